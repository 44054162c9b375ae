"""One variant in a process of its own: ``python -m fedgrove_lab.bench.alone JOB``.

:mod:`fedgrove_lab.bench.starts` starts such processes; JOB is a :class:`Job` as JSON.
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
from .engine import seconds_of, variants
from .scenes import setting

RIVALS = {"Flower": flower.train, "pfl-research": pfl.train}
"""Other simulators, by what stands before the comma in the name of the variant."""


@dataclass(frozen=True)
class Job:
    """What a process has to do."""

    scene: str
    variant: str
    device: str
    rounds: int
    out: str
    """The file that takes a line per round."""
    cohort: int | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class RoundLog:
    """A file of JSON lines: one for each finished round, one for the device's memory at the end."""

    path: Path

    def write(self, **fields: Any) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def round_done(self) -> None:
        """Append the time at which a round was finished."""
        # The monotonic clock is the same in all processes of a machine, so that whoever started
        # this one can subtract the time at which it did.
        self.write(at=time.monotonic())

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        # A process that fails early leaves no file.
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def run_job(job: Job) -> None:
    """Train all rounds of a job, and log when each was done."""
    log = RoundLog(Path(job.out))
    with tempfile.TemporaryDirectory() as folder:
        scene, run = setting(job.scene, Path(folder), job.cohort, job.data_dir)
        ours = variants(scene, job.device)
        if job.variant in ours:
            train_round = ours[job.variant](run)
            for _ in range(job.rounds):
                # Not for the seconds: it waits for the GPU, so that a round is logged when done.
                seconds_of(train_round, job.device)
                log.round_done()
        else:
            train = RIVALS[job.variant.partition(",")[0]]
            train(scene, run, job.device, job.rounds, log.round_done, Path(folder))
    if job.device == "cuda":
        log.write(device_bytes=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    run_job(Job(**json.loads(sys.argv[1])))
