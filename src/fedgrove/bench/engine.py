"""Seconds per round of our engines beside a plain PyTorch loop, in one run.

All variants train the same clients for the same epochs and batches, and take turns, so that a change in the machine's
load falls on all of them. Evaluation is left out. Variants in processes of their own, other simulators among them,
are in :mod:`fedgrove.bench.starts`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..core import Engine
from ..engines import Pool, Serial
from ..engines.batched.engine import Batched, Precision
from ..engines.pool.engine import cores
from ..runs.rounds import draw_cohort, gated, plan
from ..runs.run import Run
from .loop import Plain
from .scenes import Scene, scene_of, seeded, setting

Round = Callable[[], None]
"""Does one round, always from the same model on the same cohort."""


def variants(scene: Scene, device: str) -> dict[str, Callable[[Run], Round]]:
    """The plain loop, which comes first, and our engines."""
    threads = torch.get_num_threads()
    if device == "cpu":
        return {
            "plain loop, 1 thread": partial(_loop, scene, device, 1),
            f"plain loop, torch's default ({threads} threads)": partial(
                _loop, scene, device, threads
            ),
            "serial": partial(_ours, Serial()),
            f"pool, {cores()} workers": partial(_ours, Pool()),
        }
    kinds: tuple[Precision, ...] = ("bf16", "tf32") if scene.half else ("fp32", "tf32", "bf16")
    made = {f"batched, {kind}": Batched(device="cuda", precision=kind) for kind in kinds}
    made[f"batched, {kinds[0]}, no graphs"] = Batched(
        device="cuda", precision=kinds[0], graphs=False
    )
    ours = {name: partial(_ours, engine) for name, engine in made.items()}
    return {"plain loop": partial(_loop, scene, device, threads), **ours}


def _loop(scene: Scene, device: str, threads: int, run: Run) -> Round:
    plain, cohort = Plain(scene, run, device), draw_cohort(run, 0)

    def go() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        plain.round(cohort)
        torch.set_num_threads(before)

    return go


def _ours(engine: Engine, run: Run) -> Round:
    state = run.method.init(run.start)
    tasks = plan(run, state)
    return lambda: run.method.fold(
        state, (report for _, report in engine.map((run, task) for task in tasks))
    )


def measure(
    name: str,
    device: str = "cpu",
    repeats: int = 5,
    cohort: int | None = None,
    data_dir: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Seconds of each variant of a scene, taking turns, after one round to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        scene, run = setting(name, Path(folder), cohort, data_dir)
        each = {variant: make(run) for variant, make in variants(scene, device).items()}
        times: dict[str, list[float]] = {variant: [] for variant in each}
        for _ in range(repeats + 1):
            for variant, go in each.items():
                times[variant].append(timed(go, device))
    first = {variant: t.pop(0) for variant, t in times.items()}
    rows = spread(times)
    return [
        {"scene": name, "how": "turns", "first_s": first[row["variant"]], **row} for row in rows
    ]


def spread(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Median, least and most seconds of each variant, and the first one's median as a multiple of its own.

    >>> rows = spread({"plain": [2.0, 4.0, 3.0], "ours": [1.0]})
    >>> rows[1]
    {'variant': 'ours', 'median_s': 1.0, 'min_s': 1.0, 'max_s': 1.0, 'times_plain': 3.0}
    """
    base = statistics.median(next(iter(times.values())))
    rows = []
    for variant, t in times.items():
        median = statistics.median(t)
        rows.append(
            {
                "variant": variant,
                "median_s": median,
                "min_s": min(t),
                "max_s": max(t),
                "times_plain": base / median,
            }
        )
    return rows


# ---- runs in lockstep -----------------------------------------------------------------------------------------------


def lockstep(
    seeds: int, device: str = "cuda", repeats: int = 5, data_dir: str | Path | None = None
) -> list[dict[str, Any]]:
    """Seconds per round of so many seeds of fedavg on uci-har, a cohort of 10: together, one after another, plain."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [seeded(seed, Path(folder), data_dir) for seed in range(seeds)]
        plains = [Plain(scene_of(run), run, device) for run in runs]
        cohorts = [draw_cohort(r, 0) for r in runs]

        def plain() -> None:
            for loop, cohort in zip(plains, cohorts, strict=True):
                loop.round(cohort)

        each: dict[str, Round] = {"plain loop, one after another": plain}
        kinds: dict[str, dict[str, Any]] = {
            "fp32": {"precision": "fp32"},
            "tf32": {"precision": "tf32"},
        }
        for kind, words in kinds.items():
            together, silent, alone = (Batched(device=device, **words) for _ in range(3))
            silent.count_bytes = False
            each[f"batched, {kind}, one after another"] = partial(_one_by_one, runs, alone)
            each[f"batched, {kind}, in lockstep"] = partial(_together, runs, together)
            each[f"batched, {kind}, in lockstep, bytes not counted"] = partial(
                _together, runs, silent
            )
        return spread(
            {name: [timed(go, device) for _ in range(repeats + 1)][1:] for name, go in each.items()}
        )


def _one_by_one(runs: list[Run], engine: Engine) -> None:
    for run in runs:
        _together([run], engine)


def _together(runs: list[Run], engine: Engine) -> None:
    """One round of every run, in one map."""
    states = [run.method.init(run.start) for run in runs]
    tasks = [plan(run, state) for run, state in zip(runs, states, strict=True)]
    stream = engine.map((run, task) for run, own in zip(runs, tasks, strict=True) for task in own)
    for run, state, own in zip(runs, states, tasks, strict=True):
        run.method.fold(
            state, gated(run, (report for _, report in islice(stream, len(own))), [], own)
        )
    for _ in stream:
        pass


def timed(go: Round, device: str) -> float:
    """Seconds of one round, the device's work included."""
    began = time.perf_counter()
    go()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
