"""Runs from a file, and runs again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedgrove as fg
from fedgrove import data
from fedgrove.cli import main
from fedgrove.config.assemble import read_config
from fedgrove.errors import InputError, InputErrors, Refusals
from fedgrove.methods import FedProx

FILE = """
[run]
method = "fedprox"
data = "digits"
net = "mlp:hidden=8"
clients = 4
cohort = 2
rounds = 2
epochs = 1

[set]
mu = 0.25
optimiser.lr = 0.01
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    return tmp_path


def summary(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(path) / "summary.json").read_text())
    return found


def test_a_file_by_hand_then_its_run_again_then_with_another_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ["--engine", "serial"]
    assert main(["run", "--config", "run.toml", "--out", "a", *engine]) == 0
    assert main(["rerun", "a", "--out", "b", *engine]) == 0
    assert main(["run", "--config", "a/config.toml", "--out", "c", *engine]) == 0
    config = Path("a/config.toml").read_text()
    assert "mu = 0.25" in config
    assert "lr = 0.01" in config
    assert "epochs = 1" in config
    assert config == Path("b/config.toml").read_text() == Path("c/config.toml").read_text()
    assert summary("a")["accuracy_clients"] == summary("b")["accuracy_clients"]
    capsys.readouterr()
    words = ["--seed", "3", "--set", "mu=0.5", "--lr", "0.02", "--dry-run", "--json"]
    assert main(["rerun", "a", *words]) == 0
    plan = json.loads(capsys.readouterr().out)["config"]
    assert plan["run"]["seed"] == 3
    assert plan["run"]["rounds"] == 2
    assert plan["method"]["pull"]["mu"] == 0.5
    assert plan["method"]["local"]["optimiser"]["lr"] == 0.02
    assert plan["method"]["local"]["epochs"] == 1


def test_python_reruns_with_changes(tmp_path: Path) -> None:
    words: dict[str, Any] = {"engine": "serial", "progress": False}
    first = fg.rerun("run.toml", out="a", **words)
    again = fg.rerun("a", **words)
    assert again.summary["accuracy_clients"] == first.summary["accuracy_clients"]
    other = fg.rerun("a", method="fedavg", rounds=1, lr=0.1, **words)
    assert other.summary["method"] == "fedavg"
    assert other.summary["rounds"] == 1
    with pytest.raises(InputErrors) as caught:
        fg.rerun("a", rounds=0, seed=-1, **words)
    assert caught.value.sentences[0] == "rounds is 0; it must be 1 to 1000000."
    with pytest.raises(TypeError, match=r"argument 'round'; did you mean 'rounds'\?"):
        fg.rerun("a", round=3, seed=-1, **words)


def test_a_file_with_several_mistakes_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text(
        '[run]\nmethod = "fedproxx"\nround = 3\nseed = "x"\ndata = "digitts"\n[sett]\nmu = 1\n'
    )
    assert main(["run", "--config", "bad.toml"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "fedgrove: 5 things are wrong:"
    assert [line.split("'")[1] for line in lines] == ["sett", "round", "x", "fedproxx", "digitts"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds: 3", "bad.toml is not TOML: "),
        ("format = 1", "bad.toml is of format 1, and this version of fedgrove reads format 2"),
        ("run = 3", r"run of bad.toml is 3; it must be a table: write \[run\]."),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence(text: str, sentence: str) -> None:
    Path("bad.toml").write_text(text)
    with pytest.raises(InputError, match=f"^{sentence}"):
        fg.rerun("bad.toml")


def test_a_file_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"^there is no file or folder no\.toml; give a file"):
        fg.rerun("no.toml")


def test_the_option_is_named_if_its_file_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", "no.toml"]) == 2
    sentence = "fedgrove: --config is no.toml, and there is no such file or folder; give a file"
    assert capsys.readouterr().err.startswith(sentence)


def test_code_that_a_file_names_is_run_only_if_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.py").write_text("raise SystemError('run')")
    Path("own.toml").write_text('[run]\nmethod = "fedavg"\nnet = "x.py:Net"\n')
    assert main(["run", "--config", "own.toml"]) == 2
    assert 'own.toml has net = "x.py:Net", so the code in' in capsys.readouterr().err
    # Another net in its place: nothing is run, and nothing need be trusted.
    assert main(["run", "--config", "own.toml", "--net", "mlp", "--dry-run"]) == 0


def test_data_made_in_python_must_be_given_again() -> None:
    words: dict[str, Any] = {"engine": "serial", "progress": False, "rounds": 1}
    federation = data.load("digits", clients=3)
    fg.run("fedavg", data=federation, out="a", **words)
    with pytest.raises(InputError, match=r"^the data of a was made in Python, which a file cannot"):
        fg.rerun("a")
    assert fg.rerun("a", data=federation, **words).summary["rounds"] == 1


def test_what_is_replaced_is_not_looked_at() -> None:
    refusals = Refusals()
    Path("c.toml").write_text('[run]\nmethod = "nosuch"\nseed = "x"\n')
    wanted = read_config("c.toml", {"method": FedProx(), "seed": 1}, refusals)
    assert wanted == (None, {}, {})
    assert refusals.sentences == []
