r"""pFedGate: a personal gating layer chooses and scales blocks of the shared model within a budget
(Chen, Yao, Gao, Ding & Li, "Efficient Personalized Federated Learning via Sparse Model-Adaptation",
ICML 2023).

Round :math:`t`, cohort :math:`S_t`; w shared, phi_k a client's gating layer, s(x; phi) its scores
of blocks in (0, 1), M the mask of the blocks that the scores choose within a budget::

    phi_k = an epoch of min CE(w M s(x; phi)) from phi_k, by batch x        -> Train, GatedLoss
    s_k   = the mean of s(x; phi_k) over the client's data; M_k by s_k      -> summed_scores, chosen
    w_k   = E epochs of min CE(w M_k s_k; D_k)                              -> Train, scaled
    w     = w + sum_k n_k (w_k - w M_k) / sum_k n_k                         -> recovered

Each weight tensor is cut into ``blocks`` blocks, and those in use have at most a share ``budget``
of all weights. phi_k and s_k are never sent; w_k is sent under M_k. A client uses w M_k s_k. With a
budget of 1 there are no gates, and this is FedAvg.

- Shared: the model; each client sends back the blocks that its own gating layer chose.
- A client uses: these blocks of the shared model, each times its score.
- Bytes in the paper: 4 (d + s d_w + d − d_w) M T.
- Secure aggregation: yes; clients choose blocks. The server needs only a sum of values and a sum of
  masks; messages are then dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import trees
from ..core import (
    GRADIENT_PASSES,
    Batch,
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
from ..errors import InputError, check
from ..nets import Net
from ..nets.layout import Layout
from ..parts.common import CommonParts
from ..parts.local import SGD, LocalTraining
from ..parts.mask import weights_to_prune
from ..parts.objective import Loss, Objective
from ..parts.one_model import (
    OneModel,
    deliver_model,
    initial_model,
    send_model,
    sent_with_own_mask,
    train_cohort,
)
from ..trees import Tree

if TYPE_CHECKING:
    from ..nets import Output


# ---- blocks of weights, and which of them a device can afford ------------------------------------

# The weights of a layer are cut, in the order they are stored, into `count` blocks of one size, the
# last one perhaps shorter. A score for each block says how important it is; the blocks in use are a
# knapsack: worth the most, within a share of all weights.


@dataclass(frozen=True)
class Cut:
    """The blocks of one weight: ``count`` of them from number ``first``, of ``size`` numbers."""

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    size: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """pFedGate: how many numbers each block has."""
        last = torch.Size(self.shape).numel() - self.size * (self.count - 1)
        return (self.size,) * (self.count - 1) + (last,)


def cuts(layout: Layout, count: int) -> tuple[Cut, ...]:
    """pFedGate: all prunable weights cut into ``count`` blocks each, or fewer.

    A weight with fewer numbers has fewer blocks.

    25 numbers in 10 blocks: of ceil(25 / 10) = 3 numbers, which makes 9, the last with 1.
    """
    found = []
    first = 0
    for name in layout.prunable:
        shape = tuple(layout.shapes[name])
        numbers = torch.Size(shape).numel()
        size = -(-numbers // min(count, numbers))
        blocks = -(-numbers // size)
        found.append(Cut(name, shape, first, blocks, size))
        first += blocks
    return tuple(found)


def sizes_of(blocks: Sequence[Cut]) -> tuple[int, ...]:
    """pFedGate: the numbers of all blocks in order."""
    sizes: list[int] = []
    for cut in blocks:
        sizes += cut.sizes
    return tuple(sizes)


def check_budget(blocks: Sequence[Cut], budget: float) -> None:
    """pFedGate: refuse a budget too small for the first block of each weight.

    That block always stays.
    """
    least = sum(cut.sizes[0] for cut in blocks)
    total = sum(sizes_of(blocks))
    if budget * total < least:
        raise InputError(
            f"budget is {budget}; the first block of every layer is always kept, and these are "
            f"{least:,} of {total:,} weights: give {least / total:.3g} or more, or more blocks."
        )


def chosen(scores: Tensor, blocks: Sequence[Cut], budget: float) -> Tensor:
    r"""pFedGate: the blocks in use, as booleans: greedy in :math:`score_i / size_i` while they fit.

    :math:`\max \sum_i m_i s_i` with :math:`\sum_i m_i size_i \le budget \sum_i size_i`. The first
    block of each weight comes before all others, so that no layer is cut off. A block that does not
    fit is passed over, and smaller ones behind it may still be taken. Pure: it may be mapped over
    clients.
    """
    # Made on the device: a captured step may copy nothing to it.
    sizes = torch.cat([_sizes_on(scores.device, cut) for cut in blocks])
    comes_first = torch.cat([_first_of(scores.device, cut) for cut in blocks])
    worth = torch.where(comes_first, torch.inf, scores.detach().double() / sizes)
    # Stable: of two blocks that are worth the same the earlier one, on every device.
    order = torch.sort(worth, descending=True, stable=True).indices
    ordered = sizes[order]
    rank = torch.arange(len(sizes), device=scores.device)
    # .29 of 100 is 29, though the product is a little less.
    room = budget * sizes.sum() + 1e-9
    fits = torch.ones_like(comes_first)
    # Behind a block that does not fit, none of its size or a larger one does: room only gets less.
    # So each pass settles one size, and there are no more passes than sizes.
    for _ in {size for cut in blocks for size in cut.sizes}:
        is_over = fits & ((ordered * fits).cumsum(0) > room)
        first_over = torch.where(is_over, rank, len(sizes)).min().reshape(1)
        # Gathered: under vmap a tensor of one number cannot be an index.
        size = ordered.gather(0, first_over.clamp(max=len(sizes) - 1))
        fits = fits & ~((rank >= first_over) & (ordered >= size))
    return torch.zeros_like(fits).scatter(0, order, fits)


def _sizes_on(device: torch.device, cut: Cut) -> Tensor:
    sizes = torch.full((cut.count,), cut.size, dtype=torch.float64, device=device)
    sizes[-1] = cut.sizes[-1]
    return sizes


def _first_of(device: torch.device, cut: Cut) -> Tensor:
    """pFedGate: whether each block of a tensor is its first one."""
    return torch.arange(cut.count, device=device) == 0


def spread_out(values: Tensor, blocks: Sequence[Cut]) -> Tree:
    """pFedGate: one value for each block as one for each weight, by name."""
    tree: Tree = {}
    for cut in blocks:
        numbers = torch.Size(cut.shape).numel()
        owner = torch.arange(numbers, device=values.device) // cut.size
        tree[cut.name] = values[cut.first + owner].reshape(cut.shape)
    return tree


def least_score(blocks: int, budget: Any) -> Tensor:
    """pFedGate: scores below this are raised to it before the choice, min(max(1/B, .1), s).

    >>> float(least_score(5, 0.5)), float(least_score(20, 0.5)), float(least_score(5, 0.125))
    (0.20000000298023224, 0.10000000149011612, 0.125)
    """
    return torch.as_tensor(budget).clamp(max=max(1 / blocks, 0.1))


def make_gates(scores: Tensor, blocks: Sequence[Cut], budget: Any, least: Tensor) -> Tensor:
    r"""pFedGate: the number that each block is multiplied by: :math:`m_i s_i (1 + g_i - sg(g_i))`.

    :math:`g_i = \max(s_i, least)` is what blocks are chosen by. The value is the score of a block
    in use, and 0 of any other; the gradient is :math:`m_i (1 + s_i)` by the score, where it is
    above the least.
    """
    raised = torch.maximum(scores, least.to(scores))
    in_use = chosen(raised, blocks, budget)
    return in_use * scores * (1 + (raised - raised.detach()))


# ---- the gating layer ----------------------------------------------------------------------------


class GatingLayer(nn.Module):
    """A score for each block from one example: the example at mean 0 and deviation 1, one layer."""

    def __init__(self, features: int, blocks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, elementwise_affine=False)
        self.linear = nn.Linear(features, blocks)

    def forward(self, x: Tensor) -> Tensor:
        """pFedGate: the scores before the sigmoid, (examples, blocks)."""
        logits: Tensor = self.linear(self.norm(x.flatten(1)))
        return logits


def batch_scores(logits: Tensor, weight: Tensor) -> Tensor:
    """pFedGate: the mean over a batch of the sigmoid of each example's scores, padding left out."""
    return (torch.sigmoid(logits) * weight[:, None]).sum(0) / weight.sum()


