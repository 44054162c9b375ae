"""Freezing the first layers of a network: they are neither trained nor sent nor pruned."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InputError, check
from .forward_state import locate
from .layout import Layer, Layout


def freeze(module: nn.Module, shape: tuple[int, ...], share: float) -> None:
    """Freeze the first ``share`` of a module's layers, in place.

    Layers are counted as papers do: those with weights (convolutions, linear, recurrent, attention
    layers) in the order in which they run, rounded down. All other layers that run before the first
    trained one, such as norm layers, are frozen with them; a tensor that a trained layer shares is
    trained. A frozen norm layer normalises by its current running statistics.

    What is frozen is a constant of the module and not in its tree: no method, mask, optimiser or
    message ever sees it.

    Args:
        module: The module; its parameters are marked ``requires_grad=False``.
        shape: The shape of one input, without the batch.
        share: The share of layers, from the first on.

    Raises:
        InputError: The share is less than one layer, or not between 0 and 1, or there are no layers
            with weights.

    >>> module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> freeze(module, (2,), 0.5)
    >>> [name for name, p in module.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    check_frozen_share(share)
    layout = Layout.of(module, shape)
    first, rest = split_layers(layout, share, "freeze")
    trained: set[str] = set()
    for layer in rest:
        trained.update(layer.names)
    for layer in first:
        for name in layer.params:
            if name not in trained:
                module.get_parameter(name).requires_grad_(False)
        part = module.get_submodule(layer.name)
        if isinstance(part, _NormBase) and trained.isdisjoint(layer.names):
            _fix_statistics(module, layer.buffers)


def split_layers(
    layout: Layout, share: float, field: str
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Split a network's layers into the frozen ones and the rest.

    The rest begins with the first layer that is trained.

    This is what "the first quarter of the layers" means everywhere; :func:`freeze` explains
    how layers are counted.

    Args:
        layout: The network.
        share: The share of layers to freeze. One above 0 but of less than one layer is refused.
        field: The name of the setting, for the error.

    >>> module = nn.Sequential(nn.Conv1d(1, 2, 1), nn.GroupNorm(1, 2), nn.Conv1d(2, 2, 1))
    >>> first, rest = split_layers(Layout.of(module, (1, 4)), 0.5, "freeze")
    >>> [layer.name for layer in first], [layer.name for layer in rest]
    (['0', '1'], ['2'])
    """
    if share == 0:
        return (), layout.layers
    weighted = []
    for layer in layout.layers:
        if layer.weights and layer.activations:
            weighted.append(layer)
    if not weighted:
        raise InputError(f"{field} is {share:g}, and this net has no layers with weights.")
    # The 1e-9 is for rounding: a third of nine is 3, not 2.9999999996.
    count = min(math.floor(share * len(weighted) + 1e-9), len(weighted) - 1)
    if count == 0:
        least = math.ceil(100 / len(weighted)) / 100
        raise InputError(
            f"{field} is {share:g}, which is less than one of the {len(weighted)} layers with "
            f"weights that this net has; give {least:g} or more, or 0."
        )
    first_trained = layout.layers.index(weighted[count])
    return layout.layers[:first_trained], layout.layers[first_trained:]


def check_frozen_share(share: float) -> None:
    """Refuse to freeze a share of a network's layers that would leave nothing to train."""
    check(0 <= share < 1, "freeze", share, "a share of the layers: 0 or more, and below 1")


def _fix_statistics(module: nn.Module, names: tuple[str, ...]) -> None:
    """Leave buffers out of the ``state_dict``: so they are constants, and not sent."""
    for name in names:
        part, key = locate(module, name)
        buffer = part.get_buffer(key)
        delattr(part, key)
        part.register_buffer(key, buffer, persistent=False)
