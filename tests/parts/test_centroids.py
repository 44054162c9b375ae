"""Numbers of centroids: each bound by hand, equal clients, and against a search over all k."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.core import Info
from fedgrove.errors import InputError
from fedgrove.parts.centroids import Adaptive, Fixed, Progress, clustered_bits


def test_the_lower_bound_by_hand() -> None:
    """alpha = 27 / 400; 5 + ceil(.0675 * .5 * 200) = 12; halfway gamma 1.5: 18.

    Accuracy rose by .1: eta = .99, ceil(17.82) = 18; it fell by .1: eta = 1.15, ceil(20.7) = 21.
    """
    rule = Adaptive()
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100)) == 18
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100, 0.1)) == 18
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100, -0.1)) == 21
    # Never above k_max.
    assert rule.least(1.0, 500, 100, 500, Progress(99, 100)) == 32


def test_the_upper_bound_by_hand() -> None:
    """beta = 27 / 95; at 52.5 Mbit/s and omega .2: 32 - ceil(.2842 * .8 * 47.5) = 32 - 11 = 21."""
    rule = Adaptive()
    assert rule.limit(0.2, 52.5) == 21
    assert rule.limit(0.2, 100.0) == 32
    assert rule.limit(0.0, 5.0) == 5


def test_where_the_bounds_cross_bandwidth_wins() -> None:
    slow = Info(500, bandwidth=5.0)
    at_the_end = Progress(99, 100)
    assert Adaptive()(0.1, slow, 100, 500, at_the_end) == Adaptive().limit(0.1, 5.0) == 7
    assert Adaptive(upper=False)(0.1, slow, 100, 500, at_the_end) == 16
    assert Adaptive(lower=False)(0.1, slow, 100, 500, at_the_end) == 5


def test_equal_clients_and_one_number() -> None:
    """Nobody has more data than another: k_min, times progress."""
    assert Adaptive()(0.5, Info(300), 300, 300, Progress(0, 10)) == 5
    one = Adaptive(k_min=9, k_max=9)
    assert one(0.5, Info(300, bandwidth=5.0), 100, 500, Progress(9, 10)) == 9
    assert Fixed(8)(0.5, Info(300), 100, 500, Progress(0, 10)) == 8


@given(
    st.floats(0, 1),
    st.integers(100, 500),
    st.floats(5, 100),
    st.integers(0, 99),
    st.floats(-0.5, 0.5),
)
def test_the_closed_form_is_the_best_of_all_k(
    omega: float, examples: int, bandwidth: float, t: int, change: float
) -> None:
    """The paper's objective, searched: within the bounds the least k is best; where they cross, the
    upper one holds."""
    rule = Adaptive()
    progress = Progress(t, 100, change)
    info = Info(examples, bandwidth=bandwidth)
    low = rule.least(omega, examples, 100, 500, progress)
    high = rule.limit(omega, bandwidth)

    def seconds(k: int) -> float:
        return (16 * k + 1000 * math.log2(k) + 16 * 10) / bandwidth

    allowed = [k for k in range(5, 33) if low <= k <= high] or [high]
    assert rule(omega, info, 100, 500, progress) == min(allowed, key=seconds)


def test_bits_of_a_layer_by_hand() -> None:
    """8 centroids of 32 bits, 3 bits for each of 2,400 weights, 32 biases: 256 + 7200 + 1024."""
    assert clustered_bits(2400, 32, 8) == 8480


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Adaptive(k_min=1), r"k_min is 1; it must be in 2\.\.256"),
        (lambda: Adaptive(k_min=10, k_max=9), r"k_max is 9; it must be in 10 \(k_min\)\.\.256"),
        (lambda: Adaptive(slow=100, fast=5), "0 < slow < fast"),
        (lambda: Fixed(1), r"k is 1; it must be 0 \(no clustering\), or in 2\.\.256"),
    ],
)
def test_impossible_numbers_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()
