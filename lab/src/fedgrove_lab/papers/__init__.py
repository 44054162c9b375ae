"""What papers ran and what they report; ``fedgrove paper NAME`` runs it again beside their figures.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py``, which holds one
:class:`Paper` named ``PAPER``.
"""

from __future__ import annotations

import importlib
import pkgutil

from fedgrove.errors import InputError, check, unknown

from .data_table import DataTable
from .studies import Paper, Part, Row, Setting, Study, experiments

__all__ = [
    "DataTable",
    "Paper",
    "Part",
    "Row",
    "Setting",
    "Study",
    "experiments",
    "find",
    "names",
    "parts",
]

NOT_PAPERS = ("beside", "data_table", "page", "studies")
"""Modules of this folder that hold no paper. All others do, so names() need not import them."""


def names() -> list[str]:
    """The papers there are, by their names on the command line."""
    papers = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in NOT_PAPERS:
            papers.append(module.name.replace("_", "-"))
    return sorted(papers)


def find(name: str) -> Paper:
    """A paper by name.

    >>> sorted(find("ca-afp").tables)
    [1, 2, 3, 4]
    """
    if name not in names():
        raise unknown("paper", name, names())
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    paper: Paper = module.PAPER
    return paper


def parts(name: str, table: int | None, figure: int | None) -> dict[str, Part | DataTable]:
    """The parts of a paper with these numbers, by word, such as ``table2`` and ``figure3``."""
    paper = find(name)
    tables = ", ".join(str(n) for n in paper.tables)
    figures = ", ".join(str(n) for n in paper.figures)
    if table is None and figure is None:
        raise InputError(
            f"neither --table nor --figure was given; "
            f"{name} has --table {tables} and --figure {figures}."
        )
    wanted: dict[str, Part | DataTable] = {}
    if table is not None:
        allowed = f"one of {tables}, those of {name} that are run here"
        check(table in paper.tables, "--table", table, allowed)
        wanted[f"table{table}"] = paper.tables[table]
    if figure is not None:
        allowed = f"one of {figures}, those of {name} that are run here"
        check(figure in paper.figures, "--figure", figure, allowed)
        wanted[f"figure{figure}"] = paper.figures[figure]
    return wanted
