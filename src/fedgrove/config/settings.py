"""What can be set in a method and its parts, by name: ``--set density=0.3``, ``--set lr=0.01``.

pydantic converts plain values (:func:`fedgrove.options.definition.find_value`). Parts are found by
hand: a field takes any dataclass that fits its protocol, which pydantic cannot express, and a union
of all of them would import every method.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, get_args, get_type_hints

from .. import methods, parts
from ..channels import selection as choice
from ..errors import InputError, Refusals, shown, together, unknown
from ..options.definition import describe_type, find_value, is_plain, members
from ..parts.local import LocalTraining
from ..parts.objective import Objective
from ..renamed import find_new_field, find_new_type, rename_field
from ..wire import codec

M = TypeVar("M")


class Setting(NamedTuple):
    """A field somewhere in a method: its dotted path, its value, its type."""

    path: str
    value: Any
    hint: Any
    home: str = ""
    """The module of the method: parts of the user's own are looked for there."""
    needs_part: bool = False
    """Whether the name of the field alone does not name it, as ``eps`` of an optimiser."""


# ---- the table of allowed types ------------------------------------------------------------------


class MethodTypes(Mapping[str, type]):
    """The built-in methods by class name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> type:
        return methods.find_class(name)

    def __iter__(self) -> Iterator[str]:
        return iter(methods.classes())

    def __len__(self) -> int:
        return len(methods.classes())


@cache
def part_types() -> tuple[type, ...]:
    """Every part that a configuration may name: parts, codecs, channel choices, methods' own parts.

    Parts of different methods may have the same name: the field tells them apart. All methods are
    imported for it.

    >>> LocalTraining in part_types()
    True
    """
    classes = list(_shared_part_types())
    for module in methods.part_modules():
        classes.extend(_parts_in(module))
    return tuple(classes)


@cache
def _shared_modules() -> tuple[types.ModuleType, ...]:
    """The modules with parts that belong to no single method."""
    modules = [choice, codec]
    for info in pkgutil.iter_modules(parts.__path__):
        modules.append(import_module(f"{parts.__name__}.{info.name}"))
    return tuple(modules)


@cache
def _shared_part_types() -> tuple[type, ...]:
    """The parts that belong to no single method."""
    classes: list[type] = []
    for module in _shared_modules():
        classes.extend(_parts_in(module))
    return tuple(classes)


def _parts_in(module: types.ModuleType) -> list[type]:
    """The parts that a module defines: public frozen dataclasses, no methods and no states."""
    classes = []
    for name, value in vars(module).items():
        is_public_class = isinstance(value, type) and not name.startswith("_")
        # Not what a module only imports.
        if is_public_class and value.__module__ == module.__name__ and _is_part(value):
            classes.append(value)
    return classes


def _is_part(cls: type) -> bool:
    if not _is_frozen(cls) or methods.is_method(cls):
        return False
    # A method's state has a round (fedgrove.core.State).
    return "round" not in {field.name for field in dataclasses.fields(cls)}


def is_built_in(cls: type) -> bool:
    """Whether a configuration names a class without its file: a method or a part of fedgrove."""
    package = methods.__name__.partition(".")[0]
    if not cls.__module__.startswith(f"{package}."):
        return False
    return methods.is_method(cls) or cls in _parts_in(sys.modules[cls.__module__])


def _parts_near(hint: Any, home: str) -> list[type]:
    """Shared parts, those that a hint names, and behind them those of the method's own file.

    The last win by name. Other methods' own parts are not among them: their files would have to be
    imported.
    """
    near = list(_shared_part_types())
    for member in members(hint):
        if isinstance(member, type) and _is_part(member):
            near.append(member)
    if home in sys.modules:
        near.extend(_parts_in(sys.modules[home]))
    return near


def _is_frozen(cls: type) -> bool:
    if not dataclasses.is_dataclass(cls):
        return False
    return bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def fitting(hint: Any, home: str = "") -> dict[str, type]:
    """Return the parts that a ``--set`` field of this type takes, by name.

    These are all parts if the type is not known.

    ``home`` is the module of a method, whose own parts are there too. Another method's own part is
    not, though the field may take it: :func:`find_part` finds that by its name.

    >>> sorted(fitting(LocalTraining))
    ['LocalTraining']
    """
    near = part_types() if hint is Any else _parts_near(hint, home)
    return {cls.__name__: cls for cls in near if _takes(hint, cls)}


def find_part(name: str, hint: Any, home: str = "") -> type | None:
    """Return the part of this name that a setting takes, of any method if need be, or None."""
    name = find_new_type(name)
    near = fitting(hint, home)
    takes_parts = any(not is_plain(member) for member in members(hint))
    # All methods are imported to find it: only for a text that may be the name of a class.
    if name in near or not takes_parts or not name[:1].isupper():
        return near.get(name)
    for cls in part_types():
        if cls.__name__ == name and _takes(hint, cls):
            return cls
    return None


def _takes(hint: Any, cls: type) -> bool:
    """Whether a setting of this type accepts a part of this class."""
    wanted = [member for member in members(hint) if not is_plain(member)]
    return hint is Any or any(_accepts(member, cls) for member in wanted)


def _accepts(wanted: Any, cls: type) -> bool:
    """Whether a class is of a wanted type, or has the members of a wanted protocol."""
    if not _is_protocol(wanted):
        return isinstance(wanted, type) and issubclass(cls, wanted)
    field_names = {field.name for field in dataclasses.fields(cls)}
    for name, member in _protocol_members(wanted).items():
        if name not in field_names and not _has(cls, name, member):
            return False
    return True


def _is_protocol(wanted: Any) -> bool:
    return getattr(wanted, "_is_protocol", False) and wanted is not Protocol


def _protocol_members(protocol: type) -> dict[str, Any]:
    """The members of a protocol: its public names, and ``__call__`` if it has one."""
    promised: dict[str, Any] = {}
    for base in protocol.__mro__:
        if not _is_protocol(base):
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") or name == "__call__":
                promised[name] = member
    return promised


def _has(cls: type, name: str, like: Any) -> bool:
    """Whether a class has such a member; of a method the arguments must match too.

    (Names alone would let too much in: most parts have only ``__call__``.)
    """
    member = getattr(cls, name, None)
    if not inspect.isfunction(like):
        return member is not None
    if not inspect.isfunction(member):
        return False
    return set(inspect.signature(like).parameters) <= set(inspect.signature(member).parameters)


# ---- types and values ----------------------------------------------------------------------------


def hints(cls: Any) -> dict[str, Any]:
    """Return the resolved type of every setting of a method or part, own fields first."""
    try:
        resolved = get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError):
        # A type imported for type checkers only, or an annotation that is wrong.
        resolved = {}
    return {f.name: resolved.get(f.name, Any) for f in own_fields_first(cls) if f.init}


def own_fields_first(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the settings of a dataclass: those that it adds come before inherited ones."""
    places: dict[str, tuple[int, int]] = {}
    for depth, base in enumerate(cls.__mro__):
        for number, name in enumerate(vars(base).get("__annotations__", {})):
            # The class furthest up wins: a field with another default keeps its place.
            places[name] = (depth, number)
    return sorted(dataclasses.fields(cls), key=lambda field: places[field.name])


