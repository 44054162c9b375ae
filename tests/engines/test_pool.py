"""A worker process per core: order, failures, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import SHAPES, make_run, play, remembered, reports, tensors

import fedgrove
from fedgrove import methods, trees
from fedgrove.core import (
    Answer,
    Carry,
    Client,
    Edit,
    Give,
    Lost,
    Outcome,
    Packet,
    Report,
    Stage,
    Task,
    Train,
)
from fedgrove.data.federation import Examples
from fedgrove.engines import Pool, Serial, Wired, choose, names
from fedgrove.engines.pool import shared
from fedgrove.engines.pool.engine import cores
from fedgrove.engines.pool.message import pack_runs, strip
from fedgrove.engines.pool.window import Paces, Window
from fedgrove.engines.pool.worker import serve
from fedgrove.errors import EngineError, InputError
from fedgrove.methods.ca_afp import CAAFP
from fedgrove.nets import Net, build
from fedgrove.runs.rounds import plan, plan_scoring
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


FAIL, REFUSE, SLEEP, SLEEP_NOTED, EXIT, FAIL_LATER, ANSWER_LATER, DIE_ONCE, DIE = range(1, 10)
ANSWER_MUCH_LATER = 10
"""What a task can have its client do, as the number ``act`` of its settings."""
NO_VALUES, NO_TENSOR, COMPLEX, NO_PICKLE, NO_MEMORY, NO_OUTCOME, META = range(11, 18)
"""The same for what it can give."""
STOP_ONCE, STOP = 18, 19
"""It stops its process, as kill -STOP does."""


def act_of(carry: Carry) -> int:
    return int(carry["settings"].get("act", torch.tensor(0)))


def behave(carry: Carry, client: Client) -> Carry:
    act = act_of(carry)
    if act == FAIL:
        raise ZeroDivisionError("a bug in a method")
    if act == REFUSE:
        raise InputError("a sentence for the user.")
    if act == SLEEP_NOTED:
        note = Path(os.environ["FEDGROVE_TEST_NOTES"]) / "pid"
        # Written whole: somebody waits for it.
        note.with_suffix(".part").write_text(str(os.getpid()))
        note.with_suffix(".part").rename(note)
    if act in (SLEEP, SLEEP_NOTED):
        time.sleep(60)
    if act == EXIT:
        os._exit(7)
    if act in (FAIL_LATER, ANSWER_LATER):
        time.sleep(0.1)
    if act == ANSWER_MUCH_LATER:
        time.sleep(0.6)
    if act == FAIL_LATER:
        raise ZeroDivisionError("a bug in a method")
    if act == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if act == DIE_ONCE and first_time(client):
        os.kill(os.getpid(), signal.SIGKILL)
    if act == STOP or (act == STOP_ONCE and first_time(client)):
        os.kill(os.getpid(), signal.SIGSTOP)
    return carry


def first_time(client: Client) -> bool:
    """Whether no process has worked for this client yet; this is noted in a file."""
    note = Path(os.environ["FEDGROVE_TEST_NOTES"]) / str(client.id)
    if note.exists():
        return False
    note.touch()
    return True


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
    return odd(act_of(carry), Outcome({"model": Packet(model)}, metrics, memory))


def odd(act: int, outcome: Outcome) -> Any:
    """An outcome, or something that cannot be sent."""
    packets: dict[int, Any] = {
        NO_VALUES: None,
        NO_TENSOR: {"w": [1.0, 2.0]},
        COMPLEX: {"w": torch.ones(3, dtype=torch.complex64)},
        META: {"w": torch.ones(3, device="meta")},
    }
    if act in packets:
        return replace(outcome, give={"model": Packet(packets[act])})
    if act == NO_PICKLE:
        numbers: dict[str, float] = defaultdict(lambda: 0.0, outcome.metrics)
        return replace(outcome, metrics=numbers)
    if act == NO_MEMORY:
        return replace(outcome, memory={"seen": None})
    if act == NO_OUTCOME:
        return None
    return outcome


EITHER = [pytest.param("fork"), pytest.param("spawn")]
MOSTLY_FORK = [pytest.param("fork"), pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.fixture
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool whose start a test chooses; a spawned worker imports torch, which takes seconds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    engine = Pool(workers=2, start=request.param)
    yield engine
    engine.close()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clients note that they were here."""
    monkeypatch.setenv("FEDGROVE_TEST_NOTES", str(tmp_path))


