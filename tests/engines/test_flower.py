"""Flower as an engine, over real Flower messages in this process; and on Ray, where that is installed."""

from __future__ import annotations

import json
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, remembered, started, tensors
from tests.contract import small
from tests.engines.loopback import looped, payload

import fedgrove
from fedgrove import methods, trees
from fedgrove.core import Answer, AnyMethod, Edit, Engine, Job, Lost, Packet, Report, Task
from fedgrove.engines import Serial, choose
from fedgrove.engines.faulty import Faulty
from fedgrove.engines.flower import messages, node
from fedgrove.engines.flower.engine import Flower, lose_by_error
from fedgrove.engines.flower.messages import (
    Letter,
    client_app,
    name_codec,
    read_cost,
    read_letter,
    read_partition,
)
from fedgrove.engines.flower.simulation import Simulation
from fedgrove.errors import InputError
from fedgrove.methods import FedWCP
from fedgrove.parts.augment import Augment
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.faults import Faults
from fedgrove.runs.gate import Gate
from fedgrove.runs.memory import read_tree
from fedgrove.runs.rounds import plan, plan_scoring, rounds
from fedgrove.runs.run import Run
from fedgrove.wire.ledger import Ledger
from fedgrove.wire.message_costs import BroadcastBytes, encode_task

FEW = ("ca-afp", "heterofl", "ditto")
EVERY = [
    pytest.param(small(name), id=name, marks=() if name in FEW else pytest.mark.slow)
    for name in methods.names()
]
KEEPING = replace(small("ditto"), local=LocalTraining(1, 8, keep_state=True))
"""Its clients also remember the state of two optimisers."""
EVERY.append(pytest.param(KEEPING, id="ditto-keeping"))
ANY_LENGTH = Gate(norm=0)


def played(run: Run, engine: Engine) -> tuple[trees.Tree, list[Any], Any]:
    """The final state with what clients remember; of all answers what they are and cost; and the groups."""
    seen: list[Any] = []

    def noted(tasks: list[Task]) -> Iterator[tuple[Task, Answer]]:
        for task, answer in answers(run, engine, tasks):
            macs = getattr(answer, "macs", 0)
            seen.append((type(answer).__name__, answer.of, answer.cost, macs))
            yield task, answer

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(noted(exchange.tasks))
        assert exchange.attempt < 5, exchange.why_abandoned
    state = exchange.state
    list(noted(plan_scoring(run, state, "finetune")))
    return {**tensors(state), **remembered(run)}, seen, getattr(state, "groups", None)


@pytest.mark.parametrize("method", EVERY)
def test_a_loop_of_real_messages_is_serial(method: AnyMethod, tmp_path: Path) -> None:
    """Masks, groups, weights, bytes and what is remembered, with clients that crash or answer too late."""
    results = []
    for where in ("serial", "flower"):
        faults = Faults.parse("crash=0.2,late=0.1")
        run = make_run(method, tmp_path / where, rounds=3, faults=faults, gate=ANY_LENGTH)
        engine: Engine = Serial() if where == "serial" else looped(run)
        results.append((*played(run, Faulty(engine)), run.known_state.state()["clients"]))
    (serial, serial_seen, groups, held), (flower, flower_seen, groups2, held2) = results
    assert trees.identical(serial, flower)
    assert serial_seen == flower_seen
    assert groups == groups2
    assert held == held2
    assert {kind for kind, *_ in serial_seen} >= {"Report"}


def test_a_node_augments_projects_and_keeps_its_optimiser_as_serial_does(tmp_path: Path) -> None:
    local = LocalTraining(1, 8, Adam(1e-2), keep_state=True, augment=Augment())
    method = FedWCP(k=3, zero_pruned="batch", local=local)
    states = []
    for where in ("serial", "flower"):
        run = make_run(method, tmp_path / where, net="bn-cnn2", gate=ANY_LENGTH)
        engine: Engine = Serial() if where == "serial" else looped(run)
        states.append(played(run, engine)[0])
    serial, flower = states
    assert any("/optimiser." in name for name in serial)
    assert trees.identical(serial, flower)


# ---- what really gets lost -----------------------------------------------------------------------


def hit(lost: dict[tuple[int, int], str], grid_nodes: dict[int, int]) -> Any:
    """The fate of each message, by round and client, as the head of the message says."""
    of_node = {number: client for client, number in grid_nodes.items()}

    def fate(message: Any) -> str:
        if message.metadata.message_type != "train":
            return ""
        letter = read_letter(message.content)
        head = json.loads(letter.head[4:])
        assert head["to"] == of_node[message.metadata.dst_node_id]
        return lost.get((head["round"], head["to"]), "") if head["verb"] == "train" else ""

    return fate


