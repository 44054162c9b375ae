r"""FedDrop: every client trains channels drawn anew each round (Wen, Jeon & Huang, "Federated Dropout - A Simple
Approach for Enabling Federated Learning on Resource Constrained Devices", IEEE WCL 2022).

Round :math:`t`, cohort :math:`S_t`, client k holds a share :math:`s_k` of the channels of every layer::

    M_k  = s_k C channels of every layer, drawn for this round and client    -> drawn
    w_k  = E epochs of min CE(w; D_k) from w M_k                              -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                                -> OverlapMean

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper: channels of
convolutions fall too, not units of linear layers alone; every parameter is averaged over those who have it; and as
HeteroFL's page says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..channels.choice import Even
from ..channels.find import groups_of
from ..channels.groups import ChannelGroup, Channels
from ..channels.submodel import cut_out, groups_from_plain, groups_to_plain, mean_of
from ..core import Give, Packet, Report, Stage, Start, Task, Train
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..seeds import torch_rng
from ..wire.codec import Codec, Smallest
from .heterofl import State, check_widths, dealt, send_sub, sub_bytes


@dataclass(frozen=True)
class FedDrop:
    """One model of which every client trains channels drawn at random, others in every round."""

    widths: tuple[float, ...] = ()
    """Shares of channels, dealt to the clients in turn; none: what each device can hold, by memory and speed."""
    draw: int = 0
    """Seed of the draws, beside round and client; the run's own seed does not enter."""
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
        """Everybody gets the model."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client its own draw."""
        groups = groups_from_plain(state.structure)
        each = {
            k: drawn(groups, state.shares[k], torch_rng(self.draw, state.round, k, "channels"))
            for k in cohort
        }
        return [Task(k, {"model": cut_out(state.model, groups, each[k])}) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Every parameter over those who have it."""
        mean = mean_of(state.model, reports, groups_from_plain(state.structure))
        return replace(state, round=state.round + 1, model=mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send; to use the model, nothing need be done."""
        return {"train": (Train(self.objective, self.local), Give(send_sub)), "use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As HeteroFL's: a client's sub-model down and up."""
        return sub_bytes(net, self.widths, cohort, rounds)


def drawn(groups: Sequence[ChannelGroup], share: float, generator: torch.Generator) -> Channels:
    """Channels at random: the same number of every group as any other sub-model of this share."""
    return Even()({g.name: torch.rand(g.size, generator=generator) for g in groups}, share)
