"""Engines: where the work is done. Every engine gives the same answer."""

from __future__ import annotations

from ..core import Engine
from ..errors import unknown
from .pool import Pool, cores
from .serial import Serial

__all__ = ["Pool", "Serial", "choose", "names"]


def names() -> list[str]:
    """What ``--engine`` takes."""
    return ["auto", "pool", "serial"]


def choose(name: str = "auto") -> Engine:
    """The engine of that name; ``auto`` takes a worker per core, or this process where there is one core."""
    if name not in names():
        raise unknown("engine", name, names())
    if name == "serial" or (name == "auto" and cores() == 1):
        return Serial()
    return Pool()
