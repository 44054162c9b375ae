"""The size of an exported model, without writing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import list_again

import fedgrove as fg
from fedgrove.export.size import model_bytes
from fedgrove.nets import Net, build
from fedgrove.runs.memory import read_tree, write_tree


def test_channels_that_are_gone_do_not_count_and_single_zeros_do(tmp_path: Path) -> None:
    result = fg.run(
        "fedavg",
        data="digits",
        clients=3,
        cohort=2,
        rounds=1,
        engine="serial",
        out=tmp_path / "run",
        progress=False,
    )
    net = Net(build("mlp", (1, 8, 8), 10, 0), (1, 8, 8))
    params = result.summary["params"]
    assert model_bytes(result.folder, net) == 4 * params

    # The first hidden unit of one file goes: its 64 weights and bias, and what the next layer
    # reads of it, a weight per output. One more weight is 0 and stays.
    models = tmp_path / "run" / "models"
    index = json.loads((models / "index.json").read_text())
    assert len(set(index.values())) == 3
    path = models / index["0"]
    tree = read_tree(path)
    first, bias, following = list(net.layout.shapes)[:3]
    tree[first][0] = 0
    tree[bias][0] = 0
    tree[following][:, 0] = 0
    tree[first][1, 5] = 0
    write_tree(path, tree)
    list_again(tmp_path / "run")
    gone = 64 + 1 + tree[following].shape[0]
    # Of one client in three.
    assert model_bytes(result.folder, net) == pytest.approx(4 * (params - gone / 3))
    assert torch.count_nonzero(tree[first][1]) < 64


def test_a_run_that_cannot_be_exported_has_no_size(tmp_path: Path) -> None:
    words = {"clients": 3, "cohort": 3, "rounds": 1, "engine": "serial", "progress": False}
    result = fg.run("fedem", data="digits", out=tmp_path / "run", **words)
    net = Net(build("mlp", (1, 8, 8), 10, 0), (1, 8, 8))
    assert result.summary["prediction"] == "own"
    assert model_bytes(result.folder, net) is None
