"""Methods, one file or folder each: ``fedgrove list methods``, ``fedgrove show NAME``.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py`` or ``ca_afp/``, which
defines one method class, ``fedgrove.methods.CAAFP``. A file may also have ``PRESETS``, instances of
that class by name: ``ca-afp:paper`` is ``ca_afp.PRESETS["paper"]``. A method in a file of the
user's own is ``path/file.py:Class``, or ``path/file.py:Class:PRESET`` if that file has
``PRESETS``.

Classes are imported on first use. Editors read them from ``__init__.pyi``, which
``tools/generate.py`` writes.
"""

from __future__ import annotations

from typing import Any

from ._lookup import (
    classes,
    find,
    find_class,
    find_own,
    is_method,
    label_of,
    make,
    name_of,
    names,
    part_modules,
    presets,
)

__all__ = [
    "classes",
    "find",
    "find_class",
    "find_own",
    "is_method",
    "label_of",
    "make",
    "name_of",
    "names",
    "part_modules",
    "presets",
]


def __getattr__(name: str) -> Any:
    # Classes begin with a capital: Python itself looks up many other names.
    if name[0].isupper():
        try:
            return find_class(name)
        except KeyError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *classes()])
