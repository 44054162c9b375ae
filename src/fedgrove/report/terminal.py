"""Terminal output that fits: status line, wrapped text, tables, docstrings, ASCII where needed.

A table column has a rank. Columns of rank 0 are always shown; the others are added in order of rank
as long as they fit, and a line below the table names those that are left out. A number is never cut
or broken. A name may be broken, for example after a slash or a dash.

rich is imported inside functions only: ``fedgrove --help`` and the status line come without it.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, NamedTuple, TextIO, TypeAlias

from ..errors import make_printable, spell_hint

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Cell: TypeAlias = "str | Text"

ENCODING_ERRORS = "fedgrove"
"""The name under which :func:`replace_signs` is registered with :mod:`codecs`."""
ERASE = "\r\033[K"
"""Moves the cursor to the start of the line and deletes the line."""

COLUMN_GAP = 2
"""Spaces between table columns."""
NAME_SHARE = 0.35
"""The largest share of the width that a name takes before it is broken."""
SHORTEST_NAME = 8
"""A name is broken into pieces of at least this width."""


# ---- what the terminal can do --------------------------------------------------------------------


def write_ascii_where_needed() -> None:
    """Let stdout and stderr replace signs that their encoding lacks, instead of failing."""
    codecs.register_error(ENCODING_ERRORS, replace_signs)
    for stream in (sys.stdout, sys.stderr):
        # The streams of a notebook or a test are of other types and take any text. Unicode has all
        # signs, but not the surrogates in the name of a file whose bytes are no text.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ENCODING_ERRORS)


def replace_signs(error: UnicodeError) -> tuple[str, int]:
    """Replace signs of a table that the terminal cannot show; return where encoding continues.

    >>> codecs.register_error(ENCODING_ERRORS, replace_signs)
    >>> "3 ± 1 é".encode("ascii", errors=ENCODING_ERRORS)
    b'3 +- 1 ?'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = _read_replacements()["signs"]
    return "".join(plain.get(sign, "?") for sign in signs), error.end


