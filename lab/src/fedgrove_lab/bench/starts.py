"""Every variant in a process of its own, Flower and pfl-research among them: what a start costs.

Variants are started one after another, ``starts`` times over, and each start does three rounds.
From its log follow the steady state (rounds after the first) and the time from the start of the
process until the three rounds are done, importing torch and, for Flower, starting Ray included;
ending is not counted. The memory is that of the process and all its descendants, pages that several
share counted once (PSS), read now and then: reading takes time too.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedgrove.engines.pool.engine import cores
from fedgrove.errors import EngineError, check

from .alone import RIVALS, Job, RoundLog
from .engine import GET_IT, PFL, spread, variants
from .scenes import setting

ROUNDS = 3
"""Rounds that a start does."""
TIMEOUT = 1800.0
"""Seconds after which a process is ended."""
NEEDS = {"Flower": ("flwr", "ray"), PFL: ("pfl",)}
"""What must be installed for a rival to be measured."""
ALONE = [sys.executable, "-m", "fedgrove_lab.bench.alone"]
"""The command that runs a job; the job follows as JSON."""


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
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Rows of all variants of a scene, each in processes of its own.

    ``say`` gets a line for everything that was left out, and why.
    """
    check(starts >= 1, "starts", starts, "1 or more")
    cold_starts: dict[str, list[ColdStart]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scene, _ = setting(name, Path(folder), cohort, data_dir)
        commands: dict[str, list[str]] = dict.fromkeys(variants(scene, device), ALONE)
        commands.update(rivals(device, say))
        data_folder = str(data_dir) if data_dir else None
        for i in range(starts):
            # A copy, since a rival that fails is taken out on the way.
            for j, variant in enumerate(list(commands)):
                out = f"{folder}/{i}.{j}"
                job = Job(name, variant, device, ROUNDS, out, cohort, data_folder)
                try:
                    cold_start = run_process(job, commands[variant])
                except EngineError as error:
                    # Ours must not fail; others may, and the measurement continues without them.
                    if variant.partition(",")[0] not in RIVALS:
                        raise
                    say(f"left out: {error}")
                    del commands[variant]
                    # Earlier starts that went well go too: a row is of all starts or of none.
                    cold_starts.pop(variant, None)
                else:
                    cold_starts.setdefault(variant, []).append(cold_start)
    return [{"scene": name, "how": "alone", **row} for row in summarise(cold_starts)]


def summarise(cold_starts: dict[str, list[ColdStart]]) -> list[dict[str, Any]]:
    """Steady state and time from the start of each variant, beside the first one's.

    ``start_s`` is what a start costs beside its rounds: the first round's end less a steady round.
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
    for row in spread(steady):
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


# ---- what is started -----------------------------------------------------------------------------


def rivals(device: str, say: Callable[[str], None]) -> dict[str, list[str]]:
    """The other simulators that are installed, and the command that starts each.

    On CUDA pfl-research is one of the variants that take turns, and so of those started anyway.
    """
    asked = dict(NEEDS)
    if device == "cuda":
        del asked[PFL]
    installed = set()
    for name, packages in asked.items():
        if all(find_spec(package) for package in packages):
            installed.add(name)
    for name in sorted(set(asked) - installed):
        say(f"left out: {name} is not installed; {GET_IT}")
    n = cores()
    commands: dict[str, list[str]] = {}
    if PFL in installed:
        commands[f"{PFL}, 1 process"] = ALONE
        if n > 1:
            python, *module = ALONE
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
            commands[f"{PFL}, {n} processes"] = [python, *torchrun, *module]
    if "Flower" in installed:
        commands[f"Flower, {n} Ray actors"] = ALONE
    return commands


def run_process(job: Job, command: Sequence[str]) -> ColdStart:
    """Start a process, wait until it has done its rounds, and read its log."""
    output = Path(job.out + ".log")
    peak = 0
    with output.open("wb") as file:
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, json.dumps(asdict(job))], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() < began + TIMEOUT:
                read_began = time.monotonic()
                peak = max(peak, memory_of(process.pid))
                # At most a fiftieth of one core goes into reading.
                pause = max(0.5, 50 * (time.monotonic() - read_began))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
        finally:
            _end(process)
    lines = RoundLog(Path(job.out)).read()
    ends = []
    device_bytes = None
    for line in lines:
        if "at" in line:
            ends.append(line["at"] - began)
        if "device_bytes" in line:
            device_bytes = line["device_bytes"]
    # A process may end without an error and still have done too little.
    if process.returncode or len(ends) != job.rounds:
        raise EngineError(
            f"{job.variant} ended with code {process.returncode} after {len(ends)} rounds: "
            f"{_last_line(output)}"
        )
    # Without /proc the peak is 0, which means that it is not known.
    return ColdStart(tuple(ends), peak or None, device_bytes)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # Not killed at once: torchrun and Ray end their own processes when they are asked to end.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(output: Path) -> str:
    """The last line that is not empty: of a traceback, the exception."""
    for line in reversed(output.read_text(errors="replace").split("\n")):
        if line.strip():
            return line.strip()
    return "it said nothing"


# ---- memory of a process and its descendants -----------------------------------------------------


def memory_of(root: int) -> int:
    """Bytes that a process and its descendants hold now; 0 where there is no /proc.

    Pages that several of them share are counted once.
    """
    return sum(_pss(pid) for pid in descendants(root))


def descendants(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    if os.path.isdir("/proc"):
        for name in os.listdir("/proc"):
            if name.isdigit():
                parents[int(name)] = _parent(name)
    family = {root}
    generation = {root}
    while generation:
        children = {pid for pid, parent in parents.items() if parent in generation}
        # Less those known: a process id may have been given anew while /proc was read.
        generation = children - family
        family |= generation
    return family


def _parent(pid: str) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        # It has just ended.
        return 0
    # "pid (name) state parent ...": the name may hold anything, brackets and spaces too.
    after_name = stat.rpartition(")")[2]
    return int(after_name.split()[1])


def _pss(pid: int) -> int:
    """Bytes of a process, each page divided by the number of processes that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # It has just ended, or belongs to somebody else.
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            kib = int(line.split()[1])
            return kib * 1024
    return 0
