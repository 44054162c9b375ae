"""Files of a run folder: written whole or not at all, and checked with SHA-256 when read.

The checksum of a file is in one of three places::

    NAME.0123456789abcdef.safetensors    in its name: states, their trees, clients' memories
    "sha256": "..."                      in the file: the manifests of checkpoints, sweep.json
    checksums.txt                        everything else; ``sha256sum -c`` reads it too

A file that cannot be written, as on a full disk, raises :class:`~fedgrove.errors.EngineError` and
leaves nothing behind.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from ..errors import DamageError, EngineError, FolderTakenError, spell_hint, spell_option

CHECKSUMS = "checksums.txt"
PARTIAL = ".part"
"""The ending of a file's name while it is being written."""
SEAL = "sha256"
NAME_DIGITS = 16
"""How many of the 64 hexadecimal digits a file's name has: enough against accidents."""


def compute_checksum(data: bytes) -> str:
    """Return the SHA-256 of a run's file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


# ---- writing -------------------------------------------------------------------------------------


def write_bytes(path: Path, data: bytes, sync: bool = False) -> None:
    """Write a file of a run folder so that it exists whole or not at all.

    Args:
        path: The file.
        data: Its content.
        sync: Whether to wait until the content is on the disk before the file gets its name, so
            that it is whole after a power cut too.

    Raises:
        EngineError: The file cannot be written.
    """
    # A worker that outlives its killed server may write the same file, and an engine writes in
    # threads: each writes under another name.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a run folder, are on the disk."""
    # Windows cannot open a folder, and keeps names safe by itself.
    if os.name == "nt" and path.is_dir():
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> EngineError:
    """Return the error for a file that could not be written, with advice for full disks."""
    advice = _ADVICE.get(error.errno or 0, "make sure that it can be written to.")
    return EngineError(f"{path} could not be written: {error.strerror or error}; {advice}")


_ADVICE = {
    errno.ENOENT: "its folder does not exist.",
    errno.ENOSPC: "free some space on its disk.",
    errno.EDQUOT: "free some of your space on its disk.",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f).",
    errno.EIO: "the disk has errors: check it.",
}


# ---- reading -------------------------------------------------------------------------------------

_RESTORE = "restore it from a copy, or run it again."


def check_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that must lie in a run folder.

    Raises:
        DamageError: The name, or a link on the way, leads out of the folder.
    """
    path = folder / name
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


def is_file_name(name: Any) -> bool:
    """Whether a manifest's entry is the name of a file in the run folder, not a path elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def is_plain_name(name: str) -> bool:
    """Whether a name from a message is plain enough for the name of a file in a run folder."""
    is_plain = re.fullmatch(r"[\w:.-]{1,100}", name, re.ASCII) is not None
    return is_plain and ".." not in name


def read_bytes(path: Path) -> bytes:
    """Return the content of a file in a run folder, or raise :class:`DamageError`."""
    try:
        data = _read_regular(path)
    except MemoryError:
        raise damaged(path, "it is larger than the memory") from None
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; {_RESTORE}") from None
    except OSError as error:
        reason = error.strerror or error
        raise DamageError(f"{path} cannot be read: {reason}; {_RESTORE}") from None
    if data is None:
        raise damaged(path, "it is not a file")
    return data


def _read_regular(path: Path) -> bytes | None:
    """Return the content of a file; None for a device or a pipe, which may have no end."""
    # Opening a pipe would wait for a writer.
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        return file.read()


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def damaged(path: Path, why: str = "its content has changed") -> DamageError:
    """Return the error for a file of a run folder that can be read but is wrong."""
    return DamageError(f"{path} is damaged: {why}; {_RESTORE}")


def decode_text(data: bytes, path: Path) -> str:
    """Return the text of a run folder's file from its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise damaged(path, "it is not text") from None


def parse_json(data: bytes, path: Path) -> Any:
    """Return the content of a run folder's JSON file from its bytes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise damaged(path, "it is not JSON") from None


def read_run_options(text: str, path: Path) -> dict[str, Any]:
    """Return the table [run] in the text of a run's config.toml; ``path`` is for the message."""
    try:
        options = tomllib.loads(text).get("run", {})
    except (tomllib.TOMLDecodeError, RecursionError):
        raise damaged(path, "it is not TOML") from None
    if not isinstance(options, dict):
        raise damaged(path, "run is not a table")
    return options


