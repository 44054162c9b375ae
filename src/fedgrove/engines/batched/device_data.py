"""All clients' examples on one device, one tensor per split: any batch is a set of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...data import Federation

SplitKey = tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...], torch.dtype]
"""Split, shape and type of an input and of a target: examples that agree fit into one tensor."""


@dataclass(eq=False)
class DeviceSplit:
    """One split of all federations loaded so far, concatenated: inputs and labels."""

    x: Tensor
    y: Tensor
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    """(id of the federation, client) -> the row at which the client's examples begin."""


@dataclass(eq=False)
class DeviceData:
    """The examples of the runs under way, loaded when a stage first needs them."""

    device: torch.device
    _splits: dict[SplitKey, DeviceSplit] = field(default_factory=dict)
    # Held because offsets are keyed by id: the id of a freed federation could be given to another.
    _federations: dict[int, Federation] = field(default_factory=dict)

    def load(self, federations: list[Federation], split: str) -> DeviceSplit:
        """A split that holds at least these federations, which must agree in shape and type."""
        first_client = next(iter(federations[0].clients.values()))
        sample = getattr(first_client, split)
        x = sample.x
        y = sample.y
        key = (split, tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)
        for federation in federations:
            loaded = self._splits.get(key)
            some_client = next(iter(federation.clients))
            # All clients of a federation are loaded together, so that any one of them will tell.
            if loaded is None or (id(federation), some_client) not in loaded.offsets:
                self._federations[id(federation)] = federation
                self._splits[key] = self._with_federation(loaded, federation, split)
        return self._splits[key]

    def _with_federation(
        self, loaded: DeviceSplit | None, federation: Federation, split: str
    ) -> DeviceSplit:
        """A new split: what was loaded, then the federation's clients."""
        inputs: list[Tensor] = []
        labels: list[Tensor] = []
        offsets: dict[tuple[int, int], int] = {}
        end = 0
        if loaded is not None:
            inputs.append(loaded.x)
            labels.append(loaded.y)
            offsets.update(loaded.offsets)
            end = len(loaded.y)
        for client, data in federation.clients.items():
            examples = getattr(data, split)
            inputs.append(examples.x.to(self.device))
            labels.append(examples.y.to(self.device))
            offsets[id(federation), client] = end
            end += len(examples)
        return DeviceSplit(torch.cat(inputs), torch.cat(labels), offsets)
