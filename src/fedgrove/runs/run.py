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
from ..nets import Net
from ..nets import initial_weights as given
from ..nets.freeze import check_share
from ..nets.freeze import freeze as freeze_layers
from ..nets.initial_weights import Origin
from ..parts.local import SGD, Adam, LocalTraining
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
"""So many clients are all scored unless told otherwise."""
SCORED_OF_MANY = 1000
"""How many are scored where there are more."""


@dataclass(frozen=True, eq=False)
class Run:
    """A method on a federation: all that decides the result, and where clients keep memory."""

    method: AnyMethod
    federation: Federation
    net: Net
    memory: Memory
    rounds: int = 20
    cohort: int = 10
    seed: int = 0
    finetune: tuple[int, ...] = (0,)
    score_on: int | None = None
    """How many clients are scored, drawn from the seed; 0: none; None: all, or 1000 of many."""
    quorum: float = 0.0
    """The share of an exchange's clients that must report; at least one must."""
    deadline: float | None = None
    """Virtual seconds after which an exchange ends; who is later is lost (:mod:`.clock`)."""
    gate: Gate = field(default_factory=Gate)
    faults: Faults = NO_FAULTS
    privacy: Privacy | None = None
    """What is done to whatever leaves a client; None: nothing (:mod:`.privacy`)."""
    origin: Origin | None = None
    """The file that the net's weights come from; None: they are drawn from the seed."""
    frozen: float = 0.0
    """The share of the net's layers that is kept as it is."""
    per_task: bool = False
    """Whether true tasks are kept apart, the method once for each (:mod:`.per_task`)."""
    known_state: KnownState = field(default_factory=KnownState)
    lengths: RecentLengths = field(default_factory=RecentLengths)

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
        check(self.score_on is None or self.score_on >= 0, "score_on", self.score_on, "0 or more")
        check(0 <= self.quorum <= 1, "quorum", self.quorum, "a share between 0 and 1")
        deadline_is_valid = self.deadline is None or 0 < self.deadline < math.inf
        check(deadline_is_valid, "deadline", self.deadline, "above 0 virtual seconds")
        if self.method.local is None:
            recipe = recipe_of(self.federation.defaults)
            # The class is frozen; this is its one default that depends on another field.
            object.__setattr__(self, "method", with_recipe(self.method, recipe))

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the fields. What was computed from them is computed again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def infos(self) -> Mapping[int, ClientInfo]:
        """What the server knows of each client."""
        return self.federation.infos

    def sample(self, most: int) -> tuple[int, ...]:
        """All clients, or so many of them, drawn from the seed, in order.

        A smaller sample is part of a larger one: those who are scored have been asked by a method
        that groups a sample of the clients, unless it asks fewer.
        """
        if most >= len(self.infos):
            return tuple(self.federation.ids)
        order = seeds.numpy_rng(self.seed, "sample").permutation(len(self.infos))
        return tuple(sorted(self.federation.ids[int(place)] for place in order[:most]))

    @cached_property
    def scored(self) -> tuple[int, ...]:
        """The clients that are scored, the same ones every time; all of them unless many."""
        if self.score_on is None:
            return self._usual_sample
        if self.score_on >= len(self.infos):
            return tuple(self.infos)
        return self.sample(self.score_on)

    @cached_property
    def served(self) -> tuple[int, ...]:
        """The clients whose models are kept: the scored ones, or some if none is scored."""
        return self.scored or self._usual_sample

    @property
    def _usual_sample(self) -> tuple[int, ...]:
        if len(self.infos) <= SCORED_UP_TO:
            return tuple(self.infos)
        return self.sample(SCORED_OF_MANY)

    @cached_property
    def params(self) -> Tree:
        """The network's initial parameters: both sides draw them from the seed, or have a file."""
        return trees.pack_leaves(self.net.params())

    @cached_property
    def nets(self) -> dict[str, Net]:
        """All networks of the method by name; both sides draw their weights from the seed."""
        if not isinstance(self.method, WithNets):
            return {"model": self.net}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.derive(self.seed, "nets"))
            others = self.method.nets(self.net)
        for name, net in others.items():
            if name == "model":
                raise InputError(
                    "the method calls a net of its own 'model', which is the name of the run's "
                    "net; give it another name."
                )
            check(isinstance(net, Net), f"net {name!r} of the method", net, "a fedgrove.nets.Net")
            net.problem = self.net.problem
        nets = {**others, "model": self.net}
        # Whoever is handed one of them reaches all: objectives, predictions, `expected`.
        for net in nets.values():
            net.nets = nets
        return nets

    def net_named(self, name: str) -> Net:
        """The network of a stage."""
        if name not in self.nets:
            raise unknown("net of the method", name, self.nets)
        return self.nets[name]

    @cached_property
    def start(self) -> Setup:
        """What the server knows before the first round."""

        def fresh(j: int) -> Tree:
            drawn = self.net.redraw(seeds.derive(self.seed, "net", j))
            if self.origin is None:
                return drawn
            # What was given is not thrown away: another head is enough to tell models apart.
            head = self.net.layout.head
            return {name: drawn[name] if name in head else self.params[name] for name in drawn}

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
        """What plans and folds: the method, or the method once for each task."""
        if not self.per_task:
            return self.method
        return PerTask(self.method, self.task_of, self.federation.ids)

    @property
    def label(self) -> str:
        """What tables call the method."""
        name = methods.name_of(self.method)
        return f"{name} per task" if self.per_task else name

    @cached_property
    def initial_state(self) -> Any:
        """The method's state before round 0, made once."""
        return self.server.init(self.start)

    def client(self, task: Task, memory: dict[str, Tree]) -> Client:
        """The client a task is for, with what it remembers."""
        data = self.federation.client(task.to, task.round)
        # Without its qualifier ("train:evidence" -> "train"), so that a client which measures
        # something beside its training draws what it would draw without.
        purpose = task.verb.partition(":")[0]
        seed = seeds.derive(self.seed, task.round, task.to, purpose, *attempt_seed(task.attempt))
        return Client(task.to, data.info, data, memory, self.net, self.params, seed, self.nets)

    def task_of(self, client: int, round: int) -> str:
        """The task of a client in a mixed federation, which it may switch by round; else empty."""
        return self.federation.info(client, round).task

    def marks(self, client: Client) -> Tree:
        """What the carry holds of a client: its own labels and its task, where there are such."""
        federation = self.federation
        return problems.client_marks(
            federation.problem, federation.classes, client.data.labels, client.info.task
        )

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
                        f"the work of {verb!r} holds {stage!r}, which is no stage; it must be a "
                        "tuple of Train, Measure, Edit and Give."
                    )
            self._stages_by_verb[verb] = stages
        return self._stages_by_verb[verb]

    @cached_property
    def _stages_by_verb(self) -> dict[str, tuple[Stage, ...]]:
        return {}

    def _make_stages(self, verb: str) -> tuple[Stage, ...]:
        if verb == "evaluate":
            return scoring.evaluate_stages(self.method, self.work("use"))
        if verb == "finetune":
            return scoring.finetune_stages(self.method, self.work("use"), self.finetune, self.nets)
        with explain_errors(self.method, f"work({verb!r})"):
            return self.method.work(verb)

    def expected(self, task: Task) -> ExpectedReport:
        """What the answer to a task holds, as its last stage says."""
        stages = self.work(task.verb)
        last = stages[-1] if stages else None
        if not isinstance(last, Give):
            raise EngineError(f"the work of {task.verb!r} does not end with Give: nothing leaves.")
        with explain_errors(self.method, "expected"):
            return last.expected(task, self.net)

    def deliver_to(self, state: Any, clients: Iterable[int]) -> dict[int, Mapping[str, Packet]]:
        """Return the packets that each of some clients needs to use the current model."""
        with explain_errors(self.method, "deliver"):
            return {client: self.server.deliver(state, client) for client in clients}


