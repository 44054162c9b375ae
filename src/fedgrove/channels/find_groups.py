"""Finding the groups of channels of a network that can really be removed.

torch-pruning's dependency graph proposes groups; each is cut out of the network once, and is used
only if the small network gives the same outputs as the masked one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .. import trees
from ..errors import UnfitError, first_line
from ..nets.layout import named_tensors
from ..nets.net import Net
from ..renamed import find_old_names
from ..trees import Mask
from .groups import (
    ChannelGroup,
    Channels,
    Place,
    Role,
    complete_channels,
    expand_channels,
    intern_group,
    may_remove_channels,
    read_channels,
)
from .mask_cache import find_once
from .small_net import make_small_net

TOLERANCE = 1e-4
"""Largest difference between masked and small net, relative to the largest output, in float32."""

_GROUPS: WeakKeyDictionary[Net, tuple[ChannelGroup, ...]] = WeakKeyDictionary()


def find_groups(net: Net) -> tuple[ChannelGroup, ...]:
    """Return the groups of a net, in order of execution; found once per net.

    The net's output is in no group. A group whose channels depend on each other (they are averaged,
    shuffled or counted in the forward pass) is left out.
    """
    if net not in _GROUPS:
        _GROUPS[net] = tuple(map(intern_group, _find_and_test(net)))
    return _GROUPS[net]


def require_groups(net: Net) -> tuple[ChannelGroup, ...]:
    """Return the groups of a net, and refuse a net without any, which could not shrink."""
    groups = find_groups(net)
    if not groups:
        raise UnfitError(
            "it has no channels that can be removed. Such a channel is made by a convolution or a "
            "linear layer and read by another, and nothing in between connects it with others (a "
            "recurrent layer, attention, LayerNorm, a shared or frozen weight, a branch on data). "
            "Use a net that has some, or a method that prunes single weights: ca-afp, fedsnip, "
            "fixedprune."
        )
    return groups


def make_channel_mask(net: Net, channels: Mapping[str, Tensor]) -> Mask:
    """Return the mask of everything that is removed with channels.

    Args:
        net: The network.
        channels: Group name -> which channels are kept.

    >>> from torch import nn
    >>> net = Net(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)), (1,))
    >>> mask = make_channel_mask(net, {"0": torch.tensor([True, False])})
    >>> {name: kept.int().tolist() for name, kept in mask.items()}
    {'0.weight': [[1], [0]], '0.bias': [1, 0], '2.weight': [[1, 0]]}
    """
    return expand_channels(find_groups(net), net.layout.shapes, channels)


def find_kept_channels(net: Net, mask: Mapping[str, Tensor] | None) -> Channels | None:
    """Return which channels a mask keeps, per group; None if it removes no whole channel."""
    # Tested first, so that a net is not traced for masks that prune single weights only.
    if mask is None or not may_remove_channels(mask):
        return None
    groups = find_groups(net)
    return find_once("left", groups, mask, lambda: read_channels(groups, mask))


def _find_and_test(net: Net) -> tuple[ChannelGroup, ...]:
    # A copy: tracing switches gradients and modes. The trial net is another one, so that what is
    # cached for it is freed with it.
    traced = copy.deepcopy(net.module)
    names = {id(t): name for name, t in named_tensors(traced).items()}
    position = {}
    for i, layer in enumerate(net.layout.layers):
        position[layer.name] = i
    trial = Net(copy.deepcopy(net.module), net.shape)
    candidates: list[ChannelGroup] = []
    for group in _trace(traced, net.shape, names, position):
        # The outputs of the last linear layer are the classes.
        makes_outputs = any(
            place.tensor in net.layout.head for place in group.places_with("filter")
        )
        if not makes_outputs:
            candidates.append(group)
    if outputs_agree(trial, candidates):
        return tuple(candidates)
    # Some group fails: keep those that pass alone, if they pass together.
    independent = [group for group in candidates if outputs_agree(trial, [group])]
    if outputs_agree(trial, independent):
        return tuple(independent)
    return ()


def outputs_agree(net: Net, groups: Sequence[ChannelGroup]) -> bool:
    """Return whether the small net equals the masked one, with every other channel removed."""
    generator = torch.Generator().manual_seed(0)
    initial = net.params()
    like = next(iter(initial.values()))
    tree = {}
    for name, leaf in initial.items():
        noise = torch.rand(leaf.shape, generator=generator).to(leaf)
        # Scales of 1 and shifts of 0 would hide a mistake, so vectors are changed.
        tree[name] = leaf + 0.5 * noise if leaf.dim() == 1 else leaf
    x = torch.randn(2, *net.shape, generator=generator).to(like)
    channels = {}
    for i, group in enumerate(groups):
        # The even ones of one group and the odd ones of the next: groups that share a tensor would
        # agree by coincidence if all lost the same ones.
        kept = (torch.arange(group.size) + i) % 2 == 0
        kept[0] |= ~kept.any()
        channels[group.name] = kept
    masked = trees.apply_mask(tree, expand_channels(groups, net.layout.shapes, channels))
    try:
        thin = make_small_net(net, groups, complete_channels(groups, channels))
        # A forward pass that branches on data may go one way for x, and the other for -x.
        for inputs in (x, -x):
            with torch.no_grad():
                full = net.run(masked, inputs, False)
                small = thin.net.run(thin.narrow(masked), inputs, False)
            scale = full.abs().max().clamp_min(1e-30)
            if not bool(((full - small).abs() <= TOLERANCE * scale).all()):
                return False
        return True
    except Exception:  # a shape that no longer fits, in code that is not ours
        return False


# ---- what torch-pruning proposes -----------------------------------------------------------------


def _trace(
    module: nn.Module, shape: tuple[int, ...], names: Mapping[int, str], position: Mapping[str, int]
) -> tuple[ChannelGroup, ...]:
    """Return the proposed groups of a network, in the order in which their first layers run.

    The network's output is in no group. Groups that pass through a layer whose channels cannot be
    separated (LayerNorm, recurrent layers, grouped convolutions) are left out.

    Args:
        module: The network, which is traced in place: a copy.
        shape: The shape of one input.
        names: Id of a tensor of ``module`` -> its name.
        position: Name of a layer -> its place in the order in which layers run.
    """
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _dependency_graph(module, shape)
            found, failure = _follow_groups(graph)
    except Exception as error:
        raise _cannot_follow(module, error) from error
    label = {part: name for name, part in module.named_modules()}
    groups: list[ChannelGroup] = []
    for items in found:
        group = _convert_group(items, graph, label, names, position)
        if group is not None:
            groups.append(group)
    if failure is not None and not groups:
        raise _cannot_follow(module, failure) from failure
    groups.sort(key=lambda group: position[group.name])
    return tuple(groups)


def _cannot_follow(module: nn.Module, error: Exception) -> UnfitError:
    reason = first_line(error)
    return UnfitError(
        f"the channels of {type(module).__name__} could not be traced, "
        f"{type(error).__name__}: {reason}; write its forward pass with plain tensor "
        "operations, or use a method that prunes no channels."
    )


def _dependency_graph(module: nn.Module, shape: tuple[int, ...]) -> Any:
    # Imported here: it takes a second, and most methods prune no channels.
    import torch_pruning

    # Eval mode, so that BatchNorm accepts a batch of one; gradients, because the graph is built by
    # following autograd's.
    module.requires_grad_(True).eval()
    like = next(module.parameters())
    x = torch.zeros((1, *shape), dtype=like.dtype, device=like.device)
    return torch_pruning.DependencyGraph().build_dependency(module, x, verbose=False)


def _follow_groups(graph: Any) -> tuple[list[Any], Exception | None]:
    """Return the groups of every layer that is in no earlier group, and the first error.

    Like the graph's own loop, but a group that cannot be followed, as one whose channels are split
    and shuffled again and again, is left out alone: its channels are kept.
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
    """A tensor of a module by its attribute there, and the dimension that loses entries."""

    key: str
    dim: int
    role: Role
    fill: float = 0.0


