"""The nouns: packets, tasks, reports, clients, stages, methods and engines. Read this first.

A :class:`Method` plans :class:`Task` objects and folds :class:`Report` objects; it never sees
bytes, devices or networks. An :class:`Engine` takes tasks to where the data are and runs the
method's stages there; it never sees maths. A stage reads and writes the *carry*: a dictionary of
named trees.

The carry of a task starts as::

    carry[p]            the values of each packet p the task sends (usually "model")
    carry[p + ".mask"]  its mask, if it has one
    carry[m]            each tree m the client remembers from earlier rounds
                        (a packet of the same name wins)
    carry["settings"]   the task's numbers and the round, as tensors
    carry["client"]     the client's own labels and its task, as tensors, if it has them
    carry["aux"]        what objectives keep from step to step

The file has more than 600 lines, most of them docstrings, so that all nouns are in one place.
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
from .renamed import find_old_names
from .seeds import torch_rng
from .trees import Mask, Tree

if TYPE_CHECKING:
    from .data import ClientData, Examples
    from .nets import Net
    from .nets.layout import Layout
    from .parts.local import LocalTraining
    from .parts.objective import Objective
    from .runs.run import Run
    from .wire.codec import Codec

Carry = dict[str, Tree]
TaskSettings = Mapping[str, float | Sequence[float]]

RESERVED = {
    "settings": "the task's numbers",
    "client": "a client's personal labels and its task",
    "aux": "what objectives keep from step to step",
    "own": "the model of a client after fine-tuning",
}
"""Reserved names in the carry: no packet and no memory of a method may use them."""
OPTIMISER_PREFIX = "optimiser."
"""A client keeps optimiser states from round to round in trees whose names begin with this
(:class:`fedgrove.parts.local.LocalTraining`, ``keep_state``). No method sees these trees."""


def check_names(names: Iterable[str], what: str) -> None:
    """Refuse names of packets or memories that the carry reserves.

    Args:
        names: The names that the method uses.
        what: "a packet" or "a memory", for the error message.

    Raises:
        InputError: A name is reserved.
    """
    for name in names:
        if name in RESERVED:
            raise InputError(
                f"the method calls {what} {name!r}, which is the name of {RESERVED[name]}; give it "
                "a different name."
            )
        if name.startswith(OPTIMISER_PREFIX):
            raise InputError(
                f"the method calls {what} {name!r}, and names that begin with "
                f"{OPTIMISER_PREFIX!r} are reserved for optimiser states; give it another name."
            )
        # The carry keeps the mask of packet p under this name.
        if name.endswith(".mask") and what == "a packet":
            raise InputError(
                f"the method calls a packet {name!r}; a mask is part of its packet: "
                "Packet(values, mask)."
            )


SCORING_VERBS = ("evaluate", "finetune")
"""The verbs that every run adds to those of its method; their bytes are counted separately."""


# ---- messages between server and clients ---------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """Named tensors with an optional mask: one part of a message, before it is encoded.

    Where the mask is false the values must be +0.0, as :func:`fedgrove.trees.apply_mask` makes
    them, because the receiver reads +0.0 there. Without a mask, codecs skip +0.0 too, but keep
    -0.0.
    """

    values: Tree
    mask: Mask | None = None


@dataclass(frozen=True)
class Task:
    """A message from the server to one client: packets, numbers, and the work to do.

    ``verb`` names the work; :meth:`Method.work` returns its stages. A verb may have a qualifier, as
    in "train:evidence". Randomness depends only on the part before the colon, so that a client that
    also measures something trains exactly as it would without measuring.
    """

    to: int
    send: Mapping[str, Packet] = field(default_factory=dict)
    settings: TaskSettings = field(default_factory=dict)
    verb: str = "train"
    round: int = 0
    """The round. :mod:`fedgrove.runs.rounds` fills in this field and the next two."""
    attempt: int = 0
    """How often this exchange was abandoned before. Seeds depend on it and on the round."""
    memory: str | None = None
    """The version of the client's memory that the server accepted last. The client starts from it,
    also if it has a newer one whose report was lost or refused."""


Cost = Mapping[str, Mapping[str, int]]
"""Encoded bytes by direction ("up", "down") and part of the message."""


@dataclass(frozen=True)
class Report:
    """A message from one client to the server: the answer to a task.

    The engine fills in ``cost`` (encoded bytes), ``memory`` (the new version of the client's
    memory, if it changed) and ``macs`` (the multiply-accumulates of its work).
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
    """A task without a usable reply, and the reason. ``cost`` counts the bytes that were sent."""

    of: int
    reason: str
    """A key of :data:`LOST_REASONS`; for an answer that was refused before it was decoded, a key
    of :data:`fedgrove.runs.gate.REFUSALS`."""
    detail: str = ""
    """The reason in one sentence."""
    cost: Cost = field(default_factory=dict)


