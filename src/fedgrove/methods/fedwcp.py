r"""FedWCP: AdFedWCP with the same number of centroids in every layer of every client.

(The fixed K of AdFedWCP's Tables 3 and 6, "FedWCP-K"; docs/papers/fedwcp.md.) Everything else is as
in AdFedWCP, :mod:`fedgrove.methods.adfedwcp`, except that the importance of layers is not measured,
because nothing depends on it. With ``k=0`` nothing is clustered, as in AdFedWCP's row "no
clustering"; then, without the pull, every client trains alone.

- Shared: clustered copies of personal models, with ``k`` centroids per layer.
- A client uses: its personal model under its mask.
- Bytes in the paper: M T Σ_j (8 k + 2 ⌈log2 k⌉ W_j / 8 + 8 B_j).
- Secure aggregation: yes; the model is averaged. With noise or secure sums messages are no longer
  clustered: full size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .adfedwcp.centroids import Fixed
from .adfedwcp.method import AdFedWCP


@dataclass(frozen=True)
class FedWCP(AdFedWCP):
    """Personal models that send themselves clustered, with ``k`` centroids per layer."""

    k: int = 16
    """Centroids of every layer, one of them 0; 0: nothing is clustered."""
    # Not to be set: these two make it FedWCP.
    allocation: Fixed = field(init=False, default=Fixed())
    importance: Literal["alike"] = field(init=False, default="alike")

    def __post_init__(self, returns: bool | None) -> None:
        super().__post_init__(returns)
        # A frozen dataclass has no other way to set what follows from another field.
        object.__setattr__(self, "allocation", Fixed(self.k))
