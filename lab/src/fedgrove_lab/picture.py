"""Draws the picture of README.md from a stored result: accuracy over bytes, a point per method."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from .results import read_result

LEFT = 60
RIGHT = 610
TOP = 40
BOTTOM = 250
LEAST_KB = 0.1
MOST_KB = 1000.0
MOST_PERCENT = 100.0


class Point(NamedTuple):
    """A method in the picture, in units of the picture."""

    name: str
    x: float
    y: float
    low: float
    high: float
    text: str


def draw_first_run() -> str:
    """Return the picture of the first run as an SVG file.

    It is not drawn by ``fedgrove.report.charts``: those charts take their colours from the style of
    an HTML report, and a README shows a picture without any.
    """
    points = []
    for row in read_result("first-run")["rows"]:
        accuracies = [100 * value for value in row["values"]["accuracy_mean:0"]]
        mean = statistics.fmean(accuracies)
        deviation = statistics.stdev(accuracies)
        kilobytes = statistics.fmean(row["values"]["kb_each"])
        points.append(
            Point(
                row["name"],
                _place_kilobytes(kilobytes),
                _place_percent(mean),
                _place_percent(mean - deviation),
                _place_percent(mean + deviation),
                f"{mean:.1f} %, {kilobytes:,.1f} kB",
            )
        )
    environment = Environment(
        loader=PackageLoader("fedgrove_lab", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        keep_trailing_newline=True,
    )
    environment.filters["kilobytes"] = _place_kilobytes
    environment.filters["percent"] = _place_percent
    return environment.get_template("first_run.svg").render(points=points)


def _place_kilobytes(value: float) -> float:
    """Return the x of a number of kilobytes; the axis is logarithmic."""
    share = math.log(value / LEAST_KB) / math.log(MOST_KB / LEAST_KB)
    return round(LEFT + share * (RIGHT - LEFT), 1)


def _place_percent(value: float) -> float:
    return round(BOTTOM - value / MOST_PERCENT * (BOTTOM - TOP), 1)
