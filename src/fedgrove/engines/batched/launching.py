"""Laying a stack of jobs out on the device, and launching its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ... import nets, seeds, trees
from ...core import Batch, Carry, Measure, Train
from ...nets import Net
from ...parts import local
from ...trees import Tree
from . import grouped
from .device import (
    DeviceData,
    DeviceSplit,
    preserve_device_rng,
    seed_device,
    start_copy_to_cpu,
    without_kernel_trials,
)
from .graphs import GraphCache
from .jobs import ClientJob, from_template
from .scheduling import ClientExit, MeasureResults, TrainResults, run_to_end
from .stacking import (
    RecentStacks,
    find_duplicates,
    list_training_passes,
    make_full_width_adapters,
    make_width_adapters,
    stack_carries,
    stack_hyperparameters,
    start_return,
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

PROBE_CLIENTS = 16
"""The number of clients on which the memory of a kind of stack is measured. A stack of no more
clients is tried without measuring."""


class Launcher:
    """Runs Train and Measure stages on stacks, and knows what is on the device.

    Attributes:
        graph_cache: The captured CUDA graphs; None: steps are not captured.
        recent: The leaves that are stacked already, for the stages of the current exchange.
    """

    def __init__(self, device: torch.device, graph_cache: GraphCache | None) -> None:
        self.device = device
        self.graph_cache = graph_cache
        self.recent = RecentStacks()
        self._data = DeviceData(device)
        # By id; the net is kept with its key, so that its id is not given to another net.
        self._net_keys: dict[int, tuple[Net, Any]] = {}
        self._grouped_supported: dict[Any, bool] = {}

    def get_net_key(self, net: Net) -> Any:
        """Return what two nets must share to be run as one: layout, modules, types and problem."""
        if id(net) not in self._net_keys:
            dtypes = tuple(v.dtype for v in net.params().values())
            # A user's module may have settings that its text does not show, and frozen tensors are
            # in the module: such a net shares a stack only with itself.
            shows_all = nets.is_built_in(net.module) and not net.layout.frozen
            module = str(net.module) if shows_all else id(net)
            self._net_keys[id(net)] = (net, (net.layout, module, dtypes, net.problem))
        return self._net_keys[id(net)][1]

    def run_stage(
        self, jobs: list[ClientJob], number: int, steps: int | None = None
    ) -> Iterator[None]:
        """Run a Train or Measure stage on a stack of clients; their carries get the results.

        Args:
            jobs: The clients.
            number: The number of the stage in their work.
            steps: Do only the first steps; None: all.
        """
        stage = jobs[0].work.stages[number][1]
        # Separate functions, so that their local tensors are freed while a GPU is busy.
        launch = self._launch_training if isinstance(stage, Train) else self._launch_measuring
        try:
            results: TrainResults | MeasureResults = launch(jobs, number, steps)
        except GeneratorExit as error:
            # A user's objective may raise it, and in a generator it has another meaning.
            raise ClientExit(f"GeneratorExit: {error}") from error
        yield
        results.store()

    def _launch_training(
        self, jobs: list[ClientJob], number: int, steps: int | None
    ) -> TrainResults:
        """Lay a stack out, launch its steps, and start the copies of the results."""
        place, stage = jobs[0].work.stages[number]
        assert isinstance(stage, Train)
        full_net = jobs[0].run.nets[stage.net]
        batch_size = local.batches_of(full_net, stage).size
        passes = {id(job): list_training_passes(full_net, job, number) for job in jobs}
        # Most steps first: the clients that still have steps are then always the first rows.
        jobs = sorted(jobs, key=lambda job: -count_steps(passes[id(job)], batch_size))

        if jobs[0].in_full_width:
            adapters = make_full_width_adapters(jobs, stage.net)
        else:
            adapters = make_width_adapters(jobs, stage.net)
        common = adapters[0].common
        net = full_net
        norms = None
        if common is not None:
            net = common.net
            norms = common.norms
        template, hyperparameters = stack_hyperparameters(jobs, number, self.device)
        narrow_carries = []
        for adapter, job in zip(adapters, jobs, strict=True):
            name = local.place_of_state(job.task.verb, place)
            state = local.find_state(full_net, stage, job.carry, job.client.memory, name)
            narrow_carries.append(adapter.narrow({**job.carry, **state}, stage.whole))
        carry = stack_carries(narrow_carries, self.device, self._get_recent_stacks(full_net))

        # leaders[i] is the job that is trained in place of job i: usually i.
        leaders = find_duplicates(jobs, hyperparameters, carry)
        trained_places = sorted(set(leaders))
        if len(trained_places) < len(jobs):
            hyperparameters = hyperparameters[trained_places]
            carry = select_clients(carry, trained_places)
        trained_jobs: list[ClientJob] = []
        trained_passes: list[Passes] = []
        client_seeds: list[int] = []
        for i in trained_places:
            trained_jobs.append(jobs[i])
            trained_passes.append(passes[id(jobs[i])])
            client_seeds.append(jobs[i].client.seed)

        data, offsets = self._load_data(trained_jobs, "train")
        plan = BatchPlan.of(
            trained_passes, batch_size, offsets, hyperparameters.dtype, self.device
        ).first_steps(steps)

        net_key = (self.get_net_key(full_net), net.layout.named_shapes, norms)
        use_grouped = self._use_grouped(net_key, net, plan, data)
        # After `_use_grouped`, which draws dropout when it tries a network for the first time. The
        # draws of a stack must not depend on whether its network was tried before.
        seed_device(self.device, seeds.derive(number, *client_seeds))
        stack = Stack(net, template, carry, hyperparameters, plan, data, use_grouped)
        if self.graph_cache is None:
            trained = train_stack(stack)
        else:
            # A captured graph reads the examples at these addresses.
            addresses = (data.x.data_ptr(), data.y.data_ptr())
            graph_key = (net_key, template, stack.shape_key, addresses)
            trained = self.graph_cache.train(stack, graph_key)

        runs = [id(job.run) for job in trained_jobs]
        returning = {name: start_return(tree, runs) for name, tree in trained.items()}
        row_of = {place: row for row, place in enumerate(trained_places)}
        rows = [row_of[leader] for leader in leaders]
        return TrainResults(jobs, rows, returning, adapters, place)

    def _launch_measuring(
        self, jobs: list[ClientJob], number: int, steps: int | None
    ) -> MeasureResults:
        """Launch a Measure stage, f over stacked batches, and start the copy of its sums."""
        stage = jobs[0].work.stages[number][1]
        assert isinstance(stage, Measure)
        net = jobs[0].run.nets[stage.net]
        data, offsets = self._load_data(jobs, stage.over.split)
        passes = []
        for job in jobs:
            place = job.work.stages[number][0]
            passes.append([job.client.order(stage.over, place)])
        template, hyperparameters = stack_hyperparameters(jobs, number, self.device)
        plan = BatchPlan.of(
            passes, stage.over.size, offsets, hyperparameters.dtype, self.device
        ).first_steps(steps)
        carry = stack_carries(
            [job.carry for job in jobs], self.device, self._get_recent_stacks(net)
        )

        def measure_one(hyperparameters: Tensor, carry: Carry, batch: Batch) -> Tree:
            own_stage = from_template(template, hyperparameters)
            values: Tree = own_stage.f(net, carry[own_stage.of], batch, carry)
            return values

        total: Tree = {}
        for step in range(plan.row.shape[1]):
            with torch.no_grad(), without_kernel_trials():
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
        return MeasureResults(jobs, stage.name, counts, start_copy_to_cpu(total))

    def _get_recent_stacks(self, net: Net) -> RecentStacks | None:
        """Return the stacks of earlier stages; None if they might be out of date.

        Torch does not count the writes of BatchNorm into running statistics. On a CPU stacking
        again takes little time, so nothing is reused.
        """
        if self.device.type == "cpu" or net.layout.buffers:
            return None
        return self.recent

    def _use_grouped(self, net_key: Any, net: Net, plan: BatchPlan, data: DeviceSplit) -> bool:
        """Return whether this network can be run in grouped kernels; tried once per network."""
        if net_key not in self._grouped_supported:
            _, steps, width = plan.row.shape
            if steps == 0 or width < 2:
                # Too few examples for a trial; the next stack may have more.
                return False
            x = plan.batch(data, slice(None), 0).x
            self._grouped_supported[net_key] = grouped.supports(net, x)
        return self._grouped_supported[net_key]

    def _load_data(self, jobs: Sequence[ClientJob], split: str) -> tuple[DeviceSplit, list[int]]:
        """Load a split of the clients; also return the row at which each job's examples begin."""
        if any(job.run.federation.is_lazy for job in jobs):
            data = self._data.load_clients([job.client.data for job in jobs], split)
        else:
            data = self._data.load([job.run.federation for job in jobs], split)
        # A client without examples may begin after the last row, which padding must not read.
        last_row = max(0, len(data.y) - 1)
        offsets = []
        for job in jobs:
            offset = data.offsets[id(job.client.data)]
            offsets.append(min(offset, last_row))
        return data, offsets

    def measure_bytes_per_client(self, jobs: Sequence[ClientJob], number: int) -> int:
        """Return the memory per client that torch reserves while a few clients do two steps.

        This includes trees, optimiser, activations, workspaces, graphs and their pools. The
        clients' results are dropped.
        """
        # One job per client: duplicates would be trained once, in the memory of one.
        by_client: dict[tuple[int, int], ClientJob] = {}
        for job in jobs:
            by_client[id(job.run.federation), job.task.to] = job
        largest_first = sorted(by_client.values(), key=lambda job: -job.client.info.examples)
        # Copies, because the carries get the results.
        few = [replace(job) for job in largest_first[:PROBE_CLIENTS]]

        # Loaded before the measurement: all clients share the tensor of examples.
        stage = few[0].work.stages[number][1]
        self._load_data(few, stage.over.split if isinstance(stage, Measure) else "train")

        kept_cache = self.graph_cache
        # Once before the measurement: timing the convolutions takes memory too.
        self.graph_cache = None
        try:
            with preserve_device_rng(self.device):
                run_to_end(self.run_stage([replace(job) for job in few], number, steps=1))
        finally:
            self.graph_cache = kept_cache
        # Graphs captured here go to another cache, and are freed with it.
        if kept_cache is not None:
            self.graph_cache = GraphCache()
        # Emptied, so that everything reserved from here on is for these few.
        self.recent.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        allocated_before = torch.cuda.memory_allocated(self.device)
        try:
            with preserve_device_rng(self.device):
                run_to_end(self.run_stage(few, number, steps=2))
            reserved = torch.cuda.max_memory_reserved(self.device) - before
            # Small trees may fit into memory that was reserved before.
            allocated = torch.cuda.max_memory_allocated(self.device) - allocated_before
            taken = max(reserved, allocated)
        finally:
            self.graph_cache = kept_cache
            self.recent.clear()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        # Rounded up.
        return -(-taken // len(few))
