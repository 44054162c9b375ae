"""``--init`` and ``--freeze`` on the command line, in small real runs."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedgrove as fg
from fedgrove import methods
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.runs.memory import Memory

WORDS = ["--data", "digits", "--clients", "3", "--cohort", "3", "--rounds", "2", "--epochs", "1"]
WORDS += ["--engine", "serial"]
NET = ["--net", "bn-cnn2:width=4"]
MODEL = "first/models/client-00001.safetensors"
FROZEN = ("conv1.weight", "norm1.weight", "norm1.bias", "norm1.running_mean", "norm1.running_var")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["run", "fedavg", *WORDS, *NET, "--out", str(folder / "first"), "--json"]
    assert main(words) == 0
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("first").symlink_to(trained / "first")
    return tmp_path


def summary_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_a_run_starts_from_the_model_of_another(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate of almost nothing it ends where it started."""
    still = ["run", "fedavg", *WORDS, *NET, "--set", "optimiser=SGD", "--lr", "1e-12"]
    summary = summary_of(capsys, *still, "--init", MODEL, "--out", "second")
    digest = hashlib.sha256(Path(MODEL).read_bytes()).hexdigest()
    assert (summary["init"], summary["init_sha256"]) == (MODEL, digest)
    assert any(f"started from the weights in {MODEL}" in note for note in summary["notes"])
    config = tomllib.loads(Path("second/config.toml").read_text())
    assert config["run"]["init"] == MODEL
    assert config["files"] == {MODEL: digest}
    start = load_file(MODEL)
    for name, tensor in load_file("second/models/client-00000.safetensors").items():
        # Statistics follow the data, whatever the learning rate.
        if "running" not in name:
            torch.testing.assert_close(tensor, start[name], rtol=0, atol=1e-6)

    scratch = summary_of(capsys, *still, "--out", "scratch")
    assert scratch["init"] == "scratch"
    assert "init_sha256" not in scratch
    assert main(["compare", "second", "scratch"]) == 0
    table = capsys.readouterr().out
    assert MODEL in table
    assert "scratch" in table


