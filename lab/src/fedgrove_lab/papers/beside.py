"""What was measured beside what a paper reports: one object, and its tables for people.

:func:`table` makes the object; the rest prints it on a terminal or writes it as Markdown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from fedgrove.data.devices import read
from fedgrove.report.seed_averages import paired_difference
from fedgrove.report.tables import Summary, bytes_per_device
from fedgrove.report.terminal import Column, name_columns, number_columns, print_table, print_text
from fedgrove.report.time_to_target import Curve, common_target, read_curve

from .studies import Row, Study

Comparison = Mapping[str, Any]
"""What :func:`table` returns and ``fedgrove paper --json`` prints."""
ComparedRow = Mapping[str, Any]
"""One of the ``rows`` of a comparison."""
Summaries = Mapping[str, Summary | None]
"""The summaries of a study's runs, by name; None stands for a run without one.

Measures over rounds need the lines of the run's metrics.jsonl beside them, under "lines".
"""
Measured = Sequence[tuple[Study, Summaries]]

TITLES = {
    "accuracy_mean": "accuracy %",
    "accuracy_std": "std over clients",
    "accuracy_worst": "worst %",
    "accuracy_worst10": "worst tenth %",
    "accuracy_best": "best %",
    "score": "score",
    "params": "parameters left",
    "model_mb": "model MB",
    "mib_paper": "MiB counted",
    "mib": "MiB sent",
    "share_paper": "% counted",
    "share": "% sent",
    "reduction_paper": "% less, counted",
    "reduction": "% less, sent",
    "density_run": "density %, mean over rounds",
    "density_end": "density %, at the end",
    "mask_stability": "mask stability %",
    "pruned": "pruned %",
    "accuracy_band": "accuracy %",
    "clients_band": "clients",
    "mib_up": "MiB up",
    "mib_down": "MiB down",
    "less_counted": "% less up, counted",
    "less_up": "% less up, sent",
    "less_down": "% less down, sent",
    "centroids": "centroids per layer",
    "virtual_seconds": "virtual s",
    "seconds_round": "s a round, here",
    "seconds_to_all": "virtual s to what all reach",
    "accuracy_tasks": "mean of tasks %",
    "accuracy_least": "worst device %",
    "purity": "purity",
    "groups": "number of groups",
    "group_count": "number of groups",
    "divided_in_round": "divided after round",
    "kb_each": "kB per device and round",
}
"""How a measure is called in a table's head and on an axis; see :func:`title_of`."""
DIGITS = {
    "params": 0,
    "model_mb": 3,
    "mib_paper": 1,
    "mib": 1,
    "share_paper": 2,
    "share": 2,
    "reduction_paper": 2,
    "reduction": 2,
    "density_run": 2,
    "density_end": 2,
    "mask_stability": 2,
    "clients_band": 1,
    "mib_up": 1,
    "mib_down": 1,
    "less_counted": 2,
    "less_up": 2,
    "less_down": 2,
    "centroids": 2,
    "virtual_seconds": 1,
    "seconds_round": 2,
    "seconds_to_all": 1,
    "groups": 1,
    "group_count": 1,
    "divided_in_round": 0,
    "kb_each": 1,
}
"""Measures that do not depend on fine-tuning, and how many digits of them are shown."""
SHARES = {"share_paper": "mib_paper", "share": "mib"}
"""Measures in % of another row's, and what of."""
REDUCTIONS = {"reduction_paper": "mib_paper", "reduction": "mib"}
"""Measures of how much less a row has than another one, in % of that, and what of."""
TO_ALL = "seconds_to_all"
"""Virtual seconds to the best accuracy that all rows of a panel reach, on every seed."""
FIGURES = ("mask_stability", "centroids", "uplink_counted")
"""What methods tell of themselves in each round."""
FRACTIONS = ("accuracy", "density", "mask_stability", "pruned")
"""What begins the names of measures that are fractions, and are shown in %."""
ON_TASK = "accuracy_on/"
"""Begins a measure of the mean accuracy on one task, as ``accuracy_on/mnist``."""
REACHED = "rounds_to@"
"""Begins a measure of how many rounds it takes to an accuracy."""
SPREAD = "± over seeds. counted: the paper's own formula; sent: real messages, both ways."
FASTEST = 100
"""Mbit/s: where bandwidths of named profiles end."""
QUICK = "QUICK: a look, not a measurement"


