"""How reports become a model: a rule starts an average, reports are added to it one by one.

Here are the contract and the weighted mean, which is the default of every method and holds running
sums only. Rules that survive clients who send nonsense are in :mod:`fedgrove.parts.robust`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .. import gpu_copies, trees
from ..trees import Tree


class Average(Protocol):
    """An average under way."""

    def add(
        self, tree: Mapping[str, Tensor], weight: float, mask: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add one client's tree to an average under way.

        Where the mask is false the client does not have the coordinate; it has all of a leaf that
        the mask does not name, and nothing of one that the tree leaves out. A client of weight 0
        does not count.
        """

    def value(self) -> Tree:
        """The average so far, with the names, order and types of the previous tree.

        Where no client has a coordinate it keeps its previous value.
        """


class Averaging(Protocol):
    """A rule by which trees are averaged: a frozen dataclass, the field ``mean`` of methods."""

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """Start a new average of clients' trees.

        ``previous`` is the model that clients started from. None stands for zeros in the shapes and
        types of the first tree, as for updates and scores, which start from nothing.
        """


@dataclass(frozen=True)
class WeightedMean:
    r"""The mean over the clients that have a parameter, weighted by examples.

    :math:`\bar w_j = \sum_k n_k m_{kj} w_{kj} \big/ \sum_k n_k m_{kj}` (without masks FedAvg,
    McMahan et al. 2017, Alg. 1; with masks Hermes, Li et al. 2021). :math:`w_k` -> ``tree``,
    :math:`n_k` -> ``weight``, :math:`m_k` -> ``mask``. Only sums are kept, in double precision, so
    that the mean of one client, or of equal clients, is that client to the bit. One client is
    enough to move it anywhere.

    >>> mean = WeightedMean().start({"w": torch.tensor([7.0, 7.0, 7.0])})
    >>> mean.add({"w": torch.tensor([2.0, 0.0, 0.0])}, 1, {"w": torch.tensor([True, False, False])})
    >>> mean.add({"w": torch.tensor([8.0, 3.0, 0.0])}, 2, {"w": torch.tensor([True, True, False])})
    >>> mean.value()["w"]
    tensor([6., 3., 7.])
    """

    def start(self, previous: Mapping[str, Tensor] | None = None) -> Average:
        """Start a weighted mean, before any client is added."""
        return WeightedSums(previous)


CHUNK = 1 << 17
"""Numbers that are added at once on a CPU: in double precision they stay in a core's cache."""

FEW_NUMBERS = 1 << 13
"""Up to this many numbers a new tensor costs no more than the shared scratch memory."""


class _Scratch(threading.local):
    """Room for ``CHUNK`` numbers, the same each time: new memory takes as long as to add them."""

    def __init__(self) -> None:
        # Torch refuses to write into tensors of its inference mode when that has ended.
        with torch.inference_mode(False):
            self.numbers = torch.empty(CHUNK, dtype=torch.float64)


_SCRATCH = _Scratch()


