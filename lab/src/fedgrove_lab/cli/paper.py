"""``fedgrove paper``: a paper's tables and figures, run again and compared with what it reports."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedgrove.options import SEEDS
from fedgrove.options.definition import Options, argument, option, option_class, option_group
from fedgrove.options.groups import DataDirOption, EngineOptions, JsonOption

if TYPE_CHECKING:
    from fedgrove.config.experiment import Experiment
    from fedgrove.core import Engine
    from fedgrove.errors import MissingError
    from fedgrove.report.tables import Summary
    from fedgrove.runs.folder import RunFolder
    from fedgrove.runs.run import Run

    from ..papers import DataTable, Study, StudyOptions, StudyPart
    from ..papers.compare import Comparison, Measured, Summaries


@option_group
class StoreOption:
    """Output: a stored result."""

    store: str | None = option(
        None, "Store the result under this name in lab/results, for the docs.", "NAME"
    )


@option_class
class PaperOptions(Options, JsonOption, StoreOption, DataDirOption, EngineOptions):
    """Options of ``fedgrove paper``."""

    name: str = field(
        metadata=argument(
            "The paper: adfedwcp, ca-afp, fedapta, fedlayerprune, safl, or our own, grove.", "NAME"
        )
    )
    _: KW_ONLY
    table: int | None = option(None, "The table to run.", "N")
    figure: int | None = option(None, "The figure to run.", "N")
    quick: bool = option(False, "A quick run: built-in data, few rounds and clients.")
    rows: str | None = option(
        None, "Only these rows, by name or pattern, as in 'hermes-*,safl-k5-0.3'.", "NAMES"
    )
    rounds: int | None = option(
        None, "Number of rounds, for papers that allow it.", "N", without="as in the paper"
    )
    examples: int | None = option(
        None, "Number of examples per class, for papers that allow it.", "N"
    )
    init: str | None = option(
        None, "Initial weights, as in RUN/models/client-00000.safetensors.", "FILE[:body]"
    )
    seeds: int | tuple[int, ...] | None = option(
        None,
        "Number of seeds, from 0 on, or the seeds themselves, as in 3,5,7.",
        "N|S,S",
        without="depends on the table or figure",
        **SEEDS,
    )
    data: str | None = option(
        None, "Use only this data set.", "NAME", without="all data sets of the paper"
    )
    split: str | None = option(None, "How test data are held out: blocks or random.", "KIND")
    out: str | None = option(
        None, "Folder of the runs; runs that are already in it are resumed.", "DIR"
    )


def paper(options: PaperOptions) -> None:
    """Repeat a paper's table or figure, and compare the numbers.

    After an interruption, run the same command again to resume.
    """
    from fedgrove.api import open_engine

    from .. import papers

    options.check()
    name = options.name
    values = vars(options)
    parts = papers.parts(name, options.table, options.figure)
    folders = _folders(name, parts, options.out, options.quick)
    comparisons: list[Mapping[str, Any]] = []
    # All data are looked for before anything is trained: a missing file shows in seconds.
    data_tables = {}
    studies_of = {}
    for part_name, part in parts.items():
        if isinstance(part, papers.DataTable):
            data_tables[part_name] = part
        else:
            studies_of[part_name] = find_studies(part, values)
    if not studies_of:
        _check_nothing_to_train(values)
    any_failed = False
    # Before anything is written, as an engine that is not there is refused here.
    with open_engine(options) as chosen:
        for part_name, data_table in data_tables.items():
            found = _write_data_table(name, part_name, data_table, folders[part_name], values)
            comparisons.append(found)
        for part_name, studies in studies_of.items():
            measured = []
            for folder, study in studies.items():
                summaries = _run(study, folders[part_name] / folder, values, chosen)
                any_failed |= None in summaries.values()
                measured.append((study, summaries))
            # Written part by part, so that the first can be read while the second trains.
            comparisons.append(_write(name, part_name, measured, folders[part_name], values))
    if options.json:
        print(jsonlib.dumps(comparisons, indent=1))
    if any_failed:
        raise typer.Exit(1)
    if options.store:
        print(_store(options, comparisons), file=sys.stderr)


def _store(options: PaperOptions, comparisons: Sequence[Comparison]) -> Path:
    """Write what was measured to lab/results; of a run that failed there is nothing to store."""
    from ..results import describe_measurement, find_command, rows_of_comparisons, write_result

    rows = rows_of_comparisons(comparisons)
    command = find_command("fedgrove paper", options)
    seeds = max((row.get("seeds", []) for row in rows), key=len)
    seconds = sum(comparison.get("seconds", 0.0) for comparison in comparisons)
    assert options.store is not None
    return write_result(options.store, describe_measurement(command), rows, seeds, seconds=seconds)


def _check_nothing_to_train(options: Mapping[str, Any]) -> None:
    """Refuse options about training, where only tables about the data are requested."""
    from fedgrove.errors import check

    for name in ("rows", "rounds", "seeds"):
        given = options[name]
        check(
            given is None,
            f"--{name}",
            given,
            "left out: a table about the data does not train anything",
        )


def _folders(name: str, parts: Iterable[str], out: str | None, quick: bool) -> dict[str, Path]:
    """A folder for each part; ``--out`` itself where there is one part only."""
    part_names = list(parts)
    if out is None:
        ending = "-quick" if quick else ""
        return {part: Path("runs") / f"paper-{name}-{part}{ending}" for part in part_names}
    if len(part_names) == 1:
        return {part_names[0]: Path(out)}
    return {part: Path(out) / part for part in part_names}


def find_studies(part: StudyPart, options: Mapping[str, Any]) -> dict[str, Study]:
    """Return the studies of a part, by the folder of their runs.

    Data sets that are not found are left out, with a line on stderr.

    Raises:
        MissingError: None of the data sets is found.
    """
    _check_options(part, options)
    studies: dict[str, Study] = {}
    missing: list[MissingError] = []
    for name in _data_of(part, options):
        data = name
        chosen, study = _build_study(part, data, options)
        why = _why_missing(study, options)
        # Data that were given by name are not replaced.
        reasons: list[str] = []
        while why is not None and data in part.substitutes and not options["data"]:
            reasons.append(str(why))
            data = part.substitutes[data]
            chosen, study = _build_study(part, data, options)
            why = _why_missing(study, options)
        if why is None and reasons:
            # Two substitutes may miss a set for the same reason.
            both = " ".join(dict.fromkeys(reasons))
            print(f"fedgrove: {data} replaces {name}: {both}", file=sys.stderr)
        if why is None:
            studies[_folder_of(chosen)] = study
        else:
            missing.append(why)
    _report_missing(missing, is_empty=not studies)
    return studies


def _check_options(part: StudyPart, options: Mapping[str, Any]) -> None:
    """Refuse options that a part does not take."""
    from fedgrove.errors import check

    rounds = options["rounds"]
    allowed = "left out: this part's are the paper's"
    check(rounds is None or part.takes_rounds, "--rounds", rounds, allowed)
    check(rounds is None or rounds >= 1, "--rounds", rounds, "1 or more")
    for name in ("examples", "init"):
        given = options[name]
        is_allowed = given is None or part.takes_start
        check(is_allowed, f"--{name}", given, "left out: this part has its own")
    examples = options["examples"]
    check(examples is None or examples >= 1, "--examples", examples, "1 or more of each class")


def _build_study(
    part: StudyPart, data: str, options: Mapping[str, Any]
) -> tuple[StudyOptions, Study]:
    """A part on one data set, with the rows that are requested."""
    from ..papers import StudyOptions

    given = {key: options[key] for key in ("split", "quick", "rounds", "examples", "init")}
    chosen = StudyOptions(data, **given)
    return chosen, _choose_rows(part.study(chosen), options["rows"])


def _why_missing(study: Study, options: Mapping[str, Any]) -> MissingError | None:
    """Why a study's data are not there; None where they are.

    A damaged file, or a folder that does not exist, is a mistake to fix: nothing replaces it, and
    the command ends.
    """
    from fedgrove.errors import MissingError

    try:
        # All rows of a study are on the same data: the first row's are loaded for all.
        study.rows[0].experiment.federation(options["data_dir"])
    except MissingError as error:
        return error
    return None


def _data_of(part: StudyPart | DataTable, options: Mapping[str, Any]) -> list[str]:
    """The data sets that are wanted: the given one, the built-in one, or the paper's."""
    if options["data"]:
        return [options["data"]]
    if options["quick"]:
        return [part.quick_data]
    return list(part.data)