# ---- one object ----------------------------------------------------------------------------------


def table(paper: str, part: str, measured: Measured, quick: bool = False) -> dict[str, Any]:
    """A part of a paper: ours, the paper's and the difference by row, and the paired tests.

    Values are means over seeds with their sample deviation, None with one seed. A key that depends
    on fine-tuning has its epochs after a colon, as ``accuracy_mean:3``. The paper's own method is
    tested against all others.
    """
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    notes: list[str] = []
    finished: list[Summary] = []
    for study, summaries in measured:
        rows += _rows(study, summaries)
        matrices += _matrices(study, summaries)
        pairs += _pairs(study, summaries)
        notes += study.notes
        notes += _not_reached(study, summaries)
        notes += _reached_by_all(study, summaries)
        notes += _bands_apart(study, summaries)
        for summary in summaries.values():
            if summary is not None:
                finished.append(summary)
    for matrix in matrices:
        notes.append(f"{matrix['panel']}, {matrix['title']}: {matrix['about']}.")
    engines: set[str] = set()
    seconds: list[float] = []
    # The notes of the data come after those of all studies.
    for summary in finished:
        engines.add(summary["engine"])
        seconds.append(summary["seconds"])
        for note in summary.get("notes", ()):
            notes.append(f"{summary['data']}: {note}")
    # The studies of a part differ in their data only: the first speaks for all.
    first = measured[0][0]
    return {
        "paper": paper,
        "part": part,
        "title": first.title,
        "about": first.about,
        "quick": quick,
        "measures": list(first.measures),
        "counted": list(first.counted),
        "drawn": list(first.drawn),
        "against": first.against,
        "lines": first.lines,
        "only_best": first.only_best,
        "engines": sorted(engines),
        "seconds": round(math.fsum(seconds), 1),
        "rows": rows,
        "matrices": matrices,
        "paired": pairs,
        # Runs of one study repeat their data's notes; a dictionary drops repeats and keeps order.
        "notes": list(dict.fromkeys(notes)),
    }


def run_value(
    summary: Summary, key: str, layer: str = "", band: Collection[str] = ()
) -> float | None:
    """One value of a run; ``layer`` is the one that ``pruned`` is of, ``band`` the clients.

    None where there is none: the score of a run whose clients are all equally accurate, rounds to
    an accuracy that was not reached, what was not measured.

    >>> scores = {"accuracy_mean": 0.75, "accuracy_std": 0.25}
    >>> run_value({"finetune": {"3": scores}}, "score:3")
    3.0
    """
    measure, length = _parted(key)
    if measure.startswith(TASKS):
        return _of_tasks(summary["finetune"][length].get("tasks", {}), measure)
    if measure in ("purity", "groups"):
        # Groups that nobody asked for, as one model for all, have no purity.
        return summary.get(measure) if "purity" in summary else None
    if "@" in measure or measure in ("density_run", "mask_stability", "centroids"):
        return _over_rounds(summary.get("lines", ()), measure)
    if measure == "pruned":
        kept = summary.get("figures", {}).get(f"density:{layer}")
        return None if kept is None else 1 - float(kept)
    if measure == "accuracy_best":
        # A summary has the accuracies of single clients at the last length only.
        is_last = length == list(summary["finetune"])[-1]
        return float(max(summary["accuracy_clients"].values())) if is_last else None
    if measure == "accuracy_band":
        scored = summary["accuracy_clients"]
        values = [scored[client] for client in band if client in scored]
        return math.fsum(values) / len(values) if values else None
    if measure == "clients_band":
        return float(len(band))
    if measure in ("mib_up", "mib_down"):
        return float(summary[measure.replace("mib", "bytes")] / 2**20)
    if measure.startswith("less_"):
        return _less(summary, measure)
    if measure == "group_count":
        # Also where the truth is not known; one group counts as one.
        return float(summary["groups"])
    if measure == "divided_in_round":
        told = summary.get("figures", {}).get(measure)
        # Below 0: the method stays with one group.
        return None if told is None or told < 0 else float(told)
    if measure == "kb_each":
        up = bytes_per_device(summary, "up")
        down = bytes_per_device(summary, "down")
        return None if up is None or down is None else (up + down) / 1000
    if measure == "virtual_seconds":
        return float(summary["virtual_seconds"])
    if measure == "seconds_round":
        return float(summary["seconds"] / summary["rounds"])
    if measure == "mib":
        return float((summary["bytes_up"] + summary["bytes_down"]) / 2**20)
    if measure == "mib_paper":
        return float(summary["bytes_paper"] / 2**20)
    if measure == "density_end":
        return float(summary["density"])
    if measure == "params":
        return float(summary["params_mean"])
    if measure == "model_mb":
        # Four bytes each and 10^6 bytes to a megabyte.
        return float(4 * summary["params_mean"] / 1e6)
    scores = summary["finetune"][length]
    if measure != "score":
        return float(scores[measure])
    if scores["accuracy_std"] == 0:
        return None
    return float(scores["accuracy_mean"] / scores["accuracy_std"])


