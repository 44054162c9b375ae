"""A worker process per core: order, failures, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports, tensors

from fedgrove import methods, trees
from fedgrove.core import Carry, Client, Edit, Give, Outcome, Packet, Stage, Task, Train
from fedgrove.engines import Pool, Serial, choose, names
from fedgrove.engines.pool.engine import cores
from fedgrove.errors import EngineError, InputError
from fedgrove.runs.run import Run
from fedgrove.wire.codec import Codec, Delta, Dense


@dataclass(frozen=True)
class Odd(methods.FedAvg):
    """A method whose clients do what their number says; task settings choose the number."""

    codec: Codec = Dense()

    def work(self, verb: str) -> tuple[Stage, ...]:
        if verb == "use":
            return ()
        if verb == "train":
            return (Edit(behave), Train(self.objective, self.local), Give(answer))
        return (Edit(behave), Give(answer))


def behave(carry: Carry, client: Client) -> Carry:
    match int(carry["settings"].get("act", torch.tensor(0))):
        case 1:
            raise ZeroDivisionError("a bug in a method")
        case 2:
            raise InputError("a sentence for the user.")
        case 3:
            time.sleep(60)
        case 4:
            os._exit(7)
        case 5:
            time.sleep(0.1)
            raise ZeroDivisionError("a bug in a method")
        case 6:
            time.sleep(0.1)
    return carry


def answer(carry: Carry, client: Client) -> Outcome:
    """Give what was trained, else what was sent, else the client's id; say which process did it."""
    if "local" in carry:
        model = carry["local"]
    elif "model" in carry:
        model = carry["model"]
    else:
        model = {"id": torch.tensor([float(client.id)])}
    metrics = {"pid": float(os.getpid())}
    memory = {"seen": {"round": carry["settings"]["round"]}}
    return Outcome({"model": Packet(model)}, metrics, memory)


