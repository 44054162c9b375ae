"""Numbers of centroids: each bound by hand, equal clients, and against a search over all k."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.core import ClientInfo
from fedgrove.errors import InputError
from fedgrove.methods.adfedwcp.centroids import Adaptive, Fixed, Progress, clustered_bits


def test_the_lower_bound_by_hand() -> None:
    """alpha = 27 / 400; 5 + ceil(.0675 * .5 * 200) = 12; halfway gamma 1.5: 18.

    Accuracy rose by .1: eta = .99, ceil(17.82) = 18; it fell by .1: eta = 1.15, ceil(20.7) = 21.
    """
    rule = Adaptive()
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100)) == 18
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100, 0.1)) == 18
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100, -0.1)) == 21
    # It rose by .8: eta = .92, ceil(16.56) = 17.
    assert rule.least(0.5, 300, 100, 500, Progress(50, 100, 0.8)) == 17
    # Never above k_max, and never below k_min: 5 * (1 - .5 * .9) = 2.75.
    assert rule.least(1.0, 500, 100, 500, Progress(99, 100)) == 32
    assert Adaptive(xi=0.5).least(0.5, 100, 100, 500, Progress(0, 100, 0.9)) == 5


def test_the_upper_bound_by_hand() -> None:
    """beta = 27 / 95; at 52.5 Mbit/s and omega .2: 32 - ceil(.2842 * .8 * 47.5) = 32 - 11 = 21."""
    rule = Adaptive()
    assert rule.limit(0.2, 52.5, 5.0, 100.0) == 21
    assert rule.limit(0.2, 100.0, 5.0, 100.0) == 32
    assert rule.limit(0.0, 5.0, 5.0, 100.0) == 5


def test_the_bounds_of_memory_and_speed_by_hand() -> None:
    """k 5 to 32, omega .2. Memory 2 of 1 to 4: 32 - ceil(27 / 3 * .8 * 2) = 32 - 15 = 17.

    Speed .5 of .25 to 1: 32 - ceil(27 / .75 * .8 * .5) = 32 - 15 = 17; .4: ceil(17.28) = 18, so 14.
    """
    rule = Adaptive(memory=True, little=1, plenty=4, speed=True)
    assert rule.limits(0.2, ClientInfo(300, 100.0, speed=0.5, memory=2)) == [32, 32, 17, 17]
    assert rule.limits(0.2, ClientInfo(300, 100.0, speed=0.4, memory=4)) == [32, 32, 32, 14]
    # Beyond the ends of a range nothing is gained, and k_min is left.
    assert rule.limits(0.0, ClientInfo(300, 5.0, speed=0.01, memory=1)) == [32, 5, 5, 5]
    at_the_end = Progress(99, 100)
    assert rule(1.0, ClientInfo(500, 100.0, speed=1.0, memory=4), 100, 500, at_the_end) == 32
    assert rule(0.2, ClientInfo(500, 100.0, speed=0.4, memory=4), 100, 500, at_the_end) == 14


def test_memory_and_speed_are_off_as_in_the_paper() -> None:
    weak = ClientInfo(500, 100.0, speed=0.01, memory=1)
    assert Adaptive().limits(0.2, weak) == [32, 32]
    assert Adaptive(upper=False).limits(0.2, weak) == [32]


def test_where_the_bounds_cross_bandwidth_wins() -> None:
    slow = ClientInfo(500, bandwidth=5.0)
    at_the_end = Progress(99, 100)
    assert (
        Adaptive()(0.1, slow, 100, 500, at_the_end) == Adaptive().limit(0.1, 5.0, 5.0, 100.0) == 7
    )
    assert Adaptive(upper=False)(0.1, slow, 100, 500, at_the_end) == 16
    assert Adaptive(lower=False)(0.1, slow, 100, 500, at_the_end) == 5


def test_equal_clients_and_one_number() -> None:
    """Nobody has more data than another: k_min, times progress."""
    assert Adaptive()(0.5, ClientInfo(300), 300, 300, Progress(0, 10)) == 5
    one = Adaptive(k_min=9, k_max=9)
    assert one(0.5, ClientInfo(300, bandwidth=5.0), 100, 500, Progress(9, 10)) == 9
    assert Fixed(8)(0.5, ClientInfo(300), 100, 500, Progress(0, 10)) == 8


@given(
    st.floats(0, 1),
    st.integers(100, 500),
    st.floats(5, 100),
    st.integers(0, 99),
    st.floats(-0.5, 0.5),
    st.floats(0.1, 2.0),
    st.integers(1 << 20, 1 << 33),
    st.booleans(),
    st.booleans(),
)
def test_the_closed_form_is_the_best_of_all_k(
    omega: float,
    examples: int,
    bandwidth: float,
    t: int,
    change: float,
    speed: float,
    memory: int,
    by_memory: bool,
    by_speed: bool,
) -> None:
    """The paper's objective, searched: within the bounds the least k is best; where they cross, the
    upper one holds, and of several upper ones the least."""
    rule = Adaptive(memory=by_memory, speed=by_speed)
    progress = Progress(t, 100, change)
    info = ClientInfo(examples, bandwidth, speed, memory)
    low = rule.least(omega, examples, 100, 500, progress)
    high = upper(omega, bandwidth, 5.0, 100.0)
    if by_memory:
        high = min(high, upper(omega, memory, 2**28, 2**32))
    if by_speed:
        high = min(high, upper(omega, speed, 0.25, 1.0))

    def seconds(k: int) -> float:
        return (16 * k + 1000 * math.log2(k) + 16 * 10) / bandwidth

    allowed = [k for k in range(5, 33) if low <= k <= high] or [high]
    assert rule(omega, info, 100, 500, progress) == min(allowed, key=seconds)


def upper(omega: float, has: float, least: float, most: float) -> int:
    """The largest k of 5..32 that leaves k_max - k >= 27 (1 - omega) (most - has) / (most - least).

    Found by trying all.
    """
    gone = 27 * (1 - omega) * (most - has) / (most - least)
    allowed = [k for k in range(5, 33) if 32 - k >= gone - 1e-9]
    return max(allowed, default=5)


def test_bits_of_a_layer_by_hand() -> None:
    """8 centroids of 32 bits, 3 bits for each of 2,400 weights, 32 biases: 256 + 7200 + 1024.

    5 centroids need 3 bits too: 160 + 300.
    """
    assert clustered_bits(2400, 32, 8) == 8480
    assert clustered_bits(100, 0, 5) == 460


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Adaptive(k_min=1), r"k_min is 1; it must be in 2\.\.256"),
        (lambda: Adaptive(k_min=10, k_max=9), r"k_max is 9; it must be in 10 \(k_min\)\.\.256"),
        (lambda: Adaptive(slow=100, fast=5), "0 < slow < fast"),
        (lambda: Adaptive(little=0), "0 < little < plenty"),
        (lambda: Adaptive(little=8, plenty=8), "0 < little < plenty"),
        (lambda: Adaptive(weak=1.0), "0 < weak < strong"),
        (lambda: Fixed(1), r"k is 1; it must be 0 \(no clustering\), or in 2\.\.256"),
    ],
)
def test_impossible_numbers_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()
