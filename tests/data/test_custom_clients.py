"""Clients that are made when they are needed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgrove as fg
from fedgrove import data, problems
from fedgrove.core import ClientInfo
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.data.federation import LazyClients
from fedgrove.errors import InputError


def made(k: int, rows: int = 4) -> ClientData:
    """A client whose inputs are all k: 4 rows of 2 floats and a label, 96 bytes in three parts."""
    part = Examples(torch.full((rows, 2), float(k)), torch.arange(rows) % 2)
    return ClientData(part, part, part, ClientInfo(rows))


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
    return ClientData(part, part, part, ClientInfo(4))


BYTES = 3 * (4 * 2 * 4 + 4 * 8)
"""Of a client: three parts of four rows, two float32 and an int64 each."""


def test_what_the_server_knows_makes_no_client() -> None:
    clients = LazyClients(never, 1_000_000, ClientInfo)
    federation = Federation("many", clients, 2, ("a", "b"), (2,), data.load("digits").defaults)
    assert len(federation.clients) == len(federation.infos) == 1_000_000
    assert federation.ids == range(1_000_000)
    assert federation.infos[7] == federation.info(7) == ClientInfo(7)
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
    assert federation.infos[3] == ClientInfo(4)
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


def known(k: int, round: int) -> ClientInfo:
    return ClientInfo(4 if round < 2 else 6)


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
        return ClientData(train, none, Examples(x[20:], y[20:]), ClientInfo(20))

    federation = data.from_clients(one, 5, classes=2, info=lambda k: ClientInfo(20))
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
        ({"client": lambda k: of_numpy()}, r"client\(0\).train must be Examples.* of two tensors"),
        ({"client": lambda k: (k, k)}, r"client\(0\) returns a tuple; it must return a ClientData"),
        (
            {"info": lambda k: ClientInfo(5)},
            r"info\(0\).examples is 5; it must be the number of training examples .* 4",
        ),
        (
            {"info": lambda k: None},
            r"info\(0\) returns a NoneType; it must return a fedgrove.ClientInfo",
        ),
        (
            {"info": lambda k: 1 / 0},
            r"info\(0\) raised ZeroDivisionError: .* test_custom_clients.py, line",
        ),
        ({"info": ClientInfo(4)}, "info is ClientInfo.*; it must be a function"),
        ({"client": 3}, "client is 3; it must be a function"),
        (
            {"client": lambda k: Path("nowhere").read_text()},
            r"client\(0\) raised FileNotFoundError: .*nowhere",
        ),
        ({"client": lambda k, more: made(k)}, r"client\(0\) raised TypeError"),
        ({"clients": 10.0}, "clients is 10.0; it must be a whole number"),
        ({"clients": True}, "clients is True"),
        ({"classes": 2.0}, "classes is 2.0"),
    ],
)
def test_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        data.from_clients(**{"client": made, "clients": 3, "classes": 2} | words)


# ---- one check of every client -------------------------------------------------------------------


def with_y(y: torch.Tensor, rows: int = 4) -> ClientData:
    part = Examples(torch.ones(len(y), 2), y)
    return ClientData(part, part, part, ClientInfo(rows))


WRONG: list[tuple[Any, str]] = [
    (with_y(torch.tensor([0.0, 1.0, 1.0, 0.0])), r"train has y of torch.float32 and shape \(4,\)"),
    (with_y(torch.tensor([0, 1, 2, 0])), "classes from 0 to 2; with classes=2 they go from 0 to 1"),
    (with_y(torch.tensor([0, 1, -100, 0])), "classes from -100 to 1"),
    (with_y(torch.tensor([[0], [1], [1], [0]])), r"y of shape \(4, 1\); the first client has"),
    (with_y(torch.tensor([0, 1])), "info has 4 examples and there are 2 to train on"),
    (with_y(torch.empty(0, dtype=torch.int64), 20), "info has 20 examples and there are 0"),
    (None, "returns a NoneType; it must return a ClientData"),
    (replace(made(0), info=None), "info returns a NoneType; it must return a fedgrove.ClientInfo"),
    (replace(made(0), test=Examples(torch.ones(3, 2), torch.zeros(2).long())), "test has x of"),
    (
        replace(made(0), test=Examples(torch.ones(2, 3), torch.zeros(2).long())),
        "inputs have the shape",
    ),
    (replace(made(0), validation=(1, 2)), "validation must be Examples"),
    (replace(made(0), validation=Examples(np.ones((1, 2)), np.ones(1))), "torch.from_numpy"),
    (replace(made(0), labels=(0, 1, 2)), r"labels is \(0, 1, 2\); it must be numbers from 0 to 1"),
]


@pytest.mark.parametrize(("client", "sentence"), WRONG)
def test_a_client_that_a_run_could_not_use_is_refused(client: Any, sentence: str) -> None:
    """The first one when the federation is made, any other when it is."""
    federation = data.from_clients(
        lambda k: client if k == 2 else made(k), 3, classes=2, info=lambda k: ClientInfo(4)
    )
    assert len(federation.client(1).train) == 4
    with pytest.raises(InputError, match=sentence) as caught:
        federation.client(2)
    assert str(caught.value).endswith(".")
    with pytest.raises(InputError):
        data.from_clients(lambda k: client, 3, classes=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_classes_of_any_whole_type_are_brought_over(dtype: torch.dtype) -> None:
    federation = data.from_clients(
        lambda k: with_y(torch.tensor([0, 1, 1, 0]).to(dtype)), 2, classes=2
    )
    assert federation.client(1).test.y.dtype == torch.int64
    assert federation.client(1).test.y.tolist() == [0, 1, 1, 0]


def test_numbers_and_labels_have_a_column_for_each_output() -> None:
    column = torch.tensor([[0.5], [1.0], [2.0], [0.0]])
    words: dict[str, Any] = {"clients": 2, "problem": problems.numbers()}
    for y in (column, column.flatten(), column.long()):
        federation = data.from_clients(lambda k, y=y: with_y(y), classes=1, **words)
        assert federation.client(1).train.y.dtype == torch.float32
    with pytest.raises(InputError, match=r"with classes=3 numbers are real, of shape \(n, 3\)"):
        data.from_clients(lambda k: with_y(column), classes=3, **words)
    with pytest.raises(InputError, match="NaN"):
        data.from_clients(lambda k: with_y(column / 0), classes=1, **words)
    words["problem"] = problems.LABELS
    yes_or_no = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    federation = data.from_clients(lambda k: with_y(yes_or_no), classes=2, **words)
    assert federation.client(1).train.y.dtype == torch.float32
    with pytest.raises(InputError, match="values in y other than 0 and 1"):
        data.from_clients(lambda k: with_y(yes_or_no + 1), classes=2, **words)
    # A problem of one's own takes what it likes, the same of every client.
    own = problems.Problem("own", lambda o, y: o[:, 0] * y[:, 0], problems.numbers().metric)
    words["problem"] = own
    assert data.from_clients(lambda k: with_y(yes_or_no), classes=1, **words).classes == 1


@pytest.mark.parametrize("engine", ["serial", "pool", "batched"])
def test_why_clients_are_lost_is_said(engine: str) -> None:
    federation = data.from_clients(some_broken, 6, classes=2, info=lambda k: ClientInfo(20))
    words: dict[str, Any] = {"rounds": 1, "cohort": 6, "engine": engine, "progress": False}
    summary = fg.run("fedavg", data=federation, **words).summary
    assert summary["lost"] == {"crashed": 1}
    assert "1 answers lost: crashed 1" in summary["notes"]
    (why,) = [note for note in summary["notes"] if note.startswith("crashed: ")]
    assert why.startswith("crashed: client 3 could not train: client(3).train has classes from")


def some_broken(k: int) -> ClientData:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(k))
    y = (x[:, 0] > 0).long() + (k == 3)
    rows = [Examples(x[a:b], y[a:b]) for a, b in ((0, 20), (20, 22), (22, 30))]
    return ClientData(*rows, ClientInfo(20))


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
