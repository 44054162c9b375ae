"""The command ``fedgrove`` and its commands, in the order in which help lists them."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any

import typer
import typer.core
from typer.core import TyperGroup

from ..errors import EngineError, InputError, unknown
from .catalogue import DoctorOptions, ListOptions, ShowOptions, doctor, list_, show
from .compare import CompareOptions, ReportOptions, compare, report
from .deploy import AppOptions, KeysOptions, ProxyOptions, app_, keys, proxy
from .export import ExportOptions, export
from .new import NewOptions, new
from .parameters import add_command
from .predict import PredictOptions, predict
from .run import CostCommand, RerunCommand, ResumeCommand, RunCommand, cost, rerun, resume, run
from .sweep import ChooseCommand, SweepCommand, choose, sweep
from .watch import WatchOptions, watch

LAB_COMMANDS = ("paper", "bench")
"""Commands that the second package of the repository, fedgrove_lab, adds where it can be found."""


class Commands(TyperGroup):
    """The commands, in the order they are written here."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name, or fail with a sentence that names the nearest."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in LAB_COMMANDS:
            raise InputError(
                f"fedgrove {cmd_name} is part of the package fedgrove_lab, which is not installed; "
                "in a clone of the repository install it with: pip install -e lab, or put lab/src "
                "on PYTHONPATH."
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


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning that grows a small, personal model for every device."""
    if version:
        from .. import __version__

        print(__version__)
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


add_command(app, "run", RunCommand, run)
add_command(app, "resume", ResumeCommand, resume)
add_command(app, "rerun", RerunCommand, rerun)
add_command(app, "compare", CompareOptions, compare)
add_command(app, "cost", CostCommand, cost)
add_command(app, "watch", WatchOptions, watch)
add_command(app, "new", NewOptions, new)
add_command(app, "list", ListOptions, list_)
add_command(app, "show", ShowOptions, show)
add_command(app, "doctor", DoctorOptions, doctor)
add_command(app, "sweep", SweepCommand, sweep)
add_command(app, "choose", ChooseCommand, choose)
add_command(app, "predict", PredictOptions, predict)
add_command(app, "export", ExportOptions, export)
add_command(app, "app", AppOptions, app_)
add_command(app, "keys", KeysOptions, keys)
add_command(app, "proxy", ProxyOptions, proxy)
add_command(app, "report", ReportOptions, report)
# By import, not by entry point: on a machine where nothing is installed only PYTHONPATH is set.
if importlib.util.find_spec("fedgrove_lab") is not None:
    from fedgrove_lab.cli import add_commands

    add_commands(app, Commands)
