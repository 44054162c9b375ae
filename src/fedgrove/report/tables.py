"""Tables of runs for a terminal: what ``fedgrove run`` and ``compare`` print.

They show the objects that ``--json`` prints. The numbers of tables and pages are formatted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from .terminal import Cell, Column, print_rows, print_text, split_common_folder

Summary = Mapping[str, Any]
Line = Mapping[str, Any]
"""A line of metrics.jsonl."""

COST_COLUMNS = (
    Column("density", 5),
    Column("params", 8),
    Column("kB\nup", 2),
    Column("kB\ndown", 2),
    Column("total\nup", 3),
    Column("total\ndown", 3),
    Column("paper\nMiB", 7),
    Column("seconds", 6),
)
"""Columns of what a run cost; the lower ranks stay where a terminal is narrow."""
UNITS_NOTE = "kB: per device and round, 1 kB = 1000 bytes; total: all devices and rounds"
REASON_COLUMNS = ("lost", "refused")
"""Columns that count the reports that did not reach the model."""
OPTIONS_SHOWN = (
    "run",
    "method",
    "data",
    "partition",
    "scenario",
    "split",
    "validation",
    "init",
    "freeze",
    "seed",
    "rounds",
)
"""Options that distinguish runs: a column if runs differ in it, else a text above the table."""
DIVISION = ("data", "partition", "scenario", "split", "validation")
"""Options that say which data clients train on and are tested on."""
TRAIN_EXAMPLES = "train_examples"
"""The key of the mean number of training examples of a client."""
AFTER = re.compile(r"_after_\d+$")
"""The end of the key of a score after some epochs of fine-tuning."""
SHARED = "seconds_shared_by"
"""The key of the number of runs that were trained together; a run's seconds are its share."""
SEED_DIFFERENCE = 0.02
"""The share by which amounts of training data differ between seeds: test parts are whole examples
or blocks (1.1 % on motion, .6 % on digits)."""
RANK_IN_NAME = 9
"""The rank of a column that repeats what the names of runs say."""
USUAL = {"validation": 0.0, "init": "scratch", "freeze": 0.0}
"""The usual values of options that are shown only if a run has another one."""


# ---- numbers -------------------------------------------------------------------------------------


def format_bytes(n: int) -> str:
    """Format a number of bytes for a table.

    >>> format_bytes(3 * 2**20), format_bytes(2048), format_bytes(12)
    ('3.0 MiB', '2.0 KiB', '12 B')
    """
    if n >= 1 << 20:
        return f"{n / (1 << 20):,.1f} MiB"
    if n >= 1024:
        return f"{n / 1024:.1f} KiB"
    return f"{n} B"


def format_kilobytes(n: float) -> str:
    """Format a number of bytes in kB of 1000 bytes, without the unit.

    >>> format_kilobytes(357_056), format_kilobytes(12), format_kilobytes(12_345_678)
    ('357.1', '0.01', '12,346')
    """
    size = n / 1000
    if size >= 10_000:
        return f"{size:,.0f}"
    if 0 < size < 0.1:
        # 0.0 would look like nothing.
        return f"{size:.2f}"
    return f"{size:,.1f}"


def format_percent(share: float) -> str:
    """Format a share in percent, with at least two digits unless it is zero.

    >>> [format_percent(share) for share in (1, 0.638, 0.0179, 0.0004, 0)]
    ['100 %', '64 %', '1.8 %', '0.04 %', '0 %']
    """
    digits = ".2g" if share < 0.095 else ".0f"
    return f"{100 * share:{digits}} %"


