"""What of SAFL's tables is not data: densities, and the rounds and epochs of stage 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedgrove.methods import SAFL, Hermes

from .scope import Scope
from .study import StudyRow


def values(scope: Scope) -> dict[str, Any]:
    """Return the default rate and number of clusters, and how long stage 1 is at the first rate."""
    rates = scope["rates"]
    steps = len(SAFL(_density(rates[0])).schedule)
    stage_1 = scope["guided"] + scope["tune"]
    found = {
        "first_rate": rates[0],
        "last_rate": rates[-1],
        "k": scope["clusters"][-1],
        "steps": steps,
        "stage_1": stage_1,
        "longer": scope["stage_2"] + steps * stage_1,
    }
    # The rate of a part may refer to the first or the last one.
    found["density"] = _density(scope.extend(found)["rate"])
    return found


def row_values(scope: Scope) -> dict[str, Any]:
    """Return the density at the row's rate, and whether that is the first or the last one."""
    rate = scope["rate"]
    # Where the paper's two methods are closest and furthest apart.
    is_end = rate in (scope["first_rate"], scope["last_rate"])
    return {"density": _density(rate), "is_end": is_end}


def complete(row: StudyRow, scope: Scope) -> StudyRow:
    """Add the rounds of stage 1, one for each step of pruning, to those of stage 2."""
    experiment = row.experiment
    if isinstance(experiment.method, SAFL | Hermes):
        assert experiment.rounds is not None
        rounds = experiment.rounds + len(experiment.method.schedule)
        row = replace(row, experiment=replace(experiment, rounds=rounds))
    return row


def _density(rate: float) -> float:
    # Rounded, because 1 - 0.7 is 0.30000000000000004.
    return round(1 - rate, 6)
