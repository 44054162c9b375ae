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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ..errors import MOST_LISTED, InputError, Refusals, check, list_some, nearest
from .arrays import MAX_NUMBER, OwnDataOptions
from .dataset import Array, Dataset, Floats, Ints, cut_windows, min_windows_in_piece, number_runs

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts of empty cells, in small letters."""
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
NO_CLIENT_COLUMN = "no column gives the client of a row: rows are assigned to artificial clients"


@dataclass(frozen=True)
class InputTable:
    """A table of a user's data.

    Args:
        source: How messages call the table, such as the name of its file.
        frame: Its columns. If its index is called "line", it has the line of each row in a file.
        client: The client of all rows, if the name of the file gives it.
        found: How the file is written, if that differs from an English CSV file.
    """

    source: str
    frame: pd.DataFrame
    client: str = ""
    found: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The user's table, for a message."""
        return describe_place(self.source, self.client)

    def describe_first(self, is_found: Array) -> str:
        """Return how many rows of a user's table were found and where, for a message."""
        name = self.frame.index.name or "row"
        first = f"first in {name} {self.frame.index[is_found.argmax()]}"
        return f"in {is_found.sum()} of {len(is_found)} rows, {first}"


def describe_place(source: str, client: str) -> str:
    """Return a user's file or table and its client, for a message."""
    if client and client not in source.split():
        return f"{source} (client {client})"
    return source


def _quote(names: Sequence[str]) -> str:
    return list_some([f"'{name}'" for name in names], MAX_COLUMNS)


# ---- from tables to a data set -------------------------------------------------------------------


@dataclass(frozen=True)
class _Recordings:
    """The rows of one or more tables, sorted by table, client and time.

    ``rows`` has the source, the client (may be empty), the number of the recording, which is the
    rows of one client in one table, and the number of the piece of it without gaps.
    """

    signal: Floats
    """The inputs (n, channels)."""
    target: Array
    """Numbers, or texts."""
    rows: pd.DataFrame

    def describe(self, row: int) -> str:
        """Return the table and the client of a row, for a message."""
        return describe_place(self.rows["source"].iloc[row], self.rows["client"].iloc[row])


def make_dataset(
    tables: Sequence[InputTable], options: OwnDataOptions, notes: Sequence[str] = ()
) -> Dataset:
    """Check a user's tables and make a data set of windows, or of single rows.

    Args:
        tables: The tables; they have the same columns.
        options: Which columns are what, and how to cut windows.
        notes: Remarks for the data set.

    Raises:
        InputError: Something is wrong with the tables; the error lists all of it.
    """
    label = options.label
    if not isinstance(label, str):
        columns = ", ".join(tables[0].frame)
        raise InputError(
            f"label is not given, and {tables[0].source} has the columns {columns}; give the one "
            "to predict (--label NAME, in Python label=NAME)."
        )
    refusals = Refusals()
    _find_wrong_options(tables, options, refusals)
    refusals.check()
    channels = _find_channels(tables, options, refusals)
    parts = []
    for table in tables:
        parts.extend(_read_table(table, options, channels, refusals))
    if parts:
        _find_mixed_targets(parts, label, refusals)
        recordings = _join(parts)
        if not isinstance(options.channels, tuple):
            _find_clocks(recordings, channels, refusals)
        if options.window is not None:
            _find_short_clients(recordings, options.window, refusals)
    refusals.check()
    if not channels:
        raise InputError(
            f"{tables[0].source} has no input column, only '{label}' and the columns of client and "
            "time; there must be at least one."
        )
    return _build_dataset(recordings, options, channels, notes)


def _find_wrong_options(
    tables: Sequence[InputTable], options: OwnDataOptions, refusals: Refusals
) -> None:
    """Report columns that no table has: then the option is wrong, not every table."""
    present = list(dict.fromkeys(name for table in tables for name in table.frame))
    places = tables[0].source if len(tables) == 1 else f"any of the {len(tables)} tables"
    for option, column in options.special_columns().items():
        if column in present:
            continue
        near = nearest(column, present)
        hint = f"; did you mean '{near}'?" if near else "."
        refusals.add(
            f"{option} is '{column}', which is not a column of {places}{hint} There are: "
            f"{_quote(present)}."
        )