@dataclass(frozen=True)
class GatedLoss(Objective):
    """The loss of the model under a batch's gates (:func:`make_gates`); it trains the gating layer.

    The model itself, ``carry["model"]``, is a constant.
    """

    only_in: ClassVar[str] = "pfedgate"
    targets: ClassVar[tuple[str, ...] | None] = ()
    count: int
    budget: float

    def more_macs(self, net: Net, forward: int) -> int:
        """pFedGate: a gradient through the model, in addition to that of the gating layer."""
        return GRADIENT_PASSES * net.nets["model"].layout.macs

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean loss over the examples that are not padding."""
        net = out.nets["model"]
        blocks = cuts(net.layout, self.count)
        scores = batch_scores(out.logits, batch.weight)
        gates = make_gates(scores, blocks, self.budget, least_score(self.count, self.budget))
        gated = scale(carry["model"], spread_out(gates, blocks))
        # Not in train mode: running statistics are the model's, which is not trained here.
        logits = net(gated, batch.x, train=False).logits
        losses = net.problem.losses(logits, batch.y, carry.get("client", {}))
        return (losses * batch.weight).sum() / batch.weight.sum(), {}


def summed_scores(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """pFedGate: the sum over examples of the gates' scores, and how many examples."""
    logits = net(params, batch.x, train=False).logits
    scores = torch.sigmoid(logits) * batch.weight[:, None]
    return {"sum": scores.sum(0), "examples": batch.weight.sum()}


