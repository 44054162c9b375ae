"""A table of a paper about its data: computed from the federation, with nothing trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from fedgrove.data import Federation
from fedgrove.report.terminal import name_columns, number_columns, print_table, print_text


@dataclass(frozen=True)
class Fact:
    """One line of such a table on one data set: a measure, ours, and the paper's."""

    measure: str
    ours: float
    paper: float | None = None
    digits: int = 0


@dataclass(frozen=True)
class DataTable:
    """A table about the data: the sets it is on, and its lines on one of them."""

    data: tuple[str, ...]
    title: str
    about: str
    facts: Callable[[str, Federation], Sequence[Fact]]
    """From a data set's name and its federation, whose inputs are as they were measured."""
    notes: tuple[str, ...] = ()
    look: str = "motion"
    """The built-in data of a quick look."""


def compared(
    paper: str, part: str, table: DataTable, federations: Mapping[str, Federation]
) -> dict[str, Any]:
    """The table as one object, as ``fedgrove paper --json`` prints it."""
    rows = []
    for name, federation in federations.items():
        for fact in table.facts(name, federation):
            difference = None if fact.paper is None else round(fact.ours - fact.paper, 8)
            row = {
                "data": federation.name,
                "measure": fact.measure,
                "ours": fact.ours,
                "paper": fact.paper,
                "difference": difference,
                "digits": fact.digits,
            }
            rows.append(row)
    return {
        "paper": paper,
        "part": part,
        "title": table.title,
        "about": table.about,
        "rows": rows,
        "notes": list(table.notes),
    }


HEAD = ["data", "measure", "ours", "paper", "difference"]


def _lines(comparison: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for row in comparison["rows"]:
        digits = row["digits"]
        line = [row["data"], row["measure"], f"{row['ours']:.{digits}f}"]
        if row["paper"] is None:
            line += ["", ""]
        else:
            line += [f"{row['paper']:.{digits}f}", f"{row['difference']:+.{digits}f}"]
        lines.append(line)
    return lines


def print_data_table(comparison: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the table and its notes."""
    print_text(comparison["title"], file)
    print_text(comparison["about"], file)
    print_table(
        [*name_columns(*HEAD[:2]), *number_columns(*HEAD[2:])], _lines(comparison), file, "table.md"
    )
    for note in comparison["notes"]:
        print_text(note, file)


def markdown_of_data(comparison: Mapping[str, Any]) -> str:
    """The table as it goes into a page of docs."""
    rows = []
    for cells in (HEAD, ["---"] * len(HEAD), *_lines(comparison)):
        rows.append(f"| {' | '.join(cells)} |")
    blocks = [f"**{comparison['title']}.** {comparison['about']}", "\n".join(rows)]
    blocks += [f"- {note}" for note in comparison["notes"]]
    return "\n\n".join(blocks) + "\n"
