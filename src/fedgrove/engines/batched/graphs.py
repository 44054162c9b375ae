"""CUDA graphs of a stack's step: captured once per shape, replayed from then on.

A step is some hundred small kernels, and launching them takes longer than running them. A graph
launches them at once. It reads and writes fixed addresses, so a captured stack is kept with its
buffers, and the next round's contents are copied into them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...core import Carry
from .steps import Stack, train_stack

MAX_CAPTURED = 64
"""Captured stacks, with their buffers, that are kept at most.

A sweep of many methods needs a graph for each of them in every round, and capturing one takes
longer than replaying it for a whole round: so many are kept, as long as there is room."""
MIN_FREE_SHARE = 1 / 3
"""The share of the device's memory that captured stacks leave free."""
STEPS_MULTIPLE = 16
"""Captured plans have room for a multiple of so many steps: cohorts with a few steps more or less
share a graph."""


class CapturedStack:
    """A stack whose steps are graphs: one for all clients, and smaller ones as clients finish."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        # Trees that all clients share are one row expanded. Every round copies its own trees in, so
        # each client needs a row that can be written.
        for tree in stack.carry.values():
            tree.update(
                {k: v.clone(memory_format=torch.contiguous_format) for k, v in tree.items()}
            )
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        # One memory pool for all graphs of the stack: they never run at the same time.
        self._pool = torch.cuda.graph_pool_handle()

    def advance(self, active: int, ragged: bool) -> None:
        """The next step of the first ``active`` clients, in the smallest graph that holds them."""
        # Sizes are halved, not fitted exactly: few graphs do for any number of active clients.
        size = len(self.stack.hyperparameters)
        while size // 2 >= active:
            size //= 2
        all_active = size == active
        key = (size, all_active, ragged)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, all_active, ragged)
        self._graphs[key].replay()

    def _capture(self, size: int, all_active: bool, ragged: bool) -> torch.cuda.CUDAGraph:
        stack = self.stack
        # The warm-up below really trains: what it changes is put back afterwards. A leaf of aux is
        # in this list if the objective begins with it (`Objective.begin`).
        buffers = [stack.step]
        for name in stack.updated_names:
            buffers.extend(stack.carry[name].values())
        before = [buffer.clone() for buffer in buffers]

        # Libraries choose kernels and allocate workspaces on first use, which must not happen
        # during the capture; torch asks for the warm-up to be on a stream of its own.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                stack.advance(size, all_active, ragged)
                # Back to the same step: behind the last one the plan may have no row to read.
                stack.step.copy_(before[0])
        torch.cuda.current_stream().wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            stack.advance(size, all_active, ragged)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
        return graph


class GraphCache:
    """The captured stacks of an engine, the least recently used first."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, CapturedStack] = {}

    def train(self, stack: Stack, key: Hashable) -> Carry:
        """All steps of a stack, in the buffers of a captured one of the same ``key`` if any."""
        # Taken out and put in again below, so that the order is that of last use.
        captured = self._captured.pop(key, None)
        steps = stack.plan.row.shape[1]
        if captured is None or captured.stack.plan.row.shape[1] < steps:
            stack.plan = stack.plan.with_room(STEPS_MULTIPLE)
            captured = CapturedStack(stack)
        else:
            captured.stack.load(stack)
        self._captured[key] = captured
        # The last one, which is about to be used, always stays.
        while len(self._captured) > 1 and (
            len(self._captured) > MAX_CAPTURED or self._memory_is_short()
        ):
            del self._captured[next(iter(self._captured))]
            torch.cuda.empty_cache()
        return train_stack(captured.stack, captured.advance)

    def _memory_is_short(self) -> bool:
        """Whether too little memory is free, counting what torch has reserved and does not use."""
        free, total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused < MIN_FREE_SHARE * total
