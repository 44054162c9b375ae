r"""FedPAQ: quantised updates go up, the model comes down (Reisizadeh, Mokhtari, Hassani, Jadbabaie,
Pedarsani, "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization", AISTATS 2020, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w                    -> Train(ProblemLoss)
    q_k  = Q(w_k - w), with E[Q(x)] = x                         -> QSGD
    w    = w + sum_k n_k q_k / sum_k n_k                        -> WeightedMean

Running statistics are no weights: they are averaged as they are. With 0 levels nothing is
quantised, the model itself travels, and this is FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .. import trees
from ..core import (
    Carry,
    Client,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Objective, ProblemLoss
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    initial_model,
    send_model,
    train_cohort,
)
from ..parts.quantise import QSGD, Scope, check_scope
from ..seeds import torch_rng
from ..trees import Tree
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class FedPAQ:
    """One model for all; clients send their updates in a few levels, right on average."""

    levels: int = 10
    """s, levels of an update beside 0, for each sign; 0: not quantised."""
    scope: Scope = "model"
    """Whether levels are shares of the length of the whole update, or of each layer's."""
    mean: Averaging = WeightedMean()
    objective: Objective = ProblemLoss()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(self.levels >= 0, "levels", self.levels, "1 or more, or 0: not quantised")
        check_scope(self.scope)

    def init(self, setup: Setup) -> OneModel:
        """Alg. 1, "initial model x_0"."""
        return initial_model(setup)

    def deliver(self, state: OneModel, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: OneModel, cohort: Sequence[int]) -> list[Task]:
        """Alg. 1: the server sends the model to the clients it has drawn."""
        return train_cohort(state, cohort)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """Alg. 1, the last line of the round: the model and the mean of the updates."""
        if not self.levels:
            return average(state, reports, self.mean)
        return average(state, (as_model(report, state.model) for report in reports), self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train, and send the quantised update."""
        give = Give(self._send, self._expected)
        if not self.levels:
            give = Give(send_model)
        return {"train": (Train(self.objective, self.local), give), "use": ()}[verb]

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """Alg. 1, Q(x_{k,tau} - x_k), and the running statistics as they are."""
        layout = client.layout
        update = trees.sub(
            trees.pick(carry["local"], layout.params), trees.pick(carry["model"], layout.params)
        )
        quantised = QSGD(self.levels, self.scope)(update, torch_rng(client.seed, "quantise"))
        give = {"update": Packet(quantised)}
        if layout.buffers:
            give["statistics"] = Packet(trees.pick(carry["local"], layout.buffers))
        return Outcome(give)

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """What :meth:`_send` sends."""
        params = net.blank()
        packets = {"update": ExpectedPacket.of(trees.pick(params, net.layout.params))}
        if net.layout.buffers:
            packets["statistics"] = ExpectedPacket.of(trees.pick(params, net.layout.buffers))
        return ExpectedReport(packets)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Down 32 bits a number; up a sign and the number of the level, and once the length."""
        numbers = net.layout.size
        up = 4.0 * numbers
        if self.levels:
            bits = 1 + math.ceil(math.log2(self.levels + 1))
            up = numbers * bits / 8 + 4
        return round((4 * numbers + up) * cohort * rounds)


def as_model(report: Report, model: Tree) -> Report:
    """A report of an update as one of a model: that which was sent, and the update.

    The mean of these is the model and the mean update, and every rule of averaging takes it.
    """
    update = report.give["update"].values
    values = trees.map(torch.add, trees.pick(model, update), update)
    if "statistics" in report.give:
        values |= report.give["statistics"].values
    return replace(report, give={"model": Packet(values)})
