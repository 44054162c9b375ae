"""Tasks found from updates: distances, clusters, noise, merging, numbers that last."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.fedapta.task_groups import (
    DISTANCES,
    NOISE,
    Hdbscan,
    adjusted,
    by_outputs,
    distances,
    hdbscan,
    matched,
    merged,
    refined,
    settled,
    together,
)
from fedgrove.runs.summary import purity


def directions(tasks: list[int], noise: float = 0.1, seed: int = 0, size: int = 40) -> torch.Tensor:
    """A row for each device: its task's axis, and noise."""
    g = torch.Generator().manual_seed(seed)
    rows = noise * torch.randn(len(tasks), size, generator=g)
    for row, task in enumerate(tasks):
        rows[row, task] += 1
    return rows


def everywhere(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(rows, dtype=torch.bool)


THREE = [0] * 5 + [1] * 5 + [2] * 5


# ---- distances -----------------------------------------------------------------------------------


def test_distances_by_hand() -> None:
    """(3, 4) and (4, 3): cosine 24/25; differences 1 and 1; inner products 25, 24, 25."""
    rows = torch.tensor([[3.0, 4.0], [4.0, 3.0]])
    expected = {"cosine": 1 / 25, "l1": 2.0, "l2": 2**0.5, "inner": 1 / 25}
    for name, value in expected.items():
        apart = distances(rows, everywhere(rows), name)
        assert apart[0, 1].item() == pytest.approx(value)
        assert torch.equal(apart, apart.T)
        assert torch.equal(apart.diagonal(), torch.zeros(2, dtype=torch.float64))


def test_a_cosine_over_what_both_have() -> None:
    """(1, 1, 0) and (1, 0, 1), which lack the last and the middle entry: both have the first alone,
    where they are equal."""
    rows = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    present = torch.tensor([[True, True, False], [True, False, True]])
    assert distances(rows, present)[0, 1].item() == pytest.approx(0.0)
    assert distances(rows, everywhere(rows))[0, 1].item() == pytest.approx(0.5)


def test_a_cosine_divides_by_the_lengths_of_both() -> None:
    """(3, 4) and (8, 6), whose third entry the first lacks: 48 of 5 * 10."""
    rows = torch.tensor([[3.0, 4.0, 0.0], [8.0, 6.0, 15.0]])
    present = torch.tensor([[True, True, False], [True, True, True]])
    assert distances(rows, present)[0, 1].item() == pytest.approx(1 - 48 / 50)


def test_devices_without_a_weight_in_common_are_at_distance_1() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    present = torch.tensor([[True, False], [False, True], [True, True]])
    apart = distances(rows, present)
    assert apart[0, 1].item() == apart[0, 2].item() == 1.0


# ---- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
def test_three_tasks_are_found(distance: str) -> None:
    rows = directions(THREE)
    assert Hdbscan(distance=distance)(rows, everywhere(rows)) == THREE


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(15)))
def test_groups_do_not_depend_on_order(order: list[int]) -> None:
    rows = directions(THREE)[order]
    labels = Hdbscan()(rows, everywhere(rows))
    truth = [THREE[i] for i in order]
    pairs = {(label, task) for label, task in zip(labels, truth, strict=True)}
    assert len(pairs) == 3
    # Numbered by first appearance.
    assert list(dict.fromkeys(labels)) == [0, 1, 2]


def test_ratios_do_not_make_groups() -> None:
    """Devices of every task lack half of the weights, by turns: over all weights those that lack the
    same look alike."""
    g = torch.Generator().manual_seed(1)
    tasks = [0, 1, 2] * 6
    axes = torch.randn(3, 60, generator=g)
    rows = axes[tasks] + 0.5 * torch.randn(18, 60, generator=g)
    present = torch.ones(18, 60, dtype=torch.bool)
    present[9:, 12:] = False
    rows = torch.where(present, rows, 0.0)
    labels = Hdbscan()(rows, present)
    found = purity(dict(enumerate(labels)), {k: str(task) for k, task in enumerate(tasks)})
    assert (found, len(set(labels))) == (1.0, 3)


@pytest.mark.parametrize("devices", [1, 2])
def test_too_few_devices_are_all_noise(devices: int) -> None:
    """Also two in the literal rule: HDBSCAN never finds one cluster alone."""
    rows = directions([0] * devices)
    assert Hdbscan()(rows, everywhere(rows)) == [NOISE] * devices
    assert Hdbscan(min_size=2)(rows, everywhere(rows)) == [NOISE] * devices
    assert hdbscan(distances(rows, everywhere(rows)), 2) == [NOISE] * devices


def test_equal_devices_and_devices_that_did_not_move() -> None:
    for rows in (torch.ones(6, 4), torch.zeros(6, 4)):
        labels = Hdbscan()(rows, everywhere(rows))
        assert len(labels) == 6
        assert len(set(labels)) == 1


def test_one_task_is_not_divided() -> None:
    """No cluster at all, or several that agree and become one."""
    for seed in range(5):
        rows = directions([0] * 12, noise=0.15, seed=seed)
        assert len(set(Hdbscan()(rows, everywhere(rows)))) == 1


