"""The mean over those who have a parameter, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import trees
from fedgrove.channels.overlap import OverlapMean
from fedgrove.parts.aggregate import Mean
from fedgrove.trees import Mask, Tree

PREVIOUS = {"w": torch.tensor([9.0, 9.0, 9.0, 9.0]), "b": torch.tensor([9.0])}


def flags(*bits: int) -> torch.Tensor:
    return torch.tensor(bits).bool()


def mean(*clients: tuple[Tree, Mask | None, float]) -> OverlapMean:
    found = OverlapMean()
    for tree, mask, weight in clients:
        found.add(tree, mask, weight)
    return found


def test_by_hand() -> None:
    """w0: both, (1·2 + 3·6)/4 = 5; w1: the first alone, 2; w2: the second alone, 8; w3: nobody, 9 as before."""
    one = ({"w": torch.tensor([2.0, 2.0, 0.0, 0.0])}, {"w": flags(1, 1, 0, 0)}, 1)
    two = (
        {"w": torch.tensor([6.0, 0.0, 8.0, 0.0]), "b": torch.tensor([4.0])},
        {"w": flags(1, 0, 1, 0)},
        3,
    )
    found = mean(one, two).value(PREVIOUS)
    assert found["w"].tolist() == [5.0, 2.0, 8.0, 9.0]
    assert found["b"].tolist() == [4.0]  # sent by one client, without a mask
    assert list(found) == list(PREVIOUS)


def test_what_only_one_client_has_stays_his_to_the_bit() -> None:
    third = torch.tensor([1 / 3, 0.1, 1e-30, 3e30])
    other = ({"w": torch.zeros(4)}, {"w": flags(0, 0, 0, 0)}, 17.0)
    assert torch.equal(mean(({"w": third}, None, 7.0), other).value(PREVIOUS)["w"], third)


def test_what_a_mask_hides_does_not_matter() -> None:
    hidden = {"w": torch.tensor([1.0, torch.nan, torch.inf, -5.0])}
    found = mean((hidden, {"w": flags(1, 0, 0, 0)}, 2)).value(PREVIOUS)["w"]
    assert found.tolist() == [1.0, 9.0, 9.0, 9.0]


def test_nobody_at_all_and_weights_of_nothing() -> None:
    assert trees.identical(OverlapMean().value(PREVIOUS), PREVIOUS)
    assert trees.identical(mean(({"w": torch.ones(4)}, None, 0)).value(PREVIOUS), PREVIOUS)
    with pytest.raises(ValueError, match="weight is -1; it must be 0 or more"):
        mean(({"w": torch.ones(4)}, None, -1))
    with pytest.raises(ValueError, match=r"the previous model lacks: \['x'\]"):
        mean(({"x": torch.ones(4)}, None, 1)).value(PREVIOUS)


@given(st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_with_everything_kept_it_is_the_mean(clients: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    plain, overlap = Mean(), OverlapMean()
    for k in range(clients):
        tree = {"w": torch.randn(4, generator=g), "b": torch.randn(1, generator=g)}
        plain.add(tree, k + 1)
        overlap.add(tree, {"w": flags(1, 1, 1, 1)}, k + 1)
    assert trees.identical(plain.value(), overlap.value(PREVIOUS))


def test_inputs_are_not_changed() -> None:
    tree, mask = {"w": torch.ones(4)}, {"w": flags(1, 0, 1, 0)}
    found = mean((tree, mask, 2), (tree, mask, 2))
    found.value(PREVIOUS)
    assert tree["w"].tolist() == [1] * 4
    assert PREVIOUS["w"].tolist() == [9] * 4
