"""A network without some of its channels, and the way there and back for trees.

Methods speak full-width trees and masks only. ``narrow`` keeps the entries that stay, ``widen``
puts zeros where channels were (and ones into running variances). The small net gives the same
outputs as the masked one; it is really faster, and its file really smaller.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..nets.layout import Layout, tensors_of
from ..nets.net import Net
from ..nets.norms import ThinGroupNorm
from ..trees import Tree
from .groups import ChannelGroup, Channels, keeps

CACHE_SIZE = 16
"""How many small nets and how many masks are remembered per net."""
MOST_CUTS = 256
"""How many cuts, which are indices only: clients that keep channels of their own have one each, and
one in the width of their stack."""

Kept = dict[str, dict[int, Tensor]]
"""Tensor -> dimension -> the entries that stay, in order; tensors that stay whole are not named."""

NarrowedLeaves = dict[tuple[int, str, int], Tensor]
"""A :class:`Thin`, the name of a leaf, and the leaf itself, by id, -> the leaf narrowed."""


@dataclass(frozen=True, eq=False)
class Thin:
    """A net without some of its channels; ``narrow`` and ``widen`` bring trees there and back.

    Leaves are recognised by name and shape: a leaf that is not a tensor of the net in full (or
    small) width is left as it is.
    """

    make: Callable[[], Net]
    kept: Mapping[str, Mapping[int, Tensor]]
    """Tensor -> dimension -> the entries that stay, in order."""
    full: Mapping[str, tuple[int, ...]]
    small: Mapping[str, tuple[int, ...]]
    fill: Mapping[str, float]
    channels: Channels
    """Group -> which of its channels stay."""
    norms: tuple[tuple[str, tuple[int, ...]], ...]
    """GroupNorm -> how many channels stay in each of its own groups."""

    @property
    def net(self) -> Net:
        """The small net, built on first use: in a stack of clients only one of them is needed.

        Not held here: there are many cuts, and of the nets only the last few are remembered.
        """
        return self.make()

    def macs(self, layout: Layout) -> int:
        """Multiply-accumulates of the small net, from the ``layout`` of the full one.

        Each weight is used once for every position it slides over, and cutting channels changes no
        position: so the small net need not be built to know.
        """
        total = layout.frozen_macs
        for layer in layout.layers:
            full = sum(math.prod(self.full[name]) for name in layer.weights)
            small = sum(math.prod(self.small[name]) for name in layer.weights)
            # Frozen weights have no name, and stay whole.
            total += layer.macs * small // full if full else layer.macs
        return total

    def narrow(self, tree: Mapping[str, Tensor]) -> Tree:
        """The entries that stay, of values or masks."""
        narrowed: Tree = {}
        for name, leaf in tree.items():
            is_full = name in self.kept and tuple(leaf.shape) == self.full[name]
            narrowed[name] = select(leaf, self.kept[name]) if is_full else leaf
        return narrowed

    def narrowed(
        self,
        carry: Mapping[str, Tree],
        whole: Collection[str] = (),
        known: NarrowedLeaves | None = None,
    ) -> dict[str, Tree]:
        """All trees of a carry, narrowed; those called as in ``whole`` stay as they are.

        ``known`` takes what is narrowed here, and spares the work for leaves that are in it; they
        must be kept alive as long as it is in use.
        """
        trees: dict[str, Tree] = {}
        for name, tree in carry.items():
            trees[name] = tree if name in whole else self._narrowed_once(tree, known)
        return trees

    def _narrowed_once(self, tree: Tree, known: NarrowedLeaves | None) -> Tree:
        if known is None:
            return self.narrow(tree)
        narrowed: Tree = {}
        for name, leaf in tree.items():
            key = (id(self), name, id(leaf))
            if key not in known:
                known[key] = self.narrow({name: leaf})[name]
            narrowed[name] = known[key]
        return narrowed

    def widen(self, tree: Mapping[str, Tensor]) -> Tree:
        """The inverse: removed entries become 0, those of running variances 1."""
        widened: Tree = {}
        for name, leaf in tree.items():
            is_small = name in self.kept and tuple(leaf.shape) == self.small[name]
            widened[name] = self._widened(name, leaf) if is_small else leaf
        return widened

    def settled(self, tree: Mapping[str, Tensor]) -> Tree:
        """A full-width tree that was trained masked, as if it had been trained small.

        The running statistics of removed channels are reset.
        """
        return self.widen(self.narrow(tree))

    def _widened(self, name: str, leaf: Tensor) -> Tensor:
        for dim, index in self.kept[name].items():
            shape = list(leaf.shape)
            shape[dim] = self.full[name][dim]
            wide = leaf.new_full(shape, self.fill[name])
            leaf = wide.index_copy_(dim, index.to(leaf.device), leaf)
        return leaf


def select(leaf: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """The entries of a tensor that stay, dimension by dimension."""
    for dim, index in kept.items():
        leaf = leaf.index_select(dim, index.to(leaf.device))
    return leaf


# ---- cutting -------------------------------------------------------------------------------------

V = TypeVar("V")
_SMALL_NETS: WeakKeyDictionary[Net, dict[Any, Net]] = WeakKeyDictionary()


def remembered(
    store: WeakKeyDictionary[Net, dict[Any, V]],
    net: Net,
    key: Any,
    make: Callable[[], V],
    most: int = CACHE_SIZE,
) -> V:
    """What ``make`` returned for this key before, or returns now; the last few are kept."""
    entries = store.setdefault(net, {})
    if key in entries:
        value = entries.pop(key)
    else:
        value = make()
    # Inserted last, so that the first one is the one unused for longest.
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]
    return value


def cut_groups(net: Net, groups: Sequence[ChannelGroup], channels: Channels) -> Thin:
    """The net without the channels of these groups that are not kept; ``channels`` is complete."""
    kept = _kept_entries(groups, channels)
    norms = _norm_groups(net.module, kept)

    fill: dict[str, float] = {}
    for group in groups:
        for place in group.places:
            fill[place.tensor] = place.fill

    small_shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in net.layout.shapes.items():
        small = list(shape)
        for dim, index in kept.get(name, {}).items():
            small[dim] = len(index)
        small_shapes[name] = tuple(small)

    # Nets of equal widths are one object, so that engines can stack their clients.
    widths = tuple((group.name, int(channels[group.name].sum())) for group in groups)
    key = (widths, tuple(norms.items()))
    module = net.module
    shape = net.shape
    problem = net.problem
    # Thin nets are remembered per net: a strong reference to it here would keep it alive for ever.
    owner = ref(net)

    def build() -> Net:
        return Net(smaller(module, kept, norms), shape, problem, owner)

    def make() -> Net:
        alive = owner()
        if alive is None:
            return build()
        return remembered(_SMALL_NETS, alive, key, build)

    return Thin(
        make=make,
        kept=kept,
        full=net.layout.shapes,
        small=small_shapes,
        fill=fill,
        channels=channels,
        norms=tuple(norms.items()),
    )


def _kept_entries(groups: Sequence[ChannelGroup], channels: Channels) -> Kept:
    kept: Kept = {}
    for name, dims in keeps(groups, channels, buffers=True).items():
        for dim, stays in dims.items():
            if not bool(stays.all()):
                kept.setdefault(name, {})[dim] = stays.nonzero().flatten()
    return kept


def _norm_groups(module: nn.Module, kept: Kept) -> dict[str, tuple[int, ...]]:
    """GroupNorm -> how many channels stay in each of its own groups."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(part, nn.GroupNorm) and weight in kept:
            width = part.num_channels // part.num_groups
            group_of_channel = kept[weight][0] // width
            counts = torch.bincount(group_of_channel, minlength=part.num_groups)
            sizes[name] = tuple(counts.tolist())
    return sizes


