r"""Local: no federation. Every client trains alone, whenever it is drawn into the cohort.

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w_k     -> complete, Train, share_received

It is in every table: a federation that does not beat it is not worth building. A client does the
same local work as in FedAvg with the same cohort; nothing is sent except the task itself.

- Shared: nothing.
- A client uses: its own model.
- Bytes in the paper: 0.
- Secure aggregation: yes; nothing is sent: epsilon is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import Edit, Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss
from ..parts.personal import complete, share_received
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    """Only the round: models stay with the clients."""

    round: int


@dataclass(frozen=True)
class Local:
    """Every client for itself: the baseline the papers leave out."""

    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> State:
        """Nothing is shared."""
        return State(0)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """A client uses its own model."""
        return {}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Nothing to fold but the round."""
        for _ in reports:
            # The work happens as reports are drawn from the iterator.
            pass
        return State(state.round + 1)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the client's own model and keep it."""
        if verb == "train":
            return (Edit(complete), Train(self.objective, self.local), Give(share_received))
        return {"use": (Edit(complete),)}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Nothing is sent."""
        return 0
