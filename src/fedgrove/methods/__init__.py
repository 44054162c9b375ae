"""Methods, one file each: ``fedgrove list methods``, ``fedgrove show NAME``; or a user's own.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py``, which defines one
method class. A file may also hold ``PRESETS``, instances of that class by name: ``ca-afp:paper`` is
``ca_afp.PRESETS["paper"]``. A method in a file of the user's own is ``path/file.py:Class``, or
``path/file.py:Class:PRESET`` if that file holds ``PRESETS``.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core import AnyMethod
from ..errors import InputError, MethodError, unknown
from ..nets import custom
from .adfedwcp import AdFedWCP
from .ca_afp import CAAFP
from .caldas_dropout import CaldasDropout
from .clusterfl import ClusterFL
from .ditto import Ditto
from .efficientfl import EfficientFL
from .fedapta import FedAPTA
from .fedavg import FedAvg
from .fedbabu import FedBABU
from .fedbn import FedBN
from .fedchar import FedCHAR
from .feddrop import FedDrop
from .feddst import FedDST
from .fedem import FedEM
from .fedgen import FedGen
from .fedkd import FedKD
from .fedlayerprune import FedLayerPrune
from .fedlc import FedLC
from .fedlps import FedLPS
from .fedmask import FedMask
from .fedmp import FedMP
from .fedntd import FedNTD
from .fedpaq import FedPAQ
from .fedprox import FedProx
from .fedprune import FedPrune
from .fedrolex import FedRolex
from .fedsnip import FedSNIP
from .fedwcp import FedWCP
from .fixedprune import FixedPrune
from .global_ft import GlobalFT
from .grove import Grove
from .hermes import Hermes
from .heterofl import HeteroFL
from .ifca import IFCA
from .lg_fedavg import LGFedAvg
from .local import Local
from .lotteryfl import LotteryFL
from .moon import MOON
from .pfed1bs import PFed1BS
from .pfedgate import PFedGate
from .qfedcg import QFedCG
from .safl import SAFL
from .stc import STC

__all__ = [
    "CAAFP",
    "IFCA",
    "MOON",
    "SAFL",
    "STC",
    "AdFedWCP",
    "CaldasDropout",
    "ClusterFL",
    "Ditto",
    "EfficientFL",
    "FedAPTA",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedCHAR",
    "FedDST",
    "FedDrop",
    "FedEM",
    "FedGen",
    "FedKD",
    "FedLC",
    "FedLPS",
    "FedLayerPrune",
    "FedMP",
    "FedMask",
    "FedNTD",
    "FedPAQ",
    "FedProx",
    "FedPrune",
    "FedRolex",
    "FedSNIP",
    "FedWCP",
    "FixedPrune",
    "GlobalFT",
    "Grove",
    "Hermes",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "LotteryFL",
    "PFed1BS",
    "PFedGate",
    "QFedCG",
    "find",
    "find_own",
    "label_of",
    "make",
    "name_of",
    "names",
    "part_modules",
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
    for value in vars(module).values():
        if _is_method(value) and _module_name(value) == name:
            found: type[Any] = value
            return found
    raise MethodError(
        f"{module.__file__} defines no method; a method is a frozen dataclass with the functions "
        f"{_listed(FUNCTIONS)}."
    )


def part_modules() -> list[ModuleType]:
    """The modules of methods' own folders that hold parts: all but the method itself."""
    modules = []
    for home in pkgutil.iter_modules(__path__):
        if home.ispkg:
            package = importlib.import_module(f"{__name__}.{home.name}")
            for module in pkgutil.iter_modules(package.__path__):
                if module.name != "method":
                    modules.append(importlib.import_module(f"{package.__name__}.{module.name}"))
    return modules


def presets(name: str) -> Mapping[str, AnyMethod]:
    """The presets of a method, by name.

    >>> sorted(presets("ca-afp")), sorted(presets("fedavg"))
    (['paper'], [])
    """
    cls = find(name)
    return getattr(sys.modules[cls.__module__], "PRESETS", {})


def make(word: str) -> AnyMethod:
    """A method as the command line writes it: ``NAME`` with its defaults, or ``NAME:PRESET``.

    Or ``path/file.py:Class``, a method of the user's own; that file is run.

    >>> make("ca-afp:paper").phases
    (0, 0, 1)
    """
    if custom.is_spec(word):
        return _make_own(word)
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
    return _module_name(type(method)) or type(method).__name__.lower()


def _module_name(cls: type) -> str:
    """The name of the file or folder of this package that defines a class; "" for any other."""
    package = f"{__name__}."
    if not cls.__module__.startswith(package):
        return ""
    return cls.__module__.removeprefix(package).partition(".")[0].replace("_", "-")


