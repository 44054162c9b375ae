"""Tables as wide as the terminal: the columns there is room for, and a line about the others.

A column has a rank. Rank 0 is always there; the others come in order of rank as long as they fit.
A figure is never cut or broken. A name may be broken, after a slash or a dash say.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import PurePath
from typing import IO, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | Text
GAP = 2
"""Spaces between columns."""
NAME_SHARE = 0.35
"""How much of the width a long name may take before it is broken."""
SHORTEST_NAME = 8
"""A name is broken into pieces that are no narrower than this."""


class Column(NamedTuple):
    """A column: its head, how soon it is left out, and whether it holds names or figures."""

    head: str
    rank: int = 0
    """0 is always shown; of the others, the lower ranks come first."""
    is_name: bool = False
    called: str = ""
    """What it is called where it is left out; else as its head."""

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.called or " ".join(self.head.split())


class Fitted(NamedTuple):
    """Which columns are shown, how wide each is, and how wide a terminal would show all."""

    shown: list[int]
    widths: list[int]
    needed: int


def names(*heads: str) -> list[Column]:
    """Columns of names that are always shown."""
    return [Column(head, is_name=True) for head in heads]


def figures(*heads: str, first: int = 0) -> list[Column]:
    """Columns of figures, each less important than the one before it.

    >>> [column.rank for column in figures("mean", "worst", "seconds")]
    [0, 1, 2]
    """
    columns = []
    for i, head in enumerate(heads):
        columns.append(Column(head, rank=first + i))
    return columns


def console(file: IO[str] | None = None) -> Console:
    """A console on ``file``, or on stdout, as wide as COLUMNS says, the terminal is, or 80."""
    # Without markup, because a name with square brackets is not a style.
    return Console(file=file or sys.stdout, highlight=False, markup=False)


def print_text(text: str, file: IO[str] | None = None) -> None:
    """Print a sentence, broken between words where it is too long for the terminal.

    A word that is longer than a line, such as a path, stays whole, so that it can be copied.
    """
    out = console(file)
    lines = textwrap.wrap(text, out.width, break_long_words=False, break_on_hyphens=False)
    for line in lines or [""]:
        # Not by rich, which would break a long word.
        print(line, file=file)


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    file: IO[str] | None = None,
    elsewhere: str = "--json",
) -> None:
    """Print the columns that fit, and a line that names those that do not.

    ``elsewhere`` is where all of them can be seen. A row may end early: its other cells are empty.
    """
    out = console(file)
    fitted = fit(columns, rows, out.width)
    # On a terminal narrower than what is always shown, lines run over: better than to cut them.
    out.width = max(out.width, _total(fitted.widths, fitted.shown))
    out.print(_table(columns, rows, fitted), crop=False)
    left_out = [column.words for i, column in enumerate(columns) if i not in fitted.shown]
    if left_out:
        # A pipe has no width of its own, but takes one.
        wider = f"use a terminal of {fitted.needed} columns"
        if not out.is_terminal:
            wider = f"set COLUMNS={fitted.needed}"
        words = "column" if len(left_out) == 1 else "columns"
        names = ", ".join(left_out)
        print_text(f"no room for the {words} {names}: {wider}, or see {elsewhere}", file)


def fit(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> Fitted:
    """Choose the columns that fit into ``width``.

    >>> table = names("run"), figures("accuracy", "seconds", "MiB")
    >>> columns = [*table[0], *table[1]]
    >>> fit(columns, [["a", "91.20", "1200.5", "3.1"]], 24).shown
    [0, 1, 2]
    >>> fit(columns, [["a", "91.20", "1200.5", "3.1"]], 20).shown
    [0, 1, 3]
    """
    natural = [_natural(i, columns, rows) for i in range(len(columns))]
    everything = list(range(len(columns)))
    needed = _total(natural, everything)
    if needed <= width:
        return Fitted(everything, natural, needed)

    widths = list(natural)
    for i, column in enumerate(columns):
        if column.is_name:
            most = max(SHORTEST_NAME, int(NAME_SHARE * width))
            widths[i] = min(widths[i], most)
    shown = [i for i, column in enumerate(columns) if column.rank == 0]
    _narrow_names(columns, widths, shown, width)
    for i in sorted(everything, key=lambda i: columns[i].rank):
        # One that is too wide does not keep a narrower one behind it from being shown.
        if i not in shown and _total(widths, [*shown, i]) <= width:
            shown.append(i)
    return Fitted(sorted(shown), widths, needed)


def in_one_folder(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that all paths have in common, and what is left of each; "" if there is none.

    >>> in_one_folder(["runs/sweep/a-s0", "runs/sweep/b-s0"]), in_one_folder(["a", "runs/b"])
    (('runs/sweep', ['a-s0', 'b-s0']), ('', ['a', 'runs/b']))
    """
    parents = [PurePath(path).parent for path in paths]
    first = parents[0] if parents else PurePath()
    is_common = len(set(paths)) > 1 and set(parents) == {first} and first != PurePath()
    if not is_common:
        return "", list(paths)
    return str(first), [PurePath(path).name for path in paths]


def broken(name: str, width: int) -> str:
    """A name in lines of at most ``width``, broken where a reader would break it.

    >>> broken("runs/sweep/fedprox-mu=0.1-s0", 12).splitlines()
    ['runs/sweep/', 'fedprox-', 'mu=0.1-s0']
    """
    lines = [""]
    # After a slash, a comma, a space or a dash; not before a digit, which may be an exponent's.
    for piece in re.findall(r".+?(?:[/,_ ]|-(?!\d)|$)", name):
        rest = piece
        if cell_len(lines[-1] + rest.rstrip()) > width and lines[-1]:
            lines.append("")
        while cell_len(rest.rstrip()) > width:
            lines[-1] = rest[:width]
            lines.append("")
            rest = rest[width:]
        lines[-1] += rest
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _natural(i: int, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> int:
    texts = columns[i].head.splitlines()
    for row in rows:
        if i < len(row):
            texts += str(row[i]).splitlines()
    return max((cell_len(text) for text in texts), default=0)


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + GAP * max(0, len(shown) - 1)


def _narrow_names(
    columns: Sequence[Column], widths: list[int], shown: Sequence[int], width: int
) -> None:
    """Take from the widest name, a column at a time, until what is always shown fits."""
    while _total(widths, shown) > width:
        wide = [i for i in shown if columns[i].is_name and widths[i] > SHORTEST_NAME]
        if not wide:
            return
        widest = max(wide, key=lambda i: widths[i])
        widths[widest] -= 1


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], fitted: Fitted) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for i in fitted.shown:
        if columns[i].is_name:
            table.add_column(_wrapped_head(columns[i].head, fitted.widths[i]), no_wrap=True)
        else:
            table.add_column(columns[i].head, justify="right", no_wrap=True)
    for row in rows:
        cells: list[Cell] = []
        for i in fitted.shown:
            cell: Cell = row[i] if i < len(row) else ""
            if columns[i].is_name:
                cell = broken(str(cell), fitted.widths[i])
            cells.append(cell)
        table.add_row(*cells)
    return table


def _wrapped_head(head: str, width: int) -> str:
    lines = []
    for line in head.splitlines():
        lines.append(broken(line, width))
    return "\n".join(lines)
