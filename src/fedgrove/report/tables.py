"""Tables for a terminal: what ``fedgrove run``, ``compare`` and ``cost`` print.

They are made from the same objects that ``--json`` prints.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]
FIGURES = (
    "density",
    "params",
    "up",
    "down",
    "paper\nMiB",
    "seconds",
)
TROUBLES = ("lost", "refused")
"""Columns of how many answers never reached the model, by why."""
NAMES = (
    "run",
    "method",
    "data",
    "partition",
    "scenario",
    "split",
    "init",
    "freeze",
    "seed",
    "rounds",
)
"""Columns that tell runs apart; they are shown when there are several runs."""
USUAL = {"init": "scratch", "freeze": 0.0}
"""What most runs have in a column that is shown only if another has something else."""


class Scores(NamedTuple):
    """What a summary says of one metric; None where nobody was scored yet."""

    metric: str = "accuracy"
    more_is_better: bool = True
    share: bool = True
    """Whether it is shown in percent."""
    mean: float | None = None
    std: float = 0.0
    worst: float = 0.0
    worst10: float = 0.0

    @classmethod
    def of(cls, summary: Summary, figures: Mapping[str, Any]) -> Scores:
        """The scores among some figures, by the metric that the run's summary names."""
        # A summary without a metric is of accuracies; that of a mixed federation has None.
        metric = summary.get("metric") or "accuracy"
        mean = figures.get(f"{metric}_mean")
        form = (metric, summary.get("more_is_better", True), summary.get("share", True))
        if mean is None:
            return cls(*form)
        rest = [figures[f"{metric}_{name}"] for name in ("std", "worst", "worst10")]
        return cls(*form, mean, *rest)

    @classmethod
    def of_task(cls, task: Mapping[str, Any]) -> Scores:
        """The scores of one task of a mixed federation."""
        return cls(**{name: task[name] for name in cls._fields})

    def shown(self, value: float) -> str:
        """A value as tables have it: a share in percent, without the sign."""
        return f"{100 * value:.2f}" if self.share else f"{value:.4g}"


class _Row(NamedTuple):
    """A row of the table of runs: a run at one length of fine-tuning, or one of its tasks."""

    summary: Summary
    length: str
    """Epochs of fine-tuning; empty where the run has no fine-tuning to tell apart."""
    scores: Scores
    task: str = ""
    figures: Mapping[str, Any] = {}
    """Of a task: its clients and bytes."""

    def sent(self, direction: str) -> int:
        """The bytes of the row's task, or of its run: the first runs did not tell them apart."""
        count: int = self.figures.get(f"bytes_{direction}", self.summary[f"bytes_{direction}"])
        return count


def console(file: IO[str] | None = None) -> Console:
    """A console on ``file``, or on stdout."""
    # 240 columns whatever the terminal: a line that wraps is better than a figure cut short.
    # Without markup, because a name with square brackets is not a style.
    return Console(file=file or sys.stdout, width=240, highlight=False, markup=False)


