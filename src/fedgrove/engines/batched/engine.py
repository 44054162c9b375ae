"""The batched engine: many clients stacked and trained as one. The default on CUDA.

How an exchange runs through this package:

1. :meth:`Batched.map` takes the jobs (a run and a task each) in chunks. ``_start_job`` reads the
   client's memory and makes its carry. On a GPU two chunks take turns (:mod:`.scheduling`).
2. ``_group_by_work`` groups the jobs with equal stages and networks, from any run. Learning rates
   and other floats may differ (:mod:`.jobs`), and so may masks, data and seeds.
3. ``_run_stages`` goes through a group's stages in order. Edit and Give run one client at a time,
   on the CPU. Train and Measure run stacked (``_run_stacked``): ``split_into_stacks``
   (:mod:`.jobs`) puts trees of equal shape together, ``_stack_size`` returns how many clients fit
   into memory, and ``_run_or_halve`` runs the stage. If it fails, because the memory is too small
   after all or because of a client, it runs on each half of the stack; only a client that fails
   alone is lost.
4. ``Launcher._launch_training`` (:mod:`.launching`) brings the clients to a common width
   (``make_width_adapters``), stacks their carries (``stack_carries``), leaves out jobs that would
   give equal results (``find_duplicates``), finds the examples on the device (:mod:`.device`) and
   plans the batches (``BatchPlan``).
5. ``train_stack`` (:mod:`.steps`) then calls ``Stack.advance`` step by step; on CUDA
   ``GraphCache.train`` (:mod:`.graphs`) replays captured graphs instead. A step runs the network in
   grouped kernels (:mod:`.grouped`, with :mod:`.convolution` on a GPU), or under
   ``torch.func.vmap`` if grouped kernels would give another result.
6. ``start_return`` starts the copy of the results to the CPU, and keeps a copy on the GPU for the
   gate and the mean; ``TrainResults.store`` puts them, in full width, into the jobs' carries.
   ``Launcher._launch_measuring`` runs a Measure stage: always under ``vmap``, without graphs.
7. ``_make_answer`` writes the client's memory and makes the report; then its bytes are counted, on
   CUDA by other processes (:mod:`.counting`).

Short batches are padded with weight 0. A client that has done all its steps is frozen, because Adam
would keep moving it. What several runs have in common, such as the rounds before their settings
begin to differ, is trained once.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ... import gpu_copies
from ...core import (
    Answer,
    Client,
    ClientInfo,
    Edit,
    Give,
    Job,
    Measure,
    Report,
    Task,
    Train,
)
from ...data import ClientData, Examples
from ...errors import EngineError, check
from ...nets import Net
from ...runs.run import Run
from ...seeds import use_threads
from ...wire.message_costs import BroadcastCosts
from ..work import (
    CLIENT_FAILURES,
    add_cost,
    explain_error,
    finish_work,
    lose_crashed,
    make_carry,
    merge_memory,
    number_stages,
    store_memory,
)
from .convolution import has_triton
from .counting import (
    Counters,
    PendingPacket,
    attach_costs,
    borrow_counters,
    get_counters,
    record_task_costs,
    start_counting_tasks,
)
from .device import preserve_device_rng, use_precision
from .graphs import GraphCache
from .grouped import can_stack
from .jobs import (
    ClientJob,
    Work,
    get_data_and_seed,
    list_shapes,
    run_alone,
    split_into_stacks,
    to_template,
    width_class,
)
from .launching import PROBE_CLIENTS, Launcher
from .scheduling import Chunk, finish_in_order, run_to_end, take_turns

Precision = Literal["fp32", "tf32", "bf16"]

WORTH_HALVING = 64
"""A GPU trains this many clients or more in two halves. With fewer, two trainings take longer than
the overlap saves."""
MEMORY_SHARE = 0.5
"""The share of the free memory that a stack may take; the rest is for other stacks' graphs."""

