"""Charts as SVG: lines and dots, rows of bars, heat maps.

They are hand-written because no small maintained library draws static SVG that follows the page's
light and dark colours: matplotlib is large, and plotly and vega need their own scripts.

This module computes where everything goes; ``templates/*.svg`` draw it. A :class:`Chart` is a
picture with a title and a legend. Colours are numbers, and the page's style has a light and a dark
colour for each of them (``--c0`` to ``--c11``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..renamed import find_old_names
from .page import COLOURS, check_place, is_finite, render
from .tables import format_number

WIDTH = 440
"""Units across; about the number of pixels of a phone, so that text stays readable there."""
HEIGHT = 270
RIGHT_MARGIN = 14
LONGEST_LABEL = 24
"""Letters of the label of a row."""
LONGEST_TAG = 18
"""Letters of the name next to a line or a point."""
TAG_WIDTH = 5.6
"""The mean width of a letter of such a name, in units."""
TAG_HEIGHT = 11.0
"""The distance between two such names."""
LETTER_WIDTH = 6.6
"""The mean width of a letter, in units; text is 12 units high."""
TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, times a power of ten."""
CHART_MARK = "<!-- fedgrove -->"
"""What tells charts of fedgrove from other SVG files."""
PDF_MARK = "ReportLab"
"""What is near the beginning of the PDF files that are written here."""
TINY = 1e-100
"""Smaller numbers are drawn as zero: arithmetic with them would overflow."""

_T = TypeVar("_T")
Values = Sequence[float | None] | Sequence[float] | NDArray[np.float64]
"""Values of a chart; None and NaN are gaps."""
Limits = tuple[float, float]
"""A lower and an upper limit."""
NO_LIMITS: Limits = (-math.inf, math.inf)


__getattr__ = find_old_names(__name__)


class LegendEntry(NamedTuple):
    """A name in a legend, its colour, and the numbers of the series that it hides and shows."""

    name: str
    colour: int
    series: list[int]


