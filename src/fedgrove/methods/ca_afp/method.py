r"""CA-AFP: cluster-aware adaptive federated pruning.

(Jha, Shukla & Lone, arXiv 2603.01739, Alg. 1.)

Phases of P1, P2, P3 rounds; cohort :math:`S_t`; after P1 one exchange with all clients, which is
not a round::

    1 warm-up     w_k = min CE from w;  w = sum_k n_k w_k / sum_k n_k       -> Train, WeightedMean
      clustering  D_k = one epoch from w_ref, minus w_ref; groups by cosine -> AverageLinkage
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
phase 2, from the clustering exchange. Where no two clients of a group reported in the same round
(a group of one, say) Coh = Con = 1: it prunes by magnitude and regrows by gradient. A group of
which nobody reported since the last step has no gradient: it prunes its deficit and does not churn.
A client that missed the clustering does its part of it when it is first drawn, and joins the group
nearest to its update.

Differs from the paper where that is silent or contradicts itself: docs/papers/ca-afp.md.

- Shared: a sparse model per group, pruned and regrown by what the group agrees on.
- A client uses: its group's model, fine-tuned under the mask.
- Bytes in the paper: 8 d (K + M (P1 + P2) + M Σ_t ρ_t).
- Secure aggregation: no; clients send signs of gradients; groups come from single updates. With
  ``density=1`` and ``churn=0``, which prune nothing, noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import trees
from ...core import (
    Batches,
    Carry,
    Client,
    Edit,
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
    expected_as_sent,
)
from ...errors import check
from ...nets import Net
from ...parts.aggregate import Average
from ...parts.common import CommonParts
from ...parts.gradient import Gradient
from ...parts.group import AverageLinkage, Bipartition, Updates, nearest, strangers
from ...parts.mask import prune, regrow, weights_to_prune
from ...parts.objective import Objective, Proximal
from ...parts.one_model import dense_bytes, send_model
from ...parts.quantise import Half
from ...trees import Mask, Tree
from .evidence import Gather, Sums, evidence_packet, expected_evidence, variance, votes
from .phases import Churn, Clock, Phase, Phases, are_phases, are_shares, whole_rounds
from .score import Blend


@dataclass(frozen=True)
class State:
    """Group models and masks, who is in which group, and the evidence since the last step."""

    round: int
    phases: tuple[int, int, int]
    clients: tuple[int, ...]
    """Those who are asked when the groups are formed: all, or a sample of many."""
    prunable: tuple[str, ...]
    models: dict[int, Tree]
    """By group; before the clustering there is one model for all, under 0."""
    masks: dict[int, Mask]
    """By group; a group without a mask is dense."""
    groups: dict[int, int]
    """By client; empty before the clustering."""
    reference: Tree
    """The model at the end of the warm-up, w_ref."""
    centres: dict[int, Tensor]
    """By group: its mean update in the clustering, where late joiners find their group."""
    evidence: dict[int, Sums]
    joined: int = -1
    """The last round before which clients that were not asked joined a group."""


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CAAFP(CommonParts):
    """One pruned model per group of clients, pruned and regrown by what the group agrees on."""

    phases: Phases = (0.5, 0.1, 0.4)
    """Warm-up, stabilisation, pruning: rounds that sum to the rounds, or shares that sum to 1."""
    density: float = 0.3
    """The share of prunable weights that is kept in the end."""
    start: float | None = None
    """Density of the first mask; None: the final one."""
    clusters: int = 3
    """How many groups; 0: as many as give the best silhouette."""
    weights: tuple[float, float, float] = (0.5, 0.25, 0.25)
    """Weights of magnitude, coherence and consistency in the score; they sum to 1."""
    churn: float = 0.05
    """The share of a group's weights that a step prunes and regrows."""
    every: int = 5
    """Rounds between pruning steps."""
    pull: Proximal = Proximal(0.01, "reference")
    """The pull towards the model at the end of the warm-up."""
    grouping: AverageLinkage | Bipartition = AverageLinkage()
    """How clients are divided by their updates."""
    ask: int = 1000
    """At most so many clients, drawn from the seed, form the groups; others join when drawn."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.start is None or 0 < self.start <= 1, "start", self.start, "in (0, 1]")
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")
        check(self.ask >= 1, "ask", self.ask, "1 or more clients")
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
        """Mag, Coh and Con, weighted (Eq. 8)."""
        return Blend(*self.weights)

    @property
    def schedule(self) -> Churn:
        """When to prune, and how much."""
        return Churn(self.every, self.churn)

    @property
    def first(self) -> float:
        """The density of the first mask."""
        return self.density if self.start is None else self.start

    @property
    def masks_move(self) -> bool:
        """Whether the steps after the first mask change anything."""
        return self.churn > 0 or self.first != self.density

    @property
    def sends_later(self) -> str:
        """What --privacy cannot protect: the evidence that pruning is decided by."""
        if self.first < 1 or self.masks_move:
            return "send signs of their gradients as evidence for pruning"
        return ""

    def lengths(self, rounds: int) -> tuple[int, int, int]:
        """The phases of a run of so many rounds, in rounds.

        Of shares, the ends of the first two phases are rounded down and the third takes the rest:
        the sum is exact, and however short a run is, it prunes if it is meant to.

        >>> CAAFP(phases=(0.3, 0.1, 0.6)).lengths(50), CAAFP(phases=(0.3, 0.3, 0.4)).lengths(2)
        ((15, 5, 30), (0, 1, 1))
        """
        warm_up, stabilise, pruning = self.phases
        if are_shares(self.phases):
            end_of_warm_up = whole_rounds(warm_up * rounds)
            end_of_stabilise = whole_rounds((warm_up + stabilise) * rounds)
            phases = (end_of_warm_up, end_of_stabilise - end_of_warm_up, rounds - end_of_stabilise)
        else:
            phases = (int(warm_up), int(stabilise), int(pruning))
        check(
            sum(phases) == rounds,
            "phases",
            phases,
            f"three numbers that sum to the rounds, {rounds}, or shares of them that sum to 1",
        )
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
            round=0,
            phases=self.lengths(setup.rounds),
            clients=setup.some_clients(self.ask),
            prunable=weights_to_prune(setup.layout, self.density),
            models={0: setup.params},
            masks={},
            groups={},
            reference=setup.params,
            centres={},
            evidence={},
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model of the client's group."""
        group = state.groups.get(client, 0)
        return {"model": Packet(state.models[group], state.masks.get(group))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; between phases 1 and 2 all clients are asked for an update."""
        if self._clock(state).phase is Phase.WARM_UP:
            # Alg. 1, lines 8-11.
            return [Task(client, self.deliver(state, client)) for client in cohort]
        if not state.groups:
            # Alg. 1, lines 18-21: everyone, whoever is in the cohort.
            return [self._ask_for_update(state, client) for client in state.clients]
        if state.joined < state.round:
            # The groups were formed by a sample, so most clients of a cohort have none yet. They
            # join in an exchange of their own, once before each round, and train in the round.
            joining = strangers(cohort, state.groups, state.clients)
            if joining:
                return [self._ask_for_update(state, client) for client in joining]
        # Alg. 1, lines 32-35 and 58-62. A client that missed the clustering makes up for it in
        # place of this round's training. These clients come first: the order of tasks is the order
        # of reports.
        newcomers = [client for client in cohort if client not in state.groups]
        members = [client for client in cohort if client in state.groups]
        tasks = [self._ask_for_update(state, client) for client in newcomers]
        # Found once for each group: its mask is counted for it.
        grow_of: dict[int, int] = {}
        tasks += [self._ask_to_train(state, client, grow_of) for client in members]
        return tasks

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean of each group under its mask, newcomers to their groups, a step if it is due."""
        means: dict[int, Average] = {}
        gathered: dict[int, Gather] = {}
        newcomers = Newcomers(Updates(len(state.clients)), {})
        for report in reports:
            if "update" in report.give:
                newcomers.add(report)
                continue
            group = state.groups.get(report.of, 0)
            trained = report.give["model"].values
            if group not in means:
                means[group] = self.mean.start(state.models[group])
            means[group].add(trained, report.examples)
            if "evidence" in report.give:
                if group not in gathered:
                    gathered[group] = Gather(
                        prunable_weights(state, group), active_weights(state, group)
                    )
                gathered[group].add(
                    trees.flatten(trees.pick(trained, state.prunable)),
                    report.give["evidence"].values,
                )

        if newcomers.updates.whole and not state.groups:
            # Alg. 1, lines 22-26. This was no round, so the round's number stays. Without a phase 2
            # the first mask is made right here.
            return self._prune_if_due(self._form_groups(state, newcomers))

        # Alg. 1, line 12 (all clients are in group 0), line 36 (no mask yet) or line 63.
        models = dict(state.models)
        for group, mean in means.items():
            models[group] = trees.apply_mask(mean.value(), state.masks.get(group, {}))
        evidence = dict(state.evidence)
        for group, sums in gathered.items():
            evidence[group] = sums.since(state.evidence.get(group, {}))
        groups = dict(state.groups)
        for client, update in newcomers.updates.whole.items():
            groups[client] = nearest(update, state.centres)
        joined = strangers([*groups], state.groups, state.clients)
        if joined and not means and state.joined < state.round:
            # No round either: the cohort comes again, and trains.
            return replace(state, groups=groups, joined=state.round)
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

    # ---- what clients are asked for --------------------------------------------------------------

    def _ask_for_update(self, state: State, client: int) -> Task:
        """The update that the client would make from the reference (Alg. 1, lines 17-20)."""
        # Without a phase 2 the first mask is made from the clustering; late joiners come after it.
        first_mask_is_next = not state.groups and state.phases[1] == 0
        evidence_is_used = first_mask_is_next and self._prunes(state) and self.first < 1
        verb = "cluster:evidence" if evidence_is_used else "cluster"
        if state.phases[0] == 0:
            # The reference is w^(0), which the client draws from the seed itself.
            return Task(client, verb=verb)
        # state.reference is set only when groups are formed.
        reference = state.reference if state.groups else state.models[0]
        return Task(client, {"reference": Packet(reference)}, verb=verb)

    def _ask_to_train(self, state: State, client: int, grow_of: dict[int, int]) -> Task:
        """A trained model, and evidence if a pruning step will use it.

        ``grow_of`` holds by group what was found for other clients.
        """
        clock = self._clock(state)
        model = self.deliver(state, client)
        if clock.phase is Phase.PRUNE:
            evidence_is_used = self.masks_move
        else:
            # The first mask is made from the evidence of the `every` rounds before it.
            evidence_is_used = self.first < 1 and clock.rounds_until_prune <= self.every
        step = clock.next_step
        if step is None or not evidence_is_used or not self._prunes(state):
            return Task(client, model, verb="train:near")
        # Of the pruned weights' gradients a client sends as many as that step will regrow.
        group = state.groups[client]
        if group not in grow_of:
            _, grow_of[group] = self._sizes(state, group, step)
        return Task(client, model, {"grow": grow_of[group]}, "train:evidence")

    # ---- clustering and pruning ------------------------------------------------------------------

    def _form_groups(self, state: State, newcomers: Newcomers) -> State:
        """Divide the clients; every group starts at the reference (Alg. 1, lines 22-26)."""
        groups = newcomers.updates.divide(self.grouping, self.clusters)
        reference = state.models[0]
        weights = trees.flatten(trees.pick(reference, state.prunable))
        # The updates are the group's first evidence: they gather around 0 instead of a model.
        no_update = torch.zeros_like(weights)
        all_active = torch.ones_like(weights).bool()
        gathered: dict[int, Gather] = {}
        # Floating-point sums: clients are added in their order, not in that of their reports.
        for client, signs in sorted(newcomers.signs.items()):
            group = groups[client]
            if group not in gathered:
                gathered[group] = Gather(no_update, all_active)
            # An update starts with the prunable weights: see _send_update.
            prunable_update = newcomers.updates.whole[client][: len(weights)]
            gathered[group].add(prunable_update, {"scores.signs": signs})
        return replace(
            state,
            groups=groups,
            reference=reference,
            centres=newcomers.updates.centres(groups),
            models=dict.fromkeys(sorted(set(groups.values())), reference),
            evidence={group: sums.since({}) for group, sums in gathered.items()},
        )

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
        # What lines 45 and 46 ask of the clients came with their reports.
        spread = variance(sums)
        signs, n_votes = votes(sums)
        if spread is None:
            # No two clients reported in one round, so there is nothing to disagree on: Coh = 1, and
            # Con = 1 although one client's votes of several rounds may differ.
            signs = None
        if not sums:
            # Nobody reported, so there is no gradient to regrow by: no churn, only the deficit is
            # pruned.
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
        """Train, near the reference and with evidence as the phase asks; or one epoch's update."""
        # Eq. 5.
        near_reference = self.objective + self.pull
        one_epoch = None if self.local is None else replace(self.local, epochs=1)
        return {
            "train": (Train(self.objective, self.local), Give(send_model)),
            "train:near": (
                Edit(pull_to_reference),
                Train(near_reference, self.local),
                Give(self._send_trained),
            ),
            # Line 45: the gradient is taken at the model that was received, before training.
            "train:evidence": (
                Edit(pull_to_reference),
                measure_gradient(near_reference),
                Train(near_reference, self.local),
                Give(self._send_trained, model_and_evidence),
            ),
            "cluster": (
                Edit(start_from_reference),
                Train(self.objective, one_epoch),
                Give(self._send_update, expected_update),
            ),
            "cluster:evidence": (
                Edit(start_from_reference),
                measure_gradient(self.objective),
                Train(self.objective, one_epoch),
                Give(self._send_update, update_and_evidence),
            ),
            "use": (),
        }[verb]

    def _send_trained(self, carry: Carry, client: Client) -> Outcome:
        """The trained model under its mask, and the evidence if it was measured."""
        mask = carry.get("model.mask")
        return Outcome({"model": Packet(carry["local"], mask), **self._evidence(carry, mask)})

    def _send_update(self, carry: Carry, client: Client) -> Outcome:
        """The update (Eq. 3), in 16 bits: only its direction counts."""
        # Prunable weights first, so that the server finds them at the start of the flat update.
        names = dict.fromkeys((*client.layout.prunable, *client.layout.params))
        update = {k: carry["local"][k] - carry["model"][k] for k in names}
        give = {"update": Packet(Half()(update)), **self._evidence(carry, None)}
        if "reference" not in carry:
            return Outcome(give)
        # A reference that was sent is kept: all later rounds pull towards it.
        return Outcome(give, memory={"reference": carry["reference"]})

    def _evidence(self, carry: Carry, mask: Mask | None) -> dict[str, Packet]:
        """What the gradient says of the weights; nothing if it was not measured."""
        if "gradient" not in carry:
            return {}
        gradient = trees.flatten(carry["gradient"])
        if mask is None:
            active = torch.ones_like(gradient).bool()
        else:
            active = trees.flatten(trees.pick(mask, carry["gradient"]))
        grow = int(carry["settings"].get("grow", torch.tensor(0)))
        return {"evidence": evidence_packet(gradient, active, grow)}

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


PRESETS = {"paper": CAAFP(phases=(0, 0, 1))}
"""``ca-afp:paper``: (0,0,50) of its tables, no warm-up at all. All else is the paper's already: the
other defaults are those of its UCI-HAR, and its data sets bring its local training."""


@dataclass(frozen=True)
class Newcomers:
    """Updates of clients without a group, and the signs of their gradients where they sent them."""

    updates: Updates
    signs: dict[int, Tensor]

    def add(self, report: Report) -> None:
        """Add one client; signs only if its whole update is held, since both make the evidence."""
        self.updates.add(report.of, report.give["update"].values)
        if "evidence" in report.give and report.of in self.updates.whole:
            self.signs[report.of] = report.give["evidence"].values["scores.signs"]


def prunable_weights(state: State, group: int) -> Tensor:
    """A group's prunable weights as one vector."""
    return trees.flatten(trees.pick(state.models[group], state.prunable))


def active_weights(state: State, group: int) -> Tensor:
    """A group's mask as one vector over its prunable weights; all True while it is dense."""
    mask = state.masks.get(group)
    if mask is None:
        return torch.ones_like(prunable_weights(state, group)).bool()
    return trees.flatten(mask)


def measure_gradient(objective: Objective) -> Measure:
    """The stage that takes the gradient at the model received, over the training data."""
    return Measure("gradient", Gradient(objective), Batches("train"))


def pull_to_reference(carry: Carry, client: Client) -> Carry:
    """Set what the client is pulled to: the reference it keeps, or the network's start."""
    return {"reference": client.start, **carry}


def start_from_reference(carry: Carry, client: Client) -> Carry:
    """Train from the reference that was sent, or from the network's start."""
    return {**carry, "model": carry.get("reference", client.start)}


# ---- what an answer holds ------------------------------------------------------------------------


def expected_update(task: Task, net: Net) -> ExpectedReport:
    """The update in 16 bits, prunable weights first."""
    names = dict.fromkeys((*net.layout.prunable, *net.layout.params))
    return ExpectedReport({"update": Half().form(trees.pick(net.blank(), names))})


def update_and_evidence(task: Task, net: Net) -> ExpectedReport:
    """The update, and a vote for every prunable weight: none is pruned yet."""
    size = net.layout.prunable_size
    votes_of_all = expected_evidence(size, active=size, grow=0)
    return ExpectedReport({**expected_update(task, net).packets, "evidence": votes_of_all})


def model_and_evidence(task: Task, net: Net) -> ExpectedReport:
    """The model as it was sent, and evidence under its mask."""
    model = task.send["model"]
    weights = trees.pick(model.values, net.layout.prunable)
    size = trees.size(weights)
    active = size
    if model.mask is not None:
        active = sum(trees.count_true(model.mask[name]) for name in weights)
    grow = task.settings["grow"]
    assert isinstance(grow, int)
    evidence = expected_evidence(size, active, grow)
    return ExpectedReport({**expected_as_sent(task, net).packets, "evidence": evidence})
