"""Stacks of jobs: their carries as one and back, a common width, and jobs that are duplicates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import gpu_copies, trees
from ...channels.shrink import cut_channels
from ...channels.small_net import NarrowedLeaves, SmallNet
from ...core import Carry, Train
from ...nets import Net
from ...parts import local
from ...trees import Tree
from .device import Copies, stack_on_device, start_copy_to_cpu, to_device
from .jobs import WIDTH_CLASSES, ClientJob, get_data_and_seed
from .steps import Passes

ALIGNMENT = 8
"""The widths of wide layers are multiples of this, as matrix units need."""
MAX_SHARED_MODELS = 4
"""Up to this many distinct leaves are taken for models from the server: one, or one per group."""
RECENT_BYTES = 1 << 28
"""The most memory for stacks that are kept for the next stage; training needs memory too."""


def list_training_passes(net: Net, job: ClientJob, number: int) -> Passes:
    """Return the epochs of stage ``number``, in the order of every engine, without empty ones."""
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
    jobs: Sequence[ClientJob], number: int, device: torch.device
) -> tuple[Any, Tensor]:
    """Return the common template of stage ``number``, and the hyperparameters (jobs, values)."""
    rows = [job.work.templates[number][1] for job in jobs]
    template = jobs[0].work.templates[number][0]
    dtype = next(iter(jobs[0].run.params.values())).dtype
    values = to_device(torch.tensor(rows, dtype=dtype), device)
    return template, values.view(len(jobs), -1)


class RecentStacks:
    """Leaves that are stacked on the device already, for an earlier stage of these clients.

    Most of a carry does not change between stages: received trees, memories, masks. The stacks are
    read and never written; steps write into copies. As for :mod:`fedgrove.gpu_copies`, writes that
    torch does not count (through ``.data`` or ``.numpy()``) are not noticed.
    """

    def __init__(self) -> None:
        # By the ids of the leaves, which are kept alive, with their numbers of writes.
        self._kept: dict[tuple[int, ...], tuple[Sequence[Tensor], list[int], Tensor]] = {}
        self._bytes = 0

    def find(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """Return the stack of these leaves on the device; None without a current one."""
        kept = self._kept.get(tuple(map(id, leaves)))
        if kept is None or kept[1] != trees.count_writes(leaves):
            return None
        return kept[2]

    def keep(self, leaves: Sequence[Tensor], stacked: Tensor) -> None:
        """Keep a stack on the device, as long as all together take little memory."""
        # Inference tensors do not count writes.
        if stacked.nbytes + self._bytes > RECENT_BYTES or any(v.is_inference() for v in leaves):
            return
        self._bytes += stacked.nbytes
        self._kept[tuple(map(id, leaves))] = (leaves, trees.count_writes(leaves), stacked)

    def clear(self) -> None:
        """Drop all stacks on the device."""
        self._kept.clear()
        self._bytes = 0


def stack_carries(
    carries: Sequence[Carry], device: torch.device, recent: RecentStacks | None = None
) -> Carry:
    """Stack the trees of all clients, one row per carry, with equal names and shapes.

    Args:
        carries: One per client.
        device: Where the stacks go.
        recent: The stacks of earlier stages; new stacks are added.
    """
    if recent is None:
        recent = RecentStacks()
    stacked: Carry = {}
    waiting: list[tuple[str, str, Rows]] = []
    # In order of names: a tree from a client's memory is at another place in the carry than a
    # received one, and the key of a captured graph must not depend on it.
    for name in sorted(carries[0]):
        stacked[name] = {}
        for leaf in carries[0][name]:
            rows = Rows.of([carry[name][leaf] for carry in carries])
            there = recent.find(rows.distinct)
            if there is None:
                there = _stack_gpu_copies(rows.distinct, device)
            if there is None:
                waiting.append((name, leaf, rows))
                # Keeps its place among the leaves.
                stacked[name][leaf] = rows.distinct[0]
            else:
                stacked[name][leaf] = rows.spread(there)
    moved = stack_on_device([rows.distinct for _, _, rows in waiting], device)
    for (name, leaf, rows), there in zip(waiting, moved, strict=True):
        recent.keep(rows.distinct, there)
        stacked[name][leaf] = rows.spread(there)
    return stacked


class Rows(NamedTuple):
    """One leaf of many carries; some carries may share a tensor."""

    distinct: list[Tensor]
    places: list[int]
    """For each carry, the index of its tensor in ``distinct``."""

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> Rows:
        """Collect the leaves of all stacked clients; a shared leaf is there once."""
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
        """Return one row per stacked client, from one row per distinct leaf."""
        carries = len(self.places)
        # A broadcast model takes the memory of one row, until something is written into it.
        if len(self.distinct) == 1:
            return stacked.expand(carries, *stacked.shape[1:])
        if len(self.distinct) == carries:
            return stacked
        return stacked[to_device(torch.tensor(self.places), stacked.device)]


def _stack_gpu_copies(leaves: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Stack the leaves' cached GPU copies; None if one has no copy."""
    if device.type != "cuda":
        return None
    # A leaf for many clients is copied to the GPU and cached. Leaves of single clients are not: it
    # is faster to copy all of them together.
    are_shared = len(leaves) <= MAX_SHARED_MODELS
    if not are_shared:
        stacked = gpu_copies.stack_rows(leaves)
        if stacked is not None and stacked.device.type == device.type:
            return stacked
    found: list[Tensor] = []
    for leaf in leaves:
        gpu_copy = (
            gpu_copies.find_or_make_copy(leaf, device) if are_shared else gpu_copies.find_copy(leaf)
        )
        if gpu_copy is None or gpu_copy.device.type != device.type:
            return None
        found.append(gpu_copy)
    return torch.stack(found)


