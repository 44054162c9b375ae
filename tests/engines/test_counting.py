"""Processes that count bytes: the same ledger to the byte, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, reports, until
from tests.contract import small

from fedgrove import methods
from fedgrove.core import Lost, Packet, Report, Task
from fedgrove.engines.batched import counting
from fedgrove.engines.batched.counting import Counters, CountingWorker, get_counters
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.pool.engine import default_start
from fedgrove.errors import InputError
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run
from fedgrove.wire.codec import Chainable, Codec, Dense, KnownMask, MeasuredTensor, Smallest
from fedgrove.wire.ledger import Ledger
from fedgrove.wire.tensors import AllowedForms

pytestmark = pytest.mark.skipif(default_start() != "fork", reason="there is no fork")

RECIPE = LocalTraining(1, 8, SGD(0.05))
METHODS = ("fedavg", "safl", "fedlayerprune", "adfedwcp", "grove", "ca-afp")


def stop_counters() -> None:
    """End the processes; the next call of `get_counters` starts new ones."""
    counters = counting._COUNTERS
    if counters is not None and counters.owner == os.getpid():
        for worker in counters.workers:
            worker.end()
    counting._COUNTERS = None


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has begun in this process: none can be started")
    stop_counters()
    yield
    stop_counters()


def team(number: int = 2) -> list[CountingWorker]:
    counters = get_counters(number)
    assert counters is not None
    return counters.workers


class Watch:
    """Notes how many packets processes have counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packets = 0
        take = counting.Ticket.costs

        def costs(ticket: counting.Ticket) -> counting.Costs:
            found = take(ticket)
            self.packets += len(found)
            return found

        monkeypatch.setattr(counting.Ticket, "costs", costs)


def run_of(method: Any, folder: Path, **words: Any) -> Run:
    # In its real width har-cnn has packets that are worth sending.
    settings = {"sizes": (9, 12, 8, 10, 11), "cohort": 5, "rounds": 3} | words
    method = replace(method, local=RECIPE)
    return make_run(
        method, folder, net="har-cnn", options={"dropout": 0.0}, dtype=torch.float32, **settings
    )


def costs_of(run: Run, engine: Batched) -> list[tuple[str, int, Mapping[str, Any]]]:
    """What every message of a run takes, by part."""
    found: list[tuple[str, int, Mapping[str, Any]]] = []
    ledger = Ledger()
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        heard = list(ledger.tally(answers(run, engine, exchange.tasks)))
        for task, answer in heard:
            assert isinstance(answer, Report)
            found.append((task.verb, task.to, answer.cost))
        exchange = loop.send(iter(heard))
    return [*found, ("all", 0, {"up": ledger.up, "down": ledger.down})]


@pytest.mark.parametrize("name", METHODS)
def test_the_ledger_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    alone = costs_of(run_of(small(name), tmp_path / "alone"), Batched(counters=0))
    assert watch.packets == 0
    counted = costs_of(run_of(small(name), tmp_path / "counted"), Batched(counters=2))
    assert counted == alone
    # What Dense takes follows from the shapes: that is never sent.
    assert (watch.packets > 0) == (name != "fedavg")
    assert all(not worker.has_ended for worker in team())


SPARSE = replace(methods.FedAvg(), codec=Smallest())


def tasks_of(run: Run) -> list[Task]:
    packet = Packet(run.params, {name: leaf > 0 for name, leaf in run.params.items()})
    return [Task(client, {"model": packet}) for client in run.infos]


def costs(run: Run, engine: Batched, tasks: list[Task]) -> list[Mapping[str, int]]:
    """What reports take. What tasks take is less the second time: clients hold the mask."""
    return [report.cost["up"] for report in reports(run, engine, tasks)]


