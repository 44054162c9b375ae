r"""FedRolex: a window of channels that rolls over the model, so that all of it gets trained (Alam,
Liu, Yan & Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k holds a share :math:`s_k` of every layer's channels::

    M_k  = channels t, t + 1, ... t + s_k C - 1 (mod C) of every layer of C     -> rolling
    w_k  = E epochs of min CE(w; D_k) from w M_k                                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                                   -> WeightedMean

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper as
HeteroFL's page says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..channels.choice import rolling
from ..channels.submodel import cut_out, groups_from_plain
from ..core import Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.device_widths import (
    SharedWidths,
    average_overlap,
    check_shares,
    initial_widths,
    send_masked,
    submodel_bytes,
)
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class FedRolex:
    """One model of which every client trains a window that rolls on by one channel a round."""

    widths: tuple[float, ...] = ()
    """Shares of channels, given to the clients in turn; empty: what each device can hold."""
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check_shares(self.widths)

    def init(self, setup: Setup) -> SharedWidths:
        """The network's initial parameters, and every client's width."""
        return initial_widths(setup, self.widths, self.local)

    def deliver(self, state: SharedWidths, client: int) -> Mapping[str, Packet]:
        """Every client uses the whole model."""
        return {"model": Packet(state.model)}

    def plan(self, state: SharedWidths, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client this round's window."""
        groups = groups_from_plain(state.structure)
        tasks = []
        for k in cohort:
            window = rolling(groups, state.shares[k], state.round)
            tasks.append(Task(k, {"model": cut_out(state.model, groups, window)}))
        return tasks

    def fold(self, state: SharedWidths, reports: Iterable[Report]) -> SharedWidths:
        """Every parameter averaged over those who have it."""
        return average_overlap(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send; to use the model, nothing need be done."""
        if verb == "train":
            return (Train(self.objective, self.local), Give(send_masked))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As HeteroFL's: a client's sub-model down and up."""
        return submodel_bytes(net, self.widths, cohort, rounds)
