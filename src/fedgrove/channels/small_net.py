"""A network without some of its channels, and the way there and back for trees.

Methods use full-width trees and masks only. ``narrow`` selects the entries that are kept, ``widen``
puts zeros where channels were (and ones into running variances). The small net gives the same
outputs as the masked one; it really is faster, and its file smaller.
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

from ..nets.layout import Layout, named_tensors
from ..nets.net import Net
from ..nets.norms import ThinGroupNorm
from ..trees import Tree
from .groups import ChannelGroup, Channels, collect_kept_entries

MOST_NETS = 16
"""How many small nets and how many masks are cached per net."""
MOST_CUTS = 256
"""How many :class:`SmallNet` objects are cached per net. They are indices only. Clients with
different channels have one each, and one in the width of their stack."""

KeptEntries = Mapping[str, Mapping[int, Tensor]]
"""Tensor -> dimension -> the entries that are kept, in order; whole tensors are not named."""

NarrowedLeaves = dict[tuple[int, str, int], Tensor]
"""(id of a :class:`SmallNet`, name of a leaf, id of the leaf) -> the leaf narrowed."""


@dataclass(frozen=True, eq=False)
class SmallNet:
    """A net without some of its channels; ``narrow`` and ``widen`` convert trees.

    Leaves are recognised by name and shape: a leaf that is not a tensor of the net in full (or
    small) width is left unchanged.
    """

    make: Callable[[], Net]
    kept: KeptEntries
    full: Mapping[str, tuple[int, ...]]
    small: Mapping[str, tuple[int, ...]]
    fill: Mapping[str, float]
    channels: Channels
    """Group -> which of its channels are kept."""
    norms: tuple[tuple[str, tuple[int, ...]], ...]
    """GroupNorm -> how many channels are kept in each of its own groups."""

    @property
    def net(self) -> Net:
        """The small net, built on first use: in a stack of clients only one of them is needed.

        Not stored here: there are many cuts, and only the last few nets are cached.
        """
        return self.make()

    def macs(self, layout: Layout) -> int:
        """Count the multiply-accumulates of the small net, from the ``layout`` of the full one.

        Each weight is used once for every position it slides over, and cutting channels changes no
        position: so the small net need not be built.
        """
        total = layout.frozen_macs
        for layer in layout.layers:
            full = 0
            small = 0
            for name in layer.weights:
                full += math.prod(self.full[name])
                small += math.prod(self.small[name])
            if full:
                total += layer.macs * small // full
            else:
                # Frozen weights have no name, and stay whole.
                total += layer.macs
        return total

    def narrow(self, tree: Mapping[str, Tensor]) -> Tree:
        """Select the entries of values or masks whose channels are kept."""
        narrowed = dict(tree)
        for name, leaf in tree.items():
            if name in self.kept and tuple(leaf.shape) == self.full[name]:
                narrowed[name] = select_entries(leaf, self.kept[name])
        return narrowed

    def narrow_carry(
        self,
        carry: Mapping[str, Tree],
        whole: Collection[str] = (),
        known: NarrowedLeaves | None = None,
    ) -> dict[str, Tree]:
        """Narrow all trees of a carry to the kept channels.

        Args:
            carry: The trees.
            whole: The names of trees that stay as they are.
            known: Narrowed leaves to reuse; those narrowed here are added. The full leaves must
                stay alive as long as it is in use.
        """
        if known is None:
            known = {}
        trees = dict(carry)
        for tree_name, tree in carry.items():
            if tree_name in whole:
                continue
            narrowed: Tree = {}
            for name, leaf in tree.items():
                key = (id(self), name, id(leaf))
                if key not in known:
                    known[key] = self.narrow({name: leaf})[name]
                narrowed[name] = known[key]
            trees[tree_name] = narrowed
        return trees

    def widen(self, tree: Mapping[str, Tensor]) -> Tree:
        """Undo :meth:`narrow`: removed entries become 0, those of running variances 1."""
        widened = dict(tree)
        for name, leaf in tree.items():
            if name in self.kept and tuple(leaf.shape) == self.small[name]:
                widened[name] = self._widen_leaf(name, leaf)
        return widened

    def reset_removed(self, tree: Mapping[str, Tensor]) -> Tree:
        """Make a full-width tree that was trained masked as if it had been trained small.

        The running statistics of removed channels are reset.
        """
        return self.widen(self.narrow(tree))

    def _widen_leaf(self, name: str, leaf: Tensor) -> Tensor:
        for dim, index in self.kept[name].items():
            shape = list(leaf.shape)
            shape[dim] = self.full[name][dim]
            # One dimension after the other: a filter can lose outputs and inputs.
            wide = leaf.new_full(shape, self.fill[name])
            leaf = wide.index_copy_(dim, index.to(leaf.device), leaf)
        return leaf


def select_entries(leaf: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """Return the entries of a tensor that belong to kept channels, dimension by dimension."""
    for dim, index in kept.items():
        leaf = leaf.index_select(dim, index.to(leaf.device))
    return leaf


# ---- cutting -------------------------------------------------------------------------------------

V = TypeVar("V")
_SMALL_NETS: WeakKeyDictionary[Net, dict[Any, Net]] = WeakKeyDictionary()


def get_or_make(
    cache: WeakKeyDictionary[Net, dict[Any, V]],
    net: Net,
    key: Any,
    make: Callable[[], V],
    most: int = MOST_NETS,
) -> V:
    """Return the small net made for this key before, or make it; the last few are kept."""
    entries = cache.setdefault(net, {})
    if key in entries:
        value = entries.pop(key)
    else:
        value = make()
    # Inserted last, so that the first one is the one unused for longest.
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]
    return value


def make_small_net(net: Net, groups: Sequence[ChannelGroup], channels: Channels) -> SmallNet:
    """Cut channels out of a net; ``channels`` names every group."""
    kept = _index_kept_entries(groups, channels)
    norms = _count_norm_groups(net.module, kept)

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
    # Small nets are cached per net: a strong reference to it here would keep it alive for ever.
    owner = ref(net)

    def build() -> Net:
        return Net(shrink_module(module, kept, norms), shape, problem, owner)

    def make() -> Net:
        alive = owner()
        if alive is None:
            return build()
        return get_or_make(_SMALL_NETS, alive, key, build)

    return SmallNet(
        make=make,
        kept=kept,
        full=net.layout.shapes,
        small=small_shapes,
        fill=fill,
        channels=channels,
        norms=tuple(norms.items()),
    )


def _index_kept_entries(groups: Sequence[ChannelGroup], channels: Channels) -> KeptEntries:
    kept: dict[str, dict[int, Tensor]] = {}
    for name, dims in collect_kept_entries(groups, channels, buffers=True).items():
        for dim, flags in dims.items():
            if not bool(flags.all()):
                kept.setdefault(name, {})[dim] = flags.nonzero().flatten()
    return kept


def _count_norm_groups(module: nn.Module, kept: KeptEntries) -> dict[str, tuple[int, ...]]:
    """Return GroupNorm -> how many channels are kept in each of its own groups."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(part, nn.GroupNorm) and weight in kept:
            width = part.num_channels // part.num_groups
            group_of_channel = kept[weight][0] // width
            counts = torch.bincount(group_of_channel, minlength=part.num_groups)
            sizes[name] = tuple(counts.tolist())
    return sizes


def shrink_module(
    module: nn.Module, kept: KeptEntries, norms: Mapping[str, tuple[int, ...]]
) -> nn.Module:
    """Copy a module with only the entries whose channels are kept."""
    # Given to deepcopy as if already copied: the full tensors are never copied, and tensors that
    # layers share stay shared.
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(module).items():
        if name not in kept:
            continue
        small = select_entries(tensor.detach(), kept[name])
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
            # With neither scale nor statistics the layer has no tensor and fits any width.
            if vector is not None:
                part.num_features = len(vector)