class Losing(Serial):
    """Serial, but some tasks do not arrive, and some replies do not: what a client did then is not known."""

    def __init__(self, lost: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self.lost = lost

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job in jobs:
            _, task = job
            [(_, answer)] = super().map([job])
            if task.verb == "train" and (task.round, task.to) in self.lost:
                yield job, Lost(task.to, "died", cost={"down": answer.cost["down"]})
            else:
                yield job, answer


LOST = [
    ("ditto", "reply"),
    ("ca-afp", "task"),
    *(pytest.param("ditto", fate, marks=pytest.mark.slow) for fate in ("task", "died", "silence")),
    *(pytest.param("ca-afp", fate, marks=pytest.mark.slow) for fate in ("reply", "silence")),
]


@pytest.mark.parametrize(("name", "fate"), LOST)
def test_lost_tasks_and_lost_replies_leave_no_trace(name: str, fate: str, tmp_path: Path) -> None:
    """After a reply that was lost the client has a memory that the server knows nothing of, and goes back."""
    # Everybody is asked in every round; of client 2 two rounds in a row are lost.
    lost = {(0, 1): fate, (1, 2): fate, (2, 2): fate}
    words: dict[str, Any] = {"rounds": 5, "cohort": 4, "gate": ANY_LENGTH}
    method = KEEPING if name == "ditto" else small(name)
    expected = make_run(method, tmp_path / "serial", **words)
    serial, serial_seen, groups = played(expected, Losing(lost))
    run = make_run(method, tmp_path / "flower", **words)
    engine = looped(run, timeout=1.0 if fate == "silence" else None)
    engine.grid.fate = hit(lost, dict(engine.nodes()))
    flower, flower_seen, groups2 = played(run, engine)
    # In its third round ca-afp groups its clients, with tasks of another name.
    assert [kind for kind, *_ in serial_seen].count("Lost") == (3 if name == "ditto" else 2)
    assert trees.identical(serial, flower)
    assert [seen[:3] for seen in serial_seen] == [seen[:3] for seen in flower_seen]
    assert groups == groups2


def one_exchange(tmp_path: Path, fate: str, timeout: float | None = None) -> list[Answer]:
    run = make_run(methods.FedAvg(), tmp_path, cohort=4)
    engine = looped(run, timeout=timeout)
    engine.grid.fate = hit({(0, 2): fate}, dict(engine.nodes()))
    found = [a for _, a in answers(run, engine, plan(run, run.initial_state))]
    assert [answer.of for answer in found] == [0, 1, 2, 3]
    assert [type(answer).__name__ for answer in found] == ["Report", "Report", "Lost", "Report"]
    return found


@pytest.mark.parametrize(
    ("fate", "reason", "sentence"),
    [
        ("refused", "unsent", "too large for the SuperLink"),
        ("died", "died", "the node of client 2 cannot be reached: it is not there"),
        ("silence", "late", "client 2 did not answer within 1 s"),
    ],
)
def test_a_loss_has_its_reason(fate: str, reason: str, sentence: str, tmp_path: Path) -> None:
    timeout = 1.0 if fate == "silence" else None
    lost = one_exchange(tmp_path, fate, timeout)[2]
    assert isinstance(lost, Lost)
    assert lost.reason == reason
    assert sentence in lost.detail
    assert sum(lost.cost["down"].values()) > 0
    assert "up" not in lost.cost


@pytest.mark.parametrize(
    ("code", "waited", "reason"),
    [(3, 9.5, "late"), (3, 2.0, "died"), (4, 2.0, "late"), (5, 9.9, "died"), (2, 9.9, "crashed")],
)
def test_an_answer_that_comes_too_late_is_late(code: int, waited: float, reason: str) -> None:
    """Flower drops a task after its time, 10 s here, and then says that there is no such message."""
    error = SimpleNamespace(code=code, reason="Message Unavailable \x1b[2J" + "x" * 10_000)
    lost = lose_by_error(Task(2, {}), error, 10.0, waited)
    assert lost.reason == reason
    assert lost.detail.isprintable()
    assert len(lost.detail) < 400
    if reason == "late":
        assert lost.detail == "client 2 did not answer within 10 s."


def test_a_client_without_a_node_is_lost_and_costs_nothing(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=4)
    engine = looped(run)
    without = {k: n for k, n in engine.nodes().items() if k != 1}
    engine.nodes = lambda: without
    [_, lost, *_] = [a for _, a in answers(run, engine, plan(run, run.initial_state))]
    assert isinstance(lost, Lost)
    assert (lost.reason, lost.cost) == ("unsent", {})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda letter: replace(letter, head=b""), "shorter|header"),
        (lambda letter: replace(letter, head=b"\xff\xff\xff\xff" + letter.head[4:]), "header"),
        (lambda letter: replace(letter, packets={}), "do not add up"),
        (lambda letter: replace(letter, codec="Dense()"), "it is written with 'Dense"),
        (lambda letter: Letter(), "cannot be read"),
        (
            lambda letter: replace(
                letter, packets={n: b"x" * len(b) for n, b in letter.packets.items()}
            ),
            "cannot be read",
        ),
    ],
    ids=["no head", "long head", "no packets", "codec", "empty", "noise"],
)
def test_a_reply_that_cannot_be_read_is_lost(spoil: Any, sentence: str, tmp_path: Path) -> None:
    run = make_run(methods.CAAFP(), tmp_path, cohort=4)

    def tasked(letter: Letter, config: Any) -> Letter:
        answer = node.answer_letter(run, read_partition(config), letter)
        return spoil(answer) if read_partition(config) == 2 else answer

    engine = looped(run)
    app = client_app(lambda question, config: {}, tasked)
    engine.grid.apps = dict.fromkeys(engine.grid.apps, app)
    found = [a for _, a in answers(run, engine, plan(run, run.initial_state))]
    assert [type(answer).__name__ for answer in found] == ["Report", "Report", "Lost", "Report"]
    assert isinstance(found[2], Lost)
    assert found[2].reason == "unreadable"
    assert re.search(sentence, found[2].detail)


