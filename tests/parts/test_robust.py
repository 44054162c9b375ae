"""Averages that survive liars: worked by hand, and up to where each breaks down."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import trees
from fedgrove.errors import InputError
from fedgrove.parts.aggregate import Averaging, WeightedMean
from fedgrove.parts.robust import (
    ClippedMean,
    GeometricMedian,
    Median,
    MultiKrum,
    Sent,
    TrimmedMean,
    distance,
    median,
    squared_distances,
)
from fedgrove.trees import Mask, Tree

ROBUST: list[Averaging] = [
    Median(),
    TrimmedMean(0.3),
    ClippedMean(),
    MultiKrum(0.3),
    GeometricMedian(),
]
EVERY: list[Averaging] = [WeightedMean(), *ROBUST]
Client = tuple[list[float], float, list[int] | None]
"""Values, weight, and which coordinates it has."""


def name(rule: Averaging) -> str:
    return type(rule).__name__


def flags(bits: list[int] | None) -> Mask | None:
    return None if bits is None else {"w": torch.tensor(bits).bool()}


def average(rule: Averaging, previous: list[float] | None, *clients: Client) -> list[float]:
    """The average of the leaf w."""
    start = None if previous is None else {"w": torch.tensor(previous)}
    under_way = rule.start(start)
    for values, weight, mask in clients:
        under_way.add({"w": torch.tensor(values)}, weight, flags(mask))
    found: list[float] = under_way.value()["w"].tolist()
    return found


def alike(*values: float) -> list[Client]:
    return [([float(value)], 1, None) for value in values]


# ---- by hand -------------------------------------------------------------------------------------


def test_median_by_hand() -> None:
    assert average(Median(), None, *alike(1, 5, 2)) == [2]
    # Of four, the mean of the two in the middle: (2 + 4)/2 = 3.
    assert average(Median(), None, *alike(4, 9, 1, 2)) == [3]
    # Weights are not looked at: weighted it would be 5.
    assert average(Median(), None, ([1.0], 1, None), ([5.0], 100, None), ([2.0], 1, None)) == [2]


def test_median_with_masks_by_hand() -> None:
    # w0: of 1, 2, 6 -> 2; w1: of 3, 5 -> 4; w2: the first alone, 7; w3: nobody, 9 as before.
    found = average(
        Median(),
        [9.0, 9.0, 9.0, 9.0],
        ([1.0, 3.0, 7.0, 0.0], 1, [1, 1, 1, 0]),
        ([2.0, 0.0, 0.0, 0.0], 1, [1, 0, 0, 0]),
        ([6.0, 5.0, 0.0, 0.0], 1, [1, 1, 0, 0]),
    )
    assert found == [2, 4, 7, 9]


def test_the_weighted_median_by_hand() -> None:
    # In order 1, 3, 4 with weights 1, 2, 1: half of 4 is 2, which lies within the 3.
    values = torch.tensor([4.0, 1.0, 3.0])
    assert median(values, torch.tensor([1.0, 1.0, 2.0])).item() == 3
    # Weights 1, 2, 3: half of 6 is 3, exactly between 3 and 4.
    assert median(values, torch.tensor([3.0, 1.0, 2.0])).item() == 3.5
    # A weight of 0 takes no part: between 1 and 4.
    assert median(values, torch.tensor([1.0, 1.0, 0.0])).item() == 2.5


def test_trimmed_mean_by_hand() -> None:
    # A fifth of five is one on each side: (2 + 3 + 7)/3 = 4. Weights are not looked at.
    clients = [([2.0], 50, None), *alike(100, 3, 7, -50)]
    assert average(TrimmedMean(0.2), None, *clients) == [4]
    # A quarter of five is 1.25: one on each side again. Of three it is 0.75: nobody.
    assert average(TrimmedMean(0.25), None, *clients) == [4]
    assert average(TrimmedMean(0.25), None, *alike(1, 2, 6)) == [3]
    # 0.29 of 100 is 28.999999999999996 to a computer and 29 to people: 29..70 are left of 0..99.
    values = [float(k * k) for k in range(100)]
    expected = sum(values[29:71]) / 42
    assert average(TrimmedMean(0.29), None, *alike(*values)) == pytest.approx([expected], rel=1e-6)


def test_trimmed_mean_with_masks_by_hand() -> None:
    # A third. w0: of -9, 1, 4 without both ends -> 1; w1: of 2, 4, two clients, none cut -> 3;
    # w2: nobody.
    found = average(
        TrimmedMean(1 / 3),
        [8.0, 8.0, 8.0],
        ([1.0, 2.0, 0.0], 1, [1, 1, 0]),
        ([4.0, 4.0, 0.0], 1, [1, 1, 0]),
        ([-9.0, 5.0, 0.0], 1, [1, 0, 0]),
    )
    assert found == [1, 3, 8]


def test_clipped_mean_by_hand() -> None:
    # From (1, 1) the updates are (3, 4), (0, 1), (0, 30) of lengths 5, 1, 30; their median is 5, so
    # the last becomes (0, 5). Weights 1, 1, 2: (3, 4 + 1 + 10)/4 = (0.75, 3.75).
    clients: list[Client] = [
        ([4.0, 5.0], 1, None),
        ([1.0, 2.0], 1, None),
        ([1.0, 31.0], 2, None),
    ]
    assert average(ClippedMean(), [1.0, 1.0], *clients) == pytest.approx([1.75, 4.75])
    # To 2.5: (1.5, 2), (0, 1), (0, 2.5) make (1.5, 2 + 1 + 5)/4 = (0.375, 2).
    assert average(ClippedMean(2.5), [1.0, 1.0], *clients) == pytest.approx([1.375, 3.0])
    # With room for all, it is the weighted mean.
    assert average(ClippedMean(1e9), [1.0, 1.0], *clients) == average(
        WeightedMean(), [1.0, 1.0], *clients
    )
    # Without a previous model, updates are clipped as they are: 2, and 8 to 4.
    assert average(ClippedMean(4.0), None, *alike(2, 8)) == [3]
    # Most sent back what they got: the median length is 0, and nobody moves it.
    assert average(ClippedMean(), [1.0], *alike(1, 1, 7)) == [1]


def test_clipped_mean_with_masks_by_hand() -> None:
    # The first has one coordinate of four, 6: scaled to the whole model sqrt(36 * 4/1) = 12, twice
    # the bound, so it sends 3. The second is sqrt(4 * 4) = 4 long and stays. w0: (3 + 2)/2.
    found = average(
        ClippedMean(6.0),
        [0.0, 0.0, 0.0, 0.0],
        ([6.0, 0.0, 0.0, 0.0], 1, [1, 0, 0, 0]),
        ([2.0, 2.0, 2.0, 9.0], 1, [1, 1, 1, 0]),
    )
    # The second has three: sqrt((4 + 4 + 4) * 4/3) = 4. w3: nobody.
    assert found == pytest.approx([2.5, 2.0, 2.0, 0.0])


def test_multi_krum_by_hand() -> None:
    # n = 5, f = 1: the nearest 5 - 1 - 2 = 2 others. Scores of 0, 1, 3, 4, 100: 1 + 9 = 10,
    # 1 + 4 = 5, 1 + 4 = 5, 1 + 9 = 10, 96^2 + 97^2. Four are kept: (0 + 1 + 3 + 4)/4.
    clients = alike(0, 1, 3, 4, 100)
    assert average(MultiKrum(0.2), None, *clients) == [2]
    # Krum keeps one; 1 and 3 are equally good, and both count.
    assert average(MultiKrum(0.2, keep=1), None, *clients) == [2]
    # 0, 1, 2.5, 4, 100: 1 + 6.25 = 7.25, 1 + 2.25 = 3.25, 2.25 + 2.25 = 4.5, 2.25 + 9 = 11.25.
    clients = alike(0, 1, 2.5, 4, 100)
    assert average(MultiKrum(0.2, keep=1), None, *clients) == [1]
    assert average(MultiKrum(0.2, keep=2), None, *clients) == [1.75]
    # No more than n - f, and weights are not looked at.
    heavy: list[Client] = [([0.0], 50, None), *alike(1, 3, 4), ([100.0], 1000, None)]
    assert average(MultiKrum(0.2, keep=9), None, *heavy) == [2]


def test_multi_krum_in_small_groups_by_hand() -> None:
    # n = 3, f = 1: n - f - 2 = 0 others would say nothing of anybody; f = 1 does. Scores of
    # 1, 3, 50: 4, 4, 47^2.
    assert average(MultiKrum(0.4), None, *alike(1, 3, 50)) == [2]
    # n = 5, f = 2: two liars side by side at 50 are 0 apart, but their second neighbour is far.
    assert average(MultiKrum(0.4), None, *alike(1, 2, 3, 50, 50)) == [2]
    # Of two, neither can be told to lie; nor below 1 / liars clients.
    assert average(MultiKrum(0.4, keep=1), None, *alike(1, 50)) == [25.5]
    assert average(MultiKrum(0.2), None, *alike(1, 2, 3, 50)) == [14]


def test_distances_with_masks_by_hand() -> None:
    # Four coordinates. a, b have w0 in common: (1 - 3)^2 * 4/1 = 16. a, c have w0, w1:
    # (0 + 1) * 4/2 = 2. b, c have w0, w2, w3: (4 + 1 + 4) * 4/3 = 12. d, a: nothing; d, b: w3:
    # 4 * 4 = 16; d, c: w3: 16 * 4 = 64.
    sent = []
    for values, mask in (
        ([1.0, 1.0, 5.0, 5.0], [1, 1, 0, 0]),
        ([3.0, 5.0, 2.0, 2.0], [1, 0, 1, 1]),
        ([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1]),
        ([7.0, 7.0, 7.0, 0.0], [0, 0, 0, 1]),
    ):
        sent.append(Sent({"w": torch.tensor(values)}, 1, flags(mask)))
    previous = {"w": torch.zeros(4)}
    inf = math.inf
    assert squared_distances(previous, sent).tolist() == [
        [inf, 16, 2, inf],
        [16, inf, 12, 16],
        [2, 12, inf, 64],
        [inf, 16, 64, inf],
    ]
    # From 0, a: (1 + 1) * 4/2 = 4. A client that has nothing is nowhere far.
    assert distance(sent[0], previous) == 2
    assert distance(Sent({}, 1, None), previous) == 0


def test_multi_krum_with_masks_by_hand() -> None:
    # Three clients, one liar, one neighbour each. All have w0: 1, 2 and 90; their distances are the
    # same with and without the rest, which only one of them has each: w1 the honest second, w2 the
    # liar, whose 90 does not count. w3: nobody.
    found = average(
        MultiKrum(0.4),
        [5.0, 5.0, 5.0, 5.0],
        ([1.0, 0.0, 0.0, 0.0], 1, [1, 0, 0, 0]),
        ([2.0, 7.0, 0.0, 0.0], 1, [1, 1, 0, 0]),
        ([90.0, 0.0, 90.0, 0.0], 1, [1, 0, 1, 0]),
    )
    assert found == [1.5, 7, 5, 5]


def test_geometric_median_by_hand() -> None:
    # On a line it is the weighted median: weights 5, 2, 2 at 0, 1, 10. More than half is at 0.
    clients: list[Client] = [([0.0], 5, None), ([1.0], 2, None), ([10.0], 2, None)]
    assert average(GeometricMedian(), None, *clients) == pytest.approx([0], abs=1e-3)
    # It begins at the weighted median, and weight 3 of 5 at 0 leaves it there.
    clients = [([0.0], 3, None), *alike(1, 10)]
    assert average(GeometricMedian(iterations=1), None, *clients) == [0]
    # Fermat's point of (0, 0), (1, 0), (0, 1): x = y = (3 - sqrt 3)/6, where the sides are seen
    # under 120 degrees.
    corners: list[Client] = [([0.0, 0.0], 1, None), ([1.0, 0.0], 1, None), ([0.0, 1.0], 1, None)]
    fermat = (3 - math.sqrt(3)) / 6
    found = average(GeometricMedian(), None, *corners)
    assert found == pytest.approx([fermat, fermat], abs=1e-4)
    # A thousand times as large, it is so many times as far.
    large: list[Client] = [([1000 * x for x in values], 1, None) for values, _, _ in corners]
    assert average(GeometricMedian(), None, *large) == pytest.approx(
        [1000 * fermat, 1000 * fermat], abs=0.1
    )
    # (0, 0) with weight 3 outweighs the pull of both others, sqrt 2.
    corners[0] = ([0.0, 0.0], 3, None)
    assert average(GeometricMedian(), None, *corners) == pytest.approx([0, 0], abs=1e-3)


def test_one_step_of_the_geometric_median_by_hand() -> None:
    # (0, 0), (2, 0), (0, 2), (2, 6): the medians are (1, 1). Distances sqrt 2 for three, sqrt 26
    # for the last; b = sqrt(2/26) of the others' weight: ((2 + 2b)/(3 + b), (2 + 6b)/(3 + b)).
    b = math.sqrt(2 / 26)
    found = average(
        GeometricMedian(iterations=1),
        None,
        *[(values, 1, None) for values in ([0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 6.0])],
    )
    assert found == pytest.approx([(2 + 2 * b) / (3 + b), (2 + 6 * b) / (3 + b)])


def test_geometric_median_with_masks_by_hand() -> None:
    # One step. w0: 0, 2, 4 -> 2; w1: the last two, 1, 3 -> 2; w2: nobody. From (2, 2) the first is
    # sqrt(4 * 3/1) = sqrt 12 away over w0, the second sqrt(1 * 3/2) and the third
    # sqrt((4 + 1) * 3/2): weights a, b, c one over these.
    a, b, c = 1 / math.sqrt(12), 1 / math.sqrt(1.5), 1 / math.sqrt(7.5)
    found = average(
        GeometricMedian(iterations=1),
        [8.0, 8.0, 8.0],
        ([0.0, 0.0, 0.0], 1, [1, 0, 0]),
        ([2.0, 1.0, 0.0], 1, [1, 1, 0]),
        ([4.0, 3.0, 0.0], 1, [1, 1, 0]),
    )
    expected = [(2 * b + 4 * c) / (a + b + c), (b + 3 * c) / (b + c), 8]
    assert found == pytest.approx(expected)


# ---- liars ---------------------------------------------------------------------------------------

HONEST = st.floats(-1, 1, width=32)
LIES = st.floats(-1e30, 1e30).map(lambda x: float(torch.tensor(x)))


@st.composite
def cohorts(draw: Any, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Honest clients and liars, of whom there are at most ``most`` of all and fewer than half."""
    n = draw(st.integers(3, 11))
    liars = draw(st.integers(0, min(math.floor(most * n + 1e-9), (n - 1) // 2)))
    d = draw(st.integers(1, 4))
    honest = draw(
        st.lists(st.lists(HONEST, min_size=d, max_size=d), min_size=n - liars, max_size=n - liars)
    )
    lies = draw(st.lists(st.lists(LIES, min_size=d, max_size=d), min_size=liars, max_size=liars))
    return torch.tensor(honest).view(-1, d), torch.tensor(lies).view(-1, d)


def together(
    rule: Averaging,
    honest: torch.Tensor,
    lies: torch.Tensor,
    previous: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The average of both; ``mask`` is the liars'."""
    under_way = rule.start(None if previous is None else {"w": previous})
    for values in honest:
        under_way.add({"w": values}, 1)
    for values in lies:
        under_way.add({"w": values}, 1, None if mask is None else {"w": mask})
    return under_way.value()["w"]


def spread(honest: torch.Tensor) -> float:
    """How far honest clients are from each other at most."""
    return float(torch.cdist(honest.double(), honest.double()).max())


@given(cohorts(0.5))
def test_a_median_stays_between_the_honest(cohort: tuple[torch.Tensor, torch.Tensor]) -> None:
    honest, lies = cohort
    found = together(Median(), honest, lies)
    assert bool((honest.amin(0) <= found).all() and (found <= honest.amax(0)).all())


@given(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.4, 0.49]), st.data())
def test_a_trimmed_mean_stays_between_the_honest(share: float, data: st.DataObject) -> None:
    honest, lies = data.draw(cohorts(share))
    found = together(TrimmedMean(share), honest, lies)
    assert bool((honest.amin(0) - 1e-6 <= found).all() and (found <= honest.amax(0) + 1e-6).all())


@given(cohorts(0.49), st.data())
def test_liars_without_some_parameters_do_no_better(cohort: Any, data: st.DataObject) -> None:
    honest, lies = cohort
    d = honest.shape[1]
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=d, max_size=d)))
    lowest, highest = honest.amin(0) - 1e-6, honest.amax(0) + 1e-6
    for rule in (Median(), TrimmedMean(0.49)):
        found = together(rule, honest, lies, torch.zeros(d), mask)
        assert bool((lowest <= found).all() and (found <= highest).all())


