"""The server side of the flower engine: sends tasks over a Flower Grid and collects the answers.

The Grid may be Flower's simulation, a SuperLink with nodes on other machines, or a loop in this
process. Clients are identified by their partition, because the id of a node differs from run to
run. A reply is identified by the message that it answers. Times come from a monotonic clock, and
tasks without an answer after ``timeout`` seconds are lost.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import LOST_REASONS, Answer, Cost, ExpectedReport, Job, Lost, Task
from ...errors import (
    UnexpectedReport,
    WireError,
    clean_text,
    shown,
)
from ...runs.run import Run
from ...wire.codec import KnownMask
from ...wire.ledger import Ledger
from ...wire.message import ResendRequest, longest_answer, read_answer
from ...wire.message_costs import BroadcastBytes, encode_task, find_masks_known_to_server
from ..work import explain_error, lose_late, lose_unreadable, refuse_undecoded
from . import messages
from .mailbox import Limits, Mailbox, unreachable, was_refused
from .messages import Head, Letter, Note, name_codec, read_cost

WINDOW = 256
"""At most this many tasks are open at a time, so that memory does not grow with the clients."""
SHORTEST_WAIT = 0.005
LONGEST_WAIT = 1.0
"""Limits of the seconds between two requests for replies (:class:`_Patience`)."""
EARLY = 1.0
"""Seconds before the end of a task's time at which Flower may drop it."""
LATER = 5.0
"""Seconds after the end of a task's time at which its reply is not read any further."""
LONGEST_REASON = 300
"""Letters of Flower's or a node's own reason that a sentence keeps."""
NO_MESSAGE = 3
"""Flower's code for a message that it does not have: it expired, or its node was removed."""
NO_REPLY = 4
"""Flower's code for a reply that expired."""
NO_NODE = 5
"""Flower's code for a node that sends no more heartbeats."""
GONE = (NO_MESSAGE, NO_REPLY, NO_NODE)


def nothing() -> None:
    """Check nothing before Flower pushes a message: the default."""


def explain_absence(client: int) -> str:
    """Return why a client has no node in Flower, if nothing more is known."""
    return f"client {client} has no node; it has not joined, or has left."


