r"""FedMask: weights keep their initial values; every client learns which of them to use.

(Li, Sun, Zeng, Zhang, Li & Chen, "FedMask: Joint Computation and Communication-Efficient
Personalized Federated Learning via Heterogeneous Masking", SenSys 2021; docs/papers/fedmask.md
lists what it leaves open.)

Round :math:`t`, cohort :math:`S_t`; w the initial weights, which both sides draw from the seed;
b the server's bits, at first all 1; s_k scores, at first 0, P_k the part of the network that client
k may use, at first all of it::

    s_k  = s_k + scale (2 b - 1)                                                   -> scores_from
    s_k  = E epochs of min CE(w [s >= 0] P_k; D_k), d[s >= 0]/ds = sigmoid'(s)     -> Train, hard
    P_k  = the share ``density`` of each layer with the largest s_k; once          -> one_shot
    m_k  = [s_k >= 0] P_k                                                          -> bits
    v_j  = sum_k n_k m_kj / sum_k n_k over clients with j in P_k                   -> WeightedMean
    b    = [v >= 1/2]                                                              -> majority

Only b and m_k are sent, one bit a weight. A client uses w m_k; biases and norm layers keep their
initial values too, and running statistics are kept on the client. With nothing pruned, nothing
rescaled and no training (a ``scale`` that no score crosses) every client uses the initial network.

- Shared: a mask, one bit per weight, over a network whose weights are never trained.
- A client uses: the initial weights under its own mask.
- Bytes in the paper: 2 ⌈d_w / 8⌉ M T.
- Secure aggregation: yes; clients send bits under their own masks. The vote is a sum of bits and a
  sum of masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import trees
from ..core import (
    Carry,
    Client,
    Edit,
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
from ..parts.allocate import Uniform
from ..parts.common import CommonParts
from ..parts.mask import all_kept, top, weights_to_prune
from ..parts.one_model import sent_with_own_mask
from ..trees import Mask, Tree


@dataclass(frozen=True)
class State:
    """The clients' mean vote on every weight, in [0, 1]."""

    round: int
    votes: Tree


