"""What the shell completes: names of methods, data, nets and engines, settings, run folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from .catalogue import read_index

Completions = list[tuple[str, str]]
"""Completions, with descriptions that some shells show next to them."""


def _list_of(kind: str) -> Callable[[str], Completions]:
    def complete(incomplete: str) -> Completions:
        return _starting_with(read_index().lists[kind], incomplete)

    return complete


methods = _list_of("methods")
"""Complete methods and their presets on the command line."""
data = _list_of("data")
"""Complete data sets on the command line."""
nets = _list_of("nets")
"""Complete built-in networks on the command line."""
engines = _list_of("engines")
"""Complete engines on the command line."""


def partitions(incomplete: str) -> Completions:
    """Complete partitions on the command line, up to the number that is to be chosen."""
    rows: dict[str, str] = {}
    for name, text in read_index().lists["partitions"]:
        # As far as what is typed literally: numbers stand there as capital letters.
        rows.setdefault(re.split("[A-Z]", name)[0], text)
    return _starting_with(rows.items(), incomplete)


def kinds(incomplete: str) -> Completions:
    """Complete what ``fedgrove list`` lists."""
    return _starting_with(dict.fromkeys(read_index().lists, "").items(), incomplete)


def settings(ctx: typer.Context, incomplete: str) -> Completions:
    """Complete ``--set`` with the settings of the command's method, or of any method."""
    known = read_index()
    typed = ctx.params
    # While an option lacks its value, the parser leaves all arguments where they are.
    named = [typed.get("method"), *(typed.get("methods") or ()), *ctx.args]
    chosen = list(filter(known.settings.__contains__, named)) or known.settings
    # With any recipe: all have nearly the same fields.
    recipe = typed["data"] if typed.get("data") in known.recipes else next(iter(known.recipes))
    paths: dict[str, str] = {}
    for name in chosen:
        for path, text in known.settings_with(name, recipe):
            paths.setdefault(f"{path}=", text)
    return _starting_with(paths.items(), incomplete)


def runs(incomplete: str) -> Completions:
    """Complete run folders and sweeps: those under what was typed, else those under runs."""
    typed = Path(incomplete or "runs/")
    place = typed if incomplete.endswith("/") or not incomplete else typed.parent
    rows = []
    for path in sorted(place.glob("*/")):
        if (path / "summary.json").is_file():
            rows.append((str(path), "finished"))
        elif (path / "config.toml").is_file() or (path / "sweep.json").is_file():
            rows.append((str(path), ""))
        elif any(path.glob("*/config.toml")):
            rows.append((f"{path}/", "runs"))
    return _starting_with(rows, incomplete)


def _starting_with(rows: Iterable[tuple[str, str]], incomplete: str) -> Completions:
    return [(name, text) for name, text in rows if name.startswith(incomplete)]