LOST_REASONS = {
    "crashed": "the client's work ended with an error",
    "diverged": "a weight or a loss that the client keeps became infinite or not a number",
    "died": "the client's worker process ended twice, or its machine cannot be reached",
    "late": "no answer within --timeout, or within --deadline on the virtual clock",
    "unreadable": "the reply could not be read",
    "unanswered": "the engine gave no answer",
    "unsent": "the task could not be sent: it is too large, or the client has not joined",
}
"""Why a task can be lost: the reason, and what it means."""

Answer = Report | Lost


# ---- a client, from its own point of view --------------------------------------------------------


REFERENCE_GMACS = 1.0
"""Billions of multiply-accumulates per second that a device of speed 1 does in training. A round
number that we chose, not a measurement."""


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows about a client: its number of training examples and its device.

    Args:
        examples: The number of training examples.
        bandwidth: The uplink in Mbit/s.
        speed: Training speed relative to a reference device (:data:`REFERENCE_GMACS`).
        memory: Device memory in bytes.
        task: The data set that the client belongs to, in a federation that mixes several. It
            selects the client's loss and groups the scores. The server side of a method must not
            read it: a method that separates tasks has to find them itself.
        downlink: The downlink in Mbit/s; None: equal to ``bandwidth``.

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
        """Uplink in Mbit/s."""
        return self.bandwidth

    @property
    def down(self) -> float:
        """Downlink in Mbit/s."""
        if self.downlink is None:
            return self.bandwidth
        return self.downlink


class Batch(NamedTuple):
    """A batch of examples; a named tuple, because ``torch.func`` can map over one.

    ``weight`` is 0 for padding. ``index`` is each example's position in the client's split;
    ``position`` is the number of the batch within the epoch.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor  # type: ignore[assignment]
    position: Tensor


FOLDS = 10
"""The folds of a client's training data (:func:`assign_folds`)."""


def assign_folds(y: Tensor) -> Tensor:
    """Return the fold of each example, from 0 to ``FOLDS - 1``.

    Every class is cut into ``FOLDS`` pieces in storage order. Examples that follow each other, such
    as overlapping windows of a recording, are therefore in the same fold, except at the ends of
    pieces. Targets that are not classes count as one class.

    >>> assign_folds(torch.zeros(20, dtype=torch.int64)).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
    """
    labels = torch.zeros(len(y), dtype=torch.int64)
    if y.dim() == 1 and not y.is_floating_point():
        labels = torch.unique(y, return_inverse=True)[1]
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    order = torch.argsort(labels, stable=True)
    in_order = labels[order]
    piece = (torch.arange(len(y)) - starts[in_order]) * FOLDS // counts[in_order]
    folds = torch.empty_like(labels)
    # Shifted by class: the first pieces of classes with few examples are not all in fold 0.
    folds[order] = (piece + in_order) % FOLDS
    return folds


@dataclass(frozen=True)
class Batches:
    """Which examples a stage sees: the split, the order, the batch size, the number of batches."""

    split: Literal["train", "validation", "test"] = "train"
    size: int = 256
    shuffle: bool = False
    limit: int | None = None
    """At most this many batches. Without ``shuffle`` these are the first rows in storage order."""
    least: int = 1
    """A last batch with fewer examples is skipped (BatchNorm cannot train on one example)."""
    fold: Literal["all", "in", "out"] = "all"
    """All examples; those of the round's fold, number ``round % FOLDS``; or those outside it. A
    client with fewer than ``FOLDS`` examples has none in the fold."""

    def seen(self, count: int) -> int:
        """Return how many of ``count`` examples one pass uses.

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

    def estimate_seen(self, examples: int) -> int:
        """Return about how many of a client's examples one pass uses, without its data."""
        inside = examples // FOLDS
        counts = {"all": examples, "in": inside, "out": examples - inside}
        return self.seen(counts[self.fold])


