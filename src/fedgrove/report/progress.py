"""Progress of runs: while one trains, and as another process sees it (``fedgrove watch``).

Progress goes to stderr: a bar with the time left on a terminal, and a plain line every few seconds
elsewhere, as in a log file. What ``watch`` shows is read from the run folder by
:mod:`fedgrove.runs.follow`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..notebook import is_notebook
from .charts import Chart, Series, draw_xy, thin_out
from .page import Page
from .tables import (
    Line,
    Scores,
    Summary,
    describe_finetuning,
    finetune_lengths,
    format_bytes,
    format_duration,
    scores_after,
)
from .terminal import is_live_terminal

PRINT_EVERY = 5.0
"""Seconds between plain lines."""
NOTEBOOK_EVERY = 0.25
"""Seconds between changes of the bar in a notebook: each is a message to the browser."""
REFRESH = 2
"""Seconds after which the page of ``watch`` reloads."""
MOST_CURVE_POINTS = 300
"""Points of a curve: a run may have a hundred thousand rounds."""
MOST_ROWS = 200
"""Runs of a sweep in the table of the page."""
OVER = ("finished", "stopped", "failed")
"""The states after which nothing changes."""


# ---- while a run trains --------------------------------------------------------------------------


Forecast = Callable[[], Sequence[float]]
"""Finds the work of each round of a run in any unit, and last that of its end."""
FORECAST_FROM = 60.0
"""Seconds that a run must seem to take for its forecast to be worth a process."""


class _Work:
    """How the work of a run is spread over its rounds, found by a process of its own.

    Some methods have phases of which a round takes fifty times as long as in others. To find them
    takes seconds, and draws from torch's generator, so it is not done where the run trains. While
    nothing is known, and where processes cannot be forked, all rounds count alike.
    """

    def __init__(self, rounds: int, forecast: Forecast | None) -> None:
        self.by_round: Sequence[float] = [1.0] * rounds
        self._forecast = forecast
        self._process: Any = None
        self._answer: Any = None

    def ask(self) -> None:
        """Start the process, the first time."""
        if self._forecast is None:
            return
        forecast = self._forecast
        self._forecast = None
        has_fork = "fork" in mp.get_all_start_methods()
        if not has_fork or sys.platform == "darwin":
            return
        context = mp.get_context("fork")
        self._answer, theirs = context.Pipe(duplex=False)
        arguments = (forecast, theirs, os.getpid())
        self._process = context.Process(target=_answer, args=arguments, daemon=True)
        # An interruption between the fork and its end would leave a process that nobody knows of.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of locks that threads hold; a process that hangs is killed.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def take(self) -> None:
        """Take the answer, if it has come."""
        if self._answer is None or not self._answer.poll():
            return
        # The pipe is closed without an answer if the process failed.
        with suppress(EOFError):
            self.by_round = self._answer.recv()
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._answer.close()
        self._process = None
        self._answer = None

    def share_ahead(self, first: int, now: int) -> float:
        """The work after round ``now``, as a multiple of that since round ``first``."""
        done = sum(self.by_round[first:now])
        return sum(self.by_round[now:]) / done if done else float(len(self.by_round[now:]))


_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
FORECAST_SECONDS = 60.0
"""Seconds of computing after which a forecast is given up: it takes a core from the training."""


def _answer(forecast: Forecast, pipe: Any, parent: int) -> None:
    """In the process of a forecast: find it and send it."""
    # Imported here, because it imports torch, and `watch` does without.
    from ..seeds import single_thread

    # It must not keep a pipe open that somebody reads to its end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    # Ctrl-C goes to all processes of a terminal, and the run ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
    os.nice(10)
    threading.Thread(target=_end_in_time, args=(parent,), daemon=True).start()
    with suppress(Exception), single_thread():
        pipe.send(list(forecast()))


def _end_in_time(parent: int) -> None:
    """End this process with the run, however that ends, and after too much work."""
    while os.getppid() == parent and time.process_time() < FORECAST_SECONDS:
        time.sleep(0.2)
    os._exit(1)


@dataclass
class _Totals:
    """The sums over the lines of metrics.jsonl so far."""

    rounds: int
    """The rounds of the whole run."""
    started: float
    work: _Work
    bytes: int = 0
    round: int = 0
    score: str = ""
    first: int = 0
    """The last round before this process: rounds before a resume took no time now."""
    at: float = 0.0
    """When the last line came."""

    def add(self, line: Line) -> None:
        self.bytes += line["bytes_up"] + line["bytes_down"]
        self.round = line["round"]
        # A round that scores no client has no score; the last known one stays.
        self.score = describe_score(line) or self.score
        self.at = time.monotonic()
        if self.seconds_left() + self.at - self.started >= FORECAST_FROM:
            self.work.ask()
        self.work.take()

    def seconds_left(self) -> float:
        """How long the rest will take, counted from the last line; 0 before the first round."""
        if self.round <= self.first:
            return 0.0
        return (self.at - self.started) * self.work.share_ahead(self.first, self.round)

    @property
    def is_trained(self) -> bool:
        """Whether the progress has reached the end of all rounds; only scoring is left."""
        return self.round >= self.rounds

    def describe(self) -> str:
        """Return the score and the bytes so far for the progress line."""
        if not self.score:
            return format_bytes(self.bytes)
        return f"{self.score}  {format_bytes(self.bytes)}"

    def describe_all(self) -> str:
        """Return all progress in one line."""
        spent = time.monotonic() - self.started
        line = f"round {self.round}/{self.rounds}  {self.describe()}  {spent:.0f} s"
        if self.round > self.first:
            line += f"  {self.seconds_left():.0f} s left"
        if self.is_trained:
            line += "; fine-tuning and scoring"
        return line


def describe_score(line: Line) -> str:
    """Return the mean score of a progress line, or "" if no client was scored.

    >>> describe_score({"accuracy_mean": 0.9})
    'accuracy 90.0 %'
    >>> describe_score({"metric": "mae", "share": False, "mae_mean": 3})
    'mae 3'
    """
    if "tasks" in line:
        tasks = line["tasks"].items()
        return ", ".join(f"{name} {_format_mean(Scores.from_task(task))}" for name, task in tasks)
    return _format_mean(Scores.from_summary(line))


def describe_scores(summary: Summary) -> str:
    """Return the mean scores of a finished run, whose progress is over.

    >>> describe_scores({"accuracy_mean": 0.9})
    'accuracy 90.0 % before fine-tuning'
    """
    parts = []
    for epochs in finetune_lengths(summary):
        score = describe_score(scores_after(summary, epochs))
        if score:
            parts.append(f"{score} {describe_finetuning(epochs)}")
    return "; ".join(parts)


def _format_mean(scores: Scores) -> str:
    if scores.mean is None:
        return ""
    return f"{scores.metric} {scores.format(scores.mean, 1)}{scores.percent}"


@contextmanager
def show_progress(
    rounds: int,
    past: Sequence[Line] = (),
    quiet: bool = False,
    title: str = "",
    forecast: Forecast | None = None,
) -> Iterator[Callable[[Line], None]]:
    """Show the progress of a run; yield a function to call with each new line.

    Args:
        rounds: The rounds of the whole run.
        past: The lines from before a resume.
        quiet: Whether nothing is shown.
        title: The first line of a log, because the first round may take long.
        forecast: Finds how much work each round is, for the time left of a long run.
    """
    work = _Work(rounds, None if quiet else forecast)
    totals = _Totals(rounds, time.monotonic(), work)
    # No time was spent on them now.
    totals.first = max((line["round"] for line in past), default=0)
    for line in past:
        totals.add(line)
    try:
        if quiet:
            # Callers need not know: there is a function to call in any case.
            yield totals.add
        elif is_notebook():
            with _show_in_notebook(totals) as take:
                yield take
        elif is_live_terminal(sys.stderr):
            with _make_bar(totals) as bar:
                yield _show_in_bar(bar, totals)
        else:
            if title:
                print(title, file=sys.stderr, flush=True)
            yield _print_lines(totals)
    finally:
        work.stop()


class _TimeLeft(ProgressColumn):
    """The time left, counted down from the last line."""

    def __init__(self, totals: _Totals) -> None:
        super().__init__()
        self._totals = totals

    def render(self, task: Task) -> Text:
        """Return it as h:mm:ss."""
        left = self._totals.seconds_left()
        if not left:
            return Text("-:--:--", style="progress.remaining")
        left = max(0.0, left - (time.monotonic() - self._totals.at))
        return Text(str(timedelta(seconds=round(left))), style="progress.remaining")


def _make_bar(totals: _Totals) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        # As wide as the rest leaves: a bar of a fixed width would cut the numbers next to it.
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        _TimeLeft(totals),
    )
    # On stderr, because stdout is for results; transient, so that nothing stays behind.
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)


def _show_in_bar(bar: Progress, totals: _Totals) -> Callable[[Line], None]:
    task = bar.add_task(
        "round", total=totals.rounds, completed=totals.round, text=totals.describe()
    )

    def take(line: Line) -> None:
        totals.add(line)
        description = "fine-tuning and scoring" if totals.is_trained else "round"
        bar.update(task, completed=totals.round, text=totals.describe(), description=description)

    return take


@contextmanager
def _show_in_notebook(totals: _Totals) -> Iterator[Callable[[Line], None]]:
    """Show a bar of progress below the cell of a notebook, which stays there as a line."""
    # It is imported: this process runs in it.
    ipython = sys.modules["IPython.display"]

    def draw(text: str) -> Any:
        bar = f'<progress max="{totals.rounds}" value="{totals.round}"></progress>'
        return ipython.HTML(f"{bar} {escape(text)}")

    shown = ipython.display(draw(totals.describe_all()), display_id=True)
    shown_at = time.monotonic()

    def take(line: Line) -> None:
        nonlocal shown_at
        totals.add(line)
        is_due = time.monotonic() - shown_at >= NOTEBOOK_EVERY
        if is_due or totals.is_trained:
            shown_at = time.monotonic()
            shown.update(draw(totals.describe_all()))

    yield take
    spent = time.monotonic() - totals.started
    shown.update(
        draw(f"{totals.round} of {totals.rounds} rounds  {totals.describe()}  {spent:.0f} s")
    )


def _print_lines(totals: _Totals) -> Callable[[Line], None]:
    # Long ago, so that the first line comes at once.
    printed_at = 0.0
    printed_round = -1

    def take(line: Line) -> None:
        nonlocal printed_at, printed_round
        totals.add(line)
        is_due = time.monotonic() - printed_at >= PRINT_EVERY
        # An exchange that completes no round, as the one that finds groups, would repeat a line.
        is_new_round = totals.round != printed_round
        if is_new_round and (is_due or totals.is_trained):
            printed_at = time.monotonic()
            printed_round = totals.round
            # Flushed, because somebody may read the log file while the run trains.
            print(totals.describe_all(), file=sys.stderr, flush=True)

    return take


class MergedProgress:
    """The lines of many runs as lines of one run.

    Its round is the sum of theirs, and its score the mean over the runs with the line's metric.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._means: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, line: Line) -> Line:
        """Turn a line of the run called ``name`` into a line of the one run."""
        self._rounds[name] = line["round"]
        key = f"{line.get('metric', 'accuracy')}_mean"
        means = self._means.setdefault(key, {})
        if key in line:
            means[name] = line[key]
        merged = {**line, "round": sum(self._rounds.values())}
        if means:
            merged[key] = sum(means.values()) / len(means)
        return merged


