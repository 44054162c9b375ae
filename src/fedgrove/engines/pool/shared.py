"""Trees in shared memory: one process writes them once, another reads them; no pipe is involved."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
from torch import Tensor

from ...errors import EngineError
from ...trees import Tree

Forest = Sequence[Mapping[str, Tensor]]
Place = tuple[str, torch.dtype, tuple[int, ...], int]
"""One leaf of a tree: (name, dtype, shape, offset in the block in bytes)."""

Index = tuple[tuple[Place, ...], ...]
"""The places of the leaves of several trees."""

ALIGN = 64
"""Every leaf starts at a multiple of this many bytes: any dtype may be viewed there."""

PREFIX = "fedgrove-"
"""What the names of all blocks start with."""


class SharedMemoryFull(EngineError):
    """There is no room for a block."""


@dataclass(frozen=True)
class Block:
    """Where trees lie in shared memory: the block's name, and the places of each tree's leaves.

    The name is None where the trees hold no numbers, and so need no memory.
    """

    name: str | None
    index: Index


def fresh_name() -> str:
    """An unused block name.

    Whoever knows a block's name can drop it, even after the process that wrote it was killed.
    """
    return PREFIX + secrets.token_hex(8)


def put(forest: Forest, name: str | None = None) -> Block:
    """Write trees into a new block. Whoever reads it last calls :func:`drop`."""
    index, size = lay_out(forest)
    # The operating system has no shared memory of size 0.
    if size == 0:
        return Block(None, index)
    memory = _reserved(name or fresh_name(), size)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    write(forest, index, buffer)
    # close() unmaps the memory without asking whether a tensor still points there: a later access
    # would crash the process, so the name goes first.
    del buffer
    memory.close()
    return Block(memory.name, index)


def aligned(size: int) -> int:
    """So many bytes, and those that are left out before the next leaf.

    >>> aligned(65)
    128
    """
    # -(-n // ALIGN) is n / ALIGN rounded up.
    return -(-size // ALIGN) * ALIGN


def lay_out(forest: Forest) -> tuple[Index, int]:
    """Where the leaves of trees go in a block, and how many bytes it has to have.

    A tensor that several trees have in common is there once.
    """
    index: list[tuple[Place, ...]] = []
    offsets: dict[int, int] = {}
    end = 0
    for tree in forest:
        places: list[Place] = []
        for leaf, value in tree.items():
            if id(value) not in offsets:
                offsets[id(value)] = end
                end += aligned(value.nbytes)
            places.append((leaf, value.dtype, tuple(value.shape), offsets[id(value)]))
        index.append(tuple(places))
    return tuple(index), end


def write(forest: Forest, index: Index, buffer: Tensor) -> None:
    """Copy trees to where :func:`lay_out` has put them in a buffer of bytes."""
    # numpy copies small tensors in a third of the time that torch takes.
    target = buffer.numpy()
    written: set[int] = set()
    for tree, places in zip(forest, index, strict=True):
        for leaf, dtype, _, offset in places:
            value = tree[leaf]
            if value.numel() == 0 or offset in written:
                continue
            written.add(offset)
            if dtype == torch.bfloat16:
                # numpy has none.
                value = value.detach().view(torch.int16)
            # Contiguous first: reshape leaves a vector with gaps as it is, which has no bytes.
            whole = np.ascontiguousarray(value.numpy(force=True))
            source = whole.reshape(-1).view(np.uint8)
            target[offset : offset + len(source)] = source


def view(index: Index, buffer: Tensor) -> list[Tree]:
    """The trees in a buffer, where they are; a tensor that they have in common is one tensor."""
    views: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}
    forest: list[Tree] = []
    for places in index:
        tree: Tree = {}
        for leaf, dtype, shape, offset in places:
            key = (offset, dtype, shape)
            if key not in views:
                end = offset + math.prod(shape) * dtype.itemsize
                views[key] = buffer[offset:end].view(dtype).view(shape)
            tree[leaf] = views[key]
        forest.append(tree)
    return forest


def _reserved(name: str, size: int) -> SharedMemory:
    """A new block whose memory is really there.

    Without asking for it, the first write into a full /dev/shm would kill the process.
    """
    try:
        memory = SharedMemory(name, create=True, size=size)
    except OSError as error:
        raise _full(size, error) from None
    descriptor = getattr(memory, "_fd", -1)
    if descriptor < 0 or not hasattr(os, "posix_fallocate"):
        # Neither on Windows nor on macOS, where memory is not in a file system of limited size.
        return memory
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        memory.close()
        memory.unlink()
        raise _full(size, error) from None
    return memory


def _full(size: int, error: OSError) -> SharedMemoryFull:
    return SharedMemoryFull(
        f"shared memory has no room for {size / 2**20:.1f} MiB ({error.strerror or error}); free "
        "some of /dev/shm, or take --engine serial."
    )


def get(block: Block) -> list[Tree]:
    """Copies of the trees in a block."""
    if block.name is None:
        return view(block.index, torch.empty(0, dtype=torch.uint8))
    memory = SharedMemory(block.name)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    forest = [
        {leaf: value.clone() for leaf, value in tree.items()} for tree in view(block.index, buffer)
    ]
    # Before close(), as in put. The leaves are copies and do not point there.
    del buffer
    memory.close()
    return forest


def drop(name: str | None) -> None:
    """Free a block's memory; does nothing if the block is already gone or never existed."""
    if name is None:
        return
    try:
        memory = SharedMemory(name)
    except (FileNotFoundError, ValueError):
        # ValueError: one that was made a moment ago and has no size yet, when Ctrl-C came. Its
        # file goes with the process.
        return
    memory.close()
    memory.unlink()
