"""What the command line does, from arguments to files, stdout and exit code."""

import json
import os
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import started

from fedgrove import api
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.errors import EngineError
from fedgrove.options.definition import options_of
from fedgrove.runs.folder import RunFolder

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--epochs", "1", "--engine", "serial"]
KEYS = (
    "method data engine seed rounds clients groups accuracy_mean accuracy_std accuracy_worst "
    "accuracy_worst10 accuracy_pooled density params_mean bytes_up bytes_down bytes_paper seconds"
)
COST_KEYS = "bytes_up bytes_down bytes_paper mib_paper reduction_paper params macs memory"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_prints_a_table_and_makes_a_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedavg", *SMALL, "--finetune", "0,1"]) == 0
    out, err = capsys.readouterr()
    assert "accuracy" in out
    rows = [line.split() for line in out.splitlines() if "±" in line]
    assert [row[0] for row in rows] == ["0", "1"]
    assert out.splitlines()[-2:] == [
        "runs/fedavg-digits-s0",
        "Page: runs/fedavg-digits-s0/report.html",
    ]
    assert "round 2/2  accuracy" in err
    assert {p.name for p in (here / "runs/fedavg-digits-s0").iterdir()} >= {
        "config.toml",
        "summary.json",
        "models",
    }
    assert main(["run", "fedavg", *SMALL, "--json"]) == 0
    assert (here / "runs/fedavg-digits-s0-2/summary.json").is_file()


def test_json_is_the_summary_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ditto", *SMALL, "--out", "mine", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary == json.loads((here / "mine/summary.json").read_text())
    assert set(KEYS.split()) <= set(summary)
    assert summary["method"] == "ditto"
    assert err == ""


