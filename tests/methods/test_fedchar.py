"""FedCHAR: groups after the warm-up, and a personal model beside the group's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import answers, make_run, play
from tests.contract import Contract

from fedgrove import methods, trees
from fedgrove.core import Task
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import FedCHAR
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import Proximal
from fedgrove.parts.personal import use_personal
from fedgrove.runs.rounds import plan_scoring, rounds
from fedgrove.runs.run import Run

CONTRACT = Contract(
    # As Ditto.
    off=FedCHAR(warmup=1, clusters=1),
    paper_bytes=8 * 5187 * 3 * 51,
    forms_groups_with={"warmup": 1},
    for_a_million={"ask": 5},
)


def two_kinds(run: Run) -> Run:
    """Odd clients label every class as the next one."""
    for k, client in run.federation.clients.items():
        if k % 2:
            run.federation.clients[k] = replace(
                client, train=replace(client.train, y=(client.train.y + 1) % 3)
            )
    return run


def test_groups_come_after_the_warm_up(tmp_path: Path) -> None:
    """Two rounds in one group, an exchange with all that is no round, two in groups by kind."""
    run = two_kinds(
        make_run(
            methods.FedCHAR(warmup=2, clusters=2),
            tmp_path,
            sizes=(40, 40, 40, 40),
            cohort=3,
            rounds=4,
        )
    )
    seen = []
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        before = exchange.state
        (verb,) = {task.verb for task in exchange.tasks}
        seen.append((before.round, verb, len(exchange.tasks), len(before.models)))
        for task in exchange.tasks:
            assert trees.equal(
                task.send["model"].values, before.models[before.groups.get(task.to, 0)]
            )
        exchange = loop.send(answers(run, Serial(), exchange.tasks))
        if verb == "cluster":
            assert all(
                trees.equal(model, before.models[0]) for model in exchange.state.models.values()
            )
    assert seen == [
        (0, "train", 3, 1),
        (1, "train", 3, 1),
        (2, "cluster", 4, 1),
        (2, "train", 3, 2),
        (3, "train", 3, 2),
    ]
    assert exchange.state.groups == {0: 0, 1: 1, 2: 0, 3: 1}
    assert not trees.equal(exchange.state.models[0], exchange.state.models[1])


def test_a_client_uses_its_personal_model_and_only_the_groups_travels(tmp_path: Path) -> None:
    run = make_run(
        methods.FedCHAR(warmup=1, clusters=1, pull=Proximal(0.5)), tmp_path, rounds=3, cohort=3
    )
    state = play(run, Serial())
    trained = sorted(run.memory.files)
    for k in trained:
        memory = run.memory.read(k, run.memory.files[k])
        assert set(memory) == {"personal"}
        assert not trees.equal(memory["personal"], state.models[0])
        carry = {"model": state.models[0], **memory}
        assert use_personal(carry, None)["model"] is memory["personal"]  # type: ignore[arg-type]
        (task,) = (task for task in plan_scoring(run, state) if task.to == k)
        with_memory, _ = perform(run, task, memory)
        without, _ = perform(run, task, {})
        assert with_memory.metrics["test_loss0"] != without.metrics["test_loss0"]
    plain = play(make_run(methods.FedAvg(), tmp_path / "plain", rounds=3, cohort=3), Serial())
    # The personal models never touch the shared one.
    assert trees.equal(state.models[0], plain.model)


def test_the_personal_models_first_step_by_hand(tmp_path: Path) -> None:
    """One step of plain gradient descent from w: the pull is 0 there, so both models move alike. In
    the next task the personal one starts where it was left: with w as it is, mu = 1 / lr and a
    gradient g, v - lr (g + (v - w) / lr) = w - lr g, the step that would lead there from w with the
    gradient taken at v."""
    lr = 0.05
    method = methods.FedCHAR(warmup=9, pull=Proximal(1 / lr), local=LocalTraining(1, 64, SGD(lr)))
    run = make_run(method, tmp_path, rounds=3)
    task = Task(0, run.method.deliver(run.method.init(run.setup), 0))
    report, kept = perform(run, task, {})
    assert trees.distance(report.give["model"].values, kept["personal"]) < 1e-15
    _, after = perform(run, task, kept)
    moved = methods.FedAvg(local=method.local)
    there = Task(0, {"model": replace(task.send["model"], values=kept["personal"])})
    from_v, _ = perform(make_run(moved, tmp_path / "v"), there, {})
    g = {k: (kept["personal"][k] - v) / lr for k, v in from_v.give["model"].values.items()}
    wanted = {k: run.params[k] - lr * g[k] for k in g}
    assert trees.distance(after["personal"], wanted) < 1e-12


@pytest.mark.parametrize(
    ("words", "start"), [({"warmup": -1}, "warmup is -1"), ({"clusters": -1}, "clusters is -1")]
)
def test_impossible_values_get_a_sentence(words: dict[str, int], start: str) -> None:
    with pytest.raises(InputError, match=f"^{start}; it must be 0 .*or more"):
        methods.FedCHAR(**words)
