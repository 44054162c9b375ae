"""From lists of methods, settings and seeds to the experiments of a sweep, each under a readable name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, NamedTuple, get_origin

from .. import methods
from ..api import Experiment
from ..core import AnyMethod
from ..errors import InputError, check
from ..parts.local import LocalTraining
from ..runs.rounds import with_recipe
from .settings import assign, members, walk


class Variant(NamedTuple):
    """A method with some settings changed; ``label`` names it and the settings that vary."""

    label: str
    method: AnyMethod


def grid(
    names: Sequence[str],
    base: Experiment,
    seeds: Sequence[int],
    texts: Sequence[str] = (),
    recipe: LocalTraining | None = None,
) -> dict[str, Experiment]:
    """Methods x the product of all settings x seeds; all else as in ``base``.

    >>> from fedgrove.methods import FedAvg
    >>> list(grid(["fedavg", "fedprox"], Experiment(FedAvg()), [0], ["mu=0.1,1"]))
    ['fedavg-s0', 'fedprox-mu=0.1-s0', 'fedprox-mu=1-s0']
    """
    check(bool(names), "the list of methods", list(names), "one method or more")
    check(bool(seeds), "the list of seeds", list(seeds), "one seed or more")
    found: dict[str, Experiment] = {}
    every = variants([methods.find(name)() for name in names], texts, recipe)
    for one, other in combinations(every, 2):
        if one.label != other.label and one.method == other.method:
            raise InputError(
                f"{one.label} and {other.label} would be the same run; leave one of them out."
            )
    for label, method in every:
        for seed in seeds:
            name = f"{label}-s{seed}"
            if name in found:
                raise InputError(
                    f"the sweep holds {name} twice; give every method, value and seed once."
                )
            found[name] = replace(base, method=method, seed=seed)
    return found


def variants(
    chosen: Sequence[AnyMethod], texts: Sequence[str], recipe: LocalTraining | None = None
) -> list[Variant]:
    """Every method with every combination of settings; a method that lacks a field is left as it is.

    A field that no method has is refused, as :func:`fedgrove.config.settings.assign` refuses it.
    """
    found = [Variant(methods.name_of(method), method) for method in chosen]
    for text in texts:
        if not any(_hints(v.method, text, recipe) for v in found):
            assign(found[0].method, text, recipe)  # says what there is
        found = list(chain.from_iterable(_varied(v, text, recipe) for v in found))
    return found


def _varied(variant: Variant, text: str, recipe: LocalTraining | None) -> list[Variant]:
    if not _hints(variant.method, text, recipe):
        return [variant]
    choices = alternatives(variant.method, text, recipe)
    said = (
        [f"-{re.sub(r'[^a-zA-Z0-9_.,=+-]', '_', choice)}" for choice in choices]
        if len(choices) > 1
        else [""]
    )
    changed = [assign(variant.method, choice, recipe) for choice in choices]
    return [
        Variant(variant.label + words, method) for words, method in zip(said, changed, strict=True)
    ]


def alternatives(method: AnyMethod, text: str, recipe: LocalTraining | None = None) -> list[str]:
    """The settings that one ``--set`` of a sweep asks for.

    Commas separate values. Where the field itself holds a list they belong to it, and ``|`` separates lists; ``|``
    works for every field.

    >>> from fedgrove.methods import FedProx
    >>> alternatives(FedProx(), "mu=0.1,1"), alternatives(FedProx(), "mu=0.1|1")
    (['mu=0.1', 'mu=1'], ['mu=0.1', 'mu=1'])
    """
    key, _, value = text.partition("=")
    lists = any(
        get_origin(m) is tuple for hint in _hints(method, text, recipe) for m in members(hint)
    )
    values = value.split("|") if "|" in value or lists else value.split(",")
    return [f"{key.strip()}={one.strip()}" for one in values]


def _hints(method: AnyMethod, text: str, recipe: LocalTraining | None) -> list[Any]:
    """The types of the fields that the key of ``key=value`` may mean."""
    key = text.partition("=")[0].strip()
    whole = with_recipe(method, recipe) if recipe is not None and method.local is None else method
    fields = {s.path: s.hint for s in walk(whole)}
    return (
        [fields[key]]
        if key in fields
        else [hint for path, hint in fields.items() if path.endswith(f".{key}")]
    )
