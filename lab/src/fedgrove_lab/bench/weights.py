"""Weights to measure on: really trained, since random ones compress like nothing a client sends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove import api, nets
from fedgrove.data import load
from fedgrove.data.files import folders
from fedgrove.data.sets import SETS
from fedgrove.errors import check
from fedgrove.nets.layout import tensors_of
from fedgrove.runs.memory import read_tree
from fedgrove.seeds import torch_rng
from fedgrove.trees import Tree

DataDir = str | Path | None
IMAGE = (3, 32, 32)
"""Channels, height and width of the images that ResNet-18 is trained on."""
CLASSES = 10
"""Both CIFAR-10 and digits have ten."""
BATCH = 16
"""Images per step of SGD."""


@dataclass(frozen=True)
class Weights:
    """A trained model."""

    name: str
    about: str
    """How it was trained."""
    tree: Tree
    buffers: frozenset[str] = frozenset()
    """What in ``tree`` is not a parameter."""

    @property
    def prunable(self) -> tuple[str, ...]:
        """The weights of conv and linear layers; norms and biases have one dimension."""
        return tuple(name for name, value in self.tree.items() if value.dim() > 1)


def federated(rounds: int, data_dir: DataDir = None, data: str = "uci-har") -> Weights:
    """The model of a fedavg run on ``data``; on generated motion where that set is not at hand."""
    check(rounds >= 1, "rounds", rounds, "1 or more")
    is_at_hand = at_hand(data, data_dir)
    used = data if is_at_hand else "motion"
    result = api.run(
        "fedavg", data=used, rounds=rounds, evaluate=0, data_dir=data_dir, progress=False
    )
    models = result.folder.path / "models"
    index = json.loads((models / "index.json").read_text())
    # Client 0's, but in fedavg all clients use the same model.
    tree = read_tree(models / index["0"])
    accuracy = 100 * result.summary["accuracy_mean"]
    plural = "s" if rounds > 1 else ""
    about = f"fedavg on {used}, {rounds} round{plural}, {accuracy:.1f} % accurate"
    if not is_at_hand:
        about += f" ({data} was not found)"
    return Weights(used, about, tree)


def resnet(steps: int, data_dir: DataDir = None) -> Weights:
    """ResNet-18 after steps of SGD on CIFAR-10; on enlarged digits where that is not at hand."""
    check(steps >= 0, "steps", steps, "0 or more")
    if at_hand("cifar10", data_dir):
        used = "cifar10"
        note = ""
    else:
        used = "digits"
        note = ", enlarged (cifar10 was not found)"
    x, y = _images(used, steps * BATCH, data_dir)
    module = nets.build("resnet18", IMAGE, CLASSES, seed=0)
    _train(module, x, y, steps)
    tree = {name: value.detach().clone() for name, value in tensors_of(module).items()}
    parameters = {name for name, _ in module.named_parameters()}
    about = f"{steps} steps of SGD, batches of {BATCH}, on {used}{note}"
    return Weights("resnet18", about, tree, frozenset(tree) - parameters)


def at_hand(name: str, data_dir: DataDir = None) -> bool:
    """Whether a set can be read without a download."""
    forms = SETS[name].forms
    # A set without files is generated, or comes with a package.
    if not forms:
        return True
    for folder in folders(data_dir):
        for form in forms:
            if all((folder / file).exists() for file in form.files):
                return True
    return False


def _images(name: str, n: int, data_dir: DataDir) -> tuple[Tensor, Tensor]:
    """``n`` images (at least one) of all clients, in random order, as large as CIFAR-10's."""
    federation = load(name, data_dir=data_dir)
    inputs = []
    labels = []
    for client in federation.clients.values():
        inputs.append(client.train.x)
        labels.append(client.train.y)
    x = torch.cat(inputs)
    y = torch.cat(labels)
    order = torch.randperm(len(x), generator=torch_rng(0, "bench"))[: max(n, 1)]
    # Digits are 8 x 8 in one channel. CIFAR-10's images stay as they are.
    return F.interpolate(x[order], size=IMAGE[1:]).expand(-1, *IMAGE), y[order]


def _train(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    module.train()
    for step in range(steps):
        # Round and round, where there are fewer images than the steps take.
        index = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        optimiser.zero_grad()
        # torch leaves backward untyped.
        loss: Any = F.cross_entropy(module(x[index]), y[index])
        loss.backward()
        optimiser.step()