@dataclass(frozen=True)
class Chart:
    """A picture with its title and its legend."""

    title: str
    svg: str = field(repr=False)
    legend: Sequence[LegendEntry] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        return self.standalone()

    @property
    def file_name(self) -> str:
        """The name of the chart's file, without its ending."""
        return re.sub("[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def standalone(self) -> str:
        """Return the chart as an SVG file: with its legend, in the colours of a light page."""
        picture = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg>', self.svg, re.DOTALL)
        assert picture is not None
        # Lines that have their names next to them need no legend.
        legend = [] if 'class="tag"' in self.svg else list(self.legend)
        values = {
            "title": self.title,
            "width": float(picture[1]),
            "height": float(picture[2]),
            "content": re.sub(r' data-[a-z]="[^"]*"', "", picture[3]),
            "style": _make_standalone_style(),
            "legend": legend,
            "letter_width": LETTER_WIDTH,
        }
        return render("standalone.svg", values)

    def write(self, folder: Path, *, force: bool = False) -> list[Path]:
        """Write the chart as SVG into a folder, and as PDF if svglib is installed.

        Args:
            folder: The folder; it is made if it does not exist.
            force: Replace files that fedgrove did not write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        svg = folder / f"{self.file_name}.svg"
        check_place(svg, "charts", endings=(".svg",), mark=CHART_MARK, force=force)
        svg.write_bytes(self.standalone().encode())
        if find_spec("svglib") is None:
            return [svg]
        # Imported here: it is an optional package, and few commands write charts.
        from reportlab.graphics.renderPDF import drawToFile
        from svglib.svglib import svg2rlg

        pdf = svg.with_suffix(".pdf")
        check_place(pdf, "charts", endings=(".pdf",), mark=PDF_MARK, force=force)
        drawToFile(svg2rlg(str(svg)), str(pdf), msg=self.title)
        return [svg, pdf]


@cache
def _make_standalone_style() -> str:
    """Return the rules of the page's style that a chart needs, without variables.

    Programs other than browsers know no variables in a style.
    """
    style = render("style.css", {})
    light = dict(re.findall(r"(--\w+): (#\w+)", style.partition("}")[0]))
    rules = []
    for selectors, look in re.findall(r"^(svg [^{]+) (\{.*\})$", style, re.MULTILINE):
        # The page's rule for the picture itself is about its place on the page.
        if selectors == "svg":
            continue
        names = [name.strip().removeprefix("svg ") for name in selectors.split(",")]
        if "var(--c)" not in look:
            rules.append(f"{', '.join(names)} {look}")
            continue
        for i in range(COLOURS):
            coloured = ", ".join(f".c{i} {name}" for name in names)
            rules.append(f"{coloured} {look.replace('var(--c)', f'var(--c{i})')}")
    return re.sub(r"var\((--\w+)\)", lambda found: light[found[1]], "\n".join(rules))


@dataclass(frozen=True)
class Series:
    """Points of one kind, with or without a line through them; ``None`` in ``y`` is a gap."""

    name: str
    x: Values
    y: Values
    colour: int = 0
    line: bool = True
    marker: str = "dot"
    """dot, diamond (hollow), or empty for no marker."""
    dashed: bool = False
    spread: Sequence[float | None] = ()
    """Half the length of the whisker of each point."""
    spread_x: Sequence[float | None] = ()
    band: Sequence[float] = ()
    """Half the height of the band around the line at each point."""
    label: str = ""
    """The name that stands next to the last point."""
    tips: Sequence[str] = ()
    """The text of each point; by default its numbers."""
    in_legend: bool = True
    keys: Sequence[str] = ()
    """Keys of table rows on the page: a click on a point shows its row."""
    size: float = 3.5

    @classmethod
    def from_points(
        cls, name: str, points: Iterable[tuple[float, float | None]], colour: int = 0, **more: Any
    ) -> Series:
        """Return a chart's series of (x, y); ``more`` are the other fields."""
        pairs = list(points)
        return cls(name, [x for x, _ in pairs], [y for _, y in pairs], colour, **more)


@dataclass(frozen=True)
class Marks:
    """A value for each row of a chart of rows; None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: int = 0
    kind: str = "bar"
    """bar, dot, diamond (hollow) or tick."""
    low: Sequence[float | None] = ()
    """The start of each whisker."""
    high: Sequence[float | None] = ()
    texts: Sequence[str] = ()
    """The text next to each bar."""
    tips: Sequence[str] = ()
    lane: int | None = None
    """Marks with the same lane share a line within a row; None: a separate lane."""
    in_legend: bool = True


# ---- axes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A range of numbers with ticks, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Return the position of a value in a chart whose axis goes from ``start`` to ``end``.

        >>> Axis(0, 10, ()).place(2.5, 100, 200)
        125.0
        >>> Axis(1, 100, (), is_log=True).place(10, 0, 50)
        25.0
        """
        if self.is_log:
            # Zero has no place on a logarithmic axis: it is drawn at its start.
            value = max(value, self.low)
            # A difference of logarithms: the ratio of very different numbers would overflow.
            first = math.log(self.low)
            share = (math.log(value) - first) / (math.log(self.high) - first)
        else:
            share = (value - self.low) / (self.high - self.low)
        return start + share * (end - start)

    def labels(self) -> list[str]:
        """Return the labels of the ticks, all with the same number of digits."""
        if self.is_log or len(self.ticks) < 2:
            return list(map(format_number, self.ticks))
        step = self.ticks[1] - self.ticks[0]
        digits = 0
        # Not the logarithm of the step: 2.5 needs one digit more than 2.
        while digits < 9 and abs(round(step, digits) - step) > 1e-6 * step:
            digits += 1
        has_large_ticks = max(map(abs, self.ticks)) >= 1e6
        if digits > 6 or has_large_ticks:
            labels = list(map(format_number, self.ticks))
            # Large numbers that are close together need all their digits.
            if len(set(labels)) == len(labels):
                return labels
        if digits == 9:
            return [f"{tick:.12g}" for tick in self.ticks]
        return [f"{tick:,.{digits}f}" for tick in self.ticks]


def make_axis(
    values: Iterable[float | None],
    *,
    from_zero: bool = False,
    log: bool = False,
    within: Limits = NO_LIMITS,
) -> Axis:
    """Return a chart's axis that contains all values and ends at ticks.

    Args:
        values: The values; None and infinite ones are ignored.
        from_zero: Whether the axis contains zero.
        log: Whether the axis is logarithmic, if the values are above zero and far apart.
        within: Limits that ticks do not exceed.

    >>> make_axis([0.12, 0.57]).ticks
    (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    >>> make_axis([3, 3], from_zero=True).ticks
    (0.0, 1.0, 2.0, 3.0)
    >>> make_axis([97], within=(0, 100)).high
    100.0
    >>> make_axis([2, 900], log=True).ticks
    (1.0, 10.0, 100.0, 1000.0)
    """
    known = list(filter(is_finite, values))
    if from_zero or not known:
        known.append(0.0)
    low = min(known)
    high = max(known)
    if log and low > 0 and high / low >= 30:
        return _log_axis(low, high)
    largest = max(abs(low), abs(high))
    if largest < TINY:
        low = high = 0.0
    least, most = within
    is_one_value = high - low <= 1e-9 * largest
    if is_one_value:
        margin = abs(high) / 2 or 0.5
        # The margin is not a value: no percent above a hundred.
        high = max(high, min(high + margin, most))
        if not from_zero:
            low = min(low, max(low - margin, least))
    step = _tick_step(high - low)
    inside = []
    ticks = []
    for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1):
        # Rounded, because the third tenth would be 0.30000000000000004.
        tick = float(f"{i * step:.12g}")
        ticks.append(tick)
        if least - 1e-9 * step <= tick <= most + 1e-9 * step:
            inside.append(tick)
    ticks = inside or ticks
    return Axis(min(ticks[0], low), max(ticks[-1], high), tuple(ticks))


