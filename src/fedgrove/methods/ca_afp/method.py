r"""CA-AFP: cluster-aware adaptive federated pruning.

(Jha, Shukla & Lone, arXiv 2603.01739, Alg. 1.)

Phases of P1, P2, P3 rounds; cohort :math:`S_t`; after P1 one exchange with all clients, which is
not a round::

    1 warm-up     w_k = min CE from w;  w = sum_k n_k w_k / sum_k n_k       -> Train, WeightedMean
      clustering  D_k = e epochs from w_ref, minus w_ref; groups by cosine  -> Agglomerative
    2 stabilise   w_k = min CE + mu/2 |w - w_ref|^2 from w_c                -> Proximal
                  w_c = the mean of the group                               -> WeightedMean
    3 prune-heal  the same under the mask M_c; w_c = (mean) M_c
                  before round 1: prune to the start density                -> prune
                  before every f-th round: prune N_churn + N_deficit,       -> Churn, prune
                  regrow N_churn                                            -> regrow
                  score = alpha |w|/max|w| + beta/(1 + Var_k w)
                          + gamma |mean_k sign dL_k|                        -> Blend
    4 personal    fine-tuning under the fixed mask                          -> ``--finetune``

Evidence (variances, signs and gradients) comes with the training reports and is summed since the
last pruning step. That of the first mask comes from the last f rounds of phase 2 or, without a
phase 2, from the clustering exchange. If no two clients of a group reported in the same round (as
in a group of one) Coh = Con = 1: it prunes by magnitude and regrows by gradient. A group without
any report since the last step has no gradient: it prunes its deficit and does not churn. A client
that missed the clustering sends its update when it is first selected, and joins the group nearest
to its update.

Differs from the paper where it leaves something open or contradicts itself: docs/papers/ca-afp.md.

- Shared: a sparse model per group, pruned and regrown where the group's clients agree.
- A client uses: its group's model, fine-tuned under the mask.
- Bytes in the paper: 8 d (K + M (P1 + P2) + M Σ_t ρ_t).
- Secure aggregation: no; clients send signs of gradients; groups are formed from single updates.
  With ``density=1`` and ``churn=0``, which prune nothing, noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ... import trees
from ...core import (
    Edit,
    Give,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ...errors import check
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.group import (
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
from ...parts.local import LocalTraining, for_epochs
from ...parts.mask import prune, regrow, weights_to_prune
from ...parts.objective import Proximal
from ...parts.one_model import dense_bytes, send_model
from ...trees import Mask
from .client import (
    expected_update,
    measure_gradient,
    model_and_evidence,
    pull_to_reference,
    send_trained,
    send_update,
    start_from_reference,
    update_and_evidence,
)
from .evidence import Gather, Sums, variance, votes
from .phases import Churn, Clock, Phase, Phases, are_phases, phase_lengths
from .score import Blend


@dataclass(frozen=True, kw_only=True)
class State(GroupedState):
    """Group models and masks, who is in which group, and the evidence since the last step.

    The reference is the model at the end of the warm-up, w_ref.
    """

    phases: tuple[int, int, int]
    prunable: tuple[str, ...]
    masks: dict[int, Mask] = field(default_factory=dict)
    """By group; a group without a mask is dense."""
    evidence: dict[int, Sums] = field(default_factory=dict)


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CAAFP(CommonParts):
    """One pruned model per group of clients, pruned and regrown by what the group agrees on."""

    phases: Phases = (0.5, 0.1, 0.4)
    """Warm-up, stabilisation, pruning: rounds that sum to the rounds, or shares that sum to 1."""
    density: float = 0.3
    """The share of prunable weights that is kept at the end."""
    start: float | None = None
    """Density of the first mask; None: the final one."""
    clusters: int = 3
    """Number of groups; 0: the number with the best silhouette."""
    weights: tuple[float, float, float] = (0.5, 0.25, 0.25)
    """Weights of magnitude, coherence and consistency in the score; they sum to 1."""
    churn: float = 0.05
    """The share of a group's weights that a step prunes and regrows."""
    every: int = 5
    """Rounds between pruning steps."""
    pull: Proximal = Proximal(0.01, "reference")
    """The pull towards the model at the end of the warm-up."""
    grouping: Agglomerative | Bipartition = Agglomerative("ward")
    """How clients are divided by their updates."""
    probe_epochs: int = 3
    """Epochs of local training for the update that groups are formed from; in the paper, one."""
    probe: LocalTraining | None = None
    """How clients train for that update; None: as in rounds, for ``probe_epochs`` epochs."""
    ask: int = 1000
    """Maximum number of clients, drawn with the seed, that form the groups; others join when they
    are selected."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.start is None or 0 < self.start <= 1, "start", self.start, "in (0, 1]")
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")
        check(self.ask >= 1, "ask", self.ask, "1 or more clients")
        check(self.probe_epochs >= 1, "probe_epochs", self.probe_epochs, "1 or more epochs")
        check(
            are_phases(self.phases),
            "phases",
            self.phases,
            "three numbers of 0 or more: whole rounds, or shares that sum to 1",
        )
        check(len(self.weights) == 3, "weights", self.weights, "three numbers of 0 or more, sum 1")
        # These parts check weights, churn and every.
        Blend(*self.weights)
        Churn(self.every, self.churn)

    @property
    def score(self) -> Blend:
        """CA-AFP: the pruning score: Mag, Coh and Con, weighted (Eq. 8)."""
        return Blend(*self.weights)

    @property
    def schedule(self) -> Churn:
        """CA-AFP: when to prune, and how much."""
        return Churn(self.every, self.churn)

    @property
    def first(self) -> float:
        """CA-AFP: the density of the first mask."""
        return self.density if self.start is None else self.start

    @property
    def masks_move(self) -> bool:
        """CA-AFP: whether the steps after the first mask change anything."""
        return self.churn > 0 or self.first != self.density

    @property
    def sends_later(self) -> str:
        """CA-AFP: what --privacy cannot protect: the evidence that pruning is decided by."""
        if self.first < 1 or self.masks_move:
            return "send signs of their gradients as evidence for pruning"
        return ""

    def lengths(self, rounds: int) -> tuple[int, int, int]:
        """CA-AFP: the phases of a run of ``rounds`` rounds, in rounds.

        >>> CAAFP(phases=(0.3, 0.1, 0.6)).lengths(50), CAAFP(phases=(0.3, 0.3, 0.4)).lengths(2)
        ((15, 5, 30), (0, 1, 1))
        """
        phases = phase_lengths(self.phases, rounds)
        pruning = phases[2]
        # A step before round 1 only makes the first mask: it does not move the density on.
        a_later_step_exists = any(step > 1 for step in self.schedule.steps(pruning))
        density_is_reached = self.first == self.density or pruning == 0 or a_later_step_exists
        check(
            density_is_reached,
            "start",
            self.start,
            f"the density, {self.density}, where no step follows the first mask",
        )
        return phases

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """One dense model for all (Alg. 1, line 3)."""
        return State(
            phases=self.lengths(setup.rounds),
            clients=setup.some_clients(self.ask),
            prunable=weights_to_prune(setup.layout, self.density),
            models={0: setup.params},
            reference=setup.params,
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model of the client's group."""
        group = state.groups.get(client, 0)
        return {"model": Packet(state.models[group], state.masks.get(group))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; between phases 1 and 2 all clients send an update."""
        if self._clock(state).phase is Phase.WARM_UP:
            # Alg. 1, lines 8-11.
            return [Task(client, self.deliver(state, client)) for client in cohort]
        if not state.groups:
            # Alg. 1, lines 18-21: everyone, whoever is in the cohort.
            return [self._ask_for_update(state, client) for client in state.clients]
        joining = joining_before_round(state, cohort)
        if joining:
            return [self._ask_for_update(state, client) for client in joining]
        # Alg. 1, lines 32-35 and 58-62. A client that missed the clustering makes up for it in
        # place of this round's training. These clients come first: the order of tasks is the order
        # of reports.
        newcomers = []
        members = []
        # Once for each group: a search through its mask takes longer than to make a task.
        regrown = self._regrown_by_group(state)
        for client in cohort:
            if client in state.groups:
                members.append(self._ask_to_train(state, client, regrown))
            else:
                newcomers.append(self._ask_for_update(state, client))
        return newcomers + members

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean of each group under its mask, newcomers to their groups, a step if it is due."""
        is_warm_up = self._clock(state).phase is Phase.WARM_UP
        if not is_warm_up and not state.groups:
            # Alg. 1, lines 22-26. This was no round, so the round's number stays. Without a phase 2
            # the first mask is made right here.
            return self._prune_if_due(self._form_groups(state, reports))
        means = GroupMeans(self.mean, state.models)
        gathered: dict[int, Gather] = {}
        groups = dict(state.groups)
        uses_evidence = not is_warm_up and self._uses_evidence(state)
        for report in reports:
            if not is_warm_up and report.of not in state.groups:
                update = flatten_update(report.give["update"].values)
                groups[report.of] = nearest(update, state.centres)
                continue
            group = state.groups.get(report.of, 0)
            trained = report.give["model"].values
            means.add(group, trained, report.examples)
            if uses_evidence:
                if group not in gathered:
                    model = prunable_weights(state, group)
                    gathered[group] = Gather(model, active_weights(state, group))
                weights = trees.flatten(trees.pick(trained, state.prunable))
                gathered[group].add(weights, report.give["evidence"].values)
        if joining_before_round(state, groups):
            # No round either: the cohort comes again, and trains.
            return replace(state, groups=groups, joined=state.round)
        # Alg. 1, line 12 (all clients are in group 0), line 36 (no mask yet) or line 63.
        evidence = dict(state.evidence)
        models = {}
        for group, dense in means.value().items():
            models[group] = trees.apply_mask(dense, state.masks.get(group, {}))
        for group, sums in gathered.items():
            evidence[group] = sums.since(state.evidence.get(group, {}))
        state = replace(
            state, round=state.round + 1, models=models, groups=groups, evidence=evidence
        )
        # The box has the step of round t before its broadcast: that is after the fold of t - 1.
        return self._prune_if_due(state)

    def _clock(self, state: State) -> Clock:
        return Clock(state.round, state.phases, self.schedule)

    def _prunes(self, state: State) -> bool:
        """Whether there is anything to prune in this run."""
        return state.phases[2] > 0 and min(self.first, self.density) < 1

    # ---- what clients have to do -----------------------------------------------------------------

    def _uses_evidence(self, state: State) -> bool:
        """Whether a pruning step will use what clients measure in the next exchange."""
        if not self._prunes(state):
            return False
        if not state.groups:
            # Without a phase 2 the first mask is made from the clustering.
            return state.phases[1] == 0 and self.first < 1
        clock = self._clock(state)
        if clock.next_step is None:
            return False
        if clock.phase is Phase.PRUNE:
            return self.masks_move
        # The first mask is made from the evidence of the `every` rounds before it.
        return self.first < 1 and clock.rounds_until_prune <= self.every

    def _ask_for_update(self, state: State, client: int) -> Task:
        """The update that the client would make from the reference (Alg. 1, lines 17-20)."""
        is_clustering = not state.groups
        verb = "cluster"
        # A client that joins later is no evidence for the first mask, which is made by then.
        if is_clustering and self._uses_evidence(state):
            verb = "cluster:evidence"
        if state.phases[0] == 0:
            # The reference is w^(0), which the client draws from the seed itself.
            return Task(client, verb=verb)
        # state.reference is set only when groups are formed.
        reference = state.models[0] if is_clustering else state.reference
        return Task(client, {"reference": Packet(reference)}, verb=verb)

    def _regrown_by_group(self, state: State) -> dict[int, int]:
        """By group: how many weights its next step regrows; empty where no evidence is used."""
        step = self._clock(state).next_step
        if step is None or not self._uses_evidence(state):
            return {}
        regrown = {}
        for group in state.models:
            _, regrown[group] = self._sizes(state, group, step)
        return regrown

    def _ask_to_train(self, state: State, client: int, regrown: Mapping[int, int]) -> Task:
        """A trained model, and evidence if a pruning step will use it."""
        model = self.deliver(state, client)
        if not regrown:
            return Task(client, model, verb="train:near")
        # Of the pruned weights' gradients a client sends the number that the step will regrow.
        settings = {"grow": regrown[state.groups[client]]}
        return Task(client, model, settings, "train:evidence")

    # ---- clustering and pruning ------------------------------------------------------------------

    def _form_groups(self, state: State, reports: Iterable[Report]) -> State:
        """Divide the clients; every group starts at the reference (Alg. 1, lines 22-26)."""
        updates = Updates(len(state.clients))
        uses_evidence = self._uses_evidence(state)
        signs: dict[int, Tensor] = {}
        for report in reports:
            updates.add(report.of, report.give["update"].values)
            # Only of clients whose whole update is kept: both make the evidence.
            if uses_evidence and report.of in updates.whole:
                signs[report.of] = report.give["evidence"].values["scores.signs"]
        groups = updates.divide(self.grouping, self.clusters)
        weights = prunable_weights(state, 0)
        # The updates are the group's first evidence: they gather around 0 instead of a model.
        no_update = torch.zeros_like(weights)
        all_active = torch.ones_like(weights).bool()
        gathered: dict[int, Gather] = {}
        # Floating-point sums: clients are added in their order, not in that of their reports.
        for client in sorted(signs):
            group = groups[client]
            if group not in gathered:
                gathered[group] = Gather(no_update, all_active)
            # An update starts with the prunable weights: see send_update.
            prunable_update = updates.whole[client][: len(weights)]
            gathered[group].add(prunable_update, {"scores.signs": signs[client]})
        evidence = {group: sums.since({}) for group, sums in gathered.items()}
        return replace(form_groups(state, updates, groups), evidence=evidence)

    def _prune_if_due(self, state: State) -> State:
        """The pruning step of every group, if the next round has one (Alg. 1, lines 44-57)."""
        clock = self._clock(state)
        if not (state.groups and self._prunes(state) and clock.step_is_due):
            return state
        masks = {}
        models = {}
        for group, model in state.models.items():
            masks[group] = self._next_mask(state, group, clock.prune_round)
            models[group] = trees.apply_mask(model, masks[group])
        # The next step is decided by what clients report from here on.
        return replace(state, models=models, masks=masks, evidence={})

    def _next_mask(self, state: State, group: int, t: int) -> Mask:
        """A group's mask from round ``t`` of phase 3 on."""
        mask = active_weights(state, group)
        sums = state.evidence.get(group, {})
        # Lines 47-53.
        n_prune, n_grow = self._sizes(state, group, t)
        # What lines 45 and 46 request of the clients came with their reports.
        spread = variance(sums)
        signs, n_votes = votes(sums)
        if spread is None:
            # No two clients reported in one round, so there is nothing to disagree on: Coh = 1, and
            # Con = 1 although one client's votes of several rounds may differ.
            signs = None
        if not sums:
            # No client reported, so there is no gradient to regrow by: no churn, only the
            # deficit is pruned.
            deficit = n_prune - n_grow
            n_prune = max(deficit, 0)
            n_grow = max(-deficit, 0)
        # Line 46. Ranked in single precision, so that the order in which clients were summed
        # cannot decide between equals.
        weights = prunable_weights(state, group).double()
        score = self.score(weights, spread, signs, n_votes).float()
        # Line 54.
        new = prune(mask, score, n_prune)
        if n_grow and sums:
            # Line 55. What this step pruned does not regrow in it.
            new = regrow(new, sums["grow"].float(), n_grow, barred=mask & ~new)
        return trees.unflatten(new, trees.pick(state.models[group], state.prunable))

    def _sizes(self, state: State, group: int, t: int) -> tuple[int, int]:
        """How many weights of a group to prune and to regrow before round ``t`` of phase 3."""
        mask = active_weights(state, group)
        total = len(mask)
        if t == 1:
            # The first mask.
            return total - round(self.first * total), 0
        target = round(self.density * total)
        return self.schedule.sizes(t, state.phases[2], int(mask.sum()), target, total)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train as the phase requires, near the reference and with evidence; or for the groups."""
        # A verb at a time: this is called for every task.
        match verb:
            case "train":
                return (Train(self.objective, self.local), Give(send_model))
            case "train:near" | "train:evidence":
                return self._training(with_evidence=verb == "train:evidence")
            case "cluster" | "cluster:evidence":
                return self._clustering(with_evidence=verb == "cluster:evidence")
        return {"use": ()}[verb]

    def _training(self, with_evidence: bool) -> tuple[Stage, ...]:
        # Eq. 5.
        near_reference = self.objective + self.pull
        train = Train(near_reference, self.local)
        if not with_evidence:
            return (Edit(pull_to_reference), train, Give(send_trained))
        # Line 45: the gradient is taken at the model that was received, before training.
        gradient = measure_gradient(near_reference)
        return (Edit(pull_to_reference), gradient, train, Give(send_trained, model_and_evidence))

    def _clustering(self, with_evidence: bool) -> tuple[Stage, ...]:
        begin = Edit(start_from_reference)
        train = Train(self.objective, self.probe or for_epochs(self.local, self.probe_epochs))
        if not with_evidence:
            return (begin, train, Give(send_update, expected_update))
        gradient = measure_gradient(self.objective)
        return (begin, gradient, train, Give(send_update, update_and_evidence))

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Eq. 13: the density of each round over all parameters, and a dense exchange with all."""
        warm_up, stabilise, pruning = self.lengths(rounds)
        dense = dense_bytes(net.layout.size, cohort, 1)
        total: float = dense * (warm_up + stabilise)
        if stabilise + pruning:
            total += dense_bytes(net.layout.size, min(clients, self.ask), 1)
        density = self.first
        for t in range(1, pruning + 1):
            if t > 1 and t in self.schedule.steps(pruning):
                density += (self.density - density) / self.schedule.left(t, pruning)
            total += density * dense
        return round(total)


PRESETS = {"paper": CAAFP(phases=(0, 0, 1), grouping=Agglomerative(), probe_epochs=1)}
"""``ca-afp:paper``: (0,0,50) of its tables, no warm-up at all, and groups by one epoch and average
linkage. All else is the paper's already: the other defaults are those of its UCI-HAR, and its data
sets bring its local training."""


def prunable_weights(state: State, group: int) -> Tensor:
    """CA-AFP: a group's prunable weights as one vector."""
    return trees.flatten(trees.pick(state.models[group], state.prunable))


def active_weights(state: State, group: int) -> Tensor:
    """CA-AFP: a group's mask as one vector over its prunable weights; all True if dense."""
    mask = state.masks.get(group)
    if mask is None:
        return torch.ones_like(prunable_weights(state, group)).bool()
    return trees.flatten(mask)
