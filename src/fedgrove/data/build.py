"""Build a federation from a data set: partition, restrict, split, corrupt labels, standardise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, check, list_some, unknown
from ..options.groups import VALIDATION
from ..problems import CLASSES, LABELS, Problem, Unit, numbers
from ..seeds import numpy_rng
from . import partition as partitions
from . import scenario as scenarios
from . import split as splits
from .dataset import Dataset, Ints
from .devices import Devices
from .federation import ClientData, Defaults, Examples, Federation, SharedExamples
from .preparation import Preparation, fit_preparation

LEAK = "leaks: overlapping windows on both sides of a random split"
OFFICIAL = (
    "split official: a client is scored on all official test examples of the classes it has, so "
    "clients share test examples"
)


@dataclass(frozen=True)
class Choices:
    """The options of a federation, as the command line writes them; None is the set's default.

    Raises:
        InputError: A name is unknown or a value is not possible.
    """

    partition: str | None = None
    scenario: str | None = None
    split: str | None = None
    validation: float = VALIDATION
    clients: int | None = None
    devices: Devices = Devices()
    standardise: bool = True
    seed: int = 0
    train_examples: int | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            check(self.clients > 0, "clients", self.clients, "above 0")
        if self.train_examples is not None:
            check(self.train_examples > 0, "train_examples", self.train_examples, "above 0")
        if self.split is not None and self.split not in splits.SPLITS:
            raise unknown("split", str(self.split), splits.SPLITS)
        splits.check_validation(self.validation)
        # Parsed here so that a typo is reported before any file is read.
        partitions.parse(self.partition or "natural")
        scenarios.parse(self.scenario or "none")

    @property
    def parsed_partition(self) -> partitions.Partition:
        """How the examples of a data set are assigned to clients; natural by default."""
        return partitions.parse(self.partition or "natural")

    @property
    def parsed_scenario(self) -> scenarios.Scenario:
        """What a scenario changes in the data of some clients."""
        return scenarios.parse(self.scenario or "none")


def build(name: str, dataset: Dataset, choices: Choices, defaults: Defaults) -> Federation:
    """Build a federation: every client's train, validation and test data.

    Every step draws from its own random stream, derived from the seed.

    Args:
        name: The name of the federation.
        dataset: All examples.
        choices: The options; ``choices.partition`` must be set.
        defaults: How the data are trained unless options override it.

    Raises:
        InputError: The options do not fit the data set.
    """
    kind = choices.split or ("random" if dataset.block is None else "blocks")
    if kind == "blocks" and dataset.block is None:
        raise InputError(f"{name} cannot be split by blocks: {dataset.refusal}. Use split random.")
    if kind == "official" and dataset.is_test is None:
        raise InputError(
            f"split is official, and {name} has no official test part, or its files do not tell it "
            "apart; use split random, or blocks if the data have blocks."
        )
    scenario = choices.parsed_scenario
    if dataset.kind != "classes":
        _check_needs_no_classes(name, dataset, choices)
    scenarios.check_class_count(scenario, len(dataset.labels))

    owned = _assign_rows(name, dataset, choices, kind)
    # Classes are removed before the split, so that a client is tested on the classes it trains on.
    for k, rows in enumerate(owned):
        rng = numpy_rng(choices.seed, "restricted", k)
        owned[k] = rows[scenarios.select_classes(scenario, dataset.y[rows], rng)]
    # A client that cannot be both trained and tested is left out; it may do without validation.
    parts: list[splits.SplitRows] = []
    names = []
    left_out: list[str] = []
    all_parts = splits.split(dataset, owned, kind, choices.seed, choices.validation)
    for rows, part in zip(owned, all_parts, strict=True):
        client_name = _find_name(dataset, choices, rows)
        if choices.train_examples is not None:
            # A stream of its own: the test part does not depend on it.
            rng = numpy_rng(choices.seed, "train examples", len(parts) + len(left_out))
            part = splits.limit_train(dataset.y, part, choices.train_examples, rng)
        if len(part.train) and len(part.test):
            parts.append(part)
            names.append(client_name)
        else:
            left_out.append(client_name)
    if not parts:
        raise InputError(
            f"no client of {name} has enough examples for a test part; "
            f"{_describe_need(dataset, kind)}"
        )

    # The remaining clients are numbered from 0; scenarios and profiles use the new numbers.
    client_names = _drop_plain_numbers(names)
    devices = choices.devices.number_clients(client_names)
    devices.check_clients(len(parts))
    choices = replace(choices, devices=devices)
    affected = scenarios.draw_affected_clients(scenario, len(parts), choices.seed)
    clients = {}
    official = _prepare_official_test(dataset, kind, choices)
    for k, part in enumerate(parts):
        clients[k] = _build_client(dataset, part, choices, k, k in affected, official)

    notes = list(dataset.notes)
    if kind == "random" and dataset.block is not None:
        notes.append(LEAK)
    if kind == "official":
        notes.append(OFFICIAL)
    notes.extend(scenarios.list_caveats(scenario))
    notes.extend(_note_left_out(left_out))
    notes.extend(_note_single_class(dataset, names, parts))
    unvalidated = sum(len(part.validation) == 0 for part in parts)
    if choices.validation > 0 and unvalidated:
        notes.append(f"{unvalidated} of {len(parts)} clients have no validation examples")
    federation = Federation(
        name,
        clients,
        classes=len(dataset.labels),
        labels=dataset.labels,
        shape=dataset.x.shape[1:],
        defaults=replace(defaults, cohort=min(defaults.cohort, len(parts))),
        notes=tuple(notes),
        partition=choices.partition or "natural",
        scenario=choices.scenario or "none",
        split=kind,
        validation=choices.validation,
        train_examples=choices.train_examples,
        trace=devices.numbered_trace,
        files=devices.files,
        problem=_find_problem(dataset, parts, choices.standardise),
        preparation=fit_preparation(dataset, None, choices.standardise),
        names=client_names,
    )
    if scenario.kind == "switch":
        return scenarios.apply_switch(federation, scenario, federation.scenario, choices.seed)
    return federation


def _check_needs_no_classes(name: str, dataset: Dataset, choices: Choices) -> None:
    """Refuse options that need classes if the targets are something else."""
    if choices.parsed_partition.kind not in ("natural", "iid"):
        raise InputError(
            f"partition {choices.partition} needs classes, and the targets of {name} are "
            f"{dataset.kind}; use natural or iid."
        )
    if choices.parsed_scenario.kind not in ("none", "switch"):
        raise InputError(
            f"scenario {choices.scenario} changes classes, and the targets of {name} are "
            f"{dataset.kind}; use none, or switch:ROUND:PAIRS."
        )


def _describe_need(dataset: Dataset, kind: str) -> str:
    """Return what a client needs to be split, as the end of a sentence."""
    if kind == "blocks" and dataset.window is not None:
        # Two pieces, of which one is held out: five windows' length if they overlap much, two if
        # they do not (dataset.min_windows_in_piece).
        return (
            "for some label every client needs two recordings, or one that is five windows long: "
            "use a shorter window, or a stride as long as the window."
        )
    return "every client needs two or more."


# ---- which rows a client has ---------------------------------------------------------------------


def _assign_rows(name: str, dataset: Dataset, choices: Choices, kind: str) -> list[Ints]:
    """Return the rows of every client, before any are discarded or held out."""
    partition = choices.parsed_partition
    if partition.kind == "natural":
        return _assign_by_user(name, dataset, choices, kind)

    clients = choices.clients
    if clients is None:
        clients = 10 if dataset.user is None else int(dataset.user.max()) + 1
    available = _list_own_rows(dataset, kind)
    examples = len(available)
    # A client needs two examples at least: one to train on, one to test on.
    most = examples // 2
    allowed = f"at most {most}, half of the {examples} examples of {name}"
    check(clients <= most, "clients", clients, allowed)

    rng = numpy_rng(choices.seed, "partition")
    if kind != "blocks" or dataset.block is None:
        y = dataset.y[available]
        assigned = partitions.assign_units(partition, y, np.ones_like(y), clients, rng)
        return [available[rows] for rows in assigned]
    # A blocks split holds out whole blocks, so a block must belong to one client entirely: blocks
    # are assigned as units, each with its size and its most frequent label.
    size = np.bincount(dataset.block)
    label = splits.majority_label(dataset.block, dataset.y, len(size))
    assigned = partitions.assign_units(partition, label, size, clients, rng)
    return [np.flatnonzero(np.isin(dataset.block, blocks)) for blocks in assigned]


def _list_own_rows(dataset: Dataset, kind: str) -> Ints:
    """Return the rows that are divided among clients: all, or those outside the official test."""
    if kind == "official":
        assert dataset.is_test is not None
        return np.flatnonzero(~dataset.is_test)
    return np.arange(len(dataset.y))


def _assign_by_user(name: str, dataset: Dataset, choices: Choices, kind: str) -> list[Ints]:
    """Return the rows of each user; with fewer clients than users, of users that are drawn."""
    if dataset.user is None:
        raise InputError(
            f"{name} has no natural users; use partition iid, dirichlet:ALPHA, classes:K or shards."
        )
    own = _list_own_rows(dataset, kind)
    users = np.unique(dataset.user[own])
    clients = choices.clients or len(users)
    allowed = (
        f"at most {len(users)}, the users of {name}; to divide their examples among more clients, "
        "use partition iid or dirichlet:ALPHA"
    )
    check(clients <= len(users), "clients", clients, allowed)
    drawn = numpy_rng(choices.seed, "users").permutation(users)[:clients]
    # Clients are in the order of the users' numbers, whatever order they were drawn in.
    return [own[dataset.user[own] == user] for user in np.sort(drawn)]


# ---- one client ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfficialTest:
    """The inputs of an official test part, prepared once for all clients."""

    x: Tensor
    rows: Ints
    """Their rows in the data set, in order."""
    known: dict[bytes, Examples] = field(default_factory=dict)
    """Those of earlier clients, by rows and targets: clients with the same classes share them."""

    def select(self, rows: Ints, y: Tensor) -> Examples:
        """Return the examples in some rows of the data set."""
        key = rows.tobytes() + y.numpy().tobytes()
        if key not in self.known:
            places = torch.from_numpy(np.searchsorted(self.rows, rows))
            self.known[key] = SharedExamples(self.x, places, y)
        return self.known[key]


def _prepare_official_test(dataset: Dataset, kind: str, choices: Choices) -> _OfficialTest | None:
    """Return the official test part; None if clients prepare their inputs each by itself."""
    if kind != "official" or dataset.pixels is None:
        return None
    assert dataset.is_test is not None
    rows = np.flatnonzero(dataset.is_test)
    preparation = fit_preparation(dataset, None, choices.standardise)
    x = np.ascontiguousarray(dataset.x[rows], dtype=np.float32)
    return _OfficialTest(torch.from_numpy(preparation.scale(x)), rows)


def _build_client(
    dataset: Dataset,
    part: splits.SplitRows,
    choices: Choices,
    k: int,
    is_affected: bool,
    official: _OfficialTest | None,
) -> ClientData:
    """Build the tensors of client ``k``; a scenario corrupts its labels if it is affected."""
    # All three parts are scaled by the training rows alone: nothing of the test part leaks.
    preparation = fit_preparation(dataset, part.train, choices.standardise)
    scenario = choices.parsed_scenario
    examples: dict[str, Examples] = {}
    for name in ("train", "validation", "test"):
        rows = getattr(part, name)
        y = dataset.y[rows]
        if is_affected and (name != "test" or scenario.test):
            # One stream per part: sparing the test part does not change the training labels drawn.
            rng = numpy_rng(choices.seed, "labels", k, name)
            y = scenarios.corrupt_labels(scenario, y, len(dataset.labels), rng)
        if name == "test" and official is not None:
            targets = _take_targets(dataset, rows, y, preparation)
            examples[name] = official.select(rows, targets)
            continue
        # Indexing makes a copy, which is scaled in place.
        x = np.ascontiguousarray(dataset.x[rows], dtype=np.float32)
        inputs = torch.from_numpy(preparation.scale(x))
        examples[name] = Examples(inputs, _take_targets(dataset, rows, y, preparation))
    return ClientData(
        examples["train"],
        examples["validation"],
        examples["test"],
        info=choices.devices.info(len(part.train), k, choices.seed),
        kind=_find_kind(dataset, part),
        # Constants of the whole set are stored once, in the federation.
        preparation=None if dataset.pixels is not None else preparation,
    )


def _take_targets(dataset: Dataset, rows: Ints, y: Ints, preparation: Preparation) -> Tensor:
    """Return the classes ``y``, or the targets that the set has instead."""
    if dataset.targets is None:
        return torch.from_numpy(y)
    targets = dataset.targets[rows].astype(np.float32)
    if dataset.ahead:
        # Channels on the second axis: samples that follow the input are scaled as it is.
        # Not -1, which numpy cannot work out where a part has no rows.
        samples = targets.reshape(len(rows), targets.shape[1] // dataset.ahead, dataset.ahead)
        return torch.from_numpy(preparation.scale(samples)).flatten(1)
    return torch.from_numpy(targets)


def _find_kind(dataset: Dataset, part: splits.SplitRows) -> str:
    """Return the kind of user of a client; empty if it is unknown, or its rows are of several."""
    if dataset.kinds is None:
        return ""
    found = np.unique(dataset.kinds[np.concatenate([part.train, part.test])])
    return str(found[0]) if len(found) == 1 else ""


def _find_name(dataset: Dataset, choices: Choices, rows: Ints) -> str:
    """Return the name of the client with these rows; empty if it is not a natural user."""
    is_natural = choices.parsed_partition.kind == "natural"
    if not dataset.names or dataset.user is None or not is_natural or not len(rows):
        return ""
    return dataset.names[int(dataset.user[rows[0]])]


def _drop_plain_numbers(names: Sequence[str]) -> dict[int, str]:
    """Return the names, if all clients have one and these are not just their numbers."""
    are_numbers = all(name == str(k) for k, name in enumerate(names))
    if are_numbers or not all(names):
        return {}
    return dict(enumerate(names))


# ---- all clients ---------------------------------------------------------------------------------


def _find_problem(
    dataset: Dataset, parts: Sequence[splits.SplitRows], standardise: bool
) -> Problem:
    """Return what the targets are; numbers are scaled by their mean and deviation."""
    if dataset.kind == "classes":
        return CLASSES
    if dataset.kind == "labels":
        return LABELS
    assert dataset.targets is not None
    columns = dataset.targets.shape[1]
    unscaled = Unit((0.0,) * columns, (1.0,) * columns)
    if dataset.ahead:
        # Samples that follow the input are scaled as it is, client by client: if a client forecasts
        # the mean of each channel, its root mean square error is near 1.
        return numbers(unscaled, "rmse")
    if not standardise:
        return numbers(unscaled)
    # Over the training rows of all clients: a common unit, so that one model serves all. To find
    # it, each client has to report two sums.
    train = dataset.targets[np.concatenate([part.train for part in parts])].astype(np.float64)
    mean = train.mean(axis=0)
    deviation = train.std(axis=0)
    # The deviation of a constant may be a rounding error. Small numbers are not constant.
    varies = deviation > 1e-12 * np.abs(mean)
    scale = np.where(varies, deviation, 1.0)
    return numbers(Unit(tuple(mean.tolist()), tuple(scale.tolist())))


def _note_left_out(left_out: Sequence[str]) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(filter(None, left_out))
    listed = f": {names}" if names else ""
    noun = "client" if len(left_out) == 1 else "clients"
    return [f"{len(left_out)} {noun} with too little data left out{listed}"]


def _note_single_class(
    dataset: Dataset, names: Sequence[str], parts: Sequence[splits.SplitRows]
) -> list[str]:
    """Note the named clients with a single class, for which any model that predicts it is right."""
    if dataset.kind != "classes":
        return []
    found = []
    for name, part in zip(names, parts, strict=True):
        present = np.unique(dataset.y[np.concatenate([part.train, part.test])])
        if name and len(present) == 1:
            found.append(f"{name} ({dataset.labels[int(present[0])]})")
    if not found:
        return []
    return [f"{len(found)} of {len(parts)} clients have one class only: {list_some(found)}"]