def answered_by(run: Run, answer: Callable[[Letter, int], Letter]) -> Flower:
    """Return the engine over a grid whose nodes answer the letter of a client so."""
    engine = looped(run)
    app = client_app(
        lambda question, config: {},
        lambda letter, config: answer(letter, read_partition(config)),
    )
    engine.grid.apps = dict.fromkeys(engine.grid.apps, app)
    return engine


@pytest.mark.parametrize("changed", ["round", "run", "repeated", "nothing"])
def test_an_answer_that_is_sent_again_is_refused(changed: str, tmp_path: Path) -> None:
    """Client 2 answers every task with the report of its first one.

    A run that is repeated has the same name and sends the same tasks.
    """
    run = make_run(methods.FedAvg(), tmp_path, cohort=4, rounds=2)
    first: dict[str, Letter] = {}

    def replay(letter: Letter, client: int) -> Letter:
        answer = node.answer_letter(run, client, letter)
        if client != 2 or changed == "nothing":
            return answer
        return first.setdefault("answer", answer)

    engine = answered_by(run, replay)
    loop = rounds(run)
    tasks = next(loop).tasks
    reports = list(answers(run, engine, tasks))
    assert [type(answer).__name__ for _, answer in reports] == ["Report"] * 4
    if changed == "run":
        engine.name_of = lambda run: "another"
    elif changed == "repeated":
        assert [task.round for task in tasks] == [0] * 4
    else:
        tasks = loop.send(iter(reports)).tasks
    found = [answer for _, answer in answers(run, engine, tasks)]
    if changed == "nothing":
        assert isinstance(found[2], Report)
        return
    assert isinstance(found[2], Lost)
    assert found[2].reason == "duplicate"
    assert "a different task" in found[2].detail


@pytest.mark.parametrize("size", [0, 400_000_000], ids=["packed", "400 MB"])
def test_a_reply_of_absurd_size_is_refused_before_it_is_read(size: int, tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=4)
    codec = run.method.codec

    def large(letter: Letter, client: int) -> Letter:
        answer = node.answer_letter(run, client, letter)
        if client != 2:
            return answer
        packet = codec.encode(Packet({"w": torch.zeros(100_000_000)})).data
        if size:
            packet = bytes(size)
        head = {"of": 2, "examples": 5, "metrics": {}, "packets": [["model", len(packet)]]}
        text = json.dumps(head).encode()
        return replace(answer, head=struct.pack("<I", len(text)) + text, packets={"model": packet})

    found = [a for _, a in answers(run, answered_by(run, large), plan(run, run.initial_state))]
    assert [type(answer).__name__ for answer in found] == ["Report", "Report", "Lost", "Report"]
    assert isinstance(found[2], Lost)
    assert found[2].reason in ("packets", "tensors")


