"""Make a federation: of a named data set, of files, or of your own arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..options.groups import VALIDATION
from .arrays import ArrayData, OwnDataOptions, choose_defaults, make_dataset
from .build import Choices, build
from .dataset import Dataset
from .devices import Devices, read_devices
from .federation import Federation
from .mix import divide_clients, mix_by_name, names_several, split_names, split_option
from .named_set import is_path, read_dataset
from .scenario import parse as parse_scenario
from .sets import OPTIONS, SETS, unknown_set


def names() -> list[str]:
    """Return the names of the data sets."""
    return list(SETS)


def describe(name: str) -> str:
    """Return one line on a data set.

    Raises:
        InputError: There is no such data set.
    """
    if name not in SETS:
        raise unknown_set(name)
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
    rate: float | None = None,
    fill: str | None = None,
    partition: str | None = None,
    scenario: str | None = None,
    split: str | None = None,
    validation: float = VALIDATION,
    train_examples: int | None = None,
    clients: int | None = None,
    profile: str | None = None,
    trace: str | None = None,
    standardise: bool = True,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Federation:
    """Load the federation of a named data set, or of your own data.

    With a ``+`` between several names, the data sets become one federation, in which every client
    has the task of its set (:func:`fedgrove.data.mix`, with shared outputs). The clients are
    divided among the sets as equally as possible. ``partition``, ``scenario`` and ``split`` apply
    within each set; they may be one for all sets or one for each. The clients of a set are those
    that it has alone, with the same number of clients and seed.

    Args:
        data: The name of a data set (:func:`fedgrove.data.names`); ``cifar10:grey`` is a set
            without its colours, ``digits:turned`` a set with its images turned. Or your own data: a
            file (CSV, parquet, npz), a folder with a file or a folder for each client, a DataFrame,
            arrays (x, y) or (x, y, client), a torch or Hugging Face Dataset, a partitioner of
            flwr-datasets, or a dictionary of these by client. An npz file has arrays x, y, client
            (and block).
        label: Column to predict. For your own data only, as are the next seven.
        client: Column with the client of each row.
        window: Cut recordings into windows of this number of rows.
        stride: Rows from one window to the next; by default half a window.
        channels: Columns that are inputs; by default all others.
        time: Column to sort recordings by; with its unit, as in "t:ms", if it is not in seconds.
        rate: Resample all recordings to this number of rows per second.
        fill: What empty cells of inputs become: "mean" (of the column in the recording), "zero" or
            "previous"; with "drop", rows with empty cells are left out.
        partition: How examples are assigned to clients; by default as the set defines it.
        scenario: What is changed at some clients, such as noisy labels.
        split: How the test part is held out: "random", "blocks" or "official".
        validation: The share held out for validation, of the examples outside the test part; 0 for
            none.
        train_examples: The maximum number of training examples of a client, drawn from the seed so
            that classes keep their shares; by default all that are not held out.
        clients: The number of clients.
        profile: The name of a device profile, or a file of devices (:mod:`fedgrove.data.devices`).
        trace: A file of bandwidths over time.
        standardise: Whether inputs and numbers to predict are standardised.
        seed: The seed of all draws.
        data_dir: The folder with the files of the data set; by default ``FEDGROVE_DATA``.

    Returns:
        The federation.

    Raises:
        InputError: An argument is wrong, or the data cannot be used; the error lists everything
            that was found.
        MissingError: The files of the data set were not found.

    >>> federation = load("digits", clients=5)
    >>> len(federation.clients), federation.shape, federation.classes
    (5, (1, 8, 8), 10)
    >>> both = load("motion+motion-forecast", clients=5)
    >>> [client.info.task for client in both.clients.values()]
    ['motion', 'motion', 'motion', 'motion-forecast', 'motion-forecast']
    """
    options = OwnDataOptions(label, client, window, stride, channels, time, rate, fill)
    devices = read_devices(profile, trace)
    if isinstance(data, str) and names_several(data):
        return _load_several(
            data,
            options,
            devices,
            partition=partition,
            scenario=scenario,
            split=split,
            clients=clients,
            seed=seed,
            validation=validation,
            train_examples=train_examples,
            standardise=standardise,
            data_dir=data_dir,
        )
    choices = Choices(
        partition, scenario, split, validation, clients, devices, standardise, seed, train_examples
    )
    if not isinstance(data, str) or (data not in SETS and is_path(data)):
        # Imported here because pandas takes half a second, and named sets do not need it.
        from .readers import read_own_data

        own = read_own_data(data, options)
        federation = _build_own(own.name, own.dataset, choices)
        return replace(federation, files={**federation.files, **own.files})
    return _load_named(data, choices, options, data_dir)


def _load_named(
    data: str, choices: Choices, options: OwnDataOptions, data_dir: str | Path | None
) -> Federation:
    # First whether there is such a set: it may be the name of a folder with a typo.
    name, option = _split_option_name(data)
    given = options.list_given()
    if given:
        raise InputError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} given, and {data} is a data "
            "set that defines its columns and windows; leave it out, or give your own data "
            "(a file, a folder/)."
        )
    named_set = SETS[name]
    # A generated set makes the number of users that is wanted. With an artificial partition, the
    # number of clients does not depend on the users, and the set has its usual number.
    is_natural = (choices.partition or named_set.partition) == "natural"
    users = choices.clients if is_natural else None
    choices = replace(
        choices,
        partition=choices.partition or named_set.partition,
        clients=choices.clients or named_set.clients,
    )
    if named_set.federation is not None:
        if option:
            raise InputError(f"{name} has no option {option}; use {name}.")
        return named_set.federation(choices, named_set.defaults)
    dataset = read_dataset(name, named_set, users, data_dir)
    if option:
        dataset = OPTIONS[option](data, dataset)
    return build(data, dataset, choices, named_set.defaults)


def _split_option_name(data: str) -> tuple[str, str]:
    """Return the name of a set and the option after its last colon; some names have a colon too."""
    if data in SETS:
        return data, ""
    name, _, option = data.rpartition(":")
    if name not in SETS or option not in OPTIONS:
        others = ["FILE.csv", "FILE.npz", "FOLDER/", *(f"SET:{option}" for option in OPTIONS)]
        raise unknown_set(data, others)
    return name, option


def _build_own(name: str, dataset: Dataset, choices: Choices) -> Federation:
    """Build a federation of a user's own examples: by their clients if they have any, else iid."""
    is_divided_at_random = not choices.partition and dataset.user is None
    if not choices.partition:
        choices = replace(choices, partition="iid" if dataset.user is None else "natural")
    federation = build(name, dataset, choices, choose_defaults(dataset.x.shape[1:]))
    if not is_divided_at_random:
        return federation
    note = (
        f"the data name no clients: their rows are divided among {len(federation.clients)} clients "
        "at random (partition iid)"
    )
    return replace(federation, notes=(*federation.notes, note))


