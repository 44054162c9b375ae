"""The report of several runs: which method serves clients best and at what cost, over seeds.

Runs whose names differ only in the ending ``-sSEED`` are one entry, averaged over seeds. The
sections and their texts are in ``templates/comparison.html``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import list_some
from . import charts, seed_averages, tables
from .charts import Chart, Marks, Series, thin_out
from .page import COLOURS, Page
from .seed_averages import Group
from .tables import Scores, Summary, read_column
from .terminal import split_common_folder

BASELINES = ("fedavg", "local")
"""Methods that the headline compares the best entry with."""
FAR_APART = 10
"""If one entry sends this many times as many bytes as another, the scale is logarithmic."""
UNSURE = 0.05
"""A p above this is reported with the best entry."""
MOST_CURVES = 12
"""With more entries than this there are no curves: they could not be distinguished."""
MOST_POINTS = 200
"""Points of a curve."""
UNTUNED_COLOUR = 8
"""The colour of scores before fine-tuning."""
OTHER_COSTS = (
    ("density", "the weights kept", "share of weights kept"),
    ("virtual_seconds", "time on the devices", "virtual seconds"),
)
"""Keys of groups that scores are drawn against, if entries differ in them."""


@dataclass(frozen=True)
class ComparedRun:
    """A run: its name, its summary or None, its lines of metrics.jsonl, and why it failed."""

    run: str
    summary: Summary | None
    lines: Sequence[Mapping[str, Any]] = ()
    failure: str = ""


def make_comparison_report(
    runs: Sequence[ComparedRun], title: str = "", lead: str = "", notes: Sequence[str] = ()
) -> Page:
    """Return the HTML report that compares runs.

    Args:
        runs: The runs.
        title: The title; by default the methods and the data.
        lead: The first sentence; by default which entry is best.
        notes: The notes at the end; by default those of the data sets.
    """
    folder, names = split_common_folder([each.run for each in runs])
    runs = [replace(each, run=name) for each, name in zip(runs, names, strict=True)]
    finished = [each.summary for each in runs if each.summary is not None]
    unfinished = len(runs) - len(finished)
    warning = f"{unfinished} of {len(runs)} runs are not finished" if unfinished else ""
    members = {each.run: each.summary for each in runs}
    labels = seed_averages.label_runs(members)
    groups = seed_averages.average_over_seeds(members, labels)
    sections = _make_sections(groups, runs, labels)
    if not lead and len(sections) == 1:
        lead = headline(groups)
    return Page(
        title or _make_title(finished),
        warning,
        template="comparison.html",
        lead=lead,
        finished=finished,
        sections=sections,
        pairs=seed_averages.paired_rows(groups),
        runs=runs,
        scores_of=Scores.from_summary,
        score_name=_name_score(finished),
        differences=_list_differences(runs),
        groups=groups,
        paper_columns=seed_averages.paper_columns(groups),
        paper_rows=seed_averages.paper_rows(groups),
        paper_formats={
            "Markdown": seed_averages.markdown_table(groups),
            "LaTeX (booktabs)": seed_averages.latex_table(groups),
            "CSV": seed_averages.csv_table(groups),
        },
        notes=list(notes) or tables.list_notes(finished),
        folder=folder,
    )


def _make_title(finished: Sequence[Summary]) -> str:
    if not finished:
        return "Comparison of runs"
    # Dictionaries keep the order of first appearance, which sets would not.
    methods = dict.fromkeys(map(itemgetter("method"), finished))
    data = dict.fromkeys(map(itemgetter("data"), finished))
    return f"{list_some(list(methods))} on {', '.join(data)}"


def _name_score(finished: Sequence[Summary]) -> str:
    """Return the head of the column of scores in the table of all runs."""
    names = {Scores.from_summary(each).name for each in finished if "tasks" not in each}
    name = names.pop() if len(names) == 1 else "score"
    return f"{name} {_describe_common(map(tables.finetune_epochs, finished))}"


def _list_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return the columns of what runs differ in: data, their division and amount, and metric."""
    found = seed_averages.differing_columns(
        [each.summary for each in runs if each.summary is not None]
    )
    metrics = []
    for each in runs:
        if each.summary is not None:
            is_mixed = "tasks" in each.summary
            metrics.append("by task" if is_mixed else Scores.from_summary(each.summary).name)
    if len(set(metrics)) > 1:
        found["metric"] = metrics
    columns = {}
    for name, cells in found.items():
        known = iter(cells)
        columns[name] = ["-" if each.summary is None else next(known) for each in runs]
    return columns


def _describe_common(epochs: Iterable[int]) -> str:
    """Return when scores were measured."""
    lengths = set(epochs)
    if len(lengths) == 1:
        return tables.describe_finetuning(lengths.pop())
    return "after all fine-tuning"


# ---- the headline --------------------------------------------------------------------------------