def _find_channels(
    tables: Sequence[InputTable], options: OwnDataOptions, refusals: Refusals
) -> tuple[str, ...]:
    """Return the columns that are inputs; report columns that are missing or not expected."""
    special = list(options.special_columns().values())
    if isinstance(options.channels, tuple):
        channels = options.channels
        both = sorted(set(channels) & set(special))
        check(not both, "channels", list(channels), f"without {', '.join(both)}")
    else:
        # The columns of most tables: then messages name the tables that differ.
        usual = Counter(frozenset(table.frame) for table in tables).most_common(1)[0][0]
        model = next(table for table in tables if set(table.frame) == usual)
        channels = tuple(name for name in model.frame if name not in special)
        if isinstance(options.channels, int):
            allowed = f"the {len(channels)} columns other than {', '.join(special)}, or their names"
            check(options.channels == len(channels), "channels", options.channels, allowed)
    expected = dict.fromkeys([*channels, *special])
    for table in tables:
        missing = [name for name in expected if name not in table.frame]
        others = [name for name in table.frame if name not in expected]
        if missing and others:
            refusals.add(
                f"{table.place} has no column {_quote(missing)}, and has {_quote(others)} instead."
            )
        elif missing:
            present = _quote(list(table.frame))
            refusals.add(f"{table.place} has no column {_quote(missing)} (it has {present}).")
        elif others and not isinstance(options.channels, tuple):
            refusals.add(
                f"{table.place} has a column {_quote(others)} that the other tables lack; leave it "
                "out, or name the columns that are inputs (--channels)."
            )
    return channels


# ---- one table -----------------------------------------------------------------------------------


def _read_table(
    table: InputTable, options: OwnDataOptions, channels: Sequence[str], refusals: Refusals
) -> list[_Recordings]:
    """Read a table, sorted by client and time; report what is wrong in its cells.

    Returns:
        The recordings; none if the table has no rows, no label or no client.
    """
    frame = table.frame
    if not len(frame):
        refusals.add(f"{table.place} has no rows.")
        return []
    signal = _read_signal(table, channels, refusals)
    if not set(options.special_columns().values()) <= set(frame):
        # Reported with the channels.
        return []
    target = _read_target(table, options.label, refusals)
    client = pd.Series(table.client, frame.index, dtype=object)
    if options.client is not None:
        client = _read_clients(table, str(options.client), refusals)
    clock = np.zeros(len(frame))
    if options.time is not None:
        clock = _read_clock(table, options.time, refusals)
    code = pd.factorize(client, sort=True)[0]
    # Sorts by the last key first. Stable: rows of one moment stay in the order of the file.
    order = np.lexsort((clock, code))
    recording = number_runs(code[order])
    rows = pd.DataFrame(
        {
            "source": table.source,
            "client": client.to_numpy()[order],
            "recording": recording,
            "piece": number_pieces(clock[order], recording),
        }
    )
    return [_Recordings(signal[order], target[order], rows)]


def parse_numbers(column: pd.Series) -> tuple[Floats, Array, Array]:
    """Read a column of a user's table as numbers.

    Returns:
        The numbers, NaN in other cells; which cells are empty; and which contain anything else.
    """
    missing = column.isna().to_numpy()
    if column.dtype.kind in "biuf":
        values = column.to_numpy(np.float64, na_value=np.nan)
    elif column.dtype.kind == "M":
        values = np.full(len(column), np.nan)
    else:
        code, cells = _factorize(column)
        missing = missing | cells.str.strip().str.lower().isin(MISSING).to_numpy()[code]
        values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)[code]
    is_number = np.abs(values) <= MAX_NUMBER
    return values, missing, ~is_number & ~missing


def _factorize(column: pd.Series) -> tuple[Ints, pd.Series]:
    """Return the number of each cell, and the distinct texts: of labels there are only a few."""
    code, cells = pd.factorize(column.astype(str), use_na_sentinel=False)
    return code, pd.Series(cells)


def _show(cell: Any) -> str:
    """Return a cell for a message, cut if it is long; empty cells are ''."""
    text = " ".join(str(cell).split())
    if text == "nan":
        return "''"
    return f"'{text}'" if len(text) <= 40 else f"'{text[:40]}...'"


