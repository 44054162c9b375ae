"""Prints the tables of ``fedgrove bench`` and writes its HTML pages.

A table is a list of columns, each with the text that it shows of a row; terminal and page share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedgrove.report.charts import Chart, Marks, Series, draw_rows, draw_xy
from fedgrove.report.page import Page
from fedgrove.report.tables import format_bytes
from fedgrove.report.terminal import Cell, Column, name_columns, print_table, print_text

from . import round_profile
from .engine import compare_simulators

Row = Mapping[str, Any]
Rows = Sequence[Row]
Claims = Mapping[str, Mapping[str, Any]]


class TableColumn(NamedTuple):
    """A column of a table, and the text that it has for a row."""

    column: Column
    show: Callable[[Row], str]


def _name(head: str, key: str = "") -> TableColumn:
    """A column of names."""
    (column,) = name_columns(head)
    return TableColumn(column, lambda row: str(row[key or head]))


def _number(
    head: str, key: str, spec: str, rank: int = 0, label: str = "", scale: float = 1
) -> TableColumn:
    """A column of numbers; a dash where nothing was measured. Columns of high rank go first."""

    def show(row: Row) -> str:
        value = _look_up(row, key)
        if value is None:
            return "-"
        # An int stays one, so that thousands can have commas.
        return format(value if scale == 1 else scale * value, spec)

    return TableColumn(Column(head, rank, label=label), show)


def _look_up(row: Row, key: str) -> Any:
    """The value at ``key``, which may lead into a table in the row: ``parts.edits``."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name)
    return value


WIRE_COLUMNS = (
    _name("model"),
    TableColumn(name_columns("density")[0], lambda row: f"{row['density']:g}"),
    _name("kept as", "kind"),
    TableColumn(Column("bytes"), lambda row: format_bytes(row["bytes"])),
    _number("share of\ndense", "share", ".4f"),
    _number("plain's\nshare", "plain_share", ".4f"),
    _number("to\nentropy", "ratio", ".4f", 1),
    _number("with\nheader", "ratio_header", ".4f", 3),
    _number("encode\nMB/s", "model_speed.encode_mb", ".0f", 4),
    _number("× plain", "model_speed.encode", ".2f", 2, "encode × plain"),
    _number("decode\nMB/s", "model_speed.decode_mb", ".0f", 4),
    _number("× plain", "model_speed.decode", ".2f", 2, "decode × plain"),
    _number("tensor:\nencode", "tensor_speed.encode", ".2f", 5),
    _number("decode", "tensor_speed.decode", ".2f", 5, "tensor: decode"),
)
DEVICE_COLUMNS = (
    _name("net"),
    _number("removed", "removed", ".0%"),
    _number("params", "params", ",", 4),
    _number("MACs", "macs", ",", 5),
    _number("step\nms", "train_s", ".1f", 3, scale=1e3),
    _number("step", "train", ".2f"),
    _number("\nmedian", "train_median", ".2f", 2, "step median"),
    _number("\nmasked", "train_masked", ".2f", 1, "step masked"),
    _number("infer\nms", "infer_s", ".1f", 3, scale=1e3),
    _number("infer", "infer", ".2f"),
    _number("\nmedian", "infer_median", ".2f", 2, "infer median"),
    _number("\nmasked", "infer_masked", ".2f", 1, "infer masked"),
)
SCALE_COLUMNS = (
    _name("method"),
    _name("engine"),
    _number("clients", "clients", ","),
    _number("peak\nMiB", "memory_mib", ".0f"),
    _number("\ntimes", "times_memory", ".2f", 0, "times of memory"),
    _number("round\ns", "seconds", ".2f", 1),
    _number("\ntimes", "times_seconds", ".2f", 1, "times of the round"),
    _number("on cores\ns", "cpu", ".2f", 2),
    _number("\ntimes", "times_cpu", ".2f", 2, "times on cores"),
    _number("joining\ns", "joining_cpu", ".2f", 3),
)


def _exchange(row: Row) -> str:
    """What clients do, in brackets where it is not a round."""
    kind: str = row["kind"]
    return kind if row["counts"] else f"({kind})"


