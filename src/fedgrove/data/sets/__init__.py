"""The data sets by name. Every module in this folder defines some of them, in its ``SETS``.

To add a data set, add an entry to a ``SETS`` or a module with a ``SETS``; there is nothing else to
register. A module that cannot be used affects only its own data sets.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import InputError, unknown
from ..dataset import Dataset
from ..named_set import NamedSet

SETS: dict[str, NamedSet] = {}
"""All named data sets, module by module in alphabetical order."""
OPTIONS: dict[str, Callable[[str, Dataset], Dataset]] = {}
"""What may follow the name of a set, after a colon: those in the modules' ``OPTIONS``."""
BROKEN: dict[str, str] = {}
"""The modules that cannot be used, by name; a sentence says why."""


def unknown_set(name: str, also: Iterable[str] = ()) -> InputError:
    """The error for an unknown data set; it names broken modules, which may define it.

    Args:
        name: What was given.
        also: What else would be accepted, for the list.
    """
    error = unknown("data set", name, [*SETS, *also])
    return InputError(" ".join([str(error), *BROKEN.values()]))


def _add_module(name: str) -> None:
    """Add the data sets of a module, once all of them are known to be right."""
    module = importlib.import_module(f"{__name__}.{name}")
    for set_name, named_set in module.SETS.items():
        if not isinstance(named_set, NamedSet):
            raise TypeError(f"SETS['{set_name}'] is a {type(named_set).__name__}, not a NamedSet")
        if set_name in SETS:
            raise ValueError(f"there is another data set '{set_name}'")
    SETS.update(module.SETS)
    OPTIONS.update(getattr(module, "OPTIONS", {}))


for _module in pkgutil.iter_modules(__path__):
    try:
        _add_module(_module.name)
    # Whatever goes wrong in one module, the data sets of all others can still be used.
    except Exception as _error:
        _file = Path(__path__[0]) / f"{_module.name}.py"
        _why = str(_error).rstrip(".")
        BROKEN[_module.name] = (
            f"{_file} is broken, so its data sets are not available; {type(_error).__name__}: "
            f"{_why}."
        )
