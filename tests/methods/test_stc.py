"""STC: a round by hand, nothing is lost for good, and both sides agree on what a client holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, play, remembered, tensors
from tests.contract import Contract
from tests.methods.exchanges import exchanges

import fedgrove
from fedgrove import trees
from fedgrove.core import Packet, Report, Setup
from fedgrove.engines import Serial
from fedgrove.engines.faulty import Faulty
from fedgrove.errors import InputError, UnfitError
from fedgrove.methods.stc.method import STC, State, versions
from fedgrove.nets import Net
from fedgrove.runs.faults import Faults
from fedgrove.runs.rounds import plan, plan_scoring, rounds
from fedgrove.runs.run import Run
from fedgrove.trees import Tree

CONTRACT = Contract(
    off=STC(up=1.0, down=1.0, ternary=False),
    # A hundredth of 5187 is 52; log(.618)/log(.99) = 47.9, so b* = 6, and .99^64 = .5256: 6 + 1/.4744 + 1 = 9.108 bits
    # each and four bytes are 63.20. Four clients, three at a time: 4/3 updates come down for each that goes up.
    paper_bytes=63.201 * (1 + 4 / 3) * 3 * 50,
    # Its server rounds the sum to three values: the sum itself is looked at, not what rounding in the last bit makes of
    # ties. A real protocol adds integers, without any rounding.
    summed_with={"down": 1.0, "ternary": False},
)

HALF = STC(up=0.5, down=0.25)


def report(client: int, examples: int, update: list[float]) -> Report:
    return Report(client, {"update": Packet({"w": torch.tensor(update)})}, examples)


def test_the_server_by_hand() -> None:
    """Updates (4 0 -4 0) of one example and (0 2 -2 0) of three: the mean is (1 1.5 -2.5 0).

    With A = (1 0 0 0) that is (2 1.5 -2.5 0); a quarter of four is one: -2.5 goes, (2 1.5 0 0) is left.
    """
    before = State(
        round=3,
        published=versions.first({"w": torch.tensor([1.0, 1.0, 1.0, 1.0])}),
        statistics={},
        left={"w": torch.tensor([1.0, 0.0, 0.0, 0.0])},
    )
    reports = [report(5, 1, [4.0, 0.0, -4.0, 0.0]), report(8, 3, [0.0, 2.0, -2.0, 0.0])]
    after = HALF.fold(before, reports)
    assert after.round == 4
    assert after.published.models[0]["w"].tolist() == [1.0, 1.0, -1.5, 1.0]
    assert after.left["w"].tolist() == [2.0, 1.5, 0.0, 0.0]
    # Those who reported hold what they were sent, version 0.
    assert after.published.client_versions == {5: (0, 0), 8: (0, 0)}
    assert after.published.numbers == {0: 1}


def test_the_client_by_hand(tmp_path: Path) -> None:
    """Three changes of 3, -2 and 1 in the first bias, and 1 left of the third: two of 5187 are sent.

    3, -2 and 2 are at hand; the largest are 3 and -2, the first of equal ones, of mean magnitude 2.5. Of 3 is .5
    left, of -2 is it .5, and the 2.
    """
    run = make_run(STC(up=2 / 5187), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    client = run.client(task, {})
    bias = next(name for name in client.layout.params if name.endswith("bias"))
    changes = torch.zeros_like(client.start[bias])
    changes[:3] = torch.tensor([3.0, -2.0, 1.0])
    left = trees.map(torch.zeros_like, client.start)
    left[bias][2] = 1.0
    local = {**client.start, bias: client.start[bias] + changes}
    outcome = run.method._give({"model": client.start, "local": local, "left": left}, client)
    sent = outcome.give["update"].values
    assert sent[bias][:4].tolist() == pytest.approx([2.5, -2.5, 0.0, 0.0])
    assert int((trees.flatten(sent) != 0).sum()) == 2
    assert outcome.memory["left"][bias][:4].tolist() == pytest.approx([0.5, 0.5, 2.0, 0.0])
    assert trees.identical(outcome.memory["held"], client.start)


def test_nothing_is_lost_for_good(tmp_path: Path) -> None:
    """What is published and what is left add up to all that clients have sent; so do a client's."""
    run = make_run(HALF, tmp_path, rounds=5)
    total: Tree = dict(run.params)
    for _, _, given, after in exchanges(run):
        weights = sum(each.examples for each in given)
        for each in given:
            share = each.examples / weights
            for name, value in each.give["update"].values.items():
                total[name] = total[name] + share * value
        reached = trees.map(torch.add, after.published.models[0], after.left)
        assert trees.distance(reached, total) < 1e-12


