r"""AdFedWCP: a personal model per client, sent clustered, with centroids by layer and bandwidth.

(Adaptive Federated Weight-Clustering Pruning; see docs/papers/adfedwcp.md.)

Before round 0 every client says how important its layers are at the initial model. Round
:math:`t`, cohort :math:`S_t`; th_g shared, th_k personal, M_k its mask::

    k_kj = min(lower, upper), by importance, data, bandwidth               -> Adaptive
    th_k = E epochs of min CE(th M_k) + lambda <th, th_k - th_g> from th_k -> Train, AnnealedPull
    c_k  = k_kj centroids per layer j of th_k, one at 0; M_k = [c_k != 0]  -> kmeans.cluster
    w_k  = softmax of what each layer adds to the accuracy                 -> Prototypes, Hits
    th_g = sum_k n_k c_k / sum_k n_k                                       -> WeightedMean

A client sends c_k and uses th_k M_k. The shared model never overwrites a personal one, it only
pulls; a pruned weight keeps its value, and may return. With nothing clustered (``Fixed(0)``) and no
pull, every client trains alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import (
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    Form,
    Give,
    Holds,
    Info,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Start,
    Task,
    Train,
)
from ..errors import InputError, check
from ..nets import Net
from ..nets.layout import Layout
from ..parts import kmeans
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.anneal import AnnealedPull
from ..parts.centroids import Adaptive, Fixed, Progress, clustered_bits
from ..parts.imprint import Hits, Prototypes, accuracy, importance, layers_of
from ..parts.local import LocalTraining
from ..parts.mask import weights_to_prune
from ..parts.objective import Objective, ProblemLoss
from ..parts.one_model import dense_bytes, use_network_start
from ..problems import CLASSES
from ..trees import Mask, Tree
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class State:
    """The shared model, and what the numbers of centroids follow from."""

    round: int
    rounds: int
    model: Tree
    layers: tuple[str, ...]
    weights: tuple[str, ...]
    """What is clustered of them."""
    devices: dict[int, tuple[int, float]]
    """Every client's examples and bandwidth."""
    omegas: dict[int, tuple[float, ...]]
    """The importance of every layer, by client, as the client last said."""
    asked: bool = False
    """Whether clients have said so before the first round."""
    accuracy: float | None = None
    """The clients' mean accuracy on their training data in the last round."""
    change: float = 0.0
    """By how much it rose."""