def plain_table(
    left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]] = ()
) -> Table:
    """A table without lines: columns aligned to the left, then columns aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def mib(n: int) -> str:
    """A number of bytes for people.

    >>> mib(3 * 2**20), mib(2048), mib(12)
    ('3.0 MiB', '2.0 KiB', '12 B')
    """
    if n >= 1 << 20:
        return f"{n / (1 << 20):,.1f} MiB"
    if n >= 1024:
        return f"{n / 1024:.1f} KiB"
    return f"{n} B"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0123), duration(4.5), duration(600), duration(86_400)
    ('12.3 ms', '4.5 s', '10 min', '24 h')
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    # Not .3g, which would write a thousand hours as 1e+03.
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 100 else f"{hours:,.0f} h"


# ---- runs ----------------------------------------------------------------------------------------


def print_summaries(summaries: Sequence[Summary], file: IO[str] | None = None) -> None:
    """Print a row per run and length of fine-tuning, then the notes of the data.

    The best mean of each data set is marked. A summary without scores is an unfinished run; its
    ``rounds_done`` are shown.
    """
    rows: list[_Row] = []
    for summary in summaries:
        rows += _rows(summary)
    several_runs = len(summaries) > 1
    several_rows = len(rows) > 1
    best = _best(rows)

    names: list[str] = []
    if several_runs:
        # A column that no run fills would only take room.
        names = [name for name in NAMES if _is_known(name, summaries)]
    # Where no run was fine-tuned, a column of zeros would say nothing either.
    is_tuned = any(row.length for row in rows)
    left = [*names, "fine-tuned"] if is_tuned else names
    # Columns that only some runs need: most lose nothing.
    troubles = [key for key in TROUBLES if any(summary.get(key) for summary in summaries)]
    metrics = _metrics(rows)
    by_task = any(row.task for row in rows)
    if by_task:
        left = [*left, "task", "clients"]
    if len(metrics) > 1:
        left = [*left, "metric"]
    table = plain_table(left, [*_score_columns(metrics), *FIGURES, *troubles])
    for i, row in enumerate(rows):
        cells = [str(row.summary.get(name, USUAL.get(name, ""))) for name in names]
        if is_tuned:
            cells.append(f"{row.length or 0} epochs")
        if by_task:
            cells += [row.task, str(row.figures.get("clients", ""))]
        if len(metrics) > 1:
            cells.append(_named(row.scores))
        # A single row is trivially the best: marking it would say nothing.
        is_marked = several_rows and i in best
        counts = [str(sum((row.summary.get(key) or {}).values())) for key in troubles]
        table.add_row(*cells, *_figures(row, is_marked), *counts)

    out = console(file)
    out.print(table)
    if several_rows and best:
        where = " on its data" if several_runs else ""
        what = metrics[0].metric if len(metrics) == 1 else "of its metric"
        out.print(f"* the best mean {what}{where}")
    for scores in metrics:
        if not scores.more_is_better:
            out.print(f"{scores.metric}: less is better, and the worst is the largest")
    for note in _notes(summaries):
        out.print(note)


def _is_known(name: str, summaries: Sequence[Summary]) -> bool:
    if name in USUAL:
        return any(summary.get(name, USUAL[name]) != USUAL[name] for summary in summaries)
    return any(name in summary for summary in summaries)


def _rows(summary: Summary) -> list[_Row]:
    lengths = summary.get("finetune") or {}
    if len(lengths) > 1:
        rows = []
        for length, figures in lengths.items():
            rows += _rows_of_tasks(summary, length, figures)
        return rows
    # With one length its scores stand in the summary itself. An unfinished run has neither.
    length = next(iter(lengths), "0")
    return _rows_of_tasks(summary, "" if length == "0" else length, summary)


def _rows_of_tasks(summary: Summary, length: str, figures: Mapping[str, Any]) -> list[_Row]:
    if "tasks" not in figures:
        return [_Row(summary, length, Scores.of(summary, figures))]
    rows = []
    for name, task in figures["tasks"].items():
        rows.append(_Row(summary, length, Scores.of_task(task), name, task))
    return rows


def _metrics(rows: Sequence[_Row]) -> list[Scores]:
    """The metrics of some rows, each once; where no run has scores, that of the first."""
    known: dict[str, Scores] = {}
    for row in rows:
        if row.scores.mean is not None:
            known.setdefault(row.scores.metric, row.scores)
    if not known and rows:
        return [rows[0].scores]
    return list(known.values()) or [Scores()]


def _named(scores: Scores) -> str:
    if scores.mean is None:
        return ""
    return f"{scores.metric} %" if scores.share else scores.metric


def _score_columns(metrics: Sequence[Scores]) -> list[str]:
    """The names of the columns of scores."""
    if len(metrics) > 1:
        return ["mean", "worst", "worst\ntenth"]
    scores = metrics[0]
    if scores.share:
        return [f"{scores.metric}\n%", "worst\n%", "worst\n10 %"]
    return [scores.metric, "worst", "worst\ntenth"]


def _best(rows: Sequence[_Row]) -> set[int]:
    """The rows with the best mean on the same data; ties are all best."""
    best_means: dict[tuple[Any, ...], float] = {}
    for row in rows:
        mean = row.scores.mean
        if mean is not None:
            choose = max if row.scores.more_is_better else min
            place = _place(row)
            best_means[place] = choose(mean, best_means.get(place, mean))
    compared = Counter(_place(row) for row in rows)
    best = set()
    for i, row in enumerate(rows):
        mean = row.scores.mean
        # The tasks of one run are not beside each other.
        is_alone = bool(row.task) and compared[_place(row)] == 1
        if mean is not None and not is_alone and mean == best_means[_place(row)]:
            best.add(i)
    return best


def _place(row: _Row) -> tuple[Any, ...]:
    """The data of a row and how they are shared out: scores compare only where it is equal."""
    return (
        row.summary.get("data"),
        row.summary.get("partition"),
        row.summary.get("scenario"),
        row.summary.get("split"),
        row.task,
        row.scores.metric,
    )


def _figures(row: _Row, is_marked: bool) -> list[Text | str]:
    """The cells of the scores and of the columns ``FIGURES``."""
    summary = row.summary
    scores = row.scores
    if summary.get("scored") == 0:
        sent = [mib(summary["bytes_up"]), mib(summary["bytes_down"])]
        paper = summary["bytes_paper"]
        paper_mib = "-" if paper is None else f"{paper / 2**20:,.1f}"
        return ["not scored", "-", "-", "-", "-", *sent, paper_mib, f"{summary['seconds']:.1f}"]
    if scores.mean is None:
        done = summary.get("rounds_done", 0)
        return [f"unfinished, {done} of {summary.get('rounds', '?')} rounds"]
    mean: Text | str = f"{scores.shown(scores.mean)} ± {scores.shown(scores.std)}"
    if is_marked:
        # The star is for files and pipes, where bold is lost.
        mean = Text(f"{mean} *", style="bold")
    # A method of one's own has no paper to count by.
    paper = summary["bytes_paper"]
    return [
        mean,
        scores.shown(scores.worst),
        scores.shown(scores.worst10),
        f"{summary['density']:.3f}",
        f"{summary['params_mean']:,.0f}",
        mib(row.sent("up")),
        mib(row.sent("down")),
        "-" if paper is None else f"{paper / 2**20:,.1f}",
        f"{summary['seconds']:.1f}",
    ]


def _notes(summaries: Sequence[Summary]) -> list[str]:
    """What the data sets say of themselves, each note once."""
    notes = []
    for summary in summaries:
        for note in summary.get("notes", ()):
            notes.append(f"{summary['data']}: {note}")
    # A dictionary keeps the order of first appearance, which a set would not.
    return list(dict.fromkeys(notes))


# ---- bytes and cost ------------------------------------------------------------------------------


def print_causes(summaries: Sequence[Summary], file: IO[str] | None = None) -> None:
    """Print, run by run, what the bytes were spent on, in MiB.

    The causes are those of :func:`fedgrove.wire.ledger.causes`.
    """
    # All runs have the same causes, those that cost nothing included.
    causes = list(summaries[0]["bytes_causes"]) if summaries else []
    table = plain_table(("run", "method"), (*causes, "sent\nMiB", "paper\nMiB", "sent -\npaper"))
    for summary in summaries:
        spent = list(summary["bytes_causes"].values())
        sent = sum(spent)
        cells = [str(summary["run"]), str(summary.get("method", ""))]
        for n in (*spent, sent):
            cells.append(f"{n / 2**20:,.2f}")
        # A paper's formula counts a whole run; an unfinished one has no such count yet.
        paper = summary.get("bytes_paper")
        if paper is None:
            cells += ["", "unfinished"]
        else:
            cells += [f"{paper / 2**20:,.2f}", f"{(sent - paper) / 2**20:+,.2f}"]
        table.add_row(*cells)
    console(file).print(table)


def print_cost(cost: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the cost of a run, as :func:`fedgrove.costs.estimate.cost` returns it."""
    sizes = f"{cost['clients']}, {cost['cohort']}, {cost['rounds']}"
    paper = "none"
    if cost["bytes_paper"] is not None:
        share = cost["reduction_paper"]
        direction = "less" if share >= 0 else "more"
        paper = f"{cost['mib_paper']:,} MiB, {abs(share):.1%} {direction} than dense"
        if cost.get("paper_at_most"):
            paper = f"at most {paper}"
    pairs = [
        ("clients, cohort, rounds", sizes),
        ("up, at most", mib(cost["bytes_up"])),
        ("down, at most", mib(cost["bytes_down"])),
        ("paper's own count", paper),
        ("parameters", f"{cost['params']:,}"),
        ("multiply-accumulates", f"{cost['macs']:,} per sample"),
        ("memory of a step", mib(cost["memory"])),
        ("virtual time of all rounds", duration(cost["virtual_seconds"])),
    ]
    for name, values in _per_device(cost).items():
        least, middle, most = values
        bound = ", at most" if name in ("up", "down") else ""
        pairs.append((f"{name} per device and round{bound}", f"{middle} ({least} to {most})"))
    print_pairs(pairs, file)


