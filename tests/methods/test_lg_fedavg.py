"""LGFedAvg: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract

from fedgrove.methods import LGFedAvg

CONTRACT = Contract(
    # All three layers of the network.
    off=LGFedAvg(shared=3),
    # The last two layers.
    paper_bytes=8 * 4355 * 3 * 50,
)