def coerce(key: str, given: Any, hint: Any, home: str = "") -> Any:
    """Return a setting's number, text or tuple in the field's type, from what was typed or read.

    >>> coerce("phases", "0,0,50", tuple[int, ...]), coerce("clip", "none", float | None)
    ((0, 0, 50), None)
    """
    # By type first: an array compared with text gives an array.
    is_none = isinstance(given, str) and given == "none"
    if is_none and type(None) in members(hint):
        return None
    try:
        return find_value(given, hint)
    except ValueError:
        remark = _why_no_part(given, hint, home)
        raise InputError(
            f"{key} is {shown(given)}{remark}; it must be {allowed(hint, home)}."
        ) from None


def _why_no_part(given: Any, hint: Any, home: str) -> str:
    """What keeps a class of this name from being a part, for a sentence; "": there is none."""
    takes_parts = any(not is_plain(member) for member in members(hint))
    if not isinstance(given, str) or not takes_parts:
        return ""
    modules = list(_shared_modules())
    if home in sys.modules:
        modules.append(sys.modules[home])
    for module in modules:
        cls = vars(module).get(given)
        if isinstance(cls, type) and not _is_frozen(cls):
            return ", a class without @dataclass(frozen=True)"
    return ""


def allowed(hint: Any, home: str = "") -> str:
    """Describe what a setting may be.

    >>> allowed(float | None), allowed(tuple[int, ...])
    ('a number or none', 'whole numbers separated by commas')
    """
    alternatives: list[str] = []
    names = []
    for name, cls in fitting(hint, home).items():
        if _needs_only_a_name(cls) and (hint is not Objective or _is_whole(cls)):
            names.append(name)
    if len(names) == 1:
        alternatives.append(names[0])
    elif names:
        alternatives.append(f"one of {', '.join(names)}")
    for member in members(hint):
        if is_plain(member):
            alternatives.append(describe_type(member))
    return " or ".join(alternatives) or "made in Python"


