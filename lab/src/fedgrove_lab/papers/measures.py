"""What can be measured of a run: how each measure is called, and its value in a run's summary.

A measure may have a part behind an ``@``: ``rounds_to@0.85`` is the number of rounds to that
accuracy, ``accuracy_mean@10`` the accuracy after round 10.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgrove.report.tables import Summary, bytes_per_device, finetune_lengths, key_after

ON_TASK = "accuracy_on/"
"""Begins a measure of the mean accuracy on one task, as ``accuracy_on/mnist``."""
TASKS = (ON_TASK, "accuracy_tasks", "accuracy_least")
"""What begins the names of measures of a federation of several tasks."""
REACHED = "rounds_to@"
"""Begins a measure of how many rounds it takes to an accuracy."""
TO_ALL = "seconds_to_all"
"""Virtual seconds to the best accuracy that all rows of a panel reach, on every seed."""
SHARES = {"share_paper": "mib_paper", "share": "mib"}
"""Measures in % of another row's, and what of."""
REDUCTIONS = {"reduction_paper": "mib_paper", "reduction": "mib"}
"""Measures of how much less a row has than another one, in % of that, and what of."""
FROM_METHOD = ("mask_stability", "centroids", "uplink_counted")
"""What methods report of themselves in each round."""
OVER_ROUNDS = ("density_run", "mask_stability", "centroids")
"""Means over the rounds."""
PERCENT = ("accuracy", "density", "mask_stability", "pruned")
"""What begins the names of measures that are fractions, and are shown in %."""
MIB = 2**20


@dataclass(frozen=True)
class Measure:
    """How a measure is called, and what it is in a summary."""

    title: str
    """In a table's head and on an axis."""
    digits: int | None = None
    """Digits that are shown, of measures that do not depend on fine-tuning; None: two, with the
    spread over seeds."""
    find: Callable[[Summary], Any] | None = None
    """Its value in a summary, where that needs nothing else; None where there is none."""


def _groups_found(summary: Summary) -> float | None:
    """The number of groups, where a method was to find some: one model for all has no purity."""
    groups: float | None = summary.get("groups") if "purity" in summary else None
    return groups


def _divided_in_round(summary: Summary) -> float | None:
    reported = summary.get("figures", {}).get("divided_in_round")
    # Below 0: the method stays with one group.
    if reported is None or reported < 0:
        return None
    return float(reported)


def _kilobytes_each(summary: Summary) -> float | None:
    up = bytes_per_device(summary, "up")
    down = bytes_per_device(summary, "down")
    if up is None or down is None:
        return None
    return (up + down) / 1000


def _find_less(measure: str) -> Callable[[Summary], float]:
    """How much less was sent, in %, than by all clients of all rounds with 4 bytes a parameter.

    Counted: by the method's own formula, in which both directions are alike, or as it reports its
    uplink itself.
    """

    def find(summary: Summary) -> float:
        dense = 4 * summary["params"] * summary["cohort"] * summary["rounds"]
        reported = over_rounds(summary.get("lines", ()), "uplink_counted")
        if measure != "less_counted":
            share = summary[measure.replace("less", "bytes")] / dense
        elif reported is not None:
            share = reported
        else:
            share = summary["bytes_paper"] / (2 * dense)
        return float(100 * (1 - share))

    return find


