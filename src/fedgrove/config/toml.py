"""Configuration is construction: config.toml mirrors the dataclasses, and rebuilds them by type name.

::

    [run]                          the words of the command line
    method = "ditto"
    data = "digits"

    [method]                       a dataclass; its parts are tables in it
    type = "Ditto"

    [method.local.optimiser]
    type = "Adam"
    lr = 0.001

Types come from one explicit table (:func:`fedgrove.config.settings.part_types`); nothing is evaluated as code.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, get_args

import tomli_w
from torch import nn

from .. import methods
from ..core import AnyMethod
from ..data import Federation
from ..errors import InputError, unknown
from .settings import (
    assign,
    coerce,
    fitting,
    hints,
    is_leaf,
    members,
    method_types,
    part_types,
    settable,
)

if TYPE_CHECKING:
    from ..api import Experiment

__all__ = ["assign", "from_toml", "part_types", "read_words", "settable", "to_toml"]

NONE = "none"
"""Written only where a field that is not None by default holds None; else such fields are left out."""


# ---- writing -------------------------------------------------------------------------------------------------------


def to_toml(experiment: Experiment) -> str:
    """An experiment as the text of config.toml; floats are written so that they come back to the bit."""
    words = {k: v for k, v in vars(experiment).items() if k != "method" and v is not None}
    run = {"method": methods.name_of(experiment.method), **{k: _word(v) for k, v in words.items()}}
    return tomli_w.dumps({"run": run, "method": _table(experiment.method, method_types().values())})


def _word(value: Any) -> Any:
    if isinstance(value, Federation):
        return f"<arrays: {value.name}>"
    if isinstance(value, nn.Module):
        return f"<module: {type(value).__name__}>"
    return list(value) if isinstance(value, tuple) else value


def _table(part: Any, known: Collection[type]) -> dict[str, Any]:
    cls = type(part)
    table: dict[str, Any] = {
        "type": cls.__name__ if cls in known else f"{cls.__module__}:{cls.__qualname__}"
    }
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if f.init and not (value is None and f.default is None):
            table[f.name] = _value(value, f.name)
    return table


def _value(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value):
        return _table(value, part_types())
    if isinstance(value, tuple | list):
        return [_value(v, key) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return NONE if value is None else value
    raise InputError(
        f"{key} holds a {type(value).__name__}, which config.toml cannot hold; parts are made of numbers, words, "
        "tuples and other parts."
    )


# ---- reading -------------------------------------------------------------------------------------------------------


def read_words(text: str) -> dict[str, Any]:
    """The table [run] of a config.toml, as it stands there."""
    run = _parsed(text).get("run", {})
    return run if isinstance(run, dict) else {}


def from_toml(
    text: str,
    data: Federation | None = None,
    net: nn.Module | None = None,
    method: AnyMethod | None = None,
) -> Experiment:
    """The experiment that :func:`to_toml` wrote.

    ``data``, ``net`` and ``method`` take the place of what was made in Python and so cannot be rebuilt by name.
    """
    from ..api import Experiment

    document, kinds = _parsed(text), hints(Experiment)
    for word in document:
        if word not in ("run", "method"):
            raise unknown("table of config.toml", word, ["run", "method"])
    words = read_words(text)
    for word in words:
        if word not in kinds:
            raise unknown("word of [run]", word, kinds)
    given: dict[str, Any] = {"data": data, "net": net}
    made = {k: v for k, v in given.items() if v is not None}
    named = {
        k: _rebuilt_word(k, v, kinds[k])
        for k, v in words.items()
        if k != "method" and k not in made
    }
    return Experiment(
        method=_method(document, words) if method is None else method, **named, **made
    )


def same(one: str, other: str) -> bool:
    """Whether two config.toml ask for the same run: one that was written before a word existed has its default.

    Where data, network or method were made in Python, the texts must be equal: nothing else is known of them.
    """
    try:
        return one == other or from_toml(one) == from_toml(other)
    except InputError:  # made in Python, or by a version that knew other words
        return False


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"config.toml is not TOML ({error}); restore the file as fedgrove wrote it."
        ) from None


def _rebuilt_word(key: str, value: Any, hint: Any) -> Any:
    if key in ("data", "net") and isinstance(value, str) and value.startswith("<"):
        raise InputError(
            f"the run's {key} was made in Python ({value}); go on from Python with: fedgrove.resume(path, {key}=...)"
        )
    return coerce(key, value, hint)


def _method(document: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
    table = document.get("method")
    if table is None:
        if "method" not in words:
            raise InputError(
                "config.toml names no method; write method = NAME under [run], or a table [method]."
            )
        return methods.find(str(words["method"]))()
    return _part(table, method_types(), "method")


def _part(table: Any, known: Mapping[str, type], path: str) -> Any:
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise InputError(
            f"{path} is {table!r}; it must be a table with a type: {', '.join(known)}."
        )
    name = table["type"]
    if ":" in name:
        raise InputError(
            f"{path} is {name}, which is not part of fedgrove and is never imported by name; "
            "go on from Python with: fedgrove.resume(path, method=...)"
        )
    if name not in known:
        raise unknown(f"type for {path}", name, known)
    return _built(known[name], {k: v for k, v in table.items() if k != "type"}, path)


def _built(cls: type, fields: Mapping[str, Any], path: str) -> Any:
    kinds = hints(cls)
    for key in fields:
        if key not in kinds:
            raise unknown(f"field of {path}, a {cls.__name__},", key, kinds)
    values = {k: _rebuilt(v, kinds[k], f"{path}.{k}") for k, v in fields.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{path} cannot be made: {error}.") from None
    except InputError as error:
        raise InputError(f"{path}.{error}") from None


def _rebuilt(value: Any, hint: Any, path: str) -> Any:
    if isinstance(value, dict):
        return _part(value, fitting(hint), path)
    if isinstance(value, list):
        found = [m for m in members(hint) if get_args(m)]
        if found and not is_leaf(found[0]):
            inner = get_args(found[0])[0]
            return tuple(_rebuilt(v, inner, f"{path}.{i}") for i, v in enumerate(value))
    return coerce(path, value, hint)
