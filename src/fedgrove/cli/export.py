"""``fedgrove export``: a client's own model as a file for a device."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, field
from typing import TYPE_CHECKING

from ..errors import EngineError, InputError
from ..options.definition import Options, argument, option, option_class
from ..options.groups import DataDirOption, JsonOption, TrustOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..export.compare import FormatRow
    from ..export.figures import Exported
    from ..export.source import Source


@option_class
class ExportOptions(Options, JsonOption, TrustOption, DataDirOption):
    """Options of ``fedgrove export``."""

    run: str = field(metadata=argument("A run folder.", "RUN", complete="runs"))
    _: KW_ONLY
    client: str | None = option(
        None, "The client whose model is exported: a number or a name.", "K"
    )
    all: bool = option(False, "Export the models of all clients.")
    to: str = option(
        "onnx",
        "The format: onnx, executorch or litert; all: every format in float and in int8.",
        "FORMAT",
    )
    int8: bool = option(False, "Also write an int8 file, calibrated on the client's training data.")
    size: str | None = option(
        None,
        "The most that a file may take, as in 80kB: the float file is kept if it fits, else int8.",
        "SIZE",
        without="no limit",
    )
    check_: bool = option(
        False,
        "Write, check and measure the files, print a table, and keep none; without --client, for "
        "the first client.",
    )
    standardised: bool = option(
        False, "The file expects standardised inputs; by default it standardises raw inputs itself."
    )
    align: int = option(
        1, "Round channel counts up to multiples of N, such as 16: larger, but often faster.", "N"
    )
    out: str | None = option(None, "Folder to write to.", "DIR", without="RUN/export")


def export(options: ExportOptions) -> None:
    """Export a client's model for a device, with a model card.

    The outputs of the file are compared with those of PyTorch before anything is written.
    """
    from ..export import formats
    from ..export.make import export_client
    from ..export.source import opened

    options.check()
    one_is_given = options.client is not None
    needs_clients = not options.check_ or (options.all and one_is_given)
    if options.all == one_is_given and needs_clients:
        raise InputError(
            "give either --client K, for one client of the run, or --all, for all of its clients."
        )
    if options.check_ or options.to == "all":
        _compare(options)
        return
    wanted = formats.ExportRequest(
        options.to, options.int8, options.standardised, options.align, options.size
    )
    source = opened(options.run, data_dir=options.data_dir, trust=options.trust)
    clients = _clients(options, source)
    exports = [export_client(source, client, wanted, options.out) for client in clients]
    if options.json:
        entries = [exported.json() for exported in exports]
        # A list for --all even where the run has one client, so that scripts can rely on it.
        print(json.dumps(entries if options.all else entries[0], indent=1))
    else:
        _show(exports)


def _clients(options: ExportOptions, source: Source) -> list[int]:
    """The clients that were asked for; with --check alone the first."""
    if options.client is not None:
        return [source.number(options.client)]
    clients = sorted(source.files)
    return clients if options.all else clients[:1]


def _compare(options: ExportOptions) -> None:
    """Compare formats, and keep the files unless they are only checked."""
    from ..export.compare import FormatComparison
    from ..export.formats import FORMATS
    from ..export.source import opened

    formats = list(FORMATS) if options.to == "all" else [options.to]
    source = opened(options.run, data_dir=options.data_dir, trust=options.trust)
    rows: list[FormatRow] = []
    for client in _clients(options, source):
        found = FormatComparison.of(
            source,
            client,
            formats,
            options.size,
            options.out,
            options.standardised,
            options.align,
        )
        rows += found.rows() if options.check_ else found.keep()
    if options.json:
        print(json.dumps([row.json() for row in rows], indent=1))
    else:
        _show_formats(rows)
    failed = [row for row in rows if row.has_failed]
    if failed:
        raise EngineError(
            f"{len(failed)} of {len(rows)} exports failed; the reasons are "
            f"{'in the rows' if options.json else 'below the table'}."
        )


def _show_formats(rows: Sequence[FormatRow]) -> None:
    """Print the table of formats, and below it why some failed."""
    from ..report.tables import format_kilobytes, or_dash
    from ..report.terminal import Column, print_rows, print_text

    cells = []
    for row in rows:
        scores = row.scores
        result = row.file or row.install or "ok"
        if row.has_failed:
            result = "failed"
        elif not row.fits:
            result = "too large"
        cells.append(
            {
                Column("client", is_name=True): row.name,
                Column("format", is_name=True): row.to,
                Column("version", is_name=True): row.version,
                Column("size\nkB"): or_dash(row.bytes, format_kilobytes),
                Column(scores.name.replace(" ", "\n")): or_dash(row.score, scores.format),
                Column("µs", 2): or_dash(row.latency_us, "{:,.0f}".format),
                Column("time", 1): or_dash(row.latency, "{:.2f}".format),
                Column("from\ntorch", 3): or_dash(row.difference, "{:.0e}".format),
                Column("result", is_name=True): result,
            }
        )
    print_rows(cells)
    print_text(
        "time: of one example, relative to the first row with one; from torch: the largest "
        "difference between the outputs of the float file and torch's, on the test data"
    )
    for row in rows:
        if row.has_failed:
            print_text(f"client {row.name}, {row.to}, {row.version}: {row.failure}")


def _show(exports: list[Exported]) -> None:
    """Print the table of exported models."""
    # Imported late, so that other commands and --json start without them.
    from ..report.tables import format_kilobytes
    from ..report.terminal import Column, print_rows, print_text

    rows = []
    for exported in exports:
        scores = exported.scores
        for row in exported.rows:
            rows.append(
                {
                    Column("client", is_name=True): exported.name,
                    Column("version", is_name=True): row.version,
                    Column("params", 1): f"{row.params:,}",
                    Column("MACs", 2): f"{row.macs:,}",
                    Column("size\nkB"): format_kilobytes(row.bytes),
                    Column("µs", 3): f"{row.latency_us:,.0f}",
                    Column("time to\ndense", 4): f"{row.latency:.2f}",
                    Column(scores.name.replace(" ", "\n")): scores.format(row.score),
                    Column("int8 % of\nweights / MACs", 5): row.shares,
                }
            )
    print_rows(rows)
    for exported in exports:
        for note in exported.notes:
            print_text(f"client {exported.name}: {note}")
        files = [row.file for row in exported.rows if row.file]
        files.append(exported.card)
        print_text(
            f"{exported.folder}: {', '.join(files)}; within {exported.difference:.0e} of torch"
        )