# ---- what a client holds -------------------------------------------------------------------------


def held_by(run: Run, state: State, client: int) -> Tree:
    """The model of a client once it has read what it would be sent now."""
    carry: dict[str, Any] = dict(run.memory.read(client, run.memory.files.get(client)))
    for name, packet in run.method.deliver(state, client).items():
        carry[name] = packet.values
    start = trees.pick(run.params, state.published.models[0])
    model, _ = versions.receive(carry, start)
    return model


@pytest.mark.parametrize("room", [0.2, 4.0])
@pytest.mark.parametrize("faults", ["", "crash=0.2,nan=0.2,late=0.2"])
def test_after_every_round_all_clients_can_catch_up(
    faults: str, room: float, tmp_path: Path
) -> None:
    """Also those who have missed many, were never asked, or whose last exchange was lost or refused."""
    method = STC(up=0.1, down=0.1, room=room)
    words: dict[str, Any] = {"sizes": (12,) * 7, "cohort": 3, "rounds": 12}
    if faults:
        words["faults"] = Faults.parse(faults)
    run = make_run(method, tmp_path, **words)
    loop = rounds(run)
    exchange = next(loop)
    lost = 0
    whole = 0
    while exchange.tasks:
        whole += sum("model" in task.send for task in exchange.tasks)
        exchange = loop.send(answers(run, Faulty(Serial()), exchange.tasks))
        lost += len(exchange.tally.lost) + len(exchange.tally.refused)
        newest = exchange.state.published.models[0]
        for client in range(7):
            assert trees.distance(held_by(run, exchange.state, client), newest) < 1e-12
    assert bool(lost) == bool(faults)
    # An update takes 12 bytes of 5187/10 numbers, the model 8 of all: room .2 is room for one.
    assert len(exchange.state.published.updates[0]) <= room * 8 * 10 / 12
    assert bool(whole) == (room < 1)


def test_in_the_first_round_nothing_need_be_sent(tmp_path: Path) -> None:
    """Both sides have the initial model; later the more was missed, the more is sent."""
    run = make_run(STC(), tmp_path, sizes=(12,) * 8, cohort=2, rounds=8, dtype=torch.float32)
    (first, *_) = [tasks for _, tasks, _, _ in exchanges(run)]
    assert all(task.send == {} for task in first)


def test_a_million_clients_need_no_more_of_the_server(tmp_path: Path) -> None:
    """What the server knows of clients is bounded by the history, not by who has taken part."""
    method = STC(up=0.1, down=0.1, room=0.5)
    run = make_run(method, tmp_path, sizes=(6,) * 30, cohort=2, rounds=12)
    state = play(run, Serial())
    # Half a model of 8 bytes a number, at 12 bytes for a tenth: three updates, of two clients each, and the last.
    assert len(state.published.updates[0]) == 3
    assert len(state.published.client_versions) <= 2 * 4


# ---- the last layer at home ----------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_the_last_layer_stays_at_home(net: str, tmp_path: Path) -> None:
    run = make_run(STC(up=0.1, down=0.1, head="home"), tmp_path, net=net)
    head = set(run.net.layout.head)
    assert head
    for _, tasks, given, after in exchanges(run):
        for message in [task.send for task in tasks] + [each.give for each in given]:
            for packet in message.values():
                assert not head & packet.values.keys()
        assert not head & after.published.models[0].keys()
    kept = {name.split("/", 2)[2] for name in remembered(run) if name.split("/")[1] == "kept"}
    assert kept == head
    # A client that was never asked uses the initial one.
    for task in plan_scoring(run, run.initial_state):
        assert task.send.keys() <= {"statistics"}


