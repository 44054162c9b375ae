"""A user's own data as arrays, one example per row: check them and number labels and clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, check, spell_option
from .dataset import Array, Dataset, Ints, count_within_groups, number_values
from .federation import Defaults

if TYPE_CHECKING:
    import pandas as pd

MAX_NUMBER = 1e30
"""Larger numbers are refused: float32, in which everything is computed, ends at 3e38."""
MIN_DEVIATION = 1e-15
"""Targets with a smaller deviation are refused: float32 has no squares of much smaller errors."""
MIN_RELATIVE_DEVIATION = 1e-5
"""The smallest deviation of targets, as a share of their mean. float32 has steps of 1e-7 of a
number: these are a hundredth of such a deviation, and an error may become 0."""
FILLS = ("mean", "zero", "previous", "drop")
"""What can be done about empty cells of inputs."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of times, in seconds."""
MAX_COLOURS = 4
"""Grey, RGB and RGBA images have 1, 3 and 4 channels: a last axis of this size has the colours."""
NO_BLOCKS = "windows without block: neighbouring windows may be on both sides of the split"


@dataclass(frozen=True)
class OwnDataOptions:
    """The options for a user's own data.

    Args:
        label: The column of the targets; for arrays, the targets themselves.
        client: The column with the client of each row; for arrays, the clients themselves.
        window: The number of rows of a window; None: every row is an example.
        stride: Rows from one window to the next; by default half a window.
        channels: The columns that are inputs; by default all other columns. For arrays, the names
            of the channels or their number.
        time: The column to sort each recording by; a gap in it ends a window. With a unit at its
            end, as in "t:ms", numbers are not seconds.
        rate: Rows per second that all recordings are resampled to.
        fill: What empty cells of inputs become: "mean", "zero" or "previous"; with "drop" the rows
            are left out.

    Raises:
        InputError: An option is not possible.
    """

    label: Any = None
    client: Any = None
    window: int | None = None
    stride: int | None = None
    channels: int | str | Sequence[str] | None = None
    time: str | None = None
    rate: float | None = None
    fill: str | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check(0 < self.rate < np.inf, "rate", self.rate, "above 0")
            check(
                self.time is not None,
                "rate",
                self.rate,
                f"given together with {spell_option('time', 'COLUMN')}, the time of each row",
            )
        if self.fill is not None:
            check(self.fill in FILLS, "fill", self.fill, f"one of {', '.join(FILLS)}")
        if self.window is not None:
            check(self.window >= 2, "window", self.window, "2 rows or more")
        if self.stride is not None:
            check(self.window is not None, "stride", self.stride, "given together with window")
            check(self.stride >= 1, "stride", self.stride, "1 row or more")
        channels = self.channels
        if isinstance(channels, str):
            channels = tuple(name.strip() for name in channels.split(","))
        elif channels is not None and not isinstance(channels, int):
            channels = tuple(map(str, channels))
        if isinstance(channels, tuple):
            repeated = sorted({name for name, count in Counter(channels).items() if count > 1})
            check(
                not repeated, "channels", list(channels), f"without repeated {', '.join(repeated)}"
            )
            if len(channels) == 1 and channels[0].isdecimal():
                channels = int(channels[0])
        # The class is frozen; a text of the command line becomes names or a number.
        object.__setattr__(self, "channels", channels)

    @property
    def step(self) -> int:
        """Rows from one window of the user's data to the next."""
        assert self.window is not None
        return self.stride or max(1, self.window // 2)

    @property
    def clock(self) -> str | None:
        """The column of a user's table with the time of each row."""
        return None if self.time is None else self.time.removesuffix(f":{self.unit}")

    @property
    def unit(self) -> str | None:
        """The unit of the times of a user's table, if it is given."""
        ending = (self.time or "").rpartition(":")
        return ending[2] if ending[0] and ending[2] in SECONDS else None

    def clock_in(self, columns: Collection[str]) -> str | None:
        """The column of times, of these; the name of a column may itself end like a unit."""
        return self.time if self.time in columns else self.clock

    def special_columns(self) -> dict[str, str]:
        """Return the columns of a table that are not inputs, by the name of their option."""
        columns = {"label": self.label, "client": self.client, "time": self.clock}
        return {option: str(name) for option, name in columns.items() if name is not None}

    def list_given(self) -> list[str]:
        """Return the names of the options that were given."""
        return [name for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class ArrayData:
    """Inputs and targets as arrays.

    Args:
        x: Inputs (n, *shape).
        y: Targets.
        client: The client of each row, or None.
        block: What belongs together in time, or None.
        source: How messages call the arrays.
    """

    x: Array
    y: Array
    client: Any = None
    block: Any = None
    source: str = "arrays"


def make_dataset(arrays: ArrayData, options: OwnDataOptions) -> Dataset:
    """Check a user's arrays and make a data set; a recording (n, C) is cut into windows.

    Raises:
        InputError: The arrays cannot be used.
    """
    if options.window is not None:
        return cut_recordings([("", arrays)], options)
    x = arrays.x
    given = f"{x.dtype} {x.shape}"
    # float, int, unsigned and bool; a network takes no text, dates or objects.
    is_numeric = x.dtype.kind in "fiub"
    allowed = "numbers (n, F), (n, C, L) or (n, C, H, W)"
    check(x.ndim in (2, 3, 4) and is_numeric, "x", given, allowed)
    is_finite = bool(np.isfinite(x).all())
    check(is_finite, "x", f"{given} with NaN or infinity", "finite; fill in or drop such rows")
    _check_size("x", x)

    channels = options.channels
    assert not isinstance(channels, str)
    x, notes = _bring_channels_first(x, channels)
    targets = _read_targets(arrays.y, len(x))
    user = None
    names: tuple[str, ...] = ()
    if arrays.client is not None:
        user = _number_column("client", arrays.client, len(x))
        # np.unique sorts as number_values does.
        names = tuple(map(str, np.unique(np.asarray(arrays.client)).tolist()))
    block, start = _number_blocks(arrays.block, user, len(x))
    if x.ndim == 3 and block is None:
        # A series is most likely a window of a longer one; other shapes get no note.
        notes = (*notes, NO_BLOCKS)
    return replace(
        targets,
        x=x,
        user=user,
        block=block,
        start=start,
        reach=2,
        notes=(*notes, *targets.notes),
        refusal="the arrays came without block, which marks rows that belong together in time",
        names=names,
        channels=() if channels is None or isinstance(channels, int) else tuple(channels),
    )


def _number_blocks(block: Any, user: Ints | None, n: int) -> tuple[Ints | None, Ints | None]:
    """Number the blocks, and place the rows of each block next to each other in time."""
    if block is None:
        return None, None
    number = _number_column("block", block, n)
    if user is not None:
        # Clients may number their blocks each from 0: block 0 of two clients is two blocks.
        number = number_values(number * (user.max() + 1) + user)
    # Rows of a block are one step apart and blocks at least three: with a reach of 2 the next row
    # of the same block overlaps, and no row of another block.
    return number, number * (n + 2) + count_within_groups(number)


def _bring_channels_first(
    x: Array, channels: int | Sequence[str] | None
) -> tuple[Array, tuple[str, ...]]:
    """Return the inputs with channels first, and a note if the axes were changed.

    A series of more channels than samples, and images whose last axis looks like colours, are
    refused: almost always the axes are in another order, and the network would learn next to
    nothing. ``channels`` tells which axis has the channels.
    """
    shape = x.shape[1:]
    if channels is None:
        is_series = len(shape) == 2 and shape[0] > shape[1]
        is_image = len(shape) == 3 and shape[0] > MAX_COLOURS and shape[2] <= MAX_COLOURS
        if is_series or is_image:
            raise InputError(_explain_axes(x.shape))
        return x, ()
    count = channels if isinstance(channels, int) else len(channels)
    if shape[0] == count:
        return x, ()
    allowed = f"the size of the first axis after n or of the last, and x has the shape {x.shape}"
    check(len(shape) > 1 and shape[-1] == count, "the number of channels", count, allowed)
    note = f"x {x.shape} has its {count} channels on the last axis: moved to the front"
    return np.moveaxis(x, -1, 1), (note,)


def _explain_axes(shape: tuple[int, ...]) -> str:
    """Return the refusal of inputs whose axes seem to be in another order."""
    first = shape[1]
    last = shape[-1]
    if len(shape) == 3:
        as_given = f"{first} channels of {last} samples"
        as_meant = f"{first} samples of {last} channels"
        order = "(0, 2, 1)"
    else:
        as_given = f"{first} channels of {shape[2]} x {last} pixels"
        as_meant = f"{first} x {shape[2]} pixels of {last} channels"
        order = "(0, 3, 1, 2)"
    return (
        f"x has the shape {shape}, which would be read as {as_given}: channels come first. If "
        f"it has {as_meant}, give channels={last} (--channels {last}) or "
        f"x.transpose{order}; if the shape is correct, give channels={first}."
    )


# ---- targets -------------------------------------------------------------------------------------


def _read_targets(y: Array, n: int) -> Dataset:
    """Return a data set with targets only: classes, several labels or numbers, by type and shape.

    Its inputs are a placeholder.
    """
    given = f"{y.dtype} {y.shape}"
    is_table = y.ndim == 2 and len(y) == n and y.shape[1] > 0
    if y.dtype.kind == "f":
        allowed = f"of shape ({n},) or ({n}, L)"
        check(is_table or y.shape == (n,), "y", given, allowed)
        is_finite = bool(np.isfinite(y).all())
        check(is_finite, "y", f"{given} with NaN or infinity", "finite; fill in or drop such rows")
        _check_size("y", y)
    if is_table and y.dtype.kind in "fiub":
        is_yes_or_no = bool(np.isin(y, (0, 1)).all())
        if is_yes_or_no and y.shape[1] > 1:
            return _read_labels(y)
        allowed = "0 or 1 for several labels, or float for numbers; for classes of shape (n,)"
        check(y.dtype.kind == "f", "y", f"{given} of whole numbers", allowed)
    if y.dtype.kind == "f":
        return _read_numbers(y.reshape(n, -1))
    label = _number_column("y", y, n)
    labels = tuple(map(str, np.unique(y).tolist()))
    check(len(labels) > 1, "y", f"{n} labels of {len(labels)} class", "of two classes or more")
    return Dataset(y, label, labels)


def _read_labels(y: Array) -> Dataset:
    notes: tuple[str, ...] = ()
    if y.dtype.kind == "f":
        notes = (
            "y is float and all 0 or 1: read as several labels; for numbers replace the "
            "federation's problem in Python by fedgrove.problems.numbers()",
        )
    labels = tuple(map(str, range(y.shape[1])))
    zeros = np.zeros(len(y), dtype=np.int64)
    return Dataset(y, zeros, labels, kind="labels", targets=y, notes=notes)


def _read_numbers(y: Array) -> Dataset:
    check(len(y) > 1, "y", f"{len(y)} numbers", "two or more")
    for column in y.T:
        _check_deviation(column.astype(np.float64))
    notes: tuple[str, ...] = ()
    if bool((y == np.round(y)).all()):
        notes = (
            "y is float and all whole: read as numbers; for classes save it as whole numbers, "
            "y.astype(int)",
        )
    labels = tuple(f"y{column}" for column in range(y.shape[1]))
    zeros = np.zeros(len(y), dtype=np.int64)
    return Dataset(y, zeros, labels, kind="numbers", targets=y, notes=notes)


def _check_size(name: str, values: Array) -> None:
    """Refuse numbers that are too large for float32."""
    if values.dtype.kind != "f":
        return
    largest = float(np.abs(values).max(initial=0))
    given = f"{values.dtype} {values.shape} with numbers up to {largest:.3g}"
    check(largest <= MAX_NUMBER, name, given, f"at most {MAX_NUMBER:g}; divide it by a constant")


def _check_deviation(column: Array) -> None:
    """Refuse targets that differ too little for float32; a constant is allowed."""
    mean = float(column.mean())
    deviation = float(column.std())
    # The deviation of a constant may be a rounding error.
    if deviation <= 1e-12 * abs(mean):
        return
    given = f"numbers of mean {mean:.6g} and deviation {deviation:.3g}"
    check(
        deviation >= MIN_DEVIATION,
        "y",
        given,
        f"of deviation {MIN_DEVIATION:g} or more; multiply them by a constant",
    )
    check(
        deviation >= MIN_RELATIVE_DEVIATION * abs(mean),
        "y",
        given,
        f"of deviation {MIN_RELATIVE_DEVIATION:g} of their mean or more, since float32 cannot "
        f"distinguish them; subtract a constant first, such as y - {mean:.6g}",
    )


def _number_column(name: str, values: Any, n: int) -> Ints:
    """Number the values of a column with one whole number or text per row."""
    column = np.asarray(values)
    if column.dtype.kind == "O" and all(isinstance(value, str) for value in column.tolist()):
        # What pandas makes of a column of texts.
        column = column.astype(str)
    is_discrete = column.dtype.kind in "iuUb"
    given = f"{column.dtype} {column.shape}"
    allowed = f"whole numbers or text of shape ({n},)"
    check(column.shape == (n,) and is_discrete, name, given, allowed)
    return number_values(column)


# ---- recordings that are arrays ------------------------------------------------------------------


def cut_recordings(
    recordings: Sequence[tuple[str, ArrayData]], options: OwnDataOptions, notes: Sequence[str] = ()
) -> Dataset:
    """Cut a user's recordings (n, channels) into windows.

    Args:
        recordings: The arrays, each with the name of its client; empty if they have none.
        options: How to cut the windows.
        notes: Remarks for the data set.
    """
    # Imported here because pandas takes half a second, and most arrays are examples already.
    from . import tables as table_checks
    from .columns import InputTable

    if options.rate is not None:
        raise InputError(
            f"rate is {options.rate:g}, and arrays have no time of each row; give a table with a "
            "column of times, or resample the recordings first."
        )
    tables = []
    for client, arrays in recordings:
        tables.append(InputTable(arrays.source, _make_frame(arrays, options), client))
    has_clients = "client" in tables[0].frame
    options = replace(
        options,
        label="y",
        client="client" if has_clients else None,
        channels=tuple(name for name in tables[0].frame if name not in ("y", "client")),
        time=None,
    )
    return table_checks.make_dataset(tables, options, notes)


def _make_frame(arrays: ArrayData, options: OwnDataOptions) -> pd.DataFrame:
    """Make a table of a recording (n, channels), its targets and clients."""
    import pandas as pd

    x = arrays.x
    if x.ndim != 2:
        raise InputError(
            f"window is {options.window}, and x has the shape {x.shape}, which already consists of "
            "windows; leave window out, or give the recording (n, channels)."
        )
    names = [f"x{position}" for position in range(x.shape[1])]
    if isinstance(options.channels, tuple):
        names = list(options.channels)
        allowed = f"a name for each of the {x.shape[1]} columns of x, and neither y nor client"
        are_valid = len(names) == x.shape[1] and not {"y", "client"} & set(names)
        check(are_valid, "channels", names, allowed)
    columns = {"y": arrays.y}
    if arrays.client is not None:
        columns["client"] = np.asarray(arrays.client)
    for name, values in columns.items():
        allowed = f"of shape ({len(x)},), one for each row of x"
        check(values.shape == (len(x),), name, values, allowed)
    return pd.DataFrame(x, columns=names).assign(**columns)


# ---- training defaults ---------------------------------------------------------------------------


def choose_defaults(shape: tuple[int, ...]) -> Defaults:
    """Return a data set's training defaults, with a network for the shape of its inputs."""
    net_of_images = "mnist-cnn" if shape[0] == 1 else "lenet"
    net = {1: "mlp", 2: "har-cnn"}.get(len(shape), net_of_images)
    return Defaults(net, cohort=10, rounds=20, epochs=3, batch=32, optimiser="Adam", lr=1e-3)
