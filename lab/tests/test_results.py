"""Stored results: what a file has, and how run folders, comparisons and benchmarks become rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fedgrove as fg
from fedgrove.errors import InputError
from fedgrove_lab import results
from fedgrove_lab.results import (
    find_commit,
    main,
    read_result,
    rows_of_bench,
    rows_of_comparisons,
    rows_of_folders,
    write_result,
)

STORED = sorted((results.LAB / "results").glob("*.json"))
MEASUREMENT = {"command": "fedgrove run", "commit": "abc", "machine": "2 CPU cores"}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty lab to store results in."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "LAB", tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_is_stored_is_complete(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["command"].startswith("fedgrove ")
    # A "+" would mean that the code was not that of the commit.
    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["machine"]
    assert result["rows"]
    for row in result["rows"]:
        seeds = row.get("seeds", result["seeds"])
        for values in row["values"].values():
            assert len(values) == len(seeds) or not seeds


def test_a_result_comes_back(lab: Path) -> None:
    rows = [{"name": "fedavg", "values": {"accuracy_mean:0": [0.5, 0.75]}}]
    path = write_result("mine", MEASUREMENT, rows, seeds=[0, 1], notes=["short"])
    assert path == lab / "results" / "mine.json"
    expected = {**MEASUREMENT, "seeds": [0, 1], "rows": rows, "notes": ["short"]}
    assert read_result("mine") == expected
    # One line for each list of values.
    assert '"accuracy_mean:0": [0.5, 0.75]' in path.read_text()


def test_without_a_checkout_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LAB", tmp_path)
    with pytest.raises(InputError, match="in a checkout"):
        write_result("mine", MEASUREMENT, [])
    assert find_commit(tmp_path) == "unknown"


def test_run_folders_of_one_name_are_a_row(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = lab / "runs"
    for seed in (1, 0):
        fg.run(
            "fedavg", data="digits", clients=2, cohort=2, rounds=1, seed=seed,
            out=runs / f"fedavg-s{seed}", engine="serial",
        )  # fmt: skip
    (row,) = rows_of_folders([runs])
    assert row["name"] == "fedavg"
    assert row["seeds"] == [0, 1]
    summary = json.loads((runs / "fedavg-s1" / "summary.json").read_text())
    assert row["values"]["accuracy_mean:0"][1] == summary["finetune"]["0"]["accuracy_mean"]
    sent = summary["bytes_up"] + summary["bytes_down"]
    assert row["values"]["mib"][1] == pytest.approx(sent / 2**20)
    main(["mine", str(runs), "--command", "fedgrove sweep", "--commit", "abc1234"])
    assert "mine.json" in capsys.readouterr().out
    stored = read_result("mine")
    assert stored["rows"] == [row]
    assert stored["commit"] == "abc1234"


def test_folders_without_a_finished_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["mine", str(tmp_path), "--command", "fedgrove run"])
    assert "no summary.json" in capsys.readouterr().err


def test_rows_of_a_benchmark_split_names_and_numbers() -> None:
    row = {"net": "har-cnn", "ok": True, "speed": {"encode": 2.0}, "seconds": [1, 2], "gpu": None}
    (stored,) = rows_of_bench({"rows": [row]})
    values = {"speed.encode": [2.0], "seconds": [1, 2]}
    assert stored == {"net": "har-cnn", "ok": True, "values": values}


def test_rows_of_a_comparison_keep_values_by_seed() -> None:
    trained = {
        "name": "fedavg", "label": "FedAvg", "data": "motion", "split": None, "panel": "",
        "seeds": [0, 1], "values": {"mib": [1.0, 2.0]}, "ours": {},
    }  # fmt: skip
    about_data = {"measure": "clients", "data": "motion", "ours": 24.0, "paper": 30.0}
    first, second = rows_of_comparisons([{"rows": [trained, about_data]}])
    assert first["values"] == {"mib": [1.0, 2.0]}
    assert first["seeds"] == [0, 1]
    assert second["values"] == {"ours": [24.0], "paper": [30.0]}