class ReturningRows(NamedTuple):
    """Rows of a stacked tree while they are copied to the CPU; the rows of a run are together."""

    like: Tree
    """A client's tree, for names and shapes."""
    rows_by_run: list[list[int]]
    """The rows of each run."""
    parts: list[Tensor]
    """The GPU copies of what arrives, in that order."""
    copies: Copies

    def trees(self) -> list[Tree]:
        """Wait for the copies from the GPU and return each client's tree."""
        here = self.copies.wait()
        if not self.parts:
            return trees.unstack(here, sum(map(len, self.rows_by_run)))
        own: dict[int, Tree] = {}
        for rows, part, copy in zip(self.rows_by_run, self.parts, here.values(), strict=True):
            # They agree: the CPU tensor was copied from it.
            gpu_copies.keep_copy(copy, part, is_written=True)
            own.update(zip(rows, split_rows(copy, self.like), strict=True))
        return [own[row] for row in range(len(own))]


def start_return(stacked: Tree, owners: Sequence[int]) -> ReturningRows:
    """Start copying each client's row of a stacked tree to the CPU.

    From a GPU there is one copy for each run, which also stays on the GPU: the leaves of a client
    are views of one vector, and the gate and the mean read its GPU copy. There is one for each run,
    because a run measures all its rows at once.

    Args:
        stacked: The tree.
        owners: The run of each row, as any number.
    """
    rows_by_run: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        rows_by_run.setdefault(owner, []).append(row)
    rows = list(rows_by_run.values())
    like = {name: leaf[0] for name, leaf in stacked.items()}
    types = {leaf.dtype for leaf in stacked.values()}
    is_on_gpu = any(leaf.is_cuda for leaf in stacked.values())
    if not is_on_gpu or len(types) > 1:
        return ReturningRows(like, rows, [], start_copy_to_cpu(stacked))
    there = join_rows(stacked)
    if len(rows) > 1:
        order = torch.tensor([row for own in rows for row in own])
        there = there[to_device(order, there.device)]
    parts = torch.split(there, [len(own) for own in rows])
    copies = start_copy_to_cpu({str(number): part for number, part in enumerate(parts)})
    return ReturningRows(like, rows, list(parts), copies)


def join_rows(stacked: Tree) -> Tensor:
    """Concatenate the leaves of each stacked client: (clients, numbers)."""
    # The unsqueeze is for leaves with one number per client.
    return torch.cat([leaf.unsqueeze(-1).flatten(1) for leaf in stacked.values()], 1)


def split_rows(rows: Tensor, like: Tree) -> list[Tree]:
    """Undo :func:`join_rows`: return the clients' trees as views of the rows."""
    sizes = [leaf.numel() for leaf in like.values()]
    views: Tree = {}
    for (name, leaf), columns in zip(like.items(), torch.split(rows, sizes, 1), strict=True):
        views[name] = columns.view(len(rows), *leaf.shape)
    return trees.unstack(views, len(rows))


