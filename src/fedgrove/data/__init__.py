"""Data: sets, partitions, scenarios, splits and device profiles."""

from .federation import ClientData, Defaults, Examples, Federation
from .loading import describe, from_arrays, from_clients, load, names
from .mix import mix
from .switch import switch

__all__ = [
    "ClientData",
    "Defaults",
    "Examples",
    "Federation",
    "describe",
    "from_arrays",
    "from_clients",
    "load",
    "mix",
    "names",
    "switch",
]
