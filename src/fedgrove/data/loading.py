"""The ways to make a federation: named sets or files, your own arrays, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core import ClientInfo
from ..errors import InputError, check, unknown
from ..problems import CLASSES, Problem
from . import devices, own
from . import scenario as scenarios
from .arrays import Stack, own_defaults
from .build import Choices, build
from .checked import Checked, called, checked_info
from .crowd import crowd
from .dataset import Dataset
from .federation import ClientData, Defaults, Federation
from .images import OPTIONS, grey, turned
from .lazy import LazyClients, takes_round
from .mix import mix
from .preparation import Preparation
from .reading import is_path
from .sets import SETS, dataset_of
from .several import for_each, is_several, shares, tasks_of
from .split import VALIDATION
from .switch import switched
from .tables import Words


def names() -> list[str]:
    """The names of the data sets."""
    return list(SETS)


def describe(name: str) -> str:
    """One line on a data set."""
    if name not in SETS:
        raise unknown("data set", name, SETS)
    return SETS[name].about


def load(
    data: Any,
    *,
    label: Any = None,
    client: Any = None,
    window: int | None = None,
    stride: int | None = None,
    channels: int | str | Sequence[str] | None = None,
    time: str | None = None,
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
    """The federation of a named set, or of data of your own.

    These are a file (CSV, parquet, npz), a folder with a file or a folder for each client, a
    DataFrame, arrays (x, y) or (x, y, client), a torch or Hugging Face Dataset, a partitioner of
    flwr-datasets, or a dictionary of these by client. ``label`` is the column to predict,
    ``client`` the one that says whose a row is, ``channels`` the ones that are inputs (else all
    others), ``time`` the one to sort recordings by; with ``window`` recordings are cut into windows
    of so many rows, ``stride`` apart. An npz file has arrays x, y, client (and block).

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
    words = Words(label, client, window, stride, channels, time)
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
            own_words=vars(words),
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
    if not isinstance(data, str) or (data not in SETS and is_path(data)):
        found = own.read(data, words)
        federation = _of_own(found.name, found.dataset, choices)
        return replace(federation, files={**federation.files, **found.files})
    # First whether there is such a set: it may be a folder's name with a typo.
    name, option = _named(data)
    _check_no_words(data, words)
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


def _check_no_words(data: str, words: Words) -> None:
    """Refuse words on columns where the data set knows its own."""
    given = words.given()
    if given:
        raise InputError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} given, and {data} is a data "
            "set that knows its own columns and windows; leave it out, or give data of your own "
            "(a file, a folder/)."
        )


def _of_own(name: str, dataset: Dataset, choices: Choices) -> Federation:
    """A federation of a person's own examples: by their owners, else dealt out."""
    if not choices.partition:
        choices = replace(choices, partition="iid" if dataset.user is None else "natural")
    return build(name, dataset, choices, own_defaults(dataset.x.shape[1:]))


def _named(data: str) -> tuple[str, str]:
    """The name of a set, and the option behind its last colon: some names have a colon too."""
    if data in SETS:
        return data, ""
    name, _, option = data.rpartition(":")
    if name not in SETS or option not in OPTIONS:
        others = ["FILE.csv", "FILE.npz", "FOLDER/", *(f"SET:{word}" for word in OPTIONS)]
        raise unknown("data set", data, [*SETS, *others])
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
    own_words: Mapping[str, Any],
) -> Federation:
    """The federation of ``a+b``: its sets dealt one by one, then mixed, then given devices."""
    tasks = tasks_of(data)
    names = list(tasks)
    for each in tasks.values():
        # A typo is reported before any file is read.
        if not is_path(each):
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
            **(own_words if is_path(each) else {}),
        )
    mixed = mix(parts, data, outputs="shared")
    # By the numbers that clients have here: alone, each set would number its own from 0.
    devices_of = devices_of.of_clients(mixed.names)
    devices_of.check_all_there(len(mixed.clients))
    on_devices = {}
    for k, client in mixed.clients.items():
        device = devices_of.info(client.info.examples, k, seed)
        on_devices[k] = replace(client, info=replace(device, task=client.info.task))
    files = dict(devices_of.files)
    for part in parts.values():
        files.update(part.files)
    mixed = replace(mixed, clients=on_devices, trace=devices_of.trace, files=files)
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
    window: int | None = None,
    stride: int | None = None,
    channels: int | str | Sequence[str] | None = None,
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
    are dealt out (`iid` to 10 clients unless told otherwise). ``channels`` are the names of the
    channels, or their number: where the axis of that size is the last, it is brought to the front.
    With ``window`` x (n, C) is a recording of which windows are cut, ``stride`` apart. The other
    words are those of :func:`load`.
    """
    words = Words(window=window, stride=stride, channels=channels)
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
    stack = Stack(np.asarray(x), np.asarray(y), client, block, name)
    return _of_own(name, own.dataset_of_arrays(stack, words), choices)


def from_clients(
    client: Callable[..., ClientData],
    clients: int,
    *,
    classes: int,
    problem: Problem = CLASSES,
    info: Callable[..., ClientInfo] | None = None,
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
    check(info is None or callable(info), "info", info, "a function of k that gives a ClientInfo")
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
        defaults = own_defaults(shape)
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
