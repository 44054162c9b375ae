r"""FedAPTA: devices of different tasks and strength, a model for each task that the server finds.

(Yu, Yuan, Wang, Cheng & Hu, "FedAPTA: Federated Multi-task Learning for Heterogeneous Devices with
Adaptive Layer-wise Pruning and Task-aware Aggregation", 2025, Alg. 1 to 3.)

Round :math:`t`, cohort :math:`S_t`; device i does not get a share :math:`\rho_i` of the weights of
the convolutional layers, and is in group t, whose task the server does not know::

    I_k    = mean |w| of layer k of the group's model w_t                   -> layer_importance
    rho_k  = nearest to s / I_k, larger where I_k is smaller,
             sum_k N_k rho_k = rho_i sum_k N_k (Eq. 1), no rho_k < .8 rho_i -> monotone_ratios
    M_i    = without the rho_k C_k channels of smallest L1 norm             -> LayerwiseL1
    w^_i   = E epochs of min CE from w_t M_i (Eq. 2), really smaller        -> Train
    w_i    = w^_i + w_t (1 - M_i) (Eq. 3)                                   -> fill_missing_channels
    D_i    = w_i - w_t in the last layer, summed until it is learnt         -> Trace
    groups = HDBSCAN on 1 - cos(D_i, D_j) (Eq. 4)                           -> Hdbscan, matched
    w_t    = sum_i n_i w_i / sum_i n_i over the group (Eq. 5)               -> WeightedMean

With ``drift=feddc`` (the paper names FedDC) a device also keeps h_i and g_i::

    c_i    = G_t - g_i, where M_i is 1 and was 1 in its last round          -> correction
    w^_i   = ... min CE + alpha/2 |w + h_i - w_t|^2 + <w, c_i>              -> DriftCorrection
    h_i    = h_i + (w^_i - w_t M_i)                                         -> drifted
    g_i    = -(c_i + (w^_i - w_t M_i) / (K lr))                             -> own_gradient
    w_t    = sum_i n_i (w_i + h_i) / sum_i n_i
    G_t    = sum_i n_i m_i g_i / sum_i n_i m_i

With ``drift=server`` devices train as without, and only h_i is added to what is averaged: in the
authors' code FedDC's terms are of a detached copy of the weights, and so without a gradient.

With ratio 0 for all, ``grouping=None`` and no drift this is FedAvg. Differs from the paper: what it
leaves open is decided in docs/papers/fedapta.md. The least ratio of a layer is ours, so that weak
devices are really faster (``prune.least``); ``fedapta:paper`` has none, and the literal grouping.

- Shared: a model for each task that the server finds, cut to a width that suits each device.
- A client uses: its group's model, cut to its ratio.
- Bytes in the paper: 8 d_s M T, the mean over the ratios.
- Secure aggregation: no; the server groups devices by their single updates; it chooses the
  sub-models, so noise can be added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from ... import trees
from ...channels.find_groups import find_groups, make_channel_mask, require_groups
from ...channels.submodel import (
    PlainGroups,
    extract_submodel,
    fill_missing_channels,
    groups_from_plain,
    groups_to_plain,
    make_masked_packet,
)
from ...core import (
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
    expected_as_sent,
)
from ...errors import InputError, UnfitError, check, spell_option, unknown
from ...nets import Net
from ...nets.layout import Layout
from ...parts.aggregate import WeightedMean
from ...parts.augment import Augment
from ...parts.common import CommonParts
from ...parts.device_widths import send_masked
from ...parts.local import SGD, Adam, LocalTraining, count_steps, learning_rate
from ...parts.one_model import dense_bytes
from ...trees import Tree
from .channel_rules import (
    LayerwiseL1,
    RandomChannels,
    RollingWindow,
    UniformL1,
    check_ratio,
    client_ratios,
)
from .drift import DRIFTS, DriftCorrection, correction, drifted, own_gradient
from .layer_ratios import candidates
from .task_groups import (
    LITERAL,
    NOISE,
    Hdbscan,
    by_outputs,
    distances,
    matched,
    stay,
    together,
)
from .task_memory import Trace, remembered

PARTS_USED = ("cut", "whole")
"""What a device uses: its group's model cut to its own ratio, or the whole of it."""
START = -1
"""Where a device began that belonged to no group: at the network's initial parameters."""