@pytest.mark.parametrize("method", ["fedapta", "fedlps"])
def test_a_table_says_what_starts_from_scratch_where_the_paper_does_not(
    method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No column does: all runs are alike in it."""
    said = f"{method} started from scratch, but its paper starts from trained weights: no init= was given"
    for name in (method, "fedavg"):
        summary_of(capsys, "run", name, *WORDS, *NET, "--out", name)
    assert main(["compare", method, "fedavg"]) == 0
    assert capsys.readouterr().out.count(said) == 1
    assert main(["compare", "fedavg"]) == 0
    assert "from scratch" not in capsys.readouterr().out
    given = summary_of(capsys, "run", method, *WORDS, *NET, "--init", MODEL, "--out", "given")
    assert said not in given["notes"]


def test_frozen_layers_are_those_of_the_file_and_cost_no_bytes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "fedavg", *WORDS, *NET, "--init", MODEL]
    whole = summary_of(capsys, *words, "--out", "whole")
    summary = summary_of(capsys, *words, "--freeze", "0.34", "--out", "frozen")
    # conv1 has 4·9 weights, its norm 4 + 4 parameters and 4 + 4 statistics; 3 clients, 2 rounds.
    assert (summary["freeze"], summary["params_frozen"]) == (0.34, 44)
    assert whole["params"] - summary["params"] == 44
    for way in ("bytes_up", "bytes_down"):
        assert whole[way] - summary[way] >= 3 * 2 * 4 * (36 + 8 + 8)
    assert any("are frozen (freeze=0.34)" in note for note in summary["notes"])
    assert not any("random" in note for note in summary["notes"])
    start = load_file(MODEL)
    model = load_file("frozen/models/client-00002.safetensors")
    assert model.keys() == start.keys()
    for name, tensor in model.items():
        assert torch.equal(tensor, start[name]) == (name in FROZEN), name

    # A frozen run's model is a whole one, and can be started from.
    again = ["run", "fedavg", *WORDS, *NET, "--init", "frozen/models/client-00002.safetensors"]
    assert main([*again, "--out", "again", "--json"]) == 0


def test_a_random_quarter_may_be_frozen_and_is_noted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "ca-afp", *WORDS, "--net", "mnist-cnn", "--freeze", "0.25", "--rounds", "1"]
    summary = summary_of(capsys, *words, "--out", "mine")
    assert "the frozen layers of MnistCnn are random: no init= was given" in summary["notes"]


def test_the_body_goes_to_other_classes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 1, 8, 8)).astype(np.float32)
    np.savez("own.npz", x=x, y=rng.integers(0, 3, 60), client=np.repeat([0, 1], 30))
    words = ["run", "fedavg", "--data", "own.npz", "--rounds", "1", "--engine", "serial", *NET]
    assert main([*words, "--init", MODEL, "--out", "mine"]) == 2
    sentence = capsys.readouterr().err
    assert "'head.weight' is (10, 32) and in the net (3, 32)" in sentence
    assert f"to load everything except the head, give {MODEL}:body." in sentence
    assert not Path("mine").exists()
    summary = summary_of(capsys, *words, "--init", f"{MODEL}:body", "--out", "mine")
    assert summary["init"] == f"{MODEL}:body"
    assert set(tomllib.loads(Path("mine/config.toml").read_text())["files"]) == {MODEL, "own.npz"}


def test_resume_refuses_another_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(MODEL)
    save_file(tensors, "mine.safetensors")
    words = ["run", "fedavg", *WORDS, *NET, "--init", "mine.safetensors", "--freeze", "0.34"]
    expected = summary_of(capsys, *words, "--out", "mine")
    # As if it had been killed before its last words.
    Path("mine/summary.json").unlink()
    content = Path("mine.safetensors").read_bytes()
    save_file({k: v + 1 for k, v in tensors.items()}, "mine.safetensors")
    assert main(["resume", "mine"]) == 2
    assert "mine.safetensors has changed since the run was started" in capsys.readouterr().err
    Path("mine.safetensors").unlink()
    assert main(["resume", "mine"]) == 2
    sentence = "the run started from the weights in mine.safetensors, and there is no file"
    assert sentence in capsys.readouterr().err
    Path("mine.safetensors").write_bytes(content)
    resumed = summary_of(capsys, "resume", "mine", "--engine", "serial")
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {
        k: v for k, v in expected.items() if k != "seconds"
    }


def test_what_was_started_from_a_file_is_exported_without_it(here: Path) -> None:
    pytest.importorskip("onnx")
    save_file(load_file(MODEL), "mine.safetensors")
    words = ["run", "fedavg", *WORDS, *NET, "--init", "mine.safetensors", "--freeze", "0.34"]
    assert main([*words, "--out", "mine", "--json"]) == 0
    Path("mine.safetensors").unlink()
    # The file is checked against torch, and so holds the frozen weights.
    assert main(["export", "mine", "--client", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--init", "none.safetensors"], "there is no such file"),
        (["--init", "text.safetensors"], "is not a safetensors file"),
        (["--init", "nan.safetensors"], "'conv1.weight' of nan.safetensors contains numbers that"),
        (["--init", MODEL, "--net", "bn-cnn2:width=8"], "does not fit net BnCnn: 'conv1.weight'"),
        (["--init", MODEL, "--net", "mlp"], "does not fit net Mlp: 'fc1.weight' is not in it"),
        (["--freeze", "0.25"], "less than one of the 3 layers with weights that this net has"),
        (["--freeze", "1"], "freeze is 1.0; it must be a share of the layers"),
        (["--freeze", "some"], "is 'some'; it must be a number"),
    ],
)
def test_refused_before_a_folder_is_made(
    words: list[str], sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.safetensors").write_text("only text")
    tensors = load_file(MODEL)
    tensors["conv1.weight"][0] = torch.nan
    save_file(tensors, "nan.safetensors")
    assert main(["run", "fedavg", *WORDS, *NET, *words, "--out", "mine"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not Path("mine").exists()


def test_costs_and_plans_know_what_is_frozen(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = summary_of(capsys, "cost", "fedavg", "--data", "digits", *NET)
    frozen = summary_of(capsys, "cost", "fedavg", "--data", "digits", *NET, "--freeze", "0.34")
    assert whole["params"] - frozen["params"] == 44
    assert whole["macs"] == frozen["macs"]
    assert frozen["bytes_up"] < whole["bytes_up"]
    # Forwards only through conv1: its 64 · 36 are counted once, not three times.
    work = [each["per_device"]["macs"]["max"] for each in (whole, frozen)]
    assert work[1] < work[0]
    by_shape = ["cost", "fedavg", "--input", "1x8x8", "--classes", "10", *NET, "--freeze", "0.34"]
    assert summary_of(capsys, *by_shape)["params"] == frozen["params"]
    plan = summary_of(capsys, "run", "fedavg", *WORDS, *NET, "--freeze", "0.34", "--dry-run")
    assert plan["config"]["run"]["freeze"] == 0.34
    assert plan["cost"]["params"] == frozen["params"]


def test_a_sweep_takes_both(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "fedavg", "local", *WORDS, *NET, "--init", MODEL, "--freeze", "0.34"]
    assert main([*words, "--seeds", "2", "--out", "all"]) == 0
    for config in Path("all").glob("*/config.toml"):
        assert tomllib.loads(config.read_text())["run"]["freeze"] == 0.34
    start = load_file(MODEL)
    models = list(Path("all").glob("*/models/*.safetensors"))
    assert models
    for path in models:
        model = load_file(path)
        assert all(torch.equal(model[name], start[name]) for name in FROZEN)


def test_from_python(here: Path) -> None:
    words: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 1, "progress": False}
    result = fg.run("fedavg", net="bn-cnn2:width=4", init=Path(MODEL), freeze=0.34, **words)
    assert result.summary["init"] == MODEL


def test_other_draws_keep_the_given_body(here: Path) -> None:
    """What ifca and safl start their other models from: another head is enough to tell them apart."""
    experiment = Experiment(methods.IFCA(), clients=3, net="bn-cnn2:width=4", init=MODEL)
    run = experiment.build(experiment.federation(), Memory(Path("memory")))
    start = load_file(MODEL)
    drawn = run.setup.fresh(1)
    for name, tensor in drawn.items():
        assert torch.equal(tensor, start[name]) == (not name.startswith("head")), name
