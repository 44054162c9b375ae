"""A study of two rows and summaries of its runs; differences of stored rows, as docs state them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from fedgrove.config.experiment import Experiment
from fedgrove.methods import FedAvg, Local
from fedgrove_lab.papers import Study, StudyRow
from fedgrove_lab.results import read_result


def summary(seed: int, means: dict[int, float], std: float = 0.1, **more: Any) -> dict[str, Any]:
    lengths = {
        str(n): {"accuracy_mean": m, "accuracy_std": std, "accuracy_worst": m - 0.2}
        for n, m in means.items()
    }
    counts = {
        "bytes_up": 2**20,
        "bytes_down": 2**21,
        "bytes_paper": 5 * 2**19,
        "seconds": 1.5,
        "engine": "serial",
    }
    dealt = {
        "data": "motion",
        "partition": "natural",
        "scenario": "none",
        "split": "blocks",
        "clients": 4,
    }
    return {
        "seed": seed,
        "finetune": lengths,
        "group_sizes": [3, 1],
        "notes": ["made up"],
        **counts,
        **dealt,
        **more,
    }


def study(**more: Any) -> Study:
    fedavg = Experiment(FedAvg(), "motion", finetune=(0, 3))
    local = Experiment(Local(), "motion", finetune=(0, 3))
    reported = {"accuracy_mean:3": 0.8, "accuracy_std:3": 0.2, "mib_paper": 2.0}
    rows = (
        StudyRow("a", "a", fedavg, reported, lead=True),
        StudyRow("b", "b & co", local),
    )
    return Study("A paper, Table 1", "Two rows.", rows, 2, notes=("a note",), **more)


def done() -> dict[str, dict[str, Any] | None]:
    return {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}),
        "a-s1": summary(1, {0: 0.7, 3: 0.9}),
        "b-s0": summary(0, {0: 0.4, 3: 0.7}, group_sizes=[1] * 9),
        "b-s1": summary(1, {0: 0.4, 3: 0.9}, group_sizes=[1] * 9),
        "b-s2": None,
    }


STUDENT_T = {3: 4.302653, 10: 2.262157}
"""The 97.5 % quantile of Student's t by the number of seeds, of one degree of freedom less."""


def stored_values(result: str, row: str, measure: str) -> list[float]:
    """What a stored row has for each seed."""
    by_name = {found["name"]: found["values"] for found in read_result(result)["rows"]}
    values: list[float] = by_name[row][measure]
    return values


def paired_difference(one: Sequence[float], other: Sequence[float]) -> str:
    """The mean difference of two rows in points, with its 95 % interval over seeds."""
    found = [100 * (a - b) for a, b in zip(one, other, strict=True)]
    middle = statistics.mean(found)
    half = STUDENT_T[len(found)] * statistics.stdev(found) / math.sqrt(len(found))
    numbers = (f"{x:.1f}".replace("-0.0", "0.0") for x in (middle, middle - half, middle + half))
    mean, low, high = (number.replace("-", "−") for number in numbers)
    return f"{mean} [{low}, {high}]"
