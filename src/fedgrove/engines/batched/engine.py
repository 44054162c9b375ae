"""The batched engine: many clients stacked and trained as one. The default on CUDA.

How an exchange runs through this package:

1. :meth:`Batched.map` takes the jobs (a run and a task each) in parts. ``_start_job`` reads what
   the client remembers and makes its carry. On a card two parts take turns (:mod:`.turns`).
2. ``_group_by_work`` groups the jobs that do the same stages on the same network, whatever run they
   belong to. Learning rates, pulls and other floats may differ (:mod:`.templates`), as may masks,
   data and seeds.
3. ``_run_stages`` goes through a group's stages in order. Edit and Give run one client at a time,
   on the CPU. Train and Measure run stacked (``_run_stacked``): ``split_into_stacks``
   (:mod:`.stacking`) puts trees of one shape together, ``_stack_size`` says how many clients fit
   into memory, and ``_run_or_halve`` runs the stage, on either half of the stack if the memory does
   not suffice after all. A client whose work raises an error is lost, and nobody else
   (``_run_or_lose``).
4. ``_launch_training`` brings the clients to a common width (``width_adapters``), stacks their
   carries (``stack_carries``), leaves out jobs that would end the same (``find_duplicates``), finds
   the examples on the device (:mod:`.device_data`) and lays them out in batches (``BatchPlan``).
5. ``train_stack`` (:mod:`.steps`) then calls ``Stack.advance`` step by step; on CUDA
   ``GraphCache.train`` (:mod:`.graphs`) has it replay captured graphs instead. A step runs the
   network in grouped kernels (:mod:`.grouped`, with :mod:`.convolution` on a card and
   :mod:`.ragged` for BatchNorm on short batches), or under ``torch.func.vmap`` where grouped
   kernels would not give the same result.
6. ``bring_back`` has the results copied to the CPU, and leaves a twin on the card for gate and
   mean; ``Results.take`` puts them, in full width, each into its job's carry. ``_measure`` does the
   like for a Measure stage: always under ``vmap``, without graphs.
7. ``_answer_of`` writes what the client remembers, and makes the report (:mod:`.finishing`); then
   its bytes are counted, on CUDA by other processes (:mod:`.counting`).

Short batches are padded with weight 0. A client that has done its steps is frozen: Adam would keep
moving it. What several runs have in common, such as the rounds before their settings begin to
differ, is trained once.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vmap

from ... import gpu_copies, nets, seeds, trees
from ...core import (
    Answer,
    Batch,
    Carry,
    Client,
    ClientInfo,
    Edit,
    Give,
    Measure,
    Report,
    Stage,
    Task,
    Train,
)
from ...core import Job as CoreJob
from ...data import ClientData, Examples
from ...errors import EngineError, check
from ...nets import Net
from ...parts import local
from ...runs.run import Run
from ...seeds import use_threads
from ...trees import Tree
from ...wire.message_costs import BroadcastCosts
from ..work import (
    CLIENT_FAILURES,
    all_remembered,
    crashed,
    explained,
    given,
    initial_carry,
    numbered,
    with_cost,
    with_memory,
)
from . import grouped
from .alone import can_stack, run_alone
from .convolution import has_triton
from .counting import (
    Awaited,
    Counters,
    counted,
    counters_of_this_process,
    lent,
    look_up_tasks,
    note_tasks,
)
from .device_data import DeviceData, DeviceSplit
from .finishing import in_order
from .graphs import GraphCache
from .stacking import (
    Job,
    RecentStacks,
    Work,
    adapters_in_full_width,
    bring_back,
    carry_shapes,
    data_and_seed,
    find_duplicates,
    split_into_stacks,
    stack_carries,
    stack_hyperparameters,
    training_passes,
    width_adapters,
    width_class,
)
from .steps import (
    BatchPlan,
    Passes,
    Stack,
    count_steps,
    expand_flags,
    select_clients,
    train_stack,
)
from .templates import from_template, to_template
from .torch_state import no_trials, precision_context, preserved_rng, seed_device
from .transfers import start_to_cpu
from .turns import Measured, Part, Results, client_code, in_turns, to_the_end

Precision = Literal["fp32", "tf32", "bf16"]

PROBE_CLIENTS = 16
"""Clients on which the memory of a kind of stack is measured; as many or fewer are simply tried."""
WORTH_HALVING = 64
"""Clients that a card trains in two halves: with fewer, two trainings take longer than is saved."""
MEMORY_SHARE = 0.5
"""The share of the free memory that a stack may take; the rest is for other stacks' graphs."""

