"""Methods, one file each: ``fedgrove list methods``, ``fedgrove show NAME``.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py``, which defines one
method class. A file may also hold ``PRESETS``, instances of that class by name: ``ca-afp:paper`` is
``ca_afp.PRESETS["paper"]``.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ..core import AnyMethod
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
    "make",
    "name_of",
    "names",
    "presets",
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


def presets(name: str) -> Mapping[str, AnyMethod]:
    """The presets of a method, by name.

    >>> sorted(presets("ca-afp")), sorted(presets("fedavg"))
    (['paper'], [])
    """
    module = importlib.import_module(find(name).__module__)
    return getattr(module, "PRESETS", {})


def make(word: str) -> AnyMethod:
    """A method as the command line writes it: ``NAME`` with its defaults, or ``NAME:PRESET``.

    >>> make("ca-afp:paper").phases
    (0, 0, 1)
    """
    name, colon, preset = word.partition(":")
    if not colon:
        method: AnyMethod = find(name)()
        return method
    available = presets(name)
    if preset not in available:
        raise unknown(f"preset of {name}", preset, available)
    return available[preset]


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