_CLIENTS_DO = TableColumn(name_columns("clients do")[0], _exchange)
METHOD_COLUMNS = (
    _name("method"),
    _CLIENTS_DO,
    _number("n", "exchanges", "d", 1),
    _number("new\nmasks", "new_masks", "d", 1),
    _number("ms", "median_s", ".0f", scale=1e3),
    _number("least", "min_s", ".0f", 2, scale=1e3),
    _number("most", "max_s", ".0f", 2, scale=1e3),
    _number("times\nfedavg's", "times", ".2f"),
    _number("work,\ntimes", "work", ".2f"),
    _number("for the\nwork", "times_for_work", ".2f"),
)
_LESS_IMPORTANT = ("checkpoint", "other")
PART_COLUMNS = (
    _name("method"),
    _CLIENTS_DO,
    *(
        _number(part, f"parts.{part}", ".1f", int(part in _LESS_IMPORTANT), scale=1e3)
        for part in round_profile.PARTS
    ),
    _number("device\nbusy", "device_s", ".1f", scale=1e3),
)
TURNS_COLUMNS = (
    _number("median s", "median_s", ".4f", 0),
    _number("min", "min_s", ".4f", 1),
    _number("max", "max_s", ".4f", 2),
    _number("times plain", "times_plain", ".2f", 3),
    _number("examples\na second", "examples_s", ",.0f", 4),
    _number("% of\ncentralised", "of_centralised", ".0f", 0, scale=100),
)
ALONE_COLUMNS = (
    *TURNS_COLUMNS[:4],
    _number("start s", "start_s", ".1f", 4),
    _number("from start s", "from_start_s", ".1f", 5),
    _number("times plain", "times_plain_from_start", ".2f", 6),
    _number("peak MiB", "memory_mib", ".0f", 7),
    _number("on the device", "device_mib", ".0f", 8),
)


def _print_rows(columns: Sequence[TableColumn], rows: Rows, file: IO[str] | None) -> None:
    lines: list[list[Cell]] = []
    for row in rows:
        lines.append([each.show(row) for each in columns])
    print_table([each.column for each in columns], lines, file)


def _add_table(page: Page, columns: Sequence[TableColumn], rows: Rows) -> None:
    lines = []
    for row in rows:
        lines.append([each.show(row) for each in columns])
    page.table([each.column.full_label for each in columns], lines)


# ---- claims --------------------------------------------------------------------------------------


def _print_claims(claims: Claims, file: IO[str] | None) -> None:
    for name, claim in claims.items():
        print_text(_sentence(name, claim), file)


def _sentence(name: str, claim: Mapping[str, Any]) -> str:
    verdict = "holds" if claim["ok"] else "DOES NOT HOLD"
    detail = f"worst at {claim['at']}" if "at" in claim else f"median {claim['median']}"
    return f"{verdict}: {name} {claim['value']} (bound {claim['bound']}; {detail})"


# ---- bench engine and bench lockstep -------------------------------------------------------------


def print_times(content: Row, file: IO[str] | None = None) -> None:
    """Print seconds per round of each variant, and its speed in times the plain loop's."""
    turns = []
    alone = []
    for row in content["rows"]:
        # Rows of lockstep do not name how; they were measured in one process too.
        if row.get("how") == "alone":
            alone.append(row)
        else:
            turns.append(row)
    if turns:
        _print_variants(turns, TURNS_COLUMNS, file)
    if alone:
        rounds = alone[0]["rounds"]
        print(file=file)
        print_text(f"each in its own process, {rounds} rounds from its start:", file)
        _print_variants(alone, ALONE_COLUMNS, file)


