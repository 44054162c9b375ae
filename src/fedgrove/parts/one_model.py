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
    """Start at the network's initial parameters."""
    return OneModel(0, setup.params)


def deliver_model(state: OneModel) -> Mapping[str, Packet]:
    """The model, the same for every client."""
    return {"model": Packet(state.model)}


def train_cohort(state: OneModel, cohort: Sequence[int]) -> list[Task]:
    """The cohort is sent the model and trains."""
    return [Task(client, deliver_model(state)) for client in cohort]


def average(state: OneModel, reports: Iterable[Report], rule: Averaging) -> OneModel:
    """The next model: the mean of the reported ones by a rule, report by report."""
    mean = rule.start(state.model)
    for report in reports:
        mean.add(report.give["model"].values, report.examples)
    return OneModel(state.round + 1, mean.value())


def send_model(carry: Carry, client: Client) -> Outcome:
    """The client sends what it trained."""
    return Outcome({"model": Packet(carry["local"])})


def send_sparse(carry: Carry, client: Client) -> Outcome:
    """What was trained, under the mask it was trained with."""
    return Outcome({"model": Packet(carry["local"], carry.get("model.mask"))})


def model_with_own_mask(task: Task, net: Net) -> ExpectedReport:
    """The whole model, under a mask that the client found."""
    return ExpectedReport({"model": ExpectedPacket.of(net.blank(), "own")})


def expected_update(task: Task, net: Net) -> ExpectedReport:
    """An update looks like the model that was sent, under the same mask."""
    model = task.send["model"]
    return ExpectedReport({"update": ExpectedPacket.of(model.values, model.mask)})


def use_network_start(carry: Carry, client: Client) -> Carry:
    """The model is the network's start, which both sides draw from the seed."""
    return {**carry, "model": client.start}


def dense_bytes(numbers: int, cohort: int, rounds: int) -> int:
    """``numbers`` float32 values down and up again, per client of the cohort and round."""
    return 2 * 4 * numbers * cohort * rounds