def headline(groups: Sequence[Group]) -> str:
    """Return a report's headline: which entry serves clients best, and by how much.

    >>> one = {"group": "local", "method": "local", "accuracy_mean": 0.5, "seeds": [0]}
    >>> two = {"group": "ditto", "method": "ditto", "accuracy_mean": 0.75, "seeds": [0]}
    >>> more = {"bytes_up": 1, "bytes_down": 1, "finetune_epochs": 0}
    >>> print(headline([{**one, **more}, {**two, **more}]).partition("; ")[0])
    ditto has the best score: 75.0 % accuracy on average before fine-tuning
    """
    groups = [group for group in groups if "task" not in group]
    metrics = {Scores.from_summary(group).metric for group in groups}
    if len(groups) < 2 or len(metrics) > 1:
        return ""
    scores = Scores.from_summary(groups[0])
    ranked = sorted(groups, key=_mean_score, reverse=scores.more_is_better)
    best, second = ranked[:2]
    others = []
    for group in ranked[1:]:
        # The next best too: where it is close, it may be the better choice.
        if group is second or group["method"] in BASELINES:
            others.append(f"{group['group']} gives {scores.describe(_mean_score(group))}")
    listed = others.pop()
    if others:
        listed = f"{', '.join(others)} and {listed}"
    score = scores.describe(_mean_score(best))
    if scores.share:
        score += f" {scores.metric}"
    when = _describe_common(map(itemgetter("finetune_epochs"), groups))
    text = f"{best['group']} has the best score: {score} on average {when}; {listed}."
    for group in ranked[1:]:
        if group["method"] == "fedavg" and _mebibytes(group):
            share = tables.format_percent(_mebibytes(best) / _mebibytes(group))
            text += f" {best['group']} sends {share} of {group['group']}'s bytes."
    if max(len(group["seeds"]) for group in ranked) < 2:
        text += " One seed each: small differences may be chance."
    p = _paired_p(best, second)
    if p is not None and p > UNSURE:
        text += f" Its lead over {second['group']} may be chance (paired by seed, p {p:.2g})."
    return text


def _paired_p(one: Group, other: Group) -> float | None:
    """Return the p of the paired test between two entries, if there is one."""
    for group, against in ((one, other), (other, one)):
        for pair in group.get("paired", ()):
            if pair["against"] == against["group"] and pair["p"] is not None:
                return float(pair["p"])
    return None


def _mean_score(group: Group) -> float:
    return Scores.from_summary(group).mean or 0.0


def _mebibytes(group: Group) -> float:
    return float(group["bytes_up"] + group["bytes_down"]) / 2**20