MEASURES = {
    "accuracy_mean": Measure("accuracy %"),
    "accuracy_pooled": Measure("over all examples %"),
    "accuracy_std": Measure("std over clients"),
    "accuracy_worst": Measure("worst %"),
    "accuracy_worst10": Measure("worst tenth %"),
    "accuracy_best": Measure("best %"),
    "accuracy_band": Measure("accuracy %"),
    "accuracy_tasks": Measure("mean of tasks %"),
    "accuracy_least": Measure("worst device %"),
    "score": Measure("score"),
    "pruned": Measure("pruned %"),
    "purity": Measure("purity", find=lambda summary: summary.get("purity")),
    "params": Measure("parameters left", 0, lambda summary: summary["params_mean"]),
    # Four bytes each and 10^6 bytes to a megabyte.
    "model_mb": Measure("model MB", 3, lambda summary: 4 * summary["params_mean"] / 1e6),
    "mib_paper": Measure("MiB counted", 1, lambda summary: summary["bytes_paper"] / MIB),
    "mib": Measure(
        "MiB sent", 1, lambda summary: (summary["bytes_up"] + summary["bytes_down"]) / MIB
    ),
    "mib_up": Measure("MiB up", 1, lambda summary: summary["bytes_up"] / MIB),
    "mib_down": Measure("MiB down", 1, lambda summary: summary["bytes_down"] / MIB),
    "share_paper": Measure("% counted", 2),
    "share": Measure("% sent", 2),
    "reduction_paper": Measure("% less, counted", 2),
    "reduction": Measure("% less, sent", 2),
    "less_counted": Measure("% less up, counted", 2, _find_less("less_counted")),
    "less_up": Measure("% less up, sent", 2, _find_less("less_up")),
    "less_down": Measure("% less down, sent", 2, _find_less("less_down")),
    "density_run": Measure("density %, mean over rounds", 2),
    "density_end": Measure("density %, at the end", 2, lambda summary: summary["density"]),
    "mask_stability": Measure("mask stability %", 2),
    "clients_band": Measure("clients", 1),
    "centroids": Measure("centroids per layer", 2),
    "virtual_seconds": Measure("virtual s", 1, lambda summary: summary["virtual_seconds"]),
    "seconds_round": Measure(
        "s a round, here", 2, lambda summary: summary["seconds"] / summary["rounds"]
    ),
    TO_ALL: Measure("virtual s to what all reach", 1),
    "groups": Measure("number of groups", 1, _groups_found),
    # Also where the truth is not known; one group counts as one.
    "group_count": Measure("number of groups", 1, lambda summary: summary["groups"]),
    "group_largest": Measure("largest group", 1, lambda summary: summary["group_sizes"][0]),
    "divided_in_round": Measure("divided after round", 0, _divided_in_round),
    "kb_each": Measure("kB per device and round", 1, _kilobytes_each),
}


# ---- how a measure is shown ----------------------------------------------------------------------


def title_of(measure: str) -> str:
    """Return what a measure is called.

    >>> title_of("accuracy_mean"), title_of("accuracy_mean@10"), title_of("rounds_to@0.85")
    ('accuracy %', 'accuracy % after 10', 'rounds to 85 %')
    >>> title_of("accuracy_on/mnist")
    'mnist %'
    """
    if measure.startswith(REACHED):
        return f"rounds to {100 * float(measure.removeprefix(REACHED)):g} %"
    name, _, done = measure.partition("@")
    if name.startswith(ON_TASK):
        title = f"{name.removeprefix(ON_TASK)} %"
    else:
        title = MEASURES[name].title
    return f"{title} after {done}" if done else title


def scale_of(key: str) -> float:
    """Return what to multiply a value by before it is shown: fractions are shown in %."""
    return 100.0 if key.startswith(PERCENT) else 1.0


def digits_of(key: str) -> int | None:
    """Return how many digits of a measure are shown; None: two, with the spread over seeds."""
    known = MEASURES.get(key)
    return None if known is None else known.digits


# ---- the value in one run ------------------------------------------------------------------------


def run_value(
    summary: Summary, key: str, layer: str = "", band: Collection[str] = ()
) -> float | None:
    """Return one value of a run.

    Args:
        summary: The run's summary; measures over rounds need the lines of its metrics.jsonl too,
            under "lines".
        key: A measure, with the epochs of fine-tuning after a colon where it depends on them.
        layer: The weight tensor that ``pruned`` is of.
        band: The clients that ``accuracy_band`` is of.

    Returns:
        The value. None where there is none: the score of a run whose clients are all equally
        accurate, rounds to an accuracy that was not reached, what was not measured.

    >>> scores = {"accuracy_mean": 0.75, "accuracy_std": 0.25}
    >>> run_value({"finetune": {"3": scores}}, "score:3")
    3.0
    """
    measure, length = split_key(key)
    if measure.startswith(TASKS):
        return tasks_value(summary["finetune"][length].get("tasks", {}), measure)
    if "@" in measure or measure in OVER_ROUNDS:
        return over_rounds(summary.get("lines", ()), measure)
    if measure == "pruned":
        kept = summary.get("figures", {}).get(f"density:{layer}")
        return None if kept is None else 1 - float(kept)
    if measure == "clients_band":
        return float(len(band))
    if measure == "accuracy_band":
        scored = _clients_at(summary, length)
        values = [scored[client] for client in band if client in scored]
        return math.fsum(values) / len(values) if values else None
    if measure == "accuracy_best":
        # Runs of older versions have the accuracies of single clients at the last length only.
        scored = _clients_at(summary, length)
        return float(max(scored.values())) if scored else None
    if measure in MEASURES and MEASURES[measure].find is not None:
        find = MEASURES[measure].find
        assert find is not None
        value = find(summary)
        return None if value is None else float(value)
    scores = summary["finetune"][length]
    if measure == "accuracy_pooled":
        # Runs of before have none, nor have tasks of different problems.
        pooled = scores.get(measure)
        return None if pooled is None else float(pooled)
    if measure != "score":
        return float(scores[measure])
    if scores["accuracy_std"] == 0:
        return None
    return float(scores["accuracy_mean"] / scores["accuracy_std"])


