"""The tables of ``fedgrove bench``, and the pages of its wire and device parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..report.fit import Cell, Column, figures, names, print_table, print_text
from ..report.tables import mib
from . import device, wire

PARTS = {
    "mask": "#4c78a8",
    "indices": "#72b7b2",
    "codebook": "#eeca3b",
    "values": "#f58518",
    "header": "#b279a2",
}
"""The colours of the parts of a payload, from the bottom of a bar to its top."""
NET_COLOURS = ("#4c78a8", "#f58518", "#54a24b")
"""The colours of nets on the page of the device, in the order they were measured."""

WIRE_COLUMNS = (
    *names("model", "density", "kept as"),
    Column("bytes"),
    Column("share of\ndense"),
    Column("plain's\nshare"),
    Column("to\nentropy", 1),
    Column("with\nheader", 3),
    Column("encode\nMB/s", 4),
    Column("× plain", 2, called="encode × plain"),
    Column("decode\nMB/s", 4),
    Column("× plain", 2, called="decode × plain"),
    Column("tensor:\nencode", 5),
    Column("decode", 5, called="tensor: decode"),
)
DEVICE_COLUMNS = (
    *names("net"),
    Column("removed"),
    Column("params", 4),
    Column("MACs", 5),
    Column("step\nms", 3),
    Column("step"),
    Column("\nmedian", 2, called="step median"),
    Column("\nmasked", 1, called="step masked"),
    Column("infer\nms", 3),
    Column("infer"),
    Column("\nmedian", 2, called="infer median"),
    Column("\nmasked", 1, called="infer masked"),
)
SCALE_COLUMNS = (
    *names("method", "engine"),
    Column("clients"),
    Column("peak\nMiB"),
    Column("\ntimes", called="times of memory"),
    Column("round\ns", 1),
    Column("\ntimes", 1, called="times of the round"),
    Column("on cores\ns", 2),
    Column("\ntimes", 2, called="times on cores"),
    Column("joining\ns", 3),
)
TURNS_COLUMNS = {
    "median_s": ("median s", ".4f"),
    "min_s": ("min", ".4f"),
    "max_s": ("max", ".4f"),
    "times_plain": ("times plain", ".2f"),
}
"""Of the engines' table: key of a row -> heading and format."""
ALONE_COLUMNS = {
    "start_s": ("start s", ".1f"),
    "from_start_s": ("from start s", ".1f"),
    "times_plain_from_start": ("times plain", ".2f"),
    "memory_mib": ("peak MiB", ".0f"),
    "device_mib": ("on the device", ".0f"),
}
"""The same, for what only processes of their own show."""


# ---- tables --------------------------------------------------------------------------------------


def print_scale(rows: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print memory and seconds of a round, and how many times those of the fewest clients."""
    lines: list[list[Cell]] = []
    for row in rows:
        joining = "-" if row["joining_cpu"] is None else f"{row['joining_cpu']:.2f}"
        lines.append(
            [
                row["method"],
                row["engine"],
                f"{row['clients']:,}",
                f"{row['memory_mib']:.0f}",
                f"{row['times_memory']:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['times_seconds']:.2f}",
                f"{row['cpu']:.2f}",
                f"{row['times_cpu']:.2f}",
                joining,
            ]
        )
    print_table(SCALE_COLUMNS, lines, file)


def print_times(rows: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print seconds per round of each variant, and its speed in times the plain loop's."""
    turns = []
    alone = []
    for row in rows:
        # Rows of lockstep do not say how; they were measured in one process too.
        if row.get("how") == "alone":
            alone.append(row)
        else:
            turns.append(row)
    if turns:
        _print_variants(turns, TURNS_COLUMNS, file)
    if alone:
        rounds = alone[0]["rounds"]
        print(file=file)
        print_text(f"each in a process of its own, {rounds} rounds from its start:", file)
        _print_variants(alone, TURNS_COLUMNS | ALONE_COLUMNS, file)


def _print_variants(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], file: IO[str] | None
) -> None:
    several_scenes = len({row.get("scene") for row in rows}) > 1
    words = ["scene", "variant"] if several_scenes else ["variant"]
    formats = {}
    headings = []
    for key, (heading, number_format) in columns.items():
        # A column that nothing was measured for, such as the device's memory on a CPU, is left out.
        if any(row[key] is not None for row in rows):
            formats[key] = number_format
            headings.append(heading)
    lines: list[list[Cell]] = []
    for row in rows:
        cells = [row[word] for word in words]
        for key, number_format in formats.items():
            cells.append(_number(row[key], number_format))
        lines.append(cells)
    print_table([*names(*words), *figures(*headings)], lines, file)


