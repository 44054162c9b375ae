r"""AdFedWCP: a personal model per client, sent clustered, with centroids by layer and bandwidth.

(Adaptive Federated Weight-Clustering Pruning; see docs/papers/adfedwcp.md.)

Before round 0 every client reports how important its layers are at the initial model. Round
:math:`t`, cohort :math:`S_t`; th_g shared, th_k personal, M_k its mask::

    k_kj = min(lower, upper), by importance, data, bandwidth               -> Adaptive
    th_k = E epochs of min CE(th M_k) + lambda <th, th_k - th_g> from th_k -> Train, AnnealedPull
    c_k  = k_kj centroids per layer j of th_k, one at 0; M_k = [c_k != 0]  -> kmeans.cluster
    w_k  = softmax of what each layer adds to the accuracy                 -> Prototypes, Hits
           (or by magnitude or gradient, ours                              -> parts.importance)
    th_g = sum_k n_k c_k / sum_k n_k                                       -> WeightedMean

A client sends c_k and uses th_k M_k. The shared model never overwrites a personal one but only
pulls it; a pruned weight keeps its value and may return, unless ``zero_pruned`` sets it to 0. With
nothing clustered (``Fixed(0)``) and no pull, every client trains alone. In a run with a bandwidth
trace, centroids follow the bandwidth at the start of each exchange (ours).

- Shared: clustered copies of personal models; the number of centroids depends on importance and
  bandwidth.
- A client uses: its personal model under its mask.
- Bytes in the paper: at ``k_max``, as ``fedwcp``.
- Secure aggregation: no; clients report the importance of their layers and an accuracy; the server
  stores the importance of each client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ... import trees
from ...core import (
    Batch,
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
from ...nets.layout import Layout
from ...parts.common import CommonParts
from ...parts.gradient import Gradient
from ...parts.mask import weights_to_prune
from ...parts.one_model import dense_bytes, use_network_start
from ...problems import CLASSES
from ...renamed import rename_field
from ...trees import Mask, Tree
from . import kmeans
from .anneal import AnnealedPull
from .centroids import Adaptive, Fixed, Progress, clustered_bits
from .importance import (
    Hits,
    Prototypes,
    Right,
    accuracy,
    by_gradient,
    by_magnitude,
    imprinted,
    layers_of,
    weighed,
)


@dataclass(frozen=True)
class State:
    """The shared model, and what the numbers of centroids follow from."""

    round: int
    rounds: int
    model: Tree
    layers: tuple[str, ...]
    weights: tuple[str, ...]
    """What is clustered of them."""
    sizes: tuple[int, ...]
    """How many of these each layer has."""
    size: int
    """All numbers of the model."""
    devices: dict[int, tuple[int, float, float, int]]
    """Every client's examples, bandwidth, speed and memory, as the server knows them now."""
    fewest: int
    most: int
    """Examples of any client."""
    omegas: dict[int, tuple[float, ...]]
    """The importance of every layer, by client, as the client last reported it."""
    weighed: bool = False
    """Whether clients have weighed their layers before the first round."""
    accuracy: float | None = None
    """The clients' mean accuracy on their training data in the last round."""
    change: float = 0.0
    """By how much it rose."""
    centroids: float = 0.0
    """Per layer, the mean over the clients and layers of the last round."""
    counted: float = 1.0
    """What the paper counts of its uplink, as a share of a dense one."""