def test_statistics_travel_whole(tmp_path: Path) -> None:
    """Running means and variances are averaged as FedAvg averages them, and no share is taken of them."""
    run = make_run(STC(), tmp_path, net="bn-cnn2")
    for _, tasks, given, after in exchanges(run):
        assert all(set(task.send) >= {"statistics"} for task in tasks)
        weights = [each.examples for each in given]
        for name, value in after.statistics.items():
            assert name in run.net.layout.buffers
            rows = [each.give["statistics"].values[name] for each in given]
            mean = sum(n * row for n, row in zip(weights, rows, strict=True)) / sum(weights)
            torch.testing.assert_close(value, mean.to(value.dtype))


def headless() -> Net:
    return Net(torch.nn.Sequential(torch.nn.Conv1d(3, 3, 4), torch.nn.Flatten()), (3, 4))


def only_a_head() -> Net:
    return Net(torch.nn.Sequential(torch.nn.Linear(4, 3)), (4,))


@pytest.mark.parametrize(
    ("net", "why"),
    [(headless, "no layer with parameters"), (only_a_head, "nothing would be shared")],
)
def test_a_net_that_cannot_keep_its_head_at_home_is_refused(net, why: str) -> None:
    made = net()
    start = Setup(made.params(), made, {}, 3, lambda j: {})
    with pytest.raises(UnfitError, match=why):
        STC(head="home").init(start)
    assert STC().init(start).round == 0


# ---- one direction only --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "down", "up"),
    [
        ({"up": 1.0, "ternary": False, "down": 0.1}, {"missed0"}, {"model"}),
        ({"up": 0.1, "ternary": False, "down": 1.0}, {"model"}, {"update"}),
        ({"up": 1.0, "down": 1.0}, {"missed0"}, {"update"}),
    ],
)
def test_one_direction(words, down: set[str], up: set[str], tmp_path: Path) -> None:
    """Where nothing is compressed the model itself travels."""
    run = make_run(STC(**words), tmp_path, cohort=4)
    seen = list(exchanges(run))
    _, tasks, given, _ = seen[-1]
    assert all(set(task.send) == down for task in tasks)
    assert all(set(each.give) == up for each in given)


@pytest.mark.parametrize(
    ("word", "value"),
    [("up", 0.0), ("down", 1.5), ("head", "away"), ("room", -1.0), ("scope", "x")],
)
def test_what_is_refused(word: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{word} is "):
        STC(**{word: value})


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    words = {"data": "digits", "clients": 6, "cohort": 2, "rounds": 4, "engine": "serial"}
    words |= {"net": "mlp:hidden=8", "epochs": 1, "progress": False}
    whole = fedgrove.run(STC(up=0.05, down=0.05), **words, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fedgrove.run(STC(up=0.05, down=0.05), **words, out=tmp_path / "part", watch=stop)
    resumed = fedgrove.resume(tmp_path / "part", engine="serial", progress=False)
    for name in ("accuracy_clients", "bytes_up", "bytes_down"):
        assert resumed.summary[name] == whole.summary[name]
    assert whole.summary["bytes_up"] < whole.summary["params"] * 4 * 2 * 4 / 5


def test_its_state_holds_no_model_for_each_client(tmp_path: Path) -> None:
    run = make_run(STC(), tmp_path, sizes=(12,) * 6)
    one = sum(leaf.numel() for leaf in tensors(run.initial_state).values())
    state = play(run, Serial())
    # Three updates of a hundredth, places and values.
    assert sum(leaf.numel() for leaf in tensors(state).values()) <= one + 3 * 2 * 52
