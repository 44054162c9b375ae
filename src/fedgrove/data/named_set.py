"""A named data set: what defines it, and how its files are found, downloaded and read."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pooch

from ..errors import FedgroveError, InputError, MissingError, check
from .dataset import Array, Dataset
from .federation import Defaults, Federation

if TYPE_CHECKING:
    from .build import Choices

Arrays = dict[str, Array]
SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
"""The endings of files with a user's own data."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""A file of text may also end in one of these, as in ``anna.csv.gz``."""


@dataclass(frozen=True)
class FileFormat:
    """One form in which a data set is published.

    Args:
        files: The files it needs, as paths in a folder.
        read: Reads the files into arrays.
    """

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Arrays]

    def __post_init__(self) -> None:
        # A text is a sequence of letters, each of which would be looked for.
        check(isinstance(self.files, tuple), "files", self.files, "a tuple, as in ('steps.csv',)")


@dataclass(frozen=True)
class Download:
    """A file of the original source; ``to`` is its path in the cache, ``md5`` its checksum."""

    url: str
    md5: str
    to: str


@dataclass(frozen=True)
class NamedSet:
    """The definition of a data set: all that lists, docs and :func:`fedgrove.data.load` know of it.

    A set is either read from files (``formats`` and ``dataset``), or made without files (``make``).

    Args:
        about: One line that describes it.
        defaults: How it is trained unless options override it.
        partition: How its examples are assigned to clients by default.
        clients: The default number of clients; None for one per user.
        formats: The files it is read from, in any of these forms, the preferred one first.
        dataset: Turns the arrays read from the files into a data set.
        source: Where to get the files.
        downloads: Files that fedgrove downloads if they are not found. Only files with a known
            checksum are downloaded.
        make: ``make(users)`` makes a set that needs no files; None for the default number of users.
        federation: Makes a federation whose clients are created when needed, without a data set.
    """

    about: str
    defaults: Defaults
    partition: str
    clients: int | None = None
    formats: tuple[FileFormat, ...] = ()
    dataset: Callable[[Arrays], Dataset] | None = None
    source: str = ""
    downloads: tuple[Download, ...] = ()
    make: Callable[[int | None], Dataset] | None = None
    federation: Callable[[Choices, Defaults], Federation] | None = None

    def __post_init__(self) -> None:
        check(isinstance(self.formats, tuple), "formats", self.formats, "a tuple of FileFormat")
        ways = [bool(self.formats), self.make is not None, self.federation is not None]
        if sum(ways) != 1:
            raise InputError(
                "a NamedSet has more or less than one of formats, make and federation; give one."
            )
        if self.formats and (self.dataset is None or not self.source):
            raise InputError("a NamedSet with formats has no dataset, or no source; give both.")

    @property
    def needs_files(self) -> bool:
        """Whether the set is read from files."""
        return bool(self.formats)


def is_path(data: object) -> bool:
    """Whether ``data`` names files, not a data set.

    >>> is_path("users/"), is_path("mine.csv"), is_path("digits")
    (True, True, False)
    """
    if isinstance(data, Path):
        return True
    if not isinstance(data, str):
        return False
    has_suffix = data_ending(data) != ""
    # Not Path.is_dir, which raises if a name is too long for the file system.
    return has_suffix or "/" in data or "\\" in data or os.path.isdir(data)


def data_ending(name: str) -> str:
    """Return the ending of a file with a user's data; empty if such files do not end like it.

    >>> data_ending("anna.csv"), data_ending("Anna.CSV.gz"), data_ending("anna.npz.gz")
    ('.csv', '.csv.gz', '')
    """
    name = name.lower()
    compression = ""
    for ending in COMPRESSIONS:
        if name.endswith(ending):
            compression = ending
    base = name.removesuffix(compression)
    for suffix in (".csv", ".tsv") if compression else SUFFIXES:
        if base.endswith(suffix):
            return suffix + compression
    return ""


def read_dataset(
    name: str, named_set: NamedSet, users: int | None, data_dir: str | Path | None
) -> Dataset:
    """Read or make a named data set.

    Args:
        name: The name of the set.
        named_set: Its definition.
        users: The number of users of a set that is made; None for its default.
        data_dir: The folder with the files; None for ``FEDGROVE_DATA`` and the cache.

    Raises:
        MissingError: The files were not found and could not be downloaded.
        InputError: A file is not what it should be.
    """
    if named_set.make is not None:
        dataset = named_set.make(users)
        _check_agreement(dataset, f"the arrays of {name}", "correct its make")
        return dataset
    paths, file_format = _find_or_download(name, named_set, data_dir)
    assert named_set.dataset is not None
    try:
        dataset = named_set.dataset(read_unpacked(name, paths, file_format.read))
    except FedgroveError:
        raise
    # Any error: what a reader meets in a damaged file, or in one of a later form, has many names.
    except Exception as error:
        raise InputError(
            f"{name} cannot be read from '{paths[0]}': {type(error).__name__}: {error} "
            f"({_describe_place(error)}). Get the file again from {named_set.source}; if it is as "
            "published, correct the reader."
        ) from error
    _check_agreement(dataset, f"the files of {name}", "download them again")
    return dataset


