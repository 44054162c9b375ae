"""A client's batches, and the nouns as values."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.core import (
    FOLDS,
    Batches,
    Client,
    ClientInfo,
    Outcome,
    Packet,
    Report,
    Task,
    assign_folds,
)
from fedgrove.data import ClientData
from fedgrove.data.federation import Examples


def client(n: int = 10, seed: int = 5, dtype: torch.dtype = torch.float32) -> Client:
    """Example i of the training split holds the number i; those of the other splits start at 100 and 200."""

    def examples(size: int, low: int) -> Examples:
        return Examples(
            torch.arange(low, low + size, dtype=dtype).view(-1, 1),
            torch.arange(low, low + size) % 3,
        )

    data = ClientData(examples(n, 0), examples(3, 100), examples(4, 200), ClientInfo(n))
    return Client(0, data.info, data, {}, None, {}, seed)  # type: ignore[arg-type]


def indices(one: Client, over: Batches, *purpose: int | str) -> list[list[int]]:
    return [batch.index.tolist() for batch in one.batches(over, *purpose)]


def positions(one: Client, over: Batches) -> list[int]:
    return [i for batch in indices(one, over) for i in batch]


# ---- batches -------------------------------------------------------------------------------------


def test_in_order_every_example_comes_once() -> None:
    batches = list(client(10).batches(Batches(size=4)))
    assert [b.index.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [b.x.flatten().tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [b.y.tolist() for b in batches] == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    assert [b.weight.tolist() for b in batches] == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1]]
    assert [int(b.position) for b in batches] == [0, 1, 2]


@pytest.mark.parametrize(
    ("split", "first", "count"), [("train", 0, 10), ("validation", 100, 3), ("test", 200, 4)]
)
def test_a_split_by_name(split: str, first: int, count: int) -> None:
    (batch,) = client().batches(Batches(split))  # type: ignore[arg-type]
    assert batch.x.flatten().tolist() == list(range(first, first + count))


@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 2**62))
def test_a_shuffled_pass_is_a_permutation_whose_index_is_true(n: int, size: int, seed: int) -> None:
    batches = list(client(n, seed).batches(Batches(size=size, shuffle=True), 0))
    assert sorted(i for b in batches for i in b.index.tolist()) == list(range(n))
    for position, batch in enumerate(batches):
        assert batch.x.flatten().tolist() == batch.index.tolist()
        assert batch.y.tolist() == [i % 3 for i in batch.index.tolist()]
        assert (
            len(batch.y) == len(batch.weight) == size
            if position < len(batches) - 1
            else len(batch.y) <= size
        )
        assert int(batch.position) == position


def test_a_shuffled_order_depends_on_seed_and_purpose_alone() -> None:
    over = Batches(size=4, shuffle=True)
    one = indices(client(20), over, 0, 1)
    torch.rand(3)  # other draws change nothing
    assert indices(client(20), over, 0, 1) == one
    assert one != indices(client(20), over, 0, 2)
    assert one != indices(client(20), over, 1, 1)
    assert one != indices(client(20), over, "probe", 1)
    assert one != indices(client(20, seed=6), over, 0, 1)
    assert one != [list(range(i, i + 4)) for i in range(0, 20, 4)]


def test_folds_by_hand() -> None:
    """Class 0 has 10 examples, one in each fold; the 5 of class 1 are in every other fold, from 1 on.

    Rank r of n examples of a class is in piece 10 r // n, and class c begins c folds later.
    """
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0])
    expected = torch.tensor([0, 1, 1, 3, 2, 5, 3, 7, 4, 9, 5, 6, 7, 8, 9])
    assert torch.equal(assign_folds(y), expected)
    # Targets that are no classes, and labels of which an example may have several: in order.
    assert assign_folds(torch.zeros(20, 3)).tolist() == [i // 2 for i in range(20)]
    assert assign_folds(torch.zeros(0, dtype=torch.int64)).tolist() == []


@given(st.integers(10, 60), st.integers(0, 40), st.integers(1, 7))
def test_in_every_round_another_fold_is_left_out(n: int, round: int, size: int) -> None:
    seen: list[int] = []
    for later in range(FOLDS):
        one = replace(client(n), round=round + later)
        inside = positions(one, Batches(size=size, fold="in"))
        outside = positions(one, Batches(size=size, fold="out", shuffle=True))
        assert sorted(inside + outside) == list(range(n))
        assert outside
        assert one.count_seen(Batches(size=size, fold="in")) == len(inside)
        assert one.count_seen(Batches(size=size, fold="out")) == len(outside)
        seen += inside
    assert sorted(seen) == list(range(n))


def test_few_examples_are_never_left_out() -> None:
    one = client(FOLDS - 1)
    assert indices(one, Batches(fold="in")) == []
    assert positions(one, Batches(fold="out")) == list(range(FOLDS - 1))


def test_a_fold_is_estimated_as_a_tenth() -> None:
    """Of 65 examples 6 are inside and 59 outside; in batches of 8, with none below 4, 56 are seen."""
    assert Batches(fold="in").estimate_seen(65) == 6
    assert Batches(size=8, least=4, fold="out").estimate_seen(65) == 56


def test_another_batch_size_cuts_the_same_order() -> None:
    small, large = (indices(client(20), Batches(size=n, shuffle=True), 0) for n in (3, 20))
    assert [i for batch in small for i in batch] == large[0]


@pytest.mark.parametrize(("limit", "count"), [(None, 3), (0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_limit_of_batches(limit: int | None, count: int) -> None:
    assert len(list(client(10).batches(Batches(size=4, limit=limit)))) == count


@pytest.mark.parametrize(
    ("n", "size", "least", "sizes"),
    [(9, 4, 1, [4, 4, 1]), (9, 4, 2, [4, 4]), (10, 4, 2, [4, 4, 2]), (1, 4, 2, []), (2, 4, 2, [2])],
)
def test_a_last_batch_that_is_too_small_is_left_out(
    n: int, size: int, least: int, sizes: list[int]
) -> None:
    assert [len(b.y) for b in client(n).batches(Batches(size=size, least=least))] == sizes


def test_batches_smaller_than_the_least_are_left_out_wherever_they_are() -> None:
    # of three batches of one, all are too small, not the last alone
    assert [len(b.y) for b in client(3).batches(Batches(size=1, least=2))] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    batch = next(client(dtype=dtype).batches(Batches(size=3)))
    assert (batch.x.dtype, batch.weight.dtype) == (dtype, dtype)
    assert (batch.index.dtype, batch.position.dtype) == (torch.int64, torch.int64)


def test_an_empty_split_has_no_batches() -> None:
    assert list(client(0).batches(Batches(size=4))) == []
    assert list(client(0).batches(Batches(size=4, shuffle=True), 0)) == []


def test_global_randomness_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(client(10).batches(Batches(shuffle=True), 0))
    assert torch.equal(torch.get_rng_state(), before)


# ---- nouns ---------------------------------------------------------------------------------------


NOUNS = [Packet({}), Task(1), Report(1), ClientInfo(3), Outcome(), Batches()]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda n: type(n).__name__)
def test_nouns_are_frozen_values(noun) -> None:
    assert pickle.loads(pickle.dumps(noun)) == noun
    assert replace(noun) == noun
    with pytest.raises(FrozenInstanceError):
        setattr(noun, fields(noun)[0].name, None)


def test_tasks_do_not_share_their_defaults() -> None:
    assert Task(1).send is not Task(2).send
    assert Report(1).give is not Report(2).give
    assert (Task(1).verb, Task(1).round) == ("train", 0)
