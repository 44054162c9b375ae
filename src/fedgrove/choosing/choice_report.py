"""Report a choice between methods: the table, the reasons, the command, the HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import methods
from ..config.grid import plain
from ..options import RunOptions
from ..options.definition import options_of
from ..report.comparison_report import ComparedRun, make_comparison_report
from ..report.page import Page, render, write_if_possible
from ..report.seed_averages import strip_seed
from ..report.tables import (
    AFTER,
    Scores,
    format_duration,
    format_kilobytes,
    name_by_length,
    or_dash,
)
from ..report.terminal import Column, print_rows, print_text
from ..runs.report_html import REPORT_FILE as PAGE
from ..runs.result import Failure, Result
from ..runs.scoring import spread
from .candidates import RESERVE, count, size
from .decision import Trial, average_validation, measure_margin, predict_full_score

if TYPE_CHECKING:
    from .choose import ChoicePlan


# ---- what was found ------------------------------------------------------------------------------


def describe_choice(
    planned: ChoicePlan,
    trials: Sequence[Trial],
    judged: int,
    left_out: Mapping[str, str],
    cost: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of choice.json; the first ``judged`` trials are of all seeds."""
    pick = trials[0]
    scores = _metric(planned)
    final = trials[:judged]
    return {
        "pick": pick.method,
        "label": methods.label_of(pick.method),
        "epochs": pick.epochs,
        "metric": scores.metric,
        "share": scores.share,
        "budget": planned.budget,
        "full_rounds": planned.rounds,
        "trial_rounds": planned.trial,
        "sentence": sentence(planned, final, scores),
        "command": command(planned, pick),
        "rows": [_row(trial, i < judged, planned) for i, trial in enumerate(trials)],
        "left_out": dict(left_out),
        "cost": dict(cost),
    }


def _scores(found: Mapping[str, Any]) -> Scores:
    """Return the metric of a choice, which formats its scores."""
    return Scores(found["metric"], share=found["share"])


def _format_gap(scores: Scores, gap: float, error: float | None, digits: str) -> str:
    """Format the difference of two scores; of percents it is in points, not in percent."""
    text = f"{scores.factor * gap:{digits}}"
    if error is not None:
        text += f" ± {scores.factor * error:{digits}}"
    return f"{text} points" if scores.share else text


def describe_plan(planned: ChoicePlan) -> dict[str, Any]:
    """Return the methods that a choice would try."""
    return {
        "would_try": [fit.method for fit in planned.chosen],
        "trial_rounds": planned.trial,
        "seeds": list(planned.seeds),
        "full_rounds": planned.rounds,
        "left_out": dict(planned.left_out),
    }


def _metric(planned: ChoicePlan) -> Scores:
    """Return the metric by which methods are chosen."""
    problem: Any = planned.federations.of(planned.base).problem
    tasks = getattr(problem, "tasks", None)
    # All tasks have the same metric: other mixtures were refused before the trials.
    metric = problem.metric if tasks is None else tasks[0].problem.metric
    return Scores(**metric.describe())


def _row(trial: Trial, is_judged: bool, planned: ChoicePlan) -> dict[str, Any]:
    """Return what choice.json keeps of a method that was tried."""
    model_bytes = trial.model_bytes
    return {
        "method": trial.method,
        "went_on": is_judged,
        "seeds": trial.seeds,
        "epochs": trial.epochs,
        "score": round(trial.score, 6),
        "worst_tenth": round(trial.worst_tenth, 6),
        "heading": round(predict_full_score(trial, planned.rounds), 6),
        "bytes_each": round(trial.bytes_each),
        "model_bytes": None if model_bytes is None else round(model_bytes),
        "seconds": round(trial.seconds, 1),
    }


def sentence(planned: ChoicePlan, final: Sequence[Trial], scores: Scores) -> str:
    """Explain the choice: which method, why, by how much it is ahead, and how certain that is."""
    lead = None
    gap = ""
    if len(final) > 1:
        lead = measure_margin(final[0], final[1])
        gap = _format_gap(scores, lead.lead, lead.error, ".1f" if scores.share else ".3g")
    return _fill_in(
        "sentence.txt",
        final=final,
        score=f"{scores.format(final[0].score, 1)}{scores.percent}",
        rounds=planned.rounds,
        budget=planned.budget,
        file_size=None if planned.file is None else planned.file.size,
        lead=lead,
        gap=gap,
        cheaper=_find_cheaper(final),
        rising=_find_rising(final, planned.rounds),
    )


def _fill_in(template: str, **values: Any) -> str:
    """Return the text of a template as one line."""
    text = render(template, {"count": count, "size": size, **values}, near=__file__)
    return " ".join(text.split())


def _find_cheaper(final: Sequence[Trial]) -> Trial | None:
    """The method that sends least, under half of the pick, among those within its noise."""
    pick = final[0]
    found = None
    # A saving of less than half would not pay for a method that may be a little worse.
    bytes_to_beat = pick.bytes_each / 2
    for other in final[1:]:
        is_as_good = measure_margin(pick, other).is_noise
        if is_as_good and other.bytes_each < bytes_to_beat:
            found = other
            bytes_to_beat = other.bytes_each
    return found


