"""A disk that is really full: one sentence, nothing torn, and the run can be resumed."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import started
from tests.faults.made import contents, resume, rounds_in, start, wait_for

import fedgrove
from fedgrove import api
from fedgrove.config.experiment import Experiment
from fedgrove.engines import Pool
from fedgrove.engines.pool.engine import default_start
from fedgrove.errors import EngineError, InputError
from fedgrove.methods import Ditto
from fedgrove.runs import files


def nothing_is_torn(folder: Path) -> None:
    assert not list(folder.rglob("*.part"))
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            json.loads(line)


# ---- a limit on the size of files, which any user can set ----------------------------------------


def limited(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command none of whose files may become larger than ``limit`` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "fedgrove", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(fedgrove.__file__).parents[1])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def test_a_file_that_may_not_grow(killed: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    saved = rounds_in(folder)
    # config.toml and a line of metrics fit in, a client's model does not.
    # Not on the pool: its shared memory is a file too.
    done = limited(4096, "resume", str(folder), "--engine", "serial")
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert f"could not be written: {os.strerror(errno.EFBIG)}; raise the limit" in sentence
    assert f"{saved} of 10 rounds are saved; resume with: fedgrove resume {folder}" in sentence
    assert "Traceback" not in done.stderr
    nothing_is_torn(folder)
    assert not (folder / "lock").exists()
    api.resume(folder, progress=False)
    assert contents(folder) == whole


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    done = limited(0, "run", "fedavg", "--data", "digits", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- a full file system, where one can be mounted ------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk can be mounted by root only")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Use all space but ``leave`` bytes."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        block = bytes(4096)
        try:
            while True:
                file.write(block)
        except OSError as error:
            full = error
        assert full.errno == errno.ENOSPC
        file.truncate(max(file.tell() - leave, 0))
    return ballast


@pytest.mark.parametrize("engine", [pytest.param("serial", marks=pytest.mark.slow), "pool"])
def test_a_disk_that_fills_up(engine: str, whole: dict[str, bytes], disk: Path) -> None:
    folder = disk / "run"
    process = start(folder, "--engine", engine)
    wait_for(folder, 2, process)
    ballast = fill(disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    sentence = err.splitlines()[-1]
    assert f"{os.strerror(errno.ENOSPC)}; free some space on its disk." in sentence
    assert f"rounds are saved; resume with: fedgrove resume {folder}" in sentence
    assert "Traceback" not in err
    nothing_is_torn(folder)
    # While there is no space a resume says the same.
    again = resume(folder, "--engine", engine)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)
    assert "free some space" in again.stderr
    ballast.unlink()
    api.resume(folder, progress=False)
    assert contents(folder) == whole


@pytest.mark.skipif(default_start() != "fork", reason="only a forked worker has this disk")
def test_a_worker_that_is_ended_while_it_writes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client's file cannot be written while the other worker is in the middle of one."""
    folder = tmp_path / "run"
    rename = os.replace
    server = os.getpid()

    def crawl(partial: Path, path: Path) -> None:
        if os.getpid() == server:
            rename(partial, path)
            return
        if not path.name.startswith("client-00000"):
            time.sleep(60)
        while len(list(folder.rglob("*.part"))) < 2:
            time.sleep(0.01)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", crawl)
    experiment = Experiment(Ditto(), "digits", "mlp:hidden=8", clients=2, cohort=2, rounds=1)
    with pytest.raises(EngineError, match="free some space on its disk"):
        api.train(experiment, folder, engine=Pool(workers=2), progress=False)
    nothing_is_torn(folder)


@pytest.mark.slow
def test_wherever_the_space_ends(disk: Path, tmp_path: Path) -> None:
    """In a config, a manifest, a model, the summary, the report: with 4 KiB more each time."""
    experiment = Experiment(
        Ditto(), "digits", "mlp:hidden=8", clients=3, cohort=2, rounds=3, finetune=(0, 1)
    )
    true = contents(api.train(experiment, tmp_path / "true", engine="serial").folder.path)
    stopped: Counter[str] = Counter()
    pages = 0
    while not stopped["finished"]:
        folder = disk / f"run-{pages}"
        ballast = fill(disk, 4096 * pages)
        failure = None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                api.train(experiment, folder, engine="serial")
            except (EngineError, InputError) as error:
                failure = str(error)
        assert failure is None or re.search("could not be written|cannot be made", failure)
        nothing_is_torn(folder)
        assert failure is None or not (folder / "summary.json").exists()
        ballast.unlink()
        if failure is None and warned:
            # Whatever is wrong with the page, the run is not.
            assert "report.html was not written" in str(warned[0].message)
            stopped["finished without its page"] += 1
        elif failure is None:
            stopped["finished"] += 1
        elif folder.exists():
            stopped[f"after {rounds_in(folder)} rounds, resumed"] += 1
            api.resume(folder, engine="serial", progress=False)
        else:
            stopped["before it began"] += 1
            api.train(experiment, folder, engine="serial")
        assert contents(folder) == true
        shutil.rmtree(folder)
        pages += 1
    print(f"\n{pages} runs on a disk with 0 to {4 * pages - 4} KiB: {dict(stopped)}")
    assert {f"after {n} rounds, resumed" for n in range(4)} <= set(stopped)
    assert stopped["finished without its page"]


def test_a_sweep_on_a_full_disk_says_how_to_go_on(disk: Path) -> None:
    words = ["sweep", "ditto", "--seeds", "2", "--data", "digits", "--rounds", "10000"]
    words += ["--clients", "4", "--cohort", "2", "--evaluate", "0", "--engine", "serial"]
    out = disk / "all"
    process = started(*words, "--out", str(out))
    wait_for(out / "ditto-s1", 2, process)
    fill(disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert f"fedgrove resume {out}" in err
    nothing_is_torn(out)
