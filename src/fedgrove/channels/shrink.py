"""Really smaller networks: a net without the channels that a mask removes, and the way there and back for trees.

Methods speak full-width trees and masks only. ``shrink`` cuts the removed channels out on both sides, ``widen`` puts
zeros where they were (and the initial values into the running statistics of norms). The small net gives what the
masked one gives; it is really faster, and its file really smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .. import trees
from ..errors import InputError
from ..nets.layout import tensors_of
from ..nets.net import Net
from ..nets.norms import ThinGroupNorm
from ..trees import Tree
from .groups import ChannelGroup, Channels, checked, expand, keeps, trace

MOST = 8
"""How many small nets, and how many masks, are remembered per net."""
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Thin:
    """A net without some of its channels; ``narrow`` and ``widen`` bring trees there and back.

    Leaves are known by name and shape: what is not a tensor of the net in full (or small) width is left as it is.
    """

    make: Callable[[], Net]
    kept: Mapping[str, Mapping[int, Tensor]]
    """Tensor -> dimension -> the entries that stay, in order."""
    full: Mapping[str, tuple[int, ...]]
    small: Mapping[str, tuple[int, ...]]
    fill: Mapping[str, float]
    channels: Channels
    """ChannelGroup -> which of its channels stay."""
    norms: tuple[tuple[str, tuple[int, ...]], ...]
    """GroupNorm -> how many channels stay in each of its own groups."""

    @cached_property
    def net(self) -> Net:
        """The small net, made when it is first asked for: in a stack of clients only one is."""
        return self.make()

    def narrow(self, tree: Mapping[str, Tensor]) -> Tree:
        """The entries that stay, of values or masks."""
        small = {k: v for k, v in tree.items() if k in self.kept and tuple(v.shape) == self.full[k]}
        return {k: select(v, self.kept[k]) if k in small else v for k, v in tree.items()}

    def narrowed(self, carry: Mapping[str, Tree]) -> dict[str, Tree]:
        """All trees of a carry, narrowed."""
        return {name: self.narrow(tree) for name, tree in carry.items()}

    def widen(self, tree: Mapping[str, Tensor]) -> Tree:
        """The inverse: removed entries become 0, those of running variances 1."""
        known = {k for k, v in tree.items() if k in self.kept and tuple(v.shape) == self.small[k]}
        return {k: self._widened(k, v) if k in known else v for k, v in tree.items()}

    def settled(self, tree: Mapping[str, Tensor]) -> Tree:
        """A full-width tree that was trained masked, with the statistics of removed channels as in a small net."""
        return self.widen(self.narrow(tree))

    def _widened(self, name: str, leaf: Tensor) -> Tensor:
        for dim, index in self.kept[name].items():
            shape = list(leaf.shape)
            shape[dim] = self.full[name][dim]
            leaf = leaf.new_full(shape, self.fill[name]).index_copy_(
                dim, index.to(leaf.device), leaf
            )
        return leaf


def select(leaf: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """The entries of a tensor that stay, dimension by dimension."""
    for dim, index in kept.items():
        leaf = leaf.index_select(dim, index.to(leaf.device))
    return leaf


# ---- what others call -----------------------------------------------------------------------------------------------


def shrink(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> tuple[Net, Tree]:
    """The net and the parameters without the channels that the mask removes; equal in outputs to the masked ones.

    Single weights that the mask prunes inside channels that stay become zeros. Nets of equal width are one object.

    >>> net = Net(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)), (1,))
    >>> mask = net.layout.expand({"0": torch.tensor([True, False, True])})
    >>> small, tree = shrink(net, net.params(), mask)
    >>> small.layout.shapes["2.weight"], net.layout.shapes["2.weight"]
    ((1, 2), (1, 3))
    """
    thin = cut(net, net.layout.channels_of(mask) or {})
    return thin.net, thin.narrow(trees.masked(params, mask))


def widen(net: Net, params: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """The inverse of :func:`shrink`: small parameters in the full width of ``net``."""
    return cut(net, net.layout.channels_of(mask) or {}).widen(params)


def cut(net: Net, channels: Mapping[str, Tensor]) -> Thin:
    """The net without the channels that are not kept; at least one of each group must stay."""
    groups = net.layout.groups
    return _cut(net, groups, checked(groups, channels))


def structured(net: Net, mask: Mapping[str, Tensor] | None) -> Thin | None:
    """The small net to train in place of a masked one; None if the mask removes no whole channel. Found once per mask.

    Where a mask removes all channels of a group, the first is kept, and stays masked.
    """
    if mask is None:
        return None
    return _remembered(_SEEN, net, id(mask), lambda: (mask, _structured(net, mask)))[1]


def _structured(net: Net, mask: Mapping[str, Tensor]) -> Thin | None:
    try:
        channels = net.layout.channels_of(mask)
    except InputError:  # a net whose channels cannot be followed trains masked
        return None
    if channels is None:
        return None
    for kept in channels.values():
        kept[0] |= ~kept.any()
    return cut(net, channels)


# ---- small nets, remembered by their widths -------------------------------------------------------------------------

V = TypeVar("V")
_SMALL: WeakKeyDictionary[Net, dict[Any, Net]] = WeakKeyDictionary()
_SEEN: WeakKeyDictionary[Net, dict[Any, tuple[Mapping[str, Tensor], Thin | None]]] = (
    WeakKeyDictionary()
)


def _remembered(
    store: WeakKeyDictionary[Net, dict[Any, V]], net: Net, key: Any, make: Callable[[], V]
) -> V:
    """What ``make`` gave for this key before, or gives now; the last few are kept."""
    own = store.setdefault(net, {})
    value = own.pop(key) if key in own else make()
    own[key] = value  # the latest last
    if len(own) > MOST:
        del own[next(iter(own))]
    return value


def _cut(net: Net, groups: Sequence[ChannelGroup], channels: Channels) -> Thin:
    layout = net.layout
    stay = keeps(groups, channels, buffers=True)
    kept = {
        name: {
            dim: flags.nonzero().flatten() for dim, flags in dims.items() if not bool(flags.all())
        }
        for name, dims in stay.items()
    }
    kept = {name: dims for name, dims in kept.items() if dims}
    fill = {place.tensor: place.fill for group in groups for place in group.places}
    parts = _norm_groups(net.module, kept)
    key = (tuple((g.name, int(channels[g.name].sum())) for g in groups), tuple(parts.items()))
    small = {
        k: tuple(len(kept.get(k, {}).get(d, range(n))) for d, n in enumerate(s))
        for k, s in layout.shapes.items()
    }
    module, shape, owner = (
        net.module,
        _shape(net),
        ref(net),
    )  # a strong reference would outlive the net in _SEEN

    def made() -> Net:
        return Net(smaller(module, kept, parts), shape)

    def make() -> Net:
        alive = owner()
        return made() if alive is None else _remembered(_SMALL, alive, key, made)

    return Thin(make, kept, layout.shapes, small, fill, channels, tuple(parts.items()))


def _shape(net: Net) -> tuple[int, ...]:
    assert net.layout.source is not None
    return net.layout.source[1]


def _norm_groups(
    module: nn.Module, kept: Mapping[str, Mapping[int, Tensor]]
) -> dict[str, tuple[int, ...]]:
    """GroupNorm -> how many channels stay in each of its own groups."""
    found = {}
    for name, part in module.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(part, nn.GroupNorm) and weight in kept:
            each = kept[weight][0] // (part.num_channels // part.num_groups)
            found[name] = tuple(torch.bincount(each, minlength=part.num_groups).tolist())
    return found


def smaller(
    module: nn.Module,
    kept: Mapping[str, Mapping[int, Tensor]],
    norms: Mapping[str, tuple[int, ...]],
) -> nn.Module:
    """A copy of a module that holds only the entries that stay."""
    memo: dict[int, Any] = {}
    for name, tensor in tensors_of(module).items():
        if name in kept:
            # Handed to deepcopy as if already copied: the full tensors are never copied, shared ones stay shared.
            part = select(tensor.detach(), kept[name])
            memo[id(tensor)] = (
                nn.Parameter(part, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else part
            )
    copied = copy.deepcopy(module, memo)
    for name, sizes in norms.items():
        old = copied.get_submodule(name)
        assert isinstance(old, nn.GroupNorm)
        new = ThinGroupNorm(old, sizes)
        if not name:
            return new
        parent, _, key = name.rpartition(".")
        setattr(copied.get_submodule(parent), key, new)
    for each in copied.modules():
        _resize(each)
    return copied


def _resize(part: nn.Module) -> None:
    """Let a layer's own numbers follow its tensors."""
    match part:
        case _ConvTransposeNd():
            part.in_channels, part.out_channels = (
                part.weight.shape[0],
                part.weight.shape[1] * part.groups,
            )
        case _ConvNd():
            if part.groups == part.in_channels == part.out_channels:
                part.groups = part.weight.shape[0]
            part.out_channels, part.in_channels = (
                part.weight.shape[0],
                part.weight.shape[1] * part.groups,
            )
        case nn.Linear():
            part.out_features, part.in_features = part.weight.shape
        case _NormBase():
            vector = part.weight if part.weight is not None else part.running_mean
            part.num_features = part.num_features if vector is None else len(vector)


