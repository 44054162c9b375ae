"""Find the files of a set: in the folder you name, in the cache, or by a checked download."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch

from ..errors import InputError, MissingError
from .dataset import Array

Arrays = dict[str, Array]
UNPACKED = "1"
"""Version of the unpacked copies; a reader that gives other arrays than before must change it."""


@dataclass(frozen=True)
class FileFormat:
    """One form a set is published in: the files it needs, under a folder, and their reader."""

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Arrays]


@dataclass(frozen=True)
class Download:
    """A file of the original source; ``to`` is its path in the cache, ``md5`` its checksum."""

    url: str
    md5: str
    to: str


def cache_folder() -> Path:
    """``FEDGROVE_CACHE``, or the user's own cache."""
    return Path(os.environ.get("FEDGROVE_CACHE") or pooch.os_cache("fedgrove"))


def folders(data_dir: str | Path | None) -> list[Path]:
    """Where to look, in order: the folder named (or ``FEDGROVE_DATA``), then the cache."""
    option = "data_dir"
    named = data_dir
    if named is None:
        option = "FEDGROVE_DATA"
        named = os.environ.get("FEDGROVE_DATA")
    # A variable that is set but empty counts as not set.
    if not named:
        return [cache_folder()]
    if not Path(named).is_dir():
        raise InputError(
            f"{option} is '{named}', which is not a folder; "
            f"name the folder that holds the data files."
        )
    return [Path(named), cache_folder()]


def arrays(
    name: str,
    forms: Sequence[FileFormat],
    downloads: Sequence[Download],
    source: str,
    data_dir: str | Path | None,
) -> Arrays:
    """Find a set in any of its forms, download it if it is nowhere, and read it."""
    places = folders(data_dir)
    available = _find(places, forms)
    if available is None and downloads:
        _download(name, downloads, places, source)
        available = _find(places, forms)
    if available is None:
        files = " or ".join(f"'{form.files[0]}'" for form in forms)
        raise MissingError(
            f"{name} was not found: looked for {files} in {_listed(places)}"
            f"{_incomplete(places, forms)}. Get it from {source}, "
            f"put it in a folder and name that folder by FEDGROVE_DATA or --data-dir; "
            f"digits, motion, rooms, tags and diabetes need no files."
        )
    paths, form = available
    return unpacked(name, paths, lambda: form.read(paths))


def _find(
    places: Sequence[Path], forms: Sequence[FileFormat]
) -> tuple[list[Path], FileFormat] | None:
    """The first form whose files are all in one folder: folders in order, then forms in order."""
    for place in places:
        for form in forms:
            paths = [_plain_or_gzipped(place / file) for file in form.files]
            if all(path.exists() for path in paths):
                return paths, form
    return None


def _incomplete(places: Sequence[Path], forms: Sequence[FileFormat]) -> str:
    """Which files are missing beside those that are there, as the end of a sentence."""
    for place in places:
        for form in forms:
            missing = []
            for file in form.files:
                if not _plain_or_gzipped(place / file).exists():
                    missing.append(f"'{file}'")
            if len(missing) < len(form.files):
                return f", where of {len(form.files)} files {', '.join(missing)} is missing"
    return ""


def _plain_or_gzipped(path: Path) -> Path:
    """A ``.gz`` file, or its decompressed version where that is there instead."""
    # A .tar.gz is read as it is; the .tar beside it is not what the readers expect.
    may_be_decompressed = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    if may_be_decompressed:
        decompressed = path.with_name(path.name.removesuffix(".gz"))
        if decompressed.exists():
            return decompressed
    return path


def _listed(places: Sequence[Path]) -> str:
    return " and ".join(f"'{place}'" for place in places)


def _download(
    name: str, downloads: Sequence[Download], places: Sequence[Path], source: str
) -> None:
    for download in downloads:
        target = cache_folder() / download.to
        try:
            pooch.retrieve(
                download.url, f"md5:{download.md5}", fname=target.name, path=target.parent
            )
        # Network, TLS, checksum or disk, from any of the libraries below pooch: whatever went
        # wrong, the user needs the same advice.
        except Exception as error:
            reason = type(error).__name__
            if str(error):
                reason = str(error).splitlines()[0][:160]
            raise MissingError(
                f"{name} is neither in {_listed(places)} nor could it be downloaded from "
                f"{download.url} ({reason}). Get it from {source}, put it in a folder and name "
                f"that folder by FEDGROVE_DATA or --data-dir."
            ) from error


# ---- unpacked copies: decompressing and parsing are slow, loading plain arrays is not ------------


def unpacked(name: str, paths: Sequence[Path], read: Callable[[], Arrays]) -> Arrays:
    """What ``read`` gives, kept uncompressed in the cache until a file changes in size or time.

    Without a writable cache no copy is kept and nothing fails.
    """
    # A colon ("emnist:letters") may not stand in a file's name on every system.
    target = cache_folder() / "unpacked" / f"{name.replace(':', '-')}-{_key(paths)}.npz"
    # A copy that is missing or damaged, in any of the ways np.load reports it, is made again.
    with (
        contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(target) as copy,
    ):
        return {key: copy[key] for key in copy.files}
    fresh = read()
    with contextlib.suppress(OSError):
        _write(target, fresh)
    return fresh


def _key(paths: Sequence[Path]) -> str:
    """A digest of every source file's path, size and modification time."""
    marks = []
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            status = file.stat()
            marks.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr((UNPACKED, marks)).encode()).hexdigest()[:16]


def _write(target: Path, fresh: Arrays) -> None:
    """Write beside the target, then rename: a reader sees all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **fresh)  # type: ignore[arg-type]
        os.replace(name, target)
    finally:
        # After a successful rename there is nothing left to remove.
        with contextlib.suppress(OSError):
            os.unlink(name)


# ---- npz files -----------------------------------------------------------------------------------


def npz(path: Path) -> Arrays:
    """All arrays of an npz file; pickled objects are refused, since loading one can run code."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one bare array")
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise InputError(
            f"there is no file '{path}'; give an existing npz file with arrays x, y and client."
        ) from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"'{path}' cannot be read as npz ({error}); "
            f"write it with numpy.savez from plain number or text arrays."
        ) from error


def need(contents: Arrays, names: Sequence[str], path: str) -> None:
    """Refuse the contents of a file that lacks one of the arrays named."""
    missing = [name for name in names if name not in contents]
    if missing:
        present = ", ".join(sorted(contents)) or "none"
        raise InputError(
            f"'{path}' has no array {', '.join(missing)} (it has {present}); "
            f"add it and save the file again."
        )
