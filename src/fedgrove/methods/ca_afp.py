r"""CA-AFP: cluster-aware adaptive federated pruning (Jha, Shukla & Lone, arXiv 2603.01739, Alg. 1).

Phases of P1, P2, P3 rounds; cohort :math:`S_t`; one exchange with all clients, not a round, after P1::

    1 warm-up     w_k = min CE from w;  w = sum_k n_k w_k / sum_k n_k                          -> Train, Mean
      clustering  D_k = one epoch from w_ref, minus w_ref; groups by cosine of D               -> AverageLinkage
    2 stabilise   w_k = min CE + mu/2 |w - w_ref|^2 from w_c; the mean of each group           -> Proximal, Mean
    3 prune-heal  the same under the mask M_c; w_c = (mean) M_c. Before round 1 prune to the start density; before every
                  f-th round prune N_churn + N_deficit, regrow N_churn                          -> Churn, prune, regrow
                  by score = alpha |w|/max|w| + beta/(1 + Var_k w) + gamma |mean_k sign dL_k|   -> Blend
    4 personal    fine-tuning under the fixed mask                                              -> ``--finetune``

Var, signs and gradients ride on the training reports and gather since the last step; those of the first mask come
from the last f rounds of phase 2 or, without a phase 2, from the clustering exchange. A group in which no two clients
spoke prunes its deficit by magnitude and does not churn. A client that missed the clustering takes part in it when it
is first drawn, and joins the group nearest to its update.

Differs from the paper where that is silent or contradicts itself: docs/papers/ca-afp.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import trees
from ..core import (
    Batches,
    Carry,
    Client,
    Edit,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Start,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.aggregate import Mean
from ..parts.evidence import Gather, Gradient, Sums, evidence_packet, variance, votes
from ..parts.group import AverageLinkage, Bipartition, Updates, nearest
from ..parts.local import LocalTraining
from ..parts.mask import prune, regrow
from ..parts.objective import CrossEntropy, Objective, Proximal
from ..parts.one_model import dense_bytes
from ..parts.one_model import send_model as send
from ..parts.quantise import Half
from ..parts.schedule import Churn
from ..parts.score import Blend
from ..trees import Mask, Tree
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class State:
    """Group models and masks (no mask: dense), who is in which group, and evidence since the last step."""

    round: int
    phases: tuple[int, int, int]
    clients: tuple[int, ...]
    prunable: tuple[str, ...]
    models: dict[int, Tree]
    masks: dict[int, Mask]
    groups: dict[int, int]
    reference: Tree
    centres: dict[int, Tensor]
    evidence: dict[int, Sums]


@dataclass(frozen=True)
class CAAFP:
    """One pruned model per group of clients, pruned and regrown by what the group agrees on."""

    phases: tuple[int, int, int] | None = None
    """Rounds of warm-up, stabilisation, pruning; they sum to the rounds. None: (0, 0, all)."""
    density: float = 0.3
    start: float | None = None
    """Density of the first mask; None: the final one."""
    clusters: int = 3
    """How many groups; 0: as many as give the best silhouette."""
    weights: tuple[float, float, float] = (0.5, 0.25, 0.25)
    churn: float = 0.05
    every: int = 5
    pull: Proximal = Proximal(0.01, "reference")
    grouping: AverageLinkage | Bipartition = AverageLinkage()
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.start is None or 0 < self.start <= 1, "start", self.start, "in (0, 1]")
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")
        whole = self.phases is None or (len(self.phases) == 3 and min(self.phases) >= 0)
        check(whole, "phases", self.phases, "three numbers of 0 or more rounds")
        check(len(self.weights) == 3, "weights", self.weights, "three numbers of 0 or more, sum 1")
        self.score, self.schedule  # checks weights, churn and every  # noqa: B018

    @property
    def score(self) -> Blend:
        """Mag, Coh and Con in their weights."""
        return Blend(*self.weights)

    @property
    def schedule(self) -> Churn:
        """When and how much."""
        return Churn(self.every, self.churn)

    @property
    def first(self) -> float:
        """The density of the first mask."""
        return self.density if self.start is None else self.start

    def lengths(self, rounds: int) -> tuple[int, int, int]:
        """The phases of a run of so many rounds."""
        found = self.phases or (0, 0, rounds)
        check(
            sum(found) == rounds, "phases", found, f"three numbers that sum to the rounds, {rounds}"
        )
        reached = (
            self.first == self.density
            or not found[2]
            or any(t > 1 for t in self.schedule.steps(found[2]))
        )
        check(
            reached,
            "start",
            self.start,
            f"the density, {self.density}, where no step follows the first mask",
        )
        return found

    # ---- the server ------------------------------------------------------------------------------------------------

    def init(self, start: Start) -> State:
        """One dense model for all."""
        phases, clients = self.lengths(start.rounds), tuple(sorted(start.clients))
        return State(
            0,
            phases,
            clients,
            start.layout.prunable,
            {0: start.params},
            {},
            {},
            start.params,
            {},
            {},
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model of the client's group."""
        group = state.groups.get(client, 0)
        return {"model": Packet(state.models[group], state.masks.get(group))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; when it is time to group them, all clients are asked for an update first."""
        if state.round < state.phases[0]:
            return [Task(k, self.deliver(state, k)) for k in cohort]
        known = [k for k in cohort if k in state.groups]
        strangers = [
            k for k in (cohort if state.groups else state.clients) if k not in state.groups
        ]
        return [*(self._ask(state, k) for k in strangers), *(self._train(state, k) for k in known)]

    def _ask(self, state: State, client: int) -> Task:
        """For the update a client would make. Without a warm-up it draws the reference from the seed itself."""
        reference = state.reference if state.groups else state.models[0]
        first = not state.groups and state.phases[1] == 0 and self._prunes(state) and self.first < 1
        send = {"reference": Packet(reference)} if state.phases[0] else {}
        return Task(client, send, verb="cluster:evidence" if first else "cluster")

    def _train(self, state: State, client: int) -> Task:
        """For a trained model, and for evidence if a pruning step will use it."""
        group, (warm, stable, last) = state.groups[client], state.phases
        t = state.round - warm - stable + 1
        steps = [step for step in self.schedule.steps(last) if step > max(t, 1)]
        moves = self.churn > 0 or self.first != self.density
        used = bool(steps) and moves if t > 0 else t > -self.every and self.first < 1
        if not (used and self._prunes(state)):
            return Task(client, self.deliver(state, client), verb="train:near")
        grow = self._sizes(state, group, steps[0])[1] if t > 0 else 0
        return Task(client, self.deliver(state, client), {"grow": grow}, "train:evidence")

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean of each group under its mask; newcomers find their group; then a pruning step if one is due."""
        means: dict[int, Mean] = {}
        gathered: dict[int, Gather] = {}
        newcomers = Newcomers(Updates(len(state.clients)), {})
        for report in reports:
            if "update" in report.give:
                newcomers.add(report)
                continue
            group, trained = state.groups.get(report.of, 0), report.give["model"].values
            means.setdefault(group, Mean()).add(trained, report.examples)
            if "evidence" in report.give:
                sums = gathered.setdefault(group, Gather(weights(state, group), kept(state, group)))
                told = report.give["evidence"].values
                sums.add(trees.flat(trees.pick(trained, state.prunable)), told)
        if newcomers.updates.whole and not state.groups:
            return self._step(self._grouped(state, newcomers))
        late = {k: nearest(update, state.centres) for k, update in newcomers.updates.whole.items()}
        models = {
            g: trees.masked(mean.value(), state.masks.get(g, {})) for g, mean in means.items()
        }
        evidence = {g: sums.since(state.evidence.get(g, {})) for g, sums in gathered.items()}
        state = replace(
            state, models={**state.models, **models}, evidence={**state.evidence, **evidence}
        )
        return self._step(replace(state, round=state.round + 1, groups={**state.groups, **late}))

    def _grouped(self, state: State, found: Newcomers) -> State:
        """Every group starts at the reference; signs and variances of its updates are its first evidence."""
        groups, reference = found.updates.divide(self.grouping, self.clusters), state.models[0]
        start = trees.flat(trees.pick(reference, state.prunable))
        evidence: dict[int, Gather] = {}
        for k, signs in sorted(found.signs.items()):
            sums = evidence.setdefault(
                groups[k], Gather(torch.zeros_like(start), torch.ones_like(start).bool())
            )
            sums.add(found.updates.whole[k][: len(start)], {"scores.signs": signs})
        return replace(
            state,
            groups=groups,
            reference=reference,
            centres=found.updates.centres(groups),
            models=dict.fromkeys(sorted(set(groups.values())), reference),
            evidence={g: sums.since({}) for g, sums in evidence.items()},
        )

    def _prunes(self, state: State) -> bool:
        return state.phases[2] > 0 and min(self.first, self.density) < 1

    def _sizes(self, state: State, group: int, t: int) -> tuple[int, int]:
        """How many weights of a group to prune and to regrow before round ``t`` of the third phase."""
        mask = kept(state, group)
        total, active = len(mask), int(mask.sum())
        if t == 1:
            return total - round(self.first * total), 0
        return self.schedule.sizes(t, state.phases[2], active, round(self.density * total), total)

    def _step(self, state: State) -> State:
        """A pruning step of every group, if the next round asks for one; evidence gathers anew from here."""
        warm, stable, last = state.phases
        t = state.round - warm - stable + 1
        if not (
            state.groups
            and self._prunes(state)
            and (t == 1 <= last or (t > 1 and t in self.schedule.steps(last)))
        ):
            return state
        masks = {g: self._masked(state, g, t) for g in state.models}
        models = {g: trees.masked(model, masks[g]) for g, model in state.models.items()}
        return replace(state, models=models, masks=masks, evidence={})

    def _masked(self, state: State, group: int, t: int) -> Mask:
        """A group's next mask."""
        mask, sums = kept(state, group), state.evidence.get(group, {})
        (cut, grow), spread, (signs, n) = self._sizes(state, group, t), variance(sums), votes(sums)
        if spread is None:  # no two clients to agree or differ
            signs, cut, grow = None, max(cut - grow, 0), max(grow - cut, 0)
        # Ranked in single precision, so that the order in which clients were summed cannot decide between equals.
        score = self.score(weights(state, group).double(), spread, signs, n).float()
        left = prune(mask, score, cut)
        grown = (
            regrow(left, sums["grow"].float(), grow, barred=mask & ~left) if grow and sums else left
        )
        return trees.unflat(grown, trees.pick(state.models[group], state.prunable))

    # ---- a client --------------------------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train; near the reference and with evidence, as the phase asks; or show where one epoch would lead."""
        near, once = (
            self.objective + self.pull,
            replace(self.local, epochs=1) if self.local else None,
        )
        return {
            "train": (Train(self.objective, self.local), Give(send)),
            "train:near": (Edit(refer), Train(near, self.local), Give(self._tell)),
            "train:evidence": (
                Edit(refer),
                _gradient(near),
                Train(near, self.local),
                Give(self._tell),
            ),
            "cluster": (Edit(begin), Train(self.objective, once), Give(self._show)),
            "cluster:evidence": (
                Edit(begin),
                _gradient(self.objective),
                Train(self.objective, once),
                Give(self._show),
            ),
            "use": (),
        }[verb]

    def _tell(self, carry: Carry, client: Client) -> Outcome:
        """The trained model under its mask, and the evidence if it was measured."""
        mask = carry.get("model.mask")
        return Outcome({"model": Packet(carry["local"], mask), **self._evidence(carry, mask)})

    def _show(self, carry: Carry, client: Client) -> Outcome:
        """The update, in 16 bits: it only says in which direction the client pulls."""
        names = dict.fromkeys((*client.layout.prunable, *client.layout.params))
        update = {k: carry["local"][k] - carry["model"][k] for k in names}
        # A reference that came over the wire is kept: all later rounds pull towards it.
        keep = {"reference": carry["reference"]} if "reference" in carry else {}
        return Outcome(
            {"update": Packet(Half()(update)), **self._evidence(carry, None)}, memory=keep
        )

    def _evidence(self, carry: Carry, mask: Mask | None) -> dict[str, Packet]:
        if "gradient" not in carry:
            return {}
        g = trees.flat(carry["gradient"])
        active = (
            torch.ones_like(g).bool()
            if mask is None
            else trees.flat(trees.pick(mask, carry["gradient"]))
        )
        return {
            "evidence": evidence_packet(
                g, active, int(carry["settings"].get("grow", torch.tensor(0)))
            )
        }

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Eq. 13 with the nominal density of each round over all parameters, and the dense exchange with everyone."""
        warm, stable, last = self.lengths(rounds)
        density, dense = self.first, dense_bytes(net.layout.size, cohort, 1)
        total: float = dense_bytes(net.layout.size, clients, 1 if stable + last else 0) + dense * (
            warm + stable
        )
        for t in range(1, last + 1):
            if t > 1 and t in self.schedule.steps(last):
                density += (self.density - density) / self.schedule.left(t, last)
            total += density * dense
        return round(total)


@dataclass(frozen=True)
class Newcomers:
    """Clients that showed where they would go, and the signs of their gradients."""

    updates: Updates
    signs: dict[int, Tensor]

    def add(self, report: Report) -> None:
        """Take one in; signs only of those whose update is held."""
        self.updates.add(report.of, report.give["update"].values)
        if "evidence" in report.give and report.of in self.updates.whole:
            self.signs[report.of] = report.give["evidence"].values["scores.signs"]


def weights(state: State, group: int) -> Tensor:
    """A group's prunable weights as one vector."""
    return trees.flat(trees.pick(state.models[group], state.prunable))


def kept(state: State, group: int) -> Tensor:
    """Which of them are in use."""
    mask = state.masks.get(group)
    return torch.ones_like(weights(state, group)).bool() if mask is None else trees.flat(mask)


def _gradient(objective: Objective) -> Measure:
    return Measure("gradient", Gradient(objective), Batches("train"))


def refer(carry: Carry, client: Client) -> Carry:
    """What the client pulls towards: the reference it keeps, or the network's start."""
    return {"reference": client.start, **carry}


def begin(carry: Carry, client: Client) -> Carry:
    """Train from the reference."""
    return {**carry, "model": carry.get("reference", client.start)}
