"""The HTML page of ``fedgrove paper``: what was measured and reported, in charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgrove.report.charts import Chart, Marks, Series, draw_heat_map, draw_rows, draw_xy
from fedgrove.report.page import Page

from .compare import ComparedRow, Comparison
from .measures import scale_of, title_of
from .tables import QUICK, SPREAD, explain_marks, lay_out, lay_out_pairs, section_title

METHODS = (8, 11, 5, 0, 6, 3, 9, 7, 2, 4, 1)
"""One colour per method or series: greys for the plain ones, which come first."""
MOST_WHISKERS = 12
"""A line of more points is drawn without markers and whiskers."""
REPORTED = "diamond"
"""The symbol of what a paper reports."""


def write_page(comparison: Comparison, cited: str, path: Path) -> None:
    """Write charts, tables, tests and notes as one HTML file."""
    page = Page(comparison["title"], warning=QUICK if comparison["quick"] else "")
    page.paragraph(comparison["about"], small=f"{cited}. {_legend(comparison)}")
    for title, drawings in _figures(comparison):
        page.heading(title)
        page.charts(*drawings)
    for title, drawings in _heat_maps(comparison["matrices"]):
        page.heading(title)
        page.charts(*drawings)
    head, sections = lay_out(comparison)
    for title, lines in sections:
        page.heading(title)
        page.table(head, lines)
    page.paragraph(small=SPREAD + explain_marks(comparison))
    if comparison["paired"]:
        page.heading(
            "Paired by seed: points of accuracy, two-sided p of a paired t-test, "
            "not corrected for several pairs"
        )
        head, lines = lay_out_pairs(comparison)
        page.table(head, lines)
    page.notes(comparison["notes"])
    page.write(path)


def _legend(comparison: Comparison) -> str:
    """How to read the charts."""
    finished = [len(row["seeds"]) for row in comparison["rows"]]
    seeds = str(min(finished))
    if max(finished) > min(finished):
        seeds = f"{min(finished)} to {max(finished)}"
    return (
        f"Filled: ours, whiskers one standard deviation over seeds ({seeds}). "
        "Hollow diamonds: the paper."
    )


def _figures(comparison: Comparison) -> Iterator[tuple[str, list[Chart]]]:
    """The charts with their titles, by data and panel."""
    sections: dict[str, list[ComparedRow]] = {}
    for row in comparison["rows"]:
        # A row without a finished run has nothing to draw; the table still lists it.
        if row["seeds"]:
            sections.setdefault(section_title(row), []).append(row)
    for title, rows in sections.items():
        against = comparison.get("against")
        if against:
            yield title, _against(rows, against)
            continue
        if comparison["lines"]:
            yield title, _lines(rows, comparison["drawn"])
            continue
        yield title, _dots(rows, comparison["measures"])
        lengths = rows[0]["lengths"]
        length = middle(lengths)
        across = _across(rows[0], length)
        if across and any(row["lead"] for row in rows):
            about = f"accuracy against {' and '.join(word for word, _ in across.values())}"
            if len(lengths) > 1:
                about += f", fine-tuned {length}"
            yield f"{title}: {about}", _scatter(rows, length, across)


# ---- values --------------------------------------------------------------------------------------


def _value(row: ComparedRow, key: str, what: str) -> float | None:
    """``mean`` or ``std`` of ours, or ``paper``; fractions in %."""
    if what == "paper":
        value: float | None = row["paper"].get(key)
    else:
        value = row["ours"].get(key, {}).get(what)
    if value is None:
        return None
    return scale_of(key) * value


def _column(rows: Sequence[ComparedRow], key: str, what: str) -> list[float | None]:
    return [_value(row, key, what) for row in rows]


def middle(lengths: Sequence[int]) -> int:
    """The length of fine-tuning at which methods are compared.

    Fine-tuning hides how methods differ: none of it hides least, many epochs hide nearly all. So
    the second of three or more lengths, else the last.
    """
    return lengths[1] if len(lengths) > 2 else lengths[-1]


def points(rows: Sequence[ComparedRow], measure: str) -> list[dict[str, Any]]:
    """The points of one series, by x: ours, its deviation, and the paper's where it gives one."""
    unsorted: list[dict[str, Any]] = []
    for row in rows:
        if measure in row["curves"]:
            unsorted += _rounds(row, measure)
            continue
        for length in row["lengths"]:
            # Bytes do not depend on fine-tuning: their key has no length.
            key = measure if measure in row["ours"] else f"{measure}:{length}"
            point = {
                "x": length if row["x"] is None else row["x"],
                "mean": _value(row, key, "mean"),
                "std": _value(row, key, "std"),
                "paper": _value(row, key, "paper"),
            }
            unsorted.append(point)
    return sorted(unsorted, key=lambda point: float(point["x"]))