def test_every_word_reaches_the_config(here: Path) -> None:
    words = "--data motion --net mlp --partition iid --scenario noisy --split random --clients 3 --cohort 2 --rounds 1 --validation 0.2"
    more = "--epochs 2 --batch 8 --lr 0.01 --profile phones --seed 5 --evaluate 0 --no-standardise --finetune 0,1 --freeze 0.4"
    sets = [
        "--set",
        "mu=0.5",
        "--set",
        "codec=Smallest",
        "--set",
        "optimiser=SGD",
        "--set",
        "momentum=0.5",
    ]
    args = [
        "run",
        "fedprox",
        *words.split(),
        *more.split(),
        *sets,
        "--engine",
        "serial",
        "--device",
        "cpu",
    ]
    assert main([*args, "--out", "mine", "--json"]) == 0
    config = tomllib.loads((here / "mine/config.toml").read_text())
    typed = {
        "method": "fedprox", "data": "motion", "net": "mlp", "partition": "iid", "scenario": "noisy",
        "split": "random", "validation": 0.2, "clients": 3, "cohort": 2, "rounds": 1, "finetune": [0, 1], "profile": "phones",
        "standardise": False, "seed": 5, "evaluate": 0, "freeze": 0.4,
    }  # fmt: skip
    assert typed.items() <= config["run"].items()
    # Of the others their defaults, where they have one.
    options = options_of(Experiment)
    for name in config["run"].keys() - typed.keys():
        assert config["run"][name] == options[name].default, name
    assert config["method"]["pull"]["mu"] == 0.5
    assert config["method"]["codec"]["type"] == "Smallest"
    local = config["method"]["local"]
    assert (local["epochs"], local["batch"]) == (2, 8)
    assert local["optimiser"] == {"type": "SGD", "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0}


def test_a_dry_run_trains_nothing_and_makes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedprox", *SMALL, "--dry-run"]) == 0
    text, _, cost = capsys.readouterr().out.partition("clients, cohort, rounds")
    assert tomllib.loads(text)["method"]["local"]["epochs"] == 1
    assert "4, 2, 2" in cost
    assert main(["run", "fedprox", *SMALL, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["run"]["rounds"] == 2
    assert found["cost"]["bytes_paper"] == 8 * found["cost"]["params"] * 2 * 2
    assert list(here.iterdir()) == []


def test_a_grouped_partition_goes_through_the_command_line_and_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "local", *SMALL, "--data", "digits", "--clients", "5", "--cohort", "2"]
    words += ["--partition", "classes:2:grouped"]
    assert main([*words, "--dry-run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["run"]["partition"] == "classes:2:grouped"
    assert main([*words, "--out", "done"]) == 0
    config = tomllib.loads((here / "done/config.toml").read_text())
    assert config["run"]["partition"] == "classes:2:grouped"
    capsys.readouterr()
    assert main([*words[:-1], "classes:3:grouped", "--dry-run"]) == 2
    assert (
        "partition is 'classes:3:grouped'; it must be grouped with a K that"
        in capsys.readouterr().err
    )


def test_an_interrupted_run_is_resumed_to_the_same_result(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "ditto", *SMALL, "--rounds", "3", "--out", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    save = RunFolder.save
    calls: list[int] = []

    def stop(self: RunFolder, *args: object) -> None:
        save(self, *args)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save", stop)
    assert main(["run", "ditto", *SMALL, "--rounds", "3", "--out", "cut"]) == 130
    err = capsys.readouterr().err.splitlines()[-1]
    assert (
        err.lower()
        == "fedgrove: interrupted. 2 of 3 rounds are saved; resume with: fedgrove resume cut"
    )
    assert main(["compare", "whole", "cut"]) == 0
    assert "unfinished, 2 of 3 rounds" in capsys.readouterr().out
    assert main(["compare", "cut", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["finished"], row["rounds_done"], row["rounds"]) == (False, 2, 3)
    assert main(["resume", "cut", "--engine", "serial", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in whole.items() if k != "seconds"
    }
    assert main(["resume", "cut"]) == 2
    assert "finished; there is nothing to resume" in capsys.readouterr().err


def test_work_that_cannot_be_finished_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(*args: object, **kwargs: object) -> None:
        raise EngineError("a worker died.")

    monkeypatch.setattr(api, "train_alone", die)
    assert main(["run", "ditto", *SMALL]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "fedgrove: a worker died. 0 of 2 rounds are saved; resume with: fedgrove resume runs/"
    )


def test_compare_shows_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("fedavg", "local"):
        assert main(["run", method, *SMALL, "--out", method, "--json"]) == 0
    capsys.readouterr()
    assert main(["compare", "fedavg", "local"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["run", "fedavg", "local"]
    assert sum("*" in line for line in lines[3:5]) >= 1
    assert main(["compare", "fedavg", "local", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["run"], r["method"], r["finished"]) for r in rows] == [
        ("fedavg", "fedavg", True),
        ("local", "local", True),
    ]


def test_cost_by_shape_and_by_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--net har-cnn --input 3x200 --classes 6 --clients 36 --cohort 10 --rounds 50"
    assert main(["cost", "fedavg", *shape.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mib_paper"] == 473.8
    assert set(COST_KEYS.split()) <= set(found)
    assert main(["cost", "fedavg", "--batch", "64", *shape.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] > found["memory"]
    assert main(["cost", "lg-fedavg", "--set", "shared=1", "--rounds", "3"]) == 0
    assert "20, 10, 3" in capsys.readouterr().out
    assert list(here.iterdir()) == []


def test_as_a_process_a_mistake_is_one_sentence(here: Path) -> None:
    process = started("run", "--roundss", "3")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("fedgrove: there is no option '--roundss'; did you mean '--rounds'?")
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_as_a_process_ctrl_c_says_how_to_go_on(here: Path) -> None:
    process = started(
        "run", "local", *SMALL, "--rounds", "100000", "--evaluate", "0", "--out", "long"
    )
    while not (here / "long/checkpoint/latest.json").is_file() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith("rounds are saved; resume with: fedgrove resume long")
    assert "Traceback" not in err


# ---- averages that survive liars -----------------------------------------------------------------


def test_a_robust_mean_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trimmed = ["--set", "mean=TrimmedMean", "--set", "mean.share=0.3"]
    assert main(["run", "fedavg", *SMALL, *trimmed, "--out", "trimmed", "--json"]) == 0
    config = tomllib.loads((here / "trimmed/config.toml").read_text())
    assert config["method"]["mean"] == {"type": "TrimmedMean", "share": 0.3}
    assert main(["run", "fedavg", *SMALL, "--set", "mean=Median", "--out", "median", "--json"]) == 0
    config = tomllib.loads((here / "median/config.toml").read_text())
    assert config["method"]["mean"] == {"type": "Median"}
    capsys.readouterr()

    assert main(["run", "fedavg", *SMALL, "--set", "mean=Mode", "--json"]) == 2
    assert "mean is 'Mode'; it must be one of WeightedMean, " in capsys.readouterr().err
    wrong = ["--set", "mean=TrimmedMean", "--set", "mean.share=0.5"]
    assert main(["run", "fedavg", *SMALL, *wrong, "--json"]) == 2
    assert "mean.share is 0.5; it must be in [0, 0.5)." in capsys.readouterr().err
    assert main(["list", "parts"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("mean"))
    names = {"WeightedMean", "Median", "TrimmedMean", "ClippedMean", "MultiKrum", "GeometricMedian"}
    assert names <= set(line.split(maxsplit=1)[1].replace(",", "").split())


def test_several_tasks_have_a_row_each_and_compare_over_seeds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "rooms+tags", "--clients", "4", "--cohort", "4", "--rounds", "2"]
    words += ["--epochs", "1", "--engine", "serial", "--out", "mine", "--seeds", "2"]
    assert main(["sweep", "local", "fedavg", *words]) == 0
    capsys.readouterr()
    assert main(["compare", "mine"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # A row for each run and task, then one for each method and task over seeds.
    assert len([row for row in rows if row[:1] == ["fedavg-s1"] and "tags" in row]) == 1
    assert len([row for row in rows if row[:4] == ["fedavg", "rooms", "mae", "2"]]) == 1
    assert len([row for row in rows if row[:4] == ["fedavg", "local", "on", "tags"]]) == 1


def test_a_client_that_switched_is_exported_with_its_new_data(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "digits", "--clients", "3", "--cohort", "3", "--rounds", "2", "--engine"]
    words += ["serial", "--epochs", "1", "--scenario", "switch:1:0-2", "--out", "mine"]
    assert main(["run", "fedavg", *words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert main(["export", "mine", "--client", "0", "--json"]) == 0
    out = capsys.readouterr().out
    assert "they have changed" not in out
    assert summary["scenario"] == "switch:1:0-2"


def test_each_task_is_exported_with_its_own_outputs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name, classes in (("one", 3), ("two", 3), ("narrow", 2)):
        x = rng.normal(size=(40, 1, 8, 8))
        np.savez(f"{name}.npz", x=x, y=np.arange(40) % classes, client=np.arange(40) // 20)
    words = ["--net", "mlp", "--cohort", "4", "--rounds", "1", "--engine", "serial"]
    assert main(["run", "fedavg", "--data", "one.npz+two.npz", *words, "--out", "mine"]) == 0
    assert main(["export", "mine", "--client", "3"]) == 0
    assert (here / "mine/export/client-00003.onnx").is_file()
    assert "0 = 0, 1 = 1, 2 = 2." in (here / "mine/export/client-00003.onnx.md").read_text()
    assert main(["run", "fedavg", "--data", "one.npz+narrow.npz", *words, "--out", "other"]) == 0
    capsys.readouterr()
    assert main(["export", "other", "--client", "3"]) == 0
    assert "`(batch, 2)`" in (here / "other/export/client-00003.onnx.md").read_text()


def test_a_dry_run_tries_coded_messages_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", "digits", "--clients", "3", "--cohort", "2", "--rounds", "2"]
    assert main(["run", "stc", *words, "--dry-run", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert list(tmp_path.iterdir()) == []
    assert main(["run", "stc", *words, "--dry-run"]) == 0
    assert "up, expected" in capsys.readouterr().out
    assert main(["run", "fedavg", *words, "--dry-run"]) == 0
    assert "expected" not in capsys.readouterr().out
    assert main(["run", "stc", *words, "--out", "run", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert cost["trial_rounds"] == 2
    assert (cost["expected_up"], cost["expected_down"]) == (
        summary["bytes_up"],
        summary["bytes_down"],
    )
    assert cost["bytes_up"] > 5 * summary["bytes_up"]
