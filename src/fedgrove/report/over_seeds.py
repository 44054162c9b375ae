"""Several seeds together: means, deviations, and paired differences between runs of one seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import IO, Any

from scipy import stats

from .fit import Column, in_one_folder, names, print_table, print_text
from .tables import Summary, each_round, kilobytes, mib

SAME = ("data", "task", "partition", "scenario", "split", "validation", "clients")
"""Runs are paired by seed only where these agree.

Then the same seed means the same data, shared out alike.
"""
FORM = ("metric", "more_is_better", "share")
"""What a summary says of its metric."""

# ---- the figures ---------------------------------------------------------------------------------


def over_seeds(members: Mapping[str, Summary | None]) -> list[dict[str, Any]]:
    """One object per method and settings, from the runs' summaries by name.

    None stands for a run without a summary. Runs whose names differ only in the ending ``-sSEED``
    belong together. ``accuracy_mean`` and ``accuracy_worst`` (of another metric, so called) are
    means over seeds; ``accuracy_mean_std`` is the sample standard deviation over seeds of the runs'
    accuracy_mean, None with one seed. ``paired`` holds the differences to the objects before it.
    A mixed federation has an object for each of its ``task``s, which are paired with their own.
    """
    runs_of: dict[tuple[str, str], dict[int, Summary]] = {}
    started: dict[str, int] = {}
    for name, summary in members.items():
        label = label_of(name)
        started[label] = started.get(label, 0) + 1
        # A run with --score-on 0 has nothing to compare.
        if summary is not None and summary.get("scored") != 0:
            for task, figures in _by_task(summary).items():
                # By seed, because seeds are what pairs the runs of two labels.
                runs_of.setdefault((label, task), {})[summary["seed"]] = figures

    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for (label, task), runs in runs_of.items():
        groups[label, task] = _figures(label, runs, started[label])
    # Each pair once, the later minus the earlier: what is listed first is the baseline.
    for (earlier, before), (later, after) in combinations(runs_of.items(), 2):
        difference = paired(after, before)
        if difference is not None:
            groups[later]["paired"].append({"against": earlier[0], **difference})
    return list(groups.values())


def _by_task(summary: Summary) -> dict[str, Summary]:
    """The summary as it would be of each task alone; of one task, as it is."""
    if "tasks" not in summary:
        return {"": summary}
    found: dict[str, Summary] = {}
    for name, task in summary["tasks"].items():
        metric = task["metric"]
        own = {f"{metric}_mean": task["mean"], f"{metric}_worst": task["worst"]}
        found[name] = {**summary, **task, **own, "task": name}
    return found


def label_of(name: str) -> str:
    """A run's name without its seed.

    >>> label_of("fedprox-mu=0.1-s3"), label_of("mine")
    ('fedprox-mu=0.1', 'mine')
    """
    label, mark, seed = name.rpartition("-s")
    # A folder named by hand, such as my-sweep, has the mark but no number behind it.
    ends_with_seed = bool(mark) and seed.isdecimal()
    return label if ends_with_seed else name


def _figures(label: str, runs: Mapping[int, Summary], started: int) -> dict[str, Any]:
    """The means over the runs of one label, given by seed; ``paired`` is still empty."""
    first = next(iter(runs.values()))
    metric = _metric(first)
    means = [run[f"{metric}_mean"] for run in runs.values()]
    # One seed has no sample deviation; None keeps it apart from a deviation of 0.
    std = None
    if len(means) > 1:
        std = round(statistics.stdev(means), 8)
    return {
        "group": label,
        "method": first["method"],
        **({"task": first["task"]} if "task" in first else {}),
        "seeds": sorted(runs),
        "missing": started - len(runs),
        **{key: first[key] for key in FORM if key in first},
        f"{metric}_mean": round(_mean(runs, f"{metric}_mean"), 8),
        f"{metric}_mean_std": std,
        f"{metric}_worst": round(_mean(runs, f"{metric}_worst"), 8),
        "bytes_up": round(_mean(runs, "bytes_up")),
        "bytes_down": round(_mean(runs, "bytes_down")),
        # A sweep may vary neither, so the first run's are those of all.
        **{key: first[key] for key in ("rounds", "cohort") if key in first},
        "paired": [],
    }


def _metric(summary: Mapping[str, Any]) -> str:
    """Which metric a summary reports; the first ones did not say, and were of accuracies."""
    return str(summary.get("metric") or "accuracy")


def _mean(runs: Mapping[int, Summary], key: str) -> float:
    # fsum: the mean must not depend on the order in which the seeds finished.
    return math.fsum(run[key] for run in runs.values()) / len(runs)


def paired(runs: Mapping[int, Summary], others: Mapping[int, Summary]) -> dict[str, Any] | None:
    """Mean difference of the mean metric over n shared seeds, its error and a paired t-test's p.

    d_s = a_s - b_s;  SE = sd(d) / sqrt(n);  t = mean(d) / SE with n - 1 degrees of freedom,
    two-sided. None with fewer than two shared seeds; p is None where all differences are equal: t
    is not defined there.

    >>> runs = {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.75}}
    >>> paired(runs, {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.5}})
    {'seeds': 2, 'difference': 0.125, 'standard_error': 0.125, 'p': 0.5}
    """
    ours = []
    theirs = []
    for seed, run in runs.items():
        other = others.get(seed)
        if other is not None and _same_data(run, other):
            ours.append(float(run[f"{_metric(run)}_mean"]))
            theirs.append(float(other[f"{_metric(other)}_mean"]))
    if len(ours) < 2:
        return None

    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = 0.0
    p = None
    # Scores are written with eight digits: differences that vary by less are equal, and only
    # rounding would give them a t.
    if max(gaps) - min(gaps) > 1e-9:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        p = round(float(stats.ttest_rel(ours, theirs).pvalue), 8)
    return {
        "seeds": len(gaps),
        "difference": round(math.fsum(gaps) / len(gaps), 8),
        "standard_error": round(error, 8),
        "p": p,
    }


def _same_data(run: Summary, other: Summary) -> bool:
    return _metric(run) == _metric(other) and all(run.get(key) == other.get(key) for key in SAME)


# ---- for a terminal ------------------------------------------------------------------------------


def print_over_seeds(groups: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print what :func:`over_seeds` returns: a row per method and settings, then a row per pair."""
    if not groups:
        return
    groups = _in_one_folder(groups)
    words = _names(groups)
    columns = [
        *names(*words),
        Column("seeds", 1),
        *_columns(groups),
        Column("kB\nup", 2),
        Column("kB\ndown", 2),
        Column("total\nup", 4),
        Column("total\ndown", 4),
    ]
    print_table(columns, [_row(group, words) for group in groups], file)
    for metric in dict.fromkeys(_metric(group) for group in groups if not _more(group)):
        print_text(f"{metric}: less is better, and the worst is the largest", file)

    pairs = []
    for group in groups:
        for pair in group["paired"]:
            pairs.append(_pair(group, pair))
    if not pairs:
        return
    print(file=file)
    unit = ", points" if all(_share(group) for group in groups) else ""
    columns = [
        *names("paired by seed", "minus"),
        Column("seeds", 1),
        Column(f"difference{unit}"),
        Column("standard error", 1),
        Column("p"),
    ]
    print_table(columns, pairs, file)
    caution = "; not corrected for several pairs" if len(pairs) > 1 else ""
    print_text(f"p: two-sided paired t-test over seeds{caution}", file)


