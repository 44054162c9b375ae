"""What goes wrong at some clients: noisy labels, drift, missing classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import check, unknown
from ..seeds import numpy_rng
from .dataset import Ints

KINDS = ("none", "noisy", "noisy:all", "drift", "drift:train", "restricted:K")
AFFECTED = 0.4
"""Share of clients that a scenario touches (CA-AFP, the ablation of its score weights)."""


@dataclass(frozen=True)
class Scenario:
    """A parsed choice: ``share`` of labels made random, in the ``test`` part too or not; at most ``k`` classes."""

    kind: str
    share: float = 0.0
    test: bool = False
    k: int = 0


def parse(text: str) -> Scenario:
    """Read a scenario as the command line writes it.

    `noisy`: 40 % of clients, 30 % of their training and validation labels uniform over all classes; test labels stay
    true, so that the table says what was learnt. `noisy:all` corrupts test labels too.
    `drift`: 40 % of clients, every label uniform, test labels too: CA-AFP replaces 100 % of a broken device's labels
    and does not say that test labels are spared; its spread over clients, .31 to .38, is near the .35 that chance
    accuracy on these clients would give. `drift:train` keeps test labels true.
    `restricted:K`: each client keeps K classes drawn from its own, the rest is discarded.
    Validation labels are part of what a client was given, so they are as wrong as its training labels.

    >>> parse("restricted:2").k, parse("drift").test, parse("noisy").test
    (2, True, False)
    """
    kind, _, value = text.partition(":")
    match kind, value:
        case "none", "":
            return Scenario(kind)
        case "noisy", ("" | "train" | "all"):
            return Scenario(kind, share=0.3, test=value == "all")
        case "drift", ("" | "train" | "all"):
            return Scenario(kind, share=1.0, test=value != "train")
        case "restricted", _ if value.lstrip("-").isdigit():
            check(int(value) > 0, "scenario", text, "restricted:K with K above 0")
            return Scenario(kind, k=int(value))
    raise unknown("scenario", text, KINDS)


def affected(scenario: Scenario, clients: int, seed: int) -> frozenset[int]:
    """Which clients a noisy or drift scenario touches: round(0.4 K) of them, drawn from the seed."""
    count = round(AFFECTED * clients) if scenario.share else 0
    return frozenset(numpy_rng(seed, "scenario").permutation(clients)[:count].tolist())


def kept(scenario: Scenario, y: Ints, rng: np.random.Generator) -> Ints:
    """Places of the labels a client keeps: those of K classes drawn from its own."""
    if not scenario.k:
        return np.arange(len(y))
    own = np.unique(y)
    return np.flatnonzero(np.isin(y, rng.permutation(own)[: scenario.k]))


def corrupted(scenario: Scenario, y: Ints, classes: int, rng: np.random.Generator) -> Ints:
    """A copy of the labels in which round(share * n), at random places, are uniform over all classes."""
    places = rng.permutation(len(y))[: round(scenario.share * len(y))]
    wrong = y.copy()
    wrong[places] = rng.integers(classes, size=len(places))
    return wrong


def notes(scenario: Scenario) -> tuple[str, ...]:
    """What a table must say of the scenario."""
    if scenario.share and scenario.test:
        return (f"{scenario.kind}: affected clients are tested on random labels too",)
    return ()


def enough(scenario: Scenario, classes: int) -> None:
    """Refuse more classes than there are."""
    check(
        scenario.k <= classes,
        "scenario",
        f"restricted:{scenario.k}",
        f"restricted to at most {classes} classes",
    )
