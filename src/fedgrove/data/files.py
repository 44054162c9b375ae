"""Where the files of a set are: the folder you name, the user's cache, or the original source with a checksum."""

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

from ..errors import InputError
from .dataset import Array

Arrays = dict[str, Array]
UNPACKED = "1"
"""Version of the unpacked copies; a reader that gives other arrays than before must change it."""


@dataclass(frozen=True)
class Form:
    """One shape a set comes in: the files it needs, under a folder, and the function that reads them."""

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Arrays]


@dataclass(frozen=True)
class Download:
    """A file of the original source; ``to`` is where it belongs in the cache, ``md5`` what it must hash to."""

    url: str
    md5: str
    to: str


def cache_folder() -> Path:
    """``FEDGROVE_CACHE``, or the user's own cache."""
    return Path(os.environ.get("FEDGROVE_CACHE") or pooch.os_cache("fedgrove"))


def folders(data_dir: str | Path | None) -> list[Path]:
    """Where to look, in order: the folder named (or ``FEDGROVE_DATA``), then the cache."""
    named = os.environ.get("FEDGROVE_DATA") if data_dir is None else data_dir
    if not named:
        return [cache_folder()]
    if not Path(named).is_dir():
        how = "FEDGROVE_DATA" if data_dir is None else "data_dir"
        raise InputError(
            f"{how} is '{named}', which is not a folder; name the folder that holds the data files."
        )
    return [Path(named), cache_folder()]


def arrays(
    name: str,
    forms: Sequence[Form],
    downloads: Sequence[Download],
    source: str,
    data_dir: str | Path | None,
) -> Arrays:
    """Find a set in any of its forms, folder by folder, download it if it is nowhere, and read it."""
    places = folders(data_dir)
    found = _find(places, forms)
    if found is None and downloads:
        _download(name, downloads, places, source)
        found = _find(places, forms)
    if found is None:
        raise InputError(_missing(name, forms, places, source))
    paths, form = found
    return unpacked(name, paths, lambda: form.read(paths))


def _find(places: Sequence[Path], forms: Sequence[Form]) -> tuple[list[Path], Form] | None:
    for place in places:
        for form in forms:
            paths = [_either(place / file) for file in form.files]
            if all(path.exists() for path in paths):
                return paths, form
    return None


def _either(path: Path) -> Path:
    """A file that may come gzipped or not."""
    other = path.with_name(path.name.removesuffix(".gz"))
    return (
        other
        if path.suffix == ".gz" and not path.name.endswith(".tar.gz") and other.exists()
        else path
    )


def _missing(name: str, forms: Sequence[Form], places: Sequence[Path], source: str) -> str:
    files = " or ".join(f"'{form.files[0]}'" for form in forms)
    looked = " and ".join(f"'{place}'" for place in places)
    return (
        f"{name} was not found: looked for {files} in {looked}. Get it from {source}, put it in a folder "
        f"and name that folder by FEDGROVE_DATA or --data-dir; digits and motion need no files."
    )


def _download(
    name: str, downloads: Sequence[Download], places: Sequence[Path], source: str
) -> None:
    for d in downloads:
        target = cache_folder() / d.to
        try:
            pooch.retrieve(d.url, f"md5:{d.md5}", fname=target.name, path=target.parent)
        except Exception as error:  # requests, urllib3, checksum, disk: whatever it is, the person needs the same help
            looked = " and ".join(f"'{place}'" for place in places)
            reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise InputError(
                f"{name} is neither in {looked} nor could it be downloaded from {d.url} ({reason}). Get it from "
                f"{source}, put it in a folder and name that folder by FEDGROVE_DATA or --data-dir."
            ) from error


def unpacked(name: str, paths: Sequence[Path], read: Callable[[], Arrays]) -> Arrays:
    """What ``read`` gives, kept uncompressed in the cache until a file changes in size or time; no cache, no copy."""
    target = cache_folder() / "unpacked" / f"{name}-{_key(paths)}.npz"
    with (
        contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(target) as kept,
    ):
        return {k: kept[k] for k in kept.files}
    fresh = read()
    with contextlib.suppress(OSError):
        _write(target, fresh)
    return fresh


def _key(paths: Sequence[Path]) -> str:
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    marks = [(str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
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
        with contextlib.suppress(OSError):
            os.unlink(name)


def npz(path: Path) -> Arrays:
    """All arrays of an npz file, never a pickle."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one bare array")
            return {k: file[k] for k in file.files}
    except FileNotFoundError:
        raise InputError(
            f"there is no file '{path}'; give an existing npz file with arrays x, y and client."
        ) from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"'{path}' cannot be read as npz ({error}); write it with numpy.savez from plain number or text arrays."
        ) from error


def need(found: Arrays, names: Sequence[str], path: str) -> None:
    """Refuse a file that lacks an array."""
    lacking = [n for n in names if n not in found]
    if lacking:
        has = ", ".join(sorted(found)) or "none"
        raise InputError(
            f"'{path}' has no array {', '.join(lacking)} (it has {has}); add it and save the file again."
        )
