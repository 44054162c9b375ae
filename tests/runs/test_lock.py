"""One process at a time trains in a folder; the lock ends with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedgrove.errors import EngineError, InputError
from fedgrove.runs.lock import LOCK_FILE, check_free, locked

HOLD = """
import sys, time
from pathlib import Path
from fedgrove.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


FORK = """
import os, sys, time
from pathlib import Path
from fedgrove.runs.lock import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    # Both say who they are in one write, which the other's cannot come between.
    os.write(1, b"held\\n" if child else b"%d\\n" % os.getpid())
    time.sleep(60)
    os._exit(0)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def test_a_second_process_gets_a_sentence_that_names_the_first(tmp_path: Path) -> None:
    process = holder(tmp_path)
    sentence = rf"^{tmp_path} is in use: process {process.pid} trains in it\. Wait until it has"
    try:
        with pytest.raises(InputError, match=sentence), locked(tmp_path):
            pass
        with pytest.raises(InputError, match=sentence):
            check_free(tmp_path)
    finally:
        ended(process)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    process = holder(tmp_path)
    ended(process)
    assert (tmp_path / LOCK_FILE).read_text().split()[0] == str(process.pid)
    check_free(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().split()[0] == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_twice_in_one_process_is_once_too_often(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
        # The refusal leaves the lock where it is.
        with pytest.raises(InputError):
            check_free(tmp_path)
    with locked(tmp_path):
        pass


def test_of_many_threads_one_gets_it(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []
    refused: list[str] = []
    barrier = threading.Barrier(8)

    def take(number: int) -> None:
        barrier.wait()
        for _ in range(50):
            try:
                with locked(tmp_path):
                    inside.append(number)
                    most.append(len(inside))
                    time.sleep(0.0001)
                    inside.remove(number)
            except InputError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert refused
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    # The parent ends without a word, as by kill -9; its forked child lives on.
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # The child says so itself: a parent that is killed earlier leaves one that has yet to begin.
    words = sorted([process.stdout.readline(), process.stdout.readline()])
    child = int(words[0])
    try:
        assert words[1] == "held\n"
        process.kill()
        process.wait(timeout=30)
        assert Path(f"/proc/{child}").exists()
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_run_of_a_sweep_is_refused_while_the_sweep_is_trained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        locked(tmp_path),
        pytest.raises(InputError, match=rf"^{tmp_path} is in use"),
        locked(tmp_path / "run", sweep=tmp_path),
    ):
        pass
    assert list(tmp_path.rglob(LOCK_FILE)) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("a file of somebody's")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(EngineError, match="lock could not be written"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "a file of somebody's"
