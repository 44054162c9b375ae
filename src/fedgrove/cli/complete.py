"""What the shell completes: names of methods, data, nets and engines, settings, run folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from .catalogue import Rows, read_index

Completions = list[tuple[str, str]]
"""Completions, with descriptions that some shells show next to them."""


def methods(incomplete: str) -> Completions:
    """Complete methods and their presets on the command line."""
    return _starting_with(read_index().lists["methods"], incomplete)


def data(incomplete: str) -> Completions:
    """Complete data sets on the command line."""
    return _starting_with(read_index().lists["data"], incomplete)


def nets(incomplete: str) -> Completions:
    """Complete built-in networks on the command line."""
    return _starting_with(read_index().lists["nets"], incomplete)


def engines(incomplete: str) -> Completions:
    """Complete engines on the command line."""
    return _starting_with(read_index().lists["engines"], incomplete)


def kinds(incomplete: str) -> Completions:
    """Complete what ``fedgrove list`` lists."""
    return _starting_with([(kind, "") for kind in read_index().lists], incomplete)


def settings(ctx: typer.Context, incomplete: str) -> Completions:
    """Complete ``--set`` with the settings of the command's method, or of any method."""
    known = read_index()
    typed = ctx.params
    # While an option lacks its value, the parser leaves all arguments where they are.
    named = [typed.get("method"), *(typed.get("methods") or ()), *ctx.args]
    chosen = [name for name in named if name in known.settings] or list(known.settings)
    # With any recipe: all have nearly the same fields.
    data_set = typed.get("data")
    if data_set in known.recipes:
        recipe = data_set
    else:
        recipe = next(iter(known.recipes))
    paths: dict[str, str] = {}
    for name in chosen:
        for path, text in known.settings_with(name, recipe):
            paths.setdefault(f"{path}=", text)
    return _starting_with(list(paths.items()), incomplete)


def runs(incomplete: str) -> Completions:
    """Complete run folders and sweeps: those under what was typed, else those under runs."""
    typed = Path(incomplete or "runs/")
    if incomplete.endswith("/") or not incomplete:
        place = typed
    else:
        place = typed.parent
    rows = []
    for path in sorted(place.glob("*/")):
        if any((path / file).is_file() for file in ("config.toml", "sweep.json")):
            is_finished = (path / "summary.json").is_file()
            rows.append((str(path), "finished" if is_finished else ""))
        elif any(path.glob("*/config.toml")):
            rows.append((f"{path}/", "runs"))
    return _starting_with(rows, incomplete)


def _starting_with(rows: Rows | Iterable[tuple[str, str]], incomplete: str) -> Completions:
    matching = []
    for name, text in rows:
        if name.startswith(incomplete):
            matching.append((name, text))
    return matching
