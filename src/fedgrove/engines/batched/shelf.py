"""All clients' examples on one device, as one tensor per split, so that any batch of any client is a set of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...data import Federation

Key = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class Rows:
    """One split of every federation seen so far: inputs, labels, and where each client's begin."""

    x: Tensor
    y: Tensor
    first: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(eq=False)
class Shelf:
    """The data of the runs under way. Federations of other shapes or types lie apart."""

    device: torch.device
    _rows: dict[Key, Rows] = field(default_factory=dict)
    _known: dict[int, Federation] = field(default_factory=dict)

    def rows(self, federations: list[Federation], split: str) -> Rows:
        """The rows of a split, holding at least these federations, which are of one shape and type."""
        part = getattr(next(iter(federations[0].clients.values())), split)
        key = (split, tuple(part.x.shape[1:]), part.x.dtype)
        for federation in {id(f): f for f in federations}.values():
            rows = self._rows.get(key)
            if rows is None or (id(federation), next(iter(federation.clients))) not in rows.first:
                self._known[id(federation)] = federation
                self._rows[key] = self._added(rows, federation, split)
        return self._rows[key]

    def _added(self, rows: Rows | None, federation: Federation, split: str) -> Rows:
        parts = {k: getattr(client, split) for k, client in federation.clients.items()}
        first, at = (dict(rows.first), len(rows.y)) if rows else ({}, 0)
        for k, part in parts.items():
            first[id(federation), k] = at
            at += len(part)
        before = [(rows.x, rows.y)] if rows else []
        x = torch.cat(
            [*(b[0] for b in before), *(part.x.to(self.device) for part in parts.values())]
        )
        y = torch.cat(
            [*(b[1] for b in before), *(part.y.to(self.device) for part in parts.values())]
        )
        return Rows(x, y, first)
