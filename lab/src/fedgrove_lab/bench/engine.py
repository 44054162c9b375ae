"""Seconds per round of our engines compared with a plain PyTorch loop, in one process.

All variants train the same clients for the same epochs and batches, and take turns, so that a
change in the machine's load falls on all of them. Evaluation is left out. On CUDA pfl-research
takes part, on the same GPU. Variants in their own processes, other simulators included, are in
:mod:`fedgrove_lab.bench.starts`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fedgrove.core import Engine, Task
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched, Precision
from fedgrove.engines.pool.engine import cores
from fedgrove.runs.lockstep import collect_rarely, limit_threads
from fedgrove.runs.rounds import Admission, draw_cohort, plan
from fedgrove.runs.run import Run

from .processes import Report, be_silent
from .scenes import Scene, build_uci_har_run, describe_scene, find_scene
from .simulators import Centralised, PlainLoop, prepare_pfl

TrainRound = Callable[[], None]
"""Trains one round, on the same cohort every time."""
PFL = "pfl-research"
CENTRALISED = "centralised"
"""The yardstick: the same network trained without clients, by its first part as above."""
OTHERS = (PFL, "Flower")
"""Other simulators, by the first part of a variant's name."""
GET_IT = "get it with: pip install 'path/to/fedgrove/lab[bench]'"


def variants(scene: Scene, device: str) -> dict[str, Callable[[Run], TrainRound]]:
    """Return the plain loop, which is first, our engines and, on CUDA, pfl-research if installed.

    Called with a run, each returns a function that trains one round.
    """
    threads = torch.get_num_threads()
    if device == "cpu":
        default_threads = f"plain loop, torch's default ({threads} threads)"
        return {
            "plain loop, 1 thread": partial(_plain_round, scene, device, 1),
            default_threads: partial(_plain_round, scene, device, threads),
            "serial": partial(_engine_round, Serial()),
            f"pool, {cores()} workers": partial(_engine_round, Pool()),
        }
    # The precision of the plain loop comes first: it is measured without CUDA graphs too.
    precisions: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
    if scene.half:
        precisions = ("bf16", "tf32")
    prepared: dict[str, Callable[[Run], TrainRound]] = {
        "plain loop": partial(_plain_round, scene, device, threads)
    }
    for precision in precisions:
        engine = Batched(device="cuda", precision=precision)
        prepared[f"batched, {precision}"] = partial(_engine_round, engine)
    without_graphs = Batched(device="cuda", precision=precisions[0], graphs=False)
    prepared[f"batched, {precisions[0]}, no graphs"] = partial(_engine_round, without_graphs)
    if find_spec("pfl"):
        for precision in precisions:
            # Full fp32 is left out: its rounds take longer, and no user would choose it here.
            if precision == "tf32" or (precision == "bf16" and scene.half):
                prepared[f"{PFL}, {precision}"] = partial(prepare_pfl, scene, device, precision)
    return prepared


def _plain_round(scene: Scene, device: str, threads: int, run: Run) -> TrainRound:
    loop = PlainLoop(scene, run, device)
    cohort = draw_cohort(run, 0)

    def train_round() -> None:
        # Variants take turns in one process, and the next may need another number of threads.
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        loop.round(cohort)
        torch.set_num_threads(before)

    return train_round


def _engine_round(engine: Engine, run: Run) -> TrainRound:
    state = run.method.init(run.setup)
    tasks = plan(run, state)

    def train_round() -> None:
        # The new state is dropped: every round starts from the same model.
        stream = engine.map((run, task) for task in tasks)
        answers = ((task, answer) for (_, task), answer in stream)
        # As in a run.
        with limit_threads(run.net.layout.size), collect_rarely():
            run.method.fold(state, Admission(run, tasks).admit(answers))

    return train_round


