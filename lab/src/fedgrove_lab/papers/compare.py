"""Compares what was measured with what a paper reports, as one object.

``fedgrove paper --json`` prints the object; :mod:`.tables` and :mod:`.page` show it to people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedgrove.data import Federation
from fedgrove.data.devices import read_devices
from fedgrove.report.seed_averages import paired_difference
from fedgrove.report.tables import Summary, finetune_lengths, scores_after
from fedgrove.report.time_to_target import Curve, common_target, read_curve

from .measures import (
    REACHED,
    REDUCTIONS,
    SHARES,
    TO_ALL,
    curve_over_rounds,
    over_seeds,
    run_value,
    tasks_value,
)
from .study import DataTable, Study, StudyRow

Comparison = Mapping[str, Any]
"""What :func:`compare_part` returns and ``fedgrove paper --json`` prints."""
ComparedRow = Mapping[str, Any]
"""One of the ``rows`` of a comparison."""
Summaries = Mapping[str, Summary | None]
"""The summaries of a study's runs, by name; None stands for a run without one.

Measures over rounds need the lines of the run's metrics.jsonl as well, under "lines".
"""
Measured = Sequence[tuple[Study, Summaries]]
FASTEST = 100
"""Mbit/s: where bandwidths of named profiles end."""


def compare_part(paper: str, part: str, measured: Measured, quick: bool = False) -> dict[str, Any]:
    """Compare a part of a paper: our values, the paper's, the differences, and paired tests.

    Values are means over seeds with their sample deviation, None with one seed. A key that depends
    on fine-tuning has its epochs after a colon, as ``accuracy_mean:3``. The paper's own method is
    tested against all others.

    Args:
        paper: The paper's name.
        part: The part's, as ``table2``.
        measured: The part's studies, one for each data set, with the summaries of their runs.
        quick: Whether the runs were quick ones.

    Returns:
        The comparison, which can be written as JSON.
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
        notes += _note_not_reached(study, summaries)
        notes += _note_reached_by_all(study, summaries)
        notes += _note_bands(study, summaries)
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


def compare_data_table(
    paper: str, part: str, table: DataTable, federations: Mapping[str, Federation]
) -> dict[str, Any]:
    """Compare a table about the data with the paper's, as ``fedgrove paper --json`` prints it."""
    rows = []
    for name, federation in federations.items():
        for fact in table.facts(name, federation):
            difference = None if fact.paper is None else round(fact.ours - fact.paper, 8)
            row = {
                "data": federation.name,
                "measure": fact.measure,
                "ours": fact.ours,
                "paper": fact.paper,
                "difference": difference,
                "digits": fact.digits,
            }
            rows.append(row)
    return {
        "paper": paper,
        "part": part,
        "title": table.title,
        "about": table.about,
        "rows": rows,
        "notes": list(table.notes),
    }


# ---- rows ----------------------------------------------------------------------------------------


def _rows(study: Study, summaries: Summaries) -> list[dict[str, Any]]:
    # The best of a panel is known only when all its rows are.
    rows = [_row(study, row, summaries) for row in study.rows]
    _mark_best(rows, study.best)
    if TO_ALL in study.counted:
        for panel, (_, seconds) in _common_targets(study, summaries).items():
            for made in rows:
                if made["panel"] == panel and made["name"] in seconds:
                    made["ours"][TO_ALL] = over_seeds(seconds[made["name"]])
    # Shares are of another row, which is known only now.
    for row in rows:
        if row["name"] == study.base and row["ours"]:
            _add_shares(rows, row["ours"], study.counted)
    for row in rows:
        _add_differences(row)
    return rows