FILTERS = (_Spot("weight", 0, "filter"), _Spot("bias", 0, "bias"))
NORM = (_Spot("weight", 0, "scale"), _Spot("bias", 0, "shift"))
STATISTICS_SPOTS = (
    _Spot("running_mean", 0, "statistic"),
    _Spot("running_var", 0, "statistic", 1.0),
)


def _convert_group(
    items: Any,
    graph: Any,
    label: Mapping[nn.Module, str],
    names: Mapping[int, str],
    position: Mapping[str, int],
) -> ChannelGroup | None:
    """Return one of torch-pruning's groups as plain data; None if all its channels must be kept."""
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
            # Reshapes, sums, concatenations: they have no tensors.
            spots = ()
        if spots is None:
            return None
        # A group is named after a layer that makes its channels, never after a norm.
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
            place = _merge_place(
                places.get((name, spot.dim)), name, tensor.shape[spot.dim], spot, item
            )
            if place is None:
                return None
            places[name, spot.dim] = place
    if not makers:
        # Made by a layer of an unknown kind.
        return None
    first_maker = min(makers, key=lambda name: position[name])
    return ChannelGroup(first_maker, len(items[0].idxs), tuple(places.values()))


def _is_fixed(part: Any) -> bool:
    """Return whether it is the network's output, or a parameter of a layer of an unknown kind."""
    return isinstance(part, nn.Parameter) or type(part).__name__ == "_OutputOp"


def _spots(part: nn.Module, is_output: bool) -> tuple[_Spot, ...] | None:
    """Return what a module loses with one of its outputs (or inputs).

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
            return NORM + STATISTICS_SPOTS
        case nn.GroupNorm() if part.affine:
            return NORM
        case _:
            has_tensors = bool([*part.parameters(), *part.buffers()])
            return None if has_tensors else ()


def _merge_place(old: Place | None, name: str, length: int, spot: _Spot, item: Any) -> Place | None:
    """Return with which channel each entry of a tensor is removed, added to those of ``old``.

    None if an entry does not exist, or belongs to two channels: the forward pass mixes them.
    """
    channel = [-1] * length if old is None else list(old.channel)
    for entry, root in zip(item.idxs, item.root_idxs, strict=True):
        if entry >= length or channel[entry] not in (-1, root):
            return None
        channel[entry] = root
    return Place(name, spot.dim, tuple(channel), spot.role, spot.fill)


__getattr__ = find_old_names(__name__)
