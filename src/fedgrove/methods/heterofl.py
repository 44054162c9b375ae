r"""HeteroFL: each client trains as wide a model as its device can hold, the narrow within the wide
(Diao, Ding & Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k holds a share :math:`s_k` of every layer's channels::

    M_k  = the first s_k C channels of every layer               -> width_for, nested
    w_k  = E epochs of min CE(w; D_k) from w M_k                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                  -> WeightedMean

A client uses w M_k. With a share of 1 for all this is FedAvg. Differs from the paper: the running
statistics of norm layers are averaged over those who have the channel (the paper collects them
after training), activations are not rescaled by 1/s_k, and logits of classes that a client lacks
are not masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..channels.choice import nested
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
class HeteroFL:
    """One model of which every client trains the first channels, as many as its device can hold."""

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
        """The client's own width of the model."""
        groups = groups_from_plain(state.structure)
        channels = nested(groups, state.shares[client])
        return {"model": cut_out(state.model, groups, channels)}

    def plan(self, state: SharedWidths, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: SharedWidths, reports: Iterable[Report]) -> SharedWidths:
        """Every parameter averaged over those who have it."""
        return average_overlap(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send; to use the model, nothing need be done."""
        if verb == "train":
            return (Train(self.objective, self.local), Give(send_masked))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A client's sub-model down and up: the mean width, the whole if devices decide."""
        return submodel_bytes(net, self.widths, cohort, rounds)
