r"""HeteroFL: each client trains as wide a model as its device can hold, the narrow within the wide (Diao, Ding &
Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR 2021,
Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k holds a share :math:`s_k` of the channels of every layer::

    M_k  = the first s_k C channels of every layer               -> width_for, nested
    w_k  = E epochs of min CE(w; D_k) from w M_k                  -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                    -> OverlapMean

A client uses w M_k. With a share of 1 for all this is FedAvg. Differs from the paper: the running statistics of norm
layers are averaged over those who have the channel (the paper collects them after training), activations are not
rescaled by 1/s_k, and logits of classes that a client lacks are not masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..channels.choice import nested
from ..channels.find import groups_of
from ..channels.submodel import (
    PlainGroups,
    cut_out,
    groups_from_plain,
    groups_to_plain,
    masked_packet,
    mean_of,
    size_at,
)
from ..channels.widths import width_for, widths
from ..core import Carry, Client, Give, Outcome, Packet, Report, Stage, Start, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..trees import Tree
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class State:
    """The model in full width, and the share of channels that each client holds."""

    round: int
    structure: PlainGroups
    model: Tree
    shares: dict[int, float]


@dataclass(frozen=True)
class HeteroFL:
    """One model of which every client trains the first channels, as many as its device can hold."""

    widths: tuple[float, ...] = ()
    """Shares of channels, dealt to the clients in turn; none: what each device can hold, by memory and speed."""
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check_widths(self.widths)

    def init(self, start: Start) -> State:
        """The network's start, and everybody's width."""
        return State(
            0,
            groups_to_plain(groups_of(start.net)),
            start.params,
            dealt(self.widths, start, self.local),
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The client's own width of the model."""
        groups = groups_from_plain(state.structure)
        return {"model": cut_out(state.model, groups, nested(groups, state.shares[client]))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Every parameter over those who have it."""
        mean = mean_of(state.model, reports, groups_from_plain(state.structure))
        return replace(state, round=state.round + 1, model=mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send; to use the model, nothing need be done."""
        return {"train": (Train(self.objective, self.local), Give(send_sub)), "use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A client's sub-model down and up; the mean over the widths, or the whole where devices decide."""
        return sub_bytes(net, self.widths, cohort, rounds)


def check_widths(shares: Sequence[float]) -> None:
    """Shares of channels."""
    check(all(0 < s <= 1 for s in shares), "widths", tuple(shares), "shares in (0, 1]")


def dealt(shares: Sequence[float], start: Start, local: LocalTraining | None) -> dict[int, float]:
    """Every client's share of channels: in turn, or what its device can hold."""
    clients = sorted(start.clients)
    if shares:
        return {k: shares[i % len(shares)] for i, k in enumerate(clients)}
    options = widths(start.net, local.batch, local.optimiser.slots) if local else widths(start.net)
    return {k: width_for(start.clients[k], options) for k in clients}


def sub_bytes(net: Net, shares: Sequence[float], cohort: int, rounds: int) -> int:
    """Sub-models of these widths, in turn, 4 bytes a number, down and up."""
    sizes = [size_at(net, share) for share in shares] or [net.layout.size]
    return round(2 * 4 * cohort * rounds * sum(sizes) / len(sizes))


def send_sub(carry: Carry, client: Client) -> Outcome:
    """The sub-model travels under the mask it came with."""
    return Outcome({"model": masked_packet(carry["local"], carry.get("model.mask"))})
