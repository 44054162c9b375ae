r"""Grove: found groups, coded updates both ways, and a personal model for each client (ours).

Round :math:`t`, cohort :math:`S_t`; W_g the model of group g without the layers that stay on
the client, h_k those layers of client k (its last layer and norm layers), V_k the client's view of
its group's model, A_k its errors, 0 at first. With a view per client the server knows V_k::

    V_k  = V_k + C_down(W_g - V_k)                                         -> client_views.packets
    x_k  = E epochs of min CE(x; D_k) from (V_k, h_k)                      -> Train
    v_k  = E epochs of min CE(v; D_k) + mu/2 |v - (V_k, h_k)|^2 from v_k   -> Train(.. + Proximal)
    h_k  = that of x_k                                                     -> send
    q_k  = C_up(x_k - V_k + A_k);       A_k = x_k - V_k + A_k - q_k        -> coded, send
    W_g  = W_g + s sum_k n_k q_k / sum_k n_k   over the group              -> WeightedMean, _moved

With many clients the server keeps versions of what each group has published, P_g, and a client is
sent the updates that it has missed: V_k = P_g, and after each round::

    P_g  = P_g + C_down(W_g - P_g)                                         -> client_views.publish

C takes the largest share of each layer, each as a sign times one magnitude (-> ternary.coded). The
shares are given, or follow from a budget of bytes (-> byte_budget).

A client uses v_k, or its group's model with a part of its last step, (V_k + keep (x_k - V_k), h_k):
the group uses the kind of model that was better on a tenth of its members' training data, a
different tenth in each round, which neither was trained on in that round (-> compare, add_merits).
Clients are divided into groups if the changes of their heads in one half of their reports predict
those in the other half (-> head_evidence, HeldOutGroups); later, a client that is nearer to another
group moves there. A group's model may lose its weakest channels, and a client whose device is too
small for it has even fewer (-> ChannelMasks, narrow_clients). With all parts off the model itself
is sent, and this is FedAvg (:data:`PRESETS`, "off").

- Shared: a model for each group that is found, without its head; updates are sent as a few signs,
  both ways.
- A client uses: a personal model, or its group's model with its own head and last step.
- Bytes in the paper: M T (c(``up``) + c(``down``)) and evidence, or the budget.
- Secure aggregation: no; clients report the change of their heads, and which kind of model was
  better; the server uses single reports for groups and for what each client lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ... import trees
from ...channels.find_groups import require_groups
from ...channels.selection import FilterL1, FilterL2
from ...channels.submodel import PlainGroups, groups_from_plain, groups_to_plain, make_masked_packet
from ...core import (
    Batches,
    Edit,
    Give,
    Measure,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    TaskSettings,
    Train,
)
from ...errors import InputError, UnfitError, check, spell_option
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.device_widths import narrow_clients
from ...parts.group import MAX_UPDATE_BYTES
from ...parts.objective import Proximal
from ...parts.one_model import dense_bytes
from ...trees import Tree
from ...wire.codec import Bitmap, Smallest
from ..stc.versions import bytes_of
from . import byte_budget, client_views
from .client import GroveClient
from .head_evidence import (
    EVIDENCE,
    FEW_CLIENTS,
    gathered,
    halves,
    regrouped,
    unlike_others,
)
from .stability import HeldOutGroups
from .state import ChannelMasks, GroupRound, State, add_merits

ALL = 0
"""The one group before groups are found; afterwards the group of clients that have none yet."""
OWN = ("none", "offset", "pulled", "chosen")
SERVERS = ("auto", "views", "versions")
READY = 0.9
"""Groups are looked for when this share of the clients that have reported has done so twice."""

CHOICES = {pulled: Packet({"pulled": torch.tensor([pulled])}) for pulled in (False, True)}
"""The packets that name the better kind of model: one object for all clients, so that it is encoded
once."""


@dataclass(frozen=True)
class Grove(CommonParts):
    """A model per group that is found, and a personal one, for about 2 % of FedAvg's bytes."""

    up: float = 0.1
    """The share of an update that a client sends, of each layer; 1: the model itself."""
    down: float = 0.1
    """The share of a difference that the server sends, of each layer; 1: the model itself."""
    bytes: str | float | None = None
    """Replaces the two shares: the bytes of the run, both ways, as a share of FedAvg's bytes with
    the same net, cohort and rounds ("1%", 0.01). At most half of each layer is sent, which may take
    less. Both directions get the same share."""
    budget: str | None = None
    """Replaces ``bytes``: bytes that a client may send and receive in the whole run, on average
    ("8MB")."""
    server: Literal["auto", "views", "versions"] = "auto"
    """How the server keeps track of what clients have received: as a model for each client
    ("views"), or as versions of each group's model ("versions"); "auto" uses views if all fit into
    1 GiB."""
    room: float = 4.0
    """With versions: the server's memory for updates that clients may have missed, in models."""
    step: float = 1.25
    """The server's learning rate: a factor of the mean update."""
    home: bool = True
    """Whether the last layer and the norm layers are kept on the client."""
    own: Literal["none", "offset", "pulled", "chosen"] = "chosen"
    """What a client uses: its group's model ("none"); that model with a part of the client's last
    step ("offset"); a personal model, pulled towards the group's ("pulled"); or the better of the
    last two in its group ("chosen"), measured on a part of the training data that is not trained on
    and changes with each round."""
    keep: float = 0.5
    """With an offset: the part of its last step away from the group's model that a client keeps."""
    pull: Proximal = Proximal(mu=0.1)
    """The pull of a personal model towards its group's."""
    finding: HeldOutGroups = HeldOutGroups()
    """How groups are found; ``most=1``: never."""
    forget: float = 0.3
    """The share of a client's evidence that is dropped with each new report."""
    ask: int = 1000
    """Maximum number of clients whose evidence is stored; others join a group with each report."""
    density: float = 1.0
    """The share of channels that a group's model keeps."""
    thin: float = 0.25
    """Channels are removed when groups are found, or after this share of the rounds."""
    fit: bool = True
    """Whether a client has fewer channels if its device does not have the memory or speed for the
    whole net."""
    multiple: int = 8
    """Widths are multiples of this if a layer is wide enough."""
    score: FilterL1 | FilterL2 = FilterL1()
    """How channels are scored; those with the highest scores are kept."""

    def __post_init__(self) -> None:
        check(0 < self.up <= 1, "up", self.up, "in (0, 1]")
        check(0 < self.down <= 1, "down", self.down, "in (0, 1]")
        if self.bytes is not None and self.budget is not None:
            raise InputError(
                f"bytes is {self.bytes!r} and budget is {self.budget!r}; both set how much may be "
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
        """Grove: whether the shares of updates follow from a byte budget."""
        return self.bytes is not None or self.budget is not None

    @cached_property
    def codes_up(self) -> bool:
        """Grove: whether clients send coded updates; False: models."""
        return self.has_budget or self.up < 1

    @cached_property
    def codes_down(self) -> bool:
        """Grove: whether the server sends coded updates; False: models."""
        return self.has_budget or self.down < 1

    @property
    def averages_updates(self) -> bool:
        """Whether clients' updates are averaged; False: their models, as FedAvg does."""
        return self.codes_up or self.codes_down

    @cached_property
    def client(self) -> GroveClient:
        """Grove: the client's half of the method."""
        return GroveClient(
            home=self.home,
            own=self.own,
            keep=self.keep,
            up=None if self.has_budget else self.up,
            codes_up=self.codes_up,
            codes_down=self.codes_down,
            looks_for_groups=self.finding.most > 1,
        )

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """One group; all clients know the initial parameters, which cost no bytes."""
        if self.home and not setup.layout.head:
            raise UnfitError(
                "the last layer would be kept on the client, but the net has no layer with "
                f"parameters. Share all layers ({spell_option('set', 'home=false')}), or use a "
                "net that ends in one."
            )
        weights, statistics = self.client.shared_names(setup.layout)
        if not weights:
            raise UnfitError(
                "nothing would be shared: the net has only its last layer, which would be kept on "
                f"the client. Share all layers ({spell_option('set', 'home=false')}), or use a "
                "deeper net."
            )
        model = trees.pick(setup.params, weights)
        narrow: dict[int, float] = {}
        if self.fit:
            narrow = narrow_clients(setup, self.local)
        structure: PlainGroups = ()
        scores = {}
        if self.density < 1 or narrow:
            groups = require_groups(setup.net)
            structure = groups_to_plain(groups)
            scores[ALL] = self.score(model, groups)
        has_versions = self._has_versions(model, len(setup.clients))
        up = self.up
        down = self.down
        if self.has_budget:
            up = self._affordable(setup)
            down = up
        state = State(
            round=0,
            rounds=setup.rounds,
            up=up,
            down=down,
            models={ALL: model},
            statistics={ALL: trees.pick(setup.params, statistics)},
            client_views=client_views.first(model, ALL, has_versions),
            groups={},
            evidence={},
            merits={},
            structure=structure,
            scores=scores,
            narrow=narrow,
        )
        return self._thin_if_due(state)

    def _has_versions(self, model: Mapping[str, Tensor], clients: int) -> bool:
        if not self.codes_down or self.server == "views":
            return False
        if self.server == "versions":
            return True
        return clients * bytes_of(model) > MAX_UPDATE_BYTES

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """What brings a client nearer to its group's model, and which kind of model to use."""
        send = self._send(state, client, self._masks(state), {})
        if self.own == "chosen":
            better, _ = state.merits.get(state.groups.get(client, ALL), (0.0, 0.0))
            # One bit next to the model: before anything is known, the offset.
            send["choice"] = CHOICES[better < 0]
        return send

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort catches up and trains."""
        masks = self._masks(state)
        sums: client_views.MissedUpdates = {}
        settings: TaskSettings = {"up": state.up} if self.has_budget else {}
        tasks = []
        for client in cohort:
            send = self._send(state, client, masks, sums, will_report=True)
            tasks.append(Task(client, send, settings))
        return tasks

    def _send(
        self,
        state: State,
        client: int,
        masks: ChannelMasks,
        sums: client_views.MissedUpdates,
        will_report: bool = False,
    ) -> dict[str, Packet]:
        group = state.groups.get(client, ALL)
        mask = masks.of(group, state.narrow.get(client, 1.0))
        model = state.models[group]
        if self.codes_down:
            send = client_views.packets(
                state.client_views, client, group, model, state.down, mask, sums, will_report
            )
        else:
            send = {"model": make_masked_packet(trees.apply_mask(model, mask or {}), mask)}
        if state.statistics[group]:
            send["statistics"] = Packet(state.statistics[group])
        return send

    def _masks(self, state: State) -> ChannelMasks:
        """The masks of a state's groups, made as they are needed."""
        most = self.density if state.is_thin else 1.0
        return ChannelMasks(
            state.structure, state.scores, state.models, state.statistics, most, self.multiple
        )

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The groups' next models; evidence; groups, if there is enough; fewer channels."""
        masks = self._masks(state)
        has_views = self.codes_down and state.client_views.published is None
        by_group: dict[int, GroupRound] = {}
        new_views: dict[int, Tree] = {}
        heads: dict[int, Tensor] = {}
        for report in reports:
            group = state.groups.get(report.of, ALL)
            mask = masks.of(group, state.narrow.get(report.of, 1.0))
            began: Tree = {}
            if self.codes_down:
                began = client_views.received(
                    state.client_views, report.of, group, state.models[group], state.down, mask
                )
            if has_views:
                new_views[report.of] = began
            # Not of networks without a head: they have one group.
            if "evidence" in report.give:
                heads[report.of] = report.give["evidence"].values["scores.head"].float()
            if group not in by_group:
                by_group[group] = GroupRound(self.mean.start(self._before(state, group)))
            by_group[group].mean.add(self._given(report, began), report.examples, mask)
            by_group[group].clients.append(report.of)
            if "better" in report.metrics:
                # No client claims a larger vote than its weight in the mean.
                tried = min(report.metrics["tried"], report.examples)
                by_group[group].merits.append((report.metrics["better"], tried))
        models = dict(state.models)
        statistics = dict(state.statistics)
        merits = dict(state.merits)
        views = replace(state.client_views, views={**state.client_views.views, **new_views})
        for group, reported in by_group.items():
            found = reported.mean.value()
            step = self._step(state.models[group], found)
            models[group] = self._moved(state.models[group], found, step)
            statistics[group] = trees.pick(found, statistics[group])
            if views.published is not None:
                views = client_views.publish(
                    views, group, step, state.down, masks.of(group), reported.clients, self.room
                )
            if reported.merits:
                merits[group] = add_merits(merits.get(group, (0.0, 0.0)), reported.merits)
        after = replace(
            state,
            round=state.round + 1,
            models=models,
            client_views=views,
            statistics=statistics,
            merits=merits,
        )
        # By number, not by arrival: a mean's last bits depend on the order of its terms.
        unlike = unlike_others(dict(sorted(heads.items())))
        return self._thin_if_due(self._divided(after, unlike))

    def _given(self, report: Report, began: Tree) -> Tree:
        """What counts in the mean: an update where anything is coded, or else the model."""
        given: Tree = {}
        for name, packet in report.give.items():
            if name != "evidence":
                given |= packet.values
        if self.codes_up or not self.codes_down:
            return given
        # A whole model that was trained from what the client had, which lags behind its group's:
        # what counts is how it moved from there.
        return {**given, **trees.sub(trees.pick(given, began), began)}

    def _before(self, state: State, group: int) -> Tree:
        """What an average starts from: updates from nothing, models from the one that was sent."""
        model = state.models[group]
        if self.averages_updates:
            model = trees.map(torch.zeros_like, model)
        return {**model, **state.statistics[group]}

    def _step(self, model: Tree, found: Tree) -> Tree:
        """By what a group's model changes."""
        mean = trees.pick(found, model)
        if not self.averages_updates:
            mean = trees.sub(mean, model)
        return trees.map(lambda leaf: self.step * leaf, mean)

    def _moved(self, model: Tree, found: Tree, step: Tree) -> Tree:
        """A group's next model."""
        if not self.averages_updates and self.step == 1:
            # Not by a difference, which rounds: this is FedAvg.
            return trees.pick(found, model)
        return trees.map(torch.add, model, step)

    # ---- groups ----------------------------------------------------------------------------------

    def _divided(self, state: State, unlike: Mapping[int, Tensor]) -> State:
        """Groups, if the evidence supports them; later, clients nearer to another group move.

        ``unlike`` is how the heads of a round moved unlike each other.
        """
        if len(unlike) < 2:
            # A client that reports alone has no others to differ from.
            return state
        evidence = gathered(state.evidence, unlike, self.forget, self.ask)
        state = replace(state, evidence=evidence)
        if state.groups:
            groups = regrouped(state.groups, state.evidence, unlike)
            return replace(state, groups=groups)
        ready, odd, even = halves(state.evidence)
        if len(ready) < max(FEW_CLIENTS, READY * len(state.evidence)):
            return state
        labels, shared = self.finding(odd, even)
        # Twice in a row: once may be luck.
        was_found = state.shared >= self.finding.least
        state = replace(state, shared=shared)
        if not any(labels) or not was_found:
            return state
        return self._branched(state, dict(zip(ready, labels, strict=True)))

    def _branched(self, state: State, labels: Mapping[int, int]) -> State:
        """Groups with the model that all had, next to that of ungrouped clients."""
        # From 1 on: 0 is ALL, the model of clients without a group.
        groups = {client: label + 1 for client, label in labels.items()}
        numbers = sorted(set(groups.values()))
        branched = replace(
            state,
            groups=groups,
            divided=state.round,
            models=dict.fromkeys((ALL, *numbers), state.models[ALL]),
            statistics=dict.fromkeys((ALL, *numbers), state.statistics[ALL]),
            merits=dict.fromkeys(numbers, state.merits.get(ALL, (0.0, 0.0))),
            client_views=client_views.branch(state.client_views, numbers, ALL),
        )
        return self._scored(branched)

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """Grove: how many groups there are, since when and how certain; the shares in use."""
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
        """Every channel scored again, by its group's model."""
        if not state.structure:
            return state
        structure = groups_from_plain(state.structure)
        scores = {group: self.score(model, structure) for group, model in state.models.items()}
        views = client_views.forget(state.client_views, state.narrow)
        return replace(state, scores=scores, client_views=views)

    def _thin_if_due(self, state: State) -> State:
        """Groups without their weakest channels, when it is time."""
        if self.density == 1 or state.is_thin:
            return state
        if not state.groups and state.round < round(self.thin * state.rounds):
            return state
        state = replace(self._scored(state), is_thin=True)
        masks = self._masks(state)
        models = {}
        views = state.client_views
        for group, model in state.models.items():
            mask = masks.of(group) or {}
            models[group] = trees.apply_mask(model, mask)
            views = client_views.thin(views, group, mask)
        if self.has_budget:
            share = byte_budget.share_of_less(state.up, state.models[ALL], masks.of(ALL) or {})
            state = replace(state, up=share, down=share)
        return replace(state, models=models, client_views=views)

    # ---- bytes -----------------------------------------------------------------------------------

    def _affordable(self, setup: Setup) -> float:
        """The share, the same both ways, with which a run costs what it may."""
        weights, names = self.client.shared_names(setup.layout)
        model = trees.pick(setup.params, weights)
        codec = self.codec
        if isinstance(codec, Bitmap):
            # The estimate of costs has a codec that leaves no zeros out: it will not be used.
            codec = Smallest()
        evidence = 0
        if self.client.sends_evidence(setup.layout):
            evidence = setup.layout.count(setup.layout.head)
        exchange = byte_budget.SampleMessages(
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

        Evidence is coded too. Down, with versions, the updates that a client has missed. All
        channels are counted, also where some are removed.
        """
        if self.bytes is not None:
            dense = dense_bytes(net.layout.size, cohort, rounds)
            return round(byte_budget.parse_share(self.bytes) * dense)
        if self.budget is not None:
            return round(byte_budget.parse_size(self.budget) * clients)
        weights, _ = self.client.shared_names(net.layout)
        model = trees.pick(net.params(), weights)
        whole = 4.0 * trees.size(model)
        up = whole
        if self.codes_up:
            up = byte_budget.coded_bytes(self.up, model)
        if self.client.sends_evidence(net.layout):
            head = trees.flatten(trees.pick(net.params(), net.layout.head))
            up += byte_budget.coded_bytes(EVIDENCE, {"head": head})
        down = whole
        if self.codes_down:
            # With views nothing in round 0, then one update each time.
            missed = [1 / rounds, 1 - 1 / rounds]
            if self._has_versions(model, clients):
                missed = byte_budget.waits(clients, cohort, rounds)
            update = byte_budget.coded_bytes(self.down, model)
            down = 0.0
            for n, chance in enumerate(missed):
                # No client is sent more than the whole model.
                down += chance * min(n * update, whole)
        return round((up + down) * cohort * rounds)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Catch up, train, send the coded update; or catch up and use the model."""
        client = self.client
        if verb != "train":
            return {"use": (Edit(client.use),)}[verb]
        compares = self.own == "chosen"
        stages: list[Stage] = [Edit(client.begin)]
        stages.append(Train(self.objective, self.local, leaves_out_fold=compares))
        if client.has_personal_model:
            pulled = self.objective + self.pull
            stages.append(
                Train(
                    pulled,
                    self.local,
                    "personal",
                    "personal",
                    mask="model.mask",
                    leaves_out_fold=compares,
                )
            )
        if compares:
            stages.append(Edit(client.make_offset))
            stages.append(Measure("merit", client.compare, Batches("train", fold="in")))
        stages.append(Give(client.send, client.expected))
        return tuple(stages)


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
