"""A run seen from outside, while another process trains it: files are read and never written.

The process that trains has the lock of the folder until it ends, by whatever means. So a run that
is not locked and has no summary was stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import DamageError, InputError, not_a_run
from ..report.progress import RunStatus, describe_score, describe_scores
from ..report.tables import Scores, name_old_scores
from .files import SEAL, decode_text, parse_json, read_bytes, read_run_options
from .lock import is_locked
from .schemas import Headline, MetricsLine, SweepContent, check_content

SWEEP = "sweep.json"
RECENT_ROUNDS = 10
"""The time left is estimated from this number of last rounds."""
SILENCE = 3.0
"""Seconds without a lock and without anything written, after which a run counts as stopped.

There is a moment before a new run locks its folder, and there are file systems without locks."""
COMPARED = 4096
"""This number of the last bytes read must still be there, or all is read again."""
MIB = 1 << 20


Take = Callable[[str, Mapping[str, Any]], None]
"""Called with the path of a run and each line of its metrics.jsonl."""


def ignore(path: str, line: Mapping[str, Any]) -> None:
    """Take no line of the run that is followed."""


class Follower:
    """Reads what is new in a run folder, at each call of :meth:`read_status`."""

    def __init__(self, path: Path, take: Take = ignore) -> None:
        config = path / "config.toml"
        if not config.is_file():
            raise not_a_run(path)
        self.path = path
        self._hand_on = take
        options = read_run_options(decode_text(read_bytes(config), config), config)
        rounds = options.get("rounds")
        self._rounds = rounds if isinstance(rounds, int) else 0
        self._method = str(options.get("method", ""))
        self._data = str(options.get("data", ""))
        self._begin()

    def _begin(self) -> None:
        """Forget the lines of a followed run's metrics.jsonl that were read."""
        self._offset = 0
        self._end = b""
        # Not all lines: a run may have a hundred thousand.
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_ROUNDS + 1)
        self._bytes = 0
        self._spent = 0.0
        self._round = 0
        self._score = ""
        self._scores: list[tuple[int, float]] = []
        self._traffic: list[tuple[int, float]] = []

    def read_status(
        self, member: Mapping[str, str] | None = None, sweep: Path | None = None
    ) -> RunStatus:
        """Return how the followed run stands now; ``member`` is its state in a sweep."""
        # In this order: who is about to finish writes the summary and then frees the lock.
        is_trained = is_locked(self.path) or (sweep is not None and is_locked(sweep))
        self._read()
        summary = self._summary()
        why = ""
        score = self._score
        if summary is not None:
            state = "finished"
            score = describe_score(summary) or score
            why = describe_scores(summary)
        elif member is not None and member.get("state") == "failed":
            state = "failed"
            why = str(member.get("why", ""))
        elif not is_trained and self._is_silent():
            state = "stopped"
        elif not self._round:
            state = "waiting"
        elif self._round >= self._rounds:
            state = "scoring"
        else:
            state = "training"
        return RunStatus(
            path=str(self.path),
            method=self._method,
            data=self._data,
            state=state,
            round=self._round,
            rounds=self._rounds,
            bytes=self._bytes,
            score=score,
            spent=self._spent,
            left=self._left(),
            why=why,
            scores=tuple(self._scores),
            traffic=tuple(self._traffic),
        )

    def _read(self) -> None:
        """Take in the lines that were added since the last time."""
        file = self.path / "metrics.jsonl"
        try:
            with file.open("rb") as stream:
                stream.seek(self._offset - len(self._end))
                if stream.read(len(self._end)) != self._end:
                    # A run that was resumed cuts off the rounds that did not count.
                    self._begin()
                stream.seek(self._offset)
                new = stream.read()
        except OSError:
            # Not there yet.
            return
        # The last line may be half-written.
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._end = (self._end + whole)[-COMPARED:]
        for text in whole.splitlines():
            try:
                self._take(check_content(parse_json(text, file), MetricsLine, file))
            except (DamageError, KeyError):
                # A damaged line is for `resume` to refuse; here it is left out.
                continue

    def _take(self, line: dict[str, Any]) -> None:
        self._round = line["round"]
        self._bytes += line["bytes_up"] + line["bytes_down"]
        seconds = line.get("seconds", 0.0)
        self._spent += seconds
        self._recent.append((self._round, seconds))
        self._score = describe_score(line) or self._score
        self._traffic.append((self._round, self._bytes / MIB))
        mean = Scores.from_summary(line).mean
        if mean is not None:
            self._scores.append((self._round, float(mean)))
        self._hand_on(str(self.path), line)

    def _left(self) -> float | None:
        recent = list(self._recent)
        before = recent.pop(0)[0] if len(recent) > RECENT_ROUNDS else 0
        # An exchange that is no round takes its time too, so rounds are counted, not lines.
        done = self._round - before
        if done <= 0:
            return None
        seconds = sum(spent for _, spent in recent)
        return seconds / done * max(0, self._rounds - self._round)

    def _summary(self) -> dict[str, Any] | None:
        """Return the summary of a followed run, if it is finished."""
        file = self.path / "summary.json"
        try:
            summary: dict[str, Any] = parse_json(read_bytes(file), file)
            return name_old_scores(check_content(summary, Headline, file))
        except DamageError:
            return None

    def _is_silent(self) -> bool:
        files = [self.path, *self.path.glob("*")]
        times = []
        for file in files:
            try:
                times.append(file.stat().st_mtime)
            except OSError:
                continue
        return time.time() - max(times, default=0.0) > SILENCE


class Following:
    """A run or a sweep: one :class:`Follower` for each run."""

    def __init__(self, path: Path, take: Take = ignore) -> None:
        self.path = path
        self._take = take
        self._followers: dict[str, Follower] = {}
        if not (path / SWEEP).is_file():
            self._followers[""] = Follower(path, take)

    def read_statuses(self) -> list[RunStatus]:
        """Return how every followed run stands now."""
        if "" in self._followers:
            return [self._followers[""].read_status()]
        found = []
        for name, member in self._members().items():
            if name not in self._followers:
                try:
                    self._followers[name] = Follower(self.path / name, self._take)
                except InputError:
                    # Its folder is not made yet.
                    continue
            found.append(self._followers[name].read_status(member, self.path))
        return found

    def _members(self) -> dict[str, dict[str, str]]:
        file = self.path / SWEEP
        try:
            content: dict[str, Any] = parse_json(read_bytes(file), file)
            content.pop(SEAL, None)
            members: dict[str, dict[str, str]] = content["members"]
            check_content(content, SweepContent, file)
        except (AttributeError, DamageError, KeyError, TypeError):
            return {}
        return members
