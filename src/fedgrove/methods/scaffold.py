r"""SCAFFOLD: each step is corrected by the difference of two gradients (Karimireddy, Kale, Mohri,
Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Alg. 1).

Round :math:`t`, cohort :math:`S_t`; x the model, c and c_i the control variates of the server and
of client i, all 0 at first; K steps with rate lr, n_i examples of client i, n of all clients::

    y_i  = K steps y - lr (g_i(y) + c - c_i) from x  (Eq. 3)     -> Train(ProblemLoss + Linear)
    c_i+ = c_i - c + (x - y_i) / (K lr)      (Eq. 4, option II)  -> control_of_update
           or the gradient g_i(x)            (Eq. 4, option I)   -> Measure(Gradient)
    x    = sum_S n_i y_i / sum_S n_i                             -> FedAvg
    c    = c + sum_S n_i (c_i+ - c_i) / n    (Eq. 5)             -> moved_control

With plain SGD, option II is the mean of the gradients of the K steps. With another optimiser it is
not a gradient, so that option I is used. Without control variates (``control="off"``) this is
FedAvg.

- Shared: the model, and the mean of the clients' gradients, which corrects every step.
- A client uses: the shared model.
- Bytes in the paper: 16 d M T.
- Secure aggregation: yes; models and changes of control variates are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .. import trees
from ..core import (
    Batches,
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
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
from ..errors import InputError, unknown
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.gradient import Gradient
from ..parts.local import SGD, LocalTraining, count_steps, learning_rate
from ..parts.objective import Linear
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

CONTROLS = ("auto", "update", "gradient", "off")
"""Option II with plain SGD, otherwise option I; option II; option I; no control variates."""
ALL_EXAMPLES = Batches("train")


@dataclass(frozen=True)
class State(OneModel):
    """The model and the server's control variate."""

    control: Tree
    """c, for every parameter; empty without control variates."""
    examples: int
    """n, the number of training examples of all clients."""


