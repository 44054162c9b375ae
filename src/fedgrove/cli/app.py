"""The commands. What needs torch is imported when a command runs, so that help comes at once."""

from __future__ import annotations

import importlib.util
import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from typer.core import TyperGroup

from ..errors import EngineError, InputError, check, together, unknown
from ..report.terminal import load_torch, show_status
from . import about, complete, deploy
from . import options as o
from .choose import choose
from .everyday import SMOKED, newest_unfinished, try_out
from .export import export
from .first import side_by_side
from .index import index
from .new import new
from .report import report, write_compared
from .sweep import resume_sweep, sweep
from .watch import watch

if TYPE_CHECKING:
    from ..config.plan import Plan
    from ..runs.result import Result


LAB_COMMANDS = ("paper", "bench")
"""Commands that the second package of the repository, fedgrove_lab, adds where it can be found."""


class Commands(TyperGroup):
    """The commands, in the order they are written here."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or a sentence that names the nearest."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in LAB_COMMANDS:
            raise InputError(
                f"fedgrove {cmd_name} is part of the package fedgrove_lab, which is not installed; "
                "in a clone of the repository install it with: pip install -e lab"
            )
        if command is None:
            raise unknown("command", cmd_name, self.list_commands(ctx))
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an interruption becomes a sentence, as typer would drop its text."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise EngineError(str(stop) or "interrupted before anything was trained.") from stop


# Some versions of typer escape the brackets around defaults for rich, which our help does not use.
typer.core.HAS_RICH = False
app = typer.Typer(cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False)
Chosen = Annotated[
    str | None,
    typer.Argument(
        metavar="[METHOD]",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
        autocompletion=complete.methods,
    ),
]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]


@app.callback(invoke_without_command=True)
def top(ctx: typer.Context, version: Version = False) -> None:
    """Federated learning that grows a small, personal model for every device."""
    if version:
        from .. import __version__

        print(__version__)
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(cls=o.RunCommand)
def run(
    ctx: typer.Context,
    method: Chosen = None,
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
    seed: o.Seed = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    out: o.Out = None,
    set: o.Set = None,
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
    config: o.Config = None,
    trust: o.Trust = False,
    smoke: o.Smoke = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Train a federation and report how well every client is served and what it cost.

    Without a method: grove and ca-afp beside fedavg and training alone.
    """
    wrong = ctx.meta[o.WRONG]
    if method is None and config is None and not smoke:
        if wrong:
            raise together(wrong)
        load_torch(quiet=json)
        side_by_side(ctx.params)
        # The first command on a new machine: from here on `list` and completion come at once.
        index()
        return
    with show_status("loading torch", quiet=json) as say:
        from .. import api
        from ..config.experiment import Federations
        from ..config.plan import plan
        from . import arguments

        if method is None and config is None:
            ctx.params["method"] = SMOKED
        say("reading the data")
        federations = Federations(data_dir)
        experiment = arguments.experiment(ctx.params, federations, wrong)
    if smoke:
        return try_out(experiment, federations, ctx.params)
    folder = arguments.out_folder(experiment, method, out)
    if dry_run:
        return _print_plan(plan(experiment, folder, federations), json)
    result = api.train(
        experiment,
        folder,
        federations=federations,
        engine=engine,
        device=device,
        precision=precision,
        timeout=timeout,
        progress=not json,
    )
    _show(result, json)


