"""fedgrove: federated learning that grows a small, personal model for every device.

What stands here is imported when it is first asked for, so that ``fedgrove --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import methods
    from .api import Experiment, Result, resume, run
    from .core import (
        Batch,
        Client,
        Edit,
        Give,
        Info,
        Measure,
        Outcome,
        Packet,
        Report,
        Start,
        Task,
        Train,
    )
    from .data import from_arrays, load
    from .errors import EngineError, FedgroveError, InputError, WireError
    from .export.make import export_model

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Client",
    "Edit",
    "EngineError",
    "Experiment",
    "FedgroveError",
    "Give",
    "Info",
    "InputError",
    "Measure",
    "Outcome",
    "Packet",
    "Report",
    "Result",
    "Start",
    "Task",
    "Train",
    "WireError",
    "export_model",
    "from_arrays",
    "load",
    "methods",
    "resume",
    "run",
]

_HOMES = {
    "api": ("Experiment", "Result", "resume", "run"),
    "core": (
        "Batch",
        "Client",
        "Edit",
        "Give",
        "Info",
        "Measure",
        "Outcome",
        "Packet",
        "Report",
        "Start",
        "Task",
        "Train",
    ),
    "data": ("from_arrays", "load"),
    "errors": ("EngineError", "FedgroveError", "InputError", "WireError"),
    "export.make": ("export_model",),
}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return importlib.import_module(".methods", __name__)
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
