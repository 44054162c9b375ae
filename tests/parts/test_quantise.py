"""Quantisers: bounds of the error, no bias where none is claimed, nothing lost with feedback."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedgrove.core import Packet
from fedgrove.errors import InputError
from fedgrove.methods.fedpaq import QSGD
from fedgrove.parts.quantise import (
    Half,
    Quantiser,
    Sign,
    Ternary,
    TopK,
    UniformQuantiser,
    feedback,
    largest,
)
from fedgrove.wire.codec import Smallest

ALL: list[Quantiser] = [
    Half(),
    Half("bfloat16"),
    UniformQuantiser(2),
    UniformQuantiser(8),
    UniformQuantiser(4, stochastic=False),
    TopK(0.2),
    Sign(),
    Ternary(),
    QSGD(4),
    QSGD(4, scope="layer"),
]
floats = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40).map(torch.tensor)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one(quantiser: Quantiser, x: Tensor, seed: int = 0) -> Tensor:
    return quantiser({"w": x}, rng(seed))["w"]


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", ALL, ids=repr)
def test_shapes_counters_and_inputs_are_left_alone(quantiser: Quantiser) -> None:
    w = torch.randn(4, 3, 2, generator=rng())
    tree = {"w": w, "n": torch.arange(5), "none": torch.zeros(0, 3), "s": torch.ones(())}
    before = {k: v.clone() for k, v in tree.items()}
    quantised = quantiser(tree, rng())
    assert list(quantised) == list(tree)
    assert all(quantised[k].shape == tree[k].shape for k in tree)
    assert torch.equal(quantised["n"], tree["n"])
    assert all(torch.equal(tree[k], before[k]) for k in tree)


@pytest.mark.parametrize("quantiser", ALL, ids=repr)
def test_the_same_draw_gives_the_same_tree(quantiser: Quantiser) -> None:
    x = torch.randn(200, generator=rng())
    assert torch.equal(one(quantiser, x, 3), one(quantiser, x, 3))


@pytest.mark.parametrize("quantiser", ALL, ids=repr)
def test_zeros_stay_zeros(quantiser: Quantiser) -> None:
    assert one(quantiser, torch.zeros(5)).tolist() == [0] * 5


@pytest.mark.parametrize("quantiser", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_zeros_have_no_sign(quantiser: Quantiser, dtype: torch.dtype) -> None:
    """A negative value that becomes 0, and a -0.0 that is given: a codec would keep their sign."""
    # 1e-9 is 0 in 16 bits.
    x = torch.cat([torch.tensor([-0.0, -1e-9, -1e-3, -1.0]), torch.randn(60, generator=rng())])
    quantised = one(quantiser, x.to(dtype))
    has_sign = torch.signbit(quantised) & (quantised == 0)
    assert not has_sign.any()


@pytest.mark.parametrize("quantiser", ALL, ids=repr)
def test_feedback_loses_nothing(quantiser: Quantiser) -> None:
    """Sum of what was sent + what is left = sum of what was to be sent."""
    steps = torch.randn(30, 50, generator=rng(), dtype=torch.float64)
    sent = torch.zeros(50, dtype=torch.float64)
    left = None
    for i, x in enumerate(steps):
        out, left = feedback(quantiser, {"w": x}, left, rng(i))
        sent += out["w"].double()
    assert left is not None
    assert torch.allclose(sent + left["w"], steps.sum(0), atol=1e-9)
    # It does not pile up: 30 steps of up to 4 would reach 120 unsent.
    assert left["w"].abs().max() < 60


def test_feedback_golden() -> None:
    # Top 1 of 2. Round 1: (3, 2) -> sent (3, 0), left (0, 2).
    # Round 2: (1, 1) + (0, 2) = (1, 3) -> sent (0, 3), left (1, 0).
    sent, left = feedback(TopK(0.5), {"w": torch.tensor([3.0, 2.0])}, None)
    assert sent["w"].tolist() == [3, 0]
    assert left["w"].tolist() == [0, 2]
    sent, left = feedback(TopK(0.5), {"w": torch.tensor([1.0, 1.0])}, left)
    assert sent["w"].tolist() == [0, 3]
    assert left["w"].tolist() == [1, 0]


def test_feedback_passes_counters_through() -> None:
    sent, left = feedback(Sign(), {"n": torch.tensor([3]), "w": torch.tensor([1.0])}, None)
    assert sent["n"].tolist() == [3]
    assert list(left) == ["w"]


@pytest.mark.parametrize("quantiser", [UniformQuantiser(), Ternary()], ids=repr)
def test_random_ones_need_a_generator(quantiser: Quantiser) -> None:
    with pytest.raises(InputError, match="pass draw="):
        quantiser({"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: UniformQuantiser(1), "bits is 1"),
        (lambda: TopK(0.0), "density is 0.0"),
        (lambda: Half("float17"), "did you mean 'float16'"),
    ],
)
def test_bad_values_are_refused(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]


# ---- error and bias ------------------------------------------------------------------------------


@given(floats)
@settings(max_examples=60, deadline=None)
def test_half_is_near(x: Tensor) -> None:
    x = torch.where(x.abs() < 1e-3, 0.0, x)  # float16 is in its normal range
    for kind, bits in (("float16", 11), ("bfloat16", 8)):
        quantised = one(Half(kind), x)
        assert quantised.dtype == getattr(torch, kind)
        away = (quantised.double() - x.double()).abs()
        assert bool((away <= x.double().abs() * 2.0**-bits).all())


@given(floats, st.integers(2, 16), st.booleans())
@settings(max_examples=100, deadline=None)
def test_uniform_is_within_a_step(x: Tensor, bits: int, stochastic: bool) -> None:
    quantised = one(UniformQuantiser(bits, stochastic), x).double()
    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    allowed = (step if stochastic else step / 2) + 1e-6 * float(x.abs().max())
    assert float((quantised - x.double()).abs().max()) <= allowed
    assert len(quantised.unique()) <= 2**bits - 1
    assert float(quantised.abs().max()) <= float(x.abs().max()) * (1 + 1e-6)


@pytest.mark.parametrize(
    "quantiser", [UniformQuantiser(2), UniformQuantiser(4), Ternary()], ids=repr
)
def test_no_bias(quantiser: Quantiser) -> None:
    """The mean of n draws is within 5 of its own standard errors; a grid step is at most max |x| =
    1.
    """
    x = torch.linspace(-1, 1, 21)
    n = 4000
    mean = one(quantiser, x.repeat(n, 1)).double().mean(0)
    assert float((mean - x.double()).abs().max()) < 5 * 0.5 / n**0.5


def test_nearest_rounding_is_biased_and_so_is_not_called_unbiased() -> None:
    x = torch.tensor([1.0, 0.4]).repeat(10, 1)
    assert one(UniformQuantiser(2, stochastic=False), x)[:, 1].tolist() == [0] * 10


def test_uniform_golden() -> None:
    # 3 bits: levels -3..3, s = 6 / 3 = 2:
    # 6 -> 6, 2.9 / 2 = 1.45 -> 1 -> 2, -5.1 / 2 = -2.55 -> -3 -> -6
    assert one(UniformQuantiser(3, stochastic=False), torch.tensor([6.0, 2.9, -5.1])).tolist() == [
        6,
        2,
        -6,
    ]


@given(floats, st.floats(0.01, 1))
@settings(max_examples=100, deadline=None)
def test_top_k_keeps_the_largest(x: Tensor, density: float) -> None:
    quantised = one(TopK(density), x)
    n = max(1, round(density * x.numel()))
    assert int((quantised != 0).sum()) <= n
    kept = largest(x, n)
    assert int(kept.sum()) == n
    assert torch.equal(quantised, torch.where(kept, x, 0.0))
    left = ((quantised - x).double() ** 2).sum()
    assert left <= (1 - n / x.numel()) * (x.double() ** 2).sum() + 1e-9
    if n < x.numel():
        assert x[kept].abs().min() >= x[~kept].abs().max()


def test_ties_go_to_the_first() -> None:
    assert largest(torch.tensor([1.0, -2.0, 2.0, 1.0, 2.0]), 2).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_sign_golden() -> None:
    # mean |x| = (1 + 2 + 3 + 0) / 4 = 1.5
    assert one(Sign(), torch.tensor([1.0, -2.0, 3.0, 0.0])).tolist() == [1.5, -1.5, 1.5, 0]


@given(floats)
@settings(max_examples=60, deadline=None)
def test_sign_is_a_contraction(x: Tensor) -> None:
    # ||q - x||^2 <= (1 - ||x||_1^2 / (d ||x||_2^2)) ||x||_2^2, with equality when no value is 0
    y = x.double()
    left = ((one(Sign(), y) - y) ** 2).sum()
    assert left <= (y**2).sum() - y.abs().sum() ** 2 / y.numel() + 1e-6


@given(floats, st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_ternary_has_three_values(x: Tensor, seed: int) -> None:
    quantised = one(Ternary(), x, seed)
    most = float(x.abs().max())
    assert set(quantised.abs().tolist()) <= {0.0, most}
    assert bool((quantised * x >= 0).all())
    assert bool((quantised[x.abs() == most].abs() == most).all())  # the largest is always kept


# ---- what the codec makes of it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantiser", "share"),
    [
        (Half(), 0.5),
        (UniformQuantiser(8), 0.26),
        (UniformQuantiser(4), 0.12),
        (TopK(0.1), 0.11),
        (Sign(), 0.035),
        (Ternary(), 0.05),
    ],
    ids=repr,
)
def test_the_codec_finds_what_was_left_out(quantiser: Quantiser, share: float) -> None:
    x = torch.randn(20_000, generator=rng())
    assert len(Smallest().encode(Packet(quantiser({"w": x}, rng()))).data) < share * 4 * 20_000
