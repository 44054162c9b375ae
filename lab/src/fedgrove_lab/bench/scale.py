"""What a thousand to a million registered clients cost: memory and seconds of a round.

Every number of clients is run in its own processes, in turns: ``python -m
fedgrove_lab.bench.scale JOB``, where JOB is a :class:`ScaleJob` as JSON. The memory is the peak of
the process, or of it and its workers together. Seconds are counted twice: those of a clock, and
those for which the process and its workers had a core, which depend less on what else the machine
does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedgrove import engines as places
from fedgrove.errors import EngineError, check, unknown
from fedgrove.methods import make

from .processes import Report, be_silent, cpu_seconds, own_peak_memory, run_watched

SIZES = (1_000, 10_000, 100_000, 1_000_000)
"""Numbers of clients; the others are compared with the first."""
METHODS = ("fedavg", "ca-afp")
ENGINES = ("serial",)
"""The default: all engines would take three times as long."""
MOST_MEMORY = 1.5
"""The most memory of a number of clients, times that of the fewest."""
MOST_TIME = 1.2
"""The most seconds of a round, times those of the fewest clients."""


@dataclass(frozen=True)
class ScaleJob:
    """What a process has to do."""

    method: str
    engine: str
    clients: int
    cohort: int
    rounds: int
    score_on: int
    out: str
    """The run folder to make; a file next to it gets what the process measures of itself."""


def measure(
    methods: Sequence[str] = METHODS,
    engines: Sequence[str] = ENGINES,
    sizes: Sequence[int] = SIZES,
    cohort: int = 100,
    rounds: int = 8,
    repeats: int = 2,
    score_on: int = 100,
    report: Report = be_silent,
) -> list[dict[str, Any]]:
    """Return a row for each method, engine and number of clients."""
    check(repeats >= 1, "repeats", repeats, "1 or more")
    check(rounds >= 3, "rounds", rounds, "3 or more")
    # All is checked before the first process is started.
    for engine in engines:
        if engine not in places.names():
            raise unknown("engine", engine, places.names())
    for method in methods:
        make(method)
    sizes_are_valid = bool(sizes) and min(sizes) >= cohort and len(set(sizes)) == len(sizes)
    check(
        sizes_are_valid,
        "sizes",
        ",".join(str(size) for size in sizes),
        f"different numbers of clients of at least the cohort, {cohort}",
    )
    rows = []
    for method in methods:
        for engine in engines:
            measured: dict[int, list[dict[str, Any]]] = {size: [] for size in sorted(sizes)}
            # In turns: the machine may be busier at one time than at another.
            for _ in range(repeats):
                # The fewest first: the others are compared with them.
                for size in measured:
                    with tempfile.TemporaryDirectory() as folder:
                        out = f"{folder}/run"
                        job = ScaleJob(method, engine, size, cohort, rounds, score_on, out)
                        measured[size].append(run_process(job))
            rows += summarise(method, engine, measured)
            report(f"{method} on {engine}: done")
    return rows


def summarise(
    method: str, engine: str, measured: dict[int, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return a row for each number of clients, compared with the fewest.

    Of every round the fastest start counts, since whatever else the machine does only adds time;
    the value is the median over rounds.
    """
    rows: list[dict[str, Any]] = []
    for size, starts in measured.items():
        seconds = statistics.median(_fastest([start["seconds"] for start in starts]))
        cpu = statistics.median(_fastest([start["cpu"] for start in starts]))
        # What joining costs, where a method has new clients join a group before a round.
        joining = _fastest([start["joining"] for start in starts])
        memory = statistics.median(start["memory"] for start in starts) / 2**20
        first = rows[0] if rows else {"seconds": seconds, "cpu": cpu, "memory_mib": memory}
        rows.append(
            {
                "method": method,
                "engine": engine,
                "clients": size,
                "memory_mib": memory,
                "times_memory": memory / first["memory_mib"],
                "seconds": seconds,
                "times_seconds": seconds / first["seconds"],
                "cpu": cpu,
                "times_cpu": cpu / first["cpu"],
                "joining_cpu": statistics.median(joining) if joining else None,
            }
        )
    return rows


def checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return whether memory and time stay as flat as claimed, and where they do so the least.

    With one number of clients there is nothing to compare, and no claim.
    """
    if all(row["times_memory"] == row["times_cpu"] == 1 for row in rows):
        return {}
    claims = {
        "memory, times that of the fewest clients": ("times_memory", MOST_MEMORY),
        "seconds of a round on cores, times": ("times_cpu", MOST_TIME),
        "seconds of a round by the clock, times": ("times_seconds", MOST_TIME),
    }
    results = {}
    for claim, (key, bound) in claims.items():
        worst = max(rows, key=lambda row: float(row[key]))
        results[claim] = {
            "value": round(worst[key], 3),
            "bound": bound,
            "at": f"{worst['method']} on {worst['engine']}, {worst['clients']:,} clients",
            # Judged before rounding.
            "ok": worst[key] <= bound,
        }
    return results


def _fastest(starts: Sequence[Sequence[float]]) -> list[float]:
    """Of each round the least seconds."""
    return [min(turns) for turns in zip(*starts, strict=True)]


def run_process(job: ScaleJob) -> dict[str, Any]:
    """Start a process, wait until it has trained, and read what it left behind.

    Raises:
        EngineError: The process failed.
    """
    command = [sys.executable, "-m", "fedgrove_lab.bench.scale", json.dumps(asdict(job))]
    # On a busy machine several threads of torch wait for each other, and the waiting counts.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = run_watched(command, Path(job.out + ".log"), environment=environment)
    if process.code:
        raise EngineError(
            f"{job.method} on {job.engine} with {job.clients} clients ended with code "
            f"{process.code}: {process.last_line}"
        )
    lines = [json.loads(line) for line in Path(job.out, "metrics.jsonl").read_text().splitlines()]
    own = json.loads(Path(job.out + ".json").read_text())
    # The process knows its own peak; that of its workers was read from outside.
    return {**split_seconds(lines, own["cpu"]), "memory": max(process.peak, own["memory"])}


def split_seconds(
    lines: Sequence[dict[str, Any]], cpu_so_far: Sequence[float]
) -> dict[str, list[float]]:
    """Return the seconds of rounds after the first, and of exchanges in which clients join a group.

    ``cpu_so_far`` are the seconds on a core at the end of each exchange. The exchange that forms
    the groups is left out: there is one, and the method decides how large it is.

    >>> line = {"counts": True, "seconds": 1.0}
    >>> grouping = {"counts": False, "seconds": 9.0}
    >>> split_seconds([line, line, grouping, line], [5.0, 6.0, 15.0, 17.0])
    {'seconds': [1.0, 1.0], 'cpu': [1.0, 2.0], 'joining': []}
    """
    seconds = []
    cpu = []
    others = []
    # In the first round workers are started and kernels are tried.
    for line, (before, after) in zip(lines[1:], pairwise(cpu_so_far), strict=True):
        if line["counts"]:
            seconds.append(line["seconds"])
            cpu.append(after - before)
        else:
            others.append(after - before)
    return {"seconds": seconds, "cpu": cpu, "joining": others[1:]}


def run_job(job: ScaleJob) -> None:
    """In the process: train, and write down its peak memory and the seconds on a core."""
    from fedgrove import api

    cpu: list[float] = []

    def note_cpu(line: Mapping[str, Any]) -> None:
        cpu.append(cpu_seconds(os.getpid()))

    api.run(
        job.method,
        data="crowd",
        clients=job.clients,
        cohort=job.cohort,
        rounds=job.rounds,
        score_on=job.score_on,
        # Rounds alone are timed.
        evaluate=0,
        engine=job.engine,
        device="cpu",
        out=job.out,
        progress=False,
        watch=note_cpu,
    )
    Path(job.out + ".json").write_text(json.dumps({"memory": own_peak_memory(), "cpu": cpu}))


if __name__ == "__main__":
    run_job(ScaleJob(**json.loads(sys.argv[1])))
