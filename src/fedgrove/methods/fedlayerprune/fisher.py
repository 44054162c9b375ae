"""What gradients on one mini-batch say: how much a weight matters, and how much a layer does.

Each part is a pure function of tensors that :class:`~fedgrove.core.Measure` runs on the client
after training. Per-sample gradients are taken for a few examples at once, the number that a bounded
memory holds, and one after the other where a network cannot do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from ... import trees
from ...core import GRADIENT_PASSES, Batch, Carry
from ...errors import check
from ...nets import Net
from ...parts.gradient import gradient, loss_at
from ...parts.objective import Objective
from ...seeds import numpy_rng
from ...trees import Tree

HELD_NUMBERS = 1 << 22
"""Numbers that the gradients of some examples of a client may take at once: 16 MiB in float32."""

Measured = Callable[[Net, Tree, Batch, Carry], Tree]


@dataclass(frozen=True)
class Fisher:
    r"""FedLayerPrune, Eq. 9: the diagonal of the Fisher information on one mini-batch.

    :math:`\hat I_i = \frac{1}{n}\sum_{x,y} (\partial \ell(w; x, y) / \partial w_i)^2`, smoothed
    over the rounds a client takes part in (Eq. 10): :math:`I \leftarrow \rho I + (1 - \rho)\hat I`.
    :math:`\rho` -> ``smoothing``. With ``per_sample=False`` it is the square of the mini-batch's
    gradient, which is what the paper's "one additional backward pass" gives.

    The average starts at 0, so that no estimate weighs more than a later one. After n estimates its
    weights sum to :math:`1 - \rho^n`; :meth:`value` divides by that, so that clients which took
    part more or less often can be compared.
    """

    smoothing: float = 0.9
    per_sample: bool = True

    def __post_init__(self) -> None:
        check(0 <= self.smoothing < 1, "smoothing", self.smoothing, "in [0, 1)")

    def of(self, objective: Objective) -> Measured:
        """FedLayerPrune: the Fisher information of one mini-batch, by prunable weight.

        It is the mean of squared gradients.
        """
        if self.per_sample:
            return _SquaredPerSample(objective)
        return _SquaredOfBatch(objective)

    def smoothed(self, before: Mapping[str, Tensor] | None, now: Mapping[str, Tensor]) -> Tree:
        """FedLayerPrune: Eq. 10: the moving average with one more estimate.

        >>> Fisher(0.9).smoothed({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])})["w"]
        tensor([1.1000])
        """
        rho = self.smoothing
        if before is None:
            return trees.map(lambda new: (1 - rho) * new, now)
        return trees.map(lambda old, new: rho * old + (1 - rho) * new, before, now)

    def value(self, average: Mapping[str, Tensor], estimates: int) -> Tree:
        """FedLayerPrune: the moving average of ``count`` estimates, with weights that sum to 1.

        >>> Fisher(0.9).value({"w": torch.tensor([0.1])}, estimates=1)["w"]
        tensor([1.])
        """
        return trees.map(lambda sum_: sum_ / (1 - self.smoothing**estimates), average)


@dataclass(frozen=True)
class _SquaredPerSample:
    objective: Objective
    passes: ClassVar[int] = GRADIENT_PASSES

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        total = trees.map(torch.zeros_like, trees.pick(params, net.layout.prunable))
        for weight, own in per_sample(self.objective, net, params, batch, carry):
            total = trees.map(lambda sum_, g, w=weight: sum_ + _summed(w, g * g), total, own)
        return trees.map(lambda sum_: sum_ / batch.weight.sum().clamp(min=1), total)


@dataclass(frozen=True)
class _SquaredOfBatch:
    objective: Objective
    passes: ClassVar[int] = GRADIENT_PASSES

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        weights = trees.pick(params, net.layout.prunable)
        loss = loss_at(self.objective, net, params, batch, carry)
        return trees.map(torch.square, gradient(loss, weights))


def per_sample(
    objective: Objective, net: Net, params: Tree, batch: Batch, carry: Carry
) -> Iterator[tuple[Tensor, Tree]]:
    """FedLayerPrune: weights of some examples, and their gradients by prunable weight.

    A weight is 0 for padding; the gradients have a row per example.
    """
    weights = trees.pick(params, net.layout.prunable)

    def of_one(x: Tensor, y: Tensor, weight: Tensor, index: Tensor) -> Tree:
        # Of weight 1: the gradient of padding is finite, and its own weight then leaves it out.
        one = Batch(x[None], y[None], torch.ones_like(weight)[None], index[None], batch.position)
        return gradient(loss_at(objective, net, params, one, carry), weights)

    at_once = max(1, HELD_NUMBERS // max(1, trees.size(weights)))
    for begin in range(0, batch.x.shape[0], at_once):
        rows = slice(begin, begin + at_once)
        weight = batch.weight[rows]
        yield weight, _of_each(of_one, batch.x[rows], batch.y[rows], weight, batch.index[rows])


def _of_each(f: Callable[..., Tree], *examples: Tensor) -> Tree:
    """``f`` of every example, in rows."""
    try:
        found: Tree = vmap(f)(*examples)
        return found
    except Exception as error:
        # A forward pass that branches on data cannot be mapped over examples.
        try:
            each = list(map(f, *examples))
        except Exception:
            # What both raise is no fault of the mapping.
            raise error from None
        return trees.map(lambda *rows: torch.stack(rows), *each)


def _summed(weight: Tensor, rows: Tensor) -> Tensor:
    """The weighted sum over rows."""
    # No matrix product, which some devices round to fewer bits.
    return (weight.view(-1, *[1] * (rows.dim() - 1)) * rows).sum(0)


# ---- how strong a layer's gradients are ----------------------------------------------------------


@dataclass(frozen=True)
class GradientVariance:
    r"""FedLayerPrune, Eq. 8, right: the variance of a layer's gradients.

    :math:`s_l = \frac{1}{d_l} \sum_{i \in l} \mathrm{Var}_{x,y}\,(\partial \ell / \partial w_i)`,
    over the examples of one mini-batch.
    """

    def of(self, objective: Objective) -> Measured:
        """FedLayerPrune: by layer: the mean square, and the squared mean, of its gradients."""
        return _Moments(objective)

    def value(self, measured: Tree) -> dict[str, float]:
        """FedLayerPrune: the variance by layer; rounding may leave it just below 0."""
        variances = {}
        for name, (mean_square, squared_mean) in measured.items():
            variances[name] = max(0.0, float(mean_square - squared_mean))
        return variances


@dataclass(frozen=True)
class _Moments:
    objective: Objective
    passes: ClassVar[int] = GRADIENT_PASSES

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        weights = trees.pick(params, net.layout.prunable)
        total = trees.map(torch.zeros_like, weights)
        squares = trees.map(torch.zeros_like, weights)
        for weight, own in per_sample(self.objective, net, params, batch, carry):
            total = trees.map(lambda sum_, g, w=weight: sum_ + _summed(w, g), total, own)
            squares = trees.map(lambda sum_, g, w=weight: sum_ + _summed(w, g * g), squares, own)
        examples = batch.weight.sum().clamp(min=1)

        def moments(sum_: Tensor, square: Tensor) -> Tensor:
            return torch.stack([(square / examples).mean(), (sum_ / examples).square().mean()])

        return trees.map(moments, total, squares)


@dataclass(frozen=True)
class HessianTrace:
    r"""FedLayerPrune, Eq. 8, left: the trace of a layer's block of the Hessian, by Hutchinson.

    :math:`\mathrm{tr}\,H^{(l)} \approx \frac{1}{m} \sum_v v_l^\top (H v)_l` with :math:`m` vectors
    of random signs (Hutchinson 1990), on one mini-batch. :math:`m` -> ``draws``. Negative estimates
    count as 0. Each draw costs as much as three gradients, whatever the number of layers.
    """

    draws: int = 4

    def __post_init__(self) -> None:
        check(self.draws >= 1, "draws", self.draws, "1 or more")

    def of(self, objective: Objective) -> Measured:
        """FedLayerPrune: by layer: the estimate of the trace."""
        return _Hutchinson(objective, self.draws)

    def value(self, measured: Tree) -> dict[str, float]:
        """FedLayerPrune: the estimate by layer."""
        return {name: max(0.0, float(trace)) for name, trace in measured.items()}


@dataclass(frozen=True)
class _Hutchinson:
    objective: Objective
    draws: int

    @property
    def passes(self) -> int:
        """FedLayerPrune: a gradient of a gradient for each draw."""
        return GRADIENT_PASSES * GRADIENT_PASSES * self.draws

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        weights = trees.pick(params, net.layout.prunable)
        loss = loss_at(self.objective, net, params, batch, carry)
        total: Tree = {}
        for draw in range(self.draws):
            direction = {k: signs_like(v, draw, k) for k, v in weights.items()}
            curvature = gradient(_slope(loss, direction), weights)
            trace = trees.map(lambda hv, v: (hv * v).sum(), curvature, direction)
            total = trees.map(torch.add, total, trace) if total else trace
        return trees.map(lambda sum_: sum_ / self.draws, total)


def _slope(loss: Callable[[Tree], Tensor], direction: Tree) -> Callable[[Tree], Tensor]:
    """The derivative of the loss in a direction, v'g; its own gradient is Hv.

    Twice backwards, which more layers can do than once forwards and once backwards.
    """

    def slope(weights: Tree) -> Tensor:
        products = trees.map(lambda g, v: (g * v).sum(), gradient(loss, weights), direction)
        return torch.stack(list(products.values())).sum()

    return slope


def signs_like(weight: Tensor, draw: int, name: str) -> Tensor:
    """FedLayerPrune: random signs in the shape of a weight, from draw and name.

    Equal draws and names give equal signs.
    """
    # numpy's numbers, as torch's would differ where an engine maps this over many clients.
    bits = numpy_rng(draw, name).integers(0, 2, size=tuple(weight.shape))
    return torch.from_numpy(2 * bits - 1).to(device=weight.device, dtype=weight.dtype)