def test_the_memory_that_the_server_names_survives_lost_replies(tmp_path: Path) -> None:
    """Seven replies are lost, so the server still names the version of the first round."""
    run = make_run(methods.Ditto(), tmp_path, cohort=4, rounds=9)
    loop = rounds(run)
    task = loop.send(answers(run, looped(run), next(loop).tasks)).tasks[0]
    assert task.memory is not None
    for attempt in range(7):
        again = replace(task, attempt=attempt + 1)
        head, packets, _ = encode_task(again, run.method.codec, run.known_state, BroadcastBytes())
        letter = Letter(head, packets, name_codec(run.method.codec), {"run": "this"})
        assert "lost" not in node.answer_letter(run, task.to, letter).note


def test_a_message_of_somebody_else_is_lost(tmp_path: Path) -> None:
    from flwr.app import Message, RecordDict

    run = make_run(methods.FedAvg(), tmp_path, cohort=4)
    engine = looped(run)
    strange = dict.fromkeys(engine.grid.apps, lambda m, c: Message(RecordDict(), reply_to=m))
    engine.grid.apps = strange
    for _, lost in answers(run, engine, plan(run, run.initial_state)):
        assert isinstance(lost, Lost)
        assert lost.reason == "unreadable"
        assert "was not made by fedgrove" in lost.detail


@dataclass(frozen=True)
class Failing(methods.FedAvg):
    """Its clients raise."""

    def work(self, verb: str) -> Any:
        def fail(carry: Any, client: Any) -> Any:
            if client.id == 1:
                raise ZeroDivisionError("of its own")
            return carry

        return (Edit(fail), *super().work(verb))


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    run = make_run(Failing(), tmp_path, cohort=4)
    [_, lost, *_] = [a for _, a in answers(run, looped(run), plan(run, run.initial_state))]
    assert isinstance(lost, Lost)
    assert lost.reason == "crashed"
    assert "client 1 could not train: ZeroDivisionError: of its own" in lost.detail


def test_a_node_that_lost_its_masks_says_so_and_is_sent_them(tmp_path: Path) -> None:
    """As serial in its results; in bytes what was sent again, and nothing else, comes on top."""
    runs = [make_run(methods.FixedPrune(), tmp_path / n, cohort=4, rounds=4) for n in "ab"]
    engines: list[Engine] = [Serial(), looped(runs[1])]
    spent = []
    states = []
    for run, engine in zip(runs, engines, strict=True):
        state = run.initial_state
        for number in range(3):
            if number == 2:
                for path in run.memory.folder.glob("held-*"):
                    path.unlink()
            found = [a for _, a in answers(run, engine, plan(run, state))]
            state = run.method.fold(state, found)
        spent.append([sum(answer.cost["down"].values()) for answer in found])
        states.append(tensors(state))
        # And it holds them now.
        again = [a for _, a in answers(run, engine, plan(run, state))]
        spent.append([sum(answer.cost["down"].values()) for answer in again])
    assert trees.identical(*states)
    serial, serial_again, flower, flower_again = spent
    assert all(more > less for more, less in zip(flower, serial, strict=True))
    assert serial_again == flower_again


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ca-afp", "heterofl"])
def test_the_ledger_counts_what_flower_carries(name: str, tmp_path: Path) -> None:
    run = make_run(small(name), tmp_path, cohort=4, rounds=3, gate=ANY_LENGTH)
    engine = looped(run)
    ledger = Ledger()
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(ledger.tally(answers(run, engine, exchange.tasks)))
    carried = {"up": 0, "down": 0}
    for way, content in engine.grid.carried:
        carried[way] += payload(content)
    assert carried == {"up": sum(ledger.up.values()), "down": sum(ledger.down.values())}
    assert carried["down"] > 1000


def test_a_broadcast_is_one_object_to_flower(tmp_path: Path) -> None:
    """Objects are stored by their contents: of four tasks with one model there are five."""
    run = make_run(methods.FedAvg(), tmp_path, cohort=4)
    engine = looped(run)
    list(answers(run, engine, plan(run, run.initial_state)))
    objects = set()
    for way, content in engine.grid.carried:
        if way == "down":
            record = content.array_records["fedgrove"]
            assert sorted(record) == ["0000.head", "0001.model"]
            objects |= {array.object_id for array in record.values()}
    assert len(objects) == 5


