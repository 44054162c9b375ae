"""Jobs under way, and what makes a stack of them: shapes, widths, and jobs that are duplicates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import gpu_copies, trees
from ...channels.shrink import cut_channels, find_small_net
from ...channels.small_net import NarrowedLeaves, SmallNet
from ...core import Carry, Client, Lost, Measure, Outcome, Stage, Task, Train
from ...nets import Net
from ...parts import local
from ...runs.run import Run
from ...trees import Tree
from ..work import crashed, examples_seen, macs_per_example, pass_of
from .steps import Passes
from .transfers import Copies, stacks_to_device, start_to_cpu, to_device


@dataclass(frozen=True, eq=False)
class Work:
    """What a run's clients do on a verb."""

    stages: tuple[tuple[int, Stage], ...]
    """Each with its number among those of its kind, which seeds depend on."""
    key: Any
    """What jobs must share to be done together: the network and the stages' templates."""
    templates: tuple[tuple[Any, tuple[float, ...]], ...] = ()
    """Of each stage that stacks, its template and hyperparameters; of others, nothing of use."""


@dataclass(eq=False)
class Job:
    """A task under way."""

    run: Run
    task: Task
    client: Client
    carry: Carry
    work: Work
    outcome: Outcome = field(default_factory=Outcome)
    lost: Lost | None = None
    """Why the work ended early, if it did."""
    macs: int = 0
    """Multiply-accumulates so far, as if the client had worked alone."""
    thin: SmallNet | None = None
    """The smaller net that the stage at hand can train in place of the masked one."""
    in_full_width: bool = False
    """Whether it is to train in full width all the same."""


WIDTH_CLASSES = 4
"""Clients train together if they keep about the same share of channels: to so many parts of all.

The widths of a stack's layers are rounded up to as many parts. Finer parts would waste less, but
every new width is a new shape, for which kernels are chosen and a graph is captured: that takes as
long as tens of rounds, and masks that move lose a channel here and there in every round."""
ALIGNMENT = 8
"""Parts of wide layers are multiples of so many channels, which is what matrix units take."""


FEW_MODELS = 4
"""So many distinct trees of a name are taken for models that the server sends: one, or one for each
group."""
RECENT_BYTES = 1 << 28
"""What is kept of one stage's stacks for the next takes no more than this: training needs memory
too."""
LITTLE_WORK = 1 << 34
"""Multiply-accumulates of a step of all clients: a card that has no more to do waits for the next
kernel most of the time. One stack in full width then takes less time than several narrow ones, and
need not be cut to size before nor widened after."""


def split_into_stacks(
    jobs: Sequence[Job], stage: Train | Measure, on_card: bool = False
) -> list[list[Job]]:
    """Jobs whose trees have the same names and shapes, and whose smaller nets are about as wide.

    On a card networks of any width go together where they are small. Sets every job's ``thin`` and
    ``in_full_width`` for this stage, and counts what it will compute. A job whose carry holds
    something else than trees is lost.
    """
    any_width: dict[Any, list[Job]] = {}
    # By id: many clients hold the same tree.
    shapes: dict[int, Any] = {}
    for job in jobs:
        try:
            job.thin = _thin(job, stage)
            key = carry_shapes(job.carry, shapes)
            job.macs += _macs(job, stage)
        except Exception as error:
            job.lost = crashed(job.task, error)
            continue
        any_width.setdefault(key, []).append(job)
    stacks: list[list[Job]] = []
    for together in any_width.values():
        is_little = on_card and is_little_work(together, stage)
        for job in together:
            job.in_full_width = is_little
        stacks += [together] if is_little else _by_width(together)
    return stacks


def _thin(job: Job, stage: Train | Measure) -> SmallNet | None:
    """The smaller net that a stage can train in place of the masked one."""
    if not isinstance(stage, Train):
        return None
    return find_small_net(job.run.nets[stage.net], job.carry.get(stage.mask_name))


def _by_width(jobs: Sequence[Job]) -> list[list[Job]]:
    stacks: dict[int, list[Job]] = {}
    for job in jobs:
        stacks.setdefault(width_class(job.thin), []).append(job)
    return list(stacks.values())


