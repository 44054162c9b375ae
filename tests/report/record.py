"""Figures of a run as its folder would hold them, of any size."""

from __future__ import annotations

from typing import Any

from fedgrove.report.run_report import RunRecord


def line(number: int, rounds: int) -> dict[str, Any]:
    """A line of metrics.jsonl, of a run that gets better and loses weights on the way."""
    share = number / rounds
    crashed = {"lost": {"crashed": [1, 2]}, "why": {"crashed": "no <b>memory</b>"}}
    return {
        "round": number,
        "counts": True,
        "bytes_up": 2**20,
        "bytes_down": 2**21,
        "bytes_up_parts": {"values": 2**19, "mask": 2**19},
        "bytes_down_parts": {"values": 2**21},
        "virtual_clock": 1.5 * number,
        "slowest": {"client": 1, "down": 0.25, "compute": 1.0, "up": 0.25},
        "accuracy_mean": 0.25 + share / 2,
        "accuracy_std": 0.1,
        "accuracy_worst": 0.1 + share / 4,
        "accuracy_worst10": 0.15 + share / 4,
        "loss_mean": 2 - share,
        "density": 1 - share / 2,
        "figures": {f"density:layer{i}": 1 - share * i / 10 for i in range(4)},
        "seconds": 0.5,
        **(crashed if number % 7 == 3 else {}),
    }


def summary(clients: int, rounds: int, **more: Any) -> dict[str, Any]:
    scores = {
        "accuracy_mean": 0.75,
        "accuracy_std": 0.1,
        "accuracy_worst": 0.35,
        "accuracy_worst10": 0.4,
    }
    return {
        "method": "ca-afp",
        "data": "made",
        "partition": "natural",
        "seed": 0,
        "rounds": rounds,
        "clients": clients,
        "cohort": 10,
        "metric": "accuracy",
        "more_is_better": True,
        "share": True,
        **scores,
        "finetune": {"0": scores},
        "density": 0.5,
        "bytes_up": rounds * 2**20,
        "bytes_down": rounds * 2**21,
        "virtual_seconds": 1.5 * rounds,
        "seconds": rounds / 2,
        "notes": ["made, not measured"],
        "accuracy_clients": {str(k): (k * 37 % 100) / 100 for k in range(clients)},
        **more,
    }


def record(number: int = 12, rounds: int = 8, name: str = "device", **more: Any) -> RunRecord:
    """A finished run; every fourth client is in a group, and densities differ."""
    whole = summary(number, rounds)
    rows = []
    for k in range(number):
        rows.append(
            {
                "client": k,
                "name": f"{name}-{k}",
                "group": k % 4,
                "examples": 20 + k * 13 % 200,
                "test": 10,
                "score": whole["accuracy_clients"][str(k)],
                "density": (2 + k % 3) / 5,
            }
        )
    words = {"method": "ca-afp", "data": "made", "rounds": rounds}
    similar = [f"{name}-{k}" for k in range(min(number, 60))]
    cosines = [[1.0 if i == j else -0.2 for j in range(len(similar))] for i in range(len(similar))]
    known: dict[str, Any] = {
        "path": "runs/made",
        "options": words,
        "config": "[run]\nmethod = 'ca-afp'\n",
        "lines": [line(number, rounds) for number in range(1, rounds + 1)],
        "summary": whole,
        "clients": rows,
        "layers": {f"layer{i}": 1 - i / 10 for i in range(4)},
        "similarity": cosines,
        "similar": similar,
    }
    return RunRecord(**{**known, **more})
