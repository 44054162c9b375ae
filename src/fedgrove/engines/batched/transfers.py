"""Copies between the CPU and a card, through pinned memory: the CPU waits only where it must.

From ordinary memory a copy to a card begins when all that was launched before is done, and the
program stands still until then. From pinned memory it is queued like a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...trees import Tree


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device; on a card, the copy is under way."""
    if device.type != "cuda":
        return values.to(device)
    # Torch keeps pinned memory for the next copy, and does not reuse it before this one is done.
    return values.pin_memory().to(device, non_blocking=True)


def stacks_to_device(stacks: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Each sequence of tensors, all of one shape and type, as one on a device.

    On a card all of one type go in one copy.
    """
    if device.type != "cuda":
        return [torch.stack(tuple(leaves)).to(device) for leaves in stacks]
    places_by_type: dict[torch.dtype, list[int]] = {}
    for place, leaves in enumerate(stacks):
        places_by_type.setdefault(leaves[0].dtype, []).append(place)
    there: dict[int, Tensor] = {}
    for dtype, places in places_by_type.items():
        sizes = [len(stacks[place]) * stacks[place][0].numel() for place in places]
        here = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        for place, part in zip(places, torch.split(here, sizes), strict=True):
            leaves = stacks[place]
            torch.stack(tuple(leaves), out=part.view(len(leaves), *leaves[0].shape))
        moved = torch.split(here.to(device, non_blocking=True), sizes)
        for place, part in zip(places, moved, strict=True):
            there[place] = part.view(len(stacks[place]), *stacks[place][0].shape)
    return [there[place] for place in range(len(stacks))]


class Copies(NamedTuple):
    """A tree on its way to the CPU."""

    tree: Tree
    done: torch.cuda.Event | None
    """When it has arrived; None: it is there."""

    def wait(self) -> Tree:
        """The tree, once it is there."""
        if self.done is not None:
            self.done.synchronize()
        return self.tree


def start_to_cpu(tree: Tree) -> Copies:
    """Have a tree copied to the CPU; the CPU goes on."""
    if not any(v.is_cuda for v in tree.values()):
        return Copies(tree, None)
    pinned: Tree = {}
    for leaf, value in tree.items():
        pinned[leaf] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned[leaf].copy_(value, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return Copies(pinned, done)