def _load_several(
    data: str,
    options: OwnDataOptions,
    devices: Devices,
    *,
    partition: str | None,
    scenario: str | None,
    split: str | None,
    clients: int | None,
    seed: int,
    **common: Any,
) -> Federation:
    """Load the data sets of ``a+b`` one by one, then mix them and give them devices."""
    tasks = split_names(data)
    for each in tasks.values():
        # A typo is reported before any file is read.
        if not is_path(each):
            _split_option_name(each)
    switch = None
    if scenario is not None and scenario.startswith("switch"):
        # Clients switch between the sets, once these are one federation.
        parse_scenario(scenario)
        switch = scenario
        scenario = None
    names = list(tasks)
    partitions = split_option("partition", partition, names)
    scenarios = split_option("scenario", scenario, names)
    splits = split_option("split", split, names)
    counts = divide_clients(clients, names)
    federations = {}
    for position, (name, each) in enumerate(tasks.items()):
        own_options = vars(options) if is_path(each) else {}
        federations[name] = load(
            each,
            partition=partitions[position],
            scenario=scenarios[position],
            split=splits[position],
            clients=counts[position],
            seed=seed,
            **own_options,
            **common,
        )
    return mix_by_name(data, federations, devices, switch, seed)


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
    train_examples: int | None = None,
    clients: int | None = None,
    profile: str | None = None,
    trace: str | None = None,
    standardise: bool = True,
    seed: int = 0,
) -> Federation:
    """Make the federation of your own arrays.

    Args:
        x: Inputs (n, F), (n, C, L) or (n, C, H, W); with ``window``, a recording (n, C).
        y: Targets. Whole numbers or texts (n,) are classes, floats (n,) or (n, L) numbers, and 0
            and 1 (n, L) several labels.
        client: The client of each row (n,). Without it the rows are assigned to clients by
            ``partition`` (by default `iid` to 10 clients).
        name: The name of the federation.
        block: What belongs together in time (n,): whole blocks are held out, and neighbouring rows
            of a block count as overlapping.
        window: Cut windows of this number of rows.
        stride: Rows from one window to the next; by default half a window.
        channels: The names of the channels, or their number. If the last axis has that size, it
            becomes the first.
        partition: See :func:`load`, as for all other arguments.

    Returns:
        The federation.

    Raises:
        InputError: The arrays cannot be used.
    """
    options = OwnDataOptions(window=window, stride=stride, channels=channels)
    devices = read_devices(profile, trace)
    choices = Choices(
        partition, scenario, split, validation, clients, devices, standardise, seed, train_examples
    )
    arrays = ArrayData(np.asarray(x), np.asarray(y), client, block, name)
    return _build_own(name, make_dataset(arrays, options), choices)