# ---- as another process sees it ------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment, as its folder shows it."""

    path: str
    method: str
    data: str
    state: str
    """``waiting`` for the first round, ``training``, ``scoring`` after the last one, ``finished``,
    ``failed`` (a run of a sweep), or ``stopped``: no process is training it, and it has no
    result."""
    round: int = 0
    rounds: int = 0
    bytes: int = 0
    score: str = ""
    spent: float = 0.0
    """Seconds that the rounds so far took."""
    left: float | None = None
    """Seconds that the rest will take, if it goes on as in the last rounds."""
    why: str = ""
    """Why it failed; the scores of a finished run, before fine-tuning and after it."""
    scores: tuple[tuple[int, float], ...] = ()
    """The mean score after each round in which clients were scored."""
    traffic: tuple[tuple[int, float], ...] = ()
    """Mebibytes sent up to each round."""

    @property
    def is_over(self) -> bool:
        """Whether the shown run is over and nothing will change any more."""
        return self.state in OVER


def status_line(status: RunStatus) -> str:
    """Return a run in one line.

    >>> run = RunStatus("runs/a", "ditto", "digits", "training", 3, 10, 2**20, "mae 0.5", 6, 14)
    >>> status_line(run)
    'runs/a: training, round 3/10, mae 0.5, 1.0 MiB, 6 s, about 14 s left'
    """
    parts = [status.state, f"round {status.round}/{status.rounds}"]
    if status.score:
        parts.append(status.score)
    parts.append(format_bytes(status.bytes))
    parts.append(format_duration(status.spent))
    if status.left is not None and not status.is_over:
        parts.append(f"about {format_duration(status.left)} left")
    return f"{status.path}: {', '.join(parts)}"


