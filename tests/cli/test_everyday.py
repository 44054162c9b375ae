"""Bare resume, and words that were nearly right."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from fedgrove.cli import about, main
from fedgrove.cli.everyday import newest_unfinished
from fedgrove.errors import InputError, unknown
from fedgrove.runs.lock import locked

ROOT = Path(__file__).parents[2]
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


def test_the_newest_unfinished_run_is_found() -> None:
    old = run_folder("runs/a", 100)
    new = run_folder("runs/b", 200)
    run_folder("runs/c", 300, finished=True)
    assert newest_unfinished(Path("runs")) == new
    # One that is being trained is somebody else's.
    with locked(new):
        assert newest_unfinished(Path("runs")) == old


def test_a_sweep_is_unfinished_as_long_as_one_of_its_runs_is() -> None:
    run_folder("runs/s/x", 100, finished=True)
    last = run_folder("runs/s/y", 100)
    Path("runs/s/sweep.json").touch()
    assert newest_unfinished(Path("runs")) == Path("runs/s")
    (last / "summary.json").touch()
    with pytest.raises(InputError, match=r"^there is no unfinished run under runs; name the "):
        newest_unfinished(Path("runs"))


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


def test_doctor_names_only_extras_that_there_are_and_are_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    source = "".join(
        path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "about.py"
    )
    for name, (_, modules) in about.EXTRAS.items():
        brought = " ".join(extras[name])
        for module in modules:
            assert module in brought
            assert (
                f"import {module}" in source
                or f"from {module}" in source
                or f"from torch.utils.{module}" in source
                or f'import_module("{module}.' in source
                or module == "onnxscript"
            )


@pytest.mark.parametrize(
    ("kind", "given", "allowed", "meant"),
    [
        ("setting of ditto", "lambda", ["codec", "pull.mu"], "pull.mu"),
        ("setting of x", "learning_rate", ["local.optimiser.lr", "mean"], "local.optimiser.lr"),
        ("setting of x", "momentm", ["local.optimiser.momentum"], "local.optimiser.momentum"),
        ("setting of x", "sparsity", ["density", "phases"], "density"),
        ("option", "--batch-size", ["--batch", "--data"], "--batch"),
        ("option", "--learning-rate", ["--lr", "--rounds"], "--lr"),
        ("command", "train", ["run", "resume"], "run"),
        ("command", "ls", ["list", "run"], "list"),
    ],
)
def test_words_of_others_lead_to_ours(
    kind: str, given: str, allowed: list[str], meant: str
) -> None:
    assert f"; did you mean '{meant}'?" in str(unknown(kind, given, allowed))


def test_nothing_is_suggested_that_is_not_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict"]) == 2
    assert "did you mean" not in capsys.readouterr().err