def smaller(
    module: nn.Module,
    kept: Mapping[str, Mapping[int, Tensor]],
    norms: Mapping[str, tuple[int, ...]],
) -> nn.Module:
    """A copy of a module that holds only the entries that stay."""
    # Handed to deepcopy as if already copied: the full tensors are never copied, and tensors
    # that layers share stay shared.
    memo: dict[int, Any] = {}
    for name, tensor in tensors_of(module).items():
        if name not in kept:
            continue
        small = select(tensor.detach(), kept[name])
        if isinstance(tensor, nn.Parameter):
            small = nn.Parameter(small, tensor.requires_grad)
        memo[id(tensor)] = small
    copied = copy.deepcopy(module, memo)

    for name, sizes in norms.items():
        full = copied.get_submodule(name)
        assert isinstance(full, nn.GroupNorm)
        thin = ThinGroupNorm(full, sizes)
        if not name:
            # The module itself is the norm.
            return thin
        parent, _, key = name.rpartition(".")
        setattr(copied.get_submodule(parent), key, thin)
    for part in copied.modules():
        _resize(part)
    return copied


def _resize(part: nn.Module) -> None:
    """Make a layer's own numbers (``in_channels``, ...) agree with its tensors."""
    match part:
        case _ConvTransposeNd():
            part.in_channels = part.weight.shape[0]
            part.out_channels = part.weight.shape[1] * part.groups
        case _ConvNd():
            if part.groups == part.in_channels == part.out_channels:
                part.groups = part.weight.shape[0]
            part.out_channels = part.weight.shape[0]
            part.in_channels = part.weight.shape[1] * part.groups
        case nn.Linear():
            part.out_features, part.in_features = part.weight.shape
        case _NormBase():
            vector = part.weight if part.weight is not None else part.running_mean
            # Neither scale nor statistics: the layer holds no tensor and fits any width.
            if vector is not None:
                part.num_features = len(vector)
