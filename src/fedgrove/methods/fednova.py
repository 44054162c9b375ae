r"""FedNova: updates are divided by their number of steps before they are averaged (Wang, Liu,
Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020).

Round :math:`t`, cohort :math:`S_t`; client k does tau_k steps with its n_k examples, and p_k is
n_k / sum_S n_k::

    w_k  = E epochs of min CE(w; D_k) from w                       -> Train(ProblemLoss)
    a_k  = tau_k, or with momentum the sum of its weights          -> norm_of_steps
    w    = w + (sum_S p_k a_k) sum_S p_k (w_k - w) / a_k           -> fold

A client with many examples does more steps, and in FedAvg it counts for more than its share p_k.
Where all clients do the same number of steps, and with ``normalise=false``, this is FedAvg.

- Shared: the model; updates are averaged by step.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T.
- Secure aggregation: yes; updates are averaged; clients would divide them by their number of steps,
  which the server knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from torch import Tensor

from .. import trees
from ..core import Batches, Give, Packet, Report, Setup, Stage, Task, Train
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.local import SGD, LocalTraining, batches_of
from ..parts.one_model import (
    OneModel,
    average,
    deliver_model,
    dense_bytes,
    send_model,
    train_cohort,
)
from ..parts.server import ServerOptimiser, begin_server, step_server
from ..trees import Tree
from ..wire.codec import Codec, Dense


@dataclass(frozen=True)
class State(OneModel):
    """The model, and what the number of a client's steps follows from."""

    params: tuple[str, ...]
    """The names of the parameters; all else is running statistics, which are averaged."""
    least: int
    """A last batch with fewer examples is skipped."""


@dataclass(frozen=True)
class FedNova(CommonParts):
    """One model for all: the mean of what each client changes in a step."""

    normalise: bool = True
    """Whether updates are divided by the number of steps; false: FedAvg."""
    _: KW_ONLY
    codec: Codec = Dense()
    server: ServerOptimiser | None = None
    """What the server makes of the mean update; none: the mean is the next model."""

    def init(self, setup: Setup) -> State:
        """The network's initial parameters."""
        over = batches_of(setup.net, Train(self.objective, self.local or LocalTraining()))
        params = setup.layout.params
        remembered = begin_server(self.server, trees.pick(setup.params, params))
        return State(0, setup.params, tuple(params), over.least, server=remembered)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains."""
        return train_cohort(state, cohort)

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean change of a step, times the mean number of steps."""
        if not self.normalise:
            return average(state, reports, self.mean, self.server)
        local = self.local or LocalTraining()
        models = self.mean.start(state.model)
        steps = 0.0
        examples = 0
        for report in reports:
            # A client that does no step has not moved.
            norm = norm_of_steps(local, report.examples, state.least) or 1.0
            given = report.give["model"].values
            models.add(scaled(state, given, 1 / norm), report.examples)
            steps += report.examples * norm
            examples += report.examples
        mean = scaled(state, models.value(), steps / max(1, examples))
        model, kept = step_server(self.server, state.model, mean, state.server)
        return replace(state, round=state.round + 1, model=model, server=kept)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """As in FedAvg: train and send."""
        if verb == "train":
            return (Train(self.objective, self.local), Give(send_model))
        return {"use": ()}[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters, 4 bytes each, down and up."""
        return dense_bytes(net.layout.size, cohort, rounds)


def scaled(state: State, model: Mapping[str, Tensor], factor: float) -> Tree:
    """FedNova: a model whose difference from the server's is multiplied; statistics are not."""
    after = dict(model)
    for name in state.params:
        before = state.model[name]
        after[name] = before + factor * (model[name] - before)
    return after


def norm_of_steps(local: LocalTraining, examples: int, least: int = 1) -> float:
    r"""FedNova: :math:`\lVert a_k \rVert_1`, the sum of the weights of the gradients of a round.

    With plain SGD it is the number of steps :math:`\tau`. With momentum :math:`\rho` it is
    :math:`\big(\tau - \rho (1 - \rho^\tau) / (1 - \rho)\big) / (1 - \rho)`. Differs from the
    paper: with Adam, which it does not treat, it is the number of steps.

    >>> norm_of_steps(LocalTraining(2, 8, SGD(0.1)), examples=20)
    6.0
    >>> norm_of_steps(LocalTraining(1, 8, SGD(0.1, momentum=0.5)), examples=16)
    2.5
    """
    over = Batches(size=local.batch, least=least)
    steps = local.epochs * math.ceil(over.seen(examples) / local.batch)
    optimiser = local.optimiser
    if not isinstance(optimiser, SGD) or not optimiser.momentum:
        return float(steps)
    rho = optimiser.momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
