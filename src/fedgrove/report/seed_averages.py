"""Averages over seeds: means, deviations, paired differences, and their tables for a terminal.

Runs whose names differ only in the ending ``-sSEED`` belong together. The statistics module
is enough for the few numbers of a sweep: importing pandas would take longer than all of them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import IO, Any

from scipy import stats

from ..renamed import find_old_names
from . import tables
from .tables import Scores, Summary, or_dash
from .terminal import Column, name_columns, print_rows, print_table, print_text, split_common_folder

Group = Mapping[str, Any]
"""The averages of a method with its settings, as :func:`average_over_seeds` returns them."""
SAME_DATA = ("metric", "data", "task", "partition", "scenario", "split", "validation", "clients")
"""Runs are paired by seed only if these agree: then the same seed means the same data."""
SAME_ENTRY = ("method", *tables.DIVISION, "rounds")
"""Runs have a common mean over seeds only if these agree, with metric and fine-tuning."""


__getattr__ = find_old_names(__name__)


# ---- averages ------------------------------------------------------------------------------------


def average_over_seeds(
    members: Mapping[str, Summary | None], labels: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Average the results of each method and settings over seeds, for tables.

    Args:
        members: The summaries by the names of the runs; None for a run without a summary.
        labels: The name of each run's entry; by default :func:`label_runs` of the members.

    Returns:
        A dictionary per method and settings. ``accuracy_mean`` and ``accuracy_worst`` (or the same
        of another metric) are means over seeds, as is ``accuracy_pooled``, the score over the test
        examples of all clients together. ``accuracy_mean_std`` is the sample standard
        deviation of the runs' ``accuracy_mean``, None with one seed. ``paired`` has the
        differences to the dictionaries before it. All these are before fine-tuning; for each other
        length in ``finetune`` there are the same, as ``accuracy_mean_after_3`` and
        ``paired_after_3``. A mixed federation has a dictionary for each ``task``, paired with the
        same task.
    """
    runs_of: dict[tuple[str, str], dict[int, Summary]] = {}
    started: dict[str, int] = {}
    labels = labels or label_runs(members)
    for name, summary in members.items():
        label = labels[name]
        started[label] = started.get(label, 0) + 1
        # A run with --score-on 0 has nothing to compare.
        if summary is not None and summary.get("scored") != 0:
            for task, values in _split_tasks(summary).items():
                # By seed, because seeds pair the runs of two labels.
                runs_of.setdefault((label, task), {})[summary["seed"]] = values

    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for (label, task), runs in runs_of.items():
        groups[label, task] = _average(label, runs, started[label] - len(runs))
    # Each pair once, the later minus the earlier: the first in the list is the baseline.
    for (earlier, before), (later, after) in combinations(runs_of.items(), 2):
        for epochs in groups[later]["finetune"]:
            difference = paired_difference(_tuned(after, epochs), _tuned(before, epochs))
            if difference is not None:
                pairs = groups[later][tables.key_after("paired", epochs)]
                pairs.append({"against": earlier[0], **difference})
    return list(groups.values())


def _tuned(runs: Mapping[int, Summary], epochs: int) -> dict[int, Summary]:
    """Return the runs with their scores after fine-tuning, those that were scored then."""
    found = {}
    for seed, run in runs.items():
        if epochs in tables.finetune_lengths(run):
            found[seed] = tables.scores_after(run, epochs)
    return found