def _report_missing(missing: Sequence[MissingError], is_empty: bool) -> None:
    if is_empty:
        raise missing[0]
    for why in missing:
        print(f"fedgrove: left out: {why}", file=sys.stderr)


def _choose_rows(study: Study, text: str | None) -> Study:
    """The study with the rows that one of the patterns matches; all of them without any."""
    from fedgrove.errors import InputError

    if text is None:
        return study
    patterns = [pattern.strip() for pattern in text.split(",")]
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
        raise InputError(
            f"--rows is '{text}', which is not a row of {study.title}; it has {listed}."
        )
    return replace(study, rows=tuple(rows))


def _folder_of(chosen: StudyOptions) -> str:
    # The data may be a file: its stem is a name for a folder, its path is not.
    data = Path(chosen.data).stem
    return f"{data}-{chosen.split}" if chosen.split else data


def _run(study: Study, folder: Path, options: Mapping[str, Any], engine: Engine) -> Summaries:
    """The summaries of a study's runs by name, None where one failed."""
    from fedgrove.config import sweep as library
    from fedgrove.config.grid import list_seeds
    from fedgrove.runs.result import Failure

    from .. import papers

    wanted = papers.experiments(study, list_seeds(options["seeds"] or study.seeds))
    total = sum(experiment.rounds or 0 for experiment in wanted.values())
    run = partial(library.sweep, wanted, folder, engine=engine, data_dir=options["data_dir"])
    try:
        ends = library.watched(folder, wanted, total, run, options["json"])
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
                trained, state = _restore(wanted[name], end.folder, options["data_dir"])
                summary["matrices"] = study.matrices(trained, state)
            summaries[name] = summary
    return summaries


