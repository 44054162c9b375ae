"""Tables for a terminal: what ``fedgrove run``, ``compare`` and ``cost`` print.

They are made from the same objects that ``--json`` prints.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from rich.text import Text

from .fit import Cell, Column, console, in_one_folder, names, print_table, print_text

Summary = Mapping[str, Any]
FIGURES = (
    Column("density", 5),
    Column("params", 8),
    Column("kB\nup", 2, called="kB up"),
    Column("kB\ndown", 2, called="kB down"),
    Column("total\nup", 3, called="total up"),
    Column("total\ndown", 3, called="total down"),
    Column("paper\nMiB", 7),
    Column("seconds", 6),
)
"""Columns of what a run cost; the lower ranks stay where a terminal is narrow."""
UNITS = "kB: per device and round, 1 kB = 1000 bytes; total: all devices and rounds"
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
"""Words that tell runs apart: a column where runs differ, above the table where they do not."""
SAID_IN_NAME = 9
"""The rank of a column that repeats what the names of runs say."""
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


def percent(share: float) -> str:
    """A share for people, with two digits at least where there is something.

    >>> percent(1), percent(0.638), percent(0.0179), percent(0.0004), percent(0)
    ('100 %', '64 %', '1.8 %', '0.04 %', '0 %')
    """
    digits = ".2g" if share < 0.095 else ".0f"
    return f"{100 * share:{digits}} %"


def kilobytes(n: float) -> str:
    """A number of bytes in kB of 1000 bytes, for a column that says so.

    >>> kilobytes(357_056), kilobytes(12), kilobytes(12_345_678)
    ('357.1', '0.01', '12,346')
    """
    size = n / 1000
    if size >= 10_000:
        return f"{size:,.0f}"
    # Less than a tenth is not nothing.
    is_tiny = 0 < size < 0.1
    return f"{size:.2f}" if is_tiny else f"{size:,.1f}"


def each_round(summary: Summary, direction: str) -> float | None:
    """The bytes of one device in one round, on average; None where the run does not say.

    >>> each_round({"bytes_up": 600, "rounds": 3, "cohort": 2}, "up")
    100.0
    """
    turns = summary.get("rounds", 0) * summary.get("cohort", 0)
    sent = summary.get(f"bytes_{direction}")
    if not turns or sent is None:
        return None
    return float(sent / turns)


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


def print_summaries(
    summaries: Sequence[Summary], file: IO[str] | None = None, elsewhere: str = "--json"
) -> None:
    """Print a row per run and length of fine-tuning, then the notes of the data.

    What all runs have in common stands above the table. Of runs on the same data and of equally
    many rounds the best mean is marked. A summary without scores is an unfinished run; its
    ``rounds_done`` are shown. ``elsewhere`` is where columns are seen that find no room.
    """
    folder, summaries = _in_one_folder(summaries)
    rows: list[_Row] = []
    for summary in summaries:
        rows += _rows(summary)
    best = _best(rows)
    apart, common = _told_apart(summaries)
    columns = [Column(name, _name_rank(name, summaries), is_name=True) for name in apart]
    # Where no run was fine-tuned, a column of zeros would say nothing.
    is_tuned = any(row.length for row in rows)
    if is_tuned:
        columns.append(Column("tuned\nepochs", called="epochs of fine-tuning"))
    # Columns that only some runs need: most lose nothing.
    troubles = [key for key in TROUBLES if any(summary.get(key) for summary in summaries)]
    metrics = _metrics(rows)
    by_task = any(row.task for row in rows)
    if by_task:
        columns += [*names("task"), Column("clients", 4, is_name=True)]
    if len(metrics) > 1:
        columns += names("metric")
    columns += [*_score_columns(metrics), *FIGURES]
    columns += [Column(key, 1) for key in troubles]
    lines: list[list[Cell]] = []
    for i, row in enumerate(rows):
        cells: list[Cell] = [str(row.summary.get(name, USUAL.get(name, ""))) for name in apart]
        if is_tuned:
            cells.append(row.length or "0")
        if by_task:
            cells += [row.task, str(row.figures.get("clients", ""))]
        if len(metrics) > 1:
            cells.append(_named(row.scores))
        counts = [str(sum((row.summary.get(key) or {}).values())) for key in troubles]
        lines.append([*cells, *_figures(row, i in best), *counts])

    if folder:
        common = f"runs in {folder}, {common}".removesuffix(", ")
    if common:
        print_text(common, file)
    print_table(columns, lines, file, elsewhere)
    print_text(UNITS, file)
    _print_marks(rows, best, metrics, file)
    for scores in metrics:
        if not scores.more_is_better:
            print_text(f"{scores.metric}: less is better, and the worst is the largest", file)
    for note in _notes(summaries):
        print_text(note, file)


def _in_one_folder(summaries: Sequence[Summary]) -> tuple[str, list[Summary]]:
    """The folder of all runs, and the runs by their names in it; "" where there is none."""
    if not all("run" in summary for summary in summaries):
        return "", list(summaries)
    folder, short = in_one_folder([str(summary["run"]) for summary in summaries])
    renamed = [{**summary, "run": name} for summary, name in zip(summaries, short, strict=True)]
    return folder, list(renamed)


def _name_rank(name: str, summaries: Sequence[Summary]) -> int:
    """How soon a column that tells runs apart is left out."""
    if name == "run":
        return 0
    # Runs are called by method and seed unless they were named by hand; then the name says it.
    is_said = all(str(summary.get(name)) in str(summary.get("run", "")) for summary in summaries)
    if is_said:
        return SAID_IN_NAME
    return 0 if name == "method" else 1


def _told_apart(summaries: Sequence[Summary]) -> tuple[list[str], str]:
    """The words in which runs differ, and a sentence of those that all have in common."""
    apart = []
    common = []
    for name in NAMES:
        if not _is_known(name, summaries):
            continue
        values = {str(summary.get(name, USUAL.get(name, ""))) for summary in summaries}
        if len(values) > 1:
            apart.append(name)
            continue
        value = values.pop()
        # "scenario none" would only take room.
        if value != "none":
            common.append(f"{name} {value}")
    return apart, ", ".join(common)


def _print_marks(
    rows: Sequence[_Row], best: set[int], metrics: Sequence[Scores], file: IO[str] | None
) -> None:
    """Say what the star means, or why there is none."""
    if best:
        what = metrics[0].metric if len(metrics) == 1 else "of its metric"
        where = ""
        if len({_place(row) for row in rows}) > 1:
            where = " of the runs on the same data for as many rounds"
        print_text(f"* the best mean {what}{where}", file)
        return
    rounds = sorted({row.summary.get("rounds", 0) for row in rows if row.scores.mean is not None})
    if len(rounds) > 1:
        listed = " and ".join(str(each) for each in rounds)
        print_text(f"no run is marked as the best: they trained for {listed} rounds", file)


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


def _score_columns(metrics: Sequence[Scores]) -> list[Column]:
    """The columns of scores."""
    if len(metrics) > 1:
        return [Column("mean"), Column("worst", 4), Column("worst\ntenth", 1)]
    scores = metrics[0]
    if scores.share:
        mean = Column(f"{scores.metric}\n%")
        return [mean, Column("worst\n%", 4), Column("worst\n10 %", 1)]
    return [Column(scores.metric), Column("worst", 4), Column("worst\ntenth", 1)]


def _best(rows: Sequence[_Row]) -> set[int]:
    """The rows with the best mean of those that can be compared; ties are all best."""
    best_means: dict[tuple[Any, ...], float] = {}
    for row in rows:
        mean = row.scores.mean
        if mean is not None:
            choose = max if row.scores.more_is_better else min
            place = _place(row)
            best_means[place] = choose(mean, best_means.get(place, mean))
    compared = Counter(_place(row) for row in rows if row.scores.mean is not None)
    best = set()
    for i, row in enumerate(rows):
        mean = row.scores.mean
        # A row alone is trivially the best: marking it would say nothing.
        is_alone = compared[_place(row)] == 1
        if mean is not None and not is_alone and mean == best_means[_place(row)]:
            best.add(i)
    return best


def _place(row: _Row) -> tuple[Any, ...]:
    """What scores must have in common to be compared: the data, how they are shared out, rounds."""
    return (
        row.summary.get("data"),
        row.summary.get("partition"),
        row.summary.get("scenario"),
        row.summary.get("split"),
        row.summary.get("clients"),
        row.summary.get("rounds"),
        row.task,
        row.scores.metric,
    )


def _figures(row: _Row, is_marked: bool) -> list[Cell]:
    """The cells of the scores and of the columns ``FIGURES``."""
    summary = row.summary
    scores = row.scores
    if summary.get("scored") == 0:
        return ["not scored", "-", "-", "-", "-", *_sent(row)]
    if scores.mean is None:
        done = summary.get("rounds_done", 0)
        return [f"unfinished, {done} of {summary.get('rounds', '?')} rounds"]
    mean: Cell = f"{scores.shown(scores.mean)} ± {scores.shown(scores.std)}"
    if is_marked:
        # The star is for files and pipes, where bold is lost.
        mean = Text(f"{mean} *", style="bold")
    return [
        mean,
        scores.shown(scores.worst),
        scores.shown(scores.worst10),
        f"{summary['density']:.3f}",
        f"{summary['params_mean']:,.0f}",
        *_sent(row),
    ]


def _sent(row: _Row) -> list[str]:
    """The cells of bytes and seconds."""
    summary = row.summary
    each = []
    for direction in ("up", "down"):
        sent = None
        # How many devices of a task there were in a round is not known.
        if not row.task:
            sent = each_round(summary, direction)
        each.append("-" if sent is None else kilobytes(sent))
    # A method of one's own has no paper to count by.
    paper = summary["bytes_paper"]
    return [
        *each,
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

    The causes are those of :func:`fedgrove.wire.ledger.sum_by_cause`.
    """
    # All runs have the same causes, those that cost nothing included.
    causes = list(summaries[0]["bytes_causes"]) if summaries else []
    folder, summaries = _in_one_folder(summaries)
    method_rank = _name_rank("method", summaries)
    columns = [Column("run", is_name=True), Column("method", method_rank, is_name=True)]
    columns += [Column(_stacked(cause), 2 + i) for i, cause in enumerate(causes)]
    columns += [Column("sent\nMiB"), Column("paper\nMiB"), Column("sent -\npaper", 1)]
    rows = []
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
        rows.append(cells)
    if folder:
        print_text(f"runs in {folder}", file)
    print_table(columns, rows, file)


