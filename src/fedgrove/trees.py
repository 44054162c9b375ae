"""Arithmetic on trees (dictionaries of named tensors): the only place that loops over layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .renamed import find_old_names

Tree = dict[str, Tensor]
Mask = dict[str, Tensor]
"""Booleans under the names of a tree; a tensor whose name is absent is not prunable."""

INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Width of an element in bytes -> an integer type, to read the element's bits as a number."""


# ---- leaf by leaf --------------------------------------------------------------------------------


def map(f: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Apply a function leaf by leaf.

    Args:
        f: Called with one leaf of each tree.
        trees: Trees of the same names, in any order.

    Returns:
        A tree in the order of the first one.

    Raises:
        ValueError: The trees differ in names.
    """
    first, *rest = trees
    for other in rest:
        if other.keys() != first.keys():
            raise ValueError(f"trees differ in names: {sorted(set(first) ^ set(other))}")
    result: Tree = {}
    for name in first:
        # By name, because the trees may have their leaves in different orders.
        leaves = [tree[name] for tree in trees]
        result[name] = f(*leaves)
    return result


def pick(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Return the leaves called ``names``, in that order."""
    return {name: tree[name] for name in names}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """Return ``a - b``."""
    return map(torch.sub, a, b)


def size(tree: Mapping[str, Tensor]) -> int:
    """Count the numbers of a tree."""
    return sum(value.numel() for value in tree.values())


def sq_norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Sum the squares over all leaves."""
    # Stacked and then summed, not added one by one: results depend on this order to the bit.
    return torch.stack([(value * value).sum() for value in tree.values()]).sum()


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Stack trees of the same names and shapes along a new first dimension."""
    return map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Mapping[str, Tensor], n: int) -> list[Tree]:
    """Split a stacked tree into its ``n`` rows, the inverse of :func:`stack`; leaves are views."""
    if not tree:
        return [{} for _ in range(n)]
    # All rows of a leaf in one call, which takes a tenth of the time of one call per row.
    columns = [value.unbind() for value in tree.values()]
    return [dict(zip(tree, leaves, strict=True)) for leaves in zip(*columns, strict=True)]


# ---- masks ---------------------------------------------------------------------------------------


