"""One model for all clients: the state, the tasks and the mean that many methods share.

Methods of one model differ in how clients train and in what stays on the client; what the server
does is here once, as functions of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .. import trees
from ..core import (
    Carry,
    Client,
    ExpectedPacket,
    ExpectedReport,
    Outcome,
    Packet,
    Report,
    Setup,
    Task,
)
from ..nets import Net
from ..trees import Mask, Tree
from .aggregate import Averaging
from .server import ServerOptimiser, ServerState, begin_server, step_server


@dataclass(frozen=True)
class OneModel:
    """A method's state: the round and the one model."""

    round: int
    model: Tree
    server: ServerState = field(default_factory=dict, kw_only=True, metadata={"optional": True})
    """What the server's optimiser remembers; nothing without one."""


@dataclass(frozen=True)
class SparseModel(OneModel):
    """A method's state: the round, the one model and its mask."""

    mask: Mask
    """Empty while nothing is pruned."""


State = TypeVar("State", bound=OneModel)


def initial_model(
    setup: Setup, server: ServerOptimiser | None = None, model: Tree | None = None
) -> OneModel:
    """Start a one-model method at the network's initial parameters.

    Args:
        setup: What the server knows.
        server: The server's optimiser.
        model: The part of the model that is shared; None: all of it.
    """
    if model is None:
        model = setup.params
    params = [name for name in setup.layout.params if name in model]
    return OneModel(0, model, server=begin_server(server, trees.pick(model, params)))


def deliver_model(state: OneModel) -> Mapping[str, Packet]:
    """Deliver a one-model method's model, equal for every client."""
    return {"model": Packet(state.model)}


def deliver_sparse(state: SparseModel) -> Mapping[str, Packet]:
    """Deliver a one-model method's model, under its mask once it has one."""
    return {"model": Packet(state.model, state.mask or None)}


def train_cohort(state: OneModel, cohort: Sequence[int]) -> list[Task]:
    """Plan a one-model method: the cohort is sent the model and trains."""
    return [Task(client, deliver_model(state)) for client in cohort]


def average(
    state: State,
    reports: Iterable[Report],
    rule: Averaging,
    server: ServerOptimiser | None = None,
) -> State:
    """Fold a one-model method: the mean of the reported models by a rule, report by report.

    A server with an optimiser moves its model towards that mean.
    """
    mean = rule.start(state.model)
    for report in reports:
        mean.add(report.give["model"].values, report.examples)
    model, kept = step_server(server, state.model, mean.value(), state.server)
    return replace(state, round=state.round + 1, model=model, server=kept)


def add_mean_update(
    state: State,
    reports: Iterable[Report],
    rule: Averaging,
    server: ServerOptimiser | None = None,
) -> State:
    """Fold a one-model method: the model, moved by the mean of the reported updates.

    A server with an optimiser moves it by what that makes of the mean.
    """
    # From nothing: the reports are updates of the model, not models.
    mean = rule.start()
    for report in reports:
        mean.add(report.give["update"].values, report.examples)
    update = mean.value()
    mean_model = {name: w + update[name].to(w.dtype) for name, w in state.model.items()}
    model, kept = step_server(server, state.model, mean_model, state.server)
    return replace(state, round=state.round + 1, model=model, server=kept)


def send_model(carry: Carry, client: Client) -> Outcome:
    """Give stage of a one-model method: the client sends what it trained."""
    return Outcome({"model": Packet(carry["local"])})


def send_sparse(carry: Carry, client: Client) -> Outcome:
    """Give stage of a sparse method: the client sends what it trained, under its mask."""
    return Outcome({"model": Packet(carry["local"], carry.get("model.mask"))})


def sent_with_own_mask(task: Task, net: Net) -> ExpectedReport:
    """Expect in a report the packets of the task, each under a mask that the client found."""
    packets = {}
    for name, packet in task.send.items():
        packets[name] = ExpectedPacket.of(packet.values, "own")
    return ExpectedReport(packets)


def expected_update(task: Task, net: Net) -> ExpectedReport:
    """Expect in a report an update of the model that was sent, under its mask."""
    model = task.send["model"]
    return ExpectedReport({"update": ExpectedPacket.of(model.values, model.mask)})


def use_network_start(carry: Carry, client: Client) -> Carry:
    """Part of many methods: the model is the network's start, which both sides draw."""
    return {**carry, "model": client.start}


def dense_bytes(numbers: int, cohort: int, rounds: int) -> int:
    """Count a paper's bytes: ``numbers`` float32 values down and up, per client and round."""
    return 2 * 4 * numbers * cohort * rounds
