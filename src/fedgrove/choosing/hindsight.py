"""How good a choice was: every method in full, judged on test data, which the choice never saw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..report.seed_averages import strip_seed
from ..runs.result import Failure, Result


def hindsight(
    ends: Mapping[str, Result | Failure],
    found: Mapping[str, Any],
    budget: float | None,
    clients: int,
    more_is_better: bool,
) -> dict[str, Any]:
    """The methods in full, the best first, and how far from it the choice is.

    Each method is taken at the fine-tuning that serves it best on test data, so that the best in
    hindsight is as good as it can be; the choice at the one that it came with. A method of which a
    run failed has no place among the others, whose means are over all seeds: it is listed.
    """
    sign = 1 if more_is_better else -1
    scores: dict[tuple[str, int], dict[int, float]] = {}
    sent: dict[str, list[float]] = {}
    seconds = 0.0
    failed: dict[str, str] = {}
    for name, end in ends.items():
        if isinstance(end, Failure):
            failed.setdefault(strip_seed(name), end.why)
            continue
        summary = end.summary
        label = strip_seed(name)
        seconds += summary["seconds"]
        each = (summary["bytes_up"] + summary["bytes_down"]) / clients
        sent.setdefault(label, []).append(each)
        for length, figures in summary["finetune"].items():
            scores.setdefault((label, int(length)), {})[summary["seed"]] = _mean_of(
                summary, figures
            )
    rows: list[dict[str, Any]] = []
    for label, taken in sent.items():
        if label in failed:
            continue
        own = {length: by_seed for (of, length), by_seed in scores.items() if of == label}
        best = max(own, key=lambda length: (sign * _mean(own[length]), -length))
        each = math.fsum(taken) / len(taken)
        rows.append(
            {
                "method": label,
                "epochs": best,
                "test": round(_mean(own[best]), 6),
                "bytes_each": round(each),
                "within_budget": budget is None or each <= budget,
            }
        )
    rows.sort(key=lambda row: -sign * row["test"])
    fitting = [row for row in rows if row["within_budget"]]
    looked_at = {
        "rows": rows,
        "failed": failed,
        "pick": found["pick"],
        "seconds": round(seconds, 1),
    }
    if not fitting:
        return looked_at
    best_row = fitting[0]
    looked_at["best"] = best_row["method"]
    looked_at["best_test"] = best_row["test"]
    if found["label"] in failed:
        return looked_at
    picked = scores[(found["label"], found["epochs"])]
    best_scores = scores[(best_row["method"], best_row["epochs"])]
    gaps = [sign * (best_scores[seed] - picked[seed]) for seed in picked]
    error = None
    if len(gaps) > 1:
        error = round(statistics.stdev(gaps) / math.sqrt(len(gaps)), 6)
    return {
        **looked_at,
        "pick_test": round(_mean(picked), 6),
        "behind": round(math.fsum(gaps) / len(gaps), 6),
        "behind_error": error,
    }


def _mean(by_seed: Mapping[int, float]) -> float:
    return math.fsum(by_seed.values()) / len(by_seed)


def _mean_of(summary: Mapping[str, Any], figures: Mapping[str, Any]) -> float:
    """The mean over clients of a run after so many epochs."""
    if "tasks" not in figures:
        return float(figures[f"{summary['metric']}_mean"])
    tasks = figures["tasks"].values()
    clients = sum(task["clients"] for task in tasks)
    return float(math.fsum(task["clients"] * task["mean"] for task in tasks) / clients)