def attempt_seed(attempt: int) -> tuple[int, ...]:
    """What an exchange that is tried again adds to its seeds; nothing at the first attempt."""
    return (attempt,) if attempt else ()


def recipe_of(defaults: Defaults) -> LocalTraining:
    """How a data set trains a client by default."""
    if defaults.optimiser == "SGD":
        optimiser = SGD(defaults.lr, defaults.momentum, defaults.weight_decay)
        return LocalTraining(defaults.epochs, defaults.batch, optimiser)
    adam = Adam(defaults.lr, weight_decay=defaults.weight_decay)
    return LocalTraining(defaults.epochs, defaults.batch, adam)


def with_recipe(method: AnyMethod, local: LocalTraining) -> AnyMethod:
    """The same method with another training recipe."""
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
    score_on: int | None = None,
    quorum: float = 0.0,
    deadline: float | None = None,
    gate: Gate = Gate(),
    faults: Faults = NO_FAULTS,
    privacy: Privacy | None = None,
    init: str | None = None,
    freeze: float = 0.0,
    per_task: bool = False,
    of_one_client: bool = False,
) -> Run:
    """A run with the data set's defaults for what is None. Nothing is written.

    The method makes its initial state here, and loss and metric are tried, so that what is refused
    is refused before a run folder is made. With ``of_one_client`` the run is a client's own half of
    it, on a machine that has no other's data: the first state is the server's, and is not made.
    """
    defaults = federation.defaults
    if not federation.clients:
        raise InputError(
            f"{federation.name} has no clients left; ask for fewer clients or another partition."
        )
    if net is None:
        net = defaults.net
    if rounds is None:
        rounds = defaults.rounds
    for k, versions in federation.later.items():
        begin, _ = versions[-1]
        if begin >= rounds:
            raise InputError(
                f"client {k} switches after {begin} rounds, and the run has {rounds}; it must "
                "train on its new data: let it switch earlier, or take more rounds."
            )
    if cohort is None:
        cohort = min(defaults.cohort, len(federation.clients))
    if of_one_client:
        # Whoever else is asked, the server knows.
        cohort = 1
    check_share(freeze)
    module = nets.build(net, federation.shape, federation.classes, seed)
    origin = None
    if init is not None:
        origin, weights = given.read(init)
        given.put(origin, weights, module, federation.shape)
    if freeze:
        freeze_layers(module, federation.shape, freeze)
    run = Run(
        method=method,
        federation=federation,
        net=Net(module, federation.shape, federation.problem),
        memory=memory,
        rounds=rounds,
        cohort=cohort,
        seed=seed,
        finetune=tuple(finetune),
        score_on=score_on,
        quorum=quorum,
        deadline=deadline,
        gate=gate,
        faults=faults,
        privacy=privacy,
        origin=origin,
        frozen=freeze,
        per_task=per_task,
    )
    if not of_one_client:
        check_fit(run)
    check_stages(run)
    check_problem(run)
    check_protected(run)
    return run
