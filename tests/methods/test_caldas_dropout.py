"""Caldas' federated dropout: one share for all, drawn for each client or once for a round."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import make_run
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.submodel import read_packet_channels
from fedgrove.errors import InputError
from fedgrove.methods import CaldasDropout

CONTRACT = Contract(
    off=CaldasDropout(share=1.0),
    one_group=CaldasDropout(share=1.0),
    sends_masks=True,
    # Three quarters of the units for all clients: 3123.
    paper_bytes=8 * 3123 * 3 * 50,
)


@pytest.mark.parametrize(("alike", "different"), [(False, 8), (True, 2)])
def test_draws_by_client_or_by_round(alike: bool, different: int, tmp_path: Path) -> None:
    run = make_run(CaldasDropout(share=0.5, alike=alike), tmp_path, rounds=2, cohort=4)
    draws = []
    for _, tasks, _, _ in exchanges(run):
        for task in tasks:
            channels = read_packet_channels(task.send["model"], find_groups(run.net))
            # Half of 64 units of each layer, whatever the device.
            assert {name: int(kept.sum()) for name, kept in channels.items()} == {
                "fc1": 32,
                "fc2": 32,
            }
            draws.append(tuple(channels["fc1"].tolist()))
    assert len(draws) == 8
    assert len(set(draws)) == different


def test_a_share_outside_its_range_is_refused() -> None:
    with pytest.raises(InputError, match=r"share is 0; it must be in \(0, 1\]."):
        CaldasDropout(share=0)