def _parted(key: str) -> tuple[str, str]:
    """A measure and the epochs of fine-tuning, which not all have; tasks may have a colon too.

    >>> _parted("accuracy_on/digits:turned:3"), _parted("mib")
    (('accuracy_on/digits:turned', '3'), ('mib', ''))
    """
    measure, colon, length = key.rpartition(":")
    return (measure, length) if colon else (key, "")


TASKS = (ON_TASK, "accuracy_tasks", "accuracy_least")
"""What begins the names of measures of a federation of several tasks."""


def _of_tasks(tasks: Mapping[str, Mapping[str, Any]], measure: str) -> float | None:
    """A value of the tasks' figures; None where it is no accuracy.

    >>> tasks = {"a": {"metric": "accuracy", "mean": 0.5, "worst": 0.25}}
    >>> tasks["b"] = {"metric": "accuracy", "mean": 1.0, "worst": 0.75}
    >>> [_of_tasks(tasks, key) for key in ("accuracy_on/a", "accuracy_tasks", "accuracy_least")]
    [0.5, 0.75, 0.25]
    """
    of = {name: task for name, task in tasks.items() if task["metric"] == "accuracy"}
    if measure.startswith(ON_TASK):
        task = of.get(measure.removeprefix(ON_TASK))
        return None if task is None else float(task["mean"])
    if not of:
        return None
    if measure == "accuracy_least":
        return float(min(task["worst"] for task in of.values()))
    return math.fsum(task["mean"] for task in of.values()) / len(of)


def _less(summary: Summary, measure: str) -> float:
    """How much less was sent, in %, than by all clients of all rounds with 4 bytes a parameter.

    Counted: by the method's own formula, in which both directions are alike, or as it tells itself
    of its uplink.
    """
    dense = 4 * summary["params"] * summary["cohort"] * summary["rounds"]
    told = _over_rounds(summary.get("lines", ()), "uplink_counted")
    if measure != "less_counted":
        share = summary[measure.replace("less", "bytes")] / dense
    elif told is not None:
        share = told
    else:
        share = summary["bytes_paper"] / (2 * dense)
    return float(100 * (1 - share))


def _over_rounds(lines: Iterable[Mapping[str, Any]], measure: str) -> float | None:
    """A value of the lines of metrics.jsonl.

    >>> lines = [{"round": 1, "counts": True, "accuracy_mean": 0.5}]
    >>> lines += [{"round": 2, "counts": True, "accuracy_mean": 0.9}]
    >>> _over_rounds(lines, "rounds_to@0.85"), _over_rounds(lines, "accuracy_mean@1")
    (2.0, 0.5)
    """
    name, _, at = measure.partition("@")
    found: list[float] = []
    for line in lines:
        # An exchange that is not a round has a line too.
        if not line["counts"]:
            continue
        value = _in_line(line, name)
        if value is None:
            continue
        if name == "rounds_to" and value >= float(at):
            return float(line["round"])
        if at == str(line["round"]):
            return float(value)
        found.append(value)
    # What is asked for at a round, or to an accuracy, was not found.
    if at or not found:
        return None
    return math.fsum(found) / len(found)


