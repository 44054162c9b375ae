"""The page of ``fedgrove paper``: measured beside reported, in figures and in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.page import Page
from .beside import (
    QUICK,
    SPREAD,
    ComparedRow,
    Comparison,
    layout,
    marks,
    paired_tests,
    place,
    scale_of,
    title_of,
)

LENGTHS = ("#f58518", "#4c78a8", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2")
"""One colour per length of fine-tuning."""
METHODS = (
    "#9d9d9d",
    "#5b5b5b",
    "#72b7b2",
    "#4c78a8",
    "#eeca3b",
    "#b279a2",
    "#9d755d",
    "#ff9da6",
    "#54a24b",
    "#e45756",
    "#f58518",
)
"""One colour per method or series: greys for the plain ones, which come first."""
MOST_WHISKERS = 12
"""A line of more points is drawn without markers and whiskers."""
REPORTED = "diamond-open"
"""The symbol of what a paper reports."""


def write_page(comparison: Comparison, cited: str, path: Path) -> None:
    """Write figures, tables, tests and notes as one file."""
    page = Page(comparison["title"], warning=QUICK if comparison["quick"] else "")
    page.paragraph(comparison["about"], small=f"{cited}. {_legend(comparison)}")
    for title, figure in _figures(comparison):
        page.heading(title)
        page.figure(figure)
    for title, figure in _heat_maps(comparison["matrices"]):
        page.heading(title)
        page.figure(figure)
    head, sections = layout(comparison)
    for title, lines in sections:
        page.heading(title)
        page.table(head, lines)
    page.paragraph(small=SPREAD + marks(comparison))
    if comparison["paired"]:
        page.heading(
            "Paired by seed: points of accuracy, two-sided p of a paired t-test, "
            "not corrected for several pairs"
        )
        head, lines = paired_tests(comparison)
        page.table(head, lines)
    page.notes(comparison["notes"])
    page.write(path)


def _legend(comparison: Comparison) -> str:
    """How to read the figures."""
    finished = [len(row["seeds"]) for row in comparison["rows"]]
    seeds = str(min(finished))
    if max(finished) > min(finished):
        seeds = f"{min(finished)} to {max(finished)}"
    return (
        f"Filled: ours, whiskers one standard deviation over seeds ({seeds}). "
        "Hollow diamonds: the paper."
    )


def _figures(comparison: Comparison) -> Iterator[tuple[str, Any]]:
    """Each figure with its title, by data and panel."""
    sections: dict[str, list[ComparedRow]] = {}
    for row in comparison["rows"]:
        # A row without a finished run has nothing to draw; the table still lists it.
        if row["seeds"]:
            sections.setdefault(place(row), []).append(row)
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


def _whiskers(rows: Sequence[ComparedRow], key: str) -> dict[str, Any]:
    # One seed has no deviation; plotly wants a number for each point all the same.
    lengths = [std or 0 for std in _column(rows, key, "std")]
    return {"array": lengths, "thickness": 1.2, "width": 3}


def middle(lengths: Sequence[int]) -> int:
    """The length of fine-tuning at which methods are laid against each other.

    Fine-tuning hides how methods differ: none of it hides least, many epochs hide nearly all. So
    the second of three or more lengths, else the last.
    """
    return lengths[1] if len(lengths) > 2 else lengths[-1]


def span(rows: Sequence[ComparedRow], keys: Sequence[str]) -> list[float]:
    """The range of an axis: all values with their whiskers, and a little room.

    It need not begin at zero: dots, unlike bars, are not read by their length.
    """
    ends: list[float] = []
    for key in keys:
        for row in rows:
            mean = _value(row, key, "mean")
            std = _value(row, key, "std")
            paper = _value(row, key, "paper")
            if paper is not None:
                ends.append(paper)
            if mean is not None:
                ends.append(mean)
            if mean is not None and std is not None:
                ends += [mean - std, mean + std]
    # Where all values are one, any room will do but none.
    room = 0.05 * (max(ends) - min(ends)) or 1.0
    return [min(ends) - room, max(ends) + room]


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


# ---- a table's figures: dots and a scatter -------------------------------------------------------


def _dots(rows: Sequence[ComparedRow], measures: Sequence[str]) -> Any:
    """A line per row and a panel per measure; a colour per length of fine-tuning."""
    from plotly.subplots import make_subplots

    # The rows of a study are all fine-tuned alike.
    lengths = rows[0]["lengths"]
    figure = make_subplots(
        cols=len(measures),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[title_of(measure) for measure in measures],
    )
    for column, measure in enumerate(measures, start=1):
        keys = [f"{measure}:{length}" for length in lengths]
        # Panels share one legend, which the first one fills.
        in_legend = column == 1
        for i, key in enumerate(keys):
            name = f"fine-tuned {lengths[i]}" if len(lengths) > 1 else "ours"
            colour = LENGTHS[i % len(LENGTHS)]
            for trace in _dot_traces(rows, key, name, colour, in_legend):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(range=span(rows, keys), row=1, col=column)
    # The first row on top, as in the table.
    figure.update_yaxes(autorange="reversed", automargin=True)
    # Room for each length on a line of its own, so that whiskers do not hide each other.
    height = 150 + len(rows) * (16 + 12 * len(lengths))
    _lay_out(figure, height)
    figure.update_layout(scattermode="group", scattergap=0.35)
    return figure


def _dot_traces(
    rows: Sequence[ComparedRow], key: str, name: str, colour: str, in_legend: bool
) -> list[Any]:
    """Ours as filled dots and, where it gives any, the paper's as hollow diamonds."""
    import plotly.graph_objects as go

    # The offset group keeps ours and the paper's of one length on one line, apart from the others.
    shared = {
        "y": [row["label"] for row in rows],
        "mode": "markers",
        "legendgroup": name,
        "offsetgroup": name,
        "orientation": "h",
        "showlegend": in_legend,
    }
    ours = go.Scatter(
        x=_column(rows, key, "mean"),
        error_x=_whiskers(rows, key),
        marker={"color": colour, "size": 9},
        name=name,
        **shared,
    )
    if not any(key in row["paper"] for row in rows):
        return [ours]
    paper = go.Scatter(
        x=_column(rows, key, "paper"),
        marker={"color": colour, "size": 11, "symbol": REPORTED, "line": {"width": 2}},
        name="paper" if name == "ours" else f"{name}, paper",
        **shared,
    )
    return [ours, paper]


