"""The monotone allocation: by hand, by its conditions, and beside a general solver."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression

from fedgrove.channels.find_groups import find_groups
from fedgrove.errors import InputError
from fedgrove.methods.fedapta.channel_rules import LayerwiseL1
from fedgrove.methods.fedapta.layer_ratios import (
    bounded_isotonic,
    candidates,
    layer_importance,
    monotone_ratios,
    weight_counts,
    whole_channels,
)
from fedgrove.nets import Net, build


def test_the_target_itself_where_it_is_feasible() -> None:
    """1/I = .5, 1 over equal sizes: s (.5 + 1) / 2 = .3, s = .4: ratios .2 and .4."""
    assert monotone_ratios([2.0, 1.0], [10, 10], [0.95, 0.95], 0.3) == [0.2, 0.4]


def test_a_cap_by_hand() -> None:
    """s = .6 gives .3 and .6 of sizes 1 and 1. With caps of .5 the second takes .5, and the first
    what is left of .9: .4."""
    assert monotone_ratios([2.0, 1.0], [10, 10], [0.5, 0.5], 0.45) == pytest.approx([0.4, 0.5])


def test_a_floor_by_hand() -> None:
    """Targets are .2 and .4 (above); no layer below .8 · .3 = .24: the first takes .24, and the
    second what is left of .6."""
    ratios = monotone_ratios([2.0, 1.0], [10, 10], [0.95, 0.95], 0.3, least=0.8)
    assert ratios == pytest.approx([0.24, 0.36])
    # A floor below the targets changes nothing; one of the whole ratio leaves equal ratios alone.
    assert monotone_ratios([2.0, 1.0], [10, 10], [0.95, 0.95], 0.3, least=0.5) == [0.2, 0.4]
    assert monotone_ratios([2.0, 1.0], [10, 10], [0.95, 0.95], 0.3, least=1) == [0.3, 0.3]


def test_a_floor_and_a_cap_by_hand() -> None:
    """Three layers of one weight; 1/I = 1/4, 1/2, 1, s = 1.5 / 1.75: targets .214, .429, .857. A
    floor of .8 · .5 = .4 and a cap of .6 leave 1.5 - .4 - .6 = .5 to the middle one."""
    ratios = monotone_ratios([4.0, 2.0, 1.0], [1, 1, 1], [0.6] * 3, 0.5, least=0.8)
    assert ratios == pytest.approx([0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("least", "smallest", "largest"), [(0.0, 0.31, 0.95), (0.8, 0.64, 0.94), (0.9, 0.72, 0.92)]
)
def test_how_different_the_layers_of_resnet18_are(
    least: float, smallest: float, largest: float
) -> None:
    """At a device's ratio of .8, from initial weights: what the floor leaves of Eq. 1."""
    net = Net(build("resnet18:norm=group", (3, 32, 32), 10, 0), (3, 32, 32))
    layers = candidates(find_groups(net), net.layout.shapes)
    importances = layer_importance(net.params(), layers)
    counts = weight_counts(layers, net.layout.shapes)
    by_layer = [importances[group.name] for group in layers]
    sizes = [counts[group.name] for group in layers]
    ratios = monotone_ratios(by_layer, sizes, [0.95] * len(layers), 0.8, least)
    assert (min(ratios), max(ratios)) == pytest.approx((smallest, largest), abs=0.005)
    assert LayerwiseL1().least == 0.8


@pytest.mark.parametrize("least", [-0.1, 1.1])
def test_a_floor_beyond_the_ratio_is_refused(least: float) -> None:
    with pytest.raises(InputError, match=r"least is .*; it must be in \[0, 1\]"):
        monotone_ratios([1.0, 2.0], [10, 10], [0.95, 0.95], 0.5, least)


def test_the_order_by_hand() -> None:
    """The budget pulls large layers down: with sizes 1 and 3 and equal importance the target is
    the ratio itself, and is kept."""
    assert monotone_ratios([1.0, 1.0], [10, 30], [0.95, 0.95], 0.5) == [0.5, 0.5]


def test_a_layer_of_zeros_goes_first() -> None:
    """Its 1/I would be infinite; it counts as a millionth of the largest, and takes all it can."""
    ratios = monotone_ratios([1.0, 0.0], [10, 10], [0.95, 0.95], 0.4)
    assert ratios[1] == pytest.approx(0.8, abs=1e-5)
    assert sum(ratios) == pytest.approx(0.8)
    assert monotone_ratios([0.0, 0.0], [10, 10], [0.95, 0.95], 0.4) == [0.4, 0.4]


def test_ends_of_the_range() -> None:
    assert monotone_ratios([3.0, 1.0], [10, 20], [0.95, 0.95], 0.0) == [0.0, 0.0]
    assert monotone_ratios([3.0, 1.0], [10, 20], [0.95, 0.95], 0.95) == [0.95, 0.95]
    assert monotone_ratios([3.0], [10], [0.95], 0.6) == [0.6]


def test_a_ratio_above_a_cap_is_refused() -> None:
    with pytest.raises(InputError, match=r"ratio is 0.6; it must be from 0 to 0.5, the smallest"):
        monotone_ratios([1.0, 2.0], [10, 10], [0.5, 0.95], 0.6)


