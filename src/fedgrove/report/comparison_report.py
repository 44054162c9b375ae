"""The report of several runs: which method serves clients best and at what cost, over seeds.

Runs whose names differ only in the ending ``-sSEED`` are one entry, averaged over seeds. The
sections and their texts are in ``templates/comparison.html``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .charts import Chart, Marks, Series, draw_rows, draw_xy, thin_out
from .page import COLOURS, Page
from .seed_averages import (
    PAPER_COLUMNS,
    Group,
    average_over_seeds,
    csv_table,
    latex_table,
    markdown_table,
    paired_rows,
    paper_rows,
    strip_seed,
)
from .tables import (
    Scores,
    Summary,
    describe_finetuning,
    finetune_epochs,
    format_percent,
    list_notes,
)
from .terminal import split_common_folder

FAR_APART = 10
"""If one entry sends this many times as many bytes as another, the scale is logarithmic."""
UNSURE = 0.05
"""A p above this is reported with the best entry."""
MOST_CURVES = 12
"""With more entries than this there are no curves: nobody could distinguish them."""
MOST_POINTS = 200
"""Points of a curve."""
GREY = 8
"""The colour of scores before fine-tuning."""


_Average = tuple[float | None, float | None]
"""A mean over seeds and its deviation."""


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
    """Return the whole page.

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
    groups = average_over_seeds({each.run: each.summary for each in runs})
    sections = _make_sections(groups, runs)
    if not lead and len(sections) == 1:
        lead = headline(groups)
    return Page(
        title or _make_title(finished),
        f"{unfinished} of {len(runs)} runs are not finished" if unfinished else "",
        template="comparison.html",
        lead=lead,
        finished=finished,
        sections=sections,
        pairs=paired_rows(groups),
        runs=runs,
        scores_of=Scores.from_summary,
        score_name=_common_score_name(finished),
        groups=groups,
        paper_columns=PAPER_COLUMNS,
        paper_rows=paper_rows(groups),
        paper_formats={
            "Markdown": markdown_table(groups),
            "LaTeX (booktabs)": latex_table(groups),
            "CSV": csv_table(groups),
        },
        notes=list(notes) or list_notes(finished),
        folder=folder,
    )


def _make_title(finished: Sequence[Summary]) -> str:
    methods = list(dict.fromkeys(str(summary["method"]) for summary in finished))
    data = dict.fromkeys(str(summary["data"]) for summary in finished)
    if not methods:
        return "Comparison of runs"
    more = f" and {len(methods) - 5} more" if len(methods) > 5 else ""
    return f"{', '.join(methods[:5])}{more} on {', '.join(data)}"


def _common_score_name(finished: Sequence[Summary]) -> str:
    """Return the name of the score in the table of all runs."""
    names = set()
    for summary in finished:
        if "tasks" not in summary:
            when = describe_finetuning(finetune_epochs(summary))
            names.add(f"{Scores.from_summary(summary).name} {when}")
    return names.pop() if len(names) == 1 else "score after all fine-tuning"


# ---- the headline --------------------------------------------------------------------------------


def headline(groups: Sequence[Group]) -> str:
    """Return which entry serves clients best, compared with the next, fedavg and local.

    >>> one = {"group": "local", "method": "local", "accuracy_mean": 0.5, "seeds": [0]}
    >>> two = {"group": "ditto", "method": "ditto", "accuracy_mean": 0.75, "seeds": [0]}
    >>> more = {"bytes_up": 1, "bytes_down": 1, "finetune_epochs": 0}
    >>> print(headline([{**one, **more}, {**two, **more}]).partition("; ")[0])
    ditto serves clients best: 75.0 % accuracy on average before fine-tuning
    """
    groups = [group for group in groups if "task" not in group]
    metrics = {Scores.from_summary(group).metric for group in groups}
    if len(groups) < 2 or len(metrics) > 1:
        return ""
    scores = Scores.from_summary(groups[0])
    ranked = sorted(groups, key=_mean_score, reverse=scores.more_is_better)
    best, second = ranked[:2]
    baselines = [group for group in ranked[1:] if group["method"] in ("fedavg", "local")]
    # The next best too: where it is close, it may be the better choice.
    named = baselines if second in baselines else [second, *baselines]
    others = [f"{group['group']} gives {scores.describe(_mean_score(group))}" for group in named]
    listed = " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
    metric = f" {scores.metric}" if scores.share else ""
    lengths = {group["finetune_epochs"] for group in groups}
    when = f" {describe_finetuning(lengths.pop())}" if len(lengths) == 1 else ""
    text = (
        f"{best['group']} serves clients best: {scores.describe(_mean_score(best))}{metric} on "
        f"average{when}; {listed}."
    )
    for group in baselines:
        if group["method"] == "fedavg" and _sent(group):
            share = format_percent(_sent(best) / _sent(group))
            text += f" {best['group']} sends {share} of {group['group']}'s bytes."
    if all(len(group["seeds"]) < 2 for group in ranked):
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


