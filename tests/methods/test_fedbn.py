"""FedBN: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import WHOLE, Contract

from fedgrove.methods import FedBN

CONTRACT = Contract(
    # The network has no norm layers.
    off=FedBN(),
    paper_bytes=WHOLE,
)
