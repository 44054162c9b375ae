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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..channels.groups import ChannelGroup, Channels
from ..channels.selection import select_random
from ..core import Setup
from ..errors import check
from ..nets import Net
from ..parts.device_widths import submodel_bytes
from ..seeds import torch_rng
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class CaldasDropout(HeteroFL):
    """One model of which every client trains an equal share of channels, drawn at random."""

    # Not to be set: all clients have one width.
    widths: tuple[float, ...] = field(init=False, default=())
    # HeteroFL's, of which the paper has none.
    scale: bool = False
    masked: bool = False
    static: bool = False
    share: float = 0.75
    """The share of every layer's channels that a client trains, on any device."""
    alike: bool = False
    """Whether all clients of a round train the same channels."""
    draw: int = 0
    """Seed of the random channels, together with round and client; they do not depend on the run's
    seed."""

    # As in FedDrop.
    uses_whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")

    def init(self, setup: Setup) -> State:
        """The network's initial parameters."""
        # No shares by client: there may be millions of clients.
        return self._begin(setup, {}, self.share < 1)

    def width_of(self, state: State, client: int) -> float:
        """The same for all."""
        return self.share

    def part(self, state: State, client: int, groups: Sequence[ChannelGroup]) -> Channels:
        """The client's own draw, or that of all of them."""
        who = "all" if self.alike else client
        # From names, not from a state of a generator: a resumed run draws what it would have.
        generator = torch_rng(self.draw, state.round, who, "channels")
        return select_random(groups, self.share, generator)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A sub-model down and up."""
        return submodel_bytes(net, (self.share,), cohort, rounds)