def print_costs(costs: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print the costs of several methods: totals, then what one device has in one round."""
    columns = ["up", "down", "paper\nMiB", "MACs per\nsample", "memory\nof a step", "virtual\ntime"]
    rows = []
    for cost in costs:
        paper = cost["mib_paper"]
        rows.append(
            [
                cost["method"],
                mib(cost["bytes_up"]),
                mib(cost["bytes_down"]),
                "-" if paper is None else f"{paper:,}",
                f"{cost['macs']:,}",
                mib(cost["memory"]),
                duration(cost["virtual_seconds"]),
            ]
        )
    out = console(file)
    out.print(plain_table(["all rounds, at most"], columns, rows))
    out.print()
    heads: list[str] = []
    rows = []
    for cost in costs:
        cells = [cost["method"]]
        heads = []
        for name, values in _per_device(cost).items():
            heads += [f"{name}\nleast", "median", "most"]
            cells += values
        rows.append(cells)
    out.print(plain_table(["per device and round,\nup and down at most"], heads, rows))


def _per_device(cost: Mapping[str, Any]) -> dict[str, list[str]]:
    """What one device has in one round, for people: the least, the median and the most."""
    forms: dict[str, tuple[str, Callable[[Any], str]]] = {
        "up": ("bytes_up", mib),
        "down": ("bytes_down", mib),
        "work": ("macs", macs_in_words),
        "time": ("seconds", duration),
    }
    shown = {}
    for name, (key, form) in forms.items():
        values = cost["per_device"][key]
        shown[name] = [form(values[word]) for word in ("min", "median", "max")]
    return shown


def macs_in_words(macs: int) -> str:
    """A number of multiply-accumulates for people.

    >>> macs_in_words(2_500_000_000), macs_in_words(12_000_000), macs_in_words(0)
    ('2.5 GMAC', '12 MMAC', '0 MMAC')
    """
    if macs >= 10**9:
        return f"{macs / 10**9:,.3g} GMAC"
    return f"{macs / 10**6:.3g} MMAC"


def print_pairs(pairs: Sequence[tuple[str, str]], file: IO[str] | None = None) -> None:
    """Print names and what belongs to each, in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    console(file).print(table)
