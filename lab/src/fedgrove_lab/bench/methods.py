"""Seconds per round of methods beside FedAvg's, and what each round is made of.

Rounds are those of real runs in run folders of their own: planning, training, edits, byte counts,
files of what clients remember, the gate, the fold and the checkpoint; only scoring is left out. The
runs take turns in one process, a round each, from their first round to their last, so that phases
with and without masks, and rounds in which masks change, are all among them.

Every method runs twice in step: one run is timed, the other is looked at (:mod:`.where`), which
would disturb the times. On CUDA the second run's last round is profiled instead, which says how
long the device was at work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedgrove import engines
from fedgrove import methods as library
from fedgrove.config.experiment import Experiment, Federations, with_settings
from fedgrove.config.plan import Plan, plan
from fedgrove.core import Answer, Carry, Client, Edit, Engine, Give, Packet, Report, Stage, Task
from fedgrove.data.sets import SETS
from fedgrove.errors import InputError, check, unknown
from fedgrove.runs.lockstep import Member, collect_rarely, map_together
from fedgrove.runs.rounds import Answers
from fedgrove.runs.run import Run
from fedgrove.wire.codec import hash_mask

from .where import PARTS, Look, can_look

T = TypeVar("T")

METHODS = ("ca-afp", "fedlayerprune", "adfedwcp", "safl", "fedapta", "grove")
BASE = "fedavg"
"""What all others are compared with."""
MOST = 2.0
"""So many times FedAvg's round a method's may take, for the same work."""
MOST_PLACES = 12
"""So many functions are named."""
SETTINGS = {"fedapta": ("ratios=0.0,0.2,0.4,0.6,0.8",)}
"""Where a method's defaults would not show it at work: without devices' profiles FedAPTA prunes
nothing, and these are its paper's ratios."""
WITHOUT_NORMS = {"safl": ("score=FilterL1",)}
"""Settings for networks without norm layers, where a method cannot do with its defaults."""


@dataclass(frozen=True)
class Asked:
    """What is measured, in the words of the command line."""

    scene: str = "uci-har"
    """A data set; with its own network and recipe."""
    methods: Sequence[str] = METHODS
    engine: str = "batched"
    device: str = "auto"
    precision: str = "fp32"
    rounds: int = 30
    """Of a run. In so many CA-AFP changes its masks twice."""
    net: str | None = None
    cohort: int | None = None
    split: bool = True
    """Whether a second run of each method is looked at."""
    data_dir: str | Path | None = None


@dataclass(frozen=True)
class Exchanged:
    """One exchange of a run."""

    kind: str
    """What its clients were asked to do."""
    counts: bool
    """Whether it completed a round."""
    seconds: float
    macs: int
    """Multiply-accumulates of its clients."""
    new_masks: bool
    """Whether a mask was sent, either way, that had not been in this run."""


