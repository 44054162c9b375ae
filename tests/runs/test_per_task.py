"""A method once for each true task: as if each task were a federation of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import federation, play, tensors
from tests.contract import small

import fedgrove as fg
from fedgrove import data, methods, trees
from fedgrove.config.experiment import Experiment
from fedgrove.config.grid import grid
from fedgrove.core import ClientInfo, Report, Task
from fedgrove.data import ClientData, Federation
from fedgrove.data.federation import Examples
from fedgrove.engines import Serial
from fedgrove.errors import EngineError, InputError
from fedgrove.problems import CLASSES, MixedProblem, TaskProblem
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.memory import Memory
from fedgrove.runs.per_task import PerTask, chain_states
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.runs.run import Run, build


def mixed() -> Federation:
    """Six clients, three of each of two tasks, which are dealt out otherwise and share outputs."""
    one = federation((12,), (20, 13, 17), dtype=torch.float32)
    other = federation((12,), (16, 24, 12), dtype=torch.float32)
    return data.mix({"one": one, "another": other})


def alone(every: Federation, task: str) -> Federation:
    """The clients of one task, with the numbers that they have among all."""
    own = {k: c for k, c in every.clients.items() if c.info.task == task}
    return replace(every, clients=own)


def made(method: Any, every: Federation, folder: Path, **words: Any) -> Run:
    words = {"rounds": 2, "cohort": len(every.clients), "net": "mlp"} | words
    return build(method, every, Memory(folder), **words)


@pytest.mark.parametrize("name", sorted(set(methods.names()) - {"fedgen"}))
def test_each_task_is_a_federation_of_its_own(name: str, tmp_path: Path) -> None:
    """To the bit, whatever the method; fedgen's server draws from a seed for each task."""
    every = mixed()
    method = small(name)
    if name == "adfedwcp":
        # Imprinting needs one set of classes.
        method = methods.AdFedWCP(importance="alike")
    run = made(method, every, tmp_path / "all", per_task=True)
    states = play(run, Serial()).by_task()
    assert sorted(states) == ["another", "one"]
    for task, state in states.items():
        other = play(made(method, alone(every, task), tmp_path / task), Serial())
        assert state.round == other.round == 2
        mine = tensors(state)
        theirs = tensors(other)
        assert trees.identical(mine, theirs)


def test_clients_are_delivered_their_own_tasks_model(tmp_path: Path) -> None:
    run = made(methods.FedAvg(), mixed(), tmp_path, per_task=True)
    state = play(run, Serial())
    models = {task: own.model for task, own in state.by_task().items()}
    assert not trees.equal(models["one"], models["another"])
    for task in plan_scoring(run, state):
        own = run.task_of(task.to, state.round)
        assert trees.identical(task.send["model"].values, models[own])


def test_a_checkpoint_holds_all_states(tmp_path: Path) -> None:
    run = made(small("fedlps"), mixed(), tmp_path, per_task=True)
    state = play(run, Serial())
    found: trees.Tree = {}
    again = state_from_json(state_to_json(state, found), found, like=run.initial_state)
    assert trees.identical(tensors(again), tensors(state))
    assert again.by_task()["another"].shares == state.by_task()["another"].shares


# ---- who is there, and who is not ----------------------------------------------------------------


def local_states(a: int, b: int) -> Any:
    state = type(methods.Local().init(None))  # type: ignore[arg-type]
    return chain_states({"a": state(a), "b": state(b)})


def test_a_task_of_which_nobody_is_drawn_waits_and_its_round_passes() -> None:
    server = PerTask(methods.Local(), lambda k, _: "a" if k < 2 else "b", range(4))
    state = local_states(3, 3)
    assert [task.to for task in server.plan(state, [1])] == [1]
    after = server.fold(state, iter([Report(1)]))
    assert {task: own.round for task, own in after.by_task().items()} == {"a": 4, "b": 4}
    assert after.round == 4


def test_a_task_that_lags_is_asked_alone() -> None:
    server = PerTask(methods.Local(), lambda k, _: "a" if k < 2 else "b", range(4))
    state = local_states(3, 2)
    assert state.round == 2
    assert [task.to for task in server.plan(state, [0, 1, 3])] == [3]
    # Nobody of b was drawn: as many of b go as were drawn.
    assert [task.to for task in server.plan(state, [0])] == [2]
    after = server.fold(state, iter([Report(3)]))
    assert {task: own.round for task, own in after.by_task().items()} == {"a": 3, "b": 3}


