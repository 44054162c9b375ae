"""Users' own Python files, ``path/file.py:Class``: importing them, and the networks in them."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from ..errors import InputError, unknown
from ..renamed import find_old_names

_PREFIX = "fedgrove_user_"
"""The beginning of the module names of users' files."""


class UserFile(NamedTuple):
    """A user's file: its path as it was given, and the SHA-256 of the text that was imported."""

    path: str
    sha256: str


_FILES: dict[str, UserFile] = {}
"""By the name of the module that was made of it."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_file_spec(text: str) -> bool:
    """Return whether ``text`` names a user's file and a network class in it."""
    return ".py:" in text or text.endswith(".py")


def find_user_file(cls: type) -> UserFile | None:
    """Return the user's file that a network or method class came from, or None."""
    return _FILES.get(cls.__module__)


def find_files_in_pickle(pickled: bytes) -> list[Path]:
    """Return the user's files whose classes pickled bytes name; another process imports them."""
    files = []
    for name, file in _FILES.items():
        if name.encode() in pickled:
            files.append(Path(file.path))
    return files


def build_user_net(
    spec: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Make a user's network.

    The class is called as ``Class(shape, classes)``, ``Class(classes)`` or ``Class()``, by its
    signature.
    """
    cls = find_net_class(spec)
    args, kwargs = _match_arguments(spec, cls, shape, classes, options)
    try:
        module: nn.Module = cls(*args, **kwargs)
    except Exception as error:
        raise InputError(
            f"{spec} was called with shape {shape} and {classes} classes and raised "
            f"{type(error).__name__}: {error}; make it accept these arguments."
        ) from error
    return module


def find_net_class(spec: str) -> type[nn.Module]:
    """Import the network class that ``path/file.py:Class`` names."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise InputError(f"net '{spec}' names no class; write path/file.py:Class.")
    networks: dict[str, type[nn.Module]] = {}
    for key, value in vars(import_file(Path(path))).items():
        is_network = isinstance(value, type) and issubclass(value, nn.Module)
        # A file with "from torch.nn import Module" has that one too.
        if is_network and value is not nn.Module:
            networks[key] = value
    if name not in networks:
        raise unknown(f"network class in {path}", name, networks)
    return networks[name]


def import_file(path: Path) -> ModuleType:
    """Import a user's file of networks or methods as a module.

    Its name is made from the file's text: equal text is imported once, under one name in every
    process, so that instances of its classes are of one type and can be pickled.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of a Python file that exists.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"{_PREFIX}{path.stem}_{digest[:16]}"
    # The latest path: the file may have been moved, and still have the same text.
    _FILES[name] = UserFile(str(path), digest)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; give one that ends with .py.")
    module = importlib.util.module_from_spec(spec)
    # Before it is run, as the import statement does it: dataclasses and pickle look there.
    sys.modules[name] = module
    # The file may import others of its folder, as if it were run as a script.
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        # Half-run: the next attempt must not get it.
        del sys.modules[name]
        raise InputError(
            f"{path} could not be imported, {type(error).__name__}: {error}; run it alone to see "
            "the error."
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _match_arguments(
    spec: str,
    cls: type[nn.Module],
    shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to call a user's class with.

    Parameters called shape, classes or num_classes are given by name. If there are none, or if that
    does not fit, the number of required parameters decides.
    """
    signature = inspect.signature(cls)
    attempts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    known: dict[str, Any] = {"shape": shape, "classes": classes, "num_classes": classes}
    by_name = {name: value for name, value in known.items() if name in signature.parameters}
    if by_name:
        attempts.append(((), by_name))
    n_required = 0
    for parameter in signature.parameters.values():
        is_required = parameter.default is parameter.empty and parameter.kind in _POSITIONAL
        # The user's options fill theirs.
        if is_required and parameter.name not in options:
            n_required += 1
    by_position: tuple[tuple[Any, ...], ...] = ((shape, classes), (classes,), ())
    for args in by_position:
        if len(args) == n_required:
            attempts.append((args, {}))
    for args, kwargs in attempts:
        try:
            signature.bind(*args, **kwargs, **options)
        except TypeError:
            continue
        return args, {**kwargs, **options}
    name = cls.__name__
    with_options = f" with options {', '.join(options)}" if options else ""
    raise InputError(
        f"{spec} takes {signature}; {name}(shape, classes), {name}(classes) and {name}() were tried"
        f"{with_options}: give it one of these signatures."
    )


__getattr__ = find_old_names(__name__)
