"""Optimiser states that clients keep from round to round, for every method and on every engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, tensors
from tests.contract import small
from torch import Tensor

import fedgrove as fg
from fedgrove import methods, trees
from fedgrove.core import Engine
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.methods import AdFedWCP, Ditto, FedAvg, FedWCP, Local
from fedgrove.methods.adfedwcp.centroids import Adaptive
from fedgrove.parts import local
from fedgrove.parts.augment import Augment
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.runs.run import Run

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]
# A larger eps than usual: see tests/contracts/test_batched.py.
ADAM = Adam(1e-2, eps=1e-3)
MOMENTUM = SGD(0.05, momentum=0.9, weight_decay=1e-3)
KEPT = LocalTraining(2, 8, ADAM, keep_state=True)


def states(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of all that clients remember is of optimisers."""
    return {name: leaf for name, leaf in memory.items() if "/optimiser." in name}


def others(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in memory.items() if "/optimiser." not in name}


def first_tasks(run: Run) -> tuple[Any, dict[str, Tensor]]:
    """The reports of the first exchange, and what clients remember after it."""
    engine = Serial()
    jobs = [(run, task) for task in plan(run, run.initial_state)]
    given = {}
    for (_, task), answer in engine.map(jobs):
        given[task.to] = {name: packet.values for name, packet in answer.give.items()}
        run.memory.accept(task.to, answer.memory)
    return given, remembered(run)


@pytest.mark.parametrize("method", EVERY)
def test_in_the_first_exchange_it_is_the_form_that_is_reset(method: Any, tmp_path: Path) -> None:
    found = []
    for recipe in (KEPT, replace(KEPT, keep_state=False)):
        run = make_run(
            replace(method, local=recipe), tmp_path / str(recipe.keep_state), net="bn-cnn2"
        )
        found.append(first_tasks(run))
    (kept_gives, kept_memory), (gives, memory) = found
    for client, packets in gives.items():
        for name, values in packets.items():
            assert trees.identical(values, kept_gives[client][name])
    assert trees.identical(memory, others(kept_memory))
    assert not states(memory)


@pytest.mark.parametrize("method", EVERY)
def test_stacked_clients_keep_what_clients_alone_keep(method: Any, tmp_path: Path) -> None:
    """Masks, removed channels, several models and clients that are new among others included."""
    found = []
    for engine in (Serial(), Batched()):
        run = make_run(
            replace(method, local=KEPT),
            tmp_path / engine.name,
            net="bn-cnn2",
            sizes=(12, 9, 17, 10, 5),
        )
        found.append((tensors(play(run, engine)), remembered(run)))
    (expected, expected_memory), (mine, memory) = found
    assert trees.distance(expected, mine) < 1e-9
    assert expected_memory.keys() == memory.keys()
    assert trees.distance(expected_memory, memory) < 1e-9


FEW = [
    pytest.param(Ditto(), id="ditto"),
    pytest.param(AdFedWCP(allocation=Adaptive(k_min=3, k_max=8)), id="adfedwcp"),
    pytest.param(FedWCP(k=3, zero_pruned="batch"), id="fedwcp-batch"),
    pytest.param(small("safl"), id="safl"),
]


