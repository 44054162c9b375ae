"""Tables for a paper: averages over seeds as Markdown, LaTeX and CSV.

A score has a column for each length of fine-tuning, which says so. All numbers of a column have the
same digits after the point, and the best mean is bold.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from .. import methods
from ..errors import FedgroveError, make_printable
from . import tables
from .page import check_place, render
from .seed_averages import Group, differing_columns, split_lengths
from .tables import Scores

TABLE_FORMATS = (".md", ".tex", ".csv")
MOST_DIGITS = 4
"""Digits after the point of the bytes of a column, at most."""


class PaperColumn(NamedTuple):
    """A column of a table for a paper."""

    title: str
    """What it is, with its unit."""
    cells: list[str]
    when: str = ""
    """When a score was measured."""
    best: frozenset[int] = frozenset()
    """The rows whose cell is bold."""

    @property
    def head(self) -> str:
        """The whole head of the column of a paper table, in one line."""
        return f"{self.title} {self.when}".rstrip()


# ---- names ---------------------------------------------------------------------------------------


@cache
def title_of_method(name: str) -> str:
    """Return the name of a method as its paper writes it, for a table; others are unchanged.

    >>> title_of_method("lg-fedavg"), title_of_method("mine")
    ('LG-FedAvg', 'mine')
    """
    if name not in methods.names():
        return name
    try:
        module = sys.modules[methods.find(name).__module__]
    except FedgroveError:
        return name
    # The docstring of a method's file begins with that name; python -OO has none.
    title, colon, _ = (module.__doc__ or "").partition(":")
    return title if colon else name


def title_of_entry(group: Group) -> str:
    """Return the name of a row of a paper table: the method's name in its paper, and its settings.

    >>> title_of_entry({"group": "fedprox-mu=0.1", "method": "fedprox"})
    'FedProx, mu=0.1'
    >>> title_of_entry({"group": "my-sweep", "method": "fedprox"})
    'my-sweep'
    """
    label = str(group["group"])
    name = str(group["method"])
    title = label
    settings = label.removeprefix(name)
    if settings == "":
        title = title_of_method(name)
    elif settings != label and "=" in settings:
        title = f"{title_of_method(name)}, {settings.lstrip('-')}"
    return f"{title} on {group['task']}" if "task" in group else title


# ---- columns -------------------------------------------------------------------------------------


def paper_columns(groups: Sequence[Group]) -> list[PaperColumn]:
    """Return the columns of a table for a paper.

    A score has the name of its metric. With several metrics there is a column for it. What entries
    differ in has columns too.
    """
    metrics = {Scores.from_summary(group).name for group in groups}
    columns = [PaperColumn("Method", list(map(title_of_entry, groups)))]
    for name, cells in differing_columns(groups).items():
        columns.append(PaperColumn(name.capitalize(), cells))
    score = "Score"
    unit = ""
    if len(metrics) == 1:
        first = Scores.from_summary(groups[0])
        score = first.title
        unit = " (%)" if first.share else ""
    elif metrics:
        columns.append(PaperColumn("Metric", [Scores.from_summary(group).name for group in groups]))
    lengths = sorted({row["finetune_epochs"] for row in split_lengths(groups)})
    digits = _choose_digits(groups, lengths)
    for epochs in lengths:
        columns.append(_score_column(groups, f"{score}{unit}", epochs, digits))
    for epochs in lengths:
        columns.append(_worst_column(groups, f"Worst client{unit}", epochs, digits))
    for direction in ("up", "down"):
        sizes = [group[f"bytes_{direction}"] / 2**20 for group in groups]
        columns.append(PaperColumn(f"{direction.title()} (MiB)", format_evenly(sizes)))
    seeds = [str(len(group["seeds"])) for group in groups]
    return [*columns, PaperColumn("Seeds", seeds)]


def _choose_digits(groups: Sequence[Group], lengths: Sequence[int]) -> dict[str, int]:
    """Return the digits after the point of each metric: one for percent, else four in all."""
    largest: dict[str, float] = {}
    digits: dict[str, int] = {}
    for group in groups:
        for epochs in lengths:
            scores = Scores.from_summary(tables.scores_after(group, epochs))
            if scores.mean:
                largest[scores.metric] = max(largest.get(scores.metric, 0.0), abs(scores.mean))
                digits[scores.metric] = 1
            if not scores.share and scores.metric in largest:
                before_point = math.floor(math.log10(largest[scores.metric])) + 1
                digits[scores.metric] = max(0, 4 - max(1, before_point))
    return digits


def _format(scores: Scores, value: float, digits: Mapping[str, int]) -> str:
    return f"{scores.factor * value:.{digits.get(scores.metric, 1)}f}"


def _score_column(
    groups: Sequence[Group], title: str, epochs: int, digits: Mapping[str, int]
) -> PaperColumn:
    """Return the column of the mean score and its deviation over seeds; the best is bold."""
    cells = []
    # By what makes rows comparable.
    means: dict[tuple[str, ...], dict[int, float]] = {}
    for i, group in enumerate(groups):
        row = tables.scores_after(group, epochs)
        scores = Scores.from_summary(row)
        is_known = epochs in tables.finetune_lengths(group) and scores.mean is not None
        if not is_known or scores.mean is None:
            cells.append("-")
            continue
        mean = _format(scores, scores.mean, digits)
        std = row[f"{scores.metric}_mean_std"]
        cells.append(mean if std is None else f"{mean} ± {_format(scores, std, digits)}")
        options = [tables.show_option(group, name) for name in tables.DIVISION]
        kind = (*options, str(group.get("task")), scores.metric)
        # As shown: what looks equal is equally good.
        shown = float(mean) if scores.more_is_better else -float(mean)
        means.setdefault(kind, {})[i] = shown
    best: set[int] = set()
    for known in means.values():
        if len(known) > 1:
            best.update(i for i, mean in known.items() if mean == max(known.values()))
    return PaperColumn(title, cells, _describe(epochs), frozenset(best))


def _worst_column(
    groups: Sequence[Group], title: str, epochs: int, digits: Mapping[str, int]
) -> PaperColumn:
    cells = []
    for group in groups:
        scores = Scores.from_summary(tables.scores_after(group, epochs))
        is_known = epochs in tables.finetune_lengths(group) and scores.mean is not None
        cells.append(_format(scores, scores.worst, digits) if is_known else "-")
    return PaperColumn(title, cells, _describe(epochs))


def _describe(epochs: int) -> str:
    """Return when a score was measured, short enough for a column."""
    if not epochs:
        return "before fine-tuning"
    return "after 1 epoch" if epochs == 1 else f"after {epochs} epochs"


def format_evenly(values: Sequence[float]) -> list[str]:
    """Format a column of sizes with equal digits; the smallest has two that are not zero.

    >>> format_evenly([3.0, 0.0261, 0.0]), format_evenly([12.04, 3.0])
    (['3.000', '0.026', '0.000'], ['12.0', '3.0'])
    """
    smallest = min((value for value in values if value > 0), default=1.0)
    digits = min(MOST_DIGITS, max(1, 1 - math.floor(math.log10(smallest))))
    return [f"{value:.{digits}f}" for value in values]


def rows_of(
    columns: Sequence[PaperColumn], embolden: Callable[[str], str] = str
) -> list[list[str]]:
    """Return the rows of a paper table, the best cells changed by ``embolden``."""
    rows = []
    for i in range(len(columns[0].cells)):
        row = []
        for column in columns:
            cell = column.cells[i]
            row.append(embolden(cell) if i in column.best else cell)
        rows.append(row)
    return rows


# ---- formats -------------------------------------------------------------------------------------


def markdown_table(groups: Sequence[Group]) -> str:
    """Return the groups as a Markdown table for a paper."""
    columns = paper_columns(groups)
    rows = []
    for i in range(len(groups)):
        rows.append([(column.cells[i], i in column.best) for column in columns])
    heads = [column.head for column in columns]
    return render("paper_table.md", {"columns": heads, "rows": rows})


def latex_table(groups: Sequence[Group]) -> str:
    """Return the groups as a LaTeX table for a paper, with the rules of the package booktabs."""
    columns = paper_columns(groups)
    rows = []
    for i in range(len(groups)):
        rows.append([_escape_cell(column.cells[i], i in column.best) for column in columns])
    # Columns of one title have it once, above when each was measured.
    spans = []
    start = 1
    for title, same in groupby(columns, key=attrgetter("title")):
        width = len(list(same))
        spans.append((_escape_latex(title), start, start + width - 1))
        start += width
    whens = [_escape_latex(column.when) for column in columns]
    values = {"spans": spans, "whens": whens, "rows": rows, "width": len(columns)}
    return render("paper_table.tex", values)


def _escape_cell(cell: str, is_best: bool) -> str:
    r"""Return a cell for LaTeX, its mean in bold if it is the best.

    >>> print(_escape_cell("ca_afp", False), _escape_cell("1 ± 2", True))
    ca\_afp $\mathbf{1} \pm 2$
    """
    mean, sign, std = cell.partition(" ± ")
    if sign:
        mean = f"\\mathbf{{{mean}}}" if is_best else mean
        return f"${mean} \\pm {std}$"
    text = _escape_latex(cell)
    return f"\\textbf{{{text}}}" if is_best else text


def _escape_latex(text: str) -> str:
    # An escaped backslash would be escaped again; names of runs contain none on most systems.
    line = make_printable(" ".join(text.split()))
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", line.replace("\\", "/"))
    return escaped.replace("~", "\\textasciitilde{}").replace("^", "\\textasciicircum{}")


def csv_table(groups: Sequence[Group]) -> str:
    """Return the groups as CSV for a program that draws: all digits, a row for each length."""
    data = [*tables.DIVISION, tables.TRAIN_EXAMPLES]
    scores = ["metric", "finetune_epochs", "mean", "std", "worst", "pooled"]
    costs = ["bytes_up", "bytes_down", "seeds", "missing"]
    file = io.StringIO()
    writer = csv.DictWriter(
        file, ["entry", "method", "task", *data, *scores, *costs], lineterminator="\n"
    )
    writer.writeheader()
    for row in split_lengths(groups):
        metric = Scores.from_summary(row).metric
        cells = {name: row.get(name, "") for name in writer.fieldnames}
        cells |= {"entry": row["group"], "metric": metric, "seeds": len(row["seeds"])}
        cells |= {"mean": row[f"{metric}_mean"], "std": row[f"{metric}_mean_std"]}
        cells["worst"] = row[f"{metric}_worst"]
        cells["pooled"] = row.get(f"{metric}_pooled", "")
        writer.writerow(cells)
    return file.getvalue()


def write_paper_table(
    groups: Sequence[Group], path: Path, option: str = "path", *, force: bool = False
) -> None:
    """Write the table for a paper in the format of the file's ending.

    Args:
        groups: The rows.
        path: The file: .md, .tex or .csv.
        option: What the path is called in an error message.
        force: Replace a file that is not such a table.
    """
    writers = {".csv": csv_table, ".tex": latex_table, ".md": markdown_table}
    # The ending is checked below; any table will do until then.
    text = writers.get(path.suffix, csv_table)(groups)
    # A table has no mark of its own: one with the same head is replaced.
    head = text.partition("\n")[0]
    check_place(path, option, endings=TABLE_FORMATS, mark=head, force=force)
    path.write_bytes(text.encode())
