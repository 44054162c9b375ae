"""``fedgrove paper``: a paper's tables and figures, run again beside what it reports."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgrove.cli import options as o
from fedgrove.cli.sweep import Seeds, watched

if TYPE_CHECKING:
    from fedgrove.config.experiment import Experiment
    from fedgrove.core import Engine
    from fedgrove.errors import MissingError
    from fedgrove.report.tables import Summary
    from fedgrove.runs.folder import RunFolder
    from fedgrove.runs.run import Run

    from ..papers import DataTable, Part, Setting, Study
    from ..papers.beside import Comparison, Measured, Summaries


def _option(flag: str, help: str, metavar: str, parser: Any = None) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, parser=parser, show_default=False)


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The paper: adfedwcp, ca-afp, fedapta, fedlayerprune, safl, or ours, grove.",
        show_default=False,
    ),
]
Table = Annotated[int | None, _option("--table", "One of its tables.", "N", o.whole)]
Figure = Annotated[int | None, _option("--figure", "One of its figures.", "N", o.whole)]
Rows = Annotated[
    str | None,
    _option("--rows", "Only these rows, by name or pattern, as 'hermes-*,safl-k5-0.3'.", "NAMES"),
]
Rounds = Annotated[
    int | None,
    _option("--rounds", "So many rounds, of papers that can; else the paper's.", "N", o.whole),
]
Examples = Annotated[
    int | None,
    _option("--examples", "So many of each class in all, of papers that can.", "N", o.whole),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look: built-in data, few rounds and clients.")
]
Data = Annotated[str | None, _option("--data", "One data set; else all of the paper's.", "NAME")]
Out = Annotated[
    str | None, _option("--out", "The folder; runs that it holds already are resumed.", "DIR")
]


def paper(
    ctx: typer.Context,
    name: Name,
    table: Table = None,
    figure: Figure = None,
    quick: Quick = False,
    rows: Rows = None,
    rounds: Rounds = None,
    examples: Examples = None,
    init: o.Init = None,
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
    """Run a paper's table or figure again, beside what it reports; the same command resumes it."""
    from fedgrove.cli import arguments

    from .. import papers

    parts = papers.parts(name, table, figure)
    places = _places(name, parts, out, quick)
    comparisons: list[Mapping[str, Any]] = []
    # All data are looked for before anything is trained: a missing file shows in seconds.
    tables_of_data = {}
    studies_of = {}
    for word, part in parts.items():
        if isinstance(part, papers.DataTable):
            tables_of_data[word] = part
        else:
            studies_of[word] = _studies(part, ctx.params)
    if not studies_of:
        _check_nothing_to_train(ctx.params)
    any_failed = False
    # Before anything is written, as an engine that is not there is refused here.
    with arguments.engine(ctx.params) as chosen:
        for word, data_table in tables_of_data.items():
            comparisons.append(_write_data_table(name, word, data_table, places[word], ctx.params))
        for word, studies in studies_of.items():
            measured = []
            for folder, study in studies.items():
                summaries = _run(study, places[word] / folder, ctx.params, chosen)
                any_failed |= None in summaries.values()
                measured.append((study, summaries))
            # Written part by part, so that the first can be read while the second trains.
            comparisons.append(_write(name, word, measured, places[word], ctx.params))
    if json:
        print(jsonlib.dumps(comparisons, indent=1))
    if any_failed:
        raise typer.Exit(1)


def _check_nothing_to_train(words: Mapping[str, Any]) -> None:
    """Refuse what says how to train, where only tables about the data are asked for."""
    from fedgrove.errors import check

    for word in ("rows", "rounds", "seeds"):
        given = words[word]
        check(given is None, f"--{word}", given, "left out: a table about the data trains nothing")


def _places(name: str, parts: Iterable[str], out: str | None, quick: bool) -> dict[str, Path]:
    """A folder for each part; ``--out`` itself where there is one part only."""
    words = list(parts)
    if out is None:
        ending = "-quick" if quick else ""
        return {word: Path("runs") / f"paper-{name}-{word}{ending}" for word in words}
    if len(words) == 1:
        return {words[0]: Path(out)}
    return {word: Path(out) / word for word in words}


