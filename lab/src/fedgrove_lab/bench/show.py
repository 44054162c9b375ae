"""The tables of ``fedgrove bench``, and the pages of its wire and device parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedgrove.report.charts import Chart, Marks, Series, draw_rows, draw_xy
from fedgrove.report.page import Page
from fedgrove.report.tables import format_bytes
from fedgrove.report.terminal import (
    Cell,
    Column,
    name_columns,
    number_columns,
    print_table,
    print_text,
)

from . import device, methods, scale, where, wire
from .engine import beside_others

PARTS = ("mask", "indices", "codebook", "values", "header")
"""The parts of a payload, from the beginning of a bar to its end."""

WIRE_COLUMNS = (
    *name_columns("model", "density", "kept as"),
    Column("bytes"),
    Column("share of\ndense"),
    Column("plain's\nshare"),
    Column("to\nentropy", 1),
    Column("with\nheader", 3),
    Column("encode\nMB/s", 4),
    Column("× plain", 2, label="encode × plain"),
    Column("decode\nMB/s", 4),
    Column("× plain", 2, label="decode × plain"),
    Column("tensor:\nencode", 5),
    Column("decode", 5, label="tensor: decode"),
)
DEVICE_COLUMNS = (
    *name_columns("net"),
    Column("removed"),
    Column("params", 4),
    Column("MACs", 5),
    Column("step\nms", 3),
    Column("step"),
    Column("\nmedian", 2, label="step median"),
    Column("\nmasked", 1, label="step masked"),
    Column("infer\nms", 3),
    Column("infer"),
    Column("\nmedian", 2, label="infer median"),
    Column("\nmasked", 1, label="infer masked"),
)
SCALE_COLUMNS = (
    *name_columns("method", "engine"),
    Column("clients"),
    Column("peak\nMiB"),
    Column("\ntimes", label="times of memory"),
    Column("round\ns", 1),
    Column("\ntimes", 1, label="times of the round"),
    Column("on cores\ns", 2),
    Column("\ntimes", 2, label="times on cores"),
    Column("joining\ns", 3),
)
METHOD_COLUMNS = (
    *name_columns("method", "clients do"),
    Column("n", 1),
    Column("new\nmasks", 1),
    Column("ms"),
    Column("least", 2),
    Column("most", 2),
    Column("times\nfedavg's"),
    Column("work,\ntimes"),
    Column("for the\nwork"),
)
PART_COLUMNS = (
    *name_columns("method", "clients do"),
    *(Column(part, 1 if part in ("checkpoint", "other") else 0) for part in where.PARTS),
    Column("device\nbusy"),
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
    """Print memory and seconds of a round, how many times those of the fewest clients, and whether
    each claim holds.
    """
    lines: list[list[Cell]] = []
    for row in rows:
        lines.append(list(_scale_line(row)))
    print_table(SCALE_COLUMNS, lines, file)
    _print_claims(scale.checks(rows), file)


def _scale_line(row: Mapping[str, Any]) -> list[str]:
    return [
        row["method"],
        row["engine"],
        f"{row['clients']:,}",
        f"{row['memory_mib']:.0f}",
        f"{row['times_memory']:.2f}",
        f"{row['seconds']:.2f}",
        f"{row['times_seconds']:.2f}",
        f"{row['cpu']:.2f}",
        f"{row['times_cpu']:.2f}",
        _number(row["joining_cpu"], ".2f"),
    ]


def print_methods(rows: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print milliseconds of each kind of exchange, beside FedAvg's round and by part, and whether
    each claim holds.
    """
    lines: list[list[Cell]] = []
    parts: list[list[Cell]] = []
    for row in rows:
        lines.append(list(_method_line(row)))
        # Nobody looks where only times are asked for.
        if row["parts"]:
            parts.append(list(_part_line(row)))
    print_table(METHOD_COLUMNS, lines, file)
    print_text(
        "n: exchanges measured, the first of each kind left out; new masks: in how many a mask was "
        "sent that had not been before; work: what clients compute, times fedavg's; in brackets: "
        "no round of its own, and so no part of the claim.",
        file,
    )
    if parts:
        print(file=file)
        print_text("what an exchange goes into, ms:", file)
        print_table(PART_COLUMNS, parts, file)
    print(file=file)
    _print_claims(methods.checks(rows), file)


