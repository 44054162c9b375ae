"""Seconds per round of methods compared with FedAvg's, and what each round is made of.

Rounds are those of real runs in their own run folders: planning, training, edits, byte counts,
files of what clients remember, the gate, the fold and the checkpoint; only scoring is left out. The
runs take turns in one process, a round each, from their first round to their last, so that phases
with and without masks, and rounds in which masks change, are all included.

Every method runs twice in step: one run is timed, the other is profiled (:mod:`.round_profile`),
which would disturb the times. On CUDA the second run's last round goes through torch's profiler
instead, which measures how long the device was busy.
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

from .processes import Report as ReportLine
from .processes import be_silent
from .round_profile import PARTS, Profile, can_profile

T = TypeVar("T")

METHODS = ("ca-afp", "fedlayerprune", "adfedwcp", "safl", "fedapta", "grove")
BASE = "fedavg"
"""What all others are compared with."""
MOST = 2.0
"""The most that a method's round may take for equal work, times FedAvg's."""
MOST_PLACES = 12
"""The number of functions that are named."""
SETTINGS = {"fedapta": ("ratios=0.0,0.2,0.4,0.6,0.8",)}
"""Where a method's defaults would not show it at work: without devices' profiles FedAPTA prunes
nothing, and these are its paper's ratios."""
WITHOUT_NORMS = {"safl": ("score=FilterL1",)}
"""Settings for networks without norm layers, where a method cannot do with its defaults."""


@dataclass(frozen=True)
class MethodsOptions:
    """What is measured, as on the command line."""

    scene: str = "uci-har"
    """A data set, with its default network and recipe."""
    methods: Sequence[str] = METHODS
    engine: str = "batched"
    device: str = "auto"
    precision: str = "fp32"
    rounds: int = 30
    """Of a run. In 30 rounds CA-AFP changes its masks twice."""
    net: str | None = None
    cohort: int | None = None
    split: bool = True
    """Whether a second run of each method is profiled."""
    data_dir: str | Path | None = None


@dataclass(frozen=True)
class TimedExchange:
    """One exchange of a run."""

    kind: str
    """What its clients did: the verbs of its tasks."""
    counts: bool
    """Whether it completed a round."""
    seconds: float
    macs: int
    """Multiply-accumulates of its clients."""
    new_masks: bool
    """Whether a mask was sent, either way, that had not been in this run."""


@dataclass(eq=False)
class SteppedRun:
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

    def exchange(self) -> TimedExchange:
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
        return TimedExchange(
            kind=", ".join(sorted({task.verb for task in tasks})),
            counts=self.member.line["counts"],
            seconds=seconds,
            macs=sum(report.macs for report in reports),
            new_masks=self._has_new_masks(tasks, reports),
        )

    def _fold(self, member: Member, tasks: Sequence[Task], answers: Answers) -> None:
        member.fold(tasks, self._kept(answers))

    def _kept(self, answers: Answers) -> Iterator[tuple[Task, Answer]]:
        for task, answer in answers:
            self._answers.append((task, answer))
            yield task, answer

    def _has_new_masks(self, tasks: Sequence[Task], reports: Sequence[Report]) -> bool:
        """Whether a mask is new; called after the time is taken, since hashing takes some too."""
        packets: list[Packet] = []
        for task in tasks:
            packets += task.send.values()
        for report in reports:
            packets += report.give.values()
        masks = {hash_mask(packet.mask) for packet in packets if packet.mask}
        are_new = not masks <= self._masks
        self._masks |= masks
        return are_new


# ---- a run whose edits can be distinguished from their callers ----------------------------------


class MarkedRun(Run):
    """A run whose Edit and Give stages are called through a function that stacks show."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Return the stages, those two marked."""
        return tuple(mark_stage(stage) for stage in super().work(verb))

    @classmethod
    def of(cls, run: Run) -> MarkedRun:
        """Return a run, marked."""
        return cls(**{each.name: getattr(run, each.name) for each in fields(Run)})