def _print_variants(rows: Rows, columns: Sequence[TableColumn], file: IO[str] | None) -> None:
    scenes = list(dict.fromkeys(row.get("scene") for row in rows))
    names = [_name("variant")]
    if len(scenes) > 1:
        names.insert(0, _name("scene"))
    # A column that nothing was measured for, such as the device's memory on a CPU, is left out.
    measured = [each for each in columns if any(each.show(row) != "-" for row in rows)]
    _print_rows([*names, *measured], rows, file)
    for scene in scenes:
        own = [row for row in rows if row.get("scene") == scene]
        for pair in compare_simulators(own):
            print_text(
                f"{scene}: {pair['ours']} is {pair['times']:.2f} times as fast as {pair['other']}, "
                "round by round",
                file,
            )


class SpeedBars(NamedTuple):
    """A set of bars of speed: which rows it takes, and which of their keys."""

    name: str
    how: str
    median: str = "median_s"
    least: str = "min_s"
    most: str = "max_s"
    times: str = "times_plain"


SPEEDS = (
    SpeedBars("in turns, in one process", "turns"),
    SpeedBars("steady, in its own process", "alone"),
    SpeedBars(
        "from process start",
        "alone",
        "from_start_s",
        "from_start_min_s",
        "from_start_max_s",
        "times_plain_from_start",
    ),
)
"""From the top of a group of bars to its bottom."""
MEMORY = {"memory_mib": "memory", "device_mib": "on the device"}
"""The name of the bars of memory, by the key of a row."""


def write_times_page(content: Row, path: Path) -> None:
    """Write a page with a line of charts per scene: speeds and memory."""
    rows = content["rows"]
    page = Page("fedgrove bench engine")
    about = (
        "Bars are medians, whiskers the fastest and the slowest of all repeats. "
        "The dotted line is the plain loop."
    )
    from_start = ""
    alone = [row for row in rows if row["how"] == "alone"]
    if alone:
        from_start = (
            f"From process start: imports, start-up and {alone[0]['rounds']} rounds. "
            "Memory of all processes together."
        )
    page.paragraph(about, small=from_start)
    charts = []
    for scene, own in _group(rows, "scene").items():
        charts.append(_draw_speeds(scene, own))
        if any(row.get("memory_mib") or row.get("device_mib") for row in own):
            charts.append(_draw_memory(scene, own))
    page.charts(*charts)
    page.write(path)


