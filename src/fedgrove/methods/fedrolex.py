r"""FedRolex: a window of channels moves over the model, so that all of it is trained (Alam, Liu,
Yan & Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = channels t, t + 1, ... t + s_k C - 1 (mod C) of every layer of C     -> select_window
    w_k  = E epochs of min CE(w; D_k) from w M_k                                 -> Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki                                   -> HeteroFL

A client uses the whole model. With a share of 1 for all this is FedAvg. Differs from the paper as
HeteroFL's docs page describes.

- Shared: the model; each client trains a window of channels that moves in every round.
- A client uses: the shared model.
- Bytes in the paper: as ``heterofl``.
- Secure aggregation: yes; as heterofl, with a window that moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..channels.selection import select_window
from ..channels.submodel import extract_submodel, groups_from_plain
from ..core import Packet, Task
from ..parts.one_model import deliver_model
from .heterofl import HeteroFL, State


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """One model of which every client trains a window that rolls on by one channel a round."""

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the whole model."""
        # A window is of one round's training; no client has channels to keep for use.
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client this round's window."""
        groups = groups_from_plain(state.structure)
        tasks = []
        for k in cohort:
            # By the round alone: over the rounds every channel is trained equally often.
            window = select_window(groups, state.shares[k], state.round)
            tasks.append(Task(k, {"model": extract_submodel(state.model, groups, window)}))
        return tasks