def apply_mask(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """Set a tree to 0 where its mask is false; a leaf that the mask does not name is kept.

    The zeros are always +0.0. Use this, not ``value * mask``, which makes -0.0 of every negative
    value: a codec is lossless and would send the sign of each such zero.

    >>> apply_mask({"w": torch.tensor([-2.0, 3.0])}, {"w": torch.tensor([False, True])})
    {'w': tensor([0., 3.])}
    """
    result = dict(tree)
    for name, value in tree.items():
        if name in mask:
            result[name] = where(mask[name], value)
    return result


def where(mask: Tensor, value: Tensor, other: Tensor | float = 0.0) -> Tensor:
    """Return ``value`` where the mask is true and ``other`` elsewhere, in the type of ``value``.

    Equal to ``torch.where`` and ``masked_fill`` to the bit, and faster on a CPU.

    Args:
        mask: Where to take ``value``.
        value: The tensor to take.
        other: A number or a tensor for all other places.

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
    # On a CPU torch.where and masked_fill branch on every element, and a mask's next bit cannot be
    # predicted: they take ten to twenty times as long as a product. A product of floats would keep
    # signs and NaN, so the bits are read as integers, which become 0 or stay as they are.
    integer = INTEGER_TYPES[value.dtype.itemsize]
    bits = value.view(integer)
    if not isinstance(other, Tensor):
        if other == 0 and math.copysign(1.0, other) > 0:
            return (bits * mask).view(value.dtype)
        other = torch.tensor(other, dtype=value.dtype)
    other_bits = other.view(integer)
    return (((bits ^ other_bits) * mask) ^ other_bits).view(value.dtype)


def select(value: Tensor, mask: Tensor) -> Tensor:
    """Return ``value[mask]``, the elements where a mask of the same shape is true, as a vector.

    >>> select(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]]))
    tensor([1., 4.])
    """
    if not are_plain(mask, value) or mask.shape != value.shape:
        return value[mask]
    return value.reshape(-1).index_select(0, find_true(mask))


def find_true(mask: Tensor) -> Tensor:
    """Return the indices, in the flattened mask, of all elements that are true.

    >>> find_true(torch.tensor([[False, True], [True, False]]))
    tensor([1, 2])
    """
    if not are_plain(mask):
        return mask.reshape(-1).nonzero().flatten()
    # numpy counts first and does not branch per element: four to eight times as fast as torch.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def count_true(mask: Tensor) -> int:
    """Count the elements of a mask that are true.

    >>> count_true(torch.tensor([[False, True], [True, False]]))
    2
    """
    if mask.dtype != torch.bool or not are_plain(mask):
        return int(mask.count_nonzero())
    # numpy adds up the bytes of booleans: a tenth of torch's time.
    return int(np.count_nonzero(mask.numpy()))


def and_masks(mask: Tensor, other: Tensor) -> Tensor:
    """Return ``mask & other`` of booleans, which may broadcast.

    >>> and_masks(torch.tensor([[True], [False]]), torch.tensor([[True, False]]))
    tensor([[ True, False],
            [False, False]])
    """
    are_booleans = mask.dtype == torch.bool and other.dtype == torch.bool
    if not are_booleans or not mask.dim() or not are_plain(mask, other):
        return mask & other
    # Where rows or columns are broadcast torch goes byte by byte: five times as long as numpy.
    return torch.from_numpy(mask.numpy() & other.numpy())


def any_along(mask: Tensor, dim: int) -> Tensor:
    """Return which entries along a dimension contain anything true. Do not write into the result.

    >>> any_along(torch.tensor([[False, True], [False, False]]), 0)
    tensor([ True, False])
    """
    other_dims = tuple(other for other in range(mask.dim()) if other != dim)
    if not other_dims:
        return mask.bool()
    is_quick = mask.dtype == torch.bool and mask.numel() > 0 and are_plain(mask)
    if not is_quick:
        return mask.bool().any(dim=other_dims)
    # numpy is ten times as fast as torch on booleans: it leaves a row at its first true element,
    # and combines whole rows at once, so the dimensions before `dim` are reduced first.
    before = math.prod(mask.shape[:dim])
    blocks = mask.numpy().reshape(before, mask.shape[dim], -1)
    rows = blocks[0] if before == 1 else np.any(blocks, axis=0)
    return torch.from_numpy(np.any(rows, axis=1))


def count_writes(leaves: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written to, as torch counts: equal if none has changed.

    Torch does not count writes into tensors of its inference mode, or through ``.data``.
    """
    return [leaf._version for leaf in leaves]


def are_plain(*tensors: Tensor) -> bool:
    """Return whether tensors are ordinary CPU memory, which numpy can read.

    Not on a GPU, not under ``torch.func``, not where a gradient is needed.
    """
    for tensor in tensors:
        is_usual = type(tensor) is Tensor and tensor.is_cpu and not tensor.requires_grad
        # Torch may flip signs lazily (`is_neg`), which numpy would not see.
        if not is_usual or tensor.is_neg() or is_functorch_wrapped_tensor(tensor):
            return False
    return True


# ---- a tree as one vector ------------------------------------------------------------------------


