"""What the shell completes: names of methods, data, nets and engines, settings, run folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from .index import Rows, index

Completions = list[tuple[str, str]]
"""Words and what they mean, which some shells show beside them."""


def methods(incomplete: str) -> Completions:
    """Methods and their presets."""
    return _beginning(index().lists["methods"], incomplete)


def data(incomplete: str) -> Completions:
    """Data sets."""
    return _beginning(index().lists["data"], incomplete)


def nets(incomplete: str) -> Completions:
    """Networks that are built in."""
    return _beginning(index().lists["nets"], incomplete)


def engines(incomplete: str) -> Completions:
    """Engines."""
    return _beginning(index().lists["engines"], incomplete)


def kinds(incomplete: str) -> Completions:
    """What ``fedgrove list`` lists."""
    return _beginning([(kind, "") for kind in index().lists], incomplete)


def settings(ctx: typer.Context, incomplete: str) -> Completions:
    """What can be set in the method that the command names, or in any method."""
    known = index()
    words = ctx.params
    # While an option lacks its value, the parser leaves all arguments where they are.
    named = [words.get("method"), *(words.get("methods") or ()), *ctx.args]
    chosen = [name for name in named if name in known.settings] or list(known.settings)
    # With any recipe: all have nearly the same fields.
    data_set = words.get("data")
    recipe = data_set if data_set in known.recipes else next(iter(known.recipes))
    paths: dict[str, str] = {}
    for name in chosen:
        for path, text in known.settings_with(name, recipe):
            paths.setdefault(f"{path}=", text)
    return _beginning(list(paths.items()), incomplete)


def runs(incomplete: str) -> Completions:
    """Run folders and sweeps: those under what was typed, else those under runs."""
    typed = Path(incomplete or "runs/")
    place = typed if incomplete.endswith("/") or not incomplete else typed.parent
    rows = []
    for path in sorted(place.glob("*/")):
        if any((path / file).is_file() for file in ("config.toml", "sweep.json")):
            is_finished = (path / "summary.json").is_file()
            rows.append((str(path), "finished" if is_finished else ""))
        elif any(path.glob("*/config.toml")):
            rows.append((f"{path}/", "runs"))
    return _beginning(rows, incomplete)


def _beginning(rows: Rows | Iterable[tuple[str, str]], incomplete: str) -> Completions:
    return [(word, text) for word, text in rows if word.startswith(incomplete)]
