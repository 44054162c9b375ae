"""Many clients at once: stacked carries, stages under ``torch.func.vmap``. The default on CUDA.

Jobs whose stages, network and shapes agree train in one stack, whatever run they belong to; learning rates, pulls,
masks, data and seeds may differ. Edit and Give stay one client at a time, on the CPU. Short batches are padded with
weight 0, which BatchNorm is told of (:mod:`.ragged`). A client that has done its steps is frozen: Adam would keep
moving it. What several runs have in common, such as the rounds before their settings begin to differ, is trained once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from ... import nets, seeds, trees
from ...core import Batch, Carry, Edit, Give, Measure, Report, Task, Train
from ...errors import EngineError
from ...nets import Net
from ...parts import local
from ...runs.run import Run
from ...trees import Tree
from ...wire.count import BroadcastCosts, count_down, count_up
from ..work import initial_carry, numbered
from . import grouped
from .graphs import Graphs
from .lift import fill, lift
from .shelf import Rows, Shelf
from .stacking import (
    Job,
    Work,
    alike,
    band,
    fitted,
    home,
    lifted,
    shape_of,
    stackable,
    stacked,
    train_order,
    who,
)
from .steps import Plan, Stack, train, wide

Precision = Literal["fp32", "tf32", "bf16"]
PROBED = 16
"""Clients on which the memory of a kind of stack is measured; as many or fewer are simply tried."""
SHARE = 0.5
"""Of the device's free memory, what a stack may take; what is left is for the graphs of other stacks."""