def _clients_at(summary: Summary, length: str) -> dict[str, float]:
    """Return the accuracy of each client after fine-tuning; without a length after the last."""
    epochs = int(length) if length else finetune_lengths(summary)[-1]
    found: dict[str, float] = summary.get(key_after("accuracy_clients", epochs), {})
    return found


def split_key(key: str) -> tuple[str, str]:
    """Split a measure from the epochs of fine-tuning, which not all have; tasks may have a colon.

    >>> split_key("accuracy_on/digits:turned:3"), split_key("mib")
    (('accuracy_on/digits:turned', '3'), ('mib', ''))
    """
    measure, colon, length = key.rpartition(":")
    return (measure, length) if colon else (key, "")


def tasks_value(tasks: Mapping[str, Mapping[str, Any]], measure: str) -> float | None:
    """Return a value of several tasks; None where none of them is scored by accuracy.

    >>> tasks = {"a": {"metric": "accuracy", "mean": 0.5, "worst": 0.25}}
    >>> tasks["b"] = {"metric": "accuracy", "mean": 1.0, "worst": 0.75}
    >>> [tasks_value(tasks, key) for key in ("accuracy_on/a", "accuracy_tasks", "accuracy_least")]
    [0.5, 0.75, 0.25]
    """
    by_accuracy = {}
    for name, task in tasks.items():
        if task["metric"] == "accuracy":
            by_accuracy[name] = task
    if measure.startswith(ON_TASK):
        wanted = by_accuracy.get(measure.removeprefix(ON_TASK))
        return None if wanted is None else float(wanted["mean"])
    if not by_accuracy:
        return None
    if measure == "accuracy_least":
        return float(min(task["worst"] for task in by_accuracy.values()))
    return math.fsum(task["mean"] for task in by_accuracy.values()) / len(by_accuracy)


def over_rounds(lines: Iterable[Mapping[str, Any]], measure: str) -> float | None:
    """Return a value of the lines of metrics.jsonl: a mean, or what ``@`` asks for.

    >>> lines = [{"round": 1, "counts": True, "accuracy_mean": 0.5}]
    >>> lines += [{"round": 2, "counts": True, "accuracy_mean": 0.9}]
    >>> over_rounds(lines, "rounds_to@0.85"), over_rounds(lines, "accuracy_mean@1")
    (2.0, 0.5)
    """
    name, _, at = measure.partition("@")
    found: list[float] = []
    for line in lines:
        # An exchange that is not a round has a line too.
        if not line["counts"]:
            continue
        value = _in_line(line, name)
        if value is None:
            continue
        if name == "rounds_to" and value >= float(at):
            return float(line["round"])
        if at == str(line["round"]):
            return float(value)
        found.append(value)
    # What is wanted at a round, or to an accuracy, was not found.
    if at or not found:
        return None
    return math.fsum(found) / len(found)


def curve_over_rounds(runs: Iterable[Summary], measure: str) -> list[dict[str, Any]]:
    """Return a measure after each round, over seeds."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for line in run.get("lines", ()):
            value = _in_line(line, measure)
            if line["counts"] and value is not None:
                by_round.setdefault(line["round"], []).append(value)
    points = []
    for done in sorted(by_round):
        points.append({"round": done, **(over_seeds(by_round[done]) or {})})
    return points


def _in_line(line: Mapping[str, Any], name: str) -> float | None:
    """A line's value; none where clients were not scored, or the method does not report it."""
    if name.startswith(TASKS):
        return tasks_value(line.get("tasks", {}), name)
    keys = {"density_run": "density", "rounds_to": "accuracy_mean"}
    values = line.get("figures", {}) if name in FROM_METHOD else line
    value: float | None = values.get(keys.get(name, name))
    return value


def over_seeds(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean and sample deviation; None where there is no value at all."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = None
    if len(known) > 1:
        std = round(statistics.stdev(known), 8)
    return {"mean": round(math.fsum(known) / len(known), 8), "std": std}