@dataclass(frozen=True)
class AdFedWCP(CommonParts):
    """Personal models that send themselves clustered, by importance, data and bandwidth."""

    allocation: Adaptive | Fixed = Adaptive()
    """How many centroids each layer of a client gets: ``Adaptive``, or ``Fixed`` (the same number
    for all)."""
    importance: Literal["imprint", "magnitude", "gradient", "alike"] = "imprint"
    """How the importance of layers is measured: imprinting, mean |w|, mean |w g|, or equal (1/L
    each)."""
    broadcast: int = 0
    """Centroids per layer of what the server sends (ours); 0: dense, as in the paper."""
    zero_pruned: Literal["never", "round", "batch"] = "never"
    """When pruned weights are set to 0: never, so that they keep their values, as in the paper;
    before every round; or before every batch, as in the authors' code. Zeroing makes models
    sparser."""
    pull: AnnealedPull = AnnealedPull()
    """The pull towards the shared model; it fades over the rounds."""
    returns: InitVar[bool | None] = field(default=None, kw_only=True)
    """The old name of ``zero_pruned``, which will be removed in the next release
    (:mod:`fedgrove.renamed`)."""

    def __post_init__(self, returns: bool | None) -> None:
        if returns is not None:
            name, value = rename_field(type(self), "returns", returns)
            object.__setattr__(self, name, value)
        allowed = "0, or in 2..256"
        check(
            self.broadcast == 0 or 2 <= self.broadcast <= 256, "broadcast", self.broadcast, allowed
        )
        ways = ("imprint", "magnitude", "gradient", "alike")
        check(self.importance in ways, "importance", self.importance, f"one of {', '.join(ways)}")
        times = ("never", "round", "batch")
        is_known = self.zero_pruned in times
        check(is_known, "zero_pruned", self.zero_pruned, f"one of {', '.join(times)}")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The initial model; no client has weighed its layers yet."""
        weights_to_prune(setup.layout, 0.0 if self.clusters else 1.0)
        if self.importance == "imprint" and setup.net.problem.kind != CLASSES.kind:
            raise InputError(
                "adfedwcp measures the importance of layers by imprinting, which needs classes, "
                f"and the targets are {setup.net.problem.name}; measure it differently: --set "
                "importance=gradient, magnitude or alike."
            )
        layout = setup.layout
        clients = setup.all_clients("keeps the importance of every client's layers")
        devices = {}
        examples = []
        for client in clients:
            info = setup.clients[client]
            # Plain numbers: a state is written to checkpoints.
            devices[client] = (info.examples, info.bandwidth, info.speed, info.memory)
            examples.append(info.examples)
        layers = layers_of(layout)
        omega = [1 / len(layers)] * len(layers)
        if self.importance == "magnitude":
            # All clients start with equal weights: no exchange is needed to weigh them.
            omega = weighed(by_magnitude(setup.params, _weights_by_layer(layout)))
        return State(
            round=0,
            rounds=setup.rounds,
            model=setup.params,
            layers=layers,
            weights=layout.prunable,
            sizes=tuple(map(layout.count, _weights_by_layer(layout))),
            size=layout.size,
            devices=devices,
            fewest=min(examples),
            most=max(examples),
            omegas=dict.fromkeys(clients, tuple(omega)),
            weighed=self.importance in ("magnitude", "alike"),
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The shared model, for clients that have no personal one yet."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """All clients weigh their layers first; then the cohort trains."""
        if not state.weighed:
            return [Task(client, verb="weigh") for client in state.devices]
        model = {"model": Packet(self._broadcast(state))}
        tasks = []
        for client in cohort:
            tasks.append(Task(client, model, {"k": self.centroids(state, client)}))
        return tasks

    def follow_devices(self, state: State, clients: Mapping[int, ClientInfo]) -> State:
        """The state with the present bandwidths of clients; everything else about them stays."""
        if not isinstance(self.allocation, Adaptive) or not self.allocation.follow_trace:
            return state
        devices = dict(state.devices)
        for client, info in clients.items():
            examples, _, speed, memory = devices[client]
            devices[client] = (examples, info.bandwidth, speed, memory)
        return replace(state, devices=devices)

    def centroids(self, state: State, client: int) -> list[float]:
        """AdFedWCP: the number of centroids of each layer of a client."""
        examples, bandwidth, speed, memory = state.devices[client]
        info = ClientInfo(examples, bandwidth, speed, memory)
        progress = Progress(state.round, state.rounds, state.change)
        counts = []
        for omega in state.omegas[client]:
            counts.append(float(self.allocation(omega, info, state.fewest, state.most, progress)))
        return counts

    def _broadcast(self, state: State) -> Tree:
        """What is sent of the shared model: all of it, or clustered."""
        if not self.broadcast:
            return state.model
        weights = list(trees.pick(state.model, state.weights).values())
        k = torch.full((len(weights),), float(self.broadcast))
        clustered = kmeans.cluster_layers(weights, k, self.broadcast)
        return {**state.model, **dict(zip(state.weights, clustered, strict=True))}

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the clustered models; what clients reported of their layers."""
        mean = self.mean.start(state.model)
        omegas = dict(state.omegas)
        accuracies = []
        numbers: list[float] = []
        counted: list[float] = []
        for report in reports:
            if self.importance != "alike":
                omega = [report.metrics[name] for name in _numbered(state.layers)]
                omegas[report.of] = tuple(omega)
            # Before the first round clients only weigh their layers.
            if state.weighed:
                mean.add(report.give["model"].values, report.examples)
                # The numbers that the task had: the state before this round decides them.
                k = self.centroids(state, report.of)
                numbers += k
                counted.append(_counted_share(state, k))
                if "accuracy" in report.metrics:
                    accuracies.append(report.metrics["accuracy"])
        if not state.weighed:
            # Not a round: its number stays 0.
            return replace(state, omegas=omegas, weighed=True)
        # Without a report of an accuracy the last one stands, and the change is 0.
        now = sum(accuracies) / len(accuracies) if accuracies else state.accuracy
        change = 0.0
        if now is not None and state.accuracy is not None:
            change = now - state.accuracy
        return replace(
            state,
            round=state.round + 1,
            model=mean.value(),
            omegas=omegas,
            accuracy=now,
            change=change,
            centroids=_mean(numbers, state.centroids),
            counted=_mean(counted, state.counted),
        )

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Weigh layers at the initial model; or train, cluster, weigh and send."""
        # Where pruned weights are 0 at every step, the forward pass is under the mask anyway.
        zeroes_each_batch = self.zero_pruned == "batch"
        return {
            "weigh": (
                Edit(use_network_start),
                *self._weigh("model"),
                Give(self._say_importance, self._holds_importance),
            ),
            "train": (
                Edit(begin_personal),
                Train(
                    self.objective + self.pull,
                    self.local,
                    start="personal",
                    end="trained",
                    mask="",
                    at=None if zeroes_each_batch else under_mask,
                    project=under_mask if zeroes_each_batch else None,
                ),
                *self._cluster(),
                Edit(mask_and_use),
                *self._weigh("used"),
                Give(self._send, self._expected),
            ),
            "use": (Edit(use_personal),),
        }[verb]

    @property
    def scores(self) -> bool:
        """AdFedWCP: whether clients report their accuracy, which centroids may depend on."""
        return isinstance(self.allocation, Adaptive) or self.importance in ("imprint", "gradient")

    @property
    def clusters(self) -> bool:
        """AdFedWCP: whether any weights are clustered."""
        return self.allocation.k_max > 0

    def _cluster(self) -> tuple[Stage, ...]:
        if not self.clusters:
            return ()
        # One example is enough: only the weights are looked at. As a Measure it runs for all
        # clients of a round at once, on the engine's device.
        return (Measure("clustered", Cluster(self.allocation.k_max), ONE_EXAMPLE, of="trained"),)

    def _weigh(self, of: str) -> tuple[Stage, ...]:
        """What is measured for the importance, and the accuracy on the training data.

        Imprinting takes two passes: prototypes of the classes, then who is nearest to their own.
        """
        match self.importance:
            case "imprint":
                return (
                    Measure("prototypes", Prototypes(), of=of),
                    Measure("hits", Hits(), of=of),
                )
            case "gradient":
                slope = Measure("slope", Gradient(self.objective), of=of)
                return (slope, Measure("hits", Right(), of=of))
        return (Measure("hits", Right(), of=of),) if self.scores else ()

    def _say_importance(self, carry: Carry, client: Client) -> Outcome:
        return Outcome(metrics=self._importance(carry, "model", client.layout))

    def _importance(self, carry: Carry, of: str, layout: Layout) -> dict[str, float]:
        """The importance of each layer of ``carry[of]``, by its name in a report."""
        layers = layers_of(layout)
        weights = _weights_by_layer(layout)
        match self.importance:
            case "imprint":
                omega = imprinted(carry["hits"], layers)
            case "magnitude":
                omega = weighed(by_magnitude(carry[of], weights))
            case "gradient":
                omega = weighed(by_gradient(carry[of], carry["slope"], weights))
            case "alike":
                return {}
        return dict(zip(_numbered(layers), omega, strict=True))

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The clustered model, and what the layers and the model are worth."""
        metrics = self._importance(carry, "used", client.layout)
        if "output" in carry.get("hits", {}):
            metrics["accuracy"] = accuracy(carry["hits"])
        # With "batch" the next round zeroes them under the new mask when it begins. So does the
        # authors' code, which computes the pull's direction before that.
        personal = carry["used"] if self.zero_pruned == "round" else carry["trained"]
        memory = {"personal": personal, "kept": carry["kept"]}
        return Outcome({"model": Packet(carry["clustered.model"])}, metrics, memory)

    def _holds_importance(self, task: Task, net: Net) -> ExpectedReport:
        return ExpectedReport(metrics=dict.fromkeys(_numbered(layers_of(net.layout)), (0.0, 1.0)))

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        names = []
        if self.importance != "alike":
            names += _numbered(layers_of(net.layout))
        if self.scores and net.problem.kind == CLASSES.kind:
            names.append("accuracy")
        return ExpectedReport(
            {"model": ExpectedPacket.of(net.blank())}, dict.fromkeys(names, (0.0, 1.0))
        )

    # ---- what is reported ------------------------------------------------------------------------

    def server_metrics(self, state: State) -> Mapping[str, float]:
        """AdFedWCP: centroids per layer in the last round, and the uplink by the paper's count."""
        return {"centroids": state.centroids, "uplink_counted": state.counted}

    @property
    def paper_at_most(self) -> bool:
        """AdFedWCP: whether the paper's count of bytes is an upper bound only.

        It is one if k follows from training.
        """
        return isinstance(self.allocation, Adaptive)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The uplink at k_max, counted twice: an upper bound, as k follows from training."""
        if not self.clusters:
            return dense_bytes(net.layout.size, cohort, rounds)
        return 2 * cohort * rounds * clustered_bytes(net.layout, self.allocation.k_max)


ONE_EXAMPLE = Batches("train", size=1, limit=1)


@dataclass(frozen=True)
class Cluster:
    """Every layer's weights replaced by their centroids; the task has their number."""

    k_max: int
    passes: ClassVar[int] = 0
    """The network is not run."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The clustered weights by name."""
        return clustered_weights(net.layout, params, carry["settings"]["k"], self.k_max)


