"""Small runs to export, and what their files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import list_again
from torch import Tensor, nn

from fedgrove import trees
from fedgrove.api import train
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.config.experiment import Experiment
from fedgrove.export import executorch as executorch_files
from fedgrove.export import onnx as onnx_files
from fedgrove.export.figures import Exported, Row
from fedgrove.methods import FedAvg
from fedgrove.nets import Net
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.memory import read_tree, write_tree


def missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


with_onnx = pytest.mark.skipif(
    bool(missing(*onnx_files.NEEDS)), reason="pip install 'fedgrove[export]'"
)
with_executorch = pytest.mark.skipif(
    bool(missing(*executorch_files.NEEDS)), reason="pip install 'fedgrove[edge]'"
)

NETS: dict[str, tuple[int, ...]] = {
    "har-cnn": (3, 16),
    "mnist-cnn": (1, 8, 8),
    "lenet": (3, 16, 16),
    "leafcnn": (1, 16, 16),
    "bn-cnn2": (1, 8, 8),
    "bn-cnn4": (3, 16, 16),
    "resnet18": (3, 8, 8),
    "shufflenetv2": (3, 8, 8),
    "mlp": (12,),
}


def own_data(folder: Path, shape: tuple[int, ...]) -> str:
    """A file of two clients whose channels lie far from 0 and from each other's."""
    rng = np.random.default_rng(0)
    client = np.repeat([0, 1], 20)
    x = 3 + 5 * rng.standard_normal((40, *shape)) + 10 * client.reshape(-1, *(1,) * len(shape))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "own.npz", x=x.astype(np.float32), y=rng.integers(0, 3, 40), client=client)
    return str(folder / "own.npz")


def finished(
    folder: Path, net: str | nn.Module, shape: tuple[int, ...], method: Any = None
) -> RunFolder:
    """A real run of one round."""
    wanted = Experiment(
        method or FedAvg(), own_data(folder, shape), net, cohort=2, rounds=1, evaluate=0
    )
    return train(wanted, folder / "run", engine="serial").folder


def every_other(net: Net) -> trees.Mask:
    return make_channel_mask(net, {g.name: torch.arange(g.size) % 2 == 0 for g in find_groups(net)})


def prune(run: RunFolder, net: Net, client: int = 0) -> trees.Tree:
    """Zero every other channel of a client's stored model."""
    path = run.path / "models" / f"client-{client:05d}.safetensors"
    tree = trees.apply_mask(read_tree(path), every_other(net))
    write_tree(path, tree)
    list_again(run.path)
    return tree


def predicted(path: Path, x: Tensor) -> Tensor:
    """What onnxruntime computes with a file, without fedgrove."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def of(made: Exported) -> dict[str, Row]:
    return {row.version: row for row in made.rows}


def close(out: Tensor, truth: Tensor) -> bool:
    """To 1e-5, relative to the largest logit if it is above 1: float32 itself is no closer."""
    return float((out - truth).abs().max()) <= 1e-5 * max(1.0, float(truth.abs().max()))


def thinned(net: Net) -> trees.Tree:
    """Its parameters, moved so that norms do something, with every other channel 0."""
    g = torch.Generator().manual_seed(0)
    moved: trees.Tree = {}
    for name, value in net.params().items():
        # Vectors are biases and the scales and shifts of norms, which start at 0 and 1.
        if value.dim() == 1:
            value = value + 0.3 * torch.rand(value.shape, generator=g)
        moved[name] = value
    return trees.apply_mask(moved, every_other(net))
