"""Hindsight by hand, with runs that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedgrove.choosing.choice_report import explain_hindsight, print_choice
from fedgrove.choosing.decision import assess_choice
from fedgrove.runs.result import Failure

FOUND: dict[str, Any] = {
    "pick": "a",
    "label": "a",
    "epochs": 0,
    "metric": "accuracy",
    "share": True,
    "budget": None,
    "full_rounds": 4,
    "trial_rounds": 1,
    "sentence": "Take a.",
    "command": "fedgrove run a",
    "rows": [],
    "left_out": {},
    "cost": {"rounds": 1, "rounds_in_full": 4, "seconds": 1.0},
}


def ended(seed: int, accuracy: float) -> Any:
    figures = {"accuracy_mean": accuracy}
    summary = {"seed": seed, "seconds": 2.0, "metric": "accuracy", "finetune": {"0": figures}}
    return SimpleNamespace(summary={**summary, "bytes_up": 10, "bytes_down": 10})


def failure(why: str) -> Any:
    folder: Any = SimpleNamespace()
    return Failure(why, folder)


def looked_back(**ends: Any) -> dict[str, Any]:
    named = {name.replace("_", "-"): end for name, end in ends.items()}
    return {**FOUND, "hindsight": assess_choice(named, FOUND, None, 2, True)}


def test_the_choice_failed_in_full(capsys: Any) -> None:
    found = looked_back(
        a_s0=failure("it diverged."), a_s1=ended(1, 0.9), b_s0=ended(0, 0.6), b_s1=ended(1, 0.8)
    )
    print_choice(found, None)
    out = " ".join(capsys.readouterr().out.split())
    assert "Take a." in out
    assert "a failed in full: it diverged." in out
    assert "b was the best: 70.0 %." in out
    assert [row["method"] for row in found["hindsight"]["rows"]] == ["b"]


def test_another_failed_on_one_seed() -> None:
    # b would be the best by the one seed that it has; its mean is not one over all seeds.
    found = looked_back(
        a_s0=ended(0, 0.5), a_s1=ended(1, 0.7), b_s0=failure("no."), b_s1=ended(1, 0.9)
    )
    back = found["hindsight"]
    assert (back["best"], back["behind"], back["failed"]) == ("a", 0, {"b": "no."})
    # Finding it took 1 of 6 seconds: three runs of two were finished.
    assert explain_hindsight(found) == (
        "The choice was a: 60.0 % in full; it was the best in hindsight; finding it took 17 % of "
        "the 6 s of all in full."
    )


def test_all_failed() -> None:
    assert explain_hindsight(looked_back(a_s0=failure("no."))) == (
        "None of them could be finished in full."
    )


def test_how_far_behind() -> None:
    # Gaps .2 and .1: mean .15, sd .0707, over sqrt(2): .05.
    found = looked_back(
        a_s0=ended(0, 0.5), a_s1=ended(1, 0.7), b_s0=ended(0, 0.7), b_s1=ended(1, 0.8)
    )
    assert found["hindsight"]["behind"] == pytest.approx(0.15)
    assert "60.0 % in full, 15 ± 5 points behind the best in hindsight, b;" in explain_hindsight(
        found
    )
