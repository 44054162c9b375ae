"""``fedgrove resume`` without a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedgrove.cli import main
from fedgrove.cli.run import find_unfinished
from fedgrove.errors import InputError
from fedgrove.runs.lock import locked

SMALL = ["--clients", "4", "--cohort", "2", "--net", "mlp:hidden=8", "--engine", "serial"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_folder(path: str, written_at: float, finished: bool = False) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True)
    files = ["config.toml", *(["summary.json"] if finished else [])]
    for name in files:
        (folder / name).touch()
    for each in (*folder.iterdir(), folder):
        os.utime(each, (written_at, written_at))
    return folder


def test_the_find_unfinished_run_is_found() -> None:
    old = run_folder("runs/a", 100)
    new = run_folder("runs/b", 200)
    run_folder("runs/c", 300, finished=True)
    assert find_unfinished(Path("runs")) == new
    # One that is being trained is somebody else's.
    with locked(new):
        assert find_unfinished(Path("runs")) == old


def test_a_sweep_is_unfinished_as_long_as_one_of_its_runs_is() -> None:
    run_folder("runs/s/x", 100, finished=True)
    last = run_folder("runs/s/y", 100)
    Path("runs/s/sweep.json").touch()
    assert find_unfinished(Path("runs")) == Path("runs/s")
    (last / "summary.json").touch()
    with pytest.raises(InputError, match=r"^there is no unfinished run under runs; give a run "):
        find_unfinished(Path("runs"))


def test_bare_resume_says_which_run_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", *SMALL, "--rounds", "2", "--out", "runs/one"]) == 0
    # As if it had been interrupted behind its last round.
    Path("runs/one/summary.json").unlink()
    capsys.readouterr()
    assert main(["resume", "--engine", "serial"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("fedgrove: resuming runs/one\n")
    assert out.splitlines()[-2] == "runs/one"
    assert main(["resume"]) == 2
