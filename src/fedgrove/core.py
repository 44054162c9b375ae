"""The nouns: what travels, what a client is and does, what a method is, what runs it. Read first.

A :class:`Method` plans :class:`Task` objects and folds :class:`Report` objects; it never sees
bytes, devices or networks. An :class:`Engine` carries tasks to where the data are and does the
method's work there, stage by stage; it never sees maths. A stage reads and writes the *carry*: a
dictionary of named trees.

The carry of a task starts as::

    carry[p]            the values of each packet p the task sends (usually "model")
    carry[p + ".mask"]  its mask, if it has one
    carry[m]            each tree m the client remembers from earlier rounds
                        (a packet of the same name wins)
    carry["settings"]   the task's numbers and the round, as tensors
    carry["client"]     where a client has them: its own labels and its task, as tensors
    carry["aux"]        what objectives keep from step to step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import torch
from torch import Tensor

from .errors import InputError, check
from .renamed import find_renamed
from .seeds import torch_rng
from .trees import Mask, Tree

if TYPE_CHECKING:
    from .data import ClientData
    from .nets import Net
    from .nets.layout import Layout
    from .parts.local import LocalTraining
    from .parts.objective import Objective
    from .runs.run import Run
    from .wire.codec import Codec

Carry = dict[str, Tree]
Settings = Mapping[str, float | Sequence[float]]

RESERVED = {
    "settings": "the task's numbers",
    "client": "a client's own labels and its task",
    "aux": "what objectives keep from step to step",
    "own": "the model that fine-tuning leaves with a client",
}
"""Names of trees that are taken: no packet and no memory of a method's may be called so."""


def check_names(names: Iterable[str], what: str) -> None:
    """Refuse names that the carry has for something else."""
    for name in names:
        if name in RESERVED:
            raise InputError(
                f"the method calls {what} {name!r}, which is the name of {RESERVED[name]}; "
                "give it another name."
            )
        # A packet's own mask is found there.
        if name.endswith(".mask") and what == "a packet":
            raise InputError(
                f"the method calls a packet {name!r}; a mask travels with its packet: "
                "Packet(values, mask)."
            )


SCORING_VERBS = ("evaluate", "finetune")
"""The verbs that every run has beside its method's own; their traffic is counted apart."""


