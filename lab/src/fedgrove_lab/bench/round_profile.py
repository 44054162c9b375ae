"""Where the seconds of a round go: a profiler that samples the stack a thousand times a second.

A signal interrupts the thread that trains, which reads its own stack. The innermost package of
fedgrove on it tells what the time is spent on; nothing is wrapped or changed, so that any engine
can be profiled. Time that is spent waiting, for a GPU, for another thread or for worker processes,
belongs to the one that waits: the engine.

Another thread must not read the stack: while it goes from frame to frame the one that trains goes
on, and Python 3.11 then finds frames of generators that no longer exist.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import fedgrove

PARTS = ("engine", "edits", "counting", "memory", "server", "checkpoint", "other")
"""What a round is made of: training and what an engine does around it; what clients do one by one
(Edit and Give); encoding and counting bytes; files of what clients remember; planning, the gate and
the fold; the run folder's checkpoint; and all else."""
PACKAGE = Path(fedgrove.__file__).parent
MARK = "stage_of_a_client"
"""The function that Edit and Give are called through, so that a stack shows them."""
PAUSE = 0.001
"""Seconds between two samples."""


@cache
def part_of(code: CodeType) -> str | None:
    """Return the part of a round that a function belongs to; None: that of its caller."""
    if code.co_name == MARK:
        return "edits"
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    room, *rest = path.relative_to(PACKAGE).parts
    file = rest[-1] if rest else room
    # The second lets other processes count, and waits for them.
    if room == "wire" or (room == "engines" and file == "counting.py"):
        return "counting"
    if room == "engines":
        return "engine"
    if room == "runs":
        return {
            "memory.py": "memory",
            "checkpoint.py": "checkpoint",
            "folder.py": "checkpoint",
            "rounds.py": "server",
        }.get(file)
    return None


def find_part(frame: FrameType | None) -> tuple[str, str]:
    """Return the part that a stack belongs to, and the innermost function of fedgrove on it.

    Going outwards, an engine or the server ends the search: what they call, where that is a part
    too, is what the time goes into. Of several such the outermost counts: an Edit that counts bytes
    is an Edit.
    """
    called: str | None = None
    place = ""
    while frame is not None:
        code = frame.f_code
        if not place and code.co_filename.startswith(str(PACKAGE)):
            place = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}"
        part = part_of(code)
        if part in ("engine", "server"):
            return called or part, place
        if part is not None:
            called = part
        frame = frame.f_back
    return called or "other", place


def can_profile() -> bool:
    """Return whether this thread can be interrupted: Python handles signals in the main one."""
    return hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()


class Profile:
    """A context in which the main thread is sampled."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By part."""
        self.places: defaultdict[str, float] = defaultdict(float)
        """By function, as ``wire/count.py:count_up``."""
        self._over = threading.Event()
        # Not an Event: a handler that waits for its lock might wait for what it has interrupted.
        self._signal_is_pending = False
        self._sender = threading.Thread(
            target=self._send, args=[threading.get_ident()], daemon=True
        )
        self._handler_before: Any = None
        self._before = 0.0

    def __enter__(self) -> Profile:
        self._handler_before = signal.signal(signal.SIGPROF, self._sample)
        self._before = time.perf_counter()
        self._sender.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._sender.join()
        # At most 100 times: if the body has set another handler, that one got the signal.
        for _ in range(100):
            if not self._signal_is_pending:
                break
            time.sleep(PAUSE)
        # A signal that is late is ignored: the default ends the process.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        # None stands for a handler that was not set from Python.
        if self._handler_before is not None:
            signal.signal(signal.SIGPROF, self._handler_before)

    def _send(self, watched: int) -> None:
        while not self._over.wait(PAUSE):
            # One at a time: a system call that takes longer than the pause, as a fork may, would
            # otherwise be restarted for ever.
            if not self._signal_is_pending:
                self._signal_is_pending = True
                signal.pthread_kill(watched, signal.SIGPROF)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        try:
            part, place = find_part(frame)
            # By the clock, not by the number of samples: code that calls no Python is seen once, at
            # its end.
            now = time.perf_counter()
            self.seconds[part] += now - self._before
            self.places[place] += now - self._before
            self._before = now
        finally:
            # Ctrl-C may come in between.
            self._signal_is_pending = False