def _needs_only_a_name(cls: Any) -> bool:
    """Whether every field of a part has a default."""
    for field in dataclasses.fields(cls):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if not has_default:
            return False
    return True


def _is_whole(cls: Any) -> bool:
    """Whether an objective can be all of a method's loss, in any method."""
    return cls.is_loss and not cls.only_in


# ---- finding and setting -------------------------------------------------------------------------


def walk(part: Any, path: str = "", home: str = "") -> Iterator[Setting]:
    """Yield every setting of a part and of the parts in it, outermost first.

    Left out are fields that only code can set: those with ``settable=False`` in their metadata.
    """
    home = home or type(part).__module__
    fields = {field.name: field for field in dataclasses.fields(part)}
    for name, hint in hints(type(part)).items():
        if not fields[name].metadata.get("settable", True):
            continue
        value = getattr(part, name)
        needs_part = fields[name].metadata.get("needs_part", False)
        yield Setting(path + name, value, type(value) if hint is Any else hint, home, needs_part)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{path}{name}.", home)
        elif isinstance(value, tuple):
            yield from _walk_items(value, f"{path}{name}.", hint, home)


def _walk_items(items: tuple[Any, ...], path: str, hint: Any, home: str) -> Iterator[Setting]:
    """The parts in a tuple, by their position: ``objective.terms.0``."""
    item_hint = (get_args(hint) or (Any,))[0]
    for i, item in enumerate(items):
        if dataclasses.is_dataclass(item):
            yield Setting(f"{path}{i}", item, item_hint, home)
            yield from walk(item, f"{path}{i}.", home)


def settable(method: Any, recipe: LocalTraining | None = None) -> list[tuple[str, Any, str]]:
    """What ``--set`` takes for a method: path, present value, allowed values in words.

    >>> from fedgrove.methods import FedProx
    >>> settable(FedProx())[1]
    ('pull.mu', 0.01, 'a number')
    """
    settings = walk(with_default_recipe(method, recipe))
    return [(each.path, each.value, allowed(each.hint, each.home)) for each in settings]


