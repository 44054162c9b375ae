"""The data types: examples, what a client holds, and the federation of all clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core import ClientInfo
from ..errors import InputError, check, shown, unknown
from ..problems import CLASSES, AnyProblem
from .devices import Trace
from .lazy import LazyClients, LazyInfos
from .preparation import IDENTITY, Preparation
from .split import VALIDATION


@dataclass(frozen=True)
class Examples:
    """Inputs and their targets: ``x`` float (n, *shape), channels first.

    ``y`` is int64 (n,) for classes, float (n, L) for several labels or numbers.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        # Not `len`, which takes a tensor three microseconds: this is asked a lot.
        return self.y.shape[0]


@dataclass(frozen=True)
class ClientData:
    """The examples of one client and what the server knows of it.

    Automatic choices look at ``validation``, tables report ``test``; ``info.examples`` is
    len(train). ``labels`` are the classes that the client knows of: it never predicts another one.
    """

    train: Examples
    validation: Examples
    test: Examples
    info: ClientInfo
    labels: tuple[int, ...] | None = None
    kind: str = ""
    """Which kind of user generated data were made for; no method sees it (:mod:`runs.summary`)."""
    preparation: Preparation | None = None
    """How its raw inputs became ``x``; None: as the federation's common one says."""

    def __post_init__(self) -> None:
        if self.labels is not None:
            # The class is frozen; a list, a set or a tensor of labels is brought to its own type.
            object.__setattr__(self, "labels", _whole_numbers(self.labels))
        # In a mixed federation, targets of different kinds stand in the same columns; its clients
        # were checked before they were mixed.
        if self.labels is None or self.info.task:
            return
        for part in (self.train, self.validation, self.test):
            # Of several labels those that an example has, else the one.
            present = part.y if part.y.dim() == 1 else (part.y > 0).any(0).nonzero().flatten()
            others = set(present.tolist()) - set(self.labels)
            if others:
                raise InputError(
                    f"a client has the labels {self.labels} and an example of {min(others)}; "
                    "add the label, or leave the example out."
                )


def _whole_numbers(labels: Any) -> tuple[int, ...]:
    """Labels as a tuple, of whatever they were given as."""
    try:
        listed = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        numbers = tuple(int(label) for label in listed)
        are_whole = all(label == number for label, number in zip(listed, numbers, strict=True))
    except (TypeError, ValueError):
        are_whole = False
    if not are_whole:
        raise InputError(
            f"a client's labels are {shown(labels)}; they must be the numbers of its classes, as "
            "(3, 5)."
        )
    return numbers


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
    """All clients of a data set, numbered 0..K-1, and what the server knows of them.

    The server looks at ``infos`` and ``ids``; a client's data come from :meth:`client` when it has
    something to do. ``clients`` is a dictionary, or a mapping that makes clients when asked
    (:func:`fedgrove.data.from_clients`).

    ``notes`` are caveats that belong in every table of results. ``partition``, ``scenario``,
    ``split`` and ``validation`` say how the data were dealt out, with the set's own choices filled
    in. ``problem`` says what the targets are; ``classes`` is how many outputs they take: classes,
    labels or numbers, which ``labels`` names.
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
    problem: AnyProblem = CLASSES
    trace: Trace | None = None
    """How clients' bandwidths really change, which no method sees; without one, or for a client
    that it lacks, they stay as ``infos`` says."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file of devices, and of each file of a person's own data."""
    later: Mapping[int, tuple[tuple[int, ClientData], ...]] = field(default_factory=dict)
    """What some clients hold later: pairs of a round and the data from then on, in order."""
    elsewhere: bool = False
    """Whether clients are machines of their own: here they have no examples, only what they said of
    themselves, and what they remember stays with them."""
    preparation: Preparation = IDENTITY
    """How raw inputs became what clients hold, as far as it is the same for all of them; where
    clients standardise each by its own data, :meth:`preparation_of` has mean and std."""
    names: Mapping[int, str] = field(default_factory=dict)
    """What the clients are called, where their data say so: by their files, or a column."""

    def preparation_of(self, k: int, round: int = 0) -> Preparation:
        """How the raw inputs of one client became what it holds."""
        own = self.client(k, round).preparation
        return self.preparation if own is None else own

    def name_of(self, k: int) -> str:
        """What a client is called; its number where it has no name."""
        return self.names.get(k, str(k))

    def number_of(self, client: int | str) -> int:
        """The number of a client, from its name or its number (a name comes first).

        >>> from fedgrove import data
        >>> data.load("digits", clients=3).number_of("2")
        2
        """
        named = {name: k for k, name in self.names.items()}
        if isinstance(client, str) and client in named:
            return named[client]
        text = str(client)
        if text.isdecimal() and int(text) < len(self.clients):
            return int(text)
        if named:
            raise unknown(f"client of {self.name}", text, named)
        last = len(self.clients) - 1
        allowed = f"one of the {len(self.clients)} clients of {self.name}, from 0 to {last}"
        check(False, "client", client, allowed)
        raise AssertionError("refused above")

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with all inputs and numbers in ``dtype`` (classes stay int64)."""
        if isinstance(self.clients, LazyClients):
            lazy = self.clients
            cast = Cast(lazy.make, dtype)
            clients = LazyClients(cast, lazy.count, lazy.info, lazy.by_round, lazy.kept)
            return replace(self, clients=clients)
        later = {}
        for k, versions in self.later.items():
            later[k] = tuple((begin, _cast(data, dtype)) for begin, data in versions)
        clients_now = {k: _cast(c, dtype) for k, c in self.clients.items()}
        return replace(self, clients=clients_now, later=later)

    @property
    def is_lazy(self) -> bool:
        """Whether clients are made when they are asked for, and must not be held all at once."""
        return not isinstance(self.clients, dict)

    def client(self, k: int, round: int = 0) -> ClientData:
        """The data of one client, in a round where they change from round to round."""
        if isinstance(self.clients, LazyClients):
            return self.clients.at(k, round)
        current = self.clients[k]
        for begin, data in self.later.get(k, ()):
            if begin <= round:
                current = data
        return current

    def all_data(self) -> Iterator[ClientData]:
        """What every client holds at any time, of a federation in memory."""
        yield from self.clients.values()
        for versions in self.later.values():
            for _, data in versions:
                yield data

    def info(self, k: int, round: int = 0) -> ClientInfo:
        """What the server knows of one client, in a round."""
        if isinstance(self.clients, LazyClients):
            return self.clients.info_of(k, round)
        return self.client(k, round).info

    @cached_property
    def infos(self) -> Mapping[int, ClientInfo]:
        """What the server knows of each client."""
        if self.is_lazy:
            return LazyInfos(self.clients)
        return {k: client.info for k, client in self.clients.items()}

    @cached_property
    def ids(self) -> Sequence[int]:
        """The clients' numbers in order."""
        if isinstance(self.clients, LazyClients):
            return range(len(self.clients))
        return sorted(self.clients)


@dataclass(frozen=True)
class Cast:
    """Makes a client's data, with inputs in ``dtype``."""

    make: Callable[..., ClientData]
    dtype: torch.dtype

    def __call__(self, k: int, **when: int) -> ClientData:
        """The client, perhaps of a round."""
        return _cast(self.make(k, **when), self.dtype)


def _cast(client: ClientData, dtype: torch.dtype) -> ClientData:
    def cast(part: Examples) -> Examples:
        y = part.y.to(dtype) if part.y.is_floating_point() else part.y
        return Examples(part.x.to(dtype), y)

    return replace(
        client,
        train=cast(client.train),
        validation=cast(client.validation),
        test=cast(client.test),
    )
