"""How much a weight matters: CA-AFP's three signals and SNIP, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import InputError
from fedgrove.methods.ca_afp.score import Blend, coherence, consistency, relative
from fedgrove.methods.fedsnip import sensitivity

F64 = torch.float64
W = torch.tensor([-2.0, 1.0, 0.5, 0.0], dtype=F64)
VAR = torch.tensor([3.0, 0.0, 1.0, 0.0], dtype=F64)
SIGNS = torch.tensor([3.0, -1.0, 1.0, 0.0], dtype=F64)


def close(scores: torch.Tensor, wanted: list[float]) -> bool:
    return scores.tolist() == pytest.approx(wanted, abs=1e-12)


def test_mag_by_hand() -> None:
    """Eq. 9: the largest is |-2|, so 2/2, 1/2, .5/2, 0/2."""
    assert close(relative(W), [1.0, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("w", [torch.zeros(3), torch.zeros(0)])
def test_mag_of_nothing_but_zeros_is_zero_and_not_nan(w: torch.Tensor) -> None:
    assert relative(w).tolist() == [0.0] * len(w)


def test_coh_by_hand() -> None:
    """Eq. 10: 1/(1+3), 1/(1+0), 1/(1+1), 1."""
    assert close(coherence(VAR), [0.25, 1.0, 0.5, 1.0])


def test_con_by_hand() -> None:
    """Eq. 11 with three votes: |3|/3, |-1|/3 (two against one), |1|/3, 0: the side they agree on
    does not matter.
    """
    assert close(consistency(SIGNS, 3), [1.0, 1 / 3, 1 / 3, 0.0])


def test_blend_by_hand() -> None:
    """Eq. 8 with (.5, .3, .2).

    .5*1   + .3*.25 + .2*1   = .775
    .5*.5  + .3*1   + .2/3   = .55 + .0666...
    .5*.25 + .3*.5  + .2/3   = .275 + .0666...
    .5*0   + .3*1   + .2*0   = .3
    """
    assert close(
        Blend(0.5, 0.3, 0.2)(W, VAR, SIGNS, 3), [0.775, 0.55 + 0.2 / 3, 0.275 + 0.2 / 3, 0.3]
    )


def test_each_weight_alone_is_its_term() -> None:
    assert torch.equal(Blend(1.0, 0.0, 0.0)(W, VAR, SIGNS, 3), relative(W))
    assert torch.equal(Blend(0.0, 1.0, 0.0)(W, VAR, SIGNS, 3), coherence(VAR))
    assert torch.equal(Blend(0.0, 0.0, 1.0)(W, VAR, SIGNS, 3), consistency(SIGNS, 3))


def test_what_nobody_spoke_of_counts_as_agreed() -> None:
    """Without variance and signs both terms are 1: .5 Mag + .25 + .25, so the rank is by magnitude."""
    assert close(Blend()(W, None, None, 0), [1.0, 0.75, 0.625, 0.5])
    # with the variance alone: .5 + .0625 + .25, .25 + .25 + .25, .125 + .125 + .25, 0 + .25 + .25
    assert close(Blend()(W, VAR, None, 0), [0.8125, 0.75, 0.5, 0.5])


@pytest.mark.parametrize(
    "weights", [(0.5, 0.5, 0.5), (1.5, -0.25, -0.25), (0.0, 0.0, 0.0), (float("nan"), 0.5, 0.5)]
)
def test_bad_weights_get_a_sentence(weights: tuple[float, float, float]) -> None:
    with pytest.raises(
        InputError, match=r"^weights is \(.*\); it must be three numbers of 0 or more, sum 1\.$"
    ):
        Blend(*weights)


def test_weights_that_sum_to_one_but_for_rounding_are_taken() -> None:
    assert 0.7 + 0.2 + 0.1 != 1
    Blend(0.7, 0.2, 0.1)


@given(
    st.integers(1, 30), st.integers(0, 2**31), st.integers(2, 9), st.floats(0, 1), st.floats(0, 1)
)
def test_every_score_lies_between_0_and_1(
    size: int, seed: int, votes: int, alpha: float, part: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=g, dtype=F64)
    var = torch.rand(size, generator=g, dtype=F64) * 9
    signs = torch.randint(-votes, votes + 1, (size,), generator=g).to(F64)
    score = Blend(alpha, (1 - alpha) * part, (1 - alpha) * (1 - part))(w, var, signs, votes)
    assert bool(((score >= -1e-12) & (score <= 1 + 1e-12)).all())


def test_sensitivity_by_hand() -> None:
    """|w g| = 1*2, 2*1, 0*5, 4*.25 -> 2, 2, 0, 1; their sum, over both layers, is 5."""
    params = {"a": torch.tensor([1.0, -2.0], dtype=F64), "b": torch.tensor([0.0, 4.0], dtype=F64)}
    gradient = {
        "a": torch.tensor([2.0, 1.0], dtype=F64),
        "b": torch.tensor([5.0, -0.25], dtype=F64),
    }
    scores = sensitivity(params, gradient)
    assert close(scores["a"], [0.4, 0.4])
    assert close(scores["b"], [0.0, 0.2])


def test_sensitivity_does_not_depend_on_how_large_a_gradient_is() -> None:
    params = {"a": torch.tensor([1.0, -2.0])}
    gradient = {"a": torch.tensor([2.0, 3.0])}
    scaled = sensitivity(params, {"a": 16 * gradient["a"]})
    assert torch.equal(scaled["a"], sensitivity(params, gradient)["a"])


def test_sensitivity_of_no_gradient_is_zero_and_not_nan() -> None:
    assert sensitivity({"a": torch.ones(2)}, {"a": torch.zeros(2)})["a"].tolist() == [0.0, 0.0]