@dataclasses.dataclass(frozen=True)
class Draft(Generic[M]):
    """A method whose settings are still being changed: its parts check them all at once at the end.

    Settings may be right together only, as a new least number and a new largest: checked one by
    one, they would be refused in one order and not in the other.
    """

    method: M
    """The draft as it is so far; changes are not checked yet."""
    changed: tuple[str, ...] = ()
    """The paths of what was changed."""

    def assign(self, text: str, recipe: LocalTraining | None = None) -> Draft[M]:
        """Change one more setting, ``key=value``."""
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise InputError(f"--set was given '{text}'; it takes key=value, for instance lr=0.01.")
        return self.put(key.strip(), value.strip(), recipe)

    def put(self, key: str, value: Any, recipe: LocalTraining | None = None) -> Draft[M]:
        """Change one more setting, from Python."""
        complete = with_default_recipe(self.method, recipe)
        renamed = find_old_setting(complete, key)
        if renamed is not None:
            parent, part, old = renamed
            new, value = rename_field(type(part), old, value)
            key = parent + new
        setting = _find(complete, key)
        # The default recipe becomes the method's own only where something in it is changed.
        changes_recipe = setting.path.startswith("local.")
        base = complete if changes_recipe else self.method
        method = _put(base, setting.path.split("."), _chosen(setting, value))
        # What was changed in a part that is now replaced is gone.
        still = [path for path in self.changed if not f"{path}.".startswith(f"{setting.path}.")]
        return Draft(method, (*still, setting.path))

    def checked(self) -> M:
        """Return the method with all its settings changed; every part checks its fields."""
        method: M = _made_anew(self.method, "", self.changed)
        return method


def assign(method: M, text: str, recipe: LocalTraining | None = None) -> M:
    """The method with one setting changed; ``text`` is ``key=value``.

    The key is a field of the method, a dotted path, or the end of a path if only one path ends so.
    The constants of an optimiser need it in front, as ``optimiser.eps``. If the field holds a part,
    the value is a part's class name. ``recipe`` stands for ``local`` if the method leaves it to the
    data set.

    >>> from fedgrove.methods import Ditto
    >>> assign(Ditto(), "mu=0.5").pull.mu
    0.5
    """
    return Draft(method).assign(text, recipe).checked()


def _made_anew(part: Any, at: str, changed: Sequence[str]) -> Any:
    """The part at a path, with all that was changed in it or below checked, innermost first."""
    if not changed:
        return part
    values: dict[str, Any] = {}
    refusals = Refusals()
    for path in changed:
        key = path.removeprefix(at).partition(".")[0]
        below = [other for other in changed if other.startswith(f"{at}{key}.")]
        with refusals.collected():
            values[key] = _made_anew(_field(part, key), f"{at}{key}.", below)
    if isinstance(part, tuple):
        refusals.check()
        return tuple(values.get(str(i), item) for i, item in enumerate(part))
    # Also if something below is refused, so that all errors are reported together.
    with refusals.collected():
        made = _replaced(part, values, changed)
    refusals.check()
    return made


def _replaced(part: Any, values: dict[str, Any], changed: Sequence[str]) -> Any:
    """Return a part with these settings changed; report all values that it refuses."""
    try:
        return dataclasses.replace(part, **values)
    except InputError as error:
        raise together(_all_refusals(part, values, error, changed)) from None


def _all_refusals(
    part: Any, values: dict[str, Any], first: InputError, changed: Sequence[str]
) -> list[str]:
    """Everything that a part refuses among the new values of its fields, not only the first.

    A part stops at the first field that is wrong. With its default in place of that one, it goes on
    to the next.
    """
    sentences = [_with_path(str(first), changed)]
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    in_doubt = set(values)
    tried = dict(values)
    message = str(first)
    while True:
        wrong = message.partition(" is ")[0]
        has_default = defaults.get(wrong, dataclasses.MISSING) is not dataclasses.MISSING
        if wrong not in in_doubt or not has_default:
            return sentences
        in_doubt.discard(wrong)
        tried[wrong] = defaults[wrong]
        try:
            dataclasses.replace(part, **tried)
            return sentences
        except InputError as another:
            message = str(another)
        # Any other error is about a default, which the user did not set.
        if message.partition(" is ")[0] in in_doubt:
            sentences.append(_with_path(message, changed))


def _with_path(message: str, paths: Sequence[str]) -> str:
    """A part's refusal of its own field, with the whole path: "lr is -1" -> "local.lr is -1"."""
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        if message.startswith(f"{leaf} is "):
            return f"{parent}.{message}" if parent else message
    return f"{', '.join(paths)}: {message}"