NO_EXAMPLES = Examples(torch.empty(0), torch.empty(0))
NO_DATA = ClientData(NO_EXAMPLES, NO_EXAMPLES, NO_EXAMPLES, ClientInfo(0))
"""Of a client whose own could not be made."""


@dataclass(eq=False)
class Batched:
    """The engine; ``chunk`` is how many clients are under way at most.

    On CUDA ``graphs`` captures the steps, and a stack takes as many clients as the memory allows,
    which is measured once per kind of stack. ``counters`` processes count the bytes of reports; by
    default some on CUDA, and none on a CPU (:mod:`.counting`).
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
        """Release what lies on the device; the engine can be used again."""
        self._device = torch.device(self.device)
        self._threads = torch.get_num_threads()
        self._data = DeviceData(self._device)
        # By id; the net is held with its key, so that its id is not given to another.
        self._net_keys: dict[int, tuple[Net, Any]] = {}
        self._grouped_supported: dict[Any, bool] = {}
        # By id, as above.
        self._can_stack: dict[int, bool] = {}
        # The stages, by the key of their work and their place in it, that vmap cannot run, and why.
        self._not_stacked: dict[tuple[Any, int], str] = {}
        # By verb.
        self._why_not_stacked: WeakKeyDictionary[Run, dict[str, str]] = WeakKeyDictionary()
        self._stack_sizes: dict[Any, int] = {}
        # Of the exchange at hand.
        self._recent = RecentStacks()
        self._stream: torch.cuda.Stream | None = None
        self._graph_cache: GraphCache | None = None
        if self.graphs and self._device.type == "cuda":
            self._graph_cache = GraphCache()

    def map(self, jobs: Iterable[CoreJob]) -> Iterator[tuple[CoreJob, Answer]]:
        """Do the jobs, part by part; answers come in job order.

        While a card trains one part, the CPU prepares the next and finishes the one before.
        """
        # Of all clients that are under way: their costs are looked up ahead.
        sent = BroadcastCosts(most=max(1, self.chunk))
        works: dict[tuple[int, str], Work] = {}
        under_way: deque[Part] = deque()
        # Before any work: once CUDA is at it, no process can be started any more.
        with lent(self._counters()) as counters:
            for core_jobs in self._parts(iter(jobs)):
                clients = sum(len(part.jobs) for part in under_way)
                while under_way and clients + len(core_jobs) > self.chunk:
                    clients -= len(under_way[0].jobs)
                    yield from self._answers(under_way.popleft(), sent, counters)
                under_way.append(self._begin(core_jobs, works, sent, counters))
            while under_way:
                yield from self._answers(under_way.popleft(), sent, counters)

    def _parts(self, stream: Iterator[CoreJob]) -> Iterator[list[CoreJob]]:
        """The jobs in chunks; on a card those of many clients in halves, which take turns."""
        while chunk := list(islice(stream, self.chunk)):
            takes_turns = self._device.type == "cuda" and len(chunk) >= WORTH_HALVING
            if takes_turns and not may_be_duplicates(chunk):
                half = -(-len(chunk) // 2)
                yield chunk[:half]
                yield chunk[half:]
            else:
                yield chunk

    def _begin(
        self,
        core_jobs: Sequence[CoreJob],
        works: dict[tuple[int, str], Work],
        sent: BroadcastCosts,
        counters: Counters | None,
    ) -> Part:
        """Start some jobs; on a card their first training is then under way."""
        jobs = [self._start_job(run, task, works) for run, task in core_jobs]
        sent_before = _versions(jobs)
        steps = self._run_groups(jobs)
        with self._torch_as_needed():
            next(steps, None)
        tasks: list[Awaited] = []
        if self.count_bytes and (self._device.type == "cuda" or counters is not None):
            # While the card is at work.
            tasks = look_up_tasks(jobs, sent, counters if len(jobs) > 1 else None)
        return Part(jobs, sent_before, steps, tasks)

    def _counters(self) -> Counters | None:
        """The processes that count bytes, if there are any."""
        on_cpu = self._device.type == "cpu"
        is_asked_for = self.counters is not None or not on_cpu
        if not self.count_bytes or not is_asked_for or self.counters == 0:
            return None
        return counters_of_this_process(self.counters)

    def _answers(
        self, part: Part, sent: BroadcastCosts, counters: Counters | None
    ) -> Iterator[tuple[CoreJob, Answer]]:
        """The answers of a part, once all its stages are done."""
        try:
            with self._torch_as_needed():
                to_the_end(part.steps)
        finally:
            self._recent.clear()
        _check_versions(part.sent_before)
        note_tasks(part.tasks, sent)
        # A single report is counted here as fast as anywhere.
        helpers = counters if len(part.jobs) > 1 else None
        for job, answer, costs in counted(in_order(part.jobs, self._answer_of), helpers):
            if self.count_bytes:
                # Here, in the order of the jobs: what a client holds decides what it is sent.
                answer = with_cost(job.run, job.task, answer, sent, costs)
            yield (job.run, job.task), answer

    def _start_job(self, run: Run, task: Task, works: dict[tuple[int, str], Work]) -> Job:
        """A job with its first carry; ``works`` holds what was looked up for earlier jobs."""
        work_key = (id(run), task.verb)
        if work_key not in works:
            works[work_key] = self._work_of(run, task.verb)
        memory = run.memory.read(task.to, task.memory)
        dtype = next(iter(run.params.values())).dtype
        try:
            client = run.client(task, memory)
        except Exception as error:
            # Its data could not be made. None of its stages is run.
            nobody = Client(task.to, ClientInfo(0), NO_DATA, memory, run.net, run.params, seed=0)
            return Job(run, task, nobody, {}, works[work_key], lost=crashed(task, error))
        try:
            carry = initial_carry(task, memory, dtype, run.marks(client))
        except Exception as error:
            # As where a task's settings are no numbers.
            return Job(run, task, client, {}, works[work_key], lost=crashed(task, error))
        return Job(run, task, client, carry, works[work_key])

    def _answer_of(self, job: Job) -> Answer:
        """The answer; what the client remembers is written."""
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
            remembered = all_remembered(job.task, job.client.memory, outcome)
        except Exception as error:
            # As where the last stage gives something else than an outcome.
            return crashed(job.task, error)
        return with_memory(job.run, job.task, report, remembered)

    # ---- which jobs go together ------------------------------------------------------------------

    def _work_of(self, run: Run, verb: str) -> Work:
        """The stages of a verb, and the key of the jobs that may do them together."""
        stages = tuple(numbered(run.work(verb)))
        templates: list[tuple[Any, tuple[float, ...]]] = []
        for _, stage in stages:
            # Edit and Give are not stacked: of them, only the order among the stages must agree.
            if stacks(stage):
                hyperparameters: list[float] = []
                template = to_template(stage, hyperparameters)
                templates.append((template, tuple(hyperparameters)))
                # One that is not there is refused in a sentence.
                run.net_named(stage.net)
            else:
                templates.append((type(stage), ()))
        # All of them, since a stage reaches those it does not name as well.
        nets = [(name, self._net_key(net)) for name, net in sorted(run.nets.items())]
        # Without the hyperparameters, which may differ.
        key = (tuple(nets), tuple(template for template, _ in templates))
        return Work(stages, key, tuple(templates))

    def _net_key(self, net: Net) -> Any:
        """What two nets must share to be run as one: layout, modules, types and problem."""
        if id(net) not in self._net_keys:
            dtypes = tuple(v.dtype for v in net.params().values())
            # A module of the user's may have settings that its text does not show, and what is
            # frozen is in the module: it shares a stack with itself alone.
            shows_all = nets.is_built_in(net.module) and not net.layout.frozen
            module = str(net.module) if shows_all else id(net)
            self._net_keys[id(net)] = (net, (net.layout, module, dtypes, net.problem))
        return self._net_keys[id(net)][1]

    def _group_by_work(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that do the same stages on the same network; their hyperparameters may differ."""
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.work.key, []).append(job)
        return list(groups.values())

    # ---- stage by stage --------------------------------------------------------------------------

    @contextmanager
    def _torch_as_needed(self) -> Iterator[None]:
        """The engine's stream, threads and precision; torch's generators stay as they were."""
        # Whoever takes the answers may have set one thread only (:mod:`fedgrove.runs.lockstep`).
        own_threads = use_threads(self._threads) if self._device.type == "cpu" else nullcontext()
        with (
            self._own_stream(),
            own_threads,
            preserved_rng(self._device),
            precision_context(self._device, self.precision),
            warnings.catch_warnings(),
        ):
            # A call that vmap has no rule for, as in attention, it loops over clients, and says so.
            warnings.filterwarnings("ignore", message=".*performance drop")
            yield

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On CUDA, a stream that only training uses.

        So what the server asks about one part's results need not wait until the next is trained.
        """
        if self._device.type != "cuda":
            yield
            return
        # Kernels of ours run on the card in use, whatever their tensors are on.
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # What clients are sent may still be on its way.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    # Generators from here on (:mod:`.turns`): where they yield, a card is at work for them.

    def _run_groups(self, jobs: Sequence[Job]) -> Iterator[None]:
        """All stages of jobs of any kind."""
        return in_turns([self._run_stages(group) for group in self._group_by_work(jobs)])

    def _run_stages(self, jobs: Sequence[Job]) -> Iterator[None]:
        """All stages of jobs that share their work; a job that is lost on the way stops there."""
        for number, (_, stage) in enumerate(jobs[0].work.stages):
            jobs_left = [job for job in jobs if job.lost is None]
            if isinstance(stage, Train):
                yield from self._run_stacked(self._train, jobs_left, number, stage)
            elif isinstance(stage, Measure):
                yield from self._run_stacked(self._measure, jobs_left, number, stage)
            else:
                for job in jobs_left:
                    _edit_or_give(job, number)

    def _run_stacked(
        self, run_stage: StackedStage, jobs: Sequence[Job], number: int, stage: Train | Measure
    ) -> Iterator[None]:
        """A Train or Measure stage, in as few stacks as shapes and memory allow."""
        if not jobs:
            return
        # An objective may call any of the method's networks.
        if not all(self._stacks(net) for net in jobs[0].run.nets.values()):
            for job in jobs:
                job.macs += run_alone(job, number)
            return
        parts = []
        for stack in split_into_stacks(jobs, stage, on_card=self._device.type == "cuda"):
            # Possible duplicates side by side, so that they come into the same stack and are
            # trained once.
            stack.sort(key=data_and_seed)
            while stack:
                size = self._stack_size(run_stage, stack, number)
                parts.append(self._run_or_lose(run_stage, stack[:size], number))
                stack = stack[size:]
        yield from in_turns(parts)

    def _run_or_lose(self, run_stage: StackedStage, jobs: list[Job], number: int) -> Iterator[None]:
        """A stage on a stack; where it fails, on either half of it, until those at fault are alone.

        Only they are lost.
        """
        if (jobs[0].work.key, number) in self._not_stacked:
            for job in jobs:
                self._run_unstacked(job, number)
            return
        carries = [job.carry for job in jobs]
        try:
            yield from self._run_or_halve(run_stage, jobs, number)
            return
        except GeneratorExit:
            # Nobody wants the answers any more.
            raise
        except CLIENT_FAILURES as error:
            if len(jobs) == 1:
                jobs[0].carry = carries[0]
                self._try_unstacked(jobs[0], number, error)
                return
        # Outside the handler: the exception holds the frames that failed, and so their tensors.
        # Where memory was short, some of these may have done the stage already.
        for job, carry in zip(jobs, carries, strict=True):
            job.carry = carry
        half = len(jobs) // 2
        yield from self._run_or_lose(run_stage, jobs[:half], number)
        yield from self._run_or_lose(run_stage, jobs[half:], number)

    def _try_unstacked(self, job: Job, number: int, failure: BaseException) -> None:
        """A stage that failed on a stack of one: lost, unless the serial engine can do it.

        Then it is vmap that could not: a loss or a metric with an `if` on data, say. Such work is
        not stacked again.
        """
        # No memory for one client is no fault of its work, and an exit is meant.
        if isinstance(failure, EngineError) or not isinstance(failure, Exception):
            job.lost = crashed(job.task, failure)
            return
        # What it computes was counted when the stack was made.
        run_alone(job, number)
        if job.lost is None:
            self._not_stacked[job.work.key, number] = explained(failure)
            self._note_unstacked(job, number)

    def _run_unstacked(self, job: Job, number: int) -> None:
        """A stage that vmap cannot run; it was counted when the stack was made."""
        run_alone(job, number)
        self._note_unstacked(job, number)

    def _note_unstacked(self, job: Job, number: int) -> None:
        verb = job.task.verb.partition(":")[0]
        why = self._not_stacked[job.work.key, number]
        self._why_not_stacked.setdefault(job.run, {}).setdefault(verb, why)

    def _stacks(self, net: Net) -> bool:
        """Whether clients of this network can be run at once; tried once per network."""
        # Also holds the net, so that its id is not given to another.
        self._net_key(net)
        if id(net) not in self._can_stack:
            with preserved_rng(self._device):
                self._can_stack[id(net)] = can_stack(net, self._device)
        return self._can_stack[id(net)]

    def notes(self, run: Run) -> list[str]:
        """Which networks of a run were trained one client at a time, and what made it slower."""
        said = []
        if self._device.type == "cuda" and not has_triton():
            said.append(
                "clients were trained without kernels of our own, which is slower: Triton is not "
                "installed or finds no C compiler (pip install triton; apt install gcc)"
            )
        for net in run.nets.values():
            if not self._can_stack.get(id(net), True):
                name = type(net.module).__name__
                said.append(
                    f"clients with {name} were trained one after another, not at once: "
                    "torch.func.vmap cannot run its forward pass (one that branches on data, "
                    "mixes the examples of a batch, or has recurrent layers)"
                )
        for verb, why in self._why_not_stacked.get(run, {}).items():
            said.append(
                f"a part of {verb} was done one client after another, not at once: torch.func.vmap "
                f"cannot run it (a loss, metric or objective that branches on data): {why}"
            )
        return said

    # ---- how many fit ----------------------------------------------------------------------------

    def _stack_size(self, run_stage: StackedStage, jobs: list[Job], number: int) -> int:
        """How many of these clients to stack; on CUDA measured once per kind of stack.

        It must not change between rounds, and by the second round the graphs of the first have
        taken their memory.
        """
        if self._device.type != "cuda":
            return len(jobs)
        if len(jobs) <= PROBE_CLIENTS and not self._stack_sizes:
            # Nothing was found out about any stack, nor is it for so few.
            return len(jobs)
        try:
            key = self._memory_key(jobs, number)
        except Exception:
            # The first client's carry holds something else than trees: `_run_or_lose` finds it.
            return len(jobs)
        if key not in self._stack_sizes and len(jobs) > PROBE_CLIENTS:
            try:
                per_client = self._bytes_per_client(run_stage, jobs, number)
                free = torch.cuda.mem_get_info(self._device)[0]
                self._stack_sizes[key] = clients_that_fit(per_client, free)
            except torch.OutOfMemoryError:
                # Not even these few fit; `_run_or_halve` halves further if it must.
                self._stack_sizes[key] = PROBE_CLIENTS // 2
            except Exception:
                # One of these few is at fault; `_run_or_lose` finds out which.
                return len(jobs)
        return self._stack_sizes.get(key, len(jobs))

    def _memory_key(self, jobs: Sequence[Job], number: int) -> Any:
        """Work, stage, width and trees: stacks that agree in these take equal memory per client."""
        job = jobs[0]
        widest = max(width_class(each.thin) for each in jobs)
        return (job.work.key, number, widest, carry_shapes(job.carry))

    def _bytes_per_client(self, run_stage: StackedStage, jobs: Sequence[Job], number: int) -> int:
        """The memory that torch takes from the device while a few clients do the first steps.

        So all is counted: trees, optimiser, activations, workspaces, graphs and their pools. The
        clients' results are thrown away.
        """
        # One job per client: duplicates would be trained once, and take the memory of one.
        by_client: dict[tuple[int, int], Job] = {}
        for job in jobs:
            by_client[id(job.run.federation), job.task.to] = job
        largest_first = sorted(by_client.values(), key=lambda job: -job.client.info.examples)
        # Copies: their carries take the results.
        few = [replace(job) for job in largest_first[:PROBE_CLIENTS]]

        # Loaded before the measurement: the examples are shared by all, and not per client.
        stage = few[0].work.stages[number][1]
        self._load_data(few, stage.over.split if isinstance(stage, Measure) else "train")

        kept_cache = self._graph_cache
        # Once before it counts: to time the ways to convolve takes memory too.
        self._graph_cache = None
        try:
            with preserved_rng(self._device):
                to_the_end(run_stage([replace(job) for job in few], number, steps=1))
        finally:
            self._graph_cache = kept_cache
        # Graphs captured here go to a cache of their own, and are freed with it.
        if kept_cache is not None:
            self._graph_cache = GraphCache()
        # Emptied, so that what is reserved from here on is reserved for these few.
        self._recent.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        allocated_before = torch.cuda.memory_allocated(self._device)
        try:
            with preserved_rng(self._device):
                to_the_end(run_stage(few, number, steps=2))
            reserved = torch.cuda.max_memory_reserved(self._device) - before
            # Small trees may find room in what was reserved before.
            allocated = torch.cuda.max_memory_allocated(self._device) - allocated_before
            taken = max(reserved, allocated)
        finally:
            self._graph_cache = kept_cache
            self._recent.clear()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        # Rounded up.
        return -(-taken // len(few))

    def _run_or_halve(
        self, run_stage: StackedStage, jobs: list[Job], number: int
    ) -> Iterator[None]:
        """A stage on a stack; where the device has too little memory, on either half of it."""
        try:
            yield from run_stage(jobs, number)
            return
        except torch.OutOfMemoryError:
            if len(jobs) == 1:
                raise EngineError(
                    f"client {jobs[0].task.to} alone needs more memory than {self.device} has; "
                    "take a smaller batch."
                ) from None
        # Outside the handler: the exception holds the frames that failed, and so their tensors.
        # What other stacks have under way must not lose its memory.
        torch.cuda.synchronize()
        if self._graph_cache is not None:
            self._graph_cache = GraphCache()
        self._recent.clear()
        gpu_copies.drop_all()
        torch.cuda.empty_cache()
        half = len(jobs) // 2
        # Kept, so that the next round need not find out again.
        self._stack_sizes[self._memory_key(jobs, number)] = half
        yield from self._run_or_halve(run_stage, jobs[:half], number)
        yield from self._run_or_halve(run_stage, jobs[half:], number)

    # ---- the stages that stack -------------------------------------------------------------------

    def _train(self, jobs: list[Job], number: int, steps: int | None = None) -> Iterator[None]:
        """A Train stage on a stack: all its steps, or only the first ones."""
        # A function of its own, of which nothing is left while a card is at work but the results.
        results = client_code(partial(self._launch_training, jobs, number, steps))
        yield
        results.take()

    def _launch_training(self, jobs: list[Job], number: int, steps: int | None) -> Results:
        """Lay a stack out and launch its steps, and the copies of what they end with."""
        stage = jobs[0].work.stages[number][1]
        assert isinstance(stage, Train)
        full_net = jobs[0].run.nets[stage.net]
        batch_size = local.batches_of(full_net, stage).size
        passes = {id(job): training_passes(full_net, job, number) for job in jobs}
        # Most steps first: the clients that still have steps to do are then always the first rows.
        jobs = sorted(jobs, key=lambda job: -count_steps(passes[id(job)], batch_size))

        if jobs[0].in_full_width:
            adapters = adapters_in_full_width(jobs, stage.net)
        else:
            adapters = width_adapters(jobs, stage.net)
        common = adapters[0].common
        net = full_net if common is None else common.net
        template, hyperparameters = stack_hyperparameters(jobs, number, self._device)
        narrow_carries = []
        for adapter, job in zip(adapters, jobs, strict=True):
            narrow_carries.append(adapter.narrow(job.carry, stage.whole))
        carry = stack_carries(narrow_carries, self._device, self._stacks_of(full_net))

        # leaders[i] is the job that is trained in place of job i, mostly i itself.
        leaders = find_duplicates(jobs, hyperparameters, carry)
        trained_places = sorted(set(leaders))
        if len(trained_places) < len(jobs):
            hyperparameters = hyperparameters[trained_places]
            carry = select_clients(carry, trained_places)
        trained_jobs: list[Job] = []
        trained_passes: list[Passes] = []
        client_seeds: list[int] = []
        for i in trained_places:
            trained_jobs.append(jobs[i])
            trained_passes.append(passes[id(jobs[i])])
            client_seeds.append(jobs[i].client.seed)

        data = self._load_data(trained_jobs, "train")
        offsets = self._offsets(trained_jobs, data)
        plan = BatchPlan.of(
            trained_passes, batch_size, offsets, hyperparameters.dtype, self._device
        ).first_steps(steps)

        norms = None if common is None else common.norms
        net_key = (self._net_key(full_net), net.layout.named_shapes, norms)
        use_grouped = self._use_grouped(net_key, net, plan, data)
        # After `_use_grouped`, which draws dropout when it tries a network for the first time:
        # what a stack draws must not depend on whether its network was seen before.
        seed_device(self._device, seeds.derive(number, *client_seeds))
        stack = Stack(net, template, carry, hyperparameters, plan, data, use_grouped)
        if self._graph_cache is None:
            trained = train_stack(stack)
        else:
            # The addresses are those of the examples that a captured graph reads.
            addresses = (data.x.data_ptr(), data.y.data_ptr())
            graph_key = (net_key, template, stack.shape_key, addresses)
            trained = self._graph_cache.train(stack, graph_key)

        runs = [id(job.run) for job in trained_jobs]
        returning = {name: bring_back(tree, runs) for name, tree in trained.items()}
        row_of = {place: row for row, place in enumerate(trained_places)}
        rows = [row_of[leader] for leader in leaders]
        return Results(jobs, rows, returning, adapters)

    def _measure(self, jobs: list[Job], number: int, steps: int | None = None) -> Iterator[None]:
        """A Measure stage on a stack: f over stacked batches, summed."""
        results = client_code(partial(self._launch_measuring, jobs, number, steps))
        yield
        results.take()

    def _launch_measuring(self, jobs: list[Job], number: int, steps: int | None) -> Measured:
        """Launch all batches of a Measure stage, and the copy of their sums."""
        stage = jobs[0].work.stages[number][1]
        assert isinstance(stage, Measure)
        net = jobs[0].run.nets[stage.net]
        data = self._load_data(jobs, stage.over.split)
        passes = []
        for job in jobs:
            place = job.work.stages[number][0]
            passes.append([job.client.order(stage.over, place)])
        template, hyperparameters = stack_hyperparameters(jobs, number, self._device)
        offsets = self._offsets(jobs, data)
        plan = BatchPlan.of(
            passes, stage.over.size, offsets, hyperparameters.dtype, self._device
        ).first_steps(steps)
        carry = stack_carries([job.carry for job in jobs], self._device, self._stacks_of(net))

        def measure_one(hyperparameters: Tensor, carry: Carry, batch: Batch) -> Tree:
            own_stage = from_template(template, hyperparameters)
            values: Tree = own_stage.f(net, carry[own_stage.of], batch, carry)
            return values

        total: Tree = {}
        for step in range(plan.row.shape[1]):
            with torch.no_grad(), no_trials():
                # The batch has no name: it is freed before the next one is gathered.
                values = vmap(measure_one, randomness="different")(
                    hyperparameters, carry, plan.batch(data, slice(None), step)
                )
            # A client that has no batch left adds nothing.
            has_batch = plan.steps > step
            for k, v in values.items():
                values[k] = torch.where(expand_flags(has_batch, v), v, torch.zeros_like(v))
            total = trees.map(torch.add, total, values) if total else values

        counts = [len(examples) for (examples,) in passes]
        return Measured(jobs, stage.name, counts, start_to_cpu(total))

    def _stacks_of(self, net: Net) -> RecentStacks | None:
        """What is stacked from earlier stages; None where that might be old.

        Torch does not count what BatchNorm writes into running statistics. And on a CPU stacking
        again costs so little that no one need care about what else is not counted.
        """
        if self._device.type == "cpu" or net.layout.buffers:
            return None
        return self._recent

    def _use_grouped(self, net_key: Any, net: Net, plan: BatchPlan, data: DeviceSplit) -> bool:
        """Whether this network can be run in grouped kernels; tried once per network."""
        if net_key not in self._grouped_supported:
            _, steps, width = plan.row.shape
            if steps == 0 or width < 2:
                # Nothing to try it on; perhaps the next stack has more.
                return False
            x = plan.batch(data, slice(None), 0).x
            self._grouped_supported[net_key] = grouped.supports(net, x)
        return self._grouped_supported[net_key]

    def _load_data(self, jobs: Sequence[Job], split: str) -> DeviceSplit:
        if any(job.run.federation.is_lazy for job in jobs):
            return self._data.load_clients([job.client.data for job in jobs], split)
        return self._data.load([job.run.federation for job in jobs], split)

    def _offsets(self, jobs: Sequence[Job], data: DeviceSplit) -> list[int]:
        """The row at which each job's examples begin."""
        # A client without examples may begin behind the last row, which its padding must not read.
        last_row = max(0, len(data.y) - 1)
        offsets = []
        for job in jobs:
            offset = data.offsets[id(job.client.data)]
            offsets.append(min(offset, last_row))
        return offsets


