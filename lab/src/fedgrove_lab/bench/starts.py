"""Every variant in its own process, Flower and pfl-research included: what a start costs.

Variants are started one after another, ``starts`` times over, and each process trains three rounds.
From its log follow the steady state (rounds after the first) and the time from the start of the
process until the three rounds are done, importing torch and, for Flower, starting Ray included;
ending is not counted.

A process is ``python -m fedgrove_lab.bench.starts JOB``; JOB is a :class:`StartJob` as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fedgrove.engines.pool.engine import cores
from fedgrove.errors import EngineError, check

from . import simulators
from .engine import GET_IT, PFL, compare_with_first, name_of_simulator, time_round, variants
from .processes import Report, be_silent, run_watched
from .scenes import find_scene

ROUNDS = 3
"""Rounds of each process."""
TIMEOUT = 1800.0
"""Seconds after which a process is ended."""
OTHERS = {"Flower": simulators.train_flower, PFL: simulators.train_pfl}
"""Other simulators, by the first part of a variant's name."""
NEEDS = {"Flower": ("flwr", "ray"), PFL: ("pfl",)}
"""Packages that another simulator needs."""
COMMAND = [sys.executable, "-m", "fedgrove_lab.bench.starts"]
"""Runs a job, which follows as JSON."""


@dataclass(frozen=True)
class StartJob:
    """What a process has to do."""

    scene: str
    variant: str
    device: str
    rounds: int
    out: str
    """The file that takes a line per round."""
    cohort: int | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class RoundLog:
    """A file of JSON lines: one for each finished round, one for the device's memory at the end."""

    path: Path

    def write(self, **fields: Any) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def end_round(self) -> None:
        """Append the time at which a round was finished."""
        # The monotonic clock is the same in all processes of a machine, so that the process that
        # started this one can subtract the time at which it did.
        self.write(at=time.monotonic())

    def read(self) -> list[dict[str, Any]]:
        """Return all lines so far; a process that fails early leaves no file."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclass(frozen=True)
class ColdStart:
    """One process, from its start until its rounds were done."""

    ends: tuple[float, ...]
    """Seconds from the start until each round was done."""
    memory: int | None = None
    """Peak, in bytes."""
    device: int | None = None
    """The device's peak, in bytes."""

    @property
    def steady(self) -> list[float]:
        """Seconds of the rounds after the first."""
        return [after - before for before, after in pairwise(self.ends)]


