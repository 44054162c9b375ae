"""Real processes, really killed: what was saved is whole, and a resumed run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import started

WORDS = ["run", "ditto", "--data", "digits", "--rounds", "10", "--finetune", "0,1", "--epochs", "2"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    return started(*WORDS, "--out", str(folder), *more)


def resume(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedgrove.cli", "resume", str(folder), "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def wait_for(folder: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    """Until so many rounds are in the checkpoint."""
    latest, end = folder / "checkpoint" / "latest.json", time.monotonic() + 100
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        if latest.is_file() and json.loads(latest.read_text())["round"] >= rounds:
            return
        time.sleep(0.02)
    pytest.fail("the run made no progress")


def workers_of(pid: int) -> list[int]:
    """The processes that a run has forked: they carry its own command line."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in found if b"fedgrove.cli" in Path(f"/proc/{c}/cmdline").read_bytes()]


def contents(folder: Path) -> dict[str, bytes]:
    """Final weights, and the summary apart from what measures time or names the engine."""
    models = {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}
    summary = json.loads((folder / "summary.json").read_text())
    rest = {k: v for k, v in summary.items() if k not in ("seconds", "engine")}
    return models | {"summary": json.dumps(rest).encode()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same run, never disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder, "--json")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = contents(folder)
    assert sum(name.startswith("client-") for name in found) == 20
    return found


@pytest.mark.parametrize(("engine", "other"), [("serial", "pool"), ("pool", "serial")])
def test_kill_9_then_resume_is_the_uninterrupted_run(
    engine: str, other: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--engine", engine)
    wait_for(folder, 3, process)
    workers = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    assert not (folder / "summary.json").exists()
    # Workers notice that the server is gone and end by themselves.
    end = time.monotonic() + 30
    while any(Path(f"/proc/{w}").exists() for w in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [w for w in workers if Path(f"/proc/{w}").exists()]
    done = resume(folder, "--engine", other)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == whole
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 11))


def test_a_killed_worker_is_replaced_and_changes_nothing(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--engine", "pool")
    wait_for(folder, 2, process)
    before = workers_of(process.pid)
    os.kill(before[0], signal.SIGKILL)
    wait_for(folder, 4, process)
    after = workers_of(process.pid)
    assert before[0] not in after
    assert len(after) == len(before)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    # Not even a lost task: the summary is part of what is compared.
    assert contents(folder) == whole


def test_ctrl_c_leaves_a_checkpoint_and_a_sentence(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--engine", "pool")
    wait_for(folder, 2, process)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedgrove resume {folder}" in err
    assert "Traceback" not in err
    assert not [w for w in workers if Path(f"/proc/{w}").exists()]
    assert resume(folder).returncode == 0
    assert contents(folder) == whole
