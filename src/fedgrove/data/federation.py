"""The data types: examples, the data of a client, and the federation of all clients."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import ClientInfo, assign_folds
from ..errors import InputError, check, is_plain_text, shown
from ..notebook import show_table
from ..options.groups import VALIDATION
from ..problems import CLASSES, AnyProblem, score_by
from .preparation import IDENTITY, Preparation

if TYPE_CHECKING:
    from .devices import BandwidthTraces

MAX_CACHED_BYTES = 64 << 20
"""Bytes of client data that are kept for the next task of the same client."""
MAX_CACHED_INFOS = 4096
"""Clients whose :class:`ClientInfo` the server keeps."""


# ---- one client ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples:
    """Inputs and their targets.

    Args:
        x: Inputs (n, *shape), float, channels first.
        y: Targets: int64 (n,) for classes, float (n, L) for several labels or numbers.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        # Not `len`, which takes three microseconds for a tensor: this is called a lot.
        return self.y.shape[0]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of some examples, such as those of a batch."""
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

    @cached_property
    def folds(self) -> Tensor:
        """The fold of each example, for methods that score on training data in turn."""
        return assign_folds(self.y)


MOST_SHOWN = 10
"""Clients of a federation that a notebook shows."""


class SharedExamples(Examples):
    """Some of the examples that several clients are tested on: all inputs are stored once.

    A copy for each client of an image set would take gigabytes.

    Args:
        shared: The inputs of all of them.
        rows: Which of them these are.
        y: The targets of these.

    >>> everything = torch.tensor([[1.0], [2.0], [3.0]])
    >>> some = SharedExamples(everything, torch.tensor([0, 2]), torch.arange(2))
    >>> some.x.tolist(), some.take(torch.tensor([1]))
    ([[1.0], [3.0]], (tensor([[3.]]), tensor([1])))
    """

    def __init__(self, shared: Tensor, rows: Tensor, y: Tensor) -> None:
        # The class is frozen.
        object.__setattr__(self, "shared", shared)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "y", y)

    shared: Tensor
    rows: Tensor

    @property
    def x(self) -> Tensor:
        """The inputs, copied at each call."""
        return self.shared.index_select(0, self.rows)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of some of these examples, without copying the others."""
        return self.shared.index_select(0, self.rows[rows]), self.y.index_select(0, rows)


@dataclass(frozen=True)
class ClientData:
    """The examples of one client and what the server knows about it.

    Automatic choices look at ``validation``, tables report ``test``.

    Args:
        train: The examples to train on.
        validation: The examples for choices; may be empty.
        test: The examples for scores.
        info: What the server knows; ``info.examples`` is ``len(train)``.
        labels: The classes that the client knows: it never predicts another one. None for all.
        kind: The kind of user, if the data are generated. No method sees it
            (:mod:`fedgrove.runs.summary`).
        preparation: How its raw inputs became ``x``; None: as in ``Federation.preparation``.

    Raises:
        InputError: An example has a label that is not in ``labels``.
    """

    train: Examples
    validation: Examples
    test: Examples
    info: ClientInfo
    labels: tuple[int, ...] | None = None
    kind: str = ""
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        if self.labels is None:
            return
        # The class is frozen; labels may be given as a list, a set or a tensor.
        object.__setattr__(self, "labels", _as_whole_numbers(self.labels))
        # In a mixed federation, columns of targets have different meanings; its clients were
        # checked before they were mixed.
        if self.info.task:
            return
        for part in (self.train, self.validation, self.test):
            # Of several labels those that any example has.
            present = part.y if part.y.dim() == 1 else (part.y > 0).any(0).nonzero().flatten()
            others = set(present.tolist()) - set(self.labels)
            if others:
                raise InputError(
                    f"a client has the labels {self.labels} and an example of {min(others)}; "
                    "add the label, or leave the example out."
                )

    def map_parts(self, f: Callable[[Examples], Examples]) -> ClientData:
        """Return the client's data with ``f`` applied to train, validation and test part."""
        train = f(self.train)
        return replace(self, train=train, validation=f(self.validation), test=f(self.test))


