"""The nouns: what travels, what a client is, what it does, what a method is, what runs it. Read this first.

A :class:`Method` plans :class:`Task` objects and folds :class:`Report` objects; it never sees bytes, devices or
networks. An :class:`Engine` carries tasks to where the data are and does the method's work there, stage by stage;
it never sees maths. What a stage reads and writes is the *carry*: a dictionary of named trees.

The carry of a task begins as::

    carry[p]            the values of each packet p the task sends (usually "model")
    carry[p + ".mask"]  its mask, if it has one
    carry[m]            each tree m the client remembers from earlier rounds (a packet of the same name wins)
    carry["settings"]   the task's numbers and the round, as tensors
    carry["aux"]        what objectives keep from step to step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .seeds import torch_rng
from .trees import Mask, Tree

if TYPE_CHECKING:
    from .data import ClientData
    from .nets import Net
    from .nets.layout import Layout
    from .parts.local import LocalTraining
    from .parts.objective import Objective
    from .runs.rounds import Run
    from .wire.codec import Codec

Carry = dict[str, Tree]
Settings = Mapping[str, float | Sequence[float]]


# ---- what travels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """Named tensors with an optional mask: what crosses the wire, before any byte is written."""

    values: Tree
    mask: Mask | None = None


@dataclass(frozen=True)
class Task:
    """Server to one client: packets, numbers, and the name of the work to do with them.

    A verb may have a qualifier, "train:evidence": what stands before the colon is the purpose that randomness depends
    on, so that a method which also measures something trains as it would without.
    """

    to: int
    send: Mapping[str, Packet] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    verb: str = "train"
    round: int = 0
    """Filled in by :func:`fedgrove.runs.rounds.rounds`; part of every seed."""


@dataclass(frozen=True)
class Report:
    """One client to server. ``cost`` is filled in by the engine: real bytes, by direction and part."""

    of: int
    give: Mapping[str, Packet] = field(default_factory=dict)
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# ---- a client, seen from its own side ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Info:
    """What the server knows of a client: how much data it holds and what kind of device it is.

    bandwidth is in Mbit/s, speed is relative to a reference device, memory is in bytes.
    """

    examples: int
    bandwidth: float = 52.5
    speed: float = 1.0
    memory: int = 1 << 30


class Batch(NamedTuple):
    """Some examples. ``weight`` 0 marks padding; ``index`` is the place in the client's split; ``position`` the
    batch's number within the epoch. (A tuple, so that ``torch.func`` looks into it.)"""

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor  # type: ignore[assignment]
    position: Tensor


@dataclass(frozen=True)
class Batches:
    """Which examples a stage looks at: a split, in what order, in what size, how many batches at most."""

    split: Literal["train", "validation", "test"] = "train"
    size: int = 256
    shuffle: bool = False
    limit: int | None = None
    least: int = 1
    """A last batch with fewer examples is left out (BatchNorm cannot train on one)."""


@dataclass(frozen=True)
class Client:
    """A client in the middle of one task: its data, what it remembers, the network both sides know.

    ``start`` holds the network's initial parameters: both sides draw them from the run's seed, so they cost no bytes.
    """

    id: int
    info: Info
    data: ClientData
    memory: Mapping[str, Tree]
    layout: Layout
    start: Tree
    seed: int
    """Of this client in this task: derived from (seed, round, client, verb)."""

    def order(self, over: Batches, *purpose: int | str) -> Tensor:
        """The examples of one pass over a split, in order; a shuffle depends on seed and ``purpose`` alone."""
        n = len(getattr(self.data, over.split))
        shuffle = torch_rng(self.seed, "shuffle", *purpose) if over.shuffle else None
        order = torch.arange(n) if shuffle is None else torch.randperm(n, generator=shuffle)
        if over.limit is not None:
            order = order[: over.limit * over.size]
        if over.size < over.least:
            return order[:0]
        short = len(order) % over.size
        return order if not short or short >= over.least else order[: len(order) - short]

    def batches(self, over: Batches, *purpose: int | str) -> Iterator[Batch]:
        """One pass over a split, batch by batch."""
        part = getattr(self.data, over.split)
        ones, order = (
            torch.ones(min(over.size, len(part)), dtype=part.x.dtype),
            self.order(over, *purpose),
        )
        for position, index in enumerate(torch.split(order, over.size) if len(order) else ()):
            yield Batch(
                part.x[index], part.y[index], ones[: len(index)], index, torch.tensor(position)
            )


