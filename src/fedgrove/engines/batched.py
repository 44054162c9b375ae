"""Many clients at once: stacked carries, stages under ``torch.func.vmap``. The default on CUDA.

Jobs whose stages, network and shapes agree train in one stack, whatever run they belong to; learning rates, pulls,
masks, data and seeds may differ. Edit and Give stay one client at a time, on the CPU. Short batches are padded with
weight 0; with BatchNorm, whose statistics take no weights, only batches of equal size are stacked. A client that has
done its steps is frozen: Adam would keep moving it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from .. import seeds, trees
from ..core import Batch, Carry, Client, Edit, Give, Measure, Outcome, Report, Stage, Task, Train
from ..errors import EngineError
from ..nets import Net
from ..parts import local
from ..rounds import Run
from ..trees import Tree
from . import grouped
from .graphs import Graphs
from .lift import fill, lift
from .shelf import Rows, Shelf
from .steps import Order, Plan, Stack, train, wide
from .work import Sent, begin, count_down, count_up, numbered

Precision = Literal["fp32", "tf32", "bf16"]


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


@dataclass(eq=False)
class Batched:
    """The engine; ``chunk`` is how many clients are under way at most, ``graphs`` captures the steps on CUDA."""

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
        self._graphs = Graphs() if self.graphs and self._at.type == "cuda" else None

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do the jobs, chunk by chunk; reports come in job order."""
        stream, sent = iter(jobs), Sent()
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
        carry = begin(task, memory, next(iter(run.params.values())).dtype)
        return Job(run, task, run.client(task, memory), carry, works[id(run), task.verb], held)

    def _close(self, job: Job, sent: Sent) -> Report:
        run, task, outcome = job.run, job.task, job.outcome
        report = Report(task.to, outcome.give, job.client.info.examples, outcome.metrics)
        if outcome.memory:
            kept = {**job.client.memory, **outcome.memory}
            run.memory.accept(task.to, run.memory.write(task.to, task.round, task.verb, kept, job.held))
        if not self.count_bytes:
            return report
        return replace(report, cost={"down": count_down(run, task, sent), "up": count_up(run, task, report)})

    # ---- who goes with whom ------------------------------------------------------------------------------------

    def _alike(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that do the same stages on the same network; their numbers may differ."""
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.work.key, []).append(job)
        return list(groups.values())

    def _work_of(self, run: Run, verb: str) -> Work:
        stages = tuple(numbered(run.work(verb)))
        shapes = tuple(lift(s, []) if isinstance(s, Train | Measure) else type(s) for _, s in stages)
        return Work(stages, (self._net_key(run.net), shapes))

    def _net_key(self, net: Net) -> Any:
        if id(net) not in self._nets:
            dtypes = tuple(v.dtype for v in net.params().values())
            self._nets[id(net)] = (net, (net.layout, str(net.module), dtypes))
        return self._nets[id(net)][1]

    def _work(self, jobs: Sequence[Job]) -> None:
        for number, (_, stage) in enumerate(jobs[0].work.stages):
            if isinstance(stage, Train | Measure):
                for stack in stackable(jobs, stage):
                    self._halving(self._train if isinstance(stage, Train) else self._measure, stack, number)
                continue
            for job in jobs:
                own = job.work.stages[number][1]
                if isinstance(own, Edit):
                    job.carry = own.f(job.carry, job.client)
                elif isinstance(own, Give):
                    job.outcome = own.f(job.carry, job.client)

    def _halving(self, do: Callable[[list[Job], int], None], jobs: list[Job], number: int) -> None:
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
        for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
            self._halving(do, half, number)

    # ---- the stages that stack ---------------------------------------------------------------------------------

    def _train(self, jobs: list[Job], number: int) -> None:
        """Sorted by steps, so that those still at work are always the first."""
        net = jobs[0].run.net
        size = local.batches_of(net, jobs[0].work.stages[number][1]).size  # type: ignore[arg-type]
        orders = {id(job): train_order(net, job, number) for job in jobs}
        jobs = sorted(jobs, key=lambda job: -sum(-(-len(examples) // size) for examples in orders[id(job)]))
        skeleton, numbers = lifted(jobs, number, self._at)
        rows = self._rows(jobs, "train")
        plan = Plan.of([orders[id(job)] for job in jobs], size, self._firsts(jobs, rows), numbers.dtype, self._at)
        carry = stacked([job.carry for job in jobs], self._at)
        seed_device(self._at, seeds.derive(number, *(job.client.seed for job in jobs)))
        stack = Stack(net, skeleton, carry, numbers, plan, rows, self._side_by_side(net, plan, rows))
        if self._graphs is not None:
            done = self._graphs.train(stack, (self._net_key(net), skeleton, stack.shape, rows.x.data_ptr()))
        else:
            done = train(stack)
        for key, tree in done.items():
            for job, own in zip(jobs, trees.unstack(home(tree), len(jobs)), strict=True):
                job.carry = {**job.carry, key: own}

    def _measure(self, jobs: list[Job], number: int) -> None:
        """f over stacked batches, summed; a client without a batch adds nothing."""
        net, stage = jobs[0].run.net, jobs[0].work.stages[number][1]
        assert isinstance(stage, Measure)
        rows = self._rows(jobs, stage.over.split)
        orders = [[job.client.order(stage.over, job.work.stages[number][0])] for job in jobs]
        skeleton, numbers = lifted(jobs, number, self._at)
        plan = Plan.of(orders, stage.over.size, self._firsts(jobs, rows), numbers.dtype, self._at)
        carry = stacked([job.carry for job in jobs], self._at)

        def one(numbers: Tensor, carry: Carry, batch: Batch) -> Tree:
            own = fill(skeleton, numbers)
            return own.f(net, carry[own.of], batch, carry)  # type: ignore[no-any-return]

        total: Tree = {}
        for s in range(plan.row.shape[1]):
            with torch.no_grad():
                value = vmap(one, randomness="different")(numbers, carry, plan.batch(rows, slice(None), s))
            value = {k: torch.where(wide(plan.steps > s, v), v, torch.zeros_like(v)) for k, v in value.items()}
            total = trees.map(torch.add, total, value) if total else value
        for job, order, own in zip(jobs, orders, trees.unstack(home(total), len(jobs)), strict=True):
            job.carry = {**job.carry, stage.name: own if len(order[0]) else {}}

    def _side_by_side(self, net: Net, plan: Plan, rows: Rows) -> bool:
        """Whether this network can be run in grouped kernels; tried once per network."""
        key = self._net_key(net)
        if key not in self._fits:
            self._fits[key] = plan.row.shape[1] > 0 and grouped.fits(net, plan.batch(rows, slice(None), 0).x)
        return self._fits[key]

    def _rows(self, jobs: Sequence[Job], split: str) -> Rows:
        return self._shelf.rows([job.run.federation for job in jobs], split)

    def _firsts(self, jobs: Sequence[Job], rows: Rows) -> list[int]:
        return [rows.first[id(job.run.federation), job.task.to] for job in jobs]


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
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Torch's generators are left as they were found."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