NO_EXAMPLES = Examples(torch.empty(0), torch.empty(0))
NO_DATA = ClientData(NO_EXAMPLES, NO_EXAMPLES, NO_EXAMPLES, ClientInfo(0))
"""Stands for the data of a client whose data could not be made."""


@dataclass(eq=False)
class Batched:
    """Trains many clients at once, on a GPU or a CPU.

    A stack has as many clients as the memory allows, which is measured once per kind of stack.

    Args:
        device: Where to train, as torch names devices.
        chunk: The most clients under way at once.
        graphs: Whether to capture the steps in CUDA graphs.
        precision: The precision of products on CUDA.
        count_bytes: Whether to count the bytes of messages.
        counters: The number of processes that count bytes (:mod:`.counting`); None: a number that
            depends on the cores on CUDA, and none on a CPU.
    """

    device: str = "cpu"
    chunk: int = 512
    graphs: bool = True
    precision: Precision = "fp32"
    count_bytes: bool = True
    counters: int | None = None
    name: str = field(default="batched", init=False)

    def __post_init__(self) -> None:
        is_possible = self.counters is None or self.counters >= 0
        check(is_possible, "counters", self.counters, "a number of processes, 0 or more, or None")
        self.close()

    def close(self) -> None:
        """Release the engine's memory on the GPU; the engine can be used again."""
        self._device = torch.device(self.device)
        self._threads = torch.get_num_threads()
        self._can_stack: WeakKeyDictionary[Net, bool] = WeakKeyDictionary()
        # Why vmap cannot run a stage, by the key of the work and the number of the stage in it.
        self._not_stacked: dict[tuple[Any, int], str] = {}
        # The same for the notes of a run, by verb.
        self._why_not_stacked: WeakKeyDictionary[Run, dict[str, str]] = WeakKeyDictionary()
        # How many stages ran on the CPU, for lack of memory.
        self._done_on_cpu: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
        self._stack_sizes: dict[Any, int] = {}
        self._stream: torch.cuda.Stream | None = None
        graph_cache = None
        if self.graphs and self._device.type == "cuda":
            graph_cache = GraphCache()
        self._launcher = Launcher(self._device, graph_cache)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs of stacked clients, chunk by chunk; answers come in job order.

        While a GPU trains one chunk, the CPU prepares the next and finishes the one before.
        """
        # Large enough for all clients under way, whose costs are found before they are needed.
        sent = BroadcastCosts(most=max(1, self.chunk))
        works: dict[tuple[int, str], Work] = {}
        under_way: deque[Chunk] = deque()
        # Before any work: a process cannot be forked once CUDA has started.
        with borrow_counters(self._counters()) as counters:
            for core_jobs in self._split_into_chunks(iter(jobs)):
                clients = sum(len(part.jobs) for part in under_way)
                while under_way and clients + len(core_jobs) > self.chunk:
                    clients -= len(under_way[0].jobs)
                    yield from self._finish_chunk(under_way.popleft(), sent, counters)
                under_way.append(self._start_chunk(core_jobs, works, sent, counters))
            while under_way:
                yield from self._finish_chunk(under_way.popleft(), sent, counters)

    def _split_into_chunks(self, stream: Iterator[Job]) -> Iterator[list[Job]]:
        """Split the jobs into chunks; on a GPU large chunks into halves, which take turns."""
        while chunk := list(islice(stream, self.chunk)):
            takes_turns = self._device.type == "cuda" and len(chunk) >= WORTH_HALVING
            if takes_turns and not may_be_duplicates(chunk):
                half = -(-len(chunk) // 2)
                yield chunk[:half]
                yield chunk[half:]
            else:
                yield chunk

    def _start_chunk(
        self,
        core_jobs: Sequence[Job],
        works: dict[tuple[int, str], Work],
        sent: BroadcastCosts,
        counters: Counters | None,
    ) -> Chunk:
        """Start some jobs; on a GPU their first training is then under way."""
        jobs = [self._start_job(run, task, works) for run, task in core_jobs]
        sent_before = _record_versions(jobs)
        steps = self._run_groups(jobs)
        with self._use_torch_settings():
            next(steps, None)
        tasks: list[PendingPacket] = []
        if self.count_bytes and (self._device.type == "cuda" or counters is not None):
            # While the GPU is busy.
            tasks = start_counting_tasks(jobs, sent, _choose_helpers(jobs, counters))
        return Chunk(jobs, sent_before, steps, tasks)

    def _counters(self) -> Counters | None:
        """Return the processes that count bytes; None if there are none."""
        on_cpu = self._device.type == "cpu"
        is_requested = self.counters is not None or not on_cpu
        if not self.count_bytes or not is_requested or self.counters == 0:
            return None
        return get_counters(self.counters)

    def _finish_chunk(
        self, part: Chunk, sent: BroadcastCosts, counters: Counters | None
    ) -> Iterator[tuple[Job, Answer]]:
        """Finish the stages of a chunk and yield its answers."""
        try:
            with self._use_torch_settings():
                run_to_end(part.steps)
        finally:
            self._launcher.recent.clear()
        _check_versions(part.sent_before)
        record_task_costs(part.tasks, sent)
        helpers = _choose_helpers(part.jobs, counters)
        for job, answer, costs in attach_costs(
            finish_in_order(part.jobs, self._make_answer), helpers
        ):
            if self.count_bytes:
                # Here, in job order: what a client already has decides what it is sent.
                answer = add_cost(job.run, job.task, answer, sent, costs)
            yield (job.run, job.task), answer

    def _start_job(self, run: Run, task: Task, works: dict[tuple[int, str], Work]) -> ClientJob:
        """Make a job with its first carry; ``works`` caches the work of earlier jobs."""
        work_key = (id(run), task.verb)
        if work_key not in works:
            works[work_key] = self._make_work(run, task.verb)
        memory = run.memory.read(task.to, task.memory)
        dtype = next(iter(run.params.values())).dtype
        try:
            client = run.client(task, memory)
            carry = make_carry(task, memory, dtype, run.marks(client))
        except Exception as error:
            # Its data could not be made, or a setting of its task is no number: no stage runs.
            no_client = Client(task.to, ClientInfo(0), NO_DATA, memory, run.net, run.params, seed=0)
            return ClientJob(
                run, task, no_client, {}, works[work_key], lost=lose_crashed(task, error)
            )
        return ClientJob(run, task, client, carry, works[work_key])

    def _make_answer(self, job: ClientJob) -> Answer:
        """Write the client's memory and return the answer."""
        if job.lost is not None:
            return job.lost
        outcome = job.outcome
        try:
            report = Report(
                job.task.to,
                outcome.give,
                job.client.info.examples,
                outcome.metrics,
                macs=job.macs,
            )
            remembered = merge_memory(job.task, job.client.memory, outcome)
        except Exception as error:
            # For example a last stage that returns no outcome.
            return lose_crashed(job.task, error)
        return store_memory(job.run, job.task, report, remembered)

    # ---- which jobs go together ------------------------------------------------------------------

    def _make_work(self, run: Run, verb: str) -> Work:
        """Return the stages of a verb, and the key of the jobs that can be done together."""
        stages = tuple(number_stages(run.work(verb)))
        templates: list[tuple[Any, tuple[float, ...]]] = []
        for _, stage in stages:
            # Edit and Give are not stacked: only their place among the stages must agree.
            if isinstance(stage, Train | Measure):
                hyperparameters: list[float] = []
                template = to_template(stage, hyperparameters)
                templates.append((template, tuple(hyperparameters)))
                # Refuses the name of a missing network.
                run.net_named(stage.net)
            else:
                templates.append((type(stage), ()))
        # All networks, because a stage can also use those that it does not name.
        nets = [(name, self._launcher.get_net_key(net)) for name, net in sorted(run.nets.items())]
        # Without the hyperparameters, which may differ.
        key = (tuple(nets), tuple(template for template, _ in templates))
        return Work(stages, key, tuple(templates))

    def _group_by_work(self, jobs: Sequence[ClientJob]) -> list[list[ClientJob]]:
        """Group jobs with equal stages and networks; their hyperparameters may differ."""
        groups: dict[Any, list[ClientJob]] = {}
        for job in jobs:
            groups.setdefault(job.work.key, []).append(job)
        return list(groups.values())

    # ---- stage by stage --------------------------------------------------------------------------

    @contextmanager
    def _use_torch_settings(self) -> Iterator[None]:
        """Use the engine's stream, threads and precision; restore torch's generators afterwards."""
        # The caller may have set one thread only (:mod:`fedgrove.runs.lockstep`).
        own_threads = use_threads(self._threads) if self._device.type == "cpu" else nullcontext()
        with (
            self._own_stream(),
            own_threads,
            preserve_device_rng(self._device),
            use_precision(self._device, self.precision),
            warnings.catch_warnings(),
        ):
            # vmap warns about calls that it has no rule for (attention), and loops over clients.
            warnings.filterwarnings("ignore", message=".*performance drop")
            yield

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Use a CUDA stream for training only.

        So the server can read the results of one chunk while the next is training.
        """
        if self._device.type != "cuda":
            yield
            return
        # Our kernels run on the current GPU, even if their tensors are on another.
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Copies of what clients are sent may not be complete.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    # Generators from here on (:mod:`.scheduling`): they yield while a GPU works for them.

    def _run_groups(self, jobs: Sequence[ClientJob]) -> Iterator[None]:
        """Run all stages of jobs of any kind."""
        return take_turns([self._run_stages(group) for group in self._group_by_work(jobs)])

    def _run_stages(self, jobs: Sequence[ClientJob]) -> Iterator[None]:
        """Run all stages of jobs with equal work; a lost job stops at once."""
        for number, (_, stage) in enumerate(jobs[0].work.stages):
            jobs_left = [job for job in jobs if job.lost is None]
            if isinstance(stage, Train | Measure):
                yield from self._run_stacked(jobs_left, number, stage)
            else:
                for job in jobs_left:
                    _run_edit_or_give(job, number)

    def _run_stacked(
        self, jobs: Sequence[ClientJob], number: int, stage: Train | Measure
    ) -> Iterator[None]:
        """Run a Train or Measure stage in as few stacks as shapes and memory allow."""
        if not jobs:
            return
        # An objective may call any of the method's networks.
        if not all(self._can_stack_net(net) for net in jobs[0].run.nets.values()):
            for job in jobs:
                job.macs += run_alone(job, number)
            return
        parts = []
        for stack in split_into_stacks(jobs, stage, is_on_gpu=self._device.type == "cuda"):
            # Possible duplicates next to each other, so that they come into one stack and are
            # trained once.
            stack.sort(key=get_data_and_seed)
            while stack:
                size = self._stack_size(stack, number)
                parts.append(self._run_or_halve(stack[:size], number))
                stack = stack[size:]
        yield from take_turns(parts)

    def _run_or_halve(self, jobs: list[ClientJob], number: int) -> Iterator[None]:
        """Run a stage on a stack; if it fails, run it on each half, down to single clients.

        It fails because of a client, or because the device has too little memory. Only the clients
        that fail alone are lost.
        """
        why = self._not_stacked.get((jobs[0].work.key, number))
        if why is not None:
            for job in jobs:
                # Its multiply-accumulates were counted when the stack was made.
                run_alone(job, number)
                self._note_unstacked(job, why)
            return
        before = [(job.carry, job.states) for job in jobs]
        try:
            yield from self._launcher.run_stage(jobs, number)
            return
        except GeneratorExit:
            # The caller wants no more answers.
            raise
        except CLIENT_FAILURES as error:
            if len(jobs) == 1:
                jobs[0].carry, jobs[0].states = before[0]
                self._try_unstacked(jobs[0], number, error)
                return
            memory_was_short = isinstance(error, torch.OutOfMemoryError)
        # Outside the handler: the exception refers to the frames that failed, and their tensors.
        for job, (carry, states) in zip(jobs, before, strict=True):
            job.carry = carry
            job.states = states
        half = len(jobs) // 2
        if memory_was_short:
            self._free_memory()
            # Kept for the next round.
            self._stack_sizes[self._memory_key(jobs, number)] = half
        yield from self._run_or_halve(jobs[:half], number)
        yield from self._run_or_halve(jobs[half:], number)

    def _free_memory(self) -> None:
        """Free what the device keeps for later stages and rounds."""
        if self._device.type == "cuda":
            # Other stacks may be under way, and must not lose their memory.
            torch.cuda.synchronize()
        if self._launcher.graph_cache is not None:
            self._launcher.graph_cache = GraphCache()
        self._launcher.recent.clear()
        gpu_copies.drop_all()
        torch.cuda.empty_cache()

    def _try_unstacked(self, job: ClientJob, number: int, failure: BaseException) -> None:
        """Run a stage that failed on a stack of one as the serial engine does; if that fails: lost.

        If it works, vmap was the cause, for example a loss with an `if` on data: such work is not
        stacked again. Or the device had too little memory even for one client, which other
        processes may have taken.
        """
        # An exit is intended.
        if not isinstance(failure, Exception):
            job.lost = lose_crashed(job.task, failure)
            return
        # Its multiply-accumulates were counted when the stack was made.
        run_alone(job, number)
        if isinstance(failure, torch.OutOfMemoryError):
            # Too little memory is no fault of the client's work, and in the next round there may be
            # more: another process may have it for now.
            self._done_on_cpu[job.run] = self._done_on_cpu.get(job.run, 0) + 1
        elif job.lost is None:
            why = explain_error(failure)
            self._not_stacked[job.work.key, number] = why
            self._note_unstacked(job, why)

    def _note_unstacked(self, job: ClientJob, why: str) -> None:
        verb = job.task.verb.partition(":")[0]
        self._why_not_stacked.setdefault(job.run, {}).setdefault(verb, why)

    def _can_stack_net(self, net: Net) -> bool:
        """Return whether clients of this network can be stacked; tried once per network."""
        if net not in self._can_stack:
            with preserve_device_rng(self._device):
                self._can_stack[net] = can_stack(net, self._device)
        return self._can_stack[net]

    def notes(self, run: Run) -> list[str]:
        """Return which networks of a run were not stacked, and what made the run slower."""
        notes = []
        if self._device.type == "cuda" and not has_triton():
            notes.append(
                "clients were trained without kernels of our own, which is slower: Triton is not "
                "installed or finds no C compiler (pip install triton; apt install gcc)"
            )
        for net in run.nets.values():
            if not self._can_stack.get(net, True):
                name = type(net.module).__name__
                notes.append(
                    f"clients with {name} were trained one after another, not at once: "
                    "torch.func.vmap cannot run its forward pass (one that branches on data, "
                    "mixes the examples of a batch, or has recurrent layers)"
                )
        times = self._done_on_cpu.get(run, 0)
        if times:
            notes.append(
                f"a client's work was done on the CPU {times} times, which is slower: "
                f"{self.device} had too little free memory for it. Another process may use it; or "
                "take a smaller batch"
            )
        for verb, why in self._why_not_stacked.get(run, {}).items():
            notes.append(
                f"a part of {verb} was done one client after another, not at once: torch.func.vmap "
                "cannot run it (a loss, metric, objective or optimiser that branches on data): "
                f"{why}"
            )
        return notes

    # ---- how many fit ----------------------------------------------------------------------------

    def _stack_size(self, jobs: list[ClientJob], number: int) -> int:
        """Return how many of these clients to stack; on CUDA measured once per kind of stack.

        The number must not change between rounds. It is kept, because in the second round the
        graphs of the first have taken their memory.
        """
        if self._device.type != "cuda":
            return len(jobs)
        if len(jobs) <= PROBE_CLIENTS and not self._stack_sizes:
            # So few are not measured, and no stack was too large before.
            return len(jobs)
        try:
            key = self._memory_key(jobs, number)
        except Exception:
            # The first client's carry is not made of trees: `_run_or_halve` finds it.
            return len(jobs)
        if key not in self._stack_sizes and len(jobs) > PROBE_CLIENTS:
            try:
                per_client = self._launcher.measure_bytes_per_client(jobs, number)
                free = torch.cuda.mem_get_info(self._device)[0]
                self._stack_sizes[key] = count_fitting_clients(per_client, free)
            except torch.OutOfMemoryError:
                # Not even these few fit; `_run_or_halve` halves further if it must.
                self._stack_sizes[key] = PROBE_CLIENTS // 2
            except Exception:
                # One of these few fails; `_run_or_halve` finds out which.
                return len(jobs)
        return self._stack_sizes.get(key, len(jobs))

    def _memory_key(self, jobs: Sequence[ClientJob], number: int) -> Any:
        """Return what decides the memory per client: work, stage, width and shapes of trees."""
        job = jobs[0]
        widest = max(width_class(each.thin) for each in jobs)
        return (job.work.key, number, widest, list_shapes(job.carry))


def may_be_duplicates(jobs: Sequence[Job]) -> bool:
    """Return whether some jobs have the same client and seed, and so should share a stack."""
    seen = set()
    for run, task in jobs:
        seen.add((id(run.federation), task.to, run.seed))
    return len(seen) < len(jobs)


def _choose_helpers(jobs: Sequence[ClientJob], counters: Counters | None) -> Counters | None:
    """Return the processes to use: none for a single job, which is counted as fast here."""
    if len(jobs) > 1:
        return counters
    return None


def _record_versions(jobs: Sequence[ClientJob]) -> list[tuple[Tensor, int]]:
    """Return the tensors that the jobs were sent, with how often each was written to."""
    tensors: dict[int, Tensor] = {}
    for job in jobs:
        for packet in job.task.send.values():
            for leaf in packet.values.values():
                tensors[id(leaf)] = leaf
    return [(leaf, leaf._version) for leaf in tensors.values() if not leaf.is_inference()]


def _check_versions(before: Sequence[tuple[Tensor, int]]) -> None:
    """Refuse work that changes its received tensors: clients and server share them."""
    if any(leaf._version != version for leaf, version in before):
        raise EngineError(
            "the method's work changed tensors that it was sent, in place; clone them first."
        )


def _run_edit_or_give(job: ClientJob, number: int) -> None:
    """Run a stage that is not stacked, for one client."""
    # The function may differ between runs: use the stage of the job.
    stage = job.work.stages[number][1]
    try:
        if isinstance(stage, Edit):
            job.carry = stage.f(job.carry, job.client)
        elif isinstance(stage, Give):
            job.outcome = finish_work(job.run, job.task, stage, job.carry, job.client)
            if job.states:
                job.outcome = replace(job.outcome, states=job.states)
    except CLIENT_FAILURES as error:
        job.lost = lose_crashed(job.task, error)


def count_fitting_clients(per_client: int, free: int, share: float = MEMORY_SHARE) -> int:
    """Return how many clients fit into a share of the free GPU memory, at least one.

    Args:
        per_client: Bytes per client.
        free: Bytes of free memory.
        share: The share of it that may be used.

    >>> count_fitting_clients(per_client=100, free=1000)
    5
    >>> count_fitting_clients(per_client=5000, free=1000)
    1
    """
    return max(1, int(free * share) // max(1, per_client))
