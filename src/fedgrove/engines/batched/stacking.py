"""Jobs under way, and what makes a stack of them: who trains together, which rows, which numbers, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...channels.shrink import cut, structured
from ...channels.thin import Thin
from ...core import Carry, Client, Measure, Outcome, Stage, Task, Train
from ...nets import Net
from ...parts import local
from ...runs.run import Run
from ...trees import Tree
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
    small: Thin | None = None
    """The net that the stage at hand can train in place of the masked one."""


BANDS = 8
"""Clients train together if they keep about the same share of channels: to so many parts of all."""


def stackable(jobs: Sequence[Job], stage: Train | Measure) -> list[list[Job]]:
    """Jobs whose starting trees and masks have the same names and shapes, and whose small nets are about as wide."""
    names = (stage.start, stage.mask) if isinstance(stage, Train) else (stage.of,)
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        job.small = (
            structured(job.run.net, job.carry.get(stage.mask)) if isinstance(stage, Train) else None
        )
        key = (*(shape_of(job.carry.get(name)) for name in names), band(job.small))
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def band(thin: Thin | None) -> int:
    """How wide a small net is, in parts of the whole."""
    kept = [] if thin is None else [*thin.channels.values()]
    return (
        -(-BANDS * sum(int(k.sum()) for k in kept) // sum(len(k) for k in kept)) if kept else BANDS
    )


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
    shared = [
        k for k, tree in first.items() if all(shape_of(c.get(k)) == shape_of(tree) for c in rest)
    ]
    return {
        k: {leaf: _stack([c[k][leaf] for c in carries], device) for leaf in first[k]}
        for k in shared
    }


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
        k: torch.empty(v.shape, dtype=v.dtype, pin_memory=True).copy_(v, non_blocking=True)
        for k, v in tree.items()
    }
    torch.cuda.synchronize()
    return pinned


# ---- clients whose masks remove whole channels --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit:
    """How a client's trees go into a stack, and back: ``common`` is the width of the stack, ``own`` the client's."""

    net: Net
    common: Thin | None = None
    own: Thin | None = None

    def narrowed(self, carry: Carry) -> Carry:
        """All trees in the width of the stack."""
        return carry if self.common is None else self.common.narrowed(carry)

    def widened(self, done: Carry) -> Carry:
        """What was trained, in full width; the statistics of removed channels as a smaller net would leave them."""
        common, own = self.common, self.own
        if common is not None:
            done = {name: common.widen(tree) for name, tree in done.items()}
        if own is None or own is common or not self.net.layout.buffers:
            return done
        return {name: own.settled(tree) for name, tree in done.items()}


def fitted(jobs: Sequence[Job]) -> list[Fit]:
    """The nets to train in place of the masked ones: all as wide, layer by layer, as the widest client's.

    A client that keeps fewer channels trains some that it lacks, masked. If one keeps all, all train in full width.
    """
    thin = [job.small for job in jobs if job.small is not None]
    common: Sequence[Thin | None] = [None] * len(jobs)
    if len(thin) == len(jobs):
        widths = {name: max(int(t.channels[name].sum()) for t in thin) for name in thin[0].channels}
        wider = [_as_wide(job.run.net, t, widths) for job, t in zip(jobs, thin, strict=True)]
        if len({(tuple(t.small.items()), t.norms) for t in wider}) == 1:
            common = wider
    return [Fit(job.run.net, each, job.small) for job, each in zip(jobs, common, strict=True)]


def _as_wide(net: Net, thin: Thin, widths: Mapping[str, int]) -> Thin:
    """The net with so many channels: those that stay, and the first of those that do not."""
    more = {name: widths[name] - int(kept.sum()) for name, kept in thin.channels.items()}
    if not any(more.values()):
        return thin
    return cut(
        net,
        {
            name: kept | (~kept & ((~kept).cumsum(0) <= more[name]))
            for name, kept in thin.channels.items()
        },
    )


# ---- what several runs have in common -----------------------------------------------------------------------------


def who(job: Job) -> tuple[int, int, int]:
    """Whose data, and drawn how: jobs that differ in this share nothing."""
    return id(job.run.federation), job.task.to, job.client.seed


def alike(jobs: Sequence[Job], numbers: Tensor, carry: Carry) -> list[int]:
    """For every job the first that will end as it does: itself, or one of another run.

    Jobs of one client and seed that begin with the same numbers, to the bit, end with the same: seeds decide the rest.
    """
    seen: dict[Any, int] = {}
    like = [seen.setdefault(who(job), i) for i, job in enumerate(jobs)]
    leaves = [
        numbers,
        *(leaf for tree in carry.values() for leaf in tree.values() if leaf.stride(0)),
    ]
    open_ = [i for i, j in enumerate(like) if i != j]
    while open_:
        first, equal = (
            [like[i] for i in open_],
            torch.ones(len(open_), dtype=torch.bool, device=numbers.device),
        )
        for leaf in leaves:
            equal &= (leaf[open_] == leaf[first]).unsqueeze(-1).flatten(1).all(1)
        open_ = [i for i, same in zip(open_, equal.tolist(), strict=True) if not same]
        leads: dict[int, int] = {}
        for i in open_:  # the first that differs is asked next: perhaps the others are like it
            like[i] = leads.setdefault(like[i], i)
        open_ = [i for i in open_ if like[i] != i]
    return like
