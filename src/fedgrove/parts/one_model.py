"""One model for all clients: the state, the tasks and the mean that many methods share.

Methods of one model differ in how clients train and in what stays on the client; what the server
does stands here once, as functions of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from ..trees import Tree
from .aggregate import Averaging


@dataclass(frozen=True)
class OneModel:
    """A method's state: the round and the one model."""

    round: int
    model: Tree


def initial_model(setup: Setup) -> OneModel:
    """Start a one-model method at the network's initial parameters."""
    return OneModel(0, setup.params)


def deliver_model(state: OneModel) -> Mapping[str, Packet]:
    """Deliver a one-model method's model, equal for every client."""
    return {"model": Packet(state.model)}


def train_cohort(state: OneModel, cohort: Sequence[int]) -> list[Task]:
    """Plan a one-model method: the cohort is sent the model and trains."""
    return [Task(client, deliver_model(state)) for client in cohort]


def average(state: OneModel, reports: Iterable[Report], rule: Averaging) -> OneModel:
    """Fold a one-model method: the mean of the reported models by a rule, report by report."""
    mean = rule.start(state.model)
    for report in reports:
        mean.add(report.give["model"].values, report.examples)
    return OneModel(state.round + 1, mean.value())


def send_model(carry: Carry, client: Client) -> Outcome:
    """Give stage of a one-model method: the client sends what it trained."""
    return Outcome({"model": Packet(carry["local"])})


def send_sparse(carry: Carry, client: Client) -> Outcome:
    """Give stage of a sparse method: the client sends what it trained, under its mask."""
    return Outcome({"model": Packet(carry["local"], carry.get("model.mask"))})


def model_with_own_mask(task: Task, net: Net) -> ExpectedReport:
    """Expect in a report the whole model, under a mask that the client found."""
    return ExpectedReport({"model": ExpectedPacket.of(net.blank(), "own")})


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
