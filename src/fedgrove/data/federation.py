"""The nouns of data: examples, what a client holds, and the federation of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import Info


@dataclass(frozen=True)
class Examples:
    """Inputs and their labels: ``x`` float (n, *shape), channels first; ``y`` int64 (n,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """What one client holds; choices look at ``validation``, tables at ``test``; ``info.examples`` is len(train)."""

    train: Examples
    validation: Examples
    test: Examples
    info: Info


@dataclass(frozen=True)
class Defaults:
    """How a data set is trained when nobody says otherwise: the setting of the paper that uses it."""

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
    """All clients of a data set, numbered 0..K-1; ``notes`` are honest remarks that belong in every table.

    ``partition``, ``scenario`` and ``split`` say how the data were dealt out, once nothing is left open.
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

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with every input in ``dtype`` (labels stay int64)."""
        return replace(self, clients={k: _cast(c, dtype) for k, c in self.clients.items()})


def _cast(client: ClientData, dtype: torch.dtype) -> ClientData:
    train, validation, test = (
        replace(e, x=e.x.to(dtype)) for e in (client.train, client.validation, client.test)
    )
    return replace(client, train=train, validation=validation, test=test)
