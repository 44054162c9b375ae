"""Scenarios: wrong labels and missing classes at some clients, and clients that switch data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError, check, unknown
from ..renamed import find_old_names
from ..seeds import numpy_rng
from .dataset import Ints
from .federation import ClientData, Federation

SCENARIOS = (
    "none",
    "noisy",
    "noisy:all",
    "drift",
    "drift:train",
    "flipped:SHARE",
    "restricted:K",
    "switch:ROUND:PAIRS",
)
AFFECTED_SHARE = 0.4
"""Share of clients that a scenario affects (CA-AFP, the ablation of its score weights)."""
SWITCH = re.compile(
    r"(?P<round>\d{1,9}):((?P<count>\d{1,9})|(?P<pairs>\d{1,9}-\d{1,9}(,\d{1,9}-\d{1,9})*))"
)
"""The part after "switch:"."""


@dataclass(frozen=True)
class Scenario:
    """A parsed scenario.

    Args:
        kind: none, noisy, drift, flipped, restricted or switch.
        share: The share of an affected client's labels that become random.
        test: Whether labels of the test part become random too.
        k: Classes that each client keeps; 0 for all of them.
        clients: The share of clients that are affected.
        round: Rounds after which clients exchange their data (:func:`switch`).
        pairs: The clients that exchange their data, or the number of pairs to draw.
    """

    kind: str
    share: float = 0.0
    test: bool = False
    k: int = 0
    clients: float = AFFECTED_SHARE
    round: int = 0
    pairs: int | tuple[tuple[int, int], ...] = ()


def parse(text: str) -> Scenario:
    """Read a scenario as the command line writes it.

    - `noisy`: 40 % of clients, 30 % of their training and validation labels uniform over all
      classes; test labels stay true, so that the table shows what was learnt. `noisy:all` corrupts
      test labels too.
    - `drift`: 40 % of clients, every label uniform, test labels too: CA-AFP replaces 100 % of a
      broken device's labels and does not mention that test labels are spared; its spread over
      clients, .31 to .38, is near the .35 that chance accuracy on these clients would give.
      `drift:train` keeps test labels true.
    - `flipped:SHARE`: this share of the clients train on labels in reverse order, class c as class
      C - 1 - c; test labels stay true.
    - `restricted:K`: each client keeps K classes drawn from its own; the rest is discarded.
    - `switch:ROUND:PAIRS`: after ROUND rounds pairs of clients exchange all their data; PAIRS is
      the number of pairs to draw, or a list of them.

    Validation labels are wrong wherever training labels are: a client got both in the same way.

    >>> parse("restricted:2").k, parse("drift").test, parse("noisy").test
    (2, True, False)
    >>> parse("switch:10:2").pairs, parse("switch:10:3-17,4-20").pairs
    (2, ((3, 17), (4, 20)))
    """
    kind, _, value = text.partition(":")
    match kind, value:
        case "none", "":
            return Scenario(kind)
        # The defaults differ: noisy spares the test labels, drift does not.
        case "noisy", ("" | "train" | "all"):
            return Scenario(kind, share=0.3, test=value == "all")
        case "drift", ("" | "train" | "all"):
            return Scenario(kind, share=1.0, test=value != "train")
        case "flipped", _:
            return Scenario(kind, share=1.0, clients=_parse_share(text, value))
        # A minus sign passes, to be refused as out of range rather than as an unknown scenario.
        case "restricted", _ if value.lstrip("-").isdigit():
            check(int(value) > 0, "scenario", text, "restricted:K with K above 0")
            return Scenario(kind, k=int(value))
        case "switch", _:
            return _parse_switch(text, value)
    raise unknown("scenario", text, SCENARIOS)


def _parse_switch(text: str, value: str) -> Scenario:
    allowed = (
        "switch:ROUND:PAIRS with a round of 1 or more and the number of pairs, or a list of pairs "
        "with each client once, such as switch:10:2 or switch:10:3-17,4-20"
    )
    match = SWITCH.fullmatch(value)
    check(match is not None and int(match["round"]) > 0, "scenario", text, allowed)
    assert match is not None
    at = int(match["round"])
    if match["count"]:
        check(int(match["count"]) > 0, "scenario", text, allowed)
        return Scenario("switch", round=at, pairs=int(match["count"]))
    pairs = []
    clients: list[int] = []
    for pair in match["pairs"].split(","):
        one, other = pair.split("-")
        pairs.append((int(one), int(other)))
        clients += pairs[-1]
    check(len(set(clients)) == len(clients), "scenario", text, allowed)
    return Scenario("switch", round=at, pairs=tuple(pairs))


def _parse_share(text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    check(0 < share <= 1, "scenario", text, "flipped:SHARE with a share of clients in (0, 1]")
    return share


# ---- wrong labels and missing classes ------------------------------------------------------------


def check_class_count(scenario: Scenario, classes: int) -> None:
    """Refuse a restriction to more classes than there are."""
    allowed = f"restricted to at most {classes} classes"
    check(scenario.k <= classes, "scenario", f"restricted:{scenario.k}", allowed)


def draw_affected_clients(scenario: Scenario, clients: int, seed: int) -> frozenset[int]:
    """Draw the clients whose labels a scenario changes."""
    count = round(scenario.clients * clients) if scenario.share else 0
    return frozenset(numpy_rng(seed, "scenario").permutation(clients)[:count].tolist())


def select_classes(scenario: Scenario, y: Ints, rng: np.random.Generator) -> Ints:
    """Return the positions of the labels that a client keeps: those of K classes it draws."""
    if not scenario.k:
        return np.arange(len(y))
    classes = rng.permutation(np.unique(y))[: scenario.k]
    return np.flatnonzero(np.isin(y, classes))


def corrupt_labels(scenario: Scenario, y: Ints, classes: int, rng: np.random.Generator) -> Ints:
    """Return a copy of the labels in which round(share * n) at random positions are uniform.

    Uniform over all classes, the true one included. `flipped` reverses the order of the labels
    instead.
    """
    if scenario.kind == "flipped":
        return classes - 1 - y
    count = round(scenario.share * len(y))
    chosen = rng.permutation(len(y))[:count]
    noisy = y.copy()
    noisy[chosen] = rng.integers(classes, size=len(chosen))
    return noisy


def list_caveats(scenario: Scenario) -> tuple[str, ...]:
    """Return the caveats of the scenario that a table of results must carry."""
    if scenario.share and scenario.test:
        return (f"{scenario.kind}: affected clients are tested on random labels too",)
    return ()


# ---- clients that switch data --------------------------------------------------------------------


def switch(federation: Federation, round: int, pairs: Sequence[tuple[int, int]]) -> Federation:
    """Let pairs of clients exchange their data after some rounds.

    The data move: the three parts, the task, the labels that a client knows. The device stays:
    bandwidth, speed, memory, and what the client remembers. So every task has as many clients as
    before, and no example is with two of them.

    Args:
        federation: A federation in memory. It may have switches already; the latest comes last.
        round: The number of rounds before the switch. Tasks of the round with this number, the
            first being 0, see the new data, and so does the scoring before it.
        pairs: The clients that exchange their data.

    Returns:
        The federation with the switch.

    Raises:
        InputError: The clients are created when needed, or a round or client is not possible.

    >>> from fedgrove import data
    >>> rooms = switch(data.load("rooms", clients=4), 10, [(0, 3)])
    >>> before, after = rooms.client(0, round=9), rooms.client(0, round=10)
    >>> before is rooms.clients[0], after.test is rooms.clients[3].test
    (True, True)
    """
    if federation.is_lazy:
        raise InputError(
            f"the clients of {federation.name} are created when needed; give the function that "
            "creates them a parameter called round."
        )
    check(round >= 1, "round of a switch", round, "1 or more: the rounds before it")
    latest = max((begin for each in federation.later.values() for begin, _ in each), default=0)
    allowed = f"{latest} or later, after the switches before it"
    check(round >= latest, "round of a switch", round, allowed)
    later = dict(federation.later)
    for one, other in pairs:
        for client in (one, other):
            allowed = f"one of the {len(federation.clients)} clients, numbered from 0"
            check(client in federation.clients, "client of a switch", client, allowed)
        check(one != other, "pair of a switch", f"{one}-{other}", "two clients")
        # The data in that round: the clients may have switched before.
        first = federation.client(one, round)
        second = federation.client(other, round)
        later[one] = (*later.get(one, ()), (round, _move_to_device(second, first)))
        later[other] = (*later.get(other, ()), (round, _move_to_device(first, second)))
    listed = ",".join(f"{one}-{other}" for one, other in pairs)
    before = "" if federation.scenario == "none" else f"{federation.scenario} "
    return replace(federation, later=later, scenario=f"{before}switch:{round}:{listed}")


def _move_to_device(data: ClientData, device: ClientData) -> ClientData:
    """Return the data of one client on the device of another."""
    info = replace(device.info, examples=data.info.examples, task=data.info.task)
    return replace(data, info=info)


def apply_switch(federation: Federation, scenario: Scenario, text: str, seed: int) -> Federation:
    """Apply a scenario `switch`; config.toml keeps its ``text`` as it was written."""
    pairs = scenario.pairs
    if isinstance(pairs, int):
        pairs = draw_pairs(federation, pairs, seed)
    listed = ", ".join(f"{one} and {other}" for one, other in pairs)
    rounds = "1 round" if scenario.round == 1 else f"{scenario.round} rounds"
    note = f"after {rounds} these clients exchange their data: {listed}"
    changed = switch(federation, scenario.round, pairs)
    return replace(changed, scenario=text, notes=(*changed.notes, note))


def draw_pairs(federation: Federation, count: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Draw pairs of clients of different tasks or kinds, if there are several.

    Whether there are enough does not depend on the draw: the task with most clients left gives one.
    """
    clients = numpy_rng(seed, "switch").permutation(federation.ids).tolist()
    kinds = {k: data.info.task or data.kind for k, data in federation.clients.items()}
    if len(set(kinds.values())) == 1:
        # One task and no kinds: any two clients can exchange their data.
        kinds = {k: str(k) for k in kinds}
    largest = max(Counter(kinds.values()).values())
    most = min(len(clients) // 2, len(clients) - largest)
    allowed = f"at most {most} pairs of clients of different tasks"
    check(count <= most, "pairs of a switch", count, allowed)
    pairs = []
    for _ in range(count):
        left = Counter(kinds[k] for k in clients)
        # max takes the first of equals, in the order drawn.
        one = max(clients, key=lambda k: left[kinds[k]])
        other = next(k for k in clients if kinds[k] != kinds[one])
        clients = [k for k in clients if k not in (one, other)]
        pairs.append((one, other))
    return tuple(pairs)


__getattr__ = find_old_names(__name__)
