"""How much a weight matters: ``Score(params) -> Tree``, larger is more; scores as they are sent.

They are sent in 16 bits, under names that the ledger counts as scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import trees
from ..core import ExpectedPacket, Packet
from ..nets import Net
from ..renamed import find_old_names
from ..trees import Tree
from .quantise import Half

PREFIX = "scores."
"""Of the names of scores, so that the ledger does not take them for values."""


@dataclass(frozen=True)
class Magnitude:
    r""":math:`s_j = |w_j|`.

    >>> Magnitude()({"w": torch.tensor([-2.0, 1.0])})["w"]
    tensor([2., 1.])
    """

    def __call__(self, params: Mapping[str, Tensor]) -> Tree:
        """The score of every weight."""
        return trees.map(torch.abs, params)


def scores_packet(scores: Mapping[str, Tensor]) -> Packet:
    """Pack pruning scores in bfloat16: squares of gradients are tiny, and need its range."""
    return Packet(Half("bfloat16")(_with_prefix(scores)))


def expected_scores(net: Net) -> ExpectedPacket:
    """Expect what :func:`scores_packet` makes of a pruning score for every prunable weight."""
    weights = trees.pick(net.blank(), net.layout.prunable)
    return Half("bfloat16").form(_with_prefix(weights))


def _with_prefix(tree: Mapping[str, Tensor]) -> Tree:
    return {PREFIX + name: leaf for name, leaf in tree.items()}


def scores_of(packet: Packet) -> Tree:
    """Read pruning scores in float32: a mean taken in 16 bits would make many equal.

    >>> import torch
    >>> scores_of(scores_packet({"w": torch.tensor([0.5])}))
    {'w': tensor([0.5000])}
    """
    return {name.removeprefix(PREFIX): leaf.float() for name, leaf in packet.values.items()}


__getattr__ = find_old_names(__name__)
