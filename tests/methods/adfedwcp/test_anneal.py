"""The annealed pull: both branches and both pulls by hand, and its first step on every engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods.adfedwcp.anneal import LOSS, STEPS, AnnealedPull
from fedgrove.nets import Net


def step(pull: AnnealedPull, aux: dict[str, torch.Tensor], position: int = 0):
    """One step at weights 3 of a model that started at 2 and is pulled to 1."""
    net = Net(nn.Linear(1, 2, bias=False), (1,))
    params = {"weight": torch.tensor([[3.0], [3.0]])}
    carry = {
        "personal": {"weight": torch.tensor([[2.0], [2.0]])},
        "model": {"weight": torch.tensor([[1.0], [1.0]])},
        "aux": aux,
    }
    x = torch.ones(1, 1)
    batch = Batch(x, torch.tensor([0]), torch.ones(1), torch.zeros(1), torch.tensor(position))
    # Both logits are 3, so the loss is log 2.
    return pull(net(params, x, True), params, batch, carry)


def aux(loss: float, steps: float) -> dict[str, torch.Tensor]:
    return {LOSS: torch.tensor(loss), STEPS: torch.tensor(steps)}


def test_the_first_step_takes_the_second_branch() -> None:
    """No loss is expected yet: .5 / 1.1 = .4545; the pull is .4545 * (3 * 1 + 3 * 1)."""
    start = AnnealedPull().begin({"weight": torch.zeros(2, 1)}, {})
    term, remembered = step(AnnealedPull(), start)
    assert float(term) == pytest.approx(0.5 / 1.1 * 6)
    assert float(remembered[LOSS]) == pytest.approx(0.6931, abs=1e-4)
    assert float(remembered[STEPS]) == 1


def test_a_loss_below_the_expected_one() -> None:
    """Before 2: expected (.693 + 2) / 2 = 1.347, above .693: 1.1 * .5 = .55."""
    term, remembered = step(AnnealedPull(), aux(2.0, 4))
    assert float(term) == pytest.approx(0.55 * 6)
    assert float(remembered[LOSS]) == pytest.approx((0.6931 + 2) / 2, abs=1e-4)


def test_a_loss_above_the_expected_one() -> None:
    """Before .1: .5 / 1.1; in the third mini-batch .125 / 1.1 = .1136; later never below .1."""
    assert float(step(AnnealedPull(), aux(0.1, 4))[0]) == pytest.approx(0.5 / 1.1 * 6)
    assert float(step(AnnealedPull(), aux(0.1, 4), 2)[0]) == pytest.approx(0.125 / 1.1 * 6)
    assert float(step(AnnealedPull(), aux(0.1, 4), 9)[0]) == pytest.approx(0.1 * 6)
    # The other branch is bounded from above only.
    assert float(step(AnnealedPull(), aux(2.0, 4), 9)[0]) == pytest.approx(1.1 * 0.5**10 * 6)
    assert float(step(AnnealedPull(base=0.9), aux(2.0, 4))[0]) == pytest.approx(0.8 * 6)


def test_a_pull_that_moves_along() -> None:
    """Half the squared distance from where the model is now, 2 in both weights: .4545 * 4."""
    start = aux(0.0, 0)
    assert float(step(AnnealedPull(pull="moving"), start)[0]) == pytest.approx(0.5 / 1.1 * 4)


def test_a_fixed_weight() -> None:
    assert float(step(AnnealedPull(fixed=0.8), aux(2.0, 4), 7)[0]) == pytest.approx(0.8 * 6)
    assert float(step(AnnealedPull(fixed=0.0), aux(2.0, 4))[0]) == 0


@pytest.mark.parametrize("words", [{"base": 1}, {"pull": "hard"}, {"fixed": -1}])
def test_impossible_settings_are_refused(words) -> None:
    with pytest.raises(InputError, match="it must be"):
        AnnealedPull(**words)
