"""GlobalFT: what the contract tests compare it with."""

from __future__ import annotations

from dataclasses import replace

from tests.contract import WHOLE, Contract

from fedgrove.methods import GlobalFT

CONTRACT = Contract(
    off=GlobalFT(density=1.0, pull=replace(GlobalFT().pull, mu=0.0)),
    sends_masks=True,
    # As CA-AFP.
    paper_bytes=(0.6 + 0.4 * 0.3) * WHOLE + 8 * 5187 * 4,
    refused_with_privacy="evidence",
    for_a_million={"ask": 5},
)
