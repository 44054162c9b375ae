"""Gradients of a loss by some weights: for clients that measure what their weights are worth.

They are found for networks that ``torch.func`` cannot run as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from .. import trees
from ..core import GRADIENT_PASSES, Batch, Batches, Carry
from ..nets import Net
from ..trees import Tree
from .local import LocalTraining
from .objective import Objective


def loss_at(
    objective: Objective, net: Net, params: Tree, batch: Batch, carry: Carry
) -> Callable[[Tree], Tensor]:
    """The mean loss of a batch as a function of some weights, without dropout."""

    def loss(weights: Tree) -> Tensor:
        tree = {**params, **weights}
        out = net(tree, batch.x, train=False)
        # The objective sees the tensors that the network sees, or its own terms (a pull to a
        # reference, say) would have no gradient.
        mean, _ = objective(out, trees.pick(tree, net.layout.params), batch, carry)
        return mean

    return loss


def gradient(loss: Callable[[Tree], Tensor], weights: Tree) -> Tree:
    """Compute the gradient of a method's ``loss`` at ``weights``; zeros for those it ignores.

    It may itself be differentiated, and mapped over clients.

    >>> gradient(lambda w: (w["a"] ** 2).sum(), {"a": torch.tensor([3.0])})
    {'a': tensor([6.])}
    """
    try:
        found: Tree = grad(loss)(weights)
        return found
    except Exception as error:
        try:
            return _plain(loss, weights)
        except Exception:
            # Within torch.func there is no other way; and what both raise is no fault of it.
            raise error from None


def _plain(loss: Callable[[Tree], Tensor], weights: Tree) -> Tree:
    """As training takes it: a forward pass may then use NumPy, say."""
    # Where the gradient is differentiated again, the weights are variables already.
    is_inner = any(weight.requires_grad for weight in weights.values())
    with torch.enable_grad():
        variables = weights
        if not is_inner:
            variables = {k: v.detach().requires_grad_() for k, v in weights.items()}
        gradients = torch.autograd.grad(
            loss(variables),
            list(variables.values()),
            create_graph=is_inner,
            allow_unused=True,
            materialize_grads=True,
        )
    return dict(zip(variables, gradients, strict=True))


@dataclass(frozen=True)
class Gradient:
    """What :class:`~fedgrove.core.Measure` sums: the objective's gradient, times the examples.

    The factor turns the mean over a batch into a sum, so that batches of unequal size add up.
    """

    objective: Objective
    whole: bool = False
    """Whether by all parameters; False: by the prunable weights."""
    passes: ClassVar[int] = GRADIENT_PASSES

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The gradient by weight, without dropout."""

        mean_loss = loss_at(self.objective, net, params, batch, carry)

        def loss(weights: Tree) -> Tensor:
            return mean_loss(weights) * batch.weight.sum()

        names = net.layout.params if self.whole else net.layout.prunable
        return gradient(loss, trees.pick(params, names))


def random_batches(local: LocalTraining | None, limit: int | None = None) -> Batches:
    """Return the training batches over which a client measures gradients, in random order.

    Args:
        local: The recipe, which has the batch size; None: 32.
        limit: At most this many batches.
    """
    size = 32 if local is None else local.batch
    # Shuffled: rows may lie in order of recording, and the first ones are then of one class.
    return Batches("train", size=size, shuffle=True, limit=limit)


def settled(gradient: Tensor) -> Tensor:
    """Return a measured gradient with what is only rounding set to 0.

    That is less than 16 units in the last place of its largest entry. A weight that never left the
    reference (behind a dead unit, say) is pulled by nothing but rounding: its vote, and whether it
    regrows, would differ from machine to machine.

    >>> settled(torch.tensor([1.0, 1e-9]))
    tensor([1., 0.])
    """
    magnitudes = gradient.abs()
    rounding = 16 * torch.finfo(gradient.dtype).eps * magnitudes.max()
    return trees.where(_above(magnitudes, rounding), gradient)


def _above(numbers: Tensor, bound: Tensor) -> Tensor:
    if not trees.are_plain(numbers) or numbers.dtype == torch.bfloat16:
        return numbers > bound
    # A tenth of torch's time, which compares number by number; numpy has no bfloat16.
    return torch.from_numpy(numbers.numpy() > bound.numpy())