@pytest.fixture
def pool() -> Iterator[Pool]:
    engine = Pool(workers=2, start="fork")
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
    monkeypatch.setattr("fedgrove.engines.pool.shared.BLOCK_PREFIX", prefix)
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


def pids(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in pool._team if worker.process.pid is not None]


def warm(pool: Pool, run: Run) -> None:
    """Until all workers have started."""
    while len(pool._team) < pool.workers or not all(worker.ready for worker in pool._team):
        answers(pool, run, [task(k, act=ANSWER_LATER, verb="probe") for k in range(2)])


def busy_pid(pool: Pool, client: int) -> int:
    """The process that works for a client."""
    assert pool._window is not None
    for worker in pool._team:
        if worker.job is not None and pool._window.open[worker.job][1].to == client:
            assert worker.process.pid is not None
            return worker.process.pid
    raise AssertionError(f"nobody works for client {client}")


def answers(pool: Pool, run: Run, tasks: list[Task]) -> list[Answer]:
    """The answers; each must stand beside its own run and task."""
    found = list(pool.map((run, task) for task in tasks))
    for ((answered_run, answered_task), _), task in zip(found, tasks, strict=True):
        assert answered_run is run
        assert answered_task is task
    return [answer for _, answer in found]


def same_as_serial(run: Run, task: Task, answer: Answer) -> bool:
    """Whether an answer is what the client would have said alone, to the bit."""
    assert isinstance(answer, Report), answer
    (expected,) = reports(run, Serial(), [task])
    return trees.identical(answer.give["model"].values, expected.give["model"].values)


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("either", EITHER, indirect=True)
def test_reports_come_in_job_order_whoever_is_long(run: Run, either: Pool) -> None:
    warm(either, run)
    tasks = [task(k, params=run.params) for k in (3, 0, 5, 1, 4, 2)]
    done = answers(either, run, tasks)
    expected = reports(run, Serial(), tasks)
    for mine, other in zip(done, expected, strict=True):
        assert isinstance(mine, Report)
        assert mine.of == other.of
        assert trees.identical(mine.give["model"].values, other.give["model"].values)
        assert mine.cost["down"] == other.cost["down"]
    workers = {report.metrics["pid"] for report in done if isinstance(report, Report)}
    assert len(workers) == 2
    assert os.getpid() not in workers


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
                packet = Packet(trees.apply_mask(run.params, mask), mask)
                # Every third takes longer than the next ones.
                act = ANSWER_LATER if client % 3 == 0 else 0
                tasks.append(Task(client, {"model": packet}, {"act": act}, "probe", round))
            costs += [report.cost["down"] for report in reports(run, engine, tasks)]
        assert 1 < len(run.known_state.bank) < 20
        found.append((costs, list(run.known_state.bank)))
        engine.close()
    assert found[0] == found[1]


# ---- one pool, several runs ----------------------------------------------------------------------


def test_workers_stay_for_the_next_exchange_and_know_a_second_run(
    tmp_path: Path, pool: Pool
) -> None:
    first = make_run(methods.Ditto(), tmp_path / "first", seed=0)
    second = make_run(methods.Ditto(), tmp_path / "second", seed=1)
    one = play(first, pool)
    workers = pids(pool)
    list(reports(first, pool, [Task(0, {"model": Packet(first.params)})]))
    assert pids(pool) == workers
    two = play(second, pool)
    for name, run, state, seed in (("a", first, one, 0), ("b", second, two, 1)):
        alone = make_run(methods.Ditto(), tmp_path / name, seed=seed)
        assert trees.identical(tensors(play(alone, Serial())), tensors(state))
        assert remembered(run).keys() == remembered(alone).keys()
    # the workers that did not know the second run were replaced
    assert not any(alive(pid) for pid in workers)


