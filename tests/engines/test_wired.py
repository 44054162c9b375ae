"""Every message through real bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, remembered, reports, tensors
from tests.contract import small

from fedgrove import methods, trees
from fedgrove.core import Answer, AnyMethod, Engine, Packet, Report, Task
from fedgrove.engines import Serial, Wired, choose
from fedgrove.engines.faulty import Faulty
from fedgrove.errors import EngineError
from fedgrove.runs.faults import Faults
from fedgrove.runs.folder import CHECKPOINT, RunFolder
from fedgrove.runs.gate import Gate
from fedgrove.runs.lockstep import Member, Watch, ignore, train_alone
from fedgrove.runs.rounds import plan, rounds
from fedgrove.runs.run import Run
from fedgrove.wire.codec import Dense, KnownMask, Smallest
from fedgrove.wire.known_state import KnownState
from fedgrove.wire.message import ResendRequest, write_resend_request, write_task


def test_it_has_a_name_on_the_command_line() -> None:
    assert isinstance(choose("wired"), Wired)


METHODS = [
    pytest.param(methods.FixedPrune(codec=Smallest()), id="fixedprune"),
    pytest.param(methods.CAAFP(phases=(0.25, 0.25, 0.5), clusters=2, every=1), id="ca-afp"),
    pytest.param(small("safl"), id="safl"),
    pytest.param(small("heterofl"), id="heterofl"),
]

# How long updates are is no matter here.
ANY_LENGTH = Gate(norm=0)


def played(run: Run, engine: Engine) -> tuple[trees.Tree, list[Any]]:
    """The final state and what clients remember; and of all answers what they are and cost."""
    seen: list[Any] = []

    def noted(tasks: list[Task]) -> Iterator[tuple[Task, Answer]]:
        for task, answer in answers(run, engine, tasks):
            seen.append((type(answer).__name__, answer.of, answer.cost))
            yield task, answer

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(noted(exchange.tasks))
        assert exchange.attempt < 5, exchange.why_abandoned
    return {**tensors(exchange.state), **remembered(run)}, seen


@pytest.mark.parametrize("method", METHODS)
def test_it_is_serial_in_results_and_in_bytes_over_a_whole_run(
    method: AnyMethod, tmp_path: Path
) -> None:
    """CA-AFP regrows weights: a zero with a sign would be sent as other bytes."""
    results = []
    for engine in (Serial(), Wired()):
        folder = tmp_path / engine.name
        run = make_run(method, folder, dtype=torch.float32, rounds=4, gate=ANY_LENGTH)
        results.append((*played(run, engine), run.known_state.state()["clients"]))
    (serial, serial_seen, serial_held), (wired, wired_seen, wired_held) = results
    assert trees.identical(serial, wired)
    assert serial_seen == wired_seen
    assert serial_held == wired_held
    assert serial_held


@pytest.mark.parametrize("method", METHODS)
def test_it_is_serial_when_tasks_are_lost(method: AnyMethod, tmp_path: Path) -> None:
    faults = Faults.parse("crash=0.3,late=0.2")
    results = []
    for engine in (Serial(), Wired()):
        folder = tmp_path / engine.name
        run = make_run(
            method, folder, dtype=torch.float32, rounds=8, gate=ANY_LENGTH, faults=faults
        )
        results.append(played(run, Faulty(engine)))
    (serial, serial_seen), (wired, wired_seen) = results
    kinds = {kind for kind, _, _ in serial_seen}
    assert kinds == {"Report", "Lost"}
    assert trees.identical(serial, wired)
    assert serial_seen == wired_seen


@dataclass(frozen=True)
class Flattering(Dense):
    """Claims one byte less than it writes."""

    def cost(self, packet: Packet, known: KnownMask | None = None) -> Mapping[str, int]:
        cost = dict(super().encode(packet, known).cost)
        cost["values"] -= 1
        return cost


def test_a_count_that_is_not_the_length_of_the_bytes_is_an_error(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(codec=Flattering()), tmp_path)
    with pytest.raises(EngineError, match=r"a task of \d+ bytes was counted as \d+ bytes"):
        list(reports(run, Wired(), plan(run, run.initial_state)))


# ---- two sides that are not in step --------------------------------------------------------------


def advanced(run: Run, engine: Engine, exchanges: int) -> Any:
    """The state after some exchanges."""
    state = run.initial_state
    for _ in range(exchanges):
        state = run.method.fold(state, list(reports(run, engine, plan(run, state))))
    return state


def whole(run: Run, task: Task) -> int:
    """The bytes of a task to a client that holds nothing."""
    return len(write_task(task, run.method.codec))


def spent(report: Report, way: str) -> int:
    return sum(report.cost[way].values())


def test_a_resumed_run_sends_what_an_uninterrupted_one_sends(tmp_path: Path) -> None:
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    first = Wired()
    state = advanced(run, first, 2)
    assert len(run.known_state.digests) == 4
    other = replace(run, known_state=KnownState())
    other.known_state.restore(run.known_state.state())
    tasks = plan(run, state)
    # A new engine, as after a resume, and the old one.
    resumed = list(reports(other, Wired(), tasks))
    uninterrupted = list(reports(run, first, tasks))
    assert [r.cost for r in resumed] == [r.cost for r in uninterrupted]
    assert all(spent(r, "down") < whole(run, t) for r, t in zip(resumed, tasks, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_clients_that_start_anew_say_what_they_lack(method: AnyMethod, tmp_path: Path) -> None:
    """The results are those of serial, and the bytes are more by what was sent again."""
    runs = [make_run(method, tmp_path / n, dtype=torch.float32, rounds=4) for n in "ab"]
    serial, wired = Serial(), Wired()
    states = [run.initial_state for run in runs]
    sent_again = 0
    while states[0].round < 4:
        for client in runs[1].infos:
            wired.restart(runs[1], client)
        in_step, anew = (
            list(zip(plan(run, state), reports(run, engine, plan(run, state)), strict=True))
            for run, engine, state in zip(runs, (serial, wired), states, strict=True)
        )
        for (task, before), (_, after) in zip(in_step, anew, strict=True):
            down = spent(after, "down") - spent(before, "down")
            up = spent(after, "up") - spent(before, "up")
            if not down:
                # It was sent whole anyhow.
                assert up == 0
                continue
            sent_again += 1
            assert down == whole(runs[0], task)
            assert up == len(write_resend_request(ResendRequest(task.to, ("model",)), method.codec))
        for number, pairs in enumerate((in_step, anew)):
            run = runs[number]
            for task, report in pairs:
                run.memory.accept(task.to, report.memory)
            states[number] = run.method.fold(states[number], [report for _, report in pairs])
    assert sent_again
    assert trees.identical(tensors(states[0]), tensors(states[1]))
    assert trees.identical(remembered(runs[0]), remembered(runs[1]))
    # In the end both servers know the same of their clients.
    assert runs[0].known_state.digests == runs[1].known_state.digests


def test_a_client_that_holds_another_mask_is_sent_the_whole_one(tmp_path: Path) -> None:
    """After a map that broke, the server is rolled back and the client is not."""
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    engine = Wired()
    state = advanced(run, engine, 2)
    tasks = plan(run, state)
    for task in tasks:
        mask = task.send["model"].mask
        assert mask is not None
        run.known_state.note(task.to, "model", {name: ~leaf for name, leaf in mask.items()})
    again = list(reports(run, engine, tasks))
    for task, report in zip(tasks, again, strict=True):
        assert spent(report, "down") > whole(run, task)
    # From here on they are in step.
    for task, report in zip(tasks, reports(run, engine, tasks), strict=True):
        assert spent(report, "down") < whole(run, task)


def test_a_broken_map_leaves_clients_ahead_of_the_server(tmp_path: Path) -> None:
    method = methods.CAAFP(phases=(1, 1, 2), clusters=2, every=1)
    run = make_run(method, tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    engine = Wired()
    # A round, the grouping, a round, the first under masks.
    state = advanced(run, engine, 4)
    assert state.masks
    before = run.known_state.state()
    tasks = plan(run, state)
    first = list(reports(run, engine, tasks))
    run.known_state.restore(before)
    second = list(reports(run, engine, tasks))
    sent_again = []
    for task, a, b in zip(tasks, first, second, strict=True):
        assert trees.identical(a.give["model"].values, b.give["model"].values)
        # What the client has does not change with the server's mind: it is sent the whole mask.
        sent_again.append(spent(b, "down") == spent(a, "down") + whole(run, task))
    assert all(sent_again)


@pytest.mark.parametrize(
    "method", [methods.LGFedAvg(), methods.Ditto()], ids=["lg-fedavg", "ditto"]
)
def test_after_a_lost_reply_a_client_goes_back_to_what_the_server_knows(
    method: AnyMethod, tmp_path: Path
) -> None:
    run = make_run(method, tmp_path, dtype=torch.float32, rounds=4, cohort=4)
    engine = Wired()
    state = run.initial_state
    first = list(zip(plan(run, state), reports(run, engine, plan(run, state)), strict=True))
    for task, report in first:
        run.memory.accept(task.to, report.memory)
    state = run.method.fold(state, [report for _, report in first])
    tasks = plan(run, state)
    versions = {task.to: task.memory for task in tasks}
    assert all(version.startswith("0.train.") for version in versions.values())

    lost = list(reports(run, engine, tasks))
    assert all(report.memory.startswith("1.train.") for report in lost)
    kept = [run.memory.read(report.of, report.memory) for report in lost]
    # Nobody accepted them: the next task names the version of before, and the work is the same.
    again = list(reports(run, engine, plan(run, state)))
    for report, other, forest in zip(lost, again, kept, strict=True):
        assert trees.identical(report.give["model"].values, other.give["model"].values)
        now = run.memory.read(other.of, other.memory)
        assert now.keys() == forest.keys()
        assert all(trees.identical(now[name], forest[name]) for name in now)
        start = run.memory.read(other.of, versions[other.of])
        assert not all(trees.identical(now[name], start[name]) for name in now)


class Killed(Exception):
    """The end of a process."""


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_killed_and_resumed_counts_what_serial_counts(
    method: AnyMethod, tmp_path: Path
) -> None:
    """Through the files of the checkpoint: what clients hold is in there."""

    def member(name: str, watch: Watch = ignore) -> Member:
        path = tmp_path / name
        words = {"dtype": torch.float32, "rounds": 4, "gate": ANY_LENGTH}
        run = make_run(method, path / CHECKPOINT, **words)
        folder = RunFolder(path) if path.exists() else RunFolder.create(path, "")
        return Member(run, folder, watch=watch)

    def kill(line: Mapping[str, Any]) -> None:
        if line["round"] == 3:
            raise Killed

    whole_run = member("whole")
    train_alone(whole_run, Serial())
    with pytest.raises(Killed):
        train_alone(member("cut", kill), Wired())
    resumed = member("cut")
    train_alone(resumed, Wired())
    for a, b in zip(whole_run.folder.metrics(), resumed.folder.metrics(), strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert whole_run.run.known_state.digests == resumed.run.known_state.digests
    assert list(whole_run.run.known_state.bank) == list(resumed.run.known_state.bank)
