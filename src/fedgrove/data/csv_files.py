"""Read CSV files as they are found: compressed or not, with commas or semicolons, in any encoding.

A file of continental Europe separates cells by semicolons and has decimal commas. It is recognised
by what it contains, and only if nothing in it can be read differently: an English file never
changes its meaning.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import zstandard

from ..errors import InputError

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
SAMPLE = 1 << 16
"""Characters at the beginning of a file that are looked at to find what separates its cells."""
SAMPLE_LINES = 20
LATIN = "cp1252"
"""Latin-1 as Windows writes it: with the euro sign, curved quotation marks and dashes."""
CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r"))
"""Bytes that no text contains."""

QUOTED = r'(?:(?<=[,;\t\r\n])|\A)"(?:[^"]|"")*"'
COMMA_NUMBER = r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+)?,\d+(?:[eE][+-]?\d+)?"
"""A number with a decimal comma, such as 9,81 or 1.234,5."""
SURELY_DECIMAL = rf"(?![+-]?[1-9]\d{{0,2}},\d{{3}}\s*(?:\Z|\0)){COMMA_NUMBER}"
"""Not a number such as 1,234, which may also be more than a thousand."""
ENGLISH_NUMBER = r"[+-]?(?:(?:\d+|\d{1,3}(?:,\d{3})+)?\.\d+(?:[eE][+-]?\d+)?|\d{1,3}(?:,\d{3}){2,})"
"""A number with a decimal point, or with commas between thousands."""


def _unpack_zstandard(content: bytes) -> bytes:
    """Unpack all frames of a file; zstandard.decompress reads the first, and none in part."""
    parts = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(content))
        if not frame.eof:
            raise EOFError("the file ended before the end of its last frame")
        content = frame.unused_data
    return b"".join(parts)


UNPACK_ERRORS = (lzma.LZMAError, zlib.error, zstandard.ZstdError)
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _unpack_zstandard,
}


@dataclass(frozen=True)
class CsvTable:
    """A CSV file that was read.

    Args:
        frame: The table; its index, called "line", has the line of each row.
        found: How it is written, if that differs from an English file: "decimal commas".
    """

    frame: pd.DataFrame
    found: tuple[str, ...] = ()


def read_csv(
    path: Path,
    source: str,
    label: str | None = None,
    client: str | None = None,
    all_text: bool = False,
) -> CsvTable:
    """Read a CSV file with the names of the columns in its first line.

    Args:
        path: The file; one that ends in .gz, .bz2, .xz or .zst is compressed.
        source: How messages call it.
        label: A column that stays text; numbers with a decimal comma get a point.
        client: A column that stays text as it is written.
        all_text: Whether all columns stay text as they are written; blank lines are left out.

    Raises:
        InputError: It is not a CSV file, or its first line does not name the columns.
        OSError: The file cannot be opened.
    """
    text, encoding = _read_text(path, source)
    found: list[str] = []
    try:
        lines = _Lines.of(text)
        # Not by pandas, which would rename columns that are there twice.
        header: list[str] = next(lines.cells(), [])
        names = [name.strip() for name in header]
        _check_header(names, source)
        types: Any = str
        if not all_text:
            types = {i: str for i, name in enumerate(names) if name in (label, client)}
        try:
            frame = lines.parse(len(names), types)
            numbers = [i for i, name in enumerate(names) if name != client]
            has_commas = not all_text and lines.separator != "," and re.search(r",\d", text)
            if has_commas and _has_decimal_commas(frame, numbers, lines):
                frame = lines.parse(len(names), types, decimal=",")
                labels = [i for i in numbers if names[i] == label]
                frame = _write_points(frame, numbers, labels)
                found += [SEPARATORS[lines.separator], "decimal commas"]
        except (pd.errors.ParserError, pd.errors.ParserWarning):
            _check_cell_counts(lines, source, len(names))
            raise
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InputError(f"{source} is not CSV ({shorten_error(error)}); save it as CSV.") from None
    frame.index = pd.RangeIndex(lines.first + 1, lines.first + 1 + len(frame), name="line")
    if frame.iloc[:, -1].isna().any():
        # Some rows are blank or too short, or have an empty last cell.
        is_blank = frame.isna().all(axis=1)
        if all_text:
            frame = frame[~is_blank]
        else:
            # Blank lines at the end are not rows.
            frame = frame.iloc[: len(frame) - is_blank[::-1].cumprod().sum()]
        if frame.iloc[:, -1].isna().any():
            _check_cell_counts(lines, source, len(names))
    if encoding == LATIN:
        found.append("Latin-1 letters")
    return CsvTable(_name_columns(frame, names, source), tuple(found))


# ---- from a file to text -------------------------------------------------------------------------


def _read_text(path: Path, source: str) -> tuple[str, str]:
    """Return the text of a file, and its encoding."""
    content = path.read_bytes()
    unpack = UNPACK.get(path.suffix.lower())
    if unpack is not None:
        try:
            content = unpack(content)
        except (OSError, EOFError, ValueError, *UNPACK_ERRORS) as error:
            raise InputError(
                f"{source} cannot be unpacked ({shorten_error(error)}); compress it again, or give "
                "it unpacked."
            ) from None
    try:
        # A file of Excel begins with a mark of its encoding, which utf-8-sig leaves out.
        return content.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        pass
    # Valid UTF-8 beyond ASCII hardly ever occurs in Latin-1: then the file is UTF-8 and damaged.
    is_utf8 = any(ord(letter) > 127 for letter in content.decode("utf-8", "ignore"))
    is_binary = len(content.translate(None, CONTROL)) < len(content)
    if not is_utf8 and not is_binary:
        try:
            return content.decode(LATIN), LATIN
        except UnicodeDecodeError:
            pass
    raise InputError(
        f"{source} is not text in UTF-8, nor in Latin-1; save it as CSV in UTF-8."
    ) from None


@dataclass(frozen=True)
class _Lines:
    """The text of a CSV file, and what separates its cells."""

    text: str
    separator: str
    first: int
    """The number of the line with the names: the second, if Excel wrote "sep=;" before it."""

    @classmethod
    def of(cls, text: str) -> _Lines:
        """Find what separates the cells."""
        given = re.match(r'"?sep=([,;\t])"?\s*?\r?\n', text)
        if given:
            return cls(text[given.end() :], given[1], 2)
        return cls(text, find_separator(text[:SAMPLE]), 1)

    def cells(self) -> Any:
        """Return the rows, each as a list of cells."""
        file = io.StringIO(self.text, newline="")
        return csv.reader(file, delimiter=self.separator, skipinitialspace=True)

    def parse(
        self, count: int, types: Any, columns: Sequence[int] | None = None, decimal: str = "."
    ) -> pd.DataFrame:
        """Parse the rows below the names; the columns are called 0, 1, ..."""
        options: dict[str, Any] = {}
        version = tuple(map(int, pd.__version__.split(".")[:2]))
        if version < (3, 1):
            # Later versions always read floats exactly.
            options["float_precision"] = "round_trip"
        with warnings.catch_warnings():
            # The warning means that a row has more cells than there are names.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame: pd.DataFrame = pd.read_csv(
                io.StringIO(self.text, newline=""),
                sep=self.separator,
                header=0,
                names=list(range(count)),
                usecols=columns,
                decimal=decimal,
                index_col=False,
                dtype=types,
                # The type of a column depends on all of its cells.
                low_memory=False,
                # Blanks after a separator would make quotes part of the cell.
                skipinitialspace=True,
                # Rows keep their numbers for messages, and texts such as NA stay to be shown.
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                **options,
            )
            return frame


def find_separator(sample: str) -> str:
    """Find what separates the cells of a CSV file, by its first lines.

    >>> find_separator("t;x, in m\\n0,1;9,81\\n"), find_separator("note;x,y\\na;b,1\\n")
    (';', ',')
    """
    # The quoted cells may contain anything, also line breaks.
    lines = [line for line in re.sub(QUOTED, "", sample).splitlines() if line.strip()]
    if len(sample) == SAMPLE and len(lines) > 1:
        # The last line is cut.
        lines.pop()
    lines = lines[:SAMPLE_LINES]
    header = lines[0] if lines else ""
    # What occurs equally often in all lines, before what occurs most often in the first.
    regular = []
    for separator in SEPARATORS:
        counts = {line.count(separator) for line in lines}
        if len(counts) == 1 and counts != {0}:
            regular.append(separator)
    return max(regular or SEPARATORS, key=header.count)


# ---- decimal commas ------------------------------------------------------------------------------


def _has_decimal_commas(frame: pd.DataFrame, columns: Sequence[int], lines: _Lines) -> bool:
    """Whether the numbers of a table have decimal commas, beyond doubt.

    At least one number can mean nothing else, as 0,5 or 12,34, and none has a decimal point.
    """
    is_proved = False
    parsed = []
    for column in columns:
        if frame[column].dtype.kind == "f":
            parsed.append(column)
        if frame[column].dtype.kind in "biuf":
            continue
        if _has_cell(frame[column], ENGLISH_NUMBER):
            return False
        is_proved = is_proved or _has_cell(frame[column], SURELY_DECIMAL)
    if not is_proved or not parsed:
        return is_proved
    # Other columns were read as floats: with points, or as 1e5 and empty cells, which are neutral.
    texts = lines.parse(len(frame.columns), str, parsed)
    return not any(_has_cell(texts[column], ENGLISH_NUMBER) for column in parsed)


def _has_cell(column: pd.Series, pattern: str) -> bool:
    """Whether a whole cell matches; one search in all cells is ten times as fast as one in each."""
    cells = "\0".join(column.dropna().astype(str).unique())
    return re.search(rf"(?:\A|\0)\s*(?:{pattern})\s*(?=\Z|\0)", cells) is not None


def _write_points(
    frame: pd.DataFrame, columns: Sequence[int], labels: Sequence[int]
) -> pd.DataFrame:
    """Write numbers with a decimal comma that are still texts with a point.

    These are numbers with points between thousands, numbers in a column with other texts, and
    labels, which change only if all of them are numbers.
    """
    for column in columns:
        if frame[column].dtype.kind in "biuf":
            continue
        texts = frame[column].astype(object).str.strip()
        has_comma = texts.str.fullmatch(COMMA_NUMBER).fillna(False).astype(bool)
        points = texts.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
        points = texts.where(~has_comma, points)
        numbers = pd.to_numeric(points, errors="coerce")
        are_numbers = bool((numbers.notna() | points.isna()).all())
        if column not in labels:
            # Other texts are left for the message about them.
            frame[column] = numbers if are_numbers else points
        elif are_numbers:
            frame[column] = points
    return frame


# ---- what is wrong with a file -------------------------------------------------------------------


def shorten_error(error: Exception) -> str:
    """Return the first line of an error of another library, cut if it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def _check_header(names: Sequence[str], source: str) -> None:
    # Spreadsheets leave columns without a name after the last column.
    given = pd.Index([name for name in names if name])
    if not len(given):
        raise InputError(f"{source} is empty; its first line must have the names of the columns.")
    check_names(given, source)
    points = given.str.replace(",", ".", regex=False)
    if pd.to_numeric(points, errors="coerce").notna().all():
        raise InputError(
            f"{source} begins with numbers ({', '.join(given[:4])}, ...); its first line must have "
            "the names of the columns."
        )


def check_names(names: pd.Index, source: str) -> None:
    """Refuse a user's table that has a column twice."""
    repeated = sorted({f"'{name}'" for name in names[names.duplicated()]})
    if repeated:
        raise InputError(
            f"{source} has more than one column {', '.join(repeated)}; each name must occur only "
            "once."
        )


def _check_cell_counts(lines: _Lines, source: str, count: int) -> None:
    """Refuse the first line with more or fewer cells than there are names."""
    for number, row in enumerate(lines.cells(), start=lines.first):
        if row and len(row) != count:
            raise InputError(
                f"{source} has {len(row)} cells in line {number} and {count} names of columns "
                "in the first; every line must have the same number."
            )


def _name_columns(frame: pd.DataFrame, names: Sequence[str], source: str) -> pd.DataFrame:
    """Name the columns; columns without a name must be empty, and are left out."""
    for position, name in enumerate(names):
        if not name and not frame[position].isna().all():
            raise InputError(
                f"{source} has no name for column {position + 1}, which begins with "
                f"'{frame[position].iloc[0]}'; name it in the first line or leave it out (pandas: "
                "to_csv(..., index=False))."
            )
    frame = frame.set_axis(names, axis=1)
    return frame.drop(columns="") if "" in names else frame
