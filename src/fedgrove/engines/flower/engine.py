"""The server's half: tasks over a Flower Grid, and the answers that come back.

The Grid may be Flower's simulation, a SuperLink with nodes all over the world, or a loop in this
process; Flower decides behind it. Clients go by their partition, never by a node's number, which is
another one in every run; a reply goes by the message that it answers. Time is measured by a clock
that nobody can put forward or back, and who has not answered after ``timeout`` seconds is lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import LOST_REASONS, Answer, Cost, Job, Lost, Task
from ...errors import EngineError, FedgroveError, WireError
from ...runs.run import Run
from ...wire.codec import KnownMask
from ...wire.ledger import Ledger
from ...wire.message import ResendRequest, read_answer
from ...wire.message_costs import BroadcastBytes, encode_task, find_masks_known_to_server
from ..work import explained, late, unreadable
from . import messages
from .letter import Letter, codec_name, cost_of
from .messages import Head

WINDOW = 256
"""So many tasks are on their way at a time: the server's memory must not grow with the clients."""
SHORTEST_WAIT = 0.005
LONGEST_WAIT = 1.0
"""Seconds between two looks for replies; in between, a tenth of the time since there was one."""
GONE = (3, 4, 5)
"""Flower's codes for a message, a reply or a node that is no longer there."""


def nothing() -> None:
    """A check that finds nothing wrong."""


@dataclass(eq=False)
class Flower:
    """An engine over a Grid that somebody else opened, and closes.

    ``nodes()`` says, before each exchange, which node has which partition; ``name_of`` a run, by
    what name nodes know it. ``check`` is called while the engine waits, and raises where waiting is
    in vain.
    """

    grid: Any
    nodes: Callable[[], Mapping[int, int]]
    name_of: Callable[[Run], str]
    timeout: float | None = None
    window: int = WINDOW
    check: Callable[[], None] = nothing
    note_loss: Callable[[int, Lost], None] | None = None
    """Told of every node whose task was lost."""
    name: str = field(default="flower", init=False)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Send the tasks, as many at a time as the window has room for; answers in job order."""
        waiting = iter(jobs)
        nodes = self.nodes()
        sent = BroadcastBytes()
        # In job order; those in the middle may have their answers already.
        window: deque[_Exchange] = deque()
        patience = _Patience()
        while True:
            while len(window) < self.window:
                job = next(waiting, None)
                if job is None:
                    break
                exchange = _Exchange(job, nodes.get(job[1].to))
                window.append(exchange)
                self._send(exchange, sent)
            if not window:
                return
            if window[0].answer is not None:
                first = window.popleft()
                yield first.job, self._told(first)
                continue
            self._collect([e for e in window if e.answer is None], sent, patience)

    def _told(self, exchange: _Exchange) -> Answer:
        """The answer with what its messages cost."""
        answer = exchange.paid()
        if isinstance(answer, Lost) and exchange.node is not None and self.note_loss is not None:
            self.note_loss(exchange.node, answer)
        return answer

    def _send(self, exchange: _Exchange, sent: BroadcastBytes) -> None:
        """Send a task; one that cannot be sent is lost."""
        run, task = exchange.job
        if exchange.node is None:
            sentence = f"client {task.to} has no node; it has not joined, or has left."
            exchange.answer = Lost(task.to, "unsent", sentence)
            return
        codec = run.method.codec
        head, packets, cost = encode_task(task, codec, run.known_state, sent)
        letter = Letter(head, packets, codec_name(codec), {"run": self.name_of(run)})
        exchange.spent.add({"down": cost})
        exchange.since = time.monotonic()
        exchange.message = push(
            self.grid, messages.task_message(letter, exchange.node, self.timeout)
        )
        if exchange.message is None:
            sentence = (
                f"the task of client {task.to}, {letter.length} bytes, could not be sent: the "
                "SuperLink takes no message as large, or does not know the node."
            )
            exchange.answer = Lost(task.to, "unsent", sentence)

    def _collect(self, waiting: list[_Exchange], sent: BroadcastBytes, patience: _Patience) -> None:
        """Take in the replies that are there; wait a little if there are none."""
        by_message = {e.message: e for e in waiting if e.message is not None}
        replies = pull(self.grid, by_message)
        for message, reply in replies:
            self._take(by_message[message], reply, sent)
        if self.timeout is not None:
            now = time.monotonic()
            for exchange in waiting:
                if exchange.answer is None and now - exchange.since > self.timeout:
                    exchange.answer = late(exchange.job[1], self.timeout)
        if replies:
            patience.renew()
            return
        self.check()
        patience.wait()

    def _take(self, exchange: _Exchange, reply: Any, sent: BroadcastBytes) -> None:
        """A reply: a report, why there is none, or that the client lacks a mask to read it."""
        run, task = exchange.job
        if reply.has_error():
            exchange.answer = lost_by_error(task, reply.error)
            return
        try:
            letter = messages.letter_of(reply.content)
            if "lost" in letter.note:
                exchange.answer = _as_said(task, letter)
                return
            # It came, and was paid for, whatever it holds.
            exchange.spent.add({"up": cost_of(letter)})
            answer = _read(run, task, letter)
        except Exception as error:
            # A stranger's bytes; whatever is wrong with them is wrong with this reply alone.
            exchange.answer = unreadable(task, error)
            return
        if not isinstance(answer, ResendRequest):
            exchange.answer = answer
        elif exchange.is_second:
            sentence = f"client {task.to} was sent all masks, and lacks some still."
            exchange.answer = Lost(task.to, "unreadable", sentence)
        else:
            # The server was wrong about the client; then nothing is sure.
            run.known_state.forget(task.to)
            exchange.is_second = True
            self._send(exchange, sent)

    def close(self) -> None:
        """The Grid is not ours to close."""


@dataclass(eq=False)
class _Exchange:
    """A job on its way: to which node, as which message, what it has cost, what came of it."""

    job: Job
    node: int | None
    message: str | None = None
    since: float = 0.0
    is_second: bool = False
    spent: Ledger = field(default_factory=Ledger)
    answer: Answer | None = None

    def paid(self) -> Answer:
        """The answer with what its messages cost."""
        assert self.answer is not None
        cost: dict[str, Mapping[str, int]] = {}
        if self.spent.down:
            cost["down"] = self.spent.down
        if self.spent.up:
            cost["up"] = self.spent.up
        counted: Cost = cost
        return replace(self.answer, cost=counted)


class _Patience:
    """How long to wait for the next reply: a tenth of the time since there was one."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def renew(self) -> None:
        """There was a reply."""
        self._since = time.monotonic()

    def wait(self) -> None:
        """Wait a little."""
        waited = time.monotonic() - self._since
        time.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, waited / 10)))