@given(cohorts(0.5), st.lists(HONEST, min_size=4, max_size=4))
def test_a_clipped_mean_goes_no_further_than_the_honest(cohort: Any, start: list[float]) -> None:
    honest, lies = cohort
    previous = torch.tensor(start[: honest.shape[1]])
    found = together(ClippedMean(), honest, lies, previous)
    longest = float((honest - previous).double().norm(dim=1).max())
    assert float((found - previous).double().norm()) <= longest * (1 + 1e-5) + 1e-6


@given(st.floats(0.01, 10), cohorts(1.0))
def test_a_fixed_bound_is_the_longest_step(bound: float, cohort: Any) -> None:
    honest, lies = cohort
    found = together(ClippedMean(bound), honest, lies)
    assert float(found.double().norm()) <= bound * (1 + 1e-5)


@given(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.49]), st.sampled_from([None, 1, 2]), st.data())
def test_multi_krum_stays_near_the_honest(
    share: float, keep: int | None, data: st.DataObject
) -> None:
    honest, lies = data.draw(cohorts(share))
    found = together(MultiKrum(share, keep), honest, lies)
    n = len(honest) + len(lies)
    f = math.floor(share * n + 1e-9)
    # Whoever is kept is at most sqrt(n - f) times the spread from an honest client.
    reach = spread(honest) * (1 + math.sqrt(n - f))
    furthest = float((found - honest).double().norm(dim=1).max())
    assert furthest <= reach * (1 + 1e-5) + 1e-5