def test_what_a_client_alone_is_sent_is_counted_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each a model of its own, and all of them one in common."""
    run = run_of(SPARSE, tmp_path)
    tasks = []
    for client in run.infos:
        own = {name: leaf + client for name, leaf in run.params.items()}
        mask = {name: leaf > client for name, leaf in own.items()}
        tasks.append(Task(client, {"model": Packet(run.params), "own": Packet(own, mask)}))

    def down(engine: Batched) -> list[Mapping[str, int]]:
        # They hold nothing yet, each time.
        for client in run.infos:
            run.known_state.forget(client)
        return [report.cost["down"] for report in reports(run, engine, tasks)]

    expected = down(Batched(counters=0))
    measured: list[Packet] = []
    measure = Chainable.measure

    def noted(self: Chainable, packet: Packet) -> list[MeasuredTensor]:
        measured.append(packet)
        return measure(self, packet)

    # After the processes have begun.
    team()
    monkeypatch.setattr(Chainable, "measure", noted)
    assert down(Batched(counters=2)) == expected
    # Here only what all of them are sent was measured, and once.
    assert len(measured) == 1
    # What is not counted there is counted here.
    for worker in team():
        worker.end()
    assert down(Batched(counters=2)) == expected


def test_one_that_is_killed_in_the_middle_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    watch = Watch(monkeypatch)
    first, second = team()
    found = []
    for number, report in enumerate(reports(run, Batched(counters=2), tasks_of(run))):
        found.append(report.cost["up"])
        if number == 0:
            assert first.process.pid is not None
            # It had three reports, and may not have answered all of them.
            os.kill(first.process.pid, signal.SIGKILL)
    assert found == expected
    # It is noticed when it is asked for something, at the latest the next time.
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert first.has_ended
    assert not second.has_ended
    before = watch.packets
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    # The other one has counted them all.
    assert watch.packets == before + len(expected)


def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    first, second = team()
    assert second.process.pid is not None
    os.kill(second.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(counting, "TIMEOUT_SECONDS", 0.2)
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert second.has_ended
    assert not second.process.is_alive()
    first.end()
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected


def test_many_orders_do_not_fill_the_pipe_of_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = get_counters(1)
    assert counters is not None
    (worker,) = counters.workers
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(counting, "TIMEOUT_SECONDS", 0.2)
    packets = {"model": Packet({"w": torch.arange(4200.0)})}
    for position in range(600):
        counters.submit(position, Smallest(), packets, {})
    assert worker.has_ended


def test_they_can_be_lent_again_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = get_counters(1)

    def interrupted(worker: CountingWorker) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CountingWorker, "receive_all", interrupted)
        with pytest.raises(KeyboardInterrupt), counting.borrow_counters(counters):
            pass
    with counting.borrow_counters(counters) as again:
        assert again is counters


@pytest.mark.parametrize("room", [0, 400_000, 900_000])
def test_little_room(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, for one report, and for two at once."""
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    team()
    monkeypatch.setattr(counting, "SHARED_BYTES", room)
    watch = Watch(monkeypatch)
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert watch.packets == (len(expected) if room else 0)


def test_more_reports_than_are_handed_out_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MAX_AHEAD_PER_WORKER", 1)
    # Reports alone are looked at.
    monkeypatch.setattr(counting, "FEW_RECEIVERS", 0)
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    watch = Watch(monkeypatch)
    assert costs(run, Batched(counters=2, chunk=4), tasks_of(run)) == expected
    # The last one is alone in its part.
    assert watch.packets == 4