def split_lengths(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row per group and length of fine-tuning, with its scores under plain keys.

    ``finetune_epochs`` is the length.

    >>> group = {"finetune": [0, 3], "accuracy_mean": 0.5, "accuracy_mean_after_3": 0.75}
    >>> [(row["finetune_epochs"], row["accuracy_mean"]) for row in split_lengths([group])]
    [(0, 0.5), (3, 0.75)]
    """
    rows = []
    for group in groups:
        for epochs in tables.finetune_lengths(group):
            rows.append({**tables.scores_after(group, epochs), "finetune_epochs": epochs})
    return rows


def label_runs(members: Mapping[str, Summary | None]) -> dict[str, str]:
    """Return the name of each run's entry in tables over seeds: its own name without the seed.

    Runs that differ in method, data, division, rounds, metric or fine-tuning have no common mean.
    If their names differ in the seed only, each is an entry of its own, with its whole name.
    """
    kinds: dict[str, set[tuple[Any, ...]]] = {}
    for name, summary in members.items():
        if summary is not None:
            options = [summary.get(key) for key in SAME_ENTRY]
            # Earlier versions did not always score before fine-tuning.
            lengths = tuple(epochs for epochs in tables.finetune_lengths(summary) if epochs)
            kind = (_metric(summary), lengths, *options)
            kinds.setdefault(strip_seed(name), set()).add(kind)
    mixed = {label for label, found in kinds.items() if len(found) > 1}
    return {name: name if strip_seed(name) in mixed else strip_seed(name) for name in members}


def strip_seed(name: str) -> str:
    """Return a run's name in tables over seeds, without its seed.

    >>> strip_seed("fedprox-mu=0.1-s3"), strip_seed("my-sweep")
    ('fedprox-mu=0.1', 'my-sweep')
    """
    return re.sub(r"-s\d+$", "", name)


def _split_tasks(summary: Summary) -> dict[str, Summary]:
    """Return the summary of each task of a mixed federation; otherwise the summary itself."""
    if not any(tables.AFTER.sub("", key) == "tasks" for key in summary):
        return {"": summary}
    found: dict[str, dict[str, Any]] = {}
    for epochs in tables.finetune_lengths(summary):
        tasks = tables.scores_after(summary, epochs).get("tasks", {})
        for name, task in tasks.items():
            entry = found.setdefault(name, {**summary, **task, "task": name})
            for key in ("mean", "worst", "pooled"):
                if task.get(key) is not None:
                    entry[tables.key_after(f"{task['metric']}_{key}", epochs)] = task[key]
    return dict(found)


def _average(label: str, runs: Mapping[int, Summary], missing: int) -> dict[str, Any]:
    """Return the means over the runs of one label, given by seed; ``paired`` is still empty."""
    first = next(iter(runs.values()))
    metric = _metric(first)
    lengths = set[int]().union(*map(tables.finetune_lengths, runs.values()))
    average = {
        "group": label,
        "method": first["method"],
        "seeds": sorted(runs),
        "missing": missing,
        "finetune": sorted(lengths),
    }
    for epochs in sorted(lengths):
        scores = _average_scores(_tuned(runs, epochs), metric)
        for key, value in scores.items():
            # The seeds only where a run of an older version was not scored at this length.
            if key != "seeds" or value != average["seeds"]:
                average[tables.key_after(key, epochs)] = value
    average |= {
        "bytes_up": round(_mean(runs, "bytes_up")),
        "bytes_down": round(_mean(runs, "bytes_down")),
    }
    # A sweep varies neither rounds nor cohort, so those of the first run are those of all.
    common = ("task", "metric", "more_is_better", "share", *tables.DIVISION, "rounds", "cohort")
    average |= {key: first[key] for key in common if key in first}
    # Some of the runs may be older than the last of these numbers.
    for key in ("density", "virtual_seconds", tables.TRAIN_EXAMPLES):
        if all(run.get(key) is not None for run in runs.values()):
            average[key] = round(_mean(runs, key), 8)
    return average


def _average_scores(runs: Mapping[int, Summary], metric: str) -> dict[str, Any]:
    """Return the mean scores over the seeds of a group; ``paired`` is still empty."""
    means = [run[f"{metric}_mean"] for run in runs.values()]
    found = {
        "seeds": sorted(runs),
        f"{metric}_mean": round(statistics.fmean(means), 8),
        f"{metric}_mean_std": round(statistics.stdev(means), 8) if len(means) > 1 else None,
    }
    # Runs of an older version have no pooled score.
    for name in ("worst", "worst10", "pooled"):
        key = f"{metric}_{name}"
        if all(run.get(key) is not None for run in runs.values()):
            found[key] = round(_mean(runs, key), 8)
    return {**found, "paired": []}


def _metric(summary: Mapping[str, Any]) -> str:
    """Return the metric of a summary in a table of seeds."""
    # Early summaries did not name their metric: it was accuracy.
    return str(summary.get("metric") or "accuracy")


def _mean(runs: Mapping[int, Summary], key: str) -> float:
    """Return the mean of a number over the seeds of a group of runs."""
    # fmean sums exactly: the mean does not depend on the order in which the seeds finished.
    return statistics.fmean(run[key] for run in runs.values())


def paired_difference(
    runs: Mapping[int, Summary], others: Mapping[int, Summary]
) -> dict[str, Any] | None:
    """Compare two methods on the seeds that they share, with a paired t-test.

    d_s = a_s - b_s;  SE = sd(d) / sqrt(n);  t = mean(d) / SE with n - 1 degrees of freedom,
    two-sided.

    Args:
        runs: The summaries of one method by seed.
        others: Those of the other.

    Returns:
        The mean difference over n shared seeds, its standard error and p; None with fewer than two
        shared seeds. p is None if all differences are equal: t is not defined then.

    >>> runs = {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.75}}
    >>> paired_difference(runs, {0: {"accuracy_mean": 0.5}, 1: {"accuracy_mean": 0.5}})
    {'seeds': 2, 'difference': 0.125, 'standard_error': 0.125, 'p': 0.5}
    """
    ours = []
    theirs = []
    for seed, run in runs.items():
        other = others.get(seed)
        if other is not None and _have_same_data(run, other):
            ours.append(float(run[f"{_metric(run)}_mean"]))
            theirs.append(float(other[f"{_metric(other)}_mean"]))
    if len(ours) < 2:
        return None

    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = 0.0
    p = None
    # Scores are written with eight digits: a smaller variation is rounding, not a t.
    if max(gaps) - min(gaps) > 1e-9:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        p = round(float(stats.ttest_rel(ours, theirs).pvalue), 8)
    return {
        "seeds": len(gaps),
        "difference": round(statistics.fmean(gaps), 8),
        "standard_error": round(error, 8),
        "p": p,
    }


def _have_same_data(run: Summary, other: Summary) -> bool:
    if _metric(run) != _metric(other):
        return False
    amounts = [run.get(tables.TRAIN_EXAMPLES), other.get(tables.TRAIN_EXAMPLES)]
    # Runs of an older version do not state it.
    if None not in amounts and amounts[0] != amounts[1]:
        return False
    return all(run.get(key) == other.get(key) for key in SAME_DATA)


def differing_columns(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the columns of what entries differ in: their division, and amounts of training data.

    >>> differing_columns([{"split": "random"}, {"split": "official"}])
    {'split': ['random', 'official']}
    """
    found = {}
    for option in tables.DIVISION:
        cells = [tables.show_option(group, option) for group in groups]
        if len(set(cells)) > 1:
            found[option] = cells
    if tables.have_different_amounts(groups):
        found["train examples"] = list(map(tables.format_examples, groups))
    return found


