"""Masks from scores: exactly so many weights per layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import check
from ..trees import Mask


def top(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> Mask:
    """Keep the ``counts[layer]`` weights of largest score in every layer; of equal ones those that come first.

    >>> top({"w": torch.tensor([1.0, 3.0, 2.0])}, {"w": 2})
    {'w': tensor([False,  True,  True])}
    """
    return {k: _top(k, v, counts[k]) for k, v in scores.items()}


def _top(name: str, score: Tensor, n: int) -> Tensor:
    check(0 <= n <= score.numel(), f"the number of weights kept in {name}", n, f"from 0 to {score.numel()}")
    mask = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    mask[torch.argsort(score.reshape(-1), descending=True, stable=True)[:n]] = True
    return mask.view(score.shape)