@dataclass(frozen=True)
class State:
    """The groups' models in full width, who is in which, and how each device's last layer moved."""

    round: int
    structure: PlainGroups
    """The layers that lose channels."""
    params: tuple[str, ...]
    """The names of all parameters."""
    head: tuple[str, ...]
    """The tensors whose updates are compared."""
    ratios: dict[int, float]
    """By device: the share of weights that it does not get."""
    first: Tree
    """The initial parameters, where newcomers begin once there are several groups."""
    models: dict[int, Tree]
    """By group."""
    groups: dict[int, int]
    """By device that has taken part."""
    traces: dict[int, tuple[Tensor, Tensor, float, float, bool]]
    """By device, those seen last at the end: the fields of its trace."""
    examples: dict[int, int]
    """By device: how many it trains on; with FedDC's drift only."""
    gradients: dict[int, Tree]
    """By group: the mean gradient of its devices in the last round; with FedDC's drift only."""


@dataclass(frozen=True)
class Arrival:
    """What the server makes of one report."""

    origin: int
    """The group whose model the device began with, or :data:`START`."""
    model: Tree
    """Recovered, and with its drift where there is one."""
    gradient: Packet | None
    """Of the device's own loss; with FedDC's drift only."""
    trace: Trace
    """Of the last layer."""
    examples: int


