"""The lab's commands, ``fedgrove paper`` and ``fedgrove bench``."""

from __future__ import annotations

from typing import Any

import typer

from fedgrove.cli.parameters import add_command

from .bench import bench
from .paper import PaperOptions, paper


def add_commands(app: typer.Typer, group: type[Any]) -> None:
    """Add the lab's commands to fedgrove's own."""
    add_command(app, "paper", PaperOptions, paper)
    app.add_typer(bench, name="bench", cls=group)