def _in_one_folder(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups by their names in the folder of all, which the table of runs has named."""
    labels = [group["group"] for group in groups]
    _, short = in_one_folder(labels)
    name_of = dict(zip(labels, short, strict=True))
    renamed: list[Mapping[str, Any]] = []
    for group in groups:
        pairs = [{**pair, "against": name_of[pair["against"]]} for pair in group["paired"]]
        renamed.append({**group, "group": name_of[group["group"]], "paired": pairs})
    return renamed


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that tell rows apart: tasks and metrics only where there are several."""
    words = ["over seeds"]
    if any("task" in group for group in groups):
        words.append("task")
    if len({_metric(group) for group in groups}) > 1:
        words.append("metric")
    return words


def _row(group: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    finished = len(group["seeds"])
    seeds = str(finished)
    if group["missing"]:
        seeds = f"{finished} of {finished + group['missing']}"
    metric = _metric(group)
    mean = _shown(group, group[f"{metric}_mean"])
    if group[f"{metric}_mean_std"] is not None:
        mean += f" ± {_shown(group, group[f'{metric}_mean_std'])}"
    percent = " %" if _share(group) else ""
    words = {
        "over seeds": group["group"],
        "task": group.get("task", ""),
        "metric": f"{metric}{percent}",
    }
    return [
        *(words[name] for name in columns),
        seeds,
        mean,
        _shown(group, group[f"{metric}_worst"]),
        _each(group, "up"),
        _each(group, "down"),
        mib(group["bytes_up"]),
        mib(group["bytes_down"]),
    ]


def _each(group: Mapping[str, Any], direction: str) -> str:
    """What one device has in one round, in kB; of a task it is not known."""
    sent = None
    if "task" not in group:
        sent = each_round(group, direction)
    return "-" if sent is None else kilobytes(sent)


def _columns(groups: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns of scores: by the metric's name if there is one."""
    metrics = {_metric(group) for group in groups}
    if len(metrics) > 1:
        return [Column("mean"), Column("worst", 3)]
    percent = "\n%" if _share(groups[0]) else ""
    return [Column(f"{metrics.pop()}{percent}"), Column(f"worst{percent}", 3)]


def _share(group: Mapping[str, Any]) -> bool:
    return bool(group.get("share", True))


def _more(group: Mapping[str, Any]) -> bool:
    return bool(group.get("more_is_better", True))


def _shown(group: Mapping[str, Any], value: float, sign: str = "") -> str:
    """A share in percent, any other number as it is."""
    return f"{100 * value:{sign}.2f}" if _share(group) else f"{value:{sign}.4g}"


def _pair(group: Mapping[str, Any], pair: Mapping[str, Any]) -> list[str]:
    p = "-" if pair["p"] is None else f"{pair['p']:.2g}"
    against = pair["against"]
    if "task" in group:
        against += f" on {group['task']}"
    return [
        group["group"],
        against,
        str(pair["seeds"]),
        _shown(group, pair["difference"], "+"),
        _shown(group, pair["standard_error"]),
        p,
    ]
