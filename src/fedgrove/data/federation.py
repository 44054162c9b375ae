"""The data types: examples, what a client holds, and the federation of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import Info
from .split import VALIDATION


@dataclass(frozen=True)
class Examples:
    """Inputs and their labels: ``x`` float (n, *shape), channels first; ``y`` int64 (n,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """The examples of one client and what the server knows of it.

    Automatic choices look at ``validation``, tables report ``test``; ``info.examples`` is
    len(train).
    """

    train: Examples
    validation: Examples
    test: Examples
    info: Info


@dataclass(frozen=True)
class Defaults:
    """How a data set is trained unless told otherwise: the setting of the paper that uses it.

    net: the name of the network.
    cohort: clients that train in each round; at most the number of clients of the federation.
    rounds: rounds of the whole run.
    epochs: passes of a client over its training examples in each round.
    batch: examples per local step.
    optimiser: the client's optimiser, "SGD" or "Adam".
    lr: its learning rate.
    momentum: its momentum; only SGD has one.
    weight_decay: its weight decay.
    """

    net: str
    cohort: int
    rounds: int
    epochs: int
    batch: int
    optimiser: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Federation:
    """All clients of a data set, numbered 0..K-1.

    ``notes`` are caveats that belong in every table of results. ``partition``, ``scenario``,
    ``split`` and ``validation`` say how the data were dealt out, with the set's own choices filled
    in.
    """

    name: str
    clients: Mapping[int, ClientData]
    classes: int
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    defaults: Defaults
    notes: tuple[str, ...] = ()
    partition: str = "natural"
    scenario: str = "none"
    split: str = "random"
    validation: float = VALIDATION

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with every input in ``dtype`` (labels stay int64)."""
        return replace(self, clients={k: _cast(c, dtype) for k, c in self.clients.items()})


def _cast(client: ClientData, dtype: torch.dtype) -> ClientData:
    return replace(
        client,
        train=replace(client.train, x=client.train.x.to(dtype)),
        validation=replace(client.validation, x=client.validation.x.to(dtype)),
        test=replace(client.test, x=client.test.x.to(dtype)),
    )
