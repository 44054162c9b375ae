"""A run: a method on a federation, and everything else that decides the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from .. import methods, nets, problems, seeds, trees
from ..core import (
    AnyMethod,
    Client,
    ClientInfo,
    ExpectedReport,
    Give,
    Packet,
    Setup,
    Stage,
    Task,
    WithNets,
)
from ..data import Defaults, Federation
from ..errors import EngineError, InputError, check, unknown
from ..nets import Net, initial_weights
from ..nets.freeze import check_frozen_share
from ..nets.freeze import freeze as freeze_layers
from ..nets.initial_weights import WeightsOrigin
from ..parts.augment import WORD
from ..parts.local import DRAWS, SGD, Adam, LocalTraining
from ..trees import Tree
from ..wire.known_state import KnownState
from . import scoring
from .checks import check_fit, check_problem, check_stages
from .faults import NO_FAULTS, Faults
from .gate import Gate, RecentLengths
from .guard import explain_errors
from .memory import Memory
from .per_task import PerTask
from .privacy import Privacy, check_protected

SCORED_UP_TO = 10_000
"""By default all clients are scored if there are at most this many."""
SCORED_OF_MANY = 1000
"""By default this many are scored if there are more."""


@dataclass(frozen=True, eq=False)
class Run:
    """A method on a federation, with everything else that decides the result.

    :func:`build` makes one with the data set's defaults.
    """

    method: AnyMethod
    federation: Federation
    net: Net
    memory: Memory
    """Where clients keep what they remember."""
    rounds: int = 20
    cohort: int = 10
    """The number of clients that take part in a round."""
    seed: int = 0
    finetune: tuple[int, ...] = (0,)
    """Numbers of epochs of fine-tuning to score after the last round."""
    score_on: int | None = None
    """How many clients are scored, drawn from the seed; 0: none; None: all, or 1000 of many."""
    quorum: float = 0.0
    """The share of an exchange's clients that must report; at least one must."""
    deadline: float | None = None
    """Virtual seconds after which an exchange ends; late clients are dropped (:mod:`.clock`)."""
    gate: Gate = field(default_factory=Gate)
    faults: Faults = NO_FAULTS
    privacy: Privacy | None = None
    """How what leaves a client is protected; None: not at all (:mod:`.privacy`)."""
    origin: WeightsOrigin | None = None
    """The file that the net's weights come from; None: they are drawn from the seed."""
    frozen: float = 0.0
    """The share of the net's layers that is not trained."""
    per_task: bool = False
    """Whether the method runs once for each true task (:mod:`.per_task`)."""
    known_state: KnownState = field(default_factory=KnownState)
    """The masks that clients are known to have; codecs refer to them."""
    lengths: RecentLengths = field(default_factory=RecentLengths)
    """The lengths of recent updates, for the gate."""

    def __post_init__(self) -> None:
        clients = len(self.federation.clients)
        check(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        check(
            1 <= self.cohort <= clients,
            "cohort",
            self.cohort,
            f"between 1 and the number of clients, {clients}",
        )
        lengths_are_valid = bool(self.finetune) and min(self.finetune) >= 0
        check(lengths_are_valid, "finetune", self.finetune, "lengths of 0 or more epochs")
        if 0 not in self.finetune:
            # What is reported under the plain keys is always the scores before fine-tuning.
            object.__setattr__(self, "finetune", (0, *self.finetune))
        check(self.score_on is None or self.score_on >= 0, "score_on", self.score_on, "0 or more")
        check(0 <= self.quorum <= 1, "quorum", self.quorum, "a share between 0 and 1")
        deadline_is_valid = self.deadline is None or 0 < self.deadline < math.inf
        check(deadline_is_valid, "deadline", self.deadline, "above 0 virtual seconds")
        if self.method.local is None:
            recipe = make_recipe(self.federation.defaults)
            # The class is frozen; this is its one default that depends on another field.
            object.__setattr__(self, "method", replace_recipe(self.method, recipe))

    def __getstate__(self) -> dict[str, Any]:
        # Only the fields are pickled. What was computed from them is computed again.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    # ---- clients ---------------------------------------------------------------------------------

    @cached_property
    def infos(self) -> Mapping[int, ClientInfo]:
        """What the server of the run knows about each client."""
        return self.federation.infos

    def sample(self, most: int) -> tuple[int, ...]:
        """Return all clients of the run, or ``most`` of them drawn from the seed, in order.

        A smaller sample is part of a larger one: the scored clients are among those that a method
        groups, unless it groups fewer.
        """
        if most >= len(self.infos):
            return tuple(self.federation.ids)
        order = seeds.numpy_rng(self.seed, "sample").permutation(len(self.infos))
        return tuple(sorted(self.federation.ids[int(place)] for place in order[:most]))

    @cached_property
    def scored(self) -> tuple[int, ...]:
        """The clients that the run scores, in every round the same ones."""
        if self.score_on is None:
            return self._default_sample
        if self.score_on >= len(self.infos):
            return tuple(self.infos)
        return self.sample(self.score_on)

    @cached_property
    def served(self) -> tuple[int, ...]:
        """The clients whose models the run keeps: the scored ones, or else a sample."""
        return self.scored or self._default_sample

    @property
    def _default_sample(self) -> tuple[int, ...]:
        if len(self.infos) <= SCORED_UP_TO:
            return tuple(self.infos)
        return self.sample(SCORED_OF_MANY)

    def client(self, task: Task, memory: dict[str, Tree]) -> Client:
        """Return the client of the run that a task is for, with what it remembers."""
        data = self.federation.client(task.to, task.round)
        # Without its qualifier ("train:evidence" -> "train"), so that a client which measures
        # something in addition draws what it would draw without.
        purpose = task.verb.partition(":")[0]
        seed = seeds.derive(self.seed, task.round, task.to, purpose, *attempt_seed(task.attempt))
        return Client(
            task.to, data.info, data, memory, self.net, self.params, seed, self.nets, task.round
        )

    def task_of(self, client: int, round: int) -> str:
        """Return a client's task in a mixed federation, which it may switch by round; else ""."""
        return self.federation.info(client, round).task

    def marks(self, client: Client) -> Tree:
        """Return ``carry["client"]``: the client's own labels and its task, if it has them.

        If the recipe augments images, also the number that their draws depend on.
        """
        federation = self.federation
        marks = problems.client_marks(
            federation.problem, federation.classes, client.data.labels, client.info.task
        )
        local = self.method.local
        if local is not None and local.augment is not None:
            marks[DRAWS] = torch.tensor(seeds.derive(client.seed, DRAWS) & WORD)
        return marks

    # ---- networks and the server's state ---------------------------------------------------------

    @cached_property
    def params(self) -> Tree:
        """The initial parameters of the run's network, drawn from the seed on both sides."""
        return trees.pack_leaves(self.net.params())

    @cached_property
    def nets(self) -> dict[str, Net]:
        """All networks of the run's method by name; server and clients draw their weights."""
        if not isinstance(self.method, WithNets):
            return {"model": self.net}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.derive(self.seed, "nets"))
            others = self.method.nets(self.net)
        for name, net in others.items():
            if name == "model":
                raise InputError(
                    "the method calls one of its nets 'model', which is the name of the run's net; "
                    "give it a different name."
                )
            check(isinstance(net, Net), f"net {name!r} of the method", net, "a fedgrove.nets.Net")
            net.problem = self.net.problem
        nets = {**others, "model": self.net}
        # Objectives, predictions and `expected` get one of them, and reach all through it.
        for net in nets.values():
            net.nets = nets
        return nets

    def net_named(self, name: str) -> Net:
        """Return the network of the run that a stage names."""
        if name not in self.nets:
            raise unknown("net of the method", name, self.nets)
        return self.nets[name]

    @cached_property
    def setup(self) -> Setup:
        """What the server knows before the first round of the run."""

        def fresh(j: int) -> Tree:
            drawn = self.net.redraw(seeds.derive(self.seed, "net", j))
            if self.origin is None:
                return drawn
            # Weights from a file are kept: another head is enough to tell models apart.
            head = self.net.layout.head
            params = {}
            for name in drawn:
                params[name] = drawn[name] if name in head else self.params[name]
            return params

        return Setup(
            params=self.params,
            net=self.net,
            clients=self.infos,
            rounds=self.rounds,
            fresh=fresh,
            nets=self.nets,
            sample=self.sample,
            cohort=self.cohort,
        )

    @cached_property
    def server(self) -> AnyMethod | PerTask:
        """What plans and folds in the run: the method, or the method once for each task."""
        if not self.per_task:
            return self.method
        return PerTask(self.method, self.task_of, self.federation.ids)

    @property
    def label(self) -> str:
        """The method's name in the tables and files of this run."""
        name = methods.name_of(self.method)
        return f"{name} per task" if self.per_task else name

    @cached_property
    def initial_state(self) -> Any:
        """The method's state before round 0 of the run, made once."""
        return self.server.init(self.setup)

    def deliver_to(self, state: Any, clients: Iterable[int]) -> dict[int, Mapping[str, Packet]]:
        """Return the packets that clients of the run need to use the current model."""
        with explain_errors(self.method, "deliver"):
            return {client: self.server.deliver(state, client) for client in clients}

    # ---- the work of a verb ----------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Return the stages of a verb: one of the method's, or of the two that every run adds.

        They are made once for each run and verb.

        Raises:
            EngineError: The method returned something else than stages.
        """
        if verb not in self._stages_by_verb:
            stages = self._make_stages(verb)
            for stage in stages:
                if not isinstance(stage, Stage):
                    raise EngineError(
                        f"the work of {verb!r} contains {stage!r}, which is not a stage; it must "
                        "be a tuple of Train, Measure, Edit and Give."
                    )
            self._stages_by_verb[verb] = stages
        return self._stages_by_verb[verb]

    @cached_property
    def _stages_by_verb(self) -> dict[str, tuple[Stage, ...]]:
        return {}

    def _make_stages(self, verb: str) -> tuple[Stage, ...]:
        if verb == "evaluate":
            return scoring.evaluate_stages(self.method, self.work("use"), self.federation.classes)
        if verb == "finetune":
            return scoring.finetune_stages(
                self.method, self.work("use"), self.finetune, self.nets, self.federation.classes
            )
        with explain_errors(self.method, f"work({verb!r})"):
            return self.method.work(verb)

    def expected(self, task: Task) -> ExpectedReport:
        """Return what the report on a task contains, as the last stage of its work declares.

        Raises:
            EngineError: The work does not end with ``Give``.
        """
        stages = self.work(task.verb)
        last = stages[-1] if stages else None
        if not isinstance(last, Give):
            raise EngineError(
                f"the work of {task.verb!r} does not end with Give, so nothing is sent."
            )
        with explain_errors(self.method, "expected"):
            return last.expected(task, self.net)


def attempt_seed(attempt: int) -> tuple[int, ...]:
    """Return what another attempt at an exchange adds to its seeds; nothing for the first."""
    return (attempt,) if attempt else ()


def make_recipe(defaults: Defaults) -> LocalTraining:
    """Return a run's default training recipe, from the data set."""
    optimiser: SGD | Adam = Adam(defaults.lr, weight_decay=defaults.weight_decay)
    if defaults.optimiser == "SGD":
        optimiser = SGD(defaults.lr, defaults.momentum, defaults.weight_decay)
    return LocalTraining(defaults.epochs, defaults.batch, optimiser)


