"""Data: data sets, partitions, scenarios, splits and devices."""

from .custom_clients import from_clients
from .federation import ClientData, Defaults, Examples, Federation
from .loading import describe, from_arrays, load, names
from .mix import mix
from .scenario import switch

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
