"""Exact k-means: optimal by exhaustion, a quantiser like the others, and AdFedWCP's own next to it."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedgrove import trees
from fedgrove.errors import InputError
from fedgrove.methods.adfedwcp import kmeans
from fedgrove.parts.quantise import feedback
from fedgrove_lab.bench.kmeans import Centroids, cluster


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- as a quantiser ------------------------------------------------------------------------------


def test_shapes_counters_and_inputs_are_left_alone() -> None:
    w = torch.randn(4, 3, 2, generator=rng())
    tree = {"w": w, "n": torch.arange(5), "none": torch.zeros(0, 3), "s": torch.ones(())}
    before = {k: v.clone() for k, v in tree.items()}
    quantised = Centroids(8)(tree)
    assert list(quantised) == list(tree)
    assert all(quantised[k].shape == tree[k].shape for k in tree)
    assert torch.equal(quantised["n"], tree["n"])
    assert all(torch.equal(tree[k], before[k]) for k in tree)
    again = Centroids(8)(tree)
    assert trees.identical(quantised, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_zeros_have_no_sign(dtype: torch.dtype) -> None:
    # 1e-9 is 0 in 16 bits.
    x = torch.cat([torch.tensor([-0.0, -1e-9, -1e-3, -1.0]), torch.randn(60, generator=rng())])
    quantised = Centroids(8)({"w": x.to(dtype)})["w"]
    has_sign = torch.signbit(quantised) & (quantised == 0)
    assert not has_sign.any()


def test_feedback_loses_nothing() -> None:
    """Sum of what was sent + what is left = sum of what was to be sent."""
    steps = torch.randn(30, 50, generator=rng(), dtype=torch.float64)
    sent = torch.zeros(50, dtype=torch.float64)
    left = None
    for i, x in enumerate(steps):
        out, left = feedback(Centroids(8), {"w": x}, left, rng(i))
        sent += out["w"].double()
    assert left is not None
    assert torch.allclose(sent + left["w"], steps.sum(0), atol=1e-9)
    assert left["w"].abs().max() < 60


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Centroids(1), "k is 1"),
        (lambda: cluster(torch.ones(3), 1), "k is 1"),
        (lambda: cluster(torch.tensor([float("nan")]), 4), "NaN"),
    ],
)
def test_bad_values_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_a_centroid_that_is_rounded_to_zero_has_no_sign() -> None:
    # The least number of 16 bits is 6e-8: the mean of the first four, -1.5e-8, is rounded to -0.0.
    x = torch.tensor([-6e-8, 0.0, 0.0, 0.0, 1.0]).half()
    centroids = cluster(x, 2, zero=False).centroids
    assert trees.identical({"c": centroids}, {"c": torch.tensor([0.0, 1.0]).half()})


# ---- the best centroids ----


def error(x: Tensor, values: Tensor) -> float:
    return float(((x.double() - values.double()) ** 2).sum())


def exhaustive(x: Tensor, k: int, zero: bool) -> float:
    """The least error over all ways to cut the sorted values in k intervals, one of them about 0."""
    rising = np.sort(x.double().numpy())
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(len(rising) + 1), k - 1):
        edges = [0, *cuts, len(rising)]
        total = 0.0
        # What it costs more to put an interval's centroid at 0 instead of its mean.
        extra = []
        for a, b in itertools.pairwise(edges):
            part = rising[a:b]
            about_zero = float((part**2).sum())
            about_mean = 0.0
            if len(part):
                about_mean = float(((part - part.mean()) ** 2).sum())
            total += about_mean
            extra.append(about_zero - about_mean)
        if zero:
            total += min(extra)
        best = min(best, total)
    return best


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=8), st.integers(2, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_clusters_are_optimal(x: list[float], k: int, zero: bool) -> None:
    values = torch.tensor(x, dtype=torch.float64)
    clustering = cluster(values, k, zero)
    assert error(values, clustering.values) <= exhaustive(values, k, zero) + 1e-9
    assert len(clustering.centroids) <= k
    nearest = (values[:, None] - clustering.centroids).abs().min(1).values
    assert torch.allclose((values - clustering.values).abs(), nearest)
    if zero:
        assert clustering.centroids[0] == 0
        assert bool((clustering.centroids[1:].diff() > 0).all())


def test_clusters_golden() -> None:
    # two free centroids and 0: {-1, 1} -> 0 costs 2, {9, 11} -> 10 costs 2, {-20} -> -20
    clustering = cluster(torch.tensor([-1.0, 1.0, 9.0, 11.0, -20.0]), 3)
    assert clustering.centroids.tolist() == [0, -20, 10]
    assert clustering.index.tolist() == [0, 0, 2, 2, 1]


def test_a_histogram_costs_almost_nothing() -> None:
    x = torch.randn(16_000, generator=rng())
    for k in (4, 16):
        coarse = error(x, cluster(x, k).values)
        fine = error(x, cluster(x, k, bins=2500).values)
        assert coarse <= 1.003 * fine


def test_many_normal_values_reach_the_known_optimum() -> None:
    # Lloyd and Max: sixteen levels leave .009497 of a normal variable's variance; one of them at 0
    # costs a little.
    x = torch.randn(300_000, generator=rng())
    assert 0.0093 < error(x, cluster(x, 16, zero=False).values) / 300_000 < 0.0098
    assert error(x, cluster(x, 16).values) / 300_000 < 0.0100


def test_degenerate_layers() -> None:
    assert cluster(torch.zeros(7), 4).centroids.tolist() == [0]
    assert cluster(torch.full((7,), 2.5), 4).values.tolist() == [2.5] * 7
    assert cluster(torch.zeros(0, 3), 4).index.shape == (0, 3)
    assert cluster(torch.full((20_000,), 2.5), 4).values.unique().tolist() == [2.5]
    halves = cluster(torch.randn(500, generator=rng()).bfloat16(), 16)
    assert halves.values.dtype == torch.bfloat16


# ---- AdFedWCP's own ----


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 32), st.integers(1, 400), st.integers(0, 2**31))
def test_adfedwcp_is_as_good_as_the_exact_solver(k: int, size: int, seed: int) -> None:
    """Within a hundredth of the least error, but for what a bin of the histogram hides."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g, dtype=torch.float64) * torch.rand(size, generator=g)
    found = kmeans.cluster(x, torch.tensor(k), 32)
    best = cluster(x, k).values
    assert len(found.unique()) <= k
    bin_width = float(x.max() - x.min()) / 256
    assert error(x, found) <= 1.01 * error(x, best) + size * bin_width**2 / 12 + 1e-12