@cache
def _read_replacements() -> dict[str, dict[str, str]]:
    # Read here: most processes need none of it.
    text = Path(__file__).with_name("plain_text.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def is_live_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which a line can be overwritten."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return stream.isatty() and not is_dumb


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console on ``file`` or stdout; its width is COLUMNS, the terminal's, or 80."""
    from rich.console import Console

    # Without markup, because a name with square brackets is not a style.
    # In a notebook rich would show what is meant for the file.
    force_jupyter = None if file is None else False
    file = file or sys.stdout
    return Console(file=file, highlight=False, markup=False, force_jupyter=force_jupyter)


# ---- before the first round ----------------------------------------------------------------------


@contextmanager
def show_status(what: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on stderr what the program is waiting for; yield a function that changes the text.

    It is one line, on a live terminal only, and is deleted at the end. It is hand-written because
    it appears before anything is imported, and importing rich would delay it.
    """
    is_shown = not quiet and is_live_terminal(sys.stderr)

    def show(text: str) -> None:
        if is_shown:
            sys.stderr.write(f"{ERASE}fedgrove: {text} ...")
            sys.stderr.flush()

    show(what)
    try:
        yield show
    finally:
        if is_shown:
            sys.stderr.write(ERASE)
            sys.stderr.flush()


def load_torch(quiet: bool = False) -> None:
    """Import torch, which takes a second or two, and show that on stderr meanwhile."""
    with show_status("loading torch", quiet):
        import_module("torch")


# ---- text ----------------------------------------------------------------------------------------


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text between words; a long word such as a path stays whole, so it can be copied."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def print_text(text: str, file: IO[str] | None = None) -> None:
    """Print a sentence, broken between words where it is too long for the terminal."""
    # Not printed by rich, which would break a long word.
    for line in _wrap(text, make_console(file).width) or [""]:
        print(make_printable(line), file=file)


def print_pairs(pairs: Sequence[tuple[str, str]], file: IO[str] | None = None) -> None:
    """Print names and their values in two columns; on a narrow terminal below each other."""
    width = make_console(file).width
    widest = max((len(name) for name, _ in pairs), default=0)
    indent = widest + 2
    has_two_columns = indent <= width // 2
    if not has_two_columns:
        indent = 4
    for name, value in pairs:
        lines = _wrap(value, max(20, width - indent))
        if has_two_columns:
            first = lines.pop(0) if lines else ""
            print(f"{name:{indent}}{first}".rstrip(), file=file)
        else:
            print(name, file=file)
        for line in lines:
            print(f"{'':{indent}}{line}", file=file)


# ---- tables --------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A table column: its head, how soon it is left out, and whether it shows names or numbers."""

    head: str
    rank: int = 0
    """Columns of rank 0 are always shown; of the others, lower ranks come first."""
    is_name: bool = False
    label: str = ""
    """The column's name in a sentence, if the head is not enough."""

    @property
    def full_label(self) -> str:
        """The column's name in a sentence."""
        return self.label or " ".join(self.head.split())


class ColumnChoice(NamedTuple):
    """The columns that are shown, the width of every column, and the width that all need."""

    shown: list[int]
    widths: list[int]
    needed: int


def name_columns(*heads: str) -> list[Column]:
    """Return columns of names that are always shown."""
    return [Column(head, is_name=True) for head in heads]


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    file: IO[str] | None = None,
    elsewhere: str = "",
) -> None:
    """Print the columns that fit, and a line that names those that do not.

    Args:
        columns: All columns.
        rows: The cells. A row may end early: its other cells are empty.
        file: Where to print; stdout by default.
        elsewhere: Where the reader finds all columns; by default --json, or a DataFrame.
    """
    console = make_console(file)
    rows = _clean_names(columns, rows)
    choice = choose_columns(columns, rows, console.width)
    # On a terminal narrower than the columns of rank 0, lines run over: better than cutting them.
    console.width = max(console.width, _total_width(choice.widths, choice.shown))
    console.print(_make_table(columns, rows, choice), crop=False)
    left_out = [each.full_label for i, each in enumerate(columns) if i not in choice.shown]
    if left_out:
        wider = f"use a terminal of {choice.needed} columns"
        if not console.is_terminal:
            # A pipe has no width of its own, but respects this variable.
            variable = "JUPYTER_COLUMNS" if console.is_jupyter else "COLUMNS"
            wider = f"set {variable}={choice.needed}"
        noun = "column" if len(left_out) == 1 else "columns"
        elsewhere = elsewhere or spell_hint("--json", ".frame()")
        print_text(
            f"no room for the {noun} {', '.join(left_out)}: {wider}, or see {elsewhere}", file
        )


def _clean_names(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Return the rows with names that a terminal can show: those of folders may be anything."""
    cleaned = []
    for row in rows:
        cells: list[Cell] = list(row)
        # A row may end early.
        for i, (column, cell) in enumerate(zip(columns, row, strict=False)):
            if column.is_name:
                cells[i] = "\n".join(map(make_printable, str(cell).splitlines()))
        cleaned.append(cells)
    return cleaned


def print_rows(
    rows: Sequence[Mapping[Column, Cell]], file: IO[str] | None = None, elsewhere: str = ""
) -> None:
    """Print rows that give their cells by column; all rows have the same columns.

    Args:
        rows: The rows; nothing is printed if there are none.
        file: Where to print; stdout by default.
        elsewhere: Where the reader finds all columns; by default --json, or a DataFrame.
    """
    if rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows], file, elsewhere)


def choose_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int
) -> ColumnChoice:
    """Choose the columns that fit into ``width``.

    >>> columns = [*name_columns("run"), Column("accuracy"), Column("seconds", 1), Column("MiB", 2)]
    >>> choose_columns(columns, [["a", "91.20", "1200.5", "3.1"]], 24).shown
    [0, 1, 2]
    >>> choose_columns(columns, [["a", "91.20", "1200.5", "3.1"]], 20).shown
    [0, 1, 3]
    """
    widths = [_full_width(i, columns, rows) for i in range(len(columns))]
    everything = list(range(len(columns)))
    needed = _total_width(widths, everything)
    if needed <= width:
        return ColumnChoice(everything, widths, needed)

    widest_name = max(SHORTEST_NAME, int(NAME_SHARE * width))
    for i, column in enumerate(columns):
        if column.is_name:
            widths[i] = min(widths[i], widest_name)
    shown = [i for i in everything if columns[i].rank == 0]
    _narrow_names(columns, widths, shown, width)
    for i in sorted(everything, key=lambda i: columns[i].rank):
        # A column that is too wide does not keep out a narrower one after it.
        if i not in shown and _total_width(widths, [*shown, i]) <= width:
            shown.append(i)
    return ColumnChoice(sorted(shown), widths, needed)


def break_name(name: str, width: int) -> str:
    """Break a name into lines of at most ``width``, where a reader would break it.

    >>> break_name("runs/sweep/fedprox-mu=0.1-s0", 12).splitlines()
    ['runs/sweep/', 'fedprox-', 'mu=0.1-s0']
    """
    lines = [""]
    # After a slash, comma, space or dash; not before a digit, which may belong to an exponent.
    for piece in re.findall(r".+?(?:[/,_ ]|-(?!\d)|$)", name):
        rest = piece
        if lines[-1] and _text_width(lines[-1] + rest.rstrip()) > width:
            lines.append("")
        while _text_width(rest.rstrip()) > width:
            lines[-1] = rest[:width]
            lines.append("")
            rest = rest[width:]
        lines[-1] += rest
    return "\n".join(line.rstrip() for line in lines if line.strip())


def split_common_folder(paths: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that directly contains all paths, or "", and the rest of each path.

    >>> split_common_folder(["runs/sweep/a-s0", "runs/sweep/b-s0"])
    ('runs/sweep', ['a-s0', 'b-s0'])
    >>> split_common_folder(["a", "runs/b"])
    ('', ['a', 'runs/b'])
    """
    parents = {PurePath(path).parent for path in paths}
    # One path alone keeps its folder, and "." is not worth naming.
    if len(set(paths)) < 2 or len(parents) > 1 or parents == {PurePath()}:
        return "", list(paths)
    return str(parents.pop()), [PurePath(path).name for path in paths]


def _text_width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _full_width(i: int, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> int:
    """Return the width that column ``i`` needs if nothing is broken."""
    lines = columns[i].head.splitlines()
    for row in rows:
        if i < len(row):
            lines += str(row[i]).splitlines()
    return max(map(_text_width, lines), default=0)


def _total_width(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + COLUMN_GAP * max(0, len(shown) - 1)


def _narrow_names(
    columns: Sequence[Column], widths: list[int], shown: Sequence[int], width: int
) -> None:
    """Narrow the widest name, a character at a time, until the columns ``shown`` fit."""
    while _total_width(widths, shown) > width:
        wide = [i for i in shown if columns[i].is_name and widths[i] > SHORTEST_NAME]
        if not wide:
            return
        widest = max(wide, key=lambda i: widths[i])
        widths[widest] -= 1


def _make_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], choice: ColumnChoice
) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for i in choice.shown:
        if columns[i].is_name:
            lines = columns[i].head.splitlines()
            head = "\n".join(break_name(line, choice.widths[i]) for line in lines)
            table.add_column(head, no_wrap=True)
        else:
            table.add_column(columns[i].head, justify="right", no_wrap=True)
    for row in rows:
        cells: list[Cell] = []
        for i in choice.shown:
            cell: Cell = row[i] if i < len(row) else ""
            if columns[i].is_name:
                # rich itself breaks text at spaces only.
                cell = break_name(str(cell), choice.widths[i])
            cells.append(cell)
        table.add_row(*cells)
    return table


# ---- docstrings ----------------------------------------------------------------------------------


def wrap_docstring(docstring: str, width: int) -> str:
    """Return a docstring for a terminal: no markup, paragraphs filled, equations line by line.

    >>> print(wrap_docstring("One two three.", 10))
    One two
    three.
    """
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if lines:
            lines.append("")
        rows = strip_markup(block).splitlines()
        if rows[0].startswith(" "):
            for row in rows:
                lines += _wrap_equation(row, width)
        else:
            lines += _fill_paragraph(rows, width)
    return "\n".join(lines)


def strip_markup(text: str) -> str:
    r"""Return a text without the markup of docstrings; formulas become plain text.

    >>> strip_markup(r"Shares :math:`\rho_t`; see :mod:`fedgrove.methods.ditto`, ``--set``::")
    'Shares rho_t; see fedgrove.methods.ditto, --set:'
    """
    text = re.sub(r":math:`([^`]*)`", lambda match: formula_as_text(match[1]), text)
    # A role shows its title, or else its target.
    text = re.sub(r":\w+:`([^`<]+?)\s*<[^`]*>`", r"\1", text)
    text = re.sub(r":\w+:`[~!]?([^`]*)`", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"`([^`\n]+)`_{0,2}", r"\1", text)
    text = re.sub(r"\*\*(\S[^*]*?)\*\*", r"\1", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def formula_as_text(latex: str) -> str:
    r"""Return a LaTeX formula as plain text.

    >>> formula_as_text(r"d\,(1 - (1 - \rho)\, s / n)")
    'd (1 - (1 - rho) s / n)'
    >>> formula_as_text(r"\frac{a + 1}{b_{up}} \le x^{2}"), formula_as_text(r"\sqrt{n} \in S_t")
    ('(a + 1)/b_up <= x^2', 'sqrt(n) in S_t')
    """
    text = re.sub(r"\\[,;!: ]|~", " ", latex)
    # The braces of a set are doubled for now, to tell them from braces that only group.
    text = text.replace(r"\|", "||").replace(r"\{", "{{").replace(r"\}", "}}")
    group = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
    text = re.sub(rf"\\[dt]?frac{group}{group}", _fraction_as_text, text)
    text = re.sub(rf"\\sqrt{group}", r"sqrt(\1)", text)
    text = re.sub(r"\\([A-Za-z]+)", _symbol_as_text, text)
    text = re.sub(r"(?<!\{)\{([^{}]*)\}(?!\})", r"\1", text)
    return " ".join(text.replace("{{", "{").replace("}}", "}").split())


def _fraction_as_text(match: re.Match[str]) -> str:
    parts = []
    for part in match.groups():
        has_several_terms = " " in part.strip()
        parts.append(f"({part})" if has_several_terms else part)
    return "/".join(parts)


def _symbol_as_text(match: re.Match[str]) -> str:
    return _read_replacements()["latex"].get(match[1], match[1])


def _fill_paragraph(rows: Sequence[str], width: int) -> list[str]:
    """Fill a paragraph or a list; the lines of a list item start below its first word."""
    bullet = re.compile(r"([-*]|\d+\.) ")
    items: list[str] = []
    for row in rows:
        if bullet.match(row) or not items:
            items.append(row)
        else:
            items[-1] += " " + row.strip()
    lines: list[str] = []
    for item in items:
        found = bullet.match(item)
        indent = len(found[0]) if found else 0
        lines += _wrap(item, width, " " * indent)
    return lines


def _wrap_equation(row: str, width: int) -> list[str]:
    """Wrap a line of an equation; the function that computes it moves to the right or below."""
    row = row.rstrip()
    if len(row) <= width:
        return [row]
    equation, arrow, function = row.partition(" -> ")
    indent = len(row) - len(row.lstrip()) + 4
    lines = _wrap(equation.rstrip(), width, " " * indent)
    if arrow:
        computed_by = f"-> {function.strip()}"
        # A line that begins with the arrow continues the one above: it has no equation.
        if lines and len(lines[-1]) + 2 + len(computed_by) <= width:
            lines[-1] += f"{computed_by:>{width - len(lines[-1])}}"
        else:
            lines.append(f"{computed_by:>{width}}")
    return lines