def flatten(tree: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all leaves to one vector."""
    return torch.cat([value.reshape(-1) for value in tree.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """Split a vector into leaves, the inverse of :func:`flatten`.

    Args:
        vector: The numbers of all leaves, in order.
        like: A tree with the names and shapes of the result.

    Returns:
        A tree whose leaves are views of the vector.
    """
    parts = torch.split(vector, [value.numel() for value in like.values()])
    result: Tree = {}
    for (name, value), part in zip(like.items(), parts, strict=True):
        result[name] = part.view(value.shape)
    return result


def pack_leaves(tree: Mapping[str, Tensor]) -> Tree:
    """Copy a tree so that its leaves are views of one vector; not where types differ."""
    if len({value.dtype for value in tree.values()}) != 1:
        return dict(tree)
    return unflatten(flatten(tree), tree)


def as_vector(tree: Mapping[str, Tensor]) -> Tensor | None:
    """Return all leaves as one vector without a copy.

    Returns:
        The vector, or None unless the leaves have one type and lie one behind another in memory,
        as those of :func:`unflatten` do.

    >>> whole = torch.tensor([1.0, 2.0, 3.0])
    >>> as_vector({"w": whole[:2], "b": whole[2:]})
    tensor([1., 2., 3.])
    >>> as_vector({"b": whole[2:], "w": whole[:2]}) is None
    True
    """
    # A leaf without elements has no place in memory.
    leaves = [leaf for leaf in tree.values() if leaf.numel()]
    if not leaves:
        return None
    first = leaves[0]
    expected = first.data_ptr()
    for leaf in leaves:
        is_next = leaf.data_ptr() == expected and leaf.is_contiguous()
        if not is_next or leaf.dtype != first.dtype or leaf.device != first.device:
            return None
        expected += leaf.nbytes
    # Separate tensors may happen to lie side by side: all must be within the first one's memory,
    # which as_strided would otherwise refuse to leave.
    begin = first.storage_offset()
    numbers = size(tree)
    if (begin + numbers) * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.as_strided((numbers,), (1,), begin)


def is_finite(tree: Mapping[str, Tensor]) -> bool:
    """Whether no number of a tree is infinite or NaN.

    >>> is_finite({"w": torch.ones(2)}), is_finite({"w": torch.tensor([1.0, torch.nan])})
    (True, False)
    """
    return all(is_finite_leaf(leaf) for leaf in tree.values())


def is_finite_leaf(leaf: Tensor) -> bool:
    """Whether no number of a leaf is infinite or NaN."""
    if not leaf.is_floating_point():
        return True
    # One pass without a temporary in the usual case: a finite sum has only finite terms. A sum that
    # is not finite may only be too large, so then each number is looked at.
    if math.isfinite(float(leaf.sum())):
        return True
    return bool(torch.isfinite(leaf).all())


# ---- comparing -----------------------------------------------------------------------------------


def same_layout(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether two trees have the same names in the same order, with the same shapes."""
    if len(a) != len(b):
        return False
    for (name, leaf), (other_name, other) in zip(a.items(), b.items(), strict=True):
        if name != other_name or leaf.shape != other.shape:
            return False
    return True


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether names, types and numbers are equal: 0.0 equals -0.0, NaN equals nothing."""
    if a.keys() != b.keys():
        return False
    for name in a:
        # torch.equal alone would take 1 in float32 and 1 in float64 for equal.
        if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name]):
            return False
    return True


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether names, types, shapes and bits are equal: 0.0 is not -0.0, a NaN is itself.

    >>> identical({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
    False
    """
    if a.keys() != b.keys():
        return False
    for name in a:
        if a[name].dtype != b[name].dtype:
            return False
        # As integers of the same width: a view needs no copy, whatever the strides.
        integer = INTEGER_TYPES[a[name].dtype.itemsize]
        if not torch.equal(a[name].detach().view(integer), b[name].detach().view(integer)):
            return False
    return True


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between two trees; infinite if one contains NaN."""
    # In double precision: float32 could overflow, and torch does not subtract booleans.
    differences = map(lambda x, y: x.double() - y.double(), a, b)
    largest = 0.0
    for difference in differences.values():
        # max() of no elements is an error.
        if difference.numel():
            # max() passes a NaN on, and every comparison with NaN is false: infinity is comparable.
            largest = max(largest, float(difference.abs().max().nan_to_num(nan=torch.inf)))
    return largest


def digest(tree: Mapping[str, Tensor]) -> bytes:
    """Hash a tree to sixteen bytes, which depend on names, types, shapes and bits.

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
    """Digests of trees, each computed once per tree object."""

    def __init__(self) -> None:
        # By id, together with the tree: while it is alive, no other tree has that id.
        self._known: dict[int, tuple[Mapping[str, Tensor], bytes]] = {}

    def of(self, tree: Mapping[str, Tensor]) -> bytes:
        """Return the digest of a tree."""
        if id(tree) not in self._known:
            self._known[id(tree)] = (tree, digest(tree))
        return self._known[id(tree)][1]


__getattr__ = find_old_names(__name__)
