"""Which columns fit, and that no figure is ever cut."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgrove
from fedgrove.report.progress import show_progress
from fedgrove.report.terminal import (
    ERASE,
    Column,
    break_name,
    choose_columns,
    is_live_terminal,
    print_table,
    print_text,
    show_status,
    strip_markup,
    wrap_docstring,
)


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
        "no room for the column seconds: set COLUMNS=35, or see .frame()"
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


def test_a_name_with_control_characters_is_printed_without_them() -> None:
    rows = [["\x1b[31mrun\u202e", "94.12", "1.2", "8,970"]]
    text = printed(COLUMNS, rows, 80)
    assert "?[31mrun?" in text
    assert all(line.isprintable() for line in text.splitlines())
    out = io.StringIO()
    print_text("client \x1b[2Jann", out)
    assert out.getvalue() == "client ?[2Jann\n"


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
    shown = choose_columns(columns, [row], width).shown
    body = text.split("no room for")[0].split()
    for i in shown[1:]:
        assert row[i] in body
    for i, column in enumerate(columns):
        assert i in shown or column.rank > 0


@given(st.text("ab/-_1. ", max_size=60), st.integers(8, 40))
def test_a_broken_name_loses_no_character_but_spaces(name: str, width: int) -> None:
    pieces = break_name(name, width).splitlines()
    assert "".join("".join(pieces).split()) == "".join(name.split())
    assert all(len(piece) <= width for piece in pieces)


LINE = {"round": 1, "bytes_up": 0, "bytes_down": 0, "accuracy_mean": 0.5}


class Terminal(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_a_terminal_is_told_at_once_and_then_the_line_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_for(monkeypatch)
    with show_status("loading torch") as say:
        assert terminal.getvalue() == f"{ERASE}fedgrove: loading torch ..."
        say("reading the data")
    assert terminal.getvalue().endswith(f"{ERASE}fedgrove: reading the data ...{ERASE}")


def test_the_line_is_gone_before_an_error_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with pytest.raises(ValueError, match="x"), show_status("loading"):
        raise ValueError("x")
    assert terminal.getvalue().endswith(ERASE)


def test_quiet_and_logs_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with show_status("loading", quiet=True):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_status("loading"):
        pass
    assert sys.stderr.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live_terminal(terminal)
    with show_progress(1, title="round 0/1  fedavg on digits") as watch:
        watch(LINE)
    first, last = terminal.getvalue().splitlines()
    assert first == "round 0/1  fedavg on digits"
    assert last.startswith("round 1/1  accuracy 50.0 %")
    assert "\033" not in terminal.getvalue()


def test_a_terminal_without_signs_gets_words_for_them() -> None:
    program = (
        "import sys\n"
        "from fedgrove.report.terminal import write_ascii_where_needed as w\n"
        "w()\nprint('3 ± 1 × 2 … é')\nprint('µ', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedgrove.__file__).parents[1]),
            "PYTHONIOENCODING": "ascii",
        },
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"3 +- 1 x 2 ... ?\n"
    assert done.stderr == b"u\n"


def test_no_name_of_a_file_breaks_an_output() -> None:
    """A name of a file whose bytes are no UTF-8 has surrogates in Python, which no encoding takes."""
    program = (
        "from fedgrove.report.terminal import write_ascii_where_needed as w\n"
        "w()\nprint('anna\\udcff ± µ')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedgrove.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "anna? ± µ\n"


DOC = """Method: what it does.

Round :math:`t`, weights :math:`\\lambda_k`, **bold** and `a link`_; see :class:`~fedgrove.core.Give`
and :func:`the mean <fedgrove.trees.mean>`::

    w_k = min CE + mu/2 |w - w_ref|^2 from w_c, a few more words              -> Train
    w   = mean                                                                -> WeightedMean

- one item that is long enough to be broken into two lines, as one sees
- another
"""


def test_golden_at_sixty_columns() -> None:
    expected = """Method: what it does.

Round t, weights lambda_k, bold and a link; see
fedgrove.core.Give and the mean:

    w_k = min CE + mu/2 |w - w_ref|^2 from w_c, a few more
        words                                       -> Train
    w   = mean                               -> WeightedMean

- one item that is long enough to be broken into two lines,
  as one sees
- another"""
    assert wrap_docstring(DOC, 60) == expected


def test_where_there_is_room_equations_stay_as_they_were_written() -> None:
    rows = wrap_docstring(DOC, 100).splitlines()
    assert [row for row in rows if "->" in row] == DOC.splitlines()[5:7]


def test_signs_that_are_no_markup_stay() -> None:
    assert strip_markup("a * b * c, 2 ** 3, n_k_") == "a * b * c, 2 ** 3, n_k_"
