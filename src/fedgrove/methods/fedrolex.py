r"""FedRolex: a window of channels that rolls over the model round by round, so that all of it gets trained (Alam, Liu,
Yan & Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022,
Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k holds a share :math:`s_k` of the channels of every layer::

    M_k  = channels t, t + 1, ... t + s_k C - 1 (mod C) of every layer of C     -> rolling
    w_k  = E epochs of min CE(w; D_k) from w M_k                                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                                   -> OverlapMean

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper as HeteroFL's page says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..channels.choice import nested
from ..channels.find import groups_of
from ..channels.groups import ChannelGroup, Channels
from ..channels.submodel import cut_out, groups_from_plain, groups_to_plain, mean_of
from ..core import Give, Packet, Report, Stage, Start, Task, Train
from ..nets import Net
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..wire.codec import Codec, Smallest
from .heterofl import State, check_widths, dealt, send_sub, sub_bytes


@dataclass(frozen=True)
class FedRolex:
    """One model of which every client trains a window that rolls on by one channel a round."""

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
        """Everybody gets the model."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client this round's window."""
        groups = groups_from_plain(state.structure)
        windows = {k: rolling(groups, state.shares[k], state.round) for k in cohort}
        return [Task(k, {"model": cut_out(state.model, groups, windows[k])}) for k in cohort]

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


def rolling(groups: Sequence[ChannelGroup], share: float, round: int) -> Channels:
    """The window of a round: it begins one channel further each time, and goes round.

    >>> rolling([ChannelGroup("a", 4, ())], 0.5, round=3)
    {'a': tensor([ True, False, False,  True])}
    """
    return {
        name: torch.roll(first, round % len(first)) for name, first in nested(groups, share).items()
    }