def _as_whole_numbers(labels: Any) -> tuple[int, ...]:
    """Return labels as a tuple, whatever container they are in."""
    try:
        if hasattr(labels, "tolist"):
            labels = labels.tolist()
        listed = list(labels)
        numbers = tuple(map(int, listed))
        are_whole = listed == list(numbers)
    except (TypeError, ValueError):
        are_whole = False
    if not are_whole:
        raise InputError(
            f"a client's labels are {shown(labels)}; they must be the numbers of its classes, such "
            "as (3, 5)."
        )
    return numbers


# ---- clients that are created when needed --------------------------------------------------------


def takes_round(f: Callable[..., Any]) -> bool:
    """Whether a function that creates a client's data has a parameter called round."""
    try:
        return "round" in inspect.signature(f).parameters
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return False


class LazyClients(Mapping[int, ClientData]):
    """Clients 0..count-1 that a function creates when they are needed.

    The same arguments must give the same data in every process. The most recent clients are kept,
    so that a client that trains and is then scored is created once.

    Args:
        make: ``make(k)`` returns the data of client k; ``make(k, round=...)`` with ``by_round``.
        count: The number of clients.
        info: ``info(k)`` or ``info(k, round=...)`` returns what the server knows about a client.
            None: the data are created to find out.
        by_round: Whether the data change from round to round.
        kept: The most bytes of client data to keep.
    """

    def __init__(
        self,
        make: Callable[..., ClientData],
        count: int,
        info: Callable[..., ClientInfo] | None = None,
        by_round: bool = False,
        kept: int = MAX_CACHED_BYTES,
    ) -> None:
        self.make = make
        self.count = count
        self.info = info
        self.by_round = by_round
        self.kept = kept
        self._clear_cache()

    def _clear_cache(self) -> None:
        # The least recently used comes first.
        self._cached: OrderedDict[tuple[int, int], ClientData] = OrderedDict()
        self._cached_bytes = 0
        self._cached_info = lru_cache(MAX_CACHED_INFOS)(self._make_info)
        self._info_by_round = self.info is not None and takes_round(self.info)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle how to create clients, and none of those that were created."""
        names = ("make", "count", "info", "by_round", "kept")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clear_cache()

    # A mapping would compare all its items, and so create every client.
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
        """Return the client at the beginning of a run."""
        return self.at(k, 0)

    def at(self, k: int, round: int) -> ClientData:
        """Return the data of a client in a round, created now."""
        if k not in self:
            raise KeyError(k)
        if not self.by_round:
            round = 0
        key = (k, round)
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        data = self.make(k, round=round) if self.by_round else self.make(k)
        self._cached[key] = data
        self._cached_bytes += _count_bytes(data)
        # The newest stays, however large it is.
        while self._cached_bytes > self.kept and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= _count_bytes(oldest)
        return data

    def info_of(self, k: int, round: int = 0) -> ClientInfo:
        """Return what the server knows about a lazily created client in a round."""
        if self.info is None:
            return self.at(k, round).info
        if not self._info_by_round:
            round = 0
        return self._cached_info(k, round)

    def _make_info(self, k: int, round: int) -> ClientInfo:
        assert self.info is not None
        return self.info(k, round=round) if self._info_by_round else self.info(k)


class LazyInfos(Mapping[int, ClientInfo]):
    """What the server knows about each client, looked up when needed."""

    def __init__(self, clients: Mapping[int, ClientData]) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __contains__(self, k: object) -> bool:
        return k in self.clients

    def __getitem__(self, k: int) -> ClientInfo:
        if k not in self.clients:
            raise KeyError(k)
        if isinstance(self.clients, LazyClients):
            return self.clients.info_of(k)
        return self.clients[k].info


def _count_bytes(data: ClientData) -> int:
    parts = (data.train, data.validation, data.test)
    return sum(part.x.nbytes + part.y.nbytes for part in parts)


# ---- all clients ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defaults:
    """How a data set is trained unless options override it: the setup of the paper that uses it.

    Args:
        net: The name of the network.
        cohort: Clients that train in each round; at most the number of clients of the federation.
        rounds: Rounds of the whole run.
        epochs: Passes of a client over its training examples in each round.
        batch: Examples per local step.
        optimiser: The client's optimiser, "SGD" or "Adam".
        lr: Its learning rate.
        momentum: Its momentum; only SGD has one.
        weight_decay: Its weight decay.
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

    def __post_init__(self) -> None:
        check(self.optimiser in ("SGD", "Adam"), "optimiser", self.optimiser, "SGD or Adam")


