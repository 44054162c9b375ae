r"""pFed1BS: personal models, pulled to agree in one-bit sketches (Cheng et al., AAAI 2026,
"Personalized Federated Learning with Bidirectional Communication Compression via One-Bit Random
Sketching").

Round :math:`t`, cohort :math:`S_t`; w_k personal, v the consensus, Phi a projection of the n
parameters to m = ``share`` n numbers that all sides know::

    w_k  = E epochs of min CE(w; D_k) + lambda g(v, Phi w) + mu/2 |w|^2 from w_k   -> SignPull
    z_k  = sign(Phi w_k)                                                          -> one_bit
    v    = sign(sum_k n_k z_k)                                                    -> WeightedMean

A client sends z_k and gets v, m bits each, and uses w_k. At first v is the sketch of the initial
model. With ``pull.weight`` and ``pull.mu`` of 0 every client trains alone.

- Shared: signs of random projections of personal models, one bit each, both ways.
- A client uses: its own model.
- Bytes in the paper: 2 M T m / 8.
- Secure aggregation: yes; clients send one-bit sketches, to which no noise can be added; the vote
  is a sum of them.
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
    ExpectedPacket,
    ExpectedReport,
    Give,
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
from ...nets.layout import Layout
from ...parts.common import CommonParts
from ...trees import Tree
from .sketch import CONSENSUS, PROJECTION, SignPull, one_bit, project, projection, rows_of


@dataclass(frozen=True)
class State:
    """The round, and the bits that clients agreed on: true where a sign is positive."""

    round: int
    consensus: Tree


@dataclass(frozen=True)
class PFed1BS(CommonParts):
    """Personal models that share nothing but the signs of random projections, both ways."""

    share: float = 0.1
    """m/n, the bits of a sketch for each parameter."""
    pull: SignPull = SignPull()
    """The pull towards the consensus, with its weights and how sharp a sign is."""

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """All agree on the sketch of the initial model."""
        return State(0, self._sketch(setup.params, setup.layout))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Nothing: every client uses its own model."""
        return {}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort gets the consensus and trains."""
        send = {CONSENSUS: Packet(state.consensus)}
        return [Task(client, send) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The vote of the cohort, weighted by examples."""
        mean = self.mean.start(signs_of(state.consensus))
        for report in reports:
            mean.add(signs_of(report.give["sketch"].values), report.examples)
        return State(state.round + 1, trees.map(one_bit, mean.value()))

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the personal model towards the consensus, and send its sketch."""
        return {
            "train": (
                Edit(self._begin),
                Train(self.objective + self.pull, self.local, start="personal"),
                Give(self._send, self._expected),
            ),
            "use": (Edit(use_personal),),
        }[verb]

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """The personal model, the consensus as numbers, and the projection."""
        begun = {"personal": client.start, **carry}
        begun[CONSENSUS] = signs_of(carry[CONSENSUS])
        begun[PROJECTION] = self._projection(client.start, client.layout)
        return begun

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The sketch goes up, the model stays."""
        sketch = self._sketch(carry["local"], client.layout)
        return Outcome({"sketch": Packet(sketch)}, memory={"personal": carry["local"]})

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """A sketch looks like the consensus."""
        return ExpectedReport({"sketch": ExpectedPacket.of(task.send[CONSENSUS].values)})

    def _projection(self, model: Tree, layout: Layout) -> Tree:
        rows = rows_of(layout.size, self.share)
        return projection(layout.size, rows, model[layout.params[0]].dtype)

    def _sketch(self, model: Tree, layout: Layout) -> Tree:
        """The signs of the projections of all parameters."""
        vector = trees.flatten(trees.pick(model, layout.params))
        return {"signs": one_bit(project(self._projection(model, layout), vector))}

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """m bits down and m bits up."""
        return round(2 * rows_of(net.layout.size, self.share) / 8 * cohort * rounds)


def signs_of(bits: Mapping[str, torch.Tensor]) -> Tree:
    """Bits as 1 and -1."""
    return trees.map(lambda bit: 2.0 * bit - 1.0, bits)


def use_personal(carry: Carry, client: Client) -> Carry:
    """A client uses its own model; before it has one, the initial one."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    own = rest.pop("personal", client.start)
    return {**rest, "model": own}
