"""Masks from scores: exactly so many weights per layer, or so many fewer and more than before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import trees
from ..errors import UnfitError, check
from ..nets.layout import Layout
from ..trees import Mask


def weights_to_prune(layout: Layout, density: float) -> tuple[str, ...]:
    """The names of a net's prunable weights; a net that has none stays dense, and is refused.

    (Not with a ``density`` of 1, which prunes nothing.)
    """
    if not layout.prunable and density < 1:
        raise UnfitError(
            "it has no weights that can be pruned, those of convolutions and of linear, recurrent "
            "and attention layers. Take a net with such layers, or a method that does not prune "
            "(fedavg, ditto)."
        )
    return layout.prunable


def all_kept(weight: Tensor) -> Tensor:
    """The mask of a layer that is not pruned."""
    return torch.ones(weight.shape, dtype=torch.bool)


def top(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> Mask:
    """Keep the ``counts[layer]`` weights of largest score in every layer; of equal ones the first.

    >>> top({"w": torch.tensor([1.0, 3.0, 2.0])}, {"w": 2})
    {'w': tensor([False,  True,  True])}
    """
    mask = {}
    for layer, score in scores.items():
        n = counts[layer]
        check(
            0 <= n <= score.numel(),
            f"the number of weights kept in {layer}",
            n,
            f"from 0 to {score.numel()}",
        )
        mask[layer] = best(score.reshape(-1), n).view(score.shape)
    return mask


def best(score: Tensor, n: int, among: Tensor | None = None) -> Tensor:
    """The ``n`` places of largest score as a mask; of equal ones the first.

    With ``among``, only places where it is true.

    >>> best(torch.tensor([1.0, 3.0, 2.0]), 1, among=torch.tensor([True, False, True]))
    tensor([False, False,  True])
    """
    if n <= 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if n >= score.numel():
        mask = torch.ones_like(score, dtype=torch.bool)
    elif among is not None and n >= trees.count(among) and _has_no_lowest(score):
        # All that are allowed; none has the score of those that are not.
        mask = among.clone()
    else:
        # A threshold, as a full sort would take twenty times as long.
        if among is not None and not score.is_floating_point():
            # Of whole numbers none is -inf.
            score = score.float()
        threshold = _threshold(score, n, among)
        inside = among
        if among is not None and float(threshold) == -torch.inf:
            # Places that are not allowed come behind all others, or are tied with the last.
            score = trees.where(among, score, -torch.inf)
            inside = None
        mask = _compared(operator.ge, score, threshold, inside)
        if trees.count(mask) > n:
            # Not topk, which decides ties as it likes: those at the threshold are taken in order,
            # which gives the same mask on every machine.
            above = _compared(operator.gt, score, threshold, inside)
            tied = mask & ~above
            room = n - trees.count(above)
            mask = above | (tied & (tied.cumsum(0) <= room))
    if among is not None:
        # Fewer than n places may be allowed, or have a score of -inf themselves.
        mask = mask & among
    return mask


def _has_no_lowest(score: Tensor) -> bool:
    """Whether no score is -inf, nor NaN."""
    return not score.is_floating_point() or float(score.min()) > -torch.inf


def _threshold(score: Tensor, n: int, among: Tensor | None) -> Tensor:
    """The n-th largest number, where only some places count; -inf if there are fewer."""
    if among is None:
        return _nth_largest(score, n)
    # Of those alone: with thousands of equal numbers a selection can take forty times as long.
    allowed = trees.chosen(score, among)
    if n > len(allowed):
        return torch.tensor(-torch.inf, dtype=score.dtype, device=score.device)
    return _nth_largest(allowed, n)


def _compared(
    compare: Callable[[Any, Any], Any], score: Tensor, threshold: Tensor, inside: Tensor | None
) -> Tensor:
    """Where scores are above a threshold, or at it too, within some places."""
    above: Tensor
    if score.device.type != "cpu" or score.dtype == torch.bfloat16:
        above = compare(score, threshold)
    else:
        # A tenth of torch's time, which compares number by number; numpy has no bfloat16.
        above = torch.from_numpy(compare(score.detach().numpy(), threshold.numpy()))
    return above if inside is None else above & inside


def _nth_largest(score: Tensor, n: int) -> Tensor:
    """The n-th largest number."""
    place = score.numel() - n
    if score.device.type != "cpu":
        # kthvalue counts from 1.
        return score.kthvalue(place + 1).values
    # numpy's selection is ten times as fast as torch's on a CPU; it has no bfloat16.
    numbers = score.detach()
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.float()
    found = np.partition(numbers.numpy(), place)[place]
    return torch.as_tensor(found, dtype=score.dtype)


def prune(mask: Tensor, score: Tensor, n: int) -> Tensor:
    """The mask without its ``n`` weights of lowest score; of equal ones the last go.

    >>> prune(torch.tensor([True, True, False]), torch.tensor([2.0, 1.0, 0.0]), 1)
    tensor([ True, False, False])
    """
    active = trees.count(mask)
    check(0 <= n <= active, "the number of weights pruned", n, f"from 0 to {active}, those in use")
    return best(score, active - n, among=mask)


def regrow(mask: Tensor, gradient: Tensor, n: int, barred: Tensor) -> Tensor:
    """The mask with ``n`` more weights: those of largest gradient magnitude outside it.

    None that is ``barred`` is taken. (CA-AFP's healing; RigL, Evci et al. 2020, grows by the same
    rule.)

    >>> off = torch.tensor([False, False, False])
    >>> regrow(torch.tensor([True, False, False]), torch.tensor([9.0, 1.0, -2.0]), 1, barred=off)
    tensor([ True, False,  True])
    """
    return mask | best(gradient.abs(), n, among=~mask & ~barred)
