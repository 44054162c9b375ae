r"""FedEM: every client mixes the same few models in its own way.

(Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021,
Alg. 1.) Components :math:`w_1..w_M`, a client's own shares :math:`\pi`::

    q_i  = softmax_m(log pi_m - CE(w_m; x_i, y_i))       who explains an example -> responsibility
    pi_m = mean_i q_i(m)                                 stays on the client     -> new_shares
    w_m  = E epochs of min mean_i q_i(m) CE(w_m)         one Train per component -> Responsible
    w_m  = sum_k n_k w_mk / sum_k n_k                    -> WeightedMean
    p(y|x) = sum_m pi_m softmax(w_m(x))                  -> predict

Run it with: fedgrove run examples/fedem.py:FedEM --data motion
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedgrove.core import Edit, Give, Measure, Outcome, Packet, Task, Train
from fedgrove.parts.aggregate import Averaging, WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import Objective
from fedgrove.wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    round: int
    models: tuple[dict[str, torch.Tensor], ...]


@dataclass(frozen=True)
class FedEM:
    """A mixture of a few models, in shares of each client's own."""

    components: int = 3
    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start):
        # Different draws: equal components would stay equal.
        others = [start.fresh(m) for m in range(1, self.components)]
        return State(0, (start.params, *others))

    def deliver(self, state, client):
        return {f"model{m}": Packet(model) for m, model in enumerate(state.models)}

    def plan(self, state, cohort):
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state, reports):
        means = [self.mean.start(model) for model in state.models]
        for report in reports:
            for m, mean in enumerate(means):
                mean.add(report.give[f"model{m}"].values, report.examples)
        return State(state.round + 1, tuple(mean.value() for mean in means))

    def work(self, verb):
        begin = Edit(self.begin)
        if verb == "use":
            return (begin,)
        trains = []
        for m in range(self.components):
            trains.append(Train(Responsible(m), self.local, f"model{m}", f"local{m}"))
        shares = Measure("explained", explained, of="model0")
        return (begin, shares, Edit(new_shares), *trains, Give(self.send))

    def begin(self, carry, client):
        """Equal shares at first; a client that took part before remembers its own."""
        equal = carry["model0"][client.layout.params[0]].new_full((self.components,), 1.0)
        return {"shares": {"log": -equal.sum().log() * equal}, **carry, "model": carry["model0"]}

    def send(self, carry, client):
        give = {f"model{m}": Packet(carry[f"local{m}"]) for m in range(self.components)}
        return Outcome(give, memory={"shares": carry["shares"]})

    def predict(self, net, model, x, carry):
        """The mixture's log-probabilities."""
        log_p = []
        for m in range(self.components):
            log_p.append(F.log_softmax(net(carry[f"model{m}"], x, train=False).logits, 1))
        return torch.logsumexp(torch.stack(log_p) + carry["shares"]["log"][:, None, None], 0)


def responsibility(net, batch, carry):
    """q: for each component and example, how much of the example it explains."""
    losses = []
    for m in range(len(carry["shares"]["log"])):
        logits = net(carry[f"model{m}"], batch.x, train=False).logits
        losses.append(F.cross_entropy(logits, batch.y, reduction="none"))
    return torch.softmax(carry["shares"]["log"][:, None] - torch.stack(losses), 0)


def explained(net, params, batch, carry):
    return {"q": (responsibility(net, batch, carry) * batch.weight).sum(1)}


def new_shares(carry, client):
    return {**carry, "shares": {"log": (carry["explained"]["q"] / client.info.examples).log()}}


@dataclass(frozen=True)
class Responsible(Objective):
    """Cross-entropy of one component, each example weighted by how much the component explains."""

    component: int

    def __call__(self, out, params, batch, carry):
        with torch.no_grad():
            q = responsibility(out.net, batch, carry)[self.component]
        per_example = F.cross_entropy(out.logits, batch.y, reduction="none")
        return (q * per_example * batch.weight).sum() / batch.weight.sum(), {}