def is_little_work(jobs: Sequence[Job], stage: Train | Measure) -> bool:
    """Whether a step of all these clients, in full width, is less than fills a card."""
    net = jobs[0].run.nets[stage.net]
    batches, _ = pass_of(net, stage)
    macs = len(jobs) * batches.size * macs_per_example(net, stage, None)
    return macs <= LITTLE_WORK


def _macs(job: Job, stage: Train | Measure) -> int:
    """What a stage computes for a client in its own width, which a stack may exceed."""
    per_example = macs_per_example(job.run.nets[stage.net], stage, job.thin)
    return per_example * examples_seen(job.run, stage, job.client)


def width_class(thin: SmallNet | None) -> int:
    """The share of channels that stay, in parts of ``WIDTH_CLASSES``, rounded up."""
    if thin is None or not thin.channels:
        return WIDTH_CLASSES
    kept = 0
    total = 0
    for flags in thin.channels.values():
        kept += int(flags.sum())
        total += len(flags)
    return -(-WIDTH_CLASSES * kept // total)


def carry_shapes(carry: Carry, known: dict[int, Any] | None = None) -> Any:
    """The names, shapes and types of all trees, as a key.

    Of all, since an objective may read any of them, or ask whether it is there: a client that
    remembers something does not stack with one that is new. ``known`` holds, by id, the shapes of
    trees that are still there.
    """
    if known is None:
        known = {}
    shapes = []
    for name, tree in sorted(carry.items()):
        if id(tree) not in known:
            known[id(tree)] = shapes_of(tree)
        shapes.append((name, known[id(tree)]))
    return tuple(shapes)


def shapes_of(tree: Tree) -> Any:
    """The names, shapes and types of a tree, as a key."""
    return tuple((k, tuple(v.shape), v.dtype) for k, v in tree.items())


def training_passes(net: Net, job: Job, number: int) -> Passes:
    """The epochs of stage ``number``, in the order that every engine draws; empty ones left out."""
    place, stage = job.work.stages[number]
    assert isinstance(stage, Train)
    batches = local.batches_of(net, stage)
    passes = []
    for epoch in range(local.recipe(stage).epochs):
        examples = job.client.order(batches, place, epoch)
        if examples.shape[0]:
            passes.append(examples)
    return passes


# ---- many carries as one, and back ---------------------------------------------------------------


def stack_hyperparameters(
    jobs: Sequence[Job], number: int, device: torch.device
) -> tuple[Any, Tensor]:
    """The jobs' common template of stage ``number``, and their hyperparameters: (jobs, values)."""
    rows = [job.work.templates[number][1] for job in jobs]
    template = jobs[0].work.templates[number][0]
    dtype = next(iter(jobs[0].run.params.values())).dtype
    values = to_device(torch.tensor(rows, dtype=dtype), device)
    return template, values.view(len(jobs), -1)


class RecentStacks:
    """Leaves that are stacked on the device already, for an earlier stage of the same clients.

    Most of a carry is the same at every stage: what was sent, what is remembered, masks. The stacks
    are read and never written; steps write into copies. As for :mod:`fedgrove.gpu_copies`, what is
    written into a leaf behind torch's back (through ``.data`` or ``.numpy()``) is not noticed.
    """

    def __init__(self) -> None:
        # By the ids of the leaves, which are held, with how often they had been written to.
        self._kept: dict[tuple[int, ...], tuple[Sequence[Tensor], list[int], Tensor]] = {}
        self._bytes = 0

    def find(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """The stack of these leaves; None where there is none, or one was written to since."""
        kept = self._kept.get(tuple(map(id, leaves)))
        if kept is None or kept[1] != _versions_of(leaves):
            return None
        return kept[2]

    def keep(self, leaves: Sequence[Tensor], stacked: Tensor) -> None:
        """Remember a stack, as long as all together take little memory."""
        # Inference tensors do not count what is written into them.
        if stacked.nbytes + self._bytes > RECENT_BYTES or any(v.is_inference() for v in leaves):
            return
        self._bytes += stacked.nbytes
        self._kept[tuple(map(id, leaves))] = (leaves, _versions_of(leaves), stacked)

    def clear(self) -> None:
        """Let all go."""
        self._kept.clear()
        self._bytes = 0


def _versions_of(leaves: Sequence[Tensor]) -> list[int]:
    return [leaf._version for leaf in leaves]


def stack_carries(
    carries: Sequence[Carry], device: torch.device, recent: RecentStacks | None = None
) -> Carry:
    """All trees, one row per carry; the carries have the same names and shapes.

    ``recent`` has what was stacked for earlier stages, and gets what is stacked here.
    """
    if recent is None:
        recent = RecentStacks()
    stacked: Carry = {}
    waiting: list[tuple[str, str, Rows]] = []
    # By name: a client that remembers a tree has it in another place than one that was sent it, and
    # a graph that was captured for one order would not be found for the other.
    for name in sorted(carries[0]):
        stacked[name] = {}
        for leaf in carries[0][name]:
            rows = Rows.of([carry[name][leaf] for carry in carries])
            there = recent.find(rows.distinct)
            if there is None:
                there = _already_there(rows.distinct, device)
            if there is None:
                waiting.append((name, leaf, rows))
                # Its place among the leaves.
                stacked[name][leaf] = rows.distinct[0]
            else:
                stacked[name][leaf] = rows.spread(there)
    moved = stacks_to_device([rows.distinct for _, _, rows in waiting], device)
    for (name, leaf, rows), there in zip(waiting, moved, strict=True):
        recent.keep(rows.distinct, there)
        stacked[name][leaf] = rows.spread(there)
    return stacked


class Rows(NamedTuple):
    """A leaf of many carries, of which some may share one tensor."""

    distinct: list[Tensor]
    places: list[int]
    """For each carry, which of them is its own."""

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> Rows:
        """The leaves of all carries; one that many share is there once."""
        distinct: list[Tensor] = []
        place_of: dict[int, int] = {}
        places: list[int] = []
        for leaf in leaves:
            if id(leaf) not in place_of:
                place_of[id(leaf)] = len(distinct)
                distinct.append(leaf)
            places.append(place_of[id(leaf)])
        return cls(distinct, places)

    def spread(self, stacked: Tensor) -> Tensor:
        """One row per carry, from one per distinct leaf."""
        carries = len(self.places)
        # A broadcast model takes the memory of one row, until something is written into it.
        if len(self.distinct) == 1:
            return stacked.expand(carries, *stacked.shape[1:])
        if len(self.distinct) == carries:
            return stacked
        return stacked[to_device(torch.tensor(self.places), stacked.device)]


def _already_there(leaves: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """The leaves' twins on a card, stacked; None where one has none."""
    if device.type != "cuda":
        return None
    # What goes to many clients is brought there and stays. What each has for itself is not: all of
    # them take one copy if they go together.
    are_shared = len(leaves) <= FEW_MODELS
    if not are_shared:
        stacked = gpu_copies.stack_rows(leaves)
        if stacked is not None and stacked.device.type == device.type:
            return stacked
    found: list[Tensor] = []
    for leaf in leaves:
        twin = (
            gpu_copies.find_or_make_copy(leaf, device) if are_shared else gpu_copies.find_copy(leaf)
        )
        if twin is None or twin.device.type != device.type:
            return None
        found.append(twin)
    return torch.stack(found)


class Returning(NamedTuple):
    """The rows of a stacked tree on their way to the CPU, the rows of a run together."""

    like: Tree
    """A client's tree; only its names and shapes count."""
    rows_by_run: list[list[int]]
    """Which rows are a run's."""
    parts: list[Tensor]
    """They are the twins of what arrives, in the same order."""
    copies: Copies

    def trees(self) -> list[Tree]:
        """Each client's own tree, once all are there."""
        here = self.copies.wait()
        if not self.parts:
            return trees.unstack(here, sum(map(len, self.rows_by_run)))
        own: dict[int, Tree] = {}
        for rows, part, copy in zip(self.rows_by_run, self.parts, here.values(), strict=True):
            # It was copied from.
            gpu_copies.keep_copy(copy, part, is_written=True)
            own.update(zip(rows, split_rows(copy, self.like), strict=True))
        return [own[row] for row in range(len(own))]


def bring_back(stacked: Tree, owners: Sequence[int]) -> Returning:
    """Each client's row of a stacked tree to the CPU; ``owners`` says which run each belongs to.

    What comes from a card comes in one copy for each run, and stays there too, as its twin: then
    the leaves of a client are views of one vector, of which gate and mean read the twin. A copy for
    each run, since what it measures for one of its clients it measures for all rows at once.
    """
    rows_by_run: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        rows_by_run.setdefault(owner, []).append(row)
    rows = list(rows_by_run.values())
    like = {name: leaf[0] for name, leaf in stacked.items()}
    types = {leaf.dtype for leaf in stacked.values()}
    on_card = any(leaf.is_cuda for leaf in stacked.values())
    if not on_card or len(types) > 1:
        return Returning(like, rows, [], start_to_cpu(stacked))
    there = joined_rows(stacked)
    if len(rows) > 1:
        order = torch.tensor([row for own in rows for row in own])
        there = there[to_device(order, there.device)]
    parts = torch.split(there, [len(own) for own in rows])
    copies = start_to_cpu({str(number): part for number, part in enumerate(parts)})
    return Returning(like, rows, list(parts), copies)


def joined_rows(stacked: Tree) -> Tensor:
    """The leaves of each client one behind another: (clients, numbers)."""
    # The unsqueeze is for leaves that are one number per client.
    return torch.cat([leaf.unsqueeze(-1).flatten(1) for leaf in stacked.values()], 1)


def split_rows(rows: Tensor, like: Tree) -> list[Tree]:
    """The clients' trees again that :func:`joined_rows` joined, as views of the rows."""
    sizes = [leaf.numel() for leaf in like.values()]
    views: Tree = {}
    for (name, leaf), columns in zip(like.items(), torch.split(rows, sizes, 1), strict=True):
        views[name] = columns.view(len(rows), *leaf.shape)
    return trees.unstack(views, len(rows))


# ---- clients whose masks remove whole channels ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class WidthAdapter:
    """Brings a client's trees to the width of its stack, and back."""

    net: Net
    common: SmallNet | None = None
    """The net in the width of the stack; None: in full width."""
    own: SmallNet | None = None
    """The net in the client's own width; None: in full width."""
    narrowed_leaves: NarrowedLeaves = field(default_factory=dict)
    """What was narrowed already for the stack: a model sent to all is narrowed, moved to the device
    and held there once."""

    def narrow(self, carry: Carry, whole: Collection[str]) -> Carry:
        """All trees in the width of the stack, but those that stay whole."""
        if self.common is None:
            return carry
        return self.common.narrow_carry(carry, whole, self.narrowed_leaves)

    def widen(self, trained: Carry) -> Carry:
        """What was trained, in full width."""
        if self.common is not None:
            trained = {name: self.common.widen(tree) for name, tree in trained.items()}
        if self.own is None or self.own is self.common:
            return trained
        # Channels that the client lacks and the stack has went through BatchNorm: their running
        # statistics are set to what a net in the client's own width would leave.
        if not self.net.layout.buffers:
            return trained
        return {name: self.own.reset_removed(tree) for name, tree in trained.items()}


def adapters_in_full_width(jobs: Sequence[Job], net_name: str = "model") -> list[WidthAdapter]:
    """All networks as they are, masked."""
    return [WidthAdapter(job.run.nets[net_name], None, job.thin) for job in jobs]


def width_adapters(jobs: Sequence[Job], net_name: str = "model") -> list[WidthAdapter]:
    """The nets to train in place of the masked ones: layer by layer as wide as the widest needs.

    Widths are rounded up (:func:`rounded_width`), so that they come again in later rounds. A client
    that keeps fewer channels trains some that it lacks, masked. If one keeps all, or rounding leads
    there, all train in full width.
    """
    full_width = adapters_in_full_width(jobs, net_name)
    thin_nets: list[SmallNet] = []
    for job in jobs:
        if job.thin is None:
            return full_width
        thin_nets.append(job.thin)

    widths: dict[str, int] = {}
    is_full = True
    for thin in set(thin_nets):
        for group, kept in thin.channels.items():
            width = rounded_width(int(kept.sum()), len(kept))
            widths[group] = max(widths.get(group, 0), width)
    for group, kept in thin_nets[0].channels.items():
        if widths[group] < len(kept):
            is_full = False
    if is_full:
        return full_width

    # Clients under equal masks have one SmallNet, and so one common one.
    common_nets: dict[SmallNet, SmallNet] = {}
    narrowed_leaves: NarrowedLeaves = {}
    adapters = []
    layouts = set()
    for job, thin in zip(jobs, thin_nets, strict=True):
        net = job.run.nets[net_name]
        if thin not in common_nets:
            common_nets[thin] = _widened_to(net, thin, widths)
        common = common_nets[thin]
        adapters.append(WidthAdapter(net, common, thin, narrowed_leaves))
        layouts.add((tuple(common.small.items()), common.norms))
    # A GroupNorm may have lost other numbers of channels in each of its groups on other clients:
    # then no one net does for all.
    if len(layouts) > 1:
        return full_width
    return adapters


def rounded_width(kept: int, full: int) -> int:
    """The width, of the few that stacks have, that holds ``kept`` of ``full`` channels.

    >>> [rounded_width(kept, 64) for kept in (1, 16, 17, 60)], rounded_width(5, 9)
    ([16, 16, 32, 64], 6)
    """
    part = -(-full // WIDTH_CLASSES)
    if part > ALIGNMENT:
        part = -(-part // ALIGNMENT) * ALIGNMENT
    return min(full, -(-kept // part) * part)


def _widened_to(net: Net, thin: SmallNet, widths: Mapping[str, int]) -> SmallNet:
    """The net with so many channels: those that stay, and the first of those that do not."""
    channels: dict[str, Tensor] = {}
    is_wide_enough = True
    for group, kept in thin.channels.items():
        more = widths[group] - int(kept.sum())
        if more:
            is_wide_enough = False
        rank_among_removed = (~kept).cumsum(0)
        channels[group] = kept | (~kept & (rank_among_removed <= more))
    if is_wide_enough:
        return thin
    return cut_channels(net, channels)


# ---- what several runs have in common ------------------------------------------------------------


def data_and_seed(job: Job) -> tuple[int, int, int]:
    """Whose data, and the seed of all draws: jobs that differ in this cannot end the same."""
    return id(job.run.federation), job.task.to, job.client.seed


def find_duplicates(jobs: Sequence[Job], hyperparameters: Tensor, carry: Carry) -> list[int]:
    """For every job the index of the first that will end as it does: itself, or one of another run.

    Jobs of one client and seed that begin with the same values, to the bit, end with the same:
    seeds decide the rest.
    """
    # Every job is compared with a leader: at first, the first job of the same data and seed.
    first_jobs: dict[tuple[int, int, int], int] = {}
    leaders: list[int] = []
    undecided: list[int] = []
    for i, job in enumerate(jobs):
        leader = first_jobs.setdefault(data_and_seed(job), i)
        leaders.append(leader)
        if leader != i:
            undecided.append(i)

    values = [hyperparameters]
    for tree in carry.values():
        for leaf in tree.values():
            # A stride of 0: one row expanded, the same for all.
            if leaf.stride(0):
                values.append(leaf)

    while undecided:
        compared = [leaders[i] for i in undecided]
        equal = torch.ones(len(undecided), dtype=torch.bool, device=hyperparameters.device)
        for value in values:
            # The unsqueeze is for leaves that are one number per client.
            equal &= (value[undecided] == value[compared]).unsqueeze(-1).flatten(1).all(1)

        # Of those that are not their leader's duplicates, the first leads the others from now on.
        new_leaders: dict[int, int] = {}
        still_undecided = []
        for i, is_duplicate in zip(undecided, equal.tolist(), strict=True):
            if is_duplicate:
                continue
            leaders[i] = new_leaders.setdefault(leaders[i], i)
            if leaders[i] != i:
                still_undecided.append(i)
        undecided = still_undecided
    return leaders
