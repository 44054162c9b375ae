"""Child processes that are measured: how long they run, and how much memory and core time they use.

Memory is that of a process and all its descendants, pages that several share counted once (PSS).
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str], None]
"""Takes a line about the progress of a measurement, or about what is left out of it."""
PAUSE = 0.25
"""The least seconds between two readings of a process's memory."""


def be_silent(line: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class FinishedProcess:
    """A child process that has ended."""

    began: float
    """By the monotonic clock, which all processes of a machine share."""
    code: int
    peak: int
    """The most bytes of memory that were read; 0 where there is no /proc."""
    last_line: str
    """Of its output; of a traceback, that is the exception."""


def run_watched(
    command: Sequence[str],
    output: Path,
    timeout: float = math.inf,
    environment: Mapping[str, str] | None = None,
) -> FinishedProcess:
    """Start a process, read its memory now and then, and wait until it ends.

    Args:
        command: What to start.
        output: A file for all that it prints.
        timeout: Seconds after which it is ended.
        environment: Its environment variables, if they are not this process's.
    """
    peak = 0
    with output.open("wb") as file:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and time.monotonic() < began + timeout:
                read_began = time.monotonic()
                peak = max(peak, memory_of(process.pid))
                # At most a fiftieth of one core goes into reading.
                pause = max(PAUSE, 50 * (time.monotonic() - read_began))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause)
        finally:
            _end(process)
    return FinishedProcess(began, process.returncode, peak, _last_line(output))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # Not killed at once: torchrun and Ray end their own processes on a request to end.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(output: Path) -> str:
    for line in reversed(output.read_text(errors="replace").split("\n")):
        if line.strip():
            return line.strip()
    return "it printed nothing"


# ---- what /proc says -----------------------------------------------------------------------------


def memory_of(root: int) -> int:
    """Return the bytes of a process and its descendants now; 0 where there is no /proc."""
    return sum(_pss(pid) for pid in descendants(root))


def descendants(root: int) -> set[int]:
    """Return a process and all that descend from it."""
    parents = {}
    if os.path.isdir("/proc"):
        for name in os.listdir("/proc"):
            if name.isdigit():
                parents[int(name)] = _parent(name)
    family = {root}
    generation = {root}
    while generation:
        children = {pid for pid, parent in parents.items() if parent in generation}
        # Less those known: a process id may have been reused while /proc was read.
        generation = children - family
        family |= generation
    return family


def cpu_seconds(root: int) -> float:
    """Return for how long a process and its descendants have had a core.

    Without /proc, that of this process alone.
    """
    if not os.path.isdir("/proc"):
        return time.process_time()
    ticks = 0
    for pid in descendants(root):
        fields = _stat(pid)
        if fields:
            # Fields 14 and 15 of the file are those of the user and the system.
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def own_peak_memory() -> int:
    """Return the most bytes that this process has had; 0 where there is no /proc."""
    return 1024 * _kib_after("VmHWM:", Path("/proc/self/status"))


def _parent(pid: str) -> int:
    fields = _stat(int(pid))
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; none where the process has just ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # "pid (name) state parent ...": the name may have anything in it, brackets and spaces too.
    return stat.rpartition(")")[2].split()


def _pss(pid: int) -> int:
    """Bytes of a process, each page divided by the number of processes that share it."""
    return 1024 * _kib_after("Pss:", Path(f"/proc/{pid}/smaps_rollup"))


def _kib_after(name: str, file: Path) -> int:
    """The number behind a name; 0 where the process has ended, or belongs to somebody else."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