def _row(study: Study, row: StudyRow, summaries: Summaries) -> dict[str, Any]:
    keys = []
    for length in row.experiment.finetune:
        for measure in study.measures:
            keys.append(f"{measure}:{length}")
    for measure in study.counted:
        if measure not in SHARES | REDUCTIONS and measure != TO_ALL:
            keys.append(measure)

    runs = _finished(row, summaries)
    ours = {}
    by_seed = {}
    for key in keys:
        values = []
        for seed, run in runs.items():
            # Runs of older versions have the accuracies of clients at the last length only.
            tuned = scores_after(run, finetune_lengths(run)[-1])
            band = _in_band(row, seed, tuned.get("accuracy_clients", ()))
            values.append(run_value(run, key, row.layer, band))
        by_seed[key] = values
        if key.startswith(REACHED) and None in values:
            # The mean of those that got there would look better than the row is: a note says it.
            continue
        mean = over_seeds(values)
        if mean is not None:
            ours[key] = mean
    curves = {}
    if study.over_rounds:
        for measure in study.drawn:
            curves[measure] = curve_over_rounds(runs.values(), measure)

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
        "values": by_seed,
        "curves": curves,
        "paper": dict(row.reported),
        "difference": {},
        "group_sizes": [run["group_sizes"] for run in runs.values()],
    }


def _finished(row: StudyRow, summaries: Summaries) -> dict[int, Summary]:
    """A row's finished runs by seed."""
    runs = {}
    for name, summary in summaries.items():
        if summary is not None and _row_name(name) == row.name:
            runs[summary["seed"]] = summary
    return dict(sorted(runs.items()))


def _row_name(run: str) -> str:
    """The row of a run ``NAME-sSEED``; a prefix would not do, for ca-afp and ca-afp-phased."""
    return run.rpartition("-s")[0]


def _in_band(row: StudyRow, seed: int, clients: Iterable[str]) -> list[str]:
    """The clients whose bandwidth is in the row's band."""
    if row.band is None:
        return []
    low, high = row.band
    devices = read_devices(row.experiment.profile)
    members = []
    for client in clients:
        uplink = devices.info(1, int(client), seed).up
        # The last group has its upper end too: bandwidths are clipped there.
        if low <= uplink < high or uplink == high == FASTEST:
            members.append(client)
    return members


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


def _matrices(study: Study, summaries: Summaries) -> Iterator[dict[str, Any]]:
    """The matrices of each row, of its first seed that has any."""
    for row in study.rows:
        for run in _finished(row, summaries).values():
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


# ---- paired tests --------------------------------------------------------------------------------


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
    """The runs with their accuracies after ``length`` epochs of fine-tuning."""
    after: dict[int, Summary] = {}
    for seed, run in runs.items():
        # A summary's own accuracies are those of the last length; the test reads them there.
        own = dict(run["finetune"][str(length)])
        if "tasks" in own:
            own["accuracy_mean"] = tasks_value(own["tasks"], "accuracy_tasks")
            # Errors of forecasts alone: nothing to test.
            if own["accuracy_mean"] is None:
                continue
        after[seed] = {**run, **own}
    return after


# ---- notes on what was measured ------------------------------------------------------------------


def _note_not_reached(study: Study, summaries: Summaries) -> Iterator[str]:
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


def _note_reached_by_all(study: Study, summaries: Summaries) -> Iterator[str]:
    """A note of the accuracy that all rows of a panel reach."""
    if TO_ALL in study.counted:
        for panel, (target, _) in _common_targets(study, summaries).items():
            where = f"{panel}: " if panel else ""
            yield f"{where}what all rows reach on every seed is {100 * target:.2f} %."


def _common_targets(
    study: Study, summaries: Summaries
) -> dict[str, tuple[float, dict[str, list[float]]]]:
    """By panel: the best accuracy that all runs reach, and the seconds of each row's runs to it."""
    curves: dict[str, dict[str, list[Curve]]] = {}
    for row in study.rows:
        for run in _finished(row, summaries).values():
            found = read_curve(row.name, row.label, run.get("lines", ()))
            curves.setdefault(row.panel, {}).setdefault(row.name, []).append(found)
    common = {}
    for panel, by_row in curves.items():
        every_curve: list[Curve] = []
        for runs in by_row.values():
            every_curve += runs
        target = common_target(every_curve)
        seconds = {}
        for name, runs in by_row.items():
            points = [each.reaches(target) for each in runs]
            seconds[name] = [point.second for point in points if point is not None]
        common[panel] = (target, seconds)
    return common


def _note_bands(study: Study, summaries: Summaries) -> Iterator[str]:
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
