"""What methods would cost, on data or on a shape that stands in their place; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..core import AnyMethod
from ..costs.estimate import EXAMPLES_TRAINED, cost, of_run
from ..data.devices import read_devices
from ..errors import InputError, check
from ..parts.local import LocalTraining
from .experiment import Experiment, Federations, with_settings
from .grid import Variant, has_setting, variants
from .plan import Plan, plan

N = TypeVar("N", int, float)


def costs(
    chosen: Sequence[Variant],
    settings: Sequence[str],
    words: Mapping[str, Any],
    base: Callable[[], Experiment],
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """What each method would cost, on the data of ``base``, or where ``input`` stands in for them.

    ``words`` are those of ``fedgrove cost``. Of several methods each takes the settings that it
    has; ``tell`` is called with a sentence for each setting that some of them lack.
    """
    rows = []
    if words.get("input") is not None:
        recipe = LocalTraining()
        for name, method in with_all_settings(chosen, settings, recipe, tell).items():
            rows.append({"method": name, **cost_of_shape(words, method, recipe)})
        return rows
    examples = words.get("examples")
    check(examples is None, "--examples", examples, "left out where the data say how many")
    federations = Federations(words.get("data_dir"))
    experiment = base()
    recipe = federations.recipe(experiment)
    for name, method in with_all_settings(chosen, settings, recipe, tell).items():
        planned = plan(replace(experiment, method=method), Path(), federations)
        rows.append({"method": name, **cost_of_plan(planned)})
    return rows


def with_all_settings(
    chosen: Sequence[Variant],
    settings: Sequence[str],
    recipe: LocalTraining,
    tell: Callable[[str], None],
) -> dict[str, AnyMethod]:
    """The methods with their settings, by name.

    Of several, each takes the settings that it has a field for, and every value of them, as in a
    sweep.
    """
    if len(chosen) == 1:
        only = chosen[0]
        return {only.label: with_settings(only.method, settings, recipe)}
    varied = variants(chosen, settings, recipe)
    for text in settings:
        lacking = _who_lacks(text, chosen, varied, recipe)
        if lacking:
            tell(f"{text} is no setting of {', '.join(lacking)}.")
    return {variant.label: variant.method for variant in varied}


def _who_lacks(
    text: str, chosen: Sequence[Variant], varied: Sequence[Variant], recipe: LocalTraining
) -> list[str]:
    """The methods that have no such setting, so that nobody takes it for theirs too."""
    # As they became: a part that another setting chose may have brought the field.
    having = {type(each.method) for each in varied if has_setting(each.method, text, recipe)}
    return [each.label for each in chosen if type(each.method) not in having]


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
    devices = read_devices(words.get("profile"), words.get("trace")).number_clients({})
    devices.check_clients(clients)
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
        trace=devices.numbered_trace,
        seed=seed,
        freeze=_given(words, "freeze", 0.0),
    )


def _given(words: Mapping[str, Any], word: str, default: N) -> N:
    value: N | None = words.get(word)
    return default if value is None else value
