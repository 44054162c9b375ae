"""The lab's commands, ``fedgrove paper`` and ``fedgrove bench``."""

from __future__ import annotations

from typing import Any

import typer

from .bench import bench
from .paper import paper


def add_commands(app: typer.Typer, group: type[Any]) -> None:
    """Add the lab's commands to fedgrove's own."""
    app.command("paper")(paper)
    app.add_typer(bench, name="bench", cls=group)
