"""The table and the page of ``fedgrove bench device``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from ..report.tables import console
from .device import Row, claims

COLUMNS = (
    "removed",
    "params",
    "MACs",
    "step ms",
    "step",
    "median",
    "masked",
    "infer ms",
    "infer",
    "median",
    "masked",
)


def print_rows(rows: Sequence[Row], file: IO[str] | None = None) -> None:
    """Print a line per row, times as ratios to the dense net, and whether each claim holds."""
    out = console(file)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    table.add_column("net", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sizes = (f"{row.removed:.0%}", f"{row.params:,}", f"{row.macs:,}")
        train = (
            f"{1e3 * row.train_s:.1f}",
            f"{row.train:.2f}",
            f"{row.train_median:.2f}",
            f"{row.train_masked:.2f}",
        )
        infer = (
            f"{1e3 * row.infer_s:.1f}",
            f"{row.infer:.2f}",
            f"{row.infer_median:.2f}",
            f"{row.infer_masked:.2f}",
        )
        table.add_row(row.net, *sizes, *train, *infer)
    out.print(table)
    out.print(
        "step, infer: the shortest time with the channels gone, to the dense net's; median: turn by turn, which a"
    )
    out.print("busy machine raises; masked: with the channels zeroed instead.")
    for name, claim in claims(rows).items():
        verdict = "holds" if claim["ok"] else "DOES NOT HOLD"
        out.print(
            f"{verdict}: {name} {claim['value']} (bound {claim['bound']}, median {claim['median']})"
        )


def write_page(rows: Sequence[Row], path: Path) -> None:
    """A page that needs nothing but itself: ratios to the dense net against the share of channels removed."""
    subplots: Any = importlib.import_module("plotly.subplots")
    draw: Any = importlib.import_module("plotly.graph_objects")
    titles = ("training step", "inference")
    figure = subplots.make_subplots(rows=1, cols=2, subplot_titles=titles, shared_yaxes=True)
    for colour, name in zip(
        ("#4c78a8", "#f58518", "#54a24b"), dict.fromkeys(row.net for row in rows), strict=False
    ):
        some = [row for row in rows if row.net == name]
        for column, key in enumerate(("train", "infer"), start=1):
            for suffix, dash in (("", "solid"), ("_masked", "dot")):
                line = draw.Scatter(
                    x=[row.removed for row in some],
                    y=[getattr(row, key + suffix) for row in some],
                    name=name + (", masked" if suffix else ""),
                    line={"color": colour, "dash": dash},
                    showlegend=column == 1,
                )
                figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(title="share of channels removed", tickformat=".0%")
    figure.update_yaxes(title="time to the dense net's", rangemode="tozero", col=1)
    figure.update_layout(title="fedgrove bench device", template="plotly_white", height=480)
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))