def _across(row: ComparedRow, length: int) -> dict[str, tuple[str, str]]:
    """What accuracy is laid against, of what the study measures: a word for it and its axis."""
    # Bytes as shares of one row's where the study has these.
    cost = "share_paper" if "share_paper" in row["ours"] else "mib_paper"
    # A study that has no paper's count beside it has what was really sent.
    if cost not in row["ours"]:
        cost = "share"
    wanted = {
        f"accuracy_std:{length}": ("fairness", "std over clients, % (fairer to the left)"),
        cost: ("bytes", title_of(cost)),
    }
    return {key: words for key, words in wanted.items() if key in row["ours"]}


def _scatter(
    rows: Sequence[ComparedRow], length: int, across: Mapping[str, tuple[str, str]]
) -> Any:
    """Where methods differ: accuracy against its spread over clients, and against MiB."""
    from plotly.subplots import make_subplots

    accuracy = f"accuracy_mean:{length}"
    figure = make_subplots(cols=len(across), shared_yaxes=True, horizontal_spacing=0.04)
    for column, (key, (_, title)) in enumerate(across.items(), start=1):
        in_legend = column == 1
        for i, row in enumerate(rows):
            colour = METHODS[i % len(METHODS)]
            for trace in _scatter_traces(row, key, accuracy, colour, in_legend):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title=title, row=1, col=column)
    figure.update_yaxes(title="accuracy %", row=1, col=1)
    _lay_out(figure, height=470)
    return figure


