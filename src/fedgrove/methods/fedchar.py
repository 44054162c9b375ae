r"""FedCHAR: groups after a warm-up, and in each group a personal model next to the group's.

(Li et al., "Hierarchical clustering-based personalized federated learning for robust and fair human
activity recognition", 2023; the dense baseline of CA-AFP's tables.)

Rounds 0..T_w - 1 with all clients in one group; then one exchange with everyone, which is not a
round; then by group::

    D_k  = one epoch from w, minus w; groups by cosine of D            -> Agglomerative
    w_k  = E epochs of min CE(w; D_k) from w_c                         -> Train(ProblemLoss)
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - w_c|^2 from v_k      -> Train(.. + Proximal)
    w_c  = sum_k n_k w_k / sum_k n_k over the group's clients in S_t   -> WeightedMean

A client uses v_k; before it has one, w_c. With one group the shared model is FedAvg's. Differs from
the paper: the pull is Ditto's, whose scheme it follows, and robustness to malicious clients is left
out.

- Shared: a model per group.
- A client uses: a personal model, pulled towards its group's.
- Bytes in the paper: 8 d M (T + 1).
- Secure aggregation: no; groups are formed from single updates, to which noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from .. import trees
from ..core import (
    Carry,
    Client,
    Edit,
    ExpectedReport,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.group import (
    Agglomerative,
    Bipartition,
    GroupedState,
    GroupMeans,
    Updates,
    flatten_update,
    form_groups,
    joining_before_round,
    nearest,
)
from ..parts.local import for_epochs
from ..parts.objective import Proximal
from ..parts.one_model import dense_bytes
from ..parts.personal import use_personal
from ..parts.quantise import Half
from ..wire.codec import Codec, Dense
from .ditto import begin_personal, send_and_keep


@dataclass(frozen=True)
class FedCHAR(CommonParts):
    """A dense model per group, and a personal one pulled towards it."""

    warmup: int = 10
    """Rounds before the clients are grouped; in a run with no more rounds they are never
    grouped."""
    clusters: int = 3
    """Number of groups; 0: the number with the best silhouette."""
    pull: Proximal = Proximal(mu=0.1)
    """The pull of the personal model towards its group's."""
    grouping: Agglomerative | Bipartition = Agglomerative()
    """How clients are divided by their updates."""
    ask: int = 1000
    """Maximum number of clients, drawn with the seed, that form the groups; others join when they
    are selected."""
    _: KW_ONLY
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.warmup >= 0, "warmup", self.warmup, "0 or more rounds")
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")
        check(self.ask >= 1, "ask", self.ask, "1 or more clients")

    def init(self, setup: Setup) -> GroupedState:
        """One model for all."""
        clients = setup.some_clients(self.ask)
        return GroupedState(clients=clients, models={0: setup.params}, reference=setup.params)

    def deliver(self, state: GroupedState, client: int) -> Mapping[str, Packet]:
        """The model of the client's group."""
        return {"model": Packet(state.models[state.groups.get(client, 0)])}

    def plan(self, state: GroupedState, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; after the warm-up all clients first send an update."""
        if state.round < self.warmup:
            return [Task(client, self.deliver(state, client)) for client in cohort]
        if not state.groups:
            # Everyone, whoever is in the cohort: groups are formed once.
            model = Packet(state.models[0])
            return [Task(client, {"model": model}, verb="cluster") for client in state.clients]
        # The model that the groups were formed at: only updates from there can be compared.
        reference = Packet(state.reference)
        joining = joining_before_round(state, cohort)
        if joining:
            return [Task(client, {"model": reference}, verb="cluster") for client in joining]
        tasks = []
        for client in cohort:
            if client in state.groups:
                tasks.append(Task(client, self.deliver(state, client)))
            else:
                # It missed the clustering, and makes up for it in place of this round's training.
                tasks.append(Task(client, {"model": reference}, verb="cluster"))
        return tasks

    def fold(self, state: GroupedState, reports: Iterable[Report]) -> GroupedState:
        """The weighted mean of each group; newcomers join the group nearest to their update."""
        is_warm_up = state.round < self.warmup
        if not is_warm_up and not state.groups:
            return self._form_groups(state, reports)
        means = GroupMeans(self.mean, state.models)
        groups = dict(state.groups)
        for report in reports:
            if not is_warm_up and report.of not in state.groups:
                update = flatten_update(report.give["update"].values)
                groups[report.of] = nearest(update, state.centres)
                continue
            group = state.groups.get(report.of, 0)
            means.add(group, report.give["model"].values, report.examples)
        if joining_before_round(state, groups):
            # No round either: the cohort comes again, and trains.
            return replace(state, groups=groups, joined=state.round)
        return replace(state, round=state.round + 1, models=means.value(), groups=groups)

    def _form_groups(self, state: GroupedState, reports: Iterable[Report]) -> GroupedState:
        """Divide the clients; every group starts at the shared model. The round stays as it is."""
        updates = Updates(len(state.clients))
        for report in reports:
            updates.add(report.of, report.give["update"].values)
        return form_groups(state, updates, updates.divide(self.grouping, self.clusters))

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the group's model, then the personal one; or send the update of one epoch."""
        one_epoch = for_epochs(self.local, 1)
        return {
            "train": (
                # First, so that old and new clients have equal sets of trees, and train at once.
                Edit(begin_personal),
                Train(self.objective, self.local),
                Train(self.objective + self.pull, self.local, start="personal", end="personal"),
                Give(send_and_keep),
            ),
            "cluster": (Train(self.objective, one_epoch), Give(send_update, expected_update)),
            "use": (Edit(use_personal),),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg with one round more, as which CA-AFP's table counts the clustering."""
        return dense_bytes(net.layout.size, cohort, rounds + 1)


def send_update(carry: Carry, client: Client) -> Outcome:
    """FedCHAR: the update of the parameters, in 16 bits: only its direction counts."""
    names = client.layout.params
    update = trees.sub(trees.pick(carry["local"], names), trees.pick(carry["model"], names))
    return Outcome({"update": Packet(Half()(update))})


def expected_update(task: Task, net: Net) -> ExpectedReport:
    """FedCHAR: the parameters in 16 bits."""
    return ExpectedReport({"update": Half().form(trees.pick(net.blank(), net.layout.params))})
