"""Three users' files, a net of one's own, and a prediction on a raw window: as a new user would."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import fedgrove as fg
from fedgrove.cli import main

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(shape[0], 16, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(),
            nn.Linear(64, classes),
        )

    def forward(self, x):
        return self.layers(x)
"""
CHANNELS = ("ax", "ay", "az")
COMMAND = [
    *("run", "fedavg", "--data", "users/", "--label", "activity", "--time", "t"),
    *("--window", "32", "--stride", "16", "--net", "net.py:Net", "--rounds", "12", "--lr", "0.01"),
    *("--evaluate", "0", "--engine", "serial"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "users").mkdir()
    rng = np.random.default_rng(0)
    for user in ("watch-01", "watch-07", "watch-12"):
        with open(f"users/{user}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["t", *CHANNELS, "activity"])
            for number, (activity, tempo) in enumerate([("run", 0.9), ("sit", 0.0), ("walk", 0.3)]):
                for i in range(300):
                    wave = np.sin(tempo * i + np.arange(3)) * (tempo > 0)
                    sample = 9 + 3 * wave + rng.normal(0, 0.3, 3)
                    rows.writerow([(300 * number + i) / 50, *sample.round(3), activity])
    return tmp_path


def test_from_files_to_a_prediction(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--out", "runs/mine"]) == 0
    result = fg.load_run("runs/mine", trust=True)
    assert [row["name"] for row in result.clients()] == ["watch-01", "watch-07", "watch-12"]
    model = result.model("watch-07")
    with open("users/watch-07.csv", newline="") as file:
        recorded = list(csv.DictReader(file))
    # No start is a multiple of the stride: the model has not seen these windows.
    for start in (101, 403, 707, 811):
        rows = recorded[start : start + 32]
        window = np.array([[float(row[name]) for name in CHANNELS] for row in rows])
        assert model.predict(window) == rows[0]["activity"]
    capsys.readouterr()


def test_everything_wrong_in_the_files_is_printed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Path("users/watch-01.csv").read_text().splitlines()
    lines[5] = "0.1,n/a,x,1,run"
    Path("users/watch-01.csv").write_text("\n".join(lines))
    Path("users/watch-12.csv").write_text("t,ax,ay,activity\n0,1,2,run\n")
    assert main([*COMMAND, "--out", "runs/mine"]) == 2
    printed = capsys.readouterr().err.splitlines()
    things = [line for line in printed if line.startswith("- ")]
    assert "fedgrove: 4 things are wrong:" in printed
    assert len(things) == 4
    assert "column 'ay' contains 'x' in 1 of 900 rows, first in line 6" in things[2]
    assert not Path("runs/mine").exists()


def test_the_command_without_a_label_says_which_columns_there_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedavg", "--data", "users/"]) == 2
    assert "has the columns t, ax, ay, az, activity; give the one" in capsys.readouterr().err
    assert main(["run", "fedavg", "--data", "user/", "--label", "activity"]) == 2
    assert "there is no file or folder 'user'" in capsys.readouterr().err
