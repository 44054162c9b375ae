r"""FedLayerPrune: one model, a pruning rate for each layer, and a mask by vote.

(He, Cao, Zhang, Yang, "Efficient Federated Learning Method FedLayerPrune Based on Layer Adaptive
Pruning", Electronics 15(5), 2026.)

Round :math:`t` of :math:`T`, cohort :math:`S_t`, :math:`\lambda_k = n_k / \sum_j n_j`::

    p_l  = min(p_base alpha_l beta_t, p_max)                           -> KindAndDepth, Piecewise
    w_k  = E epochs of min CE(w; D_k) from w, under m                  -> Train
    I_k  = rho I_k + (1 - rho) mean (dl/dw)^2 on one mini-batch        -> Fisher
    m_k  = in m: channels by length, then weights by I_k, 1 - p_l each -> Hybrid
    w    = sum_k lambda_k m_k w_k / sum_k lambda_k m_k                 -> WeightedMean
    m    = [sum_k lambda_k m_k > tau]                                  -> Vote
    every R rounds, of the weights outside m the zeta of largest
    mean I_k over clients that pruned them regrow, with the value
    the server still has                                               -> grown

Channels whose filters are all pruned are removed, with their biases and norms, so that the trained
and the exported model are really smaller. With ``p_base`` 0 this is FedAvg.

Differs from the paper: docs/papers/fedlayerprune.md. The preset ``literal`` has its rules as they
are printed, ``reported`` the density of its tables.

- Shared: a sparse model; each layer has a different pruning rate, and clients vote on the mask.
- A client uses: the shared smaller model.
- Bytes in the paper: M Σ_t 2 (4 Σ_l r_lt d_l + d / 8).
- Secure aggregation: yes; clients choose masks and send scores. The server needs only sums of
  values, masks and scores; messages are then dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ... import trees
from ...channels.find_groups import find_groups
from ...channels.submodel import PlainGroups, get_shapes, groups_from_plain, groups_to_plain
from ...core import (
    Batches,
    Carry,
    Client,
    ClientInfo,
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
from ...errors import InputError, check
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.mask import all_kept, best, weights_to_prune
from ...parts.score import Magnitude, expected_scores, scores_of, scores_packet
from ...trees import Mask, Tree
from .fisher import Fisher
from .hybrid import Hybrid, LiteralHybrid, Vote, loses_channels, without_empty_channels
from .rates import (
    Alike,
    Allocated,
    KindAndDepth,
    LearnedSensitivity,
    Piecewise,
    base_for,
    capped,
    proportion_of,
    rate_of_device,
)


@dataclass(frozen=True)
class State:
    """The model in full, the mask that clients see of it, and what the rates are made from."""

    round: int
    rounds: int
    p_base: float
    model: Tree
    """With the weights that the mask hides: those that come back have these values."""
    mask: Mask
    structure: PlainGroups
    prunable: tuple[str, ...]
    evidence: dict[str, float]
    """What clients measured of each layer; empty before they did, or where nothing is measured."""
    proportions: dict[int, float]
    """How strong each device is compared with the typical one; empty without ``devices``."""
    stability: float = 1.0
    """The share of mask bits that did not change in the last round."""


@dataclass(frozen=True)
class FedLayerPrune(CommonParts):
    """One sparse model for all: rates by layer, a mask by vote, channels that are really gone."""

    p_base: float | None = None
    """The pruned share of a layer of sensitivity 1 in the first rounds; None: it follows
    from ``density``."""
    density: float = 0.5
    """Without ``p_base``: the share of the prunable weights that a client keeps, averaged over the
    rounds. Because clients disagree, the vote makes the shared model denser. If rates are measured,
    or differ between devices, this is only their starting point."""
    p_max: float = 0.8
    """The largest pruning rate of a layer."""
    rates: KindAndDepth | Alike | Allocated | LearnedSensitivity = KindAndDepth()
    """How rates differ between layers."""
    schedule: Piecewise = Piecewise()
    """How rates grow over the rounds (Eq. 7)."""
    score: Fisher | Magnitude = Fisher()
    """How weights are scored."""
    hybrid: Hybrid | LiteralHybrid = Hybrid()
    """How a client prunes channels first and then weights."""
    vote: Vote = Vote(0.3)
    """How clients agree on one mask (Eq. 12)."""
    renormalise: bool = True
    """Whether a weight's mean is over the clients that keep it. False: as printed in the paper,
    which makes a weight smaller that few clients keep."""
    every: int = 5
    """R, the rounds between two regrowths."""
    regrow: float = 0.05
    """zeta, the share of pruned weights that regrow."""
    devices: bool = False
    """Whether slower devices prune more (``--profile``)."""

    def __post_init__(self) -> None:
        if self.p_base is not None:
            check(0 <= self.p_base <= 1, "p_base", self.p_base, "in [0, 1]")
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(0 < self.p_max < 1, "p_max", self.p_max, "in (0, 1): no layer may lose all weights")
        check(self.every >= 1, "every", self.every, "1 or more rounds")
        check(0 <= self.regrow <= 1, "regrow", self.regrow, "in [0, 1]")

    @property
    def prunes(self) -> bool:
        """FedLayerPrune: whether anything is pruned at all."""
        return self.density < 1 if self.p_base is None else self.p_base > 0

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The initial model, whole."""
        prunable = weights_to_prune(setup.layout, 0.0 if self.prunes else 1.0)
        p_base = self._base(setup.net, setup.rounds)
        _check_examples(setup)
        # Refuses a network with layers that the rates do not know.
        self.rates(setup.layout, p_base)
        groups = find_groups(setup.net)
        all_weights = trees.map(all_kept, trees.pick(setup.params, prunable))
        return State(
            round=0,
            rounds=setup.rounds,
            p_base=p_base,
            model=setup.params,
            mask=without_empty_channels(all_weights, groups, get_shapes(setup.params)),
            structure=groups_to_plain(groups),
            prunable=prunable,
            evidence={},
            proportions=self._proportions(setup),
        )

    def _base(self, net: Net, rounds: int) -> float:
        """The given p_base, or the one that leads to the density."""
        if not self.prunes:
            return 0.0
        if self.p_base is not None:
            return self.p_base
        return base_for(self.density, self._kept_at(net), self.schedule, rounds, self.p_max)

    def _kept_at(self, net: Net) -> Callable[[float], float]:
        """The share of the prunable weights that a client keeps, by p_base times beta."""
        layout = net.layout
        groups = find_groups(net)

        def kept(p: float) -> float:
            rates = capped(self.rates(layout, p), self.p_max)
            return self.hybrid.kept_share(rates, groups, layout)

        return kept

    def _proportions(self, setup: Setup) -> dict[int, float]:
        if not self.devices:
            return {}
        clients = setup.all_clients("keeps a rate for every device")
        bandwidths = []
        speeds = []
        for client in clients:
            info = setup.clients[client]
            bandwidths.append(info.bandwidth)
            speeds.append(info.speed)
        # Medians: one very fast device would otherwise make all others prune more.
        typical = ClientInfo(examples=0, bandwidth=median(bandwidths), speed=median(speeds))
        return {client: proportion_of(setup.clients[client], typical) for client in clients}

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model under the mask, the same for every client."""
        return {
            "model": Packet(trees.apply_mask(state.model, state.mask), _unless_whole(state.mask))
        }

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains and prunes at the rates of this round."""
        model = Packet(trees.apply_mask(state.model, state.mask), _unless_whole(state.mask))
        verb = "train:scores" if self._regrows_after(state) else "train"
        p = state.p_base * self.schedule(state.round, state.rounds)
        tasks = []
        for client in cohort:
            own_p = rate_of_device(p, state.proportions[client]) if self.devices else p
            settings: dict[str, float | list[float]] = {"p": own_p}
            if state.evidence:
                # Without names, in the order of the prunable weights: both sides know these.
                settings["evidence"] = list(state.evidence.values())
            tasks.append(Task(client, {"model": model}, settings, verb))
        return tasks

    def _regrows_after(self, state: State) -> bool:
        """Whether weights come back after this round.

        Not after the last one: they come back with values of long ago, which need training.
        """
        completed = state.round + 1
        is_due = completed % self.every == 0 and completed < state.rounds
        return self.prunes and self.regrow > 0 and is_due

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Eqs. 11 and 12: the mean over the clients that keep a weight, and the vote on the
        mask."""
        before = trees.pick(state.mask, state.prunable)
        mean = self.mean.start(state.model)
        votes = self.vote.start(before)
        # What no client has pruned has no score, and needs none: it is not pruned.
        scores = self.mean.start(trees.map(torch.zeros_like, trees.pick(state.model, before)))
        evidence = self.mean.start()
        measured = False
        regrows = self._regrows_after(state)
        for report in reports:
            packet = report.give["model"]
            votes.add(packet.mask, report.examples)
            kept = packet.mask
            if not self.renormalise and kept is not None:
                # What a client pruned counts as 0, as Eq. 11 has it. Norms and biases are never
                # pruned by themselves: theirs is the mean over the clients that have the channel.
                kept = {name: leaf for name, leaf in kept.items() if name not in before}
            mean.add(packet.values, report.examples, kept)
            if regrows and isinstance(self.score, Fisher):
                pruned = _outside(packet.mask, before)
                scores.add(scores_of(report.give["scores"]), report.examples, pruned)
            if self.rates.measures is not None:
                measured = True
                evidence.add(_evidence_of(report, state.prunable), report.examples)
        model = mean.value()
        if not self.renormalise:
            # Where no client kept a weight Eq. 11 gives 0; the server keeps the value it has, which
            # regrowth needs.
            model = _where_kept(votes.anybody(), model, state.model)
        mask = votes.value()
        if regrows:
            importance = scores.value()
            if isinstance(self.score, Magnitude):
                importance = self.score(trees.pick(model, before))
            mask = grown(mask, importance, self.regrow)
        groups = groups_from_plain(state.structure)
        mask = without_empty_channels(mask, groups, get_shapes(model))
        return replace(
            state,
            round=state.round + 1,
            model=model,
            mask=mask,
            evidence=_numbers(evidence.value()) if measured else state.evidence,
            stability=equal_bits(before, mask),
        )

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the mask, measure one mini-batch, prune, send."""
        if verb == "use":
            return ()
        with_scores = {"train": False, "train:scores": True}[verb]
        batch_size = 32 if self.local is None else self.local.batch
        # Shuffled: rows may lie in order of recording, and the first ones are then of one class.
        one_batch = Batches("train", size=batch_size, shuffle=True, limit=1)
        stages: list[Stage] = [Edit(set_aside), Train(self.objective, self.local)]
        if self.prunes and isinstance(self.score, Fisher):
            stages.append(Measure("fisher", self.score.of(self.objective), one_batch, of="local"))
        if self.rates.measures is not None:
            measured = self.rates.measures.of(self.objective)
            stages.append(Measure("layers", measured, one_batch, of="local"))
        # After training: scores are those of the weights that are sent.
        stages.append(Edit(self._prune))
        send = self._send_with_scores if with_scores else self._send
        stages.append(Give(send, self._holds_with_scores if with_scores else self._expected))
        return tuple(stages)

    def _prune(self, carry: Carry, client: Client) -> Carry:
        """Choose the client's own mask, inside the one it trained under."""
        if not self.prunes:
            return carry
        layout = client.layout
        weights = trees.pick(carry["local"], layout.prunable)
        mask = carry.get("model.mask") or trees.map(all_kept, weights)
        estimates = torch.ones(())
        if isinstance(self.score, Fisher):
            importance = self.score.smoothed(client.memory.get("importance"), carry["fisher"])
            if "estimates" in client.memory:
                estimates = client.memory["estimates"]["count"] + 1
        else:
            importance = self.score(weights)
        settings = carry["settings"]
        evidence = None
        if "evidence" in settings:
            evidence = dict(zip(layout.prunable, settings["evidence"].tolist(), strict=True))
        rates = capped(self.rates(layout, float(settings["p"]), evidence), self.p_max)
        own = self.hybrid(weights, importance, rates, mask, find_groups(client.net), layout)
        counted = {"count": estimates}
        return {**carry, "importance": importance, "estimates": counted, "own.mask": own}

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The model under the client's mask; it remembers the importances."""
        own = carry.get("own.mask", {})
        packet = Packet(trees.apply_mask(carry["local"], own), _unless_whole(own))
        metrics: dict[str, float] = {}
        if self.rates.measures is not None:
            numbers = self.rates.measures.value(carry["layers"])
            metrics = _numbered(numbers.values())
        memory = {}
        if self.prunes and isinstance(self.score, Fisher):
            memory = {"importance": carry["importance"], "estimates": carry["estimates"]}
        return Outcome({"model": packet}, metrics, memory)

    def _send_with_scores(self, carry: Carry, client: Client) -> Outcome:
        """Also how much the pruned weights matter, which regrowth is decided by."""
        outcome = self._send(carry, client)
        if not isinstance(self.score, Fisher):
            return outcome
        importance = self.score.value(carry["importance"], int(carry["estimates"]["count"]))
        pruned = _outside(carry["own.mask"], importance)
        scores = scores_packet(trees.apply_mask(importance, pruned))
        return replace(outcome, give={**outcome.give, "scores": scores})

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """The whole model under a mask of the client's own, and a number for every layer."""
        metrics = {}
        if self.rates.measures is not None:
            metrics = dict.fromkeys(_numbered(net.layout.prunable), (0.0, math.inf))
        return ExpectedReport({"model": ExpectedPacket.of(net.blank(), "own")}, metrics)

    def _holds_with_scores(self, task: Task, net: Net) -> ExpectedReport:
        """And a score for every prunable weight."""
        expected = self._expected(task, net)
        if not isinstance(self.score, Fisher):
            return expected
        return replace(expected, packets={**expected.packets, "scores": expected_scores(net)})

    # ---- what is reported ------------------------------------------------------------------------

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """FedLayerPrune: the kept share of each layer, and how stable the mask is."""
        metrics = {"mask_stability": state.stability}
        for name in state.prunable:
            metrics[f"density:{name}"] = float(state.mask[name].double().mean())
        return metrics

    def notes(self, net: Net) -> list[str]:
        """FedLayerPrune: a note if no channel can be removed, only single weights."""
        channels_wanted = not (isinstance(self.hybrid, Hybrid) and self.hybrid.channels == 0)
        if not self.prunes or not channels_wanted or loses_channels(find_groups(net), net.layout):
            return []
        return [
            "fedlayerprune removes single weights only: this net has no convolution whose "
            "channels can be removed."
        ]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Section 3.4: 2 (4 sum_l r_l d_l + d / 8) per client and round, at the nominal rates.

        r_l is what the hybrid rule keeps at them: of a ``LiteralHybrid`` less than 1 - p_l.
        """
        layout = net.layout
        p_base = self._base(net, rounds)
        kept_at = self._kept_at(net)
        never_pruned = layout.size - layout.prunable_size
        numbers = 0.0
        for t in range(rounds):
            kept = kept_at(p_base * self.schedule(t, rounds))
            numbers += never_pruned + kept * layout.prunable_size
        # d counts biases and norms too: the paper has one bit for every parameter.
        bitmap = math.ceil(layout.size / 8)
        return round(2 * cohort * (4 * numbers + rounds * bitmap))


REMEMBERED = ("importance", "estimates")


def set_aside(carry: Carry, client: Client) -> Carry:
    """FedLayerPrune: train without the remembered Fisher information.

    No objective reads it, and newcomers do not have it.

    An engine can then train both together.
    """
    return {name: tree for name, tree in carry.items() if name not in REMEMBERED}


def _check_examples(setup: Setup) -> None:
    """Refuse a client without training examples; of a million clients some are looked at."""
    for client in setup.some_clients(1000):
        if setup.clients[client].examples == 0:
            raise InputError(
                f"client {client} has no training examples, and importances are measured on a "
                "mini-batch; leave it out of the data, or use fewer clients."
            )


# ---- masks ---------------------------------------------------------------------------------------


def grown(mask: Mask, importance: Mapping[str, Tensor], share: float) -> Mask:
    """FedLayerPrune: the mask with a share of the weights outside it, by importance.

    All layers are ranked together.

    >>> mask = {"w": torch.tensor([True, False, False])}
    >>> grown(mask, {"w": torch.tensor([9.0, 1.0, 2.0])}, 0.5)["w"]
    tensor([ True, False,  True])
    """
    kept = trees.flatten(mask)
    count = round(share * int((~kept).sum()))
    flat_importance = trees.flatten(trees.pick(importance, mask))
    return trees.unflatten(kept | best(flat_importance, count, among=~kept), mask)


def equal_bits(before: Mask, after: Mask) -> float:
    """FedLayerPrune: the share of bits that two masks have in common ("mask stability").

    The term is that of the paper's Table 6.

    >>> equal_bits({"w": torch.tensor([True, True])}, {"w": torch.tensor([True, False])})
    0.5
    """
    if not before:
        return 1.0
    equal = 0
    for name, kept in before.items():
        equal += int((kept == after[name]).sum())
    return equal / trees.size(before)


def _unless_whole(mask: Mask) -> Mask | None:
    """A mask to send; none where it keeps everything."""
    if all(bool(kept.all()) for kept in mask.values()):
        return None
    return mask


def _outside(mask: Mask | None, weights: Mapping[str, Tensor]) -> Mask:
    """Where a client has pruned; nowhere in a layer that its mask does not name."""
    kept = mask or {}
    return {name: ~kept.get(name, all_kept(leaf)) for name, leaf in weights.items()}


def _where_kept(kept: Mask, now: Tree, before: Tree) -> Tree:
    """The new values where any client kept them, and the values before where none did."""
    model = dict(now)
    for name, mask in kept.items():
        model[name] = trees.where(mask, now[name], before[name])
    return model


# ---- numbers that are sent -----------------------------------------------------------------------


def _numbered(numbers: Iterable[Any]) -> dict[str, Any]:
    """Numbers of layers under the names that a report gives them."""
    return {f"layer{i}": number for i, number in enumerate(numbers)}


def _evidence_of(report: Report, prunable: Sequence[str]) -> Tree:
    """What a client measured of its layers, as a tree that can be averaged."""
    evidence: Tree = {}
    for name, weight in zip(_numbered(prunable), prunable, strict=True):
        evidence[weight] = torch.tensor(report.metrics[name], dtype=torch.float64)
    return evidence


def _numbers(tree: Tree) -> dict[str, float]:
    """FedLayerPrune: convert a tree of single numbers to floats."""
    return {name: float(leaf) for name, leaf in tree.items()}


PRESETS = {
    "literal": FedLayerPrune(p_base=0.2, p_max=0.6, hybrid=LiteralHybrid(), renormalise=False),
    "reported": FedLayerPrune(density=0.4),
}
