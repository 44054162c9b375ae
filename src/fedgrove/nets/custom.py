"""The user's own networks: ``path/file.py:Class``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import InputError, unknown

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_spec(net: str) -> bool:
    """Whether ``net`` names a file and a class in it."""
    return ".py:" in net or net.endswith(".py")


def load(spec: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Make the user's network: ``Class(shape, classes)``, ``Class(classes)`` or ``Class()``, by its signature."""
    cls = find(spec)
    args, kwargs = _arguments(spec, cls, shape, classes, options)
    try:
        module: nn.Module = cls(*args, **kwargs)
    except Exception as error:
        raise InputError(
            f"{spec} was called with shape {shape} and {classes} classes and raised {type(error).__name__}: {error}; "
            "make it accept these."
        ) from error
    return module


def find(spec: str) -> type[nn.Module]:
    """The class that ``path/file.py:Class`` names."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise InputError(f"net '{spec}' names no class; write path/file.py:Class.")
    found = vars(_imported(Path(path)))
    own = [
        k
        for k, v in found.items()
        if isinstance(v, type) and issubclass(v, nn.Module) and v is not nn.Module
    ]
    if name not in own:
        raise unknown(f"network class in {path}", name, own)
    cls: type[nn.Module] = found[name]
    return cls


def _imported(path: Path) -> ModuleType:
    """The file as a module, under a name made from its text: the same text is imported once, in every process."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of a Python file that exists.")
    name = f"fedgrove_user_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; give one that ends with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            f"{path} could not be imported, {type(error).__name__}: {error}; run it by itself."
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _arguments(
    spec: str,
    cls: type[nn.Module],
    shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How to call ``cls``: arguments called shape, classes or num_classes by name, else by how many it requires."""
    signature = inspect.signature(cls)
    known = {"shape": shape, "classes": classes, "num_classes": classes}
    named: dict[str, Any] = {k: v for k, v in known.items() if k in signature.parameters}
    required = [
        p for p in signature.parameters.values() if p.default is p.empty and p.kind in _POSITIONAL
    ]
    open_ = [p for p in required if p.name not in options]
    forms: tuple[tuple[Any, ...], ...] = ((shape, classes), (classes,), ())
    tries = [((), named)] * bool(named) + [(form, {}) for form in forms if len(form) == len(open_)]
    for args, kwargs in tries:
        try:
            signature.bind(*args, **kwargs, **options)
        except TypeError:
            continue
        return args, {**kwargs, **options}
    name, given = cls.__name__, f" with options {', '.join(options)}" if options else ""
    raise InputError(
        f"{spec} takes {signature}; {name}(shape, classes), {name}(classes) and {name}() were tried{given}: "
        "give it one of these signatures."
    )
