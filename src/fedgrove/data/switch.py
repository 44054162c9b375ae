"""Clients that switch: after some rounds pairs of them exchange all their data, task and all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..errors import InputError, check
from ..seeds import numpy_rng
from .federation import ClientData, Federation
from .scenario import Scenario


def switch(federation: Federation, round: int, pairs: Sequence[tuple[int, int]]) -> Federation:
    """The same federation in which, after ``round`` rounds, each pair exchanges its data.

    What the data are moves: the three parts, the task, a client's own labels. What the device is
    stays: bandwidth, speed, memory, and what it remembers. So every task has as many clients as
    before, and no example is with two of them. Tasks of the round numbered ``round``, the first
    being 0, see the new data, and so does the scoring before it. Switches can follow each other:
    the latest comes last.

    >>> from fedgrove import data
    >>> rooms = switch(data.load("rooms", clients=4), 10, [(0, 3)])
    >>> before, after = rooms.client(0, round=9), rooms.client(0, round=10)
    >>> before is rooms.clients[0], after.test is rooms.clients[3].test
    (True, True)
    """
    if federation.is_lazy:
        raise InputError(
            f"the clients of {federation.name} are made when they are needed; let the function "
            "that makes them take a parameter called round."
        )
    check(round >= 1, "round of a switch", round, "1 or more: the rounds before it")
    latest = max((begin for each in federation.later.values() for begin, _ in each), default=0)
    check(round >= latest, "round of a switch", round, f"{latest} or later, after those before it")
    later = dict(federation.later)
    for one, other in pairs:
        for client in (one, other):
            allowed = f"one of the {len(federation.clients)} clients, numbered from 0"
            check(client in federation.clients, "client of a switch", client, allowed)
        check(one != other, "pair of a switch", f"{one}-{other}", "two clients")
        # As they are then: they may have switched before.
        data = federation.client(one, round), federation.client(other, round)
        later[one] = (*later.get(one, ()), (round, _on_device(data[1], data[0])))
        later[other] = (*later.get(other, ()), (round, _on_device(data[0], data[1])))
    named = ",".join(f"{one}-{other}" for one, other in pairs)
    before = "" if federation.scenario == "none" else f"{federation.scenario} "
    return replace(federation, later=later, scenario=f"{before}switch:{round}:{named}")


def _on_device(data: ClientData, device: ClientData) -> ClientData:
    """The data of one client on the device of another."""
    info = replace(device.info, examples=data.info.examples, task=data.info.task)
    return replace(data, info=info)


def switched(federation: Federation, scenario: Scenario, text: str, seed: int) -> Federation:
    """The federation under a scenario `switch`, which config.toml keeps as it was written."""
    pairs = scenario.pairs
    if isinstance(pairs, int):
        pairs = drawn_pairs(federation, pairs, seed)
    named = ", ".join(f"{one} and {other}" for one, other in pairs)
    rounds = "1 round" if scenario.round == 1 else f"{scenario.round} rounds"
    note = f"after {rounds} these clients exchange their data: {named}"
    changed = switch(federation, scenario.round, pairs)
    return replace(changed, scenario=text, notes=(*changed.notes, note))


def drawn_pairs(federation: Federation, count: int, seed: int) -> tuple[tuple[int, int], ...]:
    """So many pairs of clients, drawn from the seed; of different tasks or kinds, if there are any.

    Whether there are enough does not depend on luck: the task with most clients left gives one.
    """
    clients = numpy_rng(seed, "switch").permutation(federation.ids).tolist()
    kinds = {k: data.info.task or data.kind for k, data in federation.clients.items()}
    if len(set(kinds.values())) == 1:
        # Of one task and no kinds: anybody may exchange with anybody.
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
