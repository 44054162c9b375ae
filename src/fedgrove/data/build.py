"""A dataset and a few choices become a federation: deal, restrict, split, corrupt, standardise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..errors import InputError, check, unknown
from ..seeds import numpy_rng
from . import partition as partitions
from . import profile as profiles
from . import scenario as scenarios
from . import split as splits
from .dataset import Dataset, Ints
from .federation import ClientData, Defaults, Examples, Federation
from .scale import scaling

LEAK = "leaks: overlapping windows on both sides of a random split"


@dataclass(frozen=True)
class Choices:
    """What was asked for, as the command line writes it; None is the set's own. A wrong word is refused here."""

    partition: str | None = None
    scenario: str | None = None
    split: str | None = None
    clients: int | None = None
    profile: str | None = None
    standardise: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.clients is None or self.clients > 0, "clients", self.clients, "above 0")
        if self.split not in (None, *splits.KINDS):
            raise unknown("split", str(self.split), splits.KINDS)
        if self.profile not in (None, *profiles.NAMES):
            raise unknown("profile", str(self.profile), profiles.NAMES)
        partitions.parse(self.partition or "iid")
        scenarios.parse(self.scenario or "none")


def build(name: str, dataset: Dataset, choices: Choices, defaults: Defaults) -> Federation:
    """Make every client's parts, each from its own stream of the seed; ``choices.partition`` must be set."""
    kind = choices.split or ("random" if dataset.block is None else "blocks")
    if kind == "blocks" and dataset.block is None:
        raise InputError(f"{name} cannot be split by blocks: {dataset.refusal}. Take split random.")
    scenario = scenarios.parse(choices.scenario or "none")
    scenarios.enough(scenario, len(dataset.labels))
    owned = _restricted(dataset, _owned(name, dataset, choices, kind), scenario, choices.seed)
    rows = [
        r for r in splits.split(dataset, owned, kind, choices.seed) if len(r.train) and len(r.test)
    ]
    if not rows:
        raise InputError(
            f"no client of {name} has enough examples to hold some out; every client needs two or more."
        )
    marked = scenarios.affected(scenario, len(rows), choices.seed)
    held = {
        k: _client(dataset, r, choices, k, scenario if k in marked else None)
        for k, r in enumerate(rows)
    }
    notes = (
        *dataset.notes,
        *((LEAK,) if kind == "random" and dataset.block is not None else ()),
        *scenarios.notes(scenario),
        *(
            (f"{len(owned) - len(rows)} clients with too little data left out",)
            if len(rows) < len(owned)
            else ()
        ),
    )
    defaults = replace(defaults, cohort=min(defaults.cohort, len(rows)))
    dealt = {
        "partition": choices.partition or "natural",
        "scenario": choices.scenario or "none",
        "split": kind,
    }
    return Federation(
        name,
        held,
        len(dataset.labels),
        dataset.labels,
        dataset.x.shape[1:],
        defaults,
        notes,
        **dealt,
    )


def _owned(name: str, dataset: Dataset, choices: Choices, kind: str) -> list[Ints]:
    """The rows of every client; artificial partitions deal whole blocks where blocks are kept together."""
    partition = partitions.parse(choices.partition or "natural")
    if partition.kind == "natural":
        return _natural(name, dataset, choices)
    clients = choices.clients or (10 if dataset.user is None else int(dataset.user.max()) + 1)
    most, rng = len(dataset.y) // 2, numpy_rng(choices.seed, "partition")
    check(
        clients <= most,
        "clients",
        clients,
        f"at most {most}, half of the {len(dataset.y)} examples of {name}",
    )
    if kind == "random" or dataset.block is None:
        return partitions.deal(partition, dataset.y, np.ones_like(dataset.y), clients, rng)
    size = np.bincount(dataset.block)
    label = splits.majority(dataset.block, dataset.y, len(size))
    dealt = partitions.deal(partition, label, size, clients, rng)
    return [np.flatnonzero(np.isin(dataset.block, units)) for units in dealt]


def _natural(name: str, dataset: Dataset, choices: Choices) -> list[Ints]:
    """The rows of each user, or of as many users, drawn from the seed, as clients are asked for."""
    if dataset.user is None:
        raise InputError(
            f"{name} has no natural users; take partition iid, dirichlet:ALPHA, classes:K or shards."
        )
    users = np.unique(dataset.user)
    wanted = len(users) if choices.clients is None else choices.clients
    check(wanted <= len(users), "clients", wanted, f"at most {len(users)}, the users of {name}")
    chosen = np.sort(numpy_rng(choices.seed, "users").permutation(users)[:wanted])
    return [np.flatnonzero(dataset.user == u) for u in chosen]


def _restricted(
    dataset: Dataset, owned: Sequence[Ints], scenario: scenarios.Scenario, seed: int
) -> list[Ints]:
    rngs = (numpy_rng(seed, "restricted", k) for k in range(len(owned)))
    return [
        rows[scenarios.kept(scenario, dataset.y[rows], rng)]
        for rows, rng in zip(owned, rngs, strict=True)
    ]


def _client(
    dataset: Dataset,
    rows: splits.Rows,
    choices: Choices,
    k: int,
    scenario: scenarios.Scenario | None,
) -> ClientData:
    """One client's tensors; ``scenario`` is given where its labels are to be corrupted."""
    scale = scaling(dataset, rows.train, choices.standardise)

    def part(name: str, which: Ints) -> Examples:
        y = dataset.y[which]
        if scenario is not None and (name != "test" or scenario.test):
            y = scenarios.corrupted(
                scenario, y, len(dataset.labels), numpy_rng(choices.seed, "labels", k, name)
            )
        return Examples(scale(dataset.x[which]), torch.from_numpy(y))

    info = profiles.info(choices.profile or "uniform", len(rows.train), k, choices.seed)
    return ClientData(
        part("train", rows.train),
        part("validation", rows.validation),
        part("test", rows.test),
        info,
    )
