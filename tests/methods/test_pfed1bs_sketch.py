"""One-bit sketches: the transform, the projection, the pull and its gradient."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedgrove.errors import InputError
from fedgrove.methods.pfed1bs import (
    CONSENSUS,
    PROJECTION,
    SignPull,
    block_of,
    hadamard,
    one_bit,
    project,
    projection,
    rows_of,
)


def test_hadamard_by_hand() -> None:
    """1+2+3+5 = 11, 1-2+3-5 = -3, 1+2-3-5 = -5, 1-2-3+5 = 1."""
    for size in (2, 4, 64):
        block = block_of(size, torch.float32)
        found = hadamard(torch.tensor([1.0, 2.0, 3.0, 5.0]), block)
        assert found.tolist() == [11.0, -3.0, -5.0, 1.0]
        assert hadamard(torch.tensor([7.0]), block).tolist() == [7.0]


@settings(deadline=None)
@given(st.integers(0, 8), st.sampled_from([2, 4, 8, 64]), st.integers(0, 99))
def test_hadamard_is_the_matrix(power: int, size: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1 << power, generator=g, dtype=torch.float64)
    block = block_of(size, torch.float64)
    torch.testing.assert_close(hadamard(x, block), block_of(len(x), torch.float64) @ x)


BY_HAND = {
    "signs": torch.tensor([1.0, -1.0, 1.0]),
    "rows": torch.tensor([3, 0]),
    "block": block_of(2, torch.float32),
}


def test_a_projection_by_hand() -> None:
    """Three numbers filled up to four, signs +, -, +, rows 3 and 0 of H: (1 2 5 0) -> (1 -2 5 0).

    Row 3 is + - - +: 1 + 2 - 5 = -2; row 0: 1 - 2 + 5 = 4; both over the root of 2.
    """
    given_ = BY_HAND
    found = project(given_, torch.tensor([1.0, 2.0, 5.0]))
    torch.testing.assert_close(found, torch.tensor([-2.0, 4.0]) / math.sqrt(2))
    assert one_bit(found).tolist() == [False, True]


def test_both_sides_draw_the_same() -> None:
    one, other = (projection(100, 10, torch.float32) for _ in range(2))
    assert torch.equal(one["signs"], other["signs"])
    assert torch.equal(one["rows"], other["rows"])
    assert set(one["signs"].tolist()) == {1.0, -1.0}
    assert len(set(one["rows"].tolist())) == 10
    assert (rows_of(100, 0.1), rows_of(4, 0.1)) == (10, 1)


def test_lengths_are_kept_on_average() -> None:
    """Each row of H D gives a number of mean square |x|^2; m of them over m are |x|^2."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3000, generator=g, dtype=torch.float64)
    z = project(projection(3000, 600, torch.float64), x)
    assert float(z.square().sum() / x.square().sum()) == pytest.approx(1, abs=0.15)


def pull_at(pull: SignPull, w: Tensor, signs: Tensor, given_: dict) -> Tensor:
    carry = {PROJECTION: given_, CONSENSUS: {"signs": signs}}
    loss, aux = pull(None, {"w": w}, None, carry)  # type: ignore[arg-type]
    assert aux == {}
    return loss


def test_the_pull_by_hand() -> None:
    """z = (-2, 4)/sqrt 2 and v = (1, 1): |z| - v z is 2.828 in the first place and 0 in the second.

    log 2 / gamma more in each, as the cosh is that of large numbers; times .5, and .01/2 (1 + 4 + 25).
    """
    given_ = BY_HAND
    pull = SignPull(weight=0.5, mu=0.01, gamma=1e4)
    loss = pull_at(pull, torch.tensor([1.0, 2.0, 5.0]), torch.ones(2), given_)
    assert float(loss) == pytest.approx(0.5 * 2 * math.sqrt(2) + 0.005 * 30, rel=1e-4)


@settings(deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.5, 20.0, 1e4]))
def test_its_gradient_is_the_papers(seed: int, gamma: float) -> None:
    """lambda Phi^T (tanh(gamma Phi w) - v) + mu w, with Phi written out."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(11, generator=g, dtype=torch.float64).requires_grad_()
    given_ = projection(11, 4, torch.float64)
    signs = torch.sign(torch.randn(4, generator=g, dtype=torch.float64))
    phi = block_of(16, torch.float64)[given_["rows"], :11] * given_["signs"] / 2
    pull = SignPull(weight=0.3, mu=0.1, gamma=gamma)
    (found,) = torch.autograd.grad(pull_at(pull, w, signs, given_), w)
    expected = 0.3 * phi.T @ (torch.tanh(gamma * (phi @ w)) - signs) + 0.1 * w
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("words", [{"weight": -1.0}, {"mu": -1.0}, {"gamma": 0.0}])
def test_what_is_refused(words) -> None:
    (name,) = words
    with pytest.raises(InputError, match=f"{name} is "):
        SignPull(**words)
