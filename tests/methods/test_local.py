"""Local: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract

CONTRACT = Contract(
    paper_bytes=0,
)
