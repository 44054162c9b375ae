"""``fedgrove paper``: a paper's tables and figures, run again beside what it reports."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .sweep import Seeds, watched

if TYPE_CHECKING:
    from ..core import Engine
    from ..papers import Part, Setting, Study
    from ..report.tables import Summary


def _option(flag: str, help: str, metavar: str, parser: Any = None) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, parser=parser, show_default=False)


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The paper: ca-afp or safl.", show_default=False)
]
Table = Annotated[int | None, _option("--table", "One of its tables.", "N", o.whole)]
Figure = Annotated[int | None, _option("--figure", "One of its figures.", "N", o.whole)]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look: built-in data, few rounds and clients.")
]
Data = Annotated[str | None, _option("--data", "One data set; else all of the paper's.", "NAME")]
Out = Annotated[
    str | None,
    _option("--out", "The folder; what it holds of the same runs is gone on with.", "DIR"),
]


def paper(
    ctx: typer.Context,
    name: Name,
    table: Table = None,
    figure: Figure = None,
    quick: Quick = False,
    seeds: Seeds = None,
    data: Data = None,
    split: o.Split = None,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    data_dir: o.DataDir = None,
    out: Out = None,
    json: o.Json = False,
) -> None:
    """Run a paper's table or figure again and show it beside what the paper reports; the same command goes on."""
    from .. import papers
    from . import arguments

    parts = papers.parts(name, table, figure)
    wanted = {word: _studies(part, ctx.params) for word, part in parts.items()}
    places = _places(name, wanted, out, quick)
    found, failed = list[dict[str, Any]](), False
    with arguments.engine(ctx.params) as chosen:
        for word, studies in wanted.items():
            measured = [
                (study, _run(study, places[word] / at, ctx.params, chosen))
                for at, study in studies.items()
            ]
            failed |= any(end is None for _, done in measured for end in done.values())
            found.append(_written(name, word, measured, places[word], ctx.params))
    if json:
        print(jsonlib.dumps(found, indent=1))
    if failed:
        raise typer.Exit(1)


def _places(name: str, parts: Iterable[str], out: str | None, quick: bool) -> dict[str, Path]:
    """A folder for each part; ``--out`` itself where there is one part only."""
    words = list(parts)
    if out is None:
        return {word: Path("runs") / f"paper-{name}-{word}{'-quick' * quick}" for word in words}
    return {word: Path(out) / word if len(words) > 1 else Path(out) for word in words}


def _studies(part: Part, words: Mapping[str, Any]) -> dict[str, Study]:
    """The studies of a part, by the folder of their runs; data that are not at hand are left out with a sentence."""
    from ..errors import InputError
    from ..papers import Setting

    names = (words["data"],) if words["data"] else (part.look,) if words["quick"] else part.data
    found, missing = dict[str, "Study"](), list[InputError]()
    for name in names:
        setting = Setting(name, words["split"], words["quick"])
        study = part.study(setting)
        try:
            study.rows[0].experiment.federation(words["data_dir"])
        except InputError as error:
            missing.append(error)
        else:
            found[_folder(setting)] = study
    if not found:
        raise missing[0]
    for why in missing:
        print(f"fedgrove: left out: {why}", file=sys.stderr)
    return found


def _folder(setting: Setting) -> str:
    return Path(setting.data).stem + (f"-{setting.split}" if setting.split else "")


def _run(
    study: Study, place: Path, words: Mapping[str, Any], engine: Engine
) -> dict[str, Summary | None]:
    """The summaries of a study's runs by name, None where one failed."""
    from .. import papers
    from ..config import sweep as library
    from ..runs.result import Failure

    wanted = papers.experiments(study, words["seeds"] or range(study.seeds))
    total = sum(experiment.rounds or 0 for experiment in wanted.values())
    run = partial(library.sweep, wanted, place, engine=engine, data_dir=words["data_dir"])
    try:
        ends = watched(place, wanted, total, run, words["json"])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on where it stopped.") from None
    failures = {n: end for n, end in ends.items() if isinstance(end, Failure)}
    for name, end in failures.items():
        print(
            f"fedgrove: {name} failed after {end.folder.rounds_saved()} rounds: {end.why}",
            file=sys.stderr,
        )
    return {n: None if isinstance(end, Failure) else end.summary for n, end in ends.items()}


def _written(
    name: str,
    word: str,
    measured: Sequence[tuple[Study, Mapping[str, Summary | None]]],
    place: Path,
    words: Mapping[str, Any],
) -> dict[str, Any]:
    """Write table.json, table.md and, where plotly is, paper.html; show the table unless JSON is arguments for."""
    from .. import papers
    from ..report import paper_page
    from ..report.paper import markdown, print_paper, table
    from ..runs.store import write_bytes

    found = table(name, word, measured, quick=words["quick"])
    write_bytes(place / "table.json", (jsonlib.dumps(found, indent=1) + "\n").encode())
    write_bytes(place / "table.md", markdown(found).encode())
    page = place / "paper.html"
    if paper_page.can_draw():
        paper_page.write_page(found, papers.find(name).cited, page)
    if not words["json"]:
        print_paper(found)
        missing = f"{place}; no page: plotly is not installed; get it with: pip install 'fedgrove[report]'"
        print(page if paper_page.can_draw() else missing)
    return found
