r"""Hermes: every client prunes on its own, then shares what it has in common with others (Li et al., "Hermes: An
Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom 2021; as the baseline of SAFL's
tables, which prunes channels by network slimming).

Stage 1, T rounds of densities :math:`\rho_t` = 1, .9, ... down to the target, all clients, nothing travels::

    v_k   = recover(u_k): restored channels with gamma 0                     -> recovered
    v_k   = E1 epochs of min CE + lambda sum_b |gamma_b|_1 from v_k           -> Train(CrossEntropy + GammaL1)
    M_k   = the rho_t C channels of largest |gamma|                           -> Gamma, Slim
    u_k   = E2 epochs of min CE from v_k under M_k                            -> Train

Stage 2, the remaining rounds, cohort :math:`S_t`, structure fixed, norm layers at home::

    u_k   = E epochs of min CE from (its norms, w M_k)                        -> own, Train, share_submodel
    w_j   = sum_k n_k m_kj u_kj / sum_k n_k m_kj over those who have j        -> OverlapMean

At the end of stage 1 every client sends its sub-model once: the server then knows its channels. Stage 2 begins with the
client's own model, as SAFL's Alg. 2 does; from then on it gets its part of w. Without a stage 1 this is FedBN.

Differs from the original paper: docs/papers/hermes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import trees
from ..channels.choice import FilterL1, FilterL2, Gamma
from ..channels.find import groups_of
from ..channels.groups import Channels
from ..channels.overlap import OverlapMean
from ..channels.submodel import (
    PlainGroups,
    Score,
    add,
    cut_out,
    groups_from_plain,
    groups_to_plain,
    mask_of,
    masked_packet,
    mean_of,
    own,
    recovered,
    share_submodel,
    size_at,
    slim,
    travels,
)
from ..core import Carry, Client, Edit, Give, Outcome, Packet, Report, Stage, Start, Task, Train
from ..errors import check
from ..nets import Net
from ..parts.gamma import GammaL1
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..parts.schedule import stepwise
from ..trees import Tree
from ..wire.codec import Codec, Smallest
from .heterofl import dealt


@dataclass(frozen=True)
class State:
    """The shared part of the model in full width, and the channels of every client that has pruned."""

    round: int
    clients: tuple[int, ...]
    structure: PlainGroups
    model: Tree
    kept: dict[int, Channels]


@dataclass(frozen=True)
class Hermes:
    """Personal sub-models, pruned alone; every parameter is averaged over those who have it."""

    density: float = 0.7
    """The share of channels that a client keeps."""
    densities: tuple[float, ...] | None = None
    """The density after each round of stage 1; None: 1, 0.9, ... down to ``density``; (): no stage 1."""
    guided: int = 50
    """Epochs before a pruning step."""
    tune: int = 20
    """Epochs after it."""
    devices: bool = False
    """Whether a client is left with no more channels than its device can hold (``--profile``): its density is lowered
    until the net fits memory and speed. Stage 1 itself trains the whole width."""
    share_head: bool = True
    """Whether the last linear layer is shared in stage 2; False keeps it at home."""
    score: Gamma | FilterL1 | FilterL2 = Gamma()
    sparse: GammaL1 = GammaL1(1e-4)
    objective: Objective = CrossEntropy()
    local: LocalTraining | None = None
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(
            min(self.guided, self.tune) >= 1,
            "guided, tune",
            (self.guided, self.tune),
            "1 or more epochs each",
        )
        check_densities(self.schedule)

    @property
    def schedule(self) -> tuple[float, ...]:
        """The densities of stage 1."""
        return stepwise(self.density) if self.densities is None else self.densities

    def init(self, start: Start) -> State:
        """All but the norm layers is shared, or all but these and the last layer."""
        check_start(start, len(self.schedule), self.score, self.devices, self.local)
        model = trees.pick(start.params, travels(start.layout, self.share_head))
        return State(
            0, tuple(sorted(start.clients)), groups_to_plain(groups_of(start.net)), model, {}
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The client's part of the shared model; nothing before there is one."""
        if 0 < len(self.schedule) >= state.round:
            return {}
        return {
            "model": cut_out(
                state.model, groups_from_plain(state.structure), state.kept.get(client)
            )
        }

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """First all clients prune, at the end of which they send what is left; then the cohort trains."""
        t, last = state.round, len(self.schedule)
        if t >= last:
            return [Task(k, self.deliver(state, k)) for k in cohort]
        verb = "prune:last" if t == last - 1 else "prune"
        return [Task(k, {}, {"density": self.schedule[t]}, verb) for k in state.clients]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean over those who have each parameter; after stage 1, also who has which channels."""
        groups, after = groups_from_plain(state.structure), state.round + 1
        if after > len(self.schedule):
            return replace(state, round=after, model=mean_of(state.model, reports, groups))
        mean, kept = OverlapMean(), dict[int, Channels]()
        for report in reports:
            if "model" in report.give:
                kept[report.of] = add(mean, report.give["model"], groups, report.examples)
        return replace(
            state, round=after, model=mean.value(state.model), kept=dict(sorted(kept.items()))
        )

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Recover, train, slim, train; or train what one has."""
        prune = (
            Edit(begin),
            Train(
                self.objective + self.sparse,
                lasting(self.local, self.guided),
                "personal",
                "guided",
                mask="",
            ),
            Edit(self._slim),
            Train(
                self.objective, lasting(self.local, self.tune), "guided", "tuned", mask="slim.mask"
            ),
        )
        return {
            "prune": (*prune, Give(keep)),
            "prune:last": (*prune, Give(self._keep_and_send)),
            "train": (Edit(own), Train(self.objective, self.local), Give(self._part)),
            "use": (Edit(own),),
        }[verb]

    def _slim(self, carry: Carry, client: Client) -> Carry:
        return slim(
            carry,
            client,
            self.score,
            asked(carry),
            (self.local or LocalTraining()) if self.devices else None,
        )

    def _part(self, carry: Carry, client: Client) -> Outcome:
        return share_submodel(carry, client, self.share_head)

    def _keep_and_send(self, carry: Carry, client: Client) -> Outcome:
        """What is pruned and tuned stays, and what is shared of it travels."""
        shared = trees.pick(carry["tuned"], travels(client.layout, self.share_head))
        return replace(
            keep(carry, client),
            give={"model": masked_packet(shared, mask_of(client, carry["channels"]))},
        )

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """As SAFL's formula without its clusters: N M (1 + p) and 2 G p M per client of the cohort; see the page."""
        small, stage_2 = size_at(net, (1.0, *self.schedule)[-1]), rounds - len(self.schedule)
        first = clients * (net.layout.size + small) if self.schedule else 0
        return 4 * (first + 2 * stage_2 * cohort * small)


