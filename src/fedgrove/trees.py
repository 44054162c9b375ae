"""Arithmetic on trees (dictionaries of named tensors): the only place that loops over layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

Tree = dict[str, Tensor]
Mask = dict[str, Tensor]
"""Booleans under the names of a tree; a tensor whose name is absent is not prunable."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type for each width of an element in bytes: the same bits, read as a number."""


def map(f: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Apply ``f`` leaf by leaf; the trees must have the same names."""
    first, *rest = trees
    for other in rest:
        if other.keys() != first.keys():
            raise ValueError(f"trees differ in names: {sorted(set(first) ^ set(other))}")
    result: Tree = {}
    for name in first:
        # By name: the trees may hold their leaves in different orders. The first one's order is
        # that of the result.
        leaves = [tree[name] for tree in trees]
        result[name] = f(*leaves)
    return result


def pick(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """The leaves called ``names``, in that order."""
    return {name: tree[name] for name in names}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """``a - b``."""
    return map(torch.sub, a, b)


def masked(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """The tree with 0 where the mask is false; a leaf that the mask does not name is left as it is.

    Always +0.0: use this, not ``value * mask``, which makes -0.0 of every negative value. A codec
    is lossless and would send the sign of each such zero.

    >>> masked({"w": torch.tensor([-2.0, 3.0])}, {"w": torch.tensor([False, True])})
    {'w': tensor([0., 3.])}
    """
    result: Tree = {}
    for name, value in tree.items():
        if name in mask:
            result[name] = where(mask[name], value)
        else:
            result[name] = value
    return result


def where(mask: Tensor, value: Tensor, other: Tensor | float = 0.0) -> Tensor:
    """``value`` where the mask is true, and ``other`` elsewhere, in the type of ``value``.

    To the bit what ``torch.where`` and ``masked_fill`` give.

    >>> where(torch.tensor([True, False]), torch.tensor([-2.0, torch.nan]))
    tensor([-2.,  0.])
    """
    is_quick = mask.shape == value.shape and mask.dtype == torch.bool and are_plain(mask, value)
    if isinstance(other, Tensor):
        is_alike = other.shape == value.shape and other.dtype == value.dtype
        if not is_quick or not is_alike or not are_plain(other):
            return torch.where(mask, value, other)
    elif not is_quick:
        return value.masked_fill(~mask, other)
    # On a CPU torch.where and masked_fill decide number by number, and a core cannot guess a mask's
    # next bit: ten to twenty times as long as a product. One of floats would keep signs and NaN;
    # bits that are read as whole numbers become 0 or stay as they are.
    word = WORDS[value.dtype.itemsize]
    bits = value.view(word)
    if isinstance(other, Tensor):
        other_bits = other.view(word)
        return (((bits ^ other_bits) * mask) ^ other_bits).view(value.dtype)
    if other == 0 and math.copysign(1.0, other) > 0:
        return (bits * mask).view(value.dtype)
    # A number as wide as the tensor's: one bit pattern for all.
    fill = torch.tensor(other, dtype=value.dtype).view(word)
    return (((bits ^ fill) * mask) ^ fill).view(value.dtype)


def chosen(value: Tensor, mask: Tensor) -> Tensor:
    """The numbers of a tensor where a mask of its shape is true, as a vector: ``value[mask]``.

    >>> chosen(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]]))
    tensor([1., 4.])
    """
    if not are_plain(mask, value) or mask.shape != value.shape:
        return value[mask]
    return value.reshape(-1).index_select(0, places(mask))


def places(mask: Tensor) -> Tensor:
    """Where a mask is true, as numbers of the places of its vector.

    >>> places(torch.tensor([[False, True], [True, False]]))
    tensor([1, 2])
    """
    if not are_plain(mask):
        return mask.reshape(-1).nonzero().flatten()
    # numpy counts first and has no branch for each place: four to eight times as fast as torch.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def count(mask: Tensor) -> int:
    """How many places of a mask are true.

    >>> count(torch.tensor([[False, True], [True, False]]))
    2
    """
    if mask.dtype != torch.bool or not are_plain(mask):
        return int(mask.count_nonzero())
    # numpy adds up the bytes of booleans: a tenth of torch's time.
    return int(np.count_nonzero(mask.numpy()))


def both(mask: Tensor, other: Tensor) -> Tensor:
    """``mask & other`` of booleans, where one may broadcast along dimensions of the other.

    >>> both(torch.tensor([[True], [False]]), torch.tensor([[True, False]]))
    tensor([[ True, False],
            [False, False]])
    """
    are_booleans = mask.dtype == torch.bool and other.dtype == torch.bool
    if not are_booleans or not mask.dim() or not are_plain(mask, other):
        return mask & other
    # Where rows or columns are repeated torch goes byte by byte: five times as long as numpy.
    return torch.from_numpy(mask.numpy() & other.numpy())


def any_along(mask: Tensor, dim: int) -> Tensor:
    """Which entries along a dimension have anything true in them; not to be written into.

    >>> any_along(torch.tensor([[False, True], [False, False]]), 0)
    tensor([ True, False])
    """
    other_dims = tuple(other for other in range(mask.dim()) if other != dim)
    if not other_dims:
        return mask.bool()
    is_quick = mask.dtype == torch.bool and mask.numel() > 0 and are_plain(mask)
    if not is_quick:
        return mask.bool().any(dim=other_dims)
    # numpy is ten times as fast as torch on booleans: it leaves a row at the first that is true,
    # and joins whole rows at once, so those of the dimensions before come first.
    before = math.prod(mask.shape[:dim])
    blocks = mask.numpy().reshape(before, mask.shape[dim], -1)
    rows = blocks[0] if before == 1 else np.any(blocks, axis=0)
    return torch.from_numpy(np.any(rows, axis=1))


def are_plain(*tensors: Tensor) -> bool:
    """Whether tensors are numbers in this machine's memory and nothing else.

    Not on a card, nor under ``torch.func``, nor where a gradient is wanted.
    """
    for tensor in tensors:
        is_usual = type(tensor) is Tensor and tensor.is_cpu and not tensor.requires_grad
        # Torch may leave it to whoever reads a tensor to change its signs.
        if not is_usual or tensor.is_neg() or is_functorch_wrapped_tensor(tensor):
            return False
    return True


def digest(tree: Mapping[str, Tensor]) -> bytes:
    """Sixteen bytes that trees of equal names, types, shapes and bits share.

    >>> digest({"w": torch.zeros(2)}) == digest({"w": torch.zeros(2)})
    True
    >>> digest({"w": torch.zeros(2)}) == digest({"w": -torch.zeros(2)})
    False
    """
    summed = blake2b(digest_size=16)
    for name, leaf in tree.items():
        summed.update(f"{name}\0{leaf.dtype}\0{tuple(leaf.shape)}\0".encode())
        summed.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return summed.digest()


class Digests:
    """Digests of trees, each computed once as long as a tree is the same object."""

    def __init__(self) -> None:
        # By id, beside the tree itself: while it is alive, nothing else has that id.
        self._known: dict[int, tuple[Mapping[str, Tensor], bytes]] = {}

    def of(self, tree: Mapping[str, Tensor]) -> bytes:
        """The digest of a tree."""
        if id(tree) not in self._known:
            self._known[id(tree)] = (tree, digest(tree))
        return self._known[id(tree)][1]


def sq_norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all leaves."""
    # Stacked and then summed, not added one by one: results depend on this order to the bit.
    return torch.stack([(value * value).sum() for value in tree.values()]).sum()


