"""The same numbers for the same classes on all nodes, also for those that a node never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..problems import CLASSES

if TYPE_CHECKING:
    from ..data import ClientData, Federation


def with_labels(federation: Federation, labels: Sequence[str]) -> Federation:
    """A federation of a node's own data in which classes have their numbers in ``labels``.

    Read alone, a node's files give numbers to the classes that are in them: "walk" would be 0 here
    and 2 there. Data whose targets are not classes must have these labels already.

    >>> from fedgrove import data
    >>> own = data.from_arrays([[0.0], [1.0]] * 8, ["sit", "walk"] * 8, [0] * 16)
    >>> with_labels(own, ["run", "sit", "walk"]).client(0).train.y.unique().tolist()
    [1, 2]
    """
    known = tuple(str(label) for label in labels)
    if federation.labels == known:
        return federation
    others = [label for label in federation.labels if label not in known]
    if federation.problem != CLASSES or others:
        named = ", ".join(others or federation.labels)
        raise InputError(
            f"this node's data have the labels {named}, and the app knows {', '.join(known)}; "
            "leave the examples out, or write the app again with data that have them all."
        )
    number = torch.tensor([known.index(label) for label in federation.labels])
    preparation = replace(federation.preparation, labels=known)
    clients = {k: _numbered(client, number, known) for k, client in federation.clients.items()}
    return replace(
        federation, clients=clients, classes=len(known), labels=known, preparation=preparation
    )


def _numbered(client: ClientData, number: Tensor, labels: tuple[str, ...]) -> ClientData:
    parts = {}
    for name in ("train", "validation", "test"):
        part = getattr(client, name)
        parts[name] = replace(part, y=number[part.y])
    own = None if client.labels is None else tuple(int(number[label]) for label in client.labels)
    preparation = client.preparation
    if preparation is not None:
        preparation = replace(preparation, labels=labels)
    return replace(client, **parts, labels=own, preparation=preparation)
