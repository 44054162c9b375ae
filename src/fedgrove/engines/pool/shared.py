"""Trees in shared memory: written once by one process, read by another, without a pipe in between."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from ...trees import Tree

Forest = Sequence[Mapping[str, Tensor]]
Place = tuple[str, torch.dtype, tuple[int, ...], int]
ALIGN = 64
PREFIX = "fedgrove-"


@dataclass(frozen=True)
class Block:
    """Where trees lie: the block's name, and for each tree its leaves as (name, dtype, shape, offset)."""

    name: str | None
    index: tuple[tuple[Place, ...], ...]


def fresh_name() -> str:
    """A name for a block that nobody has; who knows it can drop the block, even one a killed process wrote."""
    return PREFIX + secrets.token_hex(8)


def put(forest: Forest, called: str | None = None) -> Block:
    """Write trees into a new block. Whoever reads it last calls :func:`drop`."""
    index: list[tuple[Place, ...]] = []
    at = 0
    for tree in forest:
        leaves: list[Place] = []
        for name, v in tree.items():
            leaves.append((name, v.dtype, tuple(v.shape), at))
            at += -(-v.numel() * v.element_size() // ALIGN) * ALIGN
        index.append(tuple(leaves))
    if at == 0:
        return Block(None, tuple(index))
    memory = SharedMemory(called or fresh_name(), create=True, size=at)
    target = torch.frombuffer(memory.buf, dtype=torch.uint8)
    for tree, places in zip(forest, index, strict=True):
        for (_, dtype, shape, offset), v in zip(places, tree.values(), strict=True):
            n = v.numel() * v.element_size()
            target[offset : offset + n].view(dtype).view(shape).copy_(v.detach())
    del target
    memory.close()
    return Block(memory.name, tuple(index))


def get(block: Block) -> list[Tree]:
    """Copies of the trees in a block."""
    if block.name is None:
        return [
            {name: torch.empty(shape, dtype=dtype) for name, dtype, shape, _ in leaves}
            for leaves in block.index
        ]
    memory = SharedMemory(block.name)
    source = torch.frombuffer(memory.buf, dtype=torch.uint8)
    forest = [
        {name: _leaf(source, dtype, shape, at) for name, dtype, shape, at in leaves}
        for leaves in block.index
    ]
    del source
    memory.close()
    return forest


def _leaf(source: Tensor, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Tensor:
    value = torch.empty(shape, dtype=dtype)
    n = value.numel() * value.element_size()
    return value.copy_(source[at : at + n].view(dtype).view(shape))


def drop(name: str | None) -> None:
    """Give a block's memory back; one that is gone already, or never was, is no matter."""
    if name is None:
        return
    try:
        memory = SharedMemory(name)
    except FileNotFoundError:
        return
    memory.close()
    memory.unlink()