def _studies(part: Part, words: Mapping[str, Any]) -> dict[str, Study]:
    """The studies of a part, by the folder of their runs.

    Data sets that are not found are left out, with a line on stderr; with none found it fails.
    """
    from fedgrove.errors import check

    rounds = words["rounds"]
    check(
        rounds is None or part.any_length,
        "--rounds",
        rounds,
        "left out: this part's are the paper's",
    )
    check(rounds is None or rounds >= 1, "--rounds", rounds, "1 or more")
    for word in ("examples", "init"):
        given = words[word]
        check(
            given is None or part.any_start, f"--{word}", given, "left out: this part has its own"
        )
    examples = words["examples"]
    check(examples is None or examples >= 1, "--examples", examples, "1 or more of each class")
    studies: dict[str, Study] = {}
    missing: list[MissingError] = []
    for name in _data_of(part, words):
        data = name
        setting, study = _study(part, data, words)
        why = _why_missing(study, words)
        # Data that were asked for by name are not replaced.
        reasons: list[str] = []
        while why is not None and data in part.instead and not words["data"]:
            reasons.append(str(why))
            data = part.instead[data]
            setting, study = _study(part, data, words)
            why = _why_missing(study, words)
        if why is None and reasons:
            # Two ways to do without a set miss it for the same reason.
            told = " ".join(dict.fromkeys(reasons))
            print(f"fedgrove: {data} in the place of {name}: {told}", file=sys.stderr)
        if why is None:
            studies[_folder(setting)] = study
        else:
            missing.append(why)
    _tell_missing(missing, is_empty=not studies)
    return studies


def _study(part: Part, data: str, words: Mapping[str, Any]) -> tuple[Setting, Study]:
    """A part on one data set, with the rows that are asked for."""
    from ..papers import Setting

    setting = Setting(
        data, words["split"], words["quick"], words["rounds"], words["examples"], words["init"]
    )
    return setting, _chosen_rows(part.study(setting), words["rows"])


def _why_missing(study: Study, words: Mapping[str, Any]) -> MissingError | None:
    """Why a study's data are not there; None where they are.

    Files that are damaged, or a folder that is none, are mistakes to mend: nothing takes their
    place, and the command ends.
    """
    from fedgrove.errors import MissingError

    try:
        # All rows of a study are on the same data: loading the first row's tells of all.
        study.rows[0].experiment.federation(words["data_dir"])
    except MissingError as error:
        return error
    return None


def _data_of(part: Part | DataTable, words: Mapping[str, Any]) -> list[str]:
    """The data sets that are asked for: one, the built-in one of a quick look, or the paper's."""
    if words["data"]:
        return [words["data"]]
    if words["quick"]:
        return [part.look]
    return list(part.data)


def _tell_missing(missing: Sequence[MissingError], is_empty: bool) -> None:
    if is_empty:
        raise missing[0]
    for why in missing:
        print(f"fedgrove: left out: {why}", file=sys.stderr)


def _chosen_rows(study: Study, text: str | None) -> Study:
    """The study with the rows that one of the patterns matches; all of them without a text."""
    from fedgrove.errors import InputError

    if text is None:
        return study
    patterns = [word.strip() for word in text.split(",")]
    rows = []
    for row in study.rows:
        if any(fnmatchcase(row.name, pattern) for pattern in patterns):
            rows.append(row)
    if not rows:
        # Rows of one run have one name.
        names = list(dict.fromkeys(row.name for row in study.rows))
        listed = ", ".join(names)
        for pattern in patterns:
            is_beginning = bool(pattern) and any(name.startswith(pattern) for name in names)
            if is_beginning:
                listed += f", or all of '{pattern}*'"
        raise InputError(f"--rows is '{text}', which is no row of {study.title}; it has {listed}.")
    return replace(study, rows=tuple(rows))


