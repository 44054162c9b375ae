"""Scenarios: wrong labels, missing classes, and clients that exchange their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgrove
from fedgrove import data
from fedgrove.data import devices, scenario
from fedgrove.data.scenario import draw_pairs, parse
from fedgrove.errors import InputError


def changed(a, b, part):
    return {
        k
        for k in a.clients
        if not torch.equal(getattr(a.clients[k], part).y, getattr(b.clients[k], part).y)
    }


@pytest.fixture(scope="module")
def clean():
    return data.load("motion", clients=20)


@pytest.mark.parametrize(
    ("text", "tested"),
    [("noisy", False), ("noisy:all", True), ("drift", True), ("drift:train", False)],
)
def test_two_fifths_of_clients_are_touched_and_inputs_never(clean, text, tested):
    wrong = data.load("motion", clients=20, scenario=text)
    touched = changed(clean, wrong, "train")
    assert len(touched) == 8  # 0.4 x 20
    assert changed(clean, wrong, "test") == (touched if tested else set())
    assert changed(clean, wrong, "validation") <= touched
    assert all(
        torch.equal(clean.clients[k].train.x, wrong.clients[k].train.x) for k in clean.clients
    )
    assert any("random labels" in note for note in wrong.notes) == tested


def test_share_of_wrong_labels():
    # 30 % replaced, of which 1 in 5 is right by chance: 24 % wrong; drift: 80 % wrong.
    y = np.zeros(20000, dtype=np.int64)
    noisy = scenario.corrupt_labels(scenario.parse("noisy"), y, 5, np.random.default_rng(0))
    drift = scenario.corrupt_labels(scenario.parse("drift"), y, 5, np.random.default_rng(0))
    assert (noisy != 0).mean() == pytest.approx(0.24, abs=0.01)
    assert np.bincount(drift) / 20000 == pytest.approx(np.full(5, 0.2), abs=0.015)
    assert not y.any()


def test_restricted_keeps_k_of_the_clients_own_classes(clean):
    few = data.load("motion", clients=20, scenario="restricted:2")
    for client in few.clients.values():
        assert len(client.train.y.unique()) == 2
        assert set(client.test.y.tolist()) <= set(client.train.y.tolist())
    assert few.classes == 5
    assert len({tuple(c.train.y.unique().tolist()) for c in few.clients.values()}) > 3


@pytest.mark.parametrize(
    "text", ["nosy", "noisy:some", "restricted", "restricted:x", "restricted:0", "drift:2"]
)
def test_wrong_words_are_refused(text):
    with pytest.raises(InputError, match="scenario"):
        scenario.parse(text)


def test_more_classes_than_there_are_is_refused():
    with pytest.raises(InputError, match="at most 5 classes"):
        data.load("motion", scenario="restricted:6")


def test_adfedwcp_bandwidth_is_the_papers():
    b = np.array([devices.draw_device("adfedwcp", 1, k, 0).bandwidth for k in range(2000)])
    assert (b == np.round(b)).all()
    assert 5 <= b.min() < b.max() <= 100
    assert b.mean() == pytest.approx(52.5, abs=1.2)  # standard error 15.83 / sqrt(2000) = 0.35
    assert b.std() == pytest.approx(15.83, abs=0.8)


def test_phones_are_three_tiers_and_do_not_depend_on_other_clients():
    infos = [devices.draw_device("phones", 1, k, 0) for k in range(1000)]
    shares = [sum(i.bandwidth == tier[1] for i in infos) / 1000 for tier in devices.TIERS]
    assert shares == pytest.approx([0.3, 0.4, 0.3], abs=0.05)
    assert infos[7] == devices.draw_device("phones", 1, 7, 0)


# ---- clients that switch data ----------------------------------------------------------------------


WORDS: dict[str, Any] = {
    "method": "ifca",
    "data": "motion+motion-forecast",
    "clients": 6,
    "cohort": 4,
    "rounds": 4,
    "epochs": 1,
    "scenario": "switch:2:1",
    "net": "mlp:hidden=8",
    "progress": False,
}


def test_data_move_and_devices_stay() -> None:
    mixed = data.load("rooms+tags", clients=6, profile="phones")
    later = data.switch(mixed, 5, [(1, 4)])
    before = later.client(1, round=4)
    after = later.client(1, round=5)
    assert before is mixed.clients[1]
    assert after.train is mixed.clients[4].train
    assert after.test is mixed.clients[4].test
    assert (after.info.task, after.info.examples) == ("tags", len(after.train))
    assert after.info.speed == before.info.speed
    assert after.info.up == before.info.up
    assert later.info(4, 5).task == "rooms"
    assert later.client(0, round=9) is mixed.clients[0]
    # Again with another: what it holds then moves on.
    twice = data.switch(later, 7, [(1, 2)])
    assert twice.client(2, round=7).test is mixed.clients[4].test
    assert twice.client(1, round=7).test is mixed.clients[2].test
    assert twice.client(1, round=6).test is mixed.clients[4].test
    assert twice.scenario == "switch:5:1-4 switch:7:1-2"
    # Nothing is with two clients.
    held = [twice.client(k, 8).train.x.data_ptr() for k in twice.ids]
    assert len(set(held)) == 6
    double = twice.to(torch.float64)
    assert double.client(1, round=7).train.x.dtype == torch.float64
    assert len(list(twice.all_data())) == 6 + 2 + 2


@pytest.mark.parametrize(
    ("round", "pairs", "why"),
    [
        (0, [(0, 1)], "round of a switch is 0; it must be 1 or more"),
        (3, [(0, 9)], "client of a switch is 9; it must be one of the 4 clients"),
        (3, [(2, 2)], "pair of a switch is '2-2'; it must be two clients"),
    ],
)
def test_what_cannot_be_switched_is_refused(round: int, pairs: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        data.switch(data.load("rooms", clients=4), round, pairs)


def test_switches_come_in_order_and_of_clients_in_memory() -> None:
    rooms = data.switch(data.load("rooms", clients=4), 5, [(0, 1)])
    with pytest.raises(InputError, match="it must be 5 or later"):
        data.switch(rooms, 4, [(0, 1)])
    with pytest.raises(InputError, match="a parameter called round"):
        data.switch(data.load("crowd", clients=4), 4, [(0, 1)])
    with pytest.raises(InputError, match="mix the federations first"):
        data.mix({"rooms": rooms, "tags": data.load("tags", clients=2)})


@pytest.mark.parametrize(
    "text", ["switch", "switch:3", "switch:0:1", "switch:3:0", "switch:3:1-", "switch:3:1-2,2-4"]
)
def test_scenarios_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="switch:ROUND:PAIRS"):
        parse(text)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
)
def test_pairs_are_of_different_tasks(sizes: list[int], seed: int, share: float) -> None:
    """As many as there can be: half of all, or all clients outside the largest task."""
    rooms = data.load("rooms", clients=2)
    owners = [f"task{i}" for i, size in enumerate(sizes) for _ in range(size)]
    clients = {}
    for k, task in enumerate(owners):
        client = rooms.clients[0]
        info = fedgrove.core.ClientInfo(client.info.examples, task=task)
        clients[k] = data.ClientData(client.train, client.validation, client.test, info)
    federation = data.Federation("made", clients, 1, ("y",), rooms.shape, rooms.defaults)
    most = min(len(owners) // 2, len(owners) - max(sizes))
    count = round(share * most)
    pairs = draw_pairs(federation, count, seed)
    named = [k for pair in pairs for k in pair]
    assert len(pairs) == count
    assert len(set(named)) == 2 * count
    assert all(owners[one] != owners[other] for one, other in pairs)
    with pytest.raises(InputError, match="at most"):
        draw_pairs(federation, most + 1, seed)


def test_kinds_and_single_sets_switch_too() -> None:
    rooms = data.load("rooms", clients=6, scenario="switch:3:2")
    assert len(rooms.later) == 4
    for k in rooms.later:
        assert rooms.client(k, 3).kind != rooms.clients[k].kind
    digits = data.load("digits", clients=3, scenario="switch:3:0-2")
    assert digits.client(0, 3).test is digits.clients[2].test
    assert digits.notes == ("after 3 rounds these clients exchange their data: 0 and 2",)
    assert digits.scenario == "switch:3:0-2"


def timeless(summary: Any) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in ("seconds", "engine")}


@pytest.fixture(scope="module")
def serial() -> fedgrove.Result:
    return fedgrove.run(**WORDS, engine="serial")


def test_scores_are_of_the_data_of_the_moment() -> None:
    """Of clients that train alone on two digits each: who gets two others knows nothing of them.

    Both runs are equal until the second round is scored, which is on the new data.
    """
    words: dict[str, Any] = {"method": "local", "data": "digits", "partition": "classes:2:grouped"}
    words |= {"clients": 3, "cohort": 3, "rounds": 4, "engine": "serial", "progress": False}
    runs = [fedgrove.run(**words, scenario=scenario) for scenario in ("switch:2:0-1", "none")]
    moved, still = ([line["accuracy_worst"] for line in run.folder.metrics()] for run in runs)
    assert moved[0] == still[0]
    assert moved[1] < 0.2
    assert still[1] > 0.8
    # They have trained on their new data since.
    assert moved[3] > 0.6


@pytest.mark.parametrize("engine", ["pool", "wired", "batched"])
def test_engines_agree(engine: str, serial: fedgrove.Result) -> None:
    found = fedgrove.run(**WORDS, engine=engine)
    if engine != "batched":
        assert timeless(found.summary) == timeless(serial.summary)
        return
    for name, task in serial.summary["tasks"].items():
        assert found.summary["tasks"][name]["loss_mean"] == pytest.approx(
            task["loss_mean"], rel=1e-4
        )
    clients = found.summary["metric_clients"]
    assert clients == pytest.approx(serial.summary["metric_clients"], abs=0.03)


def test_a_resumed_run_switches_as_it_would_have(serial: fedgrove.Result, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        fedgrove.run(**WORDS, engine="serial", out=tmp_path / "part", watch=stop)
    resumed = fedgrove.resume(tmp_path / "part", engine="serial", progress=False)
    assert timeless(resumed.summary) == timeless(serial.summary)


def test_a_switch_after_the_last_round_is_refused() -> None:
    with pytest.raises(InputError, match="switches after 4 rounds, and the run has 4"):
        fedgrove.run(**{**WORDS, "scenario": "switch:4:1"}, engine="serial")
