"""A client's choice among several models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run

from fedgrove import methods
from fedgrove.core import Batch
from fedgrove.methods.ifca import Losses, choose, send_choice

CLIENT: Any = None  # the choice looks at the carry alone


def test_losses_by_hand(tmp_path: Path) -> None:
    """A model of zeros gives every class a third: ln 3 each.

    One whose head prefers class 0 by ln 4 gives it 4/6: two of class 0 and one of class 1 lose
    2 ln(6/4) + ln 6; padding, of weight 0, loses nothing.
    """
    run = make_run(methods.FedAvg(), tmp_path)
    flat = {k: torch.zeros_like(v) for k, v in run.params.items()}
    bias = next(k for k, v in flat.items() if v.shape == (3,))
    sure = {**flat, bias: torch.tensor([math.log(4), 0.0, 0.0], dtype=torch.float64)}
    x = torch.randn(5, 12, dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 0, 1, 2, 2]), weight, torch.arange(5), torch.tensor(0))
    losses = Losses(2)(run.net, {}, batch, {"model0": flat, "model1": sure})
    assert losses["loss"].tolist() == pytest.approx(
        [3 * math.log(3), 2 * math.log(1.5) + math.log(6)], abs=1e-12
    )


@pytest.mark.parametrize(
    ("losses", "chosen"), [((2.0, 1.0, 3.0), 1), ((1.0, 1.0, 0.5), 2), ((1.0, 1.0, 1.0), 0)]
)
def test_the_lowest_loss_is_chosen_and_of_equal_ones_the_first(
    losses: tuple[float, ...], chosen: int
) -> None:
    carry = {f"model{j}": {"w": torch.tensor(float(j))} for j in range(3)}
    after = choose({**carry, "losses": {"loss": torch.tensor(losses)}}, CLIENT)
    assert after["model"] is carry[f"model{chosen}"]
    outcome = send_choice({**after, "local": {"w": torch.tensor(7.0)}}, CLIENT)
    assert outcome.metrics == {"group": float(chosen)}
    assert outcome.give["model"].values["w"].item() == 7.0