# ---- the table of groups -------------------------------------------------------------------------


def print_seed_averages(groups: Sequence[Group], file: IO[str] | None = None) -> None:
    """Print a row per method and settings, then a row per pair."""
    if not groups:
        return
    groups = _shorten_groups(split_lengths(groups))
    metrics: dict[str, Scores] = {}
    for group in groups:
        scores = Scores.from_summary(group)
        metrics.setdefault(scores.metric, scores)
    mean = Column("mean")
    worst = Column("worst", 3)
    pooled = tables.pooled_column(list(metrics.values()))
    if len(metrics) == 1:
        percent = scores.percent.replace(" ", "\n")
        mean = Column(f"{scores.metric}{percent}")
        worst = Column(f"worst{percent}", 3)
    is_tuned = any(group["finetune_epochs"] for group in groups)
    shown = {
        "task": any("task" in group for group in groups),
        "metric": len(metrics) > 1,
        "tuned\nepochs": is_tuned,
        pooled.head: _have_pooled(groups),
    }
    different = differing_columns(groups)
    rows = []
    for i, group in enumerate(groups):
        entry, *others = _group_cells(group, mean, worst, pooled).items()
        options = [(_option_column(name), cells[i]) for name, cells in different.items()]
        cells = [entry, *options, *others]
        rows.append({column: cell for column, cell in cells if shown.get(column.head, True)})
    print_rows(rows, file)
    if not is_tuned:
        print_text(f"{', '.join(metrics)}: before fine-tuning", file)
    tables.explain_errors(list(metrics.values()), file)

    pairs = paired_rows(groups)
    if pairs:
        print(file=file)
        unit = ", points" if all(each.share for each in metrics.values()) else ""
        head = [
            *name_columns("paired by seed", "minus"),
            Column("tuned\nepochs"),
            Column("seeds", 1),
            Column(f"difference{unit}"),
            Column("standard error", 1),
            Column("p"),
        ]
        if not is_tuned:
            del head[2]
            for row in pairs:
                del row[2]
        print_table(head, pairs, file)
        caution = "; not corrected for several pairs" if len(pairs) > 1 else ""
        print_text(f"p: two-sided paired t-test over seeds{caution}", file)


