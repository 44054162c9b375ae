"""Two rounds of two clients in plain torch: for tests that write a method's equations again.

Nothing here is fedgrove's but the data and the seeds of the shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.conftest import federation, make_run, play
from torch import Tensor
from torch.func import functional_call

from fedgrove import nets, seeds, trees
from fedgrove.core import AnyMethod
from fedgrove.engines import Serial
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.run import Run

Weights = dict[str, Tensor]

SIZES = (20, 13)
SHARES = (20 / 33, 13 / 33)
"""Of the two clients: the shares of their examples."""
STEPS = (6, 4)
"""Their steps in a round: two epochs of batches of 8."""
RATE = 0.1
PLAIN_SGD = LocalTraining(2, 8, SGD(RATE))


def initial() -> Weights:
    """The weights that the run begins with."""
    module = nets.build("mlp", (12,), 3, 0).double()
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def examples(client: int) -> tuple[Tensor, Tensor]:
    """A client's training data."""
    part = federation((12,), SIZES).clients[client].train
    return part.x, part.y


def gradient(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """The gradient of the mean cross-entropy."""
    module = nets.build("mlp", (12,), 3, 0).double()
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    loss = F.cross_entropy(functional_call(module, leaves, (x,)), y)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def train(
    weights: Weights,
    client: int,
    number: int,
    *,
    more: Callable[[str, Tensor], Tensor] | None = None,
    only: Collection[str] = (),
    stage: int = 0,
    epochs: int = 2,
) -> Weights:
    """SGD on one client's data in round ``number``; ``more(name, w)`` is added to a gradient."""
    x, y = examples(client)
    weights = dict(weights)
    seed = seeds.derive(0, number, client, "train")
    for epoch in range(epochs):
        generator = seeds.torch_rng(seed, "shuffle", stage, epoch)
        for rows in torch.split(torch.randperm(len(y), generator=generator), 8):
            found = gradient(weights, x[rows], y[rows])
            for name in only or list(weights):
                direction = found[name]
                if more is not None:
                    direction = direction + more(name, weights[name])
                weights[name] = weights[name] - RATE * direction
    return weights


def mean(models: list[Weights]) -> Weights:
    """The weighted mean of the two clients' models."""
    one, other = models
    return {name: SHARES[0] * one[name] + SHARES[1] * other[name] for name in one}


def play_two_rounds(method: AnyMethod, folder: Path) -> tuple[Run, Any]:
    """The library's own run, and its last state."""
    run = make_run(method, folder, sizes=SIZES, cohort=2, rounds=2)
    return run, play(run, Serial())


def far(one: Weights, other: Weights) -> float:
    """How far two trees are from each other."""
    return trees.distance(trees.pick(one, other), other)