@dataclass(eq=False)
class Runner:
    """A run that goes exchange by exchange."""

    member: Member
    engine: Engine
    device: str
    _masks: set[bytes] = field(default_factory=set)
    _answers: list[tuple[Task, Answer]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return not self.member.exchange.tasks

    def exchange(self) -> Exchanged:
        """Do the next exchange, as a run does it, up to the checkpoint."""
        tasks = self.member.exchange.tasks
        self._answers = []
        began = time.perf_counter()
        map_together(self.engine, [self.member], lambda member: tasks, self._fold)
        if self.member.error is None:
            self.member.commit(time.perf_counter() - began)
        if self.device == "cuda":
            # Kernels are queued: the call returns before they have run.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if self.member.error is not None:
            raise self.member.error
        reports = [answer for _, answer in self._answers if isinstance(answer, Report)]
        return Exchanged(
            kind=", ".join(sorted({task.verb for task in tasks})),
            counts=self.member.line["counts"],
            seconds=seconds,
            macs=sum(report.macs for report in reports),
            new_masks=self._notes_new_masks(tasks, reports),
        )

    def _fold(self, member: Member, tasks: Sequence[Task], answers: Answers) -> None:
        member.fold(tasks, self._kept(answers))

    def _kept(self, answers: Answers) -> Iterator[tuple[Task, Answer]]:
        for task, answer in answers:
            self._answers.append((task, answer))
            yield task, answer

    def _notes_new_masks(self, tasks: Sequence[Task], reports: Sequence[Report]) -> bool:
        """After the time is taken: digests take some too."""
        packets: list[Packet] = []
        for task in tasks:
            packets += task.send.values()
        for report in reports:
            packets += report.give.values()
        masks = {hash_mask(packet.mask) for packet in packets if packet.mask}
        are_new = not masks <= self._masks
        self._masks |= masks
        return are_new


# ---- a run whose edits can be told from what calls them ------------------------------------------


class MarkedRun(Run):
    """A run whose Edit and Give stages are called through a function that stacks show."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        """The stages, those two marked."""
        return tuple(marked(stage) for stage in super().work(verb))

    @classmethod
    def of(cls, run: Run) -> MarkedRun:
        """The same run, marked."""
        return cls(**{each.name: getattr(run, each.name) for each in fields(Run)})


def marked(stage: Stage) -> Stage:
    """An Edit or a Give that is called through ``stage_of_a_client``; any other as it is."""
    if isinstance(stage, Edit):
        return replace(stage, f=_through_the_mark(stage.f))
    if isinstance(stage, Give):
        return replace(stage, f=_through_the_mark(stage.f))
    return stage


def _through_the_mark(f: Callable[[Carry, Client], T]) -> Callable[[Carry, Client], T]:
    def stage_of_a_client(carry: Carry, client: Client) -> T:
        return f(carry, client)

    # An engine may look at what the function says of itself.
    return update_wrapper(stage_of_a_client, f)


# ---- the measurement -----------------------------------------------------------------------------


def measure(
    asked: Asked = Asked(), say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """A row for each method and kind of exchange, those of FedAvg first.

    ``say`` gets a line for each method that cannot be run on this data, and for each turn.
    """
    check(asked.rounds >= 3, "rounds", asked.rounds, "3 or more")
    if asked.scene not in SETS:
        raise unknown("scene", asked.scene, SETS)
    # Its refusals come before anything is trained.
    engines.choose(asked.engine, asked.device, asked.precision).close()
    # Each once.
    words = list(dict.fromkeys((BASE, *asked.methods)))
    for word in words:
        library.make(word)
    # Collections as in a run.
    with tempfile.TemporaryDirectory() as folder, collect_rarely():
        return _measure_in(Path(folder), asked, words, say)


def _measure_in(
    folder: Path, asked: Asked, words: Sequence[str], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    start = _Starter(asked, folder, say)
    timed: dict[str, Runner] = {}
    looked_at: dict[str, Runner] = {}
    split = asked.split and can_look()
    if asked.split and not split:
        say("not divided into parts: that needs the main thread, and a system with signals")
    for word in words:
        try:
            timed[word] = start.runner(word, f"{len(timed)}-timed")
            if split:
                looked_at[word] = start.runner(word, f"{len(timed)}-looked", mark=True)
        except InputError as error:
            # A network that the method cannot use. Without FedAvg there is nothing to compare with.
            if word == BASE:
                raise
            timed.pop(word, None)
            say(f"left out: {word}: {error}")
    exchanges: dict[str, list[Exchanged]] = {word: [] for word in timed}
    looks: dict[str, list[tuple[str, Look]]] = {word: [] for word in timed}
    busy: dict[str, dict[str, float]] = {word: {} for word in timed}
    try:
        for done in range(1, asked.rounds + 1):
            for word, runner in timed.items():
                exchanges[word] += _round_of(runner)
                if word in looked_at:
                    is_last = done == asked.rounds
                    profiles = is_last and runner.device == "cuda"
                    if profiles:
                        busy[word] = _busy_of(looked_at[word])
                    else:
                        looks[word] += _looked_at(looked_at[word])
            say(f"round {done} of {asked.rounds}: done")
    finally:
        start.close()
    return summarise(exchanges, looks, busy)


class _Starter:
    """Makes runs, each in a folder of its own, on engines of their own where they keep much."""

    def __init__(self, asked: Asked, folder: Path, say: Callable[[str], None]) -> None:
        self._asked = asked
        self._folder = folder
        self._say = say
        self._federations = Federations(asked.data_dir)
        self._engines: list[Engine] = []

    def runner(self, word: str, name: str, mark: bool = False) -> Runner:
        """A run of the method that ``word`` names, before its first exchange."""
        path = self._folder / name
        settings: tuple[str, ...] = SETTINGS.get(word, ())
        try:
            planned = self._plan(word, path, settings)
        except InputError:
            if word not in WITHOUT_NORMS:
                raise
            settings += WITHOUT_NORMS[word]
            planned = self._plan(word, path, settings)
        if settings and not mark:
            self._say(f"{word} is run with {' '.join(settings)}")
        if mark:
            planned = replace(planned, run=MarkedRun.of(planned.run))
        member = planned.member(planned.create_folder())
        member.restore()
        device = engines.device_of(self._asked.device, self._asked.engine)
        return Runner(member, self._engine(), device)

    def _plan(self, word: str, path: Path, settings: Sequence[str]) -> Plan:
        asked = self._asked
        experiment = Experiment(
            with_settings(library.make(word), settings),
            asked.scene,
            net=asked.net,
            rounds=asked.rounds,
            cohort=asked.cohort,
            # Rounds alone are timed.
            evaluate=0,
        )
        return plan(experiment, path, self._federations)

    def _engine(self) -> Engine:
        # A batched engine keeps graphs and stacks, which those of another method may push out. Of
        # any other, one serves all: workers would only stand about.
        asked = self._asked
        engine = engines.choose(asked.engine, asked.device, asked.precision)
        if engine.name != "batched" and self._engines:
            return self._engines[0]
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Release workers and memory."""
        for engine in self._engines:
            engine.close()


def _round_of(runner: Runner) -> list[Exchanged]:
    """The exchanges up to the end of the round: one, and before it any that count as none."""
    done: list[Exchanged] = []
    while not runner.is_over:
        done.append(runner.exchange())
        if done[-1].counts:
            break
    return done


def _looked_at(runner: Runner) -> list[tuple[str, Look]]:
    """The same, each exchange with where its time went."""
    looks: list[tuple[str, Look]] = []
    while not runner.is_over:
        with Look() as look:
            exchanged = runner.exchange()
        looks.append((exchanged.kind, look))
        if exchanged.counts:
            break
    return looks


def _busy_of(runner: Runner) -> dict[str, float]:
    """Seconds for which the device was at work, by kind of exchange; empty if nothing can tell."""
    profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except (AssertionError, RuntimeError):
        # It needs a library of the driver's that is not everywhere.
        return {}
    done = _round_of(runner)
    profile.stop()
    # Of several exchanges nobody can say which the time belongs to.
    if len(done) != 1:
        return {}
    microseconds = 0.0
    for event in profile.events() or ():
        # Of the calls that launch kernels there are events too, on the CPU.
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            microseconds += event.time_range.elapsed_us()
    return {done[0].kind: microseconds / 1e6}


# ---- rows ----------------------------------------------------------------------------------------


def summarise(
    exchanges: Mapping[str, Sequence[Exchanged]],
    looks: Mapping[str, Sequence[tuple[str, Look]]],
    busy: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Medians by method and kind of exchange, beside FedAvg's.

    The first exchange of a kind fills caches and captures graphs; it is left out, unless there is
    no other.
    """
    rows: list[dict[str, Any]] = []
    for method, done in exchanges.items():
        for kind in dict.fromkeys(exchanged.kind for exchanged in done):
            alike = _after_the_first([each for each in done if each.kind == kind])
            own_looks = _after_the_first([look for of, look in looks[method] if of == kind])
            seconds = [each.seconds for each in alike]
            first = rows[0] if rows else None
            median = statistics.median(seconds)
            macs = statistics.median(each.macs for each in alike)
            work = macs / first["macs"] if first and first["macs"] else 1.0
            times = median / first["median_s"] if first else 1.0
            rows.append(
                {
                    "method": method,
                    "kind": kind,
                    "counts": alike[0].counts,
                    "exchanges": len(alike),
                    "new_masks": sum(each.new_masks for each in alike),
                    "median_s": median,
                    "min_s": min(seconds),
                    "max_s": max(seconds),
                    "macs": macs,
                    "work": work,
                    "times": times,
                    # What clients compute beyond FedAvg's is the method's own, on any engine.
                    "times_for_work": times / max(1.0, work),
                    "parts": _mean_parts(own_looks),
                    "places": _mean_places(own_looks),
                    "device_s": busy[method].get(kind),
                }
            )
    return rows


def _after_the_first(items: list[Any]) -> list[Any]:
    return items[1:] if len(items) > 1 else items


def _mean_parts(looks: Sequence[Look]) -> dict[str, float]:
    """Seconds of an exchange by part, on average; empty where nobody looked."""
    if not looks:
        return {}
    return {part: sum(look.seconds[part] for look in looks) / len(looks) for part in PARTS}


def _mean_places(looks: Sequence[Look]) -> dict[str, float]:
    """The functions that took the most seconds of an exchange, on average."""
    total: defaultdict[str, float] = defaultdict(float)
    for look in looks:
        for place, seconds in look.places.items():
            total[place] += seconds / len(looks)
    longest = sorted(total, key=lambda place: -total[place])
    return {place: total[place] for place in longest[:MOST_PLACES]}


def checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Whether each method's rounds are within twice FedAvg's, by the slowest of their kinds.

    By the clock; and for as much work: where clients compute more than FedAvg's, a round may take
    that much longer.
    """
    judged = [row for row in rows if row["counts"] and row["method"] != BASE]
    if not judged:
        return {}
    claims = {
        f"each within twice {BASE}'s round": "times",
        "the same for as much work": "times_for_work",
    }
    results = {}
    for claim, key in claims.items():
        order = sorted(judged, key=lambda row: -float(row[key]))
        beyond = [row for row in order if row[key] > MOST]
        named = [f"{row['method']} ({row['kind']}) {row[key]:.2f}" for row in beyond or order[:1]]
        results[claim] = {
            "value": round(order[0][key], 3),
            "bound": MOST,
            "at": ", ".join(named),
            "ok": not beyond,
        }
    return results