# ---- a checksum in the name ----------------------------------------------------------------------


def name_with_checksum(stem: str, data: bytes) -> str:
    """Return the name of a run's file of tensors, which has its checksum."""
    return f"{stem}.{compute_checksum(data)[:NAME_DIGITS]}.safetensors"


def read_named(folder: Path, name: str) -> bytes:
    """Return the content of a run's file whose name has its checksum."""
    if not is_file_name(name):
        raise DamageError(f"{folder} names a file '{name}', which is not in it; {_RESTORE}")
    path = check_inside(folder, name)
    data = read_bytes(path)
    _, _, expected = name.removesuffix(".safetensors").rpartition(".")
    if compute_checksum(data)[:NAME_DIGITS] != expected:
        raise damaged(path)
    return data


# ---- a checksum in the file ----------------------------------------------------------------------


def seal_json(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return a JSON file that contains its own checksum. All keys must be strings."""
    body = json.dumps(content)
    seal = compute_checksum(body.encode())
    if content and indent is None:
        # The text that dumps() would give with the seal as the last key, without a second pass
        # over a long manifest.
        return f'{body[:-1]}, "{SEAL}": "{seal}"}}\n'.encode()
    return (json.dumps({**content, SEAL: seal}, indent=indent) + "\n").encode()


def read_sealed(path: Path, new_keys: Collection[str] | None = None) -> dict[str, Any]:
    """Return the content of a file that :func:`seal_json` made.

    Args:
        path: The file.
        new_keys: Keys that only files with a seal have. A file that has neither these nor a seal
            was written by a version without seals, and is read as it is. None: a seal is required.
    """
    content = parse_json(read_bytes(path), path)
    if not isinstance(content, dict):
        raise damaged(path)
    # Python's JSON gives the same text again: numbers keep their digits and keys their order.
    seal = content.pop(SEAL, None)
    is_older = seal is None and new_keys is not None and not content.keys() & set(new_keys)
    if not is_older and seal != compute_checksum(json.dumps(content).encode()):
        raise damaged(path)
    return content


# ---- a checksum in checksums.txt -----------------------------------------------------------------


def format_checksums(checksums: Mapping[str, str]) -> bytes:
    """Return the content of checksums.txt: the checksum of each file by its path in the folder."""
    return "".join(f"{value}  {name}\n" for name, value in checksums.items()).encode()


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in checksums.txt by file; damaged lines give names that do not exist."""
    text = read_bytes(check_inside(folder, CHECKSUMS)).decode(errors="replace")
    checksums = {}
    for line in text.splitlines():
        value, _, name = line.partition("  ")
        checksums[name] = value
    return checksums


def read_listed(folder: Path, name: str, checksums: Mapping[str, str]) -> bytes:
    """Return the content of a file that checksums.txt lists."""
    path = check_inside(folder, name)
    data = read_bytes(path)
    if name not in checksums:
        raise damaged(folder / CHECKSUMS, f"it does not list {path}")
    if compute_checksum(data) != checksums[name]:
        raise DamageError(
            f"{path} does not match {folder / CHECKSUMS}, so one of the two is damaged; {_RESTORE}"
        )
    return data


# ---- folders -------------------------------------------------------------------------------------

RUNS = Path("runs")
"""Where runs, sweeps and choices are kept without ``out``: a folder in the current one."""


def folder_exists(path: Path) -> FolderTakenError:
    """Return the error for a run folder that exists already."""
    if (path / "summary.json").exists():
        return FolderTakenError(
            f"the run folder {path} has a finished run; runs are never overwritten. Give a "
            f"different {spell_option('out')}."
        )
    resume = spell_hint(f"fedgrove resume {path}", f"fedgrove.resume({str(path)!r})")
    return FolderTakenError(
        f"the run folder {path} exists; runs are never overwritten. Give a different "
        f"{spell_option('out')}, or resume it with: {resume}"
    )


def fresh_name(root: Path, stem: str) -> Path:
    """Return a free name for a run folder: ``stem``, ``stem-2``, ``stem-3``, ..."""
    # A colon (the data set "emnist:letters") is not allowed in folder names on every system.
    stem = stem.replace(":", "-")
    # File systems allow 255 bytes; the rest is for "-2" and for temporary files next to it.
    stem = stem.encode()[:200].decode(errors="ignore")
    path = root / stem
    n = 2
    while path.exists():
        path = root / f"{stem}-{n}"
        n += 1
    return path
