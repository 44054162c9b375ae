"""Methods beside each other over seeds."""

from __future__ import annotations

import io
from typing import Any

import pytest

from fedgrove.report.comparison import compare, print_comparison


def summary(accuracy: float, worst: float, up: int) -> dict[str, Any]:
    scores = {"accuracy_mean": accuracy, "accuracy_worst": worst}
    tuned = {"accuracy_mean": 1.0, "accuracy_worst": 1.0}
    return {
        "finetune": {"0": scores, "3": tuned},
        "density": 0.3,
        "bytes_up": up,
        "bytes_down": 2 * up,
    }


def test_lines_by_hand() -> None:
    lines = compare({"a": [summary(0.5, 0.2, 100), summary(0.7, 0.4, 300)]})
    # accuracies 50 and 70: mean 60, sample deviation sqrt(2 * 10^2 / 1) = 14.142; worst 20 and 40;
    # bytes 300 and 900: mean 600
    assert [(line.method, line.finetuned) for line in lines] == [("a", 0), ("a", 3)]
    first = lines[0]
    assert first.score == pytest.approx(60)
    assert first.deviation == pytest.approx(14.1421356)
    assert first.worst == pytest.approx(30)
    assert (first.density, first.bytes_sent) == (pytest.approx(0.3), 600)


def test_what_an_engineer_asks_first_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = summary(0.5, 0.2, 6000) | {"rounds": 2, "cohort": 3}
    first["finetune"] = {"0": first["finetune"]["0"] | {"accuracy_worst10": 0.25}}
    (line,) = compare({"a": [first]}, {"a": 218_100})
    # 6,000 up and 12,000 down, of 2 rounds of 3 devices: 3,000 bytes each.
    assert (line.worst_tenth, line.bytes_each, line.model_bytes) == (25, 3000, 218_100)
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    print_comparison([line], out)
    rows = out.getvalue().splitlines()
    assert rows[2].split()[:6] == ["a", "0", "50.0", "25.0", "3.0", "218.1"]
    assert max(len(row) for row in rows) <= 80


def test_one_seed_has_no_deviation_and_does_not_show_one() -> None:
    lines = compare({"a": [summary(0.5, 0.2, 100)]})
    assert lines[0].deviation is None
    out = io.StringIO()
    print_comparison(lines, out)
    assert "±" not in out.getvalue()
    assert "50.0" in out.getvalue()