def format_duration(seconds: float) -> str:
    """Format a time for a table.

    >>> [format_duration(seconds) for seconds in (0.0123, 4.5, 600, 86_400)]
    ['12.3 ms', '4.5 s', '10 min', '24 h']
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    if seconds < 360_000:
        return f"{seconds / 3600:.3g} h"
    # Not .3g, which would write a thousand hours as 1e+03.
    return f"{seconds / 3600:,.0f} h"


def format_number(value: float, digits: int = 6) -> str:
    """Format a number of any size for a table, with some significant digits.

    >>> format_number(1500000), format_number(20000), format_number(0.12345, 3)
    ('1.5M', '20,000', '0.123')
    """
    value = float(f"{value:.{digits}g}")
    if abs(value) >= 1e9:
        return f"{value / 1e9:g}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}"


def or_dash(value: Any, format_value: Callable[[Any], str]) -> str:
    """Format a table's value, or return a dash for None."""
    return "-" if value is None else format_value(value)


def bytes_per_device(summary: Summary, direction: str) -> float | None:
    """Return a table's mean bytes of one device in one round; None if it is unknown.

    >>> bytes_per_device({"bytes_up": 600, "rounds": 3, "cohort": 2}, "up")
    100.0
    """
    turns = summary.get("rounds", 0) * summary.get("cohort", 0)
    sent = summary.get(f"bytes_{direction}")
    return None if not turns or sent is None else float(sent / turns)