@app.command()
def resume(
    ctx: typer.Context,
    run: o.Unfinished = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    timeout: o.Timeout = None,
    data_dir: o.DataDir = None,
    trust: o.Trust = False,
    json: o.Json = False,
) -> None:
    """Resume an interrupted run or sweep; the result is the one it would have had."""
    if run is None:
        run = str(newest_unfinished(Path("runs")))
        print(f"fedgrove: resuming {run}", file=sys.stderr)
    load_torch(quiet=json)
    if (Path(run) / "sweep.json").is_file():
        return resume_sweep(run, ctx.params, json)
    if (Path(run) / "choice.json").is_file():
        raise InputError(
            f"{run} holds a choice between methods; to go on with it give its command again: "
            f"fedgrove choose ... --out {run}"
        )
    from .. import api

    result = api.resume(
        run,
        engine=engine,
        device=device,
        precision=precision,
        timeout=timeout,
        data_dir=data_dir,
        trust=trust,
        progress=not json,
    )
    _show(result, json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def rerun(ctx: typer.Context, run: o.Run) -> None:
    """Run again what a run folder holds, in a folder of its own.

    Flags of ``fedgrove run`` may follow, as --seed 3; they take the place of what was.
    """
    assert ctx.parent is not None
    command: Any = ctx.parent.command
    again = command.get_command(ctx.parent, "run")
    with again.make_context("run", ["--config", run, *ctx.args], parent=ctx.parent) as inner:
        again.invoke(inner)


@app.command()
def compare(
    runs: o.Runs,
    bytes: o.Bytes = False,
    time: o.Time = False,
    to: o.To = None,
    plot: o.Plot = None,
    page: o.ComparePage = None,
    table: o.Table = None,
    json: o.Json = False,
) -> None:
    """Show runs side by side; a sweep stands for all its runs, and is also compared over seeds."""
    check(time or to is None, "--to", to, "given together with --time")
    check(time or plot is None, "--plot", plot, "given together with --time")
    check(not (time and bytes), "--time", time, "given without --bytes")
    for option, path in (("--page", page), ("--table", table)):
        check(not (path and (time or bytes)), option, path, "given without --time or --bytes")
    if time:
        return _compare_times(runs, to, plot, json)
    from ..config.compared import compared

    found = compared(runs, bytes)
    if json:
        print(jsonlib.dumps(found.rows, indent=1))
    else:
        found.table()
    if not bytes:
        write_compared(found, page, table, quiet=json)


@app.command(cls=o.Gathering)
def cost(
    ctx: typer.Context,
    methods: o.Methods,
    data: o.Data = None,
    label: o.Label = None,
    client: o.ClientColumn = None,
    window: o.Window = None,
    stride: o.Stride = None,
    channels: o.Channels = None,
    time: o.TimeColumn = None,
    net: o.Net = None,
    freeze: o.Freeze = None,
    input: o.Input = None,
    classes: o.Classes = None,
    examples: o.TrainedExamples = None,
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
    profile: o.Profile = None,
    trace: o.Trace = None,
    seed: o.Seed = None,
    data_dir: o.DataDir = None,
    set: o.Set = None,
    json: o.Json = False,
) -> None:
    """Print what methods would send and need, and how long their devices take; train nothing."""
    load_torch(quiet=json)
    from ..costs.cost_tables import print_cost, print_costs
    from . import arguments

    rows = arguments.costs(ctx.params)
    if len(rows) == 1:
        # One method is an object, several are a list.
        if json:
            print(jsonlib.dumps(rows[0], indent=1))
        else:
            print_cost(rows[0])
    elif json:
        print(jsonlib.dumps(rows, indent=1))
    else:
        print_costs(rows)


app.command("watch")(watch)
app.command("new")(new)
app.command("list")(about.list_)
app.command("show")(about.show)
app.command("doctor")(about.doctor)
app.command("sweep", cls=o.Gathering)(sweep)
app.command("choose", cls=o.Gathering)(choose)
app.command("export")(export)
app.command("app", cls=o.RunCommand)(deploy.app)
app.command("keys")(deploy.keys)
app.command("report")(report)
# By import, not by entry point: on a machine where nothing is installed only PYTHONPATH is set.
if importlib.util.find_spec("fedgrove_lab") is not None:
    from fedgrove_lab.cli import add_commands

    add_commands(app, Commands)


def _print_plan(planned: Plan, json: bool) -> None:
    """The whole configuration and the cost."""
    import tomllib

    from ..config.estimates import cost_of_plan
    from ..costs.cost_tables import print_cost

    figures = cost_of_plan(planned)
    if json:
        config = tomllib.loads(planned.config)
        print(jsonlib.dumps({"config": config, "cost": figures}, indent=1))
    else:
        print(planned.config)
        print_cost(figures)


def _show(result: Result, json: bool) -> None:
    from ..runs.report_html import REPORT_FILE as PAGE

    if json:
        print(jsonlib.dumps(result.summary, indent=1))
    else:
        result.table()
        print(result.folder.path)
        page = result.folder.path / PAGE
        if page.is_file():
            print(f"Page: {page}")


def _compare_times(runs: list[str], to: float | None, plot: str | None, json: bool) -> None:
    """Virtual time to an accuracy, as a table and as a page."""
    from ..config.compared import summary_of
    from ..config.sweep import members_of
    from ..report.page import check_place
    from ..report.time_to_target import find_times, print_times, read_curve, write_time_report
    from ..runs.files import cannot_write
    from ..runs.folder import RunFolder

    if plot is not None:
        check_place(Path(plot))
    curves = []
    for run in runs:
        for path in members_of(run):
            summary = summary_of(path)
            lines = RunFolder.open(Path(path)).metrics()
            method = summary.get("method", "")
            curves.append(read_curve(path, method, lines, summary["finished"]))
    found = find_times(curves, to)
    if plot is not None:
        try:
            write_time_report(curves, found, Path(plot))
        except OSError as error:
            raise cannot_write(Path(plot), error) from None
    if json:
        print(jsonlib.dumps(found, indent=1))
        return
    print_times(curves, found)
    if plot is not None:
        print(f"Page: {plot}")