def _read_signal(table: InputTable, channels: Sequence[str], refusals: Refusals) -> Floats:
    """Read the input columns, NaN if a cell is not a number."""
    frame = table.frame
    signal = np.full((len(frame), len(channels)), np.nan)
    for position, name in enumerate(channels):
        if name in frame and frame[name].dtype.kind in "biuf":
            signal[:, position] = frame[name].to_numpy(np.float64, na_value=np.nan)
    # Checked together: column by column, ten thousand columns take seconds. NaN compares as false.
    is_valid = (np.abs(signal) <= MAX_NUMBER).all(axis=0)
    found_wrong = 0
    for position in np.flatnonzero(~is_valid).tolist():
        name = channels[position]
        if name not in frame:
            continue
        if found_wrong == MOST_LISTED:
            # What is wrong with each of ten thousand columns takes a minute, and is not listed.
            refusals.add(
                f"{table.place} has {MOST_LISTED} columns with wrong cells; the columns after "
                f"'{name}' were not read."
            )
            break
        signal[:, position], is_wrong = _read_channel(table, name, refusals)
        found_wrong += is_wrong
    return signal


def _read_channel(table: InputTable, name: str, refusals: Refusals) -> tuple[Floats, bool]:
    """Read an input column and report cells that are not numbers; return whether any is not."""
    values, missing, wrong = parse_numbers(table.frame[name])
    is_wrong = bool((wrong | missing).any())
    where = f"{table.place}, column '{name}'"
    cell = table.frame[name].iloc[wrong.argmax()]
    if wrong.any() and (wrong | missing).all():
        kind, advice = _explain_no_numbers(name, cell)
        first = table.describe_first(wrong).partition("first ")[2]
        sentence = f"{where} contains {kind}, such as {_show(cell)} {first}; {advice}."
        refusals.add(sentence, f"{name} {kind}", table.source)
        return values, is_wrong
    if wrong.any():
        refusals.add(
            f"{where} contains {_show(cell)} {table.describe_first(wrong)}; every cell of an input "
            f"must be a number of at most {MAX_NUMBER:g}."
        )
    if missing.any():
        refusals.add(
            f"{where} is empty {table.describe_first(missing)}; fill these cells or leave the rows "
            "out."
        )
    return values, is_wrong


def _explain_no_numbers(name: str, cell: Any) -> tuple[str, str]:
    """Return what a column without a single number contains, by one of its cells, and advice."""
    leave_out = "leave it out by naming the columns that are inputs (--channels)"
    if _is_too_large(cell):
        return f"numbers beyond {MAX_NUMBER:g}", "divide them by a constant"
    if isinstance(cell, np.ndarray | list | tuple | dict):
        return "lists", f"write each number into a column of its own, or {leave_out}"
    if re.fullmatch(r"[+-]?[0-9]+(,[0-9]+)+", str(cell).strip()):
        return "numbers with a comma", (
            "write them with a point, or all numbers of the file with decimal commas and its cells "
            "with semicolons between them"
        )
    if not np.isnan(_parse_times(pd.Series([cell]))[0]):
        order = f"if they give the order of rows, use them for it (--time {shlex.quote(name)})"
        return "dates", f"{order}, or {leave_out}"
    return "values that are not numbers", leave_out


def _is_too_large(cell: Any) -> bool:
    """Whether a cell is a number that float32 cannot compute with, such as 1e308 or inf."""
    try:
        return abs(float(cell)) > MAX_NUMBER
    except (TypeError, ValueError):
        return False


def _has_lists(table: InputTable, name: str, refusals: Refusals) -> bool:
    """Report a column of labels or clients whose cells are lists, as files of parquet may have."""
    column = table.frame[name]
    if column.dtype.kind != "O":
        return False
    is_list = column.map(lambda cell: isinstance(cell, np.ndarray | list | tuple | dict)).to_numpy()
    if not is_list.any():
        return False
    refusals.add(
        f"{table.place}, column '{name}' contains the list {_show(column.iloc[is_list.argmax()])} "
        f"{table.describe_first(is_list)}; every cell must be one text or number."
    )
    return True


