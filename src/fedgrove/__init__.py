"""fedgrove: federated learning that grows a small, personal model for every device.

Names are imported on first use, so that ``fedgrove --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .renamed import find_old_modules, find_renamed, read_tables

if TYPE_CHECKING:
    from . import data, engines, methods, nets, parts, trees
    from .api import compare, cost, load_run, rerun, resume, run, sweep
    from .choosing.choose import choose
    from .config.experiment import Experiment
    from .core import (
        Batch,
        Batches,
        Carry,
        Client,
        ClientInfo,
        Edit,
        ExpectedPacket,
        ExpectedReport,
        Give,
        Measure,
        Outcome,
        Packet,
        Report,
        Setup,
        Task,
        Train,
        expected_as_sent,
        expected_no_packets,
    )
    from .data import from_arrays, load
    from .errors import EngineError, FedgroveError, InputError, InputErrors, WireError
    from .estimator import FederatedClassifier, FederatedRegressor
    from .export.make import export_model
    from .runs.model import Model
    from .runs.result import Result

__version__ = "0.1.0"
"""The version; pyproject.toml reads it from here."""

__all__ = [
    "Batch",
    "Batches",
    "Carry",
    "Client",
    "ClientInfo",
    "Edit",
    "EngineError",
    "ExpectedPacket",
    "ExpectedReport",
    "Experiment",
    "FederatedClassifier",
    "FederatedRegressor",
    "FedgroveError",
    "Give",
    "InputError",
    "InputErrors",
    "Measure",
    "Model",
    "Outcome",
    "Packet",
    "Report",
    "Result",
    "Setup",
    "Task",
    "Train",
    "WireError",
    "choose",
    "compare",
    "cost",
    "data",
    "engines",
    "expected_as_sent",
    "expected_no_packets",
    "export_model",
    "from_arrays",
    "load",
    "load_run",
    "methods",
    "nets",
    "parts",
    "rerun",
    "resume",
    "run",
    "sweep",
    "trees",
]

_MODULES = ("data", "engines", "methods", "nets", "parts", "trees")
_ERRORS = ("EngineError", "FedgroveError", "InputError", "InputErrors", "WireError")
_MODULE_OF = {
    "Experiment": "config.experiment",
    "FederatedClassifier": "estimator",
    "FederatedRegressor": "estimator",
    "Model": "runs.model",
    "Result": "runs.result",
    "choose": "choosing.choose",
    "export_model": "export.make",
    "from_arrays": "data",
    "load": "data",
    **dict.fromkeys(("compare", "cost", "load_run", "rerun", "resume", "run", "sweep"), "api"),
    **dict.fromkeys(_ERRORS, "errors"),
}
"""Where a public name is defined; those that are not listed are in ``core``."""


find_old_modules()


def __getattr__(name: str) -> Any:
    # Lazy names cannot be plain imports: a module's own __getattr__ is called only for names that
    # it does not have yet.
    if name not in __all__:
        # The nouns under their old names are looked up where they are defined.
        if name in read_tables()["names"]["fedgrove.core"]:
            importlib.import_module(".core", __name__)
            return find_renamed(f"{__name__}.core", name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    module = importlib.import_module(f".{_MODULE_OF.get(name, 'core')}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
