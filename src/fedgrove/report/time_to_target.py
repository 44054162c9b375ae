"""Virtual time until runs reach a target score: a table and a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ..errors import InputError, check
from .charts import Chart, Series, draw_xy
from .page import Page
from .seed_averages import strip_seed
from .tables import Scores, format_bytes, format_duration, or_dash, read_column
from .terminal import Column, print_rows, print_text, split_common_folder


class Point(NamedTuple):
    """The mean score of a run after a round, and what it had cost by then."""

    round: int
    second: float
    score: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Curve:
    """The scores of a run by round, before fine-tuning."""

    run: str
    method: str
    scores: Scores
    """The last scores, which name the metric."""
    points: tuple[Point, ...]
    total: float
    """Virtual seconds of all its rounds so far."""
    finished: bool = True

    @property
    def best(self) -> float:
        """The best score of all rounds on the curve."""
        scores = [point.score for point in self.points]
        return max(scores) if self.scores.more_is_better else min(scores)

    def reaches(self, target: float) -> Point | None:
        """Return the first point of the curve that is as good as ``target``."""
        for point in self.points:
            is_above = point.score >= target
            if point.score == target or is_above == self.scores.more_is_better:
                return point
        return None


def read_curve(
    run: str, method: str, lines: Sequence[Mapping[str, Any]], finished: bool = True
) -> Curve:
    """Return the curve of a run from its lines of metrics.jsonl.

    Raises:
        InputError: No client was scored during the run, or the run mixes data sets.
    """
    points = []
    up = 0
    down = 0
    last = Scores()
    for line in lines:
        up += line["bytes_up"]
        down += line["bytes_down"]
        if "tasks" in line:
            raise InputError(
                f"{run} mixes data sets, and their metrics have no common mean; compare runs on "
                "one data set."
            )
        scores = Scores.from_summary(line)
        if scores.mean is None:
            continue
        if "virtual_clock" not in line:
            raise InputError(f"{run} was trained by a version without a clock; run it again.")
        last = scores
        points.append(Point(line["round"], line["virtual_clock"], scores.mean, up, down))
    if not points:
        raise InputError(
            f"no client was scored during {run}; run it again with --evaluate N, to score every N "
            "rounds."
        )
    return Curve(run, method, last, tuple(points), lines[-1]["virtual_clock"], finished)


def common_target(curves: Sequence[Curve], wanted: float | None = None) -> float:
    """Return the target score of a time table: ``wanted``, or the best that all runs reach.

    >>> points = [Point(1, 2.0, 0.5, 0, 0), Point(2, 4.0, 0.75, 0, 0)]
    >>> one = Curve("one", "fedavg", Scores(), tuple(points), total=4.0)
    >>> other = Curve("other", "local", Scores(), tuple(points[:1]), total=4.0)
    >>> common_target([one, other])
    0.5
    """
    first = curves[0].scores
    for other in curves[1:]:
        if other.scores.metric != first.metric:
            raise InputError(
                f"{curves[0].run} reports {first.metric} and {other.run} {other.scores.metric}; "
                "compare runs of one metric."
            )
    if wanted is not None:
        if first.share:
            check(0 < wanted <= 1, "--to", wanted, f"a share, such as 0.9 for 90 % {first.metric}")
        check(math.isfinite(wanted), "--to", wanted, "a number")
        return wanted
    best = [each.best for each in curves]
    return min(best) if first.more_is_better else max(best)


def find_times(curves: Sequence[Curve], wanted: float | None = None) -> dict[str, Any]:
    """Return what ``compare --time --json`` prints: the target, each run, each group over seeds.

    None stands for a run that did not reach the target.
    """
    target = common_target(curves, wanted)
    runs = []
    times: dict[str, list[float | None]] = {}
    for each in curves:
        point = each.reaches(target)
        reached = dict.fromkeys(Point._fields) if point is None else point._asdict()
        times.setdefault(strip_seed(each.run), []).append(reached["second"])
        runs.append(
            {
                "run": each.run,
                "method": each.method,
                "finished": each.finished,
                "seconds_to": reached["second"],
                "round": reached["round"],
                "bytes_up": reached["bytes_up"],
                "bytes_down": reached["bytes_down"],
                "best": each.best,
                "virtual_seconds": each.total,
            }
        )
    return {
        "metric": curves[0].scores.metric,
        "to": target,
        "chosen": "the highest that all reach" if wanted is None else "given",
        "runs": runs,
        "groups": list(starmap(_average_times, times.items())),
    }


def _average_times(label: str, times: Sequence[float | None]) -> dict[str, Any]:
    """Average over seeds, if all runs reached the target."""
    reached = [seconds for seconds in times if seconds is not None]
    are_all = len(reached) == len(times)
    return {
        "group": label,
        "runs": len(times),
        "reached": len(reached),
        "seconds_to_mean": statistics.fmean(reached) if are_all else None,
        "seconds_to_std": statistics.stdev(reached) if are_all and len(reached) > 1 else None,
    }


# ---- table and page ------------------------------------------------------------------------------


def print_times(
    curves: Sequence[Curve], found: Mapping[str, Any], file: IO[str] | None = None
) -> None:
    """Print what :func:`find_times` returned: a row per run, then one per group over seeds."""
    scores = curves[0].scores
    folder, names = split_common_folder(list(map(itemgetter("run"), found["runs"])))
    if folder:
        print_text(f"runs in {folder}", file)
    rows = _make_rows(scores, found, names)
    print_rows(rows, file)
    if any(cell.endswith("*") for row in rows for cell in row.values()):
        print_text("* the fastest", file)
    if len(found["groups"]) < len(found["runs"]):
        groups = []
        for group in found["groups"]:
            mean = or_dash(group["seconds_to_mean"], format_duration)
            if group["seconds_to_std"] is not None:
                mean += f" ± {format_duration(group['seconds_to_std'])}"
            name = group["group"].removeprefix(f"{folder}/")
            groups.append(
                {
                    Column("over seeds", is_name=True): name,
                    Column("reached it"): f"{group['reached']} of {group['runs']}",
                    Column("virtual time to it"): mean,
                }
            )
        print(file=file)
        print_rows(groups, file)
    print_text(_explain(found), file)


def write_time_report(
    curves: Sequence[Curve], found: Mapping[str, Any], path: Path, *, force: bool = False
) -> None:
    """Write the HTML page of times to a target: the chart and the table."""
    scores = curves[0].scores
    names = list(map(itemgetter("run"), found["runs"]))
    page = Page(f"Virtual time to {_describe_target(scores, found)}")
    page.paragraph(small=_explain(found))
    page.charts(_draw_scores(curves, scores, found))
    rows = _make_rows(scores, found, names)
    head = [column.full_label for column in rows[0]]
    page.table(head, [list(row.values()) for row in rows], sortable=True)
    page.write(path, force=force)


def _describe_target(scores: Scores, found: Mapping[str, Any]) -> str:
    return f"{scores.metric} {scores.format(found['to'])}{scores.percent}"


def _make_rows(
    scores: Scores, found: Mapping[str, Any], names: Sequence[str]
) -> list[dict[Column, str]]:
    """Return a row per run; of several, the fastest is marked."""
    fastest = np.nanmin(read_column(found["runs"], "seconds_to"), initial=math.inf)
    rows = []
    for run, name in zip(found["runs"], names, strict=True):
        if not run["finished"]:
            name += " (unfinished)"
        time = "not reached"
        if run["seconds_to"] is not None:
            time = format_duration(run["seconds_to"])
            if len(names) > 1 and run["seconds_to"] == fastest:
                time += " *"
        rows.append(
            {
                Column("run", is_name=True): name,
                Column("method", 5, is_name=True): run["method"],
                Column(f"virtual time to\n{_describe_target(scores, found)}"): time,
                Column("round", 1): or_dash(run["round"], str),
                Column("up", 3): or_dash(run["bytes_up"], format_bytes),
                Column("down", 3): or_dash(run["bytes_down"], format_bytes),
                Column(f"best\n{scores.name}", 2): scores.format(run["best"]),
                Column("time of\nall rounds", 4): format_duration(run["virtual_seconds"]),
            }
        )
    return rows


def _explain(found: Mapping[str, Any]) -> str:
    """Return the line below a table of times to a target."""
    target = found["chosen"].replace("given", "the given one")
    return (
        f"The target is {target}; scores are means over clients, before fine-tuning, at the rounds "
        "that were scored."
    )


def _draw_scores(curves: Sequence[Curve], scores: Scores, found: Mapping[str, Any]) -> Chart:
    """Draw the score over virtual time, a line per run, and the target."""
    series = []
    for i, each in enumerate(curves):
        points = [(point.second, scores.factor * point.score) for point in each.points]
        series.append(Series.from_points(each.run, points, i, size=2.5))
    title = f"{scores.metric} over virtual time, before fine-tuning; dotted: the target"
    level = scores.factor * found["to"]
    return draw_xy(title, series, "virtual seconds", scores.name, level=level)