# ---- charts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """Entries that can be drawn in one chart: of one division of data, one task and one metric."""

    name: str
    groups: list[Group]
    runs: Sequence[ComparedRun]
    labels: Mapping[str, str]
    """The name of each run's entry."""

    @property
    def scores(self) -> Scores:
        """The scores of all entries of the report's section."""
        return Scores.from_summary(self.groups[0])

    @property
    def has_seeds(self) -> bool:
        """Whether any entry of the report has several seeds."""
        return max(len(group["seeds"]) for group in self.groups) > 1

    def when(self) -> str:
        """Return when the scores of the report were measured."""
        return _describe_common(map(itemgetter("finetune_epochs"), self.groups))

    def charts(self) -> list[Chart]:
        """Return all charts."""
        drawn = [self._draw_bars()]
        if len(self.groups) > 1:
            costs = list(map(_mebibytes, self.groups))
            drawn.append(
                self._draw_front("bytes", "MiB sent in total, both directions", costs, log=True)
            )
        if "task" in self.groups[0]:
            return drawn
        for key, what, x_title in OTHER_COSTS:
            costs = read_column(self.groups, key).tolist()
            # False if the costs of an entry are not known: they are NaN.
            if np.ptp(costs) > 1e-3:
                drawn.append(self._draw_front(what, x_title, costs))
        if len(self.groups) <= MOST_CURVES:
            drawn += self._draw_curves()
        return drawn

    def _draw_bars(self) -> Chart:
        """Draw the score of every entry, with a lane for each length of fine-tuning."""
        members = {each.run: each.summary for each in self.runs if each.summary is not None}
        first = self.groups[0]
        lengths: list[str] = []
        # The averages of a task are of the last length only.
        if "task" not in first:
            for name, summary in members.items():
                if self.labels[name] == first["group"]:
                    lengths = list(summary.get("finetune") or {})
        title = f"{self.scores.title}, mean over clients"
        labels = list(map(itemgetter("group"), self.groups))
        if len(lengths) < 2:
            marks = [self._make_marks(self.scores.metric, self.groups, 0)]
            return charts.draw_rows(f"{title}, {self.when()}", labels, marks, self.scores.name)
        marks = []
        for i, length in enumerate(lengths):
            # Before fine-tuning is grey; what fine-tuning adds has colours.
            colour = UNTUNED_COLOUR if length == "0" else i - ("0" in lengths)
            averages = seed_averages.average_after(members, length)
            by_label = {group["group"]: group for group in averages}
            tuned = [by_label.get(label, {}) for label in labels]
            name = tables.describe_finetuning(int(length))
            marks.append(self._make_marks(name, tuned, colour))
        return charts.draw_rows(title, labels, marks, self.scores.name)

    def _make_marks(self, name: str, groups: Sequence[Group], colour: int) -> Marks:
        metric = self.scores.metric
        means = read_column(groups, f"{metric}_mean")
        half = np.nan_to_num(read_column(groups, f"{metric}_mean_std"))
        factor = self.scores.factor
        texts = []
        for mean in means:
            texts.append("" if np.isnan(mean) else self.scores.format(mean, 1))
        return Marks(
            name,
            (factor * means).tolist(),
            colour,
            low=(factor * (means - half)).tolist(),
            high=(factor * (means + half)).tolist(),
            texts=texts,
        )

    def _draw_front(
        self, what: str, x_title: str, costs: Sequence[float], log: bool = False
    ) -> Chart:
        """Draw scores against costs, and a line through the entries that no other beats in both."""
        scores = self.scores
        shown = [scores.factor * _mean_score(group) for group in self.groups]
        points = list(zip(costs, shown, strict=True))
        front = [points[i] for i in find_front(points, scores.more_is_better)]
        line = {"dashed": True, "marker": "", "in_legend": False, "tips": [""] * len(front)}
        series = [Series.from_points("", front, UNTUNED_COLOUR, size=0, **line)]
        for i, (group, (x, y)) in enumerate(zip(self.groups, points, strict=True)):
            name = group["group"]
            series.append(
                Series(
                    name,
                    [x],
                    [y],
                    i % COLOURS,
                    line=False,
                    spread=[scores.factor * (group[f"{scores.metric}_mean_std"] or 0.0)],
                    tips=[f"{name}: {y:.4g} {scores.name} at {x:.4g} {x_title}"],
                    size=6,
                )
            )
        title = f"{scores.title} against {what}, {self.when()}"
        return charts.draw_xy(title, series, x_title, scores.name, log_x=log, x_from_zero=not log)

    def _draw_curves(self) -> list[Chart]:
        """Draw the score by round and against bytes, mean over seeds."""
        by_round = []
        by_bytes = []
        ends = []
        for i, group in enumerate(self.groups):
            points = self._average_curve(group["group"])
            if len(points) < 2:
                continue
            size = 2.5 if len(points) <= 40 else 1.5
            rounds, sent, scores = np.array(points).T
            ends.append(sent[-1])
            colour = i % COLOURS
            by_round.append(Series(group["group"], rounds, scores, colour, size=size))
            by_bytes.append(Series(group["group"], sent, scores, colour, size=size))
        if not by_round:
            return []
        # A method that sends a hundredth of another would be a stroke at the left edge.
        log = max(ends) >= FAR_APART * min(ends)
        return [
            charts.draw_xy(
                f"{self.scores.title} by round, before fine-tuning",
                by_round,
                "round",
                self.scores.name,
                whole_x=True,
            ),
            charts.draw_xy(
                f"{self.scores.title} against bytes so far, before fine-tuning",
                by_bytes,
                "MiB sent, both ways",
                self.scores.name,
                x_from_zero=not log,
                log_x=log,
            ),
        ]

    def _average_curve(self, label: str) -> list[tuple[float, float, float]]:
        """Return (round, MiB so far, score) of an entry, mean over seeds."""
        points: dict[int, list[tuple[float, float]]] = {}
        for each in self.runs:
            if self.labels[each.run] != label or each.summary is None:
                continue
            sent = 0.0
            for line in each.lines:
                sent += (line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 2**20
                score = line.get(f"{self.scores.metric}_mean")
                if score is not None:
                    points.setdefault(line["round"], []).append((sent, self.scores.factor * score))
        seeds = max(map(len, points.values()), default=0)
        averages = []
        for number in sorted(points):
            # After the end of one seed's run there is no mean over all.
            if len(points[number]) == seeds:
                mebibytes, score = np.mean(points[number], axis=0)
                averages.append((number, mebibytes, score))
        return thin_out(averages, MOST_POINTS)


def _make_sections(
    groups: Sequence[Group], runs: Sequence[ComparedRun], labels: Mapping[str, str]
) -> list[_Section]:
    different = seed_averages.differing_columns(groups)
    sections: dict[str, _Section] = {}
    for i, group in enumerate(groups):
        parts = [str(group.get("data", ""))]
        for option in tables.DIVISION[1:]:
            if option in different:
                parts.append(f"{option} {different[option][i]}")
        if "task" in group:
            parts.append(group["task"])
        parts.append(Scores.from_summary(group).metric)
        name = ", ".join(parts)
        sections.setdefault(name, _Section(name, [], runs, labels)).groups.append(group)
    return list(sections.values())


def find_front(points: Sequence[tuple[float, float]], more_is_better: bool = True) -> list[int]:
    """Return the points of a chart that no other one beats in cost and score (Pareto front).

    Points are (cost, score); the front goes from the lowest cost to the best score.

    >>> find_front([(1, 50), (2, 40), (3, 80), (3, 70)])
    [0, 2]
    """
    sign = 1 if more_is_better else -1
    front: list[int] = []
    best = -math.inf
    # By cost; of equal costs, the best score first.
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1])):
        score = sign * points[i][1]
        if score > best:
            front.append(i)
            best = score
    return front
