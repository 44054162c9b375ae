"""From the words of the command line to what the library takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from .. import methods
from ..api import check_engine
from ..config import estimates
from ..config.experiment import (
    Experiment,
    Federations,
    Settings,
    shorthand_settings,
)
from ..config.grid import PER_TASK, Variant
from ..config.repeat import read_config
from ..config.wrong import assembled
from ..core import AnyMethod, Engine
from ..engines import choose
from ..errors import Refusals
from ..runs.files import fresh_name

WORDS = (
    "data",
    "label",
    "client",
    "window",
    "stride",
    "channels",
    "time",
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
    "privacy",
    "init",
    "freeze",
    "per_task",
)
"""The words that go into an :class:`Experiment` as they are."""


def experiment(
    words: Mapping[str, Any], federations: Federations, wrong: Sequence[str] = ()
) -> Experiment:
    """The experiment the words describe; those not given are left to the library.

    Everything that is wrong is refused at once, with the sentences in ``wrong`` first.
    """
    refusals = Refusals(wrong)
    given = given_words(words)
    settings: list[Settings] = []
    method: AnyMethod | str = words["method"] or ""
    if words.get("config") is not None:
        replaced = {**given, "method": method} if method else given
        wanted = read_config(words["config"], replaced, refusals, words["trust"])
        given = {**wanted.words, **given}
        settings.append(wanted.settings)
        # A method that could not be made was refused above; any will do to look at the rest.
        method = method or wanted.method or methods.FedAvg()
    settings.append([*(words.get("set") or ()), *shorthand_settings(words)])
    engine_words = partial(
        check_engine, words["engine"], words["device"], words["precision"], words.get("timeout")
    )
    return assembled(method, given, settings, federations, refusals, (engine_words,))


def given_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words of an experiment that were given; a switch that is off was not."""
    given = {}
    for word in WORDS:
        value = words.get(word)
        if value is not None and value is not False:
            given[word] = value
    if words.get("no_standardise"):
        given["standardise"] = False
    return given


def base_experiment(words: Mapping[str, Any], method: str) -> Experiment:
    """The same before any setting of the method is changed."""
    return Experiment(methods.make(method), **given_words(words))


def engine(words: Mapping[str, Any]) -> closing[Engine]:
    """The engine the words ask for, closed at the end."""
    return closing(
        choose(words["engine"], words["device"], words["precision"], words.get("timeout"))
    )


def out_folder(wanted: Experiment, method: str | None, out: str | None) -> Path:
    """``--out``, or a name under runs that is not taken; a preset is told by its name."""
    if out is not None:
        return Path(out)
    data = Path(str(wanted.data)).stem
    label = methods.label_of(method or methods.name_of(wanted.method))
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