def clustered_weights(layout: Layout, params: Tree, numbers: Tensor, k_max: int) -> Tree:
    """AdFedWCP: the weights of layer j as at most ``numbers[j]`` centroids, one of them 0."""
    names, per_weight = _numbers_by_weight(layout, numbers)
    weights = list(trees.pick(params, names).values())
    return dict(zip(names, kmeans.cluster_layers(weights, per_weight, k_max), strict=True))


def _numbers_by_weight(layout: Layout, numbers: Tensor) -> tuple[list[str], Tensor]:
    """The weights in order of layers, and for each of them its layer's number."""
    names: list[str] = []
    layer_of: list[int] = []
    for layer, weights in enumerate(_weights_by_layer(layout)):
        names += weights
        layer_of += [layer] * len(weights)
    # Picked from a tensor: under an engine that stacks clients, numbers differ by client.
    return names, torch.stack([numbers[layer] for layer in layer_of])


@dataclass(frozen=True)
class _Start:
    """The programme of a network's start, for up to ``most`` centroids."""

    start: Tree
    most: int
    solved: kmeans.Solved


_START: WeakKeyDictionary[Net, _Start] = WeakKeyDictionary()
"""All clients of a run begin with the network's start: it is solved once."""


def clustered_start(client: Client, numbers: Tensor) -> Tree:
    """AdFedWCP: the network's start, clustered into the numbers of centroids that a client has."""
    names, per_weight = _numbers_by_weight(client.layout, numbers)
    weights = list(trees.pick(client.start, names).values())
    most = int(numbers.max())
    known = _START.get(client.net)
    if known is None or known.start is not client.start or known.most < most:
        # For more centroids than needed: other clients have other numbers, mostly up to 32.
        known = _Start(client.start, max(32, most), kmeans.solve(weights, max(32, most)))
        _START[client.net] = known
    return dict(zip(names, kmeans.with_centroids(weights, known.solved, per_weight), strict=True))


