r"""Hermes: every client prunes alone, then shares the parameters it has in common with others (Li
et al., "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients",
MobiCom 2021; as the baseline of SAFL's tables, which prunes channels by network slimming).

Stage 1, T rounds of densities :math:`\rho_t` = 1, .9, ... down to the target, all clients, nothing
is sent::

    v_k   = recover(u_k): restored channels with gamma 0                 -> restore_full_width
    v_k   = E1 epochs of min CE + lambda sum_b |gamma_b|_1 from v_k      -> Train(CE + GammaL1)
    M_k   = the rho_t C channels of largest |gamma|                      -> Gamma, Slim
    u_k   = E2 epochs of min CE from v_k under M_k                       -> Train

Stage 2, the remaining rounds, cohort :math:`S_t`, structure fixed, norm layers on the client::

    u_k   = E epochs of min CE from (its norms, w M_k)                   -> own, Train
    w_j   = sum_k n_k m_kj u_kj / sum_k n_k m_kj over clients with j     -> WeightedMean

At the end of stage 1 every client sends its sub-model once: the server then knows its channels.
Stage 2 begins with the client's own model, as SAFL's Alg. 2 does; from then on the client receives
its part of w. Without a stage 1 this is FedBN. Recovery is that of SAFL; without it
(``recover=False``) the first line is v_k = u_k, and both trainings and the choice of channels are
within the remaining channels.

Differs from the original paper: docs/papers/hermes.md.

- Shared: the parameters that sub-models have in common; before that, every client prunes channels
  alone.
- A client uses: its own smaller model.
- Bytes in the paper: 4 K (d + d_T) + 8 d_T M G.
- Secure aggregation: no; clients choose their channels, and the server stores each client's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .. import trees
from ..channels.find_groups import find_groups
from ..channels.groups import Channels
from ..channels.submodel import (
    add_submodel,
    count_params_at,
    groups_from_plain,
    groups_to_plain,
    list_shared_tensors,
    make_client_mask,
    make_masked_packet,
    restore_submodel,
)
from ..core import (
    Carry,
    Client,
    Edit,
    Give,
    Outcome,
    Report,
    Setup,
    Stage,
    Task,
    Train,
    expected_no_packets,
)
from ..nets import Net
from ..parts.device_widths import average_widths
from ..parts.personal import start_personal
from .safl.slimming import (
    Submodels,
    TwoStages,
    guided_training,
    keep_recovered,
    keep_what_is_left,
    start_with_what_is_left,
    tuning,
)


@dataclass(frozen=True)
class Hermes(TwoStages):
    """Personal sub-models, pruned alone; every parameter is averaged over the clients that have
    it."""

    recover: bool = True
    """Whether pruned channels are restored before the next step, as in SAFL. False: they are not
    restored, as in Hermes's own paper."""

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> Submodels:
        """The norm layers are not shared, nor is the last layer without ``share_head``."""
        self.check_setup(setup)
        return Submodels(
            round=0,
            clients=setup.all_clients("includes every client in every round of its first stage"),
            structure=groups_to_plain(find_groups(setup.net)),
            model=trees.pick(setup.params, list_shared_tensors(setup.layout, self.share_head)),
            kept={},
        )

    def plan(self, state: Submodels, cohort: Sequence[int]) -> list[Task]:
        """First all clients prune, and last send what is left; then the cohort trains."""
        pruning_rounds = len(self.schedule)
        if state.round >= pruning_rounds:
            return [Task(k, self.deliver(state, k)) for k in cohort]
        verb = "prune:last" if self._is_last_of_stage(state) else "prune"
        density = self.schedule[state.round]
        return [Task(k, {}, {"density": density}, verb) for k in state.clients]

    def fold(self, state: Submodels, reports: Iterable[Report]) -> Submodels:
        """The mean over the clients that have each parameter; after stage 1, also their
        channels."""
        if state.round >= len(self.schedule):
            return average_widths(state, reports, self.mean)
        groups = groups_from_plain(state.structure)
        mean = self.mean.start(state.model)
        kept: dict[int, Channels] = {}
        is_last = self._is_last_of_stage(state)
        for report in reports:
            # Earlier reports are empty, but clients do their work as reports are drawn.
            if is_last:
                kept[report.of] = add_submodel(mean, report.give["model"], groups, report.examples)
        return replace(
            state,
            round=state.round + 1,
            model=mean.value(),
            kept=dict(sorted(kept.items())),
        )

    def _is_last_of_stage(self, state: Submodels) -> bool:
        """Whether the next round is the last of stage 1, in which clients first send something."""
        return state.round == len(self.schedule) - 1

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Recover, train, slim, train; or train the sub-model the client has."""
        # Without SAFL's pull towards a cluster: Hermes has no clusters.
        guided = self.objective + self.sparse
        start = start_personal if self.recover else start_with_what_is_left
        mask = "" if self.recover else "left.mask"
        prune = (
            Edit(start),
            guided_training(guided, self.local, self.guided, mask),
            Edit(self._slim),
            tuning(self.objective, self.local, self.tune),
        )
        train = Train(self.objective, self.local)
        return {
            "prune": (*prune, Give(self._keep, expected_no_packets)),
            "prune:last": (*prune, Give(self._keep_and_send, self.expected_share)),
            "train": (Edit(restore_submodel), train, Give(self.share, self.expected_share)),
            "use": (Edit(restore_submodel),),
        }[verb]

    def _slim(self, carry: Carry, client: Client) -> Carry:
        return self.slim(carry, client, self.recover)

    def _keep(self, carry: Carry, client: Client) -> Outcome:
        keep = keep_recovered if self.recover else keep_what_is_left
        return keep(carry, client)

    def _keep_and_send(self, carry: Carry, client: Client) -> Outcome:
        """Keep what was pruned and tuned, and send what is shared of it."""
        shared = trees.pick(carry["tuned"], list_shared_tensors(client.layout, self.share_head))
        packet = make_masked_packet(shared, make_client_mask(client, carry["channels"]))
        return replace(self._keep(carry, client), give={"model": packet})

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """SAFL's formula without its clusters: N M (1 + p) + 2 G p M per client of the cohort.

        See docs/papers/hermes.md.
        """
        pruning_rounds = len(self.schedule)
        if not pruning_rounds:
            return 4 * 2 * rounds * cohort * count_params_at(net, 1.0)
        small = count_params_at(net, self.schedule[-1])
        stage_1 = clients * (net.layout.size + small)
        stage_2 = 2 * (rounds - pruning_rounds) * cohort * small
        return 4 * (stage_1 + stage_2)
