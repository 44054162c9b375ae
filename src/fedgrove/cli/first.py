"""``fedgrove run`` alone: something worth seeing on a fresh machine, two methods side by side."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .sweep import grid_of, print_plans, watched

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..report.tables import Summary

METHODS = ("ca-afp", "fedavg")
LINKAGE = "linkage=complete"
"""Average linkage, the method's own, splits off single clients here; this gives larger groups."""
FINETUNE = (0, 3)
"""CA-AFP ends with fine-tuning; without it a pruned model has not settled."""


def phases(rounds: int) -> tuple[int, int, int]:
    """Half of the rounds dense, since updates of a trained model tell clients apart better.

    Of several splits the best on validation data of digits, seeds 5 to 13.

    >>> phases(20)
    (8, 2, 10)
    """
    warm_up = 2 * rounds // 5
    stabilise = rounds // 10
    return warm_up, stabilise, rounds - warm_up - stabilise


def side_by_side(words: Mapping[str, Any]) -> None:
    """Train both on the same clients from the same start, and show them in one table."""
    from ..config import sweep as library
    from ..config.experiment import Federations
    from ..runs.result import Failure
    from . import arguments

    federations = Federations(words["data_dir"])
    experiments = _experiments(words, federations)
    if words["dry_run"]:
        return print_plans(experiments, federations, words["json"])
    first = next(iter(experiments.values()))
    folder = _folder(first, words["out"])
    total = len(experiments) * (first.rounds or 0)
    with arguments.engine(words) as chosen:
        run = partial(library.sweep, experiments, folder, engine=chosen, data_dir=words["data_dir"])
        ends = watched(folder, experiments, total, run, words["json"])
    summaries: dict[str, Summary] = {}
    failed = False
    for name, end in ends.items():
        if isinstance(end, Failure):
            failed = True
            print(f"{name} failed after {end.folder.rounds_saved()} rounds: {end.why}")
        else:
            summaries[name] = end.summary
    _show(summaries, folder, words["json"])
    if failed:
        raise typer.Exit(1)


def _experiments(words: Mapping[str, Any], federations: Federations) -> dict[str, Experiment]:
    from ..errors import InputError
    from . import arguments

    rounds = words["rounds"]
    if rounds is None:
        rounds = federations.defaults(arguments.base_experiment(words, METHODS[0])).rounds
    lengths = ",".join(str(n) for n in phases(rounds))
    grid_words = {
        **words,
        "rounds": rounds,
        "finetune": words["finetune"] or FINETUNE,
        "methods": METHODS,
        "seeds": (words["seed"] or 0,),
        "vary": [f"phases={lengths}", LINKAGE, *(words["set"] or ())],
    }
    experiments = grid_of(grid_words, federations)
    if len(experiments) > len(METHODS):
        raise InputError(
            f"--set takes one value here; for several: fedgrove sweep {' '.join(METHODS)} "
            "--set KEY=V,V"
        )
    return experiments


def _folder(first: Experiment, out: str | None) -> Path:
    """A folder that does not exist yet."""
    from ..runs.folder import exists, fresh_name

    if out is None:
        data = Path(str(first.data)).stem
        return fresh_name(Path("runs"), f"{'-'.join(METHODS)}-{data}-s{first.seed}")
    if Path(out).exists():
        raise exists(Path(out))
    return Path(out)


def _show(summaries: Mapping[str, Summary], folder: Path, json: bool) -> None:
    """One table, and what CA-AFP did to get there."""
    from ..report.tables import print_summaries

    rows = [{"run": str(folder / name), **summary} for name, summary in summaries.items()]
    if json:
        print(jsonlib.dumps(rows, indent=1))
        return
    if rows:
        print_summaries(rows)
    if len(rows) == len(METHODS):
        pruned, dense = rows
        pruned_bytes = pruned["bytes_up"] + pruned["bytes_down"]
        dense_bytes = dense["bytes_up"] + dense["bytes_down"]
        sizes = ", ".join(str(size) for size in pruned["group_sizes"])
        print(
            f"ca-afp: groups of {sizes} clients, {pruned['density']:.0%} of the weights, "
            f"{pruned_bytes / dense_bytes:.0%} of fedavg's bytes"
        )
    print(folder)
