"""``fedgrove run``, ``rerun``, ``resume`` and ``cost``: one run, and what it would cost.

What needs torch is imported when a command runs, so that help comes at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import field
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..options import CostOptions, RerunOptions, ResumeOptions, RunOptions
from ..options.definition import Options, argument, names_of, option, option_class
from ..options.groups import (
    METHOD,
    DataDirOption,
    DryRunOption,
    EngineOptions,
    EvaluateOption,
    ExchangeOptions,
    JsonOption,
    MoreRoundsOption,
    ScoringOptions,
    TrustOption,
)
from ..report.terminal import load_torch, show_status
from .catalogue import read_index
from .four_methods import run_four_methods
from .sweep import resume_sweep

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..config.plan import Plan
    from ..runs.result import Result


@option_class
class RunCommand(JsonOption, DryRunOption, TrustOption, RunOptions):
    """Options of the command."""

    config: str | None = option(
        None,
        "Read options and settings from a file or an earlier run; options given here override "
        "them.",
        "FILE.toml|RUN",
        complete="runs",
        only="command line",
    )


def run(options: RunCommand) -> None:
    """Train a federation, and report the scores of its clients.

    Without a method, compare grove and ca-afp with fedavg and with training alone, on motion.
    """
    has_method = "method" in options.given or options.config is not None
    if has_method or options.smoke:
        run_one(options, options.config, options.trust)
        return
    options.check()
    load_torch(quiet=options.json)
    run_four_methods(options, options.dry_run, options.json)
    # The first command on a new machine: from here on `list` and completion come at once.
    read_index()


@option_class
class RerunCommand(JsonOption, DryRunOption, RerunOptions):
    """Options of the command."""


def rerun(options: RerunCommand) -> None:
    """Repeat a run in a new folder, perhaps with other options.

    Options that describe the experiment and are not given keep the values of that run; for them the
    defaults below do not apply.
    """
    run_one(options, options.path, options.trust)


def run_one(options: RunCommand | RerunCommand, config: str | Path | None, trust: bool) -> None:
    """Train one run for a command, or only plan it or test it quickly, and print the result."""
    with show_status("loading torch", quiet=options.json) as say:
        from .. import api
        from ..config.assemble import make_experiment
        from ..config.cost import expect_bytes
        from ..config.experiment import Federations
        from ..config.plan import plan

        say("reading the data")
        federations = Federations(options.data_dir)
        experiment = make_experiment(options, federations, config, trust, options)
    if options.smoke:
        return _run_quickly(experiment, federations, options)
    if options.dry_run:
        planned = plan(experiment, Path(), federations)
        says = show_status("trying the first rounds", quiet=options.json)
        with api.open_engine(options) as engine, says:
            expected = expect_bytes(planned, federations, engine)
        return _print_plan(planned, expected, options.json)
    _show(api.train_kept(experiment, federations, options), options.json)


def _run_quickly(
    experiment: Experiment, federations: Federations, options: RunCommand | RerunCommand
) -> None:
    """Go through every stage once on a few examples; nothing is kept without --out."""
    from .. import api, methods
    from ..config.smoke import smoke
    from ..report.terminal import print_pairs
    from ..runs.files import read_checksums

    name = methods.name_of(experiment.method)
    begun = time.monotonic()
    small = smoke(experiment, federations)
    planned_at = time.monotonic()
    ends: list[float] = []

    def note(line: Mapping[str, Any]) -> None:
        ends.append(time.monotonic())

    result = api.train_experiment(small, options.out, federations, options, watch=note)
    trained_at = time.monotonic()
    # Every file, compared with its checksum: what was saved can be read.
    for file in read_checksums(result.folder.path):
        result.folder.read(file)
    seconds = {
        "data, net, method": planned_at - begun,
        "first round": ends[0] - planned_at,
        "other rounds": ends[-1] - ends[0],
        "fine-tuning, scoring, saving": trained_at - ends[-1],
        "reading back": time.monotonic() - trained_at,
    }
    if options.json:
        rounded = {stage: round(spent, 3) for stage, spent in seconds.items()}
        print(json.dumps({"method": name, "works": True, "seconds": rounded}, indent=1))
        return
    print_pairs([(stage, f"{spent:.1f} s") for stage, spent in seconds.items()])
    kept = "nothing was kept" if options.out is None else f"in {options.out}"
    print(f"{name} works: {small.rounds} rounds, {len(small.data.clients)} clients, {kept}.")


def _print_plan(planned: Plan, expected: Mapping[str, int], as_json: bool) -> None:
    """Print the complete configuration and the cost, with the bytes that a trial expects."""
    import tomllib

    from ..config.cost import estimate_plan_cost, print_cost

    cost = {**estimate_plan_cost(planned), **expected}
    if as_json:
        print(json.dumps({"config": tomllib.loads(planned.config), "cost": cost}, indent=1))
    else:
        print(planned.config)
        print_cost(cost)


def _show(result: Result, as_json: bool) -> None:
    """Print the result of ``fedgrove run``, as a table or as JSON."""
    from ..runs.report_html import REPORT_FILE as PAGE

    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    result.table()
    print(result.folder.path)
    page = result.folder.path / PAGE
    if page.is_file():
        print(f"Page: {page}")


# ---- resume --------------------------------------------------------------------------------------


@option_class
class ResumeCommand(
    Options, JsonOption, TrustOption, MoreRoundsOption, DataDirOption, EngineOptions
):
    """Options of the command."""

    run: str | None = option(
        None,
        "A run folder; by default the newest unfinished run under runs/.",
        "[RUN]",
        complete="runs",
        is_argument=True,
    )


def resume(options: ResumeCommand) -> None:
    """Resume an interrupted run or sweep, or continue for more rounds.

    The interruption does not change the result.
    """
    options.check()
    path = options.run
    if path is None:
        from ..runs.files import RUNS

        path = str(find_unfinished(RUNS))
        print(f"fedgrove: resuming {path}", file=sys.stderr)
    load_torch(quiet=options.json)
    is_of_several = any((Path(path) / name).is_file() for name in ("sweep.json", "choice.json"))
    if is_of_several and options.rounds is not None:
        raise InputError(
            f"rounds is {options.rounds}, and {path} contains several runs, which are equally "
            "long; start longer ones in a new folder."
        )
    if (Path(path) / "sweep.json").is_file():
        return resume_sweep(path, options, options.trust, options.data_dir, options.json)
    if (Path(path) / "choice.json").is_file():
        raise InputError(
            f"{path} contains a choice between methods; to continue, repeat its command: "
            f"fedgrove choose ... --out {path}"
        )
    from .. import api

    given = options.given_of(ResumeOptions)
    result = api.resume(path, **given, progress=not options.json)
    _show(result, options.json)


def find_unfinished(place: Path) -> Path:
    """Find the run that ``fedgrove resume`` continues: unfinished, and written to last.

    One that another process is training is left out.
    """
    from ..runs.lock import is_locked

    unfinished = list(filterfalse(_is_finished, find_runs(place)))
    free = list(filterfalse(is_locked, unfinished))
    if not free:
        busy = f" ({len(unfinished)} are being trained now)" if unfinished else ""
        raise InputError(
            f"there is no unfinished run under {place}{busy}; give a run folder: "
            "fedgrove resume RUN"
        )
    return max(free, key=last_written)


def find_runs(place: Path) -> list[Path]:
    """Find the run folders and sweeps in a folder that a command names."""
    markers = [*place.glob("*/config.toml"), *place.glob("*/sweep.json")]
    return sorted({path.parent for path in markers if path.is_file()})


def _is_finished(path: Path) -> bool:
    if (path / "sweep.json").is_file():
        return all(_is_finished(member.parent) for member in path.glob("*/config.toml"))
    return (path / "summary.json").is_file()


def last_written(path: Path) -> float:
    """Return when anything in a folder was last written, for ``resume`` and ``watch``."""
    times = [path.stat().st_mtime]
    for pattern in ("*", "*/*"):
        times.extend(each.stat().st_mtime for each in path.glob(pattern))
    return max(times)


# ---- cost ----------------------------------------------------------------------------------------


@option_class
class CostCommand(JsonOption, CostOptions):
    """Options of the command."""

    # They do not change the cost; Python takes them, so that one call serves run and cost.
    not_typed = tuple(names_of(ExchangeOptions, ScoringOptions, EvaluateOption))
    methods: Any = field(
        metadata=argument(METHOD, "METHOD...", complete="methods", is_repeated=True)
    )


def cost(options: CostCommand) -> None:
    """Estimate bytes, computation, memory and time without training."""
    options.check()
    load_torch(quiet=options.json)
    from ..config.cost import estimate_costs, print_cost, print_costs

    def warn(sentence: str) -> None:
        print(f"fedgrove: {sentence}", file=sys.stderr)

    rows = estimate_costs(options, warn)
    # One method is an object, several are a list.
    if options.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1))
    elif len(rows) == 1:
        print_cost(rows[0])
    else:
        print_costs(rows)
