"""From the words of the command line to what the library takes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import methods
from ..api import Experiment
from ..config.toml import assign
from ..core import AnyMethod, Engine
from ..cost import estimate
from ..data import Defaults, Federation
from ..data.sets import SETS
from ..engines import choose
from ..errors import InputError, check
from ..parts.local import LocalTraining
from ..runs.folder import fresh_name
from ..runs.rounds import Run, recipe_of
from ..runs.store import Memory

WORDS = [word for word in Experiment.__dataclass_fields__ if word not in ("method", "standardise")]
ENGINE = {"engine": "auto", "device": "auto", "precision": "fp32"}
SUGAR = {"epochs": "local.epochs", "batch": "local.batch", "lr": "local.optimiser.lr"}


def experiment(words: Mapping[str, Any]) -> Experiment:
    """The experiment the words ask for; those not given are left to the library."""
    given = {k: words[k] for k in WORDS if words.get(k) is not None}
    method = methods.find(words["method"])()
    asked = Experiment(method, **given, standardise=not words.get("no_standardise"))
    return replace(asked, method=with_settings(method, words, recipe(asked, words.get("data_dir"))))


def with_settings(method: AnyMethod, words: Mapping[str, Any], local: LocalTraining) -> AnyMethod:
    """The method after every ``--set``, in their order, then ``--epochs``, ``--batch`` and ``--lr``."""
    for text in words.get("set") or ():
        method = assign(method, text, local)
    for word, path in SUGAR.items():
        if words.get(word) is not None:
            method = assign(method, f"{path}={words[word]}", local)
    return method


def engine(words: Mapping[str, Any]) -> closing[Engine]:
    """The engine the words ask for, closed when it is done with."""
    return closing(choose(*(words.get(k) or v for k, v in ENGINE.items())))


def defaults(asked: Experiment, data_dir: str | None) -> Defaults:
    """How the data set is trained by default; a named set need not be read for that."""
    if isinstance(asked.data, str) and asked.data in SETS:
        return SETS[asked.data].defaults
    return asked.federation(data_dir).defaults


def recipe(asked: Experiment, data_dir: str | None) -> LocalTraining:
    """How the data set trains a client by default."""
    return recipe_of(Federation("", {}, 0, (), (), defaults(asked, data_dir)))


def out_folder(asked: Experiment, out: str | None) -> Path:
    """``--out``, or a name under runs that nobody has."""
    if out is not None:
        return Path(out)
    return fresh_name(
        Path("runs"), f"{methods.name_of(asked.method)}-{Path(str(asked.data)).stem}-s{asked.seed}"
    )


def resolved(asked: Experiment, data_dir: str | None) -> tuple[Experiment, dict[str, Any]]:
    """The experiment with nothing left open, and what it would estimate."""
    federation = asked.federation(data_dir)
    with tempfile.TemporaryDirectory() as scratch:
        run: Run = asked.build(federation, Memory(Path(scratch)))
        whole = asked.resolved(run)
        return whole, estimate.of_run(run, whole.net or federation.defaults.net)


def cost_of_shape(words: Mapping[str, Any]) -> dict[str, Any]:
    """The estimate where ``--input``, ``--net`` and ``--classes`` stand in place of data."""
    missing = [f"--{word}" for word in ("net", "classes") if words.get(word) is None]
    if missing:
        raise InputError(
            f"--input came without {' and '.join(missing)}; give them too, or --data in their place."
        )
    check(words.get("data") is None, "--data", words.get("data"), "left out where --input is given")
    local = LocalTraining()
    method = with_settings(methods.find(words["method"])(), words, local)
    clients = _or(words.get("clients"), 10)
    return estimate.cost(
        method,
        net=words["net"],
        shape=words["input"],
        classes=words["classes"],
        clients=clients,
        cohort=_or(words.get("cohort"), min(10, clients)),
        rounds=_or(words.get("rounds"), 20),
        recipe=local,
    )


def _or(given: int | None, default: int) -> int:
    return default if given is None else given