def _find_rising(final: Sequence[Trial], full_rounds: int) -> Trial | None:
    """The method with a higher predicted score than the pick; None if there is none."""
    # Of equal ones the pick, which is first: then there is nothing to report.
    furthest = max(final, key=lambda trial: trial.sign * predict_full_score(trial, full_rounds))
    return None if furthest is final[0] else furthest


def command(planned: ChoicePlan, pick: Trial) -> str:
    """Return the command that runs the chosen method in full."""
    fit = next(fit for fit in planned.chosen if fit.method == pick.method)
    settings = list(fit.settings)
    if fit.spends_budget:
        assert planned.budget is not None
        settings.append(f"budget={RESERVE * planned.budget:.0f}B")
    # Later entries win: the number of epochs that was best replaces the list that was tried.
    given = {**planned.run_options, "rounds": planned.rounds, "finetune": (pick.epochs,)}
    if not pick.epochs:
        given.pop("finetune")
    # Only trials hold data out: the full run trains on everything that is not test data.
    given.pop("validation", None)
    given |= planned.running
    # Data, a net or an engine that were made in Python cannot be typed.
    if any(map(_is_object, given.values())):
        return _write_python_call(pick.method, given, settings)
    words = ["fedgrove", "run", pick.method]
    known = options_of(RunOptions)
    for name, value in given.items():
        if not isinstance(value, bool):
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += [known[name].flag, text]
        elif value != known[name].default:
            # A switch is typed only to change its default.
            words.append(known[name].flag)
    # Settings after options, and every word quoted: a path or a setting may have spaces.
    for setting in settings:
        words += ["--set", setting]
    return " ".join(shlex.quote(word) for word in words)


def _is_object(value: Any) -> bool:
    """Whether an option of a choice was made in Python, so that no command can contain it."""
    return not isinstance(value, str | int | float | bool | list | tuple | Path)


def _write_python_call(method: str, given: Mapping[str, Any], settings: Sequence[str]) -> str:
    """The call in Python, where a value was made in Python; ``...`` stands for that value."""
    words = [repr(method)]
    for word, value in given.items():
        text = "..." if _is_object(value) else repr(plain(value))
        words.append(f"{word}={text}")
    if settings:
        words.append(f"set={list(settings)!r}")
    return f"fedgrove.run({', '.join(words)})"


# ---- for a terminal ------------------------------------------------------------------------------


def print_choice(found: Mapping[str, Any], path: Path | None) -> None:
    """Print a choice; of a plan, the methods that would be tried."""
    if "would_try" in found:
        seeds = len(found["seeds"])
        then = f"; then the promising ones, on {seeds} seeds" if seeds > 1 else ""
        print_text(
            f"would try {', '.join(found['would_try'])}: {count(found['trial_rounds'], 'round')} "
            f"each, of {found['full_rounds']} in full, on one seed{then}"
        )
        _print_left_out(found["left_out"])
        return
    print_rows([_cells(row, found) for row in found["rows"]])
    print_text(
        f"scores: {found['metric']} on validation data after "
        f"{count(found['trial_rounds'], 'round')}, with the model that a client would use; bytes: "
        f"of one client in all {count(found['full_rounds'], 'round')}, both ways, by what the "
        "trial took; seconds: all seeds"
    )
    _print_left_out(found["left_out"])
    print()
    print_text(found["sentence"])
    cost = found["cost"]
    share = cost["rounds"] / cost["rounds_in_full"]
    print_text(
        f"The trials took {format_duration(cost['seconds'])}: {count(cost['rounds'], 'round')}, "
        f"{100 * share:.0f} % of the {cost['rounds_in_full']:,} of running all of them in full."
    )
    if "hindsight" in found:
        print()
        _print_hindsight(found)
    print()
    if "=..." in found["command"]:
        how = "In Python, with what was given in place of each ..."
        if "data=..." in found["command"]:
            how += " (a federation loaded again, without validation)"
        print_text(f"{how}:")
    # Whole, so that it can be pasted.
    print(found["command"])
    if path is not None:
        print(path)
    if found.get("page"):
        print(f"Page: {found['page']}")


def _print_left_out(left_out: Mapping[str, str]) -> None:
    if not left_out:
        return
    # Many may be left out for one reason.
    names_of: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names_of.setdefault(why, []).append(name)
    print_text("left out:")
    for why, names in names_of.items():
        print_text(f"- {', '.join(names)}: {why}")


