r"""FedGen: the server learns to make features of every class, and clients train on them too.

(Zhu, Hong & Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML
2021, Alg. 1.) Head h of the network, generator G(z, y) -> features::

    G    = a few steps of min CE(mean_k h_k(G(z, y)), y)       on the server  -> train_server
    w_k  = E epochs of min CE(w) + lambda CE(h(G(z, y)), y)    on the client  -> Generated
    w    = sum_k w_k / |S|                                     -> fold

As in the authors' code, the first round goes without the second term. Differs from the paper: no
counts of labels, no term for varied samples, one draw of 64 features for a task, not for each step.

Run it with: fedgrove run examples/fedgen.py:FedGen --data digits
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from fedgrove import seeds, trees
from fedgrove.core import Edit, ExpectedPacket, ExpectedReport, Give, Packet, Task, Train
from fedgrove.nets import Net
from fedgrove.parts.aggregate import WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import CrossEntropy, Objective
from fedgrove.parts.one_model import deliver_model, send_model
from fedgrove.wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    round: int
    model: dict
    generator: dict
    heads: tuple = ()


@dataclass(frozen=True)
class FedGen:
    weight: float = 1.0
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def nets(self, net):
        weight = net.params()[net.layout.head[0]]
        classes, features = weight.shape
        module = nn.Sequential(nn.Linear(2 * classes, 64), nn.ReLU(), nn.Linear(64, features))
        return {"generator": Net(module.to(weight.dtype), (2 * classes,))}

    def init(self, start):
        head = trees.pick(start.params, start.layout.head)
        return State(0, start.params, start.nets["generator"].params(), (head,))

    def deliver(self, state, client):
        return deliver_model(state)

    def plan(self, state, cohort):
        send = {**deliver_model(state), "generator": Packet(state.generator)}
        return [Task(k, send) for k in cohort]

    def fold(self, state, reports):
        mean = WeightedMean().start(state.model)
        heads = []
        for report in reports:
            mean.add(report.give["model"].values, 1)
            heads.append(trees.pick(report.give["model"].values, state.heads[0]))
        return replace(state, round=state.round + 1, model=mean.value(), heads=tuple(heads))

    def train_server(self, state, server):
        rng = seeds.torch_rng(server.seed)
        leaves = {k: v.clone().requires_grad_() for k, v in state.generator.items()}
        optimiser = torch.optim.Adam(leaves.values(), lr=1e-2)
        for _ in range(20):
            features, y = generated(server.nets["generator"], leaves, rng)
            logits = torch.stack([F.linear(features, *head.values()) for head in state.heads])
            optimiser.zero_grad()
            F.cross_entropy(logits.mean(0), y).backward()
            optimiser.step()
        return replace(state, generator={k: v.detach() for k, v in leaves.items()})

    def server_metrics(self, state):
        return {"generator_length": float(trees.sq_norm(state.generator)) ** 0.5}

    def work(self, verb):
        # Not ProblemLoss: features are made of classes, and data without any are to be refused.
        train = Train(CrossEntropy() + Generated(self.weight), self.local)
        return {"train": (Edit(generate), train, Give(send_model, self.holds)), "use": ()}[verb]

    def holds(self, task, net):
        return ExpectedReport({"model": ExpectedPacket.of(task.send["model"].values)})


def generate(carry, client):
    rng = seeds.torch_rng(client.seed, "generated")
    features, y = generated(client.nets["generator"], carry["generator"], rng)
    return {**carry, "generated": {"features": features, "y": y}}


def generated(net, tree, rng):
    """64 features, and the labels they were made for; of noise as much as of labels."""
    classes = net.shape[0] // 2
    y = torch.randint(classes, (64,), generator=rng)
    noise = torch.randn(64, classes, generator=rng).to(next(iter(tree.values())))
    return net(tree, torch.cat([noise, F.one_hot(y, classes).to(noise)], 1), train=True).logits, y


@dataclass(frozen=True)
class Generated(Objective):
    weight: float

    def __call__(self, out, params, batch, carry):
        head = trees.pick(params, out.net.layout.head)
        logits = F.linear(carry["generated"]["features"], *head.values())
        loss = F.cross_entropy(logits, carry["generated"]["y"])
        return self.weight * (carry["settings"]["round"] > 0) * loss, {}