def mark_stage(stage: Stage) -> Stage:
    """Return an Edit or a Give that is called through ``stage_of_a_client``; others unchanged."""
    if isinstance(stage, Edit):
        return replace(stage, f=_through_the_mark(stage.f))
    if isinstance(stage, Give):
        return replace(stage, f=_through_the_mark(stage.f))
    return stage


def _through_the_mark(f: Callable[[Carry, Client], T]) -> Callable[[Carry, Client], T]:
    def stage_of_a_client(carry: Carry, client: Client) -> T:
        return f(carry, client)

    # An engine may read the function's name and annotations.
    return update_wrapper(stage_of_a_client, f)


# ---- the measurement -----------------------------------------------------------------------------


def measure(
    options: MethodsOptions = MethodsOptions(), report: ReportLine = be_silent
) -> list[dict[str, Any]]:
    """Return a row for each method and kind of exchange, those of FedAvg first.

    ``report`` gets a line for each method that cannot be run on this data, and for each turn.
    """
    check(options.rounds >= 3, "rounds", options.rounds, "3 or more")
    if options.scene not in SETS:
        raise unknown("scene", options.scene, SETS)
    # Its refusals come before anything is trained.
    engines.choose(options.engine, options.device, options.precision).close()
    # Each once.
    words = list(dict.fromkeys((BASE, *options.methods)))
    for word in words:
        library.make(word)
    # Collections as in a run.
    with tempfile.TemporaryDirectory() as folder, collect_rarely():
        return _measure_in(Path(folder), options, words, report)


def _measure_in(
    folder: Path, options: MethodsOptions, words: Sequence[str], report: ReportLine
) -> list[dict[str, Any]]:
    starter = _Starter(options, folder, report)
    timed: dict[str, SteppedRun] = {}
    profiled: dict[str, SteppedRun] = {}
    split = options.split and can_profile()
    if options.split and not split:
        report("not divided into parts: this needs the main thread, and a system with signals")
    for word in words:
        try:
            timed[word] = starter.start(word, f"{len(timed)}-timed")
            if split:
                profiled[word] = starter.start(word, f"{len(timed)}-profiled", mark=True)
        except InputError as error:
            # A network that the method cannot use. Without FedAvg there is nothing to compare with.
            if word == BASE:
                raise
            timed.pop(word, None)
            report(f"left out: {word}: {error}")
    exchanges: dict[str, list[TimedExchange]] = {word: [] for word in timed}
    profiles: dict[str, list[tuple[str, Profile]]] = {word: [] for word in timed}
    busy: dict[str, dict[str, float]] = {word: {} for word in timed}
    try:
        for done in range(1, options.rounds + 1):
            for word, run in timed.items():
                exchanges[word] += _time_round(run)
                if word in profiled:
                    is_last = done == options.rounds
                    if is_last and run.device == "cuda":
                        busy[word] = _busy_of(profiled[word])
                    else:
                        profiles[word] += _profile_round(profiled[word])
            report(f"round {done} of {options.rounds}: done")
    finally:
        starter.close()
    return summarise(exchanges, profiles, busy)


