"""What was measured beside what a paper reports: as one object, for a terminal, and as rows of a page of docs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from rich.table import Table

from ..papers import Row, Study
from .over_seeds import paired
from .tables import Summary, console

Found = Mapping[str, Any]
Measured = Sequence[tuple[Study, Mapping[str, Summary | None]]]
"""Studies, each with the summaries of its runs by name; None stands for a run without one."""

TITLES = {
    "accuracy_mean": "accuracy %",
    "accuracy_std": "std over clients",
    "accuracy_worst": "worst %",
    "score": "score",
    "mib_paper": "MiB counted",
    "mib": "MiB sent",
}
COUNTED = ("mib_paper", "mib")
SPREAD = "± over seeds. counted: the paper's own formula; sent: real messages, both ways."


# ---- one object ----------------------------------------------------------------------------------------------------


def table(paper: str, part: str, measured: Measured, quick: bool = False) -> dict[str, Any]:
    """A part of a paper: ours, the paper's and the difference by row; and the paper's own method tested against all.

    Values are means over seeds with their sample deviation, None with one seed. A key that depends on fine-tuning has
    its epochs after a colon, as ``accuracy_mean:3``.
    """
    first = measured[0][0]
    rows = [_marked(study, _rows(study, done)) for study, done in measured]
    summaries = [s for _, done in measured for s in done.values() if s is not None]
    told = [note for study, _ in measured for note in study.notes]
    told += [f"{s['data']}: {note}" for s in summaries for note in s.get("notes", ())]
    return {
        "paper": paper,
        "part": part,
        "title": first.title,
        "about": first.about,
        "quick": quick,
        "measures": list(first.measures),
        "drawn": list(first.drawn),
        "lines": first.lines,
        "only_best": first.only_best,
        "engines": sorted({s["engine"] for s in summaries}),
        "seconds": round(math.fsum(s["seconds"] for s in summaries), 1),
        "rows": [row for some in rows for row in some],
        "paired": [pair for study, done in measured for pair in _pairs(study, done)],
        "notes": list(dict.fromkeys(told)),
    }


def figure(summary: Summary, key: str) -> float | None:
    """One figure of a run.

    >>> figure({"finetune": {"3": {"accuracy_mean": 0.75, "accuracy_std": 0.25}}}, "score:3")
    3.0
    """
    measure, _, length = key.partition(":")
    if measure == "mib":
        return float((summary["bytes_up"] + summary["bytes_down"]) / 2**20)
    if measure == "mib_paper":
        return float(summary["bytes_paper"] / 2**20)
    scores = summary["finetune"][length]
    if measure == "score":
        return (
            float(scores["accuracy_mean"] / scores["accuracy_std"])
            if scores["accuracy_std"]
            else None
        )
    return float(scores[measure])


def _rows(study: Study, done: Mapping[str, Summary | None]) -> Iterator[dict[str, Any]]:
    for row in study.rows:
        runs = _runs(row, done)
        keys = [*(f"{m}:{n}" for n in row.experiment.finetune for m in study.measures), *COUNTED]
        ours = {key: _over_seeds([figure(run, key) for run in runs.values()]) for key in keys}
        difference = {
            k: _round(ours[k]["mean"] - v) for k, v in row.reported.items() if ours.get(k)
        }
        some = next(iter(runs.values()), {})
        yield {
            "data": some.get("data", row.experiment.data),
            "split": some.get("split", row.experiment.split),
            "panel": row.panel,
            "name": row.name,
            "label": row.label,
            "series": row.series,
            "x": row.x,
            "lengths": list(row.experiment.finetune),
            "lead": row.lead,
            "picked": row.picked,
            "seeds": sorted(runs),
            "missing": sum(name.rpartition("-s")[0] == row.name for name in done) - len(runs),
            "ours": {k: v for k, v in ours.items() if v},
            "paper": dict(row.reported),
            "difference": difference,
            "group_sizes": [run["group_sizes"] for run in runs.values()],
        }


def _runs(row: Row, done: Mapping[str, Summary | None]) -> dict[int, Summary]:
    """A row's finished runs by seed."""
    return {
        s["seed"]: s
        for name, s in done.items()
        if s is not None and name.rpartition("-s")[0] == row.name
    }


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample deviation; nothing where there is no value."""
    there = [v for v in values if v is not None]
    if not there:
        return {}
    std = _round(statistics.stdev(there)) if len(there) > 1 else None
    return {"mean": _round(math.fsum(there) / len(there)), "std": std}


def _round(value: float) -> float:
    return round(value, 8)


def _marked(study: Study, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """``best``: whether a row is the first of its panel by the measure that the paper chooses by."""
    found = list(rows)
    for row in found:
        rivals = [
            r for r in found if r["panel"] == row["panel"] and _chosen_by(study, r) is not None
        ]
        row["best"] = bool(study.best and rivals) and row is max(
            rivals, key=lambda r: _chosen_by(study, r) or 0.0
        )
    return found


def _chosen_by(study: Study, row: Found) -> float | None:
    mean: float | None = row["ours"].get(f"{study.best}:{row['lengths'][-1]}", {}).get("mean")
    return mean


def _pairs(study: Study, done: Mapping[str, Summary | None]) -> Iterator[dict[str, Any]]:
    """Every lead row against every other of its panel, at every length of fine-tuning."""
    leads = [row for row in study.rows if row.lead]
    for lead in leads:
        for other in study.rows:
            settled = other in leads and leads.index(other) <= leads.index(lead)
            if settled or other.panel != lead.panel or other.x != lead.x:
                continue
            for n in lead.experiment.finetune:
                ours, theirs = (_after(_runs(row, done), n) for row in (lead, other))
                if gap := paired(ours, theirs):
                    at = {
                        "data": next(iter(ours.values()))["data"],
                        "panel": lead.panel,
                        "x": lead.x,
                    }
                    yield {**at, "row": lead.label, "against": other.label, "finetune": n, **gap}


def _after(runs: Mapping[int, Summary], length: int) -> dict[int, Summary]:
    """The runs as they stand after so many epochs of fine-tuning."""
    return {seed: {**run, **run["finetune"][str(length)]} for seed, run in runs.items()}


# ---- for people ----------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """The lines of a table that belong to one data set and panel."""

    title: str
    lines: list[list[str]]


def titled(found: Found) -> str:
    """What the part is called, wherever it shows."""
    return f"{found['title']}{', QUICK: a look, not a measurement' if found['quick'] else ''}"


def layout(found: Found) -> tuple[list[str], list[Section]]:
    """The head of a table and its sections; columns that nothing fills are left out."""
    rows = [r for r in found["rows"] if r["best"] or r["picked"] or not found["only_best"]]
    several = any(len(row["lengths"]) > 1 for row in rows)
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        for n in row["lengths"]:
            sections.setdefault(place(row), []).append(_line(row, n, found["measures"]))
    head = _head(found["measures"])
    every = [line for lines in sections.values() for line in lines]
    kept = [i for i in range(len(head)) if (i != 1 or several) and any(line[i] for line in every)]
    return [head[i] for i in kept], [
        Section(title, [[line[i] for i in kept] for line in lines])
        for title, lines in sections.items()
    ]


def place(row: Found) -> str:
    """The data of a row, and its panel."""
    return f"{row['data']}, {row['split'] or 'own'} split" + (
        f": {row['panel']}" if row["panel"] else ""
    )


def _head(measures: Sequence[str]) -> list[str]:
    beside = [cell for m in measures for cell in (TITLES[m], "paper", "difference")]
    return [
        "row",
        "fine-tuned",
        "seeds",
        *beside,
        "groups",
        TITLES["mib_paper"],
        "paper",
        "difference",
        TITLES["mib"],
    ]


def _line(row: Found, n: int, measures: Sequence[str]) -> list[str]:
    mark = " *" * row["best"] + " +" * row["picked"]
    seeds = f"{len(row['seeds'])}" + (
        f" of {len(row['seeds']) + row['missing']}" if row["missing"] else ""
    )
    beside = [cell for m in measures for cell in _beside(row, f"{m}:{n}")]
    return [
        row["label"] + mark,
        str(n),
        seeds,
        *beside,
        groups(row),
        *_beside(row, "mib_paper"),
        _ours(row, "mib"),
    ]


def _beside(row: Found, key: str) -> tuple[str, str, str]:
    """Ours, the paper's, and the difference."""
    paper, gap = row["paper"].get(key), row["difference"].get(key)
    scale, digits = _scale(key)
    return (
        _ours(row, key),
        "" if paper is None else f"{scale * paper:.{digits}f}",
        "" if gap is None else f"{scale * gap:+.{digits}f}",
    )


