"""The parts that methods are made of: one file per role, frozen dataclasses with one call.

``fedgrove.parts.objective`` and the others are imported when they are first used.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

_FILES = tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return list(_FILES)