def describe_end(status: RunStatus) -> str:
    """Return the last sentence about a run that is over."""
    if status.state == "finished":
        score = f" {status.why}." if status.why else ""
        return f"{status.path} is finished.{score} Its table: fedgrove compare {status.path}"
    if status.state == "failed":
        return f"{status.path} failed after {status.round} rounds: {status.why}"
    return (
        f"{status.path} was stopped after {status.round} of {status.rounds} rounds: no process is "
        "training it, and it has no result. It was killed, interrupted or failed. Continue with: "
        f"fedgrove resume {status.path}"
    )


def describe_sweep(runs: Sequence[RunStatus]) -> str:
    """Return all runs of a sweep in one line.

    Runs in lockstep share their time, and others come one after another, so times add up.

    >>> one = RunStatus("a", "ditto", "digits", "training", 4, 10, 2**20, spent=8)
    >>> describe_sweep([one, RunStatus("b", "ditto", "digits", "waiting", 0, 10)])
    '2 runs: 4 of 20 rounds, 1.0 MiB, 8 s, about 32 s left'
    """
    done = 0
    total = 0
    failed = 0
    sent = 0
    spent = 0.0
    ahead = 0
    for run in runs:
        done += run.round
        total += run.rounds
        sent += run.bytes
        spent += run.spent
        failed += run.state == "failed"
        if not run.is_over:
            ahead += run.rounds - run.round
    parts = [f"{done:,} of {total:,} rounds"]
    if failed:
        parts.append(f"{failed} failed")
    parts += [format_bytes(sent), format_duration(spent)]
    if done and ahead > 0:
        parts.append(f"about {format_duration(spent / done * ahead)} left")
    return f"{len(runs)} runs: {', '.join(parts)}"