def _rounds(row: ComparedRow, measure: str) -> list[dict[str, Any]]:
    """The points of one row after each round."""
    scale = scale_of(measure)
    found = []
    for point in row["curves"][measure]:
        std = point["std"]
        along = {
            "x": point["round"],
            "mean": scale * point["mean"],
            "std": None if std is None else scale * std,
            "paper": _value(row, f"{measure}@{point['round']}", "paper"),
        }
        found.append(along)
    return found


# ---- a table's charts: dots and a scatter --------------------------------------------------------


def _dots(rows: Sequence[ComparedRow], measures: Sequence[str]) -> list[Chart]:
    """A row per row of the table and a chart per measure; a colour per length of fine-tuning."""
    # All rows of a study are fine-tuned for the same epochs.
    lengths = rows[0]["lengths"]
    labels = [row["label"] for row in rows]
    drawings = []
    for measure in measures:
        keys = [f"{measure}:{length}" for length in lengths]
        marks = []
        for i, key in enumerate(keys):
            name = f"fine-tuned {lengths[i]}" if len(lengths) > 1 else "ours"
            marks += _dot_marks(rows, key, name, i)
        title = title_of(measure)
        # Dots, unlike bars, are not read by their length: the axis need not begin at zero.
        drawings.append(draw_rows(title, labels, marks, title, from_zero=False))
    return drawings


def _dot_marks(rows: Sequence[ComparedRow], key: str, name: str, number: int) -> list[Marks]:
    """Ours as filled dots and, where it gives any, the paper's as hollow diamonds."""
    means = _column(rows, key, "mean")
    low: list[float | None] = []
    high: list[float | None] = []
    for mean, std in zip(means, _column(rows, key, "std"), strict=True):
        # One seed has no deviation.
        if mean is None or std is None:
            low.append(None)
            high.append(None)
        else:
            low.append(mean - std)
            high.append(mean + std)
    ours = Marks(name, means, number, kind="dot", low=low, high=high, lane=number)
    if not any(key in row["paper"] for row in rows):
        return [ours]
    paper = Marks(
        "paper" if name == "ours" else f"{name}, paper",
        _column(rows, key, "paper"),
        number,
        kind=REPORTED,
        lane=number,
        in_legend=False,
    )
    return [ours, paper]


def _across(row: ComparedRow, length: int) -> dict[str, tuple[str, str]]:
    """What accuracy is laid against, of what the study measures: a word for it and its axis."""
    # Bytes as shares of one row's where the study has these.
    cost = "share_paper" if "share_paper" in row["ours"] else "mib_paper"
    # A study without a paper's count has what was really sent.
    if cost not in row["ours"]:
        cost = "share"
    wanted = {
        f"accuracy_std:{length}": ("fairness", "std over clients, % (fairer to the left)"),
        cost: ("bytes", title_of(cost)),
    }
    return {key: words for key, words in wanted.items() if key in row["ours"]}


def _scatter(
    rows: Sequence[ComparedRow], length: int, across: Mapping[str, tuple[str, str]]
) -> list[Chart]:
    """Where methods differ: accuracy against its spread over clients, and against MiB."""
    accuracy = f"accuracy_mean:{length}"
    drawings = []
    for key, (what, title) in across.items():
        series = []
        for i, row in enumerate(rows):
            series += _scatter_series(row, key, accuracy, METHODS[i % len(METHODS)])
        drawings.append(
            draw_xy(f"accuracy against {what}", series, title, "accuracy %", height=330)
        )
    return drawings


def _scatter_series(row: ComparedRow, x: str, y: str, colour: int) -> list[Series]:
    """A method: ours filled, the paper's hollow, a thin line between."""
    label = row["label"]
    at = _value(row, x, "mean")
    mean = _value(row, y, "mean")
    if at is None:
        return []
    ours = Series(
        label,
        [at],
        [mean],
        colour,
        line=False,
        spread=[_value(row, y, "std")],
        spread_x=[_value(row, x, "std")],
        size=5,
    )
    reported_at = _value(row, x, "paper")
    reported = _value(row, y, "paper")
    if reported_at is None or reported is None:
        return [ours]
    between = Series(
        f"{label}, paper",
        [at, reported_at],
        [mean, reported],
        colour,
        dashed=True,
        marker="",
        in_legend=False,
        size=0,
    )
    paper = Series(
        f"{label}, paper",
        [reported_at],
        [reported],
        colour,
        line=False,
        marker=REPORTED,
        in_legend=False,
    )
    # Later series are drawn on top: our dot covers the beginning of the line.
    return [between, paper, ours]


