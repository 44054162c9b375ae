"""What papers ran and what they report; ``fedgrove paper NAME`` runs it again and compares.

The folder is the registry: ``ca-afp`` on the command line is ``ca-afp.toml``.
"""

from __future__ import annotations

from fedgrove.errors import InputError, check, unknown

from .definition import FOLDER, build_paper
from .study import (
    DataTable,
    Fact,
    Matrix,
    Paper,
    Study,
    StudyOptions,
    StudyPart,
    StudyRow,
    experiments,
)

__all__ = [
    "DataTable",
    "Fact",
    "Matrix",
    "Paper",
    "Study",
    "StudyOptions",
    "StudyPart",
    "StudyRow",
    "experiments",
    "find",
    "names",
    "parts",
]


def names() -> list[str]:
    """Return the papers there are, by their names on the command line."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str) -> Paper:
    """Return a paper by name.

    >>> sorted(find("ca-afp").tables)
    [1, 2, 3, 4]
    """
    if name not in names():
        raise unknown("paper", name, names())
    return build_paper(name)


def parts(name: str, table: int | None, figure: int | None) -> dict[str, StudyPart | DataTable]:
    """Return the parts of a paper with these numbers, by name: ``table2``, ``figure3``."""
    paper = find(name)
    tables = ", ".join(str(n) for n in paper.tables)
    figures = ", ".join(str(n) for n in paper.figures)
    if table is None and figure is None:
        raise InputError(
            f"neither --table nor --figure was given; "
            f"{name} has --table {tables} and --figure {figures}."
        )
    wanted: dict[str, StudyPart | DataTable] = {}
    if table is not None:
        allowed = f"one of {tables}, those of {name} that are run here"
        check(table in paper.tables, "--table", table, allowed)
        wanted[f"table{table}"] = paper.tables[table]
    if figure is not None:
        allowed = f"one of {figures}, those of {name} that are run here"
        check(figure in paper.figures, "--figure", figure, allowed)
        wanted[f"figure{figure}"] = paper.figures[figure]
    return wanted
