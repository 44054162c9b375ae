"""Methods, one file each: ``fedgrove list methods``, ``fedgrove show NAME``.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py``, which defines one
method class.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from ..errors import unknown
from .ca_afp import CAAFP
from .clusterfl import ClusterFL
from .ditto import Ditto
from .efficientfl import EfficientFL
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedchar import FedCHAR
from .feddrop import FedDrop
from .fedprox import FedProx
from .fedrolex import FedRolex
from .fedsnip import FedSNIP
from .fixedprune import FixedPrune
from .global_ft import GlobalFT
from .hermes import Hermes
from .heterofl import HeteroFL
from .ifca import IFCA
from .lg_fedavg import LGFedAvg
from .local import Local
from .safl import SAFL

__all__ = [
    "CAAFP",
    "IFCA",
    "SAFL",
    "ClusterFL",
    "Ditto",
    "EfficientFL",
    "FedAvg",
    "FedBN",
    "FedCHAR",
    "FedDrop",
    "FedProx",
    "FedRolex",
    "FedSNIP",
    "FixedPrune",
    "GlobalFT",
    "Hermes",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "find",
    "name_of",
    "names",
]


def names() -> list[str]:
    """The methods there are, as the command line calls them."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__))


def find(name: str) -> type[Any]:
    """The class of a method.

    >>> find("lg-fedavg").__name__
    'LGFedAvg'
    """
    if name not in names():
        raise unknown("method", name, names())
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    found: list[type[Any]] = [
        v for v in vars(module).values() if _is_method(v) and v.__module__ == module.__name__
    ]
    return found[0]


def name_of(method: object) -> str:
    """What the command line calls a method.

    A method of the user's own goes by its class.

    >>> name_of(LGFedAvg())
    'lg-fedavg'
    """
    package, _, file = type(method).__module__.rpartition(".")
    return file.replace("_", "-") if package == __name__ else type(method).__name__.lower()


def _is_method(value: object) -> bool:
    return (
        isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and hasattr(value, "paper_bytes")
    )
