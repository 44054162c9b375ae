"""What tells data and nets that were made in Python apart: they have no name to go by."""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice

from torch import nn

from ..data import ClientData, Federation
from ..trees import digest

LAZY = 100
"""Of clients that are made when asked for, so many are looked at: there may be a million."""


def of_data(federation: Federation) -> str:
    """Hexadecimal digits that federations of equal examples and devices share."""
    summed = blake2b(digest_size=16)
    summed.update(f"{len(federation.clients)}\0{federation.labels}\0".encode())
    if federation.is_lazy:
        for k in islice(federation.ids, LAZY):
            summed.update(_of_client(federation.client(k)))
    else:
        for data in federation.all_data():
            summed.update(_of_client(data))
    return summed.hexdigest()


def _of_client(data: ClientData) -> bytes:
    tensors = {}
    for name in ("train", "validation", "test"):
        part = getattr(data, name)
        tensors[f"{name}.x"] = part.x
        tensors[f"{name}.y"] = part.y
    return digest(tensors) + repr(data.info).encode()


def of_net(net: nn.Module) -> str:
    """Hexadecimal digits that modules of equal layers and parameters share."""
    return blake2b(repr(net).encode() + digest(net.state_dict()), digest_size=16).hexdigest()
