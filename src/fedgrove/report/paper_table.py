"""Entries over seeds as a table for a paper: Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import check

COLUMNS = ("entry", "score", "worst client", "MiB up", "MiB down", "seeds")
FORMATS = (".md", ".tex", ".csv")


def rows_for_paper(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of what :func:`~fedgrove.report.over_seeds.over_seeds` gives; shares in percent."""
    rows = []
    for group in groups:
        metric = group.get("metric") or "accuracy"
        factor = 100 if group.get("share", True) else 1
        digits = ".1f" if factor == 100 else ".4g"
        mean = f"{factor * group[f'{metric}_mean']:{digits}}"
        std = group[f"{metric}_mean_std"]
        if std is not None:
            mean += f" ± {factor * std:{digits}}"
        task = f" on {group['task']}" if "task" in group else ""
        rows.append(
            [
                f"{group['group']}{task}",
                mean,
                f"{factor * group[f'{metric}_worst']:{digits}}",
                _mebibytes(group["bytes_up"]),
                _mebibytes(group["bytes_down"]),
                str(len(group["seeds"])),
            ]
        )
    return rows


def _mebibytes(count: float) -> str:
    """With a digit behind the point, and more where it would be zero.

    >>> _mebibytes(3 * 2**20), _mebibytes(27_000), _mebibytes(0)
    ('3.0', '0.026', '0.0')
    """
    mebibytes = count / 2**20
    return f"{mebibytes:.2g}" if 0.0001 <= mebibytes < 0.1 else f"{mebibytes:.1f}"


def markdown_of(rows: Sequence[Sequence[str]]) -> str:
    r"""A table as Markdown.

    >>> print(markdown_of([["a|b", "1 ± 2", "0", "3", "4", "2"]]))
    | entry | score | worst client | MiB up | MiB down | seeds |
    |---|---:|---:|---:|---:|---:|
    | a\|b | 1 ± 2 | 0 | 3 | 4 | 2 |
    """
    lines = [_line(COLUMNS), f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    for row in rows:
        lines.append(_line([cell.replace("|", "\\|") for cell in row]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def latex_of(rows: Sequence[Sequence[str]]) -> str:
    r"""A table as LaTeX, with the rules of the package booktabs.

    >>> print(latex_of([["ca_afp", "1 ± 2", "0", "3", "4", "2"]]).splitlines()[4])
    ca\_afp & $1 \pm 2$ & 0 & 3 & 4 & 2 \\
    """
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(COLUMNS) - 1)}}}", "\\toprule"]
    lines.append(" & ".join(COLUMNS) + " \\\\")
    lines.append("\\midrule")
    for row in rows:
        lines.append(" & ".join(_latex(cell) for cell in row) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines)


def _latex(cell: str) -> str:
    mean, mark, std = cell.partition(" ± ")
    if mark:
        return f"${mean} \\pm {std}$"
    # A backslash first would be escaped again; names of runs hold none on most systems.
    text = cell.replace("\\", "/")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return text.replace("~", "\\textasciitilde{}").replace("^", "\\textasciicircum{}")


def csv_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """The same figures in full, for a program that draws."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    head = ["entry", "method", "task", "metric", "mean", "std", "worst"]
    writer.writerow([*head, "bytes_up", "bytes_down", "seeds", "missing"])
    for group in groups:
        metric = group.get("metric") or "accuracy"
        writer.writerow(
            [
                group["group"],
                group["method"],
                group.get("task", ""),
                metric,
                group[f"{metric}_mean"],
                group[f"{metric}_mean_std"],
                group[f"{metric}_worst"],
                group["bytes_up"],
                group["bytes_down"],
                len(group["seeds"]),
                group["missing"],
            ]
        )
    return file.getvalue()


def check_format(path: Path) -> None:
    """Refuse a name that says no format of a table."""
    check(path.suffix in FORMATS, "--table", str(path), "a name that ends with .md, .tex or .csv")


def write_table(groups: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the table in the format that the file's name ends with."""
    check_format(path)
    if path.suffix == ".csv":
        text = csv_of(groups)
    elif path.suffix == ".tex":
        text = latex_of(rows_for_paper(groups)) + "\n"
    else:
        text = markdown_of(rows_for_paper(groups)) + "\n"
    path.write_bytes(text.encode())
