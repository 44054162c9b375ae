r"""SAFL: similar clients prune the same channels (Li, Wang, Du, Cai & Wang, "SAFL: Structure-Aware
Personalized Federated Learning via Client-Specific Clustering and SCSI-Guided Model Pruning", Alg.
1 and 2).

Stage 1, T rounds of densities :math:`\rho_t` = 1, .9, ... down to the target, all clients; cluster
models :math:`w^1..w^K` from K different starts (lines of Alg. 1 on the left)::

     4  j_k  = argmin_j L_k(w^j), on the training data                      -> Losses, choose
     6  v_k  = recover(u_k): restored channels with gamma 0                 -> restore_full_width
     7  v_k  = E1 epochs of min CE + lambda sum_b |gamma_b|_1
                      + mu sum_b |gamma_b - gamma_b^j|_1 from v_k           -> GammaDistance
     8  M_k  = the rho_t C channels of largest |gamma|                      -> Gamma, Slim
     9  u_k  = E2 epochs of min CE from v_k under M_k                       -> Train
    11  M^j  = the channels that most clients of the cluster kept,
               of equally many those of largest mean |gamma|                -> Overlap
    12  w^j  = the mean of u_k over those of the cluster who have a
               parameter, under M^j                                         -> WeightedMean

Stage 2, the remaining rounds, cohort :math:`S_t`, structure fixed, norm layers on the client
(Hermes; lines of Alg. 2)::

     4  u_k  = E epochs of min CE from (its norms, w M_k)                   -> own, Train
     5  w_i  = sum_k n_k m_ki u_ki / sum_k n_k m_ki over clients with i     -> WeightedMean

In stage 1 all K models are sent down, and one is sent up. Stage 2 begins with the client's own
model; from then on the client receives its part of w. Without a stage 1 this is FedBN.

Differs from the paper where it leaves something open or contradicts itself: docs/papers/safl.md.

- Shared: the parameters that sub-models have in common; before that, similar clients are pulled
  towards pruning the same channels.
- A client uses: its own smaller model.
- Bytes in the paper: 4 K (2 C d + d + C Σ_{t<T−1} d_t + Σ_t d_t) + 8 d_T M G.
- Secure aggregation: no; clients report their cluster and choose channels, and the server stores
  both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ... import trees
from ...channels.find_groups import find_groups
from ...channels.groups import ChannelGroup, Channels
from ...channels.selection import Overlap
from ...channels.submodel import (
    Score,
    add_submodel,
    count_params_at,
    extract_submodel,
    groups_from_plain,
    groups_to_plain,
    list_shared_tensors,
    make_client_mask,
    make_masked_packet,
    restore_submodel,
)
from ...core import (
    Batches,
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ...errors import check
from ...nets import Net
from ...parts.aggregate import Average
from ...parts.device_widths import average_widths
from ...parts.personal import start_personal
from ...trees import Tree
from ..ifca import Losses, choose
from .slimming import (
    GammaDistance,
    Submodels,
    TwoStages,
    guided_training,
    keep_recovered,
    tuning,
)

MOST_CLUSTERS = 5
"""Cluster models at the start if their number is to be found."""
PATIENCE = 2
"""After this many rounds in which no client chose it, such a cluster is dropped."""


@dataclass(frozen=True)
class State(Submodels):
    """The shared model; before that, cluster models and who chose which."""

    models: dict[int, Tree]
    channels: dict[int, Channels]
    """The channels of every cluster; one that is not named is whole."""
    groups: dict[int, int]
    """Client -> the cluster it chose last."""
    idle: dict[int, int]
    """Cluster -> for how many rounds no client has chosen it."""


@dataclass(frozen=True)
class SAFL(TwoStages):
    """Personal sub-models, pruned as similar clients prune; what they share is averaged."""

    clusters: int = 1
    """Number of cluster models; 0: starts with five (or one per client) and drops those that no
    client chose for two rounds."""
    pull: GammaDistance = GammaDistance(0.004, to="model")
    """The pull towards the scales of the cluster's model; ``weight`` is mu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Cluster models from different draws, and the shared part of the model."""
        self.check_setup(setup)
        models: dict[int, Tree] = {}
        if self.schedule:
            models[0] = setup.params
            # Different draws: equal cluster models would have equal losses for ever.
            for j in range(1, self._clusters_at_start(len(setup.clients))):
                models[j] = setup.fresh(j)
        return State(
            round=0,
            clients=setup.all_clients("includes every client in every round of its first stage"),
            structure=groups_to_plain(find_groups(setup.net)),
            models=models,
            channels={},
            groups={},
            idle={},
            model=trees.pick(setup.params, list_shared_tensors(setup.layout, self.share_head)),
            kept={},
        )

    def _clusters_at_start(self, clients: int) -> int:
        return self.clusters or min(MOST_CLUSTERS, clients)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """First all clients choose and prune, then the cohort trains."""
        if state.round >= len(self.schedule):  # Alg. 2, line 3
            return [Task(k, self.deliver(state, k)) for k in cohort]
        # Alg. 1, line 2: all cluster models to all clients.
        groups = groups_from_plain(state.structure)
        send: dict[str, Packet] = {}
        # Numbered anew: clients know places, and clusters may have been dropped in between.
        for i, (j, model) in enumerate(sorted(state.models.items())):
            send[f"model{i}"] = extract_submodel(model, groups, state.channels.get(j))
        density = {"density": self.schedule[state.round]}
        # The number of models is in the verb: it decides the client's work, and may fall.
        verb = f"prune:{len(send)}"
        return [Task(k, send, density, verb) for k in state.clients]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Stage 1: fuse each cluster. Stage 2: the mean over the clients that have each
        parameter."""
        if state.round >= len(self.schedule):  # Alg. 2, line 5
            return average_widths(state, reports, self.mean)
        return self._fuse_clusters(state, reports)

    def _fuse_clusters(self, state: State, reports: Iterable[Report]) -> State:
        """Alg. 1, lines 11 and 12; after the last round of stage 1 also the first shared model."""
        groups = groups_from_plain(state.structure)
        clusters = sorted(state.models)
        is_last_of_stage = state.round + 1 == len(self.schedule)
        fusions: dict[int, Fusion] = {}
        chosen = dict(state.groups)
        kept = dict(state.kept)
        shared = self.mean.start(state.model)
        for report in reports:
            # Line 4: the client names the model by its place among those it was sent.
            j = clusters[int(report.metrics["group"])]
            packet = report.give["model"]
            chosen[report.of] = j
            if j not in fusions:
                fusions[j] = Fusion(groups, self.score, self.mean.start(state.models[j]))
            kept[report.of] = fusions[j].add(packet)
            if is_last_of_stage:
                part = Packet(trees.pick(packet.values, state.model), packet.mask)
                add_submodel(shared, part, groups, report.examples)

        models = dict(state.models)
        channels = dict(state.channels)
        idle: dict[int, int] = {}
        for j in clusters:
            if j in fusions:
                models[j], channels[j] = fusions[j].value()
                idle[j] = 0
            else:
                idle[j] = state.idle.get(j, 0) + 1
        state = replace(
            state,
            round=state.round + 1,
            models=models,
            channels=channels,
            groups=dict(sorted(chosen.items())),
            idle=idle,
            model=shared.value(),
            kept=dict(sorted(kept.items())),
        )
        if is_last_of_stage:
            # Stage 2 needs no cluster models, only who was in which.
            return replace(state, models={}, channels={}, idle={})
        return self._without_idle_clusters(state)

    def _without_idle_clusters(self, state: State) -> State:
        """If the number of clusters is to be found, drop those that no client chose for a while."""
        if self.clusters:
            return state
        models = dict(state.models)
        channels = dict(state.channels)
        idle = dict(state.idle)
        for j in state.models:
            if state.idle[j] >= PATIENCE:
                del models[j]
                del idle[j]
                # A cluster that was never chosen has no channels yet.
                channels.pop(j, None)
        return replace(state, models=models, channels=channels, idle=idle)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Choose, recover, train near the cluster's scales, slim, train; or train what is left."""
        name, _, models = verb.partition(":")
        if name == "prune":
            guided = self.objective + self.sparse + self.pull
            return (
                Measure("losses", Losses(int(models)), Batches("train"), of="model0"),
                Edit(choose),  # Alg. 1, lines 4 and 5
                Edit(start_personal),  # line 6; what is kept is in full width already
                guided_training(guided, self.local, self.guided),  # line 7
                Edit(self.slim),  # line 8
                tuning(self.objective, self.local, self.tune),  # line 9
                Give(keep_and_report_choice, whole_model_and_choice),  # line 10
            )
        train = Train(self.objective, self.local)
        return {
            "train": (Edit(restore_submodel), train, Give(self.share, self.expected_share)),
            "use": (Edit(restore_submodel),),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        r"""Section III.D, where only the cohort S_t takes part in stage 2:

        N M (2K + 1 + K sum_0^{T-2} p_i + sum_0^{T-1} p_i) + 2 G p_{T-1} M |S_t|.

        p_i M is the size of the net with the same share of channels in every layer.
        """
        if not self.schedule:
            return 4 * 2 * rounds * cohort * net.layout.size
        sizes = [count_params_at(net, density) for density in self.schedule]
        k = self._clusters_at_start(clients)
        stage_1 = clients * ((2 * k + 1) * net.layout.size + k * sum(sizes[:-1]) + sum(sizes))
        stage_2 = 2 * (rounds - len(sizes)) * cohort * sizes[-1]
        return 4 * (stage_1 + stage_2)


class Fusion:
    """Heterogeneous model fusion of one cluster (Section III.B.5).

    The channels that most clients of the cluster kept, each parameter averaged over the clients
    that have it. Clients have equal weight here, as in the paper; the number of channels is what
    its clients keep on average. Channels that equally many clients kept are decided by the mean of
    the score by which clients prune, |gamma|, over the clients that have them.
    """

    def __init__(self, groups: Sequence[ChannelGroup], score: Score, mean: Average) -> None:
        self.groups = groups
        self.score = score
        self.overlap = Overlap()
        self.mean = mean
        self.clients = 0

    def add(self, packet: Packet) -> Channels:
        """SAFL: add one client's sub-model to its cluster's fusion; returns its channels."""
        channels = add_submodel(self.mean, packet, self.groups, weight=1)
        self.overlap.add(channels, self.score(packet.values, self.groups))
        self.clients += 1
        return channels

    def value(self) -> tuple[Tree, Channels]:
        """SAFL: the cluster's next model and its channels."""
        counts = self.overlap.counts.values()
        times_kept = 0
        channels_in_all = 0
        for count in counts:
            times_kept += int(count.sum())
            channels_in_all += len(count)
        density = times_kept / (self.clients * channels_in_all)
        channels = self.overlap.value(density)
        model = extract_submodel(self.mean.value(), self.groups, channels).values
        return model, channels


def whole_model_and_choice(task: Task, net: Net) -> ExpectedReport:
    """SAFL: the form of a report in stage 1: the whole model under a mask, and the choice."""
    return ExpectedReport(
        {"model": ExpectedPacket.of(net.blank(), "own")}, {"group": (0, len(task.send) - 1)}
    )


def keep_and_report_choice(carry: Carry, client: Client) -> Outcome:
    """SAFL: send the sub-model and the choice; keep the model in full width."""
    packet = make_masked_packet(carry["tuned"], make_client_mask(client, carry["channels"]))
    choice = {"group": float(carry["choice"]["group"])}
    return replace(keep_recovered(carry, client), give={"model": packet}, metrics=choice)
