r"""SAFL: clients that are alike prune alike (Li, Wang, Du, Cai & Wang, "SAFL: Structure-Aware Personalized Federated
Learning via Client-Specific Clustering and SCSI-Guided Model Pruning", Alg. 1 and 2).

Stage 1, T rounds of densities :math:`\rho_t` = 1, .9, ... down to the target, all clients; cluster models
:math:`w^1..w^K` from K different starts::

    j_k   = argmin_j L_k(w^j), on the training data                               -> Measure(Losses), choose
    v_k   = recover(u_k): restored channels with gamma 0                          -> recovered
    v_k   = E1 epochs of min CE + lambda sum_b |gamma_b|_1
                               + mu sum_b |gamma_b - gamma_b^j|_1 from v_k        -> GammaL1, GammaDistance
    M_k   = the rho_t C channels of largest |gamma|                               -> Gamma, Slim
    u_k   = E2 epochs of min CE from v_k under M_k                                -> Train
    M^j   = the channels that most clients of the cluster kept                    -> Overlap
    w^j   = the mean of u_k over those of the cluster who have a parameter, M^j   -> OverlapMean

Stage 2, the remaining rounds, cohort :math:`S_t`, structure fixed, norm layers at home (Hermes)::

    u_k   = E epochs of min CE from (its norms, w M_k)                            -> own, Train, share_submodel
    w_i   = sum_k n_k m_ki u_ki / sum_k n_k m_ki over those who have i            -> OverlapMean

All K models travel down in stage 1, one up. Stage 2 begins with the client's own model; from then on it gets its part
of w. Without a stage 1 this is FedBN.

Differs from the paper where that is silent or contradicts itself: docs/papers/safl.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import trees
from ..channels.choice import FilterL1, FilterL2, Gamma, Overlap
from ..channels.find import groups_of
from ..channels.groups import ChannelGroup, Channels
from ..channels.overlap import OverlapMean
from ..channels.submodel import (
    PlainGroups,
    add,
    cut_out,
    groups_from_plain,
    groups_to_plain,
    mask_of,
    masked_packet,
    mean_of,
    own,
    share_submodel,
    size_at,
    slim,
    travels,
)
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
from ..parts.choose import Losses, choose
from ..parts.gamma import GammaDistance, GammaL1
from ..parts.local import LocalTraining
from ..parts.objective import CrossEntropy, Objective
from ..parts.schedule import stepwise
from ..trees import Tree
from ..wire.codec import Codec, Smallest
from .hermes import asked, begin, check_densities, check_start, keep, lasting

MOST = 5
"""Cluster models at the start where their number is to be chosen."""
PATIENCE = 2
"""After so many rounds in which nobody chose it, such a cluster is given up."""


@dataclass(frozen=True)
class State:
    """The cluster models and their channels (none named: whole), who chose which, and for how many rounds nobody did;
    the shared part of the model in full width, and the channels of every client."""

    round: int
    clients: tuple[int, ...]
    structure: PlainGroups
    models: dict[int, Tree]
    channels: dict[int, Channels]
    groups: dict[int, int]
    idle: dict[int, int]
    model: Tree
    kept: dict[int, Channels]


@dataclass(frozen=True)
class SAFL:
    """Personal sub-models, pruned as similar clients prune; every parameter is averaged over those who have it."""

    density: float = 0.7
    """The share of channels that a client keeps."""
    densities: tuple[float, ...] | None = None
    """The density after each round of stage 1; None: 1, 0.9, ... down to ``density``; (): no stage 1."""
    clusters: int = 1
    """How many cluster models; 0: chosen. It begins with five and gives up those that nobody chose twice running."""
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
    pull: GammaDistance = GammaDistance(0.004, to="model")
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
        check(self.clusters >= 0, "clusters", self.clusters, "0 (chosen) or more")
        check_densities(self.schedule)

    @property
    def schedule(self) -> tuple[float, ...]:
        """The densities of stage 1."""
        return stepwise(self.density) if self.densities is None else self.densities

    # ---- the server ------------------------------------------------------------------------------------------------

    def init(self, start: Start) -> State:
        """The network's start and other draws of it: equal cluster models would tie for ever."""
        check_start(start, len(self.schedule), self.score, self.devices, self.local)
        models = {
            j: start.fresh(j) if j else start.params for j in range(self._first(len(start.clients)))
        }
        shared = trees.pick(start.params, travels(start.layout, self.share_head))
        clients, structure = tuple(sorted(start.clients)), groups_to_plain(groups_of(start.net))
        return State(0, clients, structure, models if self.schedule else {}, {}, {}, {}, shared, {})

    def _first(self, clients: int) -> int:
        return self.clusters or min(MOST, clients)

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
        """First all clients choose and prune, then the cohort trains."""
        if state.round >= len(self.schedule):
            return [Task(k, self.deliver(state, k)) for k in cohort]
        groups, asked = groups_from_plain(state.structure), {"density": self.schedule[state.round]}
        models = [
            cut_out(model, groups, state.channels.get(j))
            for j, model in sorted(state.models.items())
        ]
        send = {f"model{i}": packet for i, packet in enumerate(models)}
        return [Task(k, send, asked, f"prune:{len(models)}") for k in state.clients]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Stage 1: the clusters' channels and means. Stage 2: the mean over those who have each parameter."""
        groups = groups_from_plain(state.structure)
        if state.round >= len(self.schedule):
            return replace(
                state, round=state.round + 1, model=mean_of(state.model, reports, groups)
            )
        fused, chosen, kept, shared = (
            dict[int, Fusion](),
            dict[int, int](),
            dict[int, Channels](),
            OverlapMean(),
        )
        ids, last = sorted(state.models), state.round + 1 == len(self.schedule)
        for report in reports:
            j, packet = ids[int(report.metrics["group"])], report.give["model"]
            chosen[report.of], kept[report.of] = j, fused.setdefault(j, Fusion(groups)).add(packet)
            if last:
                add(
                    shared,
                    Packet(trees.pick(packet.values, state.model), packet.mask),
                    groups,
                    report.examples,
                )
        new = {j: fusion.value(state.models[j]) for j, fusion in sorted(fused.items())}
        state = replace(
            state,
            round=state.round + 1,
            models={**state.models, **{j: model for j, (model, _) in new.items()}},
            channels={**state.channels, **{j: channels for j, (_, channels) in new.items()}},
            groups=dict(sorted({**state.groups, **chosen}.items())),
            idle={j: 0 if j in new else state.idle.get(j, 0) + 1 for j in ids},
            model=shared.value(state.model),
            kept=dict(sorted({**state.kept, **kept}.items())),
        )
        return _ended(state) if last else self._given_up(state)

    def _given_up(self, state: State) -> State:
        """Without the clusters that nobody chose for a while, where their number is to be chosen."""
        stay = [j for j in state.models if self.clusters or state.idle[j] < PATIENCE]
        return replace(
            state,
            models={j: state.models[j] for j in stay},
            channels={j: c for j, c in state.channels.items() if j in stay},
            idle={j: state.idle[j] for j in stay},
        )

    # ---- a client --------------------------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Choose, recover, train near the cluster's scales, slim, train; or train what one has."""
        name, _, models = verb.partition(":")
        if name == "prune":
            near = self.objective + self.sparse + self.pull
            return (
                Measure("losses", Losses(int(models)), Batches("train"), of="model0"),
                Edit(choose),
                Edit(begin),
                Train(near, lasting(self.local, self.guided), "personal", "guided", mask=""),
                Edit(self._slim),
                Train(
                    self.objective,
                    lasting(self.local, self.tune),
                    "guided",
                    "tuned",
                    mask="slim.mask",
                ),
                Give(keep_and_tell),
            )
        return {
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

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Section III.D: N M (2K + 1 + K sum_0^{T-2} p_i + sum_0^{T-1} p_i) + 2 G p_{T-1} M per client of the cohort.

        p_i M is the size of the net with the same share of channels in every layer.
        """
        sizes, many = [size_at(net, d) for d in self.schedule], self._first(clients)
        first = (
            (2 * many + 1) * net.layout.size + many * sum(sizes[:-1]) + sum(sizes) if sizes else 0
        )
        return 4 * (
            clients * first + 2 * (rounds - len(sizes)) * cohort * (sizes or [net.layout.size])[-1]
        )


class Fusion:
    """Heterogeneous model fusion: the channels most clients of a cluster kept, each parameter over those who have it.

    Clients count alike here, as in the paper; as many channels stay as its clients keep on average.
    """

    def __init__(self, groups: Sequence[ChannelGroup]) -> None:
        self.groups, self.overlap, self.mean, self.clients = groups, Overlap(), OverlapMean(), 0

    def add(self, packet: Packet) -> Channels:
        """Take in one client's sub-model; returns its channels."""
        channels = add(self.mean, packet, self.groups, weight=1)
        self.overlap.add(channels)
        self.clients += 1
        return channels

    def value(self, previous: Tree) -> tuple[Tree, Channels]:
        """The cluster's next model and its channels."""
        counts = self.overlap.counts.values()
        density = sum(int(c.sum()) for c in counts) / (self.clients * sum(len(c) for c in counts))
        channels = self.overlap.value(density)
        return cut_out(self.mean.value(previous), self.groups, channels).values, channels


def _ended(state: State) -> State:
    """Stage 2 asks no more of the clusters than who was in which."""
    return replace(state, models={}, channels={}, idle={})


def keep_and_tell(carry: Carry, client: Client) -> Outcome:
    """The sub-model travels, norm layers and all, with the choice; the model in full width and its channels stay."""
    packet = masked_packet(carry["tuned"], mask_of(client, carry["channels"]))
    told = {"group": float(carry["choice"]["group"])}
    return replace(keep(carry, client), give={"model": packet}, metrics=told)
