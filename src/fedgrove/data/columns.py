"""Read the columns of a user's table: inputs, targets, clients and times; report wrong cells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..errors import MOST_LISTED, Refusals, spell_option
from .arrays import MAX_NUMBER
from .dataset import Array, Floats, Ints
from .recordings import find_seconds

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts of empty cells, in small letters."""
MAX_EXACT = 2.0**53
"""Below this every whole number is exact as a float."""


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


def read_signal(
    table: InputTable, channels: Sequence[str], fill: str | None, refusals: Refusals
) -> Floats:
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
        signal[:, position], is_wrong = _read_channel(table, name, fill, refusals)
        found_wrong += is_wrong
    return signal


def _read_channel(
    table: InputTable, name: str, fill: str | None, refusals: Refusals
) -> tuple[Floats, bool]:
    """Read an input column and report cells that are not numbers; return whether any is not.

    Empty cells that are filled later are not reported.
    """
    values, missing, wrong = parse_numbers(table.frame[name])
    if missing.all() and fill is not None:
        refusals.add(
            f"{table.place}, column '{name}' is empty in all {len(missing)} rows; leave it out by "
            "naming the columns that are inputs (--channels), or leave out the file."
        )
        return values, True
    if fill is not None:
        missing = np.zeros_like(missing)
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
            f"{where} is empty {table.describe_first(missing)}; fill these cells "
            f"({spell_option('fill', 'mean')}, zero or previous) or leave the rows out "
            f"({spell_option('fill', 'drop')})."
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


def read_target(
    table: InputTable, label: str, fill: str | None, refusals: Refusals
) -> tuple[Array, Array]:
    """Read the targets of a table: numbers if all cells are numbers, else texts.

    Returns:
        The targets, and which rows have none: these are reported if they are not left out.
    """
    column = table.frame[label]
    _has_lists(table, label, refusals)
    code, cells = _factorize(column)
    texts: Array = cells.str.strip().to_numpy(object)[code]
    values, missing, wrong = parse_numbers(column)
    if column.dtype.kind == "b":
        return texts, missing
    if missing.any() and fill != "drop":
        cell = _show(column.iloc[missing.argmax()])
        advice = f"fill these cells or leave the rows out ({spell_option('fill', 'drop')})"
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
        return values, missing
    return texts, missing


def read_clients(table: InputTable, name: str, refusals: Refusals) -> pd.Series:
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


def read_clock(table: InputTable, name: str, unit: str | None, refusals: Refusals) -> Floats:
    """Read a column of times in seconds: numbers, or dates such as 2024-05-17T10:00:00."""
    column = table.frame[name]
    values, missing, wrong = parse_numbers(column)
    bad = missing | wrong
    is_date = False
    if wrong.any():
        seconds = _parse_times(column)
        # Whichever reads more cells tells what the column was meant to be.
        if np.isnan(seconds).sum() < bad.sum():
            values = seconds
            bad = np.isnan(seconds)
            is_date = True
    if bad.any():
        cell = _show(column.iloc[bad.argmax()])
        refusals.add(
            f"{table.place}, column '{name}' contains {cell} or similar "
            f"{table.describe_first(bad)}; times are numbers of at most {MAX_NUMBER:g}, or dates "
            "such as 2024-05-17T10:00:00 or 17.05.2024 10:00:00."
        )
    return values if is_date else values * find_seconds(values, unit)


def _parse_times(column: pd.Series) -> Floats:
    """Read dates as seconds, NaN if a cell is not a date.

    With points between them, the day comes first and the year last, as in 17.05.2024.
    """
    if column.dtype.kind != "M":
        column = column.astype(str).str.strip()
        german = r"^(\d{1,2})\.(\d{1,2})\.(\d{4})"
        is_german = column.str.match(german)
        if is_german.any():
            parts = column[is_german].str.extract(german)
            date = parts[2] + "-" + parts[1].str.zfill(2) + "-" + parts[0].str.zfill(2)
            column = column.where(
                ~is_german, date + column[is_german].str.replace(german, "", regex=True)
            )
        # A decimal comma of seconds.
        column = column.str.replace(r"(:\d\d),(\d+)", r"\1.\2", regex=True)
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    seconds = (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return np.asarray(seconds, dtype=np.float64)


def is_numbers(target: Array) -> bool:
    """Whether targets are numbers to predict, not classes: floats, and not all whole."""
    return target.dtype.kind == "f" and not bool((target == np.round(target)).all())
