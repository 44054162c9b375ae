"""How a client trains: optimisers, the recipe, and the Train stage in its two forms.

Parameters, gradients and optimiser state live in flat vectors: one vector operation instead of one
per tensor. Every optimiser has a pure form, ``step`` (for ``torch.func.vmap``), and an in-place
one, ``step_`` (less memory and fewer kernels on one client); they are tested equal.

The optimiser's state starts anew in every task, or with ``LocalTraining(keep_state=True)`` where
the client's last task left it. It is never sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.func import grad

from .. import trees
from ..core import OPTIMISER_PREFIX, Batch, Batches, Carry, Client, Train
from ..errors import check
from ..trees import Tree
from .augment import Augment

if TYPE_CHECKING:
    from ..nets import Net

DRAWS = "draws"
"""In ``carry["client"]``: the number that augmentation draws from."""
CONSTANT = {"needs_part": True}
"""Of a constant of an optimiser's formula: ``--set`` takes it as ``optimiser.eps``. A name such as
``eps`` alone is as likely to be meant for something else."""
Number = float | Tensor
"""A setting of an optimiser: a float, or a tensor where the batched engine stacks clients."""


# ---- optimisers ----------------------------------------------------------------------------------


class Optimiser(Protocol):
    """A rule that moves a flat vector against its gradient."""

    @property
    def lr(self) -> float:
        """The optimiser's step size before any decay."""

    @property
    def slots(self) -> int:
        """How many vectors of the parameters' size the optimiser remembers."""

    def init(self, w: Tensor) -> Tree:
        """Return the optimiser's state before the first step; names and shapes stay the same."""

    def step(self, w: Tensor, g: Tensor, state: Tree, lr: Number) -> tuple[Tensor, Tree]:
        """Return parameters and state after one step of the optimiser; pure."""

    def step_(self, w: Tensor, g: Tensor, state: Tree, lr: float) -> None:
        """Do one step of the optimiser in place: ``w``, ``g`` and ``state`` are overwritten."""


def _is_off(number: Number) -> bool:
    """Whether a momentum or weight decay is the plain number 0, and so costs nothing.

    The batched engine replaces every other number by a tensor with one value per client. A tensor
    under vmap cannot decide an ``if``; being a tensor, it is not off.
    """
    return not isinstance(number, Tensor) and number == 0


def _decayed(g: Tensor, w: Tensor, weight_decay: Number) -> Tensor:
    """The gradient with weight decay added."""
    if _is_off(weight_decay):
        return g
    return g + weight_decay * w


@dataclass(frozen=True)
class SGD:
    r"""Stochastic gradient descent with momentum and weight decay.

    :math:`g \leftarrow g + \lambda w;\; v \leftarrow \beta v + g;\; w \leftarrow w - \eta v`
    (:math:`\eta` lr, :math:`\beta` momentum, :math:`\lambda` weight_decay; the first :math:`v` is
    :math:`g`).

    >>> rule = SGD(lr=0.1)
    >>> w = torch.tensor([1.0])
    >>> w, state = rule.step(w, torch.tensor([2.0]), rule.init(w), rule.lr)
    >>> w
    tensor([0.8000])
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check(self.lr > 0, "lr", self.lr, "above 0")
        check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")

    @property
    def slots(self) -> int:
        """How many vectors SGD remembers: the velocity, none without momentum."""
        if _is_off(self.momentum):
            return 0
        return 1

    def init(self, w: Tensor) -> Tree:
        """Return SGD's velocity of zero; nothing without momentum."""
        if _is_off(self.momentum):
            return {}
        return {"v": torch.zeros_like(w)}

    def step(self, w: Tensor, g: Tensor, state: Tree, lr: Number) -> tuple[Tensor, Tree]:
        """Do one step of SGD, pure."""
        g = _decayed(g, w, self.weight_decay)
        if _is_off(self.momentum):
            return w - lr * g, {}
        v = self.momentum * state["v"] + g
        return w - lr * v, {"v": v}

    def step_(self, w: Tensor, g: Tensor, state: Tree, lr: float) -> None:
        """Do one step of SGD in place."""
        if self.weight_decay:
            g.add_(w, alpha=self.weight_decay)
        if self.momentum:
            # From here on g is the velocity itself, which add_ below only reads.
            g = state["v"].mul_(self.momentum).add_(g)
        w.add_(g, alpha=-lr)


