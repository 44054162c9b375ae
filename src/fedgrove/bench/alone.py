"""One variant in a process of its own: ``python -m fedgrove.bench.alone ORDER``, as :mod:`fedgrove.bench.starts` does.

The time is written down after every round, by a clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import flower, pfl
from .engine import Round, timed, variants
from .scenes import setting

RIVALS = {"Flower": flower.train, "pfl-research": pfl.train}
"""Other simulators, by the first word of the variant."""


@dataclass(frozen=True)
class Order:
    """What a process is to do."""

    scene: str
    variant: str
    device: str
    rounds: int
    out: str
    """The file that takes a line per round."""
    cohort: int | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class Notes:
    """Lines of JSON in a file, one for each round that is done."""

    path: Path

    def write(self, **words: Any) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def done(self) -> None:
        """A round is done."""
        self.write(at=time.monotonic())

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return (
            [json.loads(line) for line in self.path.read_text().splitlines()]
            if self.path.exists()
            else []
        )


def do(order: Order) -> None:
    """All rounds of an order."""
    notes = Notes(Path(order.out))
    with tempfile.TemporaryDirectory() as folder:
        scene, run = setting(order.scene, Path(folder), order.cohort, order.data_dir)
        rival = RIVALS.get(order.variant.partition(",")[0])
        if rival is not None:
            rival(scene, run, order.device, order.rounds, notes.done, Path(folder))
        else:
            _repeat(variants(scene, order.device)[order.variant](run), order, notes)
    if order.device == "cuda":
        notes.write(device_bytes=torch.cuda.max_memory_allocated())


def _repeat(go: Round, order: Order, notes: Notes) -> None:
    for _ in range(order.rounds):
        timed(go, order.device)
        notes.done()


if __name__ == "__main__":
    do(Order(**json.loads(sys.argv[1])))
