import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove.data.partition import Partition, assign_units, draw_class_sets, draw_classes, parse
from fedgrove.errors import InputError

Y = np.repeat(np.arange(10), 200)
ONE = np.ones_like(Y)


def dealt(text, y=Y, size=ONE, clients=10, seed=0):
    return assign_units(parse(text), y, size, clients, np.random.default_rng(seed))


@given(
    st.sampled_from(["iid", "dirichlet:0.3", "classes:3", "shards"]),
    st.integers(2, 12),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_nobody_holds_what_another_holds_and_everybody_holds_something(text, clients, seed):
    parts = dealt(text, clients=clients, seed=seed)
    rows = np.concatenate(parts)
    assert len(parts) == clients
    assert len(np.unique(rows)) == len(rows)
    assert min(map(len, parts)) >= 10
    if text in ("iid", "dirichlet:0.3"):
        assert len(rows) == len(Y)


def test_iid_is_even():
    assert {len(p) for p in dealt("iid", clients=7)} == {285, 286}  # 2000 / 7 = 285.7


@pytest.mark.parametrize("k", [1, 2, 5])
def test_classes_gives_exactly_k_classes(k):
    assert {len(np.unique(Y[p])) for p in dealt(f"classes:{k}")} == {k}


def test_classes_is_even_and_shards_is_not():
    even = [len(p) for p in dealt("classes:2")]
    uneven = [len(p) for p in dealt("shards")]
    # 10 clients x 2 classes over 10 classes: two holders each, 100 + 100.
    assert np.ptp(even) <= 2
    assert max(uneven) > 2 * min(uneven)


def test_cap_leaves_at_most_n_of_a_class():
    parts = dealt("classes:5:20")
    assert {n for p in parts for n in np.unique(Y[p], return_counts=True)[1]} == {20}
    assert {len(p) for p in parts} == {100}


def test_shards_of_fewer_examples_stay_uneven():
    parts = dealt("shards:2:60")
    assert np.bincount(np.concatenate([Y[p] for p in parts]), minlength=10).tolist() == [60] * 10
    assert {len(np.unique(Y[p])) for p in parts} == {2}
    sizes = [len(p) for p in parts]
    assert max(sizes) > 2 * min(sizes)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 5))
def test_hands_are_different_classes_held_equally_often(k, clients, seed):
    hand = draw_classes(8, k, clients, np.random.default_rng(seed))
    assert all(len(set(row)) == k for row in hand.tolist())
    assert np.ptp(np.bincount(hand.ravel(), minlength=8)) <= 1


# ---- grouped -------------------------------------------------------------------------------------


class Drawn:
    """A generator that draws a given order."""

    def __init__(self, *order: int) -> None:
        self.order = np.array(order)

    def permutation(self, n: int) -> np.ndarray:
        assert n == len(self.order)
        return self.order


def test_grouped_hands_by_hand():
    """Drawn 3 0 4 1 5 2, cut into pairs 30, 41, 52; eight clients take them in turn."""
    hand = draw_class_sets(6, 2, 8, Drawn(3, 0, 4, 1, 5, 2))
    assert hand.tolist() == [[3, 0], [4, 1], [5, 2], [3, 0], [4, 1], [5, 2], [3, 0], [4, 1]]
    assert draw_class_sets(6, 3, 3, Drawn(3, 0, 4, 1, 5, 2)).tolist() == [
        [3, 0, 4],
        [1, 5, 2],
        [3, 0, 4],
    ]


