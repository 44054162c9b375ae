r"""FedGen: a generator on the server produces features of classes for clients (Zhu, Hong & Zhou,
"Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; h the last linear layer of w, G the generator::

    c_k  = how often client k has each class                             -> LabelCounts
    w_k  = E epochs of min CE(w; D_k) + alpha_t CE(h(G(y)), y) from w    -> Train(GeneratedFeatures)
    w    = sum_k n_k w_k / sum_k n_k                                     -> WeightedMean
    G    = some steps of min CE(h(G(y)), y), y by sum_k c_k              -> GeneratorTraining

A client draws ``samples`` features once per round, with the class frequencies of all clients
together. In the first round the generator is not trained yet, and the term is 0; then
alpha_t = 10 * .98^t, as in the authors' code. The model and G are sent down, the model and c_k are
sent up. With alpha = 0 this is FedAvg.

- Shared: the model, and a generator of features that the server trains.
- A client uses: the shared model.
- Bytes in the paper: (8 d + 4 d_gen) M T.
- Secure aggregation: no; clients report how many examples of each label they have, and the server
  stores these counts per client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import trees
from ..core import (
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
    Server,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import UnfitError, check
from ..nets import Net
from ..nets.layout import Layout
from ..parts.common import CommonParts
from ..parts.label_counts import LabelCounts
from ..parts.local import Adam
from ..parts.objective import NOT_SETTABLE, Loss, Objective
from ..parts.one_model import dense_bytes
from ..problems import check_has_classes, restrict_outputs
from ..seeds import torch_rng
from ..trees import Tree
from ..wire.codec import Codec, Dense

if TYPE_CHECKING:
    from ..nets import Output


# ---- a generator of features ---------------------------------------------------------------------


class FeatureGenerator(nn.Module):
    """A class and noise in, features out: two linear layers with a ReLU after each.

    The second ReLU is there because the features that a network gives its last layer have mostly
    passed one themselves.
    """

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(classes + noise, hidden)
        self.features = nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        """FedGen: features (n, features) of inputs (n, classes + noise)."""
        features: Tensor = F.relu(self.features(F.relu(self.hidden(x))))
        return features


def generator_inputs(y: Tensor, noise: Tensor, classes: int) -> Tensor:
    """FedGen: the input of the generator: the class as one of ``classes`` columns, then noise."""
    is_class = torch.arange(classes, device=y.device) == y.unsqueeze(1)
    return torch.cat([is_class.to(noise.dtype), noise], 1)


# ---- the last layer on its own -------------------------------------------------------------------


def head_weights(layout: Layout) -> tuple[str, str | None]:
    """FedGen: the names of weight and bias of the last linear layer, which must exist."""
    head = layout.head_layer
    if head is None or not head.weights:
        raise UnfitError(
            "features are generated for its last linear layer, and it has none that is trained. "
            "Use a net that ends in a linear layer."
        )
    return head.weights[0], head.bias


def head_logits(layout: Layout, params: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """FedGen: what the last linear layer makes of features."""
    weight, bias = head_weights(layout)
    return F.linear(features, params[weight], None if bias is None else params[bias])


def check_ends_in_head(net: Net, params: Tree) -> None:
    """FedGen: refuse a network that does something more after its last linear layer."""
    like = next(iter(params.values()))
    with torch.no_grad():
        out = net(params, torch.zeros((1, *net.shape), dtype=like.dtype), train=False)
        head_weights(net.layout)
        assert out.features is not None
        logits = head_logits(net.layout, params, out.features)
    if logits.shape != out.logits.shape or not torch.allclose(logits, out.logits, atol=1e-5):
        raise UnfitError(
            "its outputs are not those of its last linear layer, for which features are generated. "
            "Use a net that ends in a linear layer."
        )


# ---- on a client ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedFeatures(Objective):
    r"""FedGen's term: the client's last layer must know generated features for what they are.

    :math:`\alpha_t\, \mathbb{E}_{y \sim \hat p(y),\, z \sim G(z | y)}\, \ell(h(z), y)` with
    :math:`\alpha_t = \alpha\, \delta^t` in round :math:`t` (Zhu, Hong & Zhou 2021, Eq. 5; the paper
    has one :math:`\alpha`, the numbers are of the authors' code, :math:`\delta` -> ``decay``).
    :math:`h` -> the last linear layer of ``params``; :math:`z`, :math:`y` -> ``carry[of]``, drawn
    once a round, with ``own``, the classes that count, and ``weight``, 0 where the generator is not
    trained yet.
    """

    is_loss: ClassVar[bool] = False
    alpha: float = 10.0
    decay: float = 0.98
    of: str = field(default="generated", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.alpha >= 0, "alpha", self.alpha, "0 or more")
        check(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over what was generated."""
        generated = carry[self.of]
        logits = head_logits(out.net.layout, params, generated["z"])
        logits = restrict_outputs(logits, {"allowed": generated["own"]})
        losses = F.cross_entropy(logits, generated["y"], reduction="none")
        alpha = self.alpha * self.decay ** carry["settings"]["round"]
        return alpha * generated["weight"] * losses.mean(), {}


# ---- on the server -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratorTraining:
    r"""How the server trains a generator against the shared last layer.

    .. math:: \min_G\; \mathbb{E}_{y \sim \hat p(y),\, \epsilon}\, \ell(h(G(y, \epsilon)), y)
        + \lambda \exp(-\mathrm{mean}_{ij}\, |z_i - z_j|\, |\epsilon_i - \epsilon_j|)

    (Zhu et al. 2021, Eq. 4; the second term, which keeps G from overlooking its noise, is of the
    authors' code, :func:`sameness`.) The paper's :math:`h` is the mean of
    the clients' logits; their last layers are linear, so that this is the logit of the mean layer.
    """

    steps: int = 50
    batch: int = 64
    diversity: float = 1.0
    optimiser: Adam = Adam(1e-3)

    def __post_init__(self) -> None:
        check(self.steps >= 0, "steps", self.steps, "0 or more")
        check(self.batch >= 2, "batch", self.batch, "2 or more")
        check(self.diversity >= 0, "diversity", self.diversity, "0 or more")

    def __call__(
        self, net: Net, weights: Tree, layout: Layout, model: Tree, shares: Tensor, seed: int
    ) -> Tree:
        """The generator after its steps; ``net`` runs it, ``layout`` and ``model`` are the head's.

        ``shares`` (outputs,) are how often each class is drawn.
        """
        random = torch_rng(seed, "generator")
        classes = len(shares)
        params = trees.pick(weights, net.layout.params)
        w = trees.flatten(params)
        noise_size = net.shape[0] - classes
        state = self.optimiser.init(w)
        for _ in range(self.steps):
            y = torch.multinomial(shares, self.batch, replacement=True, generator=random)
            noise = torch.randn(self.batch, noise_size, generator=random).to(w.dtype)
            # A new leaf in each step, or the graphs of all steps would stay connected.
            leaf = w.detach().requires_grad_()
            z = net(trees.unflatten(leaf, params), generator_inputs(y, noise, classes), True).logits
            loss = F.cross_entropy(head_logits(layout, model, z), y)
            loss = loss + self.diversity * sameness(z, noise)
            (g,) = torch.autograd.grad(loss, leaf)
            w, state = self.optimiser.step(w, g, state, self.optimiser.lr)
        # Copies, so that no leaf of the state is a view of another tensor's memory.
        return trees.map(Tensor.clone, trees.unflatten(w, params))


def sameness(z: Tensor, noise: Tensor) -> Tensor:
    """FedGen: near 1 if generated features are alike though their noise is not; else towards 0.

    Distances of features are mean differences, those of noise mean squares, as in the authors'
    code.

    >>> noise = torch.tensor([[0.0], [2.0]])
    >>> sameness(torch.tensor([[0.0], [0.5]]), noise)  # exp(-(.5 * 4 + .5 * 4) / 4)
    tensor(0.3679)
    """
    apart = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
    noise_apart = ((noise.unsqueeze(0) - noise.unsqueeze(1)) ** 2).mean(2)
    return torch.exp(-(apart * noise_apart).mean())


# ---- the method ----------------------------------------------------------------------------------


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
    """One model for all, and a generator of features that clients learn from, too."""

    generated: GeneratedFeatures = GeneratedFeatures()
    """The loss term for generated features; its weight in round t is ``alpha`` times ``decay`` to
    the power of t."""
    training: GeneratorTraining = GeneratorTraining()
    """How the server trains the generator."""
    samples: int = 256
    """Number of features that a client draws in a round; every step uses all of them."""
    noise: int = 32
    """Number of random inputs of the generator."""
    hidden: int = 256
    """Number of hidden units of the generator."""
    _: KW_ONLY
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.samples >= 1, "samples", self.samples, "1 or more")
        check(self.noise >= 1, "noise", self.noise, "1 or more")
        check(self.hidden >= 1, "hidden", self.hidden, "1 or more")

    def nets(self, net: Net) -> Mapping[str, Net]:
        """FedGen: the generator of features for the last layer of this net."""
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
        """The cohort trains, with the generator next to the model."""
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
        """FedGen: Alg. 1, the generator's steps."""
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
            # Any classes will do: their term has weight 0 below.
            weights = torch.ones_like(weights)
        # From the client's seed: what is drawn does not depend on the engine.
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
    """FedGen: under which name a client reports how often it has a class."""
    return f"label{label}"


def send_with_counts(carry: Carry, client: Client) -> Outcome:
    """FedGen: the client sends the model, and how often it has each class."""
    totals = carry["settings"]["counts"]
    # A client without training data has no batch to count.
    counts: Tensor = carry["labels"].get("counts", torch.zeros_like(totals))
    metrics = {label_name(label): float(count) for label, count in enumerate(counts)}
    return Outcome({"model": Packet(carry["local"])}, metrics)


def expected_counts(task: Task, net: Net) -> ExpectedReport:
    """FedGen: the model as it was sent, and a count for each class."""
    counts = task.settings["counts"]
    assert isinstance(counts, Sequence)
    metrics = dict.fromkeys(map(label_name, range(len(counts))), (0.0, MOST_EXAMPLES))
    return ExpectedReport({"model": ExpectedPacket.of(task.send["model"].values)}, metrics)
