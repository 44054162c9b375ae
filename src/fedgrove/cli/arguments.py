"""From the words of the command line to what the library takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import methods
from ..api import configured
from ..config import estimates
from ..config.experiment import (
    Experiment,
    Federations,
    shorthand_settings,
)
from ..config.grid import PER_TASK, Variant
from ..core import Engine
from ..engines import choose
from ..runs.folder import fresh_name

WORDS = (
    "data",
    "net",
    "partition",
    "scenario",
    "split",
    "validation",
    "clients",
    "cohort",
    "rounds",
    "finetune",
    "profile",
    "trace",
    "seed",
    "evaluate",
    "score_on",
    "quorum",
    "deadline",
    "norm_bound",
    "faults",
    "init",
    "freeze",
    "per_task",
)
"""The words that go into an :class:`Experiment` as they are."""


def experiment(words: Mapping[str, Any], federations: Federations) -> Experiment:
    """The experiment the words describe; those not given are left to the library."""
    plain = base_experiment(words, words["method"])
    settings = [*(words.get("set") or ()), *shorthand_settings(words)]
    return configured(plain, settings, federations)


def base_experiment(words: Mapping[str, Any], method: str) -> Experiment:
    """The same before any setting of the method is changed."""
    given = {}
    for word in WORDS:
        if words.get(word) is not None:
            given[word] = words[word]
    standardise = not words.get("no_standardise")
    return Experiment(methods.make(method), **given, standardise=standardise)


def engine(words: Mapping[str, Any]) -> closing[Engine]:
    """The engine the words ask for, closed at the end."""
    return closing(
        choose(words["engine"], words["device"], words["precision"], words.get("timeout"))
    )


def out_folder(wanted: Experiment, method: str, out: str | None) -> Path:
    """``--out``, or a name under runs that is not taken; a preset is told by its name."""
    if out is not None:
        return Path(out)
    data = Path(str(wanted.data)).stem
    label = methods.label_of(method)
    if wanted.per_task:
        label += PER_TASK
    return fresh_name(Path("runs"), f"{label}-{data}-s{wanted.seed}")


def costs(words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each method would cost, on data or where ``--input`` stands in their place."""
    names: list[str] = words["methods"]
    chosen = [Variant(name, methods.make(name)) for name in dict.fromkeys(names)]
    settings = [*(words.get("set") or ()), *shorthand_settings(words)]

    def tell(sentence: str) -> None:
        print(f"fedgrove: {sentence}", file=sys.stderr)

    return estimates.costs(chosen, settings, words, lambda: base_experiment(words, names[0]), tell)