def test_nobody_can_claim_other_bytes_than_came() -> None:
    note = {"cost": json.dumps({"header": 1, "values": 2})}
    assert read_cost(Letter(b"abc", {"m": b"defg"}, note=note)) == {"header": 3, "values": 4}
    for claim in ('{"header": 3, "values": 4}', '{"mask": 7}'):
        assert read_cost(Letter(b"abc", {"m": b"defg"}, note={"cost": claim})) == json.loads(claim)
    many = json.dumps({"a": 7} | {str(n): 0 for n in range(40)})
    names = ('{"\\ud800": 7}', '{"\\u001b[2J": 7}', json.dumps({"x" * 50: 7}), '{"": 7}', many)
    wrong = ("[7]", "7", "{", '{"a": 8, "b": -1}', '{"a": 7.0}', '{"a": "7"}')
    for claim in (*wrong, *names, " " * 5000 + '{"a": 7}'):
        honest = {"header": 3, "values": 4}
        assert read_cost(Letter(b"abc", {"m": b"defg"}, note={"cost": claim})) == honest


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["flwr", "ray"])
def test_without_flower_the_sentence_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(InputError, match=rf"{missing} is not installed.*'fedgrove\[flower\]'"):
        choose("flower")


def test_a_time_out_is_for_flower_too() -> None:
    pytest.importorskip("ray", reason="get it with: pip install 'fedgrove[flower]'")
    engine = choose("flower", timeout=3.0)
    assert isinstance(engine, Simulation)
    assert engine.timeout == 3.0
    engine.close()


def test_only_these_files_import_flwr() -> None:
    source = Path(fedgrove.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        if re.search(r"^\s*(from|import) flwr", path.read_text(), re.MULTILINE):
            found.add(path.relative_to(source).as_posix())
        # Never at import time.
        assert not re.search(r"^(from|import) flwr", path.read_text(), re.MULTILINE)
    assert found == {
        "engines/flower/messages.py",
        "engines/flower/simulation.py",
    }


# ---- on Ray --------------------------------------------------------------------------------------


WORDS = ["--data", "digits", "--clients", "4", "--cohort", "3"]


def descendants(process: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = set()
    waiting = [process]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def running(processes: set[int]) -> set[int]:
    return {number for number in processes if Path(f"/proc/{number}").exists()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ca-afp", "heterofl"])
def test_on_ray_it_is_serial_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    """In processes of their own: one Flower run per process."""
    pytest.importorskip("ray", reason="get it with: pip install 'fedgrove[flower]'")
    summaries = {}
    for engine in ("serial", "flower"):
        out = tmp_path / engine
        process = started(
            "run", name, *WORDS, "--rounds", "4", "--engine", engine, "--out", str(out)
        )
        family: set[int] = set()
        while process.poll() is None:
            family |= descendants(process.pid)
            time.sleep(0.2)
        assert not running(family)
        _, err = process.communicate()
        assert process.returncode == 0, err
        # Neither Flower's log nor Ray's warnings; progress is ours.
        assert all(line.startswith("round ") for line in err.splitlines()), err
        summaries[engine] = json.loads((out / "summary.json").read_text())
    assert len(family) > 3
    for key in ("group_sizes", "bytes_up", "bytes_down", "bytes_deliver_down", "virtual_seconds"):
        assert summaries["serial"][key] == summaries["flower"][key]
    models = sorted((tmp_path / "serial" / "models").glob("*.safetensors"))
    assert models
    for path in models:
        mine = read_tree(tmp_path / "flower" / "models" / path.name)
        assert trees.distance(read_tree(path), mine) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ray_ends_with_the_run(number: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="get it with: pip install 'fedgrove[flower]'")
    out = tmp_path / "run"
    process = started(
        "run", "ditto", *WORDS, "--rounds", "500", "--engine", "flower", "--out", str(out)
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and not (out / "checkpoint" / "latest.json").is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    family = descendants(process.pid)
    assert len(family) > 3
    process.send_signal(number)
    _, err = process.communicate(timeout=90)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "fedgrove resume" in err
    # A server that is killed ends nothing itself: Ray's own agents take a minute to notice.
    end = time.monotonic() + (120 if number == signal.SIGKILL else 0.5)
    while time.monotonic() < end and running(family):
        time.sleep(0.1)
    assert not running(family)
