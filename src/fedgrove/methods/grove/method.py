r"""Grove: found groups, coded updates both ways, and a model of each client's own (ours).

Round :math:`t`, cohort :math:`S_t`; W_g the model of group g without what stays at home, h_k what
does with client k (its last layer and norm layers), V_k what the client holds of its group's model,
A_k its errors, 0 at first. With a view per client the server knows V_k::

    V_k  = V_k + C_down(W_g - V_k)                                         -> holdings.packets
    x_k  = E epochs of min CE(x; D_k) from (V_k, h_k);   h_k = that of x_k -> Train, _give
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - (V_k, h_k)|^2 from v_k   -> Train(.. + Proximal)
    q_k  = C_up(x_k - V_k + A_k);       A_k = x_k - V_k + A_k - q_k        -> coded, _give
    W_g  = W_g + s sum_k n_k q_k / sum_k n_k   over the group              -> WeightedMean, _moved

With many clients it keeps versions of what each group has published, P_g, and a client is sent the
updates that it has missed: V_k = P_g, and after each round::

    P_g  = P_g + C_down(W_g - P_g)                                         -> holdings.publish

C takes the largest share of each layer, each as a sign times one magnitude (-> ternary.coded). The
shares are given, or follow from a budget of bytes (-> parts.byte_budget).

A client uses v_k, or its group's model with a part of its own last step, (V_k + keep (x_k - V_k),
h_k): the group takes what did better on its members' validation data (-> _compare, added). Clients
are divided into groups when what their heads do in one half of their reports shows again in the
other half (-> parts.head_evidence, HeldOutGroups); a client nearer to another group moves there. A
group's model may lose its weakest channels, and a client whose device is too small for it has fewer
still (-> select_best_in_steps, narrow_clients). With all of it off the model itself travels, and
this is FedAvg (:data:`PRESETS`, "off").

- Shared: a model per group that it finds, without its head; updates travel as a few signs, both
  ways.
- A client uses: a personal model, or its group's model with its own head and last step.
- Bytes in the paper: M T (c(``up``) + c(``down``)) and evidence, or the budget.
- Secure aggregation: no; clients report how their heads moved, and which kind of model did better;
  groups, and what each client lacks, follow from single reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ... import trees
from ...channels.find_groups import find_groups, make_channel_mask, require_groups
from ...channels.groups import expand_channels
from ...channels.selection import FilterL1, FilterL2, select_best_in_steps
from ...channels.submodel import (
    PlainGroups,
    get_shapes,
    groups_from_plain,
    groups_to_plain,
    make_masked_packet,
    read_packet_channels,
)
from ...core import (
    Batch,
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
    TaskSettings,
    Train,
)
from ...errors import InputError, UnfitError, check
from ...nets import Net
from ...nets.layout import Layout
from ...parts.aggregate import Average
from ...parts.common import CommonParts
from ...parts.device_widths import narrow_clients
from ...parts.group import HELD
from ...parts.objective import Proximal
from ...parts.one_model import dense_bytes
from ...trees import Mask, Tree
from ...wire.codec import Bitmap, Smallest
from ..stc.ternary import coded
from . import byte_budget
from . import client_views as holdings
from .client_views import Holdings
from .head_evidence import (
    EVIDENCE,
    FEW,
    Evidence,
    gathered,
    halves,
    head_change,
    regrouped,
    unlike_others,
)
from .stability import HeldOutGroups

ALL = 0
"""The one group before groups are found; afterwards the group of clients that have none yet."""
OWN = ("none", "offset", "pulled", "chosen")
SERVERS = ("auto", "views", "versions")
READY = 0.9
"""Groups are looked for when this share of the clients that have reported has done so twice."""
FADES = 0.9
"""What clients said of models in earlier rounds counts by so much less with each round."""


@dataclass(frozen=True)
class State:
    """The groups' models, what clients hold of them, and the evidence for groups."""

    round: int
    rounds: int
    up: float
    """The shares that are sent; given, or chosen to meet a budget."""
    down: float
    models: dict[int, Tree]
    """By group, without what stays with clients."""
    statistics: dict[int, Tree]
    """By group: running statistics, which are sent whole."""
    holdings: Holdings
    """What each client holds of its group's model."""
    groups: dict[int, int]
    evidence: Evidence
    merits: dict[int, tuple[float, float]]
    """By group: by how much clients do better with an offset than with models of their own, summed
    over validation examples, and how many those were. Older rounds count less."""
    structure: PlainGroups
    """Which channels fall together, where any may go."""
    scores: dict[int, Tree]
    """By group: how good each channel is, where any may go."""
    narrow: dict[int, float]
    """The share of channels of each client whose device cannot hold all."""
    is_thin: bool = False
    """Whether groups have lost channels."""
    shared: float = 0.0
    """How much of what is lasting in a client's updates its group has too."""
    divided: int = -1
    """The round in which groups were found."""


