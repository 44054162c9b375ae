"""How reports become a model: the weighted mean, over those who have a parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgrove import trees
from fedgrove.parts.aggregate import CHUNK, Average, WeightedMean
from fedgrove.trees import Mask, Tree

FLOATS = hnp.arrays("float32", st.integers(1, 8), elements=st.floats(-(2.0**60), 2.0**60, width=32))
WEIGHTS = st.integers(1, 2**20)
PREVIOUS = {"w": torch.tensor([9.0, 9.0, 9.0, 9.0]), "b": torch.tensor([9.0])}


def flags(*bits: int) -> torch.Tensor:
    return torch.tensor(bits).bool()


def mean_of(*pairs: tuple[Tree, float]) -> Tree:
    mean = WeightedMean().start()
    for tree, weight in pairs:
        mean.add(tree, weight)
    return mean.value()


def over_those(*clients: tuple[Tree, Mask | None, float]) -> Average:
    mean = WeightedMean().start(PREVIOUS)
    for tree, mask, weight in clients:
        mean.add(tree, weight, mask)
    return mean


# ---- everybody has everything --------------------------------------------------------------------


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
    mean = mean_of((tree, 2), (tree, 3.5))
    assert {k: v.dtype for k, v in mean.items()} == {
        "h": torch.float16,
        "d": torch.float64,
        "n": torch.int64,
    }
    assert trees.identical(mean, before)
    assert trees.identical(tree, before)


def test_value_may_be_asked_for_more_than_once() -> None:
    mean = WeightedMean().start()
    mean.add({"w": torch.tensor([1.0])}, 1)
    first = mean.value()
    mean.add({"w": torch.tensor([4.0])}, 2)
    assert first["w"].item() == 1.0
    assert mean.value()["w"].item() == 3.0


# ---- over those who have it ----------------------------------------------------------------------


def test_the_mean_over_those_who_have_it_by_hand() -> None:
    # w0: both, (1*2 + 3*6)/4 = 5; w1: the first alone, 2; w2: the second alone, 8; w3: nobody, 9 as
    # before. b: the second alone, without a mask.
    one = ({"w": torch.tensor([2.0, 2.0, 0.0, 0.0])}, {"w": flags(1, 1, 0, 0)}, 1)
    two = (
        {"w": torch.tensor([6.0, 0.0, 8.0, 0.0]), "b": torch.tensor([4.0])},
        {"w": flags(1, 0, 1, 0)},
        3,
    )
    mean = over_those(one, two).value()
    assert mean["w"].tolist() == [5.0, 2.0, 8.0, 9.0]
    assert mean["b"].tolist() == [4.0]
    assert list(mean) == list(PREVIOUS)


def test_a_mask_after_whole_models_by_hand() -> None:
    # w0: (1*2 + 1*4 + 2*5)/4 = 4; all others: (2 + 4)/2 = 3.
    mean = over_those(
        ({"w": torch.full((4,), 2.0)}, None, 1),
        ({"w": torch.full((4,), 4.0)}, {}, 1),
        ({"w": torch.full((4,), 5.0)}, {"w": flags(1, 0, 0, 0)}, 2),
    )
    assert mean.value()["w"].tolist() == [4.0, 3.0, 3.0, 3.0]


def test_what_only_one_client_has_stays_his_to_the_bit() -> None:
    third = torch.tensor([1 / 3, 0.1, 1e-30, 3e30])
    other = ({"w": torch.zeros(4)}, {"w": flags(0, 0, 0, 0)}, 17.0)
    assert torch.equal(over_those(({"w": third}, None, 7.0), other).value()["w"], third)


def test_what_a_mask_hides_does_not_matter() -> None:
    hidden = {"w": torch.tensor([1.0, torch.nan, torch.inf, -5.0])}
    found = over_those((hidden, {"w": flags(1, 0, 0, 0)}, 2)).value()["w"]
    assert found.tolist() == [1.0, 9.0, 9.0, 9.0]


@given(st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_with_everything_kept_a_mask_changes_nothing(clients: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    plain = WeightedMean().start(PREVIOUS)
    masked = WeightedMean().start(PREVIOUS)
    for k in range(clients):
        tree = {"w": torch.randn(4, generator=g), "b": torch.randn(1, generator=g)}
        plain.add(tree, k + 1)
        masked.add(tree, k + 1, {"w": flags(1, 1, 1, 1)})
    assert trees.identical(plain.value(), masked.value())


def test_masks_and_the_previous_model_are_left_alone() -> None:
    tree, mask = {"w": torch.ones(4)}, {"w": flags(1, 0, 1, 0)}
    over_those((tree, mask, 2), (tree, mask, 2)).value()
    assert tree["w"].tolist() == [1] * 4
    assert mask["w"].tolist() == [True, False, True, False]
    assert PREVIOUS["w"].tolist() == [9] * 4


# ---- nobody, and what is refused -----------------------------------------------------------------


def test_where_nobody_counts_the_previous_model_stays() -> None:
    assert trees.identical(over_those().value(), PREVIOUS)
    assert trees.identical(over_those(({"w": torch.ones(4)}, None, 0)).value(), PREVIOUS)
    with pytest.raises(ValueError, match="the average of no trees"):
        WeightedMean().start().value()


def test_wrong_weights_and_trees_of_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="weight is -1; it must be 0 or more"):
        over_those(({"w": torch.ones(4)}, None, -1))
    with pytest.raises(ValueError, match=r"the previous model lacks: \['x'\]"):
        over_those(({"x": torch.ones(4)}, None, 1))
    with pytest.raises(ValueError, match=r"the previous model lacks: \['b'\]"):
        mean_of(({"w": torch.ones(1)}, 1), ({"b": torch.ones(1)}, 1))


# ---- trees that are one vector -------------------------------------------------------------------


@st.composite
def cohorts(draw: st.DrawFn) -> list[tuple[Tree, float, Mask | None]]:
    """Clients of two leaves; with signed zeros, some of them masked, some without a leaf."""
    numbers = st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([0.0, -0.0])
    cohort: list[tuple[Tree, float, Mask | None]] = []
    for _ in range(draw(st.integers(1, 5))):
        values = torch.tensor(draw(st.lists(numbers, min_size=5, max_size=5)))
        tree = {"w": values[:4], "b": values[4:]}
        if draw(st.integers(0, 4)) == 0:
            del tree["b"]
        mask = None
        if draw(st.booleans()):
            mask = {"w": torch.tensor(draw(st.lists(st.booleans(), min_size=4, max_size=4)))}
        cohort.append((tree, draw(st.floats(0.0, 100.0)), mask))
    return cohort


@given(cohorts())
def test_vectors_and_leaves_have_the_same_mean_to_the_bit(
    cohort: list[tuple[Tree, float, Mask | None]],
) -> None:
    whole = WeightedMean().start(PREVIOUS)
    apart = WeightedMean().start(PREVIOUS)
    for tree, weight, mask in cohort:
        assert trees.as_vector(tree) is not None
        whole.add(tree, weight, mask)
        apart.add({name: leaf.clone() for name, leaf in tree.items()}, weight, mask)
        assert trees.identical(whole.value(), apart.value())


def test_the_mean_of_vectors_is_a_vector() -> None:
    numbers = torch.arange(5.0)
    mean = WeightedMean().start(PREVIOUS)
    mean.add(trees.unflatten(numbers, PREVIOUS), 2)
    first = mean.value()
    vector = trees.as_vector(first)
    assert vector is not None
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    # It is no view of the sums, which go on.
    mean.add(trees.unflatten(numbers + 3, PREVIOUS), 1)
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert mean.value()["b"].tolist() == [5.0]


def test_long_vectors_are_added_part_by_part() -> None:
    g = torch.Generator().manual_seed(0)
    forest = [{"w": torch.randn(3 * CHUNK + 1, generator=g)} for _ in range(3)]
    weights = (3.0, 5.0, 7.0)
    mean = mean_of(*zip(forest, weights, strict=True))
    # By the formula, in one piece.
    total = torch.zeros(3 * CHUNK + 1, dtype=torch.float64)
    for tree, weight in zip(forest, weights, strict=True):
        total = total + weight * tree["w"].double()
    assert torch.equal(mean["w"], (total / 15.0).float())


@pytest.mark.parametrize("joined", [True, False])
def test_masked_trees_are_added_in_order_to_the_bit(joined: bool) -> None:
    """Longer than a part, as vectors and as leaves of their own, with a leaf that has no mask."""
    g = torch.Generator().manual_seed(0)
    like = {"w": torch.zeros(CHUNK + 5), "b": torch.zeros(3), "v": torch.zeros(7, 2).T}
    previous = {name: torch.randn(leaf.shape, generator=g) for name, leaf in like.items()}
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in like.items()}
    weights = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in like.items()}
    mean = WeightedMean().start(previous)
    for weight in (0.1, 3.7, 12.0):
        tree = {name: torch.randn(leaf.shape, generator=g) for name, leaf in like.items()}
        mask = {name: torch.rand(like[name].shape, generator=g) < 0.5 for name in ("w", "v")}
        tree["w"][~mask["w"]] = torch.nan
        mean.add(trees.pack_leaves(tree) if joined else tree, weight, mask)
        for name, leaf in tree.items():
            kept = mask.get(name, torch.ones(leaf.shape, dtype=torch.bool))
            sums[name].add_(leaf.masked_fill(~kept, 0.0).double(), alpha=weight)
            weights[name].add_(kept.double(), alpha=weight)
    for name, found in mean.value().items():
        expected = torch.where(weights[name] > 0, sums[name] / weights[name], previous[name])
        assert torch.equal(found, expected.float())


def test_a_leaf_of_another_shape_is_refused() -> None:
    mean = WeightedMean().start({"w": torch.zeros(2, 3)})
    mean.add({"w": torch.ones(2, 3)}, 1, {"w": torch.ones(2, 3, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"w has shape \(3, 2\); the trees before have \(2, 3\)"):
        mean.add({"w": torch.ones(3, 2)}, 1, {"w": torch.ones(3, 2, dtype=torch.bool)})
    assert mean.value()["w"].tolist() == [[1.0] * 3] * 2