def _in_line(line: Mapping[str, Any], name: str) -> float | None:
    """What a line says; nothing where clients were not scored, or the method has no such figure."""
    if name.startswith(TASKS):
        return _of_tasks(line.get("tasks", {}), name)
    keys = {"density_run": "density", "rounds_to": "accuracy_mean"}
    told = line.get("figures", {}) if name in FIGURES else line
    value: float | None = told.get(keys.get(name, name))
    return value


def _curve(runs: Iterable[Summary], measure: str) -> list[dict[str, Any]]:
    """A measure after each round, over seeds."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for line in run.get("lines", ()):
            value = _in_line(line, measure)
            if line["counts"] and value is not None:
                by_round.setdefault(line["round"], []).append(value)
    points = []
    for done in sorted(by_round):
        points.append({"round": done, **(_over_seeds(by_round[done]) or {})})
    return points


def _not_reached(study: Study, summaries: Summaries) -> Iterator[str]:
    """A note of the rows in which an accuracy was not reached on every seed."""
    for measure in study.counted:
        if not measure.startswith(REACHED):
            continue
        short = []
        for row in study.rows:
            runs = _finished(row, summaries)
            missed = sum(run_value(run, measure) is None for run in runs.values())
            if missed == len(runs) > 0:
                short.append(row.label)
            elif missed:
                short.append(f"{row.label} (on {missed} of {len(runs)} seeds)")
        if short:
            target = float(measure.removeprefix(REACHED))
            yield f"{100 * target:g} % was not reached by: {', '.join(short)}."


def _reached_by_all(study: Study, summaries: Summaries) -> Iterator[str]:
    """A note of the accuracy that all rows of a panel reach."""
    if TO_ALL in study.counted:
        for panel, (target, _) in _common(study, summaries).items():
            where = f"{panel}: " if panel else ""
            yield f"{where}what all rows reach on every seed is {100 * target:.2f} %."


def _common(study: Study, summaries: Summaries) -> dict[str, tuple[float, dict[str, list[float]]]]:
    """By panel: the best accuracy that all runs reach, and the seconds of each row's runs to it."""
    curves: dict[str, dict[str, list[Curve]]] = {}
    for row in study.rows:
        for run in _finished(row, summaries).values():
            found = read_curve(row.name, row.label, run.get("lines", ()))
            curves.setdefault(row.panel, {}).setdefault(row.name, []).append(found)
    common = {}
    for panel, by_row in curves.items():
        target = common_target([each for runs in by_row.values() for each in runs])
        seconds = {}
        for name, runs in by_row.items():
            points = [each.reaches(target) for each in runs]
            seconds[name] = [point.second for point in points if point is not None]
        common[panel] = (target, seconds)
    return common


def _bands_apart(study: Study, summaries: Summaries) -> Iterator[str]:
    """Notes of how far the groups of bandwidths lie apart, by series."""
    means: dict[str, list[float]] = {}
    for row in study.rows:
        if row.band is None:
            continue
        value = _row(study, row, summaries)["ours"].get("accuracy_band:0")
        if value is not None:
            means.setdefault(row.series, []).append(value["mean"])
    for series, found in means.items():
        apart = 100 * (max(found) - min(found))
        yield f"{series}: groups of bandwidths lie {apart:.2f} points apart."


def _in_band(row: Row, seed: int, clients: Iterable[str]) -> list[str]:
    """Which clients have a bandwidth of the row's."""
    if row.band is None:
        return []
    low, high = row.band
    devices = read(row.experiment.profile)
    members = []
    for client in clients:
        uplink = devices.info(1, int(client), seed).up
        # The last group has its upper end too: bandwidths are clipped there.
        if low <= uplink < high or uplink == high == FASTEST:
            members.append(client)
    return members