def test_several_runs_travel_together(tmp_path: Path, pool: Pool) -> None:
    runs = [make_run(methods.FedAvg(), tmp_path / str(s), seed=s) for s in range(3)]
    jobs = [(run, Task(k, {"model": Packet(run.params)})) for k in range(3) for run in runs]
    for (job, mine), (other, expected) in zip(pool.map(jobs), Serial().map(jobs), strict=True):
        assert job[0] is other[0]
        assert job[1] is other[1]
        assert isinstance(mine, Report)
        assert isinstance(expected, Report)
        assert trees.identical(mine.give["model"].values, expected.give["model"].values)


def test_another_map_ends_the_one_before(run: Run, pool: Pool) -> None:
    """Two streams of one pool: the answers of one never come out of the other."""
    tasks = [task(k, verb="probe") for k in range(6)] * 4
    first = pool.map((run, each) for each in tasks)
    next(first)
    second = pool.map((run, each) for each in tasks)
    assert [answer.of for _, answer in second] == [each.to for each in tasks]
    with pytest.raises(EngineError, match="closed or got other jobs during a map"):
        list(first)
    assert len(answers(pool, run, tasks)) == 24


# ---- losses --------------------------------------------------------------------------------------


def test_a_client_that_raises_is_lost_with_client_verb_and_place(run: Run, pool: Pool) -> None:
    tasks = [task(k, act=FAIL if k == 1 else 0, params=run.params) for k in (0, 1, 2)]
    first, lost, last = answers(pool, run, tasks)
    workers = pids(pool)
    assert isinstance(lost, Lost)
    assert (lost.of, lost.reason) == (1, "crashed")
    assert lost.detail.startswith(
        "client 1 could not train: ZeroDivisionError: a bug in a method (at test_pool.py, line "
    )
    assert same_as_serial(run, tasks[0], first)
    assert same_as_serial(run, tasks[2], last)
    # Its task was sent all the same, and costs what it costs.
    ((_, alone),) = Serial().map([(run, tasks[1])])
    assert lost == alone
    assert isinstance(first, Report)
    assert lost.cost == {"down": first.cost["down"]}
    # The worker is still there.
    answers(pool, run, tasks[:1])
    assert pids(pool) == workers


def test_a_sentence_of_our_own_comes_without_a_place(run: Run, pool: Pool) -> None:
    (lost,) = answers(pool, run, [task(4, act=REFUSE, verb="probe")])
    assert isinstance(lost, Lost)
    assert lost.detail == "client 4 could not probe: a sentence for the user."


@pytest.mark.parametrize("either", MOSTLY_FORK, indirect=True)
def test_a_worker_that_dies_once_costs_nothing(run: Run, either: Pool, notes: None) -> None:
    tasks = [task(k, act=DIE_ONCE if k in (1, 4) else 0, params=run.params) for k in range(6)]
    for each, answer in zip(tasks, answers(either, run, tasks), strict=True):
        assert same_as_serial(run, each, answer)


@pytest.mark.parametrize("either", MOSTLY_FORK, indirect=True)
def test_a_worker_that_dies_twice_loses_its_job_and_no_other(
    run: Run, either: Pool, blocks: Callable[[], list[str]]
) -> None:
    tasks = [task(k, act=DIE if k == 2 else 0, params=run.params) for k in range(6)]
    found = answers(either, run, tasks)
    lost = found.pop(2)
    assert isinstance(lost, Lost)
    assert (lost.of, lost.reason) == (2, "died")
    assert (
        "died (exit code -9) while it worked for client 2, like another worker before;"
        in lost.detail
    )
    others = tasks[:2] + tasks[3:]
    for each, answer in zip(others, found, strict=True):
        assert same_as_serial(run, each, answer)
    # The pool works on.
    (again,) = answers(either, run, [tasks[0]])
    assert same_as_serial(run, tasks[0], again)
    either.close()
    assert blocks() == []


