"""The experiments of a sweep, under readable names: methods x settings x seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from .. import methods
from ..core import AnyMethod
from ..errors import InputError, check
from ..nets.user_files import is_file_spec
from ..options import SweepOptions
from ..options.definition import members, names_of, options_of
from ..options.groups import Settings
from ..parts.local import LocalTraining
from .experiment import (
    SHORTHANDS,
    Experiment,
    Federations,
    load_own_data,
    shorthand_settings,
)
from .settings import Draft, assign, walk, with_default_recipe

PER_TASK = "-per-task"
"""How the name of a run ends, before its seed, where true tasks are kept apart."""


class Variant(NamedTuple):
    """A method with some settings changed; ``label`` names it and the settings that vary."""

    label: str
    method: AnyMethod


def make_grid(options: SweepOptions, federations: Federations) -> dict[str, Experiment]:
    """Return the experiments of a sweep by name."""
    options.check()
    names = list_methods(options.methods, "sweep")
    # A sweep takes seeds in place of a seed; a new option need not be one of sweeps.
    known = options_of(SweepOptions)
    values = {name: getattr(options, name) for name in names_of(Experiment) if name in known}
    base = Experiment(methods.make(names[0]), **load_own_data(values))
    texts = [*write_settings(options.set, is_varied=True), *shorthand_settings(vars(options))]
    return grid(names, base, list_seeds(options.seeds), texts, federations.recipe(base))


def describe_grid(options: SweepOptions, experiments: Mapping[str, Experiment]) -> dict[str, Any]:
    """What sweep.json keeps of a sweep; folders and engines are left out: they decide no result."""
    kept = (*names_of(Experiment), *SHORTHANDS)
    given = {name: plain(value) for name, value in options.given.items() if name in kept}
    seeds = dict.fromkeys(experiment.seed for experiment in experiments.values())
    return {
        **given,
        "methods": list_methods(options.methods, "sweep"),
        "seeds": list(seeds),
        "set": write_settings(options.set, is_varied=True),
    }


def list_methods(methods: Any, name: str) -> list[Any]:
    """Return the methods of a sweep as a list; none is refused. ``name`` is for errors."""
    is_several = isinstance(methods, Sequence) and not isinstance(methods, str)
    listed = list(methods) if is_several else [methods]
    if not listed:
        raise InputError(f"{name} got no method; give a name, as fedavg, or a list of names.")
    return listed


def list_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a sweep, of which only the number may be given."""
    return list(range(seeds)) if isinstance(seeds, int) else list(seeds)


