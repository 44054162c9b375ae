"""Examples that are arrays already, a row each: checked, and their labels and owners numbered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError, check
from .dataset import Array, Dataset, Ints, ids, positions
from .federation import Defaults

LARGEST = 1e30
"""Numbers beyond this are refused: float32, in which all is computed, ends at 3e38."""
SMALLEST_SPREAD = 1e-15
"""Targets that are closer together are refused: float32 has no squares of much smaller errors."""
FINEST = 1e-5
"""The least deviation of targets, as a share of their mean. float32 has steps of 1e-7 of a number:
of a deviation of this size they are a hundredth, and an error may come out as 0 where it is not."""

NO_BLOCKS = "windows without block: neighbouring windows may be on both sides of the split"


MOST_COLOURS = 4
"""Grey, RGB and RGBA images have 1, 3 and 4 channels: a last axis of this size holds them."""


@dataclass(frozen=True)
class Stack:
    """Inputs x, targets y, and perhaps whose each row is and what belongs together in time."""

    x: Array
    y: Array
    client: Any = None
    block: Any = None
    source: str = "arrays"


def dataset_of(stack: Stack, channels: int | Sequence[str] | None = None) -> Dataset:
    """Check the arrays and number their labels, clients and blocks.

    ``channels`` are their names, or how many there are: the axis of that size then holds them.
    """
    x, y, client, block = stack.x, stack.y, stack.client, stack.block
    given = f"{x.dtype} {x.shape}"
    # float, int, unsigned and bool; text, dates and objects are no inputs of a network.
    is_numeric = x.dtype.kind in "fiub"
    allowed = "numbers (n, F), (n, C, L) or (n, C, H, W)"
    check(x.ndim in (2, 3, 4) and is_numeric, "x", given, allowed)
    is_finite = bool(np.isfinite(x).all())
    check(is_finite, "x", f"{given} with NaN or infinity", "finite; fill or drop such rows")
    _check_size("x", x)

    x, turned = _channels_first(x, channels)
    n = len(x)
    targets = _own_targets(y, n)
    user = None if client is None else _column("client", client, n)
    unit = None if block is None else _column("block", block, n)
    if unit is not None and user is not None:
        # Clients may number their blocks each from 0: block 0 of two clients is two blocks.
        unit = ids(unit * (user.max() + 1) + user)
    start = None
    if unit is not None:
        # Rows of a block are one step apart and blocks at least three: with a reach of 2 the next
        # row of the same block overlaps, and no row of another block.
        start = unit * (n + 2) + positions(unit)
    refusal = "the arrays came without block, which says which rows belong together in time"
    # A series is most likely a window of a longer one; other shapes are taken as they come.
    notes = (NO_BLOCKS,) if x.ndim == 3 and unit is None else ()
    return Dataset(
        x,
        targets.y,
        targets.labels,
        user,
        unit,
        start,
        reach=2,
        notes=(*turned, *notes, *targets.notes),
        kind=targets.kind,
        targets=targets.columns,
        refusal=refusal,
        names=() if client is None else names_of(np.asarray(client)),
        channels=() if channels is None or isinstance(channels, int) else tuple(channels),
    )


def names_of(owners: Array) -> tuple[str, ...]:
    """What the owners are called, in the order in which :func:`ids` numbers them."""
    return tuple(str(owner) for owner in np.unique(owners).tolist())


def _channels_first(
    x: Array, channels: int | Sequence[str] | None
) -> tuple[Array, tuple[str, ...]]:
    """The inputs with channels first, and a note where they came otherwise.

    A series of more channels than samples, and images whose last axis looks like colours, are
    refused: almost always the axes are in another order, and the network would learn next to
    nothing without saying why. ``channels`` says how it is.
    """
    shape = x.shape[1:]
    last = len(shape)
    if channels is None:
        is_series = last == 2 and shape[0] > shape[1]
        is_image = last == 3 and shape[0] > MOST_COLOURS and shape[2] <= MOST_COLOURS
        if is_series or is_image:
            raise InputError(_otherwise(x.shape))
        return x, ()
    count = channels if isinstance(channels, int) else len(channels)
    if shape[0] == count:
        return x, ()
    allowed = f"the size of the first axis behind n or of the last, and x has the shape {x.shape}"
    check(last > 1 and shape[-1] == count, "the number of channels", count, allowed)
    note = f"x {x.shape} has its {count} channels on the last axis: taken to the front"
    return np.moveaxis(x, -1, 1), (note,)


def _otherwise(shape: tuple[int, ...]) -> str:
    """The refusal of inputs whose axes seem to be in another order."""
    first, last = shape[1], shape[-1]
    what = f"{first} channels of {last} samples"
    other = f"{first} samples of {last} channels"
    order = "(0, 2, 1)"
    if len(shape) == 4:
        what = f"{first} channels of {shape[2]} x {last} pixels"
        other = f"{first} x {shape[2]} pixels of {last} channels"
        order = "(0, 3, 1, 2)"
    return (
        f"x has the shape {shape}, which would be read as {what}: channels come first. If it holds "
        f"{other}, say channels={last} (--channels {last}) or give x.transpose{order}; if it is "
        f"right as it is, say channels={first}."
    )


@dataclass(frozen=True)
class _Targets:
    """What a user's y was taken for."""

    kind: str
    y: Ints
    labels: tuple[str, ...]
    columns: Array | None = None
    notes: tuple[str, ...] = ()


