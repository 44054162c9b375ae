import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove.data.partition import (
    PARTITIONS,
    Partition,
    assign_units,
    draw_class_sets,
    draw_classes,
    parse,
    share_classes,
)
from fedgrove.errors import InputError

Y = np.repeat(np.arange(10), 200)
ONE = np.ones_like(Y)


def dealt(text, y=Y, size=ONE, clients=10, seed=0):
    return assign_units(parse(text), y, size, clients, np.random.default_rng(seed))


@given(
    st.sampled_from(["iid", "dirichlet:0.3", "dirichlet-clients:0.3", "classes:3", "shards"]),
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
    if text.startswith(("iid", "dirichlet")):
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


# ---- clients draw their shares of the classes ----------------------------------------------------


class DrawnShares:
    """A generator that draws given shares, and leaves units in their order."""

    def __init__(self, *shares: list) -> None:
        self.shares = [np.array(each) for each in shares]

    def dirichlet(self, alpha, size=None):
        return self.shares.pop(0)

    def permutation(self, n: int) -> np.ndarray:
        return np.arange(n)


def test_the_two_dirichlet_rules_by_hand():
    """Two clients, two classes of 8 and 16 examples.

    By client: client 0 wants 90 % of class 0 and 10 % of class 1, client 1 wants 30 and 70 %. Class
    0 is divided as .9 : .3, so 6 and 2; class 1 as .1 : .7, so 2 and 14. By class: class 0 is
    divided as .25 : .75, so 2 and 6, and class 1 as .5 : .5, so 8 and 8.
    """
    y = np.repeat([0, 1], [8, 16])
    one = np.ones_like(y)
    drawn = DrawnShares([[0.9, 0.1], [0.3, 0.7]])
    parts = assign_units(parse("dirichlet-clients:0.1"), y, one, 2, drawn)
    assert [part.tolist() for part in parts] == [
        [*range(6), 8, 9],
        [6, 7, *range(10, 24)],
    ]
    drawn = DrawnShares([0.25, 0.75], [0.5, 0.5])
    parts = assign_units(parse("dirichlet:0.1"), y, one, 2, drawn)
    assert [np.bincount(y[part]).tolist() for part in parts] == [[2, 8], [6, 8]]


def test_a_class_that_no_client_wants_is_divided_evenly():
    shares = share_classes(np.array([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]))
    assert shares[:, 0].tolist() == [0.25, 0.25, 0.5, 0.0]
    assert shares[:, 1].tolist() == [0.25] * 4


@given(st.floats(1e-4, 100), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_shares_of_a_class_sum_to_one_and_keep_the_order_of_what_is_wanted(
    alpha, clients, classes, seed
):
    wanted = np.random.default_rng(seed).dirichlet(np.full(classes, alpha), size=clients)
    shares = share_classes(wanted)
    assert shares.sum(axis=0) == pytest.approx(np.ones(classes))
    for c in range(classes):
        by_wish = np.argsort(wanted[:, c], kind="stable")
        assert np.all(np.diff(shares[by_wish, c]) >= 0)


def test_sizes_by_the_two_dirichlet_rules():
    """Of ten clients at ALPHA .1: the smallest and largest share of the data, and of a class."""
    y = np.repeat(np.arange(10), 2000)
    one = np.ones_like(y)
    found = {}
    for kind in ("dirichlet", "dirichlet-clients"):
        rows = []
        for seed in range(100):
            parts = dealt(f"{kind}:0.1", y, one, seed=seed)
            sizes = np.array([len(part) for part in parts]) / len(y)
            top = [np.bincount(y[part]).max() / len(part) for part in parts]
            rows.append((sizes.min(), sizes.max(), np.mean(top)))
        found[kind] = np.mean(rows, axis=0)
    smallest, largest, top = found["dirichlet"]
    assert (smallest, largest) == (pytest.approx(0.015, abs=0.003), pytest.approx(0.22, abs=0.01))
    smallest, largest, other_top = found["dirichlet-clients"]
    assert (smallest, largest) == (pytest.approx(0.055, abs=0.003), pytest.approx(0.17, abs=0.01))
    # The mix of classes is as uneven either way.
    assert top == pytest.approx(other_top, abs=0.02)


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_that_is_listed_can_be_read(name):
    text = name.replace("ALPHA", "0.5").replace("K", "2").replace("N", "30")
    assert parse(text).kind == name.partition(":")[0]


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
             "dirichlet-clients", "dirichlet-clients:0", "dirichlet-clients:nan", "dirichlet-clients:1:0", "dirichlet-clients:1:grouped",
             "classes:2:grouped:5", "classes:2:grouped:grouped", "classes:0:grouped"]
)  # fmt: skip
def test_wrong_words_are_refused_in_a_sentence(text):
    with pytest.raises(InputError, match=r"partition") as caught:
        parse(text)
    assert str(caught.value).rstrip().endswith(".")


def test_a_refusal_names_the_rule_that_was_given():
    with pytest.raises(InputError) as caught:
        parse("dirichlet-clients:-1")
    assert str(caught.value) == (
        "partition is 'dirichlet-clients:-1'; "
        "it must be dirichlet-clients:ALPHA with ALPHA above 0."
    )
    with pytest.raises(InputError, match="did you mean 'dirichlet-clients:ALPHA'"):
        parse("dirichlet-client:0.5")


def test_impossible_deals_are_refused():
    with pytest.raises(InputError, match="fewer clients, or a larger ALPHA"):
        dealt("dirichlet:0.001", clients=40)
    # Of 100 clients that want one class each, some want the one that has three examples.
    rare = np.repeat(np.arange(10), [500] * 9 + [3])
    with pytest.raises(InputError, match=r"partition dirichlet-clients:0\.001 leaves .* ALPHA\."):
        dealt("dirichlet-clients:0.001", rare, np.ones_like(rare), clients=100)
    with pytest.raises(InputError, match="classes:K with K at most 10, the number of classes"):
        dealt("classes:11")


@pytest.mark.parametrize("text", ["iid:20", "dirichlet:0.5:20", "dirichlet-clients:0.5:20"])
def test_so_many_examples_of_each_class_are_dealt(text):
    rows = np.concatenate(dealt(text, clients=5))
    assert len(np.unique(rows)) == len(rows)
    assert np.bincount(Y[rows]).tolist() == [20] * 10
    # Of blocks, as many as fit: three of 6 rows, never a part of one.
    label = np.repeat(np.arange(2), 9)
    blocks = np.concatenate(dealt("iid:20", label, np.full(18, 6), clients=2))
    assert np.bincount(label[blocks]).tolist() == [3, 3]
