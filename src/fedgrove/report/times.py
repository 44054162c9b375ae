"""Time to an accuracy on the virtual clock: runs beside each other, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import InputError, check
from .figures import Drawing, Series, xy
from .fit import Column, in_one_folder, names, print_table, print_text
from .over_seeds import label_of
from .page import Page
from .tables import Scores, duration, mib


class Point(NamedTuple):
    """How well clients were served at one moment of a run."""

    round: int
    second: float
    score: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Curve:
    """A run as its clients were scored on the way."""

    run: str
    method: str
    metric: str
    more_is_better: bool
    share: bool
    points: tuple[Point, ...]
    total: float
    """Virtual seconds of all its rounds so far."""
    finished: bool = True

    @property
    def best(self) -> float:
        """The best score that it ever had."""
        scores = [point.score for point in self.points]
        return max(scores) if self.more_is_better else min(scores)

    def reaches(self, target: float) -> Point | None:
        """The first moment at which the score is as good as ``target``."""
        for point in self.points:
            good = point.score >= target if self.more_is_better else point.score <= target
            if good:
                return point
        return None


def curve(
    run: str, method: str, lines: Sequence[Mapping[str, Any]], finished: bool = True
) -> Curve:
    """The curve of a run, from its lines of metrics.jsonl; one that has none is refused."""
    points = []
    up = 0
    down = 0
    words: Mapping[str, Any] = {}
    for line in lines:
        up += line["bytes_up"]
        down += line["bytes_down"]
        if "tasks" in line:
            raise InputError(
                f"{run} mixes data sets, and their metrics have no common mean; compare runs on "
                "one data set."
            )
        score = line.get(f"{line.get('metric', 'accuracy')}_mean")
        if score is None:
            continue
        if "virtual_clock" not in line:
            raise InputError(f"{run} was trained before there was a clock; run it again.")
        words = line
        points.append(Point(line["round"], line["virtual_clock"], score, up, down))
    if not points:
        raise InputError(
            f"nobody was scored on the way in {run}; run it again with --evaluate 1, or every so "
            "many rounds."
        )
    return Curve(
        run=run,
        method=method,
        # A line without a metric is of accuracies.
        metric=words.get("metric", "accuracy"),
        more_is_better=words.get("more_is_better", True),
        share=words.get("share", True),
        points=tuple(points),
        total=lines[-1]["virtual_clock"],
        finished=finished,
    )


def common_target(curves: Sequence[Curve], wanted: float | None = None) -> float:
    """``wanted``, or the best score that all runs reach; all must have one metric.

    >>> points = [Point(1, 2.0, 0.5, 0, 0), Point(2, 4.0, 0.75, 0, 0)]
    >>> one = Curve("one", "fedavg", "accuracy", True, True, tuple(points), total=4.0)
    >>> other = Curve("other", "local", "accuracy", True, True, tuple(points[:1]), total=4.0)
    >>> common_target([one, other])
    0.5
    """
    first = curves[0]
    for other in curves[1:]:
        if other.metric != first.metric:
            raise InputError(
                f"{first.run} reports {first.metric} and {other.run} {other.metric}; compare runs "
                "of one metric."
            )
    if wanted is not None:
        if first.share:
            check(0 < wanted <= 1, "--to", wanted, f"a share, as 0.9 for 90 % {first.metric}")
        check(math.isfinite(wanted), "--to", wanted, "a number")
        return wanted
    best = [each.best for each in curves]
    return min(best) if first.more_is_better else max(best)


def time_to(curves: Sequence[Curve], wanted: float | None = None) -> dict[str, Any]:
    """What ``compare --time --json`` prints: the target, each run, and each group over seeds.

    None stands where a run did not reach the target.
    """
    target = common_target(curves, wanted)
    runs = []
    groups: dict[str, list[float | None]] = {}
    for each in curves:
        reached = each.reaches(target)
        seconds = None if reached is None else reached.second
        groups.setdefault(label_of(each.run), []).append(seconds)
        runs.append(
            {
                "run": each.run,
                "method": each.method,
                "finished": each.finished,
                "seconds_to": seconds,
                "round": None if reached is None else reached.round,
                "bytes_up": None if reached is None else reached.bytes_up,
                "bytes_down": None if reached is None else reached.bytes_down,
                "best": each.best,
                "virtual_seconds": each.total,
            }
        )
    return {
        "metric": curves[0].metric,
        "to": target,
        "chosen": "given" if wanted is not None else "the best that all reach",
        "runs": runs,
        "groups": [_group(label, times) for label, times in groups.items()],
    }


def _group(label: str, times: Sequence[float | None]) -> dict[str, Any]:
    """The runs of one method and settings over seeds; a mean only where all reached the target."""
    reached = [seconds for seconds in times if seconds is not None]
    mean = None
    std = None
    if len(reached) == len(times):
        mean = math.fsum(reached) / len(reached)
        if len(reached) > 1:
            std = statistics.stdev(reached)
    return {
        "group": label,
        "runs": len(times),
        "reached": len(reached),
        "seconds_to_mean": mean,
        "seconds_to_std": std,
    }


# ---- for a terminal and a page -------------------------------------------------------------------


def print_times(
    curves: Sequence[Curve], found: Mapping[str, Any], file: IO[str] | None = None
) -> None:
    """Print what :func:`time_to` found: a row per run, then one per group over seeds."""
    scores = _scores(curves)
    folder, found = _in_one_folder(found)
    if folder:
        print_text(f"runs in {folder}", file)
    print_table(_columns(scores, found), _rows(scores, found), file)
    if len(found["runs"]) > 1 and _fastest(found) is not None:
        print_text("* the fastest", file)
    if len(found["groups"]) < len(found["runs"]):
        print(file=file)
        columns = [*names("over seeds"), Column("reached it"), Column("virtual time to it")]
        print_table(columns, [_group_row(g) for g in found["groups"]], file)
    print_text(_explained(found), file)


def write_times(curves: Sequence[Curve], found: Mapping[str, Any], path: Path) -> None:
    """Write the page: the plot and the table."""
    scores = _scores(curves)
    title = f"Virtual time to {_target(scores, found)}"
    page = Page(title)
    page.paragraph(small=_explained(found))
    page.figures(_figure(curves, scores, found))
    head = [column.words for column in _columns(scores, found)]
    page.table(head, _rows(scores, found), sortable=True)
    page.write(path)


def _in_one_folder(found: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The folder of all runs, and what was found with their names in it."""
    folder, short = in_one_folder([run["run"] for run in found["runs"]])
    runs = [{**run, "run": name} for run, name in zip(found["runs"], short, strict=True)]
    groups = []
    for group in found["groups"]:
        name = group["group"].removeprefix(f"{folder}/") if folder else group["group"]
        groups.append({**group, "group": name})
    return folder, {**found, "runs": runs, "groups": groups}