def _read_target(table: InputTable, label: str, refusals: Refusals) -> Array:
    """Read the targets of a table: numbers if all cells are numbers, else texts."""
    column = table.frame[label]
    _has_lists(table, label, refusals)
    code, cells = _factorize(column)
    texts: Array = cells.str.strip().to_numpy(object)[code]
    if column.dtype.kind == "b":
        return texts
    values, missing, wrong = parse_numbers(column)
    if missing.any():
        cell = _show(column.iloc[missing.argmax()])
        advice = "fill these cells or leave the rows out"
        if cell != "''":
            # In some data sets a class is called null or none.
            advice = f"{cell} counts as an empty cell; rename it if it is a class"
        where = f"{table.place}, column '{label}'"
        refusals.add(f"{where} has no label {table.describe_first(missing)}; {advice}.")
    is_too_large = wrong & (np.abs(values) > MAX_NUMBER)
    if is_too_large.any() and is_numbers(values[~missing & ~wrong]):
        # Of numbers to predict; whole numbers may be the names of classes, however large.
        cell = _show(column.iloc[is_too_large.argmax()])
        refusals.add(
            f"{table.place}, column '{label}' contains {cell} {table.describe_first(is_too_large)};"
            f" numbers to predict must be at most {MAX_NUMBER:g}."
        )
    # Larger whole numbers are not exact as floats: then the texts are the classes.
    known = values[~missing]
    are_exact = bool((np.abs(known) < MAX_EXACT).all())
    if not wrong.any() and (are_exact or is_numbers(known)):
        return values
    return texts


def _read_clients(table: InputTable, name: str, refusals: Refusals) -> pd.Series:
    """Read the names of the clients: 7 and 7.0 are the same."""
    column = table.frame[name]
    _has_lists(table, name, refusals)
    if column.dtype.kind == "f" and bool((column.dropna() % 1 == 0).all()):
        column = column.astype("Int64")
    _, missing, _ = parse_numbers(column)
    if missing.any():
        refusals.add(
            f"{table.place}, column '{name}' has no client {table.describe_first(missing)}; fill "
            "these cells or leave the rows out."
        )
    code, cells = _factorize(column)
    # A line break in a name would break printed tables.
    return cells.str.split().str.join(" ").astype(object)[code]


