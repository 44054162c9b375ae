"""Three users' files, a net of one's own, and a prediction on a raw window: as a new user would."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedgrove as fg
from fedgrove.cli import main
from fedgrove.errors import InputError
from fedgrove.export.source import opened

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


# ---- whole recordings ----------------------------------------------------------------------------


def predicted(capsys: pytest.CaptureFixture[str], *options: str) -> pd.DataFrame:
    assert main(["predict", "runs/mine", *options]) == 0
    return pd.read_csv(io.StringIO(capsys.readouterr().out))


def test_a_whole_recording_is_predicted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run resamples 50 Hz to 25; each window is that of the model in Python."""
    assert main([*COMMAND, "--rate", "25", "--fill", "mean", "--out", "runs/mine"]) == 0
    capsys.readouterr()
    own = ("--client", "watch-07", "--trust")
    found = predicted(capsys, "users/watch-07.csv", *own)
    assert list(found) == ["line", "t", "predicted", "probability"]
    # 900 rows become 450, from 0 to 17.98 s; a window of 32 starts every 16: .64 s or 32 lines.
    assert found["line"].tolist() == list(range(2, 2 + 32 * 27, 32))
    assert found["t"].tolist() == pytest.approx([0.64 * k for k in range(27)])
    assert found["probability"].between(1 / 3, 1).all()
    result = fg.load_run("runs/mine", trust=True)
    assert result.model("watch-07").preparation.rate == 25
    exported = fg.export_model(result, client="watch-07", out="device")
    assert "- rate: 25 samples per second" in (exported.folder / exported.card).read_text()
    frame = result.predict("users/watch-07.csv", "watch-07")
    assert frame["predicted"].tolist() == found["predicted"].tolist()
    other = result.predict("users/watch-07.csv", "watch-01")
    assert (frame["probability"] - other["probability"]).abs().max() > 1e-6

    # The same recording without its label, as it is written in Europe, packed, at 25 Hz.
    recorded = pd.read_csv("users/watch-07.csv")
    recorded.loc[3, "ax"] = np.nan
    text = recorded.drop(columns="activity").to_csv(sep=";", decimal=",", index=False)
    Path("new.csv.gz").write_bytes(gzip.compress(text.encode()))
    again = predicted(capsys, "new.csv.gz", *own)
    assert again["predicted"].tolist()[1:] == found["predicted"].tolist()[1:]
    assert again["probability"].to_numpy()[2:] == pytest.approx(found["probability"][2:], abs=1e-4)
    # Without the row of line 5, the first window begins behind it.
    assert predicted(capsys, "new.csv.gz", *own, "--fill", "drop")["line"].iloc[0] == 6

    # Times since 1970 keep their digits.
    since = pd.read_csv("users/watch-07.csv")
    since["t"] += 1_700_000_000
    since.to_csv("since.csv", index=False)
    assert predicted(capsys, "since.csv", *own)["t"].iloc[1] == pytest.approx(
        1_700_000_000.64, abs=1e-4
    )
    with pytest.raises(InputError, match="predict was given"):
        result.predict(since, "watch-07")
    # What read the data of the run is in its config.toml; data that are divided already need none.
    divided = fg.data.load(
        "users/", label="activity", window=32, stride=16, time="t", rate=25.0, fill="mean"
    )
    assert opened(result.folder, divided, trust=True).federation is divided

    assert main(["predict", "runs/mine", "users/watch-07.csv", *own, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 27
    assert main(["predict", "runs/mine", "users/watch-07.csv", *own, "--out", "p.csv"]) == 0
    assert capsys.readouterr().out == "p.csv: 27 windows\n"
    assert len(pd.read_csv("p.csv")) == 27


def test_only_rows_of_the_client_are_predicted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [pd.read_csv(path).assign(user=path.stem) for path in sorted(Path("users").iterdir())]
    pd.concat(frames).to_csv("all.csv", index=False)
    of_all = [*COMMAND, "--client", "user", "--out", "runs/mine"]
    of_all[of_all.index("users/")] = "all.csv"
    assert main(of_all) == 0
    capsys.readouterr()
    found = predicted(capsys, "all.csv", "--client", "watch-07", "--trust")
    # The second 900 rows, which begin in line 902.
    assert found["line"].iloc[0] == 902
    assert found["line"].iloc[-1] + 31 <= 1801
    assert main(["predict", "runs/mine", "users/watch-01.csv", "--client", "0", "--trust"]) == 0
    frames[0].assign(user="eva").to_csv("eva.csv", index=False)
    for file, client, wanted in [
        ("eva.csv", "watch-07", "has no row whose 'user' is 'watch-07'"),
        ("none.csv", "watch-07", "there is no file 'none.csv'"),
        ("all.csv", "eva", "there is no client 'eva'"),
        ("net.py", "watch-07", "the ending of net.py is '.py'"),
    ]:
        assert main(["predict", "runs/mine", file, "--client", client, "--trust"]) == 2
        assert wanted in capsys.readouterr().err
