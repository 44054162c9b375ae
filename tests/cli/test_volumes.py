"""Nets over volumes, whose layers give five-dimensional activations."""

import json
from pathlib import Path

import pytest

from fedgrove.cli import main

NET = """
from torch import nn

class Volumes(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 2)
        self.head = nn.Linear(2 * 1 * 7 * 7, classes)

    def forward(self, x):
        x = x.reshape(-1, 1, 2, 4, 8)
        x = nn.functional.pad(x, (0, 0, 0, 4))
        return self.head(self.conv(x).relu().flatten(1))
"""


def test_layers_of_a_net_over_volumes_are_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("volumes.py").write_text(NET)
    words = ["--clients", "3", "--rounds", "1", "--epochs", "1", "--engine", "serial", "--json"]
    assert main(["run", "adfedwcp", "--net", "volumes.py:Volumes", *words]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1