def print_wire(
    rows: Sequence[wire.Row], report: Mapping[str, Any], file: IO[str] | None = None
) -> None:
    """Print what the weights are, a line per row, and whether each claim holds."""
    for name, about in report["weights"].items():
        print_text(f"{name}: {about}", file)
    lines: list[list[Cell]] = []
    for row in rows:
        lines.append(
            [
                row.model,
                f"{row.density:g}",
                row.kind,
                mib(row.bytes),
                f"{row.share:.4f}",
                f"{row.plain_share:.4f}",
                _number(row.ratio, ".4f"),
                _number(row.ratio_header, ".4f"),
                f"{row.model_speed.encode_mb:.0f}",
                f"{row.model_speed.encode:.2f}",
                f"{row.model_speed.decode_mb:.0f}",
                f"{row.model_speed.decode:.2f}",
                f"{row.tensor_speed.encode:.2f}",
                f"{row.tensor_speed.decode:.2f}",
            ]
        )
    print_table(WIRE_COLUMNS, lines, file)
    for name, claim in report["checks"].items():
        print_text(
            f"{_verdict(claim)}: {name} {claim['value']} "
            f"(bound {claim['bound']}; worst at {claim['at']})",
            file,
        )


def print_device(rows: Sequence[device.Row], file: IO[str] | None = None) -> None:
    """Print a line per row, times as ratios to the dense net, and whether each claim holds."""
    lines: list[list[Cell]] = []
    for row in rows:
        lines.append(
            [
                row.net,
                f"{row.removed:.0%}",
                f"{row.params:,}",
                f"{row.macs:,}",
                f"{1e3 * row.train_s:.1f}",
                f"{row.train:.2f}",
                f"{row.train_median:.2f}",
                f"{row.train_masked:.2f}",
                f"{1e3 * row.infer_s:.1f}",
                f"{row.infer:.2f}",
                f"{row.infer_median:.2f}",
                f"{row.infer_masked:.2f}",
            ]
        )
    print_table(DEVICE_COLUMNS, lines, file)
    print_text(
        "step, infer: the shortest time with the channels gone, to the dense net's; "
        "median: turn by turn, which a busy machine raises; masked: with the channels zeroed "
        "instead.",
        file,
    )
    for name, claim in device.checks(rows).items():
        print_text(
            f"{_verdict(claim)}: {name} {claim['value']} "
            f"(bound {claim['bound']}, median {claim['median']})",
            file,
        )


def _number(value: float | None, number_format: str) -> str:
    return "-" if value is None else format(value, number_format)


def _verdict(claim: Mapping[str, Any]) -> str:
    return "holds" if claim["ok"] else "DOES NOT HOLD"


# ---- pages ---------------------------------------------------------------------------------------
#
# A page needs nothing but itself: plotly's script is in it. plotly is an extra, so it is imported
# only when a page is written.


def write_wire_page(rows: Sequence[wire.Row], report: Mapping[str, Any], path: Path) -> None:
    """Write a page, a column per model: bytes by part beside entropy and the plain way, speeds."""
    from plotly import subplots

    rows_of: dict[str, list[wire.Row]] = {}
    for row in rows:
        rows_of.setdefault(row.model, []).append(row)
    # plotly fills a grid row by row.
    titles = [f"{model}: share of dense float32" for model in rows_of]
    titles += [f"{model}: speed, × plain" for model in rows_of]
    figure = subplots.make_subplots(
        rows=2, cols=len(rows_of), subplot_titles=titles, vertical_spacing=0.22
    )
    for column, model_rows in enumerate(rows_of.values(), start=1):
        # The panels share one legend, which names every kind once.
        is_first = column == 1
        for trace in _size_traces(model_rows, showlegend=is_first):
            figure.add_trace(trace, row=1, col=column)
        for trace in _speed_traces(model_rows, showlegend=is_first):
            figure.add_trace(trace, row=2, col=column)
    for height, claim in ((0.5, "encode, at least"), (0.2, "decode, at least")):
        figure.add_hline(
            y=height, line_dash="dot", line_color="#888", annotation_text=claim, row=2, col="all"
        )
    weights = []
    for name, about in report["weights"].items():
        weights.append(f"{name}: {about}")
    subtitle = "<br>".join(weights)
    figure.update_layout(
        title={"text": f"fedgrove bench wire<br><sup>{subtitle}</sup>", "y": 0.97},
        barmode="stack",
        template="plotly_white",
        height=900,
        margin={"t": 130},
        legend={"traceorder": "normal"},
    )
    figure.update_xaxes(type="multicategory")
    figure.update_yaxes(rangemode="tozero")
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))


