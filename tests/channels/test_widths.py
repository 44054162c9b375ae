"""How wide a model a device can hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgrove import nets
from fedgrove.channels.widths import Width, choose_width, measure_widths
from fedgrove.core import ClientInfo
from fedgrove.data.devices import TIERS
from fedgrove.errors import InputError
from fedgrove.nets import Net

NET = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
OPTIONS = (Width(0.25, 100, 10), Width(0.5, 200, 30), Width(1.0, 400, 100))


def test_widths_by_hand() -> None:
    """h of 8 units: 4h + h + 2h + 2 parameters, three copies of each and 2 + h outputs of 5 samples, in 4 bytes."""
    found = measure_widths(Net(NET, (4,)), batch=5, optimiser_slots=1, steps=2)
    assert [w.share for w in found] == [0.5, 1.0]
    assert [w.macs for w in found] == [4 * 4 + 4 * 2, 4 * 8 + 8 * 2]
    assert [w.memory for w in found] == [4 * (3 * (7 * h + 2) + 5 * (2 + h)) for h in (4, 8)]


@pytest.mark.parametrize(
    ("speed", "memory", "share"),
    [
        (1.0, 400, 1.0),
        (9.0, 400, 1.0),
        (1.0, 399, 0.5),  # memory decides
        (0.99, 400, 0.5),  # speed decides
        (0.3, 400, 0.5),
        (0.29, 400, 0.25),
        (0.01, 400, 0.25),  # the narrowest there is, however long it takes
    ],
)
def test_the_largest_that_fits(speed: float, memory: int, share: float) -> None:
    assert choose_width(ClientInfo(1, speed=speed, memory=memory), OPTIONS) == share


def test_no_width_fits() -> None:
    with pytest.raises(InputError, match="has 99 bytes of memory and the narrowest net needs 100"):
        choose_width(ClientInfo(1, memory=99), OPTIONS)


def test_a_net_of_one_width() -> None:
    with pytest.raises(InputError, match="no channels that can be removed"):
        measure_widths(Net(nn.Linear(3, 2), (3,)))


def test_phones_hold_different_widths() -> None:
    net = Net(nets.build("bn-cnn4", (3, 16, 16), 10, 0, width=8), (3, 16, 16))
    options = measure_widths(net)
    shares = [
        choose_width(ClientInfo(1, speed=speed, memory=memory), options)
        for _, _, speed, memory in TIERS
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == 1.0
    assert torch.tensor([w.memory for w in options]).diff().min() > 0