@pytest.fixture
def pool() -> Iterator[Pool]:
    engine = Pool(workers=2)
    yield engine
    engine.close()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The blocks in shared memory that this test and its workers made.

    They get a prefix of their own: other tests may run at the same time.
    """
    if not Path("/dev/shm").is_dir():
        pytest.skip("shared memory cannot be listed here")
    prefix = "fg" + secrets.token_hex(2)
    monkeypatch.setattr("fedgrove.engines.pool.shared.PREFIX", prefix)
    return lambda: [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(prefix)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(Odd(), tmp_path, sizes=(5, 40, 8, 60, 5, 30), dtype=torch.float32, cohort=6)


def task(
    client: int, act: int = 0, verb: str = "train", params: trees.Tree | None = None, round: int = 0
) -> Task:
    send = {} if params is None else {"model": Packet(params)}
    return Task(client, send, {"act": act}, verb, round)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- order ---------------------------------------------------------------------------------------


def test_reports_come_in_job_order_whoever_is_long(run: Run, pool: Pool) -> None:
    order = [3, 0, 5, 1, 4, 2]
    jobs = [(run, task(k, params=run.params)) for k in order]
    done = list(pool.map(jobs))
    assert [report.of for _, report in done] == order
    assert all(r is run for r, _ in done)
    expected = [report for _, report in Serial().map(jobs)]
    for (_, mine), other in zip(done, expected, strict=True):
        assert trees.identical(mine.give["model"].values, other.give["model"].values)
        assert mine.cost["down"] == other.cost["down"]
    pids = {report.metrics["pid"] for _, report in done}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_jobs_are_asked_for_as_reports_are_taken(run: Run, pool: Pool) -> None:
    taken = 0

    def jobs() -> Iterator[tuple[Run, Task]]:
        nonlocal taken
        for i in range(60):
            taken += 1
            yield run, task(i % 6, verb="probe", round=i)

    stream = pool.map(jobs())
    next(stream)
    # the window of 16, and one for the report that was taken
    assert taken <= 17
    assert sum(1 for _ in stream) == 59


def test_no_jobs_need_no_workers(pool: Pool) -> None:
    assert list(pool.map([])) == []
    assert pool._team == []


def test_bytes_are_counted_right_when_tasks_are_made_as_they_are_needed(
    run: Run, pool: Pool
) -> None:
    def jobs() -> Iterator[tuple[Run, Task]]:
        for i in range(150):
            yield run, task(i % 6, verb="probe", params={"w": torch.zeros(1 + 7 * i)}, round=i)

    mine = [dict(report.cost["down"]) for _, report in pool.map(jobs())]
    assert mine == [dict(report.cost["down"]) for _, report in Serial().map(jobs())]


# ---- one pool, several runs ----------------------------------------------------------------------


def test_workers_stay_for_the_next_exchange_and_know_a_second_run(
    tmp_path: Path, pool: Pool
) -> None:
    first = make_run(methods.Ditto(), tmp_path / "first", seed=0)
    second = make_run(methods.Ditto(), tmp_path / "second", seed=1)
    one = play(first, pool)
    workers = [w.process.pid for w in pool._team]
    list(reports(first, pool, [Task(0, {"model": Packet(first.params)})]))
    assert [w.process.pid for w in pool._team] == workers
    two = play(second, pool)
    for name, run, state, seed in (("a", first, one, 0), ("b", second, two, 1)):
        alone = make_run(methods.Ditto(), tmp_path / name, seed=seed)
        assert trees.identical(tensors(play(alone, Serial())), tensors(state))
        assert remembered(run).keys() == remembered(alone).keys()
    # the workers that did not know the second run were replaced
    assert not any(alive(pid) for pid in workers if pid is not None)


def test_several_runs_travel_together(tmp_path: Path, pool: Pool) -> None:
    runs = [make_run(methods.FedAvg(), tmp_path / str(s), seed=s) for s in range(3)]
    jobs = [(run, Task(k, {"model": Packet(run.params)})) for k in range(3) for run in runs]
    for (run, mine), (other, expected) in zip(pool.map(jobs), Serial().map(jobs), strict=True):
        assert run is other
        assert trees.identical(mine.give["model"].values, expected.give["model"].values)


def test_two_tasks_for_one_client_are_done_one_after_the_other(tmp_path: Path, pool: Pool) -> None:
    kept = []
    for engine in (pool, Serial()):
        run = make_run(methods.Local(), tmp_path / engine.name, dtype=torch.float32)
        list(engine.map([(run, Task(0, round=t)) for t in range(3)]))
        kept.append(remembered(run))
    assert trees.identical(*kept)


# ---- failures ------------------------------------------------------------------------------------


def test_an_exception_in_a_worker_names_client_verb_and_place(run: Run, pool: Pool) -> None:
    with pytest.raises(EngineError) as caught:
        list(pool.map([(run, task(k, act=k == 1, params=run.params)) for k in (0, 1, 2)]))
    first, *trace = str(caught.value).splitlines()
    assert first == "client 1 could not train: ZeroDivisionError: a bug in a method"
    assert any("behave" in line for line in trace)
    assert pool._team == []


def test_a_sentence_of_our_own_comes_without_a_trace(run: Run, pool: Pool) -> None:
    with pytest.raises(EngineError) as caught:
        list(pool.map([(run, task(4, act=2, verb="probe"))]))
    assert str(caught.value) == "client 4 could not probe: InputError: a sentence for the user."


def test_a_worker_that_is_killed_in_the_middle_of_a_task(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    quick = task(0, verb="probe", params=run.params)
    sleeping = task(1, act=3, params=run.params)
    stream = pool.map([(run, quick), (run, sleeping)])
    assert next(stream)[1].of == 0
    (busy,) = (w for w in pool._team if w.job is not None)
    team = [w.process.pid for w in pool._team]
    assert busy.process.pid is not None
    os.kill(busy.process.pid, signal.SIGKILL)
    began = time.monotonic()
    sentence = rf"worker process {busy.process.pid} died \(exit code -9\) .* for client 1;"
    with pytest.raises(EngineError, match=sentence):
        next(stream)
    assert time.monotonic() - began < 5
    assert not any(alive(pid) for pid in team if pid is not None)
    assert blocks() == []
    # the pool can be used again
    assert [r.of for r in reports(run, pool, [task(1, verb="probe")])] == [1]


def test_a_worker_that_ends_itself(run: Run, pool: Pool) -> None:
    with pytest.raises(EngineError, match=r"died \(exit code 7\) while it worked for client 2;"):
        list(pool.map([(run, task(2, act=4, verb="probe"))]))


def test_a_worker_that_was_killed_while_idle_is_named_or_replaced(run: Run, pool: Pool) -> None:
    list(pool.map([(run, task(k, verb="probe")) for k in range(4)]))
    victim = pool._team[0].process
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(5)
    tasks = [task(k, verb="probe") for k in range(4)]
    with contextlib.suppress(EngineError):
        assert [r.of for r in reports(run, pool, tasks)] == [0, 1, 2, 3]
    assert [r.of for r in reports(run, pool, tasks)] == [0, 1, 2, 3]


# ---- nothing is left behind ----------------------------------------------------------------------


def test_close_ends_every_process_and_may_be_repeated(run: Run, pool: Pool) -> None:
    list(pool.map([(run, task(k, verb="probe")) for k in range(4)]))
    processes = [w.process for w in pool._team]
    assert len(processes) == 2
    assert all(p.is_alive() for p in processes)
    pool.close()
    pool.close()
    assert not any(p.is_alive() for p in processes)
    assert [r.of for r in reports(run, pool, [task(3, verb="probe")])] == [3]


def test_shared_memory_is_empty_after_the_last_report(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    jobs = ((run, task(k, verb="probe", params=run.params)) for k in range(6))
    assert len(list(pool.map(jobs))) == 6
    assert blocks() == []


def test_shared_memory_is_empty_after_a_caller_that_stops_early(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    at_once = task(3, verb="probe", params=run.params)
    later = task(1, act=6, verb="probe", params=run.params)
    stream = pool.map([(run, at_once), (run, later)])
    next(stream)
    # by then the other worker has answered, and nobody has read it
    time.sleep(0.3)
    stream.close()
    assert pool._team == []
    assert blocks() == []


def test_shared_memory_is_empty_after_a_failure(run: Run, blocks: Callable[[], list[str]]) -> None:
    pool = Pool(workers=3)
    at_once = task(3, verb="probe", params=run.params)
    failing = task(1, act=5, verb="probe", params=run.params)
    later = task(5, act=6, verb="probe", params=run.params)
    stream = pool.map([(run, at_once), (run, failing), (run, later)])
    next(stream)
    # by then client 1 has failed and client 5 has answered
    time.sleep(0.4)
    with pytest.raises(EngineError, match="client 1 could not probe"):
        next(stream)
    assert blocks() == []


def test_a_tree_that_goes_to_everybody_is_shared_once(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    most = 0
    for _ in pool.map((run, task(k, verb="probe", params=run.params)) for k in range(6)):
        most = max(most, len(blocks()))
    # the broadcast, and an answer of each of two workers
    assert most <= 3


def test_global_randomness_is_left_alone(run: Run, pool: Pool) -> None:
    before = torch.get_rng_state()
    list(pool.map([(run, task(0, params=run.params))]))
    assert torch.equal(torch.get_rng_state(), before)


# ---- choosing ------------------------------------------------------------------------------------


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"auto", "pool", "serial"} <= set(names())
    assert isinstance(choose("serial"), Serial)
    assert isinstance(choose("pool"), Pool)
    assert cores() >= 1
    monkeypatch.setattr("fedgrove.engines.cores", lambda: 1)
    assert isinstance(choose(), Serial)
    with pytest.raises(InputError, match=r"there is no engine 'seriall'; did you mean 'serial'\?"):
        choose("seriall")


def test_bytes_are_those_of_serial_whoever_is_done_first(tmp_path: Path) -> None:
    """What a mask costs depends on which masks the server still knows, thus on the order."""
    sizes = (5,) * 20
    found = []
    for engine in (Serial(), Pool(workers=3)):
        method = Odd(codec=Delta())
        run = make_run(method, tmp_path / engine.name, sizes=sizes, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        costs = []
        for round in range(3):
            tasks = []
            for client in range(20):
                shape = run.params["head.weight"].shape
                mask = {"head.weight": torch.rand(shape, generator=generator) < 0.5}
                packet = Packet(trees.masked(run.params, mask), mask)
                # Every third takes longer than the next ones.
                act = 6 if client % 3 == 0 else 0
                tasks.append(Task(client, {"model": packet}, {"act": act}, "probe", round))
            costs += [report.cost["down"] for report in reports(run, engine, tasks)]
        assert 1 < len(run.held.bank) < 20
        found.append((costs, list(run.held.bank)))
        engine.close()
    assert found[0] == found[1]