def _rows(study: Study, summaries: Summaries) -> list[dict[str, Any]]:
    # The best of a panel is known only when all its rows are.
    rows = [_row(study, row, summaries) for row in study.rows]
    _mark_best(rows, study.best)
    if TO_ALL in study.counted:
        for panel, (_, seconds) in _common(study, summaries).items():
            for made in rows:
                if made["panel"] == panel and made["name"] in seconds:
                    made["ours"][TO_ALL] = _over_seeds(seconds[made["name"]])
    # Shares are of another row, which is known only now.
    for row in rows:
        if row["name"] == study.base and row["ours"]:
            _add_shares(rows, row["ours"], study.counted)
    for row in rows:
        _add_differences(row)
    return rows


def _matrices(study: Study, summaries: Summaries) -> Iterator[dict[str, Any]]:
    """The matrices of each row, of its first seed that has any."""
    for row in study.rows:
        for _, run in sorted(_finished(row, summaries).items()):
            if "matrices" not in run:
                continue
            for matrix in run["matrices"]:
                yield {
                    "data": run["data"],
                    "panel": row.panel,
                    "label": row.label,
                    "title": matrix.title,
                    "labels": list(matrix.labels),
                    "values": [list(line) for line in matrix.values],
                    "about": matrix.about,
                }
            break


def _add_shares(
    rows: Sequence[dict[str, Any]], base: Mapping[str, Any], counted: Sequence[str]
) -> None:
    """Fill in each row's bytes as % of those of ``base``, and how many % less they are."""
    for row in rows:
        for name, measure in (SHARES | REDUCTIONS).items():
            if name in counted and measure in row["ours"]:
                percent = 100 * row["ours"][measure]["mean"] / base[measure]["mean"]
                if name in REDUCTIONS:
                    percent = 100 - percent
                row["ours"][name] = {"mean": round(percent, 8), "std": None}


def _add_differences(row: dict[str, Any]) -> None:
    # A paper may report a length of fine-tuning that a quick run leaves out.
    for key, reported in row["paper"].items():
        if key in row["ours"]:
            row["difference"][key] = round(row["ours"][key]["mean"] - reported, 8)


def _row(study: Study, row: Row, summaries: Summaries) -> dict[str, Any]:
    keys = []
    for length in row.experiment.finetune:
        for measure in study.measures:
            keys.append(f"{measure}:{length}")
    for measure in study.counted:
        if measure not in SHARES | REDUCTIONS and measure != TO_ALL:
            keys.append(measure)

    runs = _finished(row, summaries)
    ours = {}
    for key in keys:
        values = []
        for seed, run in runs.items():
            band = _in_band(row, seed, run.get("accuracy_clients", ()))
            values.append(run_value(run, key, row.layer, band))
        if key.startswith(REACHED) and None in values:
            # The mean of those that got there would look better than the row is: a note says it.
            continue
        over_seeds = _over_seeds(values)
        if over_seeds is not None:
            ours[key] = over_seeds
    curves = {}
    if study.over_rounds:
        curves = {measure: _curve(runs.values(), measure) for measure in study.drawn}

    wanted = 0
    for name in summaries:
        if _row_name(name) == row.name:
            wanted += 1
    # A run knows the data's real name and split where the experiment names a file or a default.
    first: Summary = next(iter(runs.values()), {})
    return {
        "data": first.get("data", row.experiment.data),
        "split": first.get("split", row.experiment.split),
        "panel": row.panel,
        "name": row.name,
        "label": row.label,
        "series": row.series,
        "x": row.x,
        "lengths": list(row.experiment.finetune),
        "lead": row.lead,
        "picked": row.picked,
        "seeds": sorted(runs),
        "missing": wanted - len(runs),
        "ours": ours,
        "curves": curves,
        "paper": dict(row.reported),
        "difference": {},
        "group_sizes": [run["group_sizes"] for run in runs.values()],
    }