def _folder(setting: Setting) -> str:
    # The data may be a file: its stem is a name for a folder, its path is not.
    data = Path(setting.data).stem
    return f"{data}-{setting.split}" if setting.split else data


def _run(study: Study, place: Path, words: Mapping[str, Any], engine: Engine) -> Summaries:
    """The summaries of a study's runs by name, None where one failed."""
    from fedgrove.config import sweep as library
    from fedgrove.runs.result import Failure

    from .. import papers

    wanted = papers.experiments(study, words["seeds"] or range(study.seeds))
    total = sum(experiment.rounds or 0 for experiment in wanted.values())
    run = partial(library.sweep, wanted, place, engine=engine, data_dir=words["data_dir"])
    try:
        ends = watched(place, wanted, total, run, words["json"])
    except KeyboardInterrupt:
        # The sweep's own advice, fedgrove resume, would not write the table.
        raise KeyboardInterrupt("interrupted; resume with the same command.") from None
    summaries: dict[str, Summary | None] = {}
    for name, end in ends.items():
        if isinstance(end, Failure):
            done = end.folder.rounds_saved()
            print(f"fedgrove: {name} failed after {done} rounds: {end.why}", file=sys.stderr)
            summaries[name] = None
        else:
            # Some measures are over the rounds, and a summary has the last one only.
            summary = {**end.summary, "lines": end.folder.metrics()}
            if study.matrices is not None:
                trained, state = _at_the_end(wanted[name], end.folder, words["data_dir"])
                summary["matrices"] = study.matrices(trained, state)
            summaries[name] = summary
    return summaries


def _at_the_end(experiment: Experiment, folder: RunFolder, data_dir: str | None) -> tuple[Run, Any]:
    """A finished run as its last checkpoint has it, and the state of its method."""
    from fedgrove.runs.folder import CHECKPOINT
    from fedgrove.runs.store import Memory

    federation = experiment.federation(data_dir)
    run = experiment.build(federation, Memory(folder.path / CHECKPOINT))
    state, _ = folder.restore(run)
    return run, state


def _write(
    name: str, word: str, measured: Measured, place: Path, words: Mapping[str, Any]
) -> Comparison:
    """Write table.json, table.md and paper.html; print the table for people."""
    from fedgrove.runs.store import write_bytes

    from .. import papers
    from ..papers.beside import markdown, print_paper, table
    from ..papers.page import write_page

    comparison = table(name, word, measured, quick=words["quick"])
    write_bytes(place / "table.json", (jsonlib.dumps(comparison, indent=1) + "\n").encode())
    write_bytes(place / "table.md", markdown(comparison).encode())
    page = place / "paper.html"
    write_page(comparison, papers.find(name).cited, page)
    if not words["json"]:
        print_paper(comparison)
        print(page)
    return comparison


def _write_data_table(
    name: str, word: str, part: DataTable, place: Path, words: Mapping[str, Any]
) -> dict[str, Any]:
    """A table about the data: write table.json and table.md, and print it for people."""
    from fedgrove.data import load
    from fedgrove.errors import MissingError
    from fedgrove.runs.store import write_bytes

    from ..papers.data_table import compared, markdown_of_data, print_data_table

    federations = {}
    missing = []
    for data in _data_of(part, words):
        try:
            # A random split leaves no window out, as one by blocks does between its sides.
            federations[data] = load(
                data,
                split=words["split"] or "random",
                standardise=False,
                data_dir=words["data_dir"],
            )
        except MissingError as error:
            missing.append(error)
    _tell_missing(missing, is_empty=not federations)
    comparison = compared(name, word, part, federations)
    place.mkdir(parents=True, exist_ok=True)
    write_bytes(place / "table.json", (jsonlib.dumps(comparison, indent=1) + "\n").encode())
    write_bytes(place / "table.md", markdown_of_data(comparison).encode())
    if not words["json"]:
        print_data_table(comparison)
        print(place)
    return comparison
