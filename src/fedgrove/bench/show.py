"""The tables of ``fedgrove bench``, and the page of its wire part."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from ..errors import InputError
from ..report.tables import console, mib
from .wire import Row

PARTS = {
    "mask": "#4c78a8",
    "indices": "#72b7b2",
    "codebook": "#eeca3b",
    "values": "#f58518",
    "header": "#b279a2",
}
COLUMNS = ("bytes", "share of\ndense", "plain's\nshare", "to\nentropy", "with\nheader")
TURNS = {
    "median_s": ("median s", ".4f"),
    "min_s": ("min", ".4f"),
    "max_s": ("max", ".4f"),
    "times_plain": ("times plain", ".2f"),
}
ALONE = {
    "start_s": ("start s", ".1f"),
    "from_start_s": ("from start s", ".1f"),
    "times_plain_from_start": ("times plain", ".2f"),
    "memory_mib": ("peak MiB", ".0f"),
    "device_mib": ("on the device", ".0f"),
}
SPEEDS = ("encode\nMB/s", "× plain", "decode\nMB/s", "× plain", "tensor:\nencode", "decode")


def print_rows(rows: Sequence[Row], found: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print what the weights are, a line per row, and whether each claim holds."""
    out = console(file)
    for name, about in found["weights"].items():
        out.print(f"{name}: {about}")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for column in ("model", "density", "kept as"):
        table.add_column(column, no_wrap=True)
    for column in (*COLUMNS, *SPEEDS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    out.print(table)
    for name, claim in found["checks"].items():
        verdict = "holds" if claim["ok"] else "DOES NOT HOLD"
        out.print(
            f"{verdict}: {name} {claim['value']} (bound {claim['bound']}; worst at {claim['at']})"
        )


def print_times(rows: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print seconds per round of each variant, and how many times as fast as the plain loop it is."""
    turns = [row for row in rows if row.get("how") != "alone"]
    alone = [row for row in rows if row.get("how") == "alone"]
    if turns:
        _print_table(turns, TURNS, file)
    if alone:
        console(file).print(
            f"\neach in a process of its own, {alone[0]['rounds']} rounds from its start:"
        )
        _print_table(alone, TURNS | ALONE, file)


def _print_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], file: IO[str] | None
) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    several = len({row.get("scene") for row in rows}) > 1
    for column in (*(("scene",) if several else ()), "variant"):
        table.add_column(column, no_wrap=True)
    shown = {key: how for key, how in columns.items() if any(row[key] is not None for row in rows)}
    for title, _ in shown.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        numbers = (
            "-" if row[key] is None else format(row[key], how) for key, (_, how) in shown.items()
        )
        table.add_row(*((row["scene"],) if several else ()), row["variant"], *numbers)
    console(file).print(table)


def _cells(row: Row) -> list[str]:
    whole, one = row.model_speed, row.tensor_speed
    ratios = ["-" if r is None else f"{r:.4f}" for r in (row.ratio, row.ratio_header)]
    return [
        *(row.model, f"{row.density:g}", row.kind),
        *(mib(row.bytes), f"{row.share:.4f}", f"{row.plain_share:.4f}", *ratios),
        *(
            f"{whole.encode_mb:.0f}",
            f"{whole.encode:.2f}",
            f"{whole.decode_mb:.0f}",
            f"{whole.decode:.2f}",
        ),
        *(f"{one.encode:.2f}", f"{one.decode:.2f}"),
    ]


# --- the page ------------------------------------------------------------------------------------------------------


def need_plotly(path: Path) -> None:
    """Refuse before anything is measured if the page cannot be written."""
    if find_spec("plotly") is None:
        raise InputError(
            "--plot was given and plotly is not installed; get it with: pip install 'fedgrove[report]'"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"--plot is '{path}', and there is no folder '{path.parent}'; make it or name another file."
        )


def write_page(rows: Sequence[Row], found: Mapping[str, Any], path: Path) -> None:
    """A page that needs nothing but itself: bytes by part beside the bound and the plain way, and speeds."""
    models = list(dict.fromkeys(row.model for row in rows))
    subplots: Any = importlib.import_module("plotly.subplots")
    titles = [
        f"{model}: {what}"
        for what in ("share of dense float32", "speed, × plain")
        for model in models
    ]
    figure = subplots.make_subplots(
        rows=2, cols=len(models), subplot_titles=titles, vertical_spacing=0.22
    )
    for column, model in enumerate(models, start=1):
        some = [row for row in rows if row.model == model]
        for trace in _bars(some, first=column == 1):
            figure.add_trace(trace, row=1, col=column)
        for trace in _speeds(some, first=column == 1):
            figure.add_trace(trace, row=2, col=column)
    for height, what in ((0.5, "encode, at least"), (0.2, "decode, at least")):
        figure.add_hline(
            y=height, line_dash="dot", line_color="#888", annotation_text=what, row=2, col="all"
        )
    about = "<br>".join(f"{name}: {text}" for name, text in found["weights"].items())
    figure.update_layout(
        title={"text": f"fedgrove bench wire<br><sup>{about}</sup>", "y": 0.97},
        barmode="stack",
        template="plotly_white",
        height=900,
        margin={"t": 130},
        legend={"traceorder": "normal"},
    )
    figure.update_xaxes(type="multicategory")
    figure.update_yaxes(rangemode="tozero")
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))


def _places(rows: Sequence[Row]) -> list[list[str]]:
    return [[f"density {row.density:g}" for row in rows], [row.kind for row in rows]]


def _bars(rows: Sequence[Row], first: bool) -> list[Any]:
    draw: Any = importlib.import_module("plotly.graph_objects")
    dense = [4 * row.params for row in rows]
    traces = [
        draw.Bar(
            x=_places(rows),
            y=[row.parts[part] / n for row, n in zip(rows, dense, strict=True)],
            name=part,
            marker_color=colour,
            legendgroup=part,
            showlegend=first,
        )
        for part, colour in PARTS.items()
    ]
    marks = {
        "entropy": (
            [sum(row.bound.values()) / n for row, n in zip(rows, dense, strict=True)],
            "line-ew-open",
            "black",
        ),
        "plain": ([row.plain_share for row in rows], "x-thin-open", "#d62728"),
    }
    return traces + [
        _dots(rows, y, name, symbol, colour, first) for name, (y, symbol, colour) in marks.items()
    ]


def _speeds(rows: Sequence[Row], first: bool) -> list[Any]:
    marks = {
        "encode": ([row.model_speed.encode for row in rows], "triangle-up", "#e45756"),
        "decode": ([row.model_speed.decode for row in rows], "triangle-down", "#54a24b"),
    }
    return [
        _dots(rows, y, name, symbol, colour, first) for name, (y, symbol, colour) in marks.items()
    ]


def _dots(
    rows: Sequence[Row], y: list[float], name: str, symbol: str, colour: str, first: bool
) -> Any:
    draw: Any = importlib.import_module("plotly.graph_objects")
    marker = {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}}
    return draw.Scatter(
        x=_places(rows),
        y=y,
        name=name,
        mode="markers",
        marker=marker,
        legendgroup=name,
        showlegend=first,
    )
