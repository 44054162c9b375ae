"""Replies over Flower, fetched side by side, so that no sender holds up the others.

Flower's Grid reads replies one after the other: a sender that announces a reply and does not upload
it would stop the server for hours, and one whose reply is no message would end the run. Here the
SuperLink is only asked which replies have arrived. Each of them is then read in a thread of its
own, within a limit of bytes and of time; only a few pieces are in memory before they are counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError, FedgroveError, WireError
from ..work import explain_error
from . import messages
from .messages import ClaimedReply

FIRST_ARRIVAL = 0.25
SHORT_READ = 5.0
"""Seconds to wait for the first of the replies that are being read, if one of them began so
recently: most take a few milliseconds."""
MOST_TRANSFERS = 2
"""How many pieces of replies are transferred at a time: a piece may have many MB, whatever its
reply may have, and all nodes may send one at the same moment. Always by the same threads: the C
library keeps the memory that a thread has freed for this thread."""
MOST_FAILURES = 3
"""How often a SuperLink may fail to give a reply, for instance while its database is busy."""


@dataclass(frozen=True)
class Limits:
    """How much a reply may take.

    Args:
        longest: The most bytes that its content may have; None: any number.
        until: When it must have arrived, on the monotonic clock; None: whenever it does.
    """

    longest: int | None = None
    until: float | None = None


NO_LIMITS = Limits()


class Mailbox:
    """Reads the replies to messages that were pushed to Flower's Grid.

    Args:
        grid: Flower's Grid.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        # When each reply began to be read.
        self._reading: dict[str, float] = {}
        # How often the SuperLink failed to give a reply.
        self._failed: Counter[str] = Counter()
        self._arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._transfers = ThreadPoolExecutor(MOST_TRANSFERS)
        self._is_closed = threading.Event()

    def pull(
        self, numbers: Iterable[str], limits_of: Callable[[str], Limits] | None = None
    ) -> list[tuple[str, Any]]:
        """Return the replies that have arrived, each with the number of the message it answers.

        Args:
            numbers: The messages whose replies are wanted.
            limits_of: Returns the limits of the reply to a message; None: no limits.

        Returns:
            Replies. One that cannot be read is an error, which is not raised.

        Raises:
            EngineError: The SuperLink does not answer.
        """
        wanted = set(numbers)
        if not wanted:
            return []
        if not messages.has_superlink(self._grid):
            try:
                return _first_of_each(self._grid.pull_messages(wanted), wanted)
            except Exception as error:
                raise unreachable(error) from error
        found = []
        for number, reply in self._claim(wanted - self._reading.keys()):
            if isinstance(reply, Exception):
                found.append((number, reply))
            elif number in wanted and number not in self._reading:
                self._start(reply, limits_of)
        return found + self._collect(wanted)

    def _claim(self, wanted: set[str]) -> list[tuple[str, Any]]:
        """Return the replies that have arrived, not read, or why the SuperLink cannot give one."""
        found: list[tuple[str, Any]] = []
        # A SuperLink that stumbles over one reply gives none of the others in the same request.
        doubtful = wanted & self._failed.keys()
        for numbers in (wanted - doubtful, *({number} for number in sorted(doubtful))):
            if not numbers:
                continue
            try:
                claimed = messages.claim_replies(self._grid, numbers)
            except Exception as error:
                if not was_refused(error):
                    raise unreachable(error) from error
                self._failed.update(numbers)
                for number in numbers:
                    if self._failed[number] > MOST_FAILURES:
                        found.append((number, _unreadable(error)))
            else:
                for number in numbers:
                    self._failed.pop(number, None)
                found.extend((reply.answers, reply) for reply in claimed)
        return found

    def _start(self, reply: ClaimedReply, limits_of: Callable[[str], Limits] | None) -> None:
        self._reading[reply.answers] = time.monotonic()
        limits = NO_LIMITS
        try:
            if limits_of is not None:
                limits = limits_of(reply.answers)
        except Exception as error:
            # Of a user's method, for this task only.
            self._arrived.put((reply.answers, _unreadable(error)))
            return
        # A daemon: a reply that never arrives must not keep the server from ending.
        thread = threading.Thread(target=self._read, args=(reply, limits), daemon=True)
        thread.start()

    def _read(self, reply: ClaimedReply, limits: Limits) -> None:
        """Read a reply in its thread."""

        def is_over() -> bool:
            is_late = limits.until is not None and time.monotonic() > limits.until
            return is_late or self._is_closed.is_set()

        try:
            message = reply.fetch(limits.longest, is_over, self._transfers)
        except Exception as error:
            # Bytes from outside: an error in them concerns this reply only. Without its traceback,
            # which keeps what was read of the reply in memory.
            message = _unreadable(error).with_traceback(None)
        self._arrived.put((reply.answers, message))

    def close(self) -> None:
        """Stop reading: Python would not end before the last reply of a slow sender is there."""
        self._is_closed.set()
        self._transfers.shutdown(wait=False, cancel_futures=True)

    def _collect(self, wanted: set[str]) -> list[tuple[str, Any]]:
        """Return what was read; wait a moment if some of it has just begun to be read."""
        now = time.monotonic()
        began = (self._reading[number] for number in wanted & self._reading.keys())
        is_new = any(now - since < SHORT_READ for since in began)
        found = []
        try:
            while self._reading:
                number, message = self._arrived.get(is_new, FIRST_ARRIVAL)
                del self._reading[number]
                # What nobody waits for any more came too late.
                if number in wanted:
                    found.append((number, message))
                is_new = False
        except queue.Empty:
            pass
        return found


def _unreadable(error: Exception) -> FedgroveError:
    if isinstance(error, FedgroveError):
        return error
    return WireError(f"it is not a message of Flower ({explain_error(error)[:-1]}).")


def _first_of_each(replies: Iterable[Any], wanted: set[str]) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for reply in replies:
        answered = reply.metadata.reply_to_message_id
        if answered in wanted:
            # If there are two replies, the first one counts.
            found.setdefault(answered, reply)
    return list(found.items())


def was_refused(error: Exception) -> bool:
    """Whether the SuperLink has answered a request, and refused it."""
    # Of httpx, which only Flower needs.
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0)) >= 400


def unreachable(error: Exception) -> EngineError:
    """Return the error of a run whose SuperLink does not answer."""
    if isinstance(error, FedgroveError):
        return EngineError(str(error))
    return EngineError(
        f"Flower's SuperLink cannot be reached: {explain_error(error)} Check that it runs and that "
        "its address and certificate are right."
    )