def test_an_error_comes_when_it_is_the_turn_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a full disk, which ends the run: those before it are answered."""
    run = run_of(SPARSE, tmp_path)
    answer_of = Batched._make_answer

    def fails(self: Batched, job: Any) -> Any:
        if job.task.to == 3:
            raise OSError("no space left")
        return answer_of(self, job)

    monkeypatch.setattr(Batched, "_make_answer", fails)
    loop = reports(run, Batched(counters=2), tasks_of(run))
    assert [next(loop).of for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="no space left"):
        next(loop)


def test_a_caller_that_stops_early_and_one_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    engine = Batched(counters=2)
    outer = reports(run, engine, tasks_of(run))
    assert next(outer).cost["up"] == expected[0]
    watch = Watch(monkeypatch)
    # The processes have what the outer one gave them.
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert watch.packets == 0
    outer.close()
    assert costs(run, engine, tasks_of(run)) == expected
    assert watch.packets == len(expected)


def test_a_process_that_forks_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy must not take the answers that its parent waits for, whatever it does."""
    run = run_of(SPARSE, tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    watch = Watch(monkeypatch)
    found = []
    loop = reports(run, Batched(counters=2), tasks_of(run))
    for number, report in enumerate(loop):
        found.append(report.cost["up"])
        if number == 1:
            child = os.fork()
            if child == 0:
                rest = [report.cost["up"] for report in loop]
                os._exit(0 if rest == expected[2:] else 1)
            assert os.waitpid(child, 0)[1] == 0
    assert found == expected
    assert watch.packets == len(expected)


# ---- codecs of your own --------------------------------------------------------------------------


@dataclass(frozen=True)
class Local(Chainable):
    """One that does not pickle: what it may do travels, and it does not."""

    odd: Any

    @property
    def allow(self) -> AllowedForms:
        return Smallest().allow


@dataclass(frozen=True)
class Raising(Chainable):
    """Its measuring fails, for every client."""

    allow = Smallest().allow

    def measure(self, packet: Packet) -> list[MeasuredTensor]:
        raise ValueError("no number pleases me")


@dataclass(frozen=True)
class Own:
    """A codec that does not chain."""

    def encode(self, packet: Packet, known: KnownMask | None = None) -> Any:
        return Dense().encode(packet)

    def cost(self, packet: Packet, known: KnownMask | None = None) -> Mapping[str, int]:
        return {"values": 1 + len(packet.values)}

    def decode(self, data: bytes, known: KnownMask | None = None, like: Any = None) -> Packet:
        return Dense().decode(data)


@pytest.mark.parametrize(
    ("codec", "is_sent"),
    [(Smallest(), True), (Local(lambda: 0), True), (Own(), False), (Dense(), False)],
    ids=["smallest", "local", "own", "dense"],
)
def test_codecs(
    codec: Codec, is_sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(replace(methods.FedAvg(), codec=codec), tmp_path)
    expected = costs(run, Batched(counters=0), tasks_of(run))
    watch = Watch(monkeypatch)
    assert costs(run, Batched(counters=2), tasks_of(run)) == expected
    assert watch.packets == (len(expected) if is_sent else 0)


def test_a_codec_that_raises_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(replace(methods.FedAvg(), codec=Smallest()), tmp_path)
    tasks = [Task(client, {"model": Packet(run.params)}) for client in run.infos]

    def broken(packets: Any, *rest: Any) -> Any:
        raise ValueError("no number pleases me")

    # Before the processes begin, so that they have it too.
    monkeypatch.setattr(Chainable, "measure", broken)
    monkeypatch.setattr("fedgrove.engines.work.count_task", lambda *words: {"header": 1})
    found = []
    for number in (0, 2):
        for _, answer in answers(run, Batched(counters=number), tasks):
            assert isinstance(answer, Lost)
            found.append(answer)
    assert found[: len(tasks)] == found[len(tasks) :]
    assert found[0].reason == "unreadable"
    assert "no number pleases me" in str(found[0])
    assert all(not worker.has_ended for worker in team())


def test_one_that_measures_in_its_own_way_is_not_sent() -> None:
    assert Smallest().is_defined_by_allow
    assert Local(0).is_defined_by_allow
    assert not Raising().is_defined_by_allow
    assert not Dense().is_defined_by_allow


# ---- when there are none -------------------------------------------------------------------------


def test_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Batched()._counters() is None
    assert Batched(counters=0)._counters() is None
    assert Batched(counters=2, count_bytes=False)._counters() is None
    counters = Batched(counters=2)._counters()
    assert counters is not None
    assert len(counters.workers) == 2
    # Once per process, for all engines.
    assert Batched(counters=2)._counters() is counters
    for available, number in ((1, 0), (2, 0), (3, 0), (4, 2), (6, 3), (16, 8), (64, 8)):
        monkeypatch.setattr(counting, "cores", lambda available=available: available)
        assert counting.choose_default_number() == number


def test_less_than_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"counters is -1; .*0 or more"):
        Batched(counters=-1)


def test_none_once_cuda_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert get_counters(2) is None
    monkeypatch.undo()
    # It is not asked again and again.
    assert get_counters(2) is None


def test_none_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> CountingWorker:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(counting, "_start", refuse)
    assert get_counters(2) is None


def test_a_forked_process_does_not_use_them() -> None:
    mine = get_counters(1)
    assert mine is not None
    child = os.fork()
    if child == 0:
        theirs: Counters | None = get_counters(1)
        own = theirs is not None and theirs is not mine and theirs.owner == os.getpid()
        stop_counters()
        os._exit(0 if own else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert not mine.workers[0].has_ended
    assert mine.workers[0].process.is_alive()


# ---- how they end --------------------------------------------------------------------------------


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


OWNER = """
import sys, time
from fedgrove.engines.batched.counting import get_counters
workers = get_counters(2).workers
print(*(worker.process.pid for worker in workers), flush=True)
if sys.argv[1] == "exits":
    sys.exit()
time.sleep(100)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, "exits"])
def test_they_end_with_their_owner(how: signal.Signals | str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(how)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2, owner.communicate()
    if isinstance(how, signal.Signals):
        # Ctrl-C reaches them too, and is not for them.
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        owner.send_signal(how)
    # They hold its output open: this is over when the last one has ended.
    owner.communicate(timeout=60)
    assert until(lambda: not any(is_there(pid) for pid in pids), 10)


def test_they_keep_no_file_of_their_owner_open(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        (worker,) = team(1)
        name = os.readlink(f"/proc/self/fd/{file.fileno()}")
        folder = Path(f"/proc/{worker.process.pid}/fd")

        def is_open() -> bool:
            links = []
            for descriptor in folder.iterdir():
                try:
                    links.append(os.readlink(descriptor))
                except FileNotFoundError:
                    continue
            return name in links

        assert until(lambda: not is_open(), 5)
