"""torch-pruning's dependency graph behind our own words: which channels of a network are tied.

The groups traced here are candidates; :mod:`fedgrove.channels.find` tries each before it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..errors import UnfitError
from .groups import ChannelGroup, Place, Role


def trace(
    module: nn.Module, shape: tuple[int, ...], names: Mapping[int, str], order: Sequence[str]
) -> tuple[ChannelGroup, ...]:
    """The groups of a network, in the order in which their first layers run.

    ``names``: id of a tensor of ``module`` -> its name; ``order``: the layers as they run. The
    network's output is in no group. Groups that pass through a layer whose channels cannot be told
    apart (LayerNorm, recurrent layers, grouped convolutions) are left out. The module is traced in
    place: give a copy.
    """
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _dependency_graph(module, shape)
            found, failure = _groups_followed(graph)
    except Exception as error:
        raise _cannot_follow(module, error) from error
    position = {name: i for i, name in enumerate(order)}
    label = {part: name for name, part in module.named_modules()}
    groups: list[ChannelGroup] = []
    for items in found:
        group = _group(items, graph, label, names, position)
        if group is not None:
            groups.append(group)
    if failure is not None and not groups:
        raise _cannot_follow(module, failure) from failure
    groups.sort(key=lambda group: position[group.name])
    return tuple(groups)


def _cannot_follow(module: nn.Module, error: Exception) -> UnfitError:
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return UnfitError(
        f"the channels of {type(module).__name__} could not be followed, "
        f"{type(error).__name__}: {reason}; write its forward pass with plain tensor "
        "operations, or use a method that prunes no channels."
    )


def _dependency_graph(module: nn.Module, shape: tuple[int, ...]) -> Any:
    # Imported here: it takes a second, and most methods prune no channels.
    import torch_pruning

    # The graph is built by following autograd's.
    module.requires_grad_(True).eval()
    like = next(module.parameters())
    x = torch.zeros((1, *shape), dtype=like.dtype, device=like.device)
    return torch_pruning.DependencyGraph().build_dependency(module, x, verbose=False)


def _groups_followed(graph: Any) -> tuple[list[Any], Exception | None]:
    """The groups of every layer that has not fallen with another one's, and the first error.

    As the graph's own loop has it, but a group that cannot be followed, as one whose channels are
    split and shuffled again and again, is left out alone: its channels stay.
    """
    found: list[Any] = []
    seen: set[nn.Module] = set()
    failure: Exception | None = None
    for part in list(graph.module2node):
        if part in seen or not isinstance(part, _ConvNd | nn.Linear):
            continue
        pruner = graph.get_pruner_of_module(part)
        if pruner is None or pruner.get_out_channels(part) is None:
            continue
        every_channel = list(range(pruner.get_out_channels(part)))
        try:
            group = graph.get_pruning_group(part, pruner.prune_out_channels, every_channel)
        except Exception as error:  # of whatever kind, in code that is not ours
            failure = failure or error
            continue
        for item in group:
            if graph.is_out_channel_pruning_fn(item.dep.handler):
                seen.add(item.dep.target.module)
        found.append(group)
    return found, failure


class _Spot(NamedTuple):
    """A tensor of a module by its attribute there, and the dimension that falls."""

    key: str
    dim: int
    role: Role
    fill: float = 0.0


FILTERS = (_Spot("weight", 0, "filter"), _Spot("bias", 0, "bias"))
NORM = (_Spot("weight", 0, "scale"), _Spot("bias", 0, "shift"))
STATISTICS = (
    _Spot("running_mean", 0, "statistic"),
    _Spot("running_var", 0, "statistic", 1.0),
)


def _group(
    items: Any,
    graph: Any,
    label: Mapping[nn.Module, str],
    names: Mapping[int, str],
    position: Mapping[str, int],
) -> ChannelGroup | None:
    """One of torch-pruning's groups as plain data; None if its channels must all stay."""
    places: dict[tuple[str, int], Place] = {}
    makers: list[str] = []
    for item in items:
        part = item.dep.target.module
        is_output = graph.is_out_channel_pruning_fn(item.dep.handler)
        if part in label:
            spots = _spots(part, is_output)
        elif _is_fixed(part):
            spots = None
        else:
            # Reshapes, sums, concatenations: they hold no tensors.
            spots = ()
        if spots is None:
            return None
        if is_output and any(spot.role == "filter" for spot in spots):
            makers.append(label[part])
        for spot in spots:
            tensor = getattr(part, spot.key, None)
            if isinstance(tensor, nn.Parameter) and id(tensor) not in names:
                # It is frozen, and cannot lose a channel.
                return None
            if tensor is None or id(tensor) not in names:
                continue
            name = names[id(tensor)]
            place = _joined(places.get((name, spot.dim)), name, tensor.shape[spot.dim], spot, item)
            if place is None:
                return None
            places[name, spot.dim] = place
    if not makers:
        # Made by a layer that we do not know.
        return None
    first_maker = min(makers, key=lambda name: position[name])
    return ChannelGroup(first_maker, len(items[0].idxs), tuple(places.values()))


def _is_fixed(part: Any) -> bool:
    """The network's output, and parameters that belong to no layer we know."""
    return isinstance(part, nn.Parameter) or type(part).__name__ == "_OutputOp"


def _spots(part: nn.Module, is_output: bool) -> tuple[_Spot, ...] | None:
    """What falls in a module with one of its outputs (or inputs).

    None if its channels are not independent of each other.
    """
    match part:
        case _ConvTransposeNd() if part.groups == 1:
            # Transposed: (in, out, ...) where an ordinary convolution has (out, in, ...).
            if is_output:
                return (_Spot("weight", 1, "filter"), FILTERS[1])
            return (_Spot("weight", 0, "input"),)
        case _ConvNd() | nn.Linear() if getattr(part, "groups", 1) == 1:
            if is_output:
                return FILTERS
            return (_Spot("weight", 1, "input"),)
        case _ConvNd() if part.groups == part.in_channels == part.out_channels:
            # Depthwise: each channel by itself, so what reads it makes it.
            return FILTERS
        case _NormBase():
            return NORM + STATISTICS
        case nn.GroupNorm() if part.affine:
            return NORM
        case _:
            has_tensors = bool([*part.parameters(), *part.buffers()])
            return None if has_tensors else ()


def _joined(old: Place | None, name: str, length: int, spot: _Spot, item: Any) -> Place | None:
    """With which channel each entry of a tensor falls; a tensor met before is added to.

    None if an entry does not exist, or falls with two channels: the forward pass mixes them.
    """
    channel = [-1] * length if old is None else list(old.channel)
    for entry, root in zip(item.idxs, item.root_idxs, strict=True):
        if entry >= length or channel[entry] not in (-1, root):
            return None
        channel[entry] = root
    return Place(name, spot.dim, tuple(channel), spot.role, spot.fill)
