"""Tables for people: what ``fedgrove run``, ``compare`` and ``cost`` print, from the objects that ``--json`` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]
FIGURES = (
    "accuracy\n%",
    "worst\n%",
    "worst\n10 %",
    "density",
    "params",
    "up",
    "down",
    "paper\nMiB",
    "seconds",
)
NAMES = ("run", "method", "data", "partition", "scenario", "split", "seed", "rounds")
"""Columns that tell runs apart; they come when there are several."""


def console(file: IO[str] | None = None) -> Console:
    """A console on ``file`` (else stdout), wide whatever the terminal: better a line that wraps than a figure cut."""
    return Console(file=file or sys.stdout, width=240, highlight=False, markup=False)


def print_summaries(summaries: Sequence[Summary], file: IO[str] | None = None) -> None:
    """Print a row per run and fine-tuning length, the best mean accuracy of each data set emphasised, then the notes.

    A summary without figures is an unfinished run; its ``rounds_done`` are shown.
    """
    rows = [row for summary in summaries for row in _rows(summary)]
    several = len(summaries) > 1
    names = [n for n in NAMES if several and any(n in s for s in summaries)]
    tuned = [*names, "fine-tuned"] if any(row["length"] for row in rows) else names
    table = _table(tuned, FIGURES)
    best = _best(rows)
    for i, row in enumerate(rows):
        cells = [str(row["summary"].get(n, "")) for n in names]
        cells += [f"{row['length'] or 0} epochs"] * (len(tuned) - len(names))
        table.add_row(*cells, *_figures(row, best=len(rows) > 1 and i in best))
    out = console(file)
    out.print(table)
    if len(rows) > 1 and best:
        out.print("* the best mean accuracy" + (" on its data" if several else ""))
    for note in dict.fromkeys(
        f"{s['data']}: {note}" for s in summaries for note in s.get("notes", ())
    ):
        out.print(note)


def print_causes(summaries: Sequence[Summary], file: IO[str] | None = None) -> None:
    """Print, run by run, what the bytes were spent on (:func:`fedgrove.wire.ledger.causes`), in MiB."""
    words = list(summaries[0]["bytes_causes"]) if summaries else []
    table = _table(("run", "method"), (*words, "sent\nMiB", "paper\nMiB", "sent -\npaper"))
    for s in summaries:
        sent = sum(s["bytes_causes"].values())
        cells = [*s["bytes_causes"].values(), sent]
        paper = s.get("bytes_paper")
        last = (
            ["", "unfinished"]
            if paper is None
            else [f"{paper / 2**20:,.2f}", f"{(sent - paper) / 2**20:+,.2f}"]
        )
        table.add_row(
            str(s["run"]), str(s.get("method", "")), *(f"{n / 2**20:,.2f}" for n in cells), *last
        )
    console(file).print(table)


def print_pairs(pairs: Sequence[tuple[str, str]], file: IO[str] | None = None) -> None:
    """Print names and what belongs to each, in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    console(file).print(table)


def print_cost(found: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print what :func:`fedgrove.cost.estimate.cost` found."""
    print_pairs(
        [
            (
                "clients, cohort, rounds",
                f"{found['clients']}, {found['cohort']}, {found['rounds']}",
            ),
            ("up, at most", mib(found["bytes_up"])),
            ("down, at most", mib(found["bytes_down"])),
            (
                "paper's own count",
                f"{found['mib_paper']:,} MiB, {found['reduction_paper']:.1%} less than dense",
            ),
            ("parameters", f"{found['params']:,}"),
            ("multiply-accumulates", f"{found['macs']:,} per sample"),
            ("memory of a step", mib(found["memory"])),
        ],
        file,
    )


def mib(n: int) -> str:
    """A number of bytes for people.

    >>> mib(3 * 2**20), mib(2048), mib(12)
    ('3.0 MiB', '2.0 KiB', '12 B')
    """
    if n >= 1 << 20:
        return f"{n / (1 << 20):,.1f} MiB"
    return f"{n / 1024:.1f} KiB" if n >= 1024 else f"{n} B"


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rows(summary: Summary) -> list[dict[str, Any]]:
    lengths = summary.get("finetune") or {}
    if len(lengths) < 2:
        only = next(iter(lengths), "0")
        return [{"summary": summary, "length": "" if only == "0" else only, "scores": summary}]
    return [{"summary": summary, "length": n, "scores": scores} for n, scores in lengths.items()]


def _best(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """The rows with the highest mean among those of the same data, dealt out alike; ties are all best."""
    top: dict[tuple[Any, ...], float] = {}
    for row in rows:
        mean = row["scores"].get("accuracy_mean")
        if mean is not None:
            top[_place(row)] = max(mean, top.get(_place(row), mean))
    return {
        i
        for i, row in enumerate(rows)
        if row["scores"].get("accuracy_mean", -1) == top.get(_place(row))
    }


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row["summary"].get(word) for word in ("data", "partition", "scenario", "split"))


def _figures(row: Mapping[str, Any], best: bool) -> list[Text | str]:
    s, scores = row["summary"], row["scores"]
    if "accuracy_mean" not in scores:
        return [f"unfinished, {s.get('rounds_done', 0)} of {s.get('rounds', '?')} rounds"]
    accuracy = f"{100 * scores['accuracy_mean']:.2f} ± {100 * scores['accuracy_std']:.2f}"
    return [
        Text(accuracy + " *", style="bold") if best else accuracy,
        f"{100 * scores['accuracy_worst']:.2f}",
        f"{100 * scores['accuracy_worst10']:.2f}",
        f"{s['density']:.3f}",
        f"{s['params_mean']:,.0f}",
        mib(s["bytes_up"]),
        mib(s["bytes_down"]),
        f"{s['bytes_paper'] / 2**20:,.1f}",
        f"{s['seconds']:.1f}",
    ]
