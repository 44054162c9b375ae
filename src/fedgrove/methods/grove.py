r"""Grove: found groups, coded updates both ways, and a model of each client's own (ours).

Round :math:`t`, cohort :math:`S_t`; W_g the model of group g without the head, h_k the head of
client k (and its norm layers), V_k what client k holds of its group's model, 0 <= A_k its errors::

    V_k  = V_k + C_down(W_g - V_k)                                   -> Grove._send
    x_k  = E epochs of min CE(x; D_k) from (V_k, h_k);  h_k = its head   -> Train
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - (V_k, h_k)|^2 from v_k -> Train(.. + Proximal)
    q_k  = C_up(x_k - V_k + A_k);   A_k = x_k - V_k + A_k - q_k      -> SparseTernary, feedback
    W_g  = W_g + s sum_k n_k q_k / sum_k n_k over the group          -> WeightedMean

A client uses v_k. After some rounds clients are divided into groups, if what the q_k of one half
of the reports have in common shows again in the other half (-> HeldOutGroups), and each group's
model loses its weakest channels (-> FilterL1, Even). With all of it off the model itself travels,
and this is FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import trees
from ..channels.choice import FilterL1, FilterL2
from ..channels.find import channel_mask, groups_of, removable_groups
from ..channels.groups import Channels, expand
from ..channels.submodel import (
    PlainGroups,
    channels_in,
    groups_from_plain,
    groups_to_plain,
    shapes_of,
)
from ..core import (
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    Form,
    Give,
    Holds,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Start,
    Task,
    Train,
)
from ..errors import UnfitError, check
from ..nets import Net
from ..nets.layout import Layout
from ..parts.aggregate import Average, Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss, Proximal
from ..parts.one_model import dense_bytes
from ..parts.stability import HeldOutGroups, nearest_others
from ..parts.ternary import SparseTernary
from ..trees import Mask, Tree
from ..wire.codec import Codec, Smallest

ALL = 0
"""The one group before groups are found; afterwards the group of clients that have none yet."""
OWN = ("none", "offset", "pulled", "chosen")
READY = 0.9
"""Groups are looked for when this share of the clients has reported twice."""
FADES = 0.9
"""What clients said of models in earlier rounds counts by so much less with each round."""
EVIDENCE = 0.5
"""The share of a head's change that is sent as evidence."""


@dataclass(frozen=True)
class State:
    """The groups' models, what each client holds of them, and the evidence for groups."""

    round: int
    rounds: int
    structure: PlainGroups
    models: dict[int, Tree]
    """By group, without what stays with clients."""
    views: dict[int, Tree]
    """By client: what it holds. A client that is not here holds the initial model."""
    start: Tree
    statistics: dict[int, Tree]
    groups: dict[int, int]
    evidence: dict[int, tuple[int, Tensor, Tensor]]
    """By client: its reports, and how its head moved unlike others' in the odd and even ones."""
    widths: dict[int, Tree]
    """By group: the score of every channel, once it is thinned."""
    merits: dict[int, tuple[float, float]]
    """By group: by how much clients do better with an offset than with models of their own, summed
    over validation examples, and how many those were. Older rounds count less."""
    shared: float = 0.0
    """How much of what is lasting in a client's updates its group has too."""
    divided: int = -1
    """The round in which groups were found."""


