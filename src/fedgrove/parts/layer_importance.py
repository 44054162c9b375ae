"""How much a layer matters, by the L1 norm of its weights, and how many weights it has (FedAPTA).

A *layer* here is a group of channels that fall together: one convolution, or those that a residual
sum ties to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..channels.choice import FilterL1
from ..channels.groups import ChannelGroup
from ..errors import unknown

IMPORTANCES = ("mean", "sum")
"""Per weight, or of the whole layer: the sum ranks layers mostly by their size."""
CONV_DIMENSIONS = 3
"""A convolution's weight has so many dimensions or more; a linear layer's has two."""


def candidates(
    groups: Sequence[ChannelGroup], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ChannelGroup, ...]:
    """The layers that FedAPTA prunes: the convolutional ones.

    In a net without convolutions all hidden layers, so that an MLP can be cut too. Frozen layers
    are in no group, and so never among them.
    """
    convolutional = []
    for group in groups:
        filters = group.within("filter")
        if any(len(shapes[place.tensor]) >= CONV_DIMENSIONS for place in filters):
            convolutional.append(group)
    return tuple(convolutional or groups)


def weight_counts(
    groups: Sequence[ChannelGroup], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """:math:`N_k`: how many weights make the channels of each layer; biases and norms do not count.

    A weight counts with the channel that it makes, not with the one that it reads.

    >>> from fedgrove.channels.groups import Place
    >>> conv = ChannelGroup("conv", 4, (Place("conv.weight", 0, (0, 1, 2, 3), "filter"),))
    >>> weight_counts([conv], {"conv.weight": (4, 2, 3, 3)})
    {'conv': 72}
    """
    counts = {}
    for group in groups:
        total = 0
        for place in group.within("filter"):
            shape = shapes[place.tensor]
            weights = 1
            for size in shape:
                weights *= size
            entries = sum(channel >= 0 for channel in place.channel)
            total += weights * entries // shape[place.dim]
        counts[group.name] = total
    return counts


def layer_importance(
    params: Mapping[str, Tensor], groups: Sequence[ChannelGroup], importance: str = "mean"
) -> dict[str, float]:
    r""":math:`I_k = \lVert w_k \rVert_1`, or with "mean" :math:`\lVert w_k \rVert_1 / N_k`.

    (FedAPTA, Alg. 2, line 3.) :math:`w_k` -> the weights that make the channels of layer k.
    """
    if importance not in IMPORTANCES:
        raise unknown("importance", importance, IMPORTANCES)
    shapes = {name: tuple(leaf.shape) for name, leaf in params.items()}
    counts = weight_counts(groups, shapes)
    importances = {}
    for name, scores in FilterL1()(params, groups).items():
        norm = float(scores.double().sum())
        if importance == "mean":
            norm /= counts[name]
        importances[name] = norm
    return importances
