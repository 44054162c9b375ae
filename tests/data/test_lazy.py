"""Clients that are made when they are needed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedgrove as fg
from fedgrove import data
from fedgrove.core import Info
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.data.lazy import LazyClients
from fedgrove.errors import InputError


def made(k: int, rows: int = 4) -> ClientData:
    """A client whose inputs are all k: 4 rows of 2 floats and a label, 96 bytes in three parts."""
    part = Examples(torch.full((rows, 2), float(k)), torch.arange(rows) % 2)
    return ClientData(part, part, part, Info(rows))


def drifting(k: int, round: int) -> ClientData:
    """The same, but the inputs are those of the round."""
    return made(10 * k + round)


class Counted:
    """Makes clients and remembers which."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, k: int) -> ClientData:
        self.asked.append(k)
        return made(k)


def never(k: int) -> ClientData:
    raise AssertionError(f"client {k} was made")


def of_numpy() -> ClientData:
    part: Any = Examples(np.zeros((4, 2)), np.zeros(4, int))  # type: ignore[arg-type]
    return ClientData(part, part, part, Info(4))


BYTES = 3 * (4 * 2 * 4 + 4 * 8)
"""Of a client: three parts of four rows, two float32 and an int64 each."""


def test_what_the_server_knows_makes_no_client() -> None:
    clients = LazyClients(never, 1_000_000, Info)
    federation = Federation("many", clients, 2, ("a", "b"), (2,), data.load("digits").defaults)
    assert len(federation.clients) == len(federation.infos) == 1_000_000
    assert federation.ids == range(1_000_000)
    assert federation.infos[7] == federation.info(7) == Info(7)
    assert 999_999 in federation.infos
    assert 1_000_000 not in federation.infos
    assert federation == replace(federation)
    with pytest.raises(KeyError):
        federation.infos[1_000_000]
    with pytest.raises(KeyError):
        federation.client(-1)


def test_the_last_clients_are_kept_within_a_bound() -> None:
    make = Counted()
    clients = LazyClients(make, 10, kept=2 * BYTES)
    for k in (0, 1, 0, 1, 2, 1, 0):
        assert clients[k].train.x[0, 0] == k
    # 0 and 1 are made once each; 2 takes the place of 0, the one that was not asked for longest.
    assert make.asked == [0, 1, 2, 0]
    # One is kept even if it is larger than the bound.
    tiny = LazyClients(make, 10, kept=1)
    assert tiny[3] is tiny[3]


def test_infos_come_from_the_data_where_nothing_else_says_them() -> None:
    make = Counted()
    federation = data.from_clients(make, 5, classes=2)
    assert federation.infos[3] == Info(4)
    assert make.asked == [0, 3]
    assert [info.examples for info in federation.infos.values()] == [4] * 5


def test_data_of_a_round() -> None:
    federation = data.from_clients(drifting, 3, classes=2)
    values = [float(federation.client(2, round).train.x[0, 0]) for round in (0, 1, 5, 1)]
    assert values == [20, 21, 25, 21]
    assert federation.clients[2].train.x[0, 0] == 20
    assert federation.to(torch.float64).client(2, 5).train.x.dtype == torch.float64
    assert federation.to(torch.float64).client(2, 5).train.x[0, 0] == 25


def growing(k: int, round: int) -> ClientData:
    """Four rows before round 2, and then six."""
    return made(k, rows=4 if round < 2 else 6)


def known(k: int, round: int) -> Info:
    return Info(4 if round < 2 else 6)


