"""``fedgrove bench device``: what removed channels save on a device."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options as o

Nets = Annotated[
    str, typer.Option("--net", help="har-cnn, bn-cnn4, resnet18, or all of these.", metavar="NAME")
]
Repeats = Annotated[int, typer.Option("--repeats", help="Turns that are timed.", metavar="N")]
Plot = Annotated[
    str | None, typer.Option("--plot", help="Write a page of figures too.", metavar="FILE.html")
]


def device(
    net: Nets = "all", repeats: Repeats = 11, plot: Plot = None, json: o.Json = False
) -> None:
    """Training step and inference with 0, 30, 50 and 70 % of channels removed, to the dense net's; some minutes."""
    from ..bench import device as bench
    from ..bench import device_show, show

    if plot:
        show.need_plotly(Path(plot))
    names = list(bench.SCENES) if net == "all" else [net]
    rows = [row for name in names for row in bench.measure(name, repeats=repeats)]
    if json:
        print(
            jsonlib.dumps(
                {"rows": [asdict(row) for row in rows], "checks": bench.claims(rows)}, indent=1
            )
        )
    else:
        device_show.print_rows(rows)
    if plot:
        device_show.write_page(rows, Path(plot))
