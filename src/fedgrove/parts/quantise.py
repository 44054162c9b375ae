"""Quantisers: what a method decides to lose before it sends.

Codecs lose nothing, so all that is lossy is here, inside the method. A quantiser takes a tree and
gives one with fewer distinct values or more zeros; the codec finds those and writes few bytes.
Zeros are always +0.0. Only floating-point leaves change. :func:`feedback` keeps what was left out,
for the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .. import trees
from ..core import ExpectedPacket
from ..errors import InputError, check, unknown
from ..renamed import find_old_names
from ..trees import Tree
from .mask import best

WIDTHS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Scope = Literal["model", "layer"]
"""What a quantiser looks at as one vector: the whole tree, or each layer by itself."""


class Quantiser(Protocol):
    """A lossy decision on a tree; ``draw`` is where its randomness comes from, if it has any."""

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree that will be sent."""
        ...


def feedback(
    quantiser: Quantiser,
    tree: Mapping[str, Tensor],
    left: Mapping[str, Tensor] | None,
    draw: torch.Generator | None = None,
) -> tuple[Tree, Tree]:
    r"""Quantise an update with error feedback: what is sent, and the error that is left out.

    :math:`q_t = Q(x_t + e_t),\; e_{t+1} = x_t + e_t - q_t` (Seide et al. 2014; Karimireddy et al.
    2019, Alg. 2), so that :math:`\sum_t q_t + e_T = \sum_t x_t`.

    Args:
        quantiser: Q.
        tree: The update, x.
        left: The error that the last call returned, e; None: nothing yet.
        draw: The randomness of the quantiser, if it draws.

    Returns:
        What is sent, q, and the error to give to the next call.

    >>> sent, left = feedback(TopK(0.5), {"w": torch.tensor([3.0, 1.0])}, None)
    >>> sent["w"], left["w"]
    (tensor([3., 0.]), tensor([0., 1.]))
    """
    errors = {} if left is None else left
    whole: Tree = {}
    for name, value in tree.items():
        if name in errors:
            value = value + errors[name]
        whole[name] = value
    sent = quantiser(whole, draw)
    new_errors: Tree = {}
    for name, value in whole.items():
        # Other leaves are sent as they are: no error.
        if value.is_floating_point():
            # A quantiser may send a narrower dtype; the error is kept in the tree's own.
            new_errors[name] = value - sent[name].to(value.dtype)
    return sent, new_errors


