"""Which node has which client: enrols nodes, lets them join a run, and notes which nodes have left.

Nothing here waits for one node. Questions are sent, and answers are read when they have arrived:
before each exchange, and while the engine waits for reports. A node that does not answer is queried
again after a pause that grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .. import __version__
from ..core import Answer, Lost
from ..data import Federation
from ..engines.flower import messages
from ..engines.flower.engine import (
    LONGEST_REASON,
    explain_absence,
    limit_answer,
    list_nodes,
    push,
    read_answer_head,
)
from ..engines.flower.mailbox import Mailbox
from ..engines.flower.messages import Head
from ..errors import EngineError, FedgroveError, InputError, clean_text
from ..runs.run import Run
from . import enrolment
from .enrolment import LOG, TIMES_USUAL, EnrolledClient
from .keys import DeclaredKey

ANSWER = 120.0
"""Seconds that a node may take to answer a question: it reads its data for that."""
AGAIN = 60.0
"""Seconds after which a node that was refused, or did not answer, is queried again."""
LONGEST_PAUSE = 3600.0
"""The longest pause before a silent node is queried again; pauses double until then."""
NOTICE = 10.0
"""Seconds that a run which cannot begin waits until refused nodes have received the reason."""
POLL = 0.2
"""Seconds between two looks at what has arrived, before the run."""
POLL_DURING_RUN = 1.0
"""Seconds between two looks while the engine waits for reports."""


@dataclass(frozen=True)
class _Question:
    """A question to a node that has not been answered."""

    node: int
    asks: str
    since: float
    clock: float
    """The server's clock, in seconds since 1970."""


