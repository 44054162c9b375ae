"""Clients' examples on one device, one tensor per split: any batch is a set of rows.

A federation in memory is loaded whole, once. Of one whose clients are made when they are asked for,
each stack's examples are copied to a shelf, over those of the stack before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...data import ClientData, Examples, Federation
from .transfers import to_device

SplitKey = tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...], torch.dtype]
"""Split, shape and type of an input and of a target: examples that agree fit into one tensor."""


@dataclass(eq=False)
class DeviceSplit:
    """One split of all clients that were loaded, concatenated: inputs and labels."""

    x: Tensor
    y: Tensor
    offsets: dict[int, int] = field(default_factory=dict)
    """The id of a client's data -> the row at which its examples begin."""


@dataclass(eq=False)
class DeviceData:
    """The examples of the runs under way, loaded when a stage first needs them."""

    device: torch.device
    _splits: dict[SplitKey, DeviceSplit] = field(default_factory=dict)
    # Held because offsets are keyed by id: the id of freed data could be given to others.
    _federations: dict[int, Federation] = field(default_factory=dict)
    _shelves: dict[SplitKey, DeviceSplit] = field(default_factory=dict)

    def load(self, federations: list[Federation], split: str) -> DeviceSplit:
        """A split that holds at least these federations, which must agree in shape and type."""
        first_client = next(iter(federations[0].clients.values()))
        sample = getattr(first_client, split)
        key = _key(split, sample)
        for federation in federations:
            loaded = self._splits.get(key)
            some_client = next(iter(federation.clients.values()))
            # All clients of a federation are loaded together, so that any one of them will tell.
            if loaded is None or id(some_client) not in loaded.offsets:
                self._federations[id(federation)] = federation
                self._splits[key] = self._with_federation(loaded, federation, split)
        return self._splits[key]

    def _with_federation(
        self, loaded: DeviceSplit | None, federation: Federation, split: str
    ) -> DeviceSplit:
        """A new split: what was loaded, then the federation's clients."""
        inputs: list[Tensor] = []
        labels: list[Tensor] = []
        offsets: dict[int, int] = {}
        end = 0
        if loaded is not None:
            inputs.append(loaded.x)
            labels.append(loaded.y)
            offsets.update(loaded.offsets)
            end = len(loaded.y)
        for data in federation.all_data():
            examples = getattr(data, split)
            inputs.append(examples.x.to(self.device))
            labels.append(examples.y.to(self.device))
            offsets[id(data)] = end
            end += len(examples)
        return DeviceSplit(torch.cat(inputs), torch.cat(labels), offsets)

    def load_clients(self, clients: list[ClientData], split: str) -> DeviceSplit:
        """A split that holds these clients, until the next call; the caller holds their data.

        The shelf stays where it is while it is large enough: captured graphs read it there.
        """
        distinct = {id(data): getattr(data, split) for data in clients}
        sample = next(iter(distinct.values()))
        key = _key(split, sample)
        rows = max(1, sum(len(examples) for examples in distinct.values()))
        shelf = self._shelves.get(key)
        if shelf is None or len(shelf.y) < rows:
            # A power of two, so that a little more next time does not need another one. Zeros, as
            # the rows that nobody owns are read as padding.
            room = 1 << (rows - 1).bit_length()
            x = torch.zeros(room, *sample.x.shape[1:], dtype=sample.x.dtype, device=self.device)
            y = torch.zeros(room, *sample.y.shape[1:], dtype=sample.y.dtype, device=self.device)
            shelf = DeviceSplit(x, y)
            self._shelves[key] = shelf
        shelf.offsets.clear()
        end = 0
        for identity, examples in distinct.items():
            shelf.offsets[identity] = end
            end += len(examples)
        # Joined first: one copy to the device in place of one per client.
        inputs = torch.cat([examples.x for examples in distinct.values()])
        labels = torch.cat([examples.y for examples in distinct.values()])
        shelf.x[:end].copy_(to_device(inputs, self.device))
        shelf.y[:end].copy_(to_device(labels, self.device))
        return shelf


def _key(split: str, sample: Examples) -> SplitKey:
    x = sample.x
    y = sample.y
    return (split, tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)
