"""What the server remembers of devices to tell their tasks: the sums of their updates (FedAPTA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST_REMEMBERED = 1000
"""How many devices' updates, of those seen last, are kept and compared."""


@dataclass(frozen=True)
class Trace:
    """The sum of a device's updates, where it ever had the weight, and what the last one counted.

    >>> first = Trace(torch.tensor([2.0, 0.0]), torch.tensor([True, False]))
    >>> second = Trace(torch.tensor([4.0, 8.0]), torch.tensor([True, True]))
    >>> both = first.then(second, fade=0.5)
    >>> both.total, both.first_length
    (tensor([4., 4.]), 2.0)
    """

    total: Tensor
    present: Tensor
    weight: float = 1.0
    first: float = 0.0
    """The length of the first update; 0 if there is but one, which is ``total``."""
    is_settled: bool = False
    """Whether the sum is final, and the device stays in its group."""

    @property
    def first_length(self) -> float:
        """FedAPTA: how long a device's first update was, when its task was new."""
        return self.first or length(self.total)

    def then(self, update: Trace, fade: float) -> Trace:
        """FedAPTA: the trace after one more update, which counts ``fade`` times the last one."""
        weight = fade * self.weight
        total = self.total + weight * update.total
        return Trace(total, self.present | update.present, weight, self.first_length)

    def settled(self) -> Trace:
        """FedAPTA: this trace of a device, now final."""
        return replace(self, first=self.first_length, is_settled=True)


def length(vector: Tensor) -> float:
    """FedAPTA: the Euclidean norm of an update, in double precision."""
    return float(vector.double().norm())


def has_switched(
    update: Trace, first: float, own: Tensor, others: Sequence[Tensor], margin: float
) -> bool:
    """FedAPTA: whether an update agrees clearly better with another group than with its own.

    ``own`` is the sum of what the other devices of its group have moved, ``others`` that of each
    other group, ``first`` the length of the device's first update. The difference of the cosines
    with another group and with its own, times the length of the update as a share of ``first``,
    must be above ``margin``. Once a task is learnt, what is left of updates is short and points
    anywhere; on a new task they are as long as the first was.

    >>> update = Trace(torch.tensor([0.0, 1.0]), torch.tensor([True, True]))
    >>> east, north = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    >>> has_switched(update, 1.0, east, [north], 0.1), has_switched(update, 1.0, north, [east], 0.1)
    (True, False)
    >>> has_switched(update, 20.0, east, [north], 0.1)
    False
    """
    # At most 1: an update longer than the first is no stronger evidence.
    weight = min(1.0, length(update.total) / first) if first else 1.0
    here = agreement(update, own)
    return any(weight * (agreement(update, other) - here) > margin for other in others)


def agreement(update: Trace, direction: Tensor) -> float:
    """FedAPTA: the cosine of an update with a direction, over the weights that the device has."""
    there = torch.where(update.present, direction.double(), 0.0)
    own = update.total.double()
    lengths = own.norm() * there.norm()
    return float((own @ there) / lengths.clamp_min(torch.finfo(torch.float64).tiny))


def remembered(
    before: Mapping[int, Trace],
    groups: Mapping[int, int],
    updates: Mapping[int, Trace],
    fade: float,
    settle: float,
    forget: float,
) -> dict[int, Trace]:
    """FedAPTA: the traces of all devices after a round: those of the longest absence first.

    A device that is new, or whose task has changed, is known by its update alone; one that has
    learnt its task is settled; of the others the update is added. The three numbers are those of
    :class:`fedgrove.methods.fedapta.task_groups.Hdbscan`.
    """
    directions = group_directions(before, groups)
    # Those who were absent stay in front: a dictionary keeps its order, and the front is forgotten
    # first.
    after = {k: trace for k, trace in before.items() if k not in updates}
    for k, update in updates.items():
        known = before.get(k)
        if known is None:
            after[k] = update
            continue
        group = groups[k]
        # Without the device itself, which would always agree with its own sum.
        own = directions[group] - known.total.double()
        others = [direction for g, direction in directions.items() if g != group]
        first = known.first_length
        if has_switched(update, first, own, others, forget):
            after[k] = update
        elif known.is_settled or length(update.total) < settle * first:
            after[k] = known.settled()
        else:
            after[k] = known.then(update, fade)
    newest = list(after)[-max(MOST_REMEMBERED, len(updates)) :]
    return {k: after[k] for k in newest}


def group_directions(traces: Mapping[int, Trace], groups: Mapping[int, int]) -> dict[int, Tensor]:
    """FedAPTA: by group: the sum of what its devices have moved in all."""
    directions: dict[int, Tensor] = {}
    # By number: a sum's last bits depend on the order of its terms.
    for k in sorted(traces):
        total = traces[k].total.double()
        group = groups[k]
        directions[group] = directions.get(group, torch.zeros_like(total)) + total
    return directions
