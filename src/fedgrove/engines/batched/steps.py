"""The steps of a Train stage over a stack of clients, captured in a CUDA graph or not.

Clients are sorted by their number of steps, most first, so that those that still have steps to do
(the active ones) are always the first rows of every buffer. ``Stack.advance(n)`` does the next step
of the first n: gather the rows of each batch, step, write back where the client is active. All
tensors that it reads and writes keep their addresses, as a CUDA graph needs. :func:`train_stack`
calls it step by step.

Shapes: K clients, S steps, batches of at most B examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ... import trees
from ...core import Batch, Carry
from ...nets import Net, Output
from ...parts import local
from ...trees import Tree
from . import convolution, grouped
from .device import DeviceSplit, to_device
from .jobs import from_template

Passes = Sequence[Tensor]
"""A client's passes over its data, each the indices of its examples in order."""


def count_steps(passes: Passes, batch_size: int) -> int:
    """Count the steps of a stacked client: the batches of its passes.

    A last batch may be short.
    """
    steps = 0
    for examples in passes:
        # Not `len`, which takes three microseconds for a tensor; this is called very often.
        steps += -(-examples.shape[0] // batch_size)
    return steps


class BatchPlan(NamedTuple):
    """The examples of every client in every step. Short batches are padded with weight 0."""

    row: Tensor
    """(K, S, B): rows of the device's data."""
    index: Tensor  # type: ignore[assignment]
    """(K, S, B): these examples, counted within the client's split."""
    weight: Tensor
    """(K, S, B): 1 for an example, 0 for padding."""
    position: Tensor
    """(K, S): the batch's number within its pass."""
    steps: Tensor
    """(K,): the number of steps of the client."""
    counts: np.ndarray
    """(K,): ``steps`` on the CPU, which then never waits for the device to know what is next."""
    sizes: np.ndarray
    """(K, S): the number of examples in a batch, on the CPU."""

    @classmethod
    def of(
        cls,
        passes_by_client: Sequence[Passes],
        batch_size: int,
        offsets: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> BatchPlan:
        """Divide the passes of stacked clients into batches.

        The examples of client k begin at row ``offsets[k]``.

        Padding repeats the client's first example.
        """
        # No wider than the longest pass, so that small clients waste nothing on a large batch size.
        lengths: list[int] = []
        for passes in passes_by_client:
            for examples in passes:
                lengths.append(examples.shape[0])
        # At least 1: if no client has an example, there are no steps, but there is a width.
        width = min(batch_size, max(1, max(lengths, default=1)))

        clients = len(passes_by_client)
        steps = np.array([count_steps(passes, width) for passes in passes_by_client])
        most_steps = steps.max(initial=0)
        index = np.zeros((clients, most_steps, width), np.int64)
        position = np.zeros((clients, most_steps), np.int64)
        size = np.zeros((clients, most_steps), np.int64)
        for client, passes in enumerate(passes_by_client):
            start = 0
            for examples in passes:
                n = examples.shape[0]
                if n == 0:
                    continue
                batches = count_steps([examples], width)
                end = start + batches
                # The slice is contiguous, so the reshape is a view of it and writes into `index`.
                index[client, start:end].reshape(-1)[:n] = examples.numpy()
                size[client, start:end] = width
                size[client, end - 1] -= batches * width - n
                position[client, start:end] = np.arange(batches)
                start = end
        # Integers only, in one copy; the rest is computed on the device.
        parts = (index, position, size, steps, np.array(offsets))
        there = to_device(torch.from_numpy(np.concatenate([p.ravel() for p in parts])), device)
        flat = torch.split(there, [part.size for part in parts])
        index_there, position_there, size_there, steps_there, offsets_there = (
            values.view(part.shape) for values, part in zip(flat, parts, strict=True)
        )
        weight = torch.arange(width, device=device) < size_there[..., None]
        return cls(
            row=index_there + offsets_there.view(-1, 1, 1),
            index=index_there,
            weight=weight.to(dtype),
            position=position_there,
            steps=steps_there,
            counts=steps,
            sizes=size,
        )

    def batch(self, data: DeviceSplit, clients: Any, step: Any, width: int | None = None) -> Batch:
        """Return the batches of some stacked clients in one step, ``width`` examples at most."""
        pick = (clients, step, slice(width))
        row = self.row[pick]
        return Batch(
            data.x[row],
            data.y[row],
            self.weight[pick],
            self.index[pick],
            self.position[clients, step],
        )

    def first_steps(self, most: int | None) -> BatchPlan:
        """Return the plan without the steps after ``most``; None: all."""
        if most is None:
            return self
        return BatchPlan(
            row=self.row[:, :most],
            index=self.index[:, :most],
            weight=self.weight[:, :most],
            position=self.position[:, :most],
            steps=self.steps.clamp(max=most),
            counts=self.counts.clip(max=most),
            sizes=self.sizes[:, :most],
        )

    def with_room(self, clients: int, multiple: int) -> BatchPlan:
        """Return the plan in larger tensors: more clients, and steps up to the next multiple."""
        more_clients = clients - self.row.shape[0]
        more_steps = -self.row.shape[1] % multiple

        def padded(values: Tensor) -> Tensor:
            # From the last dimension to the first, as `pad` takes it.
            behind = [0, 0] * (values.dim() - 2) + [0, more_steps, 0, more_clients]
            return torch.nn.functional.pad(values, behind)

        return self._replace(
            row=padded(self.row),
            index=padded(self.index),
            weight=padded(self.weight),
            position=padded(self.position),
            # A row without a client does no step.
            steps=torch.nn.functional.pad(self.steps, [0, more_clients]),
        )

    def loaded(self, other: BatchPlan) -> BatchPlan:
        """Copy another plan, with as many or fewer clients and steps, into these tensors."""
        clients, steps = other.row.shape[:2]
        # The entries after its last step are old, and never read because of `steps`.
        self.row[:clients, :steps].copy_(other.row)
        self.index[:clients, :steps].copy_(other.index)
        self.weight[:clients, :steps].copy_(other.weight)
        self.position[:clients, :steps].copy_(other.position)
        self.steps.zero_()
        self.steps[:clients].copy_(other.steps)
        return self._replace(counts=other.counts, sizes=other.sizes)


class Stack:
    """Clients that train together: their carries and hyperparameters, one row per client."""

    def __init__(
        self,
        net: Net,
        template: Any,
        carry: Carry,
        hyperparameters: Tensor,
        plan: BatchPlan,
        data: DeviceSplit,
        use_grouped: bool = False,
    ) -> None:
        self.net = net
        self.template = template
        self.hyperparameters = hyperparameters
        self.plan = plan
        self.data = data
        self.use_grouped = use_grouped
        # The first client's stage, for what all share, such as the names of trees.
        self.stage = from_template(template, hyperparameters[0])

        def start_one(hyperparameters: Tensor, carry: Carry) -> Carry:
            return local.start_training(net, from_template(template, hyperparameters), carry)

        self.carry = vmap(start_one)(hyperparameters, carry)
        # A tree that all clients share is one row expanded. Trees that steps write need real rows.
        for name in self.updated_names:
            copies: Tree = {}
            for leaf, value in self.carry[name].items():
                copies[leaf] = value.clone(memory_format=torch.contiguous_format)
            self.carry[name] = copies
        self.in_place = self._can_step_in_place()
        # The number of the next step, on the device: a replayed graph reads it there.
        self.step = torch.zeros((), dtype=torch.long, device=hyperparameters.device)

    def _can_step_in_place(self) -> bool:
        """Return whether kernels exist for the optimiser's step (:mod:`.optimiser_triton`)."""
        if not self.use_grouped or not convolution.is_on_gpu(self.hyperparameters):
            return False
        # Frozen tensors need the pure form, which restores them.
        if not convolution.has_triton() or local.frozen_names(self.stage, self.carry):
            return False
        # Slow to import, and only for torch builds with CUDA.
        from . import optimiser_triton

        return optimiser_triton.can_update(from_template(self.template, self.hyperparameters.T))

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """What a graph depends on in addition to the stage: the width of a batch, and a client's
        trees.

        The numbers of clients and steps do not count: a captured stack has room for more.
        """
        shapes = []
        for name, tree in self.carry.items():
            leaves = []
            for leaf, value in tree.items():
                leaves.append((leaf, tuple(value.shape[1:]), value.dtype))
            # Tuples throughout: the key of a graph must be hashable.
            shapes.append((name, tuple(leaves)))
        return (self.plan.row.shape[2], tuple(shapes))

    @property
    def updated_names(self) -> tuple[str, ...]:
        """The trees of the stacked carry that a step changes."""
        return (self.stage.end, local.OPTIMISER, "aux")

    def make_room(self, clients: int, multiple: int) -> None:
        """Enlarge the tensors for ``clients`` clients, and steps up to the next multiple.

        The rows after the last client are copies of it, and do no step.
        """
        more = clients - len(self.hyperparameters)

        def rows(values: Tensor) -> Tensor:
            behind = values[-1:].expand(more, *values.shape[1:])
            return torch.cat([values, behind])

        self.hyperparameters = rows(self.hyperparameters)
        for tree in self.carry.values():
            tree.update({k: rows(v) for k, v in tree.items()})
        self.plan = self.plan.with_room(clients, multiple)

    def load(self, other: Stack) -> None:
        """Start again with another stack's contents, in the buffers that a captured graph uses."""
        clients = len(other.hyperparameters)
        keeps_state = local.recipe(self.stage).keep_state
        buffers = [self.hyperparameters[:clients]]
        contents = [other.hyperparameters]
        for name, tree in self.carry.items():
            for leaf, value in tree.items():
                if name == local.OPTIMISER:
                    # All rows: the kernels of :mod:`.optimiser_triton` lay moments out tensor by
                    # tensor, so the rows after the last client are used too.
                    value.zero_()
                    if keeps_state:
                        buffers.append(value[:clients])
                        contents.append(other.carry[name][leaf])
                elif leaf in other.carry[name]:
                    buffers.append(value[:clients])
                    contents.append(other.carry[name][leaf])
                else:
                    # An objective added it to aux in an earlier round; here it begins again.
                    value.zero_()
        torch._foreach_copy_(buffers, contents)
        self.plan = self.plan.loaded(other.plan)
        self.step.zero_()

    def advance(self, count: int, all_active: bool = False, ragged: bool = False) -> None:
        """Do the next step of the first ``count`` clients; those without one do not change.

        Args:
            count: The number of clients.
            all_active: Whether all of them have a step, so that no check is needed.
            ragged: Whether some batches are short, so that BatchNorm must leave the padding out.
        """
        step = self.step.expand(count)
        clients = torch.arange(count, device=step.device)
        active = None if all_active else self.plan.steps[:count] > step
        # The batch has no name, so its memory is free when the results are written.
        if self.in_place:
            self._step_in_place(count, self.plan.batch(self.data, clients, step), active, ragged)
        else:
            # The first rows as a slice, not as `clients`: these are views, without a gather.
            after = self._step(slice(count), self.plan.batch(self.data, clients, step), ragged)
            self._write(slice(count), after, active)
        self.step += 1

    def _step_in_place(self, count: int, batch: Batch, active: Tensor | None, ragged: bool) -> None:
        """Do a step with one optimiser kernel per tensor (:mod:`.optimiser_triton`)."""
        from . import optimiser_triton

        # Views of the buffers: what is written to these is there as well.
        carry = select_clients(self.carry, slice(count))
        if self.stage.project is not None:
            before = self._project(self.hyperparameters[:count], carry)
            self._write(slice(count), {self.stage.end: before}, active)
        tree = carry[self.stage.end]
        buffers = trees.pick(tree, self.net.layout.buffers)
        if active is not None:
            # The forward pass also changes the running statistics of clients that are done.
            buffers = trees.map(Tensor.clone, buffers)
        hyperparameters = self.hyperparameters[:count]
        grads, aux = self._gradients(hyperparameters, carry, batch, ragged, buffers)
        # Transposed: every float of the stage becomes a tensor with one value per client.
        stage = from_template(self.template, hyperparameters.T)
        state = self.carry[local.OPTIMISER]
        with torch.no_grad():
            optimiser_triton.update(stage, carry, grads, state, count, active)
        moved: Carry = {"aux": aux}
        if active is not None:
            moved[self.stage.end] = buffers
        self._write(slice(count), moved, active)

    def advance_by_batch_size(self, step: int) -> None:
        """Do a step under vmap, where BatchNorm takes no weights: batches of equal size together.

        Args:
            step: The number of the step, which the device knows too.
        """
        clients_by_size: dict[int, list[int]] = {}
        for client, size in enumerate(self.plan.sizes[:, step].tolist()):
            if size:
                clients_by_size.setdefault(size, []).append(client)
        for size in sorted(clients_by_size):
            clients = torch.tensor(clients_by_size[size], device=self.step.device)
            batch = self.plan.batch(self.data, clients, step, size)
            self._write(clients, self._step(clients, batch), active=None)
        self.step += 1

    def _step(self, clients: Any, batch: Batch, ragged: bool = False) -> Carry:
        """Return the updated trees of some clients after one step."""
        carry = select_clients(self.carry, clients)
        hyperparameters = self.hyperparameters[clients]
        if self.use_grouped:
            return self._grouped_step(hyperparameters, carry, batch, ragged)
        return self._vmap_step(hyperparameters, carry, batch)

    def _vmap_step(self, hyperparameters: Tensor, carry: Carry, batch: Batch) -> Carry:
        """Any network: the pure step, under vmap."""

        def step_one(hyperparameters: Tensor, carry: Carry, batch: Batch) -> Carry:
            stage = from_template(self.template, hyperparameters)
            after = local.step(self.net, stage, carry, batch)
            return {name: after[name] for name in self.updated_names}

        return vmap(step_one, randomness="different")(hyperparameters, carry, batch)

    def _grouped_step(
        self, hyperparameters: Tensor, carry: Carry, batch: Batch, ragged: bool
    ) -> Carry:
        """Do a step with the network in grouped kernels; objective and optimiser under vmap."""
        net = self.net
        if self.stage.project is not None:
            before = self._project(hyperparameters, carry)
            carry = {**carry, self.stage.end: carry[self.stage.end] | before}
        tree = carry[self.stage.end]
        buffers = trees.map(Tensor.clone, trees.pick(tree, net.layout.buffers))
        grads, aux = self._gradients(hyperparameters, carry, batch, ragged, buffers)

        def update_one(
            hyperparameters: Tensor, carry: Carry, grads: Tree, aux: Tree, buffers: Tree
        ) -> Carry:
            stage = from_template(self.template, hyperparameters)
            after = local.moved(net, stage, carry, grads, aux, buffers)
            return {name: after[name] for name in self.updated_names}

        with torch.no_grad():
            return vmap(update_one)(hyperparameters, carry, grads, aux, buffers)

    def _gradients(
        self, hyperparameters: Tensor, carry: Carry, batch: Batch, ragged: bool, buffers: Tree
    ) -> tuple[Tree, Tree]:
        """Return each client's gradients and its objective's ``aux``; ``buffers`` change."""
        net = self.net
        if local.recipe(self.stage).augment is not None:
            batch = vmap(self._augment_one)(carry["client"], batch)
        tree = carry[self.stage.end]
        params = {k: tree[k].detach().requires_grad_() for k in net.layout.params}
        weight = batch.weight if ragged else None
        forward = self._forward_at(hyperparameters, params, carry)
        logits, features = grouped.forward(
            net, forward | buffers, batch.x, train=True, weight=weight
        )

        def loss_of_one(
            hyperparameters: Tensor,
            logits: Tensor,
            features: Tensor,
            params: Tree,
            batch: Batch,
            carry: Carry,
        ) -> Any:
            stage = from_template(self.template, hyperparameters)
            output = Output(logits, features, net, True)
            return stage.objective(output, params, batch, local.as_before(stage, carry))

        losses, aux = vmap(loss_of_one, randomness="different")(
            hyperparameters, logits, features, params, batch, carry
        )
        # Clients are independent, so the gradient of the summed losses has each client's gradient.
        gradients = torch.autograd.grad(
            losses.sum(), list(params.values()), allow_unused=True, materialize_grads=True
        )
        grads = dict(zip(params, gradients, strict=True))
        return grads, trees.map(Tensor.detach, aux)

    def _project(self, hyperparameters: Tensor, carry: Carry) -> Tree:
        """Return each client's parameters before a step, as :func:`local.projected`."""

        def one(hyperparameters: Tensor, carry: Carry) -> Tree:
            stage = from_template(self.template, hyperparameters)
            seen = local.as_before(stage, carry)
            tree = local.projected(self.net, stage, carry[stage.end], seen)
            return trees.pick(tree, self.net.layout.params)

        with torch.no_grad():
            before: Tree = vmap(one)(hyperparameters, carry)
        return before

    def _augment_one(self, marks: Tree, batch: Batch) -> Batch:
        """Return the batch of one client of the stack, augmented."""
        return local.augmented(self.stage, {"client": marks}, batch)

    def _forward_at(self, hyperparameters: Tensor, params: Tree, carry: Carry) -> Tree:
        """Return the weights of each client's forward pass, as in :func:`local.forward_at`."""
        if self.stage.at is None:
            return params

        def one(hyperparameters: Tensor, params: Tree, carry: Carry) -> Tree:
            stage = from_template(self.template, hyperparameters)
            return local.forward_at(stage, params, local.as_before(stage, carry))

        weights: Tree = vmap(one)(hyperparameters, params, carry)
        return weights

    def _write(self, clients: Any, after: Carry, active: Tensor | None) -> None:
        """Copy the updated trees into the buffers, where the client is active (None: all are)."""
        for name, tree in after.items():
            buffers = self.carry[name]
            for leaf, value in tree.items():
                if leaf not in buffers:
                    # An objective adds a leaf to aux in its first step.
                    shape = (len(self.hyperparameters), *value.shape[1:])
                    buffers[leaf] = torch.zeros(shape, dtype=value.dtype, device=value.device)
                buffer = buffers[leaf]
                if active is None:
                    buffer[clients] = value
                else:
                    # A client that is done is frozen, because Adam's moments would keep moving it.
                    flags = expand_flags(active, value)
                    buffer[clients] = torch.where(flags, value, buffer[clients])

    def result(self) -> Carry:
        """Return the results of a stack's stage."""
        left = {self.stage.end: self.carry[self.stage.end], "aux": self.carry["aux"]}
        if local.recipe(self.stage).keep_state:
            left |= self._name_states()
        return select_clients(left, slice(len(self.plan.counts)))

    def begin(self) -> None:
        """Prepare the first step: kept optimiser states go to where the kernels look for them."""
        if self.in_place and local.recipe(self.stage).keep_state:
            sizes = self._param_sizes()
            for value in self.carry[local.OPTIMISER].values():
                # Not Adam's step counter, which is one number per client.
                if value.dim() > 1:
                    value.copy_(to_blocks(value, sizes))

    def _name_states(self) -> Carry:
        """Return the clients' optimiser states as trees (:func:`local.name_state`)."""
        state = dict(self.carry[local.OPTIMISER])
        if not state:
            # SGD without momentum.
            return {}
        if self.in_place:
            sizes = self._param_sizes()
            for slot, value in state.items():
                if value.dim() > 1:
                    state[slot] = to_rows(value, sizes)
        params = trees.pick(self.carry[self.stage.end], self.net.layout.params)
        named: Carry = vmap(local.name_state)(state, params)
        return named

    def _param_sizes(self) -> list[int]:
        """Return how many numbers each parameter of a client has, in order."""
        params = trees.pick(self.carry[self.stage.end], self.net.layout.params)
        return [leaf[0].numel() for leaf in params.values()]


def to_blocks(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return what an optimiser remembers, a row per client, in the order of the kernels.

    Args:
        rows: (K, P): for each client the numbers of all tensors.
        sizes: How many numbers of a client each tensor has.
    """
    blocks = [part.reshape(-1) for part in torch.split(rows, list(sizes), 1)]
    return torch.cat(blocks).view(rows.shape)


def to_rows(blocks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Undo :func:`to_blocks` for the GPU kernels' results: return a row per client.

    >>> rows = torch.arange(6).view(2, 3)
    >>> blocks = to_blocks(rows, [1, 2])
    >>> blocks.tolist(), torch.equal(to_rows(blocks, [1, 2]), rows)
    ([[0, 3, 1], [2, 4, 5]], True)
    """
    clients = len(blocks)
    parts = torch.split(blocks.reshape(-1), [size * clients for size in sizes])
    return torch.cat([part.view(clients, -1) for part in parts], 1)


def select_clients(carry: Carry, clients: Any) -> Carry:
    """Select the rows of some clients in every tree; ``clients`` is a slice or indices."""
    selected: Carry = {}
    for name, tree in carry.items():
        selected[name] = {k: v[clients] for k, v in tree.items()}
    return selected


def expand_flags(flags: Tensor, like: Tensor) -> Tensor:
    """Reshape flags, one per client, to (K, 1, ...), to broadcast over the clients' rows."""
    return flags.view(-1, *([1] * (like.dim() - 1)))


def train_stack(stack: Stack, advance: Callable[[int, bool], None] | None = None) -> Carry:
    """Do all steps of a stack; ``advance(active, ragged)`` can replace ``stack.advance``."""
    stack.begin()
    counts = stack.plan.counts
    is_full = stack.plan.sizes == stack.plan.row.shape[2]
    # The first client has the most steps.
    most_steps = int(counts[0]) if len(counts) else 0
    for step in range(most_steps):
        active = int((counts > step).sum())
        all_full = bool(is_full[:active, step].all())
        # Only BatchNorm mixes examples; for others an example of weight 0 changes nothing.
        ragged = stack.net.layout.batch_norm and not all_full
        if ragged and not stack.use_grouped:
            stack.advance_by_batch_size(step)
        elif advance is None:
            stack.advance(active, True, ragged)
        else:
            advance(active, ragged)
    return stack.result()
