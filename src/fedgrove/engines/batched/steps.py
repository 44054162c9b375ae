"""The steps of a Train stage over a stack of clients: one function for all clients, captured in a CUDA graph or not.

Clients are sorted by their number of steps, so that those still at work are always the first ``b`` rows of every
buffer. ``advance(b)`` does the next step of these: gather the rows of each batch, step under ``vmap``, write back
where the client still has steps to do. All it reads and writes stays in place, which is what a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...core import Batch, Carry
from ...nets import Net, Output
from ...parts import local
from ...trees import Tree
from . import grouped
from .lift import fill
from .shelf import Rows

Order = Sequence[Tensor]
"""A client's passes over its data, each the examples in order."""


class Plan(NamedTuple):
    """The batches of all clients, padded: (clients, steps, width), and how many steps each client does."""

    row: Tensor
    index: Tensor  # type: ignore[assignment]
    weight: Tensor
    position: Tensor
    steps: Tensor

    @classmethod
    def of(
        cls,
        orders: Sequence[Order],
        batch: int,
        firsts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Plan:
        """Lay the passes out in batches; client k's examples begin at row ``firsts[k]``. Padding repeats its first."""
        width = min(
            batch, max((len(examples) for order in orders for examples in order), default=1)
        )
        steps = np.array(
            [sum(-(-len(examples) // width) for examples in order) for order in orders]
        )
        index = np.zeros((len(orders), steps.max(initial=0), width), np.int64)
        size, position = np.zeros(index.shape[:2], np.int64), np.zeros(index.shape[:2], np.int64)
        for k, order in enumerate(orders):
            at = 0
            for examples in order:
                n, batches = len(examples), -(-len(examples) // width)
                index[k, at : at + batches].reshape(-1)[:n] = examples.numpy()
                size[k, at : at + batches] = width
                size[k, at + batches - 1] -= batches * width - n
                position[k, at : at + batches] = np.arange(batches)
                at += batches
        weight = np.arange(width) < size[..., None]
        row = index + np.array(firsts).reshape(-1, 1, 1)
        made = [torch.from_numpy(a).to(device) for a in (row, index, weight, position, steps)]
        return cls(made[0], made[1], made[2].to(dtype), made[3], made[4])

    def take(self, other: Plan) -> None:
        """Take over another plan's batches; it may have fewer steps."""
        most = other.row.shape[1]
        for mine, theirs in zip(self[:4], other[:4], strict=True):
            mine[:, :most].copy_(theirs)
        self.steps.copy_(other.steps)

    def roomy(self, multiple: int) -> Plan:
        """The same with room for more steps, up to the next multiple."""
        more = -self.row.shape[1] % multiple
        grown = [
            torch.cat([t, torch.zeros_like(t[:, :1]).repeat_interleave(more, 1)], 1)
            for t in self[:4]
        ]
        return Plan._make([*grown, self.steps])

    def batch(self, rows: Rows, clients: Any, step: Any, width: int | None = None) -> Batch:
        """The batches of one step."""
        pick = (clients, step, slice(width))
        row = self.row[pick]
        return Batch(
            rows.x[row],
            rows.y[row],
            self.weight[pick],
            self.index[pick],
            self.position[clients, step],
        )


class Stack:
    """Clients that train together: their carries, one row each, and the numbers of their stages."""

    def __init__(
        self,
        net: Net,
        skeleton: Any,
        carry: Carry,
        numbers: Tensor,
        plan: Plan,
        rows: Rows,
        grouped: bool = False,
    ) -> None:
        self.grouped = grouped
        self.net, self.skeleton, self.numbers, self.plan, self.rows = (
            net,
            skeleton,
            numbers,
            plan,
            rows,
        )
        self.stage = fill(skeleton, numbers[0])
        self.carry = vmap(lambda n, c: local.start_training(net, fill(skeleton, n), c))(
            numbers, carry
        )
        for key in self.moving:  # rows of their own: a broadcast tree is one row seen many times
            self.carry[key] = {
                k: v.clone(memory_format=torch.contiguous_format)
                for k, v in self.carry[key].items()
            }
        self.step = torch.zeros((), dtype=torch.long, device=numbers.device)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What a graph depends on beside the stage: clients, width of a batch, and the trees' shapes."""
        trees = tuple(
            (key, tuple((k, tuple(v.shape)) for k, v in tree.items()))
            for key, tree in self.carry.items()
        )
        return (*self.plan.row.shape[::2], trees)

    @property
    def moving(self) -> tuple[str, ...]:
        """What a step changes."""
        return (self.stage.end, "optimiser", "aux")

    def advance(self, b: int, all_at_work: bool = False, ragged: bool = False) -> None:
        """The next step of the first ``b`` clients; those that have done theirs stay as they are.

        ``ragged``: some of their batches are short, and a BatchNorm must be told.
        """
        s = self.step.expand(b)
        rows = torch.arange(b, device=s.device)
        active = None if all_at_work else self.plan.steps[:b] > s
        self._write(
            slice(b), self._stepped(slice(b), self.plan.batch(self.rows, rows, s), ragged), active
        )
        self.step += 1

    def advance_some(self, clients: Tensor, step: int, width: int) -> None:
        """Step ``step`` of some clients, whose batches hold exactly ``width`` examples."""
        batch = self.plan.batch(self.rows, clients, step, width)
        self._write(clients, self._stepped(clients, batch), None)

    def _stepped(self, clients: Any, batch: Batch, ragged: bool = False) -> Carry:
        part = {key: {k: v[clients] for k, v in tree.items()} for key, tree in self.carry.items()}
        numbers = self.numbers[clients]
        return (
            self._grouped(numbers, part, batch, ragged)
            if self.grouped
            else self._vmapped(numbers, part, batch)
        )

    def _vmapped(self, numbers: Tensor, carry: Carry, batch: Batch) -> Carry:
        """Any network: the pure step, under vmap."""

        def one(numbers: Tensor, carry: Carry, batch: Batch) -> Carry:
            after = local.step(self.net, fill(self.skeleton, numbers), carry, batch)
            return {key: after[key] for key in self.moving}

        return vmap(one, randomness="different")(numbers, carry, batch)

    def _grouped(self, numbers: Tensor, carry: Carry, batch: Batch, ragged: bool) -> Carry:
        """The network side by side; objective and optimiser under vmap. Clients are independent, so the gradient of
        the summed losses holds each client's own."""
        net, tree = self.net, carry[self.stage.end]
        params = {k: tree[k].detach().requires_grad_() for k in net.layout.params}
        buffers = {k: tree[k].clone() for k in net.layout.buffers}
        weight = batch.weight if ragged else None
        logits, features = grouped.forward(
            net, params | buffers, batch.x, train=True, weight=weight
        )

        def loss(
            numbers: Tensor,
            logits: Tensor,
            features: Tensor,
            params: Tree,
            batch: Batch,
            carry: Carry,
        ) -> Any:
            stage, out = fill(self.skeleton, numbers), Output(logits, features, net, True)
            return stage.objective(out, params, batch, {**carry, stage.end: carry["before"]})

        def move(numbers: Tensor, carry: Carry, grads: Tree, aux: Tree, buffers: Tree) -> Carry:
            after = local.moved(net, fill(self.skeleton, numbers), carry, grads, aux, buffers)
            return {key: after[key] for key in self.moving}

        losses, aux = vmap(loss, randomness="different")(
            numbers, logits, features, params, batch, carry
        )
        flat = torch.autograd.grad(
            losses.sum(), list(params.values()), allow_unused=True, materialize_grads=True
        )
        grads = dict(zip(params, flat, strict=True))
        with torch.no_grad():
            aux = {k: v.detach() for k, v in aux.items()}
            return vmap(move)(numbers, carry, grads, aux, buffers)

    def _write(self, clients: Any, after: Carry, active: Tensor | None) -> None:
        for key, tree in after.items():
            for k, v in tree.items():
                if k not in self.carry[key]:  # an objective's first word
                    shape = (len(self.numbers), *v.shape[1:])
                    self.carry[key][k] = torch.zeros(shape, dtype=v.dtype, device=v.device)
                old = self.carry[key][k]
                old[clients] = (
                    v if active is None else torch.where(wide(active, v), v, old[clients])
                )

    def take(self, other: Stack) -> None:
        """Begin anew with another stack's contents, in the buffers a graph has seen."""
        for key, tree in self.carry.items():
            for k, v in tree.items():
                if k in other.carry[key]:
                    v.copy_(other.carry[key][k])
                else:  # an objective's first word is yet to come
                    v.zero_()
        self.numbers.copy_(other.numbers)
        self.plan.take(other.plan)
        self.step.zero_()

    def result(self) -> Carry:
        """What the stage leaves behind."""
        return {self.stage.end: self.carry[self.stage.end], "aux": self.carry["aux"]}


def wide(flags: Tensor, like: Tensor) -> Tensor:
    """Flags, one per client, shaped so that they apply to whole rows."""
    return flags.view(-1, *([1] * (like.dim() - 1)))


def train(stack: Stack, go: Callable[[int, bool], None] | None = None) -> Carry:
    """All steps of a stack; ``go`` takes the place of ``stack.advance``."""
    counts, full = stack.plan.steps.tolist(), stack.plan.weight.bool().all(2).tolist()
    advance = go or (lambda b, ragged: stack.advance(b, True, ragged))
    for s in range(counts[0] if counts else 0):
        b = sum(n > s for n in counts)
        ragged = stack.net.layout.batch_norm and not all(row[s] for row in full[:b])
        if ragged and not stack.grouped:
            _by_size(stack, s)
            stack.step += 1
        else:
            advance(b, ragged)
    return stack.result()


def _by_size(stack: Stack, s: int) -> None:
    """Under vmap BatchNorm's statistics take no weights: only batches of equal size are stacked."""
    sizes = stack.plan.weight[:, s].sum(1).long().tolist()
    at_work = sorted((n, k) for k, n in enumerate(sizes) if n)
    for width, group in groupby(at_work, key=lambda pair: pair[0]):
        stack.advance_some(
            torch.tensor([k for _, k in group], device=stack.numbers.device), s, width
        )