@given(cohorts(0.4))
@settings(deadline=None)
def test_a_geometric_median_stays_near_the_honest(cohort: Any) -> None:
    honest, lies = cohort
    found = together(GeometricMedian(), honest, lies)
    middle = honest.mean(0)
    radius = float((honest - middle).double().norm(dim=1).max())
    share = len(lies) / (len(honest) + len(lies))
    # Let m be the middle, v the median, R the radius, h honest clients and l liars. The sum of
    # distances is least at v, so h (|v - m| - R) <= h R + l |v - m|: |v - m| <= 2h/(h - l) R.
    reach = 2 * (1 - share) / (1 - 2 * share) * radius
    assert float((found - middle).double().norm()) <= reach * (1 + 1e-3) + 1e-5


def test_liars_with_little_weight_do_not_move_the_geometric_median() -> None:
    # Three of five clients, side by side, but 3 of 23 examples.
    clients: list[Client] = [([1.0, 0.0], 10, None), ([0.0, 1.0], 10, None)]
    clients += [([1e30, 1e30], 1, None)] * 3
    found = average(GeometricMedian(), None, *clients)
    assert math.hypot(found[0] - 0.5, found[1] - 0.5) < 2


@pytest.mark.parametrize("rule", ROBUST, ids=name)
def test_one_liar_moves_the_weighted_mean_anywhere_and_these_nowhere(rule: Averaging) -> None:
    honest = torch.tensor([[0.1, 0.2], [0.3, -0.1], [0.0, 0.1], [0.2, 0.0]])
    lies = torch.tensor([[1e30, -1e30]])
    assert float(together(WeightedMean(), honest, lies).abs().min()) > 1e29
    assert float(together(rule, honest, lies).abs().max()) < 1