@pytest.mark.parametrize("optimiser", [ADAM, MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.parametrize("method", FEW)
def test_every_engine_keeps_the_same(method: Any, optimiser: Any, tmp_path: Path) -> None:
    engines: list[Engine] = [Serial(), Wired(), Pool(workers=2), Batched()]
    found = []
    for engine in engines:
        recipe = LocalTraining(1, 8, optimiser, keep_state=True)
        run = make_run(replace(method, local=recipe), tmp_path / engine.name, net="bn-cnn2")
        found.append((tensors(play(run, engine)), remembered(run)))
        engine.close()
    (serial, memory), *exact, (stacked, stacked_memory) = found
    assert states(memory)
    for state, mine in exact:
        assert trees.identical(serial, state)
        assert trees.identical(memory, mine)
    assert trees.distance(serial, stacked) < 1e-9
    assert trees.distance(memory, stacked_memory) < 1e-9


def test_every_engine_augments_projects_and_keeps_the_same(tmp_path: Path) -> None:
    """Three settings of one step: images change, pruned weights are 0 before it, states go on."""
    engines: list[Engine] = [Serial(), Wired(), Pool(workers=2), Batched()]
    found = []
    for engine in engines:
        recipe = replace(KEPT, augment=Augment())
        method = FedWCP(k=3, zero_pruned="batch", local=recipe)
        run = make_run(method, tmp_path / engine.name, net="bn-cnn2")
        model = play(run, engine).model
        found.append(model | remembered(run))
        engine.close()
    serial, *exact, stacked = found
    assert states(serial)
    for mine in exact:
        assert trees.identical(serial, mine)
    assert trees.distance(serial, stacked) < 1e-9
    # Without any of the three it is another run.
    for name, other in {
        "plain": FedWCP(k=3, zero_pruned="batch", local=KEPT),
        "kept": FedWCP(k=3, local=recipe),
        "reset": replace(method, local=replace(recipe, keep_state=False)),
    }.items():
        run = make_run(other, tmp_path / name, net="bn-cnn2")
        assert trees.distance(model, play(run, Serial()).model) > 1e-4


# ---- what is kept, against torch's own optimisers ------------------------------------------------


def oracle(run: Run, rule: Any, rounds: int, resets: bool) -> dict[str, Tensor]:
    """A client's model after all rounds of ``local``, trained by torch's optimiser."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in run.params.items()}

    def begin() -> torch.optim.Optimizer:
        if isinstance(rule, Adam):
            return torch.optim.Adam(params.values(), lr=rule.lr, eps=rule.eps)
        return torch.optim.SGD(
            params.values(), rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay
        )

    optimiser = begin()
    for round in range(rounds):
        if resets:
            optimiser = begin()
        (task,) = [replace(task, round=round) for task in plan(run, run.initial_state)]
        client = run.client(task, {})
        for batch in local.epochs(run.net, run.work("train")[1], client, 0):
            optimiser.zero_grad()
            logits = run.net(params, batch.x, train=True).logits
            torch.nn.functional.cross_entropy(logits, batch.y).backward()
            optimiser.step()
    return {name: leaf.detach() for name, leaf in params.items()}


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("rule", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_rounds_are_those_of_one_optimiser_of_torchs(
    rule: Any, keep_state: bool, tmp_path: Path
) -> None:
    """Moments and Adam's step counter go on; reset, each round has an optimiser of its own."""
    method = Local(local=LocalTraining(2, 8, rule, keep_state=keep_state))
    run = make_run(method, tmp_path, sizes=(20,), rounds=4)
    play(run, Serial())
    memory = run.memory.read(0, run.memory.files[0])
    expected = oracle(run, rule, 4, resets=not keep_state)
    assert trees.distance(expected, memory["kept"]) < 1e-12
    wrong = oracle(run, rule, 4, resets=keep_state)
    assert trees.distance(wrong, memory["kept"]) > 1e-4
    if keep_state and isinstance(rule, Adam):
        # 20 examples in batches of 8, 2 epochs, 4 rounds.
        assert float(memory["optimiser.train.0.t"]["t"]) == 3 * 2 * 4


@pytest.mark.parametrize("rule", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_one_client_trains_as_in_one_long_training(rule: Any, tmp_path: Path) -> None:
    """In batches of all examples, whose order does not matter: 4 rounds of 1 epoch, 1 of 4."""
    found = {}
    for name, epochs, rounds, keep in (
        ("long", 4, 1, False),
        ("kept", 1, 4, True),
        ("reset", 1, 4, False),
    ):
        method = FedAvg(local=LocalTraining(epochs, 20, rule, keep_state=keep))
        run = make_run(method, tmp_path / name, sizes=(20,), rounds=rounds)
        found[name] = play(run, Serial()).model
    assert trees.distance(found["long"], found["kept"]) < 1e-12
    assert trees.distance(found["long"], found["reset"]) > 1e-4


# ---- around it -----------------------------------------------------------------------------------


def test_each_model_of_a_client_has_a_state_of_its_own(tmp_path: Path) -> None:
    run = make_run(Ditto(local=KEPT), tmp_path, cohort=4)
    play(run, Serial())
    memory = run.memory.read(0, run.memory.files[0])
    assert {name for name in memory if name.startswith("optimiser.")} == {
        f"optimiser.train.{number}.{slot}" for number in (0, 1) for slot in ("m", "v", "t")
    }
    shared = memory["optimiser.train.0.m"]
    personal = memory["optimiser.train.1.m"]
    assert trees.distance(shared, personal) > 1e-6
    assert {k: v.shape for k, v in shared.items()} == {k: v.shape for k, v in run.params.items()}


def test_a_state_of_another_optimiser_is_not_used(tmp_path: Path) -> None:
    run = make_run(Local(local=LocalTraining(1, 8, MOMENTUM, keep_state=True)), tmp_path)
    play(run, Serial())
    other = replace(run, method=Local(local=LocalTraining(1, 8, ADAM, keep_state=True)), rounds=5)
    fresh = replace(other, method=Local(local=LocalTraining(1, 8, ADAM)))
    for number, task in enumerate(plan(other, other.initial_state)):
        (_, kept) = next(iter(Serial().map([(other, task)])))
        (_, reset) = next(iter(Serial().map([(fresh, task)])))
        mine = other.memory.read(task.to, kept.memory)
        # SGD's v is one vector like Adam's, but there is no m: all of Adam's state begins at 0.
        assert trees.identical(mine["kept"], fresh.memory.read(task.to, reset.memory)["kept"])
        assert float(mine["optimiser.train.0.t"]["t"]) > 0, number


def test_fine_tuning_begins_with_an_optimiser_of_its_own(tmp_path: Path) -> None:
    run = make_run(FedAvg(local=KEPT), tmp_path, cohort=4)
    state = play(run, Serial())
    before = states(remembered(run))
    reset = replace(run, method=FedAvg(local=replace(KEPT, keep_state=False)))
    for task in plan_scoring(run, state, "finetune"):
        (_, mine) = next(iter(Serial().map([(run, task)])))
        (_, other) = next(iter(Serial().map([(reset, replace(task, memory=None))])))
        assert mine.metrics == other.metrics
        run.memory.accept(task.to, mine.memory)
    assert trees.identical(before, states(remembered(run)))


def test_runs_in_lockstep_keep_states_apart(tmp_path: Path) -> None:
    """Equal in the first round, which is trained once, and different from then on."""
    found = {}
    for engine in ("serial", "batched"):
        for decay in (1.0, 0.5):
            recipe = LocalTraining(1, 8, ADAM, decay=decay, keep_state=True)
            run = make_run(Ditto(local=recipe), tmp_path / f"{engine}{decay}", cohort=4)
            found[engine, decay] = run
    for decay in (1.0, 0.5):
        play(found["serial", decay], Serial())
    engine = Batched()
    together = [found["batched", decay] for decay in (1.0, 0.5)]
    loops = [fg.runs.rounds.rounds(run) for run in together]
    exchanges = [next(loop) for loop in loops]
    while exchanges[0].tasks:
        jobs = [
            (run, task)
            for run, exchange in zip(together, exchanges, strict=True)
            for task in exchange.tasks
        ]
        answers: list[list[Any]] = [[], []]
        for (run, task), answer in engine.map(jobs):
            answers[together.index(run)].append((task, answer))
        exchanges = [loop.send(own) for loop, own in zip(loops, answers, strict=True)]
    for decay in (1.0, 0.5):
        expected = remembered(found["serial", decay])
        assert trees.distance(expected, remembered(found["batched", decay])) < 1e-9


@pytest.mark.parametrize("name", ["ditto", "adfedwcp"])
def test_a_resumed_run_goes_on_exactly(name: str, tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "data": "digits",
        "clients": 3,
        "cohort": 2,
        "engine": "serial",
        "progress": False,
        "set": ["local.keep_state=true", "local.epochs=1"],
    }
    whole = fg.run(name, rounds=4, out=tmp_path / "whole", **words)

    class Stopped(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        fg.run(name, rounds=4, out=tmp_path / "part", watch=stop, **words)
    resumed = fg.resume(tmp_path / "part", progress=False)
    for name in ("accuracy_clients", "bytes_up", "bytes_down"):
        assert whole.summary[name] == resumed.summary[name]
    assert last_memories(whole) == last_memories(resumed)


def last_memories(result: Any) -> dict[str, str]:
    """The newest file of each client, whose name has its round and its checksum."""
    newest: dict[str, str] = {}
    files = (result.folder.path / "checkpoint").glob("client-*.safetensors")
    for name in sorted((path.name for path in files), key=lambda name: int(name.split(".")[1])):
        newest[name.split(".")[0]] = name
    assert len(newest) == 3
    return newest
