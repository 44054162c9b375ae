"""Every number of metrics.jsonl reaches TensorBoard and MLflow, and is read back with their own tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedgrove.cli import main
from fedgrove.errors import InputError
from fedgrove.report import track

LINES = [
    {"round": 1, "bytes_up": 10, "bytes_down": 5, "accuracy_mean": 0.5, "parts": {"mask": 3}},
    {"round": 2, "bytes_up": 20, "bytes_down": 5, "accuracy_mean": 0.75, "parts": {"mask": 4}},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, as a folder that `watch` can read."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[run]\nmethod = "fedavg"\nrounds = 2\n')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "summary.json").write_text('{"accuracy_mean": 0.75}')
    return folder


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(track, "TRACKER_MODULES", {"tensorboard": "no_such_module"})
    with pytest.raises(InputError, match=r"pip install 'fedgrove\[track\]'$"):
        track.make_tracker("tensorboard", tmp_path)


def test_tensorboard_reads_what_was_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["watch", "runs/one", "--track", "tensorboard"]) == 0
    assert "tensorboard --logdir tensorboard" in capsys.readouterr().err
    events = EventAccumulator("tensorboard/runs-one")
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "bytes_up",
        "bytes_down",
        "accuracy_mean",
        "parts/mask",
    }
    assert [(e.step, e.value) for e in events.Scalars("accuracy_mean")] == [(1, 0.5), (2, 0.75)]
    # Read a second time, nothing counts twice.
    assert main(["watch", "runs/one", "--track", "tensorboard"]) == 0
    again = EventAccumulator("tensorboard/runs-one")
    again.Reload()
    assert [e.step for e in again.Scalars("accuracy_mean")] == [1, 2]


@pytest.mark.filterwarnings("ignore")  # MLflow's own, of the libraries it uses
def test_mlflow_reads_what_was_written(run: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    assert main(["watch", "runs/one", "--track", "mlflow"]) == 0
    client = mlflow.MlflowClient(tracking_uri=track.store_address(Path("mlflow.db")))
    (found,) = client.search_runs(["0"])
    assert found.info.run_name == "runs-one"
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "accuracy_mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.75)]
