"""Finds methods: built-in ones by the files of this folder, others in a file of the user's.

The folder is listed once per process, and a file is imported when its method is first needed. A
file that cannot be used affects only its own method.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ..core import AnyMethod
from ..errors import InputError, MethodError, shown, unknown
from ..nets import user_files

FUNCTIONS = ("init", "deliver", "plan", "fold", "work")
"""What a method must be able to do (:class:`fedgrove.core.Method`)."""
FIELDS = {"local": "local: LocalTraining | None = None", "codec": "codec: Codec = Dense()"}
"""The fields that a run sets or reads, and how to write them."""
RELATED = {
    "apfl": "ditto",
    "cfl": "ca-afp",
    "feddf": "fedkd",
    "feddistill": "fedkd",
    "fedmd": "fedkd",
    "fedopt": "fedadam",
    "fedproto": "lg-fedavg",
    "fjord": "heterofl",
    "perfedavg": "ditto",
    "pfedme": "ditto",
    "qsgd": "fedpaq",
    "signsgd": "stc",
}
"""Well-known methods that are not here, without hyphens, and the method that is nearest in kind:
against drift, with a personal model or head, for groups, with few bytes, for small devices."""


# ---- what is a method ----------------------------------------------------------------------------


def is_method(value: object) -> bool:
    """Whether a value is a class that follows the protocol of :class:`fedgrove.core.Method`."""
    return not _why_not_a_method(value)


def _why_not_a_method(cls: Any) -> str:
    """What a class lacks to be a method, for a sentence that begins with its name; "": nothing."""
    # What the decorator @dataclass leaves on a class.
    params = getattr(cls, "__dataclass_params__", None)
    if not isinstance(cls, type) or params is None:
        return "is not a dataclass; a method is a class under @dataclass(frozen=True)."
    if not params.frozen:
        return "can be changed; write @dataclass(frozen=True) above the class."
    own_fields = [
        name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)
    ]
    # It inherits the mark of a dataclass, and its own fields would be ignored without a word.
    if own_fields and "__dataclass_params__" not in vars(cls):
        return (
            f"has a field '{own_fields[0]}' and is no dataclass itself; write "
            "@dataclass(frozen=True) above the class."
        )
    missing = [name for name in FUNCTIONS if not callable(getattr(cls, name, None))]
    if missing:
        return (
            f"has no {_listed(missing)}; a method has the functions {_listed(FUNCTIONS)}: "
            "write those that are missing, as fedgrove.core.Method describes them."
        )
    fields = {field.name for field in dataclasses.fields(cls)}
    for field, line in FIELDS.items():
        if field not in fields:
            return f"has no field '{field}'; write in the class: {line}"
    return ""


def _method_like(module: ModuleType) -> list[type]:
    """The classes of a file that are methods, or seem to be meant as one."""
    found = []
    for value in vars(module).values():
        # One of the two is enough: who forgets the other is to read that it is missing.
        has_server_half = hasattr(value, "plan") or hasattr(value, "fold")
        if isinstance(value, type) and has_server_half:
            found.append(value)
    return found


# ---- the methods of this folder ------------------------------------------------------------------


@cache
def _modules() -> dict[str, str]:
    """The modules of this folder by the names of their methods."""
    package = sys.modules[__package__ or ""]
    modules = {}
    for info in pkgutil.iter_modules(package.__path__):
        # This file is no method.
        if not info.name.startswith("_"):
            modules[info.name.replace("_", "-")] = f"{__package__}.{info.name}"
    return dict(sorted(modules.items()))


def names() -> list[str]:
    """Return the names of all built-in methods, as the command line calls them.

    Some may be broken.
    """
    return list(_modules())


def find(name: str) -> type[Any]:
    """Return the class of a built-in method; only the method's file is imported.

    Raises:
        InputError: There is no such method.
        MethodError: Its file cannot be imported, defines no method, or one that cannot be made.

    >>> find("lg-fedavg").__name__
    'LGFedAvg'
    """
    if name not in _modules():
        raise unknown("method", name, names(), RELATED)
    module = _imported(name)
    mine = [cls for cls in _method_like(module) if _name_of_class(cls) == name]
    if not mine:
        raise MethodError(
            f"method '{name}' is broken: {_file(name)} defines no method; a method is a frozen "
            f"dataclass with the functions {_listed(FUNCTIONS)} and the fields {_listed(FIELDS)}."
        )
    complete = [cls for cls in mine if is_method(cls)]
    cls = complete[0] if complete else mine[0]
    lacks = _why_not_a_method(cls) or _why_not_made(cls)
    if lacks:
        raise MethodError(f"method '{name}' is broken: {cls.__name__} in {_file(name)} {lacks}")
    try:
        _presets_of(cls, _file(name))
    except InputError as error:
        raise MethodError(f"method '{name}' is broken: {error}") from error
    return cls


def _imported(name: str, module: str = "") -> ModuleType:
    """Import the file or folder of a method, or a module of its folder."""
    try:
        return importlib.import_module(module or _modules()[name])
    # A file may also end Python, as a script without its packages does.
    except (Exception, SystemExit) as error:
        raise MethodError(
            f"method '{name}' is broken: {_file(name)} cannot be imported, "
            f"{type(error).__name__}: {error}."
        ) from error


def _why_not_made(cls: Any) -> str:
    """Why a method cannot be made with its defaults, for a sentence as above; "": it can."""
    required = _fields_without_default(cls)
    if required:
        return f"has no default for {_listed(required)}; give every field one."
    try:
        cls()
    except Exception as error:
        return f"cannot be made with its defaults, {type(error).__name__}: {error}"
    return ""


def _fields_without_default(cls: Any) -> list[str]:
    required = []
    for field in dataclasses.fields(cls):
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.init and field.default is dataclasses.MISSING and not has_factory:
            required.append(field.name)
    return required


def _file(name: str) -> str:
    """The file or folder of a built-in method."""
    path = Path(__file__).parent / _modules()[name].rpartition(".")[2]
    return str(path) if path.is_dir() else f"{path}.py"


def find_class(class_name: str) -> type[Any]:
    """Return the built-in method with a class of this name: ``fedgrove.methods.LGFedAvg``.

    Raises:
        KeyError: There is none.
    """
    # By convention the class LGFedAvg is in lg_fedavg.py: usually one file has to be imported.
    likely = [name for name in names() if name.replace("-", "") == class_name.lower()]
    for name in likely or names():
        try:
            cls = find(name)
        except MethodError:
            if likely:
                raise
            continue
        if cls.__name__ == class_name:
            return cls
    raise KeyError(class_name)


def classes() -> dict[str, type[Any]]:
    """Return the classes of all built-in methods by class name, without broken files."""
    found = {}
    for name in names():
        try:
            cls = find(name)
        except MethodError:
            continue
        found[cls.__name__] = cls
    return dict(sorted(found.items()))


def part_modules() -> list[ModuleType]:
    """Return all modules in which methods define parts: their files and their folders.

    Broken ones are left out.
    """
    modules = []
    for name in names():
        with suppress(MethodError):
            home = _imported(name)
            modules.append(home)
            for info in pkgutil.iter_modules(getattr(home, "__path__", [])):
                modules.append(_imported(name, f"{home.__name__}.{info.name}"))
    return modules


def name_of(method: object) -> str:
    """What the command line calls a method; one of the user's own is named by its class.

    >>> name_of(find("lg-fedavg")())
    'lg-fedavg'
    """
    return _name_of_class(type(method)) or type(method).__name__.lower()


def _name_of_class(cls: type) -> str:
    """The name of the file or folder of this package that defines a class; "" for any other."""
    package = f"{__package__}."
    if not cls.__module__.startswith(package):
        return ""
    return cls.__module__.removeprefix(package).partition(".")[0].replace("_", "-")


def presets(name: str) -> Mapping[str, AnyMethod]:
    """Return the presets of a built-in method, by name.

    >>> sorted(presets("ca-afp")), sorted(presets("fedavg"))
    (['paper'], [])
    """
    return _presets_of(find(name), _file(name))


def _presets_of(cls: type, path: str) -> dict[str, AnyMethod]:
    """The file's presets that are of this class: it may have several methods."""
    given: Any = getattr(sys.modules[cls.__module__], "PRESETS", {})
    if not isinstance(given, Mapping):
        raise InputError(
            f"PRESETS in {path} is a {type(given).__name__}; it must be a dictionary of methods by "
            "name."
        )
    presets_of_class: dict[str, Any] = {}
    for name, method in given.items():
        if not dataclasses.is_dataclass(method) or isinstance(method, type):
            raise InputError(
                f"PRESETS[{name!r}] in {path} is {method!r}; it must be a method, as "
                f"{cls.__name__}(...)."
            )
        if type(method) is cls:
            presets_of_class[name] = method
    return presets_of_class


