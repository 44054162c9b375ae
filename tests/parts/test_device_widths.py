"""Which devices are too small for a net, and how narrow it must be for them."""

from __future__ import annotations

import pytest
import torch

from fedgrove.core import MOST_AT_ONCE, ClientInfo, Setup
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.parts.device_widths import client_shares, narrow_clients
from fedgrove.parts.local import LocalTraining

NET = Net(
    torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)), (8,)
)


def start(infos: dict[int, ClientInfo]) -> Setup:
    return Setup(NET.params(), NET, infos, 5, lambda j: {})


def test_only_those_that_need_it_are_narrow() -> None:
    """The shares are those of HeteroFL; who can hold the whole net is not named."""
    local = LocalTraining()
    memory = NET.layout.memory(local.batch, local.optimiser.slots)
    infos = {
        3: ClientInfo(9),
        5: ClientInfo(9, speed=0.5),
        6: ClientInfo(9, memory=memory - 1),
        7: ClientInfo(9, speed=2.0, memory=memory),
    }
    found = narrow_clients(start(infos), local)
    assert list(found) == [5, 6]
    every = client_shares(start(infos), (), local)
    assert found == {client: every[client] for client in (5, 6)}
    assert narrow_clients(start({3: ClientInfo(9)}), None) == {}


def test_of_very_many_none_is_narrow_or_it_is_refused() -> None:
    many = {client: ClientInfo(9) for client in range(MOST_AT_ONCE + 1)}
    assert narrow_clients(start(many), None) == {}
    many[7] = ClientInfo(9, speed=0.5)
    with pytest.raises(InputError, match="--set fit=false"):
        narrow_clients(start(many), None)
