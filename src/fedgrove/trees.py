"""Arithmetic on named tensors: the only place that loops over layer names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Mask = dict[str, Tensor]
"""Same names, booleans; a name that is absent is not prunable."""


def map(f: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Apply ``f`` leaf by leaf; the trees must have the same names."""
    first, *rest = trees
    for other in rest:
        if other.keys() != first.keys():
            raise ValueError(f"trees differ in names: {sorted(set(first) ^ set(other))}")
    return {k: f(*(t[k] for t in trees)) for k in first}


def pick(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """The leaves called ``names``, in that order."""
    return {k: tree[k] for k in names}


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """``a - b``."""
    return map(torch.sub, a, b)


def masked(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    """``tree * mask``; what the mask does not name is left as it is."""
    return {k: v * mask[k] if k in mask else v for k, v in tree.items()}


def sq_norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all leaves."""
    return torch.stack([(v * v).sum() for v in tree.values()]).sum()


def flat(tree: Mapping[str, Tensor]) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([v.reshape(-1) for v in tree.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """The inverse of :func:`flat`: names and shapes as in ``like``."""
    parts = torch.split(vector, [v.numel() for v in like.values()])
    return {k: part.view(v.shape) for (k, v), part in zip(like.items(), parts, strict=True)}


def size(tree: Mapping[str, Tensor]) -> int:
    """How many numbers it holds."""
    return sum(v.numel() for v in tree.values())


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Many trees as one, along a new first dimension."""
    return map(lambda *v: torch.stack(v), *trees)


def unstack(tree: Mapping[str, Tensor], n: int) -> list[Tree]:
    """The inverse of :func:`stack`."""
    return [{k: v[i] for k, v in tree.items()} for i in range(n)]


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same names, types and numbers."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between two trees; infinite where a number is not one."""
    worst = [
        v.abs().max().nan_to_num(nan=torch.inf) for v in map(_apart, a, b).values() if v.numel()
    ]
    return float(torch.stack(worst).max()) if worst else 0.0


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return a.double() - b.double()
