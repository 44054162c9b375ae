r"""Global-FT: CA-AFP with a single group, the ablation of its Figures 3 and 4.

All of :mod:`fedgrove.methods.ca_afp` with C = 1: one pruned model for all clients, then
fine-tuning. The exchange with all clients is kept: without a warm-up the evidence for the first
mask comes from it.

- Shared: a sparse model, pruned and regrown where all clients agree.
- A client uses: the shared sparse model, fine-tuned under the mask.
- Bytes in the paper: as ``ca-afp``.
- Secure aggregation: no; as ca-afp with one group: signs of gradients, and the variance of updates,
  which cannot be computed from their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ca_afp import CAAFP


@dataclass(frozen=True)
class GlobalFT(CAAFP):
    """One pruned model for all, pruned and regrown by what they agree on."""

    clusters: int = 1
    """One group of all clients."""
    probe_epochs: int = 1
    """As in the paper: with one group, the exchange is evidence for the first mask only."""


PRESETS = {"paper": GlobalFT(phases=(0, 0, 1))}
"""``global-ft:paper``: (0,0,50), as ``ca-afp:paper``."""