def _ours(row: Found, key: str) -> str:
    value, (scale, digits) = row["ours"].get(key), _scale(key)
    if not value:
        return ""
    spread = (
        "" if value["std"] is None or key in COUNTED else f" ± {scale * value['std']:.{digits}f}"
    )
    return f"{scale * value['mean']:.{digits}f}{spread}"


def _scale(key: str) -> tuple[float, int]:
    """What to multiply a figure by, and how many digits to show."""
    return (100.0, 2) if key.startswith("accuracy") else (1.0, 1 if key in COUNTED else 2)


def groups(row: Found) -> str:
    """Sizes of the groups, those of several seeds if they differ.

    >>> groups({"group_sizes": [[28, 1, 1], [28, 1, 1]]}), groups({"group_sizes": [[1] * 30]})
    ('28/1/1', '30 x 1')
    """
    said = dict.fromkeys(_sizes(sizes) for sizes in row["group_sizes"])
    return ", ".join([*said][:3]) + (" ..." if len(said) > 3 else "")


def _sizes(sizes: Sequence[int]) -> str:
    return (
        f"{len(sizes)} x {sizes[0]}"
        if len(sizes) > 5 and len(set(sizes)) == 1
        else "/".join(map(str, sizes))
    )


def print_paper(found: Found, file: IO[str] | None = None) -> None:
    """Print the table, the tests and the notes."""
    out, (head, sections) = console(file), layout(found)
    out.print(titled(found))
    out.print(found["about"])
    for title, lines in sections:
        out.print(f"\n{title}")
        out.print(_rich(head, lines))
    out.print(SPREAD + marks(found))
    if found["paired"]:
        out.print(
            "\npaired by seed, difference of accuracy in points, two-sided p, not corrected for several pairs:"
        )
        out.print(_rich(*tests(found)))
    for note in found["notes"]:
        out.print(note)