instances = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.001, 10), min_size=n, max_size=n),
        st.lists(st.integers(1, 10_000), min_size=n, max_size=n),
        st.lists(st.floats(0.5, 0.95), min_size=n, max_size=n),
        st.floats(0, 1),
        st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
    )
)


@given(instances)
def test_budget_order_and_bounds(instance: tuple) -> None:
    importances, sizes, caps, share, least = instance
    ratio = share * min(caps)
    ratios = monotone_ratios(importances, sizes, caps, ratio, least)
    pruned = sum(n * r for n, r in zip(sizes, ratios, strict=True))
    assert pruned == pytest.approx(ratio * sum(sizes), rel=1e-9, abs=1e-9 * sum(sizes))
    for r, cap in zip(ratios, caps, strict=True):
        assert least * ratio - 1e-12 <= r <= cap + 1e-12
    order = sorted(range(len(sizes)), key=lambda k: -importances[k])
    in_order = [ratios[k] for k in order]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(in_order))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 8),
    seed=st.integers(0, 10_000),
    share=st.floats(0.05, 0.95),
    most=st.booleans(),
    least=st.one_of(st.just(0.0), st.floats(0, 0.95)),
)
def test_a_general_solver_finds_no_nearer_point(
    n: int, seed: int, share: float, most: bool, least: float
) -> None:
    """SLSQP on the program as it is written: the same objective, and where it ends the same point."""
    rng = np.random.default_rng(seed)
    importances = np.sort(rng.uniform(0.1, 2.0, n))[::-1]
    sizes = rng.integers(1, 50, n)
    caps = np.full(n, 0.95) if most else rng.uniform(0.6, 0.95, n)
    ratio = share * caps.min()
    target = ratio * sizes.sum() / (sizes / importances).sum() / importances
    ours = np.array(monotone_ratios(list(importances), list(sizes), list(caps), ratio, least))

    def objective(x: np.ndarray) -> float:
        return float(((x - target) ** 2).sum())

    found = minimize(
        objective,
        np.full(n, ratio),
        jac=lambda x: 2 * (x - target),
        bounds=[(least * ratio, cap) for cap in caps],
        constraints=[
            {"type": "eq", "fun": lambda x: (sizes * (x - ratio)).sum() / sizes.sum()},
            {"type": "ineq", "fun": np.diff},
        ],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert found.success
    assert objective(ours) <= objective(found.x) + 1e-7
    # Strictly convex: one minimum, so that points of nearly the least objective are near it.
    assert np.abs(ours - found.x).max() < 1e-3


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=10), st.sampled_from([0.0, 0.3, 0.8]))
def test_isotonic_regression_is_the_librarys(values: list[float], floor: float) -> None:
    """With one limit for all, scikit-learn's is the same problem."""
    places = np.arange(len(values))
    library = IsotonicRegression(y_min=floor, y_max=0.8).fit_transform(places, values)
    ours = bounded_isotonic(values, [0.8] * len(values), floor)
    assert ours == pytest.approx(list(library), abs=1e-9)


def test_limits_that_differ_by_hand() -> None:
    """3 is cut to its limit of .5, and 1 need not move: they are in order. Pooling first and
    cutting then would give .5 and 2."""
    assert bounded_isotonic([3.0, 1.0], [0.5, 10.0]) == [0.5, 1.0]


# ---- whole channels ------------------------------------------------------------------------------


def test_whole_channels_by_hand() -> None:
    """1.5 of 6 channels of 10 weights each, twice: 1 and 1, and 10 weights are missing; the first
    loses one more, and nothing is missing."""
    assert whole_channels([0.25, 0.25], [6, 6], [60, 60]) == [2, 1]
    # 3.2 of 4 channels of 5 weights: 3, and 1 weight is missing, less than half a channel.
    assert whole_channels([0.8], [4], [20]) == [3]
    assert whole_channels([0.0, 0.5], [8, 8], [8, 8]) == [0, 4]


@given(
    st.lists(
        st.tuples(st.floats(0, 0.95), st.integers(2, 64), st.integers(1, 600)),
        min_size=1,
        max_size=10,
    )
)
def test_whole_channels_meet_the_budget(layers: list[tuple[float, int, int]]) -> None:
    channels = [count for _, count, _ in layers]
    sizes = [count * each for _, count, each in layers]
    ratios = [min(ratio, (count - 1) / count) for ratio, count, _ in layers]
    fallen = whole_channels(ratios, channels, sizes)
    for ratio, count, number in zip(ratios, channels, fallen, strict=True):
        assert 0 <= number < count
        assert abs(number - ratio * count) < 1 + 1e-6
    pruned = sum(
        number * size / count for number, size, count in zip(fallen, sizes, channels, strict=True)
    )
    wanted = sum(ratio * size for ratio, size in zip(ratios, sizes, strict=True))
    largest = max(size / count for size, count in zip(sizes, channels, strict=True))
    assert abs(pruned - wanted) <= largest / 2 + 1e-3
