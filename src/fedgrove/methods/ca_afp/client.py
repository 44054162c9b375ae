"""What a client of CA-AFP does between receiving a task and sending its report."""

from __future__ import annotations

import torch

from ... import trees
from ...core import (
    Batches,
    Carry,
    Client,
    ExpectedReport,
    Measure,
    Outcome,
    Packet,
    Task,
    expected_as_sent,
)
from ...nets import Net
from ...nets.layout import Layout
from ...parts.gradient import Gradient
from ...parts.objective import Objective
from ...parts.quantise import Half
from ...trees import Mask
from .evidence import evidence_packet, expected_evidence


def measure_gradient(objective: Objective) -> Measure:
    """CA-AFP: the stage that takes the gradient at the model received, over the training data."""
    return Measure("gradient", Gradient(objective), Batches("train"))


def pull_to_reference(carry: Carry, client: Client) -> Carry:
    """CA-AFP: set what the client is pulled to: the reference it keeps, or the network's start."""
    return {"reference": client.start, **carry}


def start_from_reference(carry: Carry, client: Client) -> Carry:
    """CA-AFP: train from the reference that was sent, or from the network's start."""
    return {**carry, "model": carry.get("reference", client.start)}


# ---- what is sent --------------------------------------------------------------------------------


def send_trained(carry: Carry, client: Client) -> Outcome:
    """CA-AFP: the trained model under its mask, and the evidence if it was measured."""
    mask = carry.get("model.mask")
    return Outcome({"model": Packet(carry["local"], mask), **_evidence(carry, mask)})


def send_update(carry: Carry, client: Client) -> Outcome:
    """CA-AFP: the update (Eq. 3), in 16 bits: only its direction counts."""
    update = {}
    for name in prunable_first(client.layout):
        update[name] = carry["local"][name] - carry["model"][name]
    give = {"update": Packet(Half()(update)), **_evidence(carry, None)}
    if "reference" not in carry:
        return Outcome(give)
    # A reference that was sent is kept: all later rounds pull towards it.
    return Outcome(give, memory={"reference": carry["reference"]})


def prunable_first(layout: Layout) -> list[str]:
    """CA-AFP: all parameters, with the prunable ones at the start of a flat update."""
    return list(dict.fromkeys((*layout.prunable, *layout.params)))


def _evidence(carry: Carry, mask: Mask | None) -> dict[str, Packet]:
    """What the gradient says of the weights; nothing if it was not measured."""
    if "gradient" not in carry:
        return {}
    gradient = trees.flatten(carry["gradient"])
    if mask is None:
        active = torch.ones_like(gradient).bool()
    else:
        active = trees.flatten(trees.pick(mask, carry["gradient"]))
    grow = int(carry["settings"].get("grow", torch.tensor(0)))
    return {"evidence": evidence_packet(gradient, active, grow)}


# ---- what the server expects ---------------------------------------------------------------------


def expected_update(task: Task, net: Net) -> ExpectedReport:
    """CA-AFP: the update in 16 bits, prunable weights first."""
    update = trees.pick(net.blank(), prunable_first(net.layout))
    return ExpectedReport({"update": Half().form(update)})


def update_and_evidence(task: Task, net: Net) -> ExpectedReport:
    """CA-AFP: the update, and a vote for every prunable weight: none is pruned yet."""
    size = net.layout.prunable_size
    votes_of_all = expected_evidence(size, active=size, grow=0)
    return ExpectedReport({**expected_update(task, net).packets, "evidence": votes_of_all})


def model_and_evidence(task: Task, net: Net) -> ExpectedReport:
    """CA-AFP: the model as it was sent, and evidence under its mask."""
    model = task.send["model"]
    weights = trees.pick(model.values, net.layout.prunable)
    size = trees.size(weights)
    active = size
    if model.mask is not None:
        active = sum(trees.count_true(model.mask[name]) for name in weights)
    grow = task.settings["grow"]
    assert isinstance(grow, int)
    evidence = expected_evidence(size, active, grow)
    return ExpectedReport({**expected_as_sent(task, net).packets, "evidence": evidence})
