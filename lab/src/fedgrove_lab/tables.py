"""Writes tables and the picture of README.md and the docs: ``python -m fedgrove_lab.tables``.

A docs page has a table between two comments::

    <!-- table: wire-sizes -->
    ...
    <!-- end -->

``lab/results/tables.toml`` says how each looks::

    [wire-sizes]
    result = "wire"                    # lab/results/wire.json; by default the table's own name
    only = { model = "uci-har" }       # rows whose names have these values
    rows = ["fedavg", "grove"]         # these rows, in this order; by default all
    columns = [
        { title = "method", name = "label" },
        { title = "accuracy %", measures = ["accuracy_mean:0"], scale = 100, spread = true },
    ]

With ``--check`` nothing is written, and a page that differs ends the command with 1.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedgrove.errors import InputError

from .papers.tables import pipe_table
from .picture import draw_first_run
from .results import LAB, read_result

ROOT = LAB.parent
PICTURE = ROOT / "docs" / "first-run.svg"
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class ColumnDefinition(BaseModel):
    """A column: a name of the row, or one or more of its measures."""

    model_config = ConfigDict(extra="forbid")
    title: str
    name: str = ""
    """The key of a name of the row, as ``label``."""
    rename: dict[str, str] = {}
    """Other texts for some names."""
    measures: list[str] = []
    """Mean values over seeds, with slashes between."""
    scale: float = 1
    digits: int = 1
    thousands: bool = False
    spread: bool = False
    """With the sample deviation over seeds."""
    relative_to: str = ""
    """In % of the row with this name."""


class TableDefinition(BaseModel):
    """A table of a docs page."""

    model_config = ConfigDict(extra="forbid")
    result: str = ""
    only: dict[str, str] = {}
    rows: list[str] = []
    columns: list[ColumnDefinition]
    caption: bool = True
    """Whether a line below gives the command, the date, the commit and the machine."""


def load_tables() -> dict[str, TableDefinition]:
    """Read ``lab/results/tables.toml``."""
    text = (LAB / "results" / "tables.toml").read_text()
    tables = {}
    for name, table in tomllib.loads(text).items():
        tables[name] = TableDefinition(**table)
    return tables


def write_table(name: str, table: TableDefinition) -> str:
    """Return a table in Markdown, from its result.

    Args:
        name: The table's name.
        table: How it looks.
    """
    result = read_result(table.result or name)
    rows = _choose(result["rows"], table)
    lines = []
    for row in rows:
        lines.append([_cell(column, row, rows) for column in table.columns])
    text = pipe_table([column.title for column in table.columns], lines) + "\n"
    if table.caption:
        text += f"\n{_caption(result)}\n"
    return text


def _choose(rows: Sequence[Mapping[str, Any]], table: TableDefinition) -> list[Mapping[str, Any]]:
    fitting = []
    for row in rows:
        if all(str(row.get(key)) == value for key, value in table.only.items()):
            fitting.append(row)
    if not table.rows:
        return fitting
    by_name = {row["name"]: row for row in fitting}
    return [by_name[name] for name in table.rows]


def _cell(
    column: ColumnDefinition, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    if column.name:
        text = str(row.get(column.name, ""))
        return column.rename.get(text, text)
    shown = []
    for measure in column.measures:
        values = [value for value in row["values"].get(measure, ()) if value is not None]
        if not values:
            return ""
        shown.append(_show(column, measure, values, rows))
    return " / ".join(shown)


def _show(
    column: ColumnDefinition,
    measure: str,
    values: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    scale = column.scale
    if column.relative_to:
        (base,) = (row for row in rows if row["name"] == column.relative_to)
        scale = 100 / statistics.fmean(base["values"][measure])
    spec = f"{',' if column.thousands else ''}.{column.digits}f"
    text = format(scale * statistics.fmean(values), spec)
    if column.spread and len(values) > 1:
        text += f" ± {scale * statistics.stdev(values):.{column.digits}f}"
    return text


def _caption(result: Mapping[str, Any]) -> str:
    """Where the numbers come from, in lines of at most 120 columns."""
    n = len(result["seeds"])
    seeds = f", {n} seeds" if n > 1 else ""
    text = (
        f"`{result['command']}`{seeds}; {result['machine']}, {result['date']}, "
        f"commit {result['commit']}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


# ---- pages ---------------------------------------------------------------------------------------


def fill_page(text: str, tables: Mapping[str, TableDefinition]) -> str:
    """Return the text of a docs page with every marked table written again.

    Raises:
        InputError: A page has a table that ``tables.toml`` does not define.
    """

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in tables:
            known = ", ".join(tables)
            raise InputError(f"a page has the table '{name}'; lab/results/tables.toml has {known}.")
        # Blank lines, since Markdown knows a table only as a paragraph of its own.
        return f"{begin}\n{write_table(name, tables[name])}\n{end}"

    return MARKED.sub(fill, text)


def find_pages() -> Iterator[Path]:
    """Yield README.md and all docs pages."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def find_changes() -> dict[Path, str]:
    """Return the files that differ from the results, each with the text that it should have."""
    tables = load_tables()
    changes = {}
    for page in find_pages():
        text = page.read_text()
        filled = fill_page(text, tables)
        if filled != text:
            changes[page] = filled
    picture = draw_first_run()
    if not PICTURE.exists() or PICTURE.read_text() != picture:
        changes[PICTURE] = picture
    return changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of README.md and the docs from lab/results."""
    parser = argparse.ArgumentParser("python -m fedgrove_lab.tables", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; 1 where pages differ.")
    check = parser.parse_args(arguments).check
    changes = find_changes()
    for page, text in changes.items():
        if not check:
            page.write_text(text)
        print(f"{page.relative_to(ROOT)} {'differs' if check else 'was written'}")
    return int(check and bool(changes))


if __name__ == "__main__":
    sys.exit(main())
