"""The ways to make a federation: named sets or files, your own arrays, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core import Info
from ..errors import check, unknown
from ..problems import CLASSES, Problem
from . import devices
from . import scenario as scenarios
from .build import Choices, build
from .checked import Checked, called, checked_info
from .crowd import crowd
from .dataset import Array, Dataset, Ints, ids, positions
from .federation import ClientData, Defaults, Federation
from .files import need, npz
from .images import OPTIONS, grey, turned
from .lazy import LazyClients, takes_round
from .mix import mix
from .preparation import Preparation
from .sets import SETS, dataset_of
from .several import for_each, is_several, shares, tasks_of
from .split import VALIDATION
from .switch import switched

LARGEST = 1e30
"""Numbers beyond this are refused: float32, in which all is computed, ends at 3e38."""
SMALLEST_SPREAD = 1e-15
"""Targets that are closer together are refused: float32 has no squares of much smaller errors."""
FINEST = 1e-5
"""The least deviation of targets, as a share of their mean. float32 has steps of 1e-7 of a number:
of a deviation of this size they are a hundredth, and an error may come out as 0 where it is not."""

NO_BLOCKS = "windows without block: neighbouring windows may be on both sides of the split"


def names() -> list[str]:
    """The names of the data sets."""
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
    validation: float = VALIDATION,
    clients: int | None = None,
    profile: str | None = None,
    trace: str | None = None,
    standardise: bool = True,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Federation:
    """The federation of a named set, or of an npz file with arrays x, y, client (and block).

    A ``+`` between several makes one federation of them, in which every client has the task of its
    set (:func:`fedgrove.data.mix`, with shared outputs): the clients are dealt to the sets as
    equally as can be. ``partition``, ``scenario`` and ``split`` hold within each set, and may be
    one for each. A set's clients are those that it has alone, with as many clients and that seed.
    ``cifar10:grey`` is the set without its colours, ``digits:turned`` that with its images turned.

    None stands for the set's own choice. ``validation`` is the share held out for validation, of
    what is left after the test part: 0.1 by default, 0 for none. ``profile`` is a name or a file of
    devices, ``trace`` a file of bandwidths over time (:mod:`fedgrove.data.devices`).

    >>> federation = load("digits", clients=5)
    >>> len(federation.clients), federation.shape, federation.classes
    (5, (1, 8, 8), 10)
    >>> both = load("motion+motion-forecast", clients=5)
    >>> [client.info.task for client in both.clients.values()]
    ['motion', 'motion', 'motion', 'motion-forecast', 'motion-forecast']
    """
    if isinstance(data, str) and is_several(data):
        return _load_several(
            data,
            partition=partition,
            scenario=scenario,
            split=split,
            clients=clients,
            devices_of=devices.read(profile, trace),
            seed=seed,
            words={"validation": validation, "standardise": standardise, "data_dir": data_dir},
        )
    choices = Choices(
        partition=partition,
        scenario=scenario,
        split=split,
        validation=validation,
        clients=clients,
        devices=devices.read(profile, trace),
        standardise=standardise,
        seed=seed,
    )
    if isinstance(data, Path) or data.endswith(".npz"):
        contents = npz(Path(data))
        need(contents, ("x", "y"), str(data))
        return _from_own_arrays(
            contents["x"],
            contents["y"],
            contents.get("client"),
            contents.get("block"),
            Path(data).stem,
            choices,
        )
    name, option = _named(data)
    known = SETS[name]
    choices = replace(
        choices, partition=partition or known.partition, clients=clients or known.clients
    )
    if name == "crowd":
        check(not option, "data", data, "crowd")
        return crowd(choices, known.defaults)
    # A generated set makes as many users as are wanted; dealt out artificially, the number of
    # clients says nothing about the users, and it keeps its usual number.
    users = clients if choices.partition == "natural" else None
    dataset = dataset_of(name, users, data_dir)
    if option == "grey":
        dataset = grey(data, dataset)
    elif option == "turned":
        dataset = turned(data, dataset)
    return build(data, dataset, choices, known.defaults)


def _named(data: str) -> tuple[str, str]:
    """The name of a set, and the option behind its last colon: some names have a colon too."""
    if data in SETS:
        return data, ""
    name, _, option = data.rpartition(":")
    if name not in SETS or option not in OPTIONS:
        raise unknown("data set", data, [*SETS, "FILE.npz", *(f"SET:{word}" for word in OPTIONS)])
    return name, option


def _load_several(
    data: str,
    *,
    partition: str | None,
    scenario: str | None,
    split: str | None,
    clients: int | None,
    devices_of: devices.Devices,
    seed: int,
    words: Mapping[str, Any],
) -> Federation:
    """The federation of ``a+b``: its sets dealt one by one, then mixed, then given devices."""
    tasks = tasks_of(data)
    names = list(tasks)
    for each in tasks.values():
        # A typo is reported before any file is read.
        if not each.endswith(".npz"):
            _named(each)
    switching = scenarios.parse("none")
    if scenario is not None and scenario.startswith("switch"):
        # Clients switch between the sets, once these are one federation.
        switching = scenarios.parse(scenario)
    partition_of = for_each("partition", partition, names)
    scenario_of = for_each("scenario", None if switching.pairs else scenario, names)
    split_of = for_each("split", split, names)
    clients_of = shares(clients, names)
    parts = {}
    for place, (name, each) in enumerate(tasks.items()):
        parts[name] = load(
            each,
            partition=partition_of[place],
            scenario=scenario_of[place],
            split=split_of[place],
            clients=clients_of[place],
            seed=seed,
            **words,
        )
    mixed = mix(parts, data, outputs="shared")
    # By the numbers that clients have here: alone, each set would number its own from 0.
    devices_of.check_all_there(len(mixed.clients))
    on_devices = {}
    for k, client in mixed.clients.items():
        device = devices_of.info(client.info.examples, k, seed)
        on_devices[k] = replace(client, info=replace(device, task=client.info.task))
    mixed = replace(mixed, clients=on_devices, trace=devices_of.trace, files=devices_of.files)
    if switching.pairs:
        return switched(mixed, switching, str(scenario), seed)
    return mixed


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
    validation: float = VALIDATION,
    clients: int | None = None,
    profile: str | None = None,
    trace: str | None = None,
    standardise: bool = True,
    seed: int = 0,
) -> Federation:
    """The federation of your own arrays.

    x (n, F), (n, C, L) or (n, C, H, W) are the inputs, y the targets, client (n,) the owner of each
    row. Whole numbers or words (n,) are classes, floats (n,) or (n, L) numbers, and 0 and 1 (n, L)
    several labels. ``block`` (n,) names what belongs together in time: whole blocks are held out,
    and rows that follow each other within a block count as overlapping. Without ``client`` the rows
    are dealt out (`iid` to 10 clients unless told otherwise). The other words are those of
    :func:`load`.
    """
    choices = Choices(
        partition=partition,
        scenario=scenario,
        split=split,
        validation=validation,
        clients=clients,
        devices=devices.read(profile, trace),
        standardise=standardise,
        seed=seed,
    )
    return _from_own_arrays(np.asarray(x), np.asarray(y), client, block, name, choices)


def from_clients(
    client: Callable[..., ClientData],
    clients: int,
    *,
    classes: int,
    problem: Problem = CLASSES,
    info: Callable[..., Info] | None = None,
    name: str = "clients",
    labels: Sequence[str] | None = None,
    defaults: Defaults | None = None,
    notes: Sequence[str] = (),
) -> Federation:
    """The federation of clients 0..clients-1 that a function makes when they are needed.

    ``client(k)`` gives the data of client k; ``client(k, round)``, with a parameter called round,
    those of a round, where they drift or switch. The same arguments must always give the same data:
    a client may be made more than once, and in another process. ``info(k)`` says what the server
    knows, with as many examples as the client trains on, or ``info(k, round)`` where that changes;
    without it the data are made to find out. Inputs in float64 are taken as float32.
    ``problem`` says what the targets are; ``classes`` is how many outputs they take.
    """
    check(callable(client), "client", client, "a function of k that gives a ClientData")
    check(info is None or callable(info), "info", info, "a function of k that gives an Info")
    check(_is_whole(clients) and clients >= 1, "clients", clients, "a whole number, 1 or more")
    fewest = 2 if problem.kind == CLASSES.kind else 1
    enough = _is_whole(classes) and classes >= fewest
    check(enough, "classes", classes, f"a whole number, {fewest} or more")
    by_round = takes_round(client)
    when = {"round": 0} if by_round else {}
    first = called("client(0)", client, 0, **when)
    shape = _shape_of(first)
    make = Checked(client, shape, classes, problem, _target_shape(first))
    first = make.checked("client(0)", first)
    known = first.info
    if info is not None:
        info = checked_info(info)
    lazy = LazyClients(make, int(clients), info, by_round)
    if info is not None:
        known = lazy.info_of(0)
    check(
        len(first.train) == known.examples,
        "info(0).examples",
        known.examples,
        f"what client 0 trains on: {len(first.train)}",
    )
    if labels is None:
        labels = [str(label) for label in range(classes)]
    if defaults is None:
        defaults = _own_defaults(shape)
    return Federation(
        name,
        lazy,
        classes=classes,
        labels=tuple(labels),
        shape=shape,
        defaults=replace(defaults, cohort=min(defaults.cohort, clients)),
        notes=tuple(notes),
        problem=problem,
        preparation=Preparation(labels=tuple(labels), shape=shape),
    )


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _shape_of(client: Any) -> tuple[int, ...]:
    """The shape of one input; () of what is no client, which is then refused."""
    x = getattr(getattr(client, "train", None), "x", None)
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else ()


def _target_shape(client: Any) -> tuple[int, ...]:
    y = getattr(getattr(client, "train", None), "y", None)
    return tuple(y.shape[1:]) if isinstance(y, Tensor) else ()


def _from_own_arrays(
    x: Array, y: Array, client: Any, block: Any, name: str, choices: Choices
) -> Federation:
    dataset = _own_dataset(x, y, client, block)
    if not choices.partition:
        choices = replace(choices, partition="iid" if client is None else "natural")
    return build(name, dataset, choices, _own_defaults(x.shape[1:]))


def _own_dataset(x: Array, y: Array, client: Any, block: Any) -> Dataset:
    """Check the arrays and number their labels, clients and blocks."""
    given = f"{x.dtype} {x.shape}"
    # float, int, unsigned and bool; text, dates and objects are no inputs of a network.
    is_numeric = x.dtype.kind in "fiub"
    allowed = "numbers (n, F), (n, C, L) or (n, C, H, W)"
    check(x.ndim in (2, 3, 4) and is_numeric, "x", given, allowed)
    is_finite = bool(np.isfinite(x).all())
    check(is_finite, "x", f"{given} with NaN or infinity", "finite; fill or drop such rows")
    _check_size("x", x)

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
        notes=(*notes, *targets.notes),
        kind=targets.kind,
        targets=targets.columns,
        refusal=refusal,
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
    is_discrete = column.dtype.kind in "iuUb"
    given = f"{column.dtype} {column.shape}"
    allowed = f"whole numbers or text of shape ({n},)"
    check(column.shape == (n,) and is_discrete, name, given, allowed)
    return ids(column)


def _own_defaults(shape: tuple[int, ...]) -> Defaults:
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
