"""Adding up what messages cost: real bytes, by direction and part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import Answer, Cost, Task
from ..renamed import find_old_names


@dataclass
class Ledger:
    """Real bytes, by direction and part of the cost; parts add up to the total."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    name_of: Callable[[Task], str] | None = None
    """Names the ledger of :attr:`by_name` in which a message is counted as well."""
    by_name: dict[str, Ledger] = field(default_factory=dict)

    def tally(self, answers: Iterable[tuple[Task, Answer]]) -> Iterator[tuple[Task, Answer]]:
        """Count the bytes of the answers that pass through, and what lost ones have cost."""
        tasks_paid_for: set[int] = set()
        for task, answer in answers:
            # What an engine passes on may be no answer at all; the gate refuses it later.
            cost = dict(getattr(answer, "cost", {}))
            if id(task) in tasks_paid_for:
                # A second answer: the task was sent only once.
                cost.pop("down", None)
            tasks_paid_for.add(id(task))
            self.add(cost)
            if self.name_of is not None:
                self.by_name.setdefault(self.name_of(task), Ledger()).add(cost)
            yield task, answer

    def add(self, cost: Cost) -> None:
        """Add the bytes of one pair of messages, or another ledger's totals."""
        for part, count in cost.get("up", {}).items():
            self.up[part] = self.up.get(part, 0) + count
        for part, count in cost.get("down", {}).items():
            self.down[part] = self.down.get(part, 0) + count

    def totals(self, prefix: str = "bytes") -> dict[str, int]:
        """Return the bytes of both directions, under the names of ``summary.json``."""
        return {
            f"{prefix}_up": sum(self.up.values()),
            f"{prefix}_down": sum(self.down.values()),
        }

    def parts(self, prefix: str = "bytes") -> dict[str, dict[str, int]]:
        """Return the bytes of both directions, by part of the cost."""
        return {
            f"{prefix}_up_parts": dict(sorted(self.up.items())),
            f"{prefix}_down_parts": dict(sorted(self.down.items())),
        }


CAUSE_OF_PART = {"mask": "masks", "scores": "evidence", "header": "headers"}
"""Part of the cost -> the cause it is counted under; all other parts are values."""


def sum_by_cause(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sum what a run's bytes, in both directions, were spent on; the causes add up to the total.

    Args:
        lines: The lines of ``metrics.jsonl``.

    Returns:
        ``exchanges`` that are not rounds (a grouping, a probe), whole; of the rounds ``values``
        (with codebooks and indices), ``masks``, ``evidence`` (scores) and ``headers``.
    """
    totals = dict.fromkeys(("exchanges", "values", "masks", "evidence", "headers"), 0)
    for line in lines:
        is_round = line["counts"]
        for direction in ("bytes_up_parts", "bytes_down_parts"):
            for part, count in line[direction].items():
                cause = CAUSE_OF_PART.get(part, "values") if is_round else "exchanges"
                totals[cause] += count
    return totals


__getattr__ = find_old_names(__name__)
