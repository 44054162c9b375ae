r"""FedEM: every client mixes the same few models with personal shares.

(Marfoq, Neglia, Bellet, Kameni & Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, Alg. 1.)

Round :math:`t`, cohort :math:`S_t`; components :math:`w_1..w_M` for all, shares :math:`\pi_k` of
client k::

    q_i(m) = pi_km exp(-loss(w_m; x_i, y_i)), scaled to sum 1 over m   -> responsibilities
    pi_km  = mean_i q_i(m)                                             -> shares_of
    w_km   = E epochs of min mean_i q_i(m) loss(w_m; x_i, y_i)         -> Train(Responsible)
    w_m    = sum_k n_k w_km / sum_k n_k                                -> average
    p(y|x) = sum_m pi_km softmax(w_m(x))                               -> mixed

All M components are sent both ways, but the shares are never sent. Before a client uses the
components, it fits its shares again. With one component this is FedAvg.

- Shared: ``components`` models.
- A client uses: a mixture of these models, with personal shares.
- Bytes in the paper: 8 C d M T.
- Secure aggregation: yes; each component is averaged; a client's shares stay on the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import (
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
from ..errors import check
from ..nets import Net, Output
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Loss, Objective
from ..parts.one_model import dense_bytes
from ..problems import CLASSES, restrict_outputs
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State:
    """The components."""

    round: int
    models: tuple[Tree, ...]


@dataclass(frozen=True)
class FedEM:
    """A mixture of a few models for all, in shares of each client's own."""

    components: int = 3
    """Number of models that every client mixes."""
    mean: Averaging = WeightedMean()
    """How each component is averaged over all clients: every client trains every component."""
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def __post_init__(self) -> None:
        # Each is a network that every client trains and keeps; the paper has 3.
        check(1 <= self.components <= 100, "components", self.components, "in 1..100")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The network's initial parameters and other draws of them."""
        # Different draws: equal components would stay equal for ever.
        models = [setup.params]
        for m in range(1, self.components):
            models.append(setup.fresh(m))
        return State(0, tuple(models))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """All components."""
        return {name_of(m): Packet(model) for m, model in enumerate(state.models)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return [Task(client, self.deliver(state, client)) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of each component."""
        means = [self.mean.start(model) for model in state.models]
        for report in reports:
            for m, mean in enumerate(means):
                mean.add(report.give[name_of(m)].values, report.examples)
        return State(state.round + 1, tuple(mean.value() for mean in means))

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Who explains which example; then train every component on its own, or mix them."""
        expectation = (
            Edit(self._begin),
            Measure("explained", Explained(self.components), of=name_of(0)),
            Edit(fit_shares),
        )
        if verb == "train":
            return (*expectation, *self._trains(), Give(self._send))
        return {"use": (*expectation, Edit(self._largest_first))}[verb]

    def _trains(self) -> list[Train]:
        trains = []
        for m in range(self.components):
            trains.append(Train(Responsible(m), self.local, name_of(m), f"local{m}"))
        return trains

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """Equal shares at first; a client that took part before remembers its own."""
        like = carry[name_of(0)][client.layout.params[0]]
        equal = {"pi": like.new_full((self.components,), 1 / self.components)}
        shares = carry.get("shares", equal)
        table = like.new_zeros(room_for(len(client.data.train)))
        return {**carry, "shares": shares, "room": {"zeros": table}}

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """All components; the shares stay."""
        give = {}
        for m in range(self.components):
            give[name_of(m)] = Packet(carry[f"local{m}"])
        return Outcome(give, memory={"shares": carry["shares"]})

    def _largest_first(self, carry: Carry, client: Client) -> Carry:
        """The component of the largest share is the client's model, the others follow it.

        So the one that fine-tuning trains is the one that counts most.
        """
        order = carry["shares"]["pi"].argsort(descending=True, stable=True)
        ordered = dict(carry)
        for place, m in enumerate(order.tolist()):
            # The first is "model", which fine-tuning trains; model0 is not read any more.
            name = name_of(place) if place else "model"
            ordered[name] = carry[name_of(m)]
        ordered["shares"] = {"pi": carry["shares"]["pi"][order]}
        return ordered

    @property
    def tuned(self) -> str:
        """FedEM: the component that fine-tuning trains, chosen by :meth:`_largest_first`."""
        return "model"

    def predict(self, net: Net, model: Tree, x: Tensor, carry: Carry) -> Tensor:
        """FedEM: the mixture of all components' predictions."""
        outputs = [net(model, x, train=False).logits]
        for m in range(1, self.components):
            outputs.append(net(carry[name_of(m)], x, train=False).logits)
        own = carry.get("client", {})
        return mixed(net, torch.stack(outputs), carry["shares"]["pi"], own)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters of all components, 4 bytes each, down and up."""
        return self.components * dense_bytes(net.layout.size, cohort, rounds)


def name_of(m: int) -> str:
    """FedEM: what a component is called on its way and in the carry."""
    return f"model{m}"


# ---- expectation and maximisation ----------------------------------------------------------------


def responsibilities(losses: Tensor, pi: Tensor) -> Tensor:
    r"""FedEM: Alg. 1, line 7: :math:`q_i(m) \propto \pi_m \exp(-\ell_m(x_i, y_i))`; sums 1 over m.

    ``losses`` is (components, examples), as is the result.

    >>> pi = torch.tensor([0.5, 0.5])
    >>> responsibilities(torch.tensor([[0.0], [0.0]]), pi).T
    tensor([[0.5000, 0.5000]])
    """
    # As logarithms: far from every component all exponentials would be 0.
    return torch.softmax(pi.log()[:, None] - losses, 0)


@dataclass(frozen=True)
class Explained:
    """What :class:`~fedgrove.core.Measure` sums: q of a batch, each at the place of its example.

    Over all batches that is the table of all q, (components, room): found once a round, and then
    looked up by every training step.
    """

    components: int

    @property
    def passes(self) -> int:
        """FedEM: each component runs once."""
        return self.components

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """q of the batch's examples, and 0 for all others."""
        own = carry.get("client", {})
        losses = []
        for m in range(self.components):
            out = net(carry[name_of(m)], batch.x, train=False)
            losses.append(net.problem.losses(out.logits, batch.y, own))
        # Padding has weight 0, and adds nothing to the example it repeats.
        q = responsibilities(torch.stack(losses), carry["shares"]["pi"]) * batch.weight
        empty = carry["room"]["zeros"].expand(self.components, -1)
        return {"q": empty.index_add(1, batch.index, q)}


def room_for(examples: int) -> int:
    """FedEM: the length of a client's table: 64, 256, 1024, ...

    Not the number of examples itself: clients whose tables are of one length train at once.

    >>> room_for(0), room_for(64), room_for(65)
    (64, 64, 256)
    """
    room = 64
    while room < examples:
        room *= 4
    return room


def fit_shares(carry: Carry, client: Client) -> Carry:
    """FedEM: the client's shares by what each component explains; as they were without examples."""
    if not carry["explained"]:
        return carry
    return {**carry, "shares": {"pi": shares_of(carry["explained"]["q"])}}


def shares_of(q: Tensor) -> Tensor:
    r"""FedEM: Alg. 1, line 9: :math:`\pi_m = \frac1n \sum_i q_i(m)`.

    >>> shares_of(torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]]))
    tensor([0.7500, 0.2500])
    """
    explained = q.sum(1)
    # Every example adds 1 in all, so the total is their number; of the rest of the table all is 0.
    return explained / explained.sum()


@dataclass(frozen=True)
class Responsible(Objective):
    r"""Alg. 1, line 10: :math:`\sum_i v_i q_i(m) \ell(x_i, y_i) / \sum_i v_i`.

    :math:`v` -> ``batch.weight``, m -> ``component``. Divided by the examples and not by their q: a
    component that explains little of a client is moved little by it.
    """

    only_in: ClassVar[str] = "fedem"
    targets: ClassVar[tuple[str, ...] | None] = ()
    component: int

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean loss, each example as much as this component explains of it."""
        q = carry["explained"]["q"][self.component].gather(0, batch.index)
        per_example = out.net.problem.losses(out.logits, batch.y, carry.get("client", {}))
        return (q * per_example * batch.weight).sum() / batch.weight.sum(), {}


def mixed(net: Net, outputs: Tensor, pi: Tensor, own: Tree) -> Tensor:
    """FedEM: the logarithm of the mixed probabilities; for other targets the mean output.

    ``outputs`` is (components, examples, outputs).
    """
    if net.problem.name != CLASSES.name:
        return (pi[:, None, None] * outputs).sum(0)
    # A mixture of probabilities, not of logits; as logarithms, so that small ones do not vanish.
    log_probabilities = F.log_softmax(restrict_outputs(outputs, own), 2)
    return torch.logsumexp(log_probabilities + pi.log()[:, None, None], 0)