@dataclass(frozen=True)
class FedMask(CommonParts):
    """A frozen random network for all, and a learned mask of each client's own."""

    density: float = 0.5
    """The share of each layer's weights that a client may use from its first round on."""
    scale: float = 0.001
    """How much the server's bits change a score in a round: about one step of Adam."""
    rescale: bool = True
    """Whether weights are scaled to the variance that a network of this density needs (He et al.
    2015); False: the network's own initial weights."""

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        check(self.scale > 0, "scale", self.scale, "above 0")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """All weights are in use."""
        # Raises where there is nothing to mask, with density 1 too.
        names = weights_to_prune(setup.layout, 0.0)
        check_density(trees.pick(setup.params, names), self.density)
        return State(0, trees.map(torch.ones_like, trees.pick(setup.params, names)))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """What most clients use, for clients that have no mask yet."""
        return {"bits": Packet(majority(state.votes))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains its scores."""
        return [Task(client, self.deliver(state, client)) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean over the clients that may use a weight; where none may, the vote stays."""
        mean = self.mean.start(state.votes)
        for report in reports:
            packet = report.give["bits"]
            votes = {}
            for name, leaf in packet.values.items():
                # Bits become numbers: their mean is the share of clients that use a weight.
                votes[name] = leaf.to(state.votes[name].dtype)
            mean.add(votes, report.examples, packet.mask)
        return State(state.round + 1, mean.value())

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train scores, and with the first ones prune; send bits."""
        train = Train(
            self.objective,
            self.local,
            start="scores",
            end="trained",
            mask="",
            at=masked_network,
            differentiate=True,
        )
        return {
            "train": (
                Edit(self._begin),
                train,
                Edit(self._prune),
                Give(send_bits, sent_with_own_mask),
            ),
            "use": (Edit(self._use),),
        }[verb]

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """Scores from the server's bits, in place of the weights, next to the other tensors."""
        frozen = self.network(client)
        weights = trees.pick(frozen, client.layout.prunable)
        rest = dict(carry)
        # Taken out, so that old and new clients have equal sets of trees, and train at once.
        statistics = rest.pop("statistics", {})
        own = rest.pop("scores", trees.map(torch.zeros_like, weights))
        scores = scores_from(own, carry["bits"], self.scale)
        part = rest.pop("part", None) or trees.map(all_kept, weights)
        tree = {**frozen, **statistics, **scores}
        return {**rest, "scores": tree, "frozen": frozen, "part": part}

    def _prune(self, carry: Carry, client: Client) -> Carry:
        """In its first round a client chooses its part; then its bits are within it."""
        scores = trees.pick(carry["trained"], client.layout.prunable)
        part = carry["part"]
        # After training: the first scores are equal, and rank nothing.
        if "part" not in client.memory:
            part = one_shot(scores, self.density)
        return {**carry, "part": part, "scores": scores}

    def _use(self, carry: Carry, client: Client) -> Carry:
        """The network under the client's mask; under the server's bits before it has one."""
        mask = carry["bits"]
        if "scores" in carry:
            mask = bits(carry["scores"], carry["part"])
        rest = dict(carry)
        statistics = rest.pop("statistics", {})
        for name in ("scores", "part"):
            rest.pop(name, None)
        model = trees.apply_mask({**self.network(client), **statistics}, mask)
        return {**rest, "model": model, "model.mask": mask}

    def network(self, client: Client) -> Tree:
        """FedMask: the weights that masks are of: the network's start, perhaps rescaled."""
        if not self.rescale:
            return client.start
        weights = trees.pick(client.start, client.layout.prunable)
        return {**client.start, **trees.map(lambda w: rescaled(w, self.density), weights)}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """One bit for each weight, down and up."""
        weights = net.layout.count(net.layout.prunable)
        return 2 * -(-weights // 8) * cohort * rounds


# ---- masks and scores ----------------------------------------------------------------------------


def hard(score: Tensor) -> Tensor:
    r"""FedMask: the bit :math:`[\sigma(s) \ge \frac12]`, with the gradient of :math:`\sigma(s)`.

    >>> s = torch.tensor([2.0, 0.0, -2.0], requires_grad=True)
    >>> hard(s)
    tensor([1., 1., 0.], grad_fn=<AddBackward0>)
    >>> torch.autograd.grad(hard(s).sum(), s)[0]
    tensor([0.1050, 0.2500, 0.1050])
    """
    soft = torch.sigmoid(score)
    # The second term is 0 to the bit, and has the gradient of the sigmoid.
    return (score >= 0).to(score.dtype) + (soft - soft.detach())


def masked_network(params: Tree, carry: Carry) -> Tree:
    """FedMask: the weights of the forward pass: the random ones under the scores' mask."""
    weights = trees.pick(carry["frozen"], params)
    for name, part in carry["part"].items():
        # The part is fixed and has no gradient; inside it the scores decide, and learn.
        weights[name] = torch.where(part, weights[name], 0.0) * hard(params[name])
    return weights


def scores_from(own: Tree, server: Mask, scale: float) -> Tree:
    """FedMask: the client's own scores, moved a little towards the server's bits.

    A bit does not overrule a score: most clients use most of their part, so that nearly all bits
    are 1, and what a client has turned off would be on again in every round.

    >>> own = {"w": torch.tensor([0.75, -0.75, 0.75])}
    >>> scores_from(own, {"w": torch.tensor([True, True, False])}, 0.25)
    {'w': tensor([ 1.0000, -0.5000,  0.5000])}
    """
    scores = {}
    for name, score in own.items():
        scores[name] = score + scale * (2 * server[name].to(score.dtype) - 1)
    return scores


def rescaled(weight: Tensor, density: float) -> Tensor:
    r"""FedMask: a weight at He's variance for its remaining inputs: :math:`2 / (\rho\, n_{in})`.

    :math:`\rho` -> ``density``, :math:`n_{in}` the inputs of one output. A network's own draw is
    often far smaller, and here nothing but a mask could make up for it.

    >>> rescaled(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), density=0.25)
    tensor([[ 2., -2.],
            [ 2.,  2.]])
    """
    inputs = max(1, weight[0].numel())
    size = weight.square().mean().sqrt()
    # A weight of zeros stays one.
    size = torch.where(size > 0, size, 1.0)
    return weight * (math.sqrt(2 / (density * inputs)) / size)


def one_shot(scores: Tree, density: float) -> Mask:
    """FedMask: the weights of each layer with the largest scores; of equal ones the first."""
    return top(scores, Uniform()(scores, density))


def bits(scores: Tree, part: Mask) -> Mask:
    """FedMask: the weights in use: a score of 0 or more, within the client's part.

    >>> bits({"w": torch.tensor([1.0, -1.0, 1.0])}, {"w": torch.tensor([True, True, False])})
    {'w': tensor([ True, False, False])}
    """
    return {name: (scores[name] >= 0) & kept for name, kept in part.items()}


def check_density(weights: Tree, density: float) -> None:
    """FedMask: refuse a density at which a layer keeps no weight.

    Such a layer has the same output for every input.
    """
    for name, count in Uniform()(weights, density).items():
        size = weights[name].numel()
        # Half a weight is rounded to none, a little more to one.
        check(
            count >= 1,
            "density",
            density,
            f"above {0.5 / size:.3g}: at less, none of the {size:,} weights of {name} is kept",
        )


def majority(votes: Tree) -> Mask:
    """FedMask: the weights that at least half of those who may use them do use.

    >>> majority({"w": torch.tensor([0.4, 0.5, 1.0])})
    {'w': tensor([False,  True,  True])}
    """
    return {name: vote >= 0.5 for name, vote in votes.items()}


# ---- what a client sends, keeps and uses ---------------------------------------------------------


def send_bits(carry: Carry, client: Client) -> Outcome:
    """FedMask: the client sends its mask; scores and running statistics stay."""
    memory = {
        "part": carry["part"],
        "scores": carry["scores"],
        "statistics": trees.pick(carry["trained"], client.layout.buffers),
    }
    mask = bits(carry["scores"], carry["part"])
    return Outcome({"bits": Packet(mask, carry["part"])}, memory=memory)
