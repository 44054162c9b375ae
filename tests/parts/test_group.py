"""Which clients belong together."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.parts.group import (
    SKETCH,
    Agglomerative,
    Bipartition,
    Updates,
    cosine_distances,
    nearest,
    renumbered,
    silhouette,
    sketch,
)


def circle(*degrees: float) -> torch.Tensor:
    """Unit vectors, whose cosine distance is 1 - cos of the angle between them."""
    return torch.tensor(
        [[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in degrees],
        dtype=torch.float64,
    )


# ---- distances -----------------------------------------------------------------------------------


def test_cosine_distances_by_hand() -> None:
    """60 degrees: 1 - 1/2; 180: 1 - (-1); lengths do not matter; zeros are at 1 from all others."""
    rows = torch.cat(
        [circle(0, 60, 180) * torch.tensor([[1.0], [5.0], [1e-30]]), torch.zeros(1, 2)]
    )
    far = cosine_distances(rows)
    assert far[0].tolist() == pytest.approx([0.0, 0.5, 2.0, 1.0], abs=1e-12)
    assert far[3].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert torch.equal(far, far.T)
    assert bool((far.diagonal() == 0).all())


@settings(max_examples=10, deadline=None)
@given(st.integers(3, 9), st.sampled_from(["average", "complete", "single"]), st.integers(0, 99))
def test_groups_are_those_of_scikit_learn(n: int, linkage: str, seed: int) -> None:
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    vectors = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    far = cosine_distances(vectors).numpy()
    for groups in range(2, n):
        theirs = AgglomerativeClustering(groups, metric="precomputed", linkage=linkage)
        labels = renumbered(theirs.fit_predict(far).tolist())
        assert Agglomerative(linkage)(vectors, groups) == labels
        expected = silhouette_score(far, labels, metric="precomputed")
        assert silhouette(far, labels) == pytest.approx(expected, abs=1e-12)


# ---- average linkage -----------------------------------------------------------------------------


def test_average_linkage_by_hand() -> None:
    """At 0, 40, 81, 120, 165 degrees.

    81+120 (39 apart: .223) merge first, then 0+40 (40 apart: .234).
    {81, 120} to {165}: (1-cos 84 + 1-cos 45)/2 = (.895 + .293)/2 = .594
    {0, 40} to {81, 120}: (.844 + 1.5 + .245 + .826)/4 = .854
    so 165 joins 81 and 120. Single linkage looks at the nearest pair: .245 < .293, and 165 stays
    alone.
    """
    rows = circle(0, 40, 81, 120, 165)
    assert Agglomerative()(rows, 2) == [0, 0, 1, 1, 1]
    assert Agglomerative("single")(rows, 2) == [0, 0, 0, 0, 1]
    assert Agglomerative()(rows, 3) == [0, 0, 1, 1, 2]


def test_average_linkage_is_not_complete_linkage_by_hand() -> None:
    """At 0, 30, 70, 130 degrees 0+30 merge first. 70 to {0, 30}: (1-cos 70 + 1-cos 40)/2 =
    (.658 + .234)/2 = .446, nearer than to 130, 1-cos 60 = .5. Complete linkage looks at the
    furthest pair, .658, and 70 joins 130.
    """
    rows = circle(0, 30, 70, 130)
    assert Agglomerative()(rows, 2) == [0, 0, 0, 1]
    assert Agglomerative("complete")(rows, 2) == [0, 0, 1, 1]


def test_the_length_of_an_update_does_not_matter() -> None:
    rows = circle(0, 90, 5, 95) * torch.tensor([[1.0], [1e-3], [1e3], [7.0]])
    assert Agglomerative()(rows, 2) == [0, 1, 0, 1]


def test_wards_linkage_by_hand() -> None:
    """At 0, 30, 70, 130 degrees 0+30 merge first, as by average linkage.

    The square of Ward's distance is 2 a b / (a + b) times the squared distance of the centres of
    two groups of a and b members. {0, 30} has its centre at 15 degrees, .966 from the middle. To
    70: .966^2 + 1 - 2 (.966) cos 55 = .825, times 4 / 3 = 1.1. 70 to 130: 2 (1 - cos 60) = 1,
    times 1. So 70 joins 130, where average linkage joins it to 0 and 30.
    """
    rows = circle(0, 30, 70, 130) * torch.tensor([[1.0], [1e-3], [1e3], [7.0]])
    assert Agglomerative("ward")(rows, 2) == [0, 0, 1, 1]
    assert Agglomerative()(rows, 2) == [0, 0, 0, 1]


def test_other_metrics_by_hand() -> None:
    """(1, 0), (5.4, 0) and (4, 3.2).

    Euclidean: 4.4, sqrt(9 + 10.24) = 4.39 and sqrt(1.96 + 10.24) = 3.49, so the last two merge.
    Manhattan: 4.4, 6.2 and 4.6, so the first two do.
    """
    rows = torch.tensor([[1.0, 0.0], [5.4, 0.0], [4.0, 3.2]])
    assert Agglomerative(metric="euclidean")(rows, 2) == [0, 1, 1]
    assert Agglomerative(metric="manhattan")(rows, 2) == [0, 0, 1]


@given(
    st.integers(3, 9),
    st.sampled_from(["average", "complete", "ward"]),
    st.sampled_from(["euclidean", "manhattan"]),
    st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_groups_by_other_metrics_are_those_of_scikit_learn(
    n: int, linkage: str, metric: str, seed: int
) -> None:
    from sklearn.cluster import AgglomerativeClustering

    if linkage == "ward":
        metric = "euclidean"
    vectors = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for groups in range(2, n):
        theirs = AgglomerativeClustering(groups, linkage=linkage, metric=metric)
        labels = renumbered(theirs.fit_predict(vectors.numpy()).tolist())
        assert Agglomerative(linkage, metric)(vectors, groups) == labels


@given(st.integers(3, 9), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_wards_groups_are_those_of_scikit_learn(n: int, seed: int) -> None:
    from sklearn.cluster import AgglomerativeClustering

    vectors = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).numpy()
    for groups in range(2, n):
        labels = AgglomerativeClustering(groups, linkage="ward").fit_predict(unit)
        assert Agglomerative("ward")(vectors, groups) == renumbered(labels.tolist())


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_fewer_clients_than_groups_and_one_client(groups: int) -> None:
    assert Agglomerative()(circle(10), groups) == [0]
    assert Agglomerative()(circle(0, 90), groups) == ([0, 0] if groups == 1 else [0, 1])


def test_as_many_groups_as_clients() -> None:
    assert Agglomerative()(circle(0, 1, 2), 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("degrees", "labels"),
    [
        ((0, 3, 100, 104, 2, 101), [0, 0, 1, 1, 0, 1]),
        ((0, 3, 100, 104, 220, 223), [0, 0, 1, 1, 2, 2]),
        ((0, 2, 80, 82, 170, 172, 260, 262), [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_the_silhouette_finds_how_many(degrees: tuple[float, ...], labels: list[int]) -> None:
    assert Agglomerative()(circle(*degrees), 0) == labels


def test_with_too_few_to_tell_the_silhouette_gives_one_group() -> None:
    assert Agglomerative()(circle(0), 0) == [0]
    assert Agglomerative()(circle(0, 90), 0) == [0, 0]
    assert Agglomerative()(circle(0, 1, 90), 0) == [0, 0, 1]


@given(st.permutations(range(7)))
def test_who_is_together_does_not_depend_on_the_order_of_clients(order: list[int]) -> None:
    degrees = (0, 40, 81, 120, 165, 200, 290)
    plain = Agglomerative()(circle(*degrees), 3)
    moved = Agglomerative()(circle(*(degrees[i] for i in order)), 3)
    pairs = {
        frozenset((order[a], order[b])) for a in range(7) for b in range(a) if moved[a] == moved[b]
    }
    assert pairs == {frozenset((a, b)) for a in range(7) for b in range(a) if plain[a] == plain[b]}


def test_an_unknown_linkage_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no linkage 'averag'; did you mean 'average'\?"):
        Agglomerative("averag")
    with pytest.raises(InputError, match=r"no metric 'cosin'; did you mean 'cosine'\?"):
        Agglomerative(metric="cosin")


def test_wards_linkage_needs_euclidean_distances() -> None:
    with pytest.raises(InputError, match="must be cosine or euclidean with linkage ward"):
        Agglomerative("ward", "manhattan")


# ---- bipartition ---------------------------------------------------------------------------------


def test_pulls_that_cancel_out_divide_and_others_do_not() -> None:
    """0, 10, 180, 190: the mean is 0 < .4. 0, 10, 60, 70: all within 35 degrees of 35, so the mean
    is over .8.
    """
    assert Bipartition()(circle(0, 10, 180, 190), 0) == [0, 0, 1, 1]
    assert Bipartition()(circle(0, 10, 60, 70), 0) == [0, 0, 0, 0]


def test_the_bound_is_a_share_of_the_largest_update() -> None:
    """Updates (3, 0), (0, 3), (-3, 0): mean (0, 1), of length 1 = 1/3 of the largest."""
    rows = 3 * circle(0, 90, 180)
    assert not Bipartition(0.33).divides(rows)
    assert Bipartition(0.34).divides(rows)


def test_halves_are_divided_again_but_not_beyond_the_number_asked_for() -> None:
    """Four bundles at right angles: all cancel; so do no two of them: |mean| of 0 and 90 degrees is
    .71 < .9.
    """
    rows = circle(0, 2, 4, 90, 92, 94, 180, 182, 184, 270, 272, 274)
    assert Bipartition(0.9)(rows, 0) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(set(Bipartition(0.9)(rows, 3))) == 3
    assert len(set(Bipartition(0.9)(rows, 2))) == 2
    assert Bipartition(0.9)(rows, 1) == [0] * 12


def test_two_clients_are_not_divided() -> None:
    assert Bipartition()(circle(0, 180), 0) == [0, 0]
    assert Bipartition()(circle(0), 3) == [0]


@pytest.mark.parametrize("ratio", [0.0, 1.5])
def test_a_bad_ratio_gets_a_sentence(ratio: float) -> None:
    with pytest.raises(InputError, match=r"^ratio is .*; it must be in \(0, 1\]\.$"):
        Bipartition(ratio)


# ---- late joiners --------------------------------------------------------------------------------


def test_a_late_joiner_goes_where_its_angle_is_smallest() -> None:
    """To (3, 1): cosine with (10, 0) is .949, with (.1, .1) it is .894; Euclid would take the
    second.
    """
    centres = {4: torch.tensor([10.0, 0.0]), 7: torch.tensor([0.1, 0.1])}
    assert nearest(torch.tensor([3.0, 1.0]), centres) == 4
    assert nearest(torch.tensor([3.0, 2.0]), centres) == 7
    assert nearest(torch.zeros(2), centres) == 4  # of equal ones the first


@given(st.lists(st.integers(-3, 3), max_size=8))
def test_renumbering_keeps_the_groups(labels: list[int]) -> None:
    numbers = renumbered(labels)
    assert len(numbers) == len(labels)
    for i, j in itertools.product(range(len(labels)), repeat=2):
        assert (numbers[i] == numbers[j]) == (labels[i] == labels[j])
    assert list(dict.fromkeys(numbers)) == list(range(len(set(labels))))


# ---- sketches ------------------------------------------------------------------------------------


def test_a_sketch_keeps_inner_products_within_its_bound() -> None:
    """Errors of 60 random pairs, as shares of |x||y|, have a standard deviation of about
    1/sqrt(16384) = 1/128.
    """
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 60, 50_000, generator=g)
    short = [torch.stack([sketch(v) for v in rows]) for rows in (x, y)]
    assert short[0].shape == (60, SKETCH)
    error = ((short[0] * short[1]).sum(1) - (x * y).sum(1)) / (x.norm(dim=1) * y.norm(dim=1))
    assert float(error.abs().max()) < 4 / 128
    assert 0.5 / 128 < float(error.std()) < 1.5 / 128
    lengths = short[0].norm(dim=1) / x.norm(dim=1)
    assert float((lengths - 1).abs().max()) < 0.05


def test_sums_of_one_sign_cancel_out_in_a_sketch() -> None:
    """Ones in the first half against ones in the second: at right angles, but alike without the
    random signs.
    """
    halves = torch.arange(50_000) < 25_000
    x = sketch(halves.float())
    y = sketch((~halves).float())
    assert abs(float(x @ y) / 25_000) < 4 / 128
    assert float(x @ x) / 25_000 == pytest.approx(1, abs=0.05)


def test_a_sketch_is_linear_and_the_same_every_time() -> None:
    before = torch.get_rng_state()
    x = torch.arange(20_000.0)
    y = torch.ones(20_000)
    assert torch.equal(sketch(x), sketch(x))
    assert torch.allclose(sketch(x + 2 * y), sketch(x) + 2 * sketch(y), atol=1e-1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_short_vector_is_its_own_sketch() -> None:
    assert torch.equal(sketch(torch.arange(9.0)), torch.arange(9.0))


# ---- updates as they come ------------------------------------------------------------------------


def populations(size: int, clients: int) -> list[dict[str, torch.Tensor]]:
    """Even clients pull one way, odd ones another, each with noise of its own."""
    g = torch.Generator().manual_seed(5)
    ways = torch.randn(2, size, generator=g)
    rows = [ways[k % 2] + 0.3 * torch.randn(size, generator=g) for k in range(clients)]
    return [{"a": v[:7].half(), "b": v[7:].half()} for v in rows]


def test_updates_that_fit_are_held_whole() -> None:
    updates = Updates(4)
    for k, tree in enumerate(populations(50, 4)):
        updates.add(10 * k, tree)
    groups = updates.divide(Agglomerative(), 2)
    assert groups == {0: 0, 10: 1, 20: 0, 30: 1}
    assert list(updates.whole) == [0, 10, 20, 30]
    mean = (updates.whole[0] + updates.whole[20]) / 2
    assert torch.allclose(updates.centres(groups)[0], mean)


def test_beyond_what_is_held_clients_are_grouped_by_sketches() -> None:
    """Room for two and a half whole updates: two are held, all six are grouped."""
    size = 20_000
    updates = Updates(6, most_bytes=10 * size)
    for k, tree in enumerate(populations(size, 6)):
        updates.add(k, tree)
    assert list(updates.whole) == [0, 1]
    groups = updates.divide(Agglomerative(), 2)
    assert groups == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    centres = updates.centres(groups)
    assert torch.equal(centres[0], updates.whole[0])
    assert torch.equal(centres[1], updates.whole[1])


def test_a_group_of_which_nothing_is_held_has_no_centre() -> None:
    size = 20_000
    updates = Updates(4, most_bytes=4 * size)
    for k, tree in enumerate(populations(size, 4)):
        updates.add(k, tree)
    assert list(updates.centres(updates.divide(Agglomerative(), 2))) == [0]


def test_one_update_is_held_however_large_it_is() -> None:
    """Else nobody could ever be grouped, and no late joiner placed."""
    updates = Updates(3, most_bytes=0)
    for k, tree in enumerate(populations(50, 3)):
        updates.add(k, tree)
    assert list(updates.whole) == [0]
    assert updates.divide(Agglomerative(), 2) == {0: 0, 1: 1, 2: 0}


def test_the_order_in_which_updates_come_does_not_matter() -> None:
    results = []
    for order in (range(5), reversed(range(5))):
        updates = Updates(5)
        for k in order:
            updates.add(k, populations(50, 5)[k])
        groups = updates.divide(Agglomerative(), 2)
        results.append((groups, updates.centres(groups)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][g], results[1][1][g]) for g in results[0][1])


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_several_numbers_of_groups_are_as_one_call_for_each(linkage: str, count: int) -> None:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
    rule = Agglomerative(linkage)
    numbers = [1, 2, 3, 20]
    assert rule.several(rows, numbers) == [rule(rows, number) for number in numbers]
