r"""Federated dropout of Caldas et al.: a random part for every client, of one size for all (Caldas,
Konecny, McMahan & Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018).

Round :math:`t`, cohort :math:`S_t`, the same share s of every layer's channels for all clients::

    M_k  = s C channels of every layer, drawn for this round and client      -> select_random
    w_k  = E epochs of min CE(w; D_k) from w M_k                             -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                              -> WeightedMean

A client uses the whole model. With a share of 1 this is FedAvg. In ``feddrop`` (Wen et al. 2022)
shares differ between devices; papers call both "FedDrop". The paper's lossy compression of what is
sent is left out. It does not say how updates of parts are averaged: here every parameter over the
clients that have it.

- Shared: the model; each client trains random channels, new ones every round, the same number for
  every client.
- A client uses: the shared model.
- Bytes in the paper: 8 d_s M T.
- Secure aggregation: yes; the server draws each client's sub-model: sums over full width, with 0
  where a client has no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..channels.selection import select_random
from ..channels.submodel import extract_submodel, groups_from_plain
from ..core import Packet, Setup, Task
from ..errors import check
from ..nets import Net
from ..parts.device_widths import find_plain_groups, submodel_bytes
from ..parts.one_model import deliver_model
from ..seeds import torch_rng
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class CaldasDropout(HeteroFL):
    """One model of which every client trains an equal share of channels, drawn at random."""

    # Not to be set: all clients have one width.
    widths: tuple[float, ...] = field(init=False, default=())
    share: float = 0.75
    """The share of every layer's channels that a client trains, on any device."""
    alike: bool = False
    """Whether all clients of a round train the same channels."""
    draw: int = 0
    """Seed of the random channels, together with round and client; they do not depend on the run's
    seed."""

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")

    def init(self, setup: Setup) -> State:
        """The network's initial parameters."""
        structure = find_plain_groups(setup.net, self.share < 1)
        # No shares by client: there may be millions of clients.
        return State(0, setup.params, structure, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the whole model."""
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client its own draw, or all of them one."""
        groups = groups_from_plain(state.structure)
        tasks = []
        for k in cohort:
            who = "all" if self.alike else k
            # From names, not from a state of a generator: a resumed run draws what it would have.
            generator = torch_rng(self.draw, state.round, who, "channels")
            channels = select_random(groups, self.share, generator)
            tasks.append(Task(k, {"model": extract_submodel(state.model, groups, channels)}))
        return tasks

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A sub-model down and up."""
        return submodel_bytes(net, (self.share,), cohort, rounds)
