"""One-dimensional k-means for many clients: by hand, and under vmap.

The lab compares it with an exact solver: ``lab/tests/bench/test_kmeans.py``.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from fedgrove import trees
from fedgrove.methods.adfedwcp.kmeans import (
    LLOYD_STEPS,
    _in_order,
    _lloyd,
    _walk_back,
    cluster,
    operations,
    solve,
    with_centroids,
)


def clustered(values: list[float], k: int, k_max: int = 8) -> list[float]:
    found: list[float] = cluster(torch.tensor(values), torch.tensor(k), k_max).tolist()
    return found


def test_by_hand() -> None:
    """Three centroids, one at 0: the outer groups go to their means, -2 and 4; .1 and -.1 to 0."""
    assert clustered([-2.0, -0.1, 0.1, 3.0, 5.0], 3) == [-2.0, 0.0, 0.0, 4.0, 4.0]


def test_the_zero_centroid_is_pinned() -> None:
    """Without the pin two centroids would be at 1.5 and 10; with it 1 and 2 are nearest to 0."""
    assert clustered([1.0, 2.0, 10.0], 2) == [0.0, 0.0, 10.0]
    # All on one side: 0 takes what is nearest to it, here nothing but the smallest.
    assert clustered([5.0, 6.0, 50.0], 3) == [5.5, 5.5, 50.0]


def test_lloyds_steps_move_the_centroids_by_hand() -> None:
    """1, 3 and 5 are in one bin of the histogram, whose centroid is their mean, 3.

    Then 1 is nearer to 0 (1.5 is half way), and 3 and 5 move the centroid to 4: half way is 2.
    """
    assert clustered([-1000.0, 1.0, 3.0, 5.0, 1000.0], 4) == [-1000.0, 0.0, 4.0, 4.0, 1000.0]


def test_a_centroid_without_values_stays_where_it_is() -> None:
    """-5 is nearest to 0 and 5 to 5: nothing is nearest to 1, which must not become a second 0."""
    line = _in_order(torch.tensor([-5.0, 5.0]))
    found = _lloyd([line], torch.tensor([[0.0, 1.0, 5.0]]))
    assert found.sort().values.tolist() == [[0.0, 1.0, 5.0]]


def test_pruned_weights_are_plus_zero() -> None:
    found = cluster(torch.tensor([-1e-9, -3.0, 3.0]), torch.tensor(3), 8)
    assert found.tolist() == [0.0, -3.0, 3.0]
    assert not bool(torch.signbit(found[0]))


@pytest.mark.parametrize("values", [[0.0, 0.0], [7.0, 7.0, 7.0], [2.0]])
def test_fewer_values_than_centroids(values: list[float]) -> None:
    assert clustered(values, 5) == values


def test_many_clients_at_once_with_numbers_of_their_own() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 100, generator=g)
    k = torch.tensor([2.0, 3.0, 5.0, 16.0, 32.0])
    together = vmap(lambda values, number: cluster(values, number, 32))(x, k)
    for i in range(5):
        assert torch.equal(together[i], cluster(x[i], k[i], 32))
        assert len(together[i].unique()) == int(k[i])


def test_what_clustering_takes_by_hand() -> None:
    """k = 4, 8 bins: (3 * 3 + 4) * 9^2 for the programme; a value 3 + 5 * (2 + 2) = 23."""
    assert operations(10, 4, bins=8) == 13 * 81 + 10 * 23


def _lloyd_one_by_one(x: Tensor, centroids: Tensor) -> Tensor:
    """Lloyd's steps of one layer, and each value's nearest centroid."""
    values = x.sort().values
    sums = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    for _ in range(LLOYD_STEPS):
        ordered = centroids.sort().values
        midpoints = (ordered[1:] + ordered[:-1]) / 2
        places = torch.searchsorted(values, midpoints, right=True)
        bounds = torch.cat([torch.tensor([0]), places, torch.tensor([len(values)])])
        count = bounds.diff()
        mean = sums[bounds].diff() / count.clamp(min=1)
        moved = torch.where(count > 0, mean, ordered)
        centroids = torch.where(ordered == 0, 0.0, moved)
    ordered = centroids.sort().values
    return ordered[torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, x)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(0, 2**31))
def test_layers_at_once_are_to_the_bit_those_one_by_one(sizes: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    # With ties and zeros.
    layers = [(4 * torch.randn(size, generator=g)).round() / 4 for size in sizes]
    k = torch.randint(2, 9, (len(sizes),), generator=g)
    solved = solve(layers, 8)
    found = with_centroids(layers, solved, k)
    starts = _walk_back(solved, k)
    for x, one, start in zip(layers, found, starts, strict=True):
        expected = _lloyd_one_by_one(x.double(), start).float() + 0.0
        assert trees.identical({"w": one}, {"w": expected})