# ---- as the command line writes a method ---------------------------------------------------------


def make(spec: object) -> AnyMethod:
    """A method as the command line writes it: ``NAME`` with its defaults, or ``NAME:PRESET``.

    Or ``path/file.py:Class``, a user's method; that file is run. A method that was made in Python
    is returned as it is.

    >>> make("ca-afp:paper").phases
    (0, 0, 1)
    """
    if not isinstance(spec, str):
        return _check_made(spec)
    if user_files.is_file_spec(spec):
        return _make_own(spec)
    name, colon, preset = spec.partition(":")
    if not colon:
        method: AnyMethod = find(name)()
        return method
    available = presets(name)
    if preset not in available:
        raise unknown(f"preset of {name}", preset, available)
    return available[preset]


def _check_made(method: Any) -> AnyMethod:
    """Refuse what is neither a method nor the name of one."""
    if isinstance(method, type):
        name = method.__name__
        raise InputError(f"method is the class {name}; make a method of it: {name}().")
    if isinstance(method, list | tuple):
        raise InputError(
            f"method is a {type(method).__name__} of {len(method)}; give one method, or train "
            "several with fedgrove.sweep."
        )
    if not dataclasses.is_dataclass(method):
        raise InputError(
            f"method is {shown(method)}; it must be a name, such as 'fedavg', or a method made in "
            "Python, such as fedgrove.methods.Ditto()."
        )
    return cast(AnyMethod, method)


