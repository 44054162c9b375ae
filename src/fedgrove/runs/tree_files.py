"""Trees that have files of their own in a checkpoint, so that one that stays is written once.

A state may hold a tree for every group or client, such as the model that each of them holds, of
which few change in a round. What is written again each time is then most of a checkpoint's work.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .store import write_named

STEM = "tree"
"""How the names of these files begin."""
LEAST = 1 << 16
"""Bytes of a tree from which on a file of its own takes less time than writing it again."""

THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""So many files are written at once: of a checksum and a write, all but a little is done without
Python's lock. Half the cores, since threads without one of their own take longer than none."""

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
        self._asked: dict[Key, tuple[Mapping[str, Tensor], dict[str, str]]] = {}
        self._now: dict[Key, Written] = {}
        self._before: dict[Key, Written] = {}
        self.there: set[str] = set()
        """Files that a checked manifest names. They are never written again, not even with the same
        bytes: these might not yet be on the disk when the power fails."""

    def start(self) -> None:
        """Begin a checkpoint: what the one before it did not hold may have been deleted."""
        self._before = self._now
        self._now = {}
        self._asked = {}

    def forget(self) -> None:
        """The folder was changed."""
        self._now = {}

    @property
    def names(self) -> list[str]:
        """The files of the checkpoint that was written last, each once."""
        return sorted({written.name for written in self._now.values()})

    def stand_in(self, value: Mapping[Any, Any]) -> dict[str, str] | None:
        """What stands for a tree in a manifest; :meth:`write` fills in the name of its file.

        None for what goes elsewhere: what is no tree, or too small.
        """
        if not is_large_tree(value):
            return None
        key = tuple((name, id(leaf)) for name, leaf in value.items())
        if key not in self._asked:
            self._asked[key] = (value, {"file": ""})
        return self._asked[key][1]

    def write(self, folder: Path) -> None:
        """Write the trees that were asked for since :meth:`start`, those that are new."""
        new = {key: tree for key, (tree, _) in self._asked.items() if key not in self._before}
        if THREADS == 1 or len(new) < 2:
            self._finish({}, folder)
            return
        # Made anew: a thread takes little to start, and none is left behind where a process forks.
        with ThreadPoolExecutor(THREADS) as threads:
            under_way = {
                key: threads.submit(_written, tree, folder, self.there) for key, tree in new.items()
            }
            # Meanwhile the others are looked at.
            self._finish(under_way, folder)

    def _finish(self, under_way: Mapping[Key, Future[Written]], folder: Path) -> None:
        """Write what threads do not, wait for what they do, and give each tree its file's name."""
        for key, (tree, _) in self._asked.items():
            if key in under_way:
                continue
            found = self._before.get(key)
            if found is None or not _is_unchanged(found, tree):
                found = _written(tree, folder, self.there)
            self._now[key] = found
        for key, future in under_way.items():
            self._now[key] = future.result()
        for key, (_, stand_in) in self._asked.items():
            stand_in["file"] = self._now[key].name
        # Or they would be held until the next checkpoint.
        self._asked = {}


def _written(tree: Mapping[str, Tensor], folder: Path, there: set[str]) -> Written:
    """Write a tree, unless its file is there."""
    refs = tuple(weakref.ref(leaf) for leaf in tree.values())
    marks = tuple(mark_of(leaf) for leaf in tree.values())
    return Written(refs, marks, write_named(folder, STEM, tree, there))


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
    bits = leaf.detach()
    if leaf.dtype.itemsize == 4:
        # In the same width a tensor can be read as it lies, which takes half the calls.
        return leaf._version, int(bits.view(torch.int32).sum())
    flat = bits.contiguous().view(-1)
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
