"""The page of ``fedgrove paper``: what was measured beside what is reported; it needs nothing but itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .paper import SPREAD, TITLES, Found, layout, marks, place, tests, titled

LENGTHS = ("#f58518", "#4c78a8", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2")
"""One colour per length of fine-tuning."""
METHODS = (
    "#9d9d9d",
    "#5b5b5b",
    "#72b7b2",
    "#4c78a8",
    "#eeca3b",
    "#b279a2",
    "#54a24b",
    "#e45756",
    "#f58518",
)
PAPER = "diamond-open"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem }
.quick { background: #b00020; color: #fff; padding: .1rem .6rem; border-radius: .3rem; font-weight: 600 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4 }
th:first-child, td:first-child { text-align: left } th { border-bottom: 2px solid #888 }
small, li { color: #555 }
"""


def can_draw() -> bool:
    """Whether plotly is there."""
    return find_spec("plotly") is not None


def write_page(found: Found, cited: str, path: Path) -> None:
    """Pictures, tables, tests and notes in one file."""
    head, sections = layout(found)
    body = [f"<h1>{escape(found['title'])}</h1>"]
    if found["quick"]:
        body.append('<p><span class="quick">QUICK: a look, not a measurement</span></p>')
    body.append(f"<p>{escape(found['about'])}<br><small>{escape(cited)}. {_who(found)}</small></p>")
    for i, (title, figure) in enumerate(_pictures(found)):
        body.append(f"<h2>{escape(title)}</h2>")
        body.append(
            figure.to_html(
                full_html=False, include_plotlyjs=i == 0, config={"displayModeBar": False}
            )
        )
    for title, rows in sections:
        body.append(f"<h2>{escape(title)}</h2>{_html(head, rows)}")
    body.append(f"<p><small>{escape(SPREAD + marks(found))}</small></p>")
    if found["paired"]:
        said = "points of accuracy, two-sided p of a paired t-test, not corrected for several pairs"
        body.append(f"<h2>Paired by seed: {said}</h2>{_html(*tests(found))}")
    body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in found["notes"]) + "</ul>")
    head_html = (
        f'<meta charset="utf-8"><title>{escape(titled(found))}</title><style>{STYLE}</style>'
    )
    path.write_text(
        f"<!doctype html><html lang=en><head>{head_html}</head><body>{''.join(body)}</body></html>\n"
    )


def _who(found: Found) -> str:
    seeds = sorted({len(row["seeds"]) for row in found["rows"]})
    several = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    return f"Filled: ours, whiskers one standard deviation over seeds ({several}). Hollow diamonds: the paper."


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return f"<div class=scroll><table>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table></div>"


# ---- pictures ------------------------------------------------------------------------------------------------------


def _grouped(found: Found) -> dict[str, list[Found]]:
    """Rows that were measured, by data and panel."""
    sections: dict[str, list[Found]] = {}
    for row in found["rows"]:
        if row["seeds"]:
            sections.setdefault(place(row), []).append(row)
    return sections


def _value(row: Found, key: str, what: str) -> float | None:
    """``mean`` or ``std`` of ours, or ``paper``; accuracies in %."""
    value = row["paper"].get(key) if what == "paper" else row["ours"].get(key, {}).get(what)
    scale = 100 if key.startswith("accuracy") else 1
    return None if value is None else scale * value


def _column(rows: Sequence[Found], key: str, what: str) -> list[float | None]:
    return [_value(row, key, what) for row in rows]


def _whiskers(rows: Sequence[Found], key: str) -> dict[str, Any]:
    return {"array": [v or 0 for v in _column(rows, key, "std")], "thickness": 1.2, "width": 3}


def _pictures(found: Found) -> Iterator[tuple[str, Any]]:
    """Each with its title, data by data."""
    for title, rows in _grouped(found).items():
        if found["lines"]:
            yield title, _lines(rows, found["drawn"])
            continue
        yield title, _dots(rows, found["measures"])
        if any(row["lead"] for row in rows):
            n = middle(rows[0]["lengths"])
            yield f"{title}: accuracy against fairness and bytes, fine-tuned {n}", _scatter(rows, n)


