"""Which columns fit, and that no figure is ever cut."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.report.fit import Column, broken, fit, print_table, print_text


def printed(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> str:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        print_table(columns, rows, out)
    return out.getvalue()


COLUMNS = [
    Column("run", is_name=True),
    Column("accuracy\n%"),
    Column("seconds", 2),
    Column("params", 1),
]
ROWS = [["a", "94.12 ± 10.00", "1.2", "8,970"], ["b", "unfinished"]]


def test_lower_ranks_come_first_and_the_others_are_named() -> None:
    # 3 + 13 + 7 + 6 and three gaps of 2 are 35; without seconds 26; without params too 18.
    assert "no room" not in printed(COLUMNS, ROWS, 35)
    text = printed(COLUMNS, ROWS, 34)
    assert text.splitlines()[2].split() == ["a", "94.12", "±", "10.00", "8,970"]
    assert " ".join(text.split()).endswith(
        "no room for the column seconds: set COLUMNS=35, or see --json"
    )
    assert "8,970" not in printed(COLUMNS, ROWS, 25)


def test_narrower_than_any_table_it_runs_over_and_cuts_nothing() -> None:
    assert "94.12 ± 10.00" in printed(COLUMNS, ROWS, 10)


def test_a_long_name_is_broken_before_a_figure_is_left_out() -> None:
    rows = [["runs/sweep/ca-afp-density=0.3-every=5-s0", "94.12", "1.2", "8,970"]]
    text = printed(COLUMNS, rows, 50)
    assert "no room" not in text
    # In pieces of at most .35 of the width: 17.
    first = [line.split()[0] for line in text.splitlines()[2:]]
    assert first == ["runs/sweep/ca-", "afp-density=0.3-", "every=5-s0"]


def test_a_path_is_not_broken_in_a_text() -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "20")
        print_text("written to runs/a-folder-with-a-long-name/report.html", out)
    assert out.getvalue() == "written to\nruns/a-folder-with-a-long-name/report.html\n"


figures = st.integers(0, 10**9).map(lambda n: f"{n:,}")
ranked = st.tuples(st.integers(0, 4), figures)


@given(
    st.text("ab/-_1. ", max_size=60).map(str.strip),
    st.lists(ranked, min_size=1, max_size=9),
    st.integers(80, 140),
)
def test_every_table_fits_and_every_figure_is_whole(
    name: str, cells: list[tuple[int, str]], width: int
) -> None:
    columns = [Column("run", is_name=True)]
    for i, (rank, _) in enumerate(cells):
        # At most two that must be shown, so that they can be.
        columns.append(Column(f"f{i}", rank if rank or i < 2 else 1))
    row = [name, *(figure for _, figure in cells)]
    text = printed(columns, [row], width)
    assert max(len(line) for line in text.splitlines()) <= width
    shown = fit(columns, [row], width).shown
    body = text.split("no room for")[0].split()
    for i in shown[1:]:
        assert row[i] in body
    for i, column in enumerate(columns):
        assert i in shown or column.rank > 0


@given(st.text("ab/-_1. ", max_size=60), st.integers(8, 40))
def test_a_broken_name_loses_no_character_but_spaces(name: str, width: int) -> None:
    pieces = broken(name, width).splitlines()
    assert "".join("".join(pieces).split()) == "".join(name.split())
    assert all(len(piece) <= width for piece in pieces)
