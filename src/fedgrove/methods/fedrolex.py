r"""FedRolex: a window of channels moves over the model, so that all of it is trained (Alam, Liu,
Yan & Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = channels t, t + 1, ... t + s_k C - 1 (mod C) of every layer of C     -> select_window
    w_k  = E epochs of min CE(w; D_k) from w M_k                                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                                   -> HeteroFL

A client uses the whole model. As in the authors' code, which is built on HeteroFL's, clients train
with its scaler, masked loss and static BatchNorm (``scale``, ``masked``, ``static``). With a share
of 1 for all and without these this is FedAvg.

- Shared: the model; each client trains a window of channels that moves in every round.
- A client uses: the shared model.
- Bytes in the paper: as ``heterofl``.
- Secure aggregation: yes; as heterofl, with a window that moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..channels.groups import ChannelGroup, Channels
from ..channels.selection import select_window
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """One model of which every client trains a window that rolls on by one channel a round."""

    # A window is of one round's training; no client has channels to keep for use.
    uses_whole: ClassVar[bool] = True

    def part(self, state: State, client: int, groups: Sequence[ChannelGroup]) -> Channels:
        """This round's window."""
        # By the round alone: over the rounds every channel is trained equally often.
        return select_window(groups, self.width_of(state, client), state.round)