@dataclass(frozen=True)
class Client:
    """A client while it works on one task: its data, its memory and the network.

    ``memory`` holds the trees that the client kept from earlier tasks. ``start`` holds the
    network's initial parameters, which client and server both draw from the run's seed, so that
    they cost no bytes.
    """

    id: int
    info: ClientInfo
    data: ClientData
    memory: Mapping[str, Tree]
    net: Net
    start: Tree
    seed: int
    """The seed of this client in this task, derived from (seed, round, client, verb)."""
    nets: Mapping[str, Net] = field(default_factory=dict)
    """All networks of the method by name; ``net`` is the one called "model"."""
    round: int = 0
    """The round of the task; the fold of training data depends on it."""

    @property
    def layout(self) -> Layout:
        """The network's structure."""
        return self.net.layout

    def order(self, over: Batches, *purpose: int | str) -> Tensor:
        """Return the positions of the examples of one pass over a split, in order.

        Args:
            over: The split, batch size and whether to shuffle.
            purpose: What the pass is for; the shuffle depends on it and on ``seed`` only.
        """
        examples = getattr(self.data, over.split)
        positions = self._find_fold(examples, over.fold)
        count = len(examples) if positions is None else len(positions)
        if over.shuffle:
            generator = torch_rng(self.seed, "shuffle", *purpose)
            order = torch.randperm(count, generator=generator)
        else:
            order = torch.arange(count)
        if positions is not None:
            order = positions[order]
        return order[: over.seen(count)]

    def count_seen(self, over: Batches) -> int:
        """Return how many examples one pass uses."""
        examples = getattr(self.data, over.split)
        positions = self._find_fold(examples, over.fold)
        return over.seen(len(examples) if positions is None else len(positions))

    def _find_fold(self, examples: Examples, fold: str) -> Tensor | None:
        """Return the positions inside or outside the round's fold; None for all examples."""
        if fold == "all":
            return None
        inside = examples.folds == self.round % FOLDS
        if len(examples) < FOLDS:
            # A fold would be one example, and every example would be missed every few rounds.
            inside = torch.zeros_like(inside)
        return (inside if fold == "in" else ~inside).nonzero().flatten()

    def batches(self, over: Batches, *purpose: int | str) -> Iterator[Batch]:
        """Yield the batches of one pass over a split; arguments as for :meth:`order`."""
        examples = getattr(self.data, over.split)
        order = self.order(over, *purpose)
        if not len(order):
            # torch.split would give one empty batch.
            return
        ones: Tensor | None = None
        for position, index in enumerate(torch.split(order, over.size)):
            x, y = examples.take(index)
            if ones is None:
                ones = torch.ones(min(over.size, len(examples)), dtype=x.dtype)
            yield Batch(
                x=x,
                y=y,
                weight=ones[: len(index)],
                index=index,
                position=torch.tensor(position),
            )


# ---- the stages of a client's work ---------------------------------------------------------------


GRADIENT_PASSES = 3
"""The cost of a gradient in forward passes: one forward, and about two backward."""