def _scores(curves: Sequence[Curve]) -> Scores:
    first = curves[0]
    return Scores(first.metric, first.more_is_better, first.share)


def _target(scores: Scores, found: Mapping[str, Any]) -> str:
    percent = " %" if scores.share else ""
    return f"{scores.metric} {scores.shown(found['to'])}{percent}"


def _columns(scores: Scores, found: Mapping[str, Any]) -> list[Column]:
    percent = " %" if scores.share else ""
    return [
        Column("run", is_name=True),
        Column("method", 5, is_name=True),
        Column(f"virtual time to\n{_target(scores, found)}"),
        Column("round", 1),
        Column("up", 3),
        Column("down", 3),
        Column(f"best\n{scores.metric}{percent}", 2),
        Column("time of\nall rounds", 4),
    ]


def _rows(scores: Scores, found: Mapping[str, Any]) -> list[list[str]]:
    fastest = _fastest(found)
    several = len(found["runs"]) > 1
    rows = []
    for run in found["runs"]:
        name = run["run"] if run["finished"] else f"{run['run']} (unfinished)"
        seconds = run["seconds_to"]
        reached = ["not reached", "-", "-", "-"]
        if seconds is not None:
            mark = " *" if several and seconds == fastest else ""
            sent = [mib(run["bytes_up"]), mib(run["bytes_down"])]
            reached = [f"{duration(seconds)}{mark}", str(run["round"]), *sent]
        best = scores.shown(run["best"])
        rows.append([name, run["method"], *reached, best, duration(run["virtual_seconds"])])
    return rows


def _fastest(found: Mapping[str, Any]) -> float | None:
    reached = [run["seconds_to"] for run in found["runs"] if run["seconds_to"] is not None]
    return min(reached, default=None)


def _group_row(group: Mapping[str, Any]) -> list[str]:
    mean = "-"
    if group["seconds_to_mean"] is not None:
        mean = duration(group["seconds_to_mean"])
        if group["seconds_to_std"] is not None:
            mean += f" ± {duration(group['seconds_to_std'])}"
    return [group["group"], f"{group['reached']} of {group['runs']}", mean]


def _explained(found: Mapping[str, Any]) -> str:
    target = "as given" if found["chosen"] == "given" else found["chosen"]
    return (
        f"The target is {target}; scores are means over clients, as delivered, at the rounds that "
        "were scored."
    )


def _figure(curves: Sequence[Curve], scores: Scores, found: Mapping[str, Any]) -> Drawing:
    """The score over virtual time, a line per run, and the target."""
    factor = 100 if scores.share else 1
    series = []
    for i, each in enumerate(curves):
        x = [point.second for point in each.points]
        y: list[float | None] = [factor * point.score for point in each.points]
        series.append(Series(each.run, x, y, i, size=2.5))
    percent = " %" if scores.share else ""
    title = f"{scores.metric} over virtual time; dotted: the target"
    y_title = f"{scores.metric}{percent}"
    return xy(title, series, "virtual seconds", y_title, level=factor * found["to"])