@dataclass(frozen=True)
class Adam:
    r"""Adam (Kingma & Ba 2015, Alg. 1), with weight decay added to the gradient.

    :math:`m \leftarrow \beta_1 m + (1-\beta_1) g;\; v \leftarrow \beta_2 v + (1-\beta_2) g^2;\;
    w \leftarrow w - \eta\, \frac{m}{1-\beta_1^t} \big/ \big(\sqrt{v/(1-\beta_2^t)} + \epsilon\big)`
    (:math:`\eta` lr, :math:`\epsilon` eps, :math:`t` the number of the step, from 1).

    The first step is as long as the learning rate, whatever the gradient:

    >>> rule = Adam(lr=0.1)
    >>> w = torch.tensor([1.0])
    >>> w, state = rule.step(w, torch.tensor([2.0]), rule.init(w), rule.lr)
    >>> w
    tensor([0.9000])
    """

    lr: float = 1e-3
    beta1: float = field(default=0.9, metadata=CONSTANT)
    beta2: float = field(default=0.999, metadata=CONSTANT)
    eps: float = field(default=1e-8, metadata=CONSTANT)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check(self.lr > 0, "lr", self.lr, "above 0")
        check(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        check(self.eps > 0, "eps", self.eps, "above 0")
        check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")

    @property
    def slots(self) -> int:
        """How many vectors Adam remembers: first and second moments."""
        return 2

    def init(self, w: Tensor) -> Tree:
        """Return Adam's moments of zero, with no step taken."""
        # The step count is a tensor: in a stack of clients each row has taken its own number.
        return {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "t": w.new_zeros(())}

    def step(self, w: Tensor, g: Tensor, state: Tree, lr: Number) -> tuple[Tensor, Tree]:
        """Do one step of Adam, pure."""
        t = state["t"] + 1
        g = _decayed(g, w, self.weight_decay)
        m = self.beta1 * state["m"] + (1 - self.beta1) * g
        v = self.beta2 * state["v"] + (1 - self.beta2) * g * g
        root = (v / (1 - self.beta2**t)).sqrt() + self.eps
        return w - lr * (m / (1 - self.beta1**t)) / root, {"m": m, "v": v, "t": t}

    def step_(self, w: Tensor, g: Tensor, state: Tree, lr: float) -> None:
        """Do one step of Adam in place: all of it in one pass over the vectors."""
        state["t"] += 1
        # What torch.optim.adam.adam ends in; for one vector its preparations take as long again.
        torch._fused_adam_(
            [w],
            [g],
            [state["m"]],
            [state["v"]],
            [],
            [state["t"]],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


# ---- the recipe ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalTraining:
    r"""A training recipe: epochs over the client's training data, batch size, optimiser, clipping.

    The learning rate of round :math:`t` is :math:`\eta\,\delta^t` (:math:`\delta` decay); gradients
    longer than ``clip`` are scaled down to it. With ``augment`` images are changed at random in
    every step.
    """

    epochs: int = 1
    batch: int = 32
    optimiser: SGD | Adam = Adam()
    decay: float = 1.0
    clip: float | None = None
    augment: Augment | None = None
    keep_state: bool = False
    """Whether a client keeps the optimiser's state from round to round; False: it starts at 0 in
    every round."""

    def __post_init__(self) -> None:
        check(self.epochs >= 1, "epochs", self.epochs, "1 or more")
        check(self.batch >= 1, "batch", self.batch, "1 or more")
        check(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")
        check(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or none")


def for_epochs(local: LocalTraining | None, epochs: int) -> LocalTraining | None:
    """Return a training recipe for a number of epochs; None, the data set's own, stays None."""
    return None if local is None else replace(local, epochs=epochs)


def clip_scale(g: Tensor, clip: float) -> Tensor:
    r"""The factor :math:`\min(1, c / \lVert g \rVert_2)` that shortens a gradient to :math:`c`."""
    # The bound keeps a gradient of zeros from dividing by 0; its factor is 1.
    return torch.clamp_max(clip / torch.linalg.vector_norm(g).clamp_min(1e-12), 1.0)


def recipe(stage: Train) -> LocalTraining:
    """Return the training recipe of a stage; a run fills in the data set's before any work."""
    if stage.local is None:
        raise ValueError(
            "this Train stage has no recipe: build the run with fedgrove.run, "
            "or set local=LocalTraining(...)"
        )
    return stage.local


def epochs(net: Net, stage: Train, client: Client, number: int) -> Iterable[Batch]:
    """Yield the batches of local training, epoch after epoch.

    ``number`` is the stage's place among the Train stages of a task: each shuffles differently.
    """
    for epoch in range(recipe(stage).epochs):
        yield from client.batches(batches_of(net, stage), number, epoch)


def batches_of(net: Net, stage: Train) -> Batches:
    """Return the training data in the batches of the local training recipe."""
    # BatchNorm cannot train on a batch of one: a single example has no variance.
    least = 2 if net.layout.batch_norm else 1
    fold: Literal["all", "out"] = "out" if stage.leaves_out_fold else "all"
    return Batches("train", recipe(stage).batch, shuffle=True, least=least, fold=fold)


def count_steps(stage: Train, client: Client) -> int:
    """Return the number of steps of local training in a round; 0 for a client without examples."""
    over = batches_of(client.net, stage)
    return recipe(stage).epochs * math.ceil(client.count_seen(over) / over.size)


def augmented(stage: Train, carry: Carry, batch: Batch) -> Batch:
    """Return the batch of a step of local training, augmented if the recipe requests it; pure."""
    local = recipe(stage)
    if local.augment is None:
        return batch
    order = torch.arange(batch.index.shape[0], device=batch.index.device)
    place = batch.position * local.batch + order
    return batch._replace(x=local.augment(batch.x, carry["client"][DRAWS], batch.index, place))


def flat_mask(mask: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of local training over the flat vector; ones for unnamed parameters."""
    parts = []
    for name, value in params.items():
        if name in mask:
            part = mask[name].to(value.dtype)
        else:
            part = torch.ones_like(value)
        parts.append(part.reshape(-1))
    return torch.cat(parts)


def frozen_names(stage: Train, carry: Carry) -> frozenset[str]:
    """Return the names of the parameters that local training leaves as they are."""
    if not stage.frozen:
        return frozenset()
    return frozenset(carry[stage.frozen])


def without_frozen(g: Tensor, params: Mapping[str, Tensor], frozen: frozenset[str]) -> Tensor:
    """Return a flat gradient with zeros for frozen parameters, so that clipping ignores them."""
    moves = {name: torch.zeros_like(params[name]) for name in params if name in frozen}
    return g * flat_mask(moves, params)


def learning_rate(local: LocalTraining, carry: Carry) -> Tensor:
    r"""Return the learning rate of local training in a round, :math:`\eta_t = \eta\,\delta^t`."""
    rate: Tensor = local.optimiser.lr * local.decay ** carry["settings"]["round"]
    return rate


# ---- an optimiser's state that is kept from round to round ---------------------------------------


def name_state(state: Tree, params: Mapping[str, Tensor]) -> dict[str, Tree]:
    """Return an optimiser's state as trees, one for each slot of it.

    A vector becomes a tree like the parameters, so that it can be narrowed and widened with the
    network; a single number (Adam's step counter) is a tree of one leaf.
    """
    named: dict[str, Tree] = {}
    for slot, value in state.items():
        tree = trees.unflatten(value, params) if value.dim() else {slot: value}
        named[OPTIMISER_PREFIX + slot] = tree
    return named


def place_of_state(verb: str, number: int) -> str:
    """Return how the names of a Train stage's optimiser state begin in a client's memory.

    Every Train stage of a verb has its own state: a probe between two rounds changes none.

    >>> place_of_state("train:evidence", 0)
    'optimiser.train.0.'
    """
    purpose = verb.partition(":")[0]
    return f"{OPTIMISER_PREFIX}{purpose}.{number}."


def find_state(
    net: Net, stage: Train, carry: Carry, kept: Mapping[str, Tree], place: str
) -> dict[str, Tree]:
    """Return the state with which a Train stage begins, by slot; none if it keeps no state.

    That is the one that the client kept, or the optimiser's first one: for a new client, and where
    another optimiser or a network of other shapes left it.

    Args:
        net: The network.
        stage: The stage.
        carry: The carry before the stage.
        kept: What the client remembers, from earlier tasks or earlier stages.
        place: How the names of the stage's state begin (:func:`place_of_state`).
    """
    local = recipe(stage)
    if not local.keep_state:
        return {}
    params = trees.pick(carry[stage.start], net.layout.params)
    first = name_state(local.optimiser.init(trees.flatten(params)), params)
    found = {}
    for name, tree in first.items():
        there = kept.get(place + name.removeprefix(OPTIMISER_PREFIX))
        if there is None or not trees.same_layout(tree, there):
            return first
        found[name] = there
    return found


def take_state(carry: Carry, place: str) -> tuple[Carry, dict[str, Tree]]:
    """Return the carry after local training without the optimiser's state, and that to remember."""
    left: Carry = {}
    kept: dict[str, Tree] = {}
    for name, tree in carry.items():
        if name.startswith(OPTIMISER_PREFIX):
            kept[place + name.removeprefix(OPTIMISER_PREFIX)] = tree
        else:
            left[name] = tree
    return left, kept


def begin_state(
    stage: Train, carry: Carry, params: Mapping[str, Tensor], w: Tensor
) -> tuple[Carry, Tree]:
    """Return the carry and the optimiser's state, in flat vectors, before the first training step.

    A kept state is 0 where the stage's mask is: a moment from before a weight was pruned would move
    it. If the weight returns, its moments begin at 0, while Adam's step counter goes on.
    """
    state = recipe(stage).optimiser.init(w)
    left, kept = take_state(carry, "")
    if not kept:
        return carry, state
    mask = None
    if stage.mask_name in carry:
        mask = flat_mask(carry[stage.mask_name], params)
    for slot, value in state.items():
        if not value.dim():
            # A copy: the in-place form increments it.
            state[slot] = kept[slot][slot].clone()
            continue
        vector = trees.flatten(trees.pick(kept[slot], params))
        state[slot] = vector if mask is None else vector * mask
    return left, state


# ---- the pure form: start_training, then step for each batch; an engine may stack clients --------


# In the carry while a stage is under way, in angle brackets: no tree of a method's is called so.
BEFORE = "<before>"
OPTIMISER = "<optimiser>"


def start_training(net: Net, stage: Train, carry: Carry) -> Carry:
    """Return the carry before the first step of local training.

    ``carry[end]`` holds the masked start, ``carry[OPTIMISER]`` the optimiser's state.
    ``carry[BEFORE]`` keeps what ``carry[end]`` was, which is what an objective sees under that
    name: a stage may start, end and be pulled to the same tree.
    """
    tree = trees.apply_mask(carry[stage.start], carry.get(stage.mask_name, {}))
    params = trees.pick(tree, net.layout.params)
    carry, state = begin_state(stage, carry, params, trees.flatten(params))
    return {
        **carry,
        BEFORE: carry.get(stage.end, {}),
        stage.end: tree,
        OPTIMISER: state,
        "aux": carry["aux"] | stage.objective.begin(params, carry),
    }


def as_before(stage: Train, carry: Carry) -> Carry:
    """Return the carry before local training, with what objectives have remembered since."""
    seen = dict(carry)
    before = seen.pop(BEFORE)
    del seen[OPTIMISER]
    del seen[stage.end]
    if before:
        seen[stage.end] = before
    return seen


def projected(net: Net, stage: Train, tree: Tree, carry: Carry) -> Tree:
    """Return the tree that a step of local training begins with, after ``stage.project``; pure."""
    if stage.project is None:
        return tree
    return tree | stage.project(trees.pick(tree, net.layout.params), carry)


def forward_at(stage: Train, params: Tree, carry: Carry) -> Tree:
    """Return the weights of the forward pass in local training: the parameters or ``stage.at``.

    Then the gradient goes straight through: it is taken there and moves the parameters. With
    ``stage.differentiate`` it is that of ``stage.at`` as well.
    """
    if stage.at is None:
        return params
    if stage.differentiate:
        return stage.at(params, carry)
    with torch.no_grad():
        there = stage.at(params, carry)
    # The difference is a constant to autograd, and what is left of the sum is the parameters.
    return {k: w + (there[k] - w).detach() for k, w in params.items()}


def step(net: Net, stage: Train, carry: Carry, batch: Batch) -> Carry:
    """Do one step of local training, as a pure function of tensors."""
    objective_carry = as_before(stage, carry)
    batch = augmented(stage, carry, batch)
    tree = projected(net, stage, carry[stage.end], objective_carry)
    carry = {**carry, stage.end: tree}

    def loss(params: Tree) -> tuple[Tensor, tuple[Tree, Tree]]:
        # The forward pass writes running statistics into its buffers; copies keep the step pure.
        buffers = {k: tree[k].clone() for k in net.layout.buffers}
        out = net(forward_at(stage, params, objective_carry) | buffers, batch.x, train=True)
        value, aux = stage.objective(out, params, batch, objective_carry)
        return value, (aux, buffers)

    grads, (aux, buffers) = grad(loss, has_aux=True)(trees.pick(tree, net.layout.params))
    return moved(net, stage, carry, grads, aux, buffers)


def moved(net: Net, stage: Train, carry: Carry, grads: Tree, aux: Tree, buffers: Tree) -> Carry:
    """Local training: return the carry after one step: mask, clip, optimiser. Pure."""
    local = recipe(stage)
    params = trees.pick(carry[stage.end], net.layout.params)
    g = trees.flatten(trees.pick(grads, params))
    # The mask comes before clipping, so that the length is that of the weights in use, and before
    # the optimiser, so that momentum moves no pruned weight. A product may leave -0.0 in the
    # gradient; a pruned weight starts as +0.0, and 0.0 minus a zero of either sign is 0.0.
    if stage.mask_name in carry:
        g = g * flat_mask(carry[stage.mask_name], params)
    frozen = frozen_names(stage, carry)
    if frozen:
        g = without_frozen(g, params, frozen)
    if local.clip is not None:
        g = g * clip_scale(g, local.clip)
    w, state = local.optimiser.step(
        trees.flatten(params), g, carry[OPTIMISER], learning_rate(local, carry)
    )
    after = trees.unflatten(w, params) | buffers
    for name in frozen & after.keys():
        # Weight decay moves a parameter whose gradient is 0, and a forward pass moves statistics.
        after[name] = carry[stage.end][name]
    return {
        **carry,
        stage.end: after,
        "aux": carry["aux"] | aux,
        OPTIMISER: state,
    }


# ---- the in-place form: the same steps on one client, in less memory -----------------------------


def train(net: Net, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    """Do all steps of local training on one client.

    Equal to :func:`start_training` and :func:`step` over ``batches``. The returned carry has the
    optimiser's state as named trees, if the stage keeps it.
    """
    local = recipe(stage)
    start = trees.apply_mask(carry[stage.start], carry.get(stage.mask_name, {}))
    start_params = trees.pick(start, net.layout.params)
    w = trees.flatten(start_params)
    # Parameters are views of w: when the optimiser moves w in place, the network has moved.
    params = {}
    for name, view in trees.unflatten(w, start_params).items():
        params[name] = view.detach().requires_grad_()
    # Copies: the forward pass writes running statistics in place, and the start must stay as it is.
    buffers = trees.map(Tensor.clone, trees.pick(start, net.layout.buffers))
    tree: dict[str, Any] = params | buffers
    leaves = list(params.values())
    carry, state = begin_state(stage, carry, start_params, w)
    g = torch.empty_like(w)
    mask = None
    if stage.mask_name in carry:
        mask = flat_mask(carry[stage.mask_name], params)
    frozen = frozen_names(stage, carry)
    views = trees.unflatten(w, start_params)
    frozen_views = {k: v for k, v in views.items() if k in frozen}
    if frozen:
        ones = torch.ones_like(w) if mask is None else mask
        mask = without_frozen(ones, start_params, frozen)
    lr = float(learning_rate(local, carry))
    carry = {**carry, "aux": carry["aux"] | stage.objective.begin(start_params, carry)}
    for plain_batch in batches:
        batch = augmented(stage, carry, plain_batch)
        if stage.project is not None:
            for name, value in projected(net, stage, views, carry).items():
                views[name].copy_(value)
        forward = tree
        if stage.at is not None:
            forward = forward_at(stage, params, carry) | buffers
        loss, aux = stage.objective(net(forward, batch.x, train=True), params, batch, carry)
        # A parameter that the loss does not reach has a gradient of zeros, as in the pure form.
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        torch.cat([v.reshape(-1) for v in grads], out=g)
        # Mask, clip, step: the order of moved(), for its reasons.
        if mask is not None:
            g.mul_(mask)
        if local.clip is not None:
            g.mul_(clip_scale(g, local.clip))
        local.optimiser.step_(w, g, state, lr)
        for name, view in frozen_views.items():
            # As in moved(): weight decay moves what has no gradient.
            view.copy_(start_params[name])
        if aux:
            # Detached, or each step would keep the graphs of all steps before it alive.
            carry = {**carry, "aux": carry["aux"] | trees.map(Tensor.detach, aux)}
    after = trees.map(Tensor.detach, tree)
    for name in frozen & buffers.keys():
        after[name] = start[name]
    kept = name_state(state, start_params) if local.keep_state else {}
    return {**carry, stage.end: after, **kept}