# ---- groups that really are independent -----------------------------------------------------------------------------


def coupled(
    module: nn.Module, shape: tuple[int, ...], order: Sequence[str]
) -> tuple[ChannelGroup, ...]:
    """The groups of a network whose channels can be removed: each was tried, and the small net gave what the masked
    one gives. A group that fails (channels are averaged, shuffled, counted in the forward pass) is left out.
    """
    copied = copy.deepcopy(module)
    names = {id(t): name for name, t in tensors_of(copied).items()}
    groups = trace(copied, shape, names, order)
    net = Net(copy.deepcopy(module), shape)
    heads = net.layout.head
    groups = tuple(g for g in groups if not any(p.tensor in heads for p in g.within("filter")))
    if agrees(net, groups):
        return groups
    alone = tuple(g for g in groups if agrees(net, (g,)))
    return alone if agrees(net, alone) else ()


def agrees(net: Net, groups: Sequence[ChannelGroup]) -> bool:
    """Whether the small net gives what the masked net gives, with every other channel removed, on random numbers."""
    g = torch.Generator().manual_seed(0)
    like = next(iter(net.params().values()))
    tree = {k: _shaken(k, v, g) for k, v in net.params().items()}
    x = torch.randn(2, *_shape(net), generator=g).to(like)
    channels = {group.name: torch.arange(group.size) % 2 == 0 for group in groups}
    masked = trees.masked(tree, expand(groups, net.layout.shapes, channels))
    try:
        thin = _cut(net, groups, checked(groups, channels))
        with torch.no_grad():
            full, small = net.run(masked, x, False), thin.net.run(thin.narrow(masked), x, False)
        return bool(((full - small).abs() <= TOLERANCE * full.abs().max().clamp_min(1e-30)).all())
    except Exception:  # a shape that no longer fits, in code that is not ours
        return False


def _shaken(name: str, leaf: Tensor, g: torch.Generator) -> Tensor:
    """Initial values, moved: scales of 1 and shifts of 0 would hide a mistake."""
    noise = torch.rand(leaf.shape, generator=g).to(leaf)
    return leaf + 0.5 * noise if leaf.dim() == 1 else leaf
