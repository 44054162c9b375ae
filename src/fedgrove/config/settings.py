"""What can be set in a method and its parts, by name: ``--set density=0.3``, ``--set local.optimiser.lr=0.01``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pkgutil
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import TypeAdapter, ValidationError

from .. import methods, parts
from ..channels import choice
from ..errors import InputError, unknown
from ..parts.local import LocalTraining
from ..wire import codec

M = TypeVar("M")
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}


class Setting(NamedTuple):
    """A field somewhere in a method: its dotted path, what it holds, what it may hold."""

    path: str
    value: Any
    hint: Any


# ---- the table of allowed types ------------------------------------------------------------------------------------


@cache
def method_types() -> dict[str, type]:
    """The methods there are, by class name."""
    return {cls.__name__: cls for cls in map(methods.find, methods.names())}


@cache
def part_types() -> tuple[type, ...]:
    """Every public frozen dataclass that a configuration may name: parts, codecs, channel choices.

    Two parts may have one name (an allocation and a quantiser are both ``Uniform``): the field tells them apart.

    >>> LocalTraining in part_types()
    True
    """
    modules = [choice, codec]
    for info in pkgutil.iter_modules(parts.__path__):
        modules.append(import_module(f"{parts.__name__}.{info.name}"))
    types_found: list[type] = []
    for module in modules:
        for name, value in vars(module).items():
            is_public_class = isinstance(value, type) and not name.startswith("_")
            if is_public_class and value.__module__ == module.__name__ and _frozen(value):
                types_found.append(value)
    return tuple(types_found)


def _frozen(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def fitting(hint: Any) -> dict[str, type]:
    """The parts that a field of this type takes, by name; all parts where the type is not known.

    >>> sorted(fitting(LocalTraining))
    ['LocalTraining']
    """
    wanted = [m for m in members(hint) if not is_leaf(m)]
    return {
        cls.__name__: cls
        for cls in part_types()
        if hint is Any or any(_accepts(m, cls) for m in wanted)
    }


def _accepts(wanted: Any, cls: type) -> bool:
    if getattr(wanted, "_is_protocol", False):
        own = {f.name for f in dataclasses.fields(cls)}
        return all(name in own or _has(cls, name, like) for name, like in _promised(wanted).items())
    return isinstance(wanted, type) and issubclass(cls, wanted)


def _promised(protocol: type) -> dict[str, Any]:
    """What a protocol asks for: its public names, and to be called if it is."""
    bases = [b for b in protocol.__mro__ if getattr(b, "_is_protocol", False) and b is not Protocol]
    return {
        k: v for b in bases for k, v in vars(b).items() if not k.startswith("_") or k == "__call__"
    }


def _has(cls: type, name: str, like: Any) -> bool:
    """Whether a class has a method of this name that takes the same arguments: names alone would let too much in."""
    own = getattr(cls, name, None)
    if not inspect.isfunction(like) or not inspect.isfunction(own):
        return own is not None and not inspect.isfunction(like)
    return set(inspect.signature(like).parameters) <= set(inspect.signature(own).parameters)


# ---- types and values ----------------------------------------------------------------------------------------------


def hints(cls: Any) -> dict[str, Any]:
    """The resolved type of every field that can be set."""
    try:
        found = get_type_hints(cls)
    except NameError:  # a type imported for type checkers only
        found = {}
    return {f.name: found.get(f.name, Any) for f in dataclasses.fields(cls) if f.init}


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other type is its own only one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_leaf(hint: Any) -> bool:
    """Whether a type holds numbers and words only, no parts."""
    if get_origin(hint) is tuple:
        return all(is_leaf(a) for a in get_args(hint) if a is not ...)
    return hint in WORDS or hint is Any or get_origin(hint) is Literal


def coerce(key: str, given: Any, hint: Any) -> Any:
    """A number, word or tuple of the field's type, from what was typed or read.

    >>> coerce("phases", "0,0,50", tuple[int, ...]), coerce("clip", "none", float | None)
    ((0, 0, 50), None)
    """
    leaves = [m for m in members(hint) if is_leaf(m)]
    for member in sorted(
        leaves, key=lambda m: m is str
    ):  # everything is text, so text is tried last
        try:
            value = TypeAdapter(member).validate_python(_spelled(given, member))
        except ValidationError:
            continue
        if not (isinstance(given, str) and isinstance(value, float) and not math.isfinite(value)):
            return value
    raise InputError(f"{key} is {given!r}; it must be {allowed(hint)}.")


def _spelled(given: Any, member: Any) -> Any:
    if isinstance(given, str) and get_origin(member) is tuple:
        return [word.strip() for word in given.split(",")] if given.strip() else []
    return None if member is type(None) and given == "none" else given


def allowed(hint: Any) -> str:
    """What a field may hold, in words.

    >>> allowed(float | None), allowed(tuple[int, ...])
    ('a number or none', 'whole numbers with commas between')
    """
    names = [name for name, cls in fitting(hint).items() if _by_name(cls)]
    choice = [f"one of {', '.join(names)}" if len(names) > 1 else names[0]] if names else []
    return (
        " or ".join([*choice, *(_said(m) for m in members(hint) if is_leaf(m))]) or "made in Python"
    )


def _by_name(cls: Any) -> bool:
    """Whether a part needs no more than its name."""
    missing = dataclasses.MISSING
    return all(
        f.default is not missing or f.default_factory is not missing
        for f in dataclasses.fields(cls)
    )


def _said(leaf: Any) -> str:
    if get_origin(leaf) is Literal:
        return " or ".join(map(str, get_args(leaf)))
    if get_origin(leaf) is tuple:
        inner = [a for a in get_args(leaf) if a is not ...]
        plural = {int: "whole numbers", float: "numbers", str: "words"}.get(inner[0], "values")
        count = f"{len(inner)} " if ... not in get_args(leaf) else ""
        return f"{count}{plural} with commas between"
    return WORDS.get(leaf, "a value")


# ---- finding and setting -------------------------------------------------------------------------------------------


def walk(part: Any, path: str = "") -> Iterator[Setting]:
    """Every field of a part and of the parts in it, outermost first."""
    for name, hint in hints(type(part)).items():
        value = getattr(part, name)
        yield Setting(path + name, value, type(value) if hint is Any else hint)
        yield from _within(value, f"{path}{name}.", hint)


def _within(value: Any, path: str, hint: Any) -> Iterator[Setting]:
    if dataclasses.is_dataclass(value):
        yield from walk(value, path)
    elif isinstance(value, tuple):
        inner = (get_args(hint) or (Any,))[0]
        for i, item in enumerate(value):
            if dataclasses.is_dataclass(item):
                yield Setting(f"{path}{i}", item, inner)
                yield from walk(item, f"{path}{i}.")


def settable(method: Any, recipe: LocalTraining | None = None) -> list[tuple[str, Any, str]]:
    """What ``--set`` takes for a method: path, present value, allowed values in words.

    >>> from fedgrove.methods import FedProx
    >>> settable(FedProx())[1]
    ('pull.mu', 0.01, 'a number')
    """
    return [(s.path, s.value, allowed(s.hint)) for s in walk(_filled(method, recipe))]


def assign(method: M, text: str, recipe: LocalTraining | None = None) -> M:
    """The method with one setting changed; ``text`` is ``key=value``.

    The key is a field of the method, a dotted path, or the last names of a path if only one path ends so; where the
    field holds a part, the value is a part's class name. ``recipe`` stands for ``local`` where the method leaves it
    to the data set.

    >>> from fedgrove.methods import Ditto
    >>> assign(Ditto(), "mu=0.5").pull.mu
    0.5
    """
    key, equals, value = (word.strip() for word in text.partition("="))
    if not (key and equals and value):
        raise InputError(f"--set was given '{text}'; it takes key=value, for instance lr=0.01.")
    whole = _filled(method, recipe)
    setting = _find(whole, key)
    start = whole if setting.path.startswith("local.") else method
    new = _chosen(setting, value)
    try:
        return _put(start, setting.path.split("."), new)  # type: ignore[no-any-return]
    except InputError as error:
        parent, _, leaf = setting.path.rpartition(".")
        said = str(error)
        own = said.startswith(f"{leaf} is ")
        raise InputError(
            f"{parent}.{said}" if own and parent else said if own else f"{setting.path}: {said}"
        ) from None


def _filled(method: Any, recipe: LocalTraining | None) -> Any:
    missing = recipe is not None and getattr(method, "local", recipe) is None
    return dataclasses.replace(method, local=recipe) if missing else method


def _find(method: Any, key: str) -> Setting:
    every = {s.path: s for s in walk(method)}
    if key in every:
        return every[key]
    ends = [path for path in every if path.endswith(f".{key}")]
    if len(ends) > 1:
        raise InputError(f"'{key}' could be any of {', '.join(ends)}; write one of these in full.")
    if not ends:
        raise unknown(f"setting of {methods.name_of(method)}", key, every)
    return every[ends[0]]


def _chosen(setting: Setting, text: str) -> Any:
    choices = fitting(setting.hint)
    if text not in choices:
        return coerce(setting.path, text, setting.hint)
    if not _by_name(choices[text]):
        raise InputError(
            f"{setting.path} is '{text}', which needs more than a name; make it in Python."
        )
    return choices[text]()


def _put(part: Any, keys: list[str], value: Any) -> Any:
    head, *rest = keys
    if isinstance(part, tuple):
        at = int(head)
        return (*part[:at], _put(part[at], rest, value) if rest else value, *part[at + 1 :])
    return dataclasses.replace(
        part, **{head: _put(getattr(part, head), rest, value) if rest else value}
    )
