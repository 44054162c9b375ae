"""How reports become a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgrove import trees
from fedgrove.parts.aggregate import Mean

FLOATS = hnp.arrays("float32", st.integers(1, 8), elements=st.floats(-(2.0**60), 2.0**60, width=32))
WEIGHTS = st.integers(1, 2**20)


def mean_of(*pairs: tuple[trees.Tree, float]) -> trees.Tree:
    mean = Mean()
    for tree, weight in pairs:
        mean.add(tree, weight)
    return mean.value()


def test_the_weighted_mean_by_hand() -> None:
    # (1 * (1, -2) + 3 * (5, 2) + 4 * (0, 1)) / 8 = (16, 8) / 8 = (2, 1)
    mean = mean_of(
        ({"w": torch.tensor([1.0, -2.0])}, 1),
        ({"w": torch.tensor([5.0, 2.0])}, 3),
        ({"w": torch.tensor([0.0, 1.0])}, 4),
    )
    assert mean["w"].tolist() == [2.0, 1.0]
    assert mean["w"].dtype == torch.float32


@given(FLOATS, WEIGHTS)
def test_the_mean_of_one_client_is_that_client_to_the_bit(values, weight: int) -> None:
    tree = {"w": torch.from_numpy(values.copy())}
    assert trees.identical(mean_of((tree, weight)), tree)


@given(FLOATS, st.lists(WEIGHTS, min_size=2, max_size=6))
def test_the_mean_of_equal_clients_is_that_client_to_the_bit(values, weights: list[int]) -> None:
    tree = {"w": torch.from_numpy(values.copy())}
    assert trees.identical(mean_of(*((tree, n) for n in weights)), tree)


@given(st.lists(st.tuples(st.floats(-1, 1, width=32), WEIGHTS), min_size=1, max_size=8))
def test_the_mean_lies_between_its_clients_in_any_order(pairs: list[tuple[float, int]]) -> None:
    clients = [({"w": torch.tensor([v])}, n) for v, n in pairs]
    one = mean_of(*clients)
    other = mean_of(*clients[::-1])
    assert trees.distance(one, other) < 1e-7
    values = [v for v, _ in pairs]
    assert min(values) - 1e-6 <= float(one["w"]) <= max(values) + 1e-6


def test_float32_sums_are_kept_in_double_precision() -> None:
    # (2^25 + 1 + 1 + 1 + 1) / 5 = 33554436 / 5 = 6710887.2, whose nearest float32 is 6710887.0
    # (they are 0.5 apart). In float32 2^25 + 1 is 2^25 again, and 33554432 / 5 = 6710886.4 would
    # come out as 6710886.5.
    mean = mean_of(*(({"w": torch.tensor([v])}, 1) for v in (2.0**25, 1.0, 1.0, 1.0, 1.0)))
    assert mean["w"].item() == 6710887.0


def test_every_leaf_keeps_its_type_and_inputs_are_left_alone() -> None:
    tree = {
        "h": torch.ones(2, dtype=torch.float16),
        "d": torch.ones(2, dtype=torch.float64),
        "n": torch.tensor(7),
    }
    before = {k: v.clone() for k, v in tree.items()}
    mean = mean_of((tree, 2), (tree, 3))
    assert {k: v.dtype for k, v in mean.items()} == {
        "h": torch.float16,
        "d": torch.float64,
        "n": torch.int64,
    }
    assert trees.identical(mean, before)
    assert trees.identical(tree, before)


def test_value_may_be_asked_for_more_than_once() -> None:
    mean = Mean()
    mean.add({"w": torch.tensor([1.0])}, 1)
    first = mean.value()
    mean.add({"w": torch.tensor([4.0])}, 2)
    assert first["w"].item() == 1.0
    assert mean.value()["w"].item() == 3.0
    assert mean.weight == 3


def test_nothing_and_weightless_clients_have_no_mean() -> None:
    with pytest.raises(ValueError, match="a mean of nothing"):
        Mean().value()
    with pytest.raises(ValueError, match="all weights are 0"):
        mean_of(({"w": torch.ones(1)}, 0))


def test_trees_of_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in names: \['b', 'w'\]"):
        mean_of(({"w": torch.ones(1)}, 1), ({"b": torch.ones(1)}, 1))