@dataclass(frozen=True)
class Train:
    """Train parameters from ``carry[start]`` and store them as ``carry[end]``.

    If the carry has the mask, only unmasked parameters are trained. The stage is a pure function of
    tensors, so that an engine can run many clients in one batch: the objective must have no Python
    branch on data.
    """

    objective: Objective
    local: LocalTraining | None
    start: str = "model"
    end: str = "local"
    mask: str | None = None
    """The mask's name in the carry; None: ``start + ".mask"``, sent with the packet; "": none."""
    net: str = "model"
    """The name of the network to train, among the method's networks."""
    at: Callable[[Tree, Carry], Tree] | None = None
    """Run the forward pass at ``at(params, carry)``, for example at masked or rounded weights, and
    apply its gradient to ``params`` (a straight-through estimator). Must be pure.

    It must compare equal in every run of the method; otherwise ``batched`` cannot stack clients of
    several runs, and captures its CUDA graphs again for each run. Use a module-level function, or
    an instance of a frozen dataclass or one of its methods; not a lambda."""
    differentiate: bool = False
    """Whether the gradient is taken through ``at`` by the chain rule, as for scores that define a
    mask."""
    project: Callable[[Tree, Carry], Tree] | None = None
    """Replace the parameters by ``project(params, carry)`` before every step, for example to set
    the pruned ones to 0. Must be pure, and compare equal in every run, as ``at``. After the last
    step the parameters stay as the step left them."""
    whole: tuple[str, ...] = ()
    """Trees of the carry that keep their full width if the mask removes whole channels. All other
    trees are narrowed with the network. For example a teacher's, which ``out.whole`` runs."""
    frozen: str = ""
    """A tree of the carry that names the parameters and buffers to keep unchanged; "": none."""
    leaves_out_fold: bool = False
    """Whether the round's fold is left out, so that ``Batches("train", fold="in")`` can score what
    is trained without a hold-out of its own."""

    @property
    def mask_name(self) -> str:
        """The mask's name in the carry, which need not have one."""
        if self.mask is None:
            return f"{self.start}.mask"
        return self.mask


@dataclass(frozen=True)
class Measure:
    """Store the sum over batches of ``f(net, carry[of], batch, carry)`` as ``carry[name]``.

    ``f`` must be pure, as for :class:`Train`. On the virtual clock the stage costs ``f.passes``
    forward passes, by default one; a gradient counts as three (:data:`GRADIENT_PASSES`).
    """

    name: str
    f: Callable[[Net, Tree, Batch, Carry], Tree]
    over: Batches = Batches()
    of: str = "model"
    net: str = "model"
    """The name of the network that ``f`` gets, among the method's networks."""


@dataclass(frozen=True)
class Edit:
    """Change the carry in any way, one client at a time: choose a group, cluster weights, ..."""

    f: Callable[[Carry, Client], Carry]


@dataclass(frozen=True)
class Outcome:
    """The result of a client's work: packets to send, numbers to report, trees to remember.

    Trees in the client's memory that ``memory`` does not name stay unchanged.
    """

    give: Mapping[str, Packet] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Tree] = field(default_factory=dict)
    states: Mapping[str, Tree] = field(default_factory=dict)
    """Optimiser states that the client keeps; the engine fills them in."""


@dataclass(frozen=True)
class ExpectedPacket:
    """The form of one packet of a report: names, types and shapes of its tensors, and its mask."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    mask: Mask | Literal["own"] | None = None
    """Exactly this mask; or "own": any mask that the client chose, or none; or None: no mask."""

    @classmethod
    def of(
        cls, tree: Mapping[str, Tensor], mask: Mask | Literal["own"] | None = None
    ) -> ExpectedPacket:
        """Return the form of a packet with tensors like those of ``tree``."""
        tensors = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tree.items()}
        return cls(tensors, mask)


@dataclass(frozen=True)
class ExpectedReport:
    """What the report on a task contains: exactly these packets, and at least these numbers.

    Each number has a range (lowest, highest). Other numbers are allowed if they are finite.
    """

    packets: Mapping[str, ExpectedPacket] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    optional: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers that a report may leave out; if it has them, they must lie in their range."""


def expected_as_sent(task: Task, net: Net) -> ExpectedReport:
    """Expect the packets of the task, with other values: the default of :class:`Give`."""
    packets = {}
    for name, packet in task.send.items():
        packets[name] = ExpectedPacket.of(packet.values, packet.mask)
    return ExpectedReport(packets)


def expected_no_packets(task: Task, net: Net) -> ExpectedReport:
    """Expect a report without packets."""
    return ExpectedReport()