def flat(tree: Mapping[str, Tensor]) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([value.reshape(-1) for value in tree.values()])


def joined(tree: Mapping[str, Tensor]) -> Tree:
    """The same tree with leaves that are views of one vector, where they have one type."""
    if len({value.dtype for value in tree.values()}) != 1:
        return dict(tree)
    return unflat(flat(tree), tree)


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """The inverse of :func:`flat`: names and shapes as in ``like``; the leaves are views."""
    parts = torch.split(vector, [value.numel() for value in like.values()])
    result: Tree = {}
    for (name, value), part in zip(like.items(), parts, strict=True):
        result[name] = part.view(value.shape)
    return result


def vector(tree: Mapping[str, Tensor]) -> Tensor | None:
    """All leaves as one vector without a copy, where they lie one behind another in memory.

    None where they do not, as where a leaf is of another type. What :func:`unflat` gives does.

    >>> whole = torch.tensor([1.0, 2.0, 3.0])
    >>> vector({"w": whole[:2], "b": whole[2:]})
    tensor([1., 2., 3.])
    >>> vector({"b": whole[2:], "w": whole[:2]}) is None
    True
    """
    first: Tensor | None = None
    expected = 0
    numbers = 0
    for leaf in tree.values():
        count = leaf.numel()
        if not count:
            # It lies nowhere.
            continue
        if first is None:
            first = leaf
            expected = leaf.data_ptr()
        is_next = leaf.data_ptr() == expected and leaf.is_contiguous()
        if not is_next or leaf.dtype != first.dtype or leaf.device != first.device:
            return None
        expected += count * leaf.element_size()
        numbers += count
    if first is None:
        return None
    # Tensors of their own may happen to lie side by side: all must be within the first one's
    # memory, which as_strided would otherwise refuse to leave.
    begin = first.storage_offset()
    if (begin + numbers) * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.as_strided((numbers,), (1,), begin)


