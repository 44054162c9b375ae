"""Data: sets, partitions, scenarios, splits and device profiles."""

from .federation import ClientData, Defaults, Examples, Federation
from .loading import describe, from_arrays, from_clients, load, names

__all__ = [
    "ClientData",
    "Defaults",
    "Examples",
    "Federation",
    "describe",
    "from_arrays",
    "from_clients",
    "load",
    "names",
]
