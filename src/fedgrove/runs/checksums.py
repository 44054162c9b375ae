"""What shows that a file of a run folder is what was written: SHA-256, in one of three places.

::

    NAME.0123456789abcdef.safetensors    in the name: states, their trees, what clients remember
    "sha256": "..."                      in the file: the manifests of checkpoints, sweep.json
    checksums.txt                        everything else; ``sha256sum -c`` reads it too
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from ..errors import DamageError

FILE = "checksums.txt"
SEAL = "sha256"
Piece = bytes | memoryview
"""A part of a file's content."""
SHORT = 16
"""How many of the 64 hexadecimal digits a file's name holds: against accidents they are enough."""


def digest(*pieces: Piece) -> str:
    """The SHA-256 of some bytes, of one piece or of several, in hexadecimal."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a folder; a name or a link that leads out of the folder is refused."""
    path = folder / name
    if _leads_straight(folder, name):
        return path
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a link to itself, or a zero byte in the name
        is_inside = False
    if not is_inside:
        raise DamageError(
            f"{path} is outside of {folder}; nothing outside of it is read or written. "
            "Use only run folders that fedgrove made."
        )
    return path


def _leads_straight(folder: Path, name: str) -> bool:
    """Whether nothing on the way from a folder to a file is a link or leads back.

    Each round asks a dozen times: to resolve both paths looks at every folder above them as well.
    """
    # A junction of Windows is not told from a folder.
    steps = _steps(name) if os.name != "nt" else None
    if steps is None:
        return False
    place = str(folder)
    for step in steps:
        place = f"{place}/{step}"
        if os.path.islink(place):
            return False
    return True


@lru_cache(maxsize=64)
def _steps(name: str) -> tuple[str, ...] | None:
    """The parts of a name that goes downwards only; None for any other."""
    path = PurePath(name)
    goes_down = bool(path.parts) and not path.anchor and ".." not in path.parts
    return path.parts if goes_down and "\0" not in name else None


def is_plain(name: Any) -> bool:
    """Whether a name is one of a file, and not a path to it."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def read(path: Path) -> bytes:
    """A file's bytes; a file that cannot be read is a damage."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; {_ADVICE}") from None
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error.strerror or error}; {_ADVICE}") from None


_ADVICE = "restore it from a copy, or run it again."


def damaged(path: Path, why: str = "it is not what was written") -> DamageError:
    """The error for a file that can be read but is wrong."""
    return DamageError(f"{path} is damaged: {why}; {_ADVICE}")


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    return parsed(read(path), path)


def parsed(data: bytes, path: Path) -> Any:
    """The content of a JSON file whose bytes are read already."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise damaged(path, "it is not JSON") from None


# ---- in the name ---------------------------------------------------------------------------------


def named(stem: str, *pieces: Piece) -> str:
    """The name of a file of tensors: what is in it can be checked by its name."""
    return f"{stem}.{digest(*pieces)[:SHORT]}.safetensors"


def read_named(folder: Path, name: str) -> bytes:
    """The bytes of a file that :func:`named` named."""
    if not is_plain(name):
        raise DamageError(f"{folder} names a file '{name}', which is not in it; {_ADVICE}")
    path = inside(folder, name)
    data = read(path)
    _, _, written = name.removesuffix(".safetensors").rpartition(".")
    if digest(data)[:SHORT] != written:
        raise damaged(path)
    return data


# ---- in the file ---------------------------------------------------------------------------------


def sealed(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON file that holds its own checksum. All keys must be text."""
    body = json.dumps(content)
    seal = digest(body.encode())
    if content and indent is None:
        # The same text: what comes last stands before the closing brace.
        return f'{body[:-1]}, "{SEAL}": "{seal}"}}\n'.encode()
    return (json.dumps({**content, SEAL: seal}, indent=indent) + "\n").encode()


def read_sealed(path: Path, new_keys: Collection[str] | None = None) -> dict[str, Any]:
    """What :func:`sealed` wrote.

    Also a file of before there were seals, if it has none of the keys that only newer ones have.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise damaged(path)
    # Python's JSON gives the same text again: numbers keep their digits and keys their order.
    seal = content.pop(SEAL, None)
    is_from_before = (
        seal is None and new_keys is not None and not any(key in content for key in new_keys)
    )
    if not is_from_before and seal != digest(json.dumps(content).encode()):
        raise damaged(path)
    return content


# ---- in checksums.txt ----------------------------------------------------------------------------


def listed(digests: Mapping[str, str]) -> bytes:
    """The content of checksums.txt: the checksum of each file by its path in the folder."""
    return "".join(f"{value}  {name}\n" for name, value in digests.items()).encode()


def read_list(folder: Path) -> dict[str, str]:
    """What checksums.txt says; one that is damaged names no file, or a wrong checksum."""
    lines = read(inside(folder, FILE)).decode(errors="replace").splitlines()
    digests = {}
    for line in lines:
        value, _, name = line.partition("  ")
        digests[name] = value
    return digests


def read_listed(folder: Path, name: str, digests: Mapping[str, str]) -> bytes:
    """The bytes of a file that checksums.txt lists."""
    path = inside(folder, name)
    data = read(path)
    if name not in digests:
        raise damaged(folder / FILE, f"it does not list {path}")
    if digest(data) != digests[name]:
        raise DamageError(
            f"{path} does not match {folder / FILE}, so one of the two is damaged; {_ADVICE}"
        )
    return data
