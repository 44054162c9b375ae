"""``fedgrove sweep``, from arguments to folders, tables and exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import started

from fedgrove.cli import main
from fedgrove.runs.folder import RunFolder

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--epochs", "1", "--engine", "serial"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, Any]:
    """Final weights, and the summary apart from what measures time or names the engine."""
    models = {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}
    summary = json.loads((folder / "summary.json").read_text())
    different = ("seconds", "seconds_shared_by", "engine")
    return models | {k: v for k, v in summary.items() if k not in different}


def test_no_validation_data_is_a_word_that_was_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "fedavg", "--seeds", "2", "--validation", "0", *SMALL, "--json"]) == 0
    kept = json.loads((here / "runs/sweep-digits/sweep.json").read_text())
    assert kept["grid"]["validation"] == 0
    for member in json.loads(capsys.readouterr().out)["members"]:
        assert (member["validation"], member["validation_mean"]) == (0, None)


def test_runs_that_are_not_scored_have_a_table_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", "fedavg", "--seeds", "2", "--score-on", "0", *SMALL]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("fedavg-s")]
    assert len(rows) == 2
    assert all("not scored" in row for row in rows)


def test_tables_folders_and_progress(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "fedavg", "fedprox", "--seeds", "2", "--set", "mu=0.1,1", *SMALL]) == 0
    out, err = capsys.readouterr()
    names = [
        f"{label}-s{seed}"
        for label in ("fedavg", "fedprox-mu=0.1", "fedprox-mu=1")
        for seed in (0, 1)
    ]
    assert {p.name for p in (here / "runs/sweep-digits").iterdir()} == {
        *names,
        "sweep.json",
        "report.html",
    }
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in names] == names
    assert [
        row[1] for row in rows if row and row[0] in ("fedavg", "fedprox-mu=0.1", "fedprox-mu=1")
    ][:3] == ["2"] * 3
    pairs = [row[:3] for row in rows if len(row) == 6 and row[3][0] in "+-"]
    assert ["fedprox-mu=1", "fedavg", "2"] in pairs
    assert len(pairs) == 3
    assert out.splitlines()[-2:] == ["runs/sweep-digits", "Page: runs/sweep-digits/report.html"]
    assert "round 12/12  accuracy" in err  # 6 runs of 2 rounds
    told = json.loads((here / "runs/sweep-digits/sweep.json").read_text())
    assert told["grid"] == {
        "methods": ["fedavg", "fedprox"], "seeds": [0, 1], "set": ["mu=0.1,1"],
        "clients": 4, "cohort": 2, "rounds": 2, "epochs": 1,
    }  # fmt: skip


def test_a_finished_sweep_is_compared_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def over_seeds() -> list[str]:
        (line,) = re.findall(r"^(?:s/)?local +2 .*", capsys.readouterr().out, re.MULTILINE)
        return str(line).split()[1:]

    assert main(["sweep", "fedavg", "local", "--seeds", "2", *SMALL, "--out", "s"]) == 0
    shown = over_seeds()
    assert main(["compare", "s"]) == 0
    assert over_seeds() == shown
    assert main(["compare", "s", "s/local-s1", "--json"]) == 0
    found = [row["run"] for row in json.loads(capsys.readouterr().out)]
    assert found == ["s/fedavg-s0", "s/fedavg-s1", "s/local-s0", "s/local-s1", "s/local-s1"]


def test_a_member_is_the_run_the_same_words_give(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--lr", "0.01", "--partition", "iid", "--finetune", "0,1"]
    assert (
        main(
            [
                "sweep",
                "ditto",
                "fedprox",
                "--seeds",
                "3,1",
                "--set",
                "mu=0.5",
                *words,
                "--out",
                "s",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [m["run"] for m in found["members"]] == [
        "ditto-s3",
        "ditto-s1",
        "fedprox-s3",
        "fedprox-s1",
    ]
    assert [(g["group"], g["seeds"], len(g["paired"])) for g in found["groups"]] == [
        ("ditto", [1, 3], 0),
        ("fedprox", [1, 3], 1),
    ]
    assert (
        main(
            ["run", "fedprox", "--seed", "3", "--set", "mu=0.5", *words, "--out", "alone", "--json"]
        )
        == 0
    )
    assert contents(here / "s/fedprox-s3") == contents(here / "alone")
    assert (here / "s/fedprox-s3/config.toml").read_text() == (
        here / "alone/config.toml"
    ).read_text()


def test_a_failure_is_told_and_ends_with_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep",
        "fedavg",
        "--set",
        "optimiser=SGD",
        "--set",
        "lr=0.01,1e30",
        *SMALL,
        "--out",
        "s",
    ]
    assert main(words) == 1
    out, _ = capsys.readouterr()
    said = [line for line in out.splitlines() if line.startswith("fedavg-lr=1e30-s0")]
    assert len(said) == 1
    assert "failed after 0 rounds: the exchange of round 1 was abandoned 3 times: 0 of " in said[0]
    assert "fedavg-lr=0.01 " in out
    assert (
        main([*words, "--json"]) == 1
    )  # finished runs are not run again, failed ones are tried again
    found = json.loads(capsys.readouterr().out)
    assert [(m["run"], m["state"]) for m in found["members"]] == [
        ("fedavg-lr=0.01-s0", "done"),
        ("fedavg-lr=1e30-s0", "failed"),
    ]
    assert "clients sent a usable report, and the quorum is 1: " in found["members"][1]["why"]
    assert [g["missing"] for g in found["groups"]] == [0]
    assert (
        json.loads((here / "s/sweep.json").read_text())["members"]["fedavg-lr=1e30-s0"]["state"]
        == "failed"
    )


def test_the_same_command_and_resume_on_what_is_finished(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "local", "--seeds", "2", *SMALL, "--out", "s", "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main(["resume", "s", "--json"]) == 0
    assert capsys.readouterr().out == first
    assert main([*words[:3], "3", *words[4:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedgrove: s contains a different sweep")


def test_a_dry_run_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "fedprox", "--seeds", "1", "--set", "mu=0.1|1", *SMALL, "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fedprox-mu=0.1-s0", "fedprox-mu=1-s0"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["config"]["method"]["pull"]["mu"] for one in found] == [0.1, 1.0]
    assert all(one["cost"]["bytes_up"] > 0 for one in found)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "2"], "METHOD... is missing"),
        (["fedavgg"], "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        (
            ["fedavg", "--seeds", "x"],
            "--seeds is 'x'; it must be a number of seeds, such as 10, or the seeds themselves",
        ),
        (["fedavg", "--seeds", "0"], "--seeds is 0; "),
        (["fedavg", "--seeds", "1,-2"], "--seeds is '1,-2'"),
        (["fedavg", "--seeds", "4,4"], "the sweep contains fedavg-s4 twice"),
        (["fedavg", "--set", "mu=1,2"], "there is no setting of fedavg 'mu'"),
        (
            ["fedavg", "--lr", "0.1", "--set", "lr=0.1,0.2"],
            "fedavg-lr=0.1 and fedavg-lr=0.2 would be the same run",
        ),
        (["fedavg", "--clients", "3", "--cohort", "5"], "cohort is 5"),
        (["fedavg", "--seed", "3"], "did you mean '--seeds'?"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert list(here.iterdir()) == []


# ---- real processes ------------------------------------------------------------------------------

GRID = [
    "sweep",
    "ditto",
    "fixedprune",
    "--seeds",
    "2",
    "--clients",
    "4",
    "--cohort",
    "2",
    "--rounds",
    "6",
]
GRID += ["--epochs", "1", "--evaluate", "3"]


def wait_for(folder: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    """Until a run's checkpoint holds so many rounds."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        if RunFolder(folder).rounds_saved() >= rounds:
            return
        time.sleep(0.01)
    pytest.fail("the sweep made no progress")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_kill_9_then_resume_is_the_undisturbed_sweep(here: Path) -> None:
    names = [f"{method}-s{seed}" for method in ("ditto", "fixedprune") for seed in (0, 1)]
    assert main([*GRID, "--engine", "serial", "--out", "whole", "--json"]) == 0
    process = started(*GRID, "--engine", "pool", "--out", "cut")
    wait_for(here / "cut/ditto-s1", 2, process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not list((here / "cut").glob("*/summary.json"))
    assert main(["resume", "cut", "--engine", "serial", "--json"]) == 0
    assert {n: contents(here / "cut" / n) for n in names} == {
        n: contents(here / "whole" / n) for n in names
    }
    lines = RunFolder(here / "cut/fixedprune-s1").metrics()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_says_how_to_go_on(here: Path) -> None:
    process = started(
        "sweep", "local", *SMALL[:4], "--rounds", "100000", "--evaluate", "0", "--out", "long"
    )
    wait_for(here / "long/local-s0", 1, process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith(
        "0 of 1 runs are finished; resume with: fedgrove resume long"
    )
    assert "Traceback" not in err
