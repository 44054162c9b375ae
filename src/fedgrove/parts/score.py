"""How much a weight matters: ``Score(params) -> Tree``, larger is more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import trees
from ..trees import Tree


@dataclass(frozen=True)
class Magnitude:
    r""":math:`s_j = |w_j|`.

    >>> Magnitude()({"w": torch.tensor([-2.0, 1.0])})["w"]
    tensor([2., 1.])
    """

    def __call__(self, params: Mapping[str, Tensor]) -> Tree:
        """The score of every weight."""
        return trees.map(torch.abs, params)
