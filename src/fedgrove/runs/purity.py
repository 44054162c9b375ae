"""How well groups of clients agree with what the clients really are, where that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run


def purity(groups: Mapping[int, Hashable], truth: Mapping[int, Hashable]) -> float:
    """The share of clients that are what most of their group are.

    Clients of whom only one of the two is known are left out; 1 where none is left. Groups of one
    client are pure: look at how many groups there are, too.

    >>> purity({0: 0, 1: 0, 2: 0, 3: 1}, {0: "a", 1: "a", 2: "b", 3: "b"})
    0.75
    """
    kinds_of: dict[Hashable, Counter[Hashable]] = {}
    for client, group in groups.items():
        if client in truth:
            kinds_of.setdefault(group, Counter())[truth[client]] += 1
    known = sum(kinds.total() for kinds in kinds_of.values())
    if not known:
        return 1.0
    return sum(max(kinds.values()) for kinds in kinds_of.values()) / known


def truth_of(run: Run, at_round: int) -> dict[int, str]:
    """What each client is in a round: its task, or the kind that generated data were made for.

    Empty where that is not known, or all are the same. No method is told.
    """
    federation = run.federation
    # Data that are made when they are needed would all be made for this.
    if federation.is_lazy:
        return {}
    truth = {}
    for k in federation.ids:
        data = federation.client(k, at_round)
        what = data.info.task or data.kind
        if what:
            truth[k] = what
    return truth if len(set(truth.values())) > 1 else {}


def purity_of(run: Run, state: Any, at_round: int) -> dict[str, float | int]:
    """Purity and number of the groups in a method's state, as metrics.jsonl has them.

    Nothing where there are no groups, or the truth is not known. ``at_round`` is the round whose
    data the groups were made from.
    """
    groups: Mapping[int, int] | None = getattr(state, "groups", None)
    if not groups:
        return {}
    truth = truth_of(run, at_round)
    if not truth:
        return {}
    return {"groups": len(set(groups.values())), "purity": round(purity(groups, truth), 8)}
