r"""FedEM: every client mixes the same few models in its own way.

(Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021,
Alg. 1.) Components :math:`w_1..w_M`, a client's own shares :math:`\pi`::

    q_i  = softmax_m(log pi_m - loss(w_m; x_i, y_i))   who explains an example -> responsibility
    pi_m = mean_i q_i(m)                               stays on the client     -> new_shares
    w_m  = E epochs of min mean_i q_i(m) loss(w_m)     one Train per component -> Responsible
    w_m  = sum_k n_k w_mk / sum_k n_k                  -> WeightedMean
    p(y|x) = sum_m pi_m softmax(w_m(x))                -> predict

Run it with: fedgrove run examples/fedem.py:FedEM --data motion
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedgrove.core import Edit, Give, Measure, Outcome, Packet, Task, Train
from fedgrove.parts.aggregate import WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import Objective
from fedgrove.problems import restricted
from fedgrove.wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    round: int
    models: tuple[dict[str, torch.Tensor], ...]


@dataclass(frozen=True)
class FedEM:
    """A mixture of a few models, in shares of each client's own."""

    components: int = 3
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start):
        # Different draws: equal components would stay equal.
        return State(0, (start.params, *(start.fresh(m) for m in range(1, self.components))))

    def deliver(self, state, client):
        return {f"model{m}": Packet(model) for m, model in enumerate(state.models)}

    def plan(self, state, cohort):
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state, reports):
        means = [WeightedMean().start(model) for model in state.models]
        for report in reports:
            for m, mean in enumerate(means):
                mean.add(report.give[f"model{m}"].values, report.examples)
        return State(state.round + 1, tuple(mean.value() for mean in means))

    def work(self, verb):
        if verb == "use":
            return (Edit(self.begin),)
        trains = []
        for m in range(self.components):
            trains.append(Train(Responsible(m), self.local, f"model{m}", f"local{m}"))
        shares = Measure("explained", explained, of="model0")
        return (Edit(self.begin), shares, Edit(new_shares), *trains, Give(self.send))

    def begin(self, carry, client):
        """Equal shares at first; a client that took part before remembers its own."""
        equal = carry["model0"][client.layout.params[0]].new_full((self.components,), 1.0)
        shares = carry.get("shares", {"log": -equal.sum().log() * equal})
        return {**carry, "shares": shares, "prior": shares, "model": carry["model0"]}

    def send(self, carry, client):
        give = {f"model{m}": Packet(carry[f"local{m}"]) for m in range(self.components)}
        return Outcome(give, memory={"shares": carry["shares"]})

    def predict(self, net, model, x, carry):
        """The mixture's log-probabilities; the mean of the outputs where targets are no classes."""
        outputs = outputs_of(net, x, carry)
        log_shares = carry["shares"]["log"][:, None, None]
        if net.problem.name != "classes":
            return (log_shares.exp() * outputs).sum(0)
        logits = restricted(outputs, carry.get("client", {}))
        return torch.logsumexp(F.log_softmax(logits, 2) + log_shares, 0)


def outputs_of(net, x, carry):
    """What every component gives: (components, examples, outputs)."""
    count = len(carry["shares"]["log"])
    return torch.stack([net(carry[f"model{m}"], x, train=False).logits for m in range(count)])


def responsibility(net, batch, carry):
    """q, by the shares before this round: how much of each example each component explains."""
    own = carry.get("client", {})
    losses = [net.problem.losses(each, batch.y, own) for each in outputs_of(net, batch.x, carry)]
    return torch.softmax(carry["prior"]["log"][:, None] - torch.stack(losses), 0)


def explained(net, params, batch, carry):
    return {"q": (responsibility(net, batch, carry) * batch.weight).sum(1)}


def new_shares(carry, client):
    return {**carry, "shares": {"log": (carry["explained"]["q"] / client.info.examples).log()}}


@dataclass(frozen=True)
class Responsible(Objective):
    component: int

    def __call__(self, out, params, batch, carry):
        with torch.no_grad():
            q = responsibility(out.net, batch, carry)[self.component]
        per_example = out.net.problem.losses(out.logits, batch.y, carry.get("client", {}))
        return (q * per_example * batch.weight).sum() / batch.weight.sum(), {}