def measure_starts(
    name: str,
    device: str = "cpu",
    starts: int = 3,
    cohort: int | None = None,
    data_dir: str | Path | None = None,
    report: Report = be_silent,
) -> list[dict[str, Any]]:
    """Return rows of all variants of a scene, each in its own processes.

    ``report`` gets a line for everything that was left out, and why.
    """
    check(starts >= 1, "starts", starts, "1 or more")
    cold_starts: dict[str, list[ColdStart]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scene, _ = find_scene(name, Path(folder), cohort, data_dir)
        commands: dict[str, list[str]] = dict.fromkeys(variants(scene, device), COMMAND)
        commands.update(find_others(device, report))
        data_folder = str(data_dir) if data_dir else None
        for i in range(starts):
            # A copy, since a simulator that fails is removed on the way.
            for j, variant in enumerate(list(commands)):
                out = f"{folder}/{i}.{j}"
                job = StartJob(name, variant, device, ROUNDS, out, cohort, data_folder)
                try:
                    cold_start = run_process(job, commands[variant])
                except EngineError as error:
                    # Ours must not fail; others may, and the measurement continues without them.
                    if name_of_simulator(variant) not in OTHERS:
                        raise
                    report(f"left out: {error}")
                    del commands[variant]
                    # Earlier starts that went well go too: a row is of all starts or of none.
                    cold_starts.pop(variant, None)
                else:
                    cold_starts.setdefault(variant, []).append(cold_start)
    return [{"scene": name, "how": "alone", **row} for row in summarise(cold_starts)]


def summarise(cold_starts: dict[str, list[ColdStart]]) -> list[dict[str, Any]]:
    """Return steady state and time from the start of each variant, compared with the first one's.

    ``start_s`` is what a start costs without its rounds: the first round's end less a steady round.
    """
    steady: dict[str, list[float]] = {}
    first_ends: dict[str, list[float]] = {}
    last_ends: dict[str, list[float]] = {}
    for variant, starts in cold_starts.items():
        steady[variant] = []
        first_ends[variant] = []
        last_ends[variant] = []
        for start in starts:
            steady[variant] += start.steady
            first_ends[variant].append(start.ends[0])
            last_ends[variant].append(start.ends[-1])
    plain_median = statistics.median(next(iter(last_ends.values())))
    rows = []
    for row in compare_with_first(steady):
        variant = row["variant"]
        starts = cold_starts[variant]
        from_start = last_ends[variant]
        rows.append(
            {
                **row,
                "start_s": statistics.median(first_ends[variant]) - row["median_s"],
                "rounds": len(starts[0].ends),
                "from_start_s": statistics.median(from_start),
                "from_start_min_s": min(from_start),
                "from_start_max_s": max(from_start),
                "times_plain_from_start": plain_median / statistics.median(from_start),
                "memory_mib": _largest_mib([start.memory for start in starts]),
                "device_mib": _largest_mib([start.device for start in starts]),
            }
        )
    return rows


def _largest_mib(sizes: Sequence[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return max(known) / 2**20


def find_others(device: str, report: Report) -> dict[str, list[str]]:
    """Return the other simulators that are installed, and the command that starts each.

    On CUDA pfl-research is one of the variants that take turns, and so of those started anyway.
    """
    wanted = dict(NEEDS)
    if device == "cuda":
        del wanted[PFL]
    installed = set()
    for name, packages in wanted.items():
        if all(find_spec(package) for package in packages):
            installed.add(name)
    for name in sorted(set(wanted) - installed):
        report(f"left out: {name} is not installed; {GET_IT}")
    n = cores()
    commands: dict[str, list[str]] = {}
    if PFL in installed:
        commands[f"{PFL}, 1 process"] = COMMAND
        if n > 1:
            python, *module = COMMAND
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
            commands[f"{PFL}, {n} processes"] = [python, *torchrun, *module]
    if "Flower" in installed:
        commands[f"Flower, {n} Ray actors"] = COMMAND
    return commands


def run_process(job: StartJob, command: Sequence[str]) -> ColdStart:
    """Start a process, wait until it has trained its rounds, and read its log.

    Raises:
        EngineError: The process failed, or trained too few rounds.
    """
    arguments = [*command, json.dumps(asdict(job))]
    process = run_watched(arguments, Path(job.out + ".log"), TIMEOUT)
    ends = []
    device_bytes = None
    for line in RoundLog(Path(job.out)).read():
        if "at" in line:
            ends.append(line["at"] - process.began)
        if "device_bytes" in line:
            device_bytes = line["device_bytes"]
    # A process may end without an error and still have done too little.
    if process.code or len(ends) != job.rounds:
        raise EngineError(
            f"{job.variant} ended with code {process.code} after {len(ends)} rounds: "
            f"{process.last_line}"
        )
    # Without /proc the peak is 0, which means that it is not known.
    return ColdStart(tuple(ends), process.peak or None, device_bytes)


def run_job(job: StartJob) -> None:
    """In the process: train all rounds of a job, and log when each was done."""
    log = RoundLog(Path(job.out))
    with tempfile.TemporaryDirectory() as folder:
        scene, run = find_scene(job.scene, Path(folder), job.cohort, job.data_dir)
        ours = variants(scene, job.device)
        if job.variant in ours:
            train_round = ours[job.variant](run)
            for _ in range(job.rounds):
                # Not for the seconds: it waits for the GPU, so that a round is logged when done.
                time_round(train_round, job.device)
                log.end_round()
        else:
            train = OTHERS[name_of_simulator(job.variant)]
            train(scene, run, job.device, job.rounds, log.end_round, Path(folder))
    if job.device == "cuda":
        log.write(device_bytes=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    run_job(StartJob(**json.loads(sys.argv[1])))
