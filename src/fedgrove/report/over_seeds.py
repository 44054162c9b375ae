"""What several seeds say together: means, deviations, and paired differences between runs on the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import IO, Any

from rich.table import Table
from scipy import stats

from .tables import Summary, console, mib

SAME = ("data", "partition", "scenario", "split", "clients")
"""Runs are paired by seed only where these agree: then the same seed means the same data, dealt out alike."""


def over_seeds(members: Mapping[str, Summary | None]) -> list[dict[str, Any]]:
    """One object per method and settings, from the runs' summaries by name; None stands for a run without one.

    Runs whose names differ only in the ending ``-sSEED`` belong together. ``accuracy_mean`` and ``accuracy_worst``
    are means over seeds; ``accuracy_mean_std`` is the sample standard deviation over seeds of the runs'
    accuracy_mean, None with one seed. ``paired`` holds the differences to the objects before it.
    """
    parts: dict[str, dict[int, Summary]] = {}
    asked: dict[str, int] = {}
    for name, summary in members.items():
        label = label_of(name)
        asked[label] = asked.get(label, 0) + 1
        if summary is not None:
            parts.setdefault(label, {})[summary["seed"]] = summary
    found = {label: _figures(label, runs, asked[label]) for label, runs in parts.items()}
    for (one, before), (other, after) in combinations(parts.items(), 2):
        difference = paired(after, before)
        if difference is not None:
            found[other]["paired"].append({"against": one, **difference})
    return list(found.values())


def label_of(name: str) -> str:
    """A run's name without its seed.

    >>> label_of("fedprox-mu=0.1-s3"), label_of("mine")
    ('fedprox-mu=0.1', 'mine')
    """
    label, mark, seed = name.rpartition("-s")
    return label if mark and seed.isdecimal() else name


def _figures(label: str, runs: Mapping[int, Summary], asked: int) -> dict[str, Any]:
    def mean(key: str) -> float:
        return math.fsum(run[key] for run in runs.values()) / len(runs)

    means = [run["accuracy_mean"] for run in runs.values()]
    return {
        "group": label,
        "method": next(iter(runs.values()))["method"],
        "seeds": sorted(runs),
        "missing": asked - len(runs),
        "accuracy_mean": round(mean("accuracy_mean"), 8),
        "accuracy_mean_std": round(statistics.stdev(means), 8) if len(means) > 1 else None,
        "accuracy_worst": round(mean("accuracy_worst"), 8),
        "bytes_up": round(mean("bytes_up")),
        "bytes_down": round(mean("bytes_down")),
        "paired": [],
    }


def paired(runs: Mapping[int, Summary], others: Mapping[int, Summary]) -> dict[str, Any] | None:
    """Mean difference of accuracy_mean over n shared seeds, its standard error, and the p of a paired t-test.

    d_s = a_s - b_s;  SE = sd(d) / sqrt(n);  t = mean(d) / SE with n - 1 degrees of freedom, two-sided.
    None with fewer than two shared seeds; p is None where all differences are equal: t is not defined there.

    >>> runs = {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.75}}
    >>> paired(runs, {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.5}})
    {'seeds': 2, 'difference': 0.125, 'standard_error': 0.125, 'p': 0.5}
    """
    shared = [
        s for s in runs if s in others and all(runs[s].get(k) == others[s].get(k) for k in SAME)
    ]
    if len(shared) < 2:
        return None
    ours, theirs = ([float(r[s]["accuracy_mean"]) for s in shared] for r in (runs, others))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    varies = max(gaps) - min(gaps) > 1e-9  # accuracies are written with eight digits
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if varies else 0.0
    return {
        "seeds": len(shared),
        "difference": round(math.fsum(gaps) / len(gaps), 8),
        "standard_error": round(error, 8),
        "p": round(float(stats.ttest_rel(ours, theirs).pvalue), 8) if varies else None,
    }


def print_over_seeds(found: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print what :func:`over_seeds` found: a row per method and settings, then a row per pair."""
    out = console(file)
    out.print(
        _table(
            ["over seeds"],
            ["seeds", "accuracy %", "worst %", "up", "down"],
            [_row(g) for g in found],
        )
    )
    pairs = [(g["group"], pair) for g in found for pair in g["paired"]]
    if pairs:
        heads = ["seeds", "difference, points", "standard error", "p"]
        out.print()
        out.print(
            _table(["paired by seed", "minus"], heads, [_pair(name, pair) for name, pair in pairs])
        )
        out.print(
            "p: two-sided paired t-test over seeds"
            + ("; not corrected for several pairs" * (len(pairs) > 1))
        )


def _row(g: Mapping[str, Any]) -> list[str]:
    n, missing, std = len(g["seeds"]), g["missing"], g["accuracy_mean_std"]
    spread = "" if std is None else f" ± {100 * std:.2f}"
    return [
        g["group"],
        f"{n} of {n + missing}" if missing else str(n),
        f"{100 * g['accuracy_mean']:.2f}{spread}",
        f"{100 * g['accuracy_worst']:.2f}",
        mib(g["bytes_up"]),
        mib(g["bytes_down"]),
    ]


def _pair(name: str, pair: Mapping[str, Any]) -> list[str]:
    p = "-" if pair["p"] is None else f"{pair['p']:.2g}"
    points = f"{100 * pair['difference']:+.2f}"
    return [
        name,
        pair["against"],
        str(pair["seeds"]),
        points,
        f"{100 * pair['standard_error']:.2f}",
        p,
    ]


def _table(left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