def _method_line(row: Mapping[str, Any]) -> list[str]:
    return [
        *_exchange_of(row),
        str(row["exchanges"]),
        str(row["new_masks"]),
        f"{1e3 * row['median_s']:.0f}",
        f"{1e3 * row['min_s']:.0f}",
        f"{1e3 * row['max_s']:.0f}",
        f"{row['times']:.2f}",
        f"{row['work']:.2f}",
        f"{row['times_for_work']:.2f}",
    ]


def _part_line(row: Mapping[str, Any]) -> list[str]:
    cells = _exchange_of(row)
    for part in where.PARTS:
        cells.append(f"{1e3 * row['parts'][part]:.1f}")
    busy = row["device_s"]
    cells.append("-" if busy is None else f"{1e3 * busy:.1f}")
    return cells


def _exchange_of(row: Mapping[str, Any]) -> list[str]:
    return [row["method"], row["kind"] if row["counts"] else f"({row['kind']})"]


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
    print_table([*name_columns(*words), *number_columns(*headings)], lines, file)
    for scene in dict.fromkeys(row.get("scene") for row in rows):
        own = [row for row in rows if row.get("scene") == scene]
        for pair in beside_others(own):
            print_text(
                f"{scene}: {pair['ours']} is {pair['times']:.2f} times as fast as {pair['other']}, "
                "round by round",
                file,
            )


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
                format_bytes(row.bytes),
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
    _print_claims(report["checks"], file)


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


def _print_claims(claims: Mapping[str, Mapping[str, Any]], file: IO[str] | None) -> None:
    for name, claim in claims.items():
        print_text(_sentence(name, claim), file)


def _sentence(name: str, claim: Mapping[str, Any]) -> str:
    return (
        f"{_verdict(claim)}: {name} {claim['value']} "
        f"(bound {claim['bound']}; worst at {claim['at']})"
    )


def _verdict(claim: Mapping[str, Any]) -> str:
    return "holds" if claim["ok"] else "DOES NOT HOLD"


# ---- pages ---------------------------------------------------------------------------------------


def write_wire_page(rows: Sequence[wire.Row], report: Mapping[str, Any], path: Path) -> None:
    """Write a page, two figures per model: bytes beside entropy and the plain way, and speeds."""
    page = Page("fedgrove bench wire")
    page.paragraph(
        "Bars: bytes by part. Lines across them: the entropy, and the plain way (bitmap and "
        "zstandard). Speeds are times the plain way's; at least 0.5 is wanted to encode, 0.2 to "
        "decode.",
    )
    rows_by_model: dict[str, list[wire.Row]] = {}
    for row in rows:
        rows_by_model.setdefault(row.model, []).append(row)
    for model, own in rows_by_model.items():
        page.charts(_sizes(model, own), _speeds(model, own))
    page.notes([f"{name}: {about}" for name, about in report["weights"].items()])
    page.write(path)


def _sizes(model: str, rows: Sequence[wire.Row]) -> Chart:
    """A stacked bar of parts per row, with marks for the entropy and for the plain way."""
    marks = []
    for colour, part in enumerate(PARTS):
        # Of the dense model, at four bytes per float32.
        shares: list[float | None] = [row.parts[part] / (4 * row.params) for row in rows]
        marks.append(Marks(part, shares, colour))
    entropy: list[float | None] = [sum(row.bound.values()) / (4 * row.params) for row in rows]
    plain: list[float | None] = [row.plain_share for row in rows]
    marks.append(Marks("entropy", entropy, 11, kind="tick", lane=0))
    marks.append(Marks("plain", plain, 7, kind="tick", lane=0))
    title = f"{model}: share of dense float32"
    return draw_rows(title, _places(rows), marks, "share", stacked=True)


def _speeds(model: str, rows: Sequence[wire.Row]) -> Chart:
    encode: list[float | None] = [row.model_speed.encode for row in rows]
    decode: list[float | None] = [row.model_speed.decode for row in rows]
    marks = [Marks("encode", encode, 4), Marks("decode", decode, 2)]
    return draw_rows(f"{model}: speed, × plain", _places(rows), marks, "times the plain way's")


