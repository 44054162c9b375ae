"""Where the seconds of a round go: who is at work in this process, looked at a thousand times a
second.

A thread looks at the stack of the one that trains. The innermost room of fedgrove in it says what
the time is spent on; nothing is wrapped or changed, so that any engine can be looked at. Time that
is spent waiting, for a GPU, for another thread or for worker processes, belongs to whoever waits:
the engine.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

PARTS = ("engine", "edits", "counting", "memory", "server", "checkpoint", "other")
"""What a round is made of: training and what an engine does around it; what clients do one by one
(Edit and Give); encoding and counting bytes; files of what clients remember; planning, the gate and
the fold; the run folder's checkpoint; and all else."""
PACKAGE = Path(__file__).parent.parent
MARK = "stage_of_a_client"
"""The function that Edit and Give are called through, so that a stack shows them."""
PAUSE = 0.001
"""Seconds between two looks."""
SWITCH = 1e-4
"""Seconds after which the thread that trains hands over to the one that looks; Python's own 5 ms
would let it look only where that thread happens to wait."""


@cache
def part_of(code: CodeType) -> str | None:
    """The part of a round that a function belongs to; None: whatever it is called for."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    room, *rest = path.relative_to(PACKAGE).parts
    file = rest[-1] if rest else room
    if code.co_name == MARK:
        return "edits"
    if room == "wire":
        return "counting"
    if room == "engines":
        return "engine"
    if room == "runs":
        return {
            "store.py": "memory",
            "folder.py": "checkpoint",
            "rounds.py": "server",
            "admission.py": "server",
        }.get(file)
    return None


def part_at_work(frame: FrameType | None) -> tuple[str, str]:
    """What a stack is at, and the function of fedgrove's at its end.

    Going outwards, an engine or the server ends the search: what they call, as long as it has a
    name of its own, is what the time goes into. Of several such the outermost counts: an Edit that
    counts bytes is an Edit.
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


class Look:
    """A context in which the current thread is looked at."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By part."""
        self.places: defaultdict[str, float] = defaultdict(float)
        """By function, as ``wire/count.py:count_up``."""
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._switch_before = sys.getswitchinterval()

    def __enter__(self) -> Look:
        self._switch_before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_before)

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(PAUSE):
            part, place = part_at_work(sys._current_frames().get(self._watched))
            # By the clock, not by the number of looks: code that does not let go of the
            # interpreter is seen once, at its end.
            now = time.perf_counter()
            self.seconds[part] += now - before
            self.places[place] += now - before
            before = now
