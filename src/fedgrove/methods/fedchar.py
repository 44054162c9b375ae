r"""FedCHAR: groups by the cosine of updates after a warm-up, and inside each a personal model beside the group's (Li et
al., "Hierarchical clustering-based personalized federated learning for robust and fair human activity recognition",
2023; the dense baseline of CA-AFP's tables).

Rounds 0..T_w - 1 with all clients in one group; then one exchange with everyone, not a round; then by group::

    D_k  = one epoch from w, minus w; groups by cosine of D               -> AverageLinkage
    w_k  = E epochs of min CE(w; D_k) from w_c                             -> Train(CrossEntropy)
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - w_c|^2 from v_k          -> Train(CrossEntropy + Proximal)
    w_c  = sum_k n_k w_k / sum_k n_k over the group's clients in S_t       -> Mean

A client uses v_k; before it has one, w_c. With one group the shared model is FedAvg's. Differs from the paper: the pull
is Ditto's, whose scheme it follows, and robustness to malicious clients is not taken up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..core import Carry, Client, Edit, Give, Outcome, Packet, Report, Stage, Start, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.aggregate import Mean
from ..parts.group import AverageLinkage, Bipartition, Updates, nearest
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective, Proximal
from ..parts.one_model import dense_bytes
from ..parts.quantise import Half
from ..trees import Tree
from ..wire.codec import Codec, Dense
from .ditto import begin_personal, send_and_keep, use_personal


@dataclass(frozen=True)
class State:
    """The groups' models, who is in which group, and the model and mean updates by which late joiners are placed."""

    round: int
    clients: tuple[int, ...]
    models: dict[int, Tree]
    groups: dict[int, int]
    reference: Tree
    centres: dict[int, Tensor]


@dataclass(frozen=True)
class FedCHAR:
    """A dense model per group, and a personal one pulled towards it."""

    warmup: int = 10
    """Rounds before the clients are grouped; with as many as the run has, or more, they never are."""
    clusters: int = 3
    pull: Proximal = Proximal(mu=0.1)
    grouping: AverageLinkage | Bipartition = AverageLinkage()
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.warmup >= 0, "warmup", self.warmup, "0 or more rounds")
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")

    def init(self, start: Start) -> State:
        """One model for all."""
        return State(0, tuple(sorted(start.clients)), {0: start.params}, {}, start.params, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model of the client's group."""
        return {"model": Packet(state.models[state.groups.get(client, 0)])}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; after the warm-up all clients are first asked where they would go."""
        if state.round < self.warmup:
            return [Task(k, self.deliver(state, k)) for k in cohort]
        reference = state.reference if state.groups else state.models[0]
        return [
            Task(k, self.deliver(state, k))
            if k in state.groups
            else Task(k, {"model": Packet(reference)}, {}, "cluster")
            for k in (cohort if state.groups else state.clients)
        ]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of each group; newcomers find theirs."""
        means, newcomers = dict[int, Mean](), Updates(len(state.clients))
        for report in reports:
            if "update" in report.give:
                newcomers.add(report.of, report.give["update"].values)
            else:
                group = state.groups.get(report.of, 0)
                means.setdefault(group, Mean()).add(report.give["model"].values, report.examples)
        if newcomers.whole and not state.groups:
            groups, model = newcomers.divide(self.grouping, self.clusters), state.models[0]
            models = dict.fromkeys(sorted(set(groups.values())), model)
            centres = newcomers.centres(groups)
            return replace(state, models=models, groups=groups, reference=model, centres=centres)
        late = {k: nearest(update, state.centres) for k, update in newcomers.whole.items()}
        models = {**state.models, **{g: mean.value() for g, mean in means.items()}}
        return replace(state, round=state.round + 1, models=models, groups={**state.groups, **late})

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the group's model, then the personal one; or show where one epoch would lead."""
        once = replace(self.local, epochs=1) if self.local else None
        return {
            "train": (
                Train(self.objective, self.local),
                Edit(begin_personal),
                Train(self.objective + self.pull, self.local, start="personal", end="personal"),
                Give(send_and_keep),
            ),
            "cluster": (Train(self.objective, once), Give(show)),
            "use": (Edit(use_personal),),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg with one round more: CA-AFP's column counts the clustering as a round of the cohort."""
        return dense_bytes(net.layout.size, cohort, rounds + 1)


def show(carry: Carry, client: Client) -> Outcome:
    """The update of the parameters, in 16 bits: it only says in which direction the client pulls."""
    update = {k: carry["local"][k] - carry["model"][k] for k in client.layout.params}
    return Outcome({"update": Packet(Half()(update))})
