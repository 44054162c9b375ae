"""What a method of one's own may do beside training one model, on every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports, small, tensors

from fedgrove import trees
from fedgrove.core import (
    AnyMethod,
    Batch,
    Carry,
    Client,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Start,
    Task,
    Train,
)
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched import engine as batched
from fedgrove.engines.batched.engine import Batched
from fedgrove.nets import Net, Output
from fedgrove.parts.aggregate import Averaging, WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import Objective, ProblemLoss
from fedgrove.parts.one_model import (
    average,
    deliver_model,
    initial_model,
    send_model,
    train_cohort,
)
from fedgrove.runs.rounds import evaluation
from fedgrove.trees import Tree
from fedgrove.wire.codec import Codec, Dense


@dataclass(frozen=True)
class Plain:
    """FedAvg, to be changed in one place by each test."""

    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start: Start) -> Any:
        return initial_model(start)

    def deliver(self, state: Any, client: int) -> Mapping[str, Packet]:
        return deliver_model(state)

    def plan(self, state: Any, cohort: Sequence[int]) -> list[Task]:
        return train_cohort(state, cohort)

    def fold(self, state: Any, reports: Iterable[Report]) -> Any:
        return average(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        return {"train": self.training(), "use": ()}[verb]

    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss(), self.local), Give(send_model))


@dataclass(frozen=True)
class Played:
    """What is left of a run: the state, what clients remember, and their scores."""

    state: Any
    tree: Tree
    scores: list[dict[str, float]]


def on_every_engine(method: AnyMethod, folder: Path, **words: Any) -> Played:
    """Play a run on every engine, compare what is left of it, and return that of serial."""
    played = {}
    for engine in (Serial(), Pool(workers=2), Wired(), Batched()):
        run = make_run(method, folder / engine.name, **words)
        state = play(run, engine)
        scores = []
        for report in reports(run, engine, evaluation(run, state, "finetune")):
            scores.append(dict(report.metrics))
        tree = {**tensors(state), **remembered(run)}
        played[engine.name] = Played(state, tree, scores)
        engine.close()
    serial = played["serial"]
    for name in ("pool", "wired"):
        assert trees.identical(played[name].tree, serial.tree), name
        assert played[name].scores == serial.scores, name
    assert trees.distance(played["batched"].tree, serial.tree) < 1e-9
    for mine, alone in zip(played["batched"].scores, serial.scores, strict=True):
        assert mine == pytest.approx(alone, abs=1e-9)
    return serial


# ---- what some clients remember, and others do not -----------------------------------------------


@dataclass(frozen=True)
class Drift(Objective):
    """A pull that only a client which took part before has (as in FedDC)."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        if "drift" not in carry:
            return 0 * out.logits.sum(), {}
        drift = trees.pick(carry["drift"], params)
        model = trees.pick(carry["model"], params)
        away = trees.map(torch.add, trees.sub(params, model), drift)
        return 0.25 * trees.sq_norm(away), {}


def keep_drift(carry: Carry, client: Client) -> Outcome:
    moved = trees.sub(carry["local"], carry["model"])
    drift = moved
    if "drift" in carry:
        drift = trees.map(torch.add, carry["drift"], moved)
    return Outcome({"model": Packet(carry["local"])}, memory={"drift": drift})


@dataclass(frozen=True)
class WithDrift(Plain):
    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss() + Drift(), self.local), Give(keep_drift))


def seen_twice(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    times = 2.0 if "seen" in carry else 1.0
    return {"examples": times * batch.weight.sum()}


def shifted(carry: Carry, client: Client) -> Outcome:
    shift = 1e-3 * float(carry["counted"]["examples"])
    model = trees.map(lambda v: v + shift, carry["local"])
    return Outcome({"model": Packet(model)}, memory={"seen": {"x": torch.zeros(1)}})


@dataclass(frozen=True)
class WithSeen(Plain):
    def training(self) -> tuple[Stage, ...]:
        return (
            Train(ProblemLoss(), self.local),
            Measure("counted", seen_twice),
            Give(shifted),
        )


@pytest.mark.parametrize("method", [WithDrift(), WithSeen()], ids=["in Train", "in Measure"])
def test_new_clients_among_old_ones(method: AnyMethod, tmp_path: Path) -> None:
    """In a cohort of three of four, some have the memory that a stage asks for and one has not."""
    on_every_engine(method, tmp_path)


ONE_STACK = ["fedavg", "ca-afp", "ditto", "fedchar", "fedbn", "lg-fedavg", "local", "clusterfl"]


@pytest.mark.parametrize("name", ONE_STACK)
def test_new_and_old_clients_of_our_own_methods_form_one_stack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ditto's personal model, FedBN's norms: who has them already must not cost a second stack."""
    counts = []
    split = batched.split_into_stacks

    def counted(jobs: Any, stage: Any) -> Any:
        stacks = split(jobs, stage)
        counts.append(len(stacks))
        return stacks

    monkeypatch.setattr(batched, "split_into_stacks", counted)
    sizes = (20, 13, 24, 17, 18, 19, 16, 15)
    run = make_run(small(name), tmp_path, net="bn-cnn2", sizes=sizes, cohort=4, rounds=2)
    # Two cohorts of four: some clients took part twice, and some never.
    state = play(run, Batched())
    list(reports(run, Batched(), evaluation(run, state, "finetune")))
    assert set(counts) == {1}