# ---- what travels --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """Named tensors with an optional mask: what crosses the wire, before any byte is written.

    Where the mask is false the values are +0.0, as :func:`fedgrove.trees.masked` makes them: that
    is what a receiver reads there. In a packet without a mask the codec leaves zeros out as well,
    but a -0.0 is a value like any other.
    """

    values: Tree
    mask: Mask | None = None


@dataclass(frozen=True)
class Task:
    """Server to one client: packets, numbers, and the name of the work to do with them.

    A verb may have a qualifier, "train:evidence". Randomness depends only on the part before the
    colon, so that a method which also measures something trains as it would without.
    """

    to: int
    send: Mapping[str, Packet] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    verb: str = "train"
    round: int = 0
    """This and the next two are filled in by :mod:`fedgrove.runs.rounds`; part of every seed."""
    attempt: int = 0
    """How often this exchange was abandoned before; part of every seed."""
    memory: str | None = None
    """The version of the client's memory that the server knows of. After a reply that was lost or
    refused the client goes back to it."""


Cost = Mapping[str, Mapping[str, int]]
"""Real bytes, by direction ("up", "down") and part."""


@dataclass(frozen=True)
class Report:
    """One client to the server.

    ``cost``, ``memory`` and ``macs`` are filled in by the engine: real bytes, the version of what
    the client remembers from now on, if that changed, and the multiply-accumulates of its work.
    """

    of: int
    give: Mapping[str, Packet] = field(default_factory=dict)
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=dict)
    memory: str | None = None
    macs: int = 0


@dataclass(frozen=True)
class Lost:
    """A task that got no usable reply: why, in a word that is counted and in a sentence.

    ``cost`` is what its messages cost all the same.
    """

    of: int
    reason: str
    """One of the words of :data:`LOST_REASONS`."""
    detail: str = ""
    cost: Cost = field(default_factory=dict)


LOST_REASONS = {
    "crashed": "the client's work ended with an error",
    "died": "the process that worked for the client ended, twice; or its machine is gone",
    "late": "no answer within --timeout, or within --deadline on the virtual clock",
    "unreadable": "the reply could not be read",
    "unanswered": "the engine gave no answer",
    "unsent": "the task could not be sent: it is too large, or the client has not joined",
}
"""Why a task can be lost."""

Answer = Report | Lost


# ---- a client, from its own point of view --------------------------------------------------------


REFERENCE_GMACS = 1.0
"""A device of speed 1 does so many billion multiply-accumulates per second when it trains: a round
number of ours, not a measurement."""


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client: how many examples it has and what kind of device it is.

    bandwidth is that of the uplink in Mbit/s, which is what a server budgets by; downlink is the
    other way, None if it is the same. speed is relative to a reference device
    (:data:`REFERENCE_GMACS`), memory is in bytes; task is the data set it belongs to, in a
    federation that mixes several: for its own loss, and for whoever reads the scores. A method's
    server must not look at it: that is what it has to find out.

    >>> device = ClientInfo(examples=100, bandwidth=5.0, downlink=40.0)
    >>> device.up, device.down, ClientInfo(examples=100, bandwidth=5.0).down
    (5.0, 40.0, 5.0)
    """

    examples: int
    bandwidth: float = 52.5
    speed: float = 1.0
    memory: int = 1 << 30
    task: str = ""
    downlink: float | None = None

    def __post_init__(self) -> None:
        check(self.bandwidth > 0, "bandwidth", self.bandwidth, "above 0 Mbit/s")
        downlink_is_valid = self.downlink is None or self.downlink > 0
        check(downlink_is_valid, "downlink", self.downlink, "above 0 Mbit/s, or None")
        check(self.speed > 0, "speed", self.speed, "above 0")

    @property
    def up(self) -> float:
        """Mbit/s from the client to the server."""
        return self.bandwidth

    @property
    def down(self) -> float:
        """Mbit/s from the server to the client."""
        return self.bandwidth if self.downlink is None else self.downlink


class Batch(NamedTuple):
    """Some examples.

    ``weight`` 0 marks padding; ``index`` is the position in the client's split; ``position`` is the
    batch's number within the epoch. (A named tuple is a pytree, which ``torch.func`` can map over.)
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor  # type: ignore[assignment]
    position: Tensor


@dataclass(frozen=True)
class Batches:
    """Which examples a stage sees: the split, the order, the batch size, the number of batches."""

    split: Literal["train", "validation", "test"] = "train"
    size: int = 256
    shuffle: bool = False
    limit: int | None = None
    """At most this many batches: with ``shuffle``, or they are the first rows in storage order."""
    least: int = 1
    """A last batch with fewer examples is left out (BatchNorm cannot train on one)."""

    def seen(self, count: int) -> int:
        """How many of ``count`` examples one pass sees.

        >>> Batches(size=4, limit=2).seen(30), Batches(size=4, least=2).seen(9)
        (8, 8)
        """
        if self.limit is not None:
            count = min(count, self.limit * self.size)
        if self.size < self.least:
            # No batch is large enough.
            return 0
        remainder = count % self.size
        if 0 < remainder < self.least:
            return count - remainder
        return count


@dataclass(frozen=True)
class Client:
    """A client while it works on one task: its data, what it remembers, the network.

    ``start`` holds the network's initial parameters: both sides draw them from the run's seed, so
    they cost no bytes.
    """

    id: int
    info: ClientInfo
    data: ClientData
    memory: Mapping[str, Tree]
    net: Net
    start: Tree
    seed: int
    """For this client in this task: derived from (seed, round, client, verb)."""
    nets: Mapping[str, Net] = field(default_factory=dict)
    """All networks of the method by name; ``net`` is the one called "model"."""

    @property
    def layout(self) -> Layout:
        """The network's structure."""
        return self.net.layout

    def order(self, over: Batches, *purpose: int | str) -> Tensor:
        """The examples of one pass over a split, in order.

        A shuffle depends on the seed and ``purpose`` alone.
        """
        count = len(getattr(self.data, over.split))
        if over.shuffle:
            generator = torch_rng(self.seed, "shuffle", *purpose)
            order = torch.randperm(count, generator=generator)
        else:
            order = torch.arange(count)
        return order[: over.seen(count)]

    def batches(self, over: Batches, *purpose: int | str) -> Iterator[Batch]:
        """One pass over a split, batch by batch."""
        examples = getattr(self.data, over.split)
        order = self.order(over, *purpose)
        if not len(order):
            # torch.split would give one empty batch.
            return
        ones = torch.ones(min(over.size, len(examples)), dtype=examples.x.dtype)
        for position, index in enumerate(torch.split(order, over.size)):
            yield Batch(
                x=examples.x.index_select(0, index),
                y=examples.y.index_select(0, index),
                weight=ones[: len(index)],
                index=index,
                position=torch.tensor(position),
            )