KILLER = """
import os, signal, sys, time
from pathlib import Path
note = Path(sys.argv[1])
for _ in range(2):
    while not note.exists():
        time.sleep(0.01)
    pid = int(note.read_text())
    note.unlink()
    os.kill(pid, signal.SIGKILL)
    print(pid)
"""


def test_a_worker_that_is_killed_from_outside_in_the_middle_of_a_job(
    run: Run, pool: Pool, notes: None, tmp_path: Path, blocks: Callable[[], list[str]]
) -> None:
    killer = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(tmp_path / "pid")], stdout=subprocess.PIPE, text=True
    )
    quick = task(0, verb="probe", params=run.params)
    sleeping = task(1, act=SLEEP_NOTED, params=run.params)
    began = time.monotonic()
    first, lost, last = answers(pool, run, [quick, sleeping, quick])
    assert time.monotonic() - began < 30
    victims = killer.communicate(timeout=10)[0].split()
    assert isinstance(lost, Lost)
    assert lost.reason == "died"
    assert f"worker process {victims[1]} died (exit code -9)" in lost.detail
    assert same_as_serial(run, quick, first)
    assert same_as_serial(run, quick, last)
    assert not any(alive(int(pid)) for pid in victims)
    assert blocks() == []


def test_a_worker_that_ends_itself(run: Run, pool: Pool) -> None:
    (lost,) = answers(pool, run, [task(2, act=EXIT, verb="probe")])
    assert isinstance(lost, Lost)
    assert lost.reason == "died"
    assert "died (exit code 7) while it worked for client 2" in lost.detail


def test_workers_that_were_killed_while_idle_are_replaced(run: Run, pool: Pool) -> None:
    tasks = [task(k, verb="probe") for k in range(4)]
    answers(pool, run, tasks)
    for worker in pool._team:
        worker.process.kill()
        worker.process.join()
    assert [answer.of for answer in answers(pool, run, tasks)] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_worker_that_never_takes_its_job(how: str, run: Run, pool: Pool) -> None:
    """Stopped while idle, so that the job is sent and not read; then killed, or left to its time."""
    warm(pool, run)
    victim = pool._team[0]
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGSTOP)
    if how == "stopped":
        pool.timeout = 1.5
    tasks = [task(k, act=ANSWER_LATER, verb="probe", params=run.params) for k in range(3)]
    stream = pool.map((run, each) for each in tasks)
    first = next(stream)
    assert victim.job is not None or how == "stopped"
    if how == "killed":
        victim.process.kill()
    found = [first, *stream]
    lost = [answer for _, answer in found if isinstance(answer, Lost)]
    assert [answer.reason for answer in lost] == (["late"] if how == "stopped" else [])
    assert [answer.of for _, answer in found] == [0, 1, 2]


@pytest.mark.parametrize("either", MOSTLY_FORK, indirect=True)
def test_a_stopped_worker_is_lost_when_its_time_is_over(
    run: Run, either: Pool, blocks: Callable[[], list[str]]
) -> None:
    # So that the time of the map is that of the jobs.
    warm(either, run)
    either.timeout = 1.5
    quick = task(0, verb="probe", params=run.params)
    sleeping = task(1, act=SLEEP, params=run.params)
    began = time.monotonic()
    stream = either.map([(run, quick), (run, sleeping), (run, quick)])
    next(stream)
    stopped = busy_pid(either, 1)
    os.kill(stopped, signal.SIGSTOP)
    _, lost = next(stream)
    assert 1.5 <= time.monotonic() - began < 4
    assert lost == Lost(1, "late", "client 1 did not answer within 1.5 s.", lost.cost)
    assert lost.cost["down"]
    assert not alive(stopped)
    assert next(stream)[1].of == 0
    assert next(stream, None) is None
    either.close()
    assert blocks() == []