def replace_recipe(method: AnyMethod, local: LocalTraining) -> AnyMethod:
    """Return the run's method with another training recipe."""
    changed: AnyMethod = replace(method, local=local)  # type: ignore[type-var]
    return changed


def build(
    method: AnyMethod,
    federation: Federation,
    memory: Memory,
    *,
    net: Any = None,
    rounds: int | None = None,
    cohort: int | None = None,
    seed: int = 0,
    finetune: Sequence[int] = (0,),
    init: str | None = None,
    freeze: float = 0.0,
    client_only: bool = False,
    **others: Any,
) -> Run:
    """Make a run and check it, before anything is written.

    Args:
        method: The method.
        federation: The clients and their data.
        memory: Where clients keep what they remember.
        net: A name, ``file.py:Class`` or a module; None: as the data set recommends.
        rounds: The number of rounds; None: as the data set recommends.
        cohort: The number of clients in a round; None: as the data set recommends.
        seed: All randomness follows from it.
        finetune: Numbers of epochs of fine-tuning to score after the last round.
        init: A file of weights to start from; ``:body`` at its end leaves out the head.
        freeze: The share of the net's layers, from the first on, that is not trained.
        client_only: Whether the run is for one client on its own machine: the first state is the
            server's, and is not made.
        **others: Other fields of :class:`Run`.

    Raises:
        InputError: The method, the network, the loss or the metric does not fit.
    """
    defaults = federation.defaults
    if not federation.clients:
        raise InputError(
            f"{federation.name} has no clients left; use fewer clients or a different partition."
        )
    if rounds is None:
        rounds = defaults.rounds
    for k, versions in federation.later.items():
        begin, _ = versions[-1]
        if begin >= rounds:
            raise InputError(
                f"client {k} switches after {begin} rounds, and the run has {rounds}; it must "
                "train on its new data: let it switch earlier, or take more rounds."
            )
    if client_only:
        # Which others take part, only the server knows.
        cohort = 1
    if cohort is None:
        cohort = min(defaults.cohort, len(federation.clients))
    check_frozen_share(freeze)
    if net is None:
        net = defaults.net
    module = nets.build(net, federation.shape, federation.classes, seed)
    origin = None
    if init is not None:
        origin, weights = initial_weights.read_weights(init)
        initial_weights.load_weights(origin, weights, module, federation.shape)
    if freeze:
        freeze_layers(module, federation.shape, freeze)
    run = Run(
        method,
        federation,
        Net(module, federation.shape, federation.problem),
        memory,
        rounds,
        cohort,
        seed,
        tuple(finetune),
        origin=origin,
        frozen=freeze,
        **others,
    )
    if not client_only:
        check_fit(run)
    check_stages(run)
    check_problem(run)
    check_protected(run)
    return run
