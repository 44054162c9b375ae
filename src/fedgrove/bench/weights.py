"""Weights to measure on: trained for real, since random ones compress like nothing a client ever sends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import api, nets
from ..data import load
from ..data.files import folders
from ..data.sets import SETS
from ..errors import check
from ..nets.layout import tensors_of
from ..runs.store import read_tree
from ..seeds import torch_rng
from ..trees import Tree

Place = str | Path | None
IMAGE, CLASSES, BATCH = (3, 32, 32), 10, 16


@dataclass(frozen=True)
class Weights:
    """A trained model; ``about`` says how it was trained, ``buffers`` what in ``tree`` is not a parameter."""

    name: str
    about: str
    tree: Tree
    buffers: frozenset[str] = frozenset()

    @property
    def prunable(self) -> tuple[str, ...]:
        """The weights of conv and linear layers; norms and biases have one dimension."""
        return tuple(k for k, v in self.tree.items() if v.dim() > 1)


def federated(rounds: int, data_dir: Place = None, data: str = "uci-har") -> Weights:
    """The model of a fedavg run on ``data``, or on generated motion where that set is not at hand."""
    check(rounds >= 1, "rounds", rounds, "1 or more")
    there = at_hand(data, data_dir)
    used = data if there else "motion"
    result = api.run("fedavg", data=used, rounds=rounds, evaluate=0, data_dir=data_dir)
    models = result.folder.path / "models"
    tree = read_tree(models / json.loads((models / "index.json").read_text())["0"])
    accuracy = 100 * result.summary["accuracy_mean"]
    about = f"fedavg on {used}, {rounds} round{'s' * (rounds > 1)}, {accuracy:.1f} % accurate"
    return Weights(used, about if there else f"{about} ({data} was not found)", tree)


def resnet(steps: int, data_dir: Place = None) -> Weights:
    """ResNet-18 after some steps of SGD on CIFAR-10, or on enlarged digits where that set is not at hand."""
    check(steps >= 0, "steps", steps, "0 or more")
    used = "cifar10" if at_hand("cifar10", data_dir) else "digits"
    x, y = _images(used, steps * BATCH, data_dir)
    module = nets.build("resnet18", IMAGE, CLASSES, seed=0)
    _descend(module, x, y, steps)
    tree = {k: v.detach().clone() for k, v in tensors_of(module).items()}
    enlarged = "" if used == "cifar10" else ", enlarged (cifar10 was not found)"
    about = f"{steps} steps of SGD, batches of {BATCH}, on {used}{enlarged}"
    return Weights(
        "resnet18", about, tree, frozenset(tree) - {k for k, _ in module.named_parameters()}
    )


def at_hand(name: str, data_dir: Place = None) -> bool:
    """Whether a set can be read without a download."""
    forms = SETS[name].forms
    return not forms or any(
        all((p / f).exists() for f in form.files) for p in folders(data_dir) for form in forms
    )


def _images(name: str, n: int, data_dir: Place) -> tuple[Tensor, Tensor]:
    federation = load(name, data_dir=data_dir)
    parts = [client.train for client in federation.clients.values()]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    order = torch.randperm(len(x), generator=torch_rng(0, "bench"))[: max(n, 1)]
    return F.interpolate(x[order], size=IMAGE[1:]).expand(-1, *IMAGE), y[order]


def _descend(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    module.train()
    for step in range(steps):
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        optimiser.zero_grad()
        loss: Any = F.cross_entropy(module(x[at]), y[at])  # torch leaves backward untyped
        loss.backward()
        optimiser.step()
