"""E-UCB: bounds by hand, intervals that get finer, and that it finds what gains most."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.fedmp import EUCB

EDGES = (0.0, 0.4, 0.8)


def test_bounds_by_hand() -> None:
    """Plays .1, .5, .2 gained 2, 1, 4; with a discount of 1/2 they weigh 1/4, 1/2, 1; 7/4 in all.

    All together gained (2/4 + 1/2 + 4) / (7/4) = 20/7. Below .4: N = 5/4, R = (2/4 + 4) / (5/4) =
    3.6; above: N = 1/2, R = 1.
    """
    bandit = EUCB(discount=0.5, explore=0.5)
    plays = [(0.1, 2.0), (0.5, 1.0), (0.2, 4.0)]
    log = math.log(1.75)
    bounds = bandit.bounds(EDGES, plays)
    assert bounds[0.0, 0.4] == pytest.approx(3.6 * 7 / 20 + 0.5 * math.sqrt(2 * log / 1.25))
    assert bounds[0.4, 0.8] == pytest.approx(1.0 * 7 / 20 + 0.5 * math.sqrt(2 * log / 0.5))
    # The lower interval has the larger bound: a quarter of the way through it.
    assert bandit(EDGES, plays, draw=0.25) == pytest.approx(0.1)


def test_the_units_of_rewards_do_not_matter() -> None:
    plays = [(0.1, 2.0), (0.5, 1.0), (0.2, 4.0)]
    small = [(number, reward / 1000) for number, reward in plays]
    assert EUCB().bounds(EDGES, small) == pytest.approx(EUCB().bounds(EDGES, plays))
    # Nothing gained anywhere: what was played less comes first.
    assert EUCB()(EDGES, [(0.1, 0.0), (0.2, 0.0), (0.5, 0.0)], draw=0.0) == 0.4


def test_what_was_not_played_comes_first() -> None:
    assert EUCB()(EDGES, [(0.1, 1e9)], draw=0.0) == 0.4
    # Of two, the lower.
    assert EUCB()(EDGES, [], draw=0.5) == pytest.approx(0.2)


def test_the_last_interval_holds_its_end() -> None:
    assert EUCB()(EDGES, [(0.8, 1.0)], draw=0.0) == 0.0


def test_old_plays_count_less_than_new_ones() -> None:
    """Below .4: first 9, then four times 0; above: five times 1. Without a discount 9/5 is more."""
    plays = [(0.1, 9.0), (0.5, 1.0)]
    for _ in range(4):
        plays += [(0.1, 0.0), (0.5, 1.0)]
    assert EUCB(discount=1.0)(EDGES, plays, draw=0.0) == 0.0
    assert EUCB(discount=0.5)(EDGES, plays, draw=0.0) == 0.4


def test_an_interval_is_divided_where_it_was_played_until_it_is_short() -> None:
    bandit = EUCB(finest=0.25)
    assert bandit.split((0.0, 0.75), 0.5) == (0.0, 0.5, 0.75)
    # .75 - .5 = .25 is no longer than the finest.
    assert bandit.split((0.0, 0.5, 0.75), 0.6) == (0.0, 0.5, 0.75)
    # An edge divides nothing.
    assert bandit.split((0.0, 0.5, 0.75), 0.5) == (0.0, 0.5, 0.75)
    assert bandit.split((0.0, 0.0), 0.0) == (0.0, 0.0)


@given(st.integers(0, 2**31), st.floats(0.1, 1.0))
def test_numbers_lie_between_the_edges_and_edges_in_order(seed: int, most: float) -> None:
    rng = random.Random(seed)
    bandit = EUCB()
    edges: tuple[float, ...] = (0.0, most)
    plays: list[tuple[float, float]] = []
    for _ in range(30):
        played = bandit(edges, plays, rng.random())
        assert 0 <= played <= most
        edges = bandit.split(edges, played)
        assert list(edges) == sorted(set(edges))
        assert (edges[0], edges[-1]) == (0.0, most)
        plays.append((played, rng.random()))


def test_it_finds_what_gains_most() -> None:
    """The reward has its peak at .6: of the last hundred plays most are near it."""
    rng = random.Random(0)
    bandit = EUCB()
    edges: tuple[float, ...] = (0.0, 0.8)
    plays: list[tuple[float, float]] = []
    for _ in range(300):
        played = bandit(edges, plays, rng.random())
        edges = bandit.split(edges, played)
        plays.append((played, 1 / max(abs(played - 0.6), 0.1)))
    near = sum(abs(played - 0.6) < 0.15 for played, _ in plays[-100:])
    assert near > 70


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"discount": 0.0}, r"^discount is 0\.0; it must be in \(0, 1\]\.$"),
        ({"explore": -1.0}, r"^explore is -1\.0; it must be 0 or more\.$"),
        ({"finest": 0.0}, r"^finest is 0\.0; it must be above 0\.$"),
    ],
)
def test_what_is_out_of_range_is_refused(words: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EUCB(**words)
