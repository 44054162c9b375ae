r"""FedGen: a generator on the server tells clients how features of classes look (Zhu, Hong & Zhou,
"Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; h the last linear layer of w, G the generator::

    c_k  = how often client k has each class                             -> LabelCounts
    w_k  = E epochs of min CE(w; D_k) + alpha CE(h(G(y)), y) from w      -> Train(GeneratedFeatures)
    w    = sum_k n_k w_k / sum_k n_k                                     -> WeightedMean
    G    = some steps of min CE(h(G(y)), y), y by sum_k c_k              -> GeneratorTraining

A client draws its ``samples`` features once a round, of classes as all clients together have them.
In the first round the generator knows nothing, and the term is 0. The model and G travel down, the
model and c_k up. With alpha = 0 this is FedAvg.

- Shared: the model, and a generator of features that the server trains.
- A client uses: the shared model.
- Bytes in the paper: (8 d + 4 d_gen) M T.
- Secure aggregation: no; clients report how many examples of each label they have, and the server
  keeps that per client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from ...core import (
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
    Server,
    Setup,
    Stage,
    Task,
    Train,
)
from ...errors import check
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.one_model import dense_bytes
from ...problems import check_has_classes
from ...seeds import torch_rng
from ...trees import Tree
from ...wire.codec import Codec, Dense
from ..fedlc import LabelCounts
from .generator import (
    FeatureGenerator,
    GeneratedFeatures,
    GeneratorTraining,
    check_ends_in_head,
    generator_inputs,
    head_weights,
)

MOST_EXAMPLES = 1e9
"""A client cannot have more examples of a class than this."""


@dataclass(frozen=True)
class State:
    """The model, the generator, and how many examples of each class clients have reported."""

    round: int
    model: Tree
    generator: Tree
    counts: tuple[float, ...]
    """By class: the sum of what each client reported last."""
    reported: dict[int, tuple[float, ...]]
    """By client that has taken part: what it reported last."""


@dataclass(frozen=True)
class FedGen(CommonParts):
    """One model for all, and a generator of features that clients learn from beside their data."""

    generated: GeneratedFeatures = GeneratedFeatures()
    """The term that makes clients learn from generated features; ``alpha`` is its weight."""
    training: GeneratorTraining = GeneratorTraining()
    """How the server trains the generator."""
    samples: int = 256
    """How many features a client draws in a round; every step sees all of them."""
    noise: int = 32
    """How many random inputs the generator has."""
    hidden: int = 256
    """How many hidden units the generator has."""
    _: KW_ONLY
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.samples >= 1, "samples", self.samples, "1 or more")
        check(self.noise >= 1, "noise", self.noise, "1 or more")
        check(self.hidden >= 1, "hidden", self.hidden, "1 or more")

    def nets(self, net: Net) -> Mapping[str, Net]:
        """The generator of features for the last layer of this net."""
        weight = head_weights(net.layout)[0]
        classes, features = net.layout.shapes[weight]
        module = FeatureGenerator(classes, self.noise, self.hidden, features)
        dtype = net.params()[weight].dtype
        return {"generator": Net(module.to(dtype), (classes + self.noise,))}

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Both networks as they start; nothing is known of the labels."""
        check_has_classes(setup.net.problem)
        check_ends_in_head(setup.net, setup.params)
        classes = setup.layout.shapes[head_weights(setup.layout)[0]][0]
        return State(0, setup.params, setup.nets["generator"].params(), (0.0,) * classes, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, with the generator beside the model."""
        send = {"model": Packet(state.model), "generator": Packet(state.generator)}
        settings = {"counts": state.counts}
        return [Task(k, send, settings) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean is the next model; a client's labels count once, as reported last."""
        mean = self.mean.start(state.model)
        labels = range(len(state.counts))
        reported = dict(state.reported)
        for report in reports:
            mean.add(report.give["model"].values, report.examples)
            reported[report.of] = tuple(report.metrics[label_name(label)] for label in labels)
        # Added up anew: by differences a liar's fractions could leave a count below 0.
        reported = dict(sorted(reported.items()))
        counts = tuple(math.fsum(own[label] for own in reported.values()) for label in labels)
        return replace(
            state,
            round=state.round + 1,
            model=mean.value(),
            counts=counts,
            reported=reported,
        )

    def train_server(self, state: State, server: Server) -> State:
        """Alg. 1, the generator's steps."""
        shares = torch.tensor(state.counts, dtype=torch.float64)
        if not shares.sum():
            # No client has reported a class.
            return state
        net = server.nets["generator"]
        layout = server.nets["model"].layout
        generator = self.training(
            net, state.generator, layout, state.model, shares / shares.sum(), server.seed
        )
        return replace(state, generator=generator)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Count the labels, draw features, train with them (Eq. 5) and send."""
        if verb == "train":
            return (
                Measure("labels", LabelCounts(), Batches("train")),
                Edit(self._draw),
                Train(self.objective + self.generated, self.local),
                Give(send_with_counts, expected_counts),
            )
        return {"use": ()}[verb]

    def _draw(self, carry: Carry, client: Client) -> Carry:
        """Features of classes that this client has a place for, as often as all have them."""
        generator = client.nets["generator"]
        counts = carry["settings"]["counts"]
        own = carry["labels"].get("is_class", torch.ones_like(counts)) > 0
        weights = torch.where(own, counts, torch.zeros_like(counts)).double()
        is_known = bool(weights.sum() > 0)
        if not is_known:
            weights = torch.ones_like(weights)
        random = torch_rng(client.seed, "generated")
        y = torch.multinomial(weights, self.samples, replacement=True, generator=random)
        noise = torch.randn(self.samples, self.noise, generator=random).to(counts.dtype)
        with torch.no_grad():
            inputs = generator_inputs(y, noise, len(counts))
            z = generator(carry["generator"], inputs, train=False).logits
        weight = torch.tensor(float(is_known), dtype=counts.dtype)
        generated = {"z": z, "y": y, "own": own, "weight": weight}
        return {**carry, self.generated.of: generated}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The model down and up, and the generator down."""
        classes, features = net.layout.shapes[head_weights(net.layout)[0]]
        hidden = (classes + self.noise + 1) * self.hidden
        generator = hidden + (self.hidden + 1) * features
        return dense_bytes(net.layout.size, cohort, rounds) + 4 * generator * cohort * rounds


def label_name(label: int) -> str:
    """Under which name a client tells how often it has a class."""
    return f"label{label}"


def send_with_counts(carry: Carry, client: Client) -> Outcome:
    """The model, and how often the client has each class."""
    told = carry["settings"]["counts"]
    counts: Tensor = carry["labels"].get("counts", torch.zeros_like(told))
    metrics = {label_name(label): float(count) for label, count in enumerate(counts)}
    return Outcome({"model": Packet(carry["local"])}, metrics)


def expected_counts(task: Task, net: Net) -> ExpectedReport:
    """The model as it was sent, and a count for each class."""
    counts = task.settings["counts"]
    assert isinstance(counts, Sequence)
    metrics = {label_name(label): (0.0, MOST_EXAMPLES) for label in range(len(counts))}
    return ExpectedReport({"model": ExpectedPacket.of(task.send["model"].values)}, metrics)