def _finished(row: Row, summaries: Summaries) -> dict[int, Summary]:
    """A row's finished runs by seed."""
    runs = {}
    for name, summary in summaries.items():
        if summary is not None and _row_name(name) == row.name:
            runs[summary["seed"]] = summary
    return runs


def _row_name(run: str) -> str:
    """The row of a run ``NAME-sSEED``; a prefix would not do, for ca-afp and ca-afp-phased."""
    return run.rpartition("-s")[0]


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean and sample deviation; None where there is no value at all."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = None
    if len(known) > 1:
        std = round(statistics.stdev(known), 8)
    return {"mean": round(math.fsum(known) / len(known), 8), "std": std}


def _mark_best(rows: Sequence[dict[str, Any]], measure: str) -> None:
    """Set ``best``: whether a row is the first of its panel by the measure the paper picks by."""
    best: dict[str, dict[str, Any]] = {}
    highest: dict[str, float] = {}
    for row in rows:
        row["best"] = False
        value = row["ours"].get(f"{measure}:{row['lengths'][-1]}")
        if value is None:
            continue
        panel = row["panel"]
        # Strictly higher, so that the first of equal rows is the best.
        if panel not in best or value["mean"] > highest[panel]:
            best[panel] = row
            highest[panel] = value["mean"]
    for row in best.values():
        row["best"] = True


def _pairs(study: Study, summaries: Summaries) -> Iterator[dict[str, Any]]:
    """Each lead row against each other row of its panel, at each length of fine-tuning."""
    leads = [row for row in study.rows if row.lead]
    for i, lead in enumerate(leads):
        for other in study.rows:
            # Two leads are compared once, the earlier minus the later; and none with itself.
            is_settled = other in leads[: i + 1]
            is_elsewhere = other.panel != lead.panel or other.x != lead.x
            if is_settled or is_elsewhere:
                continue
            for length in lead.experiment.finetune:
                ours = _after(_finished(lead, summaries), length)
                theirs = _after(_finished(other, summaries), length)
                difference = paired_difference(ours, theirs)
                if difference is None:
                    continue
                yield {
                    "data": next(iter(ours.values()))["data"],
                    "panel": lead.panel,
                    "x": lead.x,
                    "row": lead.label,
                    "against": other.label,
                    "finetune": length,
                    **difference,
                }


def _after(runs: Mapping[int, Summary], length: int) -> dict[int, Summary]:
    """The runs with their accuracies after so many epochs of fine-tuning."""
    after: dict[int, Summary] = {}
    for seed, run in runs.items():
        # A summary's own accuracies are those of the last length; the test reads them there.
        own = dict(run["finetune"][str(length)])
        if "tasks" in own:
            own["accuracy_mean"] = _of_tasks(own["tasks"], "accuracy_tasks")
            # Errors of forecasts alone: nothing to test.
            if own["accuracy_mean"] is None:
                continue
        after[seed] = {**run, **own}
    return after


# ---- for people ----------------------------------------------------------------------------------


class Section(NamedTuple):
    """The lines of a table that belong to one data set and panel."""

    title: str
    lines: list[list[str]]


def titled(comparison: Comparison) -> str:
    """The title of the part, with a warning where the runs were quick ones."""
    title: str = comparison["title"]
    return f"{title}, {QUICK}" if comparison["quick"] else title


def layout(comparison: Comparison) -> tuple[list[str], list[Section]]:
    """The head of the table and its sections; columns that nothing fills are left out."""
    measures = comparison["measures"]
    counted = comparison["counted"]
    sections: dict[str, list[list[str]]] = {}
    # All lines are filled in before any is shown: sections share one head.
    lines: list[list[str]] = []
    several_lengths = False
    for row in comparison["rows"]:
        is_marked = row["best"] or row["picked"]
        if comparison["only_best"] and not is_marked:
            continue
        if len(row["lengths"]) > 1:
            several_lengths = True
        for length in row["lengths"]:
            line = _line(row, length, measures, counted)
            lines.append(line)
            sections.setdefault(place(row), []).append(line)

    head = _head(measures, counted)
    any_groups = any(_is_grouped(row) for row in comparison["rows"])
    kept = []
    for column, title in enumerate(head):
        if title == "fine-tuned" and not several_lengths:
            continue
        if title == "groups" and not any_groups:
            continue
        if any(line[column] for line in lines):
            kept.append(column)

    kept_sections = []
    for title, whole in sections.items():
        kept_lines = [_pick(line, kept) for line in whole]
        kept_sections.append(Section(title, kept_lines))
    return _pick(head, kept), kept_sections