@dataclass(frozen=True)
class Scaffold(CommonParts):
    """One model for all; control variates correct every step towards the mean of all clients."""

    control: Literal["auto", "update", "gradient", "off"] = "auto"
    """How a client computes its control variate: "update", the paper's option II, which needs
    plain SGD; "gradient", option I, with one more pass over its data; "auto", option II with plain
    SGD and otherwise option I; "off", no control variates."""
    _: KW_ONLY
    codec: Codec = Dense()
    server: ServerOptimiser | None = None
    """What the server makes of the mean update; none: the mean is the next model, which is the
    paper's global step size of 1."""

    def __post_init__(self) -> None:
        if self.control not in CONTROLS:
            raise unknown("control", str(self.control), CONTROLS)

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Alg. 1, "initialize c and c_i"; option II without plain SGD is refused here."""
        if self.control == "update" and not is_plain_sgd(self.local):
            raise InputError(
                "control is update, which takes updates as sums of gradients, and local training "
                f"{_describe(self.local)}; use SGD without momentum and clipping, or set control "
                "to gradient."
            )
        params = trees.pick(setup.params, setup.layout.params)
        control: Tree = {}
        if self.control != "off":
            control = zeros_like(params)
        examples = sum(info.examples for info in setup.clients.values())
        remembered = begin_server(self.server, params)
        return State(0, setup.params, control, examples, server=remembered)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the model."""
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """Alg. 1, "communicate (x, c) to all clients i in S"."""
        if self.control == "off":
            return train_cohort(state, cohort)
        send = {**deliver_model(state), "control": Packet(state.control)}
        return [Task(client, send) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Eq. 5: the mean model, and the control variate moved by the changes of the clients'."""
        if self.control == "off":
            return average(state, reports, self.mean, self.server)
        models = self.mean.start(state.model)
        changes = self.mean.start(zeros_like(state.control))
        examples = 0
        for report in reports:
            models.add(report.give["model"].values, report.examples)
            changes.add(report.give["change"].values, report.examples)
            examples += report.examples
        share = examples / max(1, state.examples)
        control = moved_control(state.control, changes.value(), share)
        model, kept = step_server(self.server, state.model, models.value(), state.server)
        return replace(state, round=state.round + 1, model=model, control=control, server=kept)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Alg. 1, the client: train corrected, and send the model and the change of c_i."""
        if verb == "train" and self.control == "off":
            return (Train(self.objective, self.local), Give(send_model))
        measuring: tuple[Stage, ...] = ()
        if self._by_gradient:
            measuring = (Measure("gradient", Gradient(self.objective, whole=True), ALL_EXAMPLES),)
        corrected = Train(self.objective + Linear("correction"), self.local)
        return {
            "train": (Edit(begin), *measuring, corrected, Give(self._give, expected_change)),
            "use": (),
        }[verb]

    @property
    def _by_gradient(self) -> bool:
        if self.control == "auto":
            return not is_plain_sgd(self.local)
        return self.control == "gradient"

    def _give(self, carry: Carry, client: Client) -> Outcome:
        """Eq. 4, and what the client sends."""
        before = carry["own_control"]
        after = self._own_control(carry, client)
        give = {"model": Packet(carry["local"]), "change": Packet(trees.sub(after, before))}
        return Outcome(give, memory={"own_control": after})

    def _own_control(self, carry: Carry, client: Client) -> Tree:
        """c_i+; a client that does no step keeps c_i."""
        local = self.local or LocalTraining()
        steps = count_steps(Train(self.objective, local), client)
        if not steps:
            return carry["own_control"]
        if self._by_gradient:
            count = client.count_seen(ALL_EXAMPLES)
            return trees.map(lambda total: total / count, carry["gradient"])
        return control_of_update(
            trees.pick(carry["model"], carry["correction"]),
            trees.pick(carry["local"], carry["correction"]),
            carry["correction"],
            steps,
            float(learning_rate(local, carry)),
        )

    # ---- what a run says of it -------------------------------------------------------------------

    def notes(self, net: Net) -> list[str]:
        """SCAFFOLD: say that option I is used where option II was not asked to be left out."""
        if self.control != "auto" or not self._by_gradient:
            return []
        return [
            "scaffold computes control variates as gradients at the received model (option I of "
            f"the paper): option II needs plain SGD, and local training {_describe(self.local)}"
        ]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """All parameters and as many control variates, 4 bytes each, down and up."""
        each = 1 if self.control == "off" else 2
        return each * dense_bytes(net.layout.size, cohort, rounds)


def begin(carry: Carry, client: Client) -> Carry:
    """SCAFFOLD: c - c_i, which is added to every gradient; a new client has c_i = 0."""
    control = carry["control"]
    own = carry.get("own_control") or zeros_like(control)
    return {**carry, "own_control": own, "correction": trees.sub(control, own)}


def control_of_update(
    received: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    correction: Mapping[str, Tensor],
    steps: int,
    lr: float,
) -> Tree:
    r"""SCAFFOLD, Eq. 4, option II: :math:`c_i^+ = c_i - c + \frac{1}{K \eta_l}(x - y_i)`.

    :math:`x` -> ``received``, :math:`y_i` -> ``trained``, :math:`c - c_i` -> ``correction``,
    :math:`K` -> ``steps``, :math:`\eta_l` -> ``lr``.

    >>> x, y, c = ({"w": torch.tensor([number])} for number in (2.0, 1.0, 0.5))
    >>> control_of_update(x, y, c, steps=4, lr=0.25)
    {'w': tensor([0.5000])}
    """
    return trees.map(lambda x, y, c: (x - y) / (steps * lr) - c, received, trained, correction)


def moved_control(
    control: Mapping[str, Tensor], change: Mapping[str, Tensor], share: float
) -> Tree:
    r"""SCAFFOLD, Eq. 5: :math:`c \leftarrow c + \frac{|S|}{N} \overline{\Delta c_i}`.

    :math:`\overline{\Delta c_i}`, the mean over those that reported -> ``change``. Differs from
    the paper: ``share`` is that of the examples, not of the clients, as the mean is weighted.

    >>> moved_control({"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}, share=0.25)
    {'w': tensor([2.])}
    """
    return trees.map(lambda c, moved: c + share * moved, control, change)


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    """SCAFFOLD: the control variates before the first round."""
    return trees.map(torch.zeros_like, tree)


def is_plain_sgd(local: LocalTraining | None) -> bool:
    """SCAFFOLD: whether an update is the sum of the gradients times the learning rate."""
    if local is None or local.clip is not None:
        return False
    return isinstance(local.optimiser, SGD) and local.optimiser.momentum == 0


def _describe(local: LocalTraining | None) -> str:
    """What keeps local training from being plain SGD."""
    optimiser = (local or LocalTraining()).optimiser
    if not isinstance(optimiser, SGD):
        return f"uses {type(optimiser).__name__}"
    return "has momentum" if optimiser.momentum else "clips gradients"


def expected_change(task: Task, net: Net) -> ExpectedReport:
    """SCAFFOLD: a report has a model like the one that was sent, and the change of c_i."""
    return ExpectedReport(
        {
            "model": ExpectedPacket.of(task.send["model"].values),
            "change": ExpectedPacket.of(task.send["control"].values),
        }
    )
