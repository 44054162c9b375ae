r"""FedWCP: AdFedWCP with the same number of centroids in every layer of every client.

(The fixed K of AdFedWCP's Tables 3 and 6, "FedWCP-K"; docs/papers/fedwcp.md.) Everything else is
AdFedWCP's, :mod:`fedgrove.methods.adfedwcp`, without the weighing of layers that nothing depends
on. With ``k=0`` nothing is clustered, its row "no clustering"; then, without the pull, every client
trains alone.

- Shared: clustered copies of personal models, with ``k`` centroids per layer.
- A client uses: its own model under its mask.
- Bytes in the paper: M T Σ_j (8 k + 2 ⌈log2 k⌉ W_j / 8 + 8 B_j).
- Secure aggregation: yes; the model is averaged. Noise and secure sums undo the centroids: full
  size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Packet, Report, Setup, Stage, Task
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss
from ..wire.codec import Codec, Smallest
from .adfedwcp.anneal import AnnealedPull
from .adfedwcp.centroids import Fixed
from .adfedwcp.method import AdFedWCP, State


@dataclass(frozen=True)
class FedWCP:
    """Personal models that send themselves clustered, with ``k`` centroids per layer."""

    k: int = 16
    """Centroids of every layer, one of them 0; 0: nothing is clustered."""
    broadcast: int = 0
    """Centroids per layer of what the server sends (ours); 0: dense, as in the paper."""
    returns: bool = True
    """Whether a pruned weight keeps its value; False: it begins at 0 in the next round."""
    pull: AnnealedPull = AnnealedPull()
    """The pull towards the shared model; it fades over the rounds."""
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        # Refuses numbers that cannot be.
        _ = self._adaptive

    @property
    def _adaptive(self) -> AdFedWCP:
        """The method that does the work."""
        return AdFedWCP(
            allocation=Fixed(self.k),
            importance="alike",
            broadcast=self.broadcast,
            returns=self.returns,
            pull=self.pull,
            mean=self.mean,
            objective=self.objective,
            local=self.local,
            codec=self.codec,
        )

    def init(self, setup: Setup) -> State:
        """The initial model."""
        return self._adaptive.init(setup)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The shared model, for those who have no personal one yet."""
        return self._adaptive.deliver(state, client)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return self._adaptive.plan(state, cohort)

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the clustered models."""
        return self._adaptive.fold(state, reports)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train, cluster, send."""
        return self._adaptive.work(verb)

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """Of the last round: centroids per layer, and the uplink by the paper's count."""
        return self._adaptive.server_metrics(state)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """k centroids, log2 k bits per weight and 32-bit biases; both directions counted alike."""
        return self._adaptive.paper_bytes(net, clients, cohort, rounds)
