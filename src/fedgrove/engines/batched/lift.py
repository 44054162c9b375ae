"""Stages as a shape and its numbers, so that runs which differ only in numbers train in one stack.

``lift`` takes every float out of a stage (learning rate, mu, decay, clip ...) and leaves a hashable skeleton; ``fill``
puts numbers, or tensors, back. Parts are written with ``self.mu`` and never notice: they must only not branch on it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """Where a number was."""

    place: int


@dataclass(frozen=True)
class Shape:
    """A dataclass with its numbers taken out."""

    type: type[Any]
    fields: tuple[tuple[str, Any], ...]


def lift(value: Any, numbers: list[float]) -> Any:
    """The skeleton of a stage or part; its floats are appended to ``numbers``.

    >>> from fedgrove.parts.objective import Proximal
    >>> numbers = []
    >>> lift(Proximal(0.5), numbers) == lift(Proximal(0.1), numbers), numbers
    (False, [0.5, 0.1])
    >>> lift(Proximal(0.5), []) == lift(Proximal(0.1), [])
    True
    """
    if isinstance(value, float) and value:  # a 0 is a choice, not a number: what is off stays off
        numbers.append(value)
        return Slot(len(numbers) - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = tuple(
            (f.name, lift(getattr(value, f.name), numbers)) for f in dataclasses.fields(value)
        )
        return Shape(type(value), pairs)
    if isinstance(value, tuple):
        return tuple(lift(v, numbers) for v in value)
    return value


def fill(skeleton: Any, numbers: Any) -> Any:
    """The stage again, with ``numbers[i]`` in place of its i-th float; nothing is checked anew.

    >>> from fedgrove.parts.objective import Proximal
    >>> numbers = []
    >>> fill(lift(Proximal(0.5), numbers), [2 * n for n in numbers])
    Proximal(mu=1.0, to='model')
    """
    if isinstance(skeleton, Slot):
        return numbers[skeleton.place]
    if isinstance(skeleton, Shape):
        made = object.__new__(skeleton.type)
        for name, value in skeleton.fields:
            object.__setattr__(made, name, fill(value, numbers))
        return made
    if isinstance(skeleton, tuple):
        return tuple(fill(v, numbers) for v in skeleton)
    return skeleton
