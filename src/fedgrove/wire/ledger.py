"""What a table shows: accuracy over clients, bytes by direction and part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import Report

Parts = Mapping[str, int]


def spread(accuracies: Sequence[float], prefix: str = "accuracy") -> dict[str, float]:
    """Mean, standard deviation over clients (the papers' "fairness"), the worst client, and the worst tenth's mean.

    The worst tenth holds at least one client: ⌈K/10⌉ of K.

    >>> spread([0.5, 1.0, 0.9])
    {'accuracy_mean': 0.8, 'accuracy_std': 0.21602469, 'accuracy_worst': 0.5, 'accuracy_worst10': 0.5}
    """
    n = len(accuracies)
    if not n:
        return {f"{prefix}_{k}": math.nan for k in ("mean", "std", "worst", "worst10")}
    ranked = sorted(accuracies)
    mean = math.fsum(ranked) / n
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in ranked) / n)
    tenth = ranked[: math.ceil(n / 10)]
    values = {
        "mean": mean,
        "std": std,
        "worst": ranked[0],
        "worst10": math.fsum(tenth) / len(tenth),
    }
    return {f"{prefix}_{k}": round(v, 8) for k, v in values.items()}


@dataclass
class Ledger:
    """Real bytes, by direction and part of the cost; parts add up to the total."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)

    def tally(self, reports: Iterable[Report]) -> Iterator[Report]:
        """Count the reports that pass through."""
        for report in reports:
            self.add(report.cost)
            yield report

    def add(self, cost: Mapping[str, Parts]) -> None:
        """Take one message pair, or another ledger's totals, in."""
        for mine, theirs in ((self.up, cost.get("up", {})), (self.down, cost.get("down", {}))):
            for part, n in theirs.items():
                mine[part] = mine.get(part, 0) + n

    def totals(self, prefix: str = "bytes") -> dict[str, int | dict[str, int]]:
        """The totals under the names of ``summary.json``."""
        return {
            f"{prefix}_up": sum(self.up.values()),
            f"{prefix}_down": sum(self.down.values()),
            f"{prefix}_up_parts": dict(sorted(self.up.items())),
            f"{prefix}_down_parts": dict(sorted(self.down.items())),
        }


def causes(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What a run's bytes, both ways, were spent on, from the lines of metrics.jsonl; the parts add up to the total.

    ``exchanges`` are those that are not rounds (a grouping, a probe), whole; of the rounds: ``values`` (with codebooks
    and indices), ``masks``, ``evidence`` (scores) and ``headers``.
    """
    found = dict.fromkeys(("exchanges", "values", "masks", "evidence", "headers"), 0)
    named = {"mask": "masks", "scores": "evidence", "header": "headers"}
    for line in lines:
        for part, n in (*line["bytes_up_parts"].items(), *line["bytes_down_parts"].items()):
            found[named.get(part, "values") if line["counts"] else "exchanges"] += n
    return found
