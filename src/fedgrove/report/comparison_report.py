"""The report of several runs: which method serves clients best and at what cost, over seeds.

Runs whose names differ only in the ending ``-sSEED`` are one entry, averaged over seeds. The
sections and their texts are in ``templates/comparison.html``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
from markupsafe import Markup

from ..errors import list_some
from . import charts, paper_table, seed_averages, tables
from .charts import Chart, Marks, Series, thin_out
from .page import Page
from .seed_averages import Group, split_lengths
from .tables import Scores, Summary, read_column
from .terminal import split_common_folder

BASELINES = ("fedavg", "local")
"""Methods that the headline compares the best entry with."""
FAR_APART = 10
"""If one entry sends this many times as many bytes as another, the scale is logarithmic."""
UNSURE = 0.05
"""A p above this is reported with the best entry."""
MOST_CURVES = 40
"""With more entries than this there are no curves."""
MOST_COLOURS = 6
"""More entries than this are grouped: more colours cannot be distinguished."""
MOST_POINTS = 200
"""Points of a curve."""
GREY = 8
"""The colour of scores before fine-tuning, and of entries that have no colour of their own."""
SETUP = ("data", "partition", "scenario", "split", "clients", "cohort", "rounds", "net")
"""Options of runs that a paper states, with the optimiser."""
OTHER_COSTS = (
    ("density", "the weights kept", "share of weights kept"),
    ("virtual_seconds", "time on the devices", "virtual seconds"),
)
"""Keys of groups that scores are drawn against, if entries differ in them."""


@dataclass(frozen=True)
class ComparedRun:
    """A run: its name, summary or None, lines of metrics.jsonl, why it failed, config.toml."""

    run: str
    summary: Summary | None
    lines: Sequence[Mapping[str, Any]] = ()
    failure: str = ""
    config: str = ""


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
    rows = split_lengths(groups)
    columns = paper_table.paper_columns(groups) if groups else []
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
        setup=describe_setup(runs),
        pairs=seed_averages.paired_rows(rows),
        runs=runs,
        scores_of=_scores_of,
        score_names=_name_scores(finished),
        differences=_list_differences(runs),
        seconds=_describe_seconds(finished),
        groups=groups,
        paper_columns=[column.head for column in columns],
        paper_rows=paper_table.rows_of(columns, _embolden) if columns else [],
        paper_formats=_write_paper_formats(groups) if groups else {},
        notes=list(notes) or tables.list_notes(finished),
        folder=folder,
    )


def draw_comparison(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Return the charts of the report that compares runs, for files of their own."""
    _, names = split_common_folder([each.run for each in runs])
    runs = [replace(each, run=name) for each, name in zip(runs, names, strict=True)]
    members = {each.run: each.summary for each in runs}
    labels = seed_averages.label_runs(members)
    groups = seed_averages.average_over_seeds(members, labels)
    sections = _make_sections(groups, runs, labels)
    drawn = []
    for section in sections:
        for chart in section.charts():
            # Charts of several data sets or tasks have equal titles.
            title = f"{section.name}: {chart.title}" if len(sections) > 1 else chart.title
            drawn.append(replace(chart, title=title))
    return drawn


def _make_title(finished: Sequence[Summary]) -> str:
    if not finished:
        return "Comparison of runs"
    # Dictionaries keep the order of first appearance, which sets would not.
    methods = dict.fromkeys(map(itemgetter("method"), finished))
    data = dict.fromkeys(map(itemgetter("data"), finished))
    return f"{list_some(list(methods))} on {', '.join(data)}"


def _embolden(cell: str) -> str:
    return Markup("<b>{}</b>").format(cell)


def _write_paper_formats(groups: Sequence[Group]) -> dict[str, str]:
    return {
        "Markdown": paper_table.markdown_table(groups),
        "LaTeX (booktabs)": paper_table.latex_table(groups),
        "CSV": paper_table.csv_table(groups),
    }


def _name_scores(finished: Sequence[Summary]) -> dict[int, str]:
    """Return the heads of the columns of scores in the table of all runs, by length."""
    names = {Scores.from_summary(each).name for each in finished if "tasks" not in each}
    name = names.pop() if len(names) == 1 else "score"
    lengths = set[int]().union(*map(tables.finetune_lengths, finished)) or {0}
    return {epochs: f"{name} {tables.describe_finetuning(epochs)}" for epochs in sorted(lengths)}


def _scores_of(summary: Summary, epochs: int) -> Scores:
    return Scores.from_summary(tables.scores_after(summary, epochs))


