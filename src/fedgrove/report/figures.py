"""Figures as SVG: lines and dots, bars, heat maps. No library draws them, and no script has to.

A figure is a :class:`Drawing`: one picture with a title, and a legend where there is something to
tell apart. Colours are numbers: the page gives each one a colour for light and one for dark
(``--c0`` to ``--c11`` in page.css). What a mark says when the pointer is on it stands in its
attribute ``data-t``. All texts are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .axes import Axis, axis_of, cut, short, width_of

WIDTH = 440
"""Units across; a phone shows about as many pixels, so that text stays readable there."""
HEIGHT = 270
COLOURS = 12
"""How many colours there are; the next series begins with the first again."""
RIGHT = 14
LONGEST_LABEL = 24
"""Letters of a label beside a bar."""
LOWEST_SHADE = 0.06
"""Of a cell of a heat map, so that the least is not nothing."""


class Entry(NamedTuple):
    """A name in a legend, its colour, and the numbers of the series that it hides and shows."""

    name: str
    colour: int
    of: list[int]


@dataclass(frozen=True)
class Drawing:
    """A picture with its title and its legend."""

    title: str
    svg: str
    legend: Sequence[Entry] = ()


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line or not; ``None`` in ``y`` leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    line: bool = True
    marker: str = "dot"
    """dot, diamond (hollow), or nothing."""
    dashed: bool = False
    spread: Sequence[float | None] = ()
    """Half the length of each point's whisker."""
    spread_x: Sequence[float | None] = ()
    tips: Sequence[str] = ()
    """What each point says; without them, its numbers."""
    in_legend: bool = True
    keys: Sequence[str] = ()
    """Of rows of a table on the page, which a click on a point finds."""
    size: float = 3.5


