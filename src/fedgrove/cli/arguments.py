"""From the words of the command line to what the library takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import methods
from ..api import check_engine
from ..config.experiment import (
    Experiment,
    Federations,
    Settings,
    shorthand_settings,
    with_settings,
)
from ..config.grid import PER_TASK, Variant, has_setting, variants
from ..config.plan import Plan, plan
from ..config.repeat import read_config
from ..config.wrong import assembled
from ..core import AnyMethod, Engine
from ..cost.estimate import EXAMPLES_TRAINED, cost, of_run
from ..data.devices import read as read_devices
from ..engines import choose
from ..errors import InputError, Refusals, check
from ..parts.local import LocalTraining
from ..runs.folder import fresh_name

N = TypeVar("N", int, float)
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


def chosen_methods(words: Mapping[str, Any], recipe: LocalTraining) -> dict[str, AnyMethod]:
    """The methods that ``cost`` is asked for, with their settings, by name.

    Of several, each takes the settings that it has a field for, and every value of them, as in a
    sweep.
    """
    names: list[str] = words["methods"]
    settings = [*(words.get("set") or ()), *shorthand_settings(words)]
    if len(names) == 1:
        return {names[0]: with_settings(methods.make(names[0]), settings, recipe)}
    chosen = [Variant(name, methods.make(name)) for name in dict.fromkeys(names)]
    varied = variants(chosen, settings, recipe)
    for text in settings:
        _tell_who_lacks(text, chosen, varied, recipe)
    return {variant.label: variant.method for variant in varied}


def _tell_who_lacks(
    text: str, chosen: Sequence[Variant], varied: Sequence[Variant], recipe: LocalTraining
) -> None:
    """Say on stderr which methods have no such setting, so that nobody takes it for theirs too."""
    # As they became: a part that another setting chose may have brought the field.
    having = {type(each.method) for each in varied if has_setting(each.method, text, recipe)}
    lacking = [each.label for each in chosen if type(each.method) not in having]
    if lacking:
        print(f"fedgrove: {text} is no setting of {', '.join(lacking)}.", file=sys.stderr)


def costs(words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each method would cost, on data or where ``--input`` stands in their place."""
    rows = []
    if words.get("input") is not None:
        recipe = LocalTraining()
        for name, method in chosen_methods(words, recipe).items():
            rows.append({"method": name, **cost_of_shape(words, method, recipe)})
        return rows
    examples = words.get("examples")
    check(examples is None, "--examples", examples, "left out where the data say how many")
    federations = Federations(words["data_dir"])
    base = base_experiment(words, words["methods"][0])
    for name, method in chosen_methods(words, federations.recipe(base)).items():
        planned = plan(replace(base, method=method), Path(), federations)
        rows.append({"method": name, **cost_of_plan(planned)})
    return rows


def cost_of_plan(planned: Plan) -> dict[str, Any]:
    """What a run that was planned would cost."""
    net = planned.experiment.net
    assert net is not None, "a plan has nothing left open"
    return of_run(planned.run, net)


def cost_of_shape(
    words: Mapping[str, Any], method: AnyMethod, recipe: LocalTraining
) -> dict[str, Any]:
    """The cost where ``--input``, ``--net`` and ``--classes`` stand in place of data."""
    missing = [f"--{word}" for word in ("net", "classes") if words.get(word) is None]
    if missing:
        raise InputError(
            f"--input came without {' and '.join(missing)}; give them too, or --data in their "
            "place."
        )
    data = words.get("data")
    check(data is None, "--data", data, "left out where --input is given")
    clients = _given(words, "clients", 10)
    examples = _given(words, "examples", EXAMPLES_TRAINED)
    check(examples >= 1, "--examples", examples, "1 or more")
    seed = _given(words, "seed", 0)
    devices = read_devices(words.get("profile"), words.get("trace"))
    devices.check_all_there(clients)
    return cost(
        method,
        net=words["net"],
        shape=words["input"],
        classes=words["classes"],
        clients=clients,
        cohort=_given(words, "cohort", min(10, clients)),
        rounds=_given(words, "rounds", 20),
        recipe=recipe,
        info=lambda client: devices.info(examples, client, seed),
        trace=devices.trace,
        seed=seed,
        freeze=_given(words, "freeze", 0.0),
    )


def _given(words: Mapping[str, Any], word: str, default: N) -> N:
    value: N | None = words.get(word)
    return default if value is None else value