def label_of(spec: object) -> str:
    """What :func:`make` takes, as part of a folder's name: some systems allow no colon there.

    >>> label_of("ca-afp:paper"), label_of("mine/fedem.py:FedEM"), label_of("x.py:FedEM:two")
    ('ca-afp-paper', 'fedem', 'fedem-two')
    """
    if not isinstance(spec, str):
        return name_of(make(spec))
    if not user_files.is_file_spec(spec):
        return spec.replace(":", "-")
    _, name, preset = _split(spec)
    label = name.lower()
    return f"{label}-{preset}" if preset else label


# ---- methods in users' files ---------------------------------------------------------------------


def find_own(path: str, name: str) -> type[Any]:
    """Return the method class in a user's file, after checking that it is one."""
    module = user_files.import_file(Path(path))
    spec = f"{path}:{name}"
    value: Any = getattr(module, name, None)
    if value is None:
        own = [cls.__name__ for cls in _method_like(module) if cls.__module__ == module.__name__]
        raise unknown(f"method in {path}", name, own)
    if isinstance(value, type) and value.__module__ != module.__name__:
        raise InputError(
            f"{spec} is imported there from {value.__module__}; name the file that defines it."
        )
    lacks = _why_not_a_method(value)
    if lacks:
        raise InputError(f"{spec} {lacks}")
    cls: type[Any] = value
    return cls


def _make_own(spec: str) -> AnyMethod:
    path, name, preset = _split(spec)
    cls = find_own(path, name)
    if preset:
        available = _presets_of(cls, path)
        if preset not in available:
            raise unknown(f"preset of {path}:{name}", preset, available)
        return available[preset]
    required = _fields_without_default(cls)
    if required:
        raise InputError(
            f"{path}:{name} has no default for {_listed(required)}; give every field one, "
            "or make the method in Python: fedgrove.run(Class(...))."
        )
    method: AnyMethod = cls()
    return method


def _split(spec: str) -> tuple[str, str, str]:
    """Path, class and preset, which may be empty."""
    match = re.fullmatch(r"(.+?\.py):([^:]+)(?::([^:]+))?", spec)
    if match is None:
        raise InputError(
            f"method '{spec}' names no class; write path/file.py:Class, or with a preset "
            "path/file.py:Class:PRESET."
        )
    return match[1], match[2], match[3] or ""


def _listed(names: Iterable[str]) -> str:
    """List names of a method's functions or fields in a sentence."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