def _is_grouped(row: ComparedRow) -> bool:
    """Whether clients share models with some others, neither with all nor with none."""
    return any(1 < len(sizes) < sum(sizes) for sizes in row["group_sizes"])


def _pick(cells: Sequence[str], columns: Sequence[int]) -> list[str]:
    return [cells[column] for column in columns]


def title_of(measure: str) -> str:
    """What a measure is called.

    >>> title_of("accuracy_mean"), title_of("accuracy_mean@10"), title_of("rounds_to@0.85")
    ('accuracy %', 'accuracy % after 10', 'rounds to 85 %')
    >>> title_of("accuracy_on/mnist")
    'mnist %'
    """
    if measure.startswith(REACHED):
        return f"rounds to {100 * float(measure.removeprefix(REACHED)):g} %"
    name, _, done = measure.partition("@")
    title = f"{name.removeprefix(ON_TASK)} %" if name.startswith(ON_TASK) else TITLES[name]
    return f"{title} after {done}" if done else title


def place(row: ComparedRow) -> str:
    """The data of a row, and its panel."""
    data = f"{row['data']}, {row['split'] or 'own'} split"
    return f"{data}: {row['panel']}" if row["panel"] else data


def _head(measures: Sequence[str], counted: Sequence[str]) -> list[str]:
    head = ["row", "fine-tuned", "seeds"]
    for measure in measures:
        head += [title_of(measure), "paper", "difference"]
    head.append("groups")
    for measure in counted:
        head += [title_of(measure), "paper", "difference"]
    return head


def _line(
    row: ComparedRow, length: int, measures: Sequence[str], counted: Sequence[str]
) -> list[str]:
    """A row at one length of fine-tuning, in the columns of :func:`_head`."""
    label = row["label"]
    if row["best"]:
        label += " *"
    if row["picked"]:
        label += " +"
    finished = len(row["seeds"])
    seeds = str(finished)
    if row["missing"]:
        seeds = f"{finished} of {finished + row['missing']}"
    line = [label, str(length), seeds]
    for measure in measures:
        line += _beside(row, f"{measure}:{length}")
    line.append(groups(row))
    for measure in counted:
        line += _beside(row, measure)
    return line


def _beside(row: ComparedRow, key: str) -> list[str]:
    """Ours, the paper's, and the difference."""
    scale = scale_of(key)
    digits = DIGITS.get(key, 2)
    paper = row["paper"].get(key)
    difference = row["difference"].get(key)
    return [
        _ours(row, key),
        "" if paper is None else f"{scale * paper:.{digits}f}",
        "" if difference is None else f"{scale * difference:+.{digits}f}",
    ]


def _ours(row: ComparedRow, key: str) -> str:
    value = row["ours"].get(key)
    if value is None:
        return ""
    scale = scale_of(key)
    digits = DIGITS.get(key, 2)
    mean = f"{scale * value['mean']:.{digits}f}"
    # Counts hardly vary over seeds: their spread would only widen the table.
    if value["std"] is None or key in DIGITS:
        return mean
    return f"{mean} ± {scale * value['std']:.{digits}f}"


def scale_of(key: str) -> float:
    """What to multiply a value by before it is shown: fractions are shown in %."""
    return 100.0 if key.startswith(FRACTIONS) else 1.0