def _scatter_traces(row: ComparedRow, x: str, y: str, colour: str, in_legend: bool) -> list[Any]:
    """A method: ours filled, the paper's hollow, a thin line between."""
    import plotly.graph_objects as go

    label = row["label"]
    ours = go.Scatter(
        x=_column([row], x, "mean"),
        y=_column([row], y, "mean"),
        error_x=_whiskers([row], x),
        error_y=_whiskers([row], y),
        mode="markers",
        marker={"color": colour, "size": 12},
        name=label,
        legendgroup=label,
        showlegend=in_legend,
    )
    if x not in row["paper"] or y not in row["paper"]:
        return [ours]
    # The line's end at ours has a marker of size 1, so that only the paper's shows.
    marker = {
        "color": colour,
        "symbol": ["circle", REPORTED],
        "size": [1, 13],
        "line": {"width": 2},
    }
    between = go.Scatter(
        x=[_value(row, x, "mean"), _value(row, x, "paper")],
        y=[_value(row, y, "mean"), _value(row, y, "paper")],
        mode="lines+markers",
        line={"color": colour, "width": 1, "dash": "dot"},
        marker=marker,
        name=f"{label}, paper",
        legendgroup=label,
        showlegend=False,
    )
    # Later traces are drawn on top: our dot covers the beginning of the line.
    return [between, ours]


# ---- a figure's lines ----------------------------------------------------------------------------


def _lines(rows: Sequence[ComparedRow], drawn: Sequence[str]) -> Any:
    """A line per series over x; where rows have no x, over the epochs of fine-tuning."""
    from plotly.subplots import make_subplots

    series: dict[str, list[ComparedRow]] = {}
    for row in rows:
        if row["x"] is None or len(row["lengths"]) == 1:
            series.setdefault(row["series"], []).append(row)
            continue
        # At one x there would be a point for each length of fine-tuning: a line of its own each.
        for length in row["lengths"]:
            name = f"{row['series']}, fine-tuned {length}"
            series.setdefault(name, []).append({**row, "lengths": [length]})
    several = len(series) > 1
    figure = make_subplots(cols=len(drawn), horizontal_spacing=0.08)
    for column, measure in enumerate(drawn, start=1):
        # A single line needs no legend: the title says what it is.
        in_legend = column == 1 and several
        for i, (name, members) in enumerate(series.items()):
            # The first colours are greys for plain methods; a line alone takes the strongest.
            colour = METHODS[i % len(METHODS)] if several else METHODS[-1]
            for trace in _line_traces(name, points(members, measure), colour, in_legend):
                figure.add_trace(trace, row=1, col=column)
        figure.update_yaxes(title=title_of(measure), row=1, col=column)
        # Rows of one figure share their panel, which says what x is.
        figure.update_xaxes(title=rows[0]["panel"], row=1, col=column)
    # Room for a legend of many lines.
    _lay_out(figure, height=430 + 10 * len(series) if several else 360)
    return figure


def _line_traces(
    name: str, along: Sequence[Mapping[str, Any]], colour: str, in_legend: bool
) -> list[Any]:
    """Ours as a line with whiskers and, where it gives any, the paper's as hollow diamonds."""
    import plotly.graph_objects as go

    x = []
    means = []
    whiskers = []
    reported_x = []
    reported = []
    for point in along:
        x.append(point["x"])
        means.append(point["mean"])
        # As in _whiskers: a number for each point, also where one seed has no deviation.
        whiskers.append(point["std"] or 0)
        if point["paper"] is not None:
            reported_x.append(point["x"])
            reported.append(point["paper"])
    # The whiskers of many points on many lines would hide the lines.
    is_dense = len(along) > MOST_WHISKERS
    ours = go.Scatter(
        x=x,
        y=means,
        error_y={"array": whiskers, "thickness": 1, "width": 3, "visible": not is_dense},
        mode="lines" if is_dense else "lines+markers",
        line={"color": colour, "width": 2},
        name=name,
        legendgroup=name,
        showlegend=in_legend,
    )
    if not reported:
        return [ours]
    paper = go.Scatter(
        x=reported_x,
        y=reported,
        mode="markers",
        marker={"color": colour, "symbol": REPORTED, "size": 13, "line": {"width": 2}},
        name=f"{name}, paper",
        legendgroup=name,
        # The page says what diamonds are: a second entry for every line would fill the legend.
        showlegend=False,
    )
    return [ours, paper]


