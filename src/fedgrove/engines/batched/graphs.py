"""CUDA graphs of a stack's step: captured once per shape, replayed from then on.

A step has hundreds of small kernels, and launching them takes longer than running them. A graph
launches them at once. It reads and writes fixed addresses, so a captured stack is kept with its
buffers, and the next round's contents are copied into them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...core import Carry
from .steps import Stack, train_stack

MAX_CAPTURED = 64
"""The most captured stacks to keep, with their buffers, as long as there is memory.

A sweep of many methods needs a graph for each of them in every round, and capturing one takes
longer than replaying it for a whole round."""
MIN_FREE_SHARE = 1 / 3
"""The share of the device's memory that captured stacks leave free."""
STEPS_MULTIPLE = 16
"""Captured plans have room for a multiple of this many steps: cohorts with a few steps more or less
share a graph."""
ROOMS = (
    *(1, 2, 3, 4, 5, 6, 8),
    *(10, 12, 15, 20, 25, 30, 40, 50, 60, 80),
    *(100, 120, 150, 200, 250, 300, 400, 500),
)
"""Captured stacks have room for one of these numbers of clients: groups that gain or lose a few
clients share a graph. Usual cohort sizes are among them, so that most stacks are full."""
LITTLE_ROOMS = (4, 10, 20, 40, 80, 160, 320)
"""The numbers for steps with little work: empty rows take almost no time."""
LITTLE_STEP = 1 << 30
"""Multiply-accumulates of a stack's forward pass, up to which a GPU takes about as long for half
the work. Capturing a step takes as long as a whole round of such steps."""


class CapturedStack:
    """A stack whose steps are graphs: one for all clients, and smaller ones as clients finish.

    If a step is little work (``is_little``), one graph is used for any number of clients.
    """

    def __init__(self, stack: Stack, is_little: bool = False) -> None:
        # Trees that all clients share are one row expanded. Every round copies its trees in, so
        # each client needs a row that can be written; make_room also does that.
        stack.make_room(find_room(len(stack.hyperparameters), is_little), STEPS_MULTIPLE)
        self.stack = stack
        self._is_little = is_little
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._can_capture = True
        # One memory pool for all graphs of the stack: they never run at the same time.
        self._pool = torch.cuda.graph_pool_handle()

    def advance(self, active: int, ragged: bool) -> None:
        """Do the next step of the first ``active`` clients, in the smallest graph with room."""
        size = len(self.stack.hyperparameters)
        # Sizes are halved, not exact: so a few graphs serve any number of active clients.
        while size // 2 >= active and not self._is_little:
            size //= 2
        # A graph that checks who is active also works if all are.
        all_active = size == active and not self._is_little
        key = (size, all_active, ragged)
        if key not in self._graphs and self._can_capture:
            graph = self._capture(size, all_active, ragged)
            if graph is None:
                self._can_capture = False
            else:
                self._graphs[key] = graph
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self.stack.advance(size, all_active, ragged)

    def _capture(self, size: int, all_active: bool, ragged: bool) -> torch.cuda.CUDAGraph | None:
        """Capture a step as a graph; None if it cannot be captured, for example if it calls `item`.

        A user's objective may do so. Any other failure already shows in the warm-up.
        """
        stack = self.stack
        # The warm-up below really trains: what it changes is restored afterwards. A leaf of aux is
        # in this list if the objective begins with it (`Objective.begin`).
        buffers = [stack.step]
        for name in stack.updated_names:
            buffers.extend(stack.carry[name].values())
        before = [buffer.clone() for buffer in buffers]
        # The generator is restored too: dropout must not depend on whether a graph existed.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn_before = generator.get_state()

        # Libraries choose kernels and allocate workspaces on first use, which must not happen
        # during the capture; torch requires a separate stream for the warm-up.
        training_stream = torch.cuda.current_stream()
        warm_up_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up_stream.wait_stream(training_stream)
        with torch.cuda.stream(warm_up_stream):
            for _ in range(2):
                stack.advance(size, all_active, ragged)
                # Back to the same step: after the last one the plan may have no row to read.
                stack.step.copy_(before[0])
        training_stream.wait_stream(warm_up_stream)

        graph = torch.cuda.CUDAGraph()
        was_captured = True
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                stack.advance(size, all_active, ragged)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            was_captured = False
            torch.cuda.synchronize()
        finally:
            # After a failed capture torch stays on the stream of the capture.
            torch.cuda.set_stream(training_stream)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
        generator.set_state(drawn_before)
        return graph if was_captured else None


class GraphCache:
    """The captured stacks of an engine, the least recently used first."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, CapturedStack] = {}

    def train(self, stack: Stack, key: Hashable) -> Carry:
        """Do all steps of a stack, in the buffers of a captured one with this ``key`` if any."""
        is_little = is_little_step(stack)
        key = (find_room(len(stack.hyperparameters), is_little), is_little, key)
        # Removed and added again below, so that the order is that of last use.
        captured = self._captured.pop(key, None)
        steps = stack.plan.row.shape[1]
        if captured is not None and captured.stack.plan.row.shape[1] >= steps:
            captured.stack.load(stack)
            self._captured[key] = captured
        else:
            captured = CapturedStack(stack, is_little)
            self._captured[key] = captured
            self._drop_oldest()
        return train_stack(captured.stack, captured.advance)

    def _drop_oldest(self) -> None:
        """Drop the least recently used stacks while memory is short; the last one always stays."""
        while len(self._captured) > 1 and (
            len(self._captured) > MAX_CAPTURED or self._memory_is_short()
        ):
            # It may still be running.
            torch.cuda.synchronize()
            del self._captured[next(iter(self._captured))]
            torch.cuda.empty_cache()

    def _memory_is_short(self) -> bool:
        """Return whether too little memory is free; memory reserved but unused by torch is free."""
        free, total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused < MIN_FREE_SHARE * total


def is_little_step(stack: Stack) -> bool:
    """Return whether a step of all clients is too little work for a GPU."""
    clients, _, batch_size = stack.plan.row.shape
    return clients * batch_size * stack.net.layout.macs <= LITTLE_STEP


def find_room(clients: int, is_little: bool = False) -> int:
    """Return the number of clients that a captured stack of ``clients`` clients has room for.

    It depends only on their number and their work: dropout draws other bits in a stack of another
    size, and must not depend on what was captured before.

    >>> [find_room(clients) for clients in (7, 10, 101, 501)]
    [8, 10, 120, 501]
    >>> [find_room(clients, is_little=True) for clients in (1, 7, 10, 101)]
    [4, 10, 10, 160]
    """
    rooms = LITTLE_ROOMS if is_little else ROOMS
    return next((room for room in rooms if room >= clients), clients)