def measure(
    name: str,
    device: str = "cpu",
    repeats: int = 5,
    cohort: int | None = None,
    data_dir: str | Path | None = None,
    report: Report = be_silent,
) -> list[dict[str, Any]]:
    """Time a round of each variant of a scene, in turns, after one round to warm up.

    ``report`` gets a line for everything that was left out, and why.
    """
    if device == "cuda" and not find_spec("pfl"):
        report(f"left out: {PFL} is not installed; {GET_IT}")
    # A first round forks workers, captures CUDA graphs and fills caches: it is reported apart.
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scene, run = find_scene(name, Path(folder), cohort, data_dir)
        # All are prepared before any is timed.
        rounds: dict[str, TrainRound] = {}
        for variant, prepare in variants(scene, device).items():
            try:
                train_round = prepare(run)
                first[variant] = time_round(train_round, device)
            except Exception as error:
                # Ours must not fail; others may, and the measurement continues without them.
                if not variant.startswith(PFL):
                    raise
                report(f"left out: {variant}: {type(error).__name__}: {error}")
                continue
            rounds[variant] = train_round
            times[variant] = []
        examples = dict.fromkeys(rounds, count_examples(run))
        for variant, prepare_yardstick in yardsticks(scene, device).items():
            try:
                yardstick = prepare_yardstick(run)
                first[variant] = time_round(yardstick.round, device)
            except Exception as error:
                # Compiling on a CPU needs a compiler for C++, which a machine may not have.
                report(f"left out: {variant}: {type(error).__name__}: {error}")
                continue
            rounds[variant] = yardstick.round
            times[variant] = []
            examples[variant] = yardstick.examples
        for _ in range(repeats):
            for variant, train_round in rounds.items():
                times[variant].append(time_round(train_round, device))
    rows = []
    for row in compare_with_first(times):
        rows.append({"scene": name, "how": "turns", "first_s": first[row["variant"]], **row})
    return add_shares(rows, examples)


def yardsticks(scene: Scene, device: str) -> dict[str, Callable[[Run], Centralised]]:
    """Return centralised training in each precision in which our engine is measured on a device.

    With and without compilation: on a CPU torch's own kernels may be the faster ones.
    """
    precisions = ("",) if device == "cpu" else (", tf32", ", bf16")
    prepared: dict[str, Callable[[Run], Centralised]] = {}
    for precision in precisions:
        for compiled in (False, True):
            name = CENTRALISED + precision + (", compiled" if compiled else "")
            prepared[name] = partial(_centralise, scene, device, precision == ", bf16", compiled)
    return prepared


def _centralise(scene: Scene, device: str, half: bool, compiled: bool, run: Run) -> Centralised:
    return Centralised(scene, run, device, half, compiled)


def count_examples(run: Run) -> int:
    """Return the examples of a round of the run, those of several epochs counted again."""
    local = run.method.local
    # A run fills in the data set's recipe where its method has none.
    assert local is not None
    return local.epochs * sum(run.infos[k].examples for k in draw_cohort(run, 0))


def add_shares(rows: list[dict[str, Any]], examples: Mapping[str, int]) -> list[dict[str, Any]]:
    """Add examples per second to rows, and their share of centralised training's.

    It is compared with the fastest one of the same precision, or of any if a variant has none.

    >>> rows = [{"variant": "serial", "median_s": 4.0}, {"variant": "centralised", "median_s": 1.0}]
    >>> add_shares(rows, {"serial": 100, "centralised": 80})[0]
    {'variant': 'serial', 'median_s': 4.0, 'examples_s': 25.0, 'of_centralised': 0.3125}
    """
    for row in rows:
        row["examples_s"] = examples[row["variant"]] / row["median_s"]
    central = [row for row in rows if name_of_simulator(row["variant"]) == CENTRALISED]
    for row in rows:
        precisions = {"tf32", "bf16"} & set(row["variant"].split(", "))
        comparable = [each for each in central if precisions <= set(each["variant"].split(", "))]
        speeds = [each["examples_s"] for each in comparable]
        if speeds:
            row["of_centralised"] = row["examples_s"] / max(speeds)
    return rows