@given(
    st.sampled_from([("classes", 2), ("classes", 5), ("shards", 1), ("shards", 2), ("shards", 5)]),
    st.integers(0, 8),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_clients_of_a_set_hold_exactly_that_set(words, more, seed):
    kind, k = words
    sets = 10 // k
    parts = dealt(f"{kind}:{k}:grouped", clients=sets + more, seed=seed)
    held = [frozenset(Y[p].tolist()) for p in parts]
    assert {len(classes) for classes in held} == {k}
    assert held == [held[client % sets] for client in range(len(parts))]
    # The sets are disjoint and there are as many as there may be: every class is held.
    assert len(set(held)) == sets
    assert frozenset.union(*held) == set(range(10))
    # All examples of every class are dealt, each to one client.
    assert np.sort(np.concatenate(parts)).tolist() == list(range(len(Y)))
    again = dealt(f"{kind}:{k}:grouped", clients=sets + more, seed=seed)
    assert [p.tolist() for p in again] == [p.tolist() for p in parts]


def test_the_seed_draws_the_sets():
    draws = set()
    for seed in range(20):
        draws.add(frozenset(frozenset(Y[p]) for p in dealt("classes:5:grouped", seed=seed)))
    assert len(draws) > 10


def test_grouped_counts_are_those_of_the_partition():
    # 10 clients on five pairs: two holders of each class, 100 each, as without the word.
    assert {len(p) for p in dealt("classes:2:grouped")} == {200}
    uneven = [len(p) for p in dealt("shards:2:60:grouped")]
    assert sum(uneven) == 600
    assert max(uneven) > 2 * min(uneven)
    capped = dealt("classes:5:20:grouped", clients=20)
    assert {n for p in capped for n in np.unique(Y[p], return_counts=True)[1]} == {20}


def test_with_fewer_clients_than_sets_the_other_classes_go_to_nobody():
    assert len(np.unique(Y[np.concatenate(dealt("classes:2:grouped", clients=3))])) == 6


@pytest.mark.parametrize("text", ["classes:3:grouped", "shards:4:20:grouped", "classes:7:grouped"])
def test_sets_must_be_whole(text):
    with pytest.raises(
        InputError,
        match=r"it must be grouped with a K that divides the 10 classes, or without :grouped",
    ):
        dealt(text)


def test_small_alpha_is_more_skewed():
    def skew(text):
        return np.mean([np.bincount(Y[p], minlength=10).max() / len(p) for p in dealt(text)])

    assert skew("dirichlet:0.1") > skew("dirichlet:1") > skew("dirichlet:100")


def test_dirichlet_shares_have_the_right_mean_and_variance():
    # A Dirichlet(a, ..., a) share over K clients has variance (1/K)(1 - 1/K) / (K a + 1):
    # K = 4, a = 1: 0.1875 / 5.
    shares = [
        np.bincount(Y[p], minlength=10) / 200
        for s in range(60)
        for p in dealt("dirichlet:1", clients=4, seed=s)
    ]
    assert np.mean(shares) == pytest.approx(0.25)
    assert np.var(shares) == pytest.approx(0.0375, rel=0.1)


def test_blocks_are_dealt_whole_and_by_size():
    size = np.array([100, 1, 1, 98])
    parts = assign_units(
        Partition("iid"), np.zeros(4, dtype=int), size, 2, np.random.default_rng(0)
    )
    assert sorted(size[p].sum() for p in parts) in ([99, 101], [100, 100], [98, 102])


def test_the_same_seed_deals_the_same():
    for a, b in zip(dealt("dirichlet:0.5", seed=4), dealt("dirichlet:0.5", seed=4), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize(
    "text", ["dirichlet", "dirichlet:x", "dirichlet:0", "dirichlet:-1", "dirichlet:nan",
             "dirichlet:inf", "classes:0", "classes:2.5", "classes:2:0", "shards:a", "shards:2:0",
             "iid:0", "iid:x", "dirichlet:1:0", "iid:3:4", "nature", "", "grouped", "iid:grouped", "dirichlet:1:grouped", "classes:grouped",
             "classes:2:grouped:5", "classes:2:grouped:grouped", "classes:0:grouped"]
)  # fmt: skip
def test_wrong_words_are_refused_in_a_sentence(text):
    with pytest.raises(InputError, match=r"partition") as caught:
        parse(text)
    assert str(caught.value).rstrip().endswith(".")


def test_impossible_deals_are_refused():
    with pytest.raises(InputError, match="fewer clients, or a larger ALPHA"):
        dealt("dirichlet:0.001", clients=40)
    with pytest.raises(InputError, match="classes:K with K at most 10, the number of classes"):
        dealt("classes:11")


@pytest.mark.parametrize("text", ["iid:20", "dirichlet:0.5:20"])
def test_so_many_examples_of_each_class_are_dealt(text):
    rows = np.concatenate(dealt(text, clients=5))
    assert len(np.unique(rows)) == len(rows)
    assert np.bincount(Y[rows]).tolist() == [20] * 10
    # Of blocks, as many as fit: three of 6 rows, never a part of one.
    label = np.repeat(np.arange(2), 9)
    blocks = np.concatenate(dealt("iid:20", label, np.full(18, 6), clients=2))
    assert np.bincount(label[blocks]).tolist() == [3, 3]