def test_a_stopped_worker_is_replaced_without_a_timeout(
    run: Run, pool: Pool, notes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.engines.pool.engine.LOOK_SECONDS", 0.1)
    quick = task(0, verb="probe", params=run.params)
    once = task(1, act=STOP_ONCE, params=run.params)
    always = task(2, act=STOP, verb="probe")
    first, second, lost = answers(pool, run, [quick, once, always])
    assert same_as_serial(run, quick, first)
    # Where its first worker was stopped, the note is there, so serial does not stop.
    assert same_as_serial(run, once, second)
    assert isinstance(lost, Lost)
    assert lost.reason == "died"
    assert "was stopped by a signal and ended while it worked for client 2" in lost.detail


def test_a_worker_that_goes_on_after_a_stop_keeps_its_job(
    run: Run, pool: Pool, notes: None, tmp_path: Path
) -> None:
    """As after Ctrl-Z and fg: the pool looks every five seconds."""
    stream = pool.map([(run, task(1, act=STOP, verb="probe"))])
    continued = subprocess.Popen(
        [sys.executable, "-c", CONTINUER, str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    answer = next(stream)[1]
    assert isinstance(answer, Report)
    assert continued.communicate(timeout=30)[0].strip() == f"{answer.metrics['pid']:.0f}"


CONTINUER = """
import os, signal, sys, time
from pathlib import Path

children = Path(f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/children")
while True:
    for pid in map(int, children.read_text().split()):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            time.sleep(6)
            os.kill(pid, signal.SIGCONT)
            print(pid)
            sys.exit()
    time.sleep(0.05)
"""


def test_time_runs_for_each_job_alone(run: Run, pool: Pool) -> None:
    """Thirty jobs of 0.1 s on two workers take longer together than a job may."""
    pool.timeout = 1.4
    tasks = [task(k % 6, act=ANSWER_LATER, verb="probe", round=k) for k in range(30)]
    assert all(isinstance(answer, Report) for answer in answers(pool, run, tasks))


@pytest.mark.parametrize(
    "engine", [Serial(timeout=0.5), Wired(timeout=0.5)], ids=["serial", "wired"]
)
def test_who_takes_too_long_in_this_process_is_late(engine: Any, run: Run) -> None:
    tasks = []
    for client, act in ((0, 0), (1, ANSWER_MUCH_LATER)):
        tasks.append(task(client, act=act, verb="probe", params=run.params))
    (_, quick), (_, lost) = engine.map((run, each) for each in tasks)
    assert isinstance(quick, Report)
    assert isinstance(lost, Lost)
    assert (lost.of, lost.reason) == (1, "late")
    assert lost.detail == "client 1 did not answer within 0.5 s."


@pytest.mark.parametrize(
    ("act", "reason", "words"),
    [
        (NO_VALUES, "unreadable", "AttributeError"),
        (NO_TENSOR, "unreadable", "AttributeError"),
        (COMPLEX, "unreadable", "complex64"),
        (NO_MEMORY, "crashed", "NoneType"),
        (NO_OUTCOME, "crashed", "NoneType"),
    ],
)
@pytest.mark.parametrize("name", ["serial", "wired", "batched", "pool"])
def test_a_report_that_cannot_be_sent_is_lost(
    name: str,
    act: int,
    reason: str,
    words: str,
    run: Run,
    capfd: pytest.CaptureFixture[str],
    blocks: Callable[[], list[str]],
) -> None:
    """On every engine: the same word, and nobody else is touched."""
    tasks = [task(k, act=act if k == 1 else 0, verb="probe", params=run.params) for k in range(3)]
    engine = choose(name, "cpu")
    first, (_, lost), last = engine.map((run, each) for each in tasks)
    engine.close()
    assert isinstance(lost, Lost)
    assert (lost.of, lost.reason) == (1, reason)
    assert words in lost.detail
    assert same_as_serial(run, tasks[0], first[1])
    assert same_as_serial(run, tasks[2], last[1])
    assert blocks() == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("act", "word"), [(NO_PICKLE, "pickle"), (META, "meta")])
def test_a_report_that_no_other_process_can_have_is_lost(
    act: int, word: str, run: Run, pool: Pool
) -> None:
    lost, other = answers(pool, run, [task(0, act=act, verb="probe"), task(1, verb="probe")])
    assert isinstance(lost, Lost)
    assert lost.reason == "unreadable"
    assert word in lost.detail
    assert isinstance(other, Report)


def test_a_reply_that_cannot_be_read_is_lost(run: Run) -> None:
    """Bytes that are no reply; and a reply whose block is gone."""
    window = Window(iter([(run, task(0)), (run, task(1))]), 16)
    window.fill()
    window.finish(0, b"no pickle")
    envelope, forest = strip(Report(1, {"model": Packet({"w": torch.ones(2)})}))
    block = shared.put(forest)
    shared.drop(block.name)
    window.finish(1, pickle.dumps((envelope, block)))
    for client in range(2):
        _, lost = window.take()
        assert isinstance(lost, Lost)
        assert (lost.of, lost.reason) == (client, "unreadable")
        assert lost.detail.startswith(f"the reply of client {client} cannot be read: ")


def test_the_job_that_takes_longest_by_what_was_measured_starts_first(run: Run) -> None:
    """Clients 0 to 2 have as many examples; scoring took a hundredth of the time of training."""
    kinds = [(0, "evaluate"), (1, "train"), (2, "probe")]
    paces = Paces()
    examples = run.federation.info(0, 0).examples
    paces.note(run, task(0, verb="evaluate"), 0.01 * examples)
    paces.note(run, task(0, verb="train"), 1.0 * examples)
    window = Window(iter([(run, task(k, verb=verb)) for k, verb in kinds]), 16, paces)
    window.fill()
    # What was never measured goes before everything.
    assert [window.pick([run]) for _ in kinds] == [2, 1, 0]
    # The mean of 1 and 5 seconds per example, and of that and what comes next.
    paces.note(run, task(0, verb="train"), 5.0 * examples)
    assert paces.predict(run, task(0, verb="train")) == (3.0 * examples, examples)


def test_workers_have_jobs_while_the_caller_looks_at_an_answer(run: Run, pool: Pool) -> None:
    tasks = [task(k % 3, params=run.params) for k in range(20)]
    stream = pool.map((run, t) for t in tasks)
    next(stream)
    started = [worker for worker in pool._team if worker.ready]
    assert started
    assert all(worker.job is not None for worker in started)
    assert len(list(stream)) == 19


def test_many_deaths_leave_nothing_behind(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    def open_files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def children() -> list[str]:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files cannot be listed here")
    # The process that watches over shared memory starts with the first worker, and stays.
    answers(pool, run, [task(0, verb="probe")])
    pool.close()
    files_before = open_files()
    children_before = children()
    tasks = [task(k, act=DIE, verb="probe", params=run.params) for k in range(6)] * 4
    assert [answer.reason for answer in answers(pool, run, tasks) if isinstance(answer, Lost)] == (
        ["died"] * 24
    )
    pool.close()
    assert open_files() == files_before
    assert children() == children_before
    assert blocks() == []


# ---- starting ------------------------------------------------------------------------------------


def test_workers_that_cannot_start_end_the_run_with_a_sentence(
    run: Run, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.engines.pool.engine.serve", lambda *args: os._exit(5))
    sentence = r"worker process \d+ died \(exit code 5\) before it had started, as others had; use"
    with pytest.raises(EngineError, match=sentence):
        answers(pool, run, [task(0)])
    assert pool._team == []


def test_one_that_cannot_start_is_replaced(
    run: Run, pool: Pool, notes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_later(*args: Any) -> None:
        try:
            (tmp_path / "started").touch(exist_ok=False)
        except FileExistsError:
            serve(*args)
        os._exit(5)

    monkeypatch.setattr("fedgrove.engines.pool.engine.serve", serve_later)
    (answer,) = answers(pool, run, [task(0, params=run.params)])
    assert isinstance(answer, Report)


def test_a_start_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="there is no start method 'spwan'; did you mean 'spawn'"):
        Pool(start="spwan")


@pytest.mark.slow
@pytest.mark.parametrize("method", [methods.Ditto(), CAAFP(phases=(1, 1, 1), clusters=2, every=1)])
def test_spawned_workers_are_serial_to_the_bit(method: Any, tmp_path: Path) -> None:
    """With dropout, memory and masks, from a run that has computed and sent something already."""
    found = []
    for engine in (Serial(), Pool(workers=2, start="spawn")):
        folder = tmp_path / engine.name
        run = make_run(method, folder, net="har-cnn", options={}, dtype=torch.float32, rounds=3)
        if engine.name == "pool":
            assert list(reports(run, Serial(), plan(run, run.initial_state)))
            for client in run.infos:
                run.known_state.forget(client)
        state = play(run, engine)
        scores = []
        for report in reports(run, engine, plan_scoring(run, state, "finetune")):
            scores.append((report.of, dict(report.metrics), report.cost))
        found.append((tensors(state), remembered(run), scores))
        engine.close()
    (state, kept, scores), (other_state, other_kept, other_scores) = found
    assert trees.identical(state, other_state)
    assert trees.identical(kept, other_kept)
    assert scores == other_scores


def test_a_run_travels_without_what_it_has_computed(run: Run) -> None:
    """Ids of masks mean nothing in another process, and a closure cannot be sent at all."""
    mask = {"w": torch.tensor([True, False])}
    run.known_state.note(1, "model", mask)
    assert run.known_state._recent
    assert run.setup.fresh(1)
    copy = pickle.loads(pickle.dumps(run))
    assert vars(copy).keys() == {each.name for each in fields(run)}
    assert copy.known_state._recent == {}
    assert copy.known_state.digests == run.known_state.digests
    assert copy.known_state.state()["clients"] == run.known_state.state()["clients"]
    assert trees.identical(copy.params, run.params)


NET_FILE = """
import torch
from torch import nn

from helper_beside import Doubled

class Small(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.doubled = Doubled()
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.doubled(x))
"""
HELPER_FILE = """
from torch import nn

class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x
"""


def run_of_file(folder: Path, last_line: str = "") -> tuple[Run, Path]:
    """A run whose network is the user's own file, which imports another beside it."""
    file = folder / "small.py"
    file.write_text(NET_FILE + last_line)
    (folder / "helper_beside.py").write_text(HELPER_FILE)
    run = make_run(methods.FedAvg(), folder / "run", dtype=torch.float32)
    module = build(f"{file}:Small", SHAPES["mlp"], 3, 0)
    return replace(run, net=Net(module, SHAPES["mlp"])), file


@pytest.mark.parametrize("either", EITHER, indirect=True)
def test_a_network_of_the_users_file_is_found_by_every_worker(tmp_path: Path, either: Pool) -> None:
    run, _ = run_of_file(tmp_path)
    each = Task(0, {"model": Packet(run.params)})
    (answer,) = answers(either, run, [each])
    assert same_as_serial(run, each, answer)


def test_a_file_that_has_changed_since_is_a_sentence(tmp_path: Path) -> None:
    run, file = run_of_file(tmp_path, "# first\n")
    file.write_text(NET_FILE + "# second\n")
    pool = Pool(workers=1, start="spawn")
    with pytest.raises(EngineError, match="the run cannot be sent to a worker process: ") as caught:
        answers(pool, run, [Task(0, {"model": Packet(run.params)})])
    assert "use engine='serial'" in str(caught.value)


def test_what_cannot_be_pickled_is_a_sentence(tmp_path: Path) -> None:
    class Here(methods.FedAvg):
        """A class that no other process can find."""

    pool = Pool(workers=1, start="spawn")
    run = make_run(Here(), tmp_path)
    with pytest.raises(EngineError, match="must be at the top level of a file"):
        answers(pool, run, [Task(0, {"model": Packet(run.params)})])
    assert pool._team == []


def test_a_part_of_a_tensor_is_sent_as_that_part(run: Run) -> None:
    """All clients' examples cut from one tensor: a copy of all for each would be six times as much."""
    clients = {}
    everything = torch.randn(6000, 12)
    for k, client in run.federation.clients.items():
        part = everything[1000 * k : 1000 * (k + 1)]
        clients[k] = replace(client, train=Examples(part, torch.zeros(1000, dtype=torch.long)))
    packed = pack_runs([replace(run, federation=replace(run.federation, clients=clients))])
    (tree,) = shared.get(packed.block)
    shared.drop(packed.block.name)
    # 6000 inputs of 12 float32, 6000 labels of 8 bytes; all else is small.
    assert 6000 * (12 * 4 + 8) < tree["runs"].numel() < 1.5 * 6000 * (12 * 4 + 8)


UNGUARDED = """
import fedgrove
from fedgrove.engines import Pool
fedgrove.run("fedavg", data="digits", rounds=1, cohort=2, engine=Pool(workers=1, start="spawn"), progress=False)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = python(script)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fedgrove.errors.EngineError: worker process ")
    assert 'below `if __name__ == "__main__":`, since every worker imports it' in last


def python(script: Path) -> subprocess.CompletedProcess[str]:
    source = str(Path(fedgrove.__file__).parents[1])
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- nothing is left behind ----------------------------------------------------------------------


def test_close_ends_every_process_and_may_be_repeated(run: Run, pool: Pool) -> None:
    answers(pool, run, [task(k, verb="probe") for k in range(4)])
    workers = pids(pool)
    assert len(workers) == 2
    assert all(alive(pid) for pid in workers)
    # A stopped worker too, and at once.
    os.kill(workers[0], signal.SIGSTOP)
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 2
    assert not any(alive(pid) for pid in workers)
    assert [answer.of for answer in answers(pool, run, [task(3, verb="probe")])] == [3]


@pytest.mark.parametrize("either", MOSTLY_FORK, indirect=True)
def test_shared_memory_is_empty_after_the_last_report(
    run: Run, either: Pool, blocks: Callable[[], list[str]]
) -> None:
    # A spawned worker that is still starting has its runs to read.
    warm(either, run)
    tasks = [task(k, verb="probe", params=run.params) for k in range(6)]
    assert len(answers(either, run, tasks)) == 6
    assert blocks() == []


def test_shared_memory_is_empty_after_a_caller_that_stops_early(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    at_once = task(3, verb="probe", params=run.params)
    later = task(1, act=ANSWER_LATER, verb="probe", params=run.params)
    stream = pool.map([(run, at_once), (run, later)])
    next(stream)
    # by then the other worker has answered, and nobody has read it
    time.sleep(0.3)
    stream.close()
    assert pool._team == []
    assert blocks() == []


def test_shared_memory_is_empty_after_close_in_the_middle(
    run: Run, pool: Pool, blocks: Callable[[], list[str]]
) -> None:
    """As after Ctrl-C between two answers, where nobody closes the stream."""
    tasks = [task(3, verb="probe", params=run.params)]
    for k in range(6):
        tasks.append(task(k, act=ANSWER_LATER, verb="probe", params=run.params))
    stream = pool.map((run, each) for each in tasks)
    next(stream)
    assert blocks()
    pool.close()
    assert blocks() == []
    stream.close()


def test_shared_memory_is_empty_after_a_loss(run: Run, blocks: Callable[[], list[str]]) -> None:
    pool = Pool(workers=3)
    at_once = task(3, verb="probe", params=run.params)
    failing = task(1, act=FAIL_LATER, verb="probe", params=run.params)
    later = task(5, act=ANSWER_LATER, verb="probe", params=run.params)
    found = answers(pool, run, [at_once, failing, later])
    assert [type(answer) for answer in found] == [Report, Lost, Report]
    assert blocks() == []
    pool.close()


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
    answers(pool, run, [task(0, params=run.params)])
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


@pytest.mark.parametrize("name", ["pool", "serial", "wired"])
def test_a_timeout_goes_to_the_engine(name: str) -> None:
    engine = choose(name, timeout=2.5)
    assert isinstance(engine, Pool | Serial | Wired)
    assert engine.timeout == 2.5
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"timeout is .*; it must be more than 0"):
            choose(name, timeout=wrong)


def test_batched_has_no_timeout() -> None:
    with pytest.raises(InputError, match="batched trains clients in stacks"):
        choose("batched", "cpu", timeout=2.5)


@pytest.mark.parametrize(("platform", "start"), [("linux", "fork"), ("darwin", "spawn")])
def test_how_processes_begin(platform: str, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert Pool().start == start