class WeightedSums:
    """The running sums of a weighted mean.

    Trees whose leaves are views of one vector, as those that an engine trained, are added as that
    vector: to the bit what is added leaf by leaf, in a few operations in place of a few per leaf.
    If a GPU has a copy of them, the sums are on that GPU. Other trees become a vector where a mask
    comes with them.
    """

    def __init__(self, previous: Mapping[str, Tensor] | None) -> None:
        self._previous = previous
        self._sums: Tree = {}
        self._whole: Tensor | None = None
        """The vector that the sums are views of, if the first tree was one."""
        self._weights: dict[str, float | Tensor] = {}
        """By leaf: one number while no mask named it, then one per coordinate."""
        self._whole_weights: Tensor | None = None
        """The vector that these are views of, where masks came with trees that are vectors."""

    @torch.no_grad()
    def add(
        self, tree: Mapping[str, Tensor], weight: float, mask: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add one client's tree to the sums of a weighted mean."""
        self._previous = previous_of(self._previous, tree, weight)
        if not weight:
            return
        if not mask and self._add_whole(tree, weight):
            return
        self._bring_sums_to_cpu()
        if mask and self._add_whole_masked(tree, weight, mask):
            return
        self._whole_weights = None
        for name, leaf in tree.items():
            kept = None if mask is None else mask.get(name)
            values = leaf
            if kept is not None:
                # Masked values need not be 0, nor even finite: replace them, do not multiply.
                values = trees.where(kept, leaf)
            if name in self._sums:
                if leaf.shape != self._sums[name].shape:
                    raise ValueError(
                        f"{name} has shape {tuple(leaf.shape)}; the trees before have "
                        f"{tuple(self._sums[name].shape)}"
                    )
                _add_scaled(self._sums[name].view(-1), values.reshape(-1), weight)
            else:
                self._sums[name] = _scaled(values.reshape(-1), weight).view(leaf.shape)
                # From now on the sums are more than that vector.
                self._whole = None
            self._weights[name] = _more(self._weights.get(name, 0.0), weight, kept)

    def _add_whole(self, tree: Mapping[str, Tensor], weight: float) -> bool:
        """Add a tree as one vector, if it is one and the sums are too; returns whether it was."""
        is_first = not self._sums
        if not is_first and self._whole is None:
            return False
        vector = trees.as_vector(tree)
        if vector is None:
            return False
        if is_first:
            on_gpu = gpu_copies.find_copy(vector)
            values = vector if on_gpu is None else on_gpu
            self._whole = _scaled(values, weight)
            self._sums = trees.unflatten(self._whole, tree)
        elif self._whole is not None and trees.same_layout(tree, self._sums):
            _add_scaled(self._whole, gpu_copies.read_on(vector, self._whole.device), weight)
        else:
            return False
        self._whole_weights = None
        for name in tree:
            self._weights[name] = _more(self._weights.get(name, 0.0), weight, None)
        return True

    def _add_whole_masked(
        self, tree: Mapping[str, Tensor], weight: float, mask: Mapping[str, Tensor]
    ) -> bool:
        """Add a tree and its mask, each as one vector, on the CPU; returns whether it was."""
        is_first = not self._sums
        if not is_first and (self._whole is None or not trees.same_layout(tree, self._sums)):
            return False
        vector = _vector_or_copy(tree)
        if vector is None or vector.device.type != "cpu":
            return False
        kept = _whole_mask(tree, mask)
        # Masked values need not be 0, nor even finite: replace them, do not multiply.
        values = trees.where(kept, vector)
        if self._whole is None:
            self._whole = _scaled(values, weight)
            self._sums = trees.unflatten(self._whole, tree)
        else:
            _add_scaled(self._whole, values, weight)
        if self._whole_weights is None:
            self._whole_weights = self._weights_of_each(tree)
            self._weights = dict(trees.unflatten(self._whole_weights, tree))
        _add_scaled(self._whole_weights, kept.view(torch.uint8), weight)
        return True

    def _weights_of_each(self, tree: Mapping[str, Tensor]) -> Tensor:
        """The weight of each coordinate so far, as one vector."""
        parts = []
        for name, leaf in tree.items():
            weight = torch.as_tensor(self._weights.get(name, 0.0), dtype=torch.float64)
            parts.append(weight.expand(leaf.shape).reshape(-1))
        return torch.cat(parts)

    def _bring_sums_to_cpu(self) -> None:
        """What comes leaf by leaf is on the CPU."""
        if self._whole is not None and self._whole.is_cuda:
            self._whole = self._whole.cpu()
            self._sums = trees.unflatten(self._whole, self._sums)

    def value(self) -> Tree:
        """Return the weighted mean so far."""
        previous = known(self._previous)
        mean = self._whole_mean(previous)
        if mean is not None:
            return mean
        self._bring_sums_to_cpu()
        mean = {}
        for name, old in previous.items():
            if name not in self._sums:
                mean[name] = old
                continue
            weight = self._weights[name]
            if isinstance(weight, float):
                quotient = _divided(self._sums[name].view(-1), weight, old.dtype)
                mean[name] = quotient.view(old.shape)
                continue
            mean[name] = _mean_or(old, self._sums[name], weight)
        return mean

    def _whole_mean(self, previous: Mapping[str, Tensor]) -> Tree | None:
        """The mean as one vector, if the sums are one and every leaf has the same weight."""
        if self._whole is None or not trees.same_layout(previous, self._sums):
            return None
        types = {old.dtype for old in previous.values()}
        if self._whole_weights is not None and len(types) == 1:
            return self._whole_masked_mean(previous, self._whole, self._whole_weights)
        weights: set[float] = set()
        for weight in self._weights.values():
            if isinstance(weight, Tensor):
                # A mask named this leaf: each of its coordinates has another divisor.
                return None
            weights.add(weight)
        if len(types) > 1 or len(weights) > 1:
            return None
        there = _divided(self._whole, weights.pop(), types.pop())
        # The next round's clients, and the gate, need it on the GPU again.
        here = gpu_copies.copy_to_cpu(there) if there.is_cuda else there
        return trees.unflatten(here, previous)

    def _whole_masked_mean(
        self, previous: Mapping[str, Tensor], sums: Tensor, weights: Tensor
    ) -> Tree:
        """The mean as one vector, where a coordinate may be had by no client."""
        before = trees.as_vector(previous)
        if before is None:
            before = trees.flatten(previous)
        return trees.unflatten(_mean_or(before, sums, weights), previous)


# On a CPU part by part: whole copies in double precision would go through the memory several times.


def _scaled(values: Tensor, weight: float) -> Tensor:
    """``weight * values`` in double precision."""
    total = torch.empty_like(values, dtype=torch.float64)
    for part, own in _pairs(total, values):
        part.copy_(own).mul_(weight)
    return total


def _add_scaled(total: Tensor, values: Tensor, weight: float) -> None:
    """``total += weight * values`` in double precision."""
    if total.is_cuda:
        # A GPU's kernel converts the other type while it reads.
        total.add_(values, alpha=weight)
        return
    if total.numel() <= FEW_NUMBERS:
        total.add_(values.double(), alpha=weight)
        return
    for part, more in _pairs(total, values):
        in_double = _SCRATCH.numbers[: len(part)]
        in_double.copy_(more)
        part.add_(in_double, alpha=weight)


def _divided(total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """``total / weight`` in double precision, then in another type."""
    quotient = torch.empty_like(total, dtype=dtype)
    for part, own in _pairs(quotient, total):
        part.copy_(own / weight)
    return quotient


def _mean_or(old: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    """``total / weight`` where somebody has a coordinate, and the previous value elsewhere."""
    somebody_has_it = weight > 0
    # Where no client has it, divide by 1 instead of 0.
    quotient = total / trees.where(somebody_has_it, weight, 1.0)
    return trees.where(somebody_has_it, quotient.to(old.dtype), old)


def _pairs(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Two vectors part by part; a GPU takes them whole."""
    if a.is_cuda or a.numel() <= CHUNK:
        return ((a, b),)
    return zip(torch.split(a, CHUNK), torch.split(b, CHUNK), strict=True)


def _vector_or_copy(tree: Mapping[str, Tensor]) -> Tensor | None:
    """All leaves as one vector; None where they are of several types or on several devices."""
    kinds = {(leaf.dtype, leaf.device) for leaf in tree.values()}
    if len(kinds) != 1:
        return None
    vector = trees.as_vector(tree)
    # A copy takes less than what is done leaf by leaf otherwise.
    return trees.flatten(tree) if vector is None else vector


def _whole_mask(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tensor:
    """Where a client has the coordinates of a tree, as one vector."""
    parts = []
    for name, leaf in tree.items():
        if name in mask:
            parts.append(mask[name].reshape(-1))
        else:
            parts.append(torch.ones(leaf.numel(), dtype=torch.bool))
    return torch.cat(parts)


def _more(total: float | Tensor, weight: float, kept: Tensor | None) -> float | Tensor:
    """The weight of a leaf with one client more, who has it where ``kept``, or all of it."""
    if kept is None:
        return total + float(weight)
    # As bytes, which become doubles three times as fast as booleans; the product is exact.
    return kept.view(torch.uint8).double().mul_(weight).add_(total)


# ---- what all rules share ------------------------------------------------------------------------


def previous_of(
    previous: Mapping[str, Tensor] | None, tree: Mapping[str, Tensor], weight: float
) -> Mapping[str, Tensor]:
    """Return the tree that an average starts from; a wrong one is refused."""
    if not weight >= 0:
        raise ValueError(f"a client's weight is {weight}; it must be 0 or more")
    if previous is None:
        return trees.map(torch.zeros_like, tree)
    unexpected = tree.keys() - previous.keys()
    if unexpected:
        raise ValueError(
            f"a client sent tensors that the previous model lacks: {sorted(unexpected)}"
        )
    return previous


def known(previous: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Return the tree that an average started from; raises if there is none."""
    if previous is None:
        raise ValueError("the average of no trees: none was added, and there is no previous one")
    return previous