def _own_targets(y: Array, n: int) -> _Targets:
    """Classes, several labels or numbers, by the type and shape of y."""
    given = f"{y.dtype} {y.shape}"
    is_number = y.dtype.kind in "fiub"
    is_table = y.ndim == 2 and len(y) == n and y.shape[1] > 0
    if y.dtype.kind == "f":
        allowed = f"of shape ({n},) or ({n}, L)"
        check(is_table or y.shape == (n,), "y", given, allowed)
        is_finite = bool(np.isfinite(y).all())
        check(is_finite, "y", f"{given} with NaN or infinity", "finite; fill or drop such rows")
        _check_size("y", y)
    if is_table and is_number:
        is_yes_or_no = bool(np.isin(y, (0, 1)).all())
        if is_yes_or_no and y.shape[1] > 1:
            return _own_labels(y)
        if y.dtype.kind != "f":
            allowed = "0 or 1 for several labels, or float for numbers; for classes of shape (n,)"
            check(False, "y", f"{given} of whole numbers", allowed)
    if y.dtype.kind == "f":
        return _own_numbers(y.reshape(n, -1))
    label = _column("y", y, n)
    labels = tuple(str(value) for value in np.unique(y).tolist())
    check(len(labels) > 1, "y", f"{n} labels of {len(labels)} class", "of two classes or more")
    return _Targets("classes", label, labels)


def _own_labels(y: Array) -> _Targets:
    notes: tuple[str, ...] = ()
    if y.dtype.kind == "f":
        notes = (
            "y is float and all 0 or 1: taken for several labels; for numbers replace the "
            "federation's problem in Python by fedgrove.problems.numbers()",
        )
    labels = tuple(str(label) for label in range(y.shape[1]))
    return _Targets("labels", np.zeros(len(y), dtype=np.int64), labels, y, notes)


def _own_numbers(y: Array) -> _Targets:
    check(len(y) > 1, "y", f"{len(y)} numbers", "two or more")
    for column in y.T:
        _check_spread(column.astype(np.float64))
    notes: tuple[str, ...] = ()
    if bool((y == np.round(y)).all()):
        notes = (
            "y is float and all whole: taken for numbers; for classes save it as whole numbers, "
            "y.astype(int)",
        )
    labels = tuple(f"y{column}" for column in range(y.shape[1]))
    return _Targets("numbers", np.zeros(len(y), dtype=np.int64), labels, y, notes)


def _check_size(name: str, values: Array) -> None:
    """Refuse numbers that float32 does not have."""
    largest = float(np.abs(values).max(initial=0)) if values.dtype.kind == "f" else 0.0
    given = f"{values.dtype} {values.shape} with numbers up to {largest:.3g}"
    check(largest <= LARGEST, name, given, f"at most {LARGEST:g}; divide it by a constant")


def _check_spread(column: Array) -> None:
    """Refuse targets that float32 cannot tell apart, but for a constant."""
    mean = float(column.mean())
    deviation = float(column.std())
    # The deviation of a constant may be a rounding error.
    if deviation <= 1e-12 * abs(mean):
        return
    given = f"numbers of mean {mean:.6g} and deviation {deviation:.3g}"
    check(
        deviation >= SMALLEST_SPREAD,
        "y",
        given,
        f"of deviation {SMALLEST_SPREAD:g} or more; multiply them by a constant",
    )
    check(
        deviation >= FINEST * abs(mean),
        "y",
        given,
        f"of deviation {FINEST:g} of their mean or more, as float32 cannot tell them apart; "
        f"take a constant off first, such as y - {mean:.6g}",
    )


def _column(name: str, values: Any, n: int) -> Ints:
    """One whole number or word per row, numbered 0, 1, ..."""
    column = np.asarray(values)
    if column.dtype.kind == "O" and all(isinstance(value, str) for value in column.tolist()):
        # What pandas makes of a column of words.
        column = column.astype(str)
    is_discrete = column.dtype.kind in "iuUb"
    given = f"{column.dtype} {column.shape}"
    allowed = f"whole numbers or text of shape ({n},)"
    check(column.shape == (n,) and is_discrete, name, given, allowed)
    return ids(column)


def own_defaults(shape: tuple[int, ...]) -> Defaults:
    """A network that fits the shape: features, series, grey images, colour images."""
    if len(shape) == 1:
        net = "mlp"
    elif len(shape) == 2:
        net = "har-cnn"
    elif shape[0] == 1:
        net = "mnist-cnn"
    else:
        net = "lenet"
    return Defaults(net, cohort=10, rounds=20, epochs=3, batch=32, optimiser="Adam", lr=1e-3)