@dataclass(eq=False)
class Batched:
    """The engine; ``chunk`` is how many clients are under way at most, ``graphs`` captures the steps on CUDA.

    On CUDA a stack takes as many of them as the memory allows, which is measured once per kind of stack.
    """

    device: str = "cpu"
    chunk: int = 512
    graphs: bool = True
    precision: Precision = "fp32"
    count_bytes: bool = True
    name: str = field(default="batched", init=False)

    def __post_init__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what lies on the device."""
        self._at = torch.device(self.device)
        self._shelf = Shelf(self._at)
        self._nets: dict[int, tuple[Net, Any]] = {}
        self._fits: dict[Any, bool] = {}
        self._sizes: dict[Any, int] = {}
        self._graphs = Graphs() if self.graphs and self._at.type == "cuda" else None

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do the jobs, chunk by chunk; reports come in job order."""
        stream, sent = iter(jobs), BroadcastCosts()
        works: dict[tuple[int, str], Work] = {}
        while chunk := [self._open(run, task, works) for run, task in islice(stream, self.chunk)]:
            with own_randomness(self._at), computing(self._at, self.precision):
                for group in self._alike(chunk):
                    self._work(group)
            for i, job in enumerate(chunk):
                chunk[i] = None  # type: ignore[call-overload]
                yield job.run, self._close(job, sent)

    def _open(self, run: Run, task: Task, works: dict[tuple[int, str], Work]) -> Job:
        if (id(run), task.verb) not in works:
            works[id(run), task.verb] = self._work_of(run, task.verb)
        held = run.memory.files.get(task.to)
        memory = run.memory.read(held)
        carry = initial_carry(task, memory, next(iter(run.params.values())).dtype)
        return Job(run, task, run.client(task, memory), carry, works[id(run), task.verb], held)

    def _close(self, job: Job, sent: BroadcastCosts) -> Report:
        run, task, outcome = job.run, job.task, job.outcome
        report = Report(task.to, outcome.give, job.client.info.examples, outcome.metrics)
        if outcome.memory:
            kept = {**job.client.memory, **outcome.memory}
            run.memory.accept(
                task.to, run.memory.write(task.to, task.round, task.verb, kept, job.held)
            )
        if not self.count_bytes:
            return report
        return replace(
            report,
            cost={
                "down": count_down(task, run.method.codec, run.held, sent),
                "up": count_up(task, report, run.method.codec, run.held),
            },
        )

    # ---- who goes with whom ------------------------------------------------------------------------------------

    def _alike(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that do the same stages on the same network; their numbers may differ."""
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.work.key, []).append(job)
        return list(groups.values())

    def _work_of(self, run: Run, verb: str) -> Work:
        stages = tuple(numbered(run.work(verb)))
        shapes = tuple(
            lift(s, []) if isinstance(s, Train | Measure) else type(s) for _, s in stages
        )
        return Work(stages, (self._net_key(run.net), shapes))

    def _net_key(self, net: Net) -> Any:
        if id(net) not in self._nets:
            dtypes = tuple(v.dtype for v in net.params().values())
            # What is not ours may hold settings that do not show: it goes with itself alone.
            name = str(net.module) if nets.is_ours(net.module) else id(net)
            self._nets[id(net)] = (net, (net.layout, name, dtypes))
        return self._nets[id(net)][1]

    def _work(self, jobs: Sequence[Job]) -> None:
        for number, (_, stage) in enumerate(jobs[0].work.stages):
            if isinstance(stage, Train | Measure):
                do = self._train if isinstance(stage, Train) else self._measure
                for stack in stackable(jobs, stage):
                    stack.sort(
                        key=who
                    )  # those that may be alike side by side: they are trained once
                    while stack:
                        size = self._size(do, stack, number)
                        self._halving(do, stack[:size], number)
                        stack = stack[size:]
                continue
            for job in jobs:
                own = job.work.stages[number][1]
                if isinstance(own, Edit):
                    job.carry = own.f(job.carry, job.client)
                elif isinstance(own, Give):
                    job.outcome = own.f(job.carry, job.client)

    # ---- how many fit ------------------------------------------------------------------------------------------

    def _size(self, do: Do, jobs: list[Job], number: int) -> int:
        """How many of these clients to stack. Found out once per kind of stack: it must not change between rounds, and
        by the second round the graphs of the first have taken their memory."""
        if self._at.type != "cuda":
            return len(jobs)
        key = self._kind(jobs, number)
        if key not in self._sizes and len(jobs) > PROBED:
            try:
                per_client = self._probe(do, jobs, number)
                self._sizes[key] = fits(per_client, torch.cuda.mem_get_info(self._at)[0])
            except torch.OutOfMemoryError:  # not even these few: halving goes on from here
                self._sizes[key] = PROBED // 2
        return self._sizes.get(key, len(jobs))

    def _kind(self, jobs: Sequence[Job], number: int) -> Any:
        """Stacks of a kind take the same memory per client: the work, its place, and the trees that are stacked."""
        job = jobs[0]
        return (
            job.work.key,
            number,
            band(job.small),
            tuple((k, shape_of(t)) for k, t in sorted(job.carry.items())),
        )

    def _probe(self, do: Do, jobs: Sequence[Job], number: int) -> int:
        """Bytes per client that the allocator takes from the device when a few clients really do the stage's first
        steps: trees, optimiser, activations, workspaces, graphs and their pools. What they get is thrown away."""
        unlike = {
            (id(job.run.federation), job.task.to): job for job in jobs
        }  # twins would be trained once
        few = [
            replace(job)
            for job in sorted(unlike.values(), key=lambda job: -job.client.info.examples)[:PROBED]
        ]
        stage = few[0].work.stages[number][1]
        self._rows(
            few, stage.over.split if isinstance(stage, Measure) else "train"
        )  # shared by all: not per client
        kept, self._graphs = self._graphs, None if self._graphs is None else Graphs()
        torch.cuda.empty_cache()  # so that what is reserved from here on is reserved for these few
        torch.cuda.reset_peak_memory_stats(self._at)
        before = torch.cuda.memory_reserved(self._at)
        try:
            with own_randomness(self._at):
                do(few, number, steps=2)
            grown = torch.cuda.max_memory_reserved(self._at) - before
        finally:
            self._graphs = kept
            torch.cuda.synchronize(self._at)
            torch.cuda.empty_cache()  # and what they took is free again
        return -(-grown // len(few))

    def _halving(self, do: Do, jobs: list[Job], number: int) -> None:
        """A stage on a stack; where the device has too little memory, on either half of it."""
        try:
            do(jobs, number)
            return
        except torch.OutOfMemoryError:
            if len(jobs) == 1:
                raise EngineError(
                    f"client {jobs[0].task.to} alone needs more memory than {self.device} has; take a smaller batch."
                ) from None
        self._graphs = Graphs() if self._graphs is not None else None
        torch.cuda.empty_cache()
        self._sizes[self._kind(jobs, number)] = (
            len(jobs) // 2
        )  # the next round need not find out again
        for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
            self._halving(do, half, number)

    # ---- the stages that stack ---------------------------------------------------------------------------------

    def _train(self, jobs: list[Job], number: int, steps: int | None = None) -> None:
        """Sorted by steps, so that those still at work are always the first; all steps, or only the first ones."""
        size = local.batches_of(jobs[0].run.net, jobs[0].work.stages[number][1]).size  # type: ignore[arg-type]
        orders = {id(job): train_order(job.run.net, job, number) for job in jobs}
        jobs = sorted(
            jobs, key=lambda job: -sum(-(-len(examples) // size) for examples in orders[id(job)])
        )
        ways = fitted(jobs)
        net = jobs[0].run.net if ways[0].common is None else ways[0].common.net
        skeleton, numbers = lifted(jobs, number, self._at)
        carry = stacked(
            [way.narrowed(job.carry) for way, job in zip(ways, jobs, strict=True)], self._at
        )
        like = alike(jobs, numbers, carry)
        once = sorted(set(like))
        if len(once) < len(jobs):
            numbers, carry = (
                numbers[once],
                {n: {k: v[once] for k, v in tree.items()} for n, tree in carry.items()},
            )
        each = [jobs[i] for i in once]
        rows = self._rows(each, "train")
        passes, firsts = [orders[id(job)] for job in each], self._firsts(each, rows)
        plan = cut(Plan.of(passes, size, firsts, numbers.dtype, self._at), steps)
        key = (
            self._net_key(jobs[0].run.net),
            net.layout.named_shapes,
            ways[0].common and ways[0].common.norms,
        )
        seed_device(self._at, seeds.derive(number, *(job.client.seed for job in each)))
        stack = Stack(
            net, skeleton, carry, numbers, plan, rows, self._side_by_side(key, net, plan, rows)
        )
        if self._graphs is not None:
            done = self._graphs.train(stack, (key, skeleton, stack.shape, rows.x.data_ptr()))
        else:
            done = train(stack)
        back = {name: trees.unstack(home(tree), len(each)) for name, tree in done.items()}
        places = {j: place for place, j in enumerate(once)}
        for way, job, j in zip(ways, jobs, like, strict=True):
            own = {name: trained[places[j]] for name, trained in back.items()}
            job.carry = {**job.carry, **way.widened(own)}

    def _measure(self, jobs: list[Job], number: int, steps: int | None = None) -> None:
        """f over stacked batches, summed; a client without a batch adds nothing."""
        net, stage = jobs[0].run.net, jobs[0].work.stages[number][1]
        assert isinstance(stage, Measure)
        rows = self._rows(jobs, stage.over.split)
        orders = [[job.client.order(stage.over, job.work.stages[number][0])] for job in jobs]
        skeleton, numbers = lifted(jobs, number, self._at)
        plan = cut(
            Plan.of(orders, stage.over.size, self._firsts(jobs, rows), numbers.dtype, self._at),
            steps,
        )
        carry = stacked([job.carry for job in jobs], self._at)

        def one(numbers: Tensor, carry: Carry, batch: Batch) -> Tree:
            own = fill(skeleton, numbers)
            return own.f(net, carry[own.of], batch, carry)  # type: ignore[no-any-return]

        total: Tree = {}
        for s in range(plan.row.shape[1]):
            with torch.no_grad():
                value = vmap(one, randomness="different")(
                    numbers, carry, plan.batch(rows, slice(None), s)
                )
            value = {
                k: torch.where(wide(plan.steps > s, v), v, torch.zeros_like(v))
                for k, v in value.items()
            }
            total = trees.map(torch.add, total, value) if total else value
        for job, order, own in zip(
            jobs, orders, trees.unstack(home(total), len(jobs)), strict=True
        ):
            job.carry = {**job.carry, stage.name: own if len(order[0]) else {}}

    def _side_by_side(self, key: Any, net: Net, plan: Plan, rows: Rows) -> bool:
        """Whether this network can be run in grouped kernels; tried once per network."""
        if key not in self._fits:
            if plan.row.shape[1] == 0 or plan.row.shape[2] < 2:
                return False  # nothing to try it on; perhaps the next stack has more
            self._fits[key] = grouped.fits(net, plan.batch(rows, slice(None), 0).x)
        return self._fits[key]

    def _rows(self, jobs: Sequence[Job], split: str) -> Rows:
        return self._shelf.rows([job.run.federation for job in jobs], split)

    def _firsts(self, jobs: Sequence[Job], rows: Rows) -> list[int]:
        last = max(
            0, len(rows.y) - 1
        )  # a client without examples may begin behind the last one: padding must not
        return [min(rows.first[id(job.run.federation), job.task.to], last) for job in jobs]


class Do(Protocol):
    """A stage on a stack of jobs: all its steps, or only the first ones."""

    def __call__(self, jobs: list[Job], number: int, steps: int | None = None) -> None:
        """Do it; the jobs' carries take the result."""


def fits(per_client: int, free: int, share: float = SHARE) -> int:
    """How many clients of so many bytes fit into a share of the free memory; one is always tried.

    >>> fits(per_client=100, free=1000), fits(per_client=5000, free=1000)
    (5, 1)
    """
    return max(1, int(free * share) // max(1, per_client))


def cut(plan: Plan, steps: int | None) -> Plan:
    """The first steps of a plan; None: all."""
    if steps is None:
        return plan
    return Plan._make([*(t[:, :steps] for t in plan[:4]), plan.steps.clamp(max=steps)])


def seed_device(device: torch.device, seed: int) -> None:
    """Dropout of a stack draws in an order of its own, but always the same."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """fp32 in full, or with the matrix units' shorter products (tf32), or with bf16 activations."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    cuda.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    cudnn.benchmark = True  # shapes come again and again: let it try its kernels once
    try:
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
        ):
            yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Torch's generators are left as they were found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