def test_reports_that_come_apart_are_refused() -> None:
    server = PerTask(methods.Local(), lambda k, _: "a" if k < 2 else "b", range(4))
    with pytest.raises(EngineError, match="reports of task 'a' are not next to each other"):
        server.fold(local_states(0, 0), iter([Report(0), Report(2), Report(1)]))


def test_tasks_are_planned_one_after_another(tmp_path: Path) -> None:
    every = mixed()
    shuffled = dict(sorted(every.clients.items(), key=lambda item: item[0] % 3))
    renumbered = dict(enumerate(shuffled.values()))
    run = made(methods.FedAvg(), replace(every, clients=renumbered), tmp_path, per_task=True)
    tasks = plan(run, run.initial_state)
    order = [run.task_of(task.to, 0) for task in tasks]
    assert order == ["another"] * 3 + ["one"] * 3
    assert play(run, Serial()).round == 2


def switching(k: int, round: int) -> ClientData:
    """Client 0 has task a before round 2 and then b; client 1 has b throughout."""
    task = "a" if k == 0 and round < 2 else "b"
    part = Examples(torch.eye(4)[:2] + k, torch.tensor([0, 1]))
    return ClientData(part, part, part, ClientInfo(2, task=task))


def test_a_client_that_switches_goes_to_its_new_task(tmp_path: Path) -> None:
    tasks = MixedProblem((TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", CLASSES, 2, 2)))
    every = data.from_clients(switching, 2, classes=4, problem=tasks)
    run = made(methods.FedAvg(), every, tmp_path, per_task=True, rounds=3)
    state = run.initial_state
    sent: list[dict[int, Task]] = []
    for round in range(3):
        planned = plan(run, state)
        sent.append({task.to: task for task in planned})
        answers = [answer for _, answer in Serial().map((run, task) for task in planned)]
        state = run.server.fold(state, iter(answers))
        assert state.round == round + 1
    models = state.by_task()
    # Nobody has task a in the last round: its model stays as the second left it.
    assert models["a"].round == 3
    assert trees.identical(sent[2][0].send["model"].values, sent[2][1].send["model"].values)
    assert not trees.equal(sent[1][0].send["model"].values, sent[1][1].send["model"].values)


# ---- from the words of the command line ----------------------------------------------------------


def test_tables_say_so(tmp_path: Path) -> None:
    words: dict[str, Any] = {"data": mixed(), "rounds": 2, "engine": "serial", "progress": False}
    result = fg.run("fedavg", per_task=True, out=tmp_path / "run", **words)
    assert result.summary["method"] == "fedavg per task"
    assert result.summary["groups"] == 2
    assert set(result.summary["tasks"]) == {"one", "another"}
    assert "per_task = true" in (tmp_path / "run/config.toml").read_text()
    together = fg.run("fedavg", **words)
    assert together.summary["method"] == "fedavg"
    assert together.summary["tasks"] != result.summary["tasks"]


def test_a_run_that_was_stopped_is_resumed(tmp_path: Path) -> None:
    words: dict[str, Any] = {"data": mixed(), "rounds": 3, "engine": "serial", "progress": False}
    whole = fg.run("fedlps", per_task=True, set=["widths=1,0.5"], **words)

    def stop(line: Any) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fg.run(
            "fedlps",
            per_task=True,
            set=["widths=1,0.5"],
            out=tmp_path / "run",
            watch=stop,
            **words,
        )
    again = fg.resume(tmp_path / "run", data=words["data"], engine="serial", progress=False)
    assert again.summary["tasks"] == whole.summary["tasks"]
    assert again.summary["metric_clients"] == whole.summary["metric_clients"]


def test_a_sweep_names_its_runs_so(tmp_path: Path) -> None:
    base = Experiment(methods.FedAvg(), per_task=True)
    assert list(grid(["fedavg", "local"], base, [0])) == [
        "fedavg-per-task-s0",
        "local-per-task-s0",
    ]


def test_one_task_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="per_task is given, but the clients have no tasks"):
        fg.run("fedavg", per_task=True, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
