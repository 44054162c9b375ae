"""Two processes and one run folder: one trains, the other gets a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.conftest import started
from tests.faults.made import contents, start, wait_for

from fedgrove.cli import main


def wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    assert path.exists()


def test_of_two_resumes_at_once_one_is_refused(
    killed: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    # A lock file of a killed process locks nothing.
    assert (folder / "lock").exists()
    both = [started("resume", str(folder), "--json", "--engine", "serial") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2]
    winner, loser = codes.index(0), codes.index(2)
    (sentence,) = said[loser][1].splitlines()
    assert f"{folder} is in use: process {both[winner].pid} trains in it" in sentence
    assert json.loads(said[winner][0]) == json.loads((folder / "summary.json").read_text())
    assert contents(folder) == whole
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 11))
    assert not (folder / "lock").exists()


def test_a_run_that_trains_is_not_resumed_but_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--engine", "serial", "--rounds", "500")
    try:
        wait_for(folder, 1, process)
        assert main(["resume", str(folder)]) == 2
        assert f"process {process.pid} trains in it" in capsys.readouterr().err
        assert main(["compare", str(folder), "--json", "--bytes"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["finished"], row["rounds_done"] >= 1) == (False, True)
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_sweep_and_its_runs_keep_each_other_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all"
    words = ["sweep", "ditto", "--seeds", "2", "--data", "digits", "--rounds", "10000"]
    words += ["--clients", "4", "--cohort", "2", "--evaluate", "0", "--engine", "serial"]
    process = started(*words, "--out", str(out))
    try:
        wait_for_file(out / "ditto-s1/checkpoint/latest.json", process)
        for folder in (out, out / "ditto-s0"):
            assert main(["resume", str(folder)]) == 2
            assert f"{out} is in use: process {process.pid} trains" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate(timeout=60)
    process = started("resume", str(out / "ditto-s0"), "--engine", "serial")
    try:
        wait_for_file(out / "ditto-s0/lock", process)
        assert main(["resume", str(out)]) == 2
        assert f"{out / 'ditto-s0'} is in use: process" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate(timeout=60)