def _read(run: Run, task: Task, letter: Letter) -> Answer | ResendRequest:
    """The report in a letter, with what the client computed."""
    codec = run.method.codec
    expected = codec_name(codec)
    if letter.codec != expected:
        raise WireError(f"it is written with {letter.codec}, and the run's codec is {expected}.")
    masks: dict[str, KnownMask | None] = find_masks_known_to_server(
        task, task.send, codec, run.known_state.digest
    )
    answer = read_answer(letter.data, codec, masks)
    if isinstance(answer, ResendRequest):
        return answer
    macs = letter.note.get("macs", 0)
    is_count = type(macs) is int and macs >= 0
    return replace(answer, macs=int(macs) if is_count else 0)


def _as_said(task: Task, letter: Letter) -> Lost:
    """Why a client has no report, in its own words."""
    reason = str(letter.note["lost"])
    sentence = str(letter.note.get("detail", ""))[:1000]
    return Lost(task.to, reason if reason in LOST_REASONS else "crashed", sentence)


def lost_by_error(task: Task, error: Any) -> Lost:
    """Flower's own error in place of a reply: the node is gone, or its app failed."""
    text = " ".join(str(error.reason or "no reason given").split())[:300].rstrip(".")
    if error.code in GONE:
        return Lost(task.to, "died", f"the node of client {task.to} is gone: {text}.")
    return Lost(task.to, "crashed", f"the app of client {task.to} failed: {text}.")


# ---- the Grid ------------------------------------------------------------------------------------


def push(grid: Any, message: Any) -> str | None:
    """Send a message: its number, or None if it was not taken.

    One at a time: of several, a Grid does not always say which it did not take.
    """
    try:
        pushed = list(grid.push_messages([message]))
    except Exception as error:
        raise _unreachable(error) from error
    # What is too large comes back as an empty list, what is malformed as None.
    return pushed[0] if pushed else None


def pull(grid: Any, numbers: Iterable[str]) -> list[tuple[str, Any]]:
    """The replies that are there to messages of these numbers, each with the one it answers."""
    wanted = set(numbers)
    if not wanted:
        return []
    try:
        replies = list(grid.pull_messages(wanted))
    except Exception as error:
        raise _unreachable(error) from error
    found: dict[str, Any] = {}
    for reply in replies:
        answered = reply.metadata.reply_to_message_id
        if answered in wanted:
            # The first reply counts, should there be two.
            found.setdefault(answered, reply)
    return list(found.items())


def _unreachable(error: Exception) -> EngineError:
    if isinstance(error, FedgroveError):
        return EngineError(str(error))
    return EngineError(
        f"Flower's SuperLink could not be reached: {explained(error)} Make sure that it runs and "
        "that its address and certificate are right."
    )


def ask(
    grid: Any,
    questions: Mapping[int, Head],
    timeout: float | None = None,
    check: Callable[[], None] = nothing,
) -> dict[int, Head]:
    """Ask nodes, all at once, and wait; answers by node. Who does not answer is left out.

    An answer that cannot be read, or an error in place of one, is ``{"refused": sentence}``.
    """
    node_of: dict[str, int] = {}
    answers: dict[int, Head] = {}
    for node, head in questions.items():
        number = push(grid, messages.question_message(head, node, timeout))
        if number is not None:
            node_of[number] = node
    started = time.monotonic()
    patience = _Patience()
    while node_of:
        replies = pull(grid, node_of)
        for number, reply in replies:
            answers[node_of.pop(number)] = _answer_in(reply)
        if timeout is not None and time.monotonic() - started > timeout:
            break
        if replies:
            patience.renew()
        elif node_of:
            check()
            patience.wait()
    return answers


def _answer_in(reply: Any) -> Head:
    if reply.has_error():
        return {"refused": " ".join(str(reply.error.reason or "no reason given").split())[:300]}
    try:
        return messages.head_of(reply)
    except WireError as error:
        return {"refused": str(error)}