def _group(rows: Rows, key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def find_whiskers(row: Row, bars: SpeedBars) -> tuple[float, float]:
    """Return the speeds of the slowest and of the fastest repeat, in times the plain loop.

    >>> row = {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "times_plain": 3.0}
    >>> find_whiskers(row, SPEEDS[0])
    (1.5, 6.0)
    """
    # A speed is the inverse of a time: the least seconds end the whisker to the right.
    slowest = row[bars.times] * row[bars.median] / row[bars.most]
    fastest = row[bars.times] * row[bars.median] / row[bars.least]
    return slowest, fastest


def _draw_speeds(scene: str, rows: Rows) -> Chart:
    """The bars of times the plain loop, a set for each way of measuring."""
    variants = list(_group(rows, "variant"))
    marks = []
    for colour, bars in enumerate(SPEEDS):
        measured = {row["variant"]: row for row in rows if row["how"] == bars.how}
        if measured:
            marks.append(_speed_marks(bars, [measured.get(each) for each in variants], colour))
    title = f"{scene}: times as fast as the plain loop"
    return draw_rows(title, variants, marks, "times", level=1.0)


def _speed_marks(bars: SpeedBars, rows: Sequence[Row | None], colour: int) -> Marks:
    values: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    texts = []
    tips = []
    for row in rows:
        if row is None:
            values.append(None)
            low.append(None)
            high.append(None)
            texts.append("")
            tips.append("")
            continue
        slowest, fastest = find_whiskers(row, bars)
        values.append(row[bars.times])
        low.append(slowest)
        high.append(fastest)
        texts.append(f"{row[bars.times]:.2f}×")
        tips.append(
            f"{row['variant']}, {bars.name}: {row[bars.times]:.2f}×, median "
            f"{row[bars.median]:.3g} s, {row[bars.least]:.3g} to {row[bars.most]:.3g}"
        )
    return Marks(bars.name, values, colour, low=low, high=high, texts=texts, tips=tips)


def _draw_memory(scene: str, rows: Rows) -> Chart:
    """The bars of peak memory, in MiB."""
    variants = list(_group(rows, "variant"))
    marks = []
    for colour, (key, name) in enumerate(MEMORY.items(), start=3):
        # None where it was not measured.
        amounts = {row["variant"]: row[key] for row in rows if row.get(key)}
        if not amounts:
            continue
        values = [amounts.get(variant) for variant in variants]
        texts = ["" if amount is None else f"{amount:.0f}" for amount in values]
        marks.append(Marks(name, values, colour, texts=texts))
    return draw_rows(f"{scene}: peak MiB", variants, marks, "MiB")


# ---- bench scale ---------------------------------------------------------------------------------


def print_scale(content: Row, file: IO[str] | None = None) -> None:
    """Print memory and seconds of a round by number of clients, and whether each claim holds."""
    _print_rows(SCALE_COLUMNS, content["rows"], file)
    _print_claims(content["checks"], file)


def write_scale_page(content: Row, path: Path) -> None:
    """Write a page: memory and seconds of a round over the number of clients, and a table."""
    named = []
    for row in content["rows"]:
        named.append({**row, "line": f"{row['method']} on {row['engine']}"})
    charts = {
        "memory_mib": ("peak memory", "MiB"),
        "seconds": ("a round, by the clock", "s"),
        "cpu": ("a round, on cores", "s"),
    }
    page = Page("fedgrove bench scale")
    page.paragraph(
        "Registered clients; an equal number of them takes part in every round. Times are those of "
        "a round after the first.",
        small="On cores: the seconds for which the processes had a core, whatever else ran.",
    )
    drawn = []
    for key, (title, unit) in charts.items():
        lines = []
        for colour, (line, own) in enumerate(_group(named, "line").items()):
            x = [row["clients"] for row in own]
            lines.append(Series(line, x, [row[key] for row in own], colour))
        drawn.append(
            draw_xy(title, lines, "registered clients", unit, log_x=True, y_from_zero=True)
        )
    page.charts(*drawn)
    _add_table(page, SCALE_COLUMNS, content["rows"])
    page.notes([_sentence(name, claim) for name, claim in content["checks"].items()])
    page.write(path)


# ---- bench methods -------------------------------------------------------------------------------


def print_methods(content: Row, file: IO[str] | None = None) -> None:
    """Print milliseconds of each kind of exchange compared with FedAvg's round, and by part."""
    rows = content["rows"]
    _print_rows(METHOD_COLUMNS, rows, file)
    print_text(
        "n: exchanges measured, the first of each kind left out; new masks: in how many a mask was "
        "sent that had not been before; work: what clients compute, times fedavg's; in brackets: "
        "not a round, and so no part of the claim.",
        file,
    )
    # Nothing is profiled where only times are requested.
    profiled = [row for row in rows if row["parts"]]
    if profiled:
        print(file=file)
        print_text("what an exchange goes into, ms:", file)
        _print_rows(PART_COLUMNS, profiled, file)
    print(file=file)
    _print_claims(content["checks"], file)


def write_methods_page(content: Row, path: Path) -> None:
    """Write a page: a bar for each kind of exchange, divided by what its time went into."""
    rows = content["rows"]
    page = Page("fedgrove bench methods")
    page.paragraph(
        "Milliseconds of an exchange. Engine: training and what goes with it, waiting for the "
        "device included; edits: what clients do one by one; counting: encoding and counting "
        "bytes; memory: files of what clients remember; server: planning, the gate and the fold.",
        small="Bars are of runs that were profiled, the table's ms of others that were only timed.",
    )
    marks = []
    for colour, part in enumerate(round_profile.PARTS):
        shares: list[float | None] = []
        for row in rows:
            seconds = row["parts"].get(part)
            shares.append(None if seconds is None else 1e3 * seconds)
        marks.append(Marks(part, shares, colour))
    profiled = [row for row in rows if row["parts"]]
    if profiled:
        labels = [f"{row['method']}: {row['kind']}" for row in rows]
        page.charts(draw_rows("an exchange, by part", labels, marks, "ms", stacked=True))
    _add_table(page, METHOD_COLUMNS, rows)
    if profiled:
        _add_table(page, PART_COLUMNS, profiled)
    page.notes([_sentence(name, claim) for name, claim in content["checks"].items()])
    page.write(path)


# ---- bench wire ----------------------------------------------------------------------------------

PAYLOAD = ("mask", "indices", "codebook", "values", "header")
"""The parts of a payload, from the beginning of a bar to its end."""


def print_wire(content: Row, file: IO[str] | None = None) -> None:
    """Print what the weights are, a line per row, and whether each claim holds."""
    for name, about in content["weights"].items():
        print_text(f"{name}: {about}", file)
    _print_rows(WIRE_COLUMNS, content["rows"], file)
    _print_claims(content["checks"], file)


def write_wire_page(content: Row, path: Path) -> None:
    """Write a page, two charts per model: bytes with entropy and the plain way, and speeds."""
    page = Page("fedgrove bench wire")
    page.paragraph(
        "Bars: bytes by part. Lines across them: the entropy, and the plain way (bitmap and "
        "zstandard). Speeds are times the plain way's; at least 0.5 is wanted to encode, 0.2 to "
        "decode.",
    )
    for model, own in _group(content["rows"], "model").items():
        labels = [f"{row['density']:g}, {row['kind']}" for row in own]
        speeds = []
        for name, colour in {"encode": 4, "decode": 2}.items():
            values = [row["model_speed"][name] for row in own]
            speeds.append(Marks(name, values, colour))
        page.charts(
            _draw_sizes(model, own, labels),
            draw_rows(f"{model}: speed, × plain", labels, speeds, "times the plain way's"),
        )
    page.notes([f"{name}: {about}" for name, about in content["weights"].items()])
    page.write(path)


def _draw_sizes(model: str, rows: Rows, labels: Sequence[str]) -> Chart:
    """A stacked bar of parts per row, with marks for the entropy and for the plain way."""
    marks = []
    for colour, part in enumerate(PAYLOAD):
        # Of the dense model, at four bytes per float32.
        shares: list[float | None] = [row["parts"][part] / (4 * row["params"]) for row in rows]
        marks.append(Marks(part, shares, colour))
    entropy: list[float | None] = []
    plain: list[float | None] = []
    for row in rows:
        entropy.append(sum(row["bound"].values()) / (4 * row["params"]))
        plain.append(row["plain_share"])
    marks.append(Marks("entropy", entropy, 11, kind="tick", lane=0))
    marks.append(Marks("plain", plain, 7, kind="tick", lane=0))
    title = f"{model}: share of dense float32"
    return draw_rows(title, labels, marks, "share", stacked=True)


# ---- bench device --------------------------------------------------------------------------------


def print_device(content: Row, file: IO[str] | None = None) -> None:
    """Print a line per row, times as ratios to the dense net, and whether each claim holds."""
    _print_rows(DEVICE_COLUMNS, content["rows"], file)
    print_text(
        "step, infer: the shortest time with the channels removed, relative to the dense net's; "
        "median: over all turns, which a busy machine raises; masked: with the channels zeroed "
        "instead.",
        file,
    )
    _print_claims(content["checks"], file)


def write_device_page(content: Row, path: Path) -> None:
    """Write a page: times as ratios to the dense net's, over the share of channels removed."""
    charts = []
    for title, key in {"training step": "train", "inference": "infer"}.items():
        lines = []
        for colour, (net, own) in enumerate(_group(content["rows"], "net").items()):
            x = [100 * row["removed"] for row in own]
            masked = [row[f"{key}_masked"] for row in own]
            lines.append(Series(net, x, [row[key] for row in own], colour))
            lines.append(Series(f"{net}, masked", x, masked, colour, dashed=True))
        x_title = "% of channels removed"
        charts.append(draw_xy(title, lines, x_title, "time to the dense net's", y_from_zero=True))
    page = Page("fedgrove bench device")
    page.charts(*charts)
    page.write(path)
