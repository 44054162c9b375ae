"""Adding up what messages cost: real bytes, by direction and part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import Answer, Task

Parts = Mapping[str, int]


@dataclass
class Ledger:
    """Real bytes, by direction and part of the cost; parts add up to the total."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    name_of: Callable[[Task], str] | None = None
    """Which of several books a message is in as well; without it there is one."""
    by_name: dict[str, Ledger] = field(default_factory=dict)

    def tally(self, answers: Iterable[tuple[Task, Answer]]) -> Iterator[tuple[Task, Answer]]:
        """Count the answers that pass through; a lost one was paid for too."""
        tasks_paid_for: set[int] = set()
        for task, answer in answers:
            # What an engine passes on may be no answer at all; the gate refuses it later.
            cost = dict(getattr(answer, "cost", {}))
            if id(task) in tasks_paid_for:
                # A second answer: the task itself was sent once.
                cost.pop("down", None)
            tasks_paid_for.add(id(task))
            self.add(cost)
            if self.name_of is not None:
                self.by_name.setdefault(self.name_of(task), Ledger()).add(cost)
            yield task, answer

    def add(self, cost: Mapping[str, Parts]) -> None:
        """Add one pair of messages, or another ledger's totals."""
        for part, count in cost.get("up", {}).items():
            self.up[part] = self.up.get(part, 0) + count
        for part, count in cost.get("down", {}).items():
            self.down[part] = self.down.get(part, 0) + count

    def totals(self, prefix: str = "bytes") -> dict[str, int]:
        """The bytes of both directions, under the names of ``summary.json``."""
        return {
            f"{prefix}_up": sum(self.up.values()),
            f"{prefix}_down": sum(self.down.values()),
        }

    def parts(self, prefix: str = "bytes") -> dict[str, dict[str, int]]:
        """The same by part of the cost."""
        return {
            f"{prefix}_up_parts": dict(sorted(self.up.items())),
            f"{prefix}_down_parts": dict(sorted(self.down.items())),
        }


CAUSE_OF_PART = {"mask": "masks", "scores": "evidence", "header": "headers"}
"""Parts of the cost that have a cause of their own; all others are values."""


def causes(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What a run's bytes, both ways, were spent on, from the lines of metrics.jsonl.

    The causes add up to the total. ``exchanges`` are those that are not rounds (a grouping, a
    probe), whole; of the rounds: ``values`` (with codebooks and indices), ``masks``, ``evidence``
    (scores) and ``headers``.
    """
    totals = dict.fromkeys(("exchanges", "values", "masks", "evidence", "headers"), 0)
    for line in lines:
        is_round = line["counts"]
        for direction in ("bytes_up_parts", "bytes_down_parts"):
            for part, count in line[direction].items():
                cause = CAUSE_OF_PART.get(part, "values") if is_round else "exchanges"
                totals[cause] += count
    return totals
