"""``fedgrove report``: the page of a run or a sweep, made again; and the pages of ``compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o

if TYPE_CHECKING:
    from ..config.compared import Comparison

Out = Annotated[
    str | None,
    o.option("--out", "Where to write it; else RUN/report.html.", "FILE.html"),
]


def report(run: o.Run, out: Out = None) -> None:
    """Write the page of a run or a sweep, finished or not.

    Every run has one at its end; this is for folders of before, and for runs on their way.
    """
    from ..config import sweep
    from ..config.compared import compared
    from ..report.page import check_place
    from ..report.run_report import make_run_report
    from ..runs.files import cannot_write
    from ..runs.folder import RunFolder
    from ..runs.report_html import REPORT_FILE, read_run_record

    path = Path(run) / REPORT_FILE
    if out is not None:
        path = Path(out)
        check_place(path, "--out")
    if (Path(run) / sweep.FILE).is_file():
        page = compared([run]).page()
    else:
        page = make_run_report(read_run_record(RunFolder.open(Path(run)), _why_failed(Path(run))))
    try:
        page.write(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    typer.echo(f"Page: {path}")


def _why_failed(run: Path) -> str:
    """What the sweep that a run belongs to says of it."""
    from ..config import sweep
    from ..errors import FedgroveError

    try:
        member = sweep.read(run.resolve().parent)["members"].get(run.resolve().name, {})
    except FedgroveError:
        return ""
    return str(member.get("why", ""))


def write_compared(found: Comparison, page: str | None, table: str | None, quiet: bool) -> None:
    """Write the page of a comparison, and its table where one is asked for.

    With --json only what is asked for by name is written.
    """
    from ..report.page import check_place
    from ..report.seed_averages import check_table_format, write_paper_table
    from ..runs.files import cannot_write

    if table is not None:
        check_table_format(Path(table))
        check_place(Path(table), "--table")
        try:
            write_paper_table(found.groups(), Path(table))
        except OSError as error:
            raise cannot_write(Path(table), error) from None
        _say(f"Table: {table}", quiet)
    if page is None and (quiet or len(found) < 2):
        return
    path = Path(page) if page is not None else found.place_of_page()
    if page is not None:
        check_place(path, "--page")
    try:
        found.page().write(path)
    except OSError as error:
        # The table was shown; a page that nobody asked for is no reason to fail.
        if page is not None:
            raise cannot_write(path, error) from None
        print(f"fedgrove: no page: {cannot_write(path, error)}", file=sys.stderr)
        return
    _say(f"Page: {path}", quiet)


def _say(line: str, quiet: bool) -> None:
    # With --json stdout belongs to the JSON alone.
    print(line, file=sys.stderr if quiet else sys.stdout)
