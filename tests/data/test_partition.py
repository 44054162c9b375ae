import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove.data.partition import Partition, deal, hands, parse
from fedgrove.errors import InputError

Y = np.repeat(np.arange(10), 200)
ONE = np.ones_like(Y)


def dealt(text, y=Y, size=ONE, clients=10, seed=0):
    return deal(parse(text), y, size, clients, np.random.default_rng(seed))


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
    hand = hands(8, k, clients, np.random.default_rng(seed))
    assert all(len(set(row)) == k for row in hand.tolist())
    assert np.ptp(np.bincount(hand.ravel(), minlength=8)) <= 1


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
    parts = deal(Partition("iid"), np.zeros(4, dtype=int), size, 2, np.random.default_rng(0))
    assert sorted(size[p].sum() for p in parts) in ([99, 101], [100, 100], [98, 102])


def test_the_same_seed_deals_the_same():
    for a, b in zip(dealt("dirichlet:0.5", seed=4), dealt("dirichlet:0.5", seed=4), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize(
    "text", ["dirichlet", "dirichlet:x", "dirichlet:0", "dirichlet:-1", "dirichlet:nan",
             "dirichlet:inf", "classes:0", "classes:2.5", "classes:2:0", "shards:a", "shards:2:0",
             "iid:3", "nature", ""]
)  # fmt: skip
def test_wrong_words_are_refused_in_a_sentence(text):
    with pytest.raises(InputError, match=r"partition") as caught:
        parse(text)
    assert str(caught.value).rstrip().endswith(".")


def test_impossible_deals_are_refused():
    with pytest.raises(InputError, match="fewer clients, or a larger ALPHA"):
        dealt("dirichlet:0.001", clients=40)
    with pytest.raises(InputError, match="at most 10 classes"):
        dealt("classes:11")
