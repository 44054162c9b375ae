"""Old names that keep working for one release, with a DeprecationWarning. Delete it after 0.2.

To rename something public, add a line to one of the tables of ``renamed.toml``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

# pathlib, tomllib and importlib.abc, which imports a lot, take longer than all else that
# ``import fedgrove`` needs: none of them is imported here at the top.


@cache
def read_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of ``renamed.toml``: modules, names, types, fields and state_fields."""
    # Read here: a process that meets no old name need not wait for it.
    import tomllib
    from pathlib import Path

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def find_renamed(module: str, name: str) -> Any:
    """Return what ``module`` calls ``name`` today, and warn.

    A module calls this in its ``__getattr__``, for names that it does not have.

    Args:
        module: The dotted name of the module.
        name: The old name.

    Raises:
        AttributeError: ``name`` is not an old name of this module.
    """
    # ``from module import name`` looks for ``__path__`` first, in every process.
    is_special = name.startswith("__")
    new = None if is_special else read_tables()["names"].get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, new_name = new.rpartition(".")
    # A name without a module stays in its own.
    home = home or module
    _warn(f"{module}.{name}", f"{home}.{new_name}")
    return getattr(importlib.import_module(home), new_name)


def find_old_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose names changed."""
    # Without a frame of its own: the warning is about the line of the user's that has the name.
    return partial(find_renamed, module)


def find_new_type(name: str) -> str:
    """Return the name that a part has today in config.toml and with ``--set``."""
    new: str = read_tables()["types"].get(name, name)
    return new


def find_new_field(cls: type, old: str) -> str | None:
    """Return what an old field of a method or part, or of its base, is called today, or None."""
    entry = _find_field(cls, old)
    return None if entry is None else str(entry["name"])


def rename_field(cls: type, old: str, value: Any) -> tuple[str, Any]:
    """Return the name and the value that an old field of a method or part has today, and warn.

    Args:
        cls: The class of the method or part; it has this old field (:func:`find_new_field`).
        old: The old name of the field.
        value: What the field was given: a value, or what was typed for it.
    """
    entry = _find_field(cls, old)
    assert entry is not None
    name = entry["name"]
    # True in Python is true on the command line and in config.toml. A value that never was allowed
    # stays, and the new field refuses it.
    new_value = entry["values"].get(str(value).lower(), value)
    _warn(f"{cls.__name__}.{old} = {value}", f"{name} = {new_value!r}", stacklevel=5)
    return name, new_value


def _find_field(cls: type, old: str) -> dict[str, Any] | None:
    """Return what the table of old fields says about a field of a class, or None."""
    for base in cls.__mro__:
        fields = read_tables()["fields"].get(f"{base.__module__}.{base.__qualname__}", {})
        if old in fields:
            entry: dict[str, Any] = fields[old]
            return entry
    return None


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old name of fedgrove was used."""
    message = f"{old} is now {new}; the old name will be removed in the next release."
    # Level 3 is the line of the user's that names it, for attributes.
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


class _OldModules:
    """Finds a module under its old name: an empty module that looks names up in the new one.

    It is a finder and a loader (``importlib.abc``) by its functions, without the base classes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        # Python asks for every module that no other finder has, and some are optional everywhere.
        if not fullname.startswith(f"{__package__}."):
            return None
        modules = read_tables()["modules"]
        is_parent = any(old.startswith(f"{fullname}.") for old in modules)
        if fullname not in modules and not is_parent:
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=is_parent)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in; the new module itself must keep its own ``__spec__``."""
        names = read_tables()["modules"].get(spec.name)
        if names is None:
            # A package that is gone, with modules that have new names.
            return ModuleType(spec.name)
        if isinstance(names, str):
            names = [names]
        homes = [importlib.import_module(name) for name in names]
        _warn(spec.name, " and ".join(names))
        stand_in = ModuleType(spec.name, homes[0].__doc__)

        def find(name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")

        stand_in.__getattr__ = find  # type: ignore[method-assign]
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""


def find_old_modules() -> None:
    """Let ``import`` find modules under their old names; asked last, after all other finders."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
