"""Build a federation from a dataset: partition, restrict, split, corrupt labels, standardise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, check, unknown
from ..problems import CLASSES, LABELS, Problem, Unit, numbers
from ..seeds import numpy_rng
from . import partition as partitions
from . import scenario as scenarios
from . import split as splits
from .dataset import Dataset, Ints
from .devices import Devices
from .federation import ClientData, Defaults, Examples, Federation
from .preparation import Preparation
from .scale import Constants, Scaling, constants
from .switch import switched

LEAK = "leaks: overlapping windows on both sides of a random split"


@dataclass(frozen=True)
class Choices:
    """The options of a federation, as the command line writes them; None means the set's own.

    An unknown word or an impossible value is refused on construction.
    """

    partition: str | None = None
    scenario: str | None = None
    split: str | None = None
    validation: float = splits.VALIDATION
    clients: int | None = None
    devices: Devices = Devices()
    standardise: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients is not None:
            check(self.clients > 0, "clients", self.clients, "above 0")
        if self.split is not None and self.split not in splits.KINDS:
            raise unknown("split", str(self.split), splits.KINDS)
        splits.check_validation(self.validation)
        # Parsed here only for the refusal, so that a typo is reported before any file is read.
        if self.partition:
            partitions.parse(self.partition)
        if self.scenario:
            scenarios.parse(self.scenario)


def build(name: str, dataset: Dataset, choices: Choices, defaults: Defaults) -> Federation:
    """Build every client's train, validation and test part; ``choices.partition`` must be set.

    Every step draws from a random stream of its own, derived from the seed.
    """
    kind = choices.split
    if kind is None:
        kind = "random" if dataset.block is None else "blocks"
    if kind == "blocks" and dataset.block is None:
        raise InputError(f"{name} cannot be split by blocks: {dataset.refusal}. Take split random.")
    scenario = scenarios.parse(choices.scenario or "none")
    _check_needs_classes(name, dataset, choices)
    scenarios.enough(scenario, len(dataset.labels))

    partitioned = _partitioned(name, dataset, choices, kind)
    # Classes are removed before the split, so that a client is tested on the classes it trains on.
    partitioned = _restricted(dataset, partitioned, scenario, choices.seed)
    # A client that cannot be both trained and tested is left out; it may do without validation.
    usable = []
    left_out = []
    rows_of_all = splits.split(dataset, partitioned, kind, choices.seed, choices.validation)
    for owned, rows in zip(partitioned, rows_of_all, strict=True):
        if len(rows.train) and len(rows.test):
            usable.append(rows)
        else:
            left_out.append(_name(dataset, choices, owned))
    if not usable:
        raise InputError(
            f"no client of {name} has enough examples to hold some out; {_enough(dataset, kind)}"
        )

    # The clients left are numbered anew from 0; scenarios and profiles go by the new numbers.
    names = {k: _name(dataset, choices, rows.train) for k, rows in enumerate(usable)}
    choices = replace(choices, devices=choices.devices.of_clients(_told(names)))
    choices.devices.check_all_there(len(usable))
    affected = scenarios.affected(scenario, len(usable), choices.seed)
    clients = {}
    for k, rows in enumerate(usable):
        own_scenario = scenario if k in affected else None
        clients[k] = _client(dataset, rows, choices, k, own_scenario)

    notes = list(dataset.notes)
    if kind == "random" and dataset.block is not None:
        notes.append(LEAK)
    notes.extend(scenarios.notes(scenario))
    if left_out:
        named = [name for name in left_out if name]
        who = f": {', '.join(named)}" if named else ""
        notes.append(f"{len(left_out)} clients with too little data left out{who}")
    one_class = _one_class(dataset, names, usable)
    if one_class:
        notes.append(one_class)
    unvalidated = sum(len(rows.validation) == 0 for rows in usable)
    if choices.validation > 0 and unvalidated:
        notes.append(f"{unvalidated} of {len(usable)} clients have no validation examples")
    federation = Federation(
        name,
        clients,
        classes=len(dataset.labels),
        labels=dataset.labels,
        shape=dataset.x.shape[1:],
        defaults=replace(defaults, cohort=min(defaults.cohort, len(usable))),
        notes=tuple(notes),
        partition=choices.partition or "natural",
        scenario=choices.scenario or "none",
        split=kind,
        validation=choices.validation,
        trace=choices.devices.trace,
        files=choices.devices.files,
        problem=_problem(dataset, usable, choices.standardise),
        preparation=_common_preparation(dataset, choices),
        names=_told(names),
    )
    if scenario.kind == "switch":
        return switched(federation, scenario, federation.scenario, choices.seed)
    return federation


def _enough(dataset: Dataset, kind: str) -> str:
    """What a client needs to be split, as the end of a sentence."""
    if kind == "blocks" and dataset.window is not None:
        # Two pieces, of which one is held out: five windows' length where they overlap much, two
        # where they do not (data.windows.least_in_piece).
        return (
            "of some label every client needs two recordings, or one five windows long: take a "
            "shorter window, or a stride as long as the window."
        )
    return "every client needs two or more."


def _one_class(dataset: Dataset, names: Mapping[int, str], rows: Sequence[splits.Rows]) -> str:
    """A note on clients with one class only, which any model that names it serves; or nothing."""
    if dataset.kind != "classes":
        return ""
    found = []
    for k, each in enumerate(rows):
        present = np.unique(dataset.y[np.concatenate([each.train, each.test])])
        if names.get(k) and len(present) == 1:
            found.append(f"{names[k]} ({dataset.labels[int(present[0])]})")
    if not found:
        return ""
    shown = ", ".join(found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{len(found)} of {len(rows)} clients have one class only: {shown}{more}"


def _check_needs_classes(name: str, dataset: Dataset, choices: Choices) -> None:
    """Refuse what goes by classes where the targets are none."""
    if dataset.kind == "classes":
        return
    partition = partitions.parse(choices.partition or "natural")
    if partition.kind not in ("natural", "iid"):
        raise InputError(
            f"partition {choices.partition} deals by class, and the targets of {name} are "
            f"{dataset.kind}; take natural or iid."
        )
    if scenarios.parse(choices.scenario or "none").kind not in ("none", "switch"):
        raise InputError(
            f"scenario {choices.scenario} changes classes, and the targets of {name} are "
            f"{dataset.kind}; take none, or switch:ROUND:PAIRS."
        )


def _problem(dataset: Dataset, rows: Sequence[splits.Rows], standardise: bool) -> Problem:
    """What the targets are; numbers are learnt in units of their spread."""
    if dataset.kind == "classes":
        return CLASSES
    if dataset.kind == "labels":
        return LABELS
    assert dataset.targets is not None
    columns = dataset.targets.shape[1]
    as_they_are = Unit((0.0,) * columns, (1.0,) * columns)
    if dataset.ahead:
        # Samples that follow the input are scaled as it is, client by client: of one who forecasts
        # the mean of each channel, the root of the mean square is near 1.
        return numbers(as_they_are, "rmse")
    if not standardise:
        return numbers(as_they_are)
    # Of the training rows of all clients: a common unit, so that one model serves all. It takes
    # two sums of each client to find it.
    train = dataset.targets[np.concatenate([each.train for each in rows])].astype(np.float64)
    mean = train.mean(axis=0)
    deviation = train.std(axis=0)
    # Of a constant the deviation may be a rounding error. Small numbers are no constants.
    varies = deviation > 1e-12 * np.abs(mean)
    scale = np.where(varies, deviation, 1.0)
    return numbers(Unit(tuple(mean.tolist()), tuple(scale.tolist())))


def _partitioned(name: str, dataset: Dataset, choices: Choices, kind: str) -> list[Ints]:
    """The rows of every client, before any are discarded or held out."""
    partition = partitions.parse(choices.partition or "natural")
    if partition.kind == "natural":
        return _by_user(name, dataset, choices)

    clients = choices.clients
    if clients is None:
        clients = 10 if dataset.user is None else int(dataset.user.max()) + 1
    examples = len(dataset.y)
    # Two examples are the least a client can be split into: one to train on, one to test on.
    most = examples // 2
    allowed = f"at most {most}, half of the {examples} examples of {name}"
    check(clients <= most, "clients", clients, allowed)

    rng = numpy_rng(choices.seed, "partition")
    if kind == "random" or dataset.block is None:
        size = np.ones_like(dataset.y)
        return partitions.deal(partition, dataset.y, size, clients, rng)
    # A blocks split holds out whole blocks, so a block must belong to one client entirely: blocks
    # are dealt as units, each with its size and its most frequent label.
    size = np.bincount(dataset.block)
    label = splits.majority(dataset.block, dataset.y, len(size))
    dealt = partitions.deal(partition, label, size, clients, rng)
    return [np.flatnonzero(np.isin(dataset.block, blocks)) for blocks in dealt]


def _by_user(name: str, dataset: Dataset, choices: Choices) -> list[Ints]:
    """The rows of each user; with fewer clients than users, of users drawn from the seed."""
    if dataset.user is None:
        raise InputError(
            f"{name} has no natural users; "
            f"take partition iid, dirichlet:ALPHA, classes:K or shards."
        )
    users = np.unique(dataset.user)
    clients = len(users) if choices.clients is None else choices.clients
    allowed = (
        f"at most {len(users)}, the users of {name}; to deal their examples to more, say partition "
        "iid or dirichlet:ALPHA"
    )
    check(clients <= len(users), "clients", clients, allowed)
    chosen = numpy_rng(choices.seed, "users").permutation(users)[:clients]
    # Clients are in the order of the users' numbers, whatever order they were drawn in.
    return [np.flatnonzero(dataset.user == user) for user in np.sort(chosen)]


def _restricted(
    dataset: Dataset, partitioned: Sequence[Ints], scenario: scenarios.Scenario, seed: int
) -> list[Ints]:
    """The rows each client keeps under ``restricted:K``; all of them under any other scenario."""
    restricted = []
    for k, rows in enumerate(partitioned):
        rng = numpy_rng(seed, "restricted", k)
        restricted.append(rows[scenarios.kept(scenario, dataset.y[rows], rng)])
    return restricted


def _client(
    dataset: Dataset,
    rows: splits.Rows,
    choices: Choices,
    k: int,
    scenario: scenarios.Scenario | None,
) -> ClientData:
    """The tensors of client ``k``; ``scenario`` is None where its labels stay true."""
    # All three parts are scaled by the training rows alone: nothing of the test part leaks.
    found = constants(dataset, rows.train, choices.standardise)
    scale = found.scaling(dataset.x.ndim)
    rows_of = {"train": rows.train, "validation": rows.validation, "test": rows.test}
    parts = {}
    for part, part_rows in rows_of.items():
        y = dataset.y[part_rows]
        if scenario is not None and (part != "test" or scenario.test):
            # One stream per part: sparing the test part does not change the training labels drawn.
            rng = numpy_rng(choices.seed, "labels", k, part)
            y = scenarios.corrupted(scenario, y, len(dataset.labels), rng)
        targets = _targets(dataset, part_rows, y, scale)
        parts[part] = Examples(scale(dataset.x[part_rows]), targets)
    info = choices.devices.info(len(rows.train), k, choices.seed)
    kind = _kind(dataset, rows)
    # Constants of the whole set are said once, in the federation.
    own = None if dataset.pixels is not None else _preparation(dataset, found)
    return ClientData(
        parts["train"], parts["validation"], parts["test"], info, kind=kind, preparation=own
    )


def _common_preparation(dataset: Dataset, choices: Choices) -> Preparation:
    """What all clients have in common: names, and the constants of images."""
    found = None
    if dataset.pixels is not None:
        nobody = np.zeros(0, dtype=np.int64)
        found = constants(dataset, nobody, choices.standardise)
    return _preparation(dataset, found)


def _preparation(dataset: Dataset, found: Constants | None) -> Preparation:
    mean = None
    std = None
    if found is not None and not found.change_nothing:
        mean = tuple(found.mean.tolist())
        std = tuple(found.deviation.tolist())
    return Preparation(
        mean,
        std,
        labels=dataset.labels,
        window=dataset.window,
        channels=dataset.channels or None,
        shape=dataset.x.shape[1:],
        ahead=dataset.ahead or None,
    )


def _told(names: dict[int, str]) -> dict[int, str]:
    """The names, if all clients have one and these say more than their numbers do."""
    are_numbers = all(name == str(k) for k, name in names.items())
    return {} if are_numbers or not all(names.values()) else names


def _name(dataset: Dataset, choices: Choices, rows: Ints) -> str:
    """What the client with these rows is called; dealt out artificially, it is nobody."""
    is_natural = partitions.parse(choices.partition or "natural").kind == "natural"
    if not dataset.names or dataset.user is None or not is_natural or not len(rows):
        return ""
    return dataset.names[int(dataset.user[rows[0]])]


def _kind(dataset: Dataset, rows: splits.Rows) -> str:
    """The kind of user that a client is; empty where none is known, or its rows are of several."""
    if dataset.kinds is None:
        return ""
    found = np.unique(dataset.kinds[np.concatenate([rows.train, rows.test])])
    return str(found[0]) if len(found) == 1 else ""


def _targets(dataset: Dataset, rows: Ints, y: Ints, scale: Scaling) -> Tensor:
    """The classes ``y``, or what there is in their place."""
    if dataset.targets is None:
        return torch.from_numpy(y)
    if dataset.ahead:
        samples = dataset.targets[rows].reshape(len(rows), -1, dataset.ahead)
        return scale(samples).flatten(1)
    return torch.from_numpy(dataset.targets[rows].astype(np.float32))
