"""Runs in lockstep: several loops, one ``engine.map`` per exchange. A run alone is a lockstep of one.

Reports come in job order, so the reports of one run lie side by side in the stream: each loop is sent an iterator
over its own part. An engine may stack the clients of all runs, or spread them over cores; no result depends on it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any


from .. import methods
from ..core import Engine, Report, Task
from ..errors import FedgroveError
from .folder import RunFolder
from ..wire.ledger import Ledger, spread
from .rounds import Exchange, Run, evaluation, rounds
from ..trees import Mask

Watch = Callable[[Mapping[str, Any]], None]
"""Called with each line of metrics.jsonl as it is written."""

FAILURES = (FedgroveError, OSError)
"""What ends one run and leaves the others alone; anything else is a mistake in the code and ends all."""


@dataclass(eq=False)
class Member:
    """A run on its way: its folder, its loop, and how it ended, by ``summary`` or by ``error``."""

    run: Run
    folder: RunFolder
    every: int = 1
    """Score all clients every so many rounds; 0: only at the end."""
    watch: Watch = lambda line: None
    name: str = ""
    summary: dict[str, Any] | None = None
    error: FedgroveError | OSError | None = None
    exchange: Exchange = field(init=False)
    line: dict[str, Any] = field(default_factory=dict, init=False)
    _loop: Generator[Exchange, Iterable[Report], None] = field(init=False)
    _kept: tuple[dict[int, str], dict[tuple[int, str], Mask]] = field(default=({}, {}), init=False)

    def begin(self) -> None:
        """Go on from the folder's last checkpoint."""
        self._open(self.folder.restore(self.run))

    def _open(self, state: Any) -> None:
        self._loop = rounds(self.run, state)
        self.exchange = next(self._loop)

    def keep(self) -> None:
        """Note what clients remember and hold before a map, for :meth:`back`."""
        self._kept = dict(self.run.memory.files), dict(self.run.held.masks)

    def back(self) -> None:
        """Undo what a broken map did: versions that nobody names do not count."""
        self.run.memory.files, self.run.held.masks = self._kept
        self._open(self.exchange.state)

    def fold(self, reports: Iterable[Report]) -> None:
        """Send the loop its reports, and begin the line of metrics that tells of them."""
        ledger, before = Ledger(), self.exchange.state.round
        self.exchange = self._loop.send(ledger.tally(reports))
        after = self.exchange.state.round
        self.line = {"round": after, "counts": after > before, **ledger.totals()}
        if self.exchange.refused:
            self.line["refused"] = list(self.exchange.refused)

    @property
    def due(self) -> bool:
        """Whether all clients are to be scored after this exchange."""
        r, every = self.line["round"], self.every
        return bool(every and self.line["counts"] and (r % every == 0 or r == self.run.rounds))

    def score(self, reports: Iterable[Report]) -> None:
        """Add the clients' scores to the line."""
        self.line |= scores(reports)

    def commit(self, seconds: float) -> None:
        """Write the line and the checkpoint."""
        self.line["seconds"] = round(seconds, 4)
        self.folder.log(self.line)
        self.folder.save(self.run, self.exchange.state)
        self.watch(self.line)

    def finish(self, figures: dict[str, Any], seconds: float) -> None:
        """Write models and summary."""
        self.folder.save_models(self.run, self.exchange.state)
        spent = sum(line["seconds"] for line in self.folder.metrics()) + seconds
        summary = {**figures, "seconds": round(spent, 3)}
        self.folder.finish(summary)
        self.summary = summary

    def attempt(self, step: Callable[..., None], *given: Any) -> None:
        """Take a step; if it fails, this run is over."""
        try:
            step(*given)
        except FAILURES as error:
            self.error = error


def together(members: Sequence[Member], engine: Engine) -> Iterator[Member]:
    """Take all members to their ends, each exchange of all of them as one map; yields each as it ends.

    One that fails is left behind with its ``error``. The seconds of a map are shared evenly among its members.
    """
    going = list(members)
    for member in going:
        member.attempt(member.begin)
    while True:
        yield from (member for member in going if member.error)
        going = _alive(going)
        at_work = [member for member in going if member.exchange.tasks]
        if not at_work:
            break
        _advance(at_work, engine)
    if going:
        _conclude(going, engine)
        yield from going


def _alive(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.error is None]


def _advance(members: Sequence[Member], engine: Engine) -> None:
    """One exchange, the scores where they are due, and the checkpoints."""
    began = time.perf_counter()
    share(engine, members, lambda m: m.exchange.tasks, Member.fold)
    if due := [member for member in _alive(members) if member.due]:
        share(engine, due, lambda m: evaluation(m.run, m.exchange.state), Member.score)
    seconds = (time.perf_counter() - began) / len(members)
    for member in _alive(members):
        member.attempt(member.commit, seconds)


def _conclude(members: Sequence[Member], engine: Engine) -> None:
    """Fine-tune, score every client with its own model, and write the results."""
    began, found = time.perf_counter(), {}

    def take(member: Member, reports: Iterable[Report]) -> None:
        found[member] = summarise(member.run, member.folder, engine.name, member.exchange.state, reports)

    share(engine, members, lambda m: evaluation(m.run, m.exchange.state, "finetune"), take)
    seconds = (time.perf_counter() - began) / len(members)
    for member in _alive(members):
        member.attempt(member.finish, found[member], seconds)


# ---- one map for many ----------------------------------------------------------------------------------------------