# ---- what a client does: a short tuple of stages, in order ---------------------------------------------------------


@dataclass(frozen=True)
class Train:
    """Parameters move from ``carry[start]`` to ``carry[end]`` under ``carry[mask]``, if there is one.

    A pure function of tensors, so that an engine may batch it over clients: no Python branch on data in the objective.
    """

    objective: Objective
    local: LocalTraining | None
    start: str = "model"
    end: str = "local"
    mask: str = "model.mask"
    net: str = "model"


@dataclass(frozen=True)
class Measure:
    """``carry[name]`` becomes the sum over batches of ``f(net, carry[of], batch, carry)``; pure, like Train."""

    name: str
    f: Callable[[Net, Tree, Batch, Carry], Tree]
    over: Batches = Batches()
    of: str = "model"
    net: str = "model"


@dataclass(frozen=True)
class Edit:
    """Any change of the carry, one client at a time: choose a group, cluster weights, restore what was kept."""

    f: Callable[[Carry, Client], Carry]


@dataclass(frozen=True)
class Outcome:
    """What a client's work ends with: what to send, what to say, what to keep (a name left out stays as it was)."""

    give: Mapping[str, Packet] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Give:
    """The last stage: what leaves the client."""

    f: Callable[[Carry, Client], Outcome]


Stage = Train | Measure | Edit | Give


# ---- what a method is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What the server knows before the first round. ``fresh(j)`` draws the j-th other set of initial parameters."""

    params: Tree
    layout: Layout
    clients: Mapping[int, Info]
    rounds: int
    fresh: Callable[[int], Tree]


class State(Protocol):
    """A method's state: a frozen dataclass of numbers, strings, trees and containers of these."""

    @property
    def round(self) -> int:
        """Rounds completed. An exchange that is not a round (a clustering, say) leaves it as it is."""


S = TypeVar("S")


class Method(Protocol[S]):
    """A federated algorithm: a frozen dataclass whose fields are its parts, and pure functions of an explicit state."""

    @property
    def local(self) -> LocalTraining | None:
        """How clients train; None takes the data set's own recipe."""

    @property
    def codec(self) -> Codec:
        """How packets are written."""

    def init(self, start: Start) -> S:
        """The state before round 0."""

    def deliver(self, state: S, client: int) -> Mapping[str, Packet]:
        """What a client gets in order to use the model now; an empty mapping if it uses its own."""

    def plan(self, state: S, cohort: Sequence[int]) -> list[Task]:
        """The tasks of the next exchange."""

    def fold(self, state: S, reports: Iterable[Report]) -> S:
        """The next state. Reports come one by one, in task order: keep running sums, not reports."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        """What a client does on a verb. "use" ends with ``carry["model"]`` being the client's own model."""

    def paper_bytes(self, layout: Layout, clients: int, cohort: int, rounds: int) -> int:
        """What the paper's own formula counts, both directions unless it says otherwise."""


class Engine(Protocol):
    """Does the work where the data are: the only thing that differs between a laptop, a GPU and a network."""

    @property
    def name(self) -> str:
        """What ``--engine`` calls it."""

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Report]]:
        """Do the jobs; reports come in job order. Several runs may travel together."""

    def close(self) -> None:
        """Let go of workers and memory."""


AnyMethod = Method[Any]