def _tick_step(span: float) -> float:
    """Return the distance between ticks so that there are about five."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    for step in TICK_STEPS:
        if step * power >= rough * (1 - 1e-9):
            return step * power
    return 10 * power


def _log_axis(low: float, high: float) -> Axis:
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    powers = [10.0**i for i in range(first, last + 1)]
    # At most eight ticks: every power, every second one, every third, ...
    ticks = powers[:: math.ceil(len(powers) / 8)]
    if len(powers) <= 3:
        ticks = sorted([*ticks, *(3 * power for power in powers[:-1])])
    return Axis(powers[0], powers[-1], tuple(ticks), is_log=True)


# ---- lines and dots ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Area:
    """The part of a picture inside its axes."""

    x_axis: Axis
    y_axis: Axis
    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return self.x_axis.place(value, self.left, self.right)

    def y(self, value: float) -> float:
        return self.y_axis.place(value, self.bottom, self.top)

    def line(self, series: Series) -> str:
        """Return the path through the points of a series; it starts again after a gap."""
        steps = []
        command = "M"
        for x, y in zip(series.x, series.y, strict=True):
            if not is_finite(y):
                command = "M"
                continue
            steps.append(f"{command}{self.x(x):.1f} {self.y(y):.1f}")
            command = "L"
        return "".join(steps)

    def band(self, series: Series) -> str:
        """Return the outline of the band around a line: its upper edge, and the lower one back."""
        upper = []
        lower = []
        for x, y, half in zip(series.x, series.y, series.band, strict=True):
            if is_finite(x) and is_finite(y):
                upper.append(f"{self.x(x):.1f} {self.y(y + half):.1f}")
                lower.append(f"{self.x(x):.1f} {self.y(y - half):.1f}")
        return f"M{'L'.join([*upper, *reversed(lower)])}Z"

    def y_ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the position and the label of each tick."""
        for tick, label in zip(self.y_axis.ticks, self.y_axis.labels(), strict=True):
            yield self.y(tick), label

    def x_ticks(self) -> Iterator[tuple[float, str, float]]:
        """Yield the position and the label of each tick, and the middle of the label."""
        labels = self.x_axis.labels()
        # Where labels would touch, only every second, third, ... is shown.
        room = (self.right - self.left) / max(1, len(labels) - 1)
        every = max(1, math.ceil((_width_of(labels) + 8) / room))
        for i, (tick, label) in enumerate(zip(self.x_axis.ticks, labels, strict=True)):
            x = self.x(tick)
            shown = label if i % every == 0 else ""
            # The last label must not leave the picture.
            yield x, shown, min(x, WIDTH - _width_of([label]) / 2)


