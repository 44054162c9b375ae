r"""FedPAQ: clients send quantised updates, the server sends the model (Reisizadeh, Mokhtari,
Hassani, Jadbabaie, Pedarsani, "FedPAQ: A Communication-Efficient Federated Learning Method with
Periodic Averaging and Quantization", AISTATS 2020, Alg. 1).

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w                    -> Train(ProblemLoss)
    q_k  = Q(w_k - w), with E[Q(x)] = x                         -> QSGD
    w    = w + sum_k n_k q_k / sum_k n_k                        -> as_model, FedAvg

Running statistics are not weights: they are averaged as they are. With 0 levels nothing is
quantised, the model itself is sent, and this is FedAvg.

- Shared: the model; clients send updates rounded to a few levels, without bias.
- A client uses: the shared model.
- Bytes in the paper: M T (4 d + d (1 + ⌈log2(s + 1)⌉) / 8 + 4).
- Secure aggregation: yes; updates are averaged. With noise or secure sums messages are no longer
  rounded: full size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

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
    Stage,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.one_model import OneModel, average
from ..parts.quantise import Scope, check_scope, draw_uniform, map_scope
from ..seeds import torch_rng
from ..trees import Tree
from ..wire.codec import Codec, Smallest
from .fedavg import FedAvg


@dataclass(frozen=True)
class QSGD:
    r"""Levels of the length of the vector, drawn so that the mean is right.

    :math:`q_i = \lVert x \rVert_2\, \mathrm{sign}(x_i)\, \xi_i / s`, where :math:`\xi_i` is
    :math:`\lfloor s |x_i| / \lVert x \rVert_2 \rfloor`, or one more with the probability of what
    was cut off: :math:`E[q] = x` and :math:`E\lVert q - x \rVert^2 \le
    \min(d/s^2, \sqrt d/s) \lVert x \rVert^2` (Alistarh et al. 2017, section 3.1; FedPAQ's
    low-precision quantiser). s -> ``levels``. The longer the vector, the more of it is 0, and the
    larger the error: ``scope`` says whether it is the whole tree or a layer.
    """

    levels: int = 10
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check(self.levels >= 1, "levels", self.levels, "1 or more")
        check_scope(self.scope)

    def __call__(self, tree: Mapping[str, Tensor], draw: torch.Generator | None = None) -> Tree:
        """The tree of levels."""
        return map_scope(tree, self.scope, lambda x: self._vector(x, draw))

    def _vector(self, x: Tensor, draw: torch.Generator | None) -> Tensor:
        # In double precision: the largest value of a short vector may be its whole length, and must
        # not be rounded above it.
        length = torch.linalg.vector_norm(x.double())
        if length == 0:
            return torch.zeros_like(x)
        level = torch.floor(x.double().abs() * (self.levels / length) + draw_uniform(x, draw))
        # Levels are multiplied first: equal levels are then equal numbers, whatever their sign.
        magnitude: Tensor = level * (length / self.levels)
        return x.sign() * magnitude.to(x.dtype)


@dataclass(frozen=True)
class FedPAQ(FedAvg):
    """One model for all; clients send their updates in a few levels, right on average."""

    levels: int = 10
    """s, the number of levels for each sign, in addition to 0; 0: not quantised."""
    scope: Scope = "model"
    """Whether levels are relative to the norm of the whole update, or of each layer."""
    _: KW_ONLY
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(self.levels >= 0, "levels", self.levels, "1 or more, or 0: not quantised")
        check_scope(self.scope)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """Alg. 1, the last line of the round: the model and the mean of the updates."""
        if not self.levels:
            return average(state, reports, self.mean, self.server)
        models = (as_model(report, state.model) for report in reports)
        return average(state, models, self.mean, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train, and send the quantised update."""
        if verb == "train" and self.levels:
            return (Train(self.objective, self.local), Give(self._send, self._expected))
        return super().work(verb)

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
    """FedPAQ: a report of an update as one of a model: the model that was sent, plus the update.

    The mean of these is the model plus the mean update, and every rule of averaging takes it.
    """
    update = report.give["update"].values
    values = trees.map(torch.add, trees.pick(model, update), update)
    if "statistics" in report.give:
        values |= report.give["statistics"].values
    return replace(report, give={"model": Packet(values)})