class _Stream:
    """A map's reports, one part after another; remembers whether it was the map that failed."""

    def __init__(self, pairs: Iterator[tuple[Run, Report]]) -> None:
        self._pairs = pairs
        self.broken: FedgroveError | OSError | None = None

    def part(self, n: int | None) -> Iterator[Report]:
        """The next ``n`` reports, or all that are left."""
        try:
            for _, report in islice(self._pairs, n):
                yield report
        except FAILURES as error:
            self.broken = error
            raise

    def drain(self, part: Iterator[Report]) -> None:
        """Let the rest of a part go by, so that the next one begins where it should."""
        try:
            deque(part, maxlen=0)
        except FAILURES as error:
            self.broken = error


Take = Callable[[Member, Iterator[Report]], None]


def share(engine: Engine, members: Sequence[Member], ask: Callable[[Member], list[Task]], take: Take) -> None:
    """One map over what all members ask; ``take`` gets each member's own reports, as they come.

    A member whose ``take`` fails is left with its error. Where the map itself breaks, nobody knows whose job it was:
    the members that had not got all their reports try again, one by one, and only the one at fault fails.
    """
    asked: dict[Member, list[Task]] = {}

    def note(member: Member) -> None:
        asked[member] = ask(member)

    for member in members:
        member.keep()
        member.attempt(note, member)
    stream = _Stream(engine.map((member.run, task) for member, tasks in asked.items() for task in tasks))
    left = deque(asked.items())
    while left and not stream.broken:
        member, tasks = left[0]
        part = stream.part(len(tasks))
        try:
            take(member, part)
        except FAILURES as error:
            if stream.broken and len(asked) > 1:
                break
            member.error = error
        left.popleft()
        stream.drain(part)
    if not left:
        stream.drain(stream.part(None))  # to its very end, so that the engine keeps what it has for the next map
    for member, _ in left:
        member.attempt(member.back)
        if member.error is None:
            share(engine, [member], ask, take)


# ---- figures -------------------------------------------------------------------------------------------------------


def scores(reports: Iterable[Report]) -> dict[str, Any]:
    """What a line of metrics says of an evaluation."""
    ledger = Ledger()
    found = list(ledger.tally(reports))
    return {
        **spread(_each(found, "test0")),
        "validation_mean": spread(_each(found, "validation0"))["accuracy_mean"],
        "loss_mean": round(sum(_each(found, "test_loss0")) / len(found), 8),
        "density": round(sum(_each(found, "density")) / len(found), 8),
        **{k: v for k, v in ledger.totals("bytes_evaluate").items() if not k.endswith("parts")},
    }


def _each(reports: list[Report], metric: str) -> list[float]:
    return [report.metrics[metric] for report in reports]


def summarise(run: Run, folder: RunFolder, engine: str, state: Any, tuned: Iterable[Report]) -> dict[str, Any]:
    """The figures of a finished run, all but its seconds; ``tuned`` are the reports of the final fine-tuning."""
    delivery, total, lines = Ledger(), Ledger(), folder.metrics()
    reports = list(delivery.tally(tuned))
    for line in lines:
        total.add({"up": line["bytes_up_parts"], "down": line["bytes_down_parts"]})
    last, sizes = run.finetune[-1], group_sizes(run, state)
    lengths = {str(n): spread(_each(reports, f"test{n}")) for n in run.finetune}
    return {
        "method": methods.name_of(run.method),
        "data": run.federation.name,
        "partition": run.federation.partition,
        "scenario": run.federation.scenario,
        "split": run.federation.split,
        "engine": engine,
        "seed": run.seed,
        "rounds": run.rounds,
        "clients": len(run.infos),
        "cohort": run.cohort,
        "groups": len(sizes),
        "group_sizes": sizes,
        **lengths[str(last)],
        "validation_mean": spread(_each(reports, f"validation{last}"))["accuracy_mean"],
        "finetune": lengths,
        "density": round(sum(_each(reports, "density")) / len(reports), 8),
        "params": run.net.layout.size,
        "params_mean": sum(_each(reports, "params")) / len(reports),
        "macs": run.net.layout.macs,
        **total.totals(),
        "bytes_paper": run.method.paper_bytes(run.net.layout, len(run.infos), run.cohort, run.rounds),
        "bytes_evaluate_up": sum(line.get("bytes_evaluate_up", 0) for line in lines),
        "bytes_evaluate_down": sum(line.get("bytes_evaluate_down", 0) for line in lines),
        **{k: v for k, v in delivery.totals("bytes_deliver").items() if not k.endswith("parts")},
        "refused": sum(len(line.get("refused", [])) for line in lines),
        "accuracy_clients": {str(r.of): round(r.metrics[f"test{last}"], 8) for r in reports},
        "notes": [*run.federation.notes, *_lonely(run, sizes)],
    }


def group_sizes(run: Run, state: Any) -> list[int]:
    """How many clients share each model, the largest group first.

    A method whose state says who is in which group is believed; else those who are handed the same model are a group,
    and clients who only use their own are one each.
    """
    groups: Mapping[int, int] | None = getattr(state, "groups", None)
    if groups:
        return sorted(Counter(groups.values()).values(), reverse=True)
    delivered = {k: run.method.deliver(state, k).get("model") for k in run.infos}
    labels = [k if packet is None else -id(packet.values) for k, packet in delivered.items()]
    return sorted(Counter(labels).values(), reverse=True)


def _lonely(run: Run, sizes: Sequence[int]) -> list[str]:
    """A warning where a grouping left clients on their own."""
    alone = sum(n == 1 for n in sizes)
    if not alone or not hasattr(run.method, "clusters") or len(sizes) == len(run.infos):
        return []
    said = "a group has" if alone == 1 else f"{alone} groups have"
    return [f"{said} one client only: fewer clusters, or a warm-up before they are formed, may give more even ones"]