def status_table(runs: Sequence[RunStatus], height: int = 20) -> RenderableType:
    """Return runs as a table of at most ``height`` rows; those that train come first."""
    is_one = len(runs) == 1
    table = Table(box=None, pad_edge=False)
    heads = ["run", "state", "round", "", "score", "sent", "time"]
    if is_one:
        heads.append("left")
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    order = sorted(runs, key=lambda run: (run.is_over, run.state == "waiting"))
    for run in order[:height]:
        left = ""
        if run.left is not None and not run.is_over:
            left = format_duration(run.left)
        cells: list[RenderableType] = [
            # Text, because a folder called [red] is not a colour.
            Text(run.path),
            run.state,
            f"{run.round}/{run.rounds}",
            ProgressBar(total=max(1, run.rounds), completed=run.round, width=16),
            Text(run.score),
            format_bytes(run.bytes),
            format_duration(run.spent),
            left,
        ]
        table.add_row(*cells[: len(heads)])
    parts: list[RenderableType] = [table]
    if len(order) > height:
        parts.append(Text(f"... and {len(order) - height} more"))
    if not is_one:
        parts.append(Text(describe_sweep(runs)))
    return Group(*parts)


def status_page(title: str, runs: Sequence[RunStatus]) -> str:
    """Return runs as a page that reloads until all are over."""
    is_one = len(runs) == 1
    page = Page(
        title,
        template="watch.html",
        runs=runs,
        most_rows=MOST_ROWS,
        sweep=describe_sweep(runs),
        charts=_status_charts(runs[0]) if is_one else [],
        describe_end=describe_end,
        is_over=all(run.is_over for run in runs),
        refresh=REFRESH,
    )
    return page.html()


def _status_charts(run: RunStatus) -> list[Chart]:
    # Only the text of the score tells its unit; a score in percent is kept as a share.
    is_share = run.score.endswith("%")
    factor = 100 if is_share else 1
    unit = "score %" if is_share else "score"
    scores = [(at, factor * value) for at, value in run.scores]
    charts = []
    if len(scores) > 1:
        charts.append(_draw_curve("Mean score by round, before fine-tuning", scores, unit))
    if len(run.traffic) > 1:
        charts.append(_draw_curve("Sent so far", run.traffic, "MiB, both ways"))
    return charts


def _draw_curve(title: str, points: Sequence[tuple[int, float]], y_title: str) -> Chart:
    series = Series.from_points("", thin_out(points, MOST_CURVE_POINTS), marker="", size=1)
    return draw_xy(title, [series], "round", y_title, whole_x=True)