def _check_agreement(dataset: Dataset, what: str, advice: str) -> None:
    """Refuse columns of different lengths, and labels without a name."""
    columns = {
        "labels": dataset.y,
        "users": dataset.user,
        "targets": dataset.targets,
        "marks of the test part": dataset.is_test,
    }
    lengths = {"examples": len(dataset.x)}
    for name, column in columns.items():
        if column is not None:
            lengths[name] = len(column)
    # ``initial`` because an empty array has neither a minimum nor a maximum.
    lowest = dataset.y.min(initial=0)
    highest = dataset.y.max(initial=0)
    labels_are_known = lowest >= 0 and highest < len(dataset.labels)
    if len(set(lengths.values())) > 1 or not labels_are_known:
        counted = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise InputError(
            f"{what} do not agree: {counted}, labels from {lowest} up to {highest}, and names for "
            f"{len(dataset.labels)}; {advice}."
        )


def _describe_place(error: Exception) -> str:
    """The line in the definition of a data set that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent.name == "sets"]
    frame = (own or frames)[-1]
    return f"at {Path(frame.filename).name}, line {frame.lineno}"


# ---- finding and downloading files ---------------------------------------------------------------


def cache_folder() -> Path:
    """Return the cache folder of data sets: ``FEDGROVE_CACHE``, or the user's own cache."""
    return Path(os.environ.get("FEDGROVE_CACHE") or pooch.os_cache("fedgrove"))


def data_folders(data_dir: str | Path | None) -> list[Path]:
    """Return where to look for data sets: the folder given or ``FEDGROVE_DATA``, then the cache."""
    option = "data_dir"
    folder = data_dir
    if folder is None:
        option = "FEDGROVE_DATA"
        folder = os.environ.get("FEDGROVE_DATA")
    # A variable that is set but empty counts as not set.
    if not folder:
        return [cache_folder()]
    if not Path(folder).is_dir():
        raise InputError(
            f"{option} is '{folder}', which is not a folder; "
            f"give the folder that contains the data files."
        )
    return [Path(folder), cache_folder()]


def _find_or_download(
    name: str, named_set: NamedSet, data_dir: str | Path | None
) -> tuple[list[Path], FileFormat]:
    """Find a set in any of its forms, and download it if necessary."""
    places = data_folders(data_dir)
    found = find_files(places, named_set.formats)
    if found is None and named_set.downloads:
        _download(name, named_set, places)
        found = find_files(places, named_set.formats)
    if found is None:
        files = " or ".join(f"'{each.files[0]}'" for each in named_set.formats)
        raise MissingError(
            f"{name} was not found: searched for {files} in {_list_folders(places)}"
            f"{_describe_incomplete(places, named_set.formats)}. {_advise(named_set)}; "
            f"{_list_built_in()} need no files."
        )
    return found


def _list_built_in() -> str:
    # Imported here because the modules of the sets import this one.
    from .sets import SETS

    names = [name for name, named_set in SETS.items() if not named_set.needs_files]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def find_files(
    places: Sequence[Path], formats: Sequence[FileFormat]
) -> tuple[list[Path], FileFormat] | None:
    """Return the first form of a data set whose files are all in one folder.

    Folders are searched first, then forms.
    """
    for place in places:
        for file_format in formats:
            paths = [_plain_or_gzipped(place / file) for file in file_format.files]
            if all(path.exists() for path in paths):
                return paths, file_format
    return None


def _describe_incomplete(places: Sequence[Path], formats: Sequence[FileFormat]) -> str:
    """Return which files of an incomplete set are missing, as the end of a sentence."""
    for place in places:
        for file_format in formats:
            files = file_format.files
            missing = [f"'{x}'" for x in files if not _plain_or_gzipped(place / x).exists()]
            if len(missing) < len(files):
                return f", where of {len(files)} files {', '.join(missing)} is missing"
    return ""


