"""The gradient of a loss by some weights, also of networks that ``torch.func`` cannot run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from .. import trees
from ..core import Batch, Carry
from ..nets import Net
from ..trees import Tree
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
    """The gradient of ``loss`` at ``weights``; zeros where it does not depend on them.

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
