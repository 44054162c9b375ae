"""Sparse ternary updates: the largest changes, each as a sign times one magnitude.

What is left out comes back with the next update (:func:`fedgrove.parts.quantise.feedback`). What
such an update costs on the wire is the codec's business; :func:`golomb_bytes` is what its paper
counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import trees
from ...errors import check
from ...parts.mask import places_of_best
from ...parts.quantise import Scope, check_scope, largest, map_scope
from ...trees import Tree


@dataclass(frozen=True)
class SparseTernary:
    r"""The share ``share`` of largest magnitudes, all replaced by their mean magnitude.

    :math:`q = \mu\,\mathrm{sign}(x)` on the :math:`k = \max(1, p\,n)` largest,
    :math:`\mu = \frac1k \sum |x|` over them, 0 elsewhere (Sattler et al. 2019, Alg. 1). p ->
    ``share``, at least one value is kept, ties go to the first. ``scope`` is what n counts: the
    whole tree as one vector, or each layer by itself. Without ``ternary`` the largest keep their
    values; with a share of 1 nothing is lost then (:attr:`is_off`).

    >>> coder = SparseTernary(share=0.5)
    >>> coder({"w": torch.tensor([3.0, -0.1, 0.2]), "b": torch.tensor([-5.0])})
    {'w': tensor([4., 0., 0.]), 'b': tensor([-4.])}
    """

    share: float = 0.01
    scope: Scope = "model"
    ternary: bool = True

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")
        check_scope(self.scope)

    @property
    def is_off(self) -> bool:
        """STC: whether the sparse ternary code changes nothing."""
        return self.share == 1 and not self.ternary

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree that will be sent; nothing is random."""
        # Only what is kept can be -0.0: it is looked at alone.
        return map_scope(tree, self.scope, self._vector, has_plain_zeros=True)

    def _vector(self, x: Tensor) -> Tensor:
        count = max(1, round(self.share * x.numel()))
        if not self.ternary:
            return trees.where(largest(x, count), x) + 0.0
        numpy_has_them = trees.are_plain(x) and x.dtype in (torch.float32, torch.float64)
        if numpy_has_them and count < x.numel():
            return _largest_as_signs(x, count)
        # Few are kept: those alone are looked at.
        places = trees.find_true(largest(x, count))
        values = x.reshape(-1).index_select(0, places)
        # In double precision: in the vector's own, a sum of many values would lose digits.
        mean = values.double().abs().mean().to(x.dtype)
        signs = values.sign() * mean + 0.0
        coded = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
        return coded.index_copy_(0, places, signs).view(x.shape)


def _largest_as_signs(x: Tensor, count: int) -> Tensor:
    """The largest magnitudes, but not all, as signs times their mean: in numpy.

    Layers are many and mostly small: what a call costs is what counts.
    """
    numbers = x.reshape(-1).numpy()
    places = places_of_best(np.abs(numbers), count)
    values = numbers[places]
    # The mean in torch, as everywhere else: its bits depend on the order of the sum.
    mean = torch.from_numpy(np.abs(values).astype(np.float64)).mean().item()
    coded = np.zeros(len(numbers), numbers.dtype)
    # A value of 0 next to one that is infinite has no number to stand for it.
    with np.errstate(invalid="ignore"):
        coded[places] = np.sign(values) * numbers.dtype.type(mean) + 0.0
    return torch.from_numpy(coded).view(x.shape)


def coded(share: float, change: Mapping[str, Tensor], mask: Mapping[str, Tensor] | None) -> Tree:
    """STC: the largest values of an update, each as a sign times one magnitude per layer.

    Under a mask the share is of what the mask keeps, and the rest is 0.

    >>> change = {"w": torch.tensor([9.0, 3.0, -1.0])}
    >>> coded(0.5, change, {"w": torch.tensor([False, True, True])})
    {'w': tensor([0., 3., 0.])}
    """
    coder = SparseTernary(share, "layer")
    if not mask:
        return coder(change)
    inside = {}
    for name, leaf in change.items():
        inside[name] = trees.select(leaf, mask[name]) if name in mask else leaf
    sent = coder(inside)
    for name, leaf in change.items():
        if name in mask:
            wide = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
            wide.view(-1).index_copy_(0, trees.find_true(mask[name]), sent[name])
            sent[name] = wide
    return sent


def golomb_bytes(numbers: int, share: float) -> float:
    r"""STC: what the paper counts for a ternary update of n numbers (Sattler et al.).

    Each of :math:`k = pn` values takes a sign and its distance from the one before, Golomb coded:
    :math:`b = b^* + \frac{1}{1 - (1-p)^{2^{b^*}}}` bits, :math:`b^* = 1 + \lfloor \log_2
    \frac{\log(\varphi - 1)}{\log(1-p)} \rfloor`, :math:`\varphi` the golden ratio; four bytes more
    for the magnitude. With p = 1 there are no distances.
    """
    kept = max(1, round(share * numbers))
    if share == 1:
        return kept / 8 + 4
    golden = (math.sqrt(5) + 1) / 2
    exponent = 1 + math.floor(math.log2(math.log(golden - 1) / math.log(1 - share)))
    # Above a share of .6 the formula gives less than no bits; a distance takes one at least.
    exponent = max(exponent, 0)
    distance: float = exponent + 1 / (1 - (1 - share) ** (2**exponent))
    return kept * (distance + 1) / 8 + 4
