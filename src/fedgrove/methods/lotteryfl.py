r"""LotteryFL: every client prunes its personal ticket and rewinds it to the initial weights (Li et
al., "LotteryFL: Empower Edge Intelligence with Personalized and Communication-Efficient Federated
Learning", SEC 2021, and arXiv 2008.03371).

Round :math:`t`, cohort :math:`S_t`; client k begins with :math:`M_k` = everything::

    u_k  = w M_k                                                                   -> deliver
    if k's training accuracy of u_k reaches ``threshold``, and M_k is above ``density``:
        M_k = M_k without the share ``rate`` of smallest |u_k| in each layer       -> prune
        u_k = w_0 M_k, the initial weights                                         -> draw
    w_k  = E epochs of min CE(u; D_k) from u_k, under M_k                          -> Train
    w_j  = sum_k n_k m_kj w_kj / sum_k n_k m_kj over clients with j                -> WeightedMean

The accuracy is that of the received model, before the client trains it. A client uses w M_k. The
server stores every ticket, one bit per weight, so that only its weights are sent. Both sides draw
w_0 from the seed. With density 1 this is FedAvg.

- Shared: the model; each client has a sparse part of it, found by pruning and training again from
  the start.
- A client uses: its part of the shared model.
- Bytes in the paper: 4 Σ over draws of (down + up), if all prune each time.
- Secure aggregation: no; clients choose their tickets, and the server stores each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import trees
from ..core import (
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    Give,
    Measure,
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
from ..parts.common import CommonParts
from ..parts.mask import all_kept, prune, weights_to_prune
from ..parts.one_model import OneModel, send_sparse, sent_with_own_mask
from ..trees import Mask, Tree


@dataclass(frozen=True)
class State(OneModel):
    """The shared model, and the ticket of every client that has pruned, as bits."""

    prunable: tuple[str, ...]
    tickets: dict[int, Tensor]


@dataclass(frozen=True)
class LotteryFL(CommonParts):
    """A shared model of which every client has a personal part, found by iterative pruning."""

    density: float = 0.5
    """Density of a client's ticket at the end, in every layer."""
    rate: float = 0.1
    """The share of the weights in use that a client prunes at a time."""
    threshold: float = 0.2
    """A client prunes only if the metric on its training data, before training, is at least as good
    as this."""

    sends_later = "choose the mask of 'model' from their data"

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(0 < self.rate < 1, "rate", self.rate, "in (0, 1)")
        check(math.isfinite(self.threshold), "threshold", self.threshold, "a finite number")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The network's initial parameters, and no tickets."""
        return State(0, setup.params, weights_to_prune(setup.layout, self.density), {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The model under the client's own ticket; all of it before the client has one."""
        if client not in state.tickets:
            return {"model": Packet(state.model)}
        mask = unpacked(state.tickets[client], trees.pick(state.model, state.prunable))
        return {"model": Packet(trees.apply_mask(state.model, mask), mask)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; who is above the density may prune first."""
        tasks = []
        for client in cohort:
            send = self.deliver(state, client)
            verb = "train:ticket" if self._may_prune(send["model"]) else "train"
            tasks.append(Task(client, send, verb=verb))
        return tasks

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean over the clients that have each weight, and their tickets."""
        mean = self.mean.start(state.model)
        tickets = dict(state.tickets)
        for report in reports:
            packet = report.give["model"]
            mean.add(packet.values, report.examples, packet.mask)
            if packet.mask:
                named = {}
                for name in state.prunable:
                    # A layer that a mask does not name is whole.
                    named[name] = packet.mask.get(name, all_kept(state.model[name]))
                # As bits: the server keeps one ticket per client.
                tickets[report.of] = packed(named)
        tickets = dict(sorted(tickets.items()))
        return State(state.round + 1, mean.value(), state.prunable, tickets)

    def _may_prune(self, packet: Packet) -> bool:
        """Whether a ticket has more weights than the density allows."""
        if self.density == 1 or packet.mask is None:
            return self.density < 1
        return any(int(kept.sum()) > self._target(kept) for kept in packet.mask.values())

    def _target(self, kept: Tensor) -> int:
        """How many weights of a layer a ticket has in the end."""
        return round(self.density * kept.numel())

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train under the ticket; before that, look whether it can do with less."""
        train = Train(self.objective, self.local, start="ticket", mask="ticket.mask")
        return {
            "train": (Train(self.objective, self.local), Give(send_sparse)),
            "train:ticket": (
                Measure("scores", scores, Batches("train")),
                Edit(self._draw),
                train,
                Give(send_ticket, sent_with_own_mask),
            ),
            "use": (),
        }[verb]

    def _draw(self, carry: Carry, client: Client) -> Carry:
        """A smaller ticket at the initial weights, if the model is good enough; else as it came."""
        model = carry["model"]
        mask = carry.get("model.mask")
        if not self._is_good(carry["scores"], client):
            same = {**carry, "ticket": model}
            return same if mask is None else {**same, "ticket.mask": mask}
        smaller: Mask = {}
        for name in client.layout.prunable:
            kept = all_kept(model[name]) if mask is None else mask[name]
            smaller[name] = self._pruned(kept, model[name])
        # Rewound: from the initial weights, which Train masks before its first step.
        return {**carry, "ticket": client.start, "ticket.mask": smaller}

    def _is_good(self, sums: Tree, client: Client) -> bool:
        """Whether the metric reaches the threshold."""
        problem = client.net.problem
        task = client.info.task
        metric = problem.for_task(task).metric
        value = metric.value(problem.select_sums(sums, task))
        return value >= self.threshold if metric.more_is_better else value <= self.threshold

    def _pruned(self, kept: Tensor, weights: Tensor) -> Tensor:
        """A layer's part of a ticket without its smallest weights, down to its target."""
        in_use = int(kept.sum())
        above = max(0, in_use - self._target(kept))
        # At least one: a share of a few weights may round to none, for ever.
        count = min(above, max(1, round(self.rate * in_use)))
        left = prune(kept.reshape(-1), weights.abs().reshape(-1), count)
        return left.view(kept.shape)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Tickets in 32 bits down and up, if all clients are drawn equally often and always prune.

        That is the most that the rule can save; masks are not counted.
        """
        weights = net.layout.count(net.layout.prunable)
        rest = net.layout.size - weights
        numbers = 0
        left = cohort * rounds
        before = weights
        while left:
            # The i-th time that each client is drawn.
            after = round(max(self.density * weights, (1 - self.rate) * before))
            drawn = min(clients, left)
            numbers += drawn * (2 * rest + before + after)
            left -= drawn
            before = after
        return 4 * numbers


def scores(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """LotteryFL: the sums of one batch that a ticket's metric is computed from."""
    outputs = net(params, batch.x, train=False).logits
    return net.problem.sums(outputs, batch.y, batch.weight, carry.get("client", {}))


def send_ticket(carry: Carry, client: Client) -> Outcome:
    """LotteryFL: what was trained, under the client's own ticket."""
    return Outcome({"model": Packet(carry["local"], carry.get("ticket.mask"))})


def packed(mask: Mapping[str, Tensor]) -> Tensor:
    """LotteryFL: a client's ticket (its mask) as bits, eight weights per byte.

    >>> packed({"a": torch.tensor([True, False, True]), "b": torch.ones(6, dtype=torch.bool)})
    tensor([191, 128], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(trees.flatten(mask).numpy()))


def unpacked(bits: Tensor, like: Mapping[str, Tensor]) -> Mask:
    """LotteryFL: undo :func:`packed`, with names and shapes as in ``like``."""
    flags = np.unpackbits(bits.numpy(), count=trees.size(like))
    return trees.unflatten(torch.from_numpy(flags).bool(), like)
