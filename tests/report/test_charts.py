"""Figures are SVG that any browser reads: places worked by hand, and nothing outside the picture."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.report.charts import (
    WIDTH,
    Chart,
    Marks,
    Series,
    draw_bars,
    draw_heat_map,
    draw_rows,
    draw_xy,
    make_axis,
    thin_out,
)

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


def parsed(drawing: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(drawing.svg)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans(), st.booleans())
@example([2.0, 2.2250738585072014e-308], True, False)
def test_an_axis_holds_all_its_values(values: list[float], log: bool, from_zero: bool) -> None:
    axis = make_axis(values, log=log, from_zero=from_zero)
    assert axis.low < axis.high
    for value in values:
        assert -1e-6 <= axis.place(value, 0, 1) <= 1 + 1e-6
    assert 2 <= len(axis.ticks) <= 12
    assert len(set(axis.labels())) == len(axis.ticks)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 100], ["0", "20", "40", "60", "80", "100"]),
        ([0.0, 0.3], ["0.0", "0.1", "0.2", "0.3"]),
        ([0, 12000], ["0", "2,500", "5,000", "7,500", "10,000", "12,500"]),
        ([0, 3e6], ["0", "1M", "2M", "3M"]),
        ([], ["-0.6", "-0.4", "-0.2", "0.0", "0.2", "0.4", "0.6"]),
    ],
)
def test_what_ticks_say(values: list[float], labels: list[str]) -> None:
    assert make_axis(values).labels() == labels


def test_ends_that_an_axis_does_not_go_beyond() -> None:
    # A whisker at 101 % is drawn, but no tick says 120 %.
    assert make_axis([50, 101], within=(0, 100)).ticks[-1] == 100
    assert make_axis([50, 101], within=(0, 100)).high == 101


def test_places_by_hand() -> None:
    drawing = draw_xy("t", [Series("a", [0, 10], [0, 100])], "x", "y")
    ends = [(float(c.get("cx")), float(c.get("cy"))) for c in parsed(drawing).iter("circle")]
    # "100" is three letters of 6.6 units: the axis begins at 29.8, and ends 14 before the edge.
    # From 40 above the bottom of 270 to 24 below the top.
    assert ends == [(29.8, 230.0), (WIDTH - 14, 24.0)]


def test_gaps_and_what_is_no_number_are_left_out() -> None:
    drawing = draw_xy("t", [Series("a", [1, 2, 3, 4], [1, None, math.nan, 2])], "x", "y")
    assert len(list(parsed(drawing).iter("circle"))) == 2
    line = parsed(drawing).find(".//*[@class='line']")
    assert line is not None
    # Two pieces: nothing is drawn across the gap.
    assert line.get("d", "").count("M") == 2
    empty = draw_xy("t", [Series("a", [1], [None])], "x", "y")
    assert "nothing was measured" in empty.svg


def test_names_with_markup_stay_text() -> None:
    name = '<script>alert("1")</script> & co'
    drawings = [
        draw_xy(name, [Series(name, [1, 2], [1, 2])], name, name),
        draw_rows(name, [name], [Marks(name, [1.0], texts=[name], tips=[name])], name),
        draw_heat_map(name, [[1.0, 2.0]], [name], [name, name], x_title=name),
    ]
    for drawing in drawings:
        assert "<script" not in drawing.svg
        # Whole XML, so no name broke out of its place.
        assert parsed(drawing).get("aria-label") == name


def test_a_legend_names_what_there_is_to_tell_apart() -> None:
    one = Series("a", [1], [1], colour=1)
    other = Series("b", [1], [2], colour=2)
    reported = Series("a, paper", [1], [3], colour=1, in_legend=False)
    assert draw_xy("t", [one, reported], "x", "y").legend == []
    # Hiding a hides the paper's values of a too.
    legend = draw_xy("t", [one, other, reported], "x", "y").legend
    assert [(entry.name, entry.series) for entry in legend] == [("a", [0, 2]), ("b", [1])]


def test_stacked_bars_begin_where_the_others_end() -> None:
    marks = [Marks("a", [1.0]), Marks("b", [3.0])]
    first, second = parsed(draw_rows("t", ["row"], marks, "x", stacked=True)).iter("rect")
    end = float(first.get("x", "")) + float(first.get("width", ""))
    assert float(second.get("x", "")) == pytest.approx(end, abs=0.1)
    assert float(second.get("width", "")) == pytest.approx(3 * float(first.get("width", "")), 0.01)
    assert first.get("y") == second.get("y")


def test_a_tick_across_stacked_bars_stands_at_its_own_value() -> None:
    marks = [Marks("a", [1.0]), Marks("b", [3.0]), Marks("bound", [4.0], kind="tick")]
    picture = parsed(draw_rows("t", ["row"], marks, "x", stacked=True))
    _, last = picture.iter("rect")
    (tick,) = [path for path in picture.iter("path") if path.get("class") == "tick"]
    # 1 + 3 = 4: where the bars end.
    end = float(last.get("x", "")) + float(last.get("width", ""))
    assert float(re.findall(r"[\d.]+", tick.get("d", ""))[0]) == pytest.approx(end, abs=0.1)


def test_bars_side_by_side_do_not_touch() -> None:
    marks = [Marks("a", [1.0, 2.0]), Marks("b", [3.0, None])]
    tops = sorted(
        float(r.get("y", "")) for r in parsed(draw_rows("t", ["p", "q"], marks, "x")).iter("rect")
    )
    assert len(tops) == 3
    assert all(b - a >= 10 for a, b in pairwise(tops))


def test_the_highest_cell_is_the_darkest() -> None:
    drawing = draw_heat_map("t", [[0.0, 1.0], [None, 0.5]], ["a", "b"], ["c", "d"])
    shades = re.findall(r'fill-opacity="([\d.]+)" data-t="([^"]+)"', drawing.svg)
    assert [(float(shade), tip) for shade, tip in shades] == [
        (0.06, "a, c: 0"),
        (1.0, "a, d: 1"),
        (0.53, "b, d: 0.5"),
    ]


def test_a_long_label_is_cut_and_can_still_be_read() -> None:
    name = "fedlayerprune-rates.measure=taylor"
    svg = draw_bars("t", {name: 1.0, "b": 2.0}, "x").svg
    assert ">fedlayerprune-rates.mea…<" in svg
    assert f'data-t="{name}"' in svg


def test_a_curve_with_many_points_ends_with_the_last_one() -> None:
    points = thin_out(range(1001), 300)
    assert points[-1] == 1000
    # 1001 points at most 300: every fourth.
    assert points[1] == 4
    assert thin_out([1, 2], 300) == [1, 2]
    assert thin_out([], 300) == []


# ---- files ---------------------------------------------------------------------------------------


def two_lines() -> Chart:
    series = [
        Series("one", [1, 2], [3, 5], 0, band=[0.5, 0.5], label="one"),
        Series("other", [1, 2], [3, 4.9], 1, label="other"),
    ]
    return draw_xy("Score & <more>, by round", series, "round", "score")


def test_a_chart_is_a_file_of_its_own(tmp_path: Path) -> None:
    chart = two_lines()
    svg, *_ = chart.write(tmp_path)
    assert svg == tmp_path / "score-more-by-round.svg"
    root = ElementTree.fromstring(svg.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = svg.read_text()
    # Programs other than browsers know no variables, and nothing points at a file.
    assert "var(" not in text
    assert "data-t" not in text
    assert ".c0 .line { stroke: #2f6db5;" in text
    # It is written again, and another file of that name is not touched.
    chart.write(tmp_path)
    svg.write_text("mine")
    with pytest.raises(InputError, match="was not written by fedgrove"):
        chart.write(tmp_path)


def test_a_chart_is_a_pdf_too(tmp_path: Path) -> None:
    pytest.importorskip("svglib")
    svg, pdf = two_lines().write(tmp_path)
    assert [svg.suffix, pdf.suffix] == [".svg", ".pdf"]
    assert pdf.read_bytes().startswith(b"%PDF-")
    # It is written again.
    two_lines().write(tmp_path)


def test_names_at_the_ends_of_lines_do_not_lie_on_each_other() -> None:
    svg = two_lines().svg
    found = re.findall(r'<text class="tag" x="([\d.]+)" y="([\d.]+)">(\w+)</text>', svg)
    assert [name for _, _, name in found] == ["one", "other"]
    assert abs(float(found[0][1]) - float(found[1][1])) >= 11
    # The line of 5 ends above that of 4.9.
    assert float(found[0][1]) < float(found[1][1])


def test_a_legend_is_in_the_file_where_no_names_are() -> None:
    marks = [Marks("before", [1.0], 0), Marks("after", [2.0], 1)]
    text = draw_rows("t", ["a"], marks, "score").standalone()
    assert ">before</text>" in text
    assert ">after</text>" in text
    assert ">one</text>" in two_lines().standalone()
    assert two_lines().standalone().count(">one</text>") == 1