def plain(value: Any) -> Any:
    """Return a sweep's value as JSON has it; of an object made in Python, its type."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return f"<{type(value).__name__}>"


def write_settings(settings: Settings, is_varied: bool) -> list[str]:
    """Return a sweep's settings as they are typed; a list has the values to try.

    >>> write_settings({"mu": [0.1, 1], "densities": [(0.5, 0.2)]}, is_varied=True)
    ['mu=0.1|1', 'densities=0.5,0.2']
    """
    if not isinstance(settings, Mapping):
        if isinstance(settings, str):
            raise InputError(
                f"set is {settings!r}; it must be a list of texts as mu=0.1, or a dictionary of "
                "values."
            )
        return list(settings)
    texts = []
    for key, value in settings.items():
        values = value if is_varied and isinstance(value, list) else [value]
        texts.append(f"{key}={'|'.join(_write_value(each) for each in values)}")
    return texts


def _write_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)


def grid(
    names: Sequence[str],
    base: Experiment,
    seeds: Sequence[int],
    texts: Sequence[str] = (),
    recipe: LocalTraining | None = None,
) -> dict[str, Experiment]:
    """Return a sweep's experiments: methods x the product of all settings x seeds.

    Everything else is as in ``base``.

    >>> from fedgrove.methods import FedAvg
    >>> list(grid(["fedavg", "fedprox"], Experiment(FedAvg()), [0], ["mu=0.1,1"]))
    ['fedavg-s0', 'fedprox-mu=0.1-s0', 'fedprox-mu=1-s0']
    """
    check(bool(names), "the list of methods", list(names), "one method or more")
    check(bool(seeds), "the list of seeds", list(seeds), "one seed or more")
    chosen = [Variant(_label(name, names), methods.make(name)) for name in names]
    every_variant = variants(chosen, texts, recipe)
    for one, other in combinations(every_variant, 2):
        if one.label != other.label and one.method == other.method:
            raise InputError(
                f"{one.label} and {other.label} would be the same run; leave one of them out."
            )
    experiments: dict[str, Experiment] = {}
    for label, method in every_variant:
        for seed in seeds:
            name = f"{label}{PER_TASK if base.per_task else ''}-s{seed}"
            if name in experiments:
                raise InputError(
                    f"the sweep holds {name} twice; give every method, value and seed once."
                )
            experiments[name] = replace(base, method=method, seed=seed)
    return experiments


def _label(name: str, names: Sequence[str]) -> str:
    """The method's part of a folder's name; files tell classes of one name apart."""
    label = methods.label_of(name)
    is_shared = any(methods.label_of(other) == label for other in names if other != name)
    if is_shared and is_file_spec(name):
        file = Path(name.partition(".py:")[0]).name
        return f"{file}-{label}"
    return label


def variants(
    chosen: Sequence[Variant], texts: Sequence[str], recipe: LocalTraining | None = None
) -> list[Variant]:
    """Return every method of a sweep with every combination of settings.

    A method without a field is left as it is.

    A field that no method has is refused, as :func:`fedgrove.config.settings.assign` refuses it.
    """
    # Checked at the end: settings may be right together only.
    current = [(variant.label, Draft(variant.method)) for variant in chosen]
    for text in texts:
        somebody_has_it = any(_hints(draft.method, text, recipe) for _, draft in current)
        if not somebody_has_it:
            # Raises, and says what there is.
            assign(chosen[0].method, text, recipe)
        varied: list[tuple[str, Draft[AnyMethod]]] = []
        for label, draft in current:
            varied.extend(_varied(label, draft, text, recipe))
        current = varied
    return [Variant(label, draft.checked()) for label, draft in current]


def _varied(
    method_label: str, draft: Draft[AnyMethod], text: str, recipe: LocalTraining | None
) -> list[tuple[str, Draft[AnyMethod]]]:
    """A draft for each value of one setting; a single value leaves the label as it is."""
    if not _hints(draft.method, text, recipe):
        return [(method_label, draft)]
    settings = alternatives(draft.method, text, recipe)
    varied: list[tuple[str, Draft[AnyMethod]]] = []
    for setting in settings:
        label = method_label
        if len(settings) > 1:
            # The label becomes a folder's name.
            label += "-" + re.sub(r"[^a-zA-Z0-9_.,=+-]", "_", setting)
        varied.append((label, draft.assign(setting, recipe)))
    return varied


def alternatives(method: AnyMethod, text: str, recipe: LocalTraining | None = None) -> list[str]:
    """Return the settings of one ``--set`` of a sweep.

    Commas separate values. If the field itself holds a list they belong to it, and ``|`` separates
    lists; ``|`` works for every field.

    >>> from fedgrove.methods import FedProx
    >>> alternatives(FedProx(), "mu=0.1,1"), alternatives(FedProx(), "mu=0.1|1")
    (['mu=0.1', 'mu=1'], ['mu=0.1', 'mu=1'])
    """
    key, equals, value = text.partition("=")
    if not equals:
        # `assign` says what is missing.
        return [text]
    takes_a_list = False
    for hint in _hints(method, text, recipe):
        for member in members(hint):
            if get_origin(member) is tuple:
                takes_a_list = True
    separator = "|" if "|" in value or takes_a_list else ","
    return [f"{key.strip()}={one.strip()}" for one in value.split(separator)]


def has_setting(method: AnyMethod, text: str, recipe: LocalTraining | None = None) -> bool:
    """Whether a method has a field that the key of ``key=value`` may mean.

    >>> from fedgrove.methods import FedAvg, FedProx
    >>> has_setting(FedProx(), "mu=0.1"), has_setting(FedAvg(), "mu=0.1")
    (True, False)
    """
    return bool(_hints(method, text, recipe))


def _hints(method: AnyMethod, text: str, recipe: LocalTraining | None) -> list[Any]:
    """The types of the fields that the key of ``key=value`` may mean."""
    key = text.partition("=")[0].strip()
    complete = with_default_recipe(method, recipe)
    hint_by_path = {setting.path: setting.hint for setting in walk(complete)}
    if key in hint_by_path:
        return [hint_by_path[key]]
    return [hint for path, hint in hint_by_path.items() if path.endswith(f".{key}")]