def marks(found: Found) -> str:
    """What the marks behind a row's name mean."""
    said = {"best": " * ours, the best.", "picked": " + the paper's choice."}
    return "".join(text for key, text in said.items() if any(row[key] for row in found["rows"]))


def tests(found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the paired tests; a column per length of fine-tuning, and one for panels where there are."""
    lengths = list(dict.fromkeys(pair["finetune"] for pair in found["paired"]))
    panels = any(_where(pair) for pair in found["paired"])
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for pair in found["paired"]:
        p = "" if pair["p"] is None else f" (p {pair['p']:.2g})"
        key = (
            pair["data"],
            *[_where(pair)] * panels,
            pair["row"],
            pair["against"],
            str(pair["seeds"]),
        )
        lines.setdefault(key, {})[pair["finetune"]] = f"{100 * pair['difference']:+.2f}{p}"
    head = [
        "data",
        *["at"] * panels,
        "row",
        "minus",
        "seeds",
        *(f"fine-tuned {n}" for n in lengths),
    ]
    return head, [[*key, *(cells.get(n, "") for n in lengths)] for key, cells in lines.items()]


def _where(pair: Found) -> str:
    """The panel of a pair, and where on its axis."""
    return pair["panel"] if pair["x"] is None else f"{pair['panel']} {pair['x']:g}"


def _rich(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for i, title in enumerate(head):
        grid.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    for line in lines:
        grid.add_row(*line)
    return grid


def markdown(found: Found) -> str:
    """The table and the tests as they go into a page of docs."""
    head, sections = layout(found)
    blocks = [f"**{titled(found)}.** {found['about']}"]
    blocks += [f"{title}\n\n{_pipes(head, lines)}" for title, lines in sections]
    blocks.append(SPREAD + marks(found))
    if found["paired"]:
        blocks.append(
            "Paired by seed: points of accuracy and two-sided p.\n\n" + _pipes(*tests(found))
        )
    return "\n\n".join([*blocks, *(f"- {note}" for note in found["notes"])]) + "\n"


def _pipes(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
