"""``fedgrove export``: a client's own model as a file for a device."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, field
from typing import TYPE_CHECKING

from ..errors import InputError
from ..options.definition import Options, argument, option, option_class
from ..options.groups import DataDirOption, JsonOption, TrustOption

if TYPE_CHECKING:
    from ..export.figures import Exported


@option_class
class ExportOptions(Options, JsonOption, TrustOption, DataDirOption):
    """Options of ``fedgrove export``."""

    run: str = field(metadata=argument("A run folder.", "RUN", complete="runs"))
    _: KW_ONLY
    client: str | None = option(
        None, "The client whose model is exported: a number or a name.", "K"
    )
    all: bool = option(False, "Export the models of all clients.")
    to: str = option("onnx", "The format: onnx or executorch.", "FORMAT")
    int8: bool = option(False, "Also write an int8 file, calibrated on the client's training data.")
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
    if options.all == one_is_given:
        raise InputError(
            "give either --client K, for one client of the run, or --all, for all of its clients."
        )
    wanted = formats.ExportRequest(options.to, options.int8, options.standardised, options.align)
    source = opened(options.run, data_dir=options.data_dir, trust=options.trust)
    clients = sorted(source.files)
    if options.client is not None:
        clients = [source.number(options.client)]
    exports = [export_client(source, client, wanted, options.out) for client in clients]
    if options.json:
        entries = [exported.json() for exported in exports]
        # A list for --all even where the run has one client, so that scripts can rely on it.
        print(json.dumps(entries if options.all else entries[0], indent=1))
    else:
        _show(exports)


def _show(exports: list[Exported]) -> None:
    """Print the table of exported models."""
    # Imported late, so that other commands and --json start without them.
    from ..report.tables import format_kilobytes
    from ..report.terminal import Column, print_rows, print_text

    rows = []
    for exported in exports:
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
                    Column("accuracy\n%"): f"{100 * row.accuracy:.2f}",
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