@dataclass(frozen=True)
class FedAPTA(CommonParts):
    """A model per task, found by the server; every device trains it as narrow as it must."""

    ratios: tuple[float, ...] = ()
    """Pruning ratios, assigned to the devices in turn; empty: what fits on each device."""
    prune: LayerwiseL1 | UniformL1 | RollingWindow | RandomChannels = LayerwiseL1()
    """Which channels a device does not get: the rule of FedAPTA, FedLPS, FedRolex or FedDrop."""
    grouping: Hdbscan | None = Hdbscan()
    """How tasks are found; none: all devices are one group."""
    last: int = 1
    """Number of last fully connected layers that are compared."""
    drift: str = "none"
    """Whether devices keep their drift: "feddc", only with SGD and with messages twice as long;
    "server", which adds it on the server but has no correction in training; or "none"."""
    correct: DriftCorrection = DriftCorrection()
    """FedDC's correction, used with "feddc"; ``alpha`` is the weight of its penalty."""
    use: str = "cut"
    """What a device uses and exports: its group's model "cut" to its ratio, or the "whole" one."""

    starts_trained = True

    def __post_init__(self) -> None:
        in_range = all(0 <= ratio < 1 for ratio in self.ratios)
        check(in_range, "ratios", self.ratios, "shares in [0, 1)")
        check(self.last >= 1, "last", self.last, "1 or more layers")
        if self.use not in PARTS_USED:
            raise unknown("use", self.use, PARTS_USED)
        if self.drift not in DRIFTS:
            raise unknown("drift", str(self.drift), DRIFTS)

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """One model for all; a ratio that no allocation can meet is refused here."""
        is_adam = self.local is not None and isinstance(self.local.optimiser, Adam)
        if self.drift == "feddc" and is_adam:
            # An update of Adam's over its rate is about 1 for every weight, however small its
            # gradient: as a correction it would drown the loss.
            raise InputError(
                "drift is feddc and the optimiser Adam; FedDC uses updates as sums of gradients, "
                "which is only correct with SGD. Use it "
                f"({spell_option('set', 'optimiser=SGD')}, {spell_option('lr', '0.1')}), or "
                "drift=server or none."
            )
        ratios = self._ratios(setup)
        find = require_groups if any(ratios.values()) else find_groups
        structure = candidates(find(setup.net), setup.layout.shapes)
        for ratio in sorted(set(ratios.values())):
            if ratio:
                check_ratio(self.prune, structure, ratio)
        return State(
            round=0,
            structure=groups_to_plain(structure),
            params=setup.layout.params,
            head=last_layers(setup.layout, self.last),
            ratios=ratios,
            first=setup.params,
            models={0: setup.params},
            groups={},
            traces={},
            examples=self._examples(setup),
            gradients={},
        )

    def _examples(self, setup: Setup) -> dict[int, int]:
        """How many examples each device has, where its weight in its group matters."""
        if self.drift != "feddc":
            return {}
        clients = setup.all_clients("keeps a drift for every client")
        return {k: setup.clients[k].examples for k in clients}

    def _ratios(self, setup: Setup) -> dict[int, float]:
        """Every device's ratio: given in turn, or the smallest that fits the device."""
        if not self.ratios:
            return client_ratios(setup, self.prune, self.local)
        clients = setup.all_clients("keeps a pruning ratio for every client")
        # Without strict: the cycle has no end, the clients decide.
        return dict(zip(clients, cycle(self.ratios), strict=False))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The group's model, cut to the device; who has none gets that of the largest group."""
        group = state.groups.get(client, largest_group(state))
        model = state.models[group]
        if self.use == "whole":
            return {"model": Packet(model)}
        return {"model": self._cut(state, model, client)}

    def _cut(self, state: State, model: Tree, client: int) -> Packet:
        """Alg. 2: the model without the channels that the device's ratio costs."""
        ratio = state.ratios[client]
        if not ratio:
            return Packet(model)
        layers = groups_from_plain(state.structure)
        kept = self.prune(model, layers, ratio, state.round, client)
        return extract_submodel(model, layers, kept)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """Alg. 1, lines 6 to 10: each device trains its group's model at its own ratio."""
        sends: dict[tuple[int, float, int], dict[str, Packet]] = {}
        weights = weights_in_groups(state) if self.correct.weighted else {}
        tasks = []
        for client in cohort:
            origin = origin_of(state, client)
            # Devices of one group and ratio share their packets, and so one small network.
            whose = client if self.prune.varies else 0
            key = (origin, state.ratios[client], whose)
            if key not in sends:
                sends[key] = self._send(state, origin, client)
            settings = {}
            if self.drift != "none":
                # The device compares the number with the one it had: in a new group its drift is 0.
                settings["group"] = float(origin)
            if self.drift == "feddc":
                settings["weight"] = weights.get(client, 1.0)
            tasks.append(Task(client, sends[key], settings))
        return tasks

    def _send(self, state: State, origin: int, client: int) -> dict[str, Packet]:
        """A group's model, cut to a device; and with FedDC's drift its mean gradient, cut alike."""
        packet = self._cut(state, model_at(state, origin), client)
        if self.drift != "feddc":
            return {"model": packet}
        gradient = state.gradients.get(origin)
        if gradient is None:
            gradient = _zeros(trees.pick(packet.values, state.params))
        gradient = trees.apply_mask(gradient, packet.mask or {})
        return {"model": packet, "group_gradient": make_masked_packet(gradient, packet.mask)}

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Alg. 1, lines 11 to 14: recover, find the groups, and average in each."""
        # The groups are not known before the last report is there, so that the cohort's models
        # are kept until then: a device's place in a mean cannot be decided as it comes.
        arrivals: dict[int, Arrival] = {}
        for report in reports:
            arrivals[report.of] = self._arrival(state, report)
        # By number, not by arrival: neither groups nor sums depend on who was faster.
        arrivals = dict(sorted(arrivals.items()))
        next_round = state.round + 1
        if not arrivals:
            return replace(state, round=next_round)
        if self.grouping is None:
            after = replace(state, groups=state.groups | dict.fromkeys(arrivals, 0))
        else:
            after = self._regroup(self.grouping, state, arrivals)
        models, gradients = self._average(state, after.groups, arrivals)
        return replace(after, round=next_round, models=models, gradients=gradients)

    def _arrival(self, state: State, report: Report) -> Arrival:
        """Eq. 3: the device's model in full width, and how it moved."""
        origin = origin_of(state, report.of)
        begun = model_at(state, origin)
        packet = report.give["model"]
        model = fill_missing_channels(packet, begun, groups_from_plain(state.structure))
        mask = packet.mask or {}
        trained = model
        if "head" in report.give:
            # What is averaged has the drift in it; compared is what was trained.
            last = fill_missing(report.give["head"], begun)
            trained = model | last
        head: Tree = {}
        present: Tree = {}
        for name in state.head:
            head[name] = trained[name].float() - begun[name].float()
            # A layer that the mask does not name is whole.
            present[name] = mask.get(name, torch.ones_like(begun[name], dtype=torch.bool))
        trace = Trace(trees.flatten(head), trees.flatten(present))
        return Arrival(origin, model, report.give.get("gradient"), trace, report.examples)

    def _regroup(self, grouping: Hdbscan, state: State, arrivals: Mapping[int, Arrival]) -> State:
        """Alg. 3, on all devices that are remembered; if all are settled, groups stay."""
        traces = {k: arrival.trace for k, arrival in arrivals.items()}
        groups = state.groups
        if grouping.memory:
            before = {k: Trace(*fields) for k, fields in state.traces.items()}
            traces = remembered(
                before, groups, traces, grouping.fade, grouping.settle, grouping.forget
            )
        if not all(trace.is_settled for trace in traces.values()):
            # Known by this update alone: newcomers, and those that have forgotten what they did.
            homeless = {k for k, arrival in arrivals.items() if traces[k] is arrival.trace}
            groups = clustered(grouping, state, traces, homeless)
        kept = {}
        if grouping.memory:
            for k, t in traces.items():
                kept[k] = (t.total, t.present, t.weight, t.first, t.is_settled)
        return replace(state, groups=dict(sorted(groups.items())), traces=kept)

    def _average(
        self, state: State, groups: Mapping[int, int], arrivals: Mapping[int, Arrival]
    ) -> tuple[dict[int, Tree], dict[int, Tree]]:
        """Eq. 5: the mean of each group, and its mean gradient; a group without devices is removed.

        A device that joins a group from another one began with another model: it counts from the
        next round on. In a new group those devices count that began with its commonest model.
        """
        models: dict[int, Tree] = {}
        gradients: dict[int, Tree] = {}
        for group in sorted(set(groups.values())):
            members = []
            origins: Counter[int] = Counter()
            for k, arrival in arrivals.items():
                if groups[k] == group:
                    members.append(k)
                    origins[arrival.origin] += 1
            origin = group
            if group not in state.models:
                # If no member reported, all members count, by the group they were in before.
                counts = origins or _origins_before(state, groups, group)
                # Of equally many the one of the smallest number.
                origin = min(counts, key=lambda o: (-counts[o], o))
            begun = model_at(state, origin)
            mean = self.mean.start(begun)
            before = state.gradients.get(group)
            if before is None:
                before = _zeros(trees.pick(begun, state.params))
            gradient_mean = WeightedMean().start(before)
            counted = [k for k in members if arrivals[k].origin == origin]
            for k in counted:
                mean.add(arrivals[k].model, arrivals[k].examples)
                own = arrivals[k].gradient
                if own is not None:
                    # Over the devices that have the weight: their corrections then add up to 0.
                    gradient_mean.add(own.values, arrivals[k].examples, own.mask)
            models[group] = mean.value() if counted else begun
            if self.drift == "feddc":
                gradients[group] = gradient_mean.value() if counted else before
        return models, gradients

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """FedAPTA: how many groups there are, and how many devices the largest has."""
        sizes = Counter(state.groups.values())
        return {"groups": len(state.models), "largest_group": max(sizes.values(), default=0)}

    # ---- a device --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train at the device's ratio and send; to use the model, nothing need be done."""
        if verb == "use":
            return ()
        objective = self.objective
        if self.drift == "feddc":
            objective = objective + self.correct
        train = Train(objective, self.local)
        if self.drift == "none":
            return {"train": (train, Give(send_masked))}[verb]
        give = Give(self._send_drift, partial(expected_drift, last=self.last))
        return {"train": (Edit(self._begin), train, give)}[verb]

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """What the device kept of its drift, where it has the weight; 0 at first, or if regrouped.

        So is its correction: without a gradient of its own there is nothing to correct. Nor is
        there for a weight that the device lacked in its last round: it has no evidence of it.
        """
        mask = carry.get("model.mask", {})
        group = carry["settings"]["group"]
        kept_for = carry.get("drift_group")
        is_same_group = kept_for is not None and float(kept_for["number"]) == float(group)
        nothing = _zeros(trees.pick(carry["model"], client.layout.params))
        begun = {**carry, "drift": nothing, "correction": nothing}
        if not is_same_group:
            return begun
        begun["drift"] = trees.apply_mask(carry["drift"], mask)
        if self.drift == "feddc":
            weight = float(carry["settings"]["weight"])
            along = correction(carry["own_gradient"], carry["group_gradient"], weight)
            begun["correction"] = trees.apply_mask(trees.apply_mask(along, mask), carry["had"])
        return begun

    def _send_drift(self, carry: Carry, client: Client) -> Outcome:
        """The sub-model with its drift; the device keeps the drift, and its gradient.

        The last layers are sent once more as they were trained: the server compares these.
        """
        mask = carry.get("model.mask")
        names = client.layout.params
        trained = trees.pick(carry["local"], names)
        received = trees.pick(carry["model"], names)
        # 0 where the device has no weight, as all three are.
        drift = drifted(carry["drift"], trained, received)
        shifted = carry["local"] | trees.map(torch.add, trained, drift)
        last = trees.pick(trained, last_layers(client.layout, self.last))
        give = {
            "model": make_masked_packet(shifted, mask),
            "head": make_masked_packet(last, mask),
        }
        memory = {"drift": drift, "drift_group": {"number": carry["settings"]["group"]}}
        if self.drift == "feddc":
            steps, lr = self._steps_and_rate(carry, client)
            own = own_gradient(trees.sub(trained, received), carry["correction"], steps, lr)
            own = trees.apply_mask(own, mask or {})
            give["gradient"] = make_masked_packet(own, mask)
            had = trees.map(lambda leaf: torch.ones_like(leaf, dtype=torch.bool), received)
            # Parameters only: a mask may name running statistics as well, which have no drift.
            for name, kept in (mask or {}).items():
                if name in had:
                    had[name] = kept
            memory |= {"own_gradient": own, "had": had}
        return Outcome(give, memory=memory)

    def _steps_and_rate(self, carry: Carry, client: Client) -> tuple[int, float]:
        """How many steps the device does in a round, and their learning rate."""
        local = self.local or LocalTraining()
        steps = count_steps(Train(self.objective, local), client)
        # A device without examples does not move, and its gradient is 0.
        return max(1, steps), float(learning_rate(local, carry))

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Sub-models of these ratios, in turn, 4 bytes a number, down and up; masks do not count.

        Nor does a drift, of which the paper says nothing. Cut as in the first round, from the
        network's initial weights; the whole model if devices decide.
        """
        structure = candidates(find_groups(net), net.layout.shapes)
        params = net.params()
        sizes = []
        for ratio in self.ratios or (0.0,):
            lost = 0
            if ratio:
                mask = make_channel_mask(net, self.prune(params, structure, ratio, 0, 0))
                for name in net.layout.params:
                    if name in mask:
                        lost += int((~mask[name]).sum())
            sizes.append(net.layout.size - lost)
        return round(dense_bytes(1, cohort, rounds) * sum(sizes) / len(sizes))


PRESETS = {
    "paper": FedAPTA(
        ratios=(0.0, 0.2, 0.4, 0.6, 0.8),
        prune=LayerwiseL1(least=0.0),
        grouping=LITERAL,
        drift="server",
        correct=DriftCorrection(alpha=0.1, weighted=True),
        use="whole",
        local=LocalTraining(
            5, 512, SGD(0.1, weight_decay=1e-3), decay=0.998, clip=10.0, augment=Augment()
        ),
    )
}
"""``fedapta:paper``: ratios of its experiments, layers' ratios by Eq. 1 alone, HDBSCAN on this
round's updates alone; local training, augmentation, drift and the scored model of the authors'
code. It is for images."""


# ---- what follows from a state -------------------------------------------------------------------


def last_layers(layout: Layout, number: int) -> tuple[str, ...]:
    """FedAPTA: the parameters of the last fully connected layers, whose updates are compared."""
    linear = [layer for layer in layout.trained_layers if layer.kind == "linear"]
    if not linear:
        raise UnfitError(
            "it has no fully connected layer, and FedAPTA distinguishes tasks by the updates of "
            "the last one; use a net that ends with one."
        )
    allowed = f"at most {len(linear)}, the number of fully connected layers of this net"
    check(number <= len(linear), "last", number, allowed)
    names: list[str] = []
    for layer in linear[-number:]:
        names += layer.params
    return tuple(names)


def origin_of(state: State, client: int) -> int:
    """FedAPTA: the group whose model a device trains.

    A newcomer trains the only one there is, or where there are several begins at the start, as all
    others did: there its update shows its task.
    """
    if client in state.groups:
        return state.groups[client]
    if len(state.models) == 1:
        return next(iter(state.models))
    return START


def model_at(state: State, origin: int) -> Tree:
    """FedAPTA: the model of a group, or the initial parameters."""
    if origin == START:
        return state.first
    return state.models[origin]


def largest_group(state: State) -> int:
    """FedAPTA: the group of most devices; of equal ones, the one of the smallest number."""
    sizes = Counter(state.groups.values())
    return min(state.models, key=lambda group: (-sizes[group], group))


def placed(state: State) -> dict[int, int]:
    """FedAPTA: the groups of all devices; before the first round there is only one."""
    if state.groups:
        return state.groups
    return dict.fromkeys(state.ratios, next(iter(state.models)))


def clustered(
    grouping: Hdbscan, state: State, traces: Mapping[int, Trace], homeless: Set[int]
) -> dict[int, int]:
    """FedAPTA: the groups of all devices by clusters of their traces, numbered as before.

    Those who are ``homeless`` have no group to stay in.
    """
    devices = sorted(traces)
    totals = []
    presences = []
    is_settled = []
    for k in devices:
        totals.append(traces[k].total)
        presences.append(traces[k].present)
        is_settled.append(traces[k].is_settled)
    vectors = torch.stack(totals)
    present = torch.stack(presences)
    known = placed(state)
    before = []
    for k in devices:
        # In the first round everybody is known by one update alone, and of the one group there is.
        is_homeless = k in homeless and bool(state.groups)
        before.append(NOISE if is_homeless else known.get(k, NOISE))
    outputs = [moved_outputs(state, traces[k]) for k in devices]
    labels = by_outputs(grouping, vectors, present, before, outputs)
    if NOISE in labels:
        # No cluster at all: everybody stays, and newcomers join their nearest neighbour.
        apart = distances(vectors, present, grouping.distance)
        return stay(state.groups, devices, apart)
    labels = together(labels, before, is_settled)
    clusters = dict(zip(devices, labels, strict=True))
    # Above the numbers of all groups that exist.
    numbers = matched(clusters, known, fresh=max(state.models) + 1)
    groups = dict(state.groups)
    for k, label in clusters.items():
        groups[k] = numbers[label]
    return groups


def moved_outputs(state: State, trace: Trace) -> Tensor:
    """FedAPTA: which outputs of the last layer a device has trained; True for each."""
    head = trees.unflatten(trace.total, trees.pick(state.first, state.head))
    # The last layer's weights, one row per output; before them other layers, after them its bias.
    weights = [leaf for leaf in head.values() if leaf.dim() > 1][-1]
    return (weights != 0).flatten(1).any(1)


def _origins_before(state: State, groups: Mapping[int, int], group: int) -> Counter[int]:
    """How many members of a group came from each group of the state."""
    counts: Counter[int] = Counter()
    for k, now in groups.items():
        if now == group:
            counts[state.groups.get(k, START)] += 1
    return counts


def weights_in_groups(state: State) -> dict[int, float]:
    """FedAPTA: by device, its examples over the mean of those that start from the same model."""
    members: dict[int, list[int]] = {}
    for k, examples in state.examples.items():
        members.setdefault(origin_of(state, k), []).append(examples)
    means = {origin: sum(own) / len(own) for origin, own in members.items()}
    weights = {}
    for k, examples in state.examples.items():
        # A device without examples does no step: it needs no weight.
        if examples:
            weights[k] = examples / means[origin_of(state, k)]
    return weights


def fill_missing(packet: Packet, model: Tree) -> Tree:
    """FedAPTA: some layers of a device's model, and the server's values where it has none."""
    filled: Tree = {}
    for name, leaf in packet.values.items():
        kept = (packet.mask or {}).get(name)
        if kept is not None:
            leaf = torch.where(kept, leaf, model[name])
        filled[name] = leaf
    return filled


def expected_drift(task: Task, net: Net, last: int) -> ExpectedReport:
    """FedAPTA: what was sent, and the last layers of the sub-model once more."""
    packets = dict(expected_as_sent(task, net).packets)
    if "group_gradient" in packets:
        # Under another name: a device's own gradient is no update of its group's.
        packets["gradient"] = packets.pop("group_gradient")
    model = task.send["model"]
    values = trees.pick(model.values, last_layers(net.layout, last))
    head = make_masked_packet(values, model.mask)
    packets["head"] = ExpectedPacket.of(head.values, head.mask)
    return ExpectedReport(packets)


def _zeros(tree: Tree) -> Tree:
    return trees.map(torch.zeros_like, tree)