class Roster:
    """Which node has which client, and what is known about it.

    Args:
        grid: Flower's Grid.
        clients: The number of clients of the run.
        quorum: With this many the run may start, after ``grace`` seconds; None: all.
        grace: Seconds to wait for all clients.
        most_examples: How many times the median number of examples a client may report.
        keys: Which clients each public key may be; None: any.
    """

    def __init__(
        self,
        grid: Any,
        clients: int,
        quorum: int | None = None,
        grace: float = 0.0,
        most_examples: float = TIMES_USUAL,
        keys: Mapping[bytes, DeclaredKey] | None = None,
    ) -> None:
        self.name = ""
        self.refused: dict[int, str] = {}
        """Why nodes were refused, by their numbers."""
        self.grid = grid
        self._mailbox = Mailbox(grid)
        self._clients = clients
        self._quorum = clients if quorum is None else quorum
        self._grace = grace
        self._most_examples = most_examples
        self._keys = keys
        # By node: who has enrolled, by its answer, and who has joined the run.
        self._known: dict[int, EnrolledClient] = {}
        self._joined: set[int] = set()
        self._node_of: dict[int, int] = {}
        # By client: why its node was refused.
        self._why: dict[int, str] = {}
        self._public_keys: dict[int, bytes] = {}
        self._open: dict[str, _Question] = {}
        self._asked: set[int] = set()
        self._ask_at: dict[int, float] = {}
        self._silent: dict[int, int] = {}
        self._late: dict[int, int] = {}
        self._suspects: set[int] = set()
        self._polled_at = 0.0
        self._wait = 0.0
        self._kind = ""
        self._usual = 0
        self._federation: Federation | None = None
        self._absent: set[int] = set()
        self._config = ""
        self._half: Head = {}

    # ---- before the run --------------------------------------------------------------------------

    def enrol(self, wait: float) -> Federation:
        """Wait until the clients have enrolled, or after the grace period a quorum of them.

        Returns:
            Their federation, without examples.

        Raises:
            EngineError: There are fewer after ``wait`` seconds.
        """
        self._wait = wait
        started = time.monotonic()
        while True:
            self.poll()
            waited = time.monotonic() - started
            if self._has_enough(waited):
                # Not earlier: the first few nodes may be the odd ones.
                self._sort_out()
                if self._has_enough(waited):
                    break
            if waited > wait:
                raise self._fail(self._too_few(self._needed(waited), wait))
            # Flower has no event for a new node, so it is polled.
            time.sleep(POLL)
        by_partition = {p: self._known[node] for p, node in self._node_of.items()}
        self._absent = self._find_absent()
        notes = sorted(set(self.refused.values()))
        if self._absent:
            named = ", ".join(map(str, sorted(self._absent)))
            notes.append(f"the run began without clients {named}, which had not enrolled")
            LOG.warning("%s", notes[-1])
        self._federation = enrolment.make_federation(
            by_partition, self._kind, self._absent, notes[-enrolment.MOST_NOTES :]
        )
        return self._federation

    def _needed(self, waited: float) -> int:
        return self._clients if waited < self._grace else self._quorum

    def _has_enough(self, waited: float) -> bool:
        return len(self._node_of) >= self._needed(waited)

    def _sort_out(self) -> None:
        """Refuse nodes whose data, or numbers of examples, differ much from those of most."""
        self._kind = enrolment.find_usual_kind(self._known)
        # A copy: a refused node is removed from the dictionary.
        for node in list(self._known):
            self._try(node, self._check_kind)
        self._usual = enrolment.find_usual_examples(self._known)
        for node in list(self._known):
            self._try(node, self._check_examples)

    def _find_absent(self) -> set[int]:
        """Return the partitions of clients of the run that have not enrolled."""
        free = (k for k in range(self._clients) if k not in self._node_of)
        return set(islice(free, max(0, self._clients - len(self._node_of))))

    def join(self, run: Run, config: str) -> None:
        """Let every enrolled node build its side of the run, and wait until they have answered.

        Raises:
            EngineError: Fewer nodes than the quorum have built it.
        """
        self._config = enrolment.config_for_nodes(config)
        self.name = enrolment.name_run(self._config)
        self._half = enrolment.describe_built_run(run, config)
        started = time.monotonic()
        for node in list(self._known):
            self._ask_to_join(node)
        while True:
            self.poll()
            waited = time.monotonic() - started
            is_enough = len(self._joined) >= self._needed(waited)
            if is_enough or not self._asks_any("join"):
                break
            time.sleep(POLL)
        if len(self._joined) < self._quorum:
            raise self._fail(self._too_few(self._quorum))

    def close(self) -> None:
        """Stop reading answers, so that the server can end."""
        self._mailbox.close()

    def _fail(self, sentence: str) -> EngineError:
        """Return the error that ends the run, once refused nodes have been given the reason."""
        end = time.monotonic() + NOTICE
        while self._asks_any("refused") and time.monotonic() < end:
            if not self._read_answers():
                time.sleep(POLL)
        return EngineError(sentence)

    def _too_few(self, needed: int, wait: float | None = None) -> str:
        waited = "" if wait is None else f" within {wait:g} s"
        takes_part = self._joined if self._config else self._node_of
        sentence = f"{len(takes_part)} of {needed} clients take part{waited}."
        if self.refused:
            return f"{sentence} Refused: {' '.join(sorted(set(self.refused.values())))}"
        return f"{sentence} Start the other nodes, or set fewer clients."

    # ---- during the run --------------------------------------------------------------------------

    def nodes(self) -> Mapping[int, int]:
        """Return the node of each client that takes part now.

        Nobody is waited for, unless there is nobody: then for as long as at the start.
        """
        end = time.monotonic() + self._wait
        self.poll()
        while not self._joined and time.monotonic() < end:
            time.sleep(POLL)
            self.poll()
        return {p: node for p, node in self._node_of.items() if node in self._joined}

    def explain_absence(self, client: int) -> str:
        """Return why a client has no node."""
        return self._why.get(client) or explain_absence(client)

    def note_answer(self, node: int, answer: Answer) -> None:
        """Note whether a node did its task; one that did not is asked to join again.

        Other losses, such as a refused report, show that the node is there.
        """
        if isinstance(answer, Lost) and answer.reason in ("died", "late", "unsent"):
            self._suspects.add(node)
            self._late[node] = self._late.get(node, 0) + 1
        else:
            self._late.pop(node, None)

    def poll_while_waiting(self) -> None:
        """Read answers while the engine waits for reports, at most once a second."""
        if time.monotonic() - self._polled_at >= POLL_DURING_RUN:
            self.poll()

    def poll(self) -> None:
        """Ask all nodes that must be asked, and read the answers that have arrived."""
        self._polled_at = time.monotonic()
        present = list_nodes(self.grid)
        self._public_keys = present
        for node in list(self._silent):
            if node not in present:
                # It has left. When it comes back it is asked at once.
                del self._silent[node]
                self._ask_at.pop(node, None)
        # A copy: nodes are removed on the way.
        for node in list(self._known):
            # A restarted node may have lost its folder, so a suspect has to join again.
            if node not in present or node in self._suspects:
                self._remove(node)
                self._ask_at[node] = self._polled_at + self._pause_after_late(node)
        self._suspects.clear()
        self._greet(present)
        # An answer may lead to the next question, which may have an answer already.
        while self._open and self._read_answers():
            pass

    def _pause_after_late(self, node: int) -> float:
        """Return the seconds until a node that did not do its task is asked to join again."""
        again = self._late.get(node, 0) - 1
        if again < 1:
            # The first time it is asked at once.
            return 0.0
        return _grow(again)

    def _remove(self, node: int) -> None:
        """Take a node off the roster; its client may come back with this node or another one."""
        self._joined.discard(node)
        known = self._known.pop(node, None)
        if known is not None and self._node_of.get(known.partition) == node:
            del self._node_of[known.partition]

    # ---- asking ----------------------------------------------------------------------------------

    def _greet(self, present: Mapping[int, bytes]) -> None:
        """Ask nodes who they are: new ones, and after a pause refused or silent ones."""
        question = {"ask": "who", "version": __version__}
        # Sorted, so that of two nodes with one client the same one is refused each time.
        for node in sorted(present):
            is_due = self._polled_at >= self._ask_at.get(node, 0.0)
            if is_due and node not in self._known and node not in self._asked:
                self._ask(node, question)

    def _ask_to_join(self, node: int) -> None:
        self._ask(node, {"ask": "join", "version": __version__, "config": self._config})

    def _ask(self, node: int, head: Head) -> None:
        """Send a question; its answer is read when it has arrived."""
        number = push(self.grid, messages.make_question(head, node, ANSWER))
        if number is None:
            self._note_silence(node)
            return
        self._asked.add(node)
        self._open[number] = _Question(node, head["ask"], time.monotonic(), time.time())

    def _asks_any(self, asks: str) -> bool:
        return any(question.asks == asks for question in self._open.values())

    def _read_answers(self) -> bool:
        """Read the answers that have arrived; return whether there were any."""
        replies = self._mailbox.pull(self._open, limit_answer)
        for number, reply in replies:
            question = self._open.pop(number)
            # The answer to a refusal has nothing in it.
            if question.asks != "refused":
                self._asked.discard(question.node)
                self._read_answer(question, reply)
        now = time.monotonic()
        for number, question in list(self._open.items()):
            if now - question.since > ANSWER:
                del self._open[number]
                if question.asks != "refused":
                    self._asked.discard(question.node)
                    self._note_silence(question.node)
        return bool(replies)

    def _read_answer(self, question: _Question, reply: Any) -> None:
        node = question.node
        said = read_answer_head(reply)
        if said is None:
            self._note_silence(node)
            return
        self._silent.pop(node, None)

        def read(node: int) -> None:
            if question.asks == "who":
                self._note(node, said, question)
            elif node in self._known:
                self._note_join(node, said)

        self._try(node, read)

    def _note_silence(self, node: int) -> None:
        """Note that a node did not answer; it is queried again after a pause that doubles."""
        self._silent[node] = self._silent.get(node, 0) + 1
        self._ask_at[node] = time.monotonic() + _grow(self._silent[node])
        known = self._known.get(node)
        if known is not None:
            self._why[known.partition] = (
                f"client {known.partition} enrolled, but did not report whether it takes part."
            )
            LOG.warning("%s", self._why[known.partition])
        self._remove(node)

    def _note(self, node: int, said: Head, question: _Question) -> None:
        """Read an enrolment."""
        if "refused" in said:
            sentence = clean_text(str(said["refused"]), LONGEST_REASON)
            raise InputError(f"{enrolment.name_node(said)} refused to take part: {sentence}")
        known = enrolment.read_enrolment(said)
        self._check_key(node, known.partition)
        other = self._node_of.get(known.partition)
        if other is not None and other != node:
            raise InputError(
                f"two nodes report that they are client {known.partition}; the first one takes "
                "part. Give every node a different partition-id."
            )
        if self._quorum < self._clients and known.partition >= self._clients:
            raise InputError(
                f"client {known.partition} is not a client of this app, 0 to {self._clients - 1}; "
                "give the node a different partition-id, or the app more clients."
            )
        clock = enrolment.describe_clock(known, question.clock, time.time())
        if clock:
            LOG.warning("%s", clock)
        self._known[node] = known
        self._node_of[known.partition] = node
        self.refused.pop(node, None)
        self._why.pop(known.partition, None)
        if self._config:
            self._check_same_client(node)
            self._ask_to_join(node)

    def _note_join(self, node: int, said: Head) -> None:
        """Compare a node's side of the run with the server's."""
        who = f"client {self._known[node].partition}"
        if "refused" in said:
            sentence = clean_text(str(said["refused"]), LONGEST_REASON)
            raise InputError(f"{who} refused to take part: {sentence}")
        enrolment.check_built_run(said, self._half, who)
        self._joined.add(node)

    # ---- who may take part -----------------------------------------------------------------------

    def _check_key(self, node: int, partition: int) -> None:
        if self._keys is None:
            return
        declared = self._keys.get(self._public_keys.get(node, b""))
        if declared is None:
            raise InputError(
                f"a node reports that it is client {partition}, and its public key is not in the "
                "folder that the app's keys names; put its .pub file there, and a line into "
                "partitions.toml."
            )
        if partition not in declared.partitions:
            listed = ", ".join(map(str, declared.partitions)) or "none"
            raise InputError(
                f"the node with the key {declared.name} reports that it is client {partition}, and "
                f"partitions.toml allows it {listed}; start it with a different partition-id."
            )

    def _check_kind(self, node: int) -> None:
        enrolment.check_kind(self._known[node], self._kind)

    def _check_examples(self, node: int) -> None:
        enrolment.check_examples(self._known[node], self._usual, self._most_examples)

    def _check_same_client(self, node: int) -> None:
        """Check a node that enrols during the run."""
        assert self._federation is not None
        self._check_kind(node)
        self._check_examples(node)
        known = self._known[node]
        partition = known.partition
        if partition not in self._federation.clients:
            raise InputError(
                f"client {partition} enrolled after the run had begun; it can take part in the "
                "next run."
            )
        if partition in self._absent:
            # Every part of the run looks up its clients here.
            clients: Any = self._federation.clients
            clients[partition] = enrolment.make_client(known)
            self._absent.discard(partition)
            return
        enrolled_with = self._federation.info(partition).examples
        if known.info.examples != enrolled_with:
            raise InputError(
                f"client {partition} has {known.info.examples} examples, and enrolled with "
                f"{enrolled_with}; give it the data that it started with."
            )

    def _try(self, node: int, step: Callable[[int], None]) -> None:
        """Take a step with a node; if it is refused, log the reason on both sides."""
        try:
            step(node)
        except FedgroveError as error:
            self._refuse(node, clean_text(str(error)))
        except Exception as error:
            # A node is not trusted: whatever it sends ends in a refusal of this node, not of the
            # run.
            self._refuse(node, clean_text(f"a node sent a message that cannot be used: {error!r}"))

    def _refuse(self, node: int, sentence: str) -> None:
        if self.refused.get(node) != sentence:
            # Once, and not each time that the node is asked.
            LOG.error("%s", sentence)
        self.refused[node] = sentence
        known = self._known.get(node)
        if known is not None:
            self._why[known.partition] = sentence
        self._remove(node)
        self._ask_at[node] = time.monotonic() + AGAIN
        # The node logs the reason, where its owner looks.
        head = {"ask": "refused", "why": sentence}
        number = push(self.grid, messages.make_question(head, node, ANSWER))
        if number is not None:
            self._open[number] = _Question(node, "refused", time.monotonic(), time.time())


def _grow(times: int) -> float:
    """Return a pause that doubles with each time."""
    return float(min(LONGEST_PAUSE, AGAIN * 2.0 ** min(times - 1, 20)))