def name_group_cells(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the groups as rows of a table in a notebook, by the heads of the columns."""
    rows = []
    for group in groups:
        cells = {"method": group["group"], "seeds": str(len(group["seeds"]))}
        if "task" in group:
            cells["task"] = group["task"]
        for row in split_lengths([group]):
            head = f"{Scores.from_summary(row).name} "
            cells[head + tables.describe_finetuning(row["finetune_epochs"])] = format_mean(row, 2)
        sent = group["bytes_up"] + group["bytes_down"]
        rows.append({**cells, "sent": tables.format_bytes(sent)})
    return rows


def _have_pooled(groups: Sequence[Group]) -> bool:
    return any(Scores.from_summary(group).pooled is not None for group in groups)


def _option_column(name: str) -> Column:
    """Return the column of what entries differ in."""
    return Column(name.replace(" ", "\n"), label=name, is_name=name in tables.DIVISION)


def _group_cells(group: Group, mean: Column, worst: Column, pooled: Column) -> dict[Column, str]:
    scores = Scores.from_summary(group)
    seeds = str(len(group["seeds"]))
    if group["missing"]:
        seeds += f" of {len(group['seeds']) + group['missing']}"
    return {
        Column("over seeds", is_name=True): group["group"],
        Column("task", is_name=True): group.get("task", ""),
        Column("metric", is_name=True): scores.name,
        Column("seeds", 1): seeds,
        mean: format_mean(group, 2),
        worst: scores.format(scores.worst),
        pooled: scores.format_pooled(),
        Column("tuned\nepochs", 3): str(group["finetune_epochs"]),
        Column("kB\nup", 2): or_dash(_bytes_each(group, "up"), tables.format_kilobytes),
        Column("kB\ndown", 2): or_dash(_bytes_each(group, "down"), tables.format_kilobytes),
        Column("total\nup", 4): tables.format_bytes(group["bytes_up"]),
        Column("total\ndown", 4): tables.format_bytes(group["bytes_down"]),
    }


def _bytes_each(group: Group, direction: str) -> float | None:
    """Return the bytes of one device in one round; they are not known for a task."""
    return None if "task" in group else tables.bytes_per_device(group, direction)


def format_mean(group: Group, digits: int = 1) -> str:
    """Return the mean score of a group and, with several seeds, its deviation."""
    scores = Scores.from_summary(group)
    mean = scores.format(scores.mean or 0.0, digits)
    std = group[f"{scores.metric}_mean_std"]
    return mean if std is None else f"{mean} ± {scores.format(std, digits)}"


def paired_rows(groups: Sequence[Group]) -> list[list[str]]:
    """Return a row per pair: entry, minus, tuned epochs, seeds, difference, standard error, p.

    The groups are those of :func:`split_lengths`.
    """
    rows = []
    for group in groups:
        scores = Scores.from_summary(group)
        task = f" on {group['task']}" if "task" in group else ""
        for pair in group["paired"]:
            rows.append(
                [
                    group["group"],
                    f"{pair['against']}{task}",
                    str(group["finetune_epochs"]),
                    str(pair["seeds"]),
                    scores.format(pair["difference"], sign="+"),
                    scores.format(pair["standard_error"]),
                    or_dash(pair["p"], "{:.2g}".format),
                ]
            )
    return rows


def _shorten_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without their common folder, which the table of runs has named."""
    labels = [group["group"] for group in groups]
    short = dict(zip(labels, split_common_folder(labels)[1], strict=True))
    renamed: list[Group] = []
    for group in groups:
        pairs = [{**pair, "against": short[pair["against"]]} for pair in group["paired"]]
        renamed.append({**group, "group": short[group["group"]], "paired": pairs})
    return renamed


# ---- the table of methods ------------------------------------------------------------------------


def compare_methods(
    runs: Mapping[str, Sequence[Summary]], model_bytes: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Average the runs of each method over seeds, at each length of fine-tuning.

    Args:
        runs: The summaries of each method, one per seed. All have the same lengths.
        model_bytes: The mean size of the exported models by method, where it is known.
    """
    rows = []
    for method, summaries in runs.items():
        members = {f"{method}-s{summary['seed']}": summary for summary in summaries}
        for row in split_lengths(average_over_seeds(members)):
            rows.append({**row, "model_bytes": (model_bytes or {}).get(method)})
    return rows


def print_method_rows(rows: Sequence[Group], file: IO[str] | None = None) -> None:
    """Print what :func:`compare_methods` returned, and what its numbers are.

    The columns that are always shown answer the first questions: how well clients are served, what
    a device sends and receives in a round, and how large its model is.
    """
    metric = Scores.from_summary(rows[0])
    lines = []
    pooled = tables.pooled_column([metric])
    for row in rows:
        scores = Scores.from_summary(row)
        sent = row["bytes_up"] + row["bytes_down"]
        each = sent / (row["rounds"] * row["cohort"]) if row.get("cohort") else None
        lines.append(
            {
                Column("method", is_name=True): row["group"],
                Column("fine-tuned\nepochs", label="fine-tuned"): str(row["finetune_epochs"]),
                Column(metric.name.replace(" ", "\n")): format_mean(row),
                Column(f"worst\ntenth{metric.percent}"): scores.format(scores.worst10, 1),
                Column("kB per device\nand round"): or_dash(each, tables.format_kilobytes),
                Column("model\nkB"): or_dash(row["model_bytes"], tables.format_kilobytes),
                Column("weights\nkept", 1): f"{row['density']:.0%}",
                Column("sent in\nall", 2): tables.format_bytes(sent),
                Column(f"worst\nclient{metric.percent}", 3): scores.format(scores.worst, 1),
                pooled: scores.format_pooled(1),
            }
        )
    print_rows(lines, file, "the page")
    has_seeds = any(len(row["seeds"]) > 1 for row in rows)
    spread = ", ± standard deviation over seeds" if has_seeds else ""
    print_text(
        f"{metric.metric}: mean over clients{spread}; kB: thousands of bytes, both ways; "
        "model: the weights that fedgrove export writes, as float32.",
        file,
    )
