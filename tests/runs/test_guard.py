"""Errors in a user's own method: one sentence each, and other runs go on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import make_run, play

import fedgrove as fg
from fedgrove import methods
from fedgrove.cli import main
from fedgrove.engines import Serial
from fedgrove.errors import EngineError, MethodError
from fedgrove.runs.guard import server_metrics_of

FAULTS = {
    "plan": "def plan(self, state, cohort): return [1 / 0 for k in cohort]",
    "fold": "def fold(self, state, reports): return [1 / 0 for report in reports]",
    "deliver": "def deliver(self, state, client): return 1 / 0",
    "server_metrics": "def server_metrics(self, state): return {'a': 1 / 0}",
    "train_server": "def train_server(self, state, server): return 1 / 0",
    "predict": "def predict(self, net, model, x, carry): return 1 / 0",
    "work('use')": "def work(self, verb): return {'use': (), 'train': 1}[verb][1 / 0]",
    "expected": "def work(self, verb): return (Give(nothing, lambda task, net: 1 / 0),)",
    "nets": "def nets(self, net): return 1 / 0",
    "notes": "def notes(self, net): return 1 / 0",
}
TEXT = """
from dataclasses import dataclass
from fedgrove.core import Give, Outcome
from fedgrove.methods import FedAvg

nothing = lambda carry, client: Outcome()

@dataclass(frozen=True)
class Faulty(FedAvg):
    {fault}
"""
LINE = 10
"""Of the fault in that text."""
WORDS = ["--clients", "3", "--cohort", "2", "--rounds", "1", "--engine"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("function", FAULTS)
def test_an_error_in_a_users_file_is_a_sentence(
    function: str, engine: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Another text in every test: one that was imported before is not run again.
    (here / "bad.py").write_text(TEXT.format(fault=FAULTS[function]) + f"# {here}\n")
    assert main(["run", "bad.py:Faulty", *WORDS, engine]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    sentence = (
        f"faulty: {function} ended with ZeroDivisionError: division by zero (at bad.py, "
        f"line {LINE}); see bad.py"
    )
    assert sentence in said
    assert "Traceback" not in said


def test_a_sweep_goes_on_without_the_run_that_failed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.py").write_text(TEXT.format(fault=FAULTS["fold"]))
    words = ["sweep", "bad.py:Faulty", "fedavg", *WORDS, "serial", "--out", "both"]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "ended with ZeroDivisionError" in said.out + said.err
    members = json.loads((here / "both" / "sweep.json").read_text())["members"]
    assert {name: member["state"] for name, member in members.items()} == {
        "faulty-s0": "failed",
        "fedavg-s0": "done",
    }
    assert "at bad.py, line 10" in members["faulty-s0"]["why"]


def test_debug_shows_the_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bad.py").write_text(TEXT.format(fault=FAULTS["fold"]) + "# debug\n")
    monkeypatch.setenv("FEDGROVE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["run", "bad.py:Faulty", *WORDS, "serial"])


def test_a_bug_of_ours_is_no_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, state: Any, reports: Any) -> Any:
        return 1 / 0

    monkeypatch.setattr(methods.FedAvg, "fold", broken)
    with pytest.raises(ZeroDivisionError):
        play(make_run(methods.FedAvg(), tmp_path), Serial())


class Broken(Serial):
    """An engine with a bug."""

    def map(self, jobs: Any) -> Any:
        yield from ()
        raise ZeroDivisionError


class Mine(methods.FedAvg):
    """A user's method, whose ``fold`` draws the reports, and so meets what the engine raises."""


def test_an_engines_bug_is_not_laid_at_the_methods_door(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        play(make_run(Mine(), tmp_path), Broken())


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("init", "forgetful: init gives a NoneType; it must return a state, which has a round"),
        ("plan", "forgetful: plan gives a NoneType; it must return a list of tasks"),
        ("fold", "forgetful: fold gives a NoneType; it must return a state, which has a round"),
        ("deliver", "forgetful: a task sends a NoneType; deliver and plan must give packets"),
    ],
)
def test_a_function_that_returns_nothing(function: str, sentence: str) -> None:
    Forgetful = type("Forgetful", (methods.FedAvg,), {function: lambda *given: None})
    with pytest.raises((EngineError, MethodError), match=sentence):
        fg.run(Forgetful(), data="digits", clients=3, rounds=1, progress=False, engine="serial")


class Figured(methods.FedAvg):
    def server_metrics(self, state: Any) -> Any:
        return state


@pytest.mark.parametrize(
    "figure", [2, 2.0, np.float32(2), torch.tensor(2.0), torch.ones(1) * 2], ids=repr
)
def test_any_one_number_is_a_figure(figure: Any) -> None:
    figures = server_metrics_of(Figured(), {"a": figure})
    assert figures == {"figures": {"a": 2.0}}
    assert type(figures["figures"]["a"]) is float


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"a": float("nan")}, "the number 'a' of server_metrics is nan; give one finite number"),
        ({"a": torch.ones(2)}, r"the number 'a' of server_metrics is tensor\(\[1., 1.\]\)"),
        ({"a": None}, "the number 'a' of server_metrics is None"),
        (None, "server_metrics gives a NoneType; it must return a dictionary of numbers"),
    ],
)
def test_what_is_no_figure_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(MethodError, match=f"figured: {sentence}"):
        server_metrics_of(Figured(), given)


class OldNamed(methods.FedAvg):
    def figures(self, state: Any) -> Any:
        return {"a": 1}


def test_the_old_name_of_the_function_works() -> None:
    with pytest.warns(DeprecationWarning, match="oldnamed: figures is now server_metrics"):
        assert server_metrics_of(OldNamed(), None) == {"figures": {"a": 1.0}}


def test_from_python_the_cause_is_kept(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=re.escape("test_guard.py, line")) as caught:
        fg.run(Failing(), data="digits", clients=3, rounds=1, progress=False, engine="serial")
    cause = caught.value.__cause__
    assert isinstance(cause, MethodError)
    assert isinstance(cause.__cause__, ZeroDivisionError)


class Failing(methods.FedAvg):
    def fold(self, state: Any, reports: Any) -> Any:
        return 1 / 0