def _sent(group: Group) -> float:
    return float(group["bytes_up"] + group["bytes_down"])


# ---- charts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """Entries that can be drawn in one chart: of one data set, one task and one metric."""

    name: str
    groups: list[Group]
    runs: Sequence[ComparedRun]

    @property
    def scores(self) -> Scores:
        """The metric of all entries."""
        return Scores.from_summary(self.groups[0])

    @property
    def has_seeds(self) -> bool:
        """Whether any entry has several seeds."""
        return any(len(group["seeds"]) > 1 for group in self.groups)

    def when(self) -> str:
        """Return when the scores were measured, if it is the same for all entries."""
        lengths = {group["finetune_epochs"] for group in self.groups}
        return describe_finetuning(lengths.pop()) if len(lengths) == 1 else "after all fine-tuning"

    def members(self, group: Group) -> list[ComparedRun]:
        """Return the finished runs of an entry."""
        label = group["group"]
        runs = [each for each in self.runs if strip_seed(each.run) == label]
        return [each for each in runs if each.summary is not None]

    def mean_of(self, group: Group, key: str) -> float | None:
        """Return the mean of a value of the summaries of an entry."""
        values = [(each.summary or {}).get(key) for each in self.members(group)]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    def charts(self) -> list[Chart]:
        """Return all charts."""
        charts = [self._draw_bars()]
        if len(self.groups) > 1:
            costs = [_sent(group) / 2**20 for group in self.groups]
            charts.append(self._draw_front("bytes", "MiB sent in all, both ways", costs, log=True))
        if "task" in self.groups[0]:
            return charts
        for key, what, x_title in (
            ("density", "the weights kept", "share of weights kept"),
            ("virtual_seconds", "time on the devices", "virtual seconds"),
        ):
            means = [self.mean_of(group, key) for group in self.groups]
            costs = [mean for mean in means if mean is not None]
            is_known = len(costs) == len(self.groups)
            if is_known and max(costs) - min(costs) > 1e-3:
                charts.append(self._draw_front(what, x_title, costs))
        if len(self.groups) <= MOST_CURVES:
            charts += self._draw_curves()
        return charts

    def _draw_bars(self) -> Chart:
        """Draw the score of every entry, with a lane for each length of fine-tuning."""
        lengths: list[str] = []
        # The averages of a task are of the last length only.
        if "task" not in self.groups[0]:
            first = self.members(self.groups[0])[0]
            lengths = list((first.summary or {}).get("finetune") or {})
        title = f"{self.scores.title}, mean over clients"
        marks = []
        if len(lengths) < 2:
            title += f", {self.when()}"
            key = f"{self.scores.metric}_mean_std"
            averages: list[_Average] = [(_mean_score(group), group[key]) for group in self.groups]
            marks.append(self._make_marks(self.scores.metric, averages, 0))
        else:
            for i, length in enumerate(lengths):
                # Before fine-tuning is grey; what fine-tuning adds has colours.
                colour = GREY if length == "0" else i - ("0" in lengths)
                averages = [self._average_after(length, group) for group in self.groups]
                marks.append(self._make_marks(describe_finetuning(int(length)), averages, colour))
        labels = [group["group"] for group in self.groups]
        return draw_rows(title, labels, marks, self.scores.name)

    def _average_after(self, length: str, group: Group) -> _Average:
        """Return the mean score of an entry after some epochs of fine-tuning, and its deviation."""
        values = []
        for each in self.members(group):
            summary = each.summary or {}
            mean = Scores.from_summary(summary, summary["finetune"].get(length, {})).mean
            if mean is not None:
                values.append(mean)
        if not values:
            return None, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def _make_marks(self, name: str, averages: Sequence[_Average], colour: int) -> Marks:
        values: list[float | None] = []
        low: list[float | None] = []
        high: list[float | None] = []
        texts = []
        for mean, std in averages:
            if mean is None:
                values.append(None)
                low.append(None)
                high.append(None)
                texts.append("")
            else:
                half = std or 0.0
                values.append(self.scores.factor * mean)
                low.append(self.scores.factor * (mean - half))
                high.append(self.scores.factor * (mean + half))
                texts.append(self.scores.format(mean, 1))
        return Marks(name, values, colour, low=low, high=high, texts=texts)

    def _draw_front(
        self, what: str, x_title: str, costs: Sequence[float], log: bool = False
    ) -> Chart:
        """Draw scores against costs, and a line through the entries that no other beats in both."""
        scores = self.scores
        points = []
        for cost, group in zip(costs, self.groups, strict=True):
            points.append((cost, scores.factor * _mean_score(group)))
        front = [points[i] for i in find_front(points, scores.more_is_better)]
        line = Series(
            "",
            [x for x, _ in front],
            [y for _, y in front],
            GREY,
            dashed=True,
            marker="",
            in_legend=False,
            tips=[""] * len(front),
            size=0,
        )
        series = [line]
        for i, (group, (x, y)) in enumerate(zip(self.groups, points, strict=True)):
            name = group["group"]
            std = group[f"{scores.metric}_mean_std"]
            spread = [None if std is None else scores.factor * std]
            tips = [f"{name}: {y:.4g} {scores.name} at {x:.4g} {x_title}"]
            colour = i % COLOURS
            series.append(
                Series(name, [x], [y], colour, line=False, spread=spread, tips=tips, size=6)
            )
        title = f"{scores.title} against {what}, {self.when()}"
        return draw_xy(title, series, x_title, scores.name, log_x=log, x_from_zero=not log)

    def _draw_curves(self) -> list[Chart]:
        """Draw the score by round and against bytes, mean over seeds."""
        by_round = []
        by_bytes = []
        for i, group in enumerate(self.groups):
            points: dict[int, list[tuple[float, float]]] = {}
            for each in self.members(group):
                sent = 0.0
                for line in each.lines:
                    sent += (line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 2**20
                    score = line.get(f"{self.scores.metric}_mean")
                    if score is not None:
                        points.setdefault(line["round"], []).append((sent, score))
            # After the end of one seed's run there is no mean over all.
            seeds = max(map(len, points.values()), default=0)
            rounds = [number for number in sorted(points) if len(points[number]) == seeds]
            rounds = thin_out(rounds, MOST_POINTS)
            if len(rounds) < 2:
                continue
            x = [statistics.fmean(sent for sent, _ in points[number]) for number in rounds]
            y = []
            for number in rounds:
                mean = statistics.fmean(score for _, score in points[number])
                y.append(self.scores.factor * mean)
            size = 2.5 if len(rounds) <= 40 else 1.5
            colour = i % COLOURS
            by_round.append(Series(group["group"], rounds, y, colour, size=size))
            by_bytes.append(Series(group["group"], x, y, colour, size=size))
        if not by_round:
            return []
        ends = [series.x[-1] for series in by_bytes]
        # A method that sends a hundredth of another would be a stroke at the left edge.
        log = max(ends) >= FAR_APART * min(ends)
        title = self.scores.title
        unit = self.scores.name
        return [
            draw_xy(f"{title} by round, before fine-tuning", by_round, "round", unit, whole_x=True),
            draw_xy(
                f"{title} against bytes so far, before fine-tuning",
                by_bytes,
                "MiB sent, both ways",
                unit,
                x_from_zero=not log,
                log_x=log,
            ),
        ]


def _make_sections(groups: Sequence[Group], runs: Sequence[ComparedRun]) -> list[_Section]:
    data_of: dict[str, str] = {}
    for each in runs:
        if each.summary is not None:
            data_of.setdefault(strip_seed(each.run), str(each.summary["data"]))
    sections: dict[str, _Section] = {}
    for group in groups:
        parts = [data_of[group["group"]]]
        if "task" in group:
            parts.append(group["task"])
        parts.append(Scores.from_summary(group).metric)
        name = ", ".join(parts)
        sections.setdefault(name, _Section(name, [], runs)).groups.append(group)
    return list(sections.values())


def find_front(points: Sequence[tuple[float, float]], more_is_better: bool = True) -> list[int]:
    """Return the points that no other one beats in cost and score (the Pareto front).

    Points are (cost, score); the front goes from the lowest cost to the best score.

    >>> find_front([(1, 50), (2, 40), (3, 80), (3, 70)])
    [0, 2]
    """
    sign = 1 if more_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or sign * points[i][1] > sign * points[front[-1]][1]:
            front.append(i)
    return front