def test_unrelated_devices_make_no_crash() -> None:
    rows = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    labels = Hdbscan()(rows, everywhere(rows))
    assert NOISE not in labels or set(labels) == {NOISE}


def test_noise_joins_its_nearest_neighbours_cluster() -> None:
    """Device 3 is noise, 2 from device 1 of cluster 5 and 3 from device 2."""
    apart = torch.tensor([[0.0, 1, 9, 4], [1, 0, 9, 2], [9, 9, 0, 3], [4, 2, 3, 0]])
    assert settled([5, 5, 2, NOISE], apart) == [0, 0, 1, 0]
    assert settled([NOISE] * 4, apart) == [NOISE] * 4


def test_groups_that_were_apart_stay_apart_unless_they_agree() -> None:
    """HDBSCAN, which never finds one cluster alone, is given two tasks that lie near each other and
    a far one: what it joins is divided again by the groups so far."""
    apart = [0] * 5 + [1] * 5 + [2] * 5
    rows = directions(apart, noise=0.02)
    rows[:10, 3] += 0.5
    rows[10:, 4] += 3
    labels = Hdbscan(merge=0.9)(rows, everywhere(rows), before=apart)
    assert labels == apart
    # One task in two groups: they agree as much as each within, and are one.
    rows = directions([0] * 6 + [1] * 6, noise=0.02)
    before = [0, 0, 0, 1, 1, 1] + [2] * 6
    assert Hdbscan()(rows, everywhere(rows), before=before) == [0] * 6 + [1] * 6


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_what_hdbscan_joins_is_divided_by_the_groups_before(seed: int) -> None:
    """Two tasks with something in common and a third far away: HDBSCAN sees two clusters."""
    rows = directions(THREE, noise=0.2, seed=seed)
    rows[:10, 3] += 0.7
    rows[10:, 4] += 3
    rule = Hdbscan(merge=0.9, adjust=False)
    assert rule(rows, everywhere(rows)) == [0] * 10 + [1] * 5
    assert rule(rows, everywhere(rows), before=THREE) == THREE


@pytest.mark.parametrize("seed", [12, 17, 29])
def test_devices_that_hdbscan_misplaces_are_moved(seed: int) -> None:
    """With much noise the nearest neighbour of a device may be of the other task; its sum is not."""
    rows = directions([0] * 6 + [1] * 6, noise=0.25, seed=seed)
    without = Hdbscan(adjust=False)(rows, everywhere(rows))
    assert len(set(without)) == 2
    assert without != [0] * 6 + [1] * 6
    assert Hdbscan()(rows, everywhere(rows)) == [0] * 6 + [1] * 6


def test_refined_by_hand() -> None:
    """Cluster 0 is of groups 4 and 8; cluster 1 has one of each, which are too few."""
    assert refined([0, 0, 0, 0, 0, 1, 1], [4, 4, 8, 8, 4, 8, 4], 2) == [0, 0, 1, 1, 0, -1, -1]
    assert refined([NOISE, 0, 0], [4, 4, 4], 2) == [NOISE, 0, 0]


def test_clusters_that_disagree_within_are_not_merged() -> None:
    """-.5 across, which is more than 1 times the -.1 within, and any share of 0."""
    across = torch.full((2, 2), -0.5)
    for within in (-0.1, 0.0):
        pair = torch.tensor([[1.0, within], [within, 1.0]])
        similarity = torch.cat([torch.cat([pair, across], 1), torch.cat([across, pair], 1)])
        assert merged([0, 0, 1, 1], similarity, 0.6) == [0, 0, 1, 1]


def test_merging_by_hand() -> None:
    """Pairs of similarity .5 within, .4 between the first two, .1 to the third: .4/.5 = .8."""
    similarity = torch.full((6, 6), 0.1)
    for a in (0, 2, 4):
        similarity[a : a + 2, a : a + 2] = 0.5
    similarity[0:2, 2:4] = similarity[2:4, 0:2] = 0.4
    similarity.fill_diagonal_(1.0)
    labels = [0, 0, 1, 1, 2, 2]
    assert merged(labels, similarity, 0.8 - 1e-6) == [0, 0, 0, 0, 1, 1]
    assert merged(labels, similarity, 0.9) == labels
    # Then .1 over min((2 · .5 + 4 · .4) / 6, .5) = .1 / .43.
    assert merged(labels, similarity, 0.23) == [0] * 6


@pytest.mark.parametrize(
    "bad",
    [
        {"distance": "l3"},
        {"min_size": 1},
        {"fade": 1.5},
        {"settle": 2.0},
        {"forget": 0.0},
        {"merge": -1.0},
    ],
)
def test_bad_fields_are_refused(bad: dict) -> None:
    with pytest.raises(InputError):
        Hdbscan(**bad)


