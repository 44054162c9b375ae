"""The commands. What needs torch is imported when a command runs, so that help comes at once."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import EngineError, unknown
from . import about
from . import options as o
from .bench import bench
from .export import export
from .first import side_by_side
from .paper import paper
from .sweep import members_of, resume_sweep, sweep

if TYPE_CHECKING:
    from ..api import Result


class Commands(TyperGroup):
    """The commands, in the order they are written here."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or a sentence that names the nearest."""
        found = super().get_command(ctx, cmd_name)
        if found is None:
            raise unknown("command", cmd_name, self.list_commands(ctx))
        return found

    def invoke(self, ctx: Any) -> Any:
        """Do the command; an interruption becomes a sentence here, for typer would drop what it says."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise EngineError(str(stop) or "interrupted before anything was trained.") from stop


app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
Chosen = Annotated[
    str | None,
    typer.Argument(metavar="[METHOD]", help="see: fedgrove list methods", show_default=False),
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


@app.command()
def run(
    ctx: typer.Context,
    method: Chosen = None,
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
    seed: o.Seed = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    out: o.Out = None,
    set: o.Set = None,
    evaluate: o.Evaluate = None,
    no_standardise: o.NoStandardise = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Train a federation and say how well every client is served and what it cost; alone: ca-afp beside fedavg."""
    if method is None:
        return side_by_side(ctx.params)
    from ..api import begin
    from ..report.progress import watching
    from . import arguments

    wanted = arguments.experiment(ctx.params)
    if dry_run:
        return _dry(*arguments.resolved(wanted, data_dir), json)
    total = wanted.rounds or arguments.defaults(wanted, data_dir).rounds
    with arguments.engine(ctx.params) as chosen, watching(total, quiet=json) as watch:
        result = begin(
            wanted, arguments.out_folder(wanted, out), engine=chosen, data_dir=data_dir, watch=watch
        )
    _show(result, json)


@app.command()
def resume(
    ctx: typer.Context,
    run: o.Run,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    json: o.Json = False,
) -> None:
    """Go on with an interrupted run or sweep; the result is the one it would have had."""
    if (Path(run) / "sweep.json").is_file():
        return resume_sweep(run, ctx.params, json)
    from .. import api
    from ..config.toml import read_words
    from ..report.progress import watching
    from ..runs.folder import RunFolder
    from . import arguments

    folder = RunFolder.open(Path(run))
    total = int(read_words(folder.config).get("rounds", 1))
    with (
        arguments.engine(ctx.params) as chosen,
        watching(total, folder.metrics(), quiet=json) as watch,
    ):
        result = api.resume(run, engine=chosen, data_dir=data_dir, watch=watch)
    _show(result, json)


@app.command()
def compare(runs: o.Runs, bytes: o.Bytes = False, json: o.Json = False) -> None:
    """Put runs side by side; a sweep stands for all its runs, and is also compared over seeds."""
    from ..report.over_seeds import over_seeds, print_over_seeds
    from ..report.tables import print_causes, print_summaries

    found = [_summary(path, bytes) for run in runs for path in members_of(run)]
    if json:
        print(jsonlib.dumps(found, indent=1))
    elif bytes:
        print_causes(found)
    else:
        print_summaries(found)
        if len(found) > len(runs) and any(each["finished"] for each in found):
            print()
            print_over_seeds(
                over_seeds({each["run"]: each if each["finished"] else None for each in found})
            )


@app.command()
def cost(
    ctx: typer.Context,
    method: o.Method,
    data: o.Data = None,
    net: o.Net = None,
    input: o.Input = None,
    classes: o.Classes = None,
    partition: o.Partition = None,
    scenario: o.Scenario = None,
    split: o.Split = None,
    clients: o.Clients = None,
    cohort: o.Cohort = None,
    rounds: o.Rounds = None,
    epochs: o.Epochs = None,
    batch: o.BatchSize = None,
    lr: o.Lr = None,
    profile: o.Profile = None,
    seed: o.Seed = None,
    data_dir: o.DataDir = None,
    set: o.Set = None,
    json: o.Json = False,
) -> None:
    """Say what a method would send and need; nothing is trained."""
    from ..report.tables import print_cost
    from . import arguments

    words = ctx.params
    if input is None:
        found = arguments.resolved(arguments.experiment(words), data_dir)[1]
    else:
        found = arguments.cost_of_shape(words)
    found = {"method": method, **found}
    if json:
        print(jsonlib.dumps(found, indent=1))
    else:
        print_cost(found)


app.command("list")(about.list_)
app.command("show")(about.show)
app.command("doctor")(about.doctor)
app.add_typer(bench, name="bench", cls=Commands)
app.command("sweep")(sweep)
app.command("export")(export)
app.command("paper")(paper)


def _dry(wanted: Any, found: dict[str, Any], json: bool) -> None:
    import tomllib

    from ..config.toml import to_toml
    from ..report.tables import print_cost

    text = to_toml(wanted)
    if json:
        print(jsonlib.dumps({"config": tomllib.loads(text), "cost": found}, indent=1))
    else:
        print(text)
        print_cost(found)


def _show(result: Result, json: bool) -> None:
    if json:
        print(jsonlib.dumps(result.summary, indent=1))
    else:
        result.table()
        print(result.folder.path)


def _summary(path: str, bytes: bool = False) -> dict[str, Any]:
    """A run's figures, or how far it got; with the words of its config that the figures lack."""
    from ..config.toml import read_words
    from ..report.tables import NAMES
    from ..runs.folder import RunFolder
    from ..wire.ledger import causes

    folder = RunFolder.open(Path(path))
    words = {k: v for k, v in read_words(folder.config).items() if k in NAMES}
    if bytes:
        words["bytes_causes"] = causes(folder.metrics())
    if folder.summary is not None:
        return {"run": path, "finished": True, **words, **folder.summary}
    return {"run": path, "finished": False, **words, "rounds_done": folder.rounds_saved()}