# ---- what a client does: a short tuple of stages, in order ---------------------------------------


GRADIENT_PASSES = 3
"""What a gradient costs, in forward passes: one forwards, and about two backwards."""


@dataclass(frozen=True)
class Train:
    """Parameters move from ``carry[start]`` to ``carry[end]``, under ``carry[mask]`` if there.

    A pure function of tensors, so that an engine may batch it over clients: the objective has no
    Python branch on data.
    """

    objective: Objective
    local: LocalTraining | None
    start: str = "model"
    end: str = "local"
    mask: str | None = None
    """None: the mask that came with ``start``, ``start + ".mask"``; "": none."""
    net: str = "model"
    """Which of the method's networks is trained."""
    at: Callable[[Tree, Carry], Tree] | None = None
    """The forward pass is made at ``at(params, carry)``, at masked, clustered or rounded weights,
    and its gradient moves the parameters themselves ("straight through"). Pure, like Train.

    It must compare equal from round to round, or batched stacks no clients of other runs with these
    and captures its CUDA graphs anew each time: a function of a module, a method of a frozen
    dataclass or an instance of one, and no lambda that ``work`` makes at each call."""
    differentiate: bool = False
    """Whether the gradient goes through ``at`` by the chain rule instead of past it: scores that
    make a mask are moved by what they do to the weights."""
    whole: tuple[str, ...] = ()
    """Trees of the carry that keep their full width where the mask removes whole channels, and all
    others are narrowed with the network: a teacher's, which ``out.whole`` runs."""
    frozen: str = ""
    """A tree of the carry whose parameters and buffers, by name, stay as they are; "": none."""

    @property
    def mask_name(self) -> str:
        """The name under which the carry may hold a mask."""
        if self.mask is None:
            return f"{self.start}.mask"
        return self.mask


@dataclass(frozen=True)
class Measure:
    """``carry[name]`` becomes the sum over batches of ``f(net, carry[of], batch, carry)``.

    Pure, like Train. On the virtual clock it takes one forward pass, or as many as ``f.passes``
    says: a gradient counts as three (:data:`GRADIENT_PASSES`).
    """

    name: str
    f: Callable[[Net, Tree, Batch, Carry], Tree]
    over: Batches = Batches()
    of: str = "model"
    net: str = "model"
    """Which of the method's networks ``f`` gets."""


@dataclass(frozen=True)
class Edit:
    """Any change of the carry, for one client at a time: choose a group, cluster weights, ..."""

    f: Callable[[Carry, Client], Carry]


@dataclass(frozen=True)
class Outcome:
    """The result of a client's work: what to send, what to report, what to remember.

    A name that is left out of ``memory`` stays as it was.
    """

    give: Mapping[str, Packet] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpectedPacket:
    """What one packet of an answer looks like: its tensors, in order, and its mask."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    mask: Mask | Literal["own"] | None = None
    """This very mask; or "own": one that the client chose, or none; or None: without a mask."""

    @classmethod
    def of(
        cls, tree: Mapping[str, Tensor], mask: Mask | Literal["own"] | None = None
    ) -> ExpectedPacket:
        """The form of a packet that holds tensors like these."""
        tensors = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tree.items()}
        return cls(tensors, mask)


@dataclass(frozen=True)
class ExpectedReport:
    """What the answer to a task holds: these packets and no others, and these numbers.

    Numbers stand with the range they must lie in; others are free, as long as they are finite.
    """

    packets: Mapping[str, ExpectedPacket] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    optional: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers that may be left out; where they are given, their range counts."""


