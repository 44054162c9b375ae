"""Sparse ternary updates: which values, which magnitude, what is left, what they cost."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedgrove import trees
from fedgrove.core import Packet
from fedgrove.errors import InputError
from fedgrove.methods.stc.ternary import SparseTernary, coded, golomb_bytes
from fedgrove.parts.quantise import feedback, largest
from fedgrove.wire.codec import Smallest

floats = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40).map(torch.tensor)
shares = st.floats(0.01, 1)


def test_by_hand() -> None:
    """Half of six values are three: 5, -4 and 3, of mean magnitude 4, wherever they are."""
    tree = {"w": torch.tensor([[5.0, 1.0], [-4.0, 0.5]]), "b": torch.tensor([3.0, -2.0])}
    sent = SparseTernary(0.5)(tree)
    assert trees.identical(
        sent, {"w": torch.tensor([[4.0, 0.0], [-4.0, 0.0]]), "b": torch.tensor([4.0, 0.0])}
    )


def test_by_layer_by_hand() -> None:
    """Two of four have the mean magnitude 4.5, one of two has 3."""
    tree = {"w": torch.tensor([[5.0, 1.0], [-4.0, 0.5]]), "b": torch.tensor([3.0, -2.0])}
    sent = SparseTernary(0.5, scope="layer")(tree)
    assert trees.identical(
        sent, {"w": torch.tensor([[4.5, 0.0], [-4.5, 0.0]]), "b": torch.tensor([3.0, 0.0])}
    )


def test_a_coded_update_by_hand() -> None:
    """Half of each layer: 9 and 3 of four, 6 in the mean, and -6 of two. Under a mask without the 9,
    half of three are 3 and 2, of mean 2.5; the layer that the mask does not name stays whole."""
    change = {"w": torch.tensor([[9.0, 3.0], [-1.0, 2.0]]), "b": torch.tensor([4.0, -6.0])}
    expected = {"w": torch.tensor([[6.0, 6.0], [0.0, 0.0]]), "b": torch.tensor([0.0, -6.0])}
    assert trees.identical(coded(0.5, change, None), expected)
    mask = {"w": torch.tensor([[False, True], [True, True]])}
    expected["w"] = torch.tensor([[0.0, 2.5], [0.0, 2.5]])
    assert trees.identical(coded(0.5, change, mask), expected)


def test_two_rounds_with_feedback_by_hand() -> None:
    """One of two: 3 goes and 2 is left; then 1 + 0 and 1.5 + 2: 3.5 goes and 1 is left."""
    coder = SparseTernary(0.5)
    sent, left = feedback(coder, {"w": torch.tensor([3.0, 2.0])}, None)
    assert (sent["w"].tolist(), left["w"].tolist()) == ([3.0, 0.0], [0.0, 2.0])
    sent, left = feedback(coder, {"w": torch.tensor([1.0, 1.5])}, left)
    assert (sent["w"].tolist(), left["w"].tolist()) == ([0.0, 3.5], [1.0, 0.0])


@settings(deadline=None)
@given(floats, shares)
def test_as_many_as_the_share_says_and_three_values(x: Tensor, share: float) -> None:
    sent = SparseTernary(share)({"w": x})["w"]
    kept = max(1, round(share * len(x)))
    assert int((sent != 0).sum()) <= kept
    assert len(set(sent.abs().tolist()) - {0.0}) <= 1
    # What is sent has the sign of what it stands for, and no zero has one.
    assert bool((sent * x >= 0).all())
    assert not bool(torch.signbit(sent[sent == 0]).any())
    # The mean over the kept is the best common magnitude: an error below that of sending nothing.
    assert float((sent - x).double().norm()) <= float(x.double().norm()) * (1 + 1e-6)


@settings(deadline=None)
@given(floats, shares)
def test_without_levels_the_largest_keep_their_values(x: Tensor, share: float) -> None:
    sent = SparseTernary(share, ternary=False)({"w": x})["w"]
    assert bool(((sent == x) | (sent == 0)).all())
    dropped = x[sent != x].abs()
    if len(dropped):
        assert float(dropped.max()) <= float(sent[sent != 0].abs().min())


def test_off_changes_nothing() -> None:
    tree = {"w": torch.tensor([1.0, -2.0])}
    off = SparseTernary(1.0, ternary=False)
    assert off.is_off
    assert trees.identical(off(tree), tree)
    assert not SparseTernary(1.0).is_off
    assert not SparseTernary(0.5, ternary=False).is_off


def test_an_update_of_zeros_stays_one() -> None:
    tree = {"w": torch.zeros(5), "n": torch.tensor(3)}
    assert trees.identical(SparseTernary(0.4)(tree), tree)


@pytest.mark.parametrize("words", [{"share": 0.0}, {"share": 1.1}, {"scope": "net"}])
def test_what_is_refused(words) -> None:
    (name,) = words
    with pytest.raises(InputError, match=f"{name} is "):
        SparseTernary(**words)


def test_golomb_by_hand() -> None:
    """p = 1/4 of 1000: log(.618)/log(.75) = 1.673, so b* = 1 + 0; 1 + 1/(1 - .75^2) = 3.286 bits and a sign.

    250 x 4.286 / 8 + 4 = 137.9 bytes. With p = 1 there is a sign for each, and four bytes.
    """
    assert golomb_bytes(1000, 0.25) == pytest.approx(250 * (1 + 16 / 7 + 1) / 8 + 4)
    assert golomb_bytes(1000, 1.0) == 125 + 4


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_real_bytes_are_near_the_papers(share: float) -> None:
    """Places that are drawn evenly take what Golomb's code takes; ours has names and shapes to write too."""
    update = {"w": torch.randn(60_000, generator=torch.Generator().manual_seed(0))}
    packet = Packet(SparseTernary(share)(update))
    real = sum(Smallest().cost(packet).values())
    assert real == pytest.approx(golomb_bytes(60_000, share), rel=0.06)


many_values = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 1e-45, torch.inf, torch.nan]),
    min_size=2,
    max_size=12,
)


@settings(deadline=None)
@given(many_values, shares, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_signs_are_to_the_bit_those_of_the_mask(
    values: list[float], share: float, dtype: torch.dtype
) -> None:
    """By definition: the sign of what the mask keeps, times its mean magnitude."""
    x = torch.tensor(values, dtype=dtype)[:, None]
    kept = largest(x, max(1, round(share * x.numel())))
    mean = x[kept].double().abs().mean().to(dtype)
    expected = torch.where(kept, x.sign() * mean, 0.0) + 0.0
    sent = SparseTernary(share, "layer")({"w": x})
    assert trees.identical(sent, {"w": expected})
