"""A pool whose server is killed, or whose shared memory is full: nothing stays behind, and a run can be resumed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import until

import fedgrove
from fedgrove.engines import Pool

SHM = Path("/dev/shm")

pytestmark = pytest.mark.skipif(
    not (SHM.is_dir() and Path("/proc").is_dir()), reason="shared memory cannot be listed here"
)

SLEEPER = """
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fedgrove
from fedgrove import methods
from fedgrove.core import Edit
from fedgrove.engines import Pool
from fedgrove.engines.pool import shared


@dataclass(frozen=True)
class Sleepy(methods.FedAvg):
    def work(self, verb):
        return (Edit(sleep), *super().work(verb))


def sleep(carry, client):
    Path(sys.argv[3], str(client.id)).touch()
    time.sleep(300)


if __name__ == "__main__":
    shared.BLOCK_PREFIX = sys.argv[2]
    pool = Pool(workers=2, start=sys.argv[1])
    fedgrove.run(Sleepy(), data="digits", rounds=1, cohort=2, engine=pool, progress=False)
"""

FILLED = """
import sys

import fedgrove
from fedgrove.engines import Pool
from fedgrove.errors import EngineError

start, out, room = sys.argv[1:]


def fill(line):
    # All but so many bytes of the /dev/shm that only this process sees.
    if line["round"] == 2:
        with open("/dev/shm/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
            file.truncate(file.tell() - int(room))


if __name__ == "__main__":
    try:
        fedgrove.run("ditto", data="digits", rounds=4, cohort=4, seed=3, epochs=1, out=out, watch=fill,
                     evaluate=0, engine=Pool(workers=2, start=start), progress=False)
    except EngineError as error:
        print(error)
        sys.exit(1)
"""


def begun(words: list[str], session: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(fedgrove.__file__).parents[1])}
    return subprocess.Popen(
        words,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
    )


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_end_with_their_server_in_the_middle_of_a_job(
    start: str, number: signal.Signals, tmp_path: Path
) -> None:
    """No handler is installed here: the server is gone at once, either way."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    notes = tmp_path / "notes"
    notes.mkdir()
    prefix = "fg" + secrets.token_hex(3)
    process = begun([sys.executable, str(script), start, prefix, str(notes)])
    assert until(lambda: len(list(notes.iterdir())) == 2, 60), process.communicate()
    # Two workers, and the process that watches over shared memory.
    family = descendants(process.pid)
    assert len(family) == 3
    assert list(SHM.glob(prefix + "*"))
    process.send_signal(number)
    # All of them hold its output open: this is over when the last one has ended.
    process.communicate(timeout=10)
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), 10)
    assert not list(SHM.glob(prefix + "*"))


def test_what_a_killed_group_left_in_shared_memory_is_freed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that watches over shared memory is killed too, as by a batch system."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    notes = tmp_path / "notes"
    notes.mkdir()
    prefix = "fg" + secrets.token_hex(3)
    process = begun([sys.executable, str(script), "fork", prefix, str(notes)], session=True)
    assert until(lambda: len(list(notes.iterdir())) == 2, 60), process.communicate()
    monkeypatch.setattr("fedgrove.engines.pool.shared.BLOCK_PREFIX", prefix)
    other = SHM / f"{prefix}of-somebody-else"
    other.touch()
    in_use = set(SHM.glob(prefix + "*"))
    try:
        # Blocks of a server that lives stay.
        assert list(Pool(workers=1).map([])) == []
        assert set(SHM.glob(prefix + "*")) == in_use
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        assert set(SHM.glob(prefix + "*")) == in_use
        assert list(Pool(workers=1).map([])) == []
        assert list(SHM.glob(prefix + "*")) == [other]
    finally:
        other.unlink()


def in_a_small_shm(size: int) -> list[str]:
    """The start of a command whose /dev/shm is its own, of so many bytes."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare on this system")
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    prefix = [unshare, "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("no file system may be mounted here")
    return prefix


@pytest.mark.parametrize(
    ("start", "room"),
    [
        ("fork", 0),  # not even the broadcast fits
        ("fork", 40 * 1024),  # the broadcast of 36 KiB fits, and a report as large does not
        pytest.param("spawn", 0, marks=pytest.mark.slow),
    ],
)
def test_a_full_shm_ends_the_run_with_a_sentence_and_it_can_be_resumed(
    start: str, room: int, tmp_path: Path
) -> None:
    script = tmp_path / "filled.py"
    script.write_text(FILLED)
    out = tmp_path / "run"
    words = [sys.executable, str(script), start, str(out), str(room)]
    process = begun([*in_a_small_shm(64 * 2**20), *words])
    printed, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert "shared memory has no room for" in printed
    assert "No space left on device" in printed
    assert f"2 of 4 rounds are saved; resume with: fedgrove.resume({str(out)!r})" in printed
    assert err == ""

    result = fedgrove.resume(out, engine="serial", progress=False)
    whole = fedgrove.run(
        "ditto",
        data="digits",
        rounds=4,
        cohort=4,
        seed=3,
        epochs=1,
        out=tmp_path / "whole",
        evaluate=0,
        engine="serial",
        progress=False,
    )
    different = {"seconds", "engine"}
    for summary in (result.summary, whole.summary):
        for word in different:
            summary.pop(word)
    assert json.dumps(result.summary) == json.dumps(whole.summary)
    for model in sorted((tmp_path / "whole" / "models").iterdir()):
        assert (out / "models" / model.name).read_bytes() == model.read_bytes()
