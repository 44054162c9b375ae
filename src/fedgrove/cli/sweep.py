"""``fedgrove sweep``: a grid of runs in lockstep."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o

if TYPE_CHECKING:
    from ..api import Experiment, Result
    from ..config.sweep import Failure

Ends = dict[str, "Result | Failure"]


def seeds_of(text: str) -> Any:
    """How many seeds, from 0 on, or the seeds themselves with commas between.

    >>> seeds_of("3"), seeds_of("3,5,7"), seeds_of("4,")
    ((0, 1, 2), (3, 5, 7), (4,))
    """
    words = text.removesuffix(",").split(",")
    if not all(word.strip().isdecimal() for word in words) or text.strip() == "0":
        raise typer.BadParameter(
            f"is '{text}'; it must be how many, as 10, or the seeds themselves, as 3,5,7 or 4,"
        )
    return tuple(map(int, words)) if "," in text else tuple(range(int(text)))


def _option(flag: str, help: str, metavar: str, parser: Any = None) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, parser=parser, show_default=False)


Methods = Annotated[
    list[str], typer.Argument(metavar="METHOD...", help="see: fedgrove list methods")
]
Seeds = Annotated[
    Any, _option("--seeds", "How many, from 0 on, or which: 3,5,7; else seed 0.", "N|S,S", seeds_of)
]
Vary = Annotated[
    list[str] | None,
    _option(
        "--set",
        "A field and its values, as mu=0.1,1; | separates values that are lists.",
        "KEY=VALUE,VALUE",
    ),
]
Out = Annotated[
    str | None, _option("--out", "The sweep's folder; the same sweep in it is continued.", "DIR")
]


def sweep(
    ctx: typer.Context,
    methods: Methods,
    seeds: Seeds = None,
    data: o.Data = None,
    net: o.Net = None,
    partition: o.Partition = None,
    scenario: o.Scenario = None,
    split: o.Split = None,
    clients: o.Clients = None,
    cohort: o.Cohort = None,
    rounds: o.Rounds = None,
    epochs: o.Epochs = None,
    batch: o.BatchSize = None,
    lr: o.Lr = None,
    finetune: o.Finetune = None,
    profile: o.Profile = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    out: Out = None,
    vary: Vary = None,
    evaluate: o.Evaluate = None,
    no_standardise: o.NoStandardise = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Train every method with every value of every --set on every seed, in lockstep, and compare over seeds."""
    from ..config import sweep as library
    from ..runs.folder import fresh_name
    from . import arguments

    wanted = experiments(ctx.params)
    if dry_run:
        return dry(wanted, data_dir, json)
    first = next(iter(wanted.values()))
    total = (first.rounds or arguments.defaults(first, data_dir).rounds) * len(wanted)
    place = (
        Path(out)
        if out is not None
        else fresh_name(Path("runs"), f"sweep-{Path(str(first.data)).stem}")
    )
    grid = _grid(ctx.params, wanted)
    with arguments.engine(ctx.params) as chosen:
        run = partial(library.sweep, wanted, place, engine=chosen, data_dir=data_dir, grid=grid)
        _go(place, wanted, total, run, json)


def resume_sweep(out: str, words: Mapping[str, Any], json: bool) -> None:
    """Go on with an interrupted sweep."""
    from ..config import sweep as library
    from . import arguments

    wanted = library.experiments_of(out)
    total = sum(experiment.rounds or 0 for experiment in wanted.values())
    with arguments.engine(words) as chosen:
        run = partial(library.resume, out, engine=chosen, data_dir=words.get("data_dir"))
        _go(Path(out), wanted, total, run, json)


def members_of(path: str) -> list[str]:
    """The run folders of a sweep; a folder that is none stands for itself."""
    from ..config import sweep as library

    if not (Path(path) / library.FILE).is_file():
        return [path]
    return [str(Path(path) / name) for name in library.read(path)["members"]]


def experiments(words: Mapping[str, Any]) -> dict[str, Experiment]:
    """The grid the words ask for; the data set's recipe is looked up once."""
    from ..config.grid import grid
    from . import arguments

    first = {**words, "method": words["methods"][0], **dict.fromkeys(("set", *arguments.SUGAR))}
    base = arguments.experiment(first)
    recipe = arguments.recipe(base, words.get("data_dir"))
    sugar = [
        f"{path}={words[word]}"
        for word, path in arguments.SUGAR.items()
        if words.get(word) is not None
    ]
    return grid(
        words["methods"], base, words["seeds"] or (0,), [*(words["vary"] or ()), *sugar], recipe
    )


