r"""pFedGate: a gating layer of each client's own picks blocks of the shared model within a budget
(Chen, Yao, Gao, Ding & Li, "Efficient Personalized Federated Learning via Sparse Model-Adaptation",
ICML 2023).

Round :math:`t`, cohort :math:`S_t`; w shared, phi_k a client's gating layer, budget s::

    phi_k = an epoch of min CE(w m(x; phi)) from phi_k, blocks m by batch x  -> Train, GatedLoss
    M_k   = the knapsack by phi_k's mean scores on the client's data        -> summed_scores, chosen
    w_k   = E epochs of min CE(w M_k; D_k)                                   -> Train under a mask
    w     = w + sum_k n_k (w_k - w M_k) / sum_k n_k                          -> recovered

Each weight is cut into ``blocks`` blocks, and those in use hold at most a share ``budget`` of all
weights. phi_k never leaves the client; w_k travels under M_k. A client uses w M_k. With a budget of
1 there are no gates, and this is FedAvg.

- Shared: the model; each client sends back the blocks that its own gating layer chose.
- A client uses: these blocks of the shared model.
- Bytes in the paper: 4 (d + s d_w + d − d_w) M T.
- Secure aggregation: yes; clients choose blocks. A sum of values and a sum of masks is all the
  server needs; dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ... import trees
from ...core import (
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
from ...errors import check
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.local import SGD, LocalTraining
from ...parts.mask import weights_to_prune
from ...parts.one_model import (
    OneModel,
    deliver_model,
    initial_model,
    model_with_own_mask,
    send_model,
    train_cohort,
)
from ...trees import Tree
from .blocks import GatedLoss, GatingLayer, block_mask, blocks_in, check_budget, cuts, summed_scores


@dataclass(frozen=True)
class PFedGate(CommonParts):
    """One model, of which every client's own gating layer picks the blocks it can afford."""

    budget: float = 0.5
    """The share of the weights that a client uses; 1: all, and there are no gates."""
    blocks: int = 5
    """How many blocks each weight is cut into."""
    gate: LocalTraining = LocalTraining(1, 32, SGD(0.1))
    """How the gating layer trains."""

    def __post_init__(self) -> None:
        check(0 < self.budget <= 1, "budget", self.budget, "above 0, at most 1")
        check(self.blocks >= 2, "blocks", self.blocks, "2 or more")

    @property
    def gates(self) -> bool:
        """Whether there is anything to choose."""
        return self.budget < 1

    def nets(self, net: Net) -> Mapping[str, Net]:
        """The gating layer; every client's starts alike, from the run's seed."""
        if not self.gates:
            return {}
        # Before a layer of no gates is made, of which torch warns.
        weights_to_prune(net.layout, self.budget)
        features = torch.Size(net.shape).numel()
        module = GatingLayer(features, len(blocks_in(cuts(net.layout, self.blocks))))
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
                Train(self.objective, self.local, mask="chosen"),
                Give(send_blocks, model_with_own_mask),
            ),
            "use": (Edit(self._use),),
        }[verb]

    def _choose(self, carry: Carry, client: Client) -> Carry:
        """The mask of this round, by the mean scores over the client's training data."""
        sums = carry["scores"]
        scores = sums["sum"] / sums["examples"]
        blocks = cuts(client.layout, self.blocks)
        mask = block_mask(scores, blocks, self.budget)
        return {**carry, "chosen": mask, "scores": {"mean": scores}}

    def _use(self, carry: Carry, client: Client) -> Carry:
        """The shared model in the client's blocks; all of it before the client has gates."""
        rest = dict(carry)
        # Taken out, so that clients are scored at once.
        rest.pop("gate", None)
        scores = rest.pop("scores", None)
        if scores is None:
            return rest
        mask = block_mask(scores["mean"], cuts(client.layout, self.blocks), self.budget)
        return {**rest, "model": trees.apply_mask(carry["model"], mask), "model.mask": mask}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The whole model down, the budget's share of its weights and all else up, in 32 bits."""
        weights = net.layout.count(net.layout.prunable)
        up = round(self.budget * weights) + net.layout.size - weights
        return 4 * (net.layout.size + up) * cohort * rounds


def begin_gate(carry: Carry, client: Client) -> Carry:
    """A client's gating layer as it left it; at first as all begin."""
    rest = dict(carry)
    # What an earlier round chose by: taken out, so that old and new clients train at once.
    rest.pop("scores", None)
    if "gate" not in rest:
        rest["gate"] = client.nets["gate"].params()
    return rest


def send_blocks(carry: Carry, client: Client) -> Outcome:
    """The trained blocks under their mask; the gating layer and its scores stay."""
    packet = Packet(carry["local"], carry["chosen"])
    return Outcome({"model": packet}, memory={"gate": carry["gate"], "scores": carry["scores"]})


def recovered(packet: Packet, model: Tree) -> Tree:
    """A client's model, with the server's own values in the blocks that it did not use."""
    whole = dict(packet.values)
    for name, mask in (packet.mask or {}).items():
        whole[name] = torch.where(mask, whole[name], model[name].to(whole[name].dtype))
    return whole