def under_mask(params: Tree, carry: Carry) -> Tree:
    """AdFedWCP: the weights as the forward pass sees them: 0 where the client has pruned them.

    >>> theta = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    >>> under_mask(theta, {"kept": {"w": torch.tensor([True, False])}})
    {'w': tensor([1., 0.]), 'b': tensor([3.])}
    """
    # Absent where nothing is clustered: an empty tree is not remembered.
    kept = carry.get("kept", {})
    seen = dict(params)
    for name, mask in kept.items():
        # Not in place: a pruned weight keeps its value, and may come back.
        seen[name] = torch.where(mask, params[name], 0.0)
    return seen


def begin_personal(carry: Carry, client: Client) -> Carry:
    """AdFedWCP: a personal model starts at the network's start, and its mask by clustering that."""
    if "personal" in carry:
        return carry
    numbers = carry["settings"]["k"]
    kept: Mask = {}
    # 0: nothing is clustered.
    if int(numbers.max()):
        clustered = clustered_start(client, numbers)
        kept = trees.map(Tensor.bool, clustered)
    return {**carry, "personal": client.start, "kept": kept}


def mask_and_use(carry: Carry, client: Client) -> Carry:
    """AdFedWCP: the mask is where no centroid is 0; the client uses its trained model under it."""
    clustered = carry.get("clustered", {})
    trained = carry["trained"]
    # On a CPU a fifth of the time of a comparison with 0.
    kept = trees.map(Tensor.bool, clustered)
    return {
        **carry,
        "kept": kept,
        "clustered.model": {**trained, **clustered},
        "used": trees.apply_mask(trained, kept),
    }


