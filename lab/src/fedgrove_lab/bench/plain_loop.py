"""The plain loop: what a researcher writes first.

An nn.Module, a DataLoader (on CUDA: batches cut from tensors that are already there), torch.optim,
``load_state_dict`` per client and a mean of state dicts. What a client does here, Flower's client
does too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedgrove.nets import build
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.run import Run

from .scenes import Scene


def plain_module(scene: Scene) -> nn.Module:
    """The network as one would write it in plain PyTorch."""
    # Our har-cnn treats a series as an image of height 1: faster, but not what one writes first.
    if scene.net != "har-cnn":
        return build(scene.net, scene.shape, scene.classes, 0)
    channels, length = scene.shape
    return nn.Sequential(
        nn.Conv1d(channels, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Dropout(0.3),
        nn.Conv1d(64, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        # Two poolings leave a quarter of the length, in 64 channels: 64 * length / 4.
        nn.Linear(16 * length, 32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, scene.classes),
    )


def optimiser_of(local: LocalTraining) -> Callable[..., torch.optim.Optimizer]:
    """torch's own optimiser for a recipe; it still wants the parameters and ``lr``."""
    rule = local.optimiser
    if isinstance(rule, Adam):
        return torch.optim.Adam
    return partial(torch.optim.SGD, momentum=rule.momentum)


def fit(model: nn.Module, x: Tensor, y: Tensor, scene: Scene) -> None:
    """Train a client's model in place."""
    optimiser = optimiser_of(scene.local)(model.parameters(), lr=scene.local.optimiser.lr)
    use_bf16 = scene.half and x.is_cuda
    model.train()
    for batch_x, batch_y in _batches(x, y, scene.local):
        optimiser.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=use_bf16):
            loss = F.cross_entropy(model(batch_x), batch_y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _batches(x: Tensor, y: Tensor, local: LocalTraining) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(local.epochs):
        if x.is_cuda:
            # A DataLoader would fetch example by example, a kernel for each: too easy to beat.
            order = torch.randperm(len(y), device=x.device)
            for index in torch.split(order, local.batch):
                yield x[index], y[index]
        else:
            yield from DataLoader(TensorDataset(x, y), batch_size=local.batch, shuffle=True)


class PlainLoop:
    """FedAvg, one client after another."""

    def __init__(self, scene: Scene, run: Run, device: str) -> None:
        self.scene = scene
        self.run = run
        self.device = device
        self.model = plain_module(scene).to(device)
        self.data: dict[int, tuple[Tensor, Tensor]] = {}
        for k, client in run.federation.clients.items():
            self.data[k] = (client.train.x.to(device), client.train.y.to(device))

    def round(self, cohort: list[int]) -> None:
        """Train every client of the cohort from the same model, and average."""
        model = self.model
        start = {}
        sums = {}
        for name, value in model.state_dict().items():
            # state_dict returns the live tensors, which training changes.
            start[name] = value.clone()
            # In float32, since BatchNorm counts its batches in integers.
            sums[name] = torch.zeros_like(value, dtype=torch.float32)
        total = sum(self.run.infos[k].examples for k in cohort)
        for k in cohort:
            model.load_state_dict(start, strict=False)
            fit(model, *self.data[k], self.scene)
            for name, value in model.state_dict().items():
                sums[name] += value * (self.run.infos[k].examples / total)
        model.load_state_dict(sums, strict=False)
