"""Jobs under way, and what makes a stack of them: who trains together, which rows, which numbers, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core import Carry, Client, Measure, Outcome, Stage, Task, Train
from ..nets import Net
from ..parts import local
from ..rounds import Run
from ..shrink import Thin, settled, structured
from ..trees import Tree
from .lift import lift
from .steps import Order


@dataclass(frozen=True, eq=False)
class Work:
    """What a run's clients do on a verb: the stages, and what jobs must share to be done together."""

    stages: tuple[tuple[int, Stage], ...]
    key: Any


@dataclass(eq=False)
class Job:
    """A task under way."""

    run: Run
    task: Task
    client: Client
    carry: Carry
    work: Work
    held: str | None
    outcome: Outcome = field(default_factory=Outcome)


def stackable(jobs: Sequence[Job], stage: Train | Measure) -> list[list[Job]]:
    """Jobs whose starting trees and masks have the same names and shapes."""
    names = (stage.start, stage.mask) if isinstance(stage, Train) else (stage.of,)
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        key = tuple(shape_of(job.carry.get(name)) for name in names)
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def shape_of(tree: Tree | None) -> Any:
    """The names and shapes of a tree."""
    return None if tree is None else tuple((k, tuple(v.shape), v.dtype) for k, v in tree.items())


def train_order(net: Net, job: Job, number: int) -> Order:
    """The client's epochs, as every engine draws them."""
    place, stage = job.work.stages[number]
    assert isinstance(stage, Train)
    over = local.batches_of(net, stage)
    passes = (job.client.order(over, place, epoch) for epoch in range(local.recipe(stage).epochs))
    return [examples for examples in passes if len(examples)]


def lifted(jobs: Sequence[Job], number: int, device: torch.device) -> tuple[Any, Tensor]:
    """What the jobs' stages have in common, and the numbers in which they differ: (jobs, numbers)."""
    found: list[list[float]] = []
    for job in jobs:
        found.append([])
        skeleton = lift(job.work.stages[number][1], found[-1])
    dtype = next(iter(jobs[0].run.params.values())).dtype
    return skeleton, torch.tensor(found, dtype=dtype, device=device).view(len(jobs), -1)


def stacked(carries: Sequence[Carry], device: torch.device) -> Carry:
    """The trees that all carries have in the same shape, one row per carry."""
    first, *rest = carries
    shared = [k for k, tree in first.items() if all(shape_of(c.get(k)) == shape_of(tree) for c in rest)]
    return {k: {leaf: _stack([c[k][leaf] for c in carries], device) for leaf in first[k]} for k in shared}


def _stack(leaves: Sequence[Tensor], device: torch.device) -> Tensor:
    """Rows on the device; a leaf that many carries share is moved once."""
    places: dict[int, int] = {}
    which = [places.setdefault(id(leaf), len(places)) for leaf in leaves]
    distinct = torch.stack([leaves[which.index(i)] for i in range(len(places))]).to(device)
    if len(places) == 1:
        return distinct.expand(len(leaves), *distinct.shape[1:])
    return distinct if len(places) == len(leaves) else distinct[torch.tensor(which, device=device)]


def home(tree: Tree) -> Tree:
    """The tree on the CPU, copied through pinned memory."""
    if not any(v.is_cuda for v in tree.values()):
        return tree
    pinned = {
        k: torch.empty(v.shape, dtype=v.dtype, pin_memory=True).copy_(v, non_blocking=True) for k, v in tree.items()
    }
    torch.cuda.synchronize()
    return pinned


# ---- clients whose masks remove whole channels --------------------------------------------------------------------


def alike_thin(jobs: Sequence[Job], number: int) -> list[Thin]:
    """The small nets to train in place of the masked ones, if all clients have masks that leave the same widths.

    Else none: clients of unlike widths stack at full width, under their masks.
    """
    found: list[Thin] = []
    for job in jobs:
        thin = structured(job.run.net, job.carry.get(_mask_of(job, number)))
        if thin is None or (found and thin.net.layout.named_shapes != found[0].net.layout.named_shapes):
            return []
        found.append(thin)
    return found


def _mask_of(job: Job, number: int) -> str:
    stage = job.work.stages[number][1]
    assert isinstance(stage, Train)
    return stage.mask


def widened(thin: Thin, done: Carry) -> Carry:
    """What a small net was trained to, in full width."""
    return {name: thin.widen(tree) for name, tree in done.items()}


def as_if_small(job: Job, number: int, done: Carry) -> Carry:
    """What was trained masked, with the statistics of removed channels as a smaller net would leave them."""
    mask = job.carry.get(_mask_of(job, number))
    if mask is None or not job.run.net.layout.buffers:
        return done
    return {name: settled(job.run.net, tree, mask) for name, tree in done.items()}