@dataclass(frozen=True)
class Federation:
    """All clients of a data set, numbered 0..K-1, and what the server knows about them.

    The server looks at ``infos`` and ``ids``. A client's data come from :meth:`client` when it has
    a task.

    Args:
        name: The name of the data.
        clients: A dictionary, or a mapping that creates clients when needed
            (:func:`fedgrove.data.from_clients`).
        classes: The number of outputs: classes, labels or numbers, which ``labels`` names.
        labels: The names of the outputs.
        shape: The shape of one input, channels first.
        defaults: How the data are trained unless options override it.
        notes: Caveats that belong in every table of results.
        partition: How examples were assigned to clients.
        scenario: What was changed at some clients.
        split: How the test part was held out.
        validation: The share of the remaining examples that was held out for validation.
        train_examples: The maximum number of training examples of a client; None for all.
        problem: What the targets are.
        trace: How the bandwidths of clients really change. The bandwidth of a client without a
            trace stays as in ``infos``. What the server knows about it: :meth:`infos_at`.
        files: The SHA-256 of each file of devices and of each file of the user's own data.
        later: Data that replace a client's data: pairs of a round and the data from then on.
        elsewhere: Whether clients are other machines: then they have no examples here, only what
            they reported, and their memory stays with them.
        preparation: How raw inputs became the clients' inputs, as far as it is common to all of
            them. If clients standardise by their own data, :meth:`preparation_of` has mean and std.
        names: The names of the clients, if their data have them: from file names or a column.
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
    train_examples: int | None = None
    problem: AnyProblem = CLASSES
    trace: BandwidthTraces | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[int, tuple[tuple[int, ClientData], ...]] = field(default_factory=dict)
    elsewhere: bool = False
    preparation: Preparation = IDENTITY
    names: Mapping[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a line about the federation, not pages of its tensors.

        >>> from fedgrove import data
        >>> data.load("digits", clients=3)
        Federation('digits', 3 clients, 10 outputs, shape (1, 8, 8), partition 'dirichlet:0.5')
        """
        return (
            f"Federation({self.name!r}, {len(self.clients)} clients, {self.classes} outputs, "
            f"shape {self.shape}, partition {self.partition!r})"
        )

    def _repr_html_(self) -> str:
        rows = []
        # Data that are made when they are needed would all be made for this.
        if not self.is_lazy:
            for client in self.ids[:MOST_SHOWN]:
                data = self.client(client)
                row = {"client": self.name_of(client), "training examples": len(data.train)}
                rows.append({**row, "test examples": len(data.test)})
        more = len(self.clients) - len(rows)
        notes = [f"and {more:,} more clients"] if more and rows else []
        return show_table(repr(self), rows, [*notes, *self.notes])

    def __post_init__(self) -> None:
        named = {
            "data": (self.name,),
            "client": self.names.values(),
            "label": self.labels,
            "channel": self.preparation.channels or (),
        }
        for kind, names in named.items():
            for name in names:
                # They reach every output of a run, and its files.
                if not is_plain_text(str(name)):
                    raise InputError(
                        f"the name of a {kind} is {shown(name)}, which cannot be printed; rename "
                        "the file, or change its text."
                    )

    def preparation_of(self, k: int, round: int = 0) -> Preparation:
        """Return how the raw inputs of one client became its inputs."""
        return self.client(k, round).preparation or self.preparation

    def name_of(self, k: int) -> str:
        """Return the name of a client in its data; its number if the data name no clients."""
        return self.names.get(k, str(k))

    def to(self, dtype: torch.dtype) -> Federation:
        """Return the federation with all inputs and numbers in ``dtype`` (classes stay int64)."""
        if isinstance(self.clients, LazyClients):
            lazy = self.clients
            cast = CastClient(lazy.make, dtype)
            clients = LazyClients(cast, lazy.count, lazy.info, lazy.by_round, lazy.kept)
            return replace(self, clients=clients)
        later = {}
        for k, versions in self.later.items():
            later[k] = tuple((begin, _cast(data, dtype)) for begin, data in versions)
        first = {k: _cast(data, dtype) for k, data in self.clients.items()}
        return replace(self, clients=first, later=later)

    def scored_by(self, metric: str | None) -> Federation:
        """Return the federation with the metric that the option metric names; None: its own.

        Raises:
            InputError: The targets are not classes.
        """
        problem = score_by(self.problem, metric)
        return self if problem == self.problem else replace(self, problem=problem)

    @property
    def division(self) -> dict[str, Any]:
        """How the data were divided, among clients and into parts, by option."""
        return {
            "partition": self.partition,
            "scenario": self.scenario,
            "split": self.split,
            "validation": self.validation,
        }

    @property
    def is_lazy(self) -> bool:
        """Whether clients' data are created when needed, and must not all be kept at once."""
        return not isinstance(self.clients, dict)

    def client(self, k: int, round: int = 0) -> ClientData:
        """Return the data of one client, in a round if they change from round to round."""
        if isinstance(self.clients, LazyClients):
            return self.clients.at(k, round)
        current = self.clients[k]
        for begin, data in self.later.get(k, ()):
            if begin <= round:
                current = data
        return current

    def all_data(self) -> Iterator[ClientData]:
        """Yield the data of every client at any time, of a federation in memory."""
        yield from self.clients.values()
        for versions in self.later.values():
            for _, data in versions:
                yield data

    def info(self, k: int, round: int = 0) -> ClientInfo:
        """Return what the server knows about one client of the federation in a round."""
        if isinstance(self.clients, LazyClients):
            return self.clients.info_of(k, round)
        return self.client(k, round).info

    @cached_property
    def infos(self) -> Mapping[int, ClientInfo]:
        """What the server knows about each client of the federation."""
        if self.is_lazy:
            return LazyInfos(self.clients)
        return {k: client.info for k, client in self.clients.items()}

    def infos_at(self, second: float) -> dict[int, ClientInfo]:
        """Return what the server knows in a virtual second about the clients that have a trace."""
        known = {}
        for client, steps in (self.trace or {}).items():
            if client in self.clients:
                up, down = steps.at(second)
                known[client] = replace(self.infos[client], bandwidth=up, downlink=down)
        return known

    @cached_property
    def ids(self) -> Sequence[int]:
        """The numbers of the federation's clients, in order."""
        if isinstance(self.clients, LazyClients):
            return range(len(self.clients))
        return sorted(self.clients)


@dataclass(frozen=True)
class CastClient:
    """Creates a client's data with inputs in ``dtype``."""

    make: Callable[..., ClientData]
    dtype: torch.dtype

    def __call__(self, k: int, **when: int) -> ClientData:
        """Return the client, perhaps in a round."""
        return _cast(self.make(k, **when), self.dtype)


def _cast(client: ClientData, dtype: torch.dtype) -> ClientData:
    def cast(part: Examples) -> Examples:
        y = part.y.to(dtype) if part.y.is_floating_point() else part.y
        return Examples(part.x.to(dtype), y)

    return client.map_parts(cast)
