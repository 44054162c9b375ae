"""Old names that keep working for one release, with a DeprecationWarning. Delete it after 0.2.

To rename something public, add a line to one of the tables below.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "fedgrove.nets.given": "fedgrove.nets.initial_weights",
    "fedgrove.parts.anneal": "fedgrove.methods.adfedwcp.anneal",
    "fedgrove.parts.bandit": "fedgrove.methods.fedmp.bandit",
    "fedgrove.parts.blocks": "fedgrove.methods.pfedgate.blocks",
    "fedgrove.parts.byte_budget": "fedgrove.methods.grove.byte_budget",
    "fedgrove.parts.centroids": "fedgrove.methods.adfedwcp.centroids",
    "fedgrove.parts.drift": "fedgrove.methods.fedapta.drift",
    "fedgrove.parts.fisher": "fedgrove.methods.fedlayerprune.fisher",
    "fedgrove.parts.gamma": "fedgrove.methods.safl.gamma",
    "fedgrove.parts.gate": "fedgrove.runs.gate",
    "fedgrove.parts.generator": "fedgrove.methods.fedgen.generator",
    "fedgrove.parts.head_evidence": "fedgrove.methods.grove.head_evidence",
    "fedgrove.parts.holdings": "fedgrove.methods.grove.client_views",
    "fedgrove.parts.hybrid": "fedgrove.methods.fedlayerprune.hybrid",
    "fedgrove.parts.importance": "fedgrove.methods.adfedwcp.importance",
    "fedgrove.parts.imprint": "fedgrove.methods.adfedwcp.imprint",
    "fedgrove.parts.kmeans": "fedgrove.methods.adfedwcp.kmeans",
    "fedgrove.parts.lowrank": "fedgrove.methods.fedkd.lowrank",
    "fedgrove.parts.mutual": "fedgrove.methods.fedkd.mutual",
    "fedgrove.parts.rates": "fedgrove.methods.fedlayerprune.rates",
    "fedgrove.parts.sketch": "fedgrove.methods.pfed1bs.sketch",
    "fedgrove.parts.slimming": "fedgrove.methods.safl.slimming",
    "fedgrove.parts.stability": "fedgrove.methods.grove.stability",
    "fedgrove.parts.task_groups": "fedgrove.methods.fedapta.task_groups",
    "fedgrove.parts.task_memory": "fedgrove.methods.fedapta.task_memory",
    "fedgrove.parts.ternary": "fedgrove.methods.stc.ternary",
    "fedgrove.parts.versions": "fedgrove.methods.stc.versions",
    "fedgrove.parts.vote": "fedgrove.methods.fedlayerprune.vote",
    "fedgrove.twins": "fedgrove.gpu_copies",
    "fedgrove.wire.held": "fedgrove.wire.known_state",
}
"""Modules that moved: old name, new name."""

NAMES = {
    "fedgrove.core": {
        "Form": "ExpectedPacket",
        "Holds": "ExpectedReport",
        "Info": "ClientInfo",
        "LOSSES": "LOST_REASONS",
        "Settings": "TaskSettings",
        "Start": "Setup",
        "WithFigures": "WithServerMetrics",
        "bytes_of_paper": "count_paper_bytes",
        "no_packets": "expected_no_packets",
        "what_was_sent": "expected_as_sent",
    },
    "fedgrove.problems": {
        "Sums": "MetricSums",
        "Task": "TaskProblem",
        "Tasks": "MixedProblem",
        "mean_over_outputs": "average_outputs",
        "restricted": "restrict_outputs",
    },
    "fedgrove.seeds": {
        "one_thread": "single_thread",
        "own_randomness": "preserve_rng",
        "threads": "use_threads",
    },
    "fedgrove.trees": {
        "WORDS": "INTEGER_TYPES",
        "both": "and_masks",
        "chosen": "select",
        "count": "count_true",
        "flat": "flatten",
        "joined": "pack_leaves",
        "masked": "apply_mask",
        "places": "find_true",
        "unflat": "unflatten",
        "vector": "as_vector",
    },
}
"""Names that changed inside a module: old name, new name."""


def find_renamed(module: str, name: str) -> Any:
    """Return what ``module`` calls ``name`` today, and warn.

    A module calls this in its ``__getattr__``, for names that it does not have.

    Args:
        module: The dotted name of the module.
        name: The old name.

    Raises:
        AttributeError: ``name`` is not an old name of this module.
    """
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{module}.{new}")
    return getattr(sys.modules[module], new)


def _warn(old: str, new: str) -> None:
    message = f"{old} is now {new}; the old name goes with the next release."
    # Level 3 is the line of the user's that names it, for attributes.
    warnings.warn(message, DeprecationWarning, stacklevel=3)


class _OldModules(MetaPathFinder, Loader):
    """Finds a module under its old name: an empty module that looks names up in the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in; the new module itself must keep its own ``__spec__``."""
        new = importlib.import_module(MODULES[spec.name])
        _warn(spec.name, new.__name__)
        stand_in = ModuleType(spec.name, new.__doc__)
        stand_in.__getattr__ = lambda name: getattr(new, name)  # type: ignore[method-assign]
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""


def find_old_modules() -> None:
    """Let ``import`` find modules under their old names; asked last, after all other finders."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
