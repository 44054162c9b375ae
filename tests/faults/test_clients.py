"""What a client's own code may do to a run: nothing but lose its task."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, tensors

import fedgrove as fg
from fedgrove import methods, trees
from fedgrove.core import (
    SCORING_VERBS,
    Answer,
    Carry,
    Client,
    Engine,
    Give,
    Job,
    Outcome,
    Packet,
    Report,
    Stage,
    Train,
)
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import EngineError
from fedgrove.parts.one_model import send_model
from fedgrove.runs.folder import CHECKPOINT, RunFolder
from fedgrove.runs.lockstep import Member, train_alone

ENGINES: dict[str, Callable[[], Engine]] = {
    "serial": Serial,
    "wired": Wired,
    "pool": lambda: Pool(workers=2),
    "batched": Batched,
}


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@dataclass(frozen=True)
class Odd(methods.FedAvg):
    """FedAvg in which client 1 does something odd when it is to send."""

    what: str = ""

    def work(self, verb: str) -> tuple[Stage, ...]:
        if verb != "train":
            return ()
        return (Train(self.objective, self.local), Give(self.send))

    def send(self, carry: Carry, client: Client) -> Outcome:
        if client.id != 1:
            return send_model(carry, client)
        if self.what == "exit":
            sys.exit(0)
        if self.what == "generator exit":
            raise GeneratorExit
        if self.what == "mute":
            raise Mute
        if self.what == "many lines":
            raise RuntimeError("first line\n" + 100 * "another line\n")
        if self.what == "sparse":
            sparse = {k: v.to_sparse() for k, v in carry["local"].items()}
            return Outcome({"model": Packet(sparse)})
        if self.what == "slash":
            return Outcome({"model": Packet(carry["local"])}, memory={"a/b": {"w": torch.ones(1)}})
        if self.what == "in place":
            for leaf in carry["model"].values():
                leaf.add_(100.0)
        return send_model(carry, client)


def trained(what: str, folder: Path, engine: Engine) -> Member:
    run = make_run(Odd(what=what), folder / CHECKPOINT, rounds=2, cohort=4)
    member = Member(run, RunFolder.create(folder, ""), every=0)
    try:
        train_alone(member, engine)
    finally:
        engine.close()
    return member


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "what", ["exit", "generator exit", "mute", "many lines", "sparse", "slash"]
)
def test_a_clients_code_loses_its_own_task_only(what: str, engine: str, tmp_path: Path) -> None:
    member = trained(what, tmp_path / "run", ENGINES[engine]())
    summary: Any = member.summary
    not_folded = {**summary["lost"], **summary["refused"]}
    assert sum(not_folded.values()) == 2
    for line in member.folder.metrics():
        for sentence in line["why"].values():
            assert "\n" not in sentence
            assert len(sentence) < 500


@pytest.mark.parametrize("engine", ["serial", "wired", "pool"])
def test_work_in_place_does_not_reach_the_servers_model(engine: str, tmp_path: Path) -> None:
    """The trained model is another tensor: only what was sent is spoilt, on the client."""
    spoilt = trained("in place", tmp_path / "spoilt", ENGINES[engine]())
    clean = trained("", tmp_path / "clean", Serial())
    expected = tensors(clean.exchange.state)
    assert trees.identical(tensors(spoilt.exchange.state), expected)


def test_where_clients_share_tensors_work_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="in place; clone them first"):
        trained("in place", tmp_path / "run", Batched())


# ---- what a client may claim about its own scores ------------------------------------------------


class Boaster(Serial):
    """The serial engine, with a client 0 that reports a number of its own choice when it is scored."""

    def __init__(self, name: str, number: float) -> None:
        super().__init__()
        self.claimed = {name: number}

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job, answer in super().map(jobs):
            _, task = job
            is_scored = task.to == 0 and task.verb in SCORING_VERBS
            if is_scored and isinstance(answer, Report):
                answer = replace(answer, metrics={**answer.metrics, **self.claimed})
            yield job, answer


@pytest.mark.parametrize(
    ("data", "name", "number"),
    [
        # Its square is too large for a number, and an error has no upper bound.
        ("diabetes", "test0", 1e200),
        ("digits", "test_loss0", 1.7e308),
        ("digits", "validation0", -1.0),
        ("digits", "params", 1e80),
        ("digits", "diverged", 2.0),
    ],
)
def test_an_absurd_score_costs_its_report_and_not_the_run(
    data: str, name: str, number: float, tmp_path: Path
) -> None:
    engine: Any = Boaster(name, number)
    words: dict[str, Any] = {"clients": 4, "cohort": 4, "rounds": 1, "progress": False}
    result = fg.run("fedavg", data=data, engine=engine, out=tmp_path / "run", **words)
    (line,) = result.folder.metrics()
    assert line["unscored"] == {"metrics": [0]}
    assert result.summary["scored"] == 3
    # As others read it: without a number that is none.
    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