def with_default_recipe(method: Any, recipe: LocalTraining | None) -> Any:
    """The method, with the data set's recipe if it has none; nothing is checked."""
    has_local = hasattr(method, "local")
    if recipe is not None and has_local and method.local is None:
        return _put(method, ["local"], recipe)
    return method


def find_old_setting(method: Any, key: str) -> tuple[str, Any, str] | None:
    """Return where an old name of a setting belongs, or None if the key is no old name.

    Returns:
        The path of the part that has the field, ending in a dot (empty for the method); the part;
        the field's old name.
    """
    parent, _, old = key.rpartition(".")
    parts = {"": method}
    for setting in walk(method):
        if dataclasses.is_dataclass(setting.value):
            parts[setting.path] = setting.value
    for path, part in parts.items():
        is_meant = path == parent or not parent
        if is_meant and find_new_field(type(part), old) is not None:
            return (f"{path}." if path else "", part, old)
    return None


def find_settings(method: Any, key: str) -> list[Setting]:
    """Return the settings of a method that a key may name: by its path, or all that end so."""
    matches = []
    for setting in walk(method):
        if setting.path == key:
            return [setting]
        needs_more = setting.needs_part and "." not in key
        if setting.path.endswith(f".{key}") and not needs_more:
            matches.append(setting)
    return matches


def _find(method: Any, key: str) -> Setting:
    """Return the one setting of a method that a key names."""
    matches = find_settings(method, key)
    if len(matches) == 1:
        return matches[0]
    if matches:
        paths = ", ".join(setting.path for setting in matches)
        raise InputError(f"'{key}' could be any of {paths}; write one of these in full.")
    name = methods.name_of(method)
    paths_of_all = [setting.path for setting in walk(method)]
    ending = [path for path in paths_of_all if path.endswith(f".{key}")]
    if ending:
        raise InputError(
            f"{name} has no setting '{key}' of its own, only {' and '.join(ending)}; if you mean "
            "that, write it in full."
        )
    raise unknown(f"setting of {name}", key, paths_of_all)


def _chosen(setting: Setting, given: Any) -> Any:
    """The value of a field from what was given: a part, a part's name, a number, text or a list."""
    if dataclasses.is_dataclass(given):
        is_known = is_built_in(type(given)) or type(given).__module__ == setting.home
        if not is_known or not _takes(setting.hint, type(given)):
            name = type(given).__name__
            allowed_values = allowed(setting.hint, setting.home)
            raise InputError(f"{setting.path} is a {name}; it must be {allowed_values}.")
        return given
    cls = find_part(given, setting.hint, setting.home) if isinstance(given, str) else None
    if cls is None:
        return coerce(setting.path, given, setting.hint, setting.home)
    if not _needs_only_a_name(cls):
        raise InputError(
            f"{setting.path} is '{given}', which needs more than a name; make it in Python."
        )
    unwritten = sorted(getattr(cls, "__abstractmethods__", ()))
    if unwritten:
        raise InputError(
            f"{setting.path} is '{given}', a class without {' and '.join(unwritten)}; write it "
            "there first."
        )
    return cls()


def _put(part: Any, keys: Sequence[str], value: Any) -> Any:
    """A copy of a part in which the field at the end of ``keys`` has another value, unchecked."""
    key, *rest = keys
    if rest:
        value = _put(_field(part, key), rest, value)
    if isinstance(part, tuple):
        position = int(key)
        return (*part[:position], value, *part[position + 1 :])
    changed = copy.copy(part)
    # Not `dataclasses.replace`, which would have the part check what is not complete yet.
    object.__setattr__(changed, key, value)
    return changed


def _field(part: Any, key: str) -> Any:
    """Return a setting's value, or an item of a tuple of parts."""
    return part[int(key)] if isinstance(part, tuple) else getattr(part, key)
