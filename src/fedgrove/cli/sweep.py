"""``fedgrove sweep``: a grid of runs in lockstep."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..report.terminal import load_torch
from . import complete
from . import options as o

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..config.sweep import Sweep
    from ..runs.result import Failure, Result

Ends = dict[str, "Result | Failure"]


def seeds_of(text: str) -> Any:
    """How many seeds, from 0 on, or the seeds themselves with commas between.

    >>> seeds_of("3"), seeds_of("3,5,7"), seeds_of("4,")
    ((0, 1, 2), (3, 5, 7), (4,))
    """
    words = text.removesuffix(",").split(",")
    all_numbers = all(word.strip().isdecimal() for word in words)
    if not all_numbers or text.strip() == "0":
        raise typer.BadParameter(
            f"is '{text}'; it must be how many, as 10, or the seeds themselves, as 3,5,7 or 4,"
        )
    if "," in text:
        return tuple(int(word) for word in words)
    return tuple(range(int(text)))


Seeds = Annotated[
    Any,
    o.option("--seeds", "How many, from 0 on, or which: 3,5,7; else seed 0.", "N|S,S", seeds_of),
]
Vary = Annotated[
    list[str] | None,
    o.option(
        "--set",
        "A field and its values, as mu=0.1,1; | separates values that are lists.",
        "KEY=VALUE,VALUE",
        complete=complete.settings,
    ),
]
Out = Annotated[
    str | None, o.option("--out", "The sweep's folder; the same sweep in it is continued.", "DIR")
]


def sweep(
    ctx: typer.Context,
    methods: o.Methods,
    seeds: Seeds = None,
    data: o.Data = None,
    label: o.Label = None,
    client: o.ClientColumn = None,
    window: o.Window = None,
    stride: o.Stride = None,
    channels: o.Channels = None,
    time: o.TimeColumn = None,
    net: o.Net = None,
    init: o.Init = None,
    freeze: o.Freeze = None,
    partition: o.Partition = None,
    scenario: o.Scenario = None,
    split: o.Split = None,
    validation: o.Validation = None,
    clients: o.Clients = None,
    cohort: o.Cohort = None,
    rounds: o.Rounds = None,
    epochs: o.Epochs = None,
    batch: o.BatchSize = None,
    lr: o.Lr = None,
    finetune: o.Finetune = None,
    profile: o.Profile = None,
    trace: o.Trace = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    out: Out = None,
    vary: Vary = None,
    evaluate: o.Evaluate = None,
    score_on: o.ScoreOn = None,
    quorum: o.Quorum = None,
    deadline: o.Deadline = None,
    timeout: o.Timeout = None,
    norm_bound: o.NormBound = None,
    faults: o.Faults = None,
    privacy: o.Privacy = None,
    per_task: o.PerTask = False,
    no_standardise: o.NoStandardise = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Train every method with every value of every --set on every seed, and compare over seeds."""
    load_torch(quiet=json)
    from ..config import sweep as library
    from ..config.experiment import Federations
    from ..runs.files import fresh_name
    from . import arguments

    federations = Federations(data_dir)
    experiments = grid_of(ctx.params, federations)
    if dry_run:
        return print_plans(experiments, federations, json)
    first = next(iter(experiments.values()))
    if out is not None:
        folder = Path(out)
    else:
        folder = fresh_name(Path("runs"), f"sweep-{Path(str(first.data)).stem}")
    rounds_each = first.rounds or federations.defaults(first).rounds
    grid = _grid_words(ctx.params, experiments)
    with arguments.engine(ctx.params) as chosen:
        run = partial(
            library.sweep, experiments, folder, engine=chosen, federations=federations, grid=grid
        )
        _run_and_show(folder, experiments, rounds_each * len(experiments), run, json)


def resume_sweep(out: str, words: Mapping[str, Any], json: bool) -> None:
    """Resume an interrupted sweep."""
    from ..config import sweep as library
    from . import arguments

    experiments = library.experiments_of(out, words["trust"])
    total = sum(experiment.rounds or 0 for experiment in experiments.values())
    with arguments.engine(words) as chosen:
        run = partial(
            library.resume,
            out,
            engine=chosen,
            data_dir=words.get("data_dir"),
            trust=words["trust"],
        )
        _run_and_show(Path(out), experiments, total, run, json)


def grid_of(words: Mapping[str, Any], federations: Federations) -> dict[str, Experiment]:
    """The experiments the words describe, by name."""
    from ..config.experiment import shorthand_settings
    from ..config.grid import grid
    from . import arguments

    methods = words["methods"]
    base = arguments.base_experiment(words, methods[0])
    settings = [*(words["vary"] or ()), *shorthand_settings(words)]
    seeds = words["seeds"] or (0,)
    return grid(methods, base, seeds, settings, federations.recipe(base))


def _grid_words(words: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> dict[str, Any]:
    """What was asked for, as sweep.json keeps it; folders and engines decide no result."""
    left_out = (
        "seeds",
        "vary",
        "engine",
        "device",
        "precision",
        "timeout",
        "data_dir",
        "out",
        "dry_run",
        "json",
    )
    given = {}
    for word, value in words.items():
        # Not `in (None, False)`: a number that is 0 was given, and counts as False there.
        is_given = value is not None and value is not False
        if is_given and word not in left_out:
            given[word] = value
    seeds = dict.fromkeys(experiment.seed for experiment in experiments.values())
    return {**given, "seeds": list(seeds), "set": list(words["vary"] or ())}


def _run_and_show(
    out: Path,
    names: Iterable[str],
    total: int,
    run: Callable[..., list[Result | Failure]],
    json: bool,
) -> None:
    """Run under a progress line, show the results, and exit with code 1 if a run failed."""
    from ..config.sweep import Sweep

    swept = Sweep(watched(out, names, total, run, json), out)
    _show(swept, json)
    if swept.has_failures:
        raise typer.Exit(1)


def watched(
    out: Path,
    names: Iterable[str],
    total: int,
    run: Callable[..., list[Result | Failure]],
    quiet: bool,
) -> Ends:
    """Run under one progress line for all; how each run ended, by name."""
    from ..config import sweep as library

    return library.watched(out, names, total, run, quiet)


def _show(swept: Sweep, json: bool) -> None:
    from ..config.sweep import state
    from ..runs.report_html import REPORT_FILE as PAGE

    if json:
        summaries = swept.summaries()
        members = []
        for name, end in swept.items():
            members.append({"run": name, **state(end), **(summaries[name] or {})})
        print(jsonlib.dumps({"members": members, "groups": swept.groups()}, indent=1))
        return
    swept.table()
    print(swept.path)
    page = swept.path / PAGE
    if page.is_file():
        print(f"Page: {page}")


def print_plans(
    experiments: Mapping[str, Experiment], federations: Federations, json: bool
) -> None:
    """Print what the runs would send, or their configurations and costs; nothing is trained."""
    import tomllib

    from ..config.sweep import plan_all
    from ..costs.estimate import of_run
    from ..report.tables import format_bytes
    from ..report.terminal import print_pairs

    rows = []
    lines = []
    for name, planned in plan_all(experiments, Path(), federations).items():
        net = planned.experiment.net
        assert net is not None, "a plan has nothing left open"
        cost = of_run(planned.run, net)
        rows.append({"run": name, "config": tomllib.loads(planned.config), "cost": cost})
        up = format_bytes(cost["bytes_up"])
        down = format_bytes(cost["bytes_down"])
        lines.append((name, f"up at most {up}, down at most {down}"))
    if json:
        print(jsonlib.dumps(rows, indent=1))
    else:
        print_pairs(lines)