def _grid(words: Mapping[str, Any], wanted: Mapping[str, Experiment]) -> dict[str, Any]:
    """What was arguments, for sweep.json; folders and engines decide no result and are left out."""
    beside = (
        "seeds",
        "vary",
        "engine",
        "device",
        "precision",
        "data_dir",
        "out",
        "dry_run",
        "json",
    )
    given = {k: v for k, v in words.items() if v not in (None, False) and k not in beside}
    seeds = list(dict.fromkeys(experiment.seed for experiment in wanted.values()))
    return {**given, "seeds": seeds, "set": list(words["vary"] or ())}


def _go(
    out: Path,
    wanted: Iterable[str],
    total: int,
    run: Callable[..., list[Result | Failure]],
    json: bool,
) -> None:
    """Run under a progress line, show the results, and end with code 1 where a run failed."""
    from ..config.sweep import Failure

    ends = watched(out, wanted, total, run, json)
    _show(out, ends, json)
    if any(isinstance(end, Failure) for end in ends.values()):
        raise typer.Exit(1)


def watched(
    out: Path,
    wanted: Iterable[str],
    total: int,
    run: Callable[..., list[Result | Failure]],
    quiet: bool,
) -> Ends:
    """Run under one progress line for all; how each run ended, by name."""
    from ..report.progress import watching
    from ..runs.folder import RunFolder

    names, summed = list(wanted), _Summed()
    past = [summed(name, line) for name in names for line in RunFolder(out / name).metrics()]
    with watching(total, past, quiet=quiet) as watch:
        return dict(
            zip(names, run(watch=lambda line: watch(summed(line["run"], line))), strict=True)
        )


class _Summed:
    """Lines of many runs as if they were one: its round is the sum of theirs, its accuracy their mean."""

    def __init__(self) -> None:
        self.last: dict[str, Mapping[str, Any]] = {}
        self.accuracy: dict[str, float] = {}

    def __call__(self, name: str, line: Mapping[str, Any]) -> Mapping[str, Any]:
        self.last[name] = line
        if "accuracy_mean" in line:
            self.accuracy[name] = line["accuracy_mean"]
        mean = (
            {"accuracy_mean": sum(self.accuracy.values()) / len(self.accuracy)}
            if self.accuracy
            else {}
        )
        return {**line, **mean, "round": sum(last["round"] for last in self.last.values())}


def _show(out: Path, ends: Ends, json: bool) -> None:
    from ..config.sweep import Failure, state
    from ..report.over_seeds import over_seeds, print_over_seeds
    from ..report.tables import print_pairs, print_summaries

    done = {name: None if isinstance(end, Failure) else end.summary for name, end in ends.items()}
    found = over_seeds(done)
    if json:
        members = [{"run": name, **state(end), **(done[name] or {})} for name, end in ends.items()]
        print(jsonlib.dumps({"members": members, "groups": found}, indent=1))
        return
    if found:
        print_summaries(
            [{"run": name, **summary} for name, summary in done.items() if summary is not None]
        )
        print()
        print_over_seeds(found)
    failed = [(name, end) for name, end in ends.items() if isinstance(end, Failure)]
    print_pairs(
        [
            (name, f"failed after {end.folder.rounds_saved()} rounds: {end.why}")
            for name, end in failed
        ]
    )
    print(out)


def dry(wanted: Mapping[str, Experiment], data_dir: str | None, json: bool) -> None:
    """Say what the runs would send, or print their configurations and costs; nothing is trained."""
    import tomllib

    from ..config.sweep import planned
    from ..config.toml import to_toml
    from ..cost.estimate import of_run
    from ..report.tables import mib, print_pairs

    with planned(wanted, data_dir) as plans:
        costs = {
            name: of_run(p.run, p.experiment.net or p.run.federation.defaults.net)
            for name, p in plans.items()
        }
    if json:
        configs = {name: tomllib.loads(to_toml(p.experiment)) for name, p in plans.items()}
        print(
            jsonlib.dumps(
                [{"run": n, "config": configs[n], "cost": costs[n]} for n in plans], indent=1
            )
        )
    else:
        said = [
            (n, f"up at most {mib(c['bytes_up'])}, down at most {mib(c['bytes_down'])}")
            for n, c in costs.items()
        ]
        print_pairs(said)
