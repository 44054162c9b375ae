"""A user's own data as tables, a row for each moment or example: check them and cut windows.

Everything that is wrong is collected first and reported together, by file, client and column.
Windows never cross a change of file, client or label, nor a gap in time. Whole stretches of a
recording are held out, so that no raw row is on both sides of a split (:mod:`fedgrove.data.split`).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..errors import InputError, Refusals, check, list_some, nearest
from .arrays import OwnDataOptions
from .columns import (
    InputTable,
    describe_place,
    is_numbers,
    read_clients,
    read_clock,
    read_signal,
    read_target,
)
from .dataset import Array, Dataset, Floats, Ints, cut_windows, min_windows_in_piece, number_runs
from .recordings import (
    check_rates,
    fill_empty,
    list_rates,
    note_empty,
    note_rates,
    recorded_rates,
    resample,
)

MAX_COLUMNS = 12
"""The most columns that a message lists."""
MIN_CLOCK_ROWS = 10
"""A column that grows with every row is a clock, if some recording has at least this many rows."""
RECORDED_ROWS = 10
"""A table looks like a recording if on average this many rows in a row have one label."""
GAP = 3.0
"""A step of the clock is a gap if it is larger than the usual step by this factor."""
NO_CLIENT_COLUMN = "no column gives the client of a row: rows are assigned to artificial clients"


def _quote(names: Sequence[str]) -> str:
    return list_some([f"'{name}'" for name in names], MAX_COLUMNS)


# ---- from tables to a data set -------------------------------------------------------------------


@dataclass(frozen=True)
class Recordings:
    """The rows of one or more tables, sorted by table, client and time.

    ``rows`` has the source and the line in it, the client (may be empty), the time in seconds, the
    number of the recording, which is the rows of one client in one table, and the number of the
    piece of it without gaps.
    """

    signal: Floats
    """The inputs (n, channels)."""
    target: Array
    """Numbers, or texts."""
    rows: pd.DataFrame
    empty: Mapping[str, int] = field(default_factory=dict)
    """The number of rows with empty cells, by their source."""

    def take(self, rows: Array) -> Recordings:
        """Return some of the rows, by their positions or as a mask."""
        taken = self.rows.loc[rows].reset_index(drop=True)
        return replace(self, signal=self.signal[rows], target=self.target[rows], rows=taken)

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
    options = _find_time_column(tables, options)
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
        if not refusals.sentences:
            # Not before: times that cannot be read have no rate.
            recordings, rate_notes = _bring_to_rate(recordings, options)
            notes = (*notes, *rate_notes, *_note_empty(recordings, tables, options))
        if options.window is not None:
            _find_short_clients(recordings, options.window, refusals)
    refusals.check()
    if not channels:
        raise InputError(
            f"{tables[0].source} has no input column, only '{label}' and the columns of client and "
            "time; there must be at least one."
        )
    return _build_dataset(recordings, options, channels, notes)


def read_recordings(table: InputTable, options: OwnDataOptions) -> Recordings:
    """Read a user's table without targets, as the table of a run was read, to predict its windows.

    Args:
        table: The table; other columns than the options name are not looked at.
        options: The columns of time and of clients, and the names of the inputs.

    Raises:
        InputError: Something is wrong with the table; the error lists all of it.
    """
    if isinstance(options.label, str):
        table = replace(table, frame=table.frame.drop(columns=options.label, errors="ignore"))
    options = _find_time_column([table], replace(options, label=None))
    refusals = Refusals()
    _find_wrong_options([table], options, refusals)
    channels = _find_channels([table], options, refusals)
    refusals.check()
    parts = _read_table(table, options, channels, refusals)
    refusals.check()
    return _bring_to_rate(parts[0], options)[0]


def _find_time_column(tables: Sequence[InputTable], options: OwnDataOptions) -> OwnDataOptions:
    """Return the options with a unit at the end of the time, if the column's own name has one."""
    is_column = any(options.time in table.frame for table in tables)
    if options.unit is None or not is_column:
        return options
    return replace(options, time=f"{options.time}:{options.unit}")


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
) -> list[Recordings]:
    """Read a table, sorted by client and time; report what is wrong in its cells.

    Returns:
        The recordings; none if the table has no rows, no label or no client.
    """
    frame = table.frame
    if not len(frame):
        refusals.add(f"{table.place} has no rows.")
        return []
    signal = read_signal(table, channels, options.fill, refusals)
    if not set(options.special_columns().values()) <= set(frame):
        # Reported with the channels.
        return []
    target: Array = np.zeros(len(frame))
    is_empty = np.asarray(np.isnan(signal).any(axis=1))
    if options.label is not None:
        target, has_no_label = read_target(table, options.label, options.fill, refusals)
        is_empty = is_empty | has_no_label
    client = pd.Series(table.client, frame.index, dtype=object)
    if options.client is not None:
        client = read_clients(table, str(options.client), refusals)
    clock = np.zeros(len(frame))
    if options.clock is not None:
        clock = read_clock(table, options.clock, options.unit, refusals)
    code = pd.factorize(client, sort=True)[0]
    # Sorts by the last key first. Stable: rows of one moment stay in the order of the file.
    order = np.lexsort((clock, code))
    recording = number_runs(code[order])
    rows = pd.DataFrame(
        {
            "source": table.source,
            "line": frame.index.to_numpy()[order],
            "client": client.to_numpy()[order],
            "clock": clock[order],
            "recording": recording,
            "piece": number_pieces(clock[order], recording),
        }
    )
    empty = {table.source: int(is_empty.sum())}
    recordings = Recordings(signal[order], target[order], rows, empty)
    if options.fill is not None and is_empty.any():
        recordings = _fill(recordings, is_empty[order], options.fill, channels, refusals)
    return [recordings] if len(recordings.rows) else []