def groups(row: ComparedRow) -> str:
    """Sizes of the groups of clients, of several seeds where they differ.

    >>> groups({"group_sizes": [[28, 1, 1], [28, 1, 1]]}), groups({"group_sizes": [[1] * 30]})
    ('28/1/1', '30 x 1')
    """
    different: list[str] = []
    for sizes in row["group_sizes"]:
        all_equal = len(set(sizes)) == 1
        if len(sizes) > 5 and all_equal:
            text = f"{len(sizes)} x {sizes[0]}"
        else:
            text = "/".join(str(size) for size in sizes)
        if text not in different:
            different.append(text)
    # Ten seeds can give ten groupings: three show how much they differ.
    more = " ..." if len(different) > 3 else ""
    return ", ".join(different[:3]) + more


def marks(comparison: Comparison) -> str:
    """What the marks behind a row's name mean, those that are used."""
    text = ""
    if any(row["best"] for row in comparison["rows"]):
        text += " * ours, the best."
    if any(row["picked"] for row in comparison["rows"]):
        text += " + the paper's choice."
    return text


def paired_tests(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the paired tests: a column per length of fine-tuning.

    Where there are panels, a column says which one.
    """
    pairs = comparison["paired"]
    has_panels = any(_where(pair) for pair in pairs)
    lengths: list[int] = []
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for pair in pairs:
        if pair["finetune"] not in lengths:
            lengths.append(pair["finetune"])
        names = [pair["data"], pair["row"], pair["against"], str(pair["seeds"])]
        if has_panels:
            names.insert(1, _where(pair))
        text = f"{100 * pair['difference']:+.2f}"
        if pair["p"] is not None:
            text += f" (p {pair['p']:.2g})"
        # The lengths of one pair share a line, though each is a test of its own.
        cells.setdefault(tuple(names), {})[pair["finetune"]] = text

    head = ["data", "row", "minus", "seeds"]
    if has_panels:
        head.insert(1, "at")
    head += [f"fine-tuned {length}" for length in lengths]
    lines = []
    for key, by_length in cells.items():
        line = list(key)
        for length in lengths:
            line.append(by_length.get(length, ""))
        lines.append(line)
    return head, lines


def _where(pair: Mapping[str, Any]) -> str:
    """The panel of a pair, and where on its axis."""
    panel: str = pair["panel"]
    return panel if pair["x"] is None else f"{panel} {pair['x']:g}"


# ---- on a terminal and in Markdown ---------------------------------------------------------------


def print_paper(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Print the table, the tests and the notes."""
    head, sections = layout(comparison)
    print_text(titled(comparison), file)
    print_text(comparison["about"], file)
    for title, lines in sections:
        print(file=file)
        print_text(title, file)
        # The columns stand in the order in which the paper has them: the first say most.
        print_table([*name_columns(head[0]), *number_columns(*head[1:])], lines, file, "table.md")
    print_text(SPREAD + marks(comparison), file)
    if comparison["paired"]:
        print(file=file)
        print_text(
            "paired by seed, difference of accuracy in points, two-sided p, "
            "not corrected for several pairs:",
            file,
        )
        head, lines = paired_tests(comparison)
        first_figure = head.index("seeds")
        lengths = number_columns(*head[first_figure + 1 :])
        columns = [*name_columns(*head[:first_figure]), Column("seeds", 1 + len(lengths)), *lengths]
        print_table(columns, lines, file, "table.md")
    for note in comparison["notes"]:
        print_text(note, file)


def markdown(comparison: Comparison) -> str:
    """The table and the tests as they go into a page of docs."""
    head, sections = layout(comparison)
    blocks = [f"**{titled(comparison)}.** {comparison['about']}"]
    for title, lines in sections:
        blocks += [title, _pipes(head, lines)]
    blocks.append(SPREAD + marks(comparison))
    if comparison["paired"]:
        head, lines = paired_tests(comparison)
        blocks += ["Paired by seed: points of accuracy and two-sided p.", _pipes(head, lines)]
    for note in comparison["notes"]:
        blocks.append(f"- {note}")
    return "\n\n".join(blocks) + "\n"


def _pipes(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = []
    for cells in (head, ["---"] * len(head), *lines):
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
