"""FedWCP: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract

from fedgrove.methods import FedWCP
from fedgrove.methods.adfedwcp.anneal import AnnealedPull

CONTRACT = Contract(
    small={"k": 4},
    alone=FedWCP(k=0, pull=AnnealedPull(fixed=0.0)),
    has_a_place_for_each_client=True,
    # 4 centroids of 32 bits in three layers, 2 bits for each of 5056 weights, 131 biases.
    paper_bytes=2 * 3 * 50 * (4 * 4 * 3 + 5056 * 2 / 8 + 131 * 4),
)