def _cells(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[Column, str]:
    """Return the cells of a method in the table of a choice."""
    scores = _scores(found)
    # The unit on a line of its own keeps the column narrow.
    percent = scores.percent.replace(" ", "\n")
    star = " *" if row["method"] == found["pick"] else ""
    cells = {
        Column("method", is_name=True): f"{row['method']}{star}",
        Column("seeds", 1): str(len(row["seeds"])),
        Column("tuned\nepochs", 2): str(row["epochs"]),
        Column(f"{scores.metric}{percent}"): scores.format(row["score"], 1),
        Column("worst\ntenth"): scores.format(row["worst_tenth"], 1),
        Column("bytes of\na client"): size(row["bytes_each"]),
    }
    if found["budget"] is not None:
        share = 100 * row["bytes_each"] / found["budget"]
        cells[Column("of the\nbudget", 1)] = f"{share:.3g} %"
    # Models that cannot be exported have no size.
    cells[Column("model\nkB", 3)] = or_dash(row["model_bytes"], format_kilobytes)
    cells[Column("seconds", 4)] = f"{row['seconds']:.1f}"
    return cells


def _print_hindsight(found: Mapping[str, Any]) -> None:
    back = found["hindsight"]
    scores = _scores(found)
    rows = []
    for row in back["rows"]:
        cells = {
            Column("in full, on test data", is_name=True): row["method"],
            Column("tuned\nepochs"): str(row["epochs"]),
            Column(scores.name): scores.format(row["test"], 1),
            Column("bytes of\na client"): size(row["bytes_each"]),
        }
        if found["budget"] is not None:
            cells[Column("within\nbudget", 1)] = "yes" if row["within_budget"] else "no"
        rows.append(cells)
    print_rows(rows)
    for name, why in back.get("failed", {}).items():
        print_text(f"{name} failed in full: {why}")
    print_text(explain_hindsight(found))


def explain_hindsight(found: Mapping[str, Any]) -> str:
    """Explain in a sentence how good the choice was on test data."""
    back = found["hindsight"]
    scores = _scores(found)
    values = {"back": back, "seconds": found["cost"]["seconds"]}
    if "best" in back:
        values["best"] = f"{scores.format(back['best_test'], 1)}{scores.percent}"
    if "behind" in back:
        values["pick"] = f"{scores.format(back['pick_test'], 1)}{scores.percent}"
        values["gap"] = _format_gap(scores, abs(back["behind"]), back["behind_error"], ".2g")
    return _fill_in("hindsight.txt", **values)


# ---- the page ------------------------------------------------------------------------------------


def write_page(
    ends: Mapping[str, Result | Failure],
    trials: Sequence[Trial],
    found: Mapping[str, Any],
    folder: Path,
) -> str:
    """Write the page of a choice, with the methods tried on all seeds; return its path or ""."""
    lengths = {methods.label_of(trial.method): trial.epochs for trial in trials}
    runs = []
    for name, end in ends.items():
        label = strip_seed(name)
        if isinstance(end, Failure) or label not in lengths:
            continue
        summary = use_validation_scores(end.summary, lengths[label])
        lines = list(map(_line_on_validation, end.folder.metrics_to_show()))
        config = end.folder.config
        runs.append(ComparedRun(str(folder / name), summary, lines, config=config))
    title = f"Which method? {found['pick']}"

    def make_page() -> Page:
        return make_comparison_report(runs, title, found["sentence"], list_notes(found))

    return str(write_if_possible(make_page, folder / PAGE) or "")


def list_notes(found: Mapping[str, Any]) -> list[str]:
    """Return notes below the scores of a choice, with the methods that are not shown."""
    notes = [
        "All scores on this page are on validation data; no test example was used.",
        f"To run the choice in full: {found['command']}",
    ]
    scores = _scores(found)
    dropped = []
    for row in found["rows"]:
        if not row["went_on"]:
            dropped.append(f"{row['method']} ({scores.format(row['score'], 1)}{scores.percent})")
    if dropped:
        notes.append(f"Tried on one seed, and not on this page: {', '.join(dropped)}.")
    return notes + [f"{name} was left out: {why}" for name, why in found["left_out"].items()]


def use_validation_scores(summary: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    """Return a candidate's summary with its validation scores before and after fine-tuning."""
    metric = summary.get("metric") or "accuracy"
    more_is_better = bool(summary.get("more_is_better", True))
    kept = {}
    for key, value in summary.items():
        # Scores on test data, which the page must not show, and those of other lengths.
        name = AFTER.sub("", key)
        if name != "tasks" and not name.startswith(f"{metric}_"):
            kept[key] = value
    finetune = {}
    for length, scores in summary["validation_clients"].items():
        if int(length) in (0, epochs):
            finetune[length] = {
                **spread(list(scores.values()), metric, more_is_better),
                f"{metric}_clients": scores,
            }
    return {**kept, "metric": metric, **name_by_length(finetune), "finetune": finetune}


def _line_on_validation(line: Mapping[str, Any]) -> dict[str, Any]:
    metric = line.get("metric", "accuracy")
    mean = average_validation(line)
    # Without a score the round stays out of the chart; a test score must not stand in for it.
    return {**line, f"{metric}_mean": mean, f"{metric}_pooled": None}