@pytest.mark.parametrize("info", [None, known], ids=["from the data", "info(k, round)"])
def test_a_client_may_have_other_examples_in_another_round(info: Any) -> None:
    federation = data.from_clients(growing, 3, classes=2, info=info)
    asked = [federation.info(1, round).examples for round in (0, 3, 1, 2)]
    assert asked == [4, 6, 4, 6]
    copy = pickle.loads(pickle.dumps(federation))
    assert copy.info(1, 3) == federation.info(1, 3)
    words: dict[str, Any] = {"rounds": 4, "cohort": 3, "engine": "serial", "progress": False}
    summary = fg.run("fedavg", data=federation, **words).summary
    assert summary["refused"] == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inputs_of_numpy_are_taken_as_float32(dtype: torch.dtype) -> None:
    def one(k: int) -> ClientData:
        x = torch.from_numpy(np.random.default_rng(k).normal(size=(30, 6))).to(dtype)
        y = (x[:, 0] > 0).long()
        train, none = Examples(x[:20], y[:20]), Examples(x[:0], y[:0])
        return ClientData(train, none, Examples(x[20:], y[20:]), Info(20))

    federation = data.from_clients(one, 5, classes=2, info=lambda k: Info(20))
    assert federation.client(3).test.x.dtype == torch.float32
    words: dict[str, Any] = {"rounds": 1, "engine": "serial", "progress": False}
    assert fg.run("fedavg", data=federation, **words).summary["lost"] == {}


def test_what_was_made_is_not_pickled() -> None:
    clients = LazyClients(made, 1_000_000)
    for k in range(100):
        _ = clients[k]
    copy = pickle.loads(pickle.dumps(clients))
    assert len(pickle.dumps(clients)) < 500
    assert torch.equal(copy[7].train.x, clients[7].train.x)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"clients": 0}, "clients is 0"),
        ({"classes": 1}, "classes is 1"),
        ({"client": lambda k: of_numpy()}, r"train.x of client\(0\) is .*; it must be a tensor"),
        ({"client": lambda k: (k, k)}, r"client\(0\) gives a tuple; it must give a ClientData"),
        ({"info": lambda k: Info(5)}, r"info\(0\).examples is 5; it must be what .*: 4"),
    ],
)
def test_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        data.from_clients(**{"client": made, "clients": 3, "classes": 2} | words)


# ---- crowd ---------------------------------------------------------------------------------------


def test_crowd_is_a_function_of_seed_and_client() -> None:
    small = data.load("crowd", clients=20, seed=3)
    large = data.load("crowd", clients=1_000_000, seed=3)
    assert len(large.clients) == 1_000_000
    for k in (0, 19):
        for part in ("train", "validation", "test"):
            one, other = getattr(small.client(k), part), getattr(large.client(k), part)
            assert torch.equal(one.x, other.x)
            assert torch.equal(one.y, other.y)
    other_seed = data.load("crowd", clients=20, seed=4).client(0)
    sizes_differ = len(other_seed.test) != len(small.client(0).test)
    assert sizes_differ or not torch.equal(other_seed.test.x, small.client(0).test.x)


def test_crowd_infos_agree_with_the_data() -> None:
    federation = data.load("crowd", clients=200, profile="phones", validation=0.3)
    for k, client in federation.clients.items():
        assert client.info == federation.infos[k]
        assert client.info.examples == len(client.train) > 0
        examples = len(client.train) + len(client.validation) + len(client.test)
        assert 30 <= examples <= 70
        assert len(client.test) == round(0.2 * examples)
    assert len({info.memory for info in federation.infos.values()}) == 3
    assert not len(data.load("crowd", validation=0).client(0).validation)


def test_crowd_kinds_label_the_same_patterns_differently() -> None:
    """The mean of a class of kind 0 is that of the next class of kind 1."""
    federation = data.load("crowd", clients=300)

    def mean(kind: int, label: int) -> torch.Tensor:
        rows = []
        for k in range(kind, 300, 3):
            part = federation.client(k).train
            rows.append(part.x[part.y == label])
        return torch.cat(rows).mean(0)

    # About 400 rows each, of deviation 2: a mean is exact to .1, and patterns are 1.4 apart.
    assert (mean(0, 4) - mean(1, 5)).abs().mean() < 0.3
    assert (mean(0, 4) - mean(1, 4)).abs().mean() > 0.5


@pytest.mark.parametrize(
    "words", [{"partition": "iid"}, {"scenario": "noisy"}, {"split": "blocks"}]
)
def test_crowd_is_dealt_in_one_way(words: dict[str, str]) -> None:
    (word,) = words
    with pytest.raises(InputError, match=f"{word} is"):
        data.load("crowd", **words)  # type: ignore[arg-type]
