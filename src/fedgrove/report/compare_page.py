"""The page of several runs: who serves clients best and at what cost, over seeds, and for a paper.

Runs whose names differ in the ending ``-sSEED`` only are one entry, its seeds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .figures import COLOURS, Drawing, Marks, Series, rows_of, xy
from .fit import in_one_folder
from .over_seeds import label_of, over_seeds
from .page import Page
from .paper_table import COLUMNS, csv_of, latex_of, markdown_of, rows_for_paper
from .tables import Scores, Summary, duration, mib, percent

Group = Mapping[str, Any]
FAR_APART = 10
"""Entries of which one sends so many times as much as another are drawn over a log scale."""
UNSURE = 0.05
"""A p above this is told beside the best entry."""
MOST_CURVES = 12
"""Of more entries than this, the curves are left out: nobody could tell them apart."""


@dataclass(frozen=True)
class Compared:
    """One run: its name, its figures or None, its lines of metrics.jsonl, and why it failed."""

    run: str
    summary: Summary | None
    lines: Sequence[Mapping[str, Any]] = ()
    failure: str = ""


def compare_page(
    runs: Sequence[Compared], title: str = "", lead: str = "", notes: Sequence[str] = ()
) -> Page:
    """The whole page; ``lead`` takes the place of the first sentence."""
    folder, names = in_one_folder([each.run for each in runs])
    runs = [
        Compared(name, each.summary, each.lines, each.failure)
        for each, name in zip(runs, names, strict=True)
    ]
    finished = [each for each in runs if each.summary is not None]
    unfinished = len(runs) - len(finished)
    warning = f"{unfinished} of {len(runs)} runs are not finished" if unfinished else ""
    groups = over_seeds({each.run: each.summary for each in runs})
    page = Page(title or _title(finished), warning)
    parts = _by_data(groups, finished)
    if lead:
        page.lead(lead)
    elif len(parts) == 1 and headline(groups):
        page.lead(headline(groups))
    if not finished:
        page.lead("No run is finished, so there is nothing to compare yet.")
    for name, own in parts.items():
        page.heading(name if len(parts) > 1 else "What clients get, and what it costs")
        _section(page, own, runs)
    _tests(page, groups)
    _all_runs(page, runs)
    if groups:
        _for_a_paper(page, groups)
    told = list(notes) or _notes(finished)
    if told:
        page.heading("Notes")
        page.notes(told)
    if folder:
        page.paragraph(small=f"Runs in {folder}")
    return page


def _title(finished: Sequence[Compared]) -> str:
    methods = dict.fromkeys(str((each.summary or {}).get("method")) for each in finished)
    data = dict.fromkeys(str((each.summary or {}).get("data")) for each in finished)
    if not methods:
        return "Runs side by side"
    listed = list(methods)
    names = ", ".join(listed[:5])
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return f"{names}{more} on {', '.join(data)}"


def _notes(finished: Sequence[Compared]) -> list[str]:
    told: dict[str, None] = {}
    for each in finished:
        summary = each.summary or {}
        for note in summary["notes"]:
            told[f"{summary.get('data')}: {note}"] = None
    return list(told)


def headline(groups: Sequence[Group]) -> str:
    """Who serves clients best, beside the next, fedavg and training alone where they are there.

    >>> one = {"group": "local", "method": "local", "accuracy_mean": 0.5, "seeds": [0]}
    >>> two = {"group": "ditto", "method": "ditto", "accuracy_mean": 0.75, "seeds": [0]}
    >>> costs = {"bytes_up": 1, "bytes_down": 1}
    >>> print(headline([{**one, **costs}, {**two, **costs}]).partition(". One seed")[0])
    ditto serves clients best: 75.0 % accuracy on average; local gives 50.0 %
    """
    ranked = [group for group in groups if "task" not in group]
    if len(ranked) < 2 or len({_metric(group) for group in ranked}) > 1:
        return ""
    more = bool(ranked[0].get("more_is_better", True))
    ranked = sorted(ranked, key=_score, reverse=more)
    best = ranked[0]
    known = [group for group in ranked[1:] if group["method"] in ("fedavg", "local")]
    # The next best too: where it is close, it may be the better choice.
    told = known if ranked[1] in known else [ranked[1], *known]
    others = [f"{group['group']} gives {_shown(group)}" for group in told]
    metric = f" {_metric(best)}" if best.get("share", True) else ""
    listed = " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
    text = f"{best['group']} serves clients best: {_shown(best)}{metric} on average; {listed}."
    for group in known:
        if group["method"] == "fedavg" and _sent(group):
            share = percent(_sent(best) / _sent(group))
            text += f" {best['group']} sends {share} of {group['group']}'s bytes."
    if all(len(group["seeds"]) < 2 for group in ranked):
        text += " One seed each: small differences may be chance."
    chance = _chance(best, ranked[1])
    if chance is not None and chance > UNSURE:
        behind = ranked[1]["group"]
        text += f" Its lead over {behind} may be chance (paired by seed, p {chance:.2g})."
    return text


def _chance(one: Group, other: Group) -> float | None:
    """The p of the paired test between two entries, where there is one."""
    for group, against in ((one, other), (other, one)):
        for pair in group.get("paired", ()):
            if pair["against"] == against["group"]:
                p = pair["p"]
                return None if p is None else float(p)
    return None


def _metric(group: Group) -> str:
    return str(group.get("metric") or "accuracy")


def _score(group: Group) -> float:
    return float(group[f"{_metric(group)}_mean"])


def _shown(group: Group) -> str:
    score = _score(group)
    return f"{100 * score:.1f} %" if group.get("share", True) else f"{_metric(group)} {score:.4g}"


def _sent(group: Group) -> float:
    return float(group["bytes_up"] + group["bytes_down"])


# ---- figures -------------------------------------------------------------------------------------


def _by_data(groups: Sequence[Group], finished: Sequence[Compared]) -> dict[str, list[Group]]:
    """Entries that can be drawn in one figure: of one data set, one task and one metric."""
    data_of: dict[str, str] = {}
    for each in finished:
        data_of.setdefault(label_of(each.run), str((each.summary or {}).get("data")))
    parts: dict[str, list[Group]] = {}
    for group in groups:
        words = [data_of[group["group"]]]
        if "task" in group:
            words.append(str(group["task"]))
        words.append(_metric(group))
        parts.setdefault(", ".join(words), []).append(group)
    return parts


def _section(page: Page, groups: Sequence[Group], runs: Sequence[Compared]) -> None:
    first = groups[0]
    colour_of = {group["group"]: i % COLOURS for i, group in enumerate(groups)}
    members: dict[str, list[Compared]] = {group["group"]: [] for group in groups}
    for each in runs:
        label = label_of(each.run)
        if label in members and each.summary is not None:
            members[label].append(each)
    drawings = [_bars(groups, members)]
    if len(groups) > 1:
        drawings.append(
            _pareto(groups, colour_of, "bytes", "MiB sent in all, both ways", _mebibytes, log=True)
        )
    if "task" not in first:
        for drawing in _other_costs(groups, colour_of, members):
            drawings.append(drawing)
        if len(groups) <= MOST_CURVES:
            drawings += _curves(groups, colour_of, members)
    words = []
    if any(len(group["seeds"]) > 1 for group in groups):
        words.append("Means over seeds; whiskers: one standard deviation.")
    if len(groups) > 1:
        words.append(
            "The dashed line joins entries that no other beats in both: the choices worth making."
        )
    longest = _last_length(members)
    if longest != "0":
        epochs = "epoch" if longest == "1" else "epochs"
        words.append(
            f"Where nothing else is said, scores are those after {longest} {epochs} of fine-tuning."
        )
    if words:
        page.paragraph(small=" ".join(words))
    page.figures(*drawings)


def _last_length(members: Mapping[str, Sequence[Compared]]) -> str:
    """The epochs of fine-tuning that scores are given after; 0 where there was none."""
    for runs in members.values():
        for each in runs:
            return str(next(reversed((each.summary or {}).get("finetune") or {"0": {}})))
    return "0"


def _factor(group: Group) -> float:
    return 100.0 if group.get("share", True) else 1.0


def _unit(group: Group) -> str:
    return f"{_metric(group)} %" if group.get("share", True) else _metric(group)


def _bars(groups: Sequence[Group], members: Mapping[str, Sequence[Compared]]) -> Drawing:
    """The score of every entry; a lane for each length of fine-tuning."""
    first = groups[0]
    metric = _metric(first)
    factor = _factor(first)
    summaries = [each.summary or {} for each in members[first["group"]]]
    lengths = list((summaries[0].get("finetune") or {}) if summaries else {})
    # Of a task, only the last length is told apart by over_seeds.
    if "task" in first or len(lengths) < 2:
        lengths = [""]
    marks = []
    for i, length in enumerate(lengths):
        means: list[float | None] = []
        low: list[float | None] = []
        high: list[float | None] = []
        texts = []
        for group in groups:
            mean: float | None = factor * _score(group)
            std = factor * (group[f"{metric}_mean_std"] or 0.0)
            if length:
                values = []
                for each in members[group["group"]]:
                    figures = ((each.summary or {}).get("finetune") or {}).get(length) or {}
                    if figures.get(f"{metric}_mean") is not None:
                        values.append(factor * figures[f"{metric}_mean"])
                mean, std = _mean_and_std(values)
            means.append(mean)
            low.append(None if mean is None else mean - std)
            high.append(None if mean is None else mean + std)
            texts.append("" if mean is None else f"{mean:.1f}" if factor == 100 else f"{mean:.4g}")
        name = metric
        if length:
            epochs = "epoch" if length == "1" else "epochs"
            name = f"after {length} {epochs} of fine-tuning" if length != "0" else "as delivered"
        # As delivered is grey; what fine-tuning adds has colours.
        colour = 8 if length == "0" else i - ("0" in lengths)
        marks.append(Marks(name, means, colour, low=low, high=high, texts=texts))
    labels = [group["group"] for group in groups]
    title = f"{metric[:1].upper()}{metric[1:]}, mean over clients"
    return rows_of(title, labels, marks, _unit(first))


def _mean_and_std(values: Sequence[float]) -> tuple[float | None, float]:
    if not values:
        return None, 0.0
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _mebibytes(group: Group) -> float:
    return _sent(group) / 2**20


def _pareto(
    groups: Sequence[Group],
    colour_of: Mapping[str, int],
    what: str,
    x_title: str,
    cost: Callable[[Group], float],
    log: bool = False,
) -> Drawing:
    """Score against a cost, and the line through the entries that none beats in both."""
    first = groups[0]
    factor = _factor(first)
    metric = _metric(first)
    more = bool(first.get("more_is_better", True))
    points = [(cost(group), factor * _score(group)) for group in groups]
    best = undominated(points, more)
    series = [
        Series(
            "",
            [points[i][0] for i in best],
            [points[i][1] for i in best],
            8,
            dashed=True,
            marker="",
            in_legend=False,
            tips=["" for _ in best],
            size=0,
        )
    ]
    for group, (x, y) in zip(groups, points, strict=True):
        std = group[f"{metric}_mean_std"]
        series.append(
            Series(
                str(group["group"]),
                [x],
                [y],
                colour_of[group["group"]],
                line=False,
                spread=[None if std is None else factor * std],
                tips=[f"{group['group']}: {y:.4g} {_unit(first)} at {x:.4g} {x_title}"],
                size=6,
            )
        )
    title = f"{metric[:1].upper()}{metric[1:]} against {what}"
    return xy(title, series, x_title, _unit(first), log_x=log, x_from_zero=not log)


def undominated(points: Sequence[tuple[float, float]], more_is_better: bool = True) -> list[int]:
    """Which points no other one beats: those with a better score than all that cost as little.

    Points are (cost, score); the answer goes from the cheapest to the best.

    >>> undominated([(1, 50), (2, 40), (3, 80), (3, 70)])
    [0, 2]
    """
    sign = 1 if more_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1]))
    found: list[int] = []
    for i in order:
        if not found or sign * points[i][1] > sign * points[found[-1]][1]:
            found.append(i)
    return found


def _other_costs(
    groups: Sequence[Group],
    colour_of: Mapping[str, int],
    members: Mapping[str, Sequence[Compared]],
) -> list[Drawing]:
    """Against the weights kept and against virtual time, where entries differ in these."""
    wanted = {
        "density": ("the weights kept", "share of weights kept"),
        "virtual_seconds": ("time on the devices", "virtual seconds"),
    }
    drawings = []
    for key, (what, x_title) in wanted.items():
        costs: dict[str, float] = {}
        for label, own in members.items():
            values = [(each.summary or {}).get(key) for each in own]
            known = [float(value) for value in values if value is not None]
            if known:
                costs[label] = math.fsum(known) / len(known)
        differ = len(costs) == len(groups) and max(costs.values()) - min(costs.values()) > 1e-3
        if differ and len(groups) > 1:

            def cost(group: Group, costs: Mapping[str, float] = costs) -> float:
                return costs[group["group"]]

            drawings.append(_pareto(groups, colour_of, what, x_title, cost))
    return drawings


def _curves(
    groups: Sequence[Group],
    colour_of: Mapping[str, int],
    members: Mapping[str, Sequence[Compared]],
) -> list[Drawing]:
    """The score by round and against bytes, mean over the seeds that were scored on the way."""
    first = groups[0]
    by_round = []
    by_bytes = []
    for group in groups:
        metric = _metric(group)
        points: dict[int, list[tuple[float, float]]] = {}
        for each in members[group["group"]]:
            sent = 0.0
            for line in each.lines:
                sent += (line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 2**20
                score = line.get(f"{metric}_mean")
                if score is not None:
                    points.setdefault(line["round"], []).append((sent, _factor(group) * score))
        # At the end of a run that other seeds have not reached there is no mean over all.
        seeds = max((len(own) for own in points.values()), default=0)
        rounds = [at for at in sorted(points) if len(points[at]) == seeds]
        every = max(1, math.ceil(len(rounds) / 200))
        rounds = rounds[::-1][::every][::-1]
        if len(rounds) < 2:
            continue
        x = [math.fsum(s for s, _ in points[at]) / seeds for at in rounds]
        y: list[float | None] = [math.fsum(v for _, v in points[at]) / seeds for at in rounds]
        name = str(group["group"])
        colour = colour_of[name]
        size = 2.5 if len(rounds) <= 40 else 1.5
        by_round.append(Series(name, [float(at) for at in rounds], y, colour, size=size))
        by_bytes.append(Series(name, x, y, colour, size=size))
    if not by_round:
        return []
    metric = _metric(first)
    name = f"{metric[:1].upper()}{metric[1:]}"
    unit = _unit(first)
    ends = [series.x[-1] for series in by_bytes]
    # A method that sends a hundredth of another would be a stroke at the left edge.
    log = max(ends) >= FAR_APART * min(ends)
    return [
        xy(f"{name} by round, as delivered", by_round, "round", unit, whole_x=True),
        xy(
            f"{name} against bytes so far, as delivered",
            by_bytes,
            "MiB sent, both ways",
            unit,
            x_from_zero=not log,
            log_x=log,
        ),
    ]


# ---- tables --------------------------------------------------------------------------------------


def _tests(page: Page, groups: Sequence[Group]) -> None:
    rows = []
    for group in groups:
        share = group.get("share", True)
        for pair in group["paired"]:
            factor = 100 if share else 1
            digits = ".2f" if share else ".4g"
            task = f" on {group['task']}" if "task" in group else ""
            rows.append(
                [
                    str(group["group"]),
                    f"{pair['against']}{task}",
                    str(pair["seeds"]),
                    f"{factor * pair['difference']:+{digits}}",
                    f"{factor * pair['standard_error']:{digits}}",
                    "-" if pair["p"] is None else f"{pair['p']:.2g}",
                ]
            )
    if not rows:
        return
    page.heading("Paired by seed")
    page.paragraph(
        small="The difference between two entries on the same seeds (points, where scores are in "
        "percent), its standard error, and the two-sided p of a paired t-test, not corrected for "
        "several pairs."
    )
    head = ["entry", "minus", "seeds", "difference", "standard error", "p"]
    page.table(head, rows, sortable=True)


def _all_runs(page: Page, runs: Sequence[Compared]) -> None:
    page.heading("All runs")
    rows = []
    for each in runs:
        summary = each.summary
        if summary is None:
            rows.append([each.run, each.failure or "not finished", *["-"] * 7])
            continue
        scores = Scores.of(summary, summary)
        worst = "-"
        mean = "by task" if "tasks" in summary else "not scored"
        if scores.mean is not None:
            mean = scores.shown(scores.mean)
            worst = scores.shown(scores.worst10)
        density = summary.get("density")
        rows.append(
            [
                each.run,
                str(summary["method"]),
                str(summary["seed"]),
                mean,
                worst,
                "-" if density is None else f"{density:.3f}",
                mib(summary["bytes_up"] + summary["bytes_down"]),
                duration(summary.get("virtual_seconds") or 0.0),
                duration(summary.get("seconds") or 0.0),
            ]
        )
    units = {_unit(each.summary) for each in runs if each.summary and "tasks" not in each.summary}
    score = units.pop() if len(units) == 1 else "score"
    head = ["run", "method", "seed", score, "worst tenth", "density", "sent", "virtual time"]
    page.table([*head, "computed in"], rows, sortable=True)


def _for_a_paper(page: Page, groups: Sequence[Group]) -> None:
    page.heading("For a paper")
    rows = rows_for_paper(groups)
    page.table(COLUMNS, rows)
    page.folded("Markdown", markdown_of(rows))
    page.folded("LaTeX (booktabs)", latex_of(rows))
    page.folded("CSV", csv_of(groups))
