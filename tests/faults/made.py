"""A run that takes a few seconds, as real processes: started, waited for, resumed, compared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import started

WORDS = ["run", "ditto", "--data", "digits", "--rounds", "10", "--finetune", "0,1", "--epochs", "2"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    return started(*WORDS, "--out", str(folder), *more)


def killed_after(rounds: int, folder: Path) -> None:
    """A run that was killed when so many rounds were saved."""
    process = start(folder, "--engine", "serial")
    wait_for(folder, rounds, process)
    process.kill()
    process.communicate(timeout=60)


def resume(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedgrove", "resume", str(folder), "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def rounds_in(folder: Path) -> int:
    """How many rounds the last checkpoint says it holds."""
    latest = folder / "checkpoint" / "latest.json"
    if not latest.is_file():
        return 0
    return int(json.loads(latest.read_text())["round"])


def wait_for(folder: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    """Until so many rounds are in the checkpoint."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        if rounds_in(folder) >= rounds:
            return
        time.sleep(0.02)
    pytest.fail("the run made no progress")


def contents(folder: Path) -> dict[str, bytes]:
    """Final weights, and the summary apart from what measures time or names the engine."""
    models = {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}
    summary = json.loads((folder / "summary.json").read_text())
    rest = {k: v for k, v in summary.items() if k not in ("seconds", "engine")}
    return models | {"summary": json.dumps(rest).encode()}