def _plain_or_gzipped(path: Path) -> Path:
    """Return the path of a ``.gz`` file, or of its decompressed version if there is one."""
    # A .tar.gz is read as it is; the readers do not expect the .tar next to it.
    may_be_decompressed = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    if may_be_decompressed:
        decompressed = path.with_name(path.name.removesuffix(".gz"))
        if decompressed.exists():
            return decompressed
    return path


def _list_folders(places: Sequence[Path]) -> str:
    return " and ".join(f"'{place}'" for place in places)


def _advise(named_set: NamedSet) -> str:
    return (
        f"Get it from {named_set.source}, put it in a folder and give that folder as FEDGROVE_DATA "
        "or --data-dir"
    )


def _download(name: str, named_set: NamedSet, places: Sequence[Path]) -> None:
    for download in named_set.downloads:
        target = cache_folder() / download.to
        try:
            pooch.retrieve(
                download.url, f"md5:{download.md5}", fname=target.name, path=target.parent
            )
        # Network, TLS, checksum or disk, from any of the libraries below pooch: whatever went
        # wrong, the user needs the same advice.
        except Exception as error:
            reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise MissingError(
                f"{name} is neither in {_list_folders(places)} nor could it be downloaded from "
                f"{download.url} ({reason}). {_advise(named_set)}."
            ) from error


# ---- unpacked copies: decompressing and parsing are slow, loading plain arrays is not ------------


def read_unpacked(
    name: str, paths: Sequence[Path], read: Callable[[Sequence[Path]], Arrays]
) -> Arrays:
    """Return the data set that ``read`` returns, kept uncompressed in the cache.

    The copy is used until a file changes in size or time, or the code of its reader changes.
    Without a writable cache no copy is kept and nothing fails.
    """
    # A colon ("emnist:letters") is not allowed in file names on every system.
    target = cache_folder() / "unpacked" / f"{name.replace(':', '-')}-{_digest(paths, read)}.npz"
    # A copy that is missing or damaged, in any of the ways np.load reports it, is made again.
    with contextlib.suppress(Exception), np.load(target) as copy:
        return {key: copy[key] for key in copy.files}
    fresh = read(paths)
    with contextlib.suppress(OSError):
        _write(target, fresh)
    return fresh


def _digest(paths: Sequence[Path], read: Callable[[Sequence[Path]], Arrays]) -> str:
    """Return a digest of every source file's path, size and modification time, and of the reader.

    Of the reader counts the file that it stands in, with those of what readers share.
    """
    code = hashlib.sha256()
    for source in (inspect.getfile(read), __file__, inspect.getfile(Dataset)):
        code.update(Path(source).read_bytes())
    marks = []
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            status = file.stat()
            marks.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr((code.hexdigest(), marks)).encode()).hexdigest()[:16]


def _write(target: Path, fresh: Arrays) -> None:
    """Write next to the target, then rename: a reader sees all of it or nothing."""
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


MOST_EXPANDED = 1 << 28
MOST_EXPANSION = 100
"""An npz file may expand to this many bytes, or to this many times its own size if that is more."""


def _check_expansion(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse a small npz file that would fill the memory."""
    expanded = sum(member.file_size for member in archive.infolist())
    if expanded > max(MOST_EXPANDED, MOST_EXPANSION * size):
        raise ValueError(
            f"its {size} bytes expand to {expanded}; so large a file must be uncompressed"
        )


def read_npz(path: Path, names: Sequence[str] = ()) -> Arrays:
    """Read all arrays of a data set's npz file.

    Args:
        path: The file.
        names: Arrays that it must have.

    Raises:
        InputError: It cannot be read, holds pickled objects (loading one can run code), or lacks
            an array.
    """
    try:
        # Opened here: numpy leaves a file that it cannot read open.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("it contains one array without a name")
            _check_expansion(loaded.zip, path.stat().st_size)
            contents = {key: loaded[key] for key in loaded.files}
    except FileNotFoundError:
        raise InputError(
            f"there is no file '{path}'; give an existing npz file with arrays x, y and client."
        ) from None
    except Exception as error:
        # numpy, zipfile and zlib have their own errors for each thing that may be wrong, and a
        # header may announce more than there is memory (MemoryError) or than fits a C integer.
        raise InputError(
            f"'{path}' cannot be read as npz ({error}); "
            f"write it with numpy.savez from plain number or text arrays."
        ) from error
    missing = [name for name in names if name not in contents]
    if missing:
        present = ", ".join(sorted(contents)) or "none"
        what = "it" if len(missing) == 1 else "them"
        raise InputError(
            f"'{path}' has no array {', '.join(missing)} (it has {present}); "
            f"add {what} and save the file again."
        )
    return contents
