"""FedProx: what the contract tests compare it with."""

from __future__ import annotations

from tests.contract import Contract

from fedgrove.methods import FedProx
from fedgrove.parts.objective import Proximal

CONTRACT = Contract(
    # The pull is to the last round's model, which `local` does not have.
    off=FedProx(pull=Proximal(0.0)),
)
