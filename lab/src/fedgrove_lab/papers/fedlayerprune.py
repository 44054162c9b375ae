"""What of FedLayerPrune's tables is not data: densities of baselines, and layers by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fedgrove import nets
from fedgrove.nets.layout import Layout

from .definition import load_definition
from .scope import Scope
from .study import StudyRow

GOALS = {"mnist": 0.95}
"""The accuracy to which Table 8 counts rounds, where the paper's .85 is reached at once."""


def values(scope: Scope) -> dict[str, Any]:
    """Return the densities of FedPrune and FedDST, the goal, and the layers that can be pruned."""
    feddst = _average_sparsity("feddst", scope["data"])
    fedprune = _average_sparsity("fedprune", scope["data"])
    layers = []
    for tensor in prunable_layers(scope["net"], tuple(scope["shape"])):
        layers.append({"tensor": tensor, "layer_name": tensor.removesuffix(".weight")})
    return {
        "goal": GOALS.get(scope["data"], 0.85),
        "density_of_feddst": round(1 - feddst, 6),
        "density_of_fedprune": last_density(fedprune, scope["rounds"], scope["every"]),
        "layers": layers,
    }


def _average_sparsity(method: str, data: str) -> float:
    """What Table 3 prints of a method; on other data as on MNIST."""
    reported = load_definition("fedlayerprune").reported
    printed = {**reported["table_3_gb"].numbers, **reported["table_3_mb"].numbers}
    numbers = printed.get(data, printed["mnist"])[method]
    assert isinstance(numbers, list)
    return numbers[-1]


def last_density(sparsity: float, rounds: int, every: int) -> float:
    """Return FedPrune's density at the end: its rate grows from 0 in even steps to a given mean.

    >>> last_density(0.33, rounds=20, every=5)
    0.4
    """
    steps = (rounds - 1) // every
    taken = sum(min(done // every, steps) for done in range(1, rounds + 1))
    return round(1 - sparsity * steps * rounds / taken, 6)


@cache
def prunable_layers(net: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the weight tensors of a network that can be pruned, in order of execution."""
    module = nets.build(net, shape, 10, seed=0)
    return Layout.of(module, shape).prunable


def complete(row: StudyRow, scope: Scope) -> StudyRow:
    """Report Table 4's accuracy of CIFAR-10 as the last point of a curve too."""
    is_drawn = "last_point" in scope and scope["printed_as"] == "cifar10"
    if is_drawn and "accuracy_mean:0" in row.reported:
        last = {scope["last_point"]: row.reported["accuracy_mean:0"]}
        row = replace(row, reported={**row.reported, **last})
    return row
