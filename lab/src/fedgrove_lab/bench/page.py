"""The page of ``fedgrove bench engine``: bars of speed beside the plain loop, and of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgrove.report.charts import Chart, Marks, draw_rows
from fedgrove.report.page import Page

Rows = Sequence[Mapping[str, Any]]

PER_ROUND = ("median_s", "min_s", "max_s", "times_plain")
"""Keys of a row: seconds per round, the fastest and slowest, and times the plain loop."""
FROM_START = ("from_start_s", "from_start_min_s", "from_start_max_s", "times_plain_from_start")
"""The same of all rounds together, the start of the process included."""


class Kind(NamedTuple):
    """What a bar of speed shows: which rows it takes, and which of their keys."""

    name: str
    how: str
    keys: tuple[str, str, str, str]


KINDS = (
    Kind("in turns, in one process", "turns", PER_ROUND),
    Kind("steady, in a process of its own", "alone", PER_ROUND),
    Kind("from process start", "alone", FROM_START),
)
"""From the top of a group of bars to its bottom."""
MEMORY = {"memory_mib": "memory", "device_mib": "on the device"}
"""The name of the bars of memory, by the key of a row."""


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
    page.charts(*_panels(rows))
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


def _panels(rows: Rows) -> list[Chart]:
    """Speeds of each scene and, where any was measured, its memory beside them."""
    scenes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        scenes.setdefault(row["scene"], []).append(row)
    drawings = []
    for scene, own in scenes.items():
        drawings.append(_speeds(scene, own))
        if any(row.get("memory_mib") or row.get("device_mib") for row in own):
            drawings.append(_memory(scene, own))
    return drawings


def _speeds(scene: str, rows: Rows) -> Chart:
    """The bars of times the plain loop, a set for each kind."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    marks = []
    for colour, kind in enumerate(KINDS):
        measured = {row["variant"]: row for row in rows if row["how"] == kind.how}
        if not measured:
            continue
        median, least, most, times = kind.keys
        values: list[float | None] = []
        low: list[float | None] = []
        high: list[float | None] = []
        texts = []
        tips = []
        for variant in variants:
            row = measured.get(variant)
            if row is None:
                values.append(None)
                low.append(None)
                high.append(None)
                texts.append("")
                tips.append("")
                continue
            (up,), (down,) = spans([row], median, least, most, times)
            values.append(row[times])
            low.append(row[times] - down)
            high.append(row[times] + up)
            texts.append(f"{row[times]:.2f}×")
            tips.append(
                f"{variant}, {kind.name}: {row[times]:.2f}×, median {row[median]:.3g} s, "
                f"{row[least]:.3g} to {row[most]:.3g}"
            )
        marks.append(Marks(kind.name, values, colour, low=low, high=high, texts=texts, tips=tips))
    title = f"{scene}: times as fast as the plain loop"
    return draw_rows(title, variants, marks, "times", level=1.0)


def _memory(scene: str, rows: Rows) -> Chart:
    """The bars of peak memory, in MiB."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    marks = []
    for colour, (key, name) in enumerate(MEMORY.items(), start=3):
        # None where it was not measured.
        amounts = {row["variant"]: row[key] for row in rows if row.get(key)}
        if not amounts:
            continue
        values = [amounts.get(variant) for variant in variants]
        texts = ["" if amount is None else f"{amount:.0f}" for amount in values]
        marks.append(Marks(name, values, colour, texts=texts))
    return draw_rows(f"{scene}: peak MiB", variants, marks, "MiB")