@dataclass(frozen=True)
class AdFedWCP:
    """Personal models that send themselves clustered, by importance, data and bandwidth."""

    allocation: Adaptive | Fixed = Adaptive()
    imprint: bool = True
    """Whether layers are weighed by imprinting; False: all alike, 1/L."""
    broadcast: int = 0
    """Centroids per layer of what the server sends (ours); 0: dense, as in the paper."""
    pull: AnnealedPull = AnnealedPull()
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        allowed = "0, or in 2..256"
        check(
            self.broadcast == 0 or 2 <= self.broadcast <= 256, "broadcast", self.broadcast, allowed
        )

    # ---- the server ------------------------------------------------------------------------------

    def init(self, start: Start) -> State:
        """The initial model; nobody has weighed its layers yet."""
        weights_to_prune(start.layout, 0.0 if self.clusters else 1.0)
        if self.imprint and start.net.problem.kind != CLASSES.kind:
            raise InputError(
                f"adfedwcp weighs layers by imprinting, which needs classes, and the targets are "
                f"{start.net.problem.name}; weigh all alike: --set imprint=false."
            )
        clients = start.all_clients("keeps the importance of every client's layers")
        devices = {}
        for client in clients:
            info = start.clients[client]
            devices[client] = (info.examples, info.bandwidth)
        layers = layers_of(start.layout)
        alike = (1 / len(layers),) * len(layers)
        return State(
            round=0,
            rounds=start.rounds,
            model=start.params,
            layers=layers,
            weights=start.layout.prunable,
            devices=devices,
            omegas=dict.fromkeys(clients, alike),
            asked=not self.imprint,
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The shared model, for those who have no personal one yet."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """All clients weigh their layers first; then the cohort trains."""
        if not state.asked:
            return [Task(client, verb="imprint") for client in state.devices]
        model = {"model": Packet(self._broadcast(state))}
        tasks = []
        for client in cohort:
            tasks.append(Task(client, model, {"k": self.centroids(state, client)}))
        return tasks

    def centroids(self, state: State, client: int) -> list[float]:
        """The number of centroids of each layer of a client."""
        sizes = [examples for examples, _ in state.devices.values()]
        fewest = min(sizes)
        most = max(sizes)
        examples, bandwidth = state.devices[client]
        info = Info(examples, bandwidth=bandwidth)
        progress = Progress(state.round, state.rounds, state.change)
        counts = []
        for omega in state.omegas[client]:
            counts.append(float(self.allocation(omega, info, fewest, most, progress)))
        return counts

    def _broadcast(self, state: State) -> Tree:
        """What is sent of the shared model: all of it, or clustered."""
        if not self.broadcast:
            return state.model
        k = torch.tensor(float(self.broadcast))
        clustered = {}
        for name in state.weights:
            clustered[name] = kmeans.cluster(state.model[name], k, self.broadcast)
        return {**state.model, **clustered}

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the clustered models; what clients said of their layers."""
        mean = self.mean.start(state.model)
        omegas = dict(state.omegas)
        accuracies = []
        for report in reports:
            if self.imprint:
                said = [report.metrics[name] for name in _numbered(state.layers)]
                omegas[report.of] = tuple(said)
            if "model" in report.give:
                mean.add(report.give["model"].values, report.examples)
                if "accuracy" in report.metrics:
                    accuracies.append(report.metrics["accuracy"])
        if not state.asked:
            # Not a round: its number stays 0.
            return replace(state, omegas=omegas, asked=True)
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
        )

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Weigh layers at the initial model; or train, cluster, weigh and send."""
        return {
            "imprint": (
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
                    at=under_mask,
                ),
                *self._cluster(),
                Edit(mask_and_use),
                *self._weigh("used"),
                Give(self._send, self._holds),
            ),
            "use": (Edit(use_personal),),
        }[verb]

    @property
    def clusters(self) -> bool:
        """Whether anything is clustered."""
        return self.allocation.k_max > 0

    def _cluster(self) -> tuple[Stage, ...]:
        if not self.clusters:
            return ()
        # One example is enough: only the weights are looked at. As a Measure it runs for all
        # clients of a round at once, on the engine's device.
        return (Measure("clustered", Cluster(self.allocation.k_max), ONE_EXAMPLE, of="trained"),)

    def _weigh(self, of: str) -> tuple[Stage, ...]:
        """Two passes: prototypes of the classes, then who is nearest to their own."""
        if not self.imprint:
            return ()
        return (
            Measure("prototypes", Prototypes(), of=of),
            Measure("hits", Hits(), of=of),
        )

    def _say_importance(self, carry: Carry, client: Client) -> Outcome:
        return Outcome(metrics=_importance(carry, client.layout))

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The clustered model, and what the layers and the model are worth."""
        metrics: dict[str, float] = {}
        if self.imprint:
            metrics = {"accuracy": accuracy(carry["hits"]), **_importance(carry, client.layout)}
        memory = {"personal": carry["trained"], "kept": carry["kept"]}
        return Outcome({"model": Packet(carry["clustered.model"])}, metrics, memory)

    def _holds_importance(self, task: Task, net: Net) -> Holds:
        return Holds(metrics=dict.fromkeys(_numbered(layers_of(net.layout)), (0.0, 1.0)))

    def _holds(self, task: Task, net: Net) -> Holds:
        metrics: dict[str, tuple[float, float]] = {}
        if self.imprint:
            names = ["accuracy", *_numbered(layers_of(net.layout))]
            metrics = dict.fromkeys(names, (0.0, 1.0))
        return Holds({"model": Form.of(net.params())}, metrics)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The uplink at k_max, counted twice: an upper bound, as k follows from training."""
        if not self.clusters:
            return dense_bytes(net.layout.size, cohort, rounds)
        return 2 * cohort * rounds * clustered_bytes(net.layout, self.allocation.k_max)


ONE_EXAMPLE = Batches("train", size=1, limit=1)


@dataclass(frozen=True)
class Cluster:
    """Every layer's weights replaced by their centroids, as many as the task says."""

    k_max: int
    passes: ClassVar[int] = 0
    """The network is not run."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The clustered weights by name."""
        return clustered_weights(net.layout, params, carry["settings"]["k"], self.k_max)


