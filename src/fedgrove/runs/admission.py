"""One exchange's answers: which may be folded, and why the others may not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core import SCORING_VERBS, Answer, Lost, Report, Task
from ..errors import FedgroveError
from .gate import FEW, Lengths, RecentLengths, Refusal, Ruler, malformed
from .store import version_of

if TYPE_CHECKING:
    from .run import Run


class TooFewReports(FedgroveError):
    """An exchange in which fewer clients reported than the quorum; it is abandoned."""


@dataclass(frozen=True)
class Tally:
    """Clients whose answers were not folded, by the word that says why."""

    lost: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, list[int]] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)
    """The first sentence of each word."""

    def lose(self, client: int, lost: Lost) -> None:
        """Count a task that got no usable reply."""
        self.lost.setdefault(lost.reason, []).append(client)
        self.sentences.setdefault(lost.reason, lost.detail)

    def refuse(self, client: int, refusal: Refusal) -> None:
        """Count a report that was refused."""
        self.refused.setdefault(refusal.reason, []).append(client)
        self.sentences.setdefault(refusal.reason, refusal.sentence)

    def line(self) -> dict[str, Any]:
        """What a line of metrics.jsonl says of it; nothing if all went well."""
        parts: dict[str, Any] = {}
        if self.lost:
            parts["lost"] = dict(sorted(self.lost.items()))
        if self.refused:
            parts["refused"] = dict(sorted(self.refused.items()))
        if self.sentences:
            parts["why"] = dict(sorted(self.sentences.items()))
        return parts


def unanswered(task: Task) -> Lost:
    """The engine passed a task over."""
    return Lost(task.to, "unanswered", f"the engine gave no answer for client {task.to}.")


class Admission:
    """The answers to one exchange's tasks, on their way to the method's ``fold``.

    State and memory do not change before :meth:`settle`: an exchange that is abandoned leaves them
    as they were. What clients are taken to hold follows what was really sent, and is unknown for
    those who were lost.
    """

    def __init__(self, run: Run, tasks: Sequence[Task], quorum: float = 0.0) -> None:
        self.tally = Tally()
        self._run = run
        self._unanswered = {id(task): task for task in tasks}
        self._asked = len(tasks)
        # 0.28 of 25 tasks is 7, though the product is a little more.
        self._needed = max(1, math.ceil(quorum * len(tasks) - 1e-9))
        self._admitted: list[tuple[Task, str | None, Lengths]] = []
        self._lost: list[Task] = []
        self._recent = RecentLengths(run.lengths.by_kind)
        self._ruler = Ruler()

    def reports(self, answers: Iterable[tuple[Task, Answer]]) -> Iterator[Report]:
        """The reports that may be folded, in task order.

        Raises :class:`TooFewReports` at the end if they are fewer than the quorum.
        """
        waiting: list[tuple[Task, Report, Lengths]] = []
        for task, answer in answers:
            report = self._admit(task, answer)
            if report is None:
                continue
            try:
                lengths = self._run.gate.lengths(report, task, self._ruler)
            except Exception as error:
                self.tally.refuse(task.to, malformed(task, error))
                continue
            waiting.append((task, report, lengths))
            # The first reports of their kind wait for each other, since only together do they say
            # what is usual. All later ones pass one by one.
            all_known = all(self._recent.knows(task, lengths) for task, _, lengths in waiting)
            if all_known or len(waiting) == FEW:
                yield from self._release(waiting)
        yield from self._release(waiting)
        for task in list(self._unanswered.values()):
            self._admit(task, unanswered(task))
        self._forget_what_lost_clients_hold()
        if len(self._admitted) < self._needed:
            raise TooFewReports(self._what_is_missing())

    def _admit(self, task: Task, answer: Answer) -> Report | None:
        """The report in an answer, if it is what was asked for; otherwise it is counted."""
        if isinstance(answer, Lost):
            # An error that follows the answer says nothing new.
            if id(task) in self._unanswered:
                del self._unanswered[id(task)]
                self._lost.append(task)
                self.tally.lose(task.to, answer)
            return None
        refusal = None
        if id(task) not in self._unanswered:
            refusal = Refusal("duplicate", f"client {task.to} answered a task again.")
        else:
            del self._unanswered[id(task)]
            expected = self._run.expected(task)
            info = self._run.federation.info(task.to, task.round)
            refusal = self._run.gate.refuses(answer, task, expected, info, self._ruler)
            if refusal is None:
                refusal = self._refuses_memory(task, answer.memory)
        if refusal is not None:
            self.tally.refuse(task.to, refusal)
            return None
        return answer

    def _release(self, waiting: list[tuple[Task, Report, Lengths]]) -> Iterator[Report]:
        """Let the reports pass whose updates are not too long; ``waiting`` is emptied."""
        refused = self._too_long([(task, lengths) for task, _, lengths in waiting])
        for task, report, lengths in waiting:
            if id(task) in refused:
                self.tally.refuse(task.to, refused[id(task)])
                continue
            if not self._run.lengths.knows(task, lengths):
                self._recent.add(task, lengths)
            self._admitted.append((task, report.memory, lengths))
            yield report
        waiting.clear()

    def _refuses_memory(self, task: Task, version: str | None) -> Refusal | None:
        """Why a version of memory cannot be what this task made the client remember."""
        if version is None:
            return None
        is_this_tasks = version.startswith(version_of(task.round, task.verb, ""))
        if is_this_tasks and self._run.memory.has(task.to, version):
            return None
        sentence = f"client {task.to} names {version!r} as what it remembers, which is not there."
        return Refusal("memory", sentence)

    def _too_long(self, waiting: list[tuple[Task, Lengths]]) -> dict[int, Refusal]:
        """The updates that are too long, by task.

        Without those, what is usual is another length, and more may be too long: until none is.
        """
        refused: dict[int, Refusal] = {}
        while True:
            left = [(task, lengths) for task, lengths in waiting if id(task) not in refused]
            usual = self._recent.usual(left)
            before = len(refused)
            for task, lengths in left:
                refusal = self._run.gate.refuses_lengths(task, lengths, usual)
                if refusal is not None:
                    refused[id(task)] = refusal
            if len(refused) == before:
                return refused

    def _forget_what_lost_clients_hold(self) -> None:
        """Nobody knows whether their tasks arrived.

        Once all tasks are sent, so that it does not depend on when an engine hears of a loss.
        Scoring leaves no trace.
        """
        for task in self._lost:
            if task.verb not in SCORING_VERBS:
                self._run.known_state.forget(task.to)

    def _what_is_missing(self) -> str:
        reasons = " ".join(self.tally.sentences.values())
        advice = ""
        if "late" in self.tally.lost:
            longer = "--timeout" if self._run.deadline is None else "--deadline or --timeout"
            advice = f" A longer {longer} may help."
        return (
            f"{len(self._admitted)} of {self._asked} clients sent a usable report, and the quorum "
            f"is {self._needed}: {reasons}{advice}"
        )

    def settle(self) -> None:
        """Accept what the admitted clients remember, and remember how long their updates were."""
        for task, memory, lengths in self._admitted:
            self._run.memory.accept(task.to, memory)
            self._run.lengths.add(task, lengths)
