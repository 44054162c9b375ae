"""A project that ``fedgrove new`` makes runs as it is: its own test is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedgrove.cli import main
from fedgrove.cli.new import FILES

PROJECT = Path(__file__).parents[2] / "src" / "fedgrove" / "cli" / "project"


def test_all_files_are_there_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "deep" / "mine"
    assert main(["new", str(place)]) == 0
    assert "python -m pytest" in capsys.readouterr().out
    assert {path.name for path in place.iterdir()} == set(FILES)
    assert {path.name for path in PROJECT.iterdir()} == set(FILES.values())
    (place / "net.py").write_text("mine")
    assert main(["new", str(place)]) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err
    assert (place / "net.py").read_text() == "mine"
    assert main(["new", str(place / "net.py")]) == 2
    assert main(["new", str(place / "net.py" / "x")]) == 2
    assert "cannot be created" in capsys.readouterr().err


def test_the_project_keeps_our_style(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine")]) == 0
    chosen = ["--isolated", "--line-length", "100", "--select", "E,F,W,I,UP,B,C4,SIM,PT"]
    command = [sys.executable, "-m", "ruff", "check", *chosen, "."]
    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.slow
def test_its_own_test_passes_and_its_script_runs(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine")]) == 0
    for words in (["make_data.py"], ["run.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "mine", capture_output=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert b"5 passed" in done.stdout