def draw_xy(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
    y_within: Limits = NO_LIMITS,
    x_within: Limits = NO_LIMITS,
    level: float | None = None,
    whole_x: bool = False,
    height: int = HEIGHT,
) -> Chart:
    """Draw a chart of series over a common x.

    Args:
        title: The title above the chart.
        series: Lines and dots; later ones are drawn on top.
        x_title: The title of the x axis.
        y_title: The title of the y axis.
        log_x: Whether x is logarithmic, if its values are far apart.
        y_from_zero: Whether the y axis contains zero.
        x_from_zero: Whether the x axis contains zero.
        y_within: Limits of the ticks of y.
        x_within: Limits of the ticks of x.
        level: The y of a dotted horizontal line.
        whole_x: Whether x has ticks at whole numbers only.
        height: The height in units.
    """
    all_x: list[float | None] = []
    all_y: list[float | None] = [level]
    for each in series:
        all_x += _with_whisker_ends(each.x, each.spread_x)
        all_y += _with_whisker_ends(each.y, each.spread or each.band)
    if not any(map(is_finite, all_y)):
        return _draw_nothing(title)
    x_axis = make_axis(all_x, log=log_x, from_zero=x_from_zero, within=x_within)
    if whole_x:
        ticks = tuple(tick for tick in x_axis.ticks if tick == int(tick))
        x_axis = Axis(x_axis.low, x_axis.high, ticks)
    y_axis = make_axis(all_y, from_zero=y_from_zero, within=y_within)
    left = _width_of(y_axis.labels()) + 10
    names = [shorten_label(each.label, LONGEST_TAG) for each in series if each.label]
    # Names of lines stand to the right of them; those of single points find room within.
    has_lines = any(each.label and each.line for each in series)
    right = WIDTH - RIGHT_MARGIN
    if has_lines:
        right -= round(TAG_WIDTH * max(map(len, names)))
    area = _Area(x_axis, y_axis, left, right, height - 40, 24)
    svg = _render(
        "xy.svg",
        title,
        height,
        area=area,
        series=series,
        x_title=x_title,
        y_title=y_title,
        level=level,
        tags=_place_tags(area, series),
    )
    return Chart(title, svg, _make_legend(series))


class _Tag(NamedTuple):
    """The name of a series, and where it stands."""

    text: str
    x: float
    y: float
    number: int


def _place_tags(area: _Area, series: Sequence[Series]) -> dict[int, _Tag]:
    """Return where the names of series stand in a chart, so that none covers another."""
    ends: list[_Tag] = []
    taken: list[tuple[float, float]] = []
    for number, each in enumerate(series):
        points = [(x, y) for x, y in zip(each.x, each.y, strict=True) if is_finite(y)]
        if not points or not each.label:
            continue
        x = area.x(float(points[-1][0] or 0.0))
        y = area.y(float(points[-1][1] or 0.0))
        ends.append(_Tag(shorten_label(each.label, LONGEST_TAG), x, y, number))
        taken.append((x, y))
    placed: list[_Tag] = []
    for tag in sorted(ends, key=lambda tag: tag.y):
        each = series[tag.number]
        if each.line:
            placed.append(_below(tag._replace(x=tag.x + 5, y=tag.y + 3.5), placed))
        else:
            placed.append(_next_to_point(tag, area, placed, taken))
    # What was pushed out below the chart is moved up again, the last one first.
    lowest = area.bottom + 4
    for i in reversed(range(len(placed))):
        if series[placed[i].number].line:
            placed[i] = placed[i]._replace(y=min(placed[i].y, lowest))
            lowest = placed[i].y - TAG_HEIGHT
    return {tag.number: tag for tag in placed}


def _below(tag: _Tag, placed: Sequence[_Tag]) -> _Tag:
    """Return a chart's tag below those that are placed already."""
    lowest = max((other.y for other in placed), default=-math.inf)
    return tag._replace(y=max(tag.y, lowest + TAG_HEIGHT))


