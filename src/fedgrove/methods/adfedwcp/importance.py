r"""How much each layer of a network matters: by imprinting, by its weights, or by its gradient.

Imprinting (AdFedWCP, section 4.3) trains nothing: after every layer the activations are pooled to a
short vector; the mean vector of a class is its prototype; the share of examples that are nearest to
the prototype of their own class is the layer's accuracy. What a layer adds to the accuracy of the
layer before is its importance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import trees
from ...core import Batch, Carry
from ...nets import Net
from ...nets.layout import Layout
from ...problems import CLASSES
from ...trees import Tree

# ---- by weights, or by gradients -----------------------------------------------------------------


def by_magnitude(params: Mapping[str, Tensor], layers: Sequence[Sequence[str]]) -> list[float]:
    r"""AdFedWCP: the importance of each layer as the mean of :math:`|w|` over its weights.

    ``layers`` has the names of the weights of each layer.

    >>> by_magnitude({"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([-1.0])}, [["a"], ["b"]])
    [2.0, 1.0]
    """
    scores = []
    for names in layers:
        weights = trees.flatten(trees.pick(params, names))
        scores.append(float(weights.double().abs().mean()))
    return scores


def by_gradient(
    params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], layers: Sequence[Sequence[str]]
) -> list[float]:
    r"""AdFedWCP: the mean of :math:`|w\,g|` of each layer: how much w matters to the loss.

    This is a first-order estimate.

    Unlike :math:`|g|` alone it does not change where one layer is scaled up and the next one down,
    which leaves a ReLU network as it is.

    >>> w = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([0.5])}
    >>> g = {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([-4.0])}
    >>> by_gradient(w, g, [["a"], ["b"]])
    [4.0, 2.0]
    """
    products = {name: params[name] * slope for name, slope in gradient.items()}
    return by_magnitude(products, layers)


def weighed(scores: Sequence[float]) -> list[float]:
    """AdFedWCP: the layers' scores as weights that sum to 1; equal weights if all scores are 0.

    >>> [round(omega, 4) for omega in weighed([2.0, 1.0])]
    [0.6225, 0.3775]
    """
    # As shares of the largest, or the scale of the weights would decide how sharp the softmax is.
    largest = max(scores)
    shares = torch.tensor(scores, dtype=torch.float64) / (largest or 1.0)
    omega: list[float] = torch.softmax(shares, 0).tolist()
    return omega


# ---- by imprinting -------------------------------------------------------------------------------


MOST_NUMBERS = 100
"""The most numbers per example that are kept of a layer, N_emb."""


def layers_of(layout: Layout) -> tuple[str, ...]:
    """AdFedWCP: the layers that have weights to cluster, in order of execution."""
    return tuple(layer.name for layer in layout.layers if layer.weights and layer.activations)


@dataclass(frozen=True)
class Prototypes:
    """What Measure sums first: by layer, the embeddings of each class, and its examples."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The sums over one batch."""
        embeddings, logits = embedded(net, params, batch)
        own_class = F.one_hot(batch.y, logits.shape[1]).to(logits.dtype) * batch.weight[:, None]
        sums = {name: own_class.T @ embedding for name, embedding in embeddings.items()}
        return {**sums, "examples": own_class.sum(0)}


@dataclass(frozen=True)
class Hits:
    """What Measure sums next: examples nearest to their own class, by layer and by the network.

    ``prototypes`` names what :class:`Prototypes` measured.
    """

    prototypes: str = "prototypes"

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The sums over one batch; the network's own under "output", all examples under "all"."""
        embeddings, logits = embedded(net, params, batch)
        examples = carry[self.prototypes]["examples"]
        there = examples > 0
        hits: Tree = {}
        for name, embedding in embeddings.items():
            means = carry[self.prototypes][name] / examples.clamp(min=1)[:, None]
            # A class without examples has no prototype, and is nearest to no example.
            nearness = (embedding @ means.T).masked_fill(~there, -torch.inf)
            hits[name] = _sum_right(nearness, batch)
        hits["output"] = _sum_right(logits, batch)
        hits["all"] = batch.weight.sum()
        return hits


@dataclass(frozen=True)
class Right:
    """What Measure sums where layers are weighed otherwise: the network's right answers alone."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """As :class:`Hits` names them; where targets are not classes, only how many there are."""
        counted = {"all": batch.weight.sum()}
        if net.problem.kind != CLASSES.kind:
            return counted
        logits = net(params, batch.x, train=False).logits
        return {**counted, "output": _sum_right(logits, batch)}


def _sum_right(nearness: Tensor, batch: Batch) -> Tensor:
    return ((nearness.argmax(1) == batch.y) * batch.weight).sum()


def embedded(net: Net, params: Tree, batch: Batch) -> tuple[Tree, Tensor]:
    """AdFedWCP: each layer's activations as short vectors, and the network's output."""
    names = layers_of(net.layout)
    found: Tree = {}
    hooks = []
    for name in names:
        # `name=name` binds the name of this turn: a closure would see that of the last one.
        def keep(_: object, __: object, output: object, name: str = name) -> None:
            # Recurrent layers give their states along; a layer that runs twice counts once, as it
            # was the last time.
            found[name] = pooled(output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]

        hooks.append(net.module.get_submodule(name).register_forward_hook(keep))
    try:
        logits = net(params, batch.x, train=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    # In the order of the layers, not in that of their last runs.
    return trees.pick(found, names), logits


def pooled(activation: Tensor) -> Tensor:
    r"""AdFedWCP: an activation (examples, channels, ...) as about :data:`MOST_NUMBERS` numbers.

    Adaptive average pooling to d in each dimension, :math:`d = \lceil (N / C)^{1/n} \rceil` for C
    channels and n dimensions behind them (the paper has images, n = 2; signals and volumes are
    ours), N the smaller of 100 and all numbers.

    >>> pooled(torch.zeros(2, 32, 28, 28)).shape, pooled(torch.zeros(2, 84)).shape
    (torch.Size([2, 128]), torch.Size([2, 84]))
    """
    if activation.dim() <= 2:
        return activation.flatten(1)
    channels = activation.shape[1]
    room = min(MOST_NUMBERS, activation[0].numel())
    match activation.dim():
        case 3:
            return F.adaptive_avg_pool1d(activation, math.ceil(room / channels)).flatten(1)
        case 4:
            side = math.ceil(math.sqrt(room / channels))
            return F.adaptive_avg_pool2d(activation, side).flatten(1)
        case 5:
            # Less a little: the root of a cube is hardly ever a whole number in floating point.
            side = math.ceil((room / channels) ** (1 / 3) - 1e-9)
            return F.adaptive_avg_pool3d(activation, side).flatten(1)
    # Torch pools no more dimensions than these: all further ones count as one.
    return pooled(activation.flatten(4))


def imprinted(hits: Tree, layers: Sequence[str]) -> list[float]:
    r"""AdFedWCP: :math:`\omega = \mathrm{softmax}(A_j - A_{j-1})`, what each layer adds; A_0 = 0.

    >>> hits = {"a": torch.tensor(3.0), "b": torch.tensor(3.0), "all": torch.tensor(4.0)}
    >>> [round(w, 3) for w in imprinted(hits, ("a", "b"))]
    [0.679, 0.321]
    """
    right = torch.stack(list(trees.pick(hits, layers).values()))
    accuracies = right.double() / hits["all"].double()
    before = torch.cat([torch.zeros(1, dtype=torch.float64), accuracies[:-1]])
    omega: list[float] = torch.softmax(accuracies - before, 0).tolist()
    return omega


def accuracy(hits: Tree) -> float:
    """AdFedWCP: the network's share of right answers, among the sums of a client's layers."""
    return float(hits["output"] / hits["all"])
