"""Trees that have files of their own in a checkpoint, so that one that stays is written once.

A state may hold a tree for every group or client, such as the model that each of them holds, of
which few change in a round. What is written again each time is then most of a checkpoint's work.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .store import write_named

STEM = "tree"
"""How the names of these files begin."""
LEAST = 1 << 16
"""Bytes of a tree from which on a file of its own takes less time than writing it again."""

Key = tuple[tuple[str, int], ...]
"""Names and ids of tensors."""


class Written(NamedTuple):
    """A file that was written, and what it holds."""

    tensors: tuple[weakref.ref[Tensor], ...]
    marks: tuple[tuple[int, int], ...]
    """What each of them was like (:func:`mark_of`)."""
    name: str


class TreeFiles:
    """The files of the trees in a run's checkpoints."""

    def __init__(self) -> None:
        self._now: dict[Key, Written] = {}
        self._before: dict[Key, Written] = {}
        self.there: set[str] = set()
        """Files that a checked manifest names. They are never written again, not even with the same
        bytes: these might not yet be on the disk when the power fails."""

    def start(self) -> None:
        """Begin a checkpoint: what the one before it did not hold may have been deleted."""
        self._before = self._now
        self._now = {}

    def forget(self) -> None:
        """The folder was changed."""
        self._now = {}

    @property
    def names(self) -> list[str]:
        """The files of the checkpoint that was begun last, each once."""
        return sorted({written.name for written in self._now.values()})

    def file_of(self, value: Mapping[Any, Any], folder: Path) -> str | None:
        """The name of a tree's file, which is written if it is new.

        None for what goes elsewhere: what is no tree, or too small.
        """
        if not is_large_tree(value):
            return None
        key = tuple((name, id(leaf)) for name, leaf in value.items())
        found = self._now.get(key) or self._before.get(key)
        if found is None or not _is_unchanged(found, value):
            refs = tuple(weakref.ref(leaf) for leaf in value.values())
            marks = tuple(mark_of(leaf) for leaf in value.values())
            found = Written(refs, marks, write_named(folder, STEM, value, self.there))
        self._now[key] = found
        return found.name


def is_large_tree(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds named tensors, and enough of them."""
    size = 0
    for name, leaf in value.items():
        # Torch does not count what is written into tensors of its inference mode.
        if not isinstance(name, str) or not isinstance(leaf, Tensor) or leaf.is_inference():
            return False
        size += leaf.nbytes
    return size >= LEAST


def mark_of(leaf: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to: torch's count, and a sum of its bits.

    Torch does not count what its own fused optimisers, BatchNorm, ``.data`` or numpy write.
    """
    flat = leaf.detach().contiguous().view(-1)
    # Not words as wide as the sum: of their highest bits, the signs, two changes would cancel.
    begin = flat.storage_offset() * flat.element_size()
    fits = begin % 4 == 0 and flat.nbytes % 4 == 0
    word = torch.int32 if fits else torch.uint8
    return leaf._version, int(flat.view(word).sum())


def _is_unchanged(written: Written, tree: Mapping[str, Tensor]) -> bool:
    """Whether these are the very tensors that were written, and are as they were."""
    # An id is a tensor's only while it lives.
    for ref, mark, leaf in zip(written.tensors, written.marks, tree.values(), strict=True):
        if ref() is not leaf or mark_of(leaf) != mark:
            return False
    return True