def clustered_weights(layout: Layout, params: Tree, numbers: Tensor, k_max: int) -> Tree:
    """The weights of layer j as at most ``numbers[j]`` centroids, one of them 0."""
    clustered: Tree = {}
    for number, name in zip(numbers, layers_of(layout), strict=True):
        for weight in _weights_of(layout, name):
            clustered[weight] = kmeans.cluster(params[weight], number, k_max)
    return clustered


def under_mask(params: Tree, carry: Carry) -> Tree:
    """The weights as the forward pass sees them: 0 where the client has pruned them."""
    # Empty where nothing is clustered: what holds no tensor is not remembered.
    return {**params, **_masked(params, carry.get("kept", {}))}


def _masked(params: Mapping[str, Tensor], kept: Mask) -> Tree:
    return {name: torch.where(mask, params[name], 0.0) for name, mask in kept.items()}


def begin_personal(carry: Carry, client: Client) -> Carry:
    """A personal model starts at the network's start, and its mask by clustering that."""
    if "personal" in carry:
        return carry
    start = client.start
    numbers = carry["settings"]["k"]
    most = int(numbers.max())
    kept: Mask = {}
    # 0: nothing is clustered.
    if most:
        clustered = clustered_weights(client.layout, start, numbers, most)
        kept = {name: leaf != 0 for name, leaf in clustered.items()}
    return {**carry, "personal": start, "kept": kept}


def mask_and_use(carry: Carry, client: Client) -> Carry:
    """The mask is where no centroid is 0; the client uses its trained model under it."""
    clustered = carry.get("clustered", {})
    trained = carry["trained"]
    kept = {name: leaf != 0 for name, leaf in clustered.items()}
    return {
        **carry,
        "kept": kept,
        "clustered.model": {**trained, **clustered},
        "used": {**trained, **_masked(trained, kept)},
    }


def use_personal(carry: Carry, client: Client) -> Carry:
    """The client uses its personal model under its mask; the shared one before it has any."""
    if "personal" not in carry:
        return carry
    personal = carry["personal"]
    kept = carry.get("kept", {})
    model = {**personal, **_masked(personal, kept)}
    return {**carry, "model": model, "model.mask": dict(kept)}


def clustered_bytes(layout: Layout, k: int) -> int:
    """What the paper counts of one clustered model: codebooks, indices and biases."""
    bits = 0
    counted = 0
    for name in layers_of(layout):
        weights = layout.count(_weights_of(layout, name))
        bits += clustered_bits(weights, 0, k)
        counted += weights
    # Biases and norms travel as they are.
    bits += 32 * (layout.size - counted)
    return -(-bits // 8)


def _weights_of(layout: Layout, layer: str) -> tuple[str, ...]:
    for each in layout.layers:
        if each.name == layer:
            return each.weights
    raise KeyError(layer)


def _importance(carry: Carry, layout: Layout) -> dict[str, float]:
    layers = layers_of(layout)
    return dict(zip(_numbered(layers), importance(carry["hits"], layers), strict=True))


def _numbered(layers: Iterable[Any]) -> list[str]:
    """Names of the layers' numbers in a report."""
    return [f"layer{i}" for i, _ in enumerate(layers)]