@dataclass(eq=False)
class Flower:
    """Runs tasks on the nodes of a Grid, which the caller opens and closes.

    Args:
        grid: Flower's Grid.
        nodes: Returns the node of each partition; called before each exchange.
        name_of: Returns the name by which nodes know a run.
        timeout: Seconds after which a task without an answer is lost; None: wait.
        window: At most this many tasks are open at a time.
        check: Called while the engine waits; raises if waiting is useless.
        note_answer: Called with the node and its answer, report or loss.
        absence: Returns a sentence on why a client has no node.
    """

    grid: Any
    nodes: Callable[[], Mapping[int, int]]
    name_of: Callable[[Run], str]
    timeout: float | None = None
    window: int = WINDOW
    check: Callable[[], None] = nothing
    note_answer: Callable[[int, Answer], None] | None = None
    absence: Callable[[int], str] = explain_absence
    name: str = field(default="flower", init=False)
    _mailbox: Mailbox = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._mailbox = Mailbox(self.grid)

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Send the tasks over Flower, at most ``window`` at a time; yield answers in job order."""
        waiting = iter(jobs)
        nodes = self.nodes()
        sent = BroadcastBytes()
        # In job order; later ones may be answered before the first.
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
                yield first.job, self._finish(first)
                continue
            self._collect([e for e in window if e.answer is None], sent, patience)

    def _finish(self, exchange: _Exchange) -> Answer:
        """Return the answer with the bytes of its messages; report whether the node answered."""
        answer = exchange.answer_with_cost()
        if exchange.node is not None and self.note_answer is not None:
            self.note_answer(exchange.node, answer)
        return answer

    def _send(self, exchange: _Exchange, sent: BroadcastBytes) -> None:
        """Send a task; one that cannot be sent is lost."""
        run, task = exchange.job
        if exchange.node is None:
            exchange.answer = Lost(task.to, "unsent", self.absence(task.to))
            return
        codec = run.method.codec
        head, packets, cost = encode_task(task, codec, run.known_state, sent)
        # A number that is used once: a run that is repeated has equal tasks, and their answers
        # must differ.
        note: Note = {"run": self.name_of(run), "nonce": secrets.token_hex(16)}
        letter = Letter(head, packets, name_codec(codec), note)
        exchange.spent.add({"down": cost})
        exchange.task_id = letter.task_id
        if not exchange.is_second:
            # A task that is sent again gets no more time.
            exchange.since = time.monotonic()
        exchange.message = self._push(letter, exchange.node)
        if exchange.message is None:
            sentence = (
                f"the task of client {task.to}, {letter.length} bytes, could not be sent: it is "
                "too large for the SuperLink, or the SuperLink does not know the node."
            )
            exchange.answer = Lost(task.to, "unsent", sentence)

    def _push(self, letter: Letter, node: int) -> str | None:
        """Push a task; return the number of its message, or None if it was not accepted."""
        pushed = push(self.grid, messages.make_task_message(letter, node, self.timeout))
        if pushed is None:
            # Without a salt, clients share the packets of a broadcast, and a malicious node can
            # predict parts of the message and have it refused.
            salted = messages.make_task_message(letter, node, self.timeout, messages.make_salt())
            pushed = push(self.grid, salted)
        return pushed

    def _collect(self, waiting: list[_Exchange], sent: BroadcastBytes, patience: _Patience) -> None:
        """Handle the replies that have arrived; wait a little if there are none."""
        by_message = {e.message: e for e in waiting if e.message is not None}

        def limits_of(message: str) -> Limits:
            exchange = by_message[message]
            run, task = exchange.job
            until = None
            if self.timeout is not None:
                # A little later than the task is lost as late: then nobody waits for it any more.
                until = exchange.since + self.timeout + LATER
            return Limits(longest_answer(run.expected(task)), until)

        replies = self._mailbox.pull(by_message, limits_of)
        for message, reply in replies:
            self._take(by_message[message], reply, sent)
        if self.timeout is not None:
            now = time.monotonic()
            for exchange in waiting:
                if exchange.answer is None and now - exchange.since > self.timeout:
                    exchange.answer = lose_late(exchange.job[1], self.timeout)
        if replies:
            patience.renew()
            return
        self.check()
        patience.wait()

    def _take(self, exchange: _Exchange, reply: Any, sent: BroadcastBytes) -> None:
        """Handle a reply: a report, a loss, or the request for a mask that the client lacks."""
        run, task = exchange.job
        if isinstance(reply, UnexpectedReport):
            exchange.answer = refuse_undecoded(task, reply)
            return
        if isinstance(reply, Exception):
            exchange.answer = lose_unreadable(task, reply)
            return
        if reply.has_error():
            waited = time.monotonic() - exchange.since
            exchange.answer = lose_by_error(task, reply.error, self.timeout, waited)
            return
        try:
            expected = run.expected(task)
            letter = messages.read_letter(reply.content, longest_answer(expected))
            if "lost" in letter.note:
                exchange.answer = _read_loss(task, letter)
                return
            # Its bytes arrived and count, whatever they contain.
            exchange.spent.add({"up": read_cost(letter)})
            _check_identity(letter, exchange.task_id)
            answer = _read(run, task, expected, letter)
        except UnexpectedReport as error:
            exchange.answer = refuse_undecoded(task, error)
            return
        except Exception as error:
            # Bytes from outside: an error in them concerns this reply only.
            exchange.answer = lose_unreadable(task, error)
            return
        if not isinstance(answer, ResendRequest):
            exchange.answer = answer
        elif exchange.is_second:
            sentence = f"client {task.to} was sent all masks, but still lacks some."
            exchange.answer = Lost(task.to, "unreadable", sentence)
        else:
            # The server was wrong about this client, so it forgets all that it assumed.
            run.known_state.forget(task.to)
            exchange.is_second = True
            self._send(exchange, sent)

    def close(self) -> None:
        """Stop reading replies; the caller closes the Grid."""
        self._mailbox.close()


@dataclass(eq=False)
class _Exchange:
    """A job, its node and message, the bytes sent so far, and its answer."""

    job: Job
    node: int | None
    message: str | None = None
    task_id: str = ""
    since: float = 0.0
    is_second: bool = False
    spent: Ledger = field(default_factory=Ledger)
    answer: Answer | None = None

    def answer_with_cost(self) -> Answer:
        """Return the answer of a Flower node with the bytes of its messages."""
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
        """Start again from the shortest wait for Flower: there was a reply."""
        self._since = time.monotonic()

    def wait(self) -> None:
        """Wait a little for replies over Flower."""
        waited = time.monotonic() - self._since
        time.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, waited / 10)))


def _check_identity(letter: Letter, task_id: str) -> None:
    """Refuse the answer to another task, such as an old answer that is sent again."""
    answered = letter.note.get("answers")
    if answered is None:
        raise WireError("it does not name the task that it answers; it cannot be read.")
    if answered != task_id:
        raise UnexpectedReport("duplicate", "the answer to a different task.")


def _read(run: Run, task: Task, expected: ExpectedReport, letter: Letter) -> Answer | ResendRequest:
    """Read the report in a letter, with the client's multiply-accumulates."""
    codec = run.method.codec
    own = name_codec(codec)
    if letter.codec != own:
        raise WireError(f"it is written with {shown(letter.codec)}, and the run's codec is {own}.")
    masks: dict[str, KnownMask | None] = find_masks_known_to_server(
        task, task.send, codec, run.known_state.digest
    )
    answer = read_answer(letter.data, codec, expected, masks)
    if isinstance(answer, ResendRequest):
        if answer.of != task.to:
            sentence = f"a request of client {answer.of}."
            raise UnexpectedReport("client", sentence)
        return answer
    macs = letter.note.get("macs", 0)
    is_count = type(macs) is int and macs >= 0
    return replace(answer, macs=int(macs) if is_count else 0)


