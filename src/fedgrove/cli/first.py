"""``fedgrove run`` alone: something worth seeing on a fresh machine, two methods side by side."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .sweep import dry, experiments, watched

if TYPE_CHECKING:
    from ..api import Experiment
    from ..report.tables import Summary

METHODS = ("ca-afp", "fedavg")
LINKAGE = "linkage=complete"
"""Average linkage, the method's own, splits off single clients here; this one gives groups of some size."""
FINETUNE = (0, 3)
"""CA-AFP ends with fine-tuning; without it a pruned model has not come to rest."""


def phases(rounds: int) -> tuple[int, int, int]:
    """Half of the rounds dense: updates from a trained model say more of who belongs together than from a random one.

    Of several splits the best on validation data of digits, seeds 5 to 13.

    >>> phases(20)
    (8, 2, 10)
    """
    warm, stable = 2 * rounds // 5, rounds // 10
    return warm, stable, rounds - warm - stable


def side_by_side(words: Mapping[str, Any]) -> None:
    """Train both on the same clients from the same start, and show them in one table."""
    from ..config import sweep as library
    from . import arguments

    wanted = _wanted(words)
    if words["dry_run"]:
        return dry(wanted, words["data_dir"], words["json"])
    first = next(iter(wanted.values()))
    place = _place(first, words["out"])
    with arguments.engine(words) as chosen:
        run = partial(library.sweep, wanted, place, engine=chosen, data_dir=words["data_dir"])
        ends = watched(place, wanted, len(wanted) * (first.rounds or 0), run, words["json"])
    failures = {name: end for name, end in ends.items() if isinstance(end, library.Failure)}
    for name, end in failures.items():
        print(f"{name} failed after {end.folder.rounds_saved()} rounds: {end.why}")
    _show(
        {n: end.summary for n, end in ends.items() if not isinstance(end, library.Failure)},
        place,
        words["json"],
    )
    if failures:
        raise typer.Exit(1)


def _wanted(words: Mapping[str, Any]) -> dict[str, Experiment]:
    from ..errors import InputError
    from . import arguments

    simple = {**words, "method": "fedavg", **dict.fromkeys(("set", *arguments.SUGAR))}
    rounds = words["rounds"]
    if rounds is None:
        rounds = arguments.defaults(arguments.experiment(simple), words["data_dir"]).rounds
    dense = f"phases={','.join(map(str, phases(rounds)))}"
    given = {**words, "rounds": rounds, "finetune": words["finetune"] or FINETUNE}
    seeds = (words["seed"] or 0,)
    found = experiments(
        {
            **given,
            "methods": METHODS,
            "seeds": seeds,
            "vary": [dense, LINKAGE, *(words["set"] or ())],
        }
    )
    if len(found) > len(METHODS):
        raise InputError(
            f"--set takes one value here; for several: fedgrove sweep {' '.join(METHODS)} --set KEY=V,V"
        )
    return found


def _place(first: Experiment, out: str | None) -> Path:
    """A folder that nobody has."""
    from ..errors import InputError
    from ..runs.folder import fresh_name

    if out is None:
        return fresh_name(
            Path("runs"), f"{'-'.join(METHODS)}-{Path(str(first.data)).stem}-s{first.seed}"
        )
    if Path(out).exists():
        raise InputError(
            f"the run folder {out} exists; runs are never overwritten. "
            f"Give another --out, or continue it with: fedgrove resume {out}"
        )
    return Path(out)


def _show(done: Mapping[str, Summary], place: Path, json: bool) -> None:
    """One table, and what CA-AFP did to get there."""
    from ..report.tables import print_summaries

    rows = [{"run": str(place / name), **summary} for name, summary in done.items()]
    if json:
        print(jsonlib.dumps(rows, indent=1))
        return
    if rows:
        print_summaries(rows)
    if len(rows) == len(METHODS):
        pruned, dense = rows
        sent, whole = (row["bytes_up"] + row["bytes_down"] for row in (pruned, dense))
        sizes = ", ".join(map(str, pruned["group_sizes"]))
        print(
            f"ca-afp: groups of {sizes} clients, {pruned['density']:.0%} of the weights, {sent / whole:.0%} of "
            "fedavg's bytes"
        )
    print(place)
