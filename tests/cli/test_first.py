"""``fedgrove run`` alone: ca-afp beside fedavg."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fedgrove.cli import main
from fedgrove.cli.first import phases
from fedgrove.runs.folder import RunFolder

SMALL = ["--clients", "6", "--cohort", "3", "--rounds", "5", "--epochs", "1", "--engine", "serial"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 20, 50])
def test_the_phases_sum_to_the_rounds_and_prune(rounds: int) -> None:
    warm, stable, last = phases(rounds)
    assert warm + stable + last == rounds
    assert last >= rounds / 2
    assert min(warm, stable) >= 0


def test_two_methods_in_one_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    place = "runs/ca-afp-fedavg-digits-s0"
    assert [line.split()[0] for line in lines[2:6]] == [
        f"{place}/{n}-s0" for n in ("ca-afp", "ca-afp", "fedavg", "fedavg")
    ]
    assert lines[-2].startswith("ca-afp: groups of ")
    assert "30% of the weights" in lines[-2]
    assert lines[-1] == place
    assert "round 10/10  accuracy" in err  # two runs of five rounds
    config = tomllib.loads((here / place / "ca-afp-s0/config.toml").read_text())
    assert (config["method"]["phases"], config["run"]["finetune"]) == ([2, 0, 3], [0, 3])
    assert config["method"]["grouping"]["linkage"] == "complete"


def test_json_is_a_list_of_two_summaries(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *SMALL,
        "--seed",
        "3",
        "--finetune",
        "0",
        "--data",
        "motion",
        "--set",
        "phases=0,2,3",
        "--lr",
        "0.01",
    ]
    assert main(["run", *words, "--out", "mine", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert [(row["method"], row["data"], row["seed"], list(row["finetune"])) for row in found] == [
        ("ca-afp", "motion", 3, ["0"]),
        ("fedavg", "motion", 3, ["0"]),
    ]
    for row in found:
        assert {
            "run": row["run"],
            **json.loads((here / row["run"] / "summary.json").read_text()),
        } == row
        local = tomllib.loads((here / row["run"] / "config.toml").read_text())["method"]["local"]
        assert (local["epochs"], local["optimiser"]["lr"]) == (1, 0.01)
    pruned, dense = found
    assert pruned["bytes_up"] + pruned["bytes_down"] < dense["bytes_up"] + dense["bytes_down"]
    assert main(["run", "fedavg", *words[:-4], "--lr", "0.01", "--out", "alone", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["accuracy_clients"] == dense["accuracy_clients"]


def test_a_dry_run_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["config"]["run"]["method"] for one in found] == ["ca-afp", "fedavg"]
    assert all(one["cost"]["bytes_up"] > 0 for one in found)
    assert list(here.iterdir()) == []


def test_interrupted_it_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = RunFolder.save, list[int]()

    def stop(self: RunFolder, *args: object) -> None:
        save(self, *args)
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", stop)
        assert main(["run", *SMALL, "--out", "cut"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("resume with: fedgrove resume cut")
    assert main(["resume", "cut", "--engine", "serial", "--json"]) == 0
    members = json.loads(capsys.readouterr().out)["members"]
    assert main(["run", *SMALL, "--out", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [m["accuracy_clients"] for m in members] == [w["accuracy_clients"] for w in whole]


def test_a_failure_is_told_and_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--set", "optimiser=SGD", "--lr", "1e30", "--out", "s"]) == 1
    assert "ca-afp-s0 failed after" in capsys.readouterr().out
