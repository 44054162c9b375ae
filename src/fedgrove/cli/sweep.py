"""``fedgrove sweep`` and ``fedgrove choose``: many runs in lockstep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..options import ChooseOptions, SweepOptions
from ..options.definition import option_class
from ..options.groups import DryRunOption, EngineOptions, JsonOption
from ..report.terminal import load_torch

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..config.sweep import Sweep


@option_class
class SweepCommand(JsonOption, DryRunOption, SweepOptions):
    """Options of the command."""


def sweep(options: SweepCommand) -> None:
    """Train methods with all values of --set on several seeds.

    Every method is trained with every combination of the values on every seed. The tables have
    every run, and means over seeds.
    """
    options.check()
    load_torch(quiet=options.json)
    from .. import api
    from ..config.experiment import Federations
    from ..config.grid import make_grid

    federations = Federations(options.data_dir)
    experiments = make_grid(options, federations)
    if options.dry_run:
        return print_plans(experiments, federations, options.json)
    _show(api.train_grid(experiments, federations, options, options.out), options.json)


def resume_sweep(
    out: str, engine: EngineOptions, trust: bool, data_dir: str | Path | None, as_json: bool
) -> None:
    """Resume an interrupted sweep."""
    from ..api import open_engine
    from ..config import sweep as library

    experiments = library.experiments_of(out, trust)
    total = sum(experiment.rounds or 0 for experiment in experiments.values())
    with open_engine(engine) as opened:
        train = partial(library.resume, out, engine=opened, data_dir=data_dir, trust=trust)
        ends = library.watched(Path(out), experiments, total, train, as_json)
    _show(library.Sweep(ends, Path(out)), as_json)


def _show(swept: Sweep, as_json: bool) -> None:
    """Show the results; the exit code is 1 if a run failed."""
    from ..config.sweep import state
    from ..runs.report_html import REPORT_FILE as PAGE

    if as_json:
        summaries = swept.summaries()
        members = []
        for name, end in swept.items():
            members.append({"run": name, **state(end), **(summaries[name] or {})})
        print(json.dumps({"members": members, "groups": swept.groups()}, indent=1))
    else:
        swept.table()
        print(swept.path)
        page = swept.path / PAGE
        if page.is_file():
            print(f"Page: {page}")
    if swept.has_failures:
        raise typer.Exit(1)


def print_plans(
    experiments: Mapping[str, Experiment], federations: Federations, as_json: bool
) -> None:
    """Print what the runs would send, or their configurations and costs; nothing is trained."""
    import tomllib

    from ..config.cost import estimate_plan_cost
    from ..config.sweep import plan_all
    from ..report.tables import format_bytes
    from ..report.terminal import print_pairs

    rows = []
    lines = []
    for name, planned in plan_all(experiments, Path(), federations).items():
        cost = estimate_plan_cost(planned)
        rows.append({"run": name, "config": tomllib.loads(planned.config), "cost": cost})
        up = format_bytes(cost["bytes_up"])
        down = format_bytes(cost["bytes_down"])
        lines.append((name, f"up at most {up}, down at most {down}"))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_pairs(lines)


@option_class
class ChooseCommand(JsonOption, ChooseOptions):
    """Options of the command."""


def choose(options: ChooseCommand) -> None:
    """Try suitable methods for some rounds, and recommend one.

    Methods are compared on validation data. Methods that exceed --budget or --size, or do not fit
    the devices of --profile, are skipped, with the reason. Below the table are the recommendation,
    the reason for it, and the command for the full run.
    """
    options.check()
    load_torch(quiet=options.json)
    from ..choosing.choose import choose_method

    found = choose_method(options)
    if options.json:
        print(json.dumps(found.found, indent=1))
    else:
        found.table()