def _places(rows: Sequence[wire.Row]) -> list[str]:
    """What tells rows apart: density, and what is sent for a kept weight."""
    return [f"{row.density:g}, {row.kind}" for row in rows]


def write_device_page(rows: Sequence[device.Row], path: Path) -> None:
    """Write a page: times as ratios to the dense net's, against the share of channels removed."""
    rows_by_net: dict[str, list[device.Row]] = {}
    for row in rows:
        rows_by_net.setdefault(row.net, []).append(row)
    training = []
    inference = []
    for colour, (net, own) in enumerate(rows_by_net.items()):
        x = [100 * row.removed for row in own]
        masked = f"{net}, masked"
        training.append(Series(net, x, [row.train for row in own], colour))
        training.append(Series(masked, x, [row.train_masked for row in own], colour, dashed=True))
        inference.append(Series(net, x, [row.infer for row in own], colour))
        inference.append(Series(masked, x, [row.infer_masked for row in own], colour, dashed=True))
    page = Page("fedgrove bench device")
    x_title = "% of channels removed"
    y_title = "time to the dense net's"
    page.charts(
        draw_xy("training step", training, x_title, y_title, y_from_zero=True),
        draw_xy("inference", inference, x_title, y_title, y_from_zero=True),
    )
    page.write(path)


def write_scale_page(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a page: memory and seconds of a round as lines over the number of clients, a table."""
    rows_by_line: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_line.setdefault(f"{row['method']} on {row['engine']}", []).append(row)
    memory = []
    clock = []
    cores = []
    for colour, (line, own) in enumerate(rows_by_line.items()):
        x = [row["clients"] for row in own]
        memory.append(Series(line, x, [row["memory_mib"] for row in own], colour))
        clock.append(Series(line, x, [row["seconds"] for row in own], colour))
        cores.append(Series(line, x, [row["cpu"] for row in own], colour))
    page = Page("fedgrove bench scale")
    page.paragraph(
        "Registered clients; the same number of them takes part in every round. Times are those of "
        "a round after the first.",
        small="On cores: the seconds for which the processes had a core, whatever else ran.",
    )
    x_title = "registered clients"
    page.charts(
        draw_xy("peak memory", memory, x_title, "MiB", log_x=True, y_from_zero=True),
        draw_xy("a round, by the clock", clock, x_title, "s", log_x=True, y_from_zero=True),
        draw_xy("a round, on cores", cores, x_title, "s", log_x=True, y_from_zero=True),
    )
    page.table([column.full_label for column in SCALE_COLUMNS], [_scale_line(row) for row in rows])
    page.notes([_sentence(name, claim) for name, claim in scale.checks(rows).items()])
    page.write(path)


def write_methods_page(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a page: a bar for each kind of exchange, divided by what its time went into."""
    places = []
    for row in rows:
        places.append(f"{row['method']}: {row['kind']}")
    page = Page("fedgrove bench methods")
    page.paragraph(
        "Milliseconds of an exchange. Engine: training and what goes with it, waiting for the "
        "device included; edits: what clients do one by one; counting: encoding and counting "
        "bytes; memory: files of what clients remember; server: planning, the gate and the fold.",
        small="Bars are of runs that were looked at while they ran, the table's ms of others that "
        "were only timed.",
    )
    marks = []
    for colour, part in enumerate(where.PARTS):
        shares: list[float | None] = []
        for row in rows:
            seconds = row["parts"].get(part)
            shares.append(None if seconds is None else 1e3 * seconds)
        marks.append(Marks(part, shares, colour))
    if any(row["parts"] for row in rows):
        page.charts(draw_rows("an exchange, by part", places, marks, "ms", stacked=True))
    page.table(
        [column.full_label for column in METHOD_COLUMNS], [_method_line(row) for row in rows]
    )
    parts = [_part_line(row) for row in rows if row["parts"]]
    if parts:
        page.table([column.full_label for column in PART_COLUMNS], parts)
    page.notes([_sentence(name, claim) for name, claim in methods.checks(rows).items()])
    page.write(path)