# ---- a figure's lines ----------------------------------------------------------------------------


def _lines(rows: Sequence[ComparedRow], drawn: Sequence[str]) -> list[Chart]:
    """A line per series over x; where rows have no x, over the epochs of fine-tuning."""
    series: dict[str, list[ComparedRow]] = {}
    for row in rows:
        if row["x"] is None or len(row["lengths"]) == 1:
            series.setdefault(row["series"], []).append(row)
            continue
        # At one x there would be a point for each length of fine-tuning: one line for each.
        for length in row["lengths"]:
            name = f"{row['series']}, fine-tuned {length}"
            series.setdefault(name, []).append({**row, "lengths": [length]})
    several = len(series) > 1
    drawings = []
    for measure in drawn:
        lines: list[Series] = []
        for i, (name, members) in enumerate(series.items()):
            # The first colours are greys for plain methods; a line alone takes the strongest.
            colour = METHODS[i % len(METHODS)] if several else METHODS[-1]
            lines += _line_series(name, points(members, measure), colour)
        title = title_of(measure)
        # Rows of one figure share their panel, which says what x is.
        drawings.append(draw_xy(title, lines, rows[0]["panel"], title, height=310))
    return drawings


def _line_series(name: str, along: Sequence[Mapping[str, Any]], colour: int) -> list[Series]:
    """Ours as a line with whiskers and, where it gives any, the paper's as hollow diamonds."""
    x = [float(point["x"]) for point in along]
    # The whiskers of many points on many lines would hide the lines.
    is_dense = len(along) > MOST_WHISKERS
    ours = Series(
        name,
        x,
        [point["mean"] for point in along],
        colour,
        marker="" if is_dense else "dot",
        spread=[] if is_dense else [point["std"] for point in along],
    )
    reported = [point for point in along if point["paper"] is not None]
    if not reported:
        return [ours]
    paper = Series(
        f"{name}, paper",
        [float(point["x"]) for point in reported],
        [point["paper"] for point in reported],
        colour,
        line=False,
        marker=REPORTED,
        # The page says what diamonds are: a second entry for every line would fill the legend.
        in_legend=False,
    )
    return [ours, paper]


def _against(rows: Sequence[ComparedRow], measure: str) -> list[Chart]:
    """Accuracy against what is measured, on a logarithmic axis; a chart per length of fine-tuning.

    A series of several rows, as a method that sends more or less, is a line.
    """
    named: dict[str, list[ComparedRow]] = {}
    for row in rows:
        if _value(row, measure, "mean"):
            named.setdefault(row["series"], []).append(row)
    drawings = []
    for length in rows[0]["lengths"]:
        key = f"accuracy_mean:{length}"
        lines: list[Series] = []
        for i, (name, members) in enumerate(named.items()):
            along = []
            for row in members:
                point = {
                    "x": _value(row, measure, "mean"),
                    "mean": _value(row, key, "mean"),
                    "std": _value(row, key, "std"),
                    "paper": None,
                }
                along.append(point)
            along.sort(key=lambda point: float(point["x"] or 0))
            lines += _line_series(name, along, METHODS[i % len(METHODS)])
        title = f"fine-tuned {length}"
        drawings.append(
            draw_xy(title, lines, title_of(measure), "accuracy %", log_x=True, height=380)
        )
    return drawings


# ---- heat maps -----------------------------------------------------------------------------------


def _heat_maps(matrices: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Chart]]]:
    """The charts of each row of a study: its matrices, each with its own key."""
    of_rows: dict[str, list[Mapping[str, Any]]] = {}
    for matrix in matrices:
        title = f"{matrix['data']}: {matrix['panel']}, {matrix['label']}"
        of_rows.setdefault(title, []).append(matrix)
    for title, own in of_rows.items():
        drawings = []
        for matrix in own:
            labels = matrix["labels"]
            drawings.append(draw_heat_map(matrix["title"], matrix["values"], labels, labels))
        yield title, drawings
