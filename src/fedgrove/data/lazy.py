"""Clients whose data are made when they are needed: what a federation of a million is made of."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core import ClientInfo

if TYPE_CHECKING:
    from .federation import ClientData

KEPT = 64 << 20
"""Bytes of client data that are kept for the next task of the same client."""
INFOS_KEPT = 4096
"""Clients of which the server keeps at hand what it knows."""


def takes_round(f: Callable[..., Any]) -> bool:
    """Whether a function has a parameter called round."""
    try:
        return "round" in inspect.signature(f).parameters
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return False


class LazyClients(Mapping[int, "ClientData"]):
    """Clients 0..count-1, each made by ``make(k)``, or by ``make(k, round)`` with ``by_round``.

    The same arguments must give the same data, in any process. What was made last is kept, within
    ``kept`` bytes, so that a client which trains and is then scored is made once. ``info(k)``, or
    ``info(k, round)``, says what the server knows of a client; without it, the data are asked.
    """

    def __init__(
        self,
        make: Callable[..., ClientData],
        count: int,
        info: Callable[..., ClientInfo] | None = None,
        by_round: bool = False,
        kept: int = KEPT,
    ) -> None:
        self.make = make
        self.count = count
        self.info = info
        self.by_round = by_round
        self.kept = kept
        self._forget()

    def _forget(self) -> None:
        # The least recently used come first.
        self._made: OrderedDict[tuple[int, int], ClientData] = OrderedDict()
        self._made_bytes = 0
        self._infos: OrderedDict[tuple[int, int], ClientInfo] = OrderedDict()
        self._info_by_round = self.info is not None and takes_round(self.info)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: how to make clients, and none that was made."""
        names = ("make", "count", "info", "by_round", "kept")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    # A mapping would compare all its items, and so make every client.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __contains__(self, k: object) -> bool:
        return k in range(self.count)

    def __getitem__(self, k: int) -> ClientData:
        """The client at the beginning of a run."""
        return self.at(k, 0)

    def at(self, k: int, round: int) -> ClientData:
        """The client in a round."""
        if k not in self:
            raise KeyError(k)
        key = (k, round if self.by_round else 0)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        data = self.make(k, round=round) if self.by_round else self.make(k)
        self._made[key] = data
        self._made_bytes += _bytes_of(data)
        # The newest stays, however large it is.
        while self._made_bytes > self.kept and len(self._made) > 1:
            _, oldest = self._made.popitem(last=False)
            self._made_bytes -= _bytes_of(oldest)
        return data

    def info_of(self, k: int, round: int = 0) -> ClientInfo:
        """What the server knows of a client in a round."""
        if self.info is None:
            return self.at(k, round).info
        key = (k, round if self._info_by_round else 0)
        if key not in self._infos:
            self._infos[key] = self.info(k, round=round) if self._info_by_round else self.info(k)
            if len(self._infos) > INFOS_KEPT:
                self._infos.popitem(last=False)
        return self._infos[key]


class LazyInfos(Mapping[int, ClientInfo]):
    """What the server knows of each client, looked up when it is asked for."""

    def __init__(self, clients: Mapping[int, ClientData]) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __contains__(self, k: object) -> bool:
        return k in self.clients

    def __getitem__(self, k: int) -> ClientInfo:
        if isinstance(self.clients, LazyClients):
            if k not in self.clients:
                raise KeyError(k)
            return self.clients.info_of(k)
        return self.clients[k].info


def _bytes_of(data: ClientData) -> int:
    parts = (data.train, data.validation, data.test)
    return sum(part.x.nbytes + part.y.nbytes for part in parts)