def may_be_duplicates(jobs: Sequence[CoreJob]) -> bool:
    """Whether runs that begin alike have the same clients: these should come into one stack."""
    seen = set()
    for run, task in jobs:
        seen.add((id(run.federation), task.to, run.seed))
    return len(seen) < len(jobs)


def stacks(stage: Stage) -> TypeGuard[Train | Measure]:
    """Whether a stage runs stacked: Edit and Give run for one client at a time."""
    return isinstance(stage, Train | Measure)


def _versions(jobs: Sequence[Job]) -> list[tuple[Tensor, int]]:
    """The tensors that the jobs were sent, each with how often it was written to."""
    tensors: dict[int, Tensor] = {}
    for job in jobs:
        for packet in job.task.send.values():
            for leaf in packet.values.values():
                tensors[id(leaf)] = leaf
    return [(leaf, leaf._version) for leaf in tensors.values() if not leaf.is_inference()]


def _check_versions(before: Sequence[tuple[Tensor, int]]) -> None:
    """Refuse work that changes what it was sent: clients and server share these tensors."""
    if any(leaf._version != version for leaf, version in before):
        raise EngineError(
            "the method's work changed tensors that it was sent, in place; clone them first."
        )


def _edit_or_give(job: Job, number: int) -> None:
    """A stage that is not stacked, for one client."""
    # The function may be another one in every run: take the job's own stage.
    stage = job.work.stages[number][1]
    try:
        if isinstance(stage, Edit):
            job.carry = stage.f(job.carry, job.client)
        elif isinstance(stage, Give):
            job.outcome = given(job.run, job.task, stage, job.carry, job.client)
    except CLIENT_FAILURES as error:
        job.lost = crashed(job.task, error)


class StackedStage(Protocol):
    """A stage on a stack of jobs: all its steps, or only the first ones."""

    def __call__(self, jobs: list[Job], number: int, steps: int | None = None) -> Iterator[None]:
        """Do it; the jobs' carries take the result."""


def clients_that_fit(per_client: int, free: int, share: float = MEMORY_SHARE) -> int:
    """How many clients of so many bytes fit into a share of the free memory; one is always tried.

    >>> clients_that_fit(per_client=100, free=1000)
    5
    >>> clients_that_fit(per_client=5000, free=1000)
    1
    """
    return max(1, int(free * share) // max(1, per_client))
