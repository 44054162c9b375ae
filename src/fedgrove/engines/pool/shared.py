"""Trees in shared memory: one process writes them once, another reads them; no pipe is involved."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from ...errors import EngineError
from ...trees import Tree

Forest = Sequence[Mapping[str, Tensor]]
Place = tuple[str, torch.dtype, tuple[int, ...], int]
"""One leaf of a tree: (name, dtype, shape, offset in the block in bytes)."""

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
    index: tuple[tuple[Place, ...], ...]


def fresh_name() -> str:
    """An unused block name.

    Whoever knows a block's name can drop it, even after the process that wrote it was killed.
    """
    return PREFIX + secrets.token_hex(8)


def put(forest: Forest, name: str | None = None) -> Block:
    """Write trees into a new block. Whoever reads it last calls :func:`drop`."""
    index: list[tuple[Place, ...]] = []
    size = 0
    for tree in forest:
        places: list[Place] = []
        for leaf, value in tree.items():
            places.append((leaf, value.dtype, tuple(value.shape), size))
            # -(-n // ALIGN) is n / ALIGN rounded up.
            size += -(-_bytes(value) // ALIGN) * ALIGN
        index.append(tuple(places))
    # The operating system has no shared memory of size 0.
    if size == 0:
        return Block(None, tuple(index))
    memory = _reserved(name or fresh_name(), size)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    for tree, tree_places in zip(forest, index, strict=True):
        for leaf, dtype, shape, offset in tree_places:
            value = tree[leaf].detach()
            buffer[offset : offset + _bytes(value)].view(dtype).view(shape).copy_(value)
    # close() unmaps the memory without asking whether a tensor still points there: a later access
    # would crash the process, so the name goes first.
    del buffer
    memory.close()
    return Block(memory.name, tuple(index))


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
    forest: list[Tree] = []
    for places in block.index:
        forest.append({leaf: torch.empty(shape, dtype=dtype) for leaf, dtype, shape, _ in places})
    if block.name is None:
        return forest
    memory = SharedMemory(block.name)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    for tree, places in zip(forest, block.index, strict=True):
        for leaf, dtype, shape, offset in places:
            value = tree[leaf]
            value.copy_(buffer[offset : offset + _bytes(value)].view(dtype).view(shape))
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


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