# ---- clients whose masks remove whole channels ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class WidthAdapter:
    """Narrows a client's trees to the width of its stack, and widens the results."""

    net: Net
    common: SmallNet | None = None
    """The net in the width of the stack; None: in full width."""
    own: SmallNet | None = None
    """The net in the client's own width; None: in full width."""
    narrowed_leaves: NarrowedLeaves = field(default_factory=dict)
    """The leaves narrowed already for the stack: a model for all clients is narrowed, moved to the
    device and kept there once."""

    def narrow(self, carry: Carry, whole: Collection[str]) -> Carry:
        """Return a client's trees in the width of its stack, except those in ``whole``."""
        if self.common is None:
            return carry
        return self.common.narrow_carry(carry, whole, self.narrowed_leaves)

    def widen(self, trained: Carry) -> Carry:
        """Return what a client of a stack trained, in full width."""
        if self.common is not None:
            trained = {name: self.common.widen(tree) for name, tree in trained.items()}
        if self.own is None or self.own is self.common:
            return trained
        # Channels that the stack has and the client lacks went through BatchNorm: their running
        # statistics are reset to those of a net in the client's own width.
        if not self.net.layout.buffers:
            return trained
        return {name: self.own.reset_removed(tree) for name, tree in trained.items()}


def make_full_width_adapters(
    jobs: Sequence[ClientJob], net_name: str = "model"
) -> list[WidthAdapter]:
    """Return adapters that train all networks masked, in full width."""
    return [WidthAdapter(job.run.nets[net_name], None, job.thin) for job in jobs]


def make_width_adapters(jobs: Sequence[ClientJob], net_name: str = "model") -> list[WidthAdapter]:
    """Return adapters to one common width: every layer as wide as the widest client needs.

    Widths are rounded up (:func:`round_width`), so that later rounds have them too. A client that
    keeps fewer channels trains some masked ones. If a client keeps all channels, or rounding gives
    full width, all train in full width.
    """
    full_width = make_full_width_adapters(jobs, net_name)
    thin_nets: list[SmallNet] = []
    for job in jobs:
        if job.thin is None:
            return full_width
        thin_nets.append(job.thin)

    widths: dict[str, int] = {}
    for thin in set(thin_nets):
        for group, kept in thin.channels.items():
            width = round_width(int(kept.sum()), len(kept))
            widths[group] = max(widths.get(group, 0), width)
    if all(widths[group] == len(kept) for group, kept in thin_nets[0].channels.items()):
        return full_width

    # Clients with equal masks share a SmallNet, and so the common one.
    common_nets: dict[SmallNet, SmallNet] = {}
    narrowed_leaves: NarrowedLeaves = {}
    adapters = []
    layouts = set()
    for job, thin in zip(jobs, thin_nets, strict=True):
        net = job.run.nets[net_name]
        if thin not in common_nets:
            common_nets[thin] = _widen_small_net(net, thin, widths)
        common = common_nets[thin]
        adapters.append(WidthAdapter(net, common, thin, narrowed_leaves))
        layouts.add((tuple(common.small.items()), common.norms))
    # The groups of a GroupNorm may have lost different numbers of channels on different clients:
    # then no single net fits all.
    if len(layouts) > 1:
        return full_width
    return adapters


def round_width(kept: int, full: int) -> int:
    """Round ``kept`` of ``full`` channels up to one of the few widths that stacks have.

    >>> [round_width(kept, 64) for kept in (1, 16, 17, 60)], round_width(5, 9)
    ([16, 16, 32, 64], 6)
    """
    part = -(-full // WIDTH_CLASSES)
    if part > ALIGNMENT:
        part = -(-part // ALIGNMENT) * ALIGNMENT
    return min(full, -(-kept // part) * part)


def _widen_small_net(net: Net, thin: SmallNet, widths: Mapping[str, int]) -> SmallNet:
    """Return the net with ``widths`` channels: the kept ones, and the first of the others."""
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


def find_duplicates(jobs: Sequence[ClientJob], hyperparameters: Tensor, carry: Carry) -> list[int]:
    """Return for every job the index of the first job with equal results, perhaps of another run.

    Jobs of one client and seed that begin with exactly equal values have equal results, because
    seeds decide the rest.
    """
    # Every job is compared with a leader: at first, the first job with its data and seed.
    first_jobs: dict[tuple[int, int, int], int] = {}
    leaders: list[int] = []
    undecided: list[int] = []
    for i, job in enumerate(jobs):
        leader = first_jobs.setdefault(get_data_and_seed(job), i)
        leaders.append(leader)
        if leader != i:
            undecided.append(i)

    values = [hyperparameters]
    for tree in carry.values():
        for leaf in tree.values():
            # A stride of 0 is one row expanded, equal for all.
            if leaf.stride(0):
                values.append(leaf)

    while undecided:
        compared = [leaders[i] for i in undecided]
        equal = torch.ones(len(undecided), dtype=torch.bool, device=hyperparameters.device)
        for value in values:
            # The unsqueeze is for leaves with one number per client.
            equal &= (value[undecided] == value[compared]).unsqueeze(-1).flatten(1).all(1)

        # Of the jobs that differ from their leader, the first leads the others from now on.
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