def middle(lengths: Sequence[int]) -> int:
    """The length of fine-tuning at which methods are laid against each other: none hides least, many hide all."""
    return lengths[1] if len(lengths) > 2 else lengths[-1]


def _dots(rows: Sequence[Found], measures: Sequence[str]) -> Any:
    """A line per row and a panel per measure; a colour per length of fine-tuning."""
    draw, subplots = _plotly()
    titles, lengths = [TITLES[m] for m in measures], rows[0]["lengths"]
    figure = subplots.make_subplots(
        cols=len(measures), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles
    )
    for column, measure in enumerate(measures, start=1):
        for i, n in enumerate(lengths):
            name = f"fine-tuned {n}" if len(lengths) > 1 else "ours"
            for trace in _pair(draw, rows, f"{measure}:{n}", name, LENGTHS[i % 7], column == 1):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(
            range=span(rows, [f"{measure}:{n}" for n in lengths]), row=1, col=column
        )
    figure.update_yaxes(autorange="reversed", automargin=True)
    # Room for each length on a line of its own, so that whiskers do not hide each other.
    height = 150 + len(rows) * (16 + 12 * len(lengths))
    return _laid_out(figure, height, scattermode="group", scattergap=0.35)


def span(rows: Sequence[Found], keys: Sequence[str]) -> list[float]:
    """The range of an axis: all values with their whiskers, and a little room. Dots need no zero."""
    ends = []
    for key in keys:
        for row in rows:
            mean, std, paper = (_value(row, key, what) for what in ("mean", "std", "paper"))
            ends += [v for v in (paper, mean) if v is not None]
            ends += [mean - std, mean + std] if mean is not None and std is not None else []
    room = 0.05 * (max(ends) - min(ends)) or 1.0
    return [min(ends) - room, max(ends) + room]


def _pair(
    draw: Any, rows: Sequence[Found], key: str, name: str, colour: str, legend: bool
) -> list[Any]:
    labels = [row["label"] for row in rows]
    shared = {
        "y": labels,
        "mode": "markers",
        "legendgroup": name,
        "offsetgroup": name,
        "orientation": "h",
    }
    ours = draw.Scatter(
        **shared,
        x=_column(rows, key, "mean"),
        error_x=_whiskers(rows, key),
        marker={"color": colour, "size": 9},
        name=name,
        showlegend=legend,
    )
    if not any(key in row["paper"] for row in rows):
        return [ours]
    paper = {"color": colour, "size": 11, "symbol": PAPER, "line": {"width": 2}}
    told = "paper" if name == "ours" else f"{name}, paper"
    x = _column(rows, key, "paper")
    return [ours, draw.Scatter(**shared, x=x, marker=paper, name=told, showlegend=legend)]


def _scatter(rows: Sequence[Found], n: int) -> Any:
    """Where methods differ: accuracy against its spread over clients, and against MiB."""
    draw, subplots = _plotly()
    across = {
        f"accuracy_std:{n}": "std over clients, % (fairer to the left)",
        "mib_paper": "MiB counted",
    }
    figure = subplots.make_subplots(cols=len(across), shared_yaxes=True, horizontal_spacing=0.04)
    for column, (key, name) in enumerate(across.items(), start=1):
        for i, row in enumerate(rows):
            for trace in _points(draw, row, key, f"accuracy_mean:{n}", METHODS[i % 9], column == 1):
                figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title=name, row=1, col=column)
    figure.update_yaxes(title="accuracy %", row=1, col=1)
    return _laid_out(figure, 470)


