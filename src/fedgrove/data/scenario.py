"""Scenarios: noisy labels, drift and missing classes at some clients, and clients that switch."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..errors import check, unknown
from ..seeds import numpy_rng
from .dataset import Ints

KINDS = (
    "none",
    "noisy",
    "noisy:all",
    "drift",
    "drift:train",
    "flipped:SHARE",
    "restricted:K",
    "switch:ROUND:PAIRS",
)
AFFECTED = 0.4
"""Share of clients that a scenario affects (CA-AFP, the ablation of its score weights)."""
SWITCH = re.compile(
    r"(?P<round>\d{1,9}):((?P<count>\d{1,9})|(?P<pairs>\d{1,9}-\d{1,9}(,\d{1,9}-\d{1,9})*))"
)
"""What follows "switch:"."""


@dataclass(frozen=True)
class Scenario:
    """A parsed scenario.

    kind: none, noisy, drift, flipped, restricted or switch.
    clients: the share of clients that are affected.
    share: the share of an affected client's labels that are made random.
    test: whether labels of the test part are made random too.
    k: classes each client keeps; 0 is all of them.
    round: rounds after which clients exchange their data (:mod:`fedgrove.data.switch`).
    pairs: who exchanges with whom; or how many pairs are drawn.
    """

    kind: str
    share: float = 0.0
    test: bool = False
    k: int = 0
    clients: float = AFFECTED
    round: int = 0
    pairs: int | tuple[tuple[int, int], ...] = ()


def parse(text: str) -> Scenario:
    """Read a scenario as the command line writes it.

    `noisy`: 40 % of clients, 30 % of their training and validation labels uniform over all classes;
    test labels stay true, so that the table says what was learnt. `noisy:all` corrupts test labels
    too. `drift`: 40 % of clients, every label uniform, test labels too: CA-AFP replaces 100 % of a
    broken device's labels and does not say that test labels are spared; its spread over clients,
    .31 to .38, is near the .35 that chance accuracy on these clients would give. `drift:train`
    keeps test labels true. `flipped:SHARE`: so many of the clients train on labels in reverse
    order, class c as class C - 1 - c; test labels stay true. `restricted:K`: each client keeps K
    classes drawn from its own, the rest is discarded. Validation labels are part of what a client
    was given, so they are as wrong as its training labels. `switch:ROUND:PAIRS`: after so many
    rounds pairs of clients exchange all their data; PAIRS is how many are drawn, or who they are.

    >>> parse("restricted:2").k, parse("drift").test, parse("noisy").test
    (2, True, False)
    >>> parse("switch:10:2").pairs, parse("switch:10:3-17,4-20").pairs
    (2, ((3, 17), (4, 20)))
    """
    kind, _, value = text.partition(":")
    match kind, value:
        case "none", "":
            return Scenario(kind)
        # The bare words differ: noisy spares the test labels, drift does not.
        case "noisy", ("" | "train" | "all"):
            return Scenario(kind, share=0.3, test=value == "all")
        case "drift", ("" | "train" | "all"):
            return Scenario(kind, share=1.0, test=value != "train")
        case "flipped", _:
            return Scenario(kind, share=1.0, clients=_share(text, value))
        # A minus sign passes, to be refused as out of range rather than as an unknown word.
        case "restricted", _ if value.lstrip("-").isdigit():
            check(int(value) > 0, "scenario", text, "restricted:K with K above 0")
            return Scenario(kind, k=int(value))
        case "switch", _:
            return _switch(text, value)
    raise unknown("scenario", text, KINDS)


def _switch(text: str, value: str) -> Scenario:
    allowed = (
        "switch:ROUND:PAIRS with a round of 1 or more and how many pairs, or who they are, each "
        "client once, as switch:10:2 or switch:10:3-17,4-20"
    )
    match = SWITCH.fullmatch(value)
    check(match is not None and int(match["round"]) > 0, "scenario", text, allowed)
    assert match is not None
    at = int(match["round"])
    if match["count"]:
        check(int(match["count"]) > 0, "scenario", text, allowed)
        return Scenario("switch", round=at, pairs=int(match["count"]))
    pairs = []
    for pair in match["pairs"].split(","):
        one, other = pair.split("-")
        pairs.append((int(one), int(other)))
    named = [client for pair in pairs for client in pair]
    check(len(set(named)) == len(named), "scenario", text, allowed)
    return Scenario("switch", round=at, pairs=tuple(pairs))


def _share(text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    check(0 < share <= 1, "scenario", text, "flipped:SHARE with a share of clients in (0, 1]")
    return share


def affected(scenario: Scenario, clients: int, seed: int) -> frozenset[int]:
    """The clients whose labels a scenario changes: a share of them, drawn from the seed."""
    count = round(scenario.clients * clients) if scenario.share else 0
    return frozenset(numpy_rng(seed, "scenario").permutation(clients)[:count].tolist())


def kept(scenario: Scenario, y: Ints, rng: np.random.Generator) -> Ints:
    """Positions of the labels a client keeps: those of K classes drawn from its own."""
    if not scenario.k:
        return np.arange(len(y))
    classes = rng.permutation(np.unique(y))[: scenario.k]
    return np.flatnonzero(np.isin(y, classes))


def corrupted(scenario: Scenario, y: Ints, classes: int, rng: np.random.Generator) -> Ints:
    """A copy of the labels in which round(share * n), at random positions, are uniform.

    Uniform over all classes, the true one included. Flipped labels are in reverse order instead.
    """
    if scenario.kind == "flipped":
        return classes - 1 - y
    count = round(scenario.share * len(y))
    chosen = rng.permutation(len(y))[:count]
    noisy = y.copy()
    noisy[chosen] = rng.integers(classes, size=len(chosen))
    return noisy


def notes(scenario: Scenario) -> tuple[str, ...]:
    """Caveats of the scenario that a table of results must carry."""
    if scenario.share and scenario.test:
        return (f"{scenario.kind}: affected clients are tested on random labels too",)
    return ()


def enough(scenario: Scenario, classes: int) -> None:
    """Refuse a restriction to more classes than there are."""
    allowed = f"restricted to at most {classes} classes"
    check(scenario.k <= classes, "scenario", f"restricted:{scenario.k}", allowed)
