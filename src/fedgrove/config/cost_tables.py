"""Tables of predicted costs for a terminal: what ``fedgrove cost`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from ..report.tables import format_bytes, format_duration, format_kilobytes, or_dash
from ..report.terminal import Column, name_columns, print_pairs, print_table


def print_cost(cost: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the cost of a run, as :func:`fedgrove.config.cost.estimate_cost` returns it."""
    paper = "none"
    if cost["bytes_paper"] is not None:
        share = cost["reduction_paper"]
        direction = "less" if share >= 0 else "more"
        paper = f"{cost['mib_paper']:,} MiB, {abs(share):.1%} {direction} than dense"
        if cost.get("paper_at_most"):
            paper = f"at most {paper}"
    pairs = [
        ("clients, cohort, rounds", f"{cost['clients']}, {cost['cohort']}, {cost['rounds']}"),
        ("up, at most", format_bytes(cost["bytes_up"])),
        ("down, at most", format_bytes(cost["bytes_down"])),
        ("paper's own count", paper),
        ("parameters", f"{cost['params']:,}"),
        ("multiply-accumulates", f"{cost['macs']:,} per sample"),
        ("memory of a step", format_bytes(cost["memory"])),
        ("virtual time of all rounds", format_duration(cost["virtual_seconds"])),
    ]
    for name, (least, median, most) in _costs_per_device(cost).items():
        bound = ", at most" if name in ("up", "down") else ""
        pairs.append((f"{name} per device and round{bound}", f"{median} ({least} to {most})"))
    print_pairs(pairs, file)


def print_costs(costs: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print the costs of several methods: totals, then the costs of one device in one round."""
    columns = [
        *name_columns("all rounds, at most"),
        Column("up"),
        Column("down"),
        Column("paper\nMiB", 4),
        Column("MACs per\nsample", 3),
        Column("memory\nof a step", 2),
        Column("virtual\ntime", 1),
    ]
    rows = []
    for cost in costs:
        rows.append(
            [
                cost["method"],
                format_bytes(cost["bytes_up"]),
                format_bytes(cost["bytes_down"]),
                or_dash(cost["mib_paper"], "{:,}".format),
                f"{cost['macs']:,}",
                format_bytes(cost["memory"]),
                format_duration(cost["virtual_seconds"]),
            ]
        )
    print_table(columns, rows, file)
    print(file=file)
    columns = name_columns("per device and round,\nup and down at most")
    for name in _costs_per_device(costs[0]):
        # The median says most; then the costs of the worst device.
        columns.append(Column(f"{name}\nleast", 2))
        columns.append(Column(f"{name}\nmedian"))
        columns.append(Column(f"{name}\nmost", 1))
    rows = []
    for cost in costs:
        cells = [cost["method"]]
        for values in _costs_per_device(cost).values():
            cells += values
        rows.append(cells)
    print_table(columns, rows, file)


def _costs_per_device(cost: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the costs of one device in one round: the least, the median and the most."""
    formats: dict[str, tuple[str, Callable[[Any], str]]] = {
        "up": ("bytes_up", _format_kilobytes),
        "down": ("bytes_down", _format_kilobytes),
        "work": ("macs", format_macs),
        "time": ("seconds", format_duration),
    }
    shown = {}
    for name, (key, format_value) in formats.items():
        values = cost["per_device"][key]
        shown[name] = [format_value(values[each]) for each in ("min", "median", "max")]
    return shown


def _format_kilobytes(n: float) -> str:
    return f"{format_kilobytes(n)} kB"


def format_macs(macs: int) -> str:
    """Format a number of multiply-accumulates.

    >>> format_macs(2_500_000_000), format_macs(12_000_000), format_macs(0)
    ('2.5 GMAC', '12 MMAC', '0 MMAC')
    """
    if macs >= 10**9:
        return f"{macs / 10**9:,.3g} GMAC"
    return f"{macs / 10**6:.3g} MMAC"