def _size_traces(rows: Sequence[wire.Row], showlegend: bool) -> list[Any]:
    """A stacked bar of parts per row, with marks for the entropy and for the plain way."""
    from plotly import graph_objects

    traces = []
    for part, colour in PARTS.items():
        shares = []
        for row in rows:
            # Of the dense model, at four bytes per float32.
            shares.append(row.parts[part] / (4 * row.params))
        traces.append(
            graph_objects.Bar(
                x=_places(rows),
                y=shares,
                name=part,
                marker_color=colour,
                legendgroup=part,
                showlegend=showlegend,
            )
        )
    entropy = []
    plain = []
    for row in rows:
        entropy.append(sum(row.bound.values()) / (4 * row.params))
        plain.append(row.plain_share)
    traces.append(_marks(rows, entropy, "entropy", "line-ew-open", "black", showlegend))
    traces.append(_marks(rows, plain, "plain", "x-thin-open", "#d62728", showlegend))
    return traces


def _speed_traces(rows: Sequence[wire.Row], showlegend: bool) -> list[Any]:
    encode = []
    decode = []
    for row in rows:
        encode.append(row.model_speed.encode)
        decode.append(row.model_speed.decode)
    return [
        _marks(rows, encode, "encode", "triangle-up", "#e45756", showlegend),
        _marks(rows, decode, "decode", "triangle-down", "#54a24b", showlegend),
    ]


def _marks(
    rows: Sequence[wire.Row],
    y: list[float],
    name: str,
    symbol: str,
    colour: str,
    showlegend: bool,
) -> Any:
    from plotly import graph_objects

    marker = {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}}
    return graph_objects.Scatter(
        x=_places(rows),
        y=y,
        name=name,
        mode="markers",
        marker=marker,
        legendgroup=name,
        showlegend=showlegend,
    )


def _places(rows: Sequence[wire.Row]) -> list[list[str]]:
    """Places on an axis of two levels: density, and under it what is sent for a kept weight."""
    densities = []
    kinds = []
    for row in rows:
        densities.append(f"density {row.density:g}")
        kinds.append(row.kind)
    return [densities, kinds]


def write_device_page(rows: Sequence[device.Row], path: Path) -> None:
    """Write a page: times as ratios to the dense net's, against the share of channels removed."""
    from plotly import graph_objects, subplots

    titles = ("training step", "inference")
    figure = subplots.make_subplots(rows=1, cols=2, subplot_titles=titles, shared_yaxes=True)
    rows_of: dict[str, list[device.Row]] = {}
    for row in rows:
        rows_of.setdefault(row.net, []).append(row)
    for colour, (net, net_rows) in zip(NET_COLOURS, rows_of.items(), strict=False):
        removed = []
        train = []
        train_masked = []
        infer = []
        infer_masked = []
        for row in net_rows:
            removed.append(row.removed)
            train.append(row.train)
            train_masked.append(row.train_masked)
            infer.append(row.infer)
            infer_masked.append(row.infer_masked)
        lines = (
            (1, net, train, "solid"),
            (1, f"{net}, masked", train_masked, "dot"),
            (2, net, infer, "solid"),
            (2, f"{net}, masked", infer_masked, "dot"),
        )
        for column, name, ratios, dash in lines:
            line = graph_objects.Scatter(
                x=removed,
                y=ratios,
                name=name,
                line={"color": colour, "dash": dash},
                # Both panels have the same lines: one legend is enough.
                showlegend=column == 1,
            )
            figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(title="share of channels removed", tickformat=".0%")
    figure.update_yaxes(title="time to the dense net's", rangemode="tozero", col=1)
    figure.update_layout(title="fedgrove bench device", template="plotly_white", height=480)
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))
