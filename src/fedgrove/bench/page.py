"""The page of ``fedgrove bench engine``: bars of speed beside the plain loop, and of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..report.page import Page

Rows = Sequence[Mapping[str, Any]]

PER_ROUND = ("median_s", "min_s", "max_s", "times_plain")
"""Keys of a row: seconds per round, the fastest and slowest, and times the plain loop."""
FROM_START = ("from_start_s", "from_start_min_s", "from_start_max_s", "times_plain_from_start")
"""The same of all rounds together, the start of the process included."""


class Kind(NamedTuple):
    """What a bar of speed shows: which rows it takes, and which of their keys."""

    name: str
    colour: str
    how: str
    keys: tuple[str, str, str, str]


KINDS = (
    Kind("in turns, in one process", "#4c78a8", "turns", PER_ROUND),
    Kind("steady, in a process of its own", "#72b7b2", "alone", PER_ROUND),
    Kind("from process start", "#f58518", "alone", FROM_START),
)
"""From the top of a group of bars to its bottom."""
MEMORY = {"memory_mib": ("memory", "#b279a2"), "device_mib": ("on the device", "#54a24b")}
"""Name and colour of the bars of memory, by the key of a row."""


def write_times(rows: Rows, path: Path) -> None:
    """Write a page with a line of panels per scene."""
    page = Page("fedgrove bench engine")
    about = (
        "Bars are medians, whiskers the fastest and the slowest of all repeats. "
        "The dotted line is the plain loop."
    )
    from_start = ""
    alone = [row for row in rows if row["how"] == "alone"]
    if alone:
        from_start = (
            f"From process start: imports, start-up and {alone[0]['rounds']} rounds. "
            "Memory of all processes together."
        )
    page.paragraph(about, small=from_start)
    page.figure(_panels(rows))
    page.write(path)


def spans(
    rows: Rows, median: str, least: str, most: str, times: str
) -> tuple[list[float], list[float]]:
    """How far the fastest and the slowest repeat lie from the median, in times the plain loop.

    >>> row = {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "times_plain": 3.0}
    >>> spans([row], "median_s", "min_s", "max_s", "times_plain")
    ([3.0], [1.5])
    """
    up = []
    down = []
    for row in rows:
        # A speed is the inverse of a time: the least seconds end the whisker to the right.
        up.append(row[times] * (row[median] / row[least] - 1))
        down.append(row[times] * (1 - row[median] / row[most]))
    return up, down


def _panels(rows: Rows) -> Any:
    """Speeds of each scene and, where any was measured, its memory beside them."""
    from plotly.subplots import make_subplots

    scenes: dict[str, list[Mapping[str, Any]]] = {}
    has_memory = False
    for row in rows:
        scenes.setdefault(row["scene"], []).append(row)
        if row.get("memory_mib") or row.get("device_mib"):
            has_memory = True
    titles = []
    for scene in scenes:
        titles.append(f"{scene}: times as fast as the plain loop")
        if has_memory:
            titles.append(f"{scene}: peak MiB")
    figure = make_subplots(
        rows=len(scenes),
        cols=2 if has_memory else 1,
        column_widths=[0.68, 0.32] if has_memory else None,
        subplot_titles=titles,
        shared_yaxes=True,
        horizontal_spacing=0.06,
        # A share of the whole height: the more scenes, the smaller.
        vertical_spacing=0.3 / len(scenes),
    )
    variants = 0
    for line, in_scene in enumerate(scenes.values(), start=1):
        variants += len({row["variant"] for row in in_scene})
        # Scenes share one legend, which the first one fills.
        in_legend = line == 1
        for bar in _speeds(in_scene, in_legend):
            figure.add_trace(bar, row=line, col=1)
        figure.add_vline(x=1, line_dash="dot", line_color="#888", row=line, col=1)
        if has_memory:
            for bar in _memory(in_scene, in_legend):
                figure.add_trace(bar, row=line, col=2)
    figure.update_layout(
        barmode="group",
        bargap=0.25,
        template="plotly_white",
        height=180 + 78 * variants,
        margin={"t": 40, "l": 20, "r": 30},
        legend={"orientation": "h", "x": 0, "y": -0.08},
    )
    # The first variant on top, as in the printed table.
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(rangemode="tozero")
    return figure


def _speeds(rows: Rows, in_legend: bool) -> list[Any]:
    """The bars of times the plain loop, a set for each kind."""
    import plotly.graph_objects as go

    bars = []
    for kind in KINDS:
        measured = [row for row in rows if row["how"] == kind.how]
        median, least, most, times = kind.keys
        up, down = spans(measured, median, least, most, times)
        speeds = []
        variants = []
        texts = []
        seconds = []
        for row in measured:
            speeds.append(row[times])
            variants.append(row["variant"])
            texts.append(f"{row[times]:.2f}×")
            seconds.append(f"median {row[median]:.3g} s, {row[least]:.3g} to {row[most]:.3g}")
        whiskers = {
            "array": up,
            "arrayminus": down,
            "color": "#555",
            "thickness": 1.2,
            "width": 3,
        }
        bar = go.Bar(
            orientation="h",
            x=speeds,
            y=variants,
            error_x=whiskers,
            marker_color=kind.colour,
            text=texts,
            textposition="inside",
            insidetextanchor="start",
            customdata=seconds,
            hovertemplate="%{y}: %{x:.2f}×<br>%{customdata}",
            name=kind.name,
            legendgroup=kind.name,
            showlegend=in_legend and bool(measured),
        )
        bars.append(bar)
    return bars


def _memory(rows: Rows, in_legend: bool) -> list[Any]:
    """The bars of peak memory, in MiB."""
    import plotly.graph_objects as go

    bars = []
    for key, (name, colour) in MEMORY.items():
        amounts = []
        variants = []
        texts = []
        for row in rows:
            # None where it was not measured.
            if row.get(key):
                amounts.append(row[key])
                variants.append(row["variant"])
                texts.append(f"{row[key]:.0f}")
        bar = go.Bar(
            orientation="h",
            x=amounts,
            y=variants,
            marker_color=colour,
            text=texts,
            textposition="auto",
            name=name,
            legendgroup=name,
            showlegend=in_legend and bool(amounts),
        )
        bars.append(bar)
    return bars