def _stacked(head: str) -> str:
    """A head with a line per word: the figures below are shorter than it."""
    return "\n".join(head.split())


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
    columns = [
        *names("all rounds, at most"),
        Column("up"),
        Column("down"),
        Column("paper\nMiB", 4),
        Column("MACs per\nsample", 3),
        Column("memory\nof a step", 2),
        Column("virtual\ntime", 1),
    ]
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
    print_table(columns, rows, file)
    print(file=file)
    columns = names("per device and round,\nup and down at most")
    for name in _per_device(costs[0]):
        # The median says most; then what the worst off have.
        columns.append(Column(f"{name}\nleast", 2))
        columns.append(Column(f"{name}\nmedian"))
        columns.append(Column(f"{name}\nmost", 1))
    rows = []
    for cost in costs:
        cells = [cost["method"]]
        for values in _per_device(cost).values():
            cells += values
        rows.append(cells)
    print_table(columns, rows, file)


def _per_device(cost: Mapping[str, Any]) -> dict[str, list[str]]:
    """What one device has in one round, for people: the least, the median and the most."""
    forms: dict[str, tuple[str, Callable[[Any], str]]] = {
        "up": ("bytes_up", _in_kilobytes),
        "down": ("bytes_down", _in_kilobytes),
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
    """Print names and what belongs to each, in two columns; texts go on below themselves."""
    width = console(file).width
    widest = max((len(name) for name, _ in pairs), default=0)
    indent = widest + 2
    stands_beside = indent <= width // 2
    if not stands_beside:
        indent = 4
    for name, value in pairs:
        room = max(20, width - indent)
        # Neither a path nor a number may be broken.
        lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        if stands_beside:
            first = lines[0] if lines else ""
            print(f"{name:{indent}}{first}".rstrip(), file=file)
            lines = lines[1:]
        else:
            print(name, file=file)
        for line in lines:
            print(f"{'':{indent}}{line}", file=file)


def _in_kilobytes(n: float) -> str:
    return f"{kilobytes(n)} kB"