@dataclass(frozen=True)
class Grove:
    """A small model of each client's own beside its group's, for a hundredth of the bytes."""

    up: float = 0.1
    """The share of an update that a client sends, of each layer; 1: the model itself."""
    down: float = 0.1
    """The share of a difference that the server sends, of each layer; 1: the model itself."""
    step: float = 1.25
    """How far the server goes along the mean update."""
    home: bool = True
    """Whether the last layer and the norm layers stay with the client."""
    own: Literal["none", "offset", "pulled", "chosen"] = "chosen"
    """What a client uses: its group's model; the same with a part of its own last step; a model of
    its own, pulled towards the group's; or the one of the last two that does better in its group,
    on validation data."""
    keep: float = 0.5
    """The part of its last step away from the group's model that a client keeps."""
    pull: Proximal = Proximal(mu=0.1)
    finding: HeldOutGroups = HeldOutGroups()
    """How groups are found; ``most=1``: never."""
    forget: float = 0.3
    """By so much evidence fades when a client reports anew."""
    density: float = 1.0
    """The share of channels that a group's model keeps."""
    thin: float = 0.25
    """Groups lose channels when they are found, or after this share of the rounds."""
    multiple: int = 8
    """Widths are multiples of it where a layer is wide enough."""
    score: FilterL1 | FilterL2 = FilterL1()
    ask: int = 1000
    """Of at most so many clients evidence is kept; others join a group by their first update."""
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(0 < self.up <= 1, "up", self.up, "in (0, 1]")
        check(0 < self.down <= 1, "down", self.down, "in (0, 1]")
        check(self.step > 0, "step", self.step, "above 0")
        check(self.own in OWN, "own", self.own, f"one of {', '.join(OWN)}")
        check(0 <= self.keep <= 1, "keep", self.keep, "in [0, 1]")
        check(0 <= self.forget <= 1, "forget", self.forget, "in [0, 1]")
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(0 <= self.thin <= 1, "thin", self.thin, "in [0, 1]")
        check(self.multiple >= 1, "multiple", self.multiple, "1 or more")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, start: Start) -> State:
        """One group; all hold the initial parameters, which cost no bytes."""
        layout = start.layout
        if self.home and not layout.head:
            raise UnfitError(
                "the last layer would stay with the client, and it has none with parameters. "
                "Share all layers (--set home=false), or take a net that ends in one."
            )
        weights, statistics = self._names(layout)
        if not weights:
            raise UnfitError(
                "nothing is shared: its last layer is all it has, and would stay with the client. "
                "Share all layers (--set home=false), or take a deeper net."
            )
        model = trees.pick(start.params, weights)
        structure: PlainGroups = ()
        if self.density < 1:
            structure = groups_to_plain(removable_groups(start.net))
        state = State(
            round=0,
            rounds=start.rounds,
            structure=structure,
            models={ALL: model},
            views={},
            start=model,
            statistics={ALL: trees.pick(start.params, statistics)},
            groups={},
            evidence={},
            widths={},
            merits={},
        )
        return self._thinned(state)

    def _names(self, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The weights that are shared, and the running statistics."""
        home: set[str] = set()
        if self.home:
            home = {*layout.head, *layout.norms}
        weights = []
        statistics = []
        for name in layout.shapes:
            if name in home:
                continue
            if name in layout.params:
                weights.append(name)
            else:
                statistics.append(name)
        return tuple(weights), tuple(statistics)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """What brings a client nearer to its group's model."""
        send = dict(self._send(state, client))
        if self.own == "chosen":
            better, _ = state.merits.get(state.groups.get(client, ALL), (0.0, 0.0))
            send["choice"] = Packet({"pulled": torch.tensor([better < 0])})
        return send

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort catches up and trains."""
        return [Task(client, self._send(state, client)) for client in cohort]

    def _send(self, state: State, client: int) -> Mapping[str, Packet]:
        group = state.groups.get(client, ALL)
        mask = self._mask(state, group)
        model = state.models[group]
        if self.down == 1:
            send = {"model": Packet(model, mask)}
        else:
            send = {"change": Packet(self._change(state, client, mask), mask)}
        if state.statistics[group]:
            send["statistics"] = Packet(state.statistics[group])
        return send

    def _change(self, state: State, client: int, mask: Mask | None) -> Tree:
        """The largest of what the client does not hold yet of its group's model."""
        model = state.models[state.groups.get(client, ALL)]
        held = state.views.get(client, state.start)
        return coded(self.down, trees.sub(model, held), mask)

    def _mask(self, state: State, group: int) -> Mask | None:
        """Which weights a group's model has left; None: all."""
        if group not in state.widths:
            return None
        return _mask_at(state, group, self.density, self.multiple)

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The groups' next models; evidence; groups, if there is enough; fewer channels."""
        means: dict[int, Average] = {}
        views = dict(state.views)
        heads: dict[int, Tensor] = {}
        merits: dict[int, list[tuple[float, float]]] = {}
        for report in reports:
            group = state.groups.get(report.of, ALL)
            mask = self._mask(state, group)
            if self.down < 1:
                held = views.get(report.of, state.start)
                view = trees.map(torch.add, held, self._change(state, report.of, mask))
                views[report.of] = view if mask is None else trees.masked(view, mask)
            if self.finding.most > 1:
                heads[report.of] = report.give["evidence"].values["scores.head"].float()
            given: Tree = {}
            for name, packet in report.give.items():
                if name != "evidence":
                    given |= packet.values
            if group not in means:
                means[group] = self.mean.start(self._before(state, group))
            means[group].add(given, report.examples, mask)
            if "better" in report.metrics:
                said = (report.metrics["better"], min(report.metrics["tried"], report.examples))
                merits.setdefault(group, []).append(said)
        models = dict(state.models)
        statistics = dict(state.statistics)
        for group, mean in means.items():
            found = mean.value()
            models[group] = self._moved(models[group], found)
            statistics[group] = trees.pick(found, statistics[group])
        after = replace(
            state,
            round=state.round + 1,
            models=models,
            views=views,
            statistics=statistics,
            merits=added(state.merits, merits),
        )
        return self._thinned(self._divided(self._gathered(after, heads), heads))

    def _before(self, state: State, group: int) -> Tree:
        """What an average starts from: updates from nothing, models from the one that was sent."""
        model = state.models[group]
        if self.up < 1:
            model = trees.map(torch.zeros_like, model)
        return {**model, **state.statistics[group]}

    def _moved(self, model: Tree, found: Tree) -> Tree:
        shared = trees.pick(found, model)
        if self.up < 1:
            return {name: model[name] + self.step * shared[name] for name in model}
        if self.step == 1:
            # Not by a difference, which rounds: this is FedAvg.
            return shared
        return {name: model[name] + self.step * (shared[name] - model[name]) for name in model}

    # ---- groups ----------------------------------------------------------------------------------

    def _gathered(self, state: State, heads: Mapping[int, Tensor]) -> State:
        """How each head moved unlike the others of its round, added to what is known."""
        if len(heads) < 2:
            return state
        mean = torch.stack(list(heads.values())).mean(0)
        evidence = dict(state.evidence)
        for client, moved in heads.items():
            if client not in evidence and len(evidence) >= self.ask:
                continue
            zero = torch.zeros_like(mean)
            count, odd, even = evidence.get(client, (0, zero, zero))
            # All rounds count the same: the first steps are the longest and say the least.
            unlike = normalize(moved - mean, dim=0)
            if count % 2:
                even = (1 - self.forget) * even + unlike
            else:
                odd = (1 - self.forget) * odd + unlike
            evidence[client] = (count + 1, odd, even)
        return replace(state, evidence=dict(sorted(evidence.items())))

    def _divided(self, state: State, reported: Iterable[int]) -> State:
        """Groups, if the evidence supports them; later, clients nearer to another group move."""
        # Both halves of a client's evidence are needed.
        ready = [client for client, (count, _, _) in state.evidence.items() if count >= 2]
        if len(ready) < 4:
            return state
        odd = torch.stack([state.evidence[client][1] for client in ready])
        even = torch.stack([state.evidence[client][2] for client in ready])
        if not state.groups:
            if len(ready) < READY * len(state.evidence):
                return state
            labels, shared = self.finding(odd, even)
            # Twice in a row: once may be luck.
            was_found = state.shared >= self.finding.least
            if not any(labels) or not was_found:
                return replace(state, shared=shared)
            groups = {client: label + 1 for client, label in zip(ready, labels, strict=True)}
            numbers = sorted(set(groups.values()))
            models = {ALL: state.models[ALL], **dict.fromkeys(numbers, state.models[ALL])}
            statistics = dict.fromkeys((ALL, *numbers), state.statistics[ALL])
            return replace(
                state,
                groups=groups,
                shared=shared,
                divided=state.round,
                models=models,
                statistics=statistics,
                merits=dict.fromkeys(numbers, state.merits.get(ALL, (0.0, 0.0))),
            )
        vectors = normalize(odd.double() + even.double())
        now = torch.tensor([state.groups.get(client, ALL) for client in ready])
        nearest = nearest_others(vectors, now)
        moved = set(reported)
        groups = dict(state.groups)
        for client, label in zip(ready, nearest.tolist(), strict=True):
            if client in moved and label != ALL:
                groups[client] = label
        return replace(state, groups=groups)

    def figures(self, state: State) -> Mapping[str, float]:
        """How many groups there are, since when, and how real they are."""
        return {
            "groups": float(max(1, len(set(state.groups.values())))),
            "divided_in_round": float(state.divided),
            "shared": state.shared,
            "offset_is_better": sum(better for better, _ in state.merits.values()),
        }

    # ---- channels --------------------------------------------------------------------------------

    def _thinned(self, state: State) -> State:
        """Groups without their weakest channels, when it is time."""
        if self.density == 1 or state.widths:
            return state
        if not state.groups and state.round < round(self.thin * state.rounds):
            return state
        structure = groups_from_plain(state.structure)
        widths = {}
        for group, model in state.models.items():
            widths[group] = self.score(model, structure)
        state = replace(state, widths=widths)
        models = {}
        for group, model in state.models.items():
            mask = self._mask(state, group)
            assert mask is not None
            models[group] = trees.masked(model, mask)
        return replace(state, models=models)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Catch up, train, send the coded update; or catch up and use the model."""
        training: list[Stage] = [Edit(self._begin)]
        if self.own == "chosen":
            training.append(Measure("merit", self._compare, Batches("validation")))
        training.append(Train(self.objective, self.local))
        if self.own in ("pulled", "chosen"):
            training.append(
                Train(
                    self.objective + self.pull,
                    self.local,
                    start="personal",
                    end="personal",
                    mask="model.mask",
                )
            )
        return {
            "train": (*training, Give(self._give, self._holds)),
            "use": (Edit(self._use),),
        }[verb]

    def _compare(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        r"""How much better the offset is than the client's own model, summed over a batch.

        An example counts :math:`e^{-\ell}` by its loss: with cross-entropy that is the probability
        of its class, a smooth accuracy that no single example can spoil.
        """
        merits = {}
        for name in ("offset", "personal"):
            outputs = net(carry[name], batch.x, train=False).logits
            losses = net.problem.losses(outputs, batch.y, carry.get("client", {}))
            merits[name] = (torch.exp(-losses) * batch.weight).sum()
        return {"better": merits["offset"] - merits["personal"], "tried": batch.weight.sum()}

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """The group's model with the client's own head, and what the client itself would use.

        What is not in the network any longer, where channels are gone, is 0 in all of them.
        """
        weights, _ = self._names(client.layout)
        rest = dict(carry)
        sent_mask = rest.pop("change.mask", None) or rest.pop("model.mask", None)
        shared = rest.pop("model", None)
        held = rest.pop("held", {})
        if shared is None:
            held = trees.pick(held or client.start, weights)
            shared = trees.map(torch.add, held, rest.pop("change"))
        # Taken out, so that old and new clients have the same trees, and train at once.
        kept = rest.pop("kept", {})
        statistics = rest.pop("statistics", {})
        complete = {**client.start, **kept, **statistics, **shared}
        model = trees.pick(complete, client.layout.shapes)
        step = rest.pop("step", None)
        personal = rest.pop("personal", model)
        offset = model
        if step is not None:
            offset = {**model, **{n: model[n] + self.keep * step[n] for n in weights}}
        if sent_mask:
            channels = channels_in(Packet({}, sent_mask), groups_of(client.net))
            mask = channel_mask(client.net, channels)
            rest["model.mask"] = mask
            model = trees.masked(model, mask)
            personal = trees.masked(personal, mask)
            offset = trees.masked(offset, mask)
        rest["model"] = model
        if self.own in ("offset", "chosen"):
            rest["offset"] = offset
        if self.own in ("pulled", "chosen"):
            rest["personal"] = personal
        if self.up < 1:
            zeros = trees.map(torch.zeros_like, trees.pick(model, weights))
            rest["left"] = rest.get("left") or zeros
        return rest

    def _use(self, carry: Carry, client: Client) -> Carry:
        """The client's own model, or the group's with a part of the client's last step."""
        begun = self._begin(carry, client)
        choice = begun.pop("choice", {})
        offset = begun.pop("offset", begun["model"])
        personal = begun.pop("personal", begun["model"])
        begun.pop("left", None)
        takes_personal = self.own == "pulled" or (choice and bool(choice["pulled"]))
        return {**begun, "model": personal if takes_personal else offset}

    def _give(self, carry: Carry, client: Client) -> Outcome:
        """Send the coded update, keep its error, the head, and the client's own model."""
        weights, names = self._names(client.layout)
        model = trees.pick(carry["model"], weights)
        trained = trees.pick(carry["local"], weights)
        mask = carry.get("model.mask")
        shared_mask = None
        if mask:
            shared_mask = {name: kept for name, kept in mask.items() if name in weights}
        give = {}
        memory: dict[str, Tree] = {}
        if self.up == 1:
            give["model"] = Packet(trained, shared_mask)
        else:
            moved = trees.map(torch.add, trees.sub(trained, model), carry["left"])
            if shared_mask:
                moved = trees.masked(moved, shared_mask)
            sent = coded(self.up, moved, shared_mask)
            memory["left"] = trees.sub(moved, sent)
            give["change"] = Packet(sent, shared_mask)
        if names:
            give["statistics"] = Packet(trees.pick(carry["local"], names))
        if self.finding.most > 1:
            give["evidence"] = Packet({"scores.head": head_change(carry, client.layout)})
        if self.down < 1:
            memory["held"] = model
        if self.home:
            home = [name for name in client.layout.shapes if name not in weights]
            memory["kept"] = trees.pick(carry["local"], home)
        if self.own in ("offset", "chosen"):
            memory["step"] = trees.sub(trained, model)
        if self.own in ("pulled", "chosen"):
            memory["personal"] = carry["personal"]
        metrics = {}
        if self.own == "chosen" and carry["merit"]:
            tried = float(carry["merit"]["tried"])
            better = float(carry["merit"]["better"]) / max(1.0, tried)
            # A client without validation data, or with a loss that is not finite, does not vote.
            if tried > 0 and math.isfinite(better):
                metrics = {"better": better, "tried": tried}
        return Outcome(give, metrics, memory=memory)

    def _holds(self, task: Task, net: Net) -> Holds:
        """What :meth:`_give` gives."""
        weights, names = self._names(net.layout)
        params = net.params()
        sent = task.send["model" if self.down == 1 else "change"]
        packet = "model" if self.up == 1 else "change"
        packets = {packet: Form.of(trees.pick(params, weights), sent.mask)}
        if names:
            packets["statistics"] = Form.of(trees.pick(params, names))
        if self.finding.most > 1:
            head = trees.flat(trees.pick(params, net.layout.head))
            packets["evidence"] = Form.of({"scores.head": head})
        return Holds(packets, optional={"better": (-1.0, 1.0), "tried": (0.0, 1e9)})

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As FedAvg."""
        return dense_bytes(net.layout.size, cohort, rounds)


def coded(share: float, change: Mapping[str, Tensor], mask: Mask | None) -> Tree:
    """The largest of a change, each as a sign times one magnitude per layer.

    Under a mask the share is of what the mask keeps.
    """
    coder = SparseTernary(share, "layer")
    if not mask:
        return coder(change)
    inside = {}
    for name, leaf in change.items():
        inside[name] = leaf[mask[name]] if name in mask else leaf
    sent = coder(inside)
    for name, leaf in change.items():
        if name in mask:
            wide = torch.zeros_like(leaf)
            wide[mask[name]] = sent[name]
            sent[name] = wide
    return sent


def head_change(carry: Carry, layout: Layout) -> Tensor:
    """How training changed the last layer: the larger half of it, as signs."""
    before = trees.flat(trees.pick(carry["model"], layout.head))
    after = trees.flat(trees.pick(carry["local"], layout.head))
    return SparseTernary(EVIDENCE)({"head": after - before})["head"]


def added(
    before: Mapping[int, tuple[float, float]], now: Mapping[int, Sequence[tuple[float, float]]]
) -> dict[int, tuple[float, float]]:
    """What clients said of either kind of model, by group; what was said earlier counts less."""
    merits = dict(before)
    for group, said in now.items():
        better, tried = merits.get(group, (0.0, 0.0))
        for one, count in said:
            better += one * count
            tried += count
        merits[group] = (FADES * better, FADES * tried)
    return merits


def _mask_at(state: State, group: int, density: float, multiple: int) -> Mask:
    structure = groups_from_plain(state.structure)
    channels = widths_in_steps(state.widths[group], density, multiple)
    return expand(structure, shapes_of(state.models[group]), channels)


def widths_in_steps(scores: Mapping[str, Tensor], density: float, multiple: int) -> Channels:
    """The best channels of every layer, as many as its share, in steps of ``multiple``.

    A layer narrower than twice ``multiple`` is not rounded.

    >>> kept = widths_in_steps({"a": torch.arange(32.0), "b": torch.arange(6.0)}, 0.4, 8)
    >>> [int(k.sum()) for k in kept.values()]
    [16, 2]
    """
    channels: Channels = {}
    for name, score in scores.items():
        count = max(1, round(density * len(score)))
        if len(score) >= 2 * multiple:
            count = min(
                len(score), max(multiple, multiple * round(density * len(score) / multiple))
            )
        best = torch.argsort(score.detach().cpu(), descending=True, stable=True)[:count]
        channels[name] = torch.zeros(len(score), dtype=torch.bool)
        channels[name][best] = True
    return channels