def _describe_seconds(finished: Sequence[Summary]) -> str:
    """Return what is known of the time that a comparison's runs took; "" if each was measured."""
    shared = [each for each in finished if each.get(tables.SHARED, 1) > 1]
    if not shared:
        return ""
    total = math.fsum(each.get("seconds") or 0.0 for each in shared)
    return (
        f"{len(shared)} runs were trained together, so the time of one of them was not measured; "
        f"together they were computed in {tables.format_duration(total)}."
    )


# ---- how runs were made --------------------------------------------------------------------------


def describe_setup(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return how a report's runs were made: the values of each option, each value once."""
    found: dict[str, dict[str, None]] = {}
    for each in runs:
        for name, value in _read_setup(each):
            # A dictionary keeps the order of first appearance, which a set would not.
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _read_setup(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """Yield the options of a run that a paper states."""
    config = tomllib.loads(run.config)
    options = {**config.get("run", {}), **(run.summary or {})}
    for name in SETUP:
        value = options.get(name)
        if value not in (None, "", "none"):
            yield name, f"{value:,}" if isinstance(value, int) else str(value)
    local = config.get("method", {}).get("local") or {}
    optimiser = local.get("optimiser") or {}
    if optimiser:
        lr = f", learning rate {optimiser['lr']}" if "lr" in optimiser else ""
        yield "optimiser", f"{optimiser.get('type', '?')}{lr}"
        yield "local epochs", str(local.get("epochs", "?"))
        yield "batch", str(local.get("batch", "?"))


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
    setups = [dict(_read_setup(each)) for each in runs]
    for name, values in describe_setup(runs).items():
        if len(values) > 1 and name not in tables.DIVISION:
            columns[name] = [setup.get(name, "-") for setup in setups]
    return columns


# ---- the headline --------------------------------------------------------------------------------


def headline(groups: Sequence[Group]) -> str:
    """Return a report's headline: which entry serves clients best, and by how much.

    Before fine-tuning; then, in a second sentence, after the longest.

    >>> one = {"group": "local", "method": "local", "accuracy_mean": 0.5, "seeds": [0]}
    >>> two = {"group": "ditto", "method": "ditto", "accuracy_mean": 0.75, "seeds": [0]}
    >>> more = {"bytes_up": 1, "bytes_down": 1}
    >>> print(headline([{**one, **more}, {**two, **more}]).partition("; ")[0])
    Before fine-tuning, ditto has the best score: 75.0 % accuracy on average
    """
    rows = split_lengths([group for group in groups if "task" not in group])
    metrics = {Scores.from_summary(row).metric for row in rows}
    lengths = sorted({row["finetune_epochs"] for row in rows})
    if len(metrics) != 1:
        return ""
    sentences = []
    for epochs in dict.fromkeys((lengths[0], lengths[-1])):
        compared = [row for row in rows if row["finetune_epochs"] == epochs]
        if len(compared) > 1:
            sentences.append(_describe_best(compared, epochs))
    is_one_seed = sentences and max(len(row["seeds"]) for row in rows) < 2
    if is_one_seed:
        sentences.append("One seed each: small differences may be chance.")
    return " ".join(sentences)


def _describe_best(groups: Sequence[Group], epochs: int) -> str:
    """Return which entry of a report is best after some epochs of fine-tuning, and the next."""
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
    when = tables.describe_finetuning(epochs)
    text = f"{when[0].upper()}{when[1:]}, {best['group']} has the best score: {score} on average; "
    text += f"{listed}."
    for group in ranked[1:]:
        if group["method"] == "fedavg" and _mebibytes(group):
            share = tables.format_percent(_mebibytes(best) / _mebibytes(group))
            text += f" {best['group']} sends {share} of {group['group']}'s bytes."
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

    @cached_property
    def lengths(self) -> list[int]:
        """The epochs of fine-tuning after which clients of the report's runs were scored."""
        return sorted(set[int]().union(*map(tables.finetune_lengths, self.groups)))

    @cached_property
    def colours(self) -> list[int]:
        """The colour of each entry of the report, at most :data:`MOST_COLOURS` of them.

        With more entries than that those of one method share a colour; with more methods than that
        the best entries have one each, and all others are grey.
        """
        entries = list(map(itemgetter("group"), self.groups))
        names = entries
        if len(entries) > MOST_COLOURS:
            names = list(map(itemgetter("method"), self.groups))
        known = list(dict.fromkeys(names))
        if len(known) <= MOST_COLOURS:
            return [known.index(name) for name in names]
        ranked = sorted(self._rows(self.lengths[0]), key=_mean_score)
        if self.scores.more_is_better:
            ranked.reverse()
        best = [row["group"] for row in ranked[: MOST_COLOURS - 1]]
        return [best.index(name) if name in best else GREY for name in entries]

    def _rows(self, epochs: int) -> list[dict[str, Any]]:
        """Return the entries that were scored after some epochs of fine-tuning."""
        return [row for row in split_lengths(self.groups) if row["finetune_epochs"] == epochs]

    def charts(self) -> list[Chart]:
        """Return all charts."""
        drawn = [self._draw_bars()]
        first = self.lengths[0]
        if len(self.groups) > 1:
            x_title = "MiB sent in total, both directions"
            for epochs in dict.fromkeys((first, self.lengths[-1])):
                costs = list(map(_mebibytes, self._rows(epochs)))
                drawn.append(self._draw_front("bytes", x_title, costs, epochs, log=True))
        if "task" in self.groups[0]:
            return drawn
        for key, what, x_title in OTHER_COSTS:
            costs = read_column(self._rows(first), key).tolist()
            # False if the costs of an entry are not known: they are NaN.
            if np.ptp(costs) > 1e-3:
                drawn.append(self._draw_front(what, x_title, costs, first))
        if len(self.groups) <= MOST_CURVES:
            drawn += self._draw_curves()
        return drawn

    def _draw_bars(self) -> Chart:
        """Draw the score of every entry, with a lane for each length of fine-tuning."""
        title = f"{self.scores.title}, mean over clients"
        labels = list(map(itemgetter("group"), self.groups))
        marks: list[Marks] = []
        for epochs in self.lengths:
            by_label = {row["group"]: row for row in self._rows(epochs)}
            scored = [by_label.get(label, {}) for label in labels]
            name = tables.describe_finetuning(epochs)
            # Before fine-tuning is grey; what fine-tuning adds has colours.
            colour = GREY if epochs == 0 and len(self.lengths) > 1 else len(marks)
            marks.append(self._make_marks(name, scored, colour))
        if len(marks) == 1:
            title = f"{title}, {marks[0].name}"
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
        self, what: str, x_title: str, costs: Sequence[float], epochs: int, log: bool = False
    ) -> Chart:
        """Draw scores against costs, and a line through the entries that no other beats in both."""
        scores = self.scores
        rows = self._rows(epochs)
        colours = {group["group"]: c for group, c in zip(self.groups, self.colours, strict=True)}
        shown = [scores.factor * _mean_score(row) for row in rows]
        points = list(zip(costs, shown, strict=True))
        front = [points[i] for i in find_front(points, scores.more_is_better)]
        line = {"dashed": True, "marker": "", "in_legend": False, "tips": [""] * len(front)}
        series = [Series.from_points("", front, GREY, size=0, **line)]
        for row, (x, y) in zip(rows, points, strict=True):
            name = row["group"]
            series.append(
                Series(
                    name,
                    [x],
                    [y],
                    colours[name],
                    line=False,
                    spread=[scores.factor * (row[f"{scores.metric}_mean_std"] or 0.0)],
                    tips=[f"{name}: {y:.4g} {scores.name} at {x:.4g} {x_title}"],
                    size=6,
                    label="" if colours[name] == GREY else name,
                    in_legend=colours[name] != GREY,
                )
            )
        title = f"{scores.title} against {what}, {tables.describe_finetuning(epochs)}"
        return charts.draw_xy(title, series, x_title, scores.name, log_x=log, x_from_zero=not log)

    def _draw_curves(self) -> list[Chart]:
        """Draw the score by round and against bytes, mean over seeds."""
        by_round = []
        by_bytes = []
        ends = []
        for group, colour in zip(self.groups, self.colours, strict=True):
            name = group["group"]
            points = self._average_curve(name)
            if len(points) < 2:
                continue
            rounds, sent, scores, band = np.array(points).T
            ends.append(sent[-1])
            is_grey = colour == GREY
            look: dict[str, Any] = {
                "size": 2.5 if len(points) <= 40 else 1.5,
                "band": () if is_grey or not np.any(band > 0) else band.tolist(),
                "label": "" if is_grey else name,
                "in_legend": not is_grey,
            }
            by_round.append(Series(name, rounds, scores, colour, **look))
            by_bytes.append(Series(name, sent, scores, colour, **look))
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

    def _average_curve(self, label: str) -> list[tuple[float, float, float, float]]:
        """Return (round, MiB so far, score, deviation of the score) of an entry, over seeds."""
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
                scores = [each for _, each in points[number]]
                std = float(np.std(scores, ddof=1)) if seeds > 1 else 0.0
                averages.append((number, mebibytes, score, std))
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