def _fill(
    recordings: Recordings,
    is_empty: Array,
    fill: str,
    channels: Sequence[str],
    refusals: Refusals,
) -> Recordings:
    """Fill the empty cells of a table, or leave out its rows with empty cells."""
    rows = recordings.rows
    if fill != "drop":
        signal = fill_empty(recordings.signal, rows["recording"].to_numpy(), fill)
        for row, column in np.argwhere(np.isnan(signal))[:1].tolist():
            refusals.add(
                f"{recordings.describe(row)} has no number in column '{channels[column]}', so its "
                "empty cells cannot be filled; leave the recording or the column out."
            )
        return replace(recordings, signal=signal)
    if is_empty.all():
        refusals.add(f"{recordings.describe(0)} has an empty cell in every row.")
    # A window must not cross rows that are left out.
    piece = number_runs(rows["piece"].to_numpy(), np.cumsum(is_empty))
    return replace(recordings, rows=rows.assign(piece=piece)).take(~is_empty)


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


def _join(parts: Sequence[Recordings]) -> Recordings:
    """Join the recordings of all tables."""
    rows = pd.concat([part.rows for part in parts], keys=range(len(parts)), names=["table", None])
    # A table numbers its recordings from 0.
    tables = rows.index.get_level_values("table").to_numpy()
    rows["recording"] = number_runs(tables, rows["recording"].to_numpy())
    signal = np.concatenate([part.signal for part in parts])
    empty: dict[str, int] = {}
    for part in parts:
        empty.update(part.empty)
    target = np.concatenate([part.target for part in parts])
    return Recordings(signal, target, rows.reset_index(drop=True), empty)


def _bring_to_rate(
    recordings: Recordings, options: OwnDataOptions
) -> tuple[Recordings, tuple[str, ...]]:
    """Resample recordings if a rate is given; return notes on their rates too."""
    if options.clock is None:
        return recordings, ()
    rows = recordings.rows
    rates = recorded_rates(rows["clock"].to_numpy(), rows["recording"].to_numpy())
    names = rows.groupby("recording")["source" if options.client is None else "client"].first()
    known = [(str(names[number]), rate) for number, rate in rates.dropna().items()]
    groups = list_rates(known)
    notes = note_rates(groups, options.rate, options.window)
    if options.rate is None or not groups:
        return recordings, notes
    check_rates(groups, options.rate, options.clock, options.unit)
    made = resample(
        recordings.signal,
        rows["clock"].to_numpy(),
        number_runs(rows["recording"].to_numpy(), rows["piece"].to_numpy()),
        # A recording of a single moment has no rate and stays as it is.
        rates[rows["recording"]].fillna(options.rate).to_numpy(),
        options.rate,
    )
    taken = recordings.take(made.nearest)
    taken = replace(taken, signal=made.signal, rows=taken.rows.assign(clock=made.clock))
    return taken, notes


def _note_empty(
    recordings: Recordings, tables: Sequence[InputTable], options: OwnDataOptions
) -> tuple[str, ...]:
    if options.fill is None:
        return ()
    return note_empty(recordings.empty, sum(len(table.frame) for table in tables), options.fill)


def _find_mixed_targets(parts: Sequence[Recordings], label: str, refusals: Refusals) -> None:
    """Report a table whose labels are numbers if those of another are texts."""
    places = {part.target.dtype.kind: part.describe(0) for part in reversed(parts)}
    if len(places) > 1:
        refusals.add(
            f"{places['f']}, column '{label}' contains numbers and in {places['O']} texts; use one "
            "or the other in all tables."
        )


def _find_clocks(recordings: Recordings, channels: Sequence[str], refusals: Refusals) -> None:
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


def _number_stretches(recordings: Recordings) -> Ints:
    """Number the stretches of rows in which nothing changes that a window must not cross."""
    columns = [recordings.rows[name].to_numpy() for name in ("recording", "piece")]
    # Numbers to predict change all the time; a window has the number of its last row.
    if not is_numbers(recordings.target):
        columns.append(pd.factorize(recordings.target)[0])
    return number_runs(*columns)


def _find_short_clients(recordings: Recordings, window: int, refusals: Refusals) -> None:
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
    recordings: Recordings,
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
        rate=options.rate,
    )
    stretch = _number_stretches(recordings)
    if options.window is None:
        return replace(dataset, notes=(*dataset.notes, *_note_recorded(recordings, stretch)))
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


def _note_recorded(recordings: Recordings, stretch: Ints) -> tuple[str, ...]:
    """Note rows without windows that seem to follow each other in time."""
    if is_numbers(recordings.target):
        # They have no classes, and equal numbers are no sign of a recording.
        return ()
    average = len(stretch) / (int(stretch.max()) + 1)
    expected = _count_shuffled_runs(recordings.rows["client"], recordings.target)
    if average < RECORDED_ROWS or stretch.max() + 1 > expected / 2:
        return ()
    return (
        f"rows of one label come {average:.0f} in a row, as in a recording, and each row is an "
        "example: neighbouring rows may be on both sides of the split; cut windows with window and "
        "stride",
    )


def _count_shuffled_runs(client: pd.Series, target: Array) -> float:
    """Return how many runs of one label to expect if each client's rows were in random order.

    Two neighbours have the same label with the probability that two of the client's rows have.
    """
    counts = pd.DataFrame({"client": client, "label": target}).value_counts(["client", "label"])
    rows = counts.groupby("client").sum()
    same = (counts * (counts - 1)).groupby("client").sum() / rows
    return float((rows - same).sum())