def read_column(rows: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    """Return a table's values of a key; NaN for None and for rows without the key.

    >>> read_column([{"a": 1}, {"a": None}, {}], "a")
    array([ 1., nan, nan])
    """
    return np.array([row.get(key) for row in rows], dtype=float)


def finetune_lengths(summary: Summary) -> list[int]:
    """Return the epochs of fine-tuning after which a table's row was scored; 0 is before it.

    >>> finetune_lengths({"finetune": {"0": {}, "3": {}}}), finetune_lengths({})
    ([0, 3], [0])
    """
    finetune = summary.get("finetune") or (0,)
    # A damaged file may have anything here: who checks the file says so.
    is_damaged = not isinstance(finetune, list | tuple) and not _has_scores(finetune)
    return [0] if is_damaged else list(map(int, finetune))


def key_after(key: str, epochs: int) -> str:
    """Return the key of a score after fine-tuning; the plain key is always before it.

    >>> key_after("accuracy_mean", 0), key_after("accuracy_mean", 3)
    ('accuracy_mean', 'accuracy_mean_after_3')
    """
    return f"{key}_after_{epochs}" if epochs else key


def scores_after(summary: Summary, epochs: int) -> Summary:
    """Return a summary, or a table's row, with the scores after fine-tuning under plain keys.

    >>> scores_after({"accuracy_mean": 0.5, "accuracy_mean_after_3": 0.75}, 3)["accuracy_mean"]
    0.75
    """
    if not epochs:
        return summary
    ending = key_after("", epochs)
    found = {}
    for key, value in summary.items():
        if key.endswith(ending):
            found[key.removesuffix(ending)] = value
    return {**summary, **found}


def name_by_length(finetune: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of all lengths of fine-tuning under the keys of a table's row."""
    named: dict[str, Any] = {}
    for epochs, scores in finetune.items():
        for key, value in scores.items():
            named[key_after(key, int(epochs))] = value
    return named


def _has_scores(finetune: Any) -> bool:
    """Whether what a file has as ``finetune`` is scores by numbers of epochs."""
    if not isinstance(finetune, dict):
        return False
    return all(
        epochs.isdecimal() and isinstance(scores, dict) for epochs, scores in finetune.items()
    )


def name_old_scores(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run, as tables take it, with the keys of this version.

    Earlier versions stored the scores after the last length of fine-tuning under the plain keys,
    which are now always those before fine-tuning. Without ``0`` among the lengths these are not
    known, and the plain keys are left out.
    """
    finetune = summary.get("finetune") or {}
    if not _has_scores(finetune):
        # It is damaged: whoever reads it says so.
        return summary
    named = name_by_length(finetune)
    # Versions that name all of them need no change; nor do runs without fine-tuning.
    if named.keys() <= summary.keys():
        return summary
    last = list(finetune)[-1]
    kept = dict(summary)
    for key in finetune[last]:
        kept.pop(key, None)
    metric = summary.get("metric") or ("metric" if "tasks" in summary else "accuracy")
    for key in ("validation_mean", f"{metric}_clients"):
        if key in kept:
            named[key_after(key, int(last))] = kept.pop(key)
    untuned = summary.get("validation_clients", {}).get("0")
    if untuned:
        named["validation_mean"] = round(math.fsum(untuned.values()) / len(untuned), 8)
    return {**kept, **named}


def describe_finetuning(epochs: int) -> str:
    """Return when a score was measured.

    >>> describe_finetuning(0), describe_finetuning(3)
    ('before fine-tuning', 'after 3 epochs of fine-tuning')
    """
    if epochs == 0:
        return "before fine-tuning"
    noun = "epoch" if epochs == 1 else "epochs"
    return f"after {epochs} {noun} of fine-tuning"


def format_examples(row: Mapping[str, Any]) -> str:
    """Format a table's mean number of training examples of a client; a dash if it is unknown.

    >>> format_examples({"train_examples": 1234.5}), format_examples({})
    ('1,234', '-')
    """
    return or_dash(row.get(TRAIN_EXAMPLES), "{:,.0f}".format)


def have_different_amounts(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the clients of a table's rows trained on different amounts of data.

    Smaller differences than :data:`SEED_DIFFERENCE` are not shown: every table of seeds has some.

    >>> have_different_amounts([{"train_examples": 100}, {"train_examples": 99}, {}])
    False
    >>> have_different_amounts([{"train_examples": 100}, {"train_examples": 90}])
    True
    """
    amounts = [row[TRAIN_EXAMPLES] for row in rows if row.get(TRAIN_EXAMPLES) is not None]
    return bool(amounts) and min(amounts) < (1 - SEED_DIFFERENCE) * max(amounts)


class Scores(NamedTuple):
    """The scores of clients in one metric; ``mean`` is None if no client was scored."""

    metric: str = "accuracy"
    more_is_better: bool = True
    share: bool = True
    """Whether it is shown in percent."""
    mean: float | None = None
    std: float = 0.0
    worst: float = 0.0
    worst10: float = 0.0
    pooled: float | None = None
    """The score over all test examples of all clients together; older runs have none."""

    @classmethod
    def from_summary(cls, summary: Summary) -> Scores:
        """Return the scores of a summary before fine-tuning, or of :func:`scores_after`."""
        # A summary without a metric has accuracies; that of a mixed federation has None.
        metric = summary.get("metric") or "accuracy"
        kind = (metric, summary.get("more_is_better", True), summary.get("share", True))
        mean = summary.get(f"{metric}_mean")
        if mean is None:
            return cls(*kind)
        rest = []
        for name in ("std", "worst", "worst10"):
            rest.append(summary.get(f"{metric}_{name}", 0.0))
        return cls(*kind, mean, *rest)._replace(pooled=summary.get(f"{metric}_pooled"))

    @classmethod
    def from_task(cls, task: Mapping[str, Any]) -> Scores:
        """Return the scores of one task of a mixed federation."""
        return cls(**{name: task[name] for name in cls._fields if name in task})

    @property
    def factor(self) -> float:
        """What a score is multiplied by to be shown in a table."""
        return 100.0 if self.share else 1.0

    @property
    def percent(self) -> str:
        """The unit behind a name: " %", or nothing."""
        return " %" if self.share else ""

    @property
    def name(self) -> str:
        """The metric with its unit, as the head of a table's column."""
        return f"{self.metric}{self.percent}"

    @property
    def title(self) -> str:
        """The metric at the start of a title."""
        return f"{self.metric[:1].upper()}{self.metric[1:]}"

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest possible value of the metric, as shown in charts."""
        return (0.0, 100.0) if self.share else (-math.inf, math.inf)

    def format_pooled(self, digits: int = 2) -> str:
        """Format the pooled score of a table's row; a dash if the run has none."""
        return "-" if self.pooled is None else self.format(self.pooled, digits)

    def format(self, value: float, digits: int = 2, sign: str = "") -> str:
        """Format a score without its unit: shares in percent, others with four digits."""
        if self.share:
            return f"{100 * value:{sign}.{digits}f}"
        return f"{value:{sign}.4g}"

    def describe(self, value: float | None) -> str:
        """Format a score in a sentence: ``75.0 %``, or ``mae 1.25``."""
        if value is None:
            return "no score"
        if self.share:
            return f"{100 * value:.1f} %"
        return f"{self.metric} {value:.4g}"


# ---- runs ----------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of the table of runs: a run at one length of fine-tuning, or one of its tasks."""

    summary: Summary
    epochs: str
    """Epochs of fine-tuning; empty if the run has none."""
    scores: Scores
    task: str = ""
    task_values: Mapping[str, Any] = {}
    """The clients and bytes of the task."""

    def sent(self, direction: str) -> int:
        """The bytes in a table's row: of its task, or of its run if it did not count by task."""
        key = f"bytes_{direction}"
        count: int = self.task_values.get(key, self.summary[key])
        return count

    def conditions(self) -> tuple[Any, ...]:
        """What the scores of table rows must have in common to be compared."""
        options = (*DIVISION, "clients", "rounds")
        shown = [show_option(self.summary, option) for option in options]
        return (*shown, self.task, self.scores.metric)


def print_summaries(
    summaries: Sequence[Summary], file: IO[str] | None = None, elsewhere: str = ""
) -> None:
    """Print a row per run and length of fine-tuning, then the notes of the data.

    What all runs have in common is above the table. The best mean is marked among runs on the same
    data for the same number of rounds. A summary without scores is an unfinished run, with its
    ``rounds_done``.

    Args:
        summaries: The runs.
        file: Where to print; stdout by default.
        elsewhere: Where the reader finds the columns that do not fit; see :func:`print_rows`.
    """
    folder, summaries = _shorten_runs(summaries)
    rows: list[_Row] = []
    for summary in summaries:
        rows += _make_rows(summary)
    best = _find_best(rows)
    metrics = _list_metrics(rows)
    different, common = _split_options(summaries)
    if folder:
        common = f"runs in {folder}, {common}".removesuffix(", ")
    if common:
        print_text(common, file)

    ranks = {name: _option_rank(name, summaries) for name in different}
    # If no run was fine-tuned, a line below the table says so instead.
    is_tuned = any(row.epochs for row in rows)
    has_tasks = any(row.task for row in rows)
    are_amounts_different = have_different_amounts(summaries)
    # Most runs lose nothing and need no such column.
    reasons = [key for key in REASON_COLUMNS if any(summary.get(key) for summary in summaries)]
    pooled = pooled_column(metrics)
    has_pooled = any(row.scores.pooled is not None for row in rows)
    numbers = [*_score_columns(metrics), pooled, *COST_COLUMNS]
    lines = []
    for i, row in enumerate(rows):
        cells: dict[Column, Cell] = {}
        for name, rank in ranks.items():
            cells[Column(name, rank, is_name=True)] = show_option(row.summary, name)
        if is_tuned:
            cells[Column("tuned\nepochs", label="epochs of fine-tuning")] = row.epochs or "0"
        if has_tasks:
            cells[Column("task", is_name=True)] = row.task
            cells[Column("clients", 4, is_name=True)] = str(row.task_values.get("clients", ""))
        if len(metrics) > 1:
            cells[Column("metric", is_name=True)] = row.scores.name
        if are_amounts_different:
            cells[Column("train\nexamples", label="training examples")] = format_examples(
                row.summary
            )
        # An unfinished run has the first cell only.
        cells |= dict.fromkeys(numbers, "")
        cells |= zip(numbers, _score_and_cost_cells(row, i in best), strict=False)
        if not has_pooled:
            # Runs of an older version do not have this score.
            del cells[pooled]
        for key in reasons:
            cells[Column(key, 1)] = str(sum((row.summary.get(key) or {}).values()))
        lines.append(cells)
    print_rows(lines, file, elsewhere)
    print_text(UNITS_NOTE, file)
    if are_amounts_different:
        print_text("train examples: of one client, mean", file)
    if not is_tuned:
        print_text(f"{', '.join(scores.metric for scores in metrics)}: before fine-tuning", file)
    _explain_seconds(summaries, file)
    _explain_marks(rows, best, metrics, file)
    explain_errors(metrics, file)
    for note in list_notes(summaries):
        print_text(note, file)


def _explain_seconds(summaries: Sequence[Summary], file: IO[str] | None) -> None:
    """Print below the table how long runs took that were trained together."""
    shared = [
        each["seconds"] for each in summaries if each.get(SHARED, 1) > 1 and "seconds" in each
    ]
    if shared:
        total = format_duration(math.fsum(shared))
        print_text(f"seconds: {len(shared)} runs were trained together, in {total}", file)


def explain_errors(metrics: Sequence[Scores], file: IO[str] | None = None) -> None:
    """Print a line below the table for each metric of which less is better."""
    for scores in metrics:
        if not scores.more_is_better:
            print_text(f"{scores.metric}: less is better, and the worst is the largest", file)


def list_notes(summaries: Sequence[Summary]) -> list[str]:
    """Return the notes of the runs' data sets for a table, each once."""
    # A dictionary keeps the order of first appearance, which a set would not.
    notes: dict[str, None] = {}
    for summary in summaries:
        for note in summary.get("notes", ()):
            notes[f"{summary['data']}: {note}"] = None
    return list(notes)


def _shorten_runs(summaries: Sequence[Summary]) -> tuple[str, list[Summary]]:
    """Return the folder of all runs, or "", and the runs with their names in that folder."""
    if not all("run" in summary for summary in summaries):
        return "", list(summaries)
    folder, names = split_common_folder([str(summary["run"]) for summary in summaries])
    renamed: list[Summary] = []
    for summary, name in zip(summaries, names, strict=True):
        renamed.append({**summary, "run": name})
    return folder, renamed


def _option_rank(name: str, summaries: Sequence[Summary]) -> int:
    """Return how soon the column of an option is left out."""
    if name == "run":
        return 0
    # Runs are named by method and seed unless the user named them.
    is_in_name = all(str(summary.get(name)) in str(summary.get("run", "")) for summary in summaries)
    if is_in_name:
        return RANK_IN_NAME
    return 0 if name == "method" else 1


def _split_options(summaries: Sequence[Summary]) -> tuple[list[str], str]:
    """Return the options in which runs differ, and a text of those that all have in common."""
    different = []
    common = []
    for name in OPTIONS_SHOWN:
        given = [summary[name] for summary in summaries if name in summary]
        if not given or all(value == USUAL.get(name) for value in given):
            continue
        values = {show_option(summary, name) for summary in summaries}
        if len(values) > 1:
            different.append(name)
        elif values != {"none"}:
            # "scenario none" would only take room.
            common.append(f"{name} {values.pop()}")
    return different, ", ".join(common)


def show_option(summary: Summary, name: str) -> str:
    """Return an option of a run as a table shows it."""
    return str(summary.get(name, USUAL.get(name, "")))


def _make_rows(summary: Summary) -> list[_Row]:
    lengths = finetune_lengths(summary)
    is_tuned = any(lengths)
    rows = []
    for epochs in lengths:
        values = scores_after(summary, epochs)
        rows += _rows_by_task(summary, str(epochs) if is_tuned else "", values)
    return rows


def _rows_by_task(summary: Summary, epochs: str, values: Summary) -> list[_Row]:
    if "tasks" not in values:
        return [_Row(summary, epochs, Scores.from_summary(values))]
    rows = []
    for name, task in values["tasks"].items():
        rows.append(_Row(summary, epochs, Scores.from_task(task), name, task))
    return rows


def _list_metrics(rows: Sequence[_Row]) -> list[Scores]:
    """Return an example of each metric; if no run has scores, of the first row's."""
    known: dict[str, Scores] = {}
    for row in rows:
        if row.scores.mean is not None:
            known.setdefault(row.scores.metric, row.scores)
    if not known and rows:
        return [rows[0].scores]
    return list(known.values()) or [Scores()]


def _score_columns(metrics: Sequence[Scores]) -> list[Column]:
    if len(metrics) > 1:
        return [Column("mean"), Column("worst", 4), Column("worst\ntenth", 1)]
    metric = metrics[0].metric
    if metrics[0].share:
        return [Column(f"{metric}\n%"), Column("worst\n%", 4), Column("worst\n10 %", 1)]
    return [Column(metric), Column("worst", 4), Column("worst\ntenth", 1)]


def pooled_column(metrics: Sequence[Scores]) -> Column:
    """Return a table's column of the score over all clients' test examples together."""
    is_percent = len(metrics) == 1 and metrics[0].share
    return Column("pooled\n%" if is_percent else "pooled", 6)


def _find_best(rows: Sequence[_Row]) -> set[int]:
    """Return the rows with the best mean among comparable rows; ties are all best."""
    comparable: dict[tuple[Any, ...], dict[int, float]] = {}
    for i, row in enumerate(rows):
        if row.scores.mean is not None:
            # Before and after fine-tuning are different claims.
            kind = (*row.conditions(), row.epochs or "0")
            comparable.setdefault(kind, {})[i] = row.scores.mean
    found = set()
    for means in comparable.values():
        best = max(means.values())
        if not rows[min(means)].scores.more_is_better:
            best = min(means.values())
        for i, mean in means.items():
            # A row without others is the best of one: marking it would say nothing.
            if mean == best and len(means) > 1:
                found.add(i)
    return found


def _explain_marks(
    rows: Sequence[_Row], best: set[int], metrics: Sequence[Scores], file: IO[str] | None
) -> None:
    """Print what the star means, or why there is none."""
    if best:
        text = f"* the best mean {metrics[0].metric}"
        if len(metrics) > 1:
            text = "* the best mean of its metric"
        if len(set(map(_Row.conditions, rows))) > 1:
            text += " of the runs on the same data for the same number of rounds"
        if any(row.epochs for row in rows):
            text += ", before fine-tuning and after it"
        print_text(text, file)
        return
    scored = [row for row in rows if row.scores.mean is not None]
    shares = {show_option(row.summary, "validation") for row in scored}
    if len(shares) > 1 and len(set(map(_Row.conditions, scored))) == len(scored):
        listed = " and ".join(sorted(shares))
        print_text(f"no run is marked as the best: they held out {listed} for validation", file)
        return
    rounds = {row.summary.get("rounds", 0) for row in scored}
    if len(rounds) > 1:
        listed = " and ".join(map(str, sorted(rounds)))
        print_text(f"no run is marked as the best: they trained for {listed} rounds", file)


def _score_and_cost_cells(row: _Row, is_best: bool) -> list[Cell]:
    summary = row.summary
    scores = row.scores
    if summary.get("scored") == 0:
        return ["not scored", "-", "-", "-", "-", "-", *_cost_cells(row)]
    if scores.mean is None:
        done = summary.get("rounds_done", 0)
        return [f"unfinished, {done} of {summary.get('rounds', '?')} rounds"]
    mean: Cell = f"{scores.format(scores.mean)} ± {scores.format(scores.std)}"
    if is_best:
        # The star is for files and pipes, where bold is lost.
        mean = Text(f"{mean} *", style="bold")
    return [
        mean,
        scores.format(scores.worst),
        scores.format(scores.worst10),
        scores.format_pooled(),
        f"{summary['density']:.3f}",
        f"{summary['params_mean']:,.0f}",
        *_cost_cells(row),
    ]


def _cost_cells(row: _Row) -> list[str]:
    """Return the cells of bytes and seconds."""
    # How many devices of a task took part in a round is not known.
    summary = {} if row.task else row.summary
    return [
        or_dash(bytes_per_device(summary, "up"), format_kilobytes),
        or_dash(bytes_per_device(summary, "down"), format_kilobytes),
        format_bytes(row.sent("up")),
        format_bytes(row.sent("down")),
        # A user's method has no paper to count by.
        or_dash(row.summary["bytes_paper"], lambda n: f"{n / 2**20:,.1f}"),
        "-" if row.summary.get(SHARED, 1) > 1 else f"{row.summary['seconds']:.1f}",
    ]


def name_cells(summary: Summary) -> dict[str, str]:
    """Return a run as a row of a table in a notebook, by the heads of the columns."""
    cells = {}
    for name in ("run", "method", "data", "seed", "rounds"):
        if name in summary:
            cells[name] = str(summary[name])
    if "bytes_up" not in summary:
        return {**cells, "state": f"unfinished, {summary.get('rounds_done', 0)} rounds"}
    for row in _make_rows(summary):
        scores = row.scores
        when = describe_finetuning(int(row.epochs or 0))
        of_task = f" on {row.task}" if row.task else ""
        if scores.mean is not None:
            mean = f"{scores.format(scores.mean)} ± {scores.format(scores.std)}"
            cells[f"{scores.name}{of_task} {when}"] = mean
    sent = summary["bytes_up"] + summary["bytes_down"]
    return {**cells, "sent": format_bytes(sent)}


def describe_run(summary: Summary) -> str:
    """Return a run in one line, for its repr and above its table in a notebook."""
    parts = [f"{summary['method']} on {summary['data']}", f"seed {summary['seed']}"]
    parts.append(f"{summary['rounds']} rounds")
    for row in _make_rows(summary):
        of_task = f" on {row.task}" if row.task else ""
        if row.scores.mean is not None:
            score = f"{row.scores.metric} {row.scores.format(row.scores.mean, 1)}"
            when = describe_finetuning(int(row.epochs or 0))
            parts.append(f"{score}{row.scores.percent}{of_task} {when}")
    parts.append(f"{format_bytes(summary['bytes_up'] + summary['bytes_down'])} sent")
    return ", ".join(parts)


# ---- bytes ---------------------------------------------------------------------------------------


def print_causes(summaries: Sequence[Summary], file: IO[str] | None = None) -> None:
    """Print, run by run, what the bytes were spent on, in MiB.

    The causes are those of :func:`fedgrove.wire.ledger.sum_by_cause`.
    """
    folder, summaries = _shorten_runs(summaries)
    rank = _option_rank("method", summaries)
    rows = []
    for summary in summaries:
        cells: dict[Column, Cell] = {
            Column("run", is_name=True): str(summary["run"]),
            Column("method", rank, is_name=True): str(summary.get("method", "")),
        }
        # All runs have the same causes, including those that cost nothing.
        for i, (cause, count) in enumerate(summary["bytes_causes"].items()):
            # A line per word: the numbers below are shorter than the head.
            cells[Column("\n".join(cause.split()), 2 + i)] = f"{count / 2**20:,.2f}"
        sent = sum(summary["bytes_causes"].values())
        # A paper's formula counts a whole run; an unfinished one has no such count yet.
        paper = summary.get("bytes_paper")
        counted = "" if paper is None else f"{paper / 2**20:,.2f}"
        more = "unfinished" if paper is None else f"{(sent - paper) / 2**20:+,.2f}"
        cells[Column("sent\nMiB")] = f"{sent / 2**20:,.2f}"
        cells[Column("paper\nMiB")] = counted
        cells[Column("sent -\npaper", 1)] = more
        rows.append(cells)
    if folder:
        print_text(f"runs in {folder}", file)
    print_rows(rows, file)