def expected_as_sent(task: Task, net: Net) -> ExpectedReport:
    """The packets that the task sent, changed in their values only."""
    return ExpectedReport(
        {name: ExpectedPacket.of(packet.values, packet.mask) for name, packet in task.send.items()}
    )


def expected_no_packets(task: Task, net: Net) -> ExpectedReport:
    """Nothing but the news that the work is done."""
    return ExpectedReport()


@dataclass(frozen=True)
class Give:
    """The last stage: what leaves the client.

    ``expected`` declares what the report contains, so that the server can refuse anything else: a
    report that looks different never reaches ``fold``.
    """

    f: Callable[[Carry, Client], Outcome]
    expected: Callable[[Task, Net], ExpectedReport] = expected_as_sent
    holds: InitVar[Callable[[Task, Net], ExpectedReport] | None] = None
    """The old name of ``expected``; goes with the next release (:mod:`fedgrove.renamed`)."""

    def __post_init__(self, holds: Callable[[Task, Net], ExpectedReport] | None) -> None:
        if holds is not None:
            message = "holds= of Give is now expected=; the old name goes with the next release."
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "expected", holds)


Stage = Train | Measure | Edit | Give


# ---- what a method is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What the server knows before the first round.

    ``fresh(j)`` draws the j-th other set of initial parameters.
    """

    params: Tree
    net: Net
    clients: Mapping[int, ClientInfo]
    rounds: int
    fresh: Callable[[int], Tree]
    nets: Mapping[str, Net] = field(default_factory=dict)
    """All networks of the method by name; ``net`` is the one called "model"."""
    sample: Callable[[int], tuple[int, ...]] | None = None
    """``sample(n)`` draws so many clients from the run's seed; None: the first ones are taken."""
    cohort: int = 1
    """How many clients take part in a round."""

    @property
    def layout(self) -> Layout:
        """The network's structure."""
        return self.net.layout

    def some_clients(self, most: int) -> tuple[int, ...]:
        """Whom to ask where all clients should be asked: all, in order, or a sample of ``most``."""
        if len(self.clients) <= most:
            return tuple(sorted(self.clients))
        if self.sample is None:
            return tuple(islice(self.clients, most))
        return self.sample(most)

    def all_clients(self, why: str) -> tuple[int, ...]:
        """All clients in order, for a method that cannot do with a sample; ``why`` says so.

        More than :data:`MOST_AT_ONCE` are refused.
        """
        check(
            len(self.clients) <= MOST_AT_ONCE,
            "clients",
            len(self.clients),
            f"at most {MOST_AT_ONCE} with a method that {why}; take another method, or fewer "
            "clients",
        )
        return tuple(sorted(self.clients))


MOST_AT_ONCE = 10_000
"""So many clients may take part in one exchange, or have a place of their own in a state."""


class State(Protocol):
    """A method's state: a frozen dataclass of numbers, strings, trees and containers of these."""

    @property
    def round(self) -> int:
        """Rounds completed. An exchange that is not a round (a clustering) leaves it as it is."""


S = TypeVar("S")


