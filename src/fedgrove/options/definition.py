"""How options are defined, checked and handed to functions; the options are in the package."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from ..errors import ArgumentError, InputError, Refusals, nearest, shown, together

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
OptionsT = TypeVar("OptionsT", bound="Options")


# ---- what an option is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """What is known of an option in addition to its name, type and default value."""

    help: str
    metavar: str = ""
    """What ``--help`` shows in place of the value."""
    without: str = ""
    """What happens without the option, if its default value does not show it."""
    allowed: str = ""
    """The values that ``check`` and ``parse`` accept, for an error message."""
    check: Callable[[Any], bool] | None = None
    """Whether a value of the right type is within its limits; None itself is always allowed."""
    parse: Callable[[str], Any] | None = None
    """Reads what was typed; raises ValueError. By default the type says how."""
    complete: str = ""
    """The function of :mod:`fedgrove.cli.complete` that completes it."""
    python: str = ""
    """What it means in Python, if that differs; "" takes ``help``."""
    checked_as: Any = None
    """The type that values are converted to, where the field's own type is wider or needs torch.

    Any: values are not checked.
    """
    setting: str = ""
    """The setting of the method that it is short for, as ``local.epochs``."""
    is_argument: bool = False
    """Whether the command line takes it by position."""
    is_repeated: bool = False
    """Whether the command line takes it several times."""
    only: Literal["", "python", "command line"] = ""


def option(default: T, help: str, metavar: str = "", **details: Any) -> T:
    """Define an option as a field of a dataclass.

    Args:
        default: The default value.
        help: What it does, as ``--help`` shows it.
        metavar: What ``--help`` shows in place of the value.
        details: The other fields of :class:`Option`.
    """
    metadata = {"option": Option(help, metavar, **details)}
    return dataclasses.field(default=default, metadata=metadata)


def argument(help: str, metavar: str, **details: Any) -> dict[str, Option]:
    """Define an argument without a default: the metadata of its field."""
    return {"option": Option(help, metavar, is_argument=True, **details)}


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def option_group(cls: type[T]) -> type[T]:
    """Make a class a group of options, all of which Python takes by name."""
    # Without what a group does not need: many are made before the first help text is shown.
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def option_class(cls: type[T]) -> type[T]:
    """Make a class one of options; Python takes those before ``_: KW_ONLY`` also by position."""
    return dataclass(frozen=True, repr=False, eq=False)(cls)


class Field(NamedTuple):
    """An option of a class: its name, type and default together with its definition."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The option as it is typed; a switch that is on by default is switched off."""
        prefix = "--no-" if self.default is True else "--"
        # ``check_`` is typed --check: the name without the underscore is a method's.
        return prefix + self.name.rstrip("_").replace("_", "-")

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is dataclasses.MISSING

    def describe_default(self) -> str:
        """The default for help and docs; empty if there is nothing to show."""
        if self.option.without:
            return self.option.without
        has_none = self.is_required or self.default is None
        if has_none or isinstance(self.default, bool) or self.default == ():
            return ""
        if isinstance(self.default, tuple):
            return ",".join(str(item) for item in self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def describe(self, in_python: bool = False) -> str:
        """The help text with the default at its end."""
        text = (self.option.python if in_python else "") or self.option.help
        default = self.describe_default()
        return f"{text} Default: {default}." if default else text

    def convert(self, value: Any) -> Any:
        """Return ``value`` in the option's type; an InputError states what is allowed."""
        try:
            found = find_value(value, self.type)
        except ValueError:
            raise _not_allowed(self.name, value, self._describe_allowed()) from None
        return check_limits(self, found)

    def _describe_allowed(self) -> str:
        """The values of the right type; of a list the limits say more, and give an example."""
        is_list = any(get_origin(member) is tuple for member in members(self.type))
        if is_list and self.option.allowed:
            return self.option.allowed
        return describe_alternatives(self.type)

    def read(self, text: Any) -> Any:
        """Return the value of what was typed; an InputError states what is allowed."""
        if isinstance(self.default, bool):
            return not self.default
        if self.option.parse is None:
            return self.convert(text)
        try:
            value = self.option.parse(text)
        except ValueError:
            raise _not_allowed(self.name, text, self.option.allowed) from None
        return check_limits(self, value)


@functools.cache
def options_of(cls: type) -> dict[str, Field]:
    """Return the options of a class by name, in the order in which Python takes them."""
    found = {}
    for each in dataclasses.fields(cls):
        if "option" in each.metadata:
            kind = _resolve_type(cls, each)
            found[each.name] = Field(each.name, kind, each.default, each.metadata["option"])
    return found


def _resolve_type(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The type of a field; Any where ``checked_as`` stands for it.

    Not `typing.get_type_hints`: it wants all types of a class, and some of them need torch.
    """
    option: Option = field.metadata["option"]
    if option.checked_as is not None:
        return option.checked_as
    for owner in cls.__mro__:
        if field.name in vars(owner).get("__annotations__", {}):
            return eval(str(field.type), vars(sys.modules[owner.__module__]))
    raise AssertionError(f"{field.name} is a field of no class")


def names_of(*classes: type) -> list[str]:
    """The names of the options of classes."""
    return [name for cls in classes for name in options_of(cls)]


def check_limits(field: Field, value: Any) -> Any:
    """Return ``value``; an InputError refuses one beyond the option's limits."""
    check = field.option.check
    if check is not None and value is not None and not check(value):
        raise _not_allowed(field.name, value, field.option.allowed)
    return value


def _not_allowed(name: str, value: Any, allowed: str) -> InputError:
    return InputError(f"{name} is {shown(value)}; it must be {allowed}.")


# ---- types ---------------------------------------------------------------------------------------

TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of an option's union type; any other type is its only one."""
    is_union = get_origin(hint) in (Union, UnionType)
    return get_args(hint) if is_union else (hint,)


def is_plain(hint: Any) -> bool:
    """Whether an option's values are numbers, text, or tuples of these."""
    if get_origin(hint) is tuple:
        return all(is_plain(item) for item in get_args(hint) if item is not ...)
    return hint in TYPE_NAMES or hint is Any or get_origin(hint) is Literal


def describe_type(hint: Any) -> str:
    """Describe the plain type of an option for help.

    >>> describe_type(float), describe_type(tuple[int, ...])
    ('a number', 'whole numbers separated by commas')
    """
    if get_origin(hint) is Literal:
        return " or ".join(str(value) for value in get_args(hint))
    if get_origin(hint) is tuple:
        items = [item for item in get_args(hint) if item is not ...]
        plural = {int: "whole numbers", float: "numbers", str: "words"}.get(items[0], "values")
        any_length = ... in get_args(hint)
        count = "" if any_length else f"{len(items)} "
        return f"{count}{plural} separated by commas"
    if isinstance(hint, type) and issubclass(hint, PathLike):
        return "a path"
    return TYPE_NAMES.get(hint, "a value")


def describe_alternatives(hint: Any) -> str:
    """The alternatives of a type in words, but for None.

    >>> describe_alternatives(int | str | None)
    'a whole number or text'
    """
    return " or ".join(
        describe_type(member) for member in members(hint) if member is not type(None)
    )


def find_value(value: Any, hint: Any) -> Any:
    """Return an option's ``value`` in a type; raises ValueError if it is not of the type."""
    alternatives = members(hint)
    if Any in alternatives or (value is None and type(None) in alternatives):
        return value
    if getattr(value, "shape", None) == ():
        # A number of numpy's.
        value = value.item()
    # Everything is text, so text is tried last.
    for member in alternatives:
        if is_plain(member) and member not in (str, type(None)):
            try:
                return _validate(value, member)
            except ValueError:
                continue
    if str in alternatives and isinstance(value, str | PathLike):
        text = str(value)
        # No file can have such a name, and the system's calls fail without a sentence. What cannot
        # be encoded is a ValueError already.
        if b"\0" in os.fsencode(text):
            raise ValueError(value)
        return text
    raise ValueError(value)


def _validate(value: Any, hint: Any) -> Any:
    """The value in a type that is neither text nor None; raises ValueError."""
    if isinstance(value, str) and get_origin(hint) is tuple:
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    elif isinstance(value, Sequence) and get_origin(hint) is tuple:
        # Any sequence, a range too.
        value = list(value)
    # pydantic's ValidationError is a ValueError.
    found = _adapter(hint).validate_python(value)
    is_typed_number = isinstance(value, str) and isinstance(found, float)
    if is_typed_number and not math.isfinite(found):
        # Typed "nan" or "inf" is a number to Python and a slip to people.
        raise ValueError(value)
    return found


@functools.cache
def _adapter(hint: Any) -> Any:
    # Imported here: it takes a while, and help and completion do without.
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


# ---- options that were given ---------------------------------------------------------------------


class Options:
    """Base of the options of a function or command: knows which of them were given."""

    given: Mapping[str, Any] = MappingProxyType({})
    """Those that were given and are right; all others have their defaults."""
    mistakes: Sequence[str] = ()
    """What is wrong with those that were given, a sentence for each."""
    not_typed: ClassVar[tuple[str, ...]] = ()
    """Inherited options that the command does not take."""

    def values_of(self, *classes: type) -> dict[str, Any]:
        """Return the values of the options that one of ``classes`` has too."""
        known = names_of(*classes)
        return {name: value for name, value in vars(self).items() if name in known}

    def given_of(self, *classes: type) -> dict[str, Any]:
        """Return the options that were given and that one of ``classes`` has too."""
        known = names_of(*classes)
        return {name: value for name, value in self.given.items() if name in known}

    def check(self) -> None:
        """Refuse all options that are wrong at once."""
        if self.mistakes:
            raise together(self.mistakes)


def make_options(
    cls: Callable[..., OptionsT], given: Mapping[str, Any], name: str, is_typed: bool = False
) -> OptionsT:
    """Make the options of a function or command from what was given.

    What is wrong is collected in ``mistakes``, and its default stands in for it.

    Args:
        cls: The class of the options.
        given: Values by name.
        name: The function or command, for errors.
        is_typed: Whether the values are texts of the command line.

    Raises:
        ArgumentError: An argument without a default is missing.
        InputError: An argument without a default is wrong.
    """
    known = options_of(cast(type, cls))
    mistakes = Refusals()
    values: dict[str, Any] = {}
    for key, value in given.items():
        with mistakes.collected():
            values[key] = known[key].read(value) if is_typed else known[key].convert(value)
    for field in known.values():
        if field.is_required and field.name not in given:
            what = field.option.help
            raise ArgumentError(f"{name} needs {field.name}: {what[0].lower()}{what[1:]}")
        if field.is_required and field.name not in values:
            # No default can stand in for it.
            mistakes.check()
    made = cls(**values)
    # The class is frozen; these are no fields, so that its constructor does not take them.
    object.__setattr__(made, "given", MappingProxyType(values))
    object.__setattr__(made, "mistakes", tuple(mistakes.sentences))
    return made


def takes(
    options: Callable[P, OptionsT], home: str = "fedgrove"
) -> Callable[[Callable[[OptionsT], R]], Callable[P, R]]:
    """Let a function take the options of a class as its arguments.

    Type checkers and editors see the arguments of ``options``; so does ``help``. An unknown
    argument is refused with a sentence that names the nearest.

    Args:
        options: The class.
        home: The module that users import the function from.
    """
    cls = cast(type, options)
    by_position = [each.name for each in dataclasses.fields(cls) if not each.kw_only]

    def decorate(function: Callable[[OptionsT], R]) -> Callable[P, R]:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _check_arguments(f"{home}.{name}", options_of(cls), by_position, args, kwargs)
            given = {**dict(zip(by_position, args, strict=False)), **kwargs}
            return function(make_options(options, given, name))

        signature = inspect.signature(cls)
        returns = inspect.signature(function).return_annotation
        described: Any = call
        described.__signature__ = signature.replace(return_annotation=returns)
        described.__doc__ = f"{inspect.getdoc(function)}\n\nArgs:\n{describe_arguments(cls)}"
        return call

    return decorate


def _check_arguments(
    path: str, known: Mapping[str, Field], by_position: Sequence[str], args: Any, kwargs: Any
) -> None:
    """Refuse a call as Python does, and say what was probably meant."""
    name = path.rpartition(".")[2]
    if len(args) > len(by_position):
        raise ArgumentError(
            f"{name} takes {', '.join(by_position)} by position, and got {len(args)} values; give "
            "all others by name, as in rounds=3."
        )
    for key in kwargs:
        if key in by_position[: len(args)]:
            raise ArgumentError(f"{name}() got multiple values for argument '{key}'.")
        if key not in known:
            near = nearest(key, list(known))
            hint = f"; did you mean '{near}'?" if near else "."
            raise ArgumentError(
                f"{name}() got an unexpected keyword argument '{key}'{hint} "
                f"help({path}) lists all arguments."
            )


def describe_arguments(cls: type) -> str:
    """The arguments of a class of options, as a docstring lists them."""
    lines = []
    for field in options_of(cls).values():
        if field.option.only != "command line":
            lines.append(f"    {field.name}: {field.describe(in_python=True)}")
    return "\n".join(lines)
