"""Clients that fail in a stack: they are lost, and nobody beside them is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run
from torch import Tensor, nn

from fedgrove import methods, trees
from fedgrove.core import (
    Answer,
    Batch,
    Carry,
    Client,
    Edit,
    Engine,
    Give,
    Lost,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Task,
    Train,
)
from fedgrove.data.federation import Examples
from fedgrove.engines import Serial
from fedgrove.engines.batched import engine as batched_engine
from fedgrove.engines.batched import launching
from fedgrove.engines.batched.engine import Batched
from fedgrove.nets import Net
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.run import Run
from fedgrove.trees import Tree

BAD = 2
SIZES = (20, 13, 24, 17, 9, 20, 13, 24)


def answers(run: Run, engine: Engine) -> list[Answer]:
    jobs = [(run, Task(k, {"model": Packet(run.params)})) for k in run.infos]
    found = list(engine.map(jobs))
    assert [job[1] for job, _ in found] == [task for _, task in jobs]
    return [answer for _, answer in found]


def check_only_bad_is_lost(run: Run, words: str) -> None:
    """The same loss as alone, and the others' results are those of serial."""
    for mine, alone in zip(answers(run, Batched()), answers(run, Serial()), strict=True):
        assert mine.of == alone.of
        if mine.of == BAD:
            assert isinstance(mine, Lost)
            assert isinstance(alone, Lost)
            assert mine.reason == alone.reason == "crashed"
            assert words in mine.detail
            assert mine.cost == alone.cost
        else:
            assert isinstance(mine, Report), mine
            assert isinstance(alone, Report)
            distance = trees.distance(mine.give["model"].values, alone.give["model"].values)
            assert distance < 1e-10


# ---- every stage, on one client --------------------------------------------------------------------


def only_bad(f: Callable[[Carry], Any]) -> Callable[[Carry, Client], Any]:
    def on_carry(carry: Carry, client: Client) -> Any:
        return f(carry) if client.id == BAD else carry

    return on_carry


def raised(carry: Carry) -> Carry:
    raise ZeroDivisionError("a bug")


def without_model(carry: Carry) -> Carry:
    return {name: tree for name, tree in carry.items() if name != "model"}


def other_shape(carry: Carry) -> Carry:
    return {**carry, "model": {name: leaf[:1] for name, leaf in carry["model"].items()}}


EDITS: dict[str, tuple[Callable[[Carry], Any], str]] = {
    "raises": (raised, "could not train: ZeroDivisionError: a bug (at test_losses.py, line "),
    "gives no carry": (lambda carry: None, "NoneType"),
    "gives no tree": (lambda carry: {**carry, "model": 3}, "int"),
    "gives another shape": (other_shape, "Error"),
    "leaves the model out": (without_model, "KeyError"),
}


def give(carry: Carry, client: Client) -> Outcome:
    return Outcome({"model": Packet(carry["local"])})


def give_but_bad(carry: Carry, client: Client) -> Outcome:
    if client.id == BAD:
        raise ZeroDivisionError("a bug in Give")
    return give(carry, client)


def mean_input(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    return {"sum": (batch.x.flatten(1).sum(1) * batch.weight).sum() + carry["offset"]["by"]}


@dataclass(frozen=True)
class Staged(methods.FedAvg):
    """FedAvg with other stages; a key says which."""

    kind: str = ""

    def work(self, verb: str) -> tuple[Stage, ...]:
        train = Train(self.objective, self.local)
        if self.kind in EDITS:
            f, _ = EDITS[self.kind]
            return (Edit(only_bad(f)), train, Give(give))
        if self.kind == "give":
            return (train, Give(give_but_bad))
        assert self.kind == "measure"
        offset = {"by": torch.zeros((), dtype=torch.float64)}
        odd = Edit(
            lambda carry, client: {**carry, "offset": {} if client.id == BAD else offset},
        )
        return (odd, Measure("mean", mean_input), train, Give(give))


def staged(kind: str, folder: Path, **words: Any) -> Run:
    method = Staged(kind=kind, local=LocalTraining(2, 8, SGD(0.1)))
    return make_run(method, folder, sizes=SIZES, cohort=len(SIZES), **words)


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_an_edit_that_fails_or_spoils_the_carry(kind: str, net: str, tmp_path: Path) -> None:
    check_only_bad_is_lost(staged(kind, tmp_path, net=net), EDITS[kind][1])


def test_a_give_that_fails(tmp_path: Path) -> None:
    check_only_bad_is_lost(staged("give", tmp_path), "ZeroDivisionError: a bug in Give")


def test_a_measure_that_fails(tmp_path: Path) -> None:
    check_only_bad_is_lost(staged("measure", tmp_path), "KeyError: 'by'")


# ---- a training that fails -------------------------------------------------------------------------


class Touchy(nn.Module):
    """Refuses inputs that are far too large, as a network that checks its input might."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.detach().max() > 1e3):
            raise ZeroDivisionError("the input is too large")
        return self.head(x)


def touchy(folder: Path, method: Any = None) -> Run:
    """A run in which the training data of one client are too large for its network."""
    torch.manual_seed(0)
    made = make_run(
        method or methods.FedAvg(local=LocalTraining(2, 8, SGD(0.1))),
        folder,
        sizes=SIZES,
        cohort=len(SIZES),
    )
    data = made.federation.clients[BAD]
    spoilt = replace(data, train=Examples(data.train.x + 1e4, data.train.y))
    federation = replace(made.federation, clients={**made.federation.clients, BAD: spoilt})
    return replace(made, federation=federation, net=Net(Touchy().double(), (12,)))


def test_a_training_that_fails_on_one_clients_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    train_stack = launching.train_stack

    def counted(stack: Any) -> Any:
        sizes.append(len(stack.hyperparameters))
        return train_stack(stack)

    monkeypatch.setattr(launching, "train_stack", counted)
    # Its look at the data would have it trained one client at a time.
    monkeypatch.setattr(batched_engine, "can_stack", lambda net, device: True)
    check_only_bad_is_lost(touchy(tmp_path), "ZeroDivisionError: the input is too large")
    # Halves, until client 2 is alone; those without it are trained as they are.
    assert sizes == [8, 4, 2, 2, 1, 1, 4]


@dataclass(frozen=True)
class InPlace(methods.FedAvg):
    """Trains the model where it is: to do it twice would show."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        return (
            Train(self.objective, self.local, end="model"),
            Give(lambda carry, client: Outcome({"model": Packet(carry["model"])})),
        )


def test_nobody_is_trained_twice_where_memory_is_short_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half is trained before the second one fails, and is then tried again."""
    train_stack = launching.train_stack

    def tight(stack: Any) -> Any:
        if len(stack.hyperparameters) > 2:
            raise torch.OutOfMemoryError("no room")
        return train_stack(stack)

    monkeypatch.setattr(launching, "train_stack", tight)
    run = touchy(tmp_path, InPlace(local=LocalTraining(2, 8, SGD(0.1))))
    check_only_bad_is_lost(run, "ZeroDivisionError: the input is too large")


def test_all_may_fail(tmp_path: Path) -> None:
    run = touchy(tmp_path)
    hot = {}
    for k, client in run.federation.clients.items():
        hot[k] = replace(client, train=run.federation.clients[BAD].train)
    found = answers(replace(run, federation=replace(run.federation, clients=hot)), Batched())
    assert [answer.reason for answer in found if isinstance(answer, Lost)] == ["crashed"] * 8
