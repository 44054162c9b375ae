"""From the words of the command line to what the library takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import methods
from ..api import configured
from ..config.experiment import (
    Experiment,
    Federations,
    shorthand_settings,
    with_settings,
)
from ..core import Engine
from ..cost.estimate import cost
from ..engines import choose
from ..errors import InputError, check
from ..parts.local import LocalTraining
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
    return fresh_name(Path("runs"), f"{methods.label_of(method)}-{data}-s{wanted.seed}")


def cost_of_shape(words: Mapping[str, Any]) -> dict[str, Any]:
    """The cost where ``--input``, ``--net`` and ``--classes`` stand in place of data."""
    missing = [f"--{word}" for word in ("net", "classes") if words.get(word) is None]
    if missing:
        raise InputError(
            f"--input came without {' and '.join(missing)}; give them too, or --data in their "
            "place."
        )
    data = words.get("data")
    check(data is None, "--data", data, "left out where --input is given")
    recipe = LocalTraining()
    settings = [*(words.get("set") or ()), *shorthand_settings(words)]
    method = with_settings(methods.make(words["method"]), settings, recipe)
    clients = _given(words, "clients", 10)
    return cost(
        method,
        net=words["net"],
        shape=words["input"],
        classes=words["classes"],
        clients=clients,
        cohort=_given(words, "cohort", min(10, clients)),
        rounds=_given(words, "rounds", 20),
        recipe=recipe,
    )


def _given(words: Mapping[str, Any], word: str, default: int) -> int:
    value: int | None = words.get(word)
    return default if value is None else value
