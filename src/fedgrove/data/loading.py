"""The two ways in: a named set or file, and your own arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import check, unknown
from .build import Choices, build
from .dataset import Array, Dataset, Ints, ids, positions
from .federation import Defaults, Federation
from .files import need, npz
from .sets import SETS, dataset_of


def names() -> list[str]:
    """The data sets there are."""
    return list(SETS)


def describe(name: str) -> str:
    """One line on a data set."""
    if name not in SETS:
        raise unknown("data set", name, SETS)
    return SETS[name].about


def load(
    data: str | Path,
    *,
    partition: str | None = None,
    scenario: str | None = None,
    split: str | None = None,
    clients: int | None = None,
    profile: str | None = None,
    standardise: bool = True,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Federation:
    """The federation of a named set, or of an npz file with arrays x, y, client (and block); None is the set's own.

    >>> federation = load("digits", clients=5)
    >>> len(federation.clients), federation.shape, federation.classes
    (5, (1, 8, 8), 10)
    """
    choices = Choices(partition, scenario, split, clients, profile, standardise, seed)
    if isinstance(data, Path) or data.endswith(".npz"):
        d = npz(Path(data))
        need(d, ("x", "y"), str(data))
        return _own(d["x"], d["y"], d.get("client"), d.get("block"), Path(data).stem, choices)
    if data not in SETS:
        raise unknown("data set", data, [*SETS, "FILE.npz"])
    known = SETS[data]
    choices = replace(
        choices, partition=partition or known.partition, clients=clients or known.clients
    )
    dataset = dataset_of(data, clients if choices.partition == "natural" else None, data_dir)
    return build(data, dataset, choices, known.defaults)


def from_arrays(
    x: Any,
    y: Any,
    client: Any = None,
    *,
    name: str = "arrays",
    block: Any = None,
    partition: str | None = None,
    scenario: str | None = None,
    split: str | None = None,
    clients: int | None = None,
    profile: str | None = None,
    standardise: bool = True,
    seed: int = 0,
) -> Federation:
    """The federation of your own arrays: x (n, F), (n, C, L) or (n, C, H, W), y (n,) labels, client (n,) owners.

    ``block`` (n,) names what belongs together in time; whole blocks are held out, and rows that follow each other
    within a block count as overlapping. Without ``client`` the rows are dealt out (`iid` to 10 clients unless told).
    """
    choices = Choices(partition, scenario, split, clients, profile, standardise, seed)
    return _own(np.asarray(x), np.asarray(y), client, block, name, choices)


def _own(x: Array, y: Array, client: Any, block: Any, name: str, choices: Choices) -> Federation:
    dataset = _own_dataset(x, y, client, block)
    choices = replace(
        choices, partition=choices.partition or ("iid" if client is None else "natural")
    )
    return build(name, dataset, choices, _own_defaults(x.shape[1:]))


def _own_dataset(x: Array, y: Array, client: Any, block: Any) -> Dataset:
    """Check the arrays and number their labels, clients and blocks."""
    n, given = len(x) if x.ndim else 0, f"{x.dtype} {x.shape}"
    check(
        x.ndim in (2, 3, 4) and x.dtype.kind in "fiub",
        "x",
        given,
        "numbers (n, F), (n, C, L) or (n, C, H, W)",
    )
    check(
        bool(np.isfinite(x).all()),
        "x",
        f"{given} with NaN or infinity",
        "finite; fill or drop such rows",
    )
    label, user, unit = _column("y", y, n), _column("client", client, n), _column("block", block, n)
    assert label is not None
    labels = tuple(map(str, np.unique(y).tolist()))
    check(len(labels) > 1, "y", f"{n} labels of {len(labels)} class", "of two classes or more")
    if unit is not None and user is not None:
        unit = ids(unit * (user.max() + 1) + user)  # block 0 of two clients is two blocks
    start = None if unit is None else unit * (n + 2) + positions(unit)
    refusal = "the arrays came without block, which says which rows belong together in time"
    return Dataset(x, label, labels, user, unit, start, reach=2, refusal=refusal)


def _column(name: str, values: Any, n: int) -> Ints | None:
    """One whole number or word per row, numbered 0, 1, ..."""
    if values is None:
        return None
    column = np.asarray(values)
    given = f"{column.dtype} {column.shape}"
    check(
        column.shape == (n,) and column.dtype.kind in "iuUb",
        name,
        given,
        f"whole numbers or text of shape ({n},)",
    )
    return ids(column)


def _own_defaults(shape: tuple[int, ...]) -> Defaults:
    net = {1: "mlp", 2: "har-cnn"}.get(len(shape)) or ("mnist-cnn" if shape[0] == 1 else "lenet")
    return Defaults(net, cohort=10, rounds=20, epochs=3, batch=32, optimiser="Adam", lr=1e-3)
