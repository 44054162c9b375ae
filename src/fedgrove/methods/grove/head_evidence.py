"""How heads move, as evidence of which clients are similar: what Grove finds its groups by.

A head (the last linear layer) sees what a client's labels do to the same features; its change is
short, and says more of the kind of a client than the change of all other layers. Of each client two
sums are kept, of its 1st, 3rd, ... and of its 2nd, 4th, ... report, so that a division can be made
from one and tried on the other (:mod:`.stability`).
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ... import trees
from ...core import MOST_AT_ONCE, Carry
from ...nets.layout import Layout
from ..stc.ternary import SparseTernary
from .stability import nearest_others

EVIDENCE = 0.5
"""The share of a head's change that is sent as evidence."""
FEW_CLIENTS = 4
"""With fewer clients than this no client changes its group."""
LONGEST_CHANGE = 5.0
"""A change that is longer than this many times the median of its round is shortened to that: no
client decides alone what all have in common."""

Evidence = dict[int, tuple[int, Tensor, Tensor]]
"""By client: its reports, and how its head moved unlike others' in the odd and the even ones."""


def head_change(carry: Carry, layout: Layout) -> Tensor:
    """Grove: how training changed the last layer: the larger half of it, as signs."""
    before = trees.flatten(trees.pick(carry["model"], layout.head))
    after = trees.flatten(trees.pick(carry["local"], layout.head))
    return SparseTernary(EVIDENCE)({"head": after - before})["head"]


def unlike_others(heads: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Grove: how each head moved unlike the others of its round, as a vector of length 1.

    >>> unlike_others({4: torch.tensor([3.0, 1.0]), 7: torch.tensor([1.0, 1.0])})
    {4: tensor([1., 0.]), 7: tensor([-1.,  0.])}
    """
    if not heads:
        return {}
    lengths = {}
    for client, moved in heads.items():
        lengths[client] = float(moved.double().norm())
    longest = LONGEST_CHANGE * median_low(lengths.values())
    bounded = {}
    for client, moved in heads.items():
        if lengths[client] > longest:
            # By its length first: the quotient alone may be too small for a number.
            moved = (moved.double() / lengths[client] * longest).to(moved.dtype)
        bounded[client] = moved
    mean = torch.stack(list(bounded.values())).mean(0)
    return {client: normalize(moved - mean, dim=0) for client, moved in bounded.items()}


def gathered(
    before: Mapping[int, tuple[int, Tensor, Tensor]],
    unlike: Mapping[int, Tensor],
    forget: float,
    most: int,
) -> Evidence:
    """Grove: the evidence for groups after the reports of a round, of at most ``most`` clients.

    A sum fades by ``forget`` when its client adds to it. All rounds have equal weight: the first
    steps are the longest and the least informative.
    """
    evidence = dict(before)
    for client, moved in unlike.items():
        if client not in evidence and len(evidence) >= most:
            continue
        zero = torch.zeros_like(moved)
        count, odd, even = evidence.get(client, (0, zero, zero))
        if count % 2:
            even = (1 - forget) * even + moved
        else:
            odd = (1 - forget) * odd + moved
        evidence[client] = (count + 1, odd, even)
    return dict(sorted(evidence.items()))


def halves(
    evidence: Mapping[int, tuple[int, Tensor, Tensor]],
) -> tuple[list[int], Tensor, Tensor]:
    """Grove: the clients with both halves of evidence known, with a row for each in either half."""
    ready = []
    odd_rows = []
    even_rows = []
    for client, (count, odd, even) in evidence.items():
        # Reports alternate between the halves: with two, each half has one.
        if count >= 2:
            ready.append(client)
            odd_rows.append(odd)
            even_rows.append(even)
    if not ready:
        return [], torch.zeros(0, 0), torch.zeros(0, 0)
    return ready, torch.stack(odd_rows), torch.stack(even_rows)


def regrouped(
    groups: Mapping[int, int],
    evidence: Mapping[int, tuple[int, Tensor, Tensor]],
    unlike: Mapping[int, Tensor],
) -> dict[int, int]:
    """Grove: the groups after a round; a client that reported may change its group.

    Clients that have none yet join one with their first report. Clients without stored evidence
    join again with each; of them the last are remembered.
    """
    after = dict(groups)
    members = {client: known for client, known in evidence.items() if client in groups}
    ready, odd, even = halves(members)
    if len(ready) >= FEW_CLIENTS:
        now = torch.tensor([groups[client] for client in ready])
        nearest = nearest_others(normalize(odd.double() + even.double()), now)
        for client, label in zip(ready, nearest.tolist(), strict=True):
            # Only clients of this round: of the others nothing new is known.
            if client in unlike:
                after[client] = label
    for client, moved in unlike.items():
        if client not in members:
            # Behind all others, as the last that joined.
            after.pop(client, None)
            after[client] = nearest_group(moved, members, groups)
    # Without evidence a client's group is remembered in this dictionary alone: it is kept small.
    joined = [client for client in after if client not in evidence]
    for client in joined[: max(0, len(joined) - MOST_AT_ONCE)]:
        del after[client]
    return after


def nearest_group(
    moved: Tensor,
    members: Mapping[int, tuple[int, Tensor, Tensor]],
    groups: Mapping[int, int],
) -> int:
    """Grove: the group whose members' heads move most as this one does.

    >>> east = (2, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.1]))
    >>> north = (2, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]))
    >>> nearest_group(torch.tensor([-0.5, 1.0]), {3: east, 8: north}, {3: 1, 8: 2})
    2
    """
    totals: dict[int, Tensor] = {}
    for client, (_, odd, even) in members.items():
        member = normalize(odd.double() + even.double(), dim=0)
        totals[groups[client]] = totals.get(groups[client], 0) + member
    cosines = {}
    # In order of number: of equal cosines max() takes the first.
    for group in sorted(totals):
        cosines[group] = float(moved.double() @ normalize(totals[group], dim=0))
    return max(cosines, key=lambda group: cosines[group])