@dataclass(frozen=True)
class Give:
    """The last stage: what leaves the client.

    ``expected(task, net)`` declares what the report contains. The server refuses any other report
    before it reaches ``fold``.
    """

    f: Callable[[Carry, Client], Outcome]
    expected: Callable[[Task, Net], ExpectedReport] = expected_as_sent
    holds: InitVar[Callable[[Task, Net], ExpectedReport] | None] = None
    """The old name of ``expected``; to be removed in the next release (:mod:`fedgrove.renamed`)."""

    def __post_init__(self, holds: Callable[[Task, Net], ExpectedReport] | None) -> None:
        if holds is not None:
            message = (
                "holds= of Give is now expected=; the old name will be removed in the next release."
            )
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "expected", holds)


Stage = Train | Measure | Edit | Give


# ---- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What the server knows before the first round.

    ``fresh(j)`` draws the j-th alternative set of initial parameters.
    """

    params: Tree
    net: Net
    clients: Mapping[int, ClientInfo]
    rounds: int
    fresh: Callable[[int], Tree]
    nets: Mapping[str, Net] = field(default_factory=dict)
    """All networks of the method by name; ``net`` is the one called "model"."""
    sample: Callable[[int], tuple[int, ...]] | None = None
    """``sample(n)`` draws n clients from the run's seed; None: take the first n."""
    cohort: int = 1
    """The number of clients that take part in a round."""

    @property
    def layout(self) -> Layout:
        """The network's structure."""
        return self.net.layout

    def some_clients(self, most: int) -> tuple[int, ...]:
        """Return all clients in order, or a sample of ``most`` if there are more."""
        if len(self.clients) <= most:
            return tuple(sorted(self.clients))
        if self.sample is None:
            return tuple(islice(self.clients, most))
        return self.sample(most)

    def all_clients(self, why: str) -> tuple[int, ...]:
        """Return all clients in order, for a method that needs all of them.

        Args:
            why: What the method does that needs all clients, for the error message.

        Raises:
            InputError: There are more than :data:`MOST_AT_ONCE` clients.
        """
        check(
            len(self.clients) <= MOST_AT_ONCE,
            "clients",
            len(self.clients),
            f"at most {MOST_AT_ONCE} with a method that {why}; use a different method, or fewer "
            "clients",
        )
        return tuple(sorted(self.clients))


MOST_AT_ONCE = 10_000
"""The most clients that may take part in one exchange, or have their own entry in a state."""


class State(Protocol):
    """A method's state: a frozen dataclass of numbers, strings, trees and containers of these."""

    @property
    def round(self) -> int:
        """The number of completed rounds. An exchange that is not a round, such as one that forms
        groups, does not change it."""


S = TypeVar("S")


class Method(Protocol[S]):
    """A federated algorithm: a frozen dataclass whose fields are its parts.

    All functions are pure: what changes from round to round is in the state.
    """

    @property
    def local(self) -> LocalTraining | None:
        """How clients train; None: as the data set recommends."""

    @property
    def codec(self) -> Codec:
        """How packets are encoded."""

    def init(self, setup: Setup) -> S:
        """Return the state before round 0."""

    def deliver(self, state: S, client: int) -> Mapping[str, Packet]:
        """Return the packets that a client needs to use the current model.

        They are empty if the client uses a model that it keeps itself.
        """

    def plan(self, state: S, cohort: Sequence[int]) -> list[Task]:
        """Return the tasks of the next exchange, at most one for each client.

        Args:
            state: The current state.
            cohort: The clients drawn for this round. The tasks may go to other clients too.
        """

    def fold(self, state: S, reports: Iterable[Report]) -> S:
        """Return the next state.

        Args:
            state: The state that the tasks were planned from.
            reports: The reports in task order, one by one: keep sums, not reports. Tasks whose
                clients failed, and reports that were refused, are missing.
        """

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Return the stages of a client's work on a verb; called once for each run and verb.

        The work of every verb ends with :class:`Give`, except "use": after its stages,
        ``carry["model"]`` is the model that the client uses.
        """


# ---- what a method may have in addition ----------------------------------------------------------


@runtime_checkable
class WithPaper(Protocol):
    """A method whose paper has a formula for the bytes that it sends."""

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Return the bytes of a run by the paper's formula, in both directions unless noted."""


def count_paper_bytes(
    method: AnyMethod, net: Net, clients: int, cohort: int, rounds: int
) -> int | None:
    """Return the bytes of a run by the formula of the method's paper; None without a formula."""
    if not isinstance(method, WithPaper):
        return None
    return method.paper_bytes(net, clients, cohort, rounds)