def compare_with_first(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return median, least and most seconds of each variant, and its speed in times the first.

    >>> rows = compare_with_first({"plain": [2.0, 4.0, 3.0], "ours": [1.0]})
    >>> rows[1]["median_s"], rows[1]["times_plain"]
    (1.0, 3.0)
    """
    plain_median = statistics.median(next(iter(times.values())))
    rows = []
    for variant, seconds in times.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "variant": variant,
                "median_s": median,
                "min_s": min(seconds),
                "max_s": max(seconds),
                "seconds": list(seconds),
                "times_plain": plain_median / median,
            }
        )
    return rows


def compare_simulators(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest variant of each other simulator, and our fastest compared with it.

    Ours is of the same precision where the other's has one.

    >>> names = ("plain loop", "serial", "pool, 2 workers", "pfl-research, tf32")
    >>> seconds = ([8.0], [4.0], [2.0], [5.0])
    >>> rows = compare_with_first(dict(zip(names, seconds)))
    >>> compare_simulators(rows)
    [{'ours': 'pool, 2 workers', 'other': 'pfl-research, tf32', 'times': 2.5}]
    """
    ours = []
    others: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        simulator = name_of_simulator(row["variant"])
        if simulator in OTHERS:
            others.setdefault(simulator, []).append(row)
        elif simulator not in ("plain loop", CENTRALISED):
            ours.append(row)
    pairs = []
    for variants_of_it in others.values():
        other = min(variants_of_it, key=lambda row: float(row["median_s"]))
        precision = other["variant"].rpartition(", ")[2]
        comparable = [row for row in ours if precision in row["variant"].split(", ")] or ours
        if comparable:
            best = min(comparable, key=lambda row: float(row["median_s"]))
            times = other["median_s"] / best["median_s"]
            pairs.append({"ours": best["variant"], "other": other["variant"], "times": times})
    return pairs


def name_of_simulator(variant: str) -> str:
    """Return the first part of a variant's name."""
    return variant.partition(",")[0]


def time_round(train_round: TrainRound, device: str) -> float:
    """Return the seconds of one round, the device's work included."""
    began = time.perf_counter()
    train_round()
    if device == "cuda":
        # Kernels are queued: the call returns before they have run.
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---- runs in lockstep ----------------------------------------------------------------------------


def measure_lockstep(
    seeds: int, device: str = "cuda", repeats: int = 5, data_dir: str | Path | None = None
) -> list[dict[str, Any]]:
    """Time a round of several seeds of fedavg on uci-har, a cohort of 10 each.

    All seeds together, one after another, and as plain loops one after another.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = [build_uci_har_run(seed, Path(folder), data_dir) for seed in range(seeds)]
        plain_work: list[tuple[PlainLoop, list[int]]] = []
        for run in runs:
            plain_work.append((PlainLoop(describe_scene(run), run, device), draw_cohort(run, 0)))

        def plain_rounds() -> None:
            for loop, cohort in plain_work:
                loop.round(cohort)

        rounds: dict[str, TrainRound] = {"plain loop, one after another": plain_rounds}
        precisions: tuple[Precision, ...] = ("fp32", "tf32")
        for precision in precisions:
            # An engine keeps data, CUDA graphs and stack sizes, so each variant has its own.
            together = Batched(device=device, precision=precision)
            uncounted = Batched(device=device, precision=precision, count_bytes=False)
            alone = Batched(device=device, precision=precision)
            name = f"batched, {precision}"
            rounds[f"{name}, one after another"] = partial(_train_one_by_one, runs, alone)
            rounds[f"{name}, in lockstep"] = partial(_train_together, runs, together)
            rounds[f"{name}, in lockstep, bytes not counted"] = partial(
                _train_together, runs, uncounted
            )
        times: dict[str, list[float]] = {}
        for variant, train_round in rounds.items():
            # To warm up: CUDA graphs are captured, data are moved.
            time_round(train_round, device)
            times[variant] = []
            for _ in range(repeats):
                times[variant].append(time_round(train_round, device))
        return compare_with_first(times)


def _train_one_by_one(runs: list[Run], engine: Engine) -> None:
    for run in runs:
        _train_together([run], engine)


def _train_together(runs: list[Run], engine: Engine) -> None:
    """Train one round of every run, in one map, so that clients of different runs share a stack."""
    planned: list[tuple[Run, Any, list[Task]]] = []
    jobs: list[tuple[Run, Task]] = []
    for run in runs:
        # Every round starts from the same model.
        state = run.initial_state
        tasks = plan(run, state)
        planned.append((run, state, tasks))
        for task in tasks:
            jobs.append((run, task))
    stream = engine.map(jobs)
    # As in a run.
    with limit_threads(runs[0].net.layout.size), collect_rarely():
        # Answers come in job order: the next len(tasks) of them belong to this run.
        for run, state, tasks in planned:
            answers = ((task, answer) for (_, task), answer in islice(stream, len(tasks)))
            run.method.fold(state, Admission(run, tasks).admit(answers))
        # islice stops at a run's last report without asking for more, and an engine cleans up only
        # when it is exhausted.
        for _ in stream:
            pass