def same_layout(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same names in the same order, with the same shapes."""
    if len(a) != len(b):
        return False
    for (name, leaf), (other_name, other) in zip(a.items(), b.items(), strict=True):
        if name != other_name or leaf.shape != other.shape:
            return False
    return True


def size(tree: Mapping[str, Tensor]) -> int:
    """How many numbers it holds."""
    return sum(value.numel() for value in tree.values())


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Many trees as one, along a new first dimension."""
    return map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Mapping[str, Tensor], n: int) -> list[Tree]:
    """The inverse of :func:`stack`; the leaves are views."""
    if not tree:
        return [{} for _ in range(n)]
    # All rows of a leaf in one call, which takes a tenth of the time of a call for each.
    columns = [value.unbind() for value in tree.values()]
    return [dict(zip(tree, leaves, strict=True)) for leaves in zip(*columns, strict=True)]


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same names, types and numbers: 0.0 equals -0.0, and NaN equals nothing."""
    if a.keys() != b.keys():
        return False
    for name in a:
        # torch.equal alone would take 1 in float32 and 1 in float64 for equal.
        if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name]):
            return False
    return True


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same names, types, shapes and bits: 0.0 is not -0.0, and a NaN is itself.

    >>> identical({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
    False
    """
    if a.keys() != b.keys():
        return False
    for name in a:
        if a[name].dtype != b[name].dtype:
            return False
        # As integers of the same width: a view needs no copy, whatever the strides.
        word = WORDS[a[name].dtype.itemsize]
        if not torch.equal(a[name].detach().view(word), b[name].detach().view(word)):
            return False
    return True


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between two trees; infinite where one is NaN."""
    # In double precision: float32 could overflow, and torch does not subtract booleans.
    differences = map(lambda x, y: x.double() - y.double(), a, b)
    largest: list[Tensor] = []
    for difference in differences.values():
        # max() of no numbers is an error.
        if difference.numel():
            # max() hands a NaN on, and a comparison with NaN is always false: infinity is not.
            largest.append(difference.abs().max().nan_to_num(nan=torch.inf))
    if not largest:
        return 0.0
    return float(torch.stack(largest).max())
