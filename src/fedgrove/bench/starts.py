"""Every variant in a process of its own: what starting it costs, beside Flower's simulation and pfl-research.

Variants are started one after another, ``starts`` times over, and each start does three rounds. From its notes follow
the steady state (rounds after the first) and the time from the start of the process until the three rounds are done,
importing torch and, for Flower, starting Ray included; ending is not counted. The memory is that of the process and
all that descend from it, pages that several share counted once (PSS), looked at now and then: looking takes time too.
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

from ..engines.pool.engine import cores
from ..errors import EngineError, check
from .alone import RIVALS, Notes, Order
from .engine import spread, variants
from .scenes import setting

ROUNDS = 3
"""Rounds that a start does."""
PATIENCE = 1800.0
"""Seconds after which a process is given up."""
NEEDS = {"Flower": ("flwr", "ray"), "pfl-research": ("pfl",)}
"""What must be installed for a rival to be measured."""


@dataclass(frozen=True)
class ColdStart:
    """One process: seconds from its start until each round was done, peak memory, and that of the device, in bytes."""

    ends: tuple[float, ...]
    memory: int | None = None
    device: int | None = None

    @property
    def steady(self) -> list[float]:
        """Seconds of the rounds after the first."""
        return [b - a for a, b in pairwise(self.ends)]


def measure_starts(
    name: str,
    device: str = "cpu",
    starts: int = 3,
    cohort: int | None = None,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Rows of all variants of a scene, each in processes of its own; ``say`` is told what was left out, and why."""
    check(starts >= 1, "starts", starts, "1 or more")
    found: dict[str, list[ColdStart]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scene, _ = setting(name, Path(folder), cohort, data_dir)
        each = {**dict.fromkeys(variants(scene, device), _alone()), **rivals(device, say)}
        where = str(data_dir) if data_dir else None
        for i in range(starts):
            for j, variant in enumerate(list(each)):
                order = Order(name, variant, device, ROUNDS, f"{folder}/{i}.{j}", cohort, where)
                try:
                    found.setdefault(variant, []).append(started(order, each[variant]))
                except EngineError as error:
                    if variant.partition(",")[0] not in RIVALS:
                        raise
                    say(f"left out: {error}")
                    del each[variant]
    return [
        {"scene": name, "how": "alone", **row}
        for row in rows({k: v for k, v in found.items() if k in each})
    ]


def rows(found: dict[str, list[ColdStart]]) -> list[dict[str, Any]]:
    """Steady state and time from the start of each variant, beside the first one's.

    ``start_s`` is what a start costs beside its rounds: the first round's end less a steady round.
    """
    base = statistics.median(s.ends[-1] for s in next(iter(found.values())))
    steady = spread(
        {variant: [t for s in some for t in s.steady] for variant, some in found.items()}
    )
    made = []
    for row, some in zip(steady, found.values(), strict=True):
        whole = [s.ends[-1] for s in some]
        extra = {
            "start_s": statistics.median(s.ends[0] for s in some) - row["median_s"],
            "rounds": len(some[0].ends),
            "from_start_s": statistics.median(whole),
            "from_start_min_s": min(whole),
            "from_start_max_s": max(whole),
            "times_plain_from_start": base / statistics.median(whole),
            "memory_mib": _mib([s.memory for s in some]),
            "device_mib": _mib([s.device for s in some]),
        }
        made.append({**row, **extra})
    return made


def _mib(sizes: Sequence[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return max(known) / 2**20 if known else None


# ---- what is started ------------------------------------------------------------------------------------------------


def rivals(device: str, say: Callable[[str], None]) -> dict[str, list[str]]:
    """The other simulators that are installed, and how each is started."""
    there = {name for name, needs in NEEDS.items() if all(find_spec(need) for need in needs)}
    for name in sorted(set(NEEDS) - there):
        say(f"left out: {name} is not installed; get it with: pip install 'fedgrove[bench]'")
    n, found = cores(), dict[str, list[str]]()
    if "pfl-research" in there:
        found["pfl-research, 1 process"] = _alone()
        if n > 1 and device == "cpu":  # on CUDA it wants a GPU for every process
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
            found[f"pfl-research, {n} processes"] = [sys.executable, *launch, *_alone()[1:]]
    if "Flower" in there:
        found[f"Flower, {n} Ray actors"] = _alone()
    return found


def _alone() -> list[str]:
    return [sys.executable, "-m", "fedgrove.bench.alone"]


def started(order: Order, command: Sequence[str]) -> ColdStart:
    """ColdStart a process, wait until it has done its rounds, and read its notes."""
    log, notes, peak = Path(order.out + ".log"), Notes(Path(order.out)), 0
    with log.open("wb") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, json.dumps(asdict(order))], stdout=out, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() < began + PATIENCE:
                looked = time.monotonic()
                peak = max(peak, memory_of(process.pid))
                pause = max(
                    0.5, 50 * (time.monotonic() - looked)
                )  # at most a fiftieth of one core goes into looking
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
        finally:
            _end(process)
    lines = notes.read()
    ends = tuple(line["at"] - began for line in lines if "at" in line)
    if process.returncode or len(ends) != order.rounds:
        said = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise EngineError(
            f"{order.variant} ended with code {process.returncode} after {len(ends)} rounds: {last}"
        )
    return ColdStart(
        ends,
        peak or None,
        next((line["device_bytes"] for line in lines if "device_bytes" in line), None),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # first politely: torchrun and Ray end their own processes then
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- memory of a family of processes -------------------------------------------------------------------------------


def memory_of(root: int) -> int:
    """Bytes that a process and its descendants hold now, shared pages counted once; 0 where there is no /proc."""
    return sum(_pss(pid) for pid in family(root))


def family(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {
        int(p): _parent(p)
        for p in (os.listdir("/proc") if os.path.isdir("/proc") else ())
        if p.isdigit()
    }
    found, more = {root}, {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def _parent(pid: str) -> int:
    """The second field after the name, which stands in brackets and may hold anything."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        )
    except OSError:  # it has just ended
        return 0


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