def use_personal(carry: Carry, client: Client) -> Carry:
    """AdFedWCP: the client uses its personal model under its mask, or else the shared one."""
    if "personal" not in carry:
        return carry
    personal = carry["personal"]
    kept = carry.get("kept", {})
    return {**carry, "model": trees.apply_mask(personal, kept), "model.mask": dict(kept)}


def clustered_bytes(layout: Layout, k: int) -> int:
    """AdFedWCP: what the paper counts of one clustered model: codebooks, indices and biases."""
    bits = 0
    counted = 0
    for name in layers_of(layout):
        weights = layout.count(_weights_of(layout, name))
        bits += clustered_bits(weights, 0, k)
        counted += weights
    # Biases and norms are sent as they are.
    bits += 32 * (layout.size - counted)
    return -(-bits // 8)


def _weights_of(layout: Layout, layer: str) -> tuple[str, ...]:
    for each in layout.layers:
        if each.name == layer:
            return each.weights
    raise KeyError(layer)


def _weights_by_layer(layout: Layout) -> list[tuple[str, ...]]:
    return [_weights_of(layout, name) for name in layers_of(layout)]


def _counted_share(state: State, numbers: Sequence[float]) -> float:
    """What the paper counts of a model with these centroids per layer, as a share of dense."""
    bits = 32 * (state.size - sum(state.sizes))
    for weights, k in zip(state.sizes, numbers, strict=True):
        bits += clustered_bits(weights, 0, int(k)) if k else 32 * weights
    return bits / (32 * state.size)


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    """AdFedWCP: the mean of numbers, or ``otherwise`` if there are none."""
    return sum(numbers) / len(numbers) if numbers else otherwise


def _numbered(layers: Iterable[Any]) -> list[str]:
    """Names of the layers' numbers in a report."""
    return [f"layer{i}" for i, _ in enumerate(layers)]
