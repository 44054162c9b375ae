"""Hermes: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract
from tests.methods.test_safl import SLIM

from fedgrove.methods import Hermes

CONTRACT = Contract(
    small=SLIM,
    # As FedBN.
    off=Hermes(densities=()),
    one_group=Hermes(densities=()),
    sends_masks=True,
    has_a_place_for_each_client=True,
    # Half the units: 1571 of 5187. One round of stage 1 with all four, 49 of stage 2.
    paper_bytes=4 * (4 * (5187 + 1571) + 2 * 49 * 3 * 1571),
    refused_with_privacy="mask of 'model'",
    for_a_million={"densities": "0.5"},
    net_with_norms=True,
)
