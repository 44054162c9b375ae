r"""FedSNIP: one sparse model, its mask found once by connection sensitivity before training (the baseline of CA-AFP's
tables, after Bustincio et al., "Reducing communication overhead through one-shot model pruning in federated learning",
2025; SNIP: Lee et al. 2019, Eq. 5).

Before round 0 an exchange with all clients, not a round; then FedAvg under the mask::

    s_k  = |w * dL_k/dw| on the client's first batch, as a share of its sum     -> sensitivity
    M    = the density * d largest of sum_k n_k s_k, all layers ranked together  -> GlobalRank, top
    w_k  = E epochs of min CE(w; D_k) from w, under M                            -> Train
    w    = (sum_k n_k w_k / sum_k n_k) M                                         -> Mean

Clients draw the initial w from the seed, so the exchange costs only their answers, in 16 bits. With density 1 this is
FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import trees
from ..core import (
    Batches,
    Carry,
    Client,
    Edit,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Start,
    Task,
    Train,
)
from ..errors import check
from ..nets import Net
from ..parts.aggregate import Mean
from ..parts.allocate import GlobalRank, Uniform
from ..parts.evidence import Gradient
from ..parts.local import LocalTraining
from ..parts.mask import top
from ..parts.objective import CrossEntropy, Objective
from ..parts.one_model import OneModel as Dense
from ..parts.one_model import average, dense_bytes
from ..parts.quantise import Half
from ..parts.score import sensitivity
from ..trees import Mask, Tree
from ..wire.codec import Codec, Smallest


@dataclass(frozen=True)
class State:
    """The round, the model and its mask (empty: not yet found), and who is to be asked."""

    round: int
    model: Tree
    mask: Mask
    clients: tuple[int, ...]


@dataclass(frozen=True)
class FedSNIP:
    """One sparse model for all; its mask comes from the first gradients and stays."""

    density: float = 0.3
    allocation: GlobalRank | Uniform = GlobalRank()
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(0 < self.density <= 1, "density", self.density, "in (0, 1]")

    def init(self, start: Start) -> State:
        """Dense, until all clients have been asked."""
        return State(0, start.params, {}, tuple(sorted(start.clients)))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Everybody gets the model."""
        return {"model": Packet(state.model, state.mask or None)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """All clients are asked for sensitivities first; then the cohort trains."""
        if self.density < 1 and not state.mask:
            return [Task(k, verb="snip") for k in state.clients]
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mask from the mean sensitivities, or the weighted mean under the mask."""
        if self.density < 1 and not state.mask:
            mean = Mean()
            for report in reports:
                mean.add(
                    trees.map(lambda v: v.float(), report.give["sensitivity"].values),
                    report.examples,
                )
            scores = {k.removeprefix("scores."): v for k, v in mean.value().items()}
            mask = top(scores, self.allocation(scores, self.density))
            return State(0, trees.masked(state.model, mask), mask, state.clients)
        new = average(Dense(state.round, state.model), reports)
        return State(new.round, trees.masked(new.model, state.mask), state.mask, state.clients)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Look at the first batch from the network's start, or train under the mask."""
        first = Batches("train", size=self.local.batch if self.local else 32, limit=1)
        return {
            "snip": (Edit(begin), Measure("gradient", Gradient(self.objective), first), Give(tell)),
            "train": (Train(self.objective, self.local), Give(send_sparse)),
            "use": (),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The kept share of all parameters, biases included; the probe and the mask are not counted."""
        return round(self.density * dense_bytes(net.layout.size, cohort, rounds))


def begin(carry: Carry, client: Client) -> Carry:
    """Both sides know the network's start."""
    return {**carry, "model": client.start}


def tell(carry: Carry, client: Client) -> Outcome:
    """The sensitivity of every prunable weight."""
    found = sensitivity(trees.pick(client.start, carry["gradient"]), carry["gradient"])
    return Outcome(
        {"sensitivity": Packet(Half("bfloat16")({f"scores.{k}": v for k, v in found.items()}))}
    )


def send_sparse(carry: Carry, client: Client) -> Outcome:
    """What was trained, under the mask it was trained with."""
    return Outcome({"model": Packet(carry["local"], carry.get("model.mask"))})
