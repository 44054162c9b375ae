"""``fedgrove export``: a client's own model as a file for a device."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from . import options as o

if TYPE_CHECKING:
    from ..export.figures import Exported

Which = Annotated[
    str | None,
    typer.Option("--client", help="Whose model: a number or a name.", metavar="K"),
]
Every = Annotated[bool, typer.Option("--all", help="The model of every client.")]
To = Annotated[str, typer.Option("--to", help="onnx or executorch.", metavar="FORMAT")]
Int8 = Annotated[
    bool, typer.Option("--int8", help="An int8 file too, fitted to the client's training data.")
]
Standardised = Annotated[
    bool,
    typer.Option(
        "--standardised", help="The file takes standardised inputs; else it standardises raw ones."
    ),
]
Align = Annotated[
    int,
    typer.Option(
        "--align",
        help="Channels in multiples of N: larger, often faster, as 16.",
        metavar="N",
        parser=o.whole,
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        "--out", help="The folder to write to; else export in the run folder.", metavar="DIR"
    ),
]


def export(
    run: o.Run,
    client: Which = None,
    all: Every = False,
    to: To = "onnx",
    int8: Int8 = False,
    standardised: Standardised = False,
    align: Align = 1,
    out: Folder = None,
    data_dir: o.DataDir = None,
    trust: o.Trust = False,
    json: o.Json = False,
) -> None:
    """Write a client's own model, really shrunk, for a device, with a model card.

    The file is checked against torch before anything is written.
    """
    from ..export import make

    one_is_given = client is not None
    if all == one_is_given:
        raise InputError(
            "whose model? Give --client K for one of the run's clients, "
            "or --all for every one of them."
        )
    arguments: Any = {
        "to": to,
        "int8": int8,
        "standardised": standardised,
        "align": align,
        "out": out,
        "data_dir": data_dir,
        "trust": trust,
    }
    if client is None:
        exports = list(make.export_all(run, **arguments))
    else:
        exports = [make.export_model(run, client=client, **arguments)]
    if json:
        entries = [exported.json() for exported in exports]
        # A list for --all even where the run has one client, so that scripts can rely on it.
        print(jsonlib.dumps(entries if all else entries[0], indent=1))
    else:
        _show(exports)


def _show(exports: list[Exported]) -> None:
    # Imported late, so that other commands and --json start without them.
    from ..report.tables import format_kilobytes
    from ..report.terminal import Column, name_columns, print_table, print_text

    columns = [
        *name_columns("client", "version"),
        Column("params", 1),
        Column("MACs", 2),
        Column("size\nkB"),
        Column("µs", 3),
        Column("time to\ndense", 4),
        Column("accuracy\n%"),
        Column("int8 % of\nweights / MACs", 5),
    ]
    lines = []
    for exported in exports:
        for row in exported.rows:
            lines.append(
                [
                    exported.name,
                    row.version,
                    f"{row.params:,}",
                    f"{row.macs:,}",
                    format_kilobytes(row.bytes),
                    f"{row.latency_us:,.0f}",
                    f"{row.latency:.2f}",
                    f"{100 * row.accuracy:.2f}",
                    row.shares,
                ]
            )
    print_table(columns, lines)
    for exported in exports:
        for note in exported.notes:
            print_text(f"client {exported.name}: {note}")
        files = [row.file for row in exported.rows if row.file]
        files.append(exported.card)
        print_text(
            f"{exported.folder}: {', '.join(files)}; within {exported.difference:.0e} of torch"
        )
