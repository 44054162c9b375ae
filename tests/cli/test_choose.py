"""``fedgrove choose``, from arguments to a table, JSON and refusals that leave nothing behind."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedgrove.choosing.choose import choose
from fedgrove.cli import main
from fedgrove.cli.parameters import typed_options
from fedgrove.cli.run import RunCommand
from fedgrove.cli.sweep import ChooseCommand

SMALL = ["--data", "digits", "--clients", "3", "--cohort", "2", "--epochs", "1", "--batch", "64"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *args: str, beside: int = 0) -> str:
    assert main(["choose", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(list(Path().iterdir())) == beside
    return err.removeprefix("fedgrove: ")


def test_a_table_a_sentence_and_a_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--methods", "local, fedavg", "--rounds", "4", "--seeds", "2"]
    assert main(["choose", *words, "--trial", "2", "--finetune", "0", "--engine", "serial"]) == 0
    out, err = capsys.readouterr()
    assert "Use " in out
    assert "paired over 6 clients of all seeds" in out
    assert "8 rounds, 50 % of the 16" in " ".join(out.split())
    assert "runs/choose-digits" in out
    assert "first trial: 2 runs of 2 rounds" in err
    assert "second trial: 2 runs of 2 rounds" in err
    (last,) = [line for line in out.splitlines() if line.startswith("fedgrove run ")]
    assert last.endswith("--clients 3 --cohort 2 --epochs 1 --batch 64 --rounds 4 --engine serial")
    assert json.loads((here / "runs/choose-digits/choice.json").read_text())["state"] == "done"
    assert main(["resume", "runs/choose-digits"]) == 2
    assert "fedgrove choose ... --out runs/choose-digits" in capsys.readouterr().err


def test_a_dry_run_trains_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--rounds", "10", "--budget", "300kB", "--dry-run"]
    assert main(["choose", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "grove" in found["would_try"]
    assert "at least" in found["left_out"]["fedavg"]
    assert main(["choose", *words]) == 0
    assert "left out:\n- fedavg, ditto: a client would send" in capsys.readouterr().out
    assert list(here.iterdir()) == []


def test_a_budget_too_small_for_grove_says_which_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, "--rounds", "4", "--methods", "local,grove", "--dry-run", "--json", "--budget"]
    assert main(["choose", *words, "1.4kB"]) == 0
    why = json.loads(capsys.readouterr().out)["left_out"]["grove"]
    assert "nine tenths of the budget of 1.4 kB" in why
    enough = re.search(r"A budget of (\S+) would be enough", why)
    assert enough is not None
    assert main(["choose", *words, enough[1]]) == 0
    assert "grove" in json.loads(capsys.readouterr().out)["would_try"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--budget much", "budget is 'much'; it must be bytes for one client in the whole run"),
        (
            "--budget 10B --methods fedavg,stc",
            "none of the methods fits. fedavg: a client would send and receive",
        ),
        ("--methods fedavgg", "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ("--methods fedavg,fedavg", "methods is 'fedavg,fedavg'; it must be each of them once."),
        ("--clients 1", "there is only one client;"),
        (
            "--validation 0",
            "--validation is 0.0; it must be above 0, as the choice is made on validation data",
        ),
        ("--score-on 0", "--score-on is 0; it must be 1 or more: clients are compared."),
        ("--profile nowhere.csv", "nowhere.csv"),
        ("--trial 0", "trial is 0; it must be from 1 to 20 rounds."),
        ("--trial 21", "trial is 21; it must be from 1 to 20 rounds."),
        ("--seeds none", "--seeds is 'none'; it must be a number of seeds"),
        ("--rounds 0", "rounds is 0; it must be 1 or more."),
        ("--data nowhere", "there is no data set 'nowhere'"),
        ("--engine warp", "there is no engine 'warp'"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], args: str, sentence: str) -> None:
    assert sentence in refused(capsys, *args.split())


def test_a_profile_without_a_client(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "devices.csv").write_text("client,up,down,speed,memory\n0,5,5,1,1000000\n")
    said = refused(capsys, *SMALL, "--profile", "devices.csv", beside=1)
    assert "devices.csv" in said


def test_other_files_are_not_touched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("years of work")
    said = refused(capsys, *SMALL, "--out", "mine", beside=1)
    assert (
        said == "mine contains other files, and nothing is overwritten; give a different folder.\n"
    )
    assert [path.name for path in (here / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_an_interruption_says_how_to_go_on(here: Path) -> None:
    words = [*SMALL, "--methods", "local,fedavg", "--rounds", "400", "--seeds", "1"]
    line = [sys.executable, "-m", "fedgrove", "choose", *words, "--out", "mine"]
    process = subprocess.Popen([*line, "--engine", "serial"], stderr=subprocess.PIPE, text=True)
    metrics = here / "mine" / "first" / "fedavg-s0" / "metrics.jsonl"
    while not metrics.is_file() and process.poll() is None:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "Interrupted. Finished training is kept; to continue, repeat the command with --out mine"
        in err
    )


def test_it_takes_every_option_of_the_command() -> None:
    typed = {field.name for field in typed_options(ChooseCommand)}
    assert typed - {"json"} <= set(inspect.signature(choose).parameters)


def test_the_page_names_all_words_of_run_that_are_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    refused_words = page.split("These options are refused:")[1].split("\n\n")[0]
    named = set(re.findall(r"`--([a-z-]+)`", refused_words)) - {"methods", "seeds"}
    ours = {field.name for field in typed_options(ChooseCommand)}
    theirs = {field.name for field in typed_options(RunCommand)}
    assert {word.replace("-", "_") for word in named} == theirs - ours - {"method"}