@dataclass(frozen=True)
class Half:
    """Sixteen-bit floats, rounded to nearest; the leaves change their dtype.

    Relative error at most 2^-11 (float16, in its normal range) or 2^-8 (bfloat16).
    """

    kind: str = "float16"

    def __post_init__(self) -> None:
        if self.kind not in WIDTHS:
            raise unknown("sixteen-bit float", self.kind, WIDTHS)

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree in sixteen bits."""
        return _map_floats(tree, lambda x: x.to(WIDTHS[self.kind]))

    def form(self, tree: Mapping[str, Tensor]) -> ExpectedPacket:
        """Return the form of a packet quantised to sixteen bits."""
        tensors = {}
        for name, leaf in tree.items():
            dtype = WIDTHS[self.kind] if leaf.is_floating_point() else leaf.dtype
            tensors[name] = (dtype, tuple(leaf.shape))
        return ExpectedPacket(tensors)


@dataclass(frozen=True)
class UniformQuantiser:
    r"""A symmetric grid of :math:`2^b - 1` levels per layer, 0 among them.

    :math:`q = s \lfloor x / s + u \rfloor,\; s = \max|x| / (2^{b-1} - 1)`, with u uniform in [0, 1)
    (stochastic rounding: unbiased, error under s; Alistarh et al. 2017) or u = 1/2 (nearest: error
    at most s/2). b -> ``bits``.

    >>> UniformQuantiser(bits=2, stochastic=False)({"w": torch.tensor([1.0, 0.4, -0.6])})["w"]
    tensor([ 1.,  0., -1.])
    """

    bits: int = 8
    stochastic: bool = True

    def __post_init__(self) -> None:
        check(2 <= self.bits <= 16, "bits", self.bits, "in 2..16")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree on its grids."""
        return _map_floats(tree, lambda x: self._layer(x, draw))

    def _layer(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        """Quantise one layer of an update to evenly spaced levels."""
        levels = (1 << (self.bits - 1)) - 1
        step = x.abs().max().double() / levels
        # Nothing to round, and no division by 0. No number is drawn for such a layer.
        if step == 0:
            return torch.zeros_like(x)
        u: float | Tensor = 0.5
        if self.stochastic:
            u = draw_uniform(x, draw)
        # In double precision: a rounding of x / s above its exact value would leave the grid's end
        # or bias the draw.
        return (torch.floor(x.double() / step + u).clamp(-levels, levels) * step).to(x.dtype)


@dataclass(frozen=True)
class TopK:
    """The share ``density`` of each layer with the largest magnitudes, at least one; the rest is 0.

    Ties go to the first. Among all trees of that density this is the nearest:
    ||q - x||^2 <= (1 - density) ||x||^2.
    """

    density: float = 0.1

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree with the small values set to 0."""
        return _map_floats(tree, self._layer)

    def _layer(self, x: Tensor) -> Tensor:
        """Keep the largest values of one layer of an update."""
        kept = max(1, round(self.density * x.numel()))
        return trees.where(largest(x, kept), x)


@dataclass(frozen=True)
class Sign:
    r"""The sign of each value times the layer's mean magnitude.

    :math:`q = \frac{\|x\|_1}{d}\,\mathrm{sign}(x)`: EF-signSGD (Karimireddy et al. 2019). Biased,
    so use it with :func:`feedback`. The sign of 0 is 0.
    """

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of signs."""
        return _map_floats(tree, self._layer)

    def _layer(self, x: Tensor) -> Tensor:
        """Quantise one layer of an update to signs times a magnitude."""
        # The mean in double precision: in the layer's own, a sum of many values would lose digits.
        return x.sign() * x.double().abs().mean().to(x.dtype)


@dataclass(frozen=True)
class Ternary:
    r"""Each value becomes -m, 0 or m, unbiased.

    :math:`q = m\,\mathrm{sign}(x)\,b,\; P(b=1) = |x|/m,\; m = \max|x|`: TernGrad (Wen et al. 2017),
    without its clipping.
    """

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of three values per layer."""
        return _map_floats(tree, lambda x: self._layer(x, draw))

    def _layer(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        """Quantise one layer of an update to three values, without bias."""
        m = x.abs().max()
        # u < |x| / m, multiplied by m: a layer of zeros needs no division. A strict comparison and
        # u < 1: a value of 0 stays 0, and the largest is always kept.
        b = draw_uniform(x, draw) * m.double() < x.abs().double()
        return torch.where(b, x.sign() * m, 0.0)


# ---- shared --------------------------------------------------------------------------------------


def largest(x: Tensor, n: int) -> Tensor:
    """Return where the ``n`` largest magnitudes of an update are; of equal ones the first."""
    return best(x.detach().abs().reshape(-1), n).reshape(x.shape)


def check_scope(scope: str) -> None:
    """Refuse a quantiser's scope that is not a :data:`Scope`."""
    check(scope in ("model", "layer"), "scope", scope, "'model' or 'layer'")


def map_scope(
    tree: Mapping[str, Tensor],
    scope: Scope,
    f: Callable[[Tensor], Tensor],
    has_plain_zeros: bool = False,
) -> Tree:
    """Quantise each floating-point leaf with ``f``, or all of them as one vector.

    Counters and empty leaves stay as they are; zeros come out as +0.0.

    Args:
        tree: The tree.
        scope: "layer": ``f`` is called for each leaf; "model": once, for one vector of all leaves.
        f: Quantises a tensor.
        has_plain_zeros: Whether all zeros of ``f`` are +0.0 already.

    >>> tree = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    >>> map_scope(tree, "model", lambda x: x / x.max())
    {'a': tensor([0.2500, 0.5000]), 'b': tensor([1.])}
    """
    if scope == "layer":
        return _map_floats(tree, f, has_plain_zeros)
    floats = {name: value for name, value in tree.items() if value.is_floating_point()}
    if not trees.size(floats):
        return dict(tree)
    mapped = _map_floats({"all": trees.flatten(floats)}, f, has_plain_zeros)
    return {**tree, **trees.unflatten(mapped["all"], floats)}


def _map_floats(
    tree: Mapping[str, Tensor], f: Callable[[Tensor], Tensor], has_plain_zeros: bool = False
) -> Tree:
    """Apply ``f`` to floating-point leaves; counters and empty leaves stay as they are.

    Zeros come out as +0.0.
    """
    mapped = {}
    # In the tree's order, which is also the order of random draws.
    for name, value in tree.items():
        if value.is_floating_point() and value.numel():
            value = f(value)
            if not has_plain_zeros:
                # -0.0 + 0.0 is 0.0, and no other number changes. A small negative value that is
                # rounded to 0 keeps its sign, which a lossless codec would have to send.
                value = value + 0.0
        mapped[name] = value
    return mapped


def draw_uniform(x: Tensor, draw: torch.Generator | None) -> Tensor:
    """Draw a quantiser's random number in [0, 1) for each value of ``x``."""
    if draw is None:
        raise InputError(
            "a random quantiser was given no generator; "
            "pass draw=seeds.torch_rng(seed, round, client)."
        )
    return torch.rand(x.shape, generator=draw, dtype=torch.float64)


__getattr__ = find_old_names(__name__)