def check_densities(densities: Sequence[float]) -> None:
    """Shares of channels, one per round of stage 1."""
    check(all(0 < d <= 1 for d in densities), "densities", tuple(densities), "in (0, 1] each")


def check_start(
    start: Start, stage_1: int, score: Score, devices: bool, local: LocalTraining | None
) -> None:
    """There must be a stage 2, and for a stage 1 channels with a score: a net without norms has no scales.

    Where devices decide, there must be a stage 1, and the narrowest net must fit them all.
    """
    check(
        start.rounds > stage_1,
        "rounds",
        start.rounds,
        f"more than {stage_1}, which the pruning of stage 1 takes",
    )
    if stage_1:
        score(start.params, groups_of(start.net))
    if devices:
        check(
            stage_1 > 0,
            "densities",
            (),
            "one or more where devices decide, since pruning is what fits a model to one",
        )
        dealt((), start, local)


def lasting(local: LocalTraining | None, epochs: int) -> LocalTraining | None:
    """The recipe for so many epochs."""
    return replace(local, epochs=epochs) if local else None


def asked(carry: Carry) -> float:
    """The density the task asks for, as it was written: single precision would round it off."""
    return round(float(carry["settings"]["density"]), 6)


def begin(carry: Carry, client: Client) -> Carry:
    """A client's first model is the network's start."""
    return {"personal": client.start, **carry}


def keep(carry: Carry, client: Client) -> Outcome:
    """The model, already in full width again, and its channels stay with the client."""
    return Outcome(memory={"personal": recovered(carry, client), "channels": carry["channels"]})
