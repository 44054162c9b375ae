"""Recordings in tables, a row for each moment or example: checked, then cut into windows.

Everything that is wrong is found first and said at once, by file, client and column. Windows never
cross a change of file, client or label, nor a gap in time; whole stretches of a recording are held
out, so that no raw row is on both sides of a split (:mod:`fedgrove.data.split`).
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, InputErrors, check, nearest, together
from .arrays import LARGEST
from .dataset import Array, Dataset, Ints, ids, runs
from .windows import least_in_piece, pieces, starts

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Cells that hold nothing, in small letters."""
SHOWN = 20
"""How many wrong things are listed; the others are counted."""
PLACES = 5
"""How many tables are named in which the same is wrong; the others are counted."""
CLOCK_ROWS = 10
"""A column that grows with every row of recordings at least this long is a clock, not a sensor."""
STRETCH = 10
"""Rows of one label that follow each other, on average, from which on a table looks recorded."""
MOST_EXACT = 2.0**53
"""Below this every whole number is a float of its own."""
GAP = 3.0
"""Times the usual step of a clock from which on a recording has a gap."""

NOBODY = "no column says whose a row is (client): all are dealt out to clients that are made up"

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Words:
    """What a person says of data of their own, in the words of the command line.

    label: the column of the targets; of arrays, the targets themselves.
    client: the column that says whose a row is; of arrays, the owners themselves.
    window, stride: cut windows of so many rows, so far apart; stride is half a window by default.
    channels: the columns that are inputs, else all others; of arrays, the names of the channels or
        their number.
    time: the column to sort each recording by; a gap in it ends a window.
    """

    label: Any = None
    client: Any = None
    window: int | None = None
    stride: int | None = None
    channels: int | str | Sequence[str] | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check(self.window >= 2, "window", self.window, "2 rows or more")
        if self.stride is not None:
            check(self.window is not None, "stride", self.stride, "given together with window")
            check(self.stride >= 1, "stride", self.stride, "1 row or more")
        channels = self.channels
        if isinstance(channels, str):
            channels = tuple(word.strip() for word in channels.split(","))
        elif channels is not None and not isinstance(channels, int):
            channels = tuple(str(word) for word in channels)
        if isinstance(channels, tuple) and len(channels) == 1 and channels[0].isdecimal():
            channels = int(channels[0])
        # The class is frozen; text of the command line is brought to the field's own type.
        object.__setattr__(self, "channels", channels)

    @property
    def step(self) -> int:
        """Rows from one window to the next."""
        assert self.window is not None
        return max(1, self.window // 2) if self.stride is None else self.stride

    def given(self) -> list[str]:
        """Which words were said."""
        return [word for word, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class Table:
    """Columns of equal length; ``client`` is whose they are, where the file's name says so.

    ``first_line`` is where in its file the first row stands, 0 where there is no file: rows are
    then counted from 0.
    """

    source: str
    columns: Mapping[str, Array]
    client: str = ""
    first_line: int = 0

    @property
    def place(self) -> str:
        """Which table it is, for a sentence."""
        return f"{self.source} (client {self.client})" if self.client else self.source

    def where(self, row: int) -> str:
        """Where a row stands, for a sentence."""
        return f"line {row + self.first_line}" if self.first_line else f"row {row}"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass
class Findings:
    """What is wrong, one sentence each, to be said all at once."""

    sentences: list[str] = field(default_factory=list)
    alike: dict[str, list[str]] = field(default_factory=dict)
    """The first sentence on what is wrong alike in several places, with the places behind it."""

    def add(self, sentence: str) -> None:
        """One thing more."""
        self.sentences.append(sentence)

    def add_alike(self, kind: str, sentence: str, place: str) -> None:
        """One thing more, which is told once for all places where it is of the same kind."""
        if kind in self.alike:
            self.alike[kind].append(place)
        else:
            self.alike[kind] = [sentence]

    def refuse(self) -> None:
        """Raise an error with all of them, if there are any."""
        found = []
        for sentence, *others in self.alike.values():
            found.append(sentence)
            if others:
                shown = others[:PLACES]
                more = f" and {len(others) - PLACES} more" if len(others) > PLACES else ""
                found[-1] += f" The same in {', '.join(shown)}{more}."
        found.extend(self.sentences)
        if len(found) > SHOWN:
            raise InputErrors(found[:SHOWN], len(found) - SHOWN)
        if found:
            raise together(found)


# ---- from tables to a data set -------------------------------------------------------------------


def dataset_of(tables: Sequence[Table], words: Words, notes: Sequence[str] = ()) -> Dataset:
    """Windows of recordings, or with no window single rows, of all tables."""
    label = words.label
    if not isinstance(label, str):
        columns = ", ".join(tables[0].columns)
        raise InputError(
            f"label is not given, and {tables[0].source} has the columns {columns}; say which one "
            f"is to be predicted (--label NAME, in Python label=NAME)."
        )
    _check_some_table_has(tables, words, label)
    findings = Findings()
    channels = _channels(tables, words, label, findings)
    recordings = []
    for table in tables:
        recordings.extend(_recordings(table, words, label, channels, findings))
    if not isinstance(words.channels, tuple):
        _check_clocks(recordings, channels, findings)
    _check_targets_agree(recordings, label, findings)
    numeric = any(is_numbers(each.target) for each in recordings)
    if words.window is not None:
        _check_lengths(recordings, words.window, numeric, findings)
    findings.refuse()
    if not channels:
        raise InputError(
            f"{tables[0].source} has no column but '{label}' and those that say whose and when; "
            "there must be one or more to learn from."
        )
    return _joined(recordings, words, channels, label, tuple(notes))


def _check_some_table_has(tables: Sequence[Table], words: Words, label: str) -> None:
    """Refuse columns that no table has: the word is wrong, not every table."""
    findings = Findings()
    present = list(dict.fromkeys(name for table in tables for name in table.columns))
    for word, column in (("label", label), ("client", words.client), ("time", words.time)):
        if column is None or str(column) in present:
            continue
        near = nearest(str(column), present)
        hint = f"; did you mean '{near}'?" if near else "."
        places = tables[0].source if len(tables) == 1 else f"any of the {len(tables)} tables"
        findings.add(
            f"{word} is '{column}', which is no column of {places}{hint} There are: "
            f"{_listed(present)}."
        )
    findings.refuse()


def _channels(
    tables: Sequence[Table], words: Words, label: str, findings: Findings
) -> tuple[str, ...]:
    """The columns that are inputs; what tables lack, or have beside them, is found."""
    special = [label]
    for column in (words.client, words.time):
        if column is not None:
            special.append(str(column))
    if isinstance(words.channels, tuple):
        channels = words.channels
        may_have_others = True
        both = sorted(set(channels) & set(special))
        check(not both, "channels", list(channels), f"without {', '.join(both)}")
    else:
        # As most tables have it: then the odd ones out are named, not the others.
        usual = Counter(tuple(sorted(table.columns)) for table in tables).most_common(1)[0][0]
        like_most = next(table for table in tables if tuple(sorted(table.columns)) == usual)
        channels = tuple(name for name in like_most.columns if name not in special)
        may_have_others = False
        if isinstance(words.channels, int):
            allowed = f"the {len(channels)} columns beside {', '.join(special)}, or their names"
            check(words.channels == len(channels), "channels", words.channels, allowed)
    wanted = [*channels, *special]
    for table in tables:
        lacking = [name for name in wanted if name not in table.columns]
        others = [name for name in table.columns if name not in wanted]
        if lacking:
            has = f", and has {_listed(others)} instead" if others else ""
            columns = "" if others else f" (it has {_listed(list(table.columns))})"
            findings.add(f"{table.place} has no column {_listed(lacking)}{has}{columns}.")
        elif others and not may_have_others:
            findings.add(
                f"{table.place} has a column {_listed(others)} that the other tables lack; leave "
                "it out, or say which columns are inputs (--channels)."
            )
    return channels


def _listed(names: Sequence[str], most: int = 12) -> str:
    quoted = [f"'{name}'" for name in names[:most]]
    more = len(names) - most
    return ", ".join(quoted) + (f" and {more} more" if more > 0 else "")


# ---- one recording -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recording:
    """The rows of one client in one table, in the order of time; and where its gaps are."""

    place: str
    client: str
    signal: Floats
    target: Array
    pieces: Ints
    """The number of the gapless piece that each row is in."""


def _recordings(
    table: Table, words: Words, label: str, channels: Sequence[str], findings: Findings
) -> list[_Recording]:
    """The recordings of a table; what is wrong in its cells is found."""
    n = len(table)
    if n == 0:
        findings.add(f"{table.place} has no rows.")
        return []
    signal = np.full((n, len(channels)), np.nan)
    for place, name in enumerate(channels):
        if name in table.columns:
            signal[:, place] = _sensor(table, name, findings)
    target = _target(table, label, findings)
    owner = _owner(table, words, findings)
    order = np.arange(n)
    clock = None
    if words.time is not None and words.time in table.columns:
        clock = _clock(table, words.time, findings)
        # Stable: rows of the same moment stay in the order of the file.
        order = np.argsort(clock, kind="stable")
    if target is None or owner is None:
        return []

    # All rows of one client after another, each in the order of time.
    number = ids(owner)
    order = order[np.argsort(number[order], kind="stable")]
    recordings = []
    for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        client = str(owner[rows[0]])
        parts = np.zeros(len(rows), dtype=np.int64)
        if clock is not None:
            parts = _between_gaps(clock[rows])
        named = Table(table.source, {}, client).place
        recordings.append(_Recording(named, client, signal[rows], target[rows], parts))
    return recordings


def _sensor(table: Table, name: str, findings: Findings) -> Floats:
    """A column of numbers, NaN where a cell holds none."""
    values, missing, wrong = numbers_of(table.columns[name])
    n = len(values)
    where = f"{table.place}, column '{name}'"
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        cell = table.columns[name][first]
        if wrong.sum() + missing.sum() == n:
            kind, advice = _no_numbers(name, cell)
            sentence = f"{where} holds {kind}, as {_shown(cell)} in {table.where(first)}; {advice}."
            findings.add_alike(f"{name} {kind}", sentence, table.source)
            return values
        findings.add(
            f"{where} holds {_shown(cell)} in {wrong.sum()} of {n} rows, first in "
            f"{table.where(first)}; every cell of an input must be a number."
        )
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        findings.add(
            f"{where} is empty in {missing.sum()} of {n} rows, first in {table.where(first)}; "
            "fill these cells or leave the rows out."
        )
    return values


def _no_numbers(name: str, cell: Any) -> tuple[str, str]:
    """What a column without a single number holds, by one of its cells, and what to do."""
    inputs = "leave it out by naming the columns that are inputs (--channels)"
    if isinstance(cell, str) and re.fullmatch(r"-?[0-9]+,[0-9]+", cell.strip()):
        return "numbers with a decimal comma", "write them with a point"
    if _moments(np.array([cell])) is not None:
        order = f"if they say in what order rows come, say so (--time {shlex.quote(name)})"
        return "dates", f"{order}, or {inputs}"
    return "what is no number", inputs


def _moments(column: Array) -> Floats | None:
    """Dates as seconds, NaN where there is none; None if these are no dates."""
    with warnings.catch_warnings():
        # NumPy warns, once a row, that it takes a date with a time zone to UTC: as it should.
        warnings.simplefilter("ignore", UserWarning)
        try:
            dates = column.astype("datetime64[ns]")
        except (TypeError, ValueError):
            return None
    return np.where(np.isnat(dates), np.nan, dates.astype(np.int64) / 1e9)


def numbers_of(column: Array) -> tuple[Floats, Flags, Flags]:
    """The numbers of a column; which cells are empty, and which hold anything else."""
    n = len(column)
    nothing = np.zeros(n, dtype=bool)
    if column.dtype.kind in "fiub":
        values = column.astype(np.float64)
        missing = np.isnan(values)
        # NaN compares as False, so that it is not wrong beside being missing.
        return values, missing, np.abs(values) > LARGEST
    if column.dtype.kind in "US":
        try:
            values = column.astype(np.float64)
        except ValueError:
            values = np.zeros(0)
        if len(values) == n and not np.isnan(values).any():
            return values, nothing, np.abs(values) > LARGEST
    values = np.full(n, np.nan)
    missing = nothing.copy()
    wrong = nothing.copy()
    # The few cells that differ are read once each: labels are a few words over and over.
    known: dict[Any, float | None] = {}
    for row, cell in enumerate(column.tolist()):
        key = cell if isinstance(cell, str) else None
        if key is None or key not in known:
            known[key] = _number(cell)
        number = known[key]
        if number is None:
            wrong[row] = True
        elif np.isnan(number):
            missing[row] = True
        else:
            values[row] = number
    return values, missing, wrong | (np.abs(values) > LARGEST)


def _number(cell: Any) -> float | None:
    """The number in a cell; NaN if the cell is empty, None if it holds anything else."""
    if is_missing(cell):
        return float("nan")
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing.

    >>> is_missing(" N/A "), is_missing(float("nan")), is_missing("walk"), is_missing(0)
    (True, True, False, False)
    """
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    if cell is None:
        return True
    try:
        # NaN, and pandas' NaT, are not equal to themselves.
        return bool(cell != cell)
    except TypeError:
        # Of pandas' NA nothing can be said, not even that.
        return True
    except ValueError:
        # An array in a cell.
        return False


def _shown(cell: Any) -> str:
    """A cell for a sentence, cut where it is long."""
    text = str(cell).strip() if isinstance(cell, str) else repr(cell)
    text = " ".join(text.split())
    if len(text) > 40:
        text = f"{text[:40]}..."
    return f"'{text}'"


def _target(table: Table, label: str, findings: Findings) -> Array | None:
    """The targets of a table: numbers where all are, else words."""
    if label not in table.columns:
        return None
    column = table.columns[label]
    values, missing, wrong = numbers_of(column)
    if column.dtype.kind == "b":
        return column.astype(str)
    where = f"{table.place}, column '{label}'"
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        cell = column[first]
        advice = "fill these cells or leave the rows out"
        if isinstance(cell, str) and cell.strip():
            # In some data sets a class is called null or none.
            advice = f"{_shown(cell)} counts as an empty cell; rename it if it is a class"
        findings.add(
            f"{where} has no label in {missing.sum()} of {len(column)} rows, first in "
            f"{table.where(first)}; {advice}."
        )
    # Larger whole numbers are not told apart as floats: they are names then.
    are_exact = bool((np.abs(values[~missing]) < MOST_EXACT).all())
    if not wrong.any() and (are_exact or is_numbers(values[~missing])):
        return values
    return np.array([str(cell).strip() for cell in column.tolist()])


def _owner(table: Table, words: Words, findings: Findings) -> Array | None:
    """Whose each row is, as text; empty where nobody says."""
    if words.client is None:
        return np.full(len(table), table.client, dtype=f"U{max(1, len(table.client))}")
    name = str(words.client)
    if name not in table.columns:
        return None
    column = table.columns[name]
    names = _names(column)
    missing = np.array([not name for name in names])
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        findings.add(
            f"{table.place}, column '{name}' names nobody in {missing.sum()} of {len(column)} "
            f"rows, first in {table.where(first)}; fill these cells or leave the rows out."
        )
    return np.array(names)


def _names(column: Array) -> list[str]:
    """What is in each cell as a name: 7 and 7.0 are the same person; empty: nothing is."""
    names = []
    # A person has many rows: each text is looked at once.
    known: dict[str, str] = {}
    for cell in column.tolist():
        if isinstance(cell, str) and cell in known:
            names.append(known[cell])
        elif is_missing(cell):
            names.append("")
        elif isinstance(cell, float) and cell.is_integer():
            names.append(str(int(cell)))
        else:
            # A line break in a name would break tables.
            names.append(" ".join(str(cell).split()))
        if isinstance(cell, str):
            known[cell] = names[-1]
    return names


def _clock(table: Table, name: str, findings: Findings) -> Floats:
    """A column of moments: numbers, or dates as 2024-05-17T10:00:00."""
    column = table.columns[name]
    values, missing, wrong = numbers_of(column)
    if column.dtype.kind == "M" or bool(wrong.any()):
        moments = _moments(column)
        if moments is not None:
            values = moments
            missing = np.isnan(values)
            wrong = np.zeros(len(column), dtype=bool)
    bad = missing | wrong
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        findings.add(
            f"{table.place}, column '{name}' holds {_shown(column[first])} in "
            f"{table.where(first)}, and {bad.sum()} such cells of {len(column)}; moments are "
            "numbers, or dates as 2024-05-17T10:00:00."
        )
    return values


def _between_gaps(clock: Floats) -> Ints:
    """Number the pieces of a recording between gaps in time.

    >>> _between_gaps(np.array([0.0, 1, 2, 3, 90, 91])).tolist()
    [0, 0, 0, 0, 1, 1]
    """
    steps = np.diff(clock)
    forward = steps[steps > 0]
    usual = float(np.median(forward)) if len(forward) else np.inf
    return np.cumsum(np.r_[False, steps > GAP * usual]).astype(np.int64)


# ---- all recordings together ---------------------------------------------------------------------


def _check_clocks(
    recordings: Sequence[_Recording], channels: Sequence[str], findings: Findings
) -> None:
    """Find columns that grow with every row: a network would learn when, not what."""
    longest = max((len(each.target) for each in recordings), default=0)
    if longest < CLOCK_ROWS:
        return
    for place, name in enumerate(channels):
        # NaN is not larger than anything, so that a column with holes is no clock.
        if all(bool((np.diff(each.signal[:, place]) > 0).all()) for each in recordings):
            findings.add(
                f"column '{name}' grows with every row of every recording: a clock or a row "
                f"number, not an input; say so (--time {name}), or name the columns that are "
                "inputs (--channels)."
            )


def _check_targets_agree(recordings: Sequence[_Recording], label: str, findings: Findings) -> None:
    """Find a table whose labels are numbers where those of another are words."""
    words = [each for each in recordings if each.target.dtype.kind != "f"]
    numbers = [each for each in recordings if each.target.dtype.kind == "f"]
    if words and numbers:
        findings.add(
            f"{numbers[0].place}, column '{label}' holds numbers and in {words[0].place} words; "
            "take one or the other for all."
        )


def _check_lengths(
    recordings: Sequence[_Recording], window: int, numeric: bool, findings: Findings
) -> None:
    """Find clients none of whose stretches is as long as a window."""
    longest: dict[str, int] = {}
    rows: dict[str, int] = {}
    places: dict[str, str] = {}
    for each in recordings:
        # Numbers to predict change all the time; a window takes that of its last row.
        stretch = each.pieces if numeric else runs(each.pieces, each.target)
        stretches = np.bincount(stretch)
        longest[each.client] = max(longest.get(each.client, 0), int(stretches.max()))
        rows[each.client] = max(rows.get(each.client, 0), len(each.target))
        places.setdefault(each.client, each.place)
    for client, most in longest.items():
        if most < window:
            what = "without a gap" if numeric else "of one label"
            findings.add(
                f"{places[client]} has no {window} rows {what} one after another, which is one "
                f"window: its longest stretch has {most} rows, its longest recording "
                f"{rows[client]}; take a shorter window (--window), or leave the client out."
            )


def is_numbers(target: Array) -> bool:
    """Whether targets are numbers to predict, not classes: floats, and not all whole."""
    return target.dtype.kind == "f" and not bool((target == np.round(target)).all())


def _joined(
    recordings: Sequence[_Recording],
    words: Words,
    channels: tuple[str, ...],
    label: str,
    notes: tuple[str, ...],
) -> Dataset:
    """One data set of all recordings, which nothing is wrong with."""
    signal = np.concatenate([each.signal for each in recordings]).astype(np.float32)
    target = np.concatenate([each.target for each in recordings])
    numeric = is_numbers(target)
    classes, y = _classes(target)
    users, user = _users(recordings)
    if user is None:
        notes = (*notes, NOBODY)
    if len(users) == 1:
        notes = (*notes, f"there is one client only, {users[0]}: nobody shares anything with it")
    notes = (*notes, *_nearly_one(classes))
    number = np.repeat(np.arange(len(recordings)), [len(each.target) for each in recordings])
    piece = np.concatenate([each.pieces for each in recordings])
    # In a stretch nothing changes that a window may not cross.
    run = runs(number, piece) if numeric else runs(number, piece, y)
    if numeric:
        y = np.zeros(len(target), dtype=np.int64)
        classes = (label,)
    elif len(classes) < 2:
        raise InputError(
            f"column '{label}' holds one class only ({', '.join(classes)}); there must be two or "
            "more to tell apart."
        )
    kind = "numbers" if numeric else "classes"
    if words.window is None:
        return Dataset(
            signal,
            y,
            classes,
            user,
            notes=(*notes, *_looks_recorded(run)),
            kind=kind,
            targets=target[:, None] if numeric else None,
            refusal="rows without window are single examples",
            names=users,
            channels=channels,
        )
    length = words.window
    start = starts(run, length, words.step)
    # A view of all windows, of which only those wanted are copied; the window is its last axis.
    x = np.lib.stride_tricks.sliding_window_view(signal, length, axis=0)[start]
    last = start + length - 1
    sizes = np.bincount(run)
    short = int((sizes < length).sum())
    if short:
        notes = (
            *notes,
            f"{short} of {len(sizes)} stretches of one label are shorter than a window of {length} "
            "rows and left out",
        )
    return Dataset(
        x,
        y[start],
        classes,
        None if user is None else user[start],
        block=pieces(ids(run[start]), least_in_piece(length, words.step)),
        start=start,
        reach=length,
        notes=notes,
        kind=kind,
        targets=target[last][:, None] if numeric else None,
        names=users,
        channels=channels,
        window=length,
    )


def _classes(target: Array) -> tuple[tuple[str, ...], Ints]:
    """The names of the classes, and the number of each row's; whole numbers are in their order."""
    if target.dtype.kind == "f" and not is_numbers(target):
        target = target.astype(np.int64)
    found, y = np.unique(target, return_inverse=True)
    return tuple(str(value) for value in found.tolist()), y.reshape(-1).astype(np.int64)


def _nearly_one(classes: Sequence[str]) -> tuple[str, ...]:
    """A note where classes differ by capitals or blanks alone.

    >>> _nearly_one(["Walk", "sit", "walk"])
    ("classes that differ by capitals or blanks only are told apart: 'Walk' and 'walk'",)
    """
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(name.lower().split()), []).append(f"'{name}'")
    pairs = [" and ".join(names) for names in alike.values() if len(names) > 1]
    if not pairs:
        return ()
    return ("classes that differ by capitals or blanks only are told apart: " + "; ".join(pairs),)


def _users(recordings: Sequence[_Recording]) -> tuple[tuple[str, ...], Ints | None]:
    """The names of the clients, and the number of each row's; whole numbers are in their order."""
    found = {each.client for each in recordings}
    if found == {""}:
        return (), None
    names = sorted(found)
    if all(name.isdecimal() for name in names):
        names = sorted(found, key=int)
    numbers = {name: number for number, name in enumerate(names)}
    user = [np.full(len(each.target), numbers[each.client]) for each in recordings]
    return tuple(names), np.concatenate(user).astype(np.int64)


def _looks_recorded(run: Ints) -> tuple[str, ...]:
    """A note where rows without windows seem to follow each other in time."""
    average = len(run) / (int(run.max()) + 1)
    if average < STRETCH:
        return ()
    return (
        f"rows of one label come {average:.0f} in a row, as in a recording, and each is taken as "
        "an example of its own: neighbouring rows may be on both sides of the split; cut windows "
        "with window and stride",
    )
