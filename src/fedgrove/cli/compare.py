"""``fedgrove compare`` and ``fedgrove report``: tables and pages of runs that exist."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import check
from ..options.definition import Options, argument, option, option_class
from ..options.groups import JsonOption

if TYPE_CHECKING:
    from ..config.comparison import Comparison


@option_class
class CompareOptions(Options, JsonOption):
    """Options of ``fedgrove compare``."""

    runs: Sequence[str] = field(
        metadata=argument(
            "Run folders, or folders of sweeps.",
            "RUN...",
            complete="runs",
            is_repeated=True,
            checked_as=Any,
        )
    )
    _: KW_ONLY
    bytes: bool = option(
        False, "Show what the bytes were spent on, next to the bytes that the paper counts."
    )
    time: bool = option(False, "Show the virtual time until an accuracy is reached.")
    to: float | None = option(
        None,
        "The accuracy for --time, as in 0.9.",
        "SHARE",
        without="the highest that all runs reach",
    )
    plot: str | None = option(None, "With --time, also write a page with a plot.", "FILE.html")
    page: str | None = option(
        None,
        "Where to write the HTML report.",
        "FILE.html",
        without="next to the runs, or in this folder",
    )
    charts: str | None = option(
        None,
        "Also write each chart of the report into this folder, as SVG; as PDF too after pip "
        "install 'fedgrove[pdf]'.",
        "DIR",
    )
    table: str | None = option(None, "Also write a table for a paper: .md, .tex or .csv.", "FILE")
    force: bool = option(False, "Replace files that fedgrove did not write.")


def compare(options: CompareOptions) -> None:
    """Compare runs in one table.

    A sweep adds all its runs, and is also summarised over seeds.
    """
    options.check()
    time = options.time
    check(time or options.to is None, "to", options.to, "given together with --time")
    check(time or options.plot is None, "plot", options.plot, "given together with --time")
    check(not (time and options.bytes), "time", time, "given without --bytes")
    for name, path in (
        ("page", options.page),
        ("charts", options.charts),
        ("table", options.table),
    ):
        is_plain = not (time or options.bytes)
        check(path is None or is_plain, name, path, "given without --time or --bytes")
    if time:
        return _compare_times(options)
    from ..config.comparison import compare_runs

    found = compare_runs(options.runs, options.bytes)
    if options.json:
        print(json.dumps(found.rows, indent=1))
    else:
        found.table()
    if not options.bytes:
        _write_files(found, options)


def _compare_times(options: CompareOptions) -> None:
    """Show virtual time to an accuracy, as a table and as a page."""
    from ..config.comparison import read_summary
    from ..config.sweep import members_of
    from ..report.page import check_place
    from ..report.time_to_target import find_times, print_times, read_curve, write_time_report
    from ..runs.folder import RunFolder

    plot = None if options.plot is None else Path(options.plot)
    if plot is not None:
        check_place(plot, force=options.force)
    curves = []
    for run in options.runs:
        for path in members_of(run):
            summary = read_summary(path)
            lines = RunFolder.open(Path(path)).metrics()
            method = summary.get("method", "")
            curves.append(read_curve(path, method, lines, summary["finished"]))
    found = find_times(curves, options.to)
    if plot is not None:
        with _file_errors(plot):
            write_time_report(curves, found, plot, force=options.force)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print_times(curves, found)
    if plot is not None:
        print(f"Page: {plot}")


def _write_files(found: Comparison, options: CompareOptions) -> None:
    """Write the page of a comparison, and its table if one is requested.

    With --json only what is requested by name is written.
    """
    from ..report.page import check_place
    from ..report.paper_table import write_paper_table

    # With --json stdout belongs to the JSON alone.
    stream = sys.stderr if options.json else sys.stdout
    if options.table is not None:
        place = Path(options.table)
        with _file_errors(place):
            write_paper_table(found.groups(), place, "--table", force=options.force)
        print(f"Table: {place}", file=stream)
    if options.charts is not None:
        _write_charts(found, Path(options.charts), stream, options.force)
    if options.page is not None:
        path = Path(options.page)
        check_place(path, "--page", force=options.force)
        with _file_errors(path):
            found.page().write(path, force=options.force)
        print(f"Page: {path}", file=stream)
    elif not options.json and len(found) > 1:
        _write_usual_page(found, options.force)


def _write_charts(found: Comparison, folder: Path, stream: TextIO, force: bool) -> None:
    """Write the charts of a comparison into a folder, which may be new."""
    written = 0
    with _file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in found.charts():
            written += len(chart.write(folder, force=force))
    print(f"Charts: {folder} ({written} files)", file=stream)


def _write_usual_page(found: Comparison, force: bool) -> None:
    """Write a page that was not requested: the table was shown, so a failure is only reported."""
    from ..errors import EngineError, InputError

    path = found.place_of_page()
    try:
        with _file_errors(path):
            found.page().write(path, force=force)
        print(f"Page: {path}")
    except EngineError as error:
        print(f"fedgrove: no report was written: {error}", file=sys.stderr)
    except InputError:
        sentence = f"{path} was not written by fedgrove; give --page FILE.html or --force."
        print(f"fedgrove: no report was written: {sentence}", file=sys.stderr)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn an error of the system about a file into a sentence."""
    from ..runs.files import cannot_write

    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


# ---- report --------------------------------------------------------------------------------------


@option_class
class ReportOptions(Options):
    """Options of ``fedgrove report``."""

    run: str = field(metadata=argument("A folder of a run or a sweep.", "RUN", complete="runs"))
    _: KW_ONLY
    out: str | None = option(
        None, "Where to write the report.", "FILE.html", without="RUN/report.html"
    )
    force: bool = option(False, "Replace a file that fedgrove did not write.")


def report(options: ReportOptions) -> None:
    """Write the HTML report of a run or a sweep again.

    Every run writes its report when it ends; use this for older folders and for runs in progress.
    """
    from ..config import sweep
    from ..config.comparison import compare_runs
    from ..report.page import check_place
    from ..report.run_report import make_run_report
    from ..runs.folder import RunFolder
    from ..runs.report_html import REPORT_FILE, read_run_record

    run = Path(options.run)
    path = run / REPORT_FILE
    if options.out is not None:
        path = Path(options.out)
        check_place(path, "--out", force=options.force)
    if (run / sweep.SWEEP_FILE).is_file():
        page = compare_runs([options.run]).page()
    else:
        page = make_run_report(read_run_record(RunFolder.open(run), _why_failed(run)))
    with _file_errors(path):
        # Without --out it is the report of the folder, also one of a version without the mark.
        page.write(path, force=options.force or options.out is None)
    print(f"Page: {path}")


def _why_failed(run: Path) -> str:
    """Why a run of a sweep failed, as its sweep.json has it."""
    from ..config import sweep
    from ..errors import FedgroveError

    try:
        member = sweep.read(run.resolve().parent)["members"].get(run.resolve().name, {})
    except FedgroveError:
        return ""
    return str(member.get("why", ""))