def _next_to_point(
    tag: _Tag, area: _Area, placed: Sequence[_Tag], points: Sequence[tuple[float, float]]
) -> _Tag:
    """Return a chart's tag where it covers no other tag and no point; else to the right."""
    width = TAG_WIDTH * len(tag.text)
    right = tag.x + 9
    left = tag.x - 9 - width
    middle = tag.x - width / 2
    spots = [(right, tag.y + 3.5), (left, tag.y + 3.5), (middle, tag.y - 10), (middle, tag.y + 17)]
    spots += [(right, tag.y - 8), (right, tag.y + 15), (left, tag.y - 8), (left, tag.y + 15)]
    for x, y in spots:
        is_inside = area.left - 4 <= x and x + width <= WIDTH and area.top - 8 <= y <= area.bottom
        is_free = True
        for other in placed:
            is_beside = abs(other.y - y) >= TAG_HEIGHT
            other_end = other.x + TAG_WIDTH * len(other.text)
            is_free &= is_beside or other_end < x or x + width < other.x
        for px, py in points:
            is_free &= abs(py - (y - 3.5)) > 9 or px < x - 7 or x + width + 7 < px
        if is_inside and is_free:
            return tag._replace(x=x, y=y)
    return tag._replace(x=min(right, WIDTH - width), y=tag.y + 3.5)


def _with_whisker_ends(values: Values, spread: Sequence[float | None]) -> list[float | None]:
    ends: list[float | None] = list(values)
    for value, half in zip(values, spread, strict=False):
        if value is not None and half is not None:
            ends += [value - half, value + half]
    return ends


# ---- rows of bars --------------------------------------------------------------------------------


def draw_rows(
    title: str,
    labels: Sequence[str],
    marks: Sequence[Marks],
    x_title: str,
    *,
    stacked: bool = False,
    from_zero: bool = True,
    level: float | None = None,
) -> Chart:
    """Draw a chart with a row per label, from top to bottom, with bars, dots or ticks in it.

    Args:
        title: The title above the chart.
        labels: The labels of the rows.
        marks: The values. Bars of several marks lie below each other within a row.
        x_title: The title of the x axis.
        stacked: Whether bars of several marks form one bar instead.
        from_zero: Whether the x axis contains zero.
        level: The x of a dotted vertical line.
    """
    lanes = _choose_lanes(marks, stacked)
    last_lane = max(lanes, default=0)
    thickness = 15 if last_lane == 0 else 10
    lane_height = thickness + 3
    row_height = (last_lane + 1) * lane_height + 9
    starts = _stack(marks, stacked, len(labels))
    ends: list[float | None] = [level]
    texts: list[str] = []
    for each, own in zip(marks, starts, strict=True):
        texts += each.texts
        ends += [*each.low, *each.high]
        for start, value in zip(own, each.values, strict=True):
            if value is not None:
                ends.append(start + value)
    axis = make_axis(ends, from_zero=from_zero)
    names = list(map(shorten_label, labels))
    right: float = WIDTH - RIGHT_MARGIN
    if texts and not stacked:
        right -= _width_of(texts) + 4
    top = 8.0
    bottom = top + row_height * len(labels)
    area = _Area(axis, Axis(0, 1, ()), _width_of(names) + 10, right, bottom, top)
    svg = _render(
        "rows.svg",
        title,
        round(bottom + 40),
        area=area,
        labels=labels,
        names=names,
        marks=zip(marks, lanes, starts, strict=True),
        row_height=row_height,
        lane_height=lane_height,
        thickness=thickness,
        x_title=x_title,
        level=level,
    )
    return Chart(title, svg, _make_legend(marks))


def draw_bars(
    title: str,
    values: Mapping[str, float],
    x_title: str,
    colour: int = 0,
    format_value: Callable[[Any], str] = lambda value: format_number(value, 3),
    scale: float = 1.0,
) -> Chart:
    """Draw a chart with a bar per name, with its value next to it.

    Args:
        title: The title above the chart.
        values: The values by name.
        x_title: The title of the x axis.
        colour: The colour of all bars.
        format_value: Formats a value.
        scale: What values are multiplied by for the axis.
    """
    texts = list(map(format_value, values.values()))
    lengths: list[float | None] = []
    tips = []
    for (name, value), text in zip(values.items(), texts, strict=True):
        lengths.append(scale * value)
        tips.append(f"{name}: {text}")
    marks = Marks(title, lengths, colour, texts=texts, tips=tips)
    return draw_rows(title, list(values), [marks], x_title)


