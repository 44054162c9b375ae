"""A user's own data as tables, a row for each moment or example: check them and cut windows.

Everything that is wrong is collected first and reported together, by file, client and column.
Windows never cross a change of file, client or label, nor a gap in time. Whole stretches of a
recording are held out, so that no raw row is on both sides of a split (:mod:`fedgrove.data.split`).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..errors import InputError, InputErrors, check, nearest, together
from .arrays import MAX_NUMBER, ArrayData, OwnDataOptions
from .dataset import (
    Array,
    Dataset,
    Ints,
    cut_into_pieces,
    find_window_starts,
    min_windows_in_piece,
    number_runs,
    number_values,
    take_windows,
)

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts of empty cells, in small letters."""
MAX_FINDINGS = 20
"""The most findings that are listed; the others are counted."""
MAX_PLACES = 5
"""The most tables that are listed for a finding they share; the others are counted."""
MAX_COLUMNS = 12
"""The most columns that a message lists."""
MIN_CLOCK_ROWS = 10
"""A column that grows with every row is a clock, if some recording has at least this many rows."""
RECORDED_ROWS = 10
"""A table looks like a recording if on average this many rows in a row have one label."""
MAX_EXACT = 2.0**53
"""Below this every whole number is exact as a float."""
GAP = 3.0
"""A step of the clock is a gap if it is larger than the usual step by this factor."""
NO_CLIENT_COLUMN = (
    "no column gives the client of a row (client): rows are assigned to artificial clients"
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class InputTable:
    """A table of a user's data.

    Args:
        source: How messages call the table, such as the name of its file.
        frame: Its columns.
        client: The client of all rows, if the name of the file gives it.
        first_line: The line of the first row in its file; 0 if there is no file: rows are then
            counted from 0.
    """

    source: str
    frame: pd.DataFrame
    client: str = ""
    first_line: int = 0

    @property
    def place(self) -> str:
        """The table, for a message."""
        return describe_place(self.source, self.client)

    def describe_row(self, row: int) -> str:
        """Return the position of a row, for a message."""
        if self.first_line:
            return f"line {row + self.first_line}"
        return f"row {row}"


def describe_place(source: str, client: str) -> str:
    """Return a source and the client it belongs to, for a message."""
    if client and client not in source.split():
        return f"{source} (client {client})"
    return source


@dataclass
class Findings:
    """Collects what is wrong, one sentence each, to report everything at once."""

    sentences: list[str] = field(default_factory=list)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """For each finding that several tables share: its first sentence, then the other tables."""

    def add(self, sentence: str) -> None:
        """Add a finding."""
        self.sentences.append(sentence)

    def add_repeated(self, kind: str, sentence: str, table: str) -> None:
        """Add a finding that is reported once for all tables in which it is of the same kind."""
        if kind in self.repeated:
            self.repeated[kind].append(table)
        else:
            self.repeated[kind] = [sentence]

    def refuse(self) -> None:
        """Raise an error with all findings, if there are any."""
        found = []
        for sentence, *others in self.repeated.values():
            if others:
                sentence += f" The same in {_list_some(others, MAX_PLACES)}."
            found.append(sentence)
        found.extend(self.sentences)
        if len(found) > MAX_FINDINGS:
            raise InputErrors(found[:MAX_FINDINGS], len(found) - MAX_FINDINGS)
        if found:
            raise together(found)


def _list_some(names: Sequence[str], most: int) -> str:
    """List the first names, and count the others."""
    listed = ", ".join(names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most} more"
    return listed


def _quote(names: Sequence[str]) -> str:
    return _list_some([f"'{name}'" for name in names], MAX_COLUMNS)


# ---- from tables to a data set -------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """The rows of one or more tables, by table, client and time.

    A recording is the rows of one client in one table. A piece is a part of it without gaps.
    """

    signal: Floats
    """(n, channels)."""
    target: Array
    """Numbers, or texts."""
    client: Array
    """The names of the clients; empty if they have none."""
    recording: Ints
    piece: Ints
    source: Array
    """The name of the table."""

    def place(self, row: int) -> str:
        """Return the table and the client of a row, for a message."""
        return describe_place(self.source[row], self.client[row])


def make_dataset(
    tables: Sequence[InputTable], options: OwnDataOptions, notes: Sequence[str] = ()
) -> Dataset:
    """Check tables and make a data set of windows, or of single rows without ``window``.

    Args:
        tables: The tables; they have the same columns.
        options: Which columns are what, and how to cut windows.
        notes: Remarks for the data set.

    Raises:
        InputError: Something is wrong with the tables; the error lists all of it.
    """
    label = options.label
    if not isinstance(label, str):
        columns = ", ".join(tables[0].frame.columns)
        raise InputError(
            f"label is not given, and {tables[0].source} has the columns {columns}; say which one "
            f"is to be predicted (--label NAME, in Python label=NAME)."
        )
    _check_columns_exist(tables, options)
    findings = Findings()
    channels = _find_channels(tables, options, findings)
    parts = []
    for table in tables:
        part = _read_rows(table, options, channels, findings)
        if part is not None:
            parts.append(part)
    if parts:
        rows = _join_rows(parts)
        if not isinstance(options.channels, tuple):
            _find_clocks(rows, channels, findings)
        _find_mixed_targets(parts, label, findings)
        numeric = any(is_numbers(part.target) for part in parts)
        if options.window is not None:
            _find_short_clients(rows, options.window, numeric, findings)
    findings.refuse()
    if not channels:
        raise InputError(
            f"{tables[0].source} has no input column, only '{label}' and the columns of client and "
            "time; there must be one or more to learn from."
        )
    return _build_dataset(rows, options, channels, tuple(notes))


def _check_columns_exist(tables: Sequence[InputTable], options: OwnDataOptions) -> None:
    """Refuse columns that no table has: then the option is wrong, not every table."""
    findings = Findings()
    present = list(dict.fromkeys(name for table in tables for name in table.frame))
    for option in ("label", "client", "time"):
        column = getattr(options, option)
        if column is None or str(column) in present:
            continue
        near = nearest(str(column), present)
        hint = f"; did you mean '{near}'?" if near else "."
        places = tables[0].source if len(tables) == 1 else f"any of the {len(tables)} tables"
        findings.add(
            f"{option} is '{column}', which is not a column of {places}{hint} There are: "
            f"{_quote(present)}."
        )
    findings.refuse()


def _find_channels(
    tables: Sequence[InputTable], options: OwnDataOptions, findings: Findings
) -> tuple[str, ...]:
    """Return the columns that are inputs; report columns that are missing or not expected."""
    special = []
    for column in (options.label, options.client, options.time):
        if column is not None:
            special.append(str(column))
    are_named = isinstance(options.channels, tuple)
    if isinstance(options.channels, tuple):
        channels = options.channels
        both = sorted(set(channels) & set(special))
        check(not both, "channels", list(channels), f"without {', '.join(both)}")
    else:
        # The columns of most tables: then messages name the tables that differ.
        columns = Counter(tuple(sorted(table.frame)) for table in tables)
        usual = columns.most_common(1)[0][0]
        model = next(table for table in tables if tuple(sorted(table.frame)) == usual)
        channels = tuple(name for name in model.frame if name not in special)
        if isinstance(options.channels, int):
            allowed = f"the {len(channels)} columns other than {', '.join(special)}, or their names"
            check(options.channels == len(channels), "channels", options.channels, allowed)
    expected = dict.fromkeys([*channels, *special])
    for table in tables:
        missing = [name for name in expected if name not in table.frame]
        others = [name for name in table.frame if name not in expected]
        if missing and others:
            findings.add(
                f"{table.place} has no column {_quote(missing)}, and has {_quote(others)} instead."
            )
        elif missing:
            present = _quote(list(table.frame))
            findings.add(f"{table.place} has no column {_quote(missing)} (it has {present}).")
        elif others and not are_named:
            findings.add(
                f"{table.place} has a column {_quote(others)} that the other tables lack; leave "
                "it out, or say which columns are inputs (--channels)."
            )
    return channels


# ---- one table -----------------------------------------------------------------------------------


def _read_rows(
    table: InputTable, options: OwnDataOptions, channels: Sequence[str], findings: Findings
) -> _Rows | None:
    """Read the rows of a table, sorted by client and time; report what is wrong in its cells."""
    n = len(table.frame)
    if n == 0:
        findings.add(f"{table.place} has no rows.")
        return None
    signal = _read_signal(table, channels, findings)
    target = _read_target(table, str(options.label), findings)
    client = _read_clients(table, options.client, findings)
    clock = np.zeros(n)
    if options.time is not None and options.time in table.frame:
        clock = _read_clock(table, options.time, findings)
    if target is None or client is None:
        return None
    number = pd.factorize(client, sort=True)[0]
    # Sorts by the last key first. Stable: rows of one moment stay in the order of the file.
    order = np.lexsort((clock, number))
    recording = number_runs(number[order])
    return _Rows(
        signal[order],
        target[order],
        client[order],
        recording,
        number_pieces(clock[order], recording),
        np.full(n, table.source, dtype=object),
    )


def parse_cells(column: pd.Series) -> tuple[Floats, Flags, Flags]:
    """Read a column as numbers.

    Returns:
        The numbers, NaN in other cells; which cells are empty; and which contain anything else.
    """
    if column.dtype.kind in "biuf":
        values = column.to_numpy(np.float64, na_value=np.nan)
        # NaN compares as false, so an empty cell is not wrong as well.
        return values, np.isnan(values), np.abs(values) > MAX_NUMBER
    code, cells = _factorize(column)
    # Empty cells have the code -1, which is the last entry.
    numbers = np.array([*(_parse_number(cell) for cell in cells), np.nan])
    empty = np.array([*(is_missing(cell) for cell in cells), True])
    values = numbers[code]
    missing = empty[code]
    is_no_number = np.isnan(values) & ~missing
    return values, missing, is_no_number | (np.abs(values) > MAX_NUMBER)


def _factorize(column: pd.Series) -> tuple[Ints, Array]:
    """Number the distinct cells of a column, so that each is looked at once; -1 for NaN."""
    try:
        code, cells = pd.factorize(column.astype(object))
    except TypeError:
        # Cells that cannot be hashed, such as arrays.
        code, cells = pd.factorize(column.astype(str).astype(object))
    return code, np.asarray(cells, dtype=object)


def _parse_number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan


def is_missing(cell: Any) -> bool:
    """Whether a cell is empty.

    >>> is_missing(" N/A "), is_missing("walk"), is_missing(0)
    (True, False, False)
    """
    return isinstance(cell, str) and cell.strip().lower() in MISSING


def _show(cell: Any) -> str:
    """Return a cell for a message, cut if it is long; empty cells are ''."""
    text = "" if pd.api.types.is_scalar(cell) and pd.isna(cell) else str(cell)
    text = " ".join(text.split())
    if len(text) > 40:
        text = f"{text[:40]}..."
    return f"'{text}'"


def _read_signal(table: InputTable, channels: Sequence[str], findings: Findings) -> Floats:
    """Read the input columns, NaN if a cell is not a number."""
    frame = table.frame
    signal = np.full((len(frame), len(channels)), np.nan)
    present = [(position, name) for position, name in enumerate(channels) if name in frame]
    for position, name in present:
        if frame[name].dtype.kind in "biuf":
            signal[:, position] = frame[name].to_numpy(np.float64, na_value=np.nan)
    # Checked together: column by column, ten thousand columns take seconds. NaN compares as false.
    is_valid = (np.abs(signal) <= MAX_NUMBER).all(axis=0)
    for position, name in present:
        if not is_valid[position]:
            signal[:, position] = _read_channel(table, name, findings)
    return signal


def _read_channel(table: InputTable, name: str, findings: Findings) -> Floats:
    """Read an input column and report cells that are not numbers."""
    column = table.frame[name]
    values, missing, wrong = parse_cells(column)
    n = len(values)
    where = f"{table.place}, column '{name}'"
    if wrong.any():
        first = int(wrong.argmax())
        cell = column.iloc[first]
        if wrong.sum() + missing.sum() == n:
            kind, advice = _explain_no_numbers(name, cell)
            row = table.describe_row(first)
            sentence = f"{where} contains {kind}, such as {_show(cell)} in {row}; {advice}."
            findings.add_repeated(f"{name} {kind}", sentence, table.source)
            return values
        findings.add(
            f"{where} contains {_show(cell)} in {wrong.sum()} of {n} rows, first in "
            f"{table.describe_row(first)}; every cell of an input must be a number."
        )
    if missing.any():
        findings.add(
            f"{where} is empty in {missing.sum()} of {n} rows, first in "
            f"{table.describe_row(int(missing.argmax()))}; fill these cells or leave the rows out."
        )
    return values


def _explain_no_numbers(name: str, cell: Any) -> tuple[str, str]:
    """Return what a column without a single number contains, by one of its cells, and advice."""
    leave_out = "leave it out by naming the columns that are inputs (--channels)"
    if isinstance(cell, str) and re.fullmatch(r"-?[0-9]+,[0-9]+", cell.strip()):
        return "numbers with a decimal comma", "write them with a point"
    if not np.isnan(_parse_times(pd.Series([cell]))[0]):
        order = f"if they give the order of rows, use them for it (--time {shlex.quote(name)})"
        return "dates", f"{order}, or {leave_out}"
    return "values that are not numbers", leave_out


def _read_target(table: InputTable, label: str, findings: Findings) -> Array | None:
    """Read the targets of a table: numbers if all cells are numbers, else texts."""
    if label not in table.frame:
        return None
    column = table.frame[label]
    if column.dtype.kind == "b":
        return np.asarray(column.astype(str), dtype=object)
    values, missing, wrong = parse_cells(column)
    if missing.any():
        first = int(missing.argmax())
        cell = _show(column.iloc[first])
        advice = "fill these cells or leave the rows out"
        if cell != "''":
            # In some data sets a class is called null or none.
            advice = f"{cell} counts as an empty cell; rename it if it is a class"
        findings.add(
            f"{table.place}, column '{label}' has no label in {missing.sum()} of {len(column)} "
            f"rows, first in {table.describe_row(first)}; {advice}."
        )
    # Larger whole numbers are not exact as floats: then the texts are the classes.
    are_exact = bool((np.abs(values[~missing]) < MAX_EXACT).all())
    if not wrong.any() and (are_exact or is_numbers(values[~missing])):
        return values
    code, cells = _factorize(column)
    return np.array([*(str(cell).strip() for cell in cells), ""], dtype=object)[code]


def _read_clients(table: InputTable, name: Any, findings: Findings) -> Array | None:
    """Read the client of each row as text; empty if there is no column of clients."""
    if name is None:
        return np.full(len(table.frame), table.client, dtype=object)
    if str(name) not in table.frame:
        return None
    column = table.frame[str(name)]
    code, cells = _factorize(column)
    names = np.array([*(_read_name(cell) for cell in cells), ""], dtype=object)[code]
    missing = names == ""
    if missing.any():
        findings.add(
            f"{table.place}, column '{name}' has no client in {missing.sum()} of {len(column)} "
            f"rows, first in {table.describe_row(int(missing.argmax()))}; fill these cells or "
            "leave the rows out."
        )
    return names


def _read_name(cell: Any) -> str:
    """Return the name of a client: 7 and 7.0 are the same; empty for an empty cell."""
    if is_missing(cell):
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    # A line break in a name would break printed tables.
    return " ".join(str(cell).split())


def _read_clock(table: InputTable, name: str, findings: Findings) -> Floats:
    """Read a column of times: numbers, or dates such as 2024-05-17T10:00:00."""
    column = table.frame[name]
    values, missing, wrong = parse_cells(column)
    bad = missing | wrong
    if wrong.any():
        seconds = _parse_times(column)
        # Whichever reads more cells tells what the column was meant to be.
        if np.isnan(seconds).sum() < bad.sum():
            values = seconds
            bad = np.isnan(seconds)
    if bad.any():
        first = int(bad.argmax())
        findings.add(
            f"{table.place}, column '{name}' contains {_show(column.iloc[first])} in "
            f"{table.describe_row(first)}, and {bad.sum()} such cells of {len(column)}; times are "
            "numbers, or dates such as 2024-05-17T10:00:00."
        )
    return values


def _parse_times(column: pd.Series) -> Floats:
    """Read dates as seconds, NaN if a cell is not a date."""
    if column.dtype.kind != "M":
        column = column.astype(str)
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    seconds = (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return np.asarray(seconds, dtype=np.float64)


def number_pieces(clock: Floats, recording: Ints) -> Ints:
    """Number the pieces of recordings between gaps in time.

    >>> number_pieces(np.array([0.0, 1, 2, 3, 90, 91]), np.zeros(6, int)).tolist()
    [0, 0, 0, 0, 1, 1]
    """
    steps = pd.Series(clock).groupby(recording).diff()
    # A recording without a step forward has no usual step, and no gaps: NaN compares as false.
    usual = steps.where(steps > 0).groupby(recording).transform("median")
    return np.cumsum(np.asarray(steps > GAP * usual))


# ---- all tables together -------------------------------------------------------------------------


def _join_rows(parts: Sequence[_Rows]) -> _Rows:
    """Join the rows of all tables; recordings of different tables stay apart."""
    recordings: list[Ints] = []
    for part in parts:
        first = recordings[-1][-1] + 1 if recordings else 0
        recordings.append(part.recording + first)
    return _Rows(
        np.concatenate([part.signal for part in parts]),
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.client for part in parts]),
        np.concatenate(recordings),
        np.concatenate([part.piece for part in parts]),
        np.concatenate([part.source for part in parts]),
    )


def _find_clocks(rows: _Rows, channels: Sequence[str], findings: Findings) -> None:
    """Report columns that grow with every row: a network would learn when, not what."""
    if np.bincount(rows.recording).max() < MIN_CLOCK_ROWS:
        return
    is_inside = np.diff(rows.recording) == 0
    # NaN is not larger than anything, so a column with empty cells is not a clock.
    grows = (rows.signal[1:] > rows.signal[:-1])[is_inside].all(axis=0)
    for position in np.flatnonzero(grows).tolist():
        name = channels[position]
        findings.add(
            f"column '{name}' grows with every row of every recording, so it is a clock or a row "
            f"number, not an input; use it as the time (--time {shlex.quote(name)}), or name the "
            "columns that are inputs (--channels)."
        )


def _find_mixed_targets(parts: Sequence[_Rows], label: str, findings: Findings) -> None:
    """Report a table whose labels are numbers if those of another are texts."""
    texts = [part for part in parts if part.target.dtype.kind != "f"]
    numbers = [part for part in parts if part.target.dtype.kind == "f"]
    if texts and numbers:
        findings.add(
            f"{numbers[0].place(0)}, column '{label}' contains numbers and in {texts[0].place(0)} "
            "texts; use one or the other in all tables."
        )


def _find_short_clients(rows: _Rows, window: int, numeric: bool, findings: Findings) -> None:
    """Report clients without a stretch that is as long as a window."""
    stretch = number_runs(rows.recording, rows.piece)
    what = "without a gap"
    if not numeric:
        # Numbers to predict change all the time; a window has the number of its last row.
        stretch = number_runs(stretch, pd.factorize(rows.target)[0])
        what = "of one label"
    by_client = pd.DataFrame({"client": rows.client, "stretch": stretch, "of": rows.recording})
    longest = by_client.groupby(["client", "stretch"]).size().groupby("client").max()
    recorded = by_client.groupby(["client", "of"]).size().groupby("client").max()
    is_first = ~by_client["client"].duplicated()
    for row in np.flatnonzero(is_first).tolist():
        client = rows.client[row]
        if longest[client] < window:
            findings.add(
                f"{rows.place(row)} has no {window} rows {what} in a row, which is one window: its "
                f"longest stretch has {longest[client]} rows, its longest recording "
                f"{recorded[client]}; use a shorter window (--window), or leave the client out."
            )


def is_numbers(target: Array) -> bool:
    """Whether targets are numbers to predict, not classes: floats, and not all whole."""
    return target.dtype.kind == "f" and not bool((target == np.round(target)).all())


def _build_dataset(
    rows: _Rows, options: OwnDataOptions, channels: tuple[str, ...], notes: tuple[str, ...]
) -> Dataset:
    """Make the data set of rows that nothing is wrong with."""
    numeric = is_numbers(rows.target)
    classes, y = _number_classes(rows.target)
    names, user = _number_users(rows.client)
    notes = (*notes, *_note_users(names, user), *_note_similar_classes(classes))
    # Nothing that a window must not cross changes in a stretch.
    stretch = number_runs(rows.recording, rows.piece)
    targets = None
    if numeric:
        y = np.zeros(len(y), dtype=np.int64)
        classes = (str(options.label),)
        targets = rows.target[:, None]
    else:
        stretch = number_runs(stretch, y)
        if len(classes) < 2:
            raise InputError(
                f"column '{options.label}' has one class only ({', '.join(classes)}); there must "
                "be two or more."
            )
    examples = Dataset(
        rows.signal.astype(np.float32),
        y,
        classes,
        user,
        notes=notes,
        kind="numbers" if numeric else "classes",
        targets=targets,
        names=names,
        channels=channels,
    )
    if options.window is None:
        notes = (*notes, *_note_recorded(stretch))
        return replace(examples, notes=notes, refusal="rows without window are single examples")
    return _cut_windows(examples, stretch, options.window, options.step)


def _cut_windows(rows: Dataset, stretch: Ints, length: int, step: int) -> Dataset:
    """Cut windows out of the rows, each within one stretch."""
    start = find_window_starts(stretch, length, step)
    sizes = np.bincount(stretch)
    short = int((sizes < length).sum())
    notes = rows.notes
    if short:
        notes = (
            *notes,
            f"{short} of {len(sizes)} stretches of one label are shorter than a window of {length} "
            "rows and left out",
        )
    targets = rows.targets
    if targets is not None:
        # A number to predict is that of the last row.
        targets = targets[start + length - 1]
    return replace(
        rows,
        x=take_windows(rows.x, start, length),
        y=rows.y[start],
        user=None if rows.user is None else rows.user[start],
        block=cut_into_pieces(number_values(stretch[start]), min_windows_in_piece(length, step)),
        start=start,
        reach=length,
        notes=notes,
        targets=targets,
        window=length,
    )


def _number_classes(target: Array) -> tuple[tuple[str, ...], Ints]:
    """Return the names of the classes, and the class of each row; whole numbers are in order."""
    if target.dtype.kind == "f" and not is_numbers(target):
        target = target.astype(np.int64)
    y, found = pd.factorize(target, sort=True)
    return tuple(str(value) for value in found.tolist()), y.astype(np.int64)


def _number_users(client: Array) -> tuple[tuple[str, ...], Ints | None]:
    """Return the names of the clients, and the client of each row; whole numbers are in order."""
    names = pd.unique(client).tolist()
    if names == [""]:
        return (), None
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    else:
        names.sort()
    return tuple(names), pd.Index(names).get_indexer(client).astype(np.int64)


def _note_users(names: Sequence[str], user: Ints | None) -> tuple[str, ...]:
    if user is None:
        return (NO_CLIENT_COLUMN,)
    if len(names) == 1:
        return (f"there is one client only, {names[0]}: there is nothing to federate",)
    return ()


def _note_similar_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Note classes that differ by capitals or blanks alone.

    >>> _note_similar_classes(["Walk", "sit", "walk"])
    ("classes that differ only by capitals or blanks are different classes: 'Walk' and 'walk'",)
    """
    similar: dict[str, list[str]] = {}
    for name in classes:
        similar.setdefault("".join(name.lower().split()), []).append(f"'{name}'")
    pairs = [" and ".join(names) for names in similar.values() if len(names) > 1]
    if not pairs:
        return ()
    listed = "; ".join(pairs)
    return (f"classes that differ only by capitals or blanks are different classes: {listed}",)


def _note_recorded(stretch: Ints) -> tuple[str, ...]:
    """Note rows without windows that seem to follow each other in time."""
    average = len(stretch) / (int(stretch.max()) + 1)
    if average < RECORDED_ROWS:
        return ()
    return (
        f"rows of one label come {average:.0f} in a row, as in a recording, and each row is an "
        "example: neighbouring rows may be on both sides of the split; cut windows with window and "
        "stride",
    )


# ---- recordings that are arrays ------------------------------------------------------------------


def cut_recordings(
    recordings: Sequence[tuple[str, ArrayData]], options: OwnDataOptions, notes: Sequence[str] = ()
) -> Dataset:
    """Cut arrays (n, channels) into windows.

    Args:
        recordings: The arrays, each with the name of its client; empty if they have none.
        options: How to cut the windows.
        notes: Remarks for the data set.
    """
    tables = []
    for client, arrays in recordings:
        tables.append(InputTable(arrays.source, _make_frame(arrays, options), client))
    has_clients = recordings[0][1].client is not None
    options = replace(
        options,
        label="y",
        client="client" if has_clients else None,
        channels=_name_channels(recordings[0][1].x, options),
        time=None,
    )
    return make_dataset(tables, options, notes)


def _name_channels(x: Array, options: OwnDataOptions) -> tuple[str, ...]:
    if isinstance(options.channels, tuple):
        return options.channels
    return tuple(f"x{position}" for position in range(x.shape[1]))


def _make_frame(arrays: ArrayData, options: OwnDataOptions) -> pd.DataFrame:
    """Make a table of a recording (n, channels), its targets and clients."""
    x = arrays.x
    if x.ndim != 2:
        raise InputError(
            f"window is {options.window}, and x has the shape {x.shape}, which is windows already; "
            "leave window out, or give the recording (n, channels)."
        )
    names = _name_channels(x, options)
    if len(names) != x.shape[1]:
        raise InputError(
            f"channels has {len(names)} names, and x of the shape {x.shape} has {x.shape[1]} "
            "columns; name each of them."
        )
    columns = {"y": arrays.y}
    if arrays.client is not None:
        columns["client"] = np.asarray(arrays.client)
    for name, values in columns.items():
        if values.shape != (len(x),):
            raise InputError(
                f"{arrays.source} has {len(x)} inputs and {name} of the shape {values.shape}; "
                "there must be one for each input."
            )
    return pd.DataFrame(x, columns=list(names)).assign(**columns)
