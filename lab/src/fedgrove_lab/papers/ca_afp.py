"""What of CA-AFP's tables is not data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedgrove.data import Federation
from fedgrove.methods import CAAFP

from .scope import Scope
from .study import Fact, StudyRow

ACCELERATION = {"uci-har": slice(6, 9)}
"""The channels of the acceleration with gravity, where they are not the first three."""


def values(scope: Scope) -> dict[str, Any]:
    """Return the seeds of Table 2 on UCI-HAR: more where windows of a client do not leak."""
    is_without_leak = scope["split"] in (None, "blocks")
    return {"seeds_of_split": 10 if is_without_leak else 3}


def complete(row: StudyRow, scope: Scope) -> StudyRow:
    """Run CA-AFP for as many rounds as its phases have; add the score to what is reported."""
    method = row.experiment.method
    if isinstance(method, CAAFP):
        # All phases here are rounds, none are shares.
        rounds = sum(int(length) for length in method.phases)
        row = replace(row, experiment=replace(row.experiment, rounds=rounds))
    reported = dict(row.reported)
    if "accuracy_std:0" in reported:
        score = reported["accuracy_mean:0"] / reported["accuracy_std:0"]
        reported["score:0"] = round(score, 4)
    return replace(row, reported=reported)


def compare_clients(
    name: str, federation: Federation, numbers: Mapping[str, Mapping[str, Any]]
) -> list[Fact]:
    """Return Table 1: how much the clients' data differ, all parts of a client's data together."""
    counts = []
    incomplete = 0
    # The mean length of the acceleration, of each client that has the activity, by activity.
    lengths: list[list[float]] = [[] for _ in range(federation.classes)]
    for client in federation.clients.values():
        parts = (client.train, client.validation, client.test)
        x = torch.cat([part.x for part in parts]).double()
        y = torch.cat([part.y for part in parts])
        counts.append(float(len(y)))
        activities = set(y.tolist())
        if len(activities) < federation.classes:
            incomplete += 1
        length = x[:, ACCELERATION.get(name, slice(0, 3))].norm(dim=1)
        for activity in activities:
            lengths[activity].append(float(length[y == activity].mean()))
    variations = [_variation(of_clients) for of_clients in lengths if of_clients]
    mean = sum(counts) / len(counts)
    ours = {
        "examples per client: deviation, % of the mean": (_variation(counts), 1),
        "examples per client: mean": (mean, 0),
        "examples per client: deviation": (_variation(counts) / 100 * mean, 0),
        "clients without some class": (float(incomplete), 0),
        "clients without some class, %": (100 * incomplete / len(counts), 1),
        "acceleration: deviation over clients, %": (sum(variations) / len(variations), 1),
    }
    printed: Sequence[float | None] = (None,) * len(ours)
    if name in numbers:
        printed = numbers[name]["all"]
    facts = []
    for (measure, (value, digits)), paper in zip(ours.items(), printed, strict=True):
        facts.append(Fact(measure, value, paper, digits))
    return facts


def _variation(values: list[float]) -> float:
    """The coefficient of variation in %: the deviation of all, not of a sample, over the mean."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(100 * tensor.std(unbiased=False) / tensor.mean().abs())