def _choose_lanes(marks: Sequence[Marks], stacked: bool) -> list[int]:
    lanes: list[int] = []
    for each in marks:
        lane = each.lane
        if lane is None:
            lane = 0 if stacked else max(lanes, default=-1) + 1
        lanes.append(lane)
    return lanes


def _stack(marks: Sequence[Marks], stacked: bool, rows: int) -> list[list[float]]:
    """Return where the bars of each of ``marks`` start: where the stack of their row ends."""
    ends = [0.0] * rows
    starts = []
    for each in marks:
        # Ticks and dots on stacked bars show a position, not a length.
        if not stacked or each.kind != "bar":
            starts.append([0.0] * rows)
            continue
        starts.append(list(ends))
        for i, value in enumerate(each.values):
            ends[i] += value or 0.0
    return starts


# ---- heat maps -----------------------------------------------------------------------------------


def draw_heat_map(
    title: str,
    values: Sequence[Values],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x_title: str = "",
    ends: tuple[float, float] | None = None,
) -> Chart:
    """Draw a cell per value, darker where it is higher.

    Args:
        title: The title above the chart.
        values: The values by row.
        rows: The names of the rows, shown if there is room.
        columns: The names of the columns, shown when the pointer is on a cell.
        x_title: The title of the x axis.
        ends: The values of the lightest and the darkest cell.
    """
    known: list[float] = []
    for row in values:
        known += filter(is_finite, row)
    if not known:
        return _draw_nothing(title)
    low, high = ends or (min(known), max(known))
    cell_height = max(5.0, min(22.0, 300 / len(values)))
    names = list(map(shorten_label, rows))
    left = _width_of(names) + 10
    if cell_height < 11:
        names = []
        left = 16.0
    bottom = 6.0 + cell_height * len(values)
    svg = _render(
        "heat_map.svg",
        title,
        round(bottom + 38),
        values=values,
        rows=rows,
        columns=columns,
        names=names,
        low=low,
        high=high,
        left=left,
        right=WIDTH - RIGHT_MARGIN,
        bottom=bottom,
        cell_height=cell_height,
        x_title=x_title,
        lowest_width=_width_of([f"{low:.3g}"]),
    )
    return Chart(title, svg)


# ---- parts of all charts -------------------------------------------------------------------------


def _make_legend(kinds: Sequence[Series | Marks]) -> list[LegendEntry]:
    """Return the entries; a series without one belongs to the entry of its colour."""
    entries: list[LegendEntry] = []
    # By colour: the first of several entries.
    first: dict[int, LegendEntry] = {}
    for i, each in enumerate(kinds):
        if each.in_legend:
            entries.append(LegendEntry(each.name, each.colour, [i]))
            first.setdefault(each.colour, entries[-1])
    for i, each in enumerate(kinds):
        if not each.in_legend and each.colour in first:
            first[each.colour].series.append(i)
    # One entry alone would distinguish nothing.
    return entries if len(entries) > 1 else []


def _draw_nothing(title: str) -> Chart:
    return Chart(title, _render("nothing.svg", title, 70))


def _width_of(texts: Sequence[str]) -> float:
    """Return about how wide the longest text is."""
    return LETTER_WIDTH * max(map(len, texts), default=0)


def shorten_label(text: str, longest: int = LONGEST_LABEL) -> str:
    """Cut a chart's label that is too long, and mark the cut.

    >>> shorten_label("fedlayerprune-local.lr=0.01")
    'fedlayerprune-local.lr=…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def thin_out(items: Sequence[_T], most: int) -> list[_T]:
    """Return at most about ``most`` points of a chart, evenly spaced, the last one included.

    >>> thin_out(range(7), 4)
    [0, 2, 4, 6]
    """
    every = max(1, math.ceil(len(items) / most))
    return list(items[(len(items) - 1) % every :: every])


def _render(template: str, title: str, height: float, **values: Any) -> str:
    svg = render(template, {**values, "title": title, "width": WIDTH, "height": height})
    # A page of ten thousand clients has ten thousand circles: no blanks between them.
    return re.sub(r">\s+<", "><", svg).strip()