class _Starter:
    """Starts runs, each in its own folder, on its own engine where engines keep much."""

    def __init__(self, options: MethodsOptions, folder: Path, report: ReportLine) -> None:
        self._options = options
        self._folder = folder
        self._report = report
        self._federations = Federations(options.data_dir)
        self._engines: list[Engine] = []

    def start(self, word: str, name: str, mark: bool = False) -> SteppedRun:
        """Return a run of a method, before its first exchange."""
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
            self._report(f"{word} is run with {' '.join(settings)}")
        if mark:
            planned = replace(planned, run=MarkedRun.of(planned.run))
        member = planned.member(planned.create_folder())
        member.restore()
        device = engines.device_of(self._options.device, self._options.engine)
        return SteppedRun(member, self._engine(), device)

    def _plan(self, word: str, path: Path, settings: Sequence[str]) -> Plan:
        options = self._options
        experiment = Experiment(
            with_settings(library.make(word), settings),
            options.scene,
            net=options.net,
            rounds=options.rounds,
            cohort=options.cohort,
            # Rounds alone are timed.
            evaluate=0,
        )
        return plan(experiment, path, self._federations)

    def _engine(self) -> Engine:
        # A batched engine keeps graphs and stacks, which those of another method may push out. Of
        # any other kind, one serves all: more workers would only be idle.
        options = self._options
        engine = engines.choose(options.engine, options.device, options.precision)
        if engine.name != "batched" and self._engines:
            return self._engines[0]
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Release workers and memory."""
        for engine in self._engines:
            engine.close()


def _time_round(run: SteppedRun) -> list[TimedExchange]:
    """The exchanges up to the end of the round: one, and before it any that count as none."""
    done: list[TimedExchange] = []
    while not run.is_over:
        done.append(run.exchange())
        if done[-1].counts:
            break
    return done


def _profile_round(run: SteppedRun) -> list[tuple[str, Profile]]:
    """The exchanges up to the end of the round, each with where its time went."""
    profiles: list[tuple[str, Profile]] = []
    while not run.is_over:
        with Profile() as profile:
            exchanged = run.exchange()
        profiles.append((exchanged.kind, profile))
        if exchanged.counts:
            break
    return profiles


def _busy_of(run: SteppedRun) -> dict[str, float]:
    """Seconds for which the device was busy, by kind of exchange; empty if they are not known."""
    profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except (AssertionError, RuntimeError):
        # It needs a library of the driver that not every machine has.
        return {}
    done = _time_round(run)
    profile.stop()
    # With several exchanges it is not known which one the time belongs to.
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
    exchanges: Mapping[str, Sequence[TimedExchange]],
    profiles: Mapping[str, Sequence[tuple[str, Profile]]],
    busy: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Return medians by method and kind of exchange, compared with FedAvg's.

    The first exchange of a kind fills caches and captures graphs; it is left out, unless there is
    no other.
    """
    rows: list[dict[str, Any]] = []
    for method, done in exchanges.items():
        for kind in dict.fromkeys(exchanged.kind for exchanged in done):
            alike = _after_the_first([each for each in done if each.kind == kind])
            own_profiles = _after_the_first([each for of, each in profiles[method] if of == kind])
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
                    "parts": _mean_parts(own_profiles),
                    "places": _mean_places(own_profiles),
                    "device_s": busy[method].get(kind),
                }
            )
    return rows


def _after_the_first(items: list[Any]) -> list[Any]:
    return items[1:] if len(items) > 1 else items


def _mean_parts(profiles: Sequence[Profile]) -> dict[str, float]:
    """Seconds of an exchange by part, on average; empty without a profile."""
    means = {}
    if profiles:
        for part in PARTS:
            total = sum(profile.seconds[part] for profile in profiles)
            means[part] = total / len(profiles)
    return means


def _mean_places(profiles: Sequence[Profile]) -> dict[str, float]:
    """The functions that took the most seconds of an exchange, on average."""
    total: defaultdict[str, float] = defaultdict(float)
    for profile in profiles:
        for place, seconds in profile.places.items():
            total[place] += seconds / len(profiles)
    longest = sorted(total, key=lambda place: -total[place])
    return {place: total[place] for place in longest[:MOST_PLACES]}


def checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return whether each method's rounds are within twice FedAvg's, by the slowest of their kinds.

    By the clock; and for equal work: where clients compute more than FedAvg's, a round may take
    that much longer.
    """
    judged = [row for row in rows if row["counts"] and row["method"] != BASE]
    if not judged:
        return {}
    claims = {
        f"each within twice {BASE}'s round": "times",
        "each within twice, for equal work": "times_for_work",
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
