"""What the contract tests must know of a method. Its own test file says it, as ``CONTRACT``.

A method whose test file has no ``CONTRACT`` is tested with the defaults here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgrove import methods
from fedgrove.core import AnyMethod

WHOLE = 8 * 5187 * 3 * 50
"""FedAvg's bytes in the test of ``paper_bytes``: the MLP, a cohort of 3, 50 rounds."""


@dataclass(frozen=True)
class Contract:
    """How one method is tested with all others."""

    small: Mapping[str, Any] = field(default_factory=dict)
    """Fields with which it fits two rounds on any network, and takes little time."""
    off: AnyMethod | None = None
    """With its features off, on a network without norm layers: FedAvg to the bit."""
    alone: AnyMethod | None = None
    """With one client: ``local`` to the bit. None: as ``off``, or as it is."""
    trains_weights: bool = True
    """Whether it trains the network at all; if not, it is compared with no other method."""
    one_group: AnyMethod | None = None
    """With all clients in one group: where a liar has a group, or a weight, for himself he decides.
    """
    why_no_liar_spoils_it: str = ""
    """Why one liar cannot spoil even its weighted mean; "": he can."""
    sends_masks: bool = False
    """Whether packets under masks travel."""
    paper_bytes: float | None = None
    """What its paper counts for the MLP (12, 3) of 5187 parameters, 4 clients, a cohort of 3 and 50
    rounds, worked by hand: 64*12+64 = 832, 64*64+64 = 4160, 3*64+3 = 195; 5056 weights and 131
    biases. None: it has no ``paper_bytes``, or FedAvg's own."""
    refused_with_privacy: str = ""
    """A part of the sentence that refuses ``--privacy``; "": it can run with that."""
    forms_groups_with: Mapping[str, Any] = field(default_factory=dict)
    """Fields with which it forms groups within a few rounds."""
    summed_with: Mapping[str, Any] = field(default_factory=dict)
    """Fields with which it is tried with sums alone."""
    has_a_place_for_each_client: bool = False
    """Whether a million clients are refused."""
    for_a_million: Mapping[str, Any] = field(default_factory=dict)
    """Fields for a run of two rounds with a million clients."""
    most_macs: float = 1.0
    """How much more torch may count than the clock does."""
    macs_net: str = "bn-cnn2"
    """The network on which that is counted."""
    net_with_norms: bool = False
    """Whether its defaults need a network with norm layers."""


def module_of(name: str) -> str:
    """A method's own test file, as a module."""
    return f"tests.methods.test_{name.replace('-', '_')}"


def advise(name: str, field: str, why: str) -> str:
    """What to do about a contract that a method does not keep, for a test that fails."""
    file = module_of(name).replace(".", "/") + ".py"
    return (
        f"{name}: {why}. If that is as it should be, set {field} of CONTRACT in {file}; "
        "tests/contract.py says what each field means."
    )


def contract_of(name: str) -> Contract:
    """The ``CONTRACT`` in a method's own test file."""
    module = module_of(name)
    if importlib.util.find_spec(module) is None:
        return Contract()
    found: Contract = getattr(importlib.import_module(module), "CONTRACT", Contract())
    return found


def small(name: str) -> AnyMethod:
    """A method as it is, or so that it fits a run of two rounds on any network."""
    made: AnyMethod = methods.find(name)(**contract_of(name).small)
    return made