def _against(rows: Sequence[ComparedRow], measure: str) -> Any:
    """Accuracy against what is measured, on a logarithmic axis; a panel per length of fine-tuning.

    A series of several rows, as a method that sends more or less, is a line.
    """
    from plotly.subplots import make_subplots

    series: dict[str, list[ComparedRow]] = {}
    for row in rows:
        if _value(row, measure, "mean"):
            series.setdefault(row["series"], []).append(row)
    lengths = rows[0]["lengths"]
    figure = make_subplots(
        cols=len(lengths),
        horizontal_spacing=0.06,
        subplot_titles=[f"fine-tuned {length}" for length in lengths],
    )
    for column, length in enumerate(lengths, start=1):
        for i, (name, members) in enumerate(series.items()):
            along = []
            for row in members:
                key = f"accuracy_mean:{length}"
                point = {
                    "x": _value(row, measure, "mean"),
                    "mean": _value(row, key, "mean"),
                    "std": _value(row, key, "std"),
                    "paper": None,
                }
                along.append(point)
            along.sort(key=lambda point: float(point["x"] or 0))
            colour = METHODS[i % len(METHODS)]
            for trace in _line_traces(name, along, colour, in_legend=column == 1):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title=title_of(measure), type="log", row=1, col=column)
    figure.update_yaxes(title="accuracy %", row=1, col=1)
    _lay_out(figure, height=480)
    return figure


# ---- heat maps -----------------------------------------------------------------------------------

MAPS_A_LINE = 2
"""Heat maps side by side."""


def _heat_maps(matrices: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A figure for each row of a study: its matrices, each with colours of its own."""
    # A page without any needs no plotly.
    if not matrices:
        return
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    of_rows: dict[str, list[Mapping[str, Any]]] = {}
    for matrix in matrices:
        title = f"{matrix['data']}: {matrix['panel']}, {matrix['label']}"
        of_rows.setdefault(title, []).append(matrix)
    for title, own in of_rows.items():
        lines = -(-len(own) // MAPS_A_LINE)
        figure = make_subplots(
            rows=lines,
            cols=MAPS_A_LINE,
            horizontal_spacing=0.16,
            vertical_spacing=0.14,
            subplot_titles=[matrix["title"] for matrix in own],
        )
        for i, matrix in enumerate(own):
            line, column = divmod(i, MAPS_A_LINE)
            # A bar of colours beside each: metrics have different ranges.
            bar = {
                "x": 0.43 if column == 0 else 1.0,
                "y": 1 - (line + 0.5) / lines,
                "len": 0.8 / lines,
                "thickness": 12,
            }
            heat = go.Heatmap(
                z=matrix["values"],
                x=matrix["labels"],
                y=matrix["labels"],
                colorscale="Viridis",
                colorbar=bar,
            )
            figure.add_trace(heat, row=line + 1, col=column + 1)
        # Rows are named, in letters as large as so many leave room for; columns are the same.
        size = max(7, min(11, 300 // len(own[0]["labels"])))
        figure.update_yaxes(autorange="reversed", tickfont={"size": size}, tickmode="linear")
        figure.update_xaxes(showticklabels=False)
        _lay_out(figure, height=420 * lines)
        yield title, figure


def _lay_out(figure: Any, height: int) -> None:
    # The legend's y is a share of the height: a low figure needs more of it to clear the axis.
    below = -0.16 if height > 300 else -0.3
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"t": 40, "r": 20},
        legend={"orientation": "h", "y": below, "yanchor": "top"},
    )