@dataclass(frozen=True)
class Marks:
    """A value for each row of a chart of categories; None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: int = 0
    kind: str = "bar"
    """bar, dot, diamond (hollow) or tick."""
    low: Sequence[float | None] = ()
    """Where each whisker begins."""
    high: Sequence[float | None] = ()
    texts: Sequence[str] = ()
    """What stands beside a bar."""
    tips: Sequence[str] = ()
    lane: int | None = None
    """Marks of one lane lie on one line within a row; None: a lane of its own."""
    in_legend: bool = True


# ---- lines and dots ------------------------------------------------------------------------------


def xy(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
    y_within: tuple[float | None, float | None] = (None, None),
    x_within: tuple[float | None, float | None] = (None, None),
    level: float | None = None,
    whole_x: bool = False,
    height: int = HEIGHT,
) -> Drawing:
    """Series over a common x. ``level`` is a dotted line at that y; ``whole_x``: x is counted."""
    all_x: list[float | None] = []
    all_y: list[float | None] = [level]
    for each in series:
        all_x += _with_ends(each.x, each.spread_x)
        all_y += _with_ends(each.y, each.spread)
    if not any(value is not None and math.isfinite(value) for value in all_y):
        return _empty(title)
    x_axis = axis_of(all_x, log=log_x, from_zero=x_from_zero, within=x_within)
    if whole_x:
        ticks = tuple(tick for tick in x_axis.ticks if tick == int(tick))
        x_axis = Axis(x_axis.low, x_axis.high, ticks)
    y_axis = axis_of(all_y, from_zero=y_from_zero, within=y_within)
    left = width_of(y_axis.labels()) + 10
    top = 24
    bottom = height - 40
    place = _Place(x_axis, y_axis, left, WIDTH - RIGHT, bottom, top)
    parts = _grid_y(place, y_axis, y_title)
    parts += _grid_x(place, x_axis, x_title, height)
    if level is not None:
        y = place.y(level)
        parts.append(f'<path class="level" d="M{left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
    for i, each in enumerate(series):
        parts.append(f'<g class="s c{each.colour % COLOURS}" data-s="{i}">')
        parts += _series(each, place, x_title, y_title)
        parts.append("</g>")
    return Drawing(title, _svg(parts, height, title), _legend(series))


@dataclass(frozen=True)
class _Place:
    """Where numbers come to lie in a picture."""

    x_axis: Axis
    y_axis: Axis
    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return self.x_axis.at(value, self.left, self.right)

    def y(self, value: float) -> float:
        return self.y_axis.at(value, self.bottom, self.top)


def _with_ends(
    values: Sequence[float | None], spread: Sequence[float | None]
) -> list[float | None]:
    """Values and the ends of their whiskers."""
    ends = list(values)
    for value, half in zip(values, spread, strict=False):
        if value is not None and half is not None:
            ends += [value - half, value + half]
    return ends


def _series(each: Series, place: _Place, x_title: str, y_title: str) -> list[str]:
    parts = []
    if each.line:
        style = ' stroke-dasharray="4 4"' if each.dashed else ""
        parts.append(f'<path class="line" d="{_path(each, place)}"{style}/>')
    for i, (x, y) in enumerate(zip(each.x, each.y, strict=True)):
        if y is None or not math.isfinite(y):
            continue
        at_x = place.x(x)
        at_y = place.y(y)
        half = each.spread[i] if each.spread else None
        if half:
            ends = f"M{at_x:.1f} {place.y(y - half):.1f}V{place.y(y + half):.1f}"
            parts.append(f'<path class="whisker" d="{ends}"/>')
        half = each.spread_x[i] if each.spread_x else None
        if half:
            ends = f"M{place.x(x - half):.1f} {at_y:.1f}H{place.x(x + half):.1f}"
            parts.append(f'<path class="whisker" d="{ends}"/>')
        name = f"{each.name}: " if each.name else ""
        tip = each.tips[i] if each.tips else f"{name}{y:.4g} {y_title} at {x:.4g} {x_title}"
        key = f' data-k="{escape(each.keys[i])}"' if each.keys else ""
        parts.append(_point(each.marker, at_x, at_y, each.size, tip, key))
    return parts


def _path(each: Series, place: _Place) -> str:
    steps = []
    command = "M"
    for x, y in zip(each.x, each.y, strict=True):
        if y is None or not math.isfinite(y):
            command = "M"
            continue
        steps.append(f"{command}{place.x(x):.1f} {place.y(y):.1f}")
        command = "L"
    return "".join(steps)


def _point(marker: str, x: float, y: float, size: float, tip: str, key: str = "") -> str:
    says = f' data-t="{escape(tip)}"{key}'
    if marker == "diamond":
        r = size + 2.5
        corners = f"M{x - r:.1f} {y:.1f}l{r} {-r}l{r} {r}l{-r} {r}z"
        return f'<path class="hollow" d="{corners}" data-x="{x:.1f}" data-y="{y:.1f}"{says}/>'
    # A point without a marker is there all the same: the pointer finds it.
    hidden = "" if marker else ' class="bare"'
    return f'<circle{hidden} cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"{says}/>'


# ---- categories ----------------------------------------------------------------------------------


def rows_of(
    title: str,
    labels: Sequence[str],
    marks: Sequence[Marks],
    x_title: str,
    *,
    stacked: bool = False,
    from_zero: bool = True,
    level: float | None = None,
    x_within: tuple[float | None, float | None] = (None, None),
) -> Drawing:
    """A row per label, from the top down, with bars or dots in it.

    Bars of several marks lie below each other, or in one line where they are ``stacked``.
    """
    lanes = _lanes(marks, stacked)
    thick = 15 if max(lanes, default=0) == 0 else 10
    gap = 3
    row_height = (max(lanes, default=0) + 1) * (thick + gap) + 9
    axis = axis_of(_ends_of(marks, stacked, level), from_zero=from_zero, within=x_within)
    names = [cut(label, LONGEST_LABEL) for label in labels]
    left = width_of(names) + 10
    texts = [text for each in marks for text in each.texts]
    right = WIDTH - RIGHT - (width_of(texts) + 4 if texts and not stacked else 0)
    top = 8.0
    bottom = top + row_height * len(labels)
    height = round(bottom + 40)
    place = _Place(axis, Axis(0, 1, ()), left, right, bottom, top)
    parts = _grid_x(place, axis, x_title, height)
    for i, name in enumerate(names):
        middle = top + (i + 0.5) * row_height
        says = f' data-t="{escape(labels[i])}"' if name != labels[i] else ""
        parts.append(
            f'<text class="name" x="{left - 8:.1f}" y="{middle + 4:.1f}"{says}>'
            f"{escape(name)}</text>"
        )
    done = [0.0] * len(labels)
    for number, (each, lane) in enumerate(zip(marks, lanes, strict=True)):
        parts.append(f'<g class="s c{each.colour % COLOURS}" data-s="{number}">')
        for i, value in enumerate(each.values):
            if value is None or not math.isfinite(value):
                continue
            y = top + i * row_height + 4.5 + lane * (thick + gap)
            tip = each.tips[i] if each.tips else f"{labels[i]}, {each.name}: {value:.4g} {x_title}"
            # Ticks and dots across stacked bars say where they are, not how long.
            is_stacked = stacked and each.kind == "bar"
            parts += _mark(each, i, value, done[i] if is_stacked else 0.0, place, y, thick, tip)
            if is_stacked:
                done[i] += value
        parts.append("</g>")
    if level is not None:
        x = place.x(level)
        parts.append(f'<path class="level" d="M{x:.1f} {top}V{bottom:.1f}"/>')
    return Drawing(title, _svg(parts, height, title), _legend(marks))


def _lanes(marks: Sequence[Marks], stacked: bool) -> list[int]:
    lanes = []
    following = 0
    for each in marks:
        if each.lane is not None:
            lanes.append(each.lane)
            following = max(following, each.lane + 1)
        elif stacked:
            lanes.append(0)
        else:
            lanes.append(following)
            following += 1
    return lanes


def _ends_of(marks: Sequence[Marks], stacked: bool, level: float | None) -> list[float | None]:
    values: list[float | None] = [level]
    sums: dict[int, float] = {}
    for each in marks:
        values += [*each.low, *each.high]
        if stacked and each.kind == "bar":
            for i, value in enumerate(each.values):
                sums[i] = sums.get(i, 0.0) + (value or 0.0)
        else:
            values += each.values
    return [*values, *sums.values()]


def _mark(
    each: Marks,
    i: int,
    value: float,
    begin: float,
    place: _Place,
    y: float,
    thick: float,
    tip: str,
) -> list[str]:
    """One mark with its whisker and its text."""
    parts = []
    middle = y + thick / 2
    end = place.x(begin + value)
    if each.kind == "bar":
        start = place.x(begin if place.x_axis.low <= begin else place.x_axis.low)
        width = max(abs(end - start), 0.8)
        parts.append(
            f'<rect x="{min(start, end):.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{thick}" rx="1.5" data-t="{escape(tip)}"/>'
        )
    elif each.kind == "tick":
        line = f"M{end:.1f} {y - 2:.1f}v{thick + 4}"
        parts.append(f'<path class="tick" d="{line}" data-t="{escape(tip)}"/>')
    else:
        parts.append(_point(each.kind, end, middle, 4, tip))
    furthest = end
    low = each.low[i] if each.low else None
    high = each.high[i] if each.high else None
    if low is not None and high is not None and high > low:
        furthest = max(furthest, place.x(high))
        line = f"M{place.x(low):.1f} {middle:.1f}H{place.x(high):.1f}"
        parts.append(f'<path class="whisker over" d="{line}"/>')
    if each.texts:
        parts.append(
            f'<text x="{furthest + 5:.1f}" y="{middle + 4:.1f}">{escape(each.texts[i])}</text>'
        )
    return parts


# ---- heat maps -----------------------------------------------------------------------------------


def heat(
    title: str,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x_title: str = "",
    unit: str = "",
    ends: tuple[float, float] | None = None,
    row_title: str = "",
) -> Drawing:
    """A cell per value, darker where it is higher; ``ends`` are the values of both ends.

    Rows are named where their names find room; columns by what the pointer is on.
    """
    known = [v for row in values for v in row if v is not None and math.isfinite(v)]
    if not known:
        return _empty(title)
    low, high = ends or (min(known), max(known))
    room = high - low or 1.0
    tall = max(5.0, min(22.0, 300 / len(values)))
    names = [cut(name, LONGEST_LABEL) for name in rows]
    is_named = tall >= 11
    left = width_of(names) + 10 if is_named else 16.0
    top = 6.0
    bottom = top + tall * len(values)
    wide = (WIDTH - RIGHT - left) / max(len(row) for row in values)
    parts = ['<g class="heat c0">']
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is None or not math.isfinite(value):
                continue
            share = min(1.0, max(0.0, (value - low) / room))
            shade = LOWEST_SHADE + (1 - LOWEST_SHADE) * share
            tip = f"{rows[i]}, {columns[j]}: {value:.3g}{unit}"
            parts.append(
                f'<rect x="{left + j * wide:.1f}" y="{top + i * tall:.1f}" width="{wide:.2f}" '
                f'height="{tall:.2f}" fill-opacity="{shade:.3f}" data-t="{escape(tip)}"/>'
            )
    parts.append("</g>")
    for i, name in enumerate(names if is_named else ()):
        y = top + (i + 0.5) * tall + 4
        kind = "name small" if tall < 15 else "name"
        parts.append(f'<text class="{kind}" x="{left - 8:.1f}" y="{y:.1f}">{escape(name)}</text>')
    if not is_named and row_title:
        parts.append(
            f'<text class="title" x="{left}" y="{bottom + 32:.1f}">{escape(row_title)}</text>'
        )
    key = _key_of_shades(left, bottom + 10, low, high, unit)
    parts.append(
        f'<text class="title end" x="{WIDTH - RIGHT}" y="{bottom + 19:.1f}">'
        f"{escape(x_title)}</text>"
    )
    return Drawing(title, _svg([*parts, *key], round(bottom + 38), title))


def _key_of_shades(left: float, top: float, low: float, high: float, unit: str) -> list[str]:
    """What the lightest and the darkest cell mean."""
    first = f"{low:.3g}{unit}"
    begin = left + width_of([first]) + 6
    parts = [f'<text x="{left:.1f}" y="{top + 10:.1f}">{escape(first)}</text>', '<g class="c0">']
    for i in range(8):
        shade = LOWEST_SHADE + (1 - LOWEST_SHADE) * i / 7
        parts.append(
            f'<rect x="{begin + 9 * i:.1f}" y="{top}" width="9" height="11" '
            f'fill-opacity="{shade:.2f}"/>'
        )
    parts.append("</g>")
    text = escape(f"{high:.3g}{unit}")
    parts.append(f'<text x="{begin + 78:.1f}" y="{top + 10:.1f}">{text}</text>')
    return parts


# ---- what all have in common ---------------------------------------------------------------------


def _legend(kinds: Sequence[Series | Marks]) -> list[Entry]:
    """The entries; what has none of its own goes with the one of its colour. One needs none."""
    entries: list[Entry] = []
    for i, each in enumerate(kinds):
        if each.in_legend:
            entries.append(Entry(each.name, each.colour, [i]))
    for i, each in enumerate(kinds):
        partners = [entry for entry in entries if entry.colour == each.colour]
        if not each.in_legend and partners:
            partners[0].of.append(i)
    return entries if len(entries) > 1 else []


def _grid_y(place: _Place, axis: Axis, title: str) -> list[str]:
    parts = [f'<text class="title" x="2" y="11">{escape(title)}</text>']
    for tick, label in zip(axis.ticks, axis.labels(), strict=True):
        y = place.y(tick)
        parts.append(f'<path class="grid" d="M{place.left:.1f} {y:.1f}H{place.right:.1f}"/>')
        parts.append(f'<text class="name" x="{place.left - 6:.1f}" y="{y + 4:.1f}">{label}</text>')
    return parts


def _grid_x(place: _Place, axis: Axis, title: str, height: float) -> list[str]:
    parts = []
    labels = axis.labels()
    # Where labels would touch, every second one is left out.
    room = (place.right - place.left) / max(1, len(labels) - 1)
    every = max(1, math.ceil((width_of(labels) + 8) / room))
    for i, (tick, label) in enumerate(zip(axis.ticks, labels, strict=True)):
        x = place.x(tick)
        ends = f"M{x:.1f} {place.top:.1f}V{place.bottom:.1f}"
        parts.append(f'<path class="grid" d="{ends}"/>')
        if i % every == 0:
            # The last one must not leave the picture.
            half = width_of([label]) / 2
            middle = min(x, WIDTH - half)
            y = place.bottom + 17
            parts.append(f'<text class="mid" x="{middle:.1f}" y="{y:.1f}">{label}</text>')
    middle = (place.left + place.right) / 2
    parts.append(
        f'<text class="title mid" x="{middle:.1f}" y="{height - 6}">{escape(title)}</text>'
    )
    return parts


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _empty(title: str) -> Drawing:
    text = '<text class="mid" x="220" y="40">nothing was measured</text>'
    return Drawing(title, _svg([text], 70, title))


def bars(
    title: str,
    values: Mapping[str, float],
    x_title: str,
    colour: int = 0,
    unit: str = "",
    texts: Sequence[str] = (),
) -> Drawing:
    """A bar per name, with its value beside it, or what ``texts`` say instead."""
    if not texts:
        texts = [f"{short(float(f'{value:.3g}'))}{unit}" for value in values.values()]
    tips = [f"{name}: {text}" for name, text in zip(values, texts, strict=True)]
    marks = Marks(title, list(values.values()), colour, texts=texts, tips=tips)
    return rows_of(title, list(values), [marks], x_title)