def _restore(experiment: Experiment, folder: RunFolder, data_dir: str | None) -> tuple[Run, Any]:
    """A finished run as its last checkpoint has it, and the state of its method."""
    from fedgrove.runs.folder import CHECKPOINT
    from fedgrove.runs.memory import Memory

    federation = experiment.federation(data_dir)
    run = experiment.build(federation, Memory(folder.path / CHECKPOINT))
    state, _ = folder.restore(run)
    return run, state


def _write(
    name: str, part: str, measured: Measured, folder: Path, options: Mapping[str, Any]
) -> Comparison:
    """Write table.json, table.md and paper.html; print the table for people."""
    from .. import papers
    from ..papers.compare import compare_part
    from ..papers.page import write_page
    from ..papers.tables import print_comparison, write_markdown

    comparison = compare_part(name, part, measured, quick=options["quick"])
    _write_files(folder, comparison, write_markdown(comparison))
    page = folder / "paper.html"
    write_page(comparison, papers.find(name).cited, page)
    if not options["json"]:
        print_comparison(comparison)
        print(page)
    return comparison


def _write_files(folder: Path, comparison: Comparison, markdown: str) -> None:
    from fedgrove.runs.files import write_bytes

    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "table.json", (jsonlib.dumps(comparison, indent=1) + "\n").encode())
    write_bytes(folder / "table.md", markdown.encode())


def _write_data_table(
    name: str, part_name: str, part: DataTable, folder: Path, options: Mapping[str, Any]
) -> Comparison:
    """A table about the data: write table.json and table.md, and print it for people."""
    from fedgrove.data import load
    from fedgrove.errors import MissingError

    from ..papers.compare import compare_data_table
    from ..papers.tables import print_data_table, write_data_markdown

    federations = {}
    missing = []
    for data in _data_of(part, options):
        try:
            # A random split leaves no window out, as one by blocks does between its sides.
            federations[data] = load(
                data,
                split=options["split"] or "random",
                standardise=False,
                data_dir=options["data_dir"],
            )
        except MissingError as error:
            missing.append(error)
    _report_missing(missing, is_empty=not federations)
    comparison = compare_data_table(name, part_name, part, federations)
    _write_files(folder, comparison, write_data_markdown(comparison))
    if not options["json"]:
        print_data_table(comparison)
        print(folder)
    return comparison
