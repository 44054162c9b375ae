"""FedAvg: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import WHOLE, Contract

from fedgrove.methods import FedAvg

CONTRACT = Contract(
    off=FedAvg(),
    paper_bytes=WHOLE,
)
