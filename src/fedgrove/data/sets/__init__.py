"""The data sets by name. Every module in this folder defines some of them, in its ``SETS``.

To add a data set, add an entry to a ``SETS`` or a module with a ``SETS``; there is nothing else to
register.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..named_set import NamedSet

SETS: dict[str, NamedSet] = {}
"""All named data sets, module by module in alphabetical order."""
for _module in pkgutil.iter_modules(__path__):
    SETS.update(importlib.import_module(f"{__name__}.{_module.name}").SETS)
