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
    int | None,
    typer.Option("--client", help="Whose model.", metavar="K", parser=o.whole, show_default=False),
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
COLUMNS = (
    "client",
    "version",
    "params",
    "MACs",
    "size",
    "µs",
    "to dense",
    "accuracy\n%",
    "int8 % of\nweights / MACs",
)


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
    json: o.Json = False,
) -> None:
    """Write a client's own model, really shrunk, for a device; checked against torch, with a model card beside it."""
    from ..export import make

    if all == (client is not None):
        raise InputError(
            "whose model? Give --client K for one of the run's clients, or --all for every one of them."
        )
    given: Any = {
        "to": to,
        "int8": int8,
        "standardised": standardised,
        "align": align,
        "out": out,
        "data_dir": data_dir,
    }
    made = (
        [*make.export_all(run, **given)]
        if client is None
        else [make.export_model(run, client=client, **given)]
    )
    if json:
        shown = [each.json() for each in made]
        print(jsonlib.dumps(shown if all else shown[0], indent=1))
    else:
        _show(made)


def _show(made: list[Exported]) -> None:
    from rich.table import Table

    from ..report.tables import console, mib

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i > 1 else "left", no_wrap=True)
    for each in made:
        for row in each.rows:
            sizes = (f"{row.params:,}", f"{row.macs:,}", mib(row.bytes))
            times = (f"{row.latency_us:,.0f}", f"{row.latency:.2f}")
            table.add_row(
                str(each.client),
                row.version,
                *sizes,
                *times,
                f"{100 * row.accuracy:.2f}",
                row.shares,
            )
    out = console()
    out.print(table)
    for each in made:
        for note in each.notes:
            out.print(f"client {each.client}: {note}")
        files = [row.file for row in each.rows if row.file]
        out.print(
            f"{each.folder}: {', '.join([*files, each.card])}; within {each.difference:.0e} of torch"
        )
