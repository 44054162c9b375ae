"""Methods beside each other over seeds: one table for a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from .fit import Column, print_table, print_text
from .tables import Summary, each_round, kilobytes, mib


class Line(NamedTuple):
    """A method after so many epochs of fine-tuning: means over seeds, shares in percent."""

    method: str
    finetuned: int
    score: float
    deviation: float | None
    """Sample standard deviation over seeds; None with one seed."""
    worst: float
    density: float
    bytes_sent: float
    metric: str = "accuracy"
    share: bool = True
    worst_tenth: float | None = None
    """Mean of the worst tenth of the clients."""
    bytes_each: float | None = None
    """Sent and received by one device in one round, on average."""
    model_bytes: float | None = None
    """The weights of the model that a client exports, on average; None if it is not known."""


def compare(
    runs: Mapping[str, Sequence[Summary]], model_bytes: Mapping[str, float] | None = None
) -> list[Line]:
    """The lines of a comparison; ``runs`` are the summaries of each method, one per seed.

    ``model_bytes`` is the size of what each method exports, where it is known.
    """
    sizes = model_bytes or {}
    lines = []
    for method, summaries in runs.items():
        # All runs of a comparison report the same lengths.
        for epochs in summaries[0]["finetune"]:
            metric = summaries[0].get("metric") or "accuracy"
            share = summaries[0].get("share", True)
            factor = 100 if share else 1
            scores = [factor * s["finetune"][epochs][f"{metric}_mean"] for s in summaries]
            worst = [factor * s["finetune"][epochs][f"{metric}_worst"] for s in summaries]
            tenth = [_tenth(s, epochs, factor) for s in summaries]
            sent = [s["bytes_up"] + s["bytes_down"] for s in summaries]
            deviation = None
            if len(scores) > 1:
                deviation = statistics.stdev(scores)
            lines.append(
                Line(
                    method=method,
                    finetuned=int(epochs),
                    score=_mean(scores),
                    deviation=deviation,
                    worst=_mean(worst),
                    density=_mean([s["density"] for s in summaries]),
                    bytes_sent=_mean(sent),
                    metric=metric,
                    share=share,
                    worst_tenth=_mean_or_none(tenth),
                    bytes_each=_mean_or_none([_each(s) for s in summaries]),
                    model_bytes=sizes.get(method),
                )
            )
    return lines


def _mean(values: Sequence[float]) -> float:
    # fsum: the mean must not depend on the order in which the seeds finished.
    return math.fsum(values) / len(values)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _tenth(summary: Summary, epochs: str, factor: float) -> float | None:
    metric = summary.get("metric") or "accuracy"
    worst = summary["finetune"][epochs].get(f"{metric}_worst10")
    return None if worst is None else factor * worst


def _each(summary: Summary) -> float | None:
    up = each_round(summary, "up")
    down = each_round(summary, "down")
    return None if up is None or down is None else up + down


def _columns(lines: Sequence[Line]) -> list[Column]:
    """The columns; all lines of a comparison have one metric.

    What an engineer asks first is always there: how well clients are served, what a device sends
    and gets in a round, and how large a model it then holds.
    """
    percent = _percent(lines)
    return [
        Column("method", is_name=True),
        Column("fine-tuned\nepochs", called="fine-tuned"),
        Column(_named(lines).replace(" ", "\n")),
        Column(f"worst\ntenth{percent}"),
        Column("kB per device\nand round"),
        Column("model\nkB"),
        Column("weights\nkept", 1),
        Column("sent in\nall", 2),
        Column(f"worst\nclient{percent}", 3),
    ]


def _named(lines: Sequence[Line]) -> str:
    metric = lines[0].metric if lines else "accuracy"
    return f"{metric}{_percent(lines)}"


def _percent(lines: Sequence[Line]) -> str:
    is_share = lines[0].share if lines else True
    return " %" if is_share else ""


def print_comparison(lines: Sequence[Line], file: IO[str] | None = None) -> None:
    """Print the table and what its figures are."""
    print_table(_columns(lines), [_cells(line) for line in lines], file, "the page")
    print_text(_explained(lines), file)


def _explained(lines: Sequence[Line]) -> str:
    spread = ""
    if any(line.deviation is not None for line in lines):
        spread = ", ± standard deviation over seeds"
    metric = lines[0].metric if lines else "accuracy"
    return (
        f"{metric}: mean over clients{spread}; kB: thousands of "
        "bytes, both ways; model: the weights that fedgrove export writes, as float32."
    )


def _cells(line: Line) -> list[str]:
    digits = ".1f" if line.share else ".4g"
    score = f"{line.score:{digits}}"
    if line.deviation is not None:
        score += f" ± {line.deviation:{digits}}"
    return [
        line.method,
        str(line.finetuned),
        score,
        "-" if line.worst_tenth is None else f"{line.worst_tenth:{digits}}",
        "-" if line.bytes_each is None else kilobytes(line.bytes_each),
        "-" if line.model_bytes is None else kilobytes(line.model_bytes),
        f"{line.density:.0%}",
        mib(round(line.bytes_sent)),
        f"{line.worst:{digits}}",
    ]
