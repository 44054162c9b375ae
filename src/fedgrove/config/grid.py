"""The experiments of a sweep, under readable names: methods x settings x seeds.

Also the sweep that a run without a method is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from .. import methods
from ..core import AnyMethod
from ..errors import InputError, check, spell_option
from ..nets.user_files import is_file_spec
from ..options import RunOptions, SweepOptions
from ..options.definition import make_options, members
from ..options.groups import Settings, TrainingOptions
from ..parts.local import LocalTraining
from ..renamed import find_new_field
from ..runs.files import RUNS, folder_exists, fresh_name
from .experiment import Experiment, Federations, load_own_data, shorthand_settings
from .settings import Draft, assign, find_old_setting, find_settings, with_default_recipe

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
    values = load_own_data(options.values_of(Experiment))
    base = Experiment(methods.make(names[0]), **values)
    texts = [*write_settings(options.set, is_varied=True), *shorthand_settings(vars(options))]
    return grid(names, base, list_seeds(options.seeds), texts, federations.recipe(base))


def describe_grid(options: SweepOptions, experiments: Mapping[str, Experiment]) -> dict[str, Any]:
    """What sweep.json keeps of a sweep; folders and engines are left out: they decide no result."""
    kept = options.given_of(Experiment, TrainingOptions)
    return {
        **{name: plain(value) for name, value in kept.items()},
        "methods": [_name_to_store(method) for method in list_methods(options.methods, "sweep")],
        "seeds": list(dict.fromkeys(experiment.seed for experiment in experiments.values())),
        "set": write_settings(options.set, is_varied=True),
    }


def _name_to_store(method: Any) -> str:
    return method if isinstance(method, str) else methods.label_of(method)


def list_methods(methods: Any, name: str) -> list[Any]:
    """Return the methods of a sweep as a list; none is refused. ``name`` is for errors."""
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        return [methods]
    if not methods:
        raise InputError(
            f"{name} was given no method; give a name, such as fedavg, or a list of names."
        )
    return list(methods)


def list_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a sweep, of which only the number may be given."""
    return list(range(seeds) if isinstance(seeds, int) else seeds)


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
    if isinstance(settings, str):
        raise InputError(
            f"set is {settings!r}; it must be a list of texts as mu=0.1, or a dictionary of values."
        )
    if not isinstance(settings, Mapping):
        return list(settings)
    texts = []
    for key, value in settings.items():
        values = value if is_varied and isinstance(value, list) else [value]
        texts.append(f"{key}={'|'.join(map(_write_value, values))}")
    return texts


def _write_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def grid(
    names: Sequence[str | AnyMethod],
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
    chosen = [Variant(_label(i, names), methods.make(name)) for i, name in enumerate(names)]
    every_variant = variants(chosen, texts, recipe)
    for one, other in combinations(every_variant, 2):
        if one.label != other.label and one.method == other.method:
            raise InputError(
                f"{one.label} and {other.label} would be the same run; leave one of them out."
            )
    experiments: dict[str, Experiment] = {}
    ending = PER_TASK if base.per_task else ""
    for label, method in every_variant:
        for seed in seeds:
            name = f"{label}{ending}-s{seed}"
            if name in experiments:
                raise InputError(
                    f"the sweep contains {name} twice; give every method, value and seed once."
                )
            experiments[name] = replace(base, method=method, seed=seed)
    return experiments


def _label(number: int, names: Sequence[str | AnyMethod]) -> str:
    """The method's part of a folder's name.

    Files tell classes of one name apart, and numbers methods that were made in Python.
    """
    name = names[number]
    label = methods.label_of(name)
    if not isinstance(name, str):
        earlier = [methods.label_of(other) for other in names[:number] if other != name]
        count = 1 + earlier.count(label)
        return label if count == 1 else f"{label}-{count}"
    labels_of_others = [methods.label_of(other) for other in names if other != name]
    if is_file_spec(name) and label in labels_of_others:
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
    drafts = [(variant.label, Draft(variant.method)) for variant in chosen]
    for text in texts:
        varied: list[tuple[str, Draft[AnyMethod]]] = []
        is_known = False
        for label, draft in drafts:
            is_known = is_known or has_setting(draft.method, text, recipe)
            varied += _varied(label, draft, text, recipe)
        if not is_known:
            # Raises, and lists the settings.
            assign(chosen[0].method, text, recipe)
        drafts = varied
    return [Variant(label, draft.checked()) for label, draft in drafts]


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
    separator = "|"
    types = chain.from_iterable(map(members, _hints(method, text, recipe)))
    takes_a_list = any(get_origin(each) is tuple for each in types)
    if "|" not in value and not takes_a_list:
        separator = ","
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
    renamed = find_old_setting(complete, key)
    if renamed is not None:
        parent, part, old = renamed
        key = f"{parent}{find_new_field(type(part), old)}"
    return [setting.hint for setting in find_settings(complete, key)]


# ---- without a method ----------------------------------------------------------------------------

FOUR_METHODS = ("local", "fedavg", "ca-afp", "grove")
DATA = "motion"
"""Built in, and its users are of three kinds: there are groups to be found."""
SEEDS = (0, 1, 2)
ROUNDS = 40
"""Many and short (see EPOCHS): what is coded, and groups, need reports more than epochs."""
EPOCHS = 1
BATCH = 32
LR = 5e-3
"""Larger than the data set's own, as batches are, which are for three epochs a round."""
FINETUNE = (0, 3)


class FourMethods(NamedTuple):
    """What ``fedgrove run`` and ``fedgrove.run()`` train where no method is given."""

    options: SweepOptions
    experiments: dict[str, Experiment]
    folder: Path


def compare_four_methods(options: RunOptions, federations: Federations) -> FourMethods:
    """Plan the sweep of four methods that a run without a method is."""
    options.check()
    # One function takes the lines of one run.
    check(options.watch is None, "watch", options.watch, "left out without a method")
    swept = _four_methods_options(options)
    experiments = make_grid(swept, federations)
    if len(experiments) > len(FOUR_METHODS) * len(list_seeds(swept.seeds)):
        raise InputError(
            f"{spell_option('set')} takes one value without a method; for several, train a sweep "
            f"of {', '.join(FOUR_METHODS)}."
        )
    first = next(iter(experiments.values()))
    folder = fresh_name(RUNS, f"{'-'.join(FOUR_METHODS)}-{first.data_name}")
    if options.out is not None:
        folder = Path(options.out)
    if folder.exists():
        raise folder_exists(folder)
    return FourMethods(swept, experiments, folder)


def _four_methods_options(options: RunOptions) -> SweepOptions:
    """The options of the sweep; those not given are chosen so that there is something to see."""
    is_scored = options.score_on != 0
    check(is_scored, "score_on", 0, "1 or more without a METHOD, where accuracies are compared")
    defaults: dict[str, Any] = {
        "data": DATA,
        "rounds": ROUNDS,
        "finetune": FINETUNE,
        # Scored at the end only: on the way it would take a third of the time.
        "evaluate": 0,
    }
    # Other data are trained by their own recipe.
    if "data" not in options.given:
        defaults |= {"epochs": EPOCHS, "batch": BATCH, "lr": LR}
    # An option may also be given as a setting: --set lr=0.1, --set local.epochs=2.
    for text in options.set:
        defaults.pop(text.partition("=")[0].rpartition(".")[2], None)
    seeds = (options.seed,) if "seed" in options.given else SEEDS
    values = {**defaults, **options.given_of(SweepOptions), "methods": FOUR_METHODS, "seeds": seeds}
    return make_options(SweepOptions, values, "run")
