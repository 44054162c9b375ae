"""Read a file, or a folder of a file per client, into tables or arrays: CSV, parquet, npz."""

from __future__ import annotations

import csv
import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import InputError
from .arrays import Stack
from .dataset import Array
from .files import npz
from .tables import Findings, Table, Words

SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True)
class Read:
    """What files hold: tables, or examples that are arrays already."""

    tables: tuple[Table, ...] = ()
    stacks: tuple[tuple[str, Stack], ...] = ()
    """With the client that a file's name says."""
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file, by its path as it was given."""


def is_path(data: object) -> bool:
    """Whether a word names files, not a data set.

    >>> is_path("users/"), is_path("mine.csv"), is_path("digits")
    (True, True, False)
    """
    if isinstance(data, Path):
        return True
    if not isinstance(data, str):
        return False
    has_suffix = data.lower().endswith(SUFFIXES)
    # Not Path.is_dir, which raises where a name is too long for the file system.
    return has_suffix or "/" in data or "\\" in data or os.path.isdir(data)


def read(path: Path, words: Words) -> Read:
    """What is in a file, or in a folder, of which each file or sub-folder is a client."""
    if path.is_dir():
        return _folder(path, words)
    if not path.exists():
        raise InputError(
            f"there is no file or folder '{path}'; give a file ({', '.join(SUFFIXES)}), a folder "
            "of such files, one for each client, or the name of a data set (fedgrove list data)."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"'{path}' ends in '{path.suffix}'; files that can be read end in "
            f"{', '.join(SUFFIXES)}."
        )
    return _merged([("", path)], str(path.name), words, [])


def _folder(folder: Path, words: Words) -> Read:
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            inside = [each for each in sorted(entry.rglob("*")) if each.is_file()]
            for file in inside:
                _sort_in(file, entry.name, folder, found, ignored)
        else:
            _sort_in(entry, _stem(entry), folder, found, ignored)
    if not found:
        raise InputError(
            f"the folder '{folder}' holds no file that ends in {', '.join(SUFFIXES)}; put a file "
            "for each client there, or a folder of files for each client."
        )
    notes = []
    if ignored:
        shown = ", ".join(ignored[:5])
        more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
        notes.append(f"files that are no data are ignored: {shown}{more}")
    return _merged(found, folder.name, words, notes, folder)


def _sort_in(
    file: Path, client: str, folder: Path, found: list[tuple[str, Path]], ignored: list[str]
) -> None:
    # In sub-folders too; a Mac leaves a hidden "._NAME.csv" beside each file that it copies.
    if any(part.startswith(".") for part in file.relative_to(folder).parts):
        return
    if file.suffix.lower() in SUFFIXES:
        found.append((client, file))
    else:
        ignored.append(str(file.relative_to(folder)))


def _stem(file: Path) -> str:
    return file.name[: -len(file.suffix)] if file.suffix else file.name


def _merged(
    found: Sequence[tuple[str, Path]],
    name: str,
    words: Words,
    notes: Sequence[str],
    folder: Path | None = None,
) -> Read:
    """All files read; what is wrong in any of them is said at once."""
    findings = Findings()
    tables: list[Table] = []
    stacks: list[tuple[str, Stack]] = []
    for client, path in found:
        # In a folder by the path in it; a column that says whose a row is wins over the file name.
        source = path.name if folder is None else path.relative_to(folder).as_posix()
        whose = "" if words.client is not None else client
        try:
            content = _content(path, source, whose, words)
        except InputError as error:
            findings.add(str(error))
            continue
        if isinstance(content, Table):
            tables.append(content)
        else:
            stacks.append((client, content))
    findings.refuse()
    if tables and stacks:
        raise InputError(
            f"{name} holds tables ({tables[0].source}) and arrays x and y ({stacks[0][1].source}); "
            "give one or the other."
        )
    files = {}
    for _, path in found:
        files[path.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Read(tuple(tables), tuple(stacks), tuple(notes), files)


def _content(path: Path, source: str, client: str, words: Words) -> Table | Stack:
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            return _npz(path, source, client, words)
        if suffix == ".parquet":
            return Table(source, _parquet(path, source), client)
        return Table(source, _csv(path, source), client, first_line=2)
    except OSError as error:
        raise InputError(f"{source} cannot be read ({error.strerror or error}).") from None


# ---- CSV -----------------------------------------------------------------------------------------


def _csv(path: Path, source: str) -> dict[str, Array]:
    """The columns of a CSV file as text, by the names in its first line."""
    try:
        # An Excel file begins with a mark of its encoding, which utf-8-sig leaves out.
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separator = max(SEPARATORS, key=first.count)
            # Blanks behind a separator would make quotes part of the cell.
            rows = list(csv.reader(file, delimiter=separator, skipinitialspace=True))
    except UnicodeDecodeError:
        raise InputError(f"{source} is not text in UTF-8; save it as CSV in UTF-8.") from None
    except csv.Error as error:
        raise InputError(f"{source} is no CSV ({error}); save it as CSV in UTF-8.") from None
    if not rows or not any(cell.strip() for cell in rows[0]):
        raise InputError(f"{source} is empty; it needs a first line with the names of the columns.")
    header = [cell.strip() for cell in rows[0]]
    _check_header(header, source)
    body = rows[1:]
    while body and not any(body[-1]):
        # Empty lines at the end are no rows.
        body.pop()
    for number, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise InputError(
                f"{source} has {len(row)} cells in line {number} and {len(header)} names of "
                "columns in the first; every line must have as many."
            )
    if not body:
        return {name: np.zeros(0, dtype=str) for name in header}
    columns = {}
    for place, (name, cells) in enumerate(zip(header, zip(*body, strict=True), strict=True)):
        if name:
            columns[name] = np.array(cells)
        elif any(cells):
            raise InputError(
                f"{source} has no name for column {place + 1}, which begins with '{cells[0]}'; "
                "name it in the first line or leave it out (pandas: to_csv(..., index=False))."
            )
    return columns


def _check_header(header: Sequence[str], source: str) -> None:
    # Without a name: what a spreadsheet leaves behind the last column, more than once too.
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        listed = ", ".join(f"'{name}'" for name in twice)
        raise InputError(
            f"{source} has more than one column {listed}; every name may be there once."
        )
    if all(_is_number(name) for name in header):
        raise InputError(
            f"{source} begins with numbers ({', '.join(header[:4])}, ...); its first line must "
            "hold the names of the columns."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---- parquet and npz -----------------------------------------------------------------------------


def _parquet(path: Path, source: str) -> dict[str, Array]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(
            f"{source} needs pyarrow to be read: pip install pyarrow, or save it as CSV."
        ) from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        # pyarrow has errors of its own for each thing that may be wrong with a file.
        reason = str(error).splitlines()[0][:160]
        raise InputError(f"{source} cannot be read as parquet ({reason}).") from None
    columns = {}
    for name in table.column_names:
        columns[str(name)] = table.column(name).to_numpy()
    return columns


def _npz(path: Path, source: str, client: str, words: Words) -> Table | Stack:
    """Arrays x and y, or a table of columns of equal length."""
    contents = npz(path)
    label = words.label if isinstance(words.label, str) else "y"
    owners = words.client if isinstance(words.client, str) else "client"
    sizes = {len(values) for values in contents.values() if values.ndim}
    is_table = all(values.ndim == 1 for values in contents.values()) and len(sizes) == 1
    if "x" not in contents and is_table and label in contents:
        return Table(source, contents, client)
    missing = [name for name in ("x", label) if name not in contents]
    if isinstance(words.client, str) and owners not in contents:
        missing.append(owners)
    if missing:
        present = ", ".join(sorted(contents)) or "none"
        raise InputError(
            f"'{source}' has no array {', '.join(missing)} (it has {present}); add it and save the "
            "file again."
        )
    return Stack(
        contents["x"], contents[label], contents.get(owners), contents.get("block"), source
    )