def scale(model: Tree, gates: Tree) -> Tree:
    """pFedGate: the model with each weight times its gate."""
    scaled = dict(model)
    for name, gate in gates.items():
        scaled[name] = model[name] * gate
    return scaled


def scaled(params: Tree, carry: Carry) -> Tree:
    """pFedGate: the weights of the forward pass in local training; the gradient goes through."""
    return scale(params, carry["gates"])


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PFedGate(CommonParts):
    """One model; the gating layer of each client chooses blocks of it within a budget."""

    budget: float = 0.5
    """The share of the weights that a client uses; 1: all weights, without gates."""
    blocks: int = 5
    """Number of blocks into which each weight tensor is divided."""
    gate: LocalTraining = LocalTraining(1, 32, SGD(0.1))
    """How the gating layer trains."""

    def __post_init__(self) -> None:
        check(0 < self.budget <= 1, "budget", self.budget, "above 0, at most 1")
        check(self.blocks >= 2, "blocks", self.blocks, "2 or more")

    @property
    def gates(self) -> bool:
        """pFedGate: whether there are any blocks to choose."""
        return self.budget < 1

    def nets(self, net: Net) -> Mapping[str, Net]:
        """pFedGate: the gating layer; every client's starts alike, from the run's seed."""
        if not self.gates:
            return {}
        # Before a layer of no gates is made, of which torch warns.
        weights_to_prune(net.layout, self.budget)
        features = torch.Size(net.shape).numel()
        module = GatingLayer(features, len(sizes_of(cuts(net.layout, self.blocks))))
        like = next(iter(net.params().values()))
        return {"gate": Net(module.to(like), net.shape)}

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> OneModel:
        """The network's initial parameters, if the budget holds a block of every layer."""
        if self.gates:
            check_budget(cuts(setup.layout, self.blocks), self.budget)
        return initial_model(setup)

    def deliver(self, state: OneModel, client: int) -> Mapping[str, Packet]:
        """The whole model: the server does not know what a client's gates choose."""
        return deliver_model(state)

    def plan(self, state: OneModel, cohort: Sequence[int]) -> list[Task]:
        """The cohort is sent the whole model and trains."""
        return train_cohort(state, cohort)

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """The weighted mean of the recovered models."""
        mean = self.mean.start(state.model)
        for report in reports:
            mean.add(recovered(report.give["model"], state.model), report.examples)
        return OneModel(state.round + 1, mean.value())

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the gates, choose blocks, train them and send them; a client uses its blocks."""
        if not self.gates:
            return {"train": (Train(self.objective, self.local), Give(send_model)), "use": ()}[verb]
        gated = GatedLoss(self.blocks, self.budget)
        return {
            "train": (
                Edit(begin_gate),
                Train(gated, self.gate, start="gate", end="gate", net="gate", mask=""),
                Measure("scores", summed_scores, of="gate", net="gate"),
                Edit(self._choose),
                Train(self.objective, self.local, mask="chosen", at=scaled, differentiate=True),
                Give(send_blocks, sent_with_own_mask),
            ),
            "use": (Edit(self._use),),
        }[verb]

    def _choose(self, carry: Carry, client: Client) -> Carry:
        """The gates of this round, by the mean scores over the client's training data."""
        sums = carry["scores"]
        scores = sums["sum"] / sums["examples"]
        gates = self._gates(scores, client.layout)
        mask = trees.map(Tensor.bool, gates)
        return {**carry, "chosen": mask, "gates": gates, "scores": {"mean": scores}}

    def _gates(self, scores: Tensor, layout: Layout) -> Tree:
        """The number that each weight is multiplied by; 0 in blocks that are not in use."""
        blocks = cuts(layout, self.blocks)
        least = least_score(self.blocks, self.budget)
        return spread_out(make_gates(scores, blocks, self.budget, least), blocks)

    def _use(self, carry: Carry, client: Client) -> Carry:
        """The shared model under the client's gates; all of it before the client has gates."""
        rest = dict(carry)
        # Taken out, so that clients are scored at once.
        rest.pop("gate", None)
        scores = rest.pop("scores", None)
        if scores is None:
            return rest
        gates = self._gates(scores["mean"], client.layout)
        mask = trees.map(Tensor.bool, gates)
        model = trees.apply_mask(scale(carry["model"], gates), mask)
        return {**rest, "model": model, "model.mask": mask}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The whole model down, the budget's share of its weights and all else up, in 32 bits."""
        weights = net.layout.count(net.layout.prunable)
        up = round(self.budget * weights) + net.layout.size - weights
        return 4 * (net.layout.size + up) * cohort * rounds


def begin_gate(carry: Carry, client: Client) -> Carry:
    """pFedGate: a client's gating layer as it left it; at first as all begin."""
    rest = dict(carry)
    # What an earlier round chose by: taken out, so that old and new clients train at once.
    rest.pop("scores", None)
    if "gate" not in rest:
        rest["gate"] = client.nets["gate"].params()
    return rest


def send_blocks(carry: Carry, client: Client) -> Outcome:
    """pFedGate: the trained blocks under their mask; the gating layer and its scores stay."""
    packet = Packet(carry["local"], carry["chosen"])
    return Outcome({"model": packet}, memory={"gate": carry["gate"], "scores": carry["scores"]})


def recovered(packet: Packet, model: Tree) -> Tree:
    """pFedGate: a client's model, with the server's values in the blocks it did not use."""
    whole = dict(packet.values)
    for name, mask in (packet.mask or {}).items():
        whole[name] = torch.where(mask, whole[name], model[name].to(whole[name].dtype))
    return whole
