"""Masks from scores: an exact number of weights per layer, or some fewer and some more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import trees
from ..errors import UnfitError, check
from ..nets.layout import Layout
from ..trees import Mask

Places = npt.NDArray[np.int64]


def weights_to_prune(layout: Layout, density: float) -> tuple[str, ...]:
    """The names of a net's prunable weights; a net that has none stays dense, and is refused.

    (Not with a ``density`` of 1, which prunes nothing.)
    """
    if not layout.prunable and density < 1:
        raise UnfitError(
            "it has no weights that can be pruned, those of convolutions and of linear, recurrent "
            "and attention layers. Use a net with such layers, or a method that does not prune "
            "(fedavg, ditto)."
        )
    return layout.prunable


def all_kept(weight: Tensor) -> Tensor:
    """Return the pruning mask of a layer that is not pruned."""
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
    """Return a pruning mask of the ``n`` places of largest score; of equal ones the first.

    Args:
        score: A score for each place.
        n: The number of places; with 0 or less none, and at most all.
        among: Where places may be chosen; None: everywhere.

    >>> best(torch.tensor([1.0, 3.0, 2.0]), 1, among=torch.tensor([True, False, True]))
    tensor([False, False,  True])
    """
    if n <= 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if n >= score.numel():
        return torch.ones_like(score, dtype=torch.bool) if among is None else among.clone()
    if among is not None and not score.is_floating_point():
        # Of whole numbers none is -inf.
        score = score.float()
    # In numpy: its selection is ten times as fast as torch's on a CPU, and its calls are cheaper.
    numbers = _numbers(score)
    kept = np.zeros(len(numbers), dtype=np.bool_)
    if among is None:
        kept[places_of_best(numbers, n)] = True
    else:
        kept[_best_among(numbers, n, among.cpu().numpy())] = True
    return torch.from_numpy(kept).to(score.device)


def places_of_best(numbers: npt.NDArray[Any], n: int) -> Places:
    """Return the ``n`` places of largest score for a pruning mask; of equal ones the first.

    >>> places_of_best(np.array([1.0, 3.0, 2.0, 2.0]), 2)
    array([1, 2])
    """
    return _places_from(numbers, _nth_largest(numbers, n), n)


def _best_among(numbers: npt.NDArray[Any], n: int, among: npt.NDArray[np.bool_]) -> Places:
    """:func:`places_of_best` as if all others had -inf, and of those only places ``among``."""
    inside = np.flatnonzero(among)
    # Those alone: with thousands of equal numbers a selection can take forty times as long.
    allowed = numbers[inside]
    if n < len(inside):
        threshold = _nth_largest(allowed, n)
        if threshold != -np.inf:
            return inside[_places_from(allowed, threshold, n)]
    elif allowed.min(initial=np.inf) > -np.inf:
        # All that are allowed; none has the score of those that are not, nor is NaN.
        return inside
    # Places that are not allowed are tied with the last that are, and count.
    lowered = np.where(among, numbers, -np.inf)
    places = places_of_best(lowered, n)
    return places[among[places]]


def _nth_largest(numbers: npt.NDArray[Any], n: int) -> Any:
    # A threshold, as a full sort would take twenty times as long.
    place = len(numbers) - n
    return np.partition(numbers, place)[place]


def _places_from(numbers: npt.NDArray[Any], threshold: Any, n: int) -> Places:
    """The places of what is above the n-th largest number, and at it the first."""
    places = np.flatnonzero(numbers >= threshold)
    if len(places) > n:
        # Not topk, which decides ties as it likes: those at the threshold are taken in order,
        # which gives the same mask on every machine.
        is_above = numbers[places] > threshold
        is_tied = ~is_above
        room = n - np.count_nonzero(is_above)
        places = places[is_above | (is_tied & (is_tied.cumsum() <= room))]
    return places


def _numbers(score: Tensor) -> npt.NDArray[Any]:
    """Return scores as a NumPy array, to find the largest."""
    numbers = score.detach().cpu()
    if numbers.dtype == torch.bfloat16:
        # Numpy does not have it; in float32 it is the same number.
        numbers = numbers.float()
    return numbers.numpy()


def prune(mask: Tensor, score: Tensor, n: int) -> Tensor:
    """Return the mask pruned by the ``n`` weights of lowest score; of equal ones the last go.

    Args:
        mask: The weights in use.
        score: A score for each weight.
        n: The number of weights to prune.

    Raises:
        InputError: ``n`` is more than the weights in use.

    >>> prune(torch.tensor([True, True, False]), torch.tensor([2.0, 1.0, 0.0]), 1)
    tensor([ True, False, False])
    """
    active = trees.count_true(mask)
    check(0 <= n <= active, "the number of weights pruned", n, f"from 0 to {active}, those in use")
    return best(score, active - n, among=mask)


def regrow(mask: Tensor, gradient: Tensor, n: int, barred: Tensor) -> Tensor:
    """Return the mask regrown by ``n`` weights: the largest gradients outside it.

    (CA-AFP's healing; RigL, Evci et al. 2020, grows by the same rule.)

    Args:
        mask: The weights in use.
        gradient: A gradient for each weight.
        n: The number of weights to regrow.
        barred: Weights that must not regrow.

    >>> off = torch.tensor([False, False, False])
    >>> regrow(torch.tensor([True, False, False]), torch.tensor([9.0, 1.0, -2.0]), 1, barred=off)
    tensor([ True, False,  True])
    """
    return mask | best(gradient.abs(), n, among=~mask & ~barred)