@runtime_checkable
class WithNets(Protocol):
    """A method with several networks: for example a teacher and a student, or a generator."""

    def nets(self, net: Net) -> Mapping[str, Net]:
        """Return the additional networks by name; ``net`` is the run's network, called "model".

        Draw initial weights from torch's global generator, which the run has seeded.
        """


@runtime_checkable
class WithPrediction(Protocol):
    """A method whose clients predict with more than one pass of one network, such as a mixture."""

    def predict(self, net: Net, model: Tree, x: Tensor, carry: Carry) -> Tensor:
        """Return the logits for ``x``. Must be pure.

        Args:
            net: The run's network; ``net.nets`` are all networks of the method.
            model: The client's model, fine-tuned if the run fine-tunes.
            x: The inputs.
            carry: The carry after the stages of "use".
        """


@runtime_checkable
class WithTuning(Protocol):
    """A method with ``predict`` that can be fine-tuned. Without this, fine-tuning it is refused."""

    @property
    def tuned(self) -> str:
        """The name of the tree in the carry to fine-tune; ``predict`` gets it as ``model``.

        It is trained in the network of that name if there is one, otherwise in "model".
        """


@dataclass(frozen=True)
class Server:
    """What the server trains with: the method's networks, and a seed for this exchange.

    Torch's global generator is seeded with it as well, for dropout, and torch uses one thread.
    """

    nets: Mapping[str, Net]
    seed: int


@runtime_checkable
class WithServerTraining(Protocol[S]):
    """A method that also trains on the server, after the reports of an exchange are folded."""

    def train_server(self, state: S, server: Server) -> S:
        """Return the next state, with the same round. Must be pure."""


@runtime_checkable
class WithChangingDevices(Protocol[S]):
    """A method whose server updates what it knows about devices during the run."""

    def follow_devices(self, state: S, clients: Mapping[int, ClientInfo]) -> S:
        """Return the state for an exchange that is about to begin, with the same round.

        It is called before every ``plan`` of a run with a bandwidth trace. Must be pure.

        Args:
            state: The current state.
            clients: What the server now knows about the clients whose bandwidth may change.
        """


@runtime_checkable
class WithServerMetrics(Protocol):
    """A method that reports numbers about its state, such as the number of groups."""

    def server_metrics(self, state: Any) -> Mapping[str, float]:
        """Return finite numbers by name; metrics.jsonl and summary.json have them as "figures"."""


@runtime_checkable
class WithTrainedStart(Protocol):
    """A method whose paper may start from trained weights; a run from scratch then has a note."""

    @property
    def starts_trained(self) -> bool:
        """Whether the paper starts from trained weights."""


@runtime_checkable
class WithLaterMessages(Protocol):
    """A method whose clients send in a later exchange what its first one does not show.

    With ``--privacy`` a run looks at the first exchange before it begins; such a method is refused
    there too.
    """

    @property
    def sends_later(self) -> str:
        """What its clients do that no noise can protect, as "send ..."; "" if nothing."""


@runtime_checkable
class WithNotes(Protocol):
    """A method with notes about how it treats a network."""

    def notes(self, net: Net) -> list[str]:
        """Return sentences for ``summary["notes"]``."""


@runtime_checkable
class EngineWithNotes(Protocol):
    """An engine with notes about what it did differently from what was requested."""

    def notes(self, run: Run) -> list[str]:
        """Return sentences about this run for ``summary["notes"]``."""


class Engine(Protocol):
    """Runs tasks where the data are: in this process, on a GPU or over a network."""

    @property
    def name(self) -> str:
        """The engine's name, as ``--engine`` takes it."""

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs and yield one answer for each, in job order.

        The jobs may belong to several runs. An error in a client's work is not raised: the answer
        to its task is :class:`Lost`.
        """

    def close(self) -> None:
        """Release workers and memory."""


AnyMethod = Method[Any]
Job: TypeAlias = "tuple[Run, Task]"
"""A task and the run it belongs to."""


__getattr__ = find_old_names(__name__)