def _read_clock(table: InputTable, name: str, refusals: Refusals) -> Floats:
    """Read a column of times: numbers, or dates such as 2024-05-17T10:00:00."""
    column = table.frame[name]
    values, missing, wrong = parse_numbers(column)
    bad = missing | wrong
    if wrong.any():
        seconds = _parse_times(column)
        # Whichever reads more cells tells what the column was meant to be.
        if np.isnan(seconds).sum() < bad.sum():
            values = seconds
            bad = np.isnan(seconds)
    if bad.any():
        cell = _show(column.iloc[bad.argmax()])
        refusals.add(
            f"{table.place}, column '{name}' contains {cell} or similar "
            f"{table.describe_first(bad)}; times are numbers of at most {MAX_NUMBER:g}, or dates "
            "such as 2024-05-17T10:00:00."
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


def _join(parts: Sequence[_Recordings]) -> _Recordings:
    """Join the recordings of all tables."""
    rows = pd.concat([part.rows for part in parts], keys=range(len(parts)), names=["table", None])
    # A table numbers its recordings from 0.
    tables = rows.index.get_level_values("table").to_numpy()
    rows["recording"] = number_runs(tables, rows["recording"].to_numpy())
    signal = np.concatenate([part.signal for part in parts])
    return _Recordings(signal, np.concatenate([part.target for part in parts]), rows)


def _find_mixed_targets(parts: Sequence[_Recordings], label: str, refusals: Refusals) -> None:
    """Report a table whose labels are numbers if those of another are texts."""
    places = {part.target.dtype.kind: part.describe(0) for part in reversed(parts)}
    if len(places) > 1:
        refusals.add(
            f"{places['f']}, column '{label}' contains numbers and in {places['O']} texts; use one "
            "or the other in all tables."
        )


def _find_clocks(recordings: _Recordings, channels: Sequence[str], refusals: Refusals) -> None:
    """Report columns that grow with every row: a network would learn when, not what."""
    number = recordings.rows["recording"].to_numpy()
    if np.bincount(number).max() < MIN_CLOCK_ROWS:
        return
    is_inside = np.diff(number) == 0
    signal = recordings.signal
    # NaN is not larger than anything, so a column with empty cells is not a clock.
    grows = (signal[1:] > signal[:-1])[is_inside].all(axis=0)
    for position in np.flatnonzero(grows).tolist():
        name = channels[position]
        refusals.add(
            f"column '{name}' grows with every row of every recording, so it is a clock or a row "
            f"number, not an input; use it as the time (--time {shlex.quote(name)}), or name the "
            "columns that are inputs (--channels)."
        )


def is_numbers(target: Array) -> bool:
    """Whether targets are numbers to predict, not classes: floats, and not all whole."""
    return target.dtype.kind == "f" and not bool((target == np.round(target)).all())


def _number_stretches(recordings: _Recordings) -> Ints:
    """Number the stretches of rows in which nothing changes that a window must not cross."""
    columns = [recordings.rows[name].to_numpy() for name in ("recording", "piece")]
    # Numbers to predict change all the time; a window has the number of its last row.
    if not is_numbers(recordings.target):
        columns.append(pd.factorize(recordings.target)[0])
    return number_runs(*columns)


def _find_short_clients(recordings: _Recordings, window: int, refusals: Refusals) -> None:
    """Report clients without a stretch that is as long as a window."""
    what = "without a gap" if is_numbers(recordings.target) else "of one label"
    rows = recordings.rows.assign(stretch=_number_stretches(recordings))
    longest = rows.groupby(["client", "stretch"]).size().groupby("client").max()
    recorded = rows.groupby(["client", "recording"]).size().groupby("client").max()
    for row in np.flatnonzero(~rows["client"].duplicated()).tolist():
        client = rows["client"].iloc[row]
        if longest[client] < window:
            refusals.add(
                f"{recordings.describe(row)} has no {window} rows {what} in a row, which is one "
                f"window: its longest stretch has {longest[client]} rows, its longest recording "
                f"{recorded[client]}; use a shorter window (--window), or leave the client out."
            )


def _build_dataset(
    recordings: _Recordings,
    options: OwnDataOptions,
    channels: tuple[str, ...],
    notes: Sequence[str],
) -> Dataset:
    """Make the data set of recordings that nothing is wrong with."""
    target = recordings.target
    numeric = is_numbers(target)
    y = np.zeros(len(target), dtype=np.int64)
    labels: tuple[str, ...] = (str(options.label),)
    if not numeric:
        # As numbers, 9 comes before 10.
        if target.dtype.kind == "f":
            target = target.astype(np.int64)
        y, found = pd.factorize(target, sort=True)
        labels = tuple(map(str, found.tolist()))
        if len(labels) < 2:
            raise InputError(
                f"column '{options.label}' has only one class ({', '.join(labels)}); there must be "
                "at least two classes."
            )
    names, user = _number_users(recordings.rows["client"])
    dataset = Dataset(
        recordings.signal.astype(np.float32),
        y.astype(np.int64),
        labels,
        user,
        notes=(*notes, *_note_users(names), *_note_similar_classes(labels)),
        kind="numbers" if numeric else "classes",
        targets=target[:, None] if numeric else None,
        refusal="rows without window are single examples",
        names=names,
        channels=channels,
    )
    stretch = _number_stretches(recordings)
    if options.window is None:
        return replace(dataset, notes=(*dataset.notes, *_note_recorded(stretch)))
    return _cut_windows(dataset, stretch, options.window, options.step)


def _cut_windows(rows: Dataset, stretch: Ints, length: int, step: int) -> Dataset:
    """Cut windows out of the rows, each within one stretch; note stretches that are too short."""
    windows = cut_windows(rows, length, step, stretch, min_windows_in_piece(length, step))
    notes = rows.notes
    sizes = np.bincount(stretch)
    short = int((sizes < length).sum())
    if short:
        note = f"{short} of {len(sizes)} stretches of one label are shorter than a window of"
        notes = (*notes, f"{note} {length} rows and left out")
    return replace(windows, notes=notes, window=length)


def _number_users(client: pd.Series) -> tuple[tuple[str, ...], Ints | None]:
    """Return the names of the clients, and the client of each row; whole numbers are in order."""
    names = sorted(client.unique())
    if names == [""]:
        return (), None
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    return tuple(names), pd.Index(names).get_indexer(client).astype(np.int64)


def _note_users(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return (NO_CLIENT_COLUMN,)
    if len(names) == 1:
        return (f"there is one client only, {names[0]}, so nothing is learnt from other clients",)
    return ()


def _note_similar_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Note classes that differ by capitals or blanks alone.

    >>> _note_similar_classes(["Walk", "sit", "walk"])
    ("classes that differ only in case or spaces are different classes: 'Walk' and 'walk'",)
    """
    similar: dict[str, list[str]] = {}
    for name in classes:
        similar.setdefault("".join(name.lower().split()), []).append(f"'{name}'")
    listed = "; ".join(" and ".join(names) for names in similar.values() if len(names) > 1)
    if not listed:
        return ()
    return (f"classes that differ only in case or spaces are different classes: {listed}",)


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