def _read_loss(task: Task, letter: Letter) -> Lost:
    """Read why a client has no report."""
    reason = str(letter.note["lost"])
    sentence = clean_text(str(letter.note.get("detail", "")))
    return Lost(task.to, reason if reason in LOST_REASONS else "crashed", sentence)


def lose_by_error(
    task: Task, error: Any, timeout: float | None = None, waited: float = 0.0
) -> Lost:
    """Return the loss for an error of Flower: too late, the node cannot be reached, or its app
    failed.

    Args:
        task: The task.
        error: Flower's error.
        timeout: Seconds after which Flower drops the task; None: never.
        waited: Seconds since the task was sent.
    """
    # Flower has one code for a message that expired and for one whose node was removed. Its clock
    # and this one differ a little.
    has_expired = timeout is not None and waited >= timeout - EARLY
    if error.code == NO_REPLY or (error.code == NO_MESSAGE and has_expired):
        if timeout is not None:
            return lose_late(task, timeout)
        return Lost(task.to, "late", f"the answer of client {task.to} came too late for Flower.")
    text = clean_text(str(error.reason or "no reason given"), LONGEST_REASON).rstrip(".")
    if error.code in GONE:
        return Lost(task.to, "died", f"the node of client {task.to} cannot be reached: {text}.")
    return Lost(task.to, "crashed", f"the app of client {task.to} failed: {text}.")


# ---- the Grid ------------------------------------------------------------------------------------


def push(grid: Any, message: Any) -> str | None:
    """Push a message to Flower's Grid; return its id, or None if it was not accepted.

    One at a time, because a Grid does not always report which of several it did not accept.
    """
    try:
        pushed = list(grid.push_messages([message]))
    except Exception as error:
        if was_refused(error):
            # The SuperLink answers; it is this message that it does not take.
            return None
        raise unreachable(error) from error
    # A message that is too large gives an empty list, a malformed one gives None.
    return pushed[0] if pushed else None


def list_nodes(grid: Any) -> dict[int, bytes]:
    """Return the public key of each node that is connected to Flower's Grid."""
    try:
        return {info.node_id: bytes(info.public_key) for info in grid.get_nodes()}
    except Exception as error:
        raise unreachable(error) from error


def ask(
    grid: Any,
    questions: Mapping[int, Head],
    timeout: float | None = None,
    check: Callable[[], None] = nothing,
) -> dict[int, Head]:
    """Ask Flower nodes at the same time and wait for their answers.

    Args:
        grid: Flower's Grid.
        questions: A question for each node.
        timeout: Seconds to wait; None: until all have answered.
        check: Called while waiting; raises if waiting is useless.

    Returns:
        Answers by node, without the nodes that did not answer. An answer that cannot be read, or an
        error instead of one, is ``{"refused": sentence}``.
    """
    node_of: dict[str, int] = {}
    answers: dict[int, Head] = {}
    for node, head in questions.items():
        number = push(grid, messages.make_question(head, node, timeout))
        if number is not None:
            node_of[number] = node
    started = time.monotonic()
    patience = _Patience()
    mailbox = Mailbox(grid)
    while node_of:
        replies = mailbox.pull(node_of, limit_answer)
        for number, reply in replies:
            answers[node_of.pop(number)] = _read_head(reply)
        if timeout is not None and time.monotonic() - started > timeout:
            break
        if replies:
            patience.renew()
        elif node_of:
            check()
            patience.wait()
    mailbox.close()
    return answers


def limit_answer(number: str) -> Limits:
    """Return the limits of the answer to a question."""
    return Limits(messages.MAX_QUESTION)


def read_answer_head(reply: Any) -> Head | None:
    """Read the answer to a question over Flower; None: the node has not answered."""
    if isinstance(reply, Exception):
        return _read_head(reply)
    if reply.has_error() and reply.error.code in GONE:
        return None
    return _read_head(reply)


def _read_head(reply: Any) -> Head:
    if isinstance(reply, Exception):
        return {"refused": str(reply)}
    if reply.has_error():
        return {"refused": clean_text(str(reply.error.reason or "no reason"), LONGEST_REASON)}
    try:
        return messages.read_head(reply)
    except Exception as error:
        # Bytes from outside: an error in them concerns this node only.
        return {"refused": explain_error(error)}