def _is_method(value: object) -> bool:
    if not isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return all(callable(getattr(value, name, None)) for name in FUNCTIONS)


# ---- methods of the user's own -------------------------------------------------------------------

FUNCTIONS = ("init", "deliver", "plan", "fold", "work")
"""What a method must be able to do (:class:`fedgrove.core.Method`)."""
FIELDS = {"local": "local: LocalTraining | None = None", "codec": "codec: Codec = Dense()"}
"""The fields that a run sets or reads, and how to write them."""


def label_of(word: str) -> str:
    """A word of :func:`make` as part of a folder's name, which on some systems holds no colon.

    >>> label_of("ca-afp:paper"), label_of("mine/fedem.py:FedEM"), label_of("x.py:FedEM:two")
    ('ca-afp-paper', 'fedem', 'fedem-two')
    """
    if not custom.is_spec(word):
        return word.replace(":", "-")
    _, name, preset = _split(word)
    label = name.lower()
    return f"{label}-{preset}" if preset else label


def find_own(path: str, name: str) -> type[Any]:
    """The class of a method in a user's file, once it is known to be one."""
    module = custom.import_file(Path(path))
    spec = f"{path}:{name}"
    value: Any = getattr(module, name, None)
    if value is None:
        raise unknown(f"method in {path}", name, _methods_in(module))
    # What dataclasses note on a class that is one of them.
    params = getattr(value, "__dataclass_params__", None)
    if not isinstance(value, type) or params is None:
        raise InputError(
            f"{spec} is not a dataclass; a method is a class under @dataclass(frozen=True)."
        )
    if value.__module__ != module.__name__:
        raise InputError(
            f"{spec} is imported there from {value.__module__}; name the file that defines it."
        )
    if not params.frozen:
        raise InputError(f"{spec} can be changed; write @dataclass(frozen=True) above the class.")
    missing = [each for each in FUNCTIONS if not callable(getattr(value, each, None))]
    if missing:
        raise InputError(
            f"{spec} has no {_listed(missing)}; a method has the functions {_listed(FUNCTIONS)}: "
            "write those that are missing, as fedgrove.core.Method describes them."
        )
    fields = {field.name for field in dataclasses.fields(value)}
    for field, line in FIELDS.items():
        if field not in fields:
            raise InputError(f"{spec} has no field '{field}'; write in the class: {line}")
    return value


def _make_own(word: str) -> AnyMethod:
    path, name, preset = _split(word)
    cls = find_own(path, name)
    if preset:
        available = _own_presets(cls, path)
        if preset not in available:
            raise unknown(f"preset of {path}:{name}", preset, available)
        return available[preset]
    without_default = []
    for field in dataclasses.fields(cls):
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.init and field.default is dataclasses.MISSING and not has_factory:
            without_default.append(field.name)
    if without_default:
        raise InputError(
            f"{path}:{name} has no default for {_listed(without_default)}; give every field one, "
            "or make the method in Python: fedgrove.run(Class(...))."
        )
    method: AnyMethod = cls()
    return method


def _split(word: str) -> tuple[str, str, str]:
    """Path, class and preset, which may be empty."""
    match = re.fullmatch(r"(.+?\.py):([^:]+)(?::([^:]+))?", word)
    if match is None:
        raise InputError(
            f"method '{word}' names no class; write path/file.py:Class, or with a preset "
            "path/file.py:Class:PRESET."
        )
    return match[1], match[2], match[3] or ""


def _own_presets(cls: type, path: str) -> dict[str, AnyMethod]:
    """The file's presets that are of this class: it may hold several methods."""
    given: Any = getattr(sys.modules[cls.__module__], "PRESETS", {})
    if not isinstance(given, Mapping):
        raise InputError(
            f"PRESETS in {path} is a {type(given).__name__}; it must be a dictionary of methods by "
            "name."
        )
    held: Mapping[str, AnyMethod] = given
    for name, method in held.items():
        if not dataclasses.is_dataclass(method) or isinstance(method, type):
            raise InputError(
                f"PRESETS[{name!r}] in {path} is {method!r}; it must be a method, as "
                f"{cls.__name__}(...)."
            )
    return {name: method for name, method in held.items() if type(method) is cls}


def _methods_in(module: ModuleType) -> list[str]:
    """The classes of a file that look like methods."""
    found = []
    for name, value in vars(module).items():
        is_own_class = isinstance(value, type) and value.__module__ == module.__name__
        if is_own_class and hasattr(value, "plan") and hasattr(value, "fold"):
            found.append(name)
    return found


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