def test_adjusting_by_hand() -> None:
    """Row 2 points east as 0 and 1 do, and is in the northern cluster: it moves."""
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.2], [0.0, 1.0], [0.1, 1.0]])
    assert adjusted([0, 0, 1, 1, 1], rows, everywhere(rows)) == [0, 0, 0, 1, 1]
    assert adjusted([0, 0, 0, 1, 1], rows, everywhere(rows)) == [0, 0, 0, 1, 1]
    assert adjusted([NOISE] * 5, rows, everywhere(rows)) == [NOISE] * 5


# ---- groups that last ----------------------------------------------------------------------------


def test_numbers_last_by_hand() -> None:
    """Cluster 0 shares two devices with group 7; cluster 1 one with 7 and one with 9: 0 takes 7."""
    labels = {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert matched(labels, {1: 7, 2: 7, 3: 7, 4: 9}, fresh=10) == {0: 7, 1: 9}
    assert matched(labels, {}, fresh=0) == {0: 0, 1: 1}
    assert matched(labels, {1: 7, 2: 7}, fresh=8) == {0: 7, 1: 8}
    # Cluster 0 has three devices of groups 7 and 9, cluster 1 a newcomer: it is not group 9.
    assert matched({1: 0, 2: 0, 3: 0, 4: 1}, {1: 7, 2: 7, 3: 9}, fresh=10) == {0: 7, 1: 10}


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 4), min_size=1),
    st.dictionaries(st.integers(0, 30), st.integers(5, 9)),
)
def test_numbers_are_one_to_one(labels: dict[int, int], groups: dict[int, int]) -> None:
    numbers = matched(labels, groups, fresh=100)
    assert numbers.keys() == set(labels.values())
    assert len(set(numbers.values())) == len(numbers)


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 4), min_size=1))
def test_groups_that_stay_keep_their_numbers(groups: dict[int, int]) -> None:
    """However clusters are numbered."""
    labels = {device: 7 - group for device, group in groups.items()}
    numbers = matched(labels, groups, fresh=100)
    assert {device: numbers[label] for device, label in labels.items()} == groups


def test_who_votes_where_settled_devices_go() -> None:
    """Only settled devices of the group: one against two that are not. Of two that vote differently
    the smaller cluster counts, and the others stay where they are."""
    assert together([0, 1, 1], [4, 4, 4], [True, False, False]) == [0, 1, 1]
    assert together([0, 1, 1, 0], [4, 4, 8, 8], [True, True, False, False]) == [0, 0, 1, 0]


def test_settled_devices_stay_together_by_hand() -> None:
    """Of group 4 two settled devices are in cluster 0 and one in 1: it goes with them. Device 4 is
    not settled, and leaves group 8 alone."""
    is_settled = [True, True, True, True, False, True]
    before = [4, 4, 4, 8, 8, 8]
    assert together([0, 0, 1, 1, 0, 1], before, is_settled) == [0, 0, 0, 1, 0, 1]
    # All of group 4 agree with group 8: they join it.
    assert together([1, 1, 1, 1, 0, 1], before, is_settled) == [0, 0, 0, 0, 1, 0]
    # Of equally many, the cluster of the smaller number.
    assert together([2, 0, 1], [4, 4, 8], [True, True, True]) == [0, 0, 1]
    assert together([0, 1, 1], [4, 4, 8], [False] * 3) == [0, 1, 1]


# ---- devices that train different outputs --------------------------------------------------------


def test_devices_that_train_different_outputs_are_of_different_tasks() -> None:
    """Two outputs with two weights each; the last three devices train the first output only.

    By the cosine device 2 is nearer to them than to devices 0 and 1: it moves the first output as
    they do.
    """
    rows = torch.tensor(
        [
            [0.1, 0.0, 1.0, 0.0],
            [0.2, 0.1, 1.0, 0.1],
            [1.0, 0.0, 0.2, 0.3],
            [1.0, 0.0, 0.0, 0.0],
            [1.0, 0.1, 0.0, 0.0],
            [0.9, 0.0, 0.0, 0.0],
        ]
    )
    both = torch.tensor([True, True])
    first = torch.tensor([True, False])
    outputs = [both, both, both, first, first, first]
    before = [0] * 6
    labels = by_outputs(Hdbscan(), rows, everywhere(rows), before, outputs)
    assert labels == [0, 0, 0, 1, 1, 1]
    alike = by_outputs(Hdbscan(), rows, everywhere(rows), before, [both] * 6)
    assert alike == Hdbscan()(rows, everywhere(rows), before)
    assert alike != labels
    ignored = by_outputs(Hdbscan(outputs=False), rows, everywhere(rows), before, outputs)
    assert ignored == alike


def test_too_few_that_train_the_same_outputs_stay_in_their_groups() -> None:
    """Two devices cannot be a cluster of three: one stays, the newcomer joins the nearest."""
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.0], [1.0, 0.1], [0.9, 0.0]])
    one, other = torch.tensor([True]), torch.tensor([False])
    outputs = [one, one, other, other, other]
    labels = by_outputs(Hdbscan(), rows, everywhere(rows), [4, NOISE, 4, 4, 4], outputs)
    assert labels == [0, 0, 1, 1, 1]