class Method(Protocol[S]):
    """A federated algorithm.

    A frozen dataclass whose fields are its parts, and pure functions of an explicit state.
    """

    @property
    def local(self) -> LocalTraining | None:
        """How clients train; None takes the data set's own recipe."""

    @property
    def codec(self) -> Codec:
        """How packets are written."""

    def init(self, setup: Setup) -> S:
        """The state before round 0."""

    def deliver(self, state: S, client: int) -> Mapping[str, Packet]:
        """What a client is sent in order to use the model now; empty if it uses its own."""

    def plan(self, state: S, cohort: Sequence[int]) -> list[Task]:
        """The tasks of the next exchange."""

    def fold(self, state: S, reports: Iterable[Report]) -> S:
        """The next state. Reports come one by one, in task order: keep sums, not reports.

        Some tasks may have none: their clients failed, or what they sent was refused.
        """

    def work(self, verb: str) -> tuple[Stage, ...]:
        """What a client does on a verb.

        After "use", ``carry["model"]`` is the client's own model.
        """


# ---- what a method may have beside that ----------------------------------------------------------


@runtime_checkable
class WithPaper(Protocol):
    """A method whose paper says what it sends."""

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """What the paper's own formula counts, both directions unless it says otherwise."""


def bytes_of_paper(
    method: AnyMethod, net: Net, clients: int, cohort: int, rounds: int
) -> int | None:
    """What the method's paper counts; None where there is none."""
    if not isinstance(method, WithPaper):
        return None
    return method.paper_bytes(net, clients, cohort, rounds)


@runtime_checkable
class WithNets(Protocol):
    """A method with more networks than one: a teacher beside a student, a generator."""

    def nets(self, net: Net) -> Mapping[str, Net]:
        """The other networks by name; ``net`` is the run's own, called "model".

        Initial weights are drawn from torch's generator, which the run has seeded.
        """


@runtime_checkable
class WithPrediction(Protocol):
    """A method whose clients predict otherwise than by one pass of one network: by a mixture."""

    def predict(self, net: Net, model: Tree, x: Tensor, carry: Carry) -> Tensor:
        """The logits for ``x``, where ``model`` is the client's (fine-tuned) model. Pure.

        ``net`` is the run's own; ``net.nets`` are all of the method's.
        """


@runtime_checkable
class WithTuning(Protocol):
    """A method with a prediction of its own that can be fine-tuned; without this it is refused."""

    @property
    def tuned(self) -> str:
        """The tree of the carry that is trained, in the network of that name, or else in "model".

        It is what ``predict`` then gets as ``model``, and finds in the carry.
        """


@dataclass(frozen=True)
class Server:
    """Where the server trains: its networks, and a seed for this exchange alone.

    Torch's global generator is seeded with it too, for dropout, and torch has one thread.
    """

    nets: Mapping[str, Net]
    seed: int


@runtime_checkable
class WithServerTraining(Protocol[S]):
    """A method that trains on the server as well, after the reports of an exchange are folded."""

    def train_server(self, state: S, server: Server) -> S:
        """The next state; a pure function of its arguments. The round stays as it is."""


@runtime_checkable
class WithFigures(Protocol):
    """A method with figures of its own."""

    def figures(self, state: Any) -> Mapping[str, float]:
        """Numbers that go into metrics.jsonl and summary.json under ``figures``."""


@runtime_checkable
class WithTrainedStart(Protocol):
    """A method whose paper starts from trained weights: a run from scratch then says that it is."""

    @property
    def starts_trained(self) -> bool:
        """Whether its paper does."""


@runtime_checkable
class WithNotes(Protocol):
    """A method that has something to say of the network it is given."""

    def notes(self, net: Net) -> list[str]:
        """Sentences for ``summary["notes"]``."""


@runtime_checkable
class EngineWithNotes(Protocol):
    """An engine that could not do all as it was asked to."""

    def notes(self, run: Run) -> list[str]:
        """What it did otherwise in this run, for ``summary["notes"]``."""


class Engine(Protocol):
    """Does the work where the data are: all that differs between a laptop, a GPU and a network."""

    @property
    def name(self) -> str:
        """What ``--engine`` calls it."""

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs: one answer for each, in job order. Several runs may travel together.

        Nothing that a client does is raised here; its task is :class:`Lost`.
        """

    def close(self) -> None:
        """Release workers and memory."""


AnyMethod = Method[Any]
Job: TypeAlias = "tuple[Run, Task]"
"""A task and the run it belongs to."""


def __getattr__(name: str) -> Any:
    return find_renamed(__name__, name)
