"""Ditto: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract

from fedgrove.methods import Ditto

CONTRACT = Contract(
    # The personal model never touches the global one.
    off=Ditto(),
)
