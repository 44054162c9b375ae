"""CUDA graphs of a stack's step: captured once per shape, replayed ever after.

A step is some hundred small kernels, and launching them takes longer than running them. A graph launches them at once.
Captured stacks are kept, with their buffers, for the next round; those used least recently go first.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...core import Carry
from .steps import Stack, train

KEPT, SPARE = 64, 1 / 3
"""Captured stacks, with their buffers, that are kept at most, and the share of the device's memory that stays free.

A sweep of many methods needs a graph for each of them in every round, and capturing one takes longer than replaying it
for a whole round: so many are kept, as long as there is room."""
ROOM = 16
"""Plans have room for a multiple of so many steps, so that cohorts of unlike sizes share a graph."""


class Captured:
    """A stack whose steps are graphs: one for all clients, and for the halves that are left as clients finish."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        for tree in (
            stack.carry.values()
        ):  # real rows everywhere: what a graph reads is written anew every round
            tree.update(
                {k: v.clone(memory_format=torch.contiguous_format) for k, v in tree.items()}
            )
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def advance(self, b: int, ragged: bool) -> None:
        """The next step of the first ``b`` clients, in the smallest graph that holds them."""
        size = len(self.stack.numbers)
        while size // 2 >= b:
            size //= 2
        key = (size, size == b, ragged)
        if key not in self._graphs:
            self._graphs[key] = self._captured(*key)
        self._graphs[key].replay()

    def _captured(self, size: int, all_at_work: bool, ragged: bool) -> torch.cuda.CUDAGraph:
        stack = self.stack
        buffers = [stack.step, *(v for key in stack.moving for v in stack.carry[key].values())]
        before = [v.clone() for v in buffers]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # libraries choose their kernels before, not during, the capture
            for _ in range(2):
                stack.advance(size, all_at_work, ragged)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            stack.advance(size, all_at_work, ragged)
        for v, old in zip(buffers, before, strict=True):
            v.copy_(old)
        return graph


class Graphs:
    """The captured stacks of an engine."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, Captured] = {}

    def train(self, stack: Stack, key: Hashable) -> Carry:
        """All steps of a stack, in a captured one of the same ``key`` where there is one."""
        held = self._captured.pop(key, None)
        if held is None or held.stack.plan.row.shape[1] < stack.plan.row.shape[1]:
            stack.plan = stack.plan.roomy(ROOM)
            held = Captured(stack)
        else:
            held.stack.take(stack)
        self._captured[key] = held
        while len(self._captured) > 1 and (len(self._captured) > KEPT or self._crowded()):
            del self._captured[next(iter(self._captured))]
            torch.cuda.empty_cache()
        return train(held.stack, held.advance)

    def _crowded(self) -> bool:
        """Whether what is left on the device, what torch holds in reserve included, is too little."""
        free, total = torch.cuda.mem_get_info()
        reserve = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + reserve < SPARE * total
