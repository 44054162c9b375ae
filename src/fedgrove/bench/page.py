"""The page of ``fedgrove bench engine``: bars of times the plain loop, with their spread, and of memory."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
KINDS = {
    "in turns, in one process": "#4c78a8",
    "steady, in a process of its own": "#72b7b2",
    "from process start": "#f58518",
}
"""What a bar shows, from the top of a group to its bottom."""
MEMORY = {"memory": "#b279a2", "on the device": "#54a24b"}


def write_times(rows: Rows, path: Path) -> None:
    """A page that needs nothing but itself: a line of panels per scene."""
    subplots: Any = importlib.import_module("plotly.subplots")
    scenes = list(dict.fromkeys(row["scene"] for row in rows))
    heads = [
        f"{scene}: {what}"
        for scene in scenes
        for what in ("times as fast as the plain loop", "peak MiB")
    ]
    memory = any(row.get("memory_mib") or row.get("device_mib") for row in rows)
    figure = subplots.make_subplots(
        rows=len(scenes),
        cols=2 if memory else 1,
        column_widths=[0.68, 0.32] if memory else None,
        subplot_titles=heads if memory else heads[::2],
        shared_yaxes=True,
        horizontal_spacing=0.06,
        vertical_spacing=0.3 / len(scenes),
    )
    for i, scene in enumerate(scenes, start=1):
        some = [row for row in rows if row["scene"] == scene]
        for bar in _speeds(some, first=i == 1):
            figure.add_trace(bar, row=i, col=1)
        figure.add_vline(x=1, line_dash="dot", line_color="#888", row=i, col=1)
        for bar in _memory(some, first=i == 1) if memory else ():
            figure.add_trace(bar, row=i, col=2)
    _lay_out(figure, rows, scenes)
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))


def spans(
    rows: Rows, median: str, least: str, most: str, times: str
) -> tuple[list[float], list[float]]:
    """How far the fastest and the slowest of a variant's repeats lie from its median, in times the plain loop.

    >>> row = {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "times_plain": 3.0}
    >>> spans([row], "median_s", "min_s", "max_s", "times_plain")
    ([3.0], [1.5])
    """
    up = [row[times] * (row[median] / row[least] - 1) for row in rows]
    down = [row[times] * (1 - row[median] / row[most]) for row in rows]
    return up, down


def _speeds(rows: Rows, first: bool) -> list[Any]:
    draw: Any = importlib.import_module("plotly.graph_objects")
    turns, alone = ([row for row in rows if row["how"] == how] for how in ("turns", "alone"))
    start = ("from_start_s", "from_start_min_s", "from_start_max_s", "times_plain_from_start")
    round = ("median_s", "min_s", "max_s", "times_plain")
    bars = []
    for (kind, colour), some, keys in zip(
        KINDS.items(), (turns, alone, alone), (round, round, start), strict=True
    ):
        up, down = spans(some, *keys)
        about = [
            f"median {row[keys[0]]:.3g} s, {row[keys[1]]:.3g} to {row[keys[2]]:.3g}" for row in some
        ]
        bars.append(
            draw.Bar(
                **{
                    "orientation": "h",
                    "name": kind,
                    "legendgroup": kind,
                    "showlegend": first and bool(some),
                },
                **{"x": [row[keys[3]] for row in some], "y": [row["variant"] for row in some]},
                **{
                    "marker_color": colour,
                    "customdata": about,
                    "hovertemplate": "%{y}: %{x:.2f}×<br>%{customdata}",
                },
                error_x={
                    "array": up,
                    "arrayminus": down,
                    "color": "#555",
                    "thickness": 1.2,
                    "width": 3,
                },
                text=[f"{row[keys[3]]:.2f}×" for row in some],
                textposition="inside",
                insidetextanchor="start",
            )
        )
    return bars


def _memory(rows: Rows, first: bool) -> list[Any]:
    draw: Any = importlib.import_module("plotly.graph_objects")
    bars = []
    for (name, colour), key in zip(MEMORY.items(), ("memory_mib", "device_mib"), strict=True):
        some = [row for row in rows if row.get(key)]
        bars.append(
            draw.Bar(
                **{
                    "orientation": "h",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": first and bool(some),
                },
                **{
                    "x": [row[key] for row in some],
                    "y": [row["variant"] for row in some],
                    "marker_color": colour,
                },
                text=[f"{row[key]:.0f}" for row in some],
                textposition="auto",
            )
        )
    return bars


def _lay_out(figure: Any, rows: Rows, scenes: Sequence[str]) -> None:
    tall = sum(len({row["variant"] for row in rows if row["scene"] == scene}) for scene in scenes)
    rounds = next((row["rounds"] for row in rows if row["how"] == "alone"), 0)
    about = "Bars are medians, whiskers the fastest and the slowest of all repeats. The dotted line is the plain loop."
    if rounds:
        about += f"<br>From process start: imports, start-up and {rounds} rounds. Memory of all processes together."
    figure.update_layout(
        title={"text": f"fedgrove bench engine<br><sup>{about}</sup>", "y": 0.98, "yanchor": "top"},
        barmode="group",
        bargap=0.25,
        template="plotly_white",
        height=260 + 78 * tall,
        margin={"t": 120, "l": 20, "r": 30},
        legend={"orientation": "h", "x": 0, "y": -0.08},
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(rangemode="tozero")
