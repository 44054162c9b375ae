r"""FedDyn: a penalty that follows each client's own gradient (Acar, Zhao, Navarro, Mattina,
Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`; w the model, g_k the gradient that client k keeps, h the
server's, 0 at first; n_k examples of client k, n of all clients::

    w_k  = E epochs of min CE(v; D_k) - <g_k, v> + alpha/2 |v - w|^2 from w
                                                       -> Train(ProblemLoss + Linear + Proximal)
    g_k  = g_k - alpha (w_k - w)                       -> next_gradient
    h    = h - alpha sum_S n_k (w_k - w) / n           -> moved_server
    w    = sum_S n_k w_k / sum_S n_k - h / alpha       -> moved_server

The server keeps -h / alpha, the sum of the updates. With alpha = 0 this is FedAvg.

- Shared: the model; a penalty pulls clients towards a common optimum.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; the model is averaged; the gradients g_k stay on the clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from .. import trees
from ..core import Carry, Client, Edit, Give, Outcome, Packet, Report, Setup, Stage, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.objective import Linear, Proximal
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    send_model,
    train_cohort,
)
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State(OneModel):
    """The model, and the sum of the updates."""

    sum: Tree
    """-h / alpha, for every parameter."""
    examples: int
    """n, the number of training examples of all clients."""


@dataclass(frozen=True)
class FedDyn(CommonParts):
    """One model for all; each client's penalty follows its own gradient."""

    alpha: float = 0.01
    """The strength of the penalty; 0: FedAvg."""
    _: KW_ONLY
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        check(self.alpha >= 0, "alpha", self.alpha, "0 or more")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Alg. 1, "input": all gradients are 0."""
        nothing = trees.map(torch.zeros_like, trees.pick(setup.params, setup.layout.params))
        examples = sum(info.examples for info in setup.clients.values())
        return State(0, setup.params, nothing, examples)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """Alg. 1, "for each device k in P_t in parallel"."""
        return train_cohort(state, cohort)

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Alg. 1, the server's lines."""
        if not self.alpha:
            return average(state, reports, self.mean)
        models = self.mean.start(state.model)
        examples = 0
        for report in reports:
            models.add(report.give["model"].values, report.examples)
            examples += report.examples
        share = examples / max(1, state.examples)
        model, total = moved_server(state.model, models.value(), state.sum, share)
        return replace(state, round=state.round + 1, model=model, sum=total)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Alg. 1, the device: train under the penalty, send the model, keep the gradient."""
        if verb == "train" and not self.alpha:
            return (Train(self.objective, self.local), Give(send_model))
        objective = self.objective + Linear("descent") + Proximal(self.alpha)
        return {
            "train": (Edit(begin), Train(objective, self.local), Give(self._give)),
            "use": (),
        }[verb]

    def _give(self, carry: Carry, client: Client) -> Outcome:
        """What the client sends, and its next gradient."""
        trained = trees.pick(carry["local"], carry["descent"])
        received = trees.pick(carry["model"], carry["descent"])
        gradient = next_gradient(carry["own_gradient"], trained, received, self.alpha)
        return Outcome({"model": Packet(carry["local"])}, memory={"own_gradient": gradient})

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters, 4 bytes each, down and up."""
        return dense_bytes(net.layout.size, cohort, rounds)


def begin(carry: Carry, client: Client) -> Carry:
    """FedDyn: -g_k, which is added to every gradient; a new client has g_k = 0."""
    params = trees.pick(carry["model"], client.layout.params)
    own = carry.get("own_gradient") or trees.map(torch.zeros_like, params)
    return {**carry, "own_gradient": own, "descent": trees.map(torch.neg, own)}


def next_gradient(
    own: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    alpha: float,
) -> Tree:
    r"""FedDyn, Alg. 1: :math:`g_k \leftarrow g_k - \alpha (w_k - w)`.

    :math:`g_k` -> ``own``, :math:`w_k` -> ``trained``, :math:`w` -> ``received``. Where training
    ends in an optimum, this is the gradient of the client's own loss.

    >>> g, w_k, w = ({"w": torch.tensor([number])} for number in (1.0, 2.0, 4.0))
    >>> next_gradient(g, w_k, w, alpha=0.5)
    {'w': tensor([2.])}
    """
    return trees.map(lambda g, w_k, w: g - alpha * (w_k - w), own, trained, received)


def moved_server(
    model: Mapping[str, Tensor], mean: Tree, total: Mapping[str, Tensor], share: float
) -> tuple[Tree, Tree]:
    r"""FedDyn, Alg. 1, the server: :math:`s \leftarrow s + \frac{|S|}{m}(\bar w - w)`,
    :math:`w \leftarrow \bar w + s`, with :math:`s = -h / \alpha`.

    :math:`w` -> ``model``, :math:`\bar w` -> ``mean``, :math:`s` -> ``total``. Running statistics
    are averaged. Differs from the paper: ``share`` is that of the examples, not of the clients, as
    the mean is weighted.

    >>> w, mean, s = ({"w": torch.tensor([number])} for number in (4.0, 2.0, 1.0))
    >>> moved_server(w, mean, s, share=0.5)
    ({'w': tensor([2.])}, {'w': tensor([0.])})
    """
    mean_params = trees.pick(mean, total)
    before = trees.pick(model, total)
    after = trees.map(lambda s, m, w: s + share * (m - w), total, mean_params, before)
    return {**mean, **trees.map(torch.add, mean_params, after)}, after
