r"""HeteroFL: each client trains the widest model that fits on its device (Diao, Ding & Tarokh,
"HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = the first s_k C channels of every layer               -> choose_width, select_first
    w_k  = E epochs of min CE(w; D_k) from w M_k                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                  -> WeightedMean

A client uses w M_k. With a share of 1 for all this is FedAvg. Differs from the paper: the running
statistics of norm layers are averaged over the clients that have the channel (the paper collects
them after training), activations are not rescaled by 1/s_k, and logits of classes that a client
lacks are not masked.

- Shared: the model; each client trains the first channels, as many as fit on its device.
- A client uses: those channels of the shared model.
- Bytes in the paper: 8 d_s M T, the mean over the widths.
- Secure aggregation: yes; the server chooses each client's sub-model: sums over full width, with 0
  where a client has no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..channels.selection import select_first
from ..channels.submodel import extract_submodel, groups_from_plain
from ..core import Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.device_widths import (
    WideModel,
    average_widths,
    check_shares,
    client_shares,
    find_plain_groups,
    send_masked,
    submodel_bytes,
)


@dataclass(frozen=True)
class State(WideModel):
    """The model in full width, and each client's share of the channels."""

    shares: dict[int, float]


@dataclass(frozen=True)
class HeteroFL(CommonParts):
    """One model of which every client trains the first channels; their share fits its device."""

    widths: tuple[float, ...] = ()
    """Shares of channels, assigned to the clients in turn; empty: what fits on each device."""

    def __post_init__(self) -> None:
        check_shares(self.widths)

    def init(self, setup: Setup) -> State:
        """The network's initial parameters, and every client's width."""
        all_have_all = bool(self.widths) and min(self.widths) == 1
        structure = find_plain_groups(setup.net, not all_have_all)
        shares = client_shares(setup, self.widths, self.local)
        return State(0, setup.params, structure, shares)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The client's own width of the model."""
        groups = groups_from_plain(state.structure)
        # Nested: a narrow client's channels are among those of every wider one.
        channels = select_first(groups, state.shares[client])
        return {"model": extract_submodel(state.model, groups, channels)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Every parameter averaged over the clients that have it."""
        return average_widths(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send; to use the model, nothing need be done."""
        if verb == "train":
            return (Train(self.objective, self.local), Give(send_masked))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A client's sub-model down and up: the mean width, the whole if devices decide."""
        return submodel_bytes(net, self.widths, cohort, rounds)
