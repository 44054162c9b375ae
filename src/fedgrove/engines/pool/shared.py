"""Trees in shared memory: one process writes them, others read them, without a pipe."""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import trees
from ...errors import EngineError, spell_option
from ...trees import Tree

Forest = Sequence[Mapping[str, Tensor]]
Place = tuple[str, torch.dtype, tuple[int, ...], int]
"""One leaf of a tree: (name, dtype, shape, offset in the block in bytes)."""

Index = tuple[tuple[Place, ...], ...]
"""The places of the leaves of several trees."""

ALIGN = 64
"""Every leaf starts at a multiple of this many bytes: any dtype may be viewed there."""

BLOCK_PREFIX = "fedgrove-"
"""The names of all blocks start with this."""
SHM = Path("/dev/shm")
"""Where Linux lists blocks; other systems do not list them."""


class SharedMemoryFull(EngineError):
    """Shared memory has no room for a block."""


@dataclass(frozen=True)
class Block:
    """Where trees lie in shared memory: the block's name, and the places of each tree's leaves.

    The name is None if the trees are empty and need no memory.
    """

    name: str | None
    index: Index


def fresh_name() -> str:
    """Return an unused name for a block of shared memory, which names the server process.

    A process that knows a block's name can free it, even if the process that wrote it was killed.
    """
    # macOS allows 30 characters.
    return f"{BLOCK_PREFIX}{os.getpid():x}-{_find_namespace():x}-{secrets.token_hex(5)}"


@cache
def _find_namespace() -> int:
    """Return a number for the processes that this one can see; 0 if there is only one such group.

    Containers may share /dev/shm and not see each other's processes.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def sweep() -> None:
    """Free the blocks of this user's servers that were killed together with all their helpers.

    A server that ends in any other way leaves nothing behind: its resource tracker outlives it.
    """
    if not SHM.is_dir():
        return
    of_ours = re.compile(
        f"{re.escape(BLOCK_PREFIX)}([0-9a-f]+)-{_find_namespace():x}-[0-9a-f]{{10}}"
    )
    for path in SHM.iterdir():
        found = of_ours.fullmatch(path.name)
        # It may be gone by now: another server sweeps at the same time.
        with suppress(OSError):
            if found and path.stat().st_uid == os.getuid() and not _is_alive(int(found[1], 16)):
                path.unlink()


def _is_alive(process: int) -> bool:
    try:
        # Signal 0 sends nothing, and fails if there is no such process.
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def put(forest: Forest, name: str | None = None) -> Block:
    """Write trees into a new block of shared memory. The last reader calls :func:`drop`."""
    index, size = lay_out(forest)
    # The operating system has no shared memory of size 0.
    if size == 0:
        return Block(None, index)
    memory = _reserve(name or fresh_name(), size)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    write(forest, index, buffer)
    # close() unmaps the memory even if a tensor still points to it, and a later access would crash
    # the process. So the tensor is deleted first.
    del buffer
    memory.close()
    return Block(memory.name, index)


def align(size: int) -> int:
    """Round a number of bytes in shared memory up to a multiple of :data:`ALIGN`.

    >>> align(65)
    128
    """
    # -(-n // ALIGN) is n / ALIGN rounded up.
    return -(-size // ALIGN) * ALIGN


def lay_out(forest: Forest) -> tuple[Index, int]:
    """Return where the leaves of trees go in a block of shared memory, and its size in bytes.

    A tensor that several trees share is stored once.
    """
    index: list[tuple[Place, ...]] = []
    offsets: dict[int, int] = {}
    end = 0
    for tree in forest:
        places: list[Place] = []
        for leaf, value in tree.items():
            if id(value) not in offsets:
                offsets[id(value)] = end
                end += align(value.nbytes)
            places.append((leaf, value.dtype, tuple(value.shape), offsets[id(value)]))
        index.append(tuple(places))
    return tuple(index), end


def write(forest: Forest, index: Index, buffer: Tensor) -> None:
    """Copy trees into shared memory, to the places from :func:`lay_out`."""
    # numpy copies small tensors three times as fast as torch.
    target = buffer.numpy()
    written: set[int] = set()
    for tree, places in zip(forest, index, strict=True):
        for leaf, dtype, _, offset in places:
            value = tree[leaf]
            if value.numel() == 0 or offset in written:
                continue
            written.add(offset)
            if dtype == torch.bfloat16:
                # numpy has no bfloat16.
                value = value.detach().view(torch.int16)
            # Contiguous first: reshape keeps a vector with gaps, which cannot be viewed as bytes.
            whole = np.ascontiguousarray(value.numpy(force=True))
            source = whole.reshape(-1).view(np.uint8)
            target[offset : offset + len(source)] = source


def view(index: Index, buffer: Tensor) -> list[Tree]:
    """Return the trees in shared memory without copying; a shared tensor is one tensor."""
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


def _reserve(name: str, size: int) -> SharedMemory:
    """Make a new block and allocate its memory.

    Without the allocation, the first write into a full /dev/shm would kill the process.
    """
    try:
        memory = SharedMemory(name, create=True, size=size)
    except OSError as error:
        raise _full(size, error) from None
    descriptor = getattr(memory, "_fd", -1)
    if descriptor < 0 or not hasattr(os, "posix_fallocate"):
        # Windows and macOS have neither; their shared memory is no file system of limited size.
        return memory
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        memory.close()
        memory.unlink()
        raise _full(size, error) from None
    return memory


def _full(size: int, error: OSError) -> SharedMemoryFull:
    """Return the error for shared memory without enough room."""
    return SharedMemoryFull(
        f"shared memory has no room for {size / 2**20:.1f} MiB ({error.strerror or error}); free "
        f"some of /dev/shm, or use {spell_option('engine', 'serial')}."
    )


def get(block: Block) -> list[Tree]:
    """Return copies of the trees in a block of shared memory."""
    if block.name is None:
        return view(block.index, torch.empty(0, dtype=torch.uint8))
    memory = _open_untracked(block.name)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    forest = [trees.map(Tensor.clone, tree) for tree in view(block.index, buffer)]
    # Before close(), as in put. The leaves are copies and do not point into the block.
    del buffer
    memory.close()
    return forest


def _open_untracked(name: str) -> SharedMemory:
    """Open a block for reading, without registering it with Python's resource tracker.

    Its writer registered it. If a reader registered it again just after another process had freed
    it, the tracker would warn of a leak when the program ends.
    """
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    # Older versions have no such argument, and always call this function.
    register = resource_tracker.register
    resource_tracker.register = _do_not_register
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


def _do_not_register(name: Sized, rtype: str) -> None:
    """Stand in for ``resource_tracker.register``."""


def drop(name: str | None) -> None:
    """Free a block of shared memory; do nothing if the block does not exist."""
    if name is None:
        return
    try:
        memory = SharedMemory(name)
    except (FileNotFoundError, ValueError):
        # ValueError: Ctrl-C came just after the block was made, and it has no size yet. Its file
        # goes with the process.
        return
    memory.close()
    memory.unlink()