Known = dict[tuple[int, float], Mask]
"""Masks that were made already, by group and share of channels."""


@dataclass(frozen=True)
class Grove(CommonParts):
    """A small model of each client's own beside its group's, for a hundredth of the bytes."""

    up: float = 0.1
    """The share of an update that a client sends, of each layer; 1: the model itself."""
    down: float = 0.1
    """The share of a difference that the server sends, of each layer; 1: the model itself."""
    bytes: str | float | None = None
    """In place of the two shares: how much the run sends both ways, as a share of what FedAvg sends
    with the same net, cohort and rounds ("1%", 0.01); less where half of each layer takes less.
    Both ways get the same share."""
    budget: str | None = None
    """In place of that: how much a client may send and receive in the whole run, on average
    ("8MB")."""
    server: Literal["auto", "views", "versions"] = "auto"
    """How the server knows what clients hold: a model for each client; versions of each group's; or
    the former while all clients' models fit into 1 GiB."""
    room: float = 4.0
    """So many models' room a server with versions takes for updates that clients may have
    missed."""
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
    """The pull of a personal model towards its group's."""
    finding: HeldOutGroups = HeldOutGroups()
    """How groups are found; ``most=1``: never."""
    forget: float = 0.3
    """By so much evidence fades when a client reports anew."""
    ask: int = 1000
    """Of at most so many clients evidence is kept; others join a group with each report."""
    density: float = 1.0
    """The share of channels that a group's model keeps."""
    thin: float = 0.25
    """Groups lose channels when they are found, or after this share of the rounds."""
    fit: bool = True
    """Whether a client whose device cannot hold or train the whole net has fewer channels."""
    multiple: int = 8
    """Widths are multiples of it where a layer is wide enough."""
    score: FilterL1 | FilterL2 = FilterL1()
    """Which channels are kept: the largest."""

    def __post_init__(self) -> None:
        check(0 < self.up <= 1, "up", self.up, "in (0, 1]")
        check(0 < self.down <= 1, "down", self.down, "in (0, 1]")
        if self.bytes is not None and self.budget is not None:
            raise InputError(
                f"bytes is {self.bytes!r} and budget is {self.budget!r}; both say how much may be "
                "sent: give one of them."
            )
        shares_are_given = (self.up, self.down) != (Grove.up, Grove.down)
        if self.has_budget and shares_are_given:
            raise InputError(
                f"up is {self.up} and down is {self.down}, and a budget is given too, from which "
                "both would follow: leave the shares out, or the budget."
            )
        if self.bytes is not None:
            byte_budget.parse_share(self.bytes)
        if self.budget is not None:
            byte_budget.parse_size(self.budget)
        check(self.server in SERVERS, "server", self.server, f"one of {', '.join(SERVERS)}")
        check(self.room >= 0, "room", self.room, "0 or more models")
        check(self.step > 0, "step", self.step, "above 0")
        check(self.own in OWN, "own", self.own, f"one of {', '.join(OWN)}")
        check(0 <= self.keep <= 1, "keep", self.keep, "in [0, 1]")
        check(0 <= self.forget <= 1, "forget", self.forget, "in [0, 1]")
        check(self.ask >= 4, "ask", self.ask, "4 or more clients")
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(0 <= self.thin <= 1, "thin", self.thin, "in [0, 1]")
        check(self.multiple >= 1, "multiple", self.multiple, "1 or more")

    @property
    def has_budget(self) -> bool:
        """Whether shares follow from a budget."""
        return self.bytes is not None or self.budget is not None

    @property
    def codes_up(self) -> bool:
        """Whether clients send coded updates; False: models."""
        return self.has_budget or self.up < 1

    @property
    def codes_down(self) -> bool:
        """Whether the server sends coded updates; False: models."""
        return self.has_budget or self.down < 1

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """One group; all hold the initial parameters, which cost no bytes."""
        layout = setup.layout
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
        model = trees.pick(setup.params, weights)
        narrow = narrow_clients(setup, self.local) if self.fit else {}
        structure: PlainGroups = ()
        scores = {}
        if self.density < 1 or narrow:
            groups = require_groups(setup.net)
            structure = groups_to_plain(groups)
            scores[ALL] = self.score(model, groups)
        has_versions = self._has_versions(model, len(setup.clients))
        up, down = self.up, self.down
        if self.has_budget:
            up = down = self._affordable(setup)
        state = State(
            round=0,
            rounds=setup.rounds,
            up=up,
            down=down,
            models={ALL: model},
            statistics={ALL: trees.pick(setup.params, statistics)},
            holdings=holdings.first(model, ALL, has_versions),
            groups={},
            evidence={},
            merits={},
            structure=structure,
            scores=scores,
            narrow=narrow,
        )
        return self._thinned(state)

    def _names(self, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The weights that are shared, and the running statistics."""
        home: set[str] = set()
        if self.home:
            home = {*layout.head, *layout.norms}
        return layout.without(home)

    def _gives_evidence(self, layout: Layout) -> bool:
        """Whether clients say how their heads moved; where there is none, there is one group."""
        return self.finding.most > 1 and bool(layout.head)

    def _has_versions(self, model: Mapping[str, Tensor], clients: int) -> bool:
        if not self.codes_down or self.server == "views":
            return False
        if self.server == "versions":
            return True
        size = sum(leaf.numel() * leaf.element_size() for leaf in model.values())
        return clients * size > HELD

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """What brings a client nearer to its group's model, and which kind of model to use."""
        send = dict(self._send(state, client, {}, {}))
        if self.own == "chosen":
            better, _ = state.merits.get(state.groups.get(client, ALL), (0.0, 0.0))
            send["choice"] = Packet({"pulled": torch.tensor([better < 0])})
        return send

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort catches up and trains."""
        known: Known = {}
        sums: holdings.Sums = {}
        settings: TaskSettings = {"up": state.up} if self.has_budget else {}
        tasks = []
        for client in cohort:
            send = self._send(state, client, known, sums, will_report=True)
            tasks.append(Task(client, send, settings))
        return tasks

    def _send(
        self,
        state: State,
        client: int,
        known: Known,
        sums: holdings.Sums,
        will_report: bool = False,
    ) -> Mapping[str, Packet]:
        group = state.groups.get(client, ALL)
        mask = self._mask(state, client, known)
        model = state.models[group]
        if not self.codes_down:
            send = {"model": make_masked_packet(trees.apply_mask(model, mask or {}), mask)}
        else:
            send = holdings.packets(
                state.holdings, client, group, model, state.down, mask, sums, will_report
            )
        if state.statistics[group]:
            send["statistics"] = Packet(state.statistics[group])
        return send

    def _mask(self, state: State, client: int, known: Known) -> Mask | None:
        """What a client has of its group's model and statistics; None: all."""
        group = state.groups.get(client, ALL)
        return self._group_mask(state, group, known, state.narrow.get(client, 1.0))

    def _group_mask(
        self, state: State, group: int, known: Known, share: float = 1.0
    ) -> Mask | None:
        """What is left of a group's model at a share of the channels; None: all."""
        if state.is_thin:
            share = min(share, self.density)
        if share == 1:
            return None
        if (group, share) not in known:
            channels = select_best_in_steps(state.scores[group], share, self.multiple)
            shapes = get_shapes({**state.models[group], **state.statistics[group]})
            structure = groups_from_plain(state.structure)
            known[group, share] = expand_channels(structure, shapes, channels, buffers=True)
        return known[group, share]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The groups' next models; evidence; groups, if there is enough; fewer channels."""
        means: dict[int, Average] = {}
        views: dict[int, Tree] = {}
        reported: dict[int, list[int]] = {}
        heads: dict[int, Tensor] = {}
        merits: dict[int, list[tuple[float, float]]] = {}
        known: Known = {}
        for report in reports:
            group = state.groups.get(report.of, ALL)
            mask = self._mask(state, report.of, known)
            reported.setdefault(group, []).append(report.of)
            if self.codes_down and state.holdings.published is None:
                views[report.of] = holdings.next_view(
                    state.holdings, report.of, state.models[group], state.down, mask
                )
            if "evidence" in report.give:
                heads[report.of] = report.give["evidence"].values["scores.head"].float()
            if group not in means:
                means[group] = self.mean.start(self._before(state, group))
            given = self._given(state, report, views.get(report.of), mask)
            means[group].add(given, report.examples, mask)
            if "better" in report.metrics:
                said = (report.metrics["better"], min(report.metrics["tried"], report.examples))
                merits.setdefault(group, []).append(said)
        models = dict(state.models)
        statistics = dict(state.statistics)
        steps: dict[int, Tree] = {}
        for group, mean in means.items():
            found = mean.value()
            steps[group] = self._step(state, group, found)
            models[group] = self._moved(models[group], found, steps[group])
            statistics[group] = trees.pick(found, statistics[group])
        held = replace(state.holdings, views={**state.holdings.views, **views})
        if held.published is not None:
            for group, step in steps.items():
                mask = self._group_mask(state, group, known)
                members = reported[group]
                held = holdings.publish(held, group, step, state.down, mask, members, self.room)
        after = replace(
            state,
            round=state.round + 1,
            models=models,
            holdings=held,
            statistics=statistics,
            merits=added(state.merits, merits),
        )
        unlike = unlike_others(dict(sorted(heads.items())))
        return self._thinned(self._divided(after, unlike))

    def _given(self, state: State, report: Report, view: Tree | None, mask: Mask | None) -> Tree:
        """What counts in the mean: an update where anything is coded, or else the model."""
        given: Tree = {}
        for name, packet in report.give.items():
            if name != "evidence":
                given |= packet.values
        if self.codes_up or not self.codes_down:
            return given
        # A whole model that was trained from what the client holds, which lags behind the group's:
        # what counts is how it moved from there.
        began = view
        if began is None:
            published = state.holdings.published
            assert published is not None, "clients hold views, or versions"
            began = trees.apply_mask(published.models[state.groups.get(report.of, ALL)], mask or {})
        return {**given, **trees.sub(trees.pick(given, began), began)}

    def _before(self, state: State, group: int) -> Tree:
        """What an average starts from: updates from nothing, models from the one that was sent."""
        model = state.models[group]
        if self.codes_up or self.codes_down:
            model = trees.map(torch.zeros_like, model)
        return {**model, **state.statistics[group]}

    def _step(self, state: State, group: int, found: Tree) -> Tree:
        """By what a group's model changes."""
        mean = trees.pick(found, state.models[group])
        if not self.codes_up and not self.codes_down:
            mean = trees.sub(mean, state.models[group])
        return trees.map(lambda leaf: self.step * leaf, mean)

    def _moved(self, model: Tree, found: Tree, step: Tree) -> Tree:
        """A group's next model."""
        if not self.codes_up and not self.codes_down and self.step == 1:
            # Not by a difference, which rounds: this is FedAvg.
            return trees.pick(found, model)
        return trees.map(torch.add, model, step)

    # ---- groups ----------------------------------------------------------------------------------

    def _divided(self, state: State, unlike: Mapping[int, Tensor]) -> State:
        """Groups, if the evidence supports them; later, clients nearer to another group move.

        ``unlike`` is how the heads of a round moved unlike each other.
        """
        if len(unlike) < 2:
            # Who reports alone is unlike nobody.
            return state
        evidence = gathered(state.evidence, unlike, self.forget, self.ask)
        state = replace(state, evidence=evidence)
        if state.groups:
            groups = regrouped(state.groups, state.evidence, unlike)
            return replace(state, groups=groups)
        ready, odd, even = halves(state.evidence)
        if len(ready) < max(FEW, READY * len(state.evidence)):
            return state
        labels, shared = self.finding(odd, even)
        # Twice in a row: once may be luck.
        was_found = state.shared >= self.finding.least
        state = replace(state, shared=shared)
        if not any(labels) or not was_found:
            return state
        return self._branched(state, dict(zip(ready, labels, strict=True)))

    def _branched(self, state: State, labels: Mapping[int, int]) -> State:
        """Groups with the model that all had, beside that of clients who are in none yet."""
        groups = {client: label + 1 for client, label in labels.items()}
        numbers = sorted(set(groups.values()))
        branched = replace(
            state,
            groups=groups,
            divided=state.round,
            models=dict.fromkeys((ALL, *numbers), state.models[ALL]),
            statistics=dict.fromkeys((ALL, *numbers), state.statistics[ALL]),
            merits=dict.fromkeys(numbers, state.merits.get(ALL, (0.0, 0.0))),
            holdings=holdings.branch(state.holdings, numbers, ALL),
        )
        return self._scored(branched)

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """How many groups there are, since when, and how real they are; the shares in use."""
        return {
            "groups": float(max(1, len(set(state.groups.values())))),
            "divided_in_round": float(state.divided),
            "shared": state.shared,
            "offset_is_better": sum(better for better, _ in state.merits.values()),
            "share_up": state.up,
            "share_down": state.down,
        }

    # ---- channels --------------------------------------------------------------------------------

    def _scored(self, state: State) -> State:
        """Every channel judged anew, by its group's model."""
        if not state.structure:
            return state
        structure = groups_from_plain(state.structure)
        scores = {group: self.score(model, structure) for group, model in state.models.items()}
        return replace(state, scores=scores, holdings=holdings.forget(state.holdings, state.narrow))

    def _thinned(self, state: State) -> State:
        """Groups without their weakest channels, when it is time."""
        if self.density == 1 or state.is_thin:
            return state
        if not state.groups and state.round < round(self.thin * state.rounds):
            return state
        state = replace(self._scored(state), is_thin=True)
        models = {}
        held = state.holdings
        for group, model in state.models.items():
            mask = self._group_mask(state, group, {})
            assert mask is not None
            models[group] = trees.apply_mask(model, mask)
            held = holdings.thin(held, group, mask)
        if self.has_budget:
            mask = self._group_mask(state, ALL, {}) or {}
            whole = state.models[ALL]
            share = byte_budget.share_of_less(state.up, whole, mask)
            state = replace(state, up=share, down=share)
        return replace(state, models=models, holdings=held)

    # ---- bytes -----------------------------------------------------------------------------------

    def _affordable(self, setup: Setup) -> float:
        """The share, the same both ways, with which a run costs what it may."""
        weights, names = self._names(setup.layout)
        model = trees.pick(setup.params, weights)
        # The estimate of costs has a codec that leaves no zeros out: it is not what will be used.
        codec = Smallest() if isinstance(self.codec, Bitmap) else self.codec
        evidence = 0
        if self._gives_evidence(setup.layout):
            evidence = setup.layout.count(setup.layout.head)
        exchange = byte_budget.Exchange(
            federation=setup,
            model=model,
            statistics=trees.pick(setup.params, names),
            evidence=evidence,
            metrics={"better": -0.012345678901234567, "tried": 100.0},
            codec=codec,
            has_versions=self._has_versions(model, len(setup.clients)),
            room=self.room,
        )
        return byte_budget.share_within(exchange, self.bytes, self.budget)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Of a coded update the entropy of its places, its signs and its magnitudes; or the budget.

        Evidence is coded too. Down, with versions, as many updates as a client has missed. All
        channels are counted, also where some are removed.
        """
        if self.bytes is not None:
            dense = dense_bytes(net.layout.size, cohort, rounds)
            return round(byte_budget.parse_share(self.bytes) * dense)
        if self.budget is not None:
            return round(byte_budget.parse_size(self.budget) * clients)
        weights, _ = self._names(net.layout)
        model = trees.pick(net.params(), weights)
        whole = 4.0 * trees.size(model)
        up = down = whole
        if self.codes_up:
            up = byte_budget.coded_bytes(self.up, model)
        if self._gives_evidence(net.layout):
            head = trees.flatten(trees.pick(net.params(), net.layout.head))
            up += byte_budget.coded_bytes(EVIDENCE, {"head": head})
        if self.codes_down:
            # With views nothing in round 0, then one update each time.
            missed = [1 / rounds, 1 - 1 / rounds]
            if self._has_versions(model, clients):
                missed = byte_budget.waits(clients, cohort, rounds)
            update = byte_budget.coded_bytes(self.down, model)
            down = sum(chance * min(n * update, whole) for n, chance in enumerate(missed))
        return round((up + down) * cohort * rounds)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Catch up, train, send the coded update; or catch up and use the model."""
        training: list[Stage] = [Edit(self._begin)]
        if self.own == "chosen":
            training.append(Measure("merit", self._compare, Batches("validation")))
        training.append(Edit(without_offset))
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
            "train": (*training, Give(self._give, self._expected)),
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
        sent_mask = None
        rest = {}
        for name, tree in carry.items():
            # All packets that have a mask have the same.
            if name.endswith(".mask"):
                sent_mask = tree
            else:
                rest[name] = tree
        shared, rest = holdings.receive(rest, trees.pick(client.start, weights))
        # Taken out, so that old and new clients have the same trees, and train at once.
        rest.pop("left", None)
        kept = rest.pop("kept", {})
        statistics = rest.pop("statistics", {})
        complete = {**client.start, **kept, **statistics, **shared}
        model = trees.pick(complete, client.layout.shapes)
        step = rest.pop("step", None)
        personal = rest.pop("personal", model)
        offset = model
        if step is not None:
            # In the product's memory: to ask for more takes longer than the sum.
            offset = {**model, **{n: (self.keep * step[n]).add_(model[n]) for n in weights}}
        if sent_mask:
            channels = read_packet_channels(Packet({}, sent_mask), find_groups(client.net))
            mask = make_channel_mask(client.net, channels)
            rest["model.mask"] = mask
            model = trees.apply_mask(model, mask)
            personal = trees.apply_mask(personal, mask)
            offset = trees.apply_mask(offset, mask)
        rest["model"] = model
        if self.own in ("offset", "chosen"):
            rest["offset"] = offset
        if self.own in ("pulled", "chosen"):
            rest["personal"] = personal
        return rest

    def _use(self, carry: Carry, client: Client) -> Carry:
        """The client's own model, or the group's with a part of the client's last step."""
        begun = self._begin(carry, client)
        choice = begun.pop("choice", {})
        offset = begun.pop("offset", begun["model"])
        personal = begun.pop("personal", begun["model"])
        takes_personal = self.own == "pulled" or (choice and bool(choice["pulled"]))
        return {**begun, "model": personal if takes_personal else offset}

    def _give(self, carry: Carry, client: Client) -> Outcome:
        """Send the coded update, keep its error, the head, and the client's own model."""
        weights, names = self._names(client.layout)
        model = trees.pick(carry["model"], weights)
        trained = trees.pick(carry["local"], weights)
        step = trees.sub(trained, model)
        mask = carry.get("model.mask")
        give = {}
        memory: dict[str, Tree] = {}
        if not self.codes_up:
            give["model"] = make_masked_packet(trained, mask)
        else:
            share = self.up
            if self.has_budget:
                share = float(carry["settings"]["up"])
            left = client.memory.get("left")
            if left is None:
                owed = trees.map(torch.clone, step)
            else:
                owed = trees.map(torch.add, step, left)
            owed = trees.apply_mask(owed, mask or {})
            sent = coded(share, owed, mask)
            # In place: to ask for memory takes longer than the difference.
            memory["left"] = trees.map(Tensor.sub_, owed, sent)
            give["change"] = make_masked_packet(sent, mask)
        if names:
            give["statistics"] = Packet(trees.pick(carry["local"], names))
        if self._gives_evidence(client.layout):
            give["evidence"] = Packet({"scores.head": head_change(carry, client.layout)})
        if self.codes_down:
            memory["held"] = model
        if self.home:
            home = [name for name in client.layout.shapes if name not in weights]
            memory["kept"] = trees.pick(carry["local"], home)
        if self.own in ("offset", "chosen"):
            memory["step"] = step
        if self.own in ("pulled", "chosen"):
            memory["personal"] = carry["personal"]
        metrics = {}
        if self.own == "chosen" and carry["merit"]:
            tried = float(carry["merit"]["tried"])
            better = float(carry["merit"]["better"]) / max(1.0, tried)
            # A client without validation data, or with a loss that is not finite, does not vote.
            if tried > 0 and math.isfinite(better):
                # With a loss below 0, which a problem of one's own may have, it may be any number.
                metrics = {"better": min(1.0, max(-1.0, better)), "tried": tried}
        return Outcome(give, metrics, memory=memory)

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """What :meth:`_give` gives."""
        weights, names = self._names(net.layout)
        params = net.blank()
        masks = [packet.mask for packet in task.send.values() if packet.mask]
        mask = masks[0] if masks else None
        packet = "change" if self.codes_up else "model"
        packets = {packet: ExpectedPacket.of(trees.pick(params, weights), mask)}
        if names:
            packets["statistics"] = ExpectedPacket.of(trees.pick(params, names))
        if self._gives_evidence(net.layout):
            head = trees.pick(params, net.layout.head)
            dtype = next(iter(head.values())).dtype
            packets["evidence"] = ExpectedPacket({"scores.head": (dtype, (trees.size(head),))})
        return ExpectedReport(packets, optional={"better": (-1.0, 1.0), "tried": (0.0, 1e9)})


def without_offset(carry: Carry, client: Client) -> Carry:
    """Train without the offset, which was compared.

    No objective reads it: an engine need not carry it to its device, twice in every round.
    """
    return {name: tree for name, tree in carry.items() if name != "offset"}


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


PRESETS = {
    "off": Grove(
        up=1.0,
        down=1.0,
        step=1.0,
        home=False,
        own="none",
        finding=HeldOutGroups(most=1),
        density=1.0,
        fit=False,
    )
}
"""All parts off: FedAvg."""
