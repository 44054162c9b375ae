"""Terms on the scales of norms, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods.safl.slimming import GammaDistance, GammaL1
from fedgrove.nets import Net, Output

BATCH = Batch(
    torch.ones(1, 2), torch.zeros(1).long(), torch.ones(1), torch.zeros(1).long(), torch.tensor(0)
)
NET = Net(
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3), nn.GroupNorm(1, 3)), (2,)
)
SCALES = {"1.weight": torch.tensor([1.0, -2.0]), "3.weight": torch.tensor([0.0, 0.5, 3.0])}
OUT = Output(torch.zeros(1, 3), None, NET, True)


def test_the_sum_of_all_scales() -> None:
    """1 + 2 + 0 + .5 + 3 = 6.5; shifts and weights of other layers do not count."""
    params = {k: torch.full_like(v, 50.0) for k, v in NET.params().items()} | SCALES
    loss, aux = GammaL1(0.1)(OUT, params, BATCH, {})
    assert loss.item() == pytest.approx(0.65)
    assert aux == {}


def test_the_distance_to_the_groups_scales() -> None:
    """|1-1| + |-2-1| + |0-1| + |.5-1| + |3-1| = 6.5 as well, times .2."""
    near = {"cluster": {k: torch.ones_like(v) for k, v in SCALES.items()}}
    assert GammaDistance(0.2)(OUT, SCALES, BATCH, near)[0].item() == pytest.approx(1.3)
    assert GammaDistance(0.2, to="other")(OUT, SCALES, BATCH, {"other": SCALES})[0].item() == 0


def test_the_slope_is_the_sign_and_0_at_0() -> None:
    params = {k: v.clone().requires_grad_() for k, v in SCALES.items()}
    GammaL1(0.5)(OUT, params, BATCH, {})[0].backward()
    assert params["1.weight"].grad.tolist() == [0.5, -0.5]  # type: ignore[union-attr]
    assert params["3.weight"].grad.tolist() == [0.0, 0.5, 0.5]  # type: ignore[union-attr]


def test_over_many_clients_at_once() -> None:
    many = {k: torch.stack([v, 2 * v]) for k, v in SCALES.items()}
    losses = vmap(lambda params: GammaL1(1.0)(OUT, params, BATCH, {})[0])(many)
    assert losses.tolist() == [6.5, 13.0]


def test_a_net_without_norms_is_not_pulled() -> None:
    plain = Output(torch.zeros(1, 1), None, Net(nn.Linear(2, 1), (2,)), True)
    assert GammaL1()(plain, {}, BATCH, {})[0].item() == 0
    assert GammaDistance()(plain, {}, BATCH, {"cluster": {}})[0].item() == 0


@pytest.mark.parametrize("term", [GammaL1, GammaDistance])
def test_weights_are_not_negative(term: type[GammaL1 | GammaDistance]) -> None:
    with pytest.raises(InputError, match="weight is -1; it must be 0 or more"):
        term(weight=-1)
