"""Training that diverges is reported, costs its report, and leaves the last finite model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, list_again, make_run
from tests.engines.loopback import looped

import fedgrove as fg
from fedgrove.cli import main
from fedgrove.core import Carry, Client, Edit, Engine, Report, Stage, Train
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.pool.engine import Pool
from fedgrove.engines.serial import Serial
from fedgrove.engines.wired import Wired
from fedgrove.errors import EngineError, InputError
from fedgrove.methods import Ditto, FedAvg, Local
from fedgrove.runs import scoring
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.memory import read_tree, write_tree
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run
from fedgrove.trees import identical, is_finite

ENGINES: dict[str, Callable[[Run], Engine]] = {
    "serial": lambda run: Serial(),
    "wired": lambda run: Wired(),
    "pool": lambda run: Pool(workers=2),
    "batched": lambda run: Batched("cpu"),
    "flower": looped,
}


@dataclass(frozen=True)
class Spoil:
    """Makes a tree of some clients NaN from a round on."""

    tree: str
    clients: tuple[int, ...]
    since: int = 0

    def __call__(self, carry: Carry, client: Client) -> Carry:
        if client.id not in self.clients or int(carry["settings"]["round"]) < self.since:
            return carry
        spoilt = {name: leaf * math.nan for name, leaf in carry[self.tree].items()}
        return {**carry, self.tree: spoilt}


@dataclass(frozen=True)
class Diverging(Ditto):
    """Ditto whose personal models diverge at some clients; the shared model stays finite."""

    clients: tuple[int, ...] = (1,)
    since: int = 1

    def work(self, verb: str) -> tuple[Stage, ...]:
        stages = super().work(verb)
        if verb != "train":
            return stages
        return (*stages[:-1], Edit(Spoil("personal", self.clients, self.since)), stages[-1])


def trained(method: Any, name: str, folder: Path, **words: Any) -> tuple[Any, RunFolder]:
    made = RunFolder.create(folder, "")
    run = make_run(method, folder / "checkpoint", **{"cohort": 4, "rounds": 3, **words})
    engine = ENGINES[name](run)
    try:
        return train_alone(Member(run, made), engine), made
    finally:
        engine.close()


@pytest.mark.parametrize("name", ENGINES)
def test_a_client_that_diverges_keeps_its_last_finite_model(name: str, tmp_path: Path) -> None:
    summary, folder = trained(Diverging(), name, tmp_path / name, finetune=(0,))
    # Round 1 is good; rounds 2 and 3 of client 1 are lost.
    assert summary["lost"] == {"diverged": 2}
    assert summary["diverged"] == {"training": [1]}
    lost = [line.get("lost") for line in folder.metrics()]
    assert lost == [None, {"diverged": [1]}, {"diverged": [1]}]
    why = folder.metrics()[1]["why"]["diverged"]
    assert "client 1" in why
    assert "learning rate (lr)" in why
    (note,) = [note for note in summary["notes"] if note.startswith("training diverged at 1 of 4")]
    assert "lr" in note
    for client in folder.models():
        assert is_finite(folder.tree(folder.models()[client])), client
    alone, other = trained(Diverging(since=3), "serial", tmp_path / "one", rounds=1, finetune=(0,))
    assert "diverged" not in alone
    model = folder.models()[1]
    tolerance = 1e-9 if name == "batched" else 0.0
    for leaf, value in folder.tree(model).items():
        torch.testing.assert_close(value, other.tree(model)[leaf], rtol=tolerance, atol=tolerance)


def test_a_model_that_never_travels_is_covered_too(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class DivergingLocal(Local):
        def work(self, verb: str) -> tuple[Stage, ...]:
            stages = super().work(verb)
            if verb != "train":
                return stages
            return (*stages[:-1], Edit(Spoil("local", (2,))), stages[-1])

    summary, folder = trained(DivergingLocal(), "serial", tmp_path / "run", finetune=(0,))
    assert summary["diverged"] == {"training": [2], "initial": [2]}
    assert any("the model is the initial one" in note for note in summary["notes"])
    initial = make_run(Local(), tmp_path / "again").params
    own = folder.tree(folder.models()[2])
    assert identical(own, {name: leaf.float() for name, leaf in initial.items()})


@pytest.mark.parametrize("name", ["serial", "batched"])
def test_a_fine_tuning_that_diverges_keeps_the_model_before_it(name: str, tmp_path: Path) -> None:
    run = make_run(FedAvg(), tmp_path / "run" / "checkpoint", cohort=4, rounds=1, finetune=(0, 1))
    stages = list(run.work("finetune"))
    place = next(n for n, stage in enumerate(stages) if isinstance(stage, Train))
    stages.insert(place + 1, Edit(Spoil("tuned1", (3,))))
    tasks = plan_scoring(run, run.initial_state, "finetune")
    engine = ENGINES[name](run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "work", lambda self, verb: tuple(stages))
        reports = {}
        for task, answer in answers(run, engine, tasks):
            assert isinstance(answer, Report)
            reports[task.to] = answer
    assert {k: scoring.DIVERGED in r.metrics for k, r in reports.items()} == {
        0: False,
        1: False,
        2: False,
        3: True,
    }
    assert reports[3].metrics["test1"] == reports[3].metrics["test0"]
    kept = run.memory.read(3, reports[3].memory)["own"]
    assert identical(kept, dict(tasks[3].send["model"].values))


def test_a_learning_rate_that_is_too_high_is_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["run", "ditto", "--data", "digits", "--clients", "6", "--lr", "1000", "--rounds", "2"]
    assert main([*words, "--engine", "serial", "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    summary = json.loads((out / "summary.json").read_text())
    # Adam's steps are as long as lr whatever the gradient: weights are finite, and useless.
    assert "is not clearly better than chance" in shown
    assert "learning rate (lr)" in shown
    assert "is not clearly better than chance" in (out / "report.html").read_text()
    assert any("is not clearly better than chance" in note for note in summary["notes"])


def test_a_run_without_a_finite_report_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"learning rate \(lr\)"):
        fg.run(
            "local",
            data="digits",
            clients=3,
            rounds=2,
            lr=1e38,
            engine="serial",
            out=tmp_path / "run",
        )


def test_a_model_of_an_older_run_that_diverged_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fg.run("ditto", data="digits", clients=3, rounds=1, net="mlp:hidden=4", out=folder)
    path = folder / "models" / "client-00001.safetensors"
    write_tree(path, {name: leaf * math.nan for name, leaf in read_tree(path).items()})
    list_again(folder)
    with pytest.raises(InputError, match=r"training diverged\. Run it again with a lower learning"):
        fg.load_run(folder).model(1)