def _points(draw: Any, row: Found, x: str, y: str, colour: str, legend: bool) -> list[Any]:
    """A method: ours filled, the paper's hollow, a thin line between."""
    label = row["label"]
    ours = draw.Scatter(
        **{
            "x": _column([row], x, "mean"),
            "y": _column([row], y, "mean"),
            "name": label,
            "legendgroup": label,
        },
        **{"mode": "markers", "showlegend": legend, "marker": {"color": colour, "size": 12}},
        error_x=_whiskers([row], x),
        error_y=_whiskers([row], y),
    )
    if x not in row["paper"] or y not in row["paper"]:
        return [ours]
    between = draw.Scatter(
        x=[_value(row, x, "mean"), _value(row, x, "paper")],
        y=[_value(row, y, "mean"), _value(row, y, "paper")],
        **{
            "mode": "lines+markers",
            "legendgroup": label,
            "showlegend": False,
            "name": f"{label}, paper",
        },
        line={"color": colour, "width": 1, "dash": "dot"},
        marker={
            "color": colour,
            "symbol": ["circle", PAPER],
            "size": [1, 13],
            "line": {"width": 2},
        },
    )
    return [between, ours]


def _lines(rows: Sequence[Found], drawn: Sequence[str]) -> Any:
    """A line per series over x; where rows have no x, over the epochs of fine-tuning."""
    draw, subplots = _plotly()
    series: dict[str, list[Found]] = {}
    for row in rows:
        series.setdefault(row["series"], []).append(row)
    figure = subplots.make_subplots(cols=len(drawn), horizontal_spacing=0.08)
    for column, measure in enumerate(drawn, start=1):
        for i, (name, some) in enumerate(series.items()):
            colour = METHODS[-1] if len(series) == 1 else METHODS[i % 9]
            for trace in _curve(
                draw, name, points(some, measure), colour, column == 1 and len(series) > 1
            ):
                figure.add_trace(trace, row=1, col=column)
        figure.update_yaxes(title=TITLES[measure], row=1, col=column)
        figure.update_xaxes(title=rows[0]["panel"], row=1, col=column)
    return _laid_out(figure, 470 if len(series) > 1 else 360)


def points(rows: Sequence[Found], measure: str) -> list[dict[str, Any]]:
    """The points of one series, by x: ours, its deviation, and the paper's where it says one."""
    found = []
    for row in rows:
        for n in row["lengths"]:
            key = measure if measure in row["ours"] else f"{measure}:{n}"
            values = {what: _value(row, key, what) for what in ("mean", "std", "paper")}
            found.append({"x": n if row["x"] is None else row["x"], **values})
    return sorted(found, key=lambda point: float(point["x"]))


def _curve(
    draw: Any, name: str, some: Sequence[Mapping[str, Any]], colour: str, legend: bool
) -> list[Any]:
    ours = draw.Scatter(
        **{
            "x": [p["x"] for p in some],
            "y": [p["mean"] for p in some],
            "name": name,
            "legendgroup": name,
        },
        **{"mode": "lines+markers", "line": {"color": colour, "width": 2}, "showlegend": legend},
        error_y={"array": [p["std"] or 0 for p in some], "thickness": 1, "width": 3},
    )
    told = [p for p in some if p["paper"] is not None]
    if not told:
        return [ours]
    marker = {"color": colour, "symbol": PAPER, "size": 13, "line": {"width": 2}}
    x, y = ([p[key] for p in told] for key in ("x", "paper"))
    return [
        ours,
        draw.Scatter(
            x=x, y=y, mode="markers", marker=marker, name=f"{name}, paper", legendgroup=name
        ),
    ]


def _laid_out(figure: Any, height: int, **more: Any) -> Any:
    legend = {"orientation": "h", "y": -0.16 if height > 300 else -0.3, "yanchor": "top"}
    figure.update_layout(
        template="plotly_white", height=height, margin={"t": 40, "r": 20}, legend=legend, **more
    )
    return figure


def _plotly() -> tuple[Any, Any]:
    return importlib.import_module("plotly.graph_objects"), importlib.import_module(
        "plotly.subplots"
    )