# ---- what holds for every rule -------------------------------------------------------------------

VALUES = st.lists(st.lists(HONEST, min_size=3, max_size=3), min_size=1, max_size=7)


@pytest.mark.parametrize("rule", EVERY, ids=name)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=4), st.integers(1, 5)
)
@settings(deadline=None)
def test_one_client_and_equal_clients_are_that_client_to_the_bit(
    rule: Averaging, values: list[float], n: int
) -> None:
    tree = {"w": torch.tensor(values), "n": torch.tensor(3), "bn.running_var": torch.ones(2)}
    under_way = rule.start(trees.map(torch.zeros_like, tree))
    for k in range(n):
        under_way.add(tree, k + 1)
    assert trees.equal(under_way.value(), tree)


@pytest.mark.parametrize("rule", EVERY, ids=name)
@given(VALUES, st.randoms(use_true_random=False), st.data())
@settings(deadline=None, max_examples=50)
def test_the_order_of_clients_does_not_matter(
    rule: Averaging, values: list[list[float]], random: Any, data: st.DataObject
) -> None:
    masks = st.one_of(st.none(), st.lists(st.integers(0, 1), min_size=3, max_size=3))
    clients: list[Client] = [(v, k % 3 + 1, data.draw(masks)) for k, v in enumerate(values)]
    other = list(clients)
    random.shuffle(other)
    previous = [0.5, 0.5, 0.5]
    one = average(rule, previous, *clients)
    assert average(rule, previous, *other) == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_what_nobody_has_stays_and_what_a_mask_hides_does_not_matter(rule: Averaging) -> None:
    clients: list[Client] = []
    hidden: list[Client] = []
    for k in range(5):
        clients.append(([float(k), 0.0, 0.0], 1, [1, 0, k % 2]))
        hidden.append(([float(k), math.nan, 0.0 if k % 2 else -math.inf], 1, [1, 0, k % 2]))
    found = average(rule, [7.0, 1 / 3, 7.0], *clients)
    assert found[1] == torch.tensor(1 / 3).item()
    assert average(rule, [7.0, 1 / 3, 7.0], *hidden) == found


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_tensors_that_are_left_out(rule: Averaging) -> None:
    """A client that leaves a tensor out does not have it; one that all leave out stays."""
    previous = {"a": torch.tensor([9.0]), "b": torch.tensor([9.0]), "c": torch.tensor([9.0])}
    under_way = rule.start(previous)
    under_way.add({"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}, 1)
    under_way.add({"a": torch.tensor([1.0])}, 1)
    found = under_way.value()
    assert {k: v.item() for k, v in found.items()} == pytest.approx({"a": 1, "b": 1, "c": 9})
    assert list(found) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"the previous model lacks: \['x'\]"):
        under_way.add({"x": torch.ones(1)}, 1)


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_nobody_and_clients_without_weight(rule: Averaging) -> None:
    previous = {"w": torch.tensor([1 / 3])}
    assert trees.identical(rule.start(previous).value(), previous)
    under_way = rule.start(previous)
    under_way.add({"w": torch.tensor([5.0])}, 0)
    assert trees.identical(under_way.value(), previous)
    with pytest.raises(ValueError, match="weight is -1; it must be 0 or more"):
        under_way.add({"w": torch.tensor([5.0])}, -1)
    with pytest.raises(ValueError, match="the average of no trees"):
        rule.start().value()


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_types_stay_and_inputs_are_left_alone(rule: Averaging) -> None:
    sent: list[Tree] = []
    for k in range(4):
        sent.append(
            {
                "half": torch.full((2,), float(k), dtype=torch.float16),
                "double": torch.full((2, 3), float(k), dtype=torch.float64),
                "scalar": torch.tensor(float(k)),
                "none": torch.zeros(0, 3),
                "count": torch.tensor(k),
            }
        )
    previous = trees.map(torch.zeros_like, sent[0])
    before = copy.deepcopy((sent, previous))
    under_way = rule.start(previous)
    for tree in sent:
        under_way.add(tree, 1)
    found = under_way.value()
    for leaf, value in found.items():
        assert (value.dtype, value.shape) == (previous[leaf].dtype, previous[leaf].shape)
    assert trees.identical(under_way.value(), found)
    for tree, old in zip([*sent, previous], [*before[0], before[1]], strict=True):
        assert trees.identical(tree, old)


@pytest.mark.parametrize("rule", ROBUST, ids=name)
def test_running_statistics_neither_hide_a_lie_nor_carry_one(rule: Averaging) -> None:
    """Honest clients differ a lot in their statistics; liars either in weights or in statistics."""

    def client(weight: float, mean: float, variance: float, count: int) -> Tree:
        return {
            "conv.weight": torch.tensor([weight, -weight]),
            "bn.running_mean": torch.tensor([mean]),
            "bn.running_var": torch.tensor([variance]),
            "bn.num_batches_tracked": torch.tensor(count),
        }

    under_way = rule.start(client(0.0, 0.0, 1.0, 0))
    for k in range(5):
        under_way.add(client(0.1 + 0.01 * k, 1e3 * k, 1e6 * (k + 1), 10 + k), 1)
    under_way.add(client(0.12, -1e30, 1e30, 2**60), 1)
    under_way.add(client(1e20, 2e3, 3e6, 12), 1)
    found = under_way.value()
    assert 0 <= float(found["bn.running_mean"]) <= 4e3
    assert 1e6 <= float(found["bn.running_var"]) <= 5e6
    assert 10 <= int(found["bn.num_batches_tracked"]) <= 14
    assert float(found["conv.weight"].abs().max()) < 0.5


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_is_a_frozen_value(rule: Any) -> None:
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert hash(rule) == hash(copy.deepcopy(rule))


@pytest.mark.parametrize(
    ("cls", "words", "message"),
    [
        (TrimmedMean, {"share": 0.5}, r"share is 0.5; it must be in \[0, 0.5\)."),
        (TrimmedMean, {"share": -0.1}, "share is -0.1"),
        (TrimmedMean, {"share": math.nan}, "share is nan"),
        (ClippedMean, {"bound": 0.0}, "bound is 0.0; it must be above 0, or none."),
        (MultiKrum, {"liars": 0.5}, r"liars is 0.5; it must be a share in \[0, 0.5\)."),
        (MultiKrum, {"keep": 0}, "keep is 0; it must be 1 or more, or none."),
        (GeometricMedian, {"iterations": 0}, "iterations is 0; it must be 1 or more."),
        (GeometricMedian, {"tolerance": -1.0}, "tolerance is -1.0; it must be 0 or more."),
        (GeometricMedian, {"smooth": 0.0}, "smooth is 0.0; it must be above 0."),
    ],
)
def test_impossible_settings_are_refused(cls: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cls(**words)
