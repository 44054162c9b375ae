"""docs/options.md, from the definitions of the options."""

from __future__ import annotations

from typing import Any

import typer
from generate import ROOT, Files

from fedgrove.cli.app import app
from fedgrove.cli.parameters import typed_options
from fedgrove.options import groups
from fedgrove.options.definition import Field, options_of

HEAD = """# Options

The options of runs, sweeps, costs and choices, as they are written on the command line and in
Python (`fedgrove.run(rounds=10)`). The last column names the commands that take an option; the
function of the same name takes it too. For all other commands see their `--help`.
`tools/generate.py` writes this page from the definitions in `fedgrove.options`.
"""


def command_classes() -> dict[str, type]:
    """The class of options of each command; commands of the lab are left out."""
    found = {}
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        options = getattr(command.callback, "options", None)
        if options is not None and options.__module__.startswith("fedgrove."):
            found[name] = options
    return found


def page() -> Files:
    """The page with all options."""
    commands = command_classes()
    tables: dict[str, list[str]] = {}
    in_groups: dict[str, set[str]] = {name: set() for name in commands}
    for cls in vars(groups).values():
        if not isinstance(cls, type) or cls.__module__ != groups.__name__:
            continue
        heading = (cls.__doc__ or "").partition(":")[0]
        taken_by = [name for name, options in commands.items() if issubclass(options, cls)]
        for field in own_fields(cls):
            names = []
            for name in taken_by:
                if field == options_of(commands[name])[field.name]:
                    in_groups[name].add(field.name)
                    if field in typed_options(commands[name]):
                        names.append(name)
            tables.setdefault(heading, []).append(row(field, ", ".join(names)))
    for name in ("run", "sweep", "cost", "choose"):
        for field in typed_options(commands[name]):
            if field.name not in in_groups[name]:
                tables.setdefault(f"Only fedgrove {name}", []).append(row(field, name))
    parts = [HEAD]
    for heading, rows in tables.items():
        head = "| command line | Python | meaning | commands |\n|---|---|---|---|\n"
        parts.append(f"## {heading}\n\n{head}" + "\n".join(rows) + "\n")
    return {ROOT / "docs" / "options.md": "\n".join(parts)}


def own_fields(cls: type) -> list[Field]:
    """The options that a class itself defines."""
    own = vars(cls).get("__annotations__", {})
    return [field for field in options_of(cls).values() if field.name in own]


def row(field: Field, commands: str) -> str:
    """A row of a table."""
    typed = ""
    if field.option.is_argument:
        typed = f"`{field.option.metavar.strip('[]')}`"
    elif field.option.only != "python":
        typed = f"`{field.flag} {field.option.metavar}".strip() + "`"
    in_python = "" if field.option.only == "command line" else f"`{field.name}`"
    cells = [typed, in_python, field.describe(), commands]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
