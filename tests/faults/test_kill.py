"""Real processes, really killed: what was saved is whole, and a resumed run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import started
from tests.faults.made import WORDS, contents, resume, rounds_in, start, wait_for

from fedgrove import api


def workers_of(pid: int) -> list[int]:
    """The processes that a run has forked: they carry its own command line."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in found if b"fedgrove" in Path(f"/proc/{c}/cmdline").read_bytes()]


def assert_they_end(workers: list[int]) -> None:
    """Wait until processes have ended and their parent has noticed it."""
    end = time.monotonic() + 30
    while any(Path(f"/proc/{w}").exists() for w in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [w for w in workers if Path(f"/proc/{w}").exists()]


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
    assert_they_end(workers)
    done = resume(folder, "--engine", other)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == whole
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 11))


def test_killed_workers_change_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    """One after another, whatever they are doing; never two on one job."""
    folder = tmp_path / "run"
    process = start(folder, "--engine", "pool")
    for rounds in (2, 4, 6):
        wait_for(folder, rounds, process)
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert contents(folder) == whole


@pytest.mark.parametrize(
    ("engine", "number", "code"),
    [
        ("pool", signal.SIGTERM, 143),
        # Ctrl-C is also in tests/cli: of a run, of a sweep and of the first call.
        pytest.param("pool", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("pool", signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param("serial", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_a_sentence(
    engine: str, number: signal.Signals, code: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--engine", engine)
    wait_for(folder, 2, process)
    workers = workers_of(process.pid)
    assert bool(workers) == (engine == "pool")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    # A sentence, and nothing else but the lines of progress.
    assert re.search(r"\d+ of 10 rounds are saved; resume with: ", err)
    assert f"fedgrove resume {folder}" in err
    assert "Traceback" not in err
    assert "leaked" not in err
    assert_they_end(workers)
    api.resume(folder, progress=False)
    assert contents(folder) == whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_any_moment(whole: dict[str, bytes], tmp_path: Path) -> None:
    """Ten runs, each killed while it runs and again while it is resumed."""
    moment = random.Random(14)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    rows = []
    for number in range(10):
        folder = tmp_path / f"run-{number}"
        engine, other = ("serial", "pool") if number % 2 else ("pool", "serial")
        rounds = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(temporary))
            resumption = ("resume", str(folder), "--engine", other)
            for words in ((*WORDS, "--out", str(folder), "--engine", engine), resumption):
                process = started(*words)
                # By rounds, for on a busy machine seconds say little; then at any time in a round.
                wanted = rounds_in(folder) + moment.randrange(5)
                while process.poll() is None and not (folder / "config.toml").is_file():
                    time.sleep(0.001)
                while process.poll() is None and rounds_in(folder) < wanted:
                    time.sleep(0.001)
                time.sleep(moment.uniform(0, 0.3))
                process.kill()
                process.communicate(timeout=60)
                rounds.append(rounds_in(folder))
            ended = "had finished"
            if not (folder / "summary.json").is_file():
                done = resume(folder, "--engine", engine)
                assert done.returncode == 0, done.stderr
                ended = "resumed"
                assert not (folder / "lock").exists()
        assert contents(folder) == whole
        assert not list(folder.rglob("*.part"))
        rows.append(f"{number:2} {engine:6} rounds at the kills {rounds}: {ended}, equal")
    print("\n" + "\n".join(rows))
    assert list(temporary.iterdir()) == []
    # They came at different moments.
    assert len({row.partition("kills")[2] for row in rows}) >= 5
