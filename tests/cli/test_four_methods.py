"""``fedgrove run`` alone: training alone, fedavg, ca-afp and grove."""

from __future__ import annotations

import json
import tomllib
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fedgrove.cli import main
from fedgrove.cli.four_methods import describe_gain
from fedgrove.runs.folder import RunFolder

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "5", "--epochs", "1", "--engine", "serial"]
ONE = [*SMALL, "--seed", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALL = ("local", "fedavg", "ca-afp", "grove")


def test_four_methods_three_seeds_one_table_one_sentence_one_page(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    rows = [line.split()[:2] for line in lines[2:10]]
    assert rows == [[m, n] for m in ALL for n in ("0", "3")]
    folder = here / "runs/local-fedavg-ca-afp-grove-motion"
    sentence = " ".join(lines[lines.index("") + 1 : -1])
    assert sentence.startswith("Before fine-tuning, grove gives clients ")
    assert "; sizes of the groups it found: " in sentence
    assert lines[-1] == "Page: runs/local-fedavg-ca-afp-grove-motion/report.html"
    page = unescape((folder / "report.html").read_text()).replace("\xa0", " ")
    assert sentence.split(";")[0] in page
    assert "round 60/60" in err  # twelve runs of five rounds
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == sorted(f"{m}-s{s}" for m in ALL for s in (0, 1, 2))
    config = tomllib.loads((folder / "ca-afp-s0/config.toml").read_text())["run"]
    # Scored at the end only.
    assert (config["data"], config["finetune"], config["evaluate"]) == ("motion", [0, 3], 0)


def test_the_sentence_by_hand() -> None:
    def summary(accuracy: float, sent: int, sizes: list[int], density: float) -> dict[str, Any]:
        return {
            "accuracy_mean": accuracy,
            "accuracy_mean_after_3": 1.0,
            "finetune": {"0": {}, "3": {}},
            "bytes_up": sent,
            "bytes_down": sent,
            "group_sizes": sizes,
            "density": density,
        }

    runs = {
        "local": [summary(0.5, 1, [1, 1], 1.0)],
        "fedavg": [summary(0.6, 100, [2], 1.0)],
        "ca-afp": [summary(0.9, 60, [8, 8], 0.3), summary(0.8, 40, [8, 8], 0.3)],
        "grove": [summary(0.9, 2, [8, 8], 1.0), summary(0.7, 1, [16], 1.0)],
    }
    # grove: (90 + 70) / 2 = 80, bytes (4 + 2) / 2 = 3 of 200; ca-afp: (90 + 80) / 2 = 85, bytes
    # (120 + 80) / 2 = 100 of 200
    assert describe_gain(runs) == (
        "Before fine-tuning, grove gives clients 80.0 % where fedavg gives 60.0 %, ca-afp 85.0 % "
        "and training alone 50.0 %, with 1.5 % of fedavg's bytes (ca-afp: 50 %); sizes of the "
        "groups it found: 8/8, 16."
    )


def test_json_is_a_list_of_summaries(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--seed", "3", "--finetune", "0", "--data", "digits", "--lr", "0.01"]
    words += ["--set", "phases=0,2,3"]
    assert main(["run", *words, "--out", "mine", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert err == ""
    assert [(row["method"], row["data"], row["seed"]) for row in rows] == [
        ("local", "digits", 3),
        ("fedavg", "digits", 3),
        ("ca-afp", "digits", 3),
        ("grove", "digits", 3),
    ]
    for row in rows:
        saved = json.loads((here / row["run"] / "summary.json").read_text())
        assert {"run": row["run"], **saved} == row
        config = tomllib.loads((here / row["run"] / "config.toml").read_text())
        local = config["method"]["local"]
        assert (local["epochs"], local["optimiser"]["lr"]) == (1, 0.01)
    _, dense, pruned, coded = rows
    assert 10 * (coded["bytes_up"] + coded["bytes_down"]) < dense["bytes_up"] + dense["bytes_down"]
    assert pruned["bytes_up"] + pruned["bytes_down"] < dense["bytes_up"] + dense["bytes_down"]
    alone = [word for word in words if word not in ("--set", "phases=0,2,3")]
    assert main(["run", "fedavg", *alone, "--out", "alone", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy_clients"] == dense["accuracy_clients"]


def test_a_dry_run_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *ONE, "--dry-run", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    methods = [plan["config"]["run"]["method"] for plan in plans]
    assert methods == list(ALL)
    assert all(plan["cost"]["bytes_up"] > 0 for plan in plans)
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
        assert main(["run", *ONE, "--out", "cut"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("resume with: fedgrove resume cut")
    assert main(["resume", "cut", "--engine", "serial", "--json"]) == 0
    members = json.loads(capsys.readouterr().out)["members"]
    assert main(["run", *ONE, "--out", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [m["accuracy_clients"] for m in members] == [w["accuracy_clients"] for w in whole]


def test_a_failure_is_told_and_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *ONE, "--set", "optimiser=SGD", "--lr", "1e30", "--out", "s"]) == 1
    assert "fedavg-s0 failed after" in capsys.readouterr().out
