r"""HeteroFL: each client trains the widest model that fits on its device (Diao, Ding & Tarokh,
"HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, Alg. 1).

Round :math:`t`, cohort :math:`S_t`, client k has a share :math:`s_k` of every layer's channels::

    M_k  = the first s_k C channels of every layer               -> choose_width, select_first
    w_k  = E epochs of min CE from w M_k: outputs of layers divided by s_k -> scaled_weights
           and logits of classes that k lacks set to 0           -> MaskedLoss, Train
    w_i  = sum_k n_k m_ki w_ki / sum_k n_k m_ki; of the last layer a class is
           averaged over the clients that have it                -> WeightedMean
    mu, sigma^2 of w M_k = mean over clients' batches            -> BatchStatistics

A client uses w M_k, with the statistics of its width, which the cohort collects after training, in
an exchange of its own (static BatchNorm; only if the network has BatchNorm). With a share of 1 for
all, ``scale``, ``masked`` and ``static`` off this is FedAvg. Differs from the paper: clients are
weighted by their examples; statistics are of each width and not of the whole model alone, as each
client uses its own width; scores are of all classes, also those that a client lacks.

- Shared: the model; each client trains the first channels that fit on its device.
- A client uses: those channels of the shared model.
- Bytes in the paper: 8 d_s M T, the mean over the widths.
- Secure aggregation: yes; the server chooses each client's sub-model, and clients which classes of
  the last layer they send: sums of values and of masks are all it needs. With ``masked=false``
  noise can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ... import trees
from ...channels.groups import ChannelGroup, Channels
from ...channels.selection import select_first
from ...channels.submodel import extract_submodel, groups_from_plain
from ...core import Batches, Edit, Give, Measure, Packet, Report, Setup, Stage, Task, Train
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.device_widths import (
    WideModel,
    check_shares,
    client_shares,
    find_plain_groups,
    send_masked,
    submodel_bytes,
)
from ...parts.label_counts import LabelCounts
from ...problems import has_classes
from ...trees import Tree
from .masked_loss import LABELS, MaskedLoss, add_known, expected_known, send_known
from .scaler import find_scales, scaled_weights
from .static_norm import (
    STATISTICS,
    BatchStatistics,
    expected_statistics,
    send_statistics,
    statistics_names,
)


@dataclass(frozen=True)
class State(WideModel):
    """The model in full width, and each client's share of the channels."""

    shares: dict[int, float]
    has_classes: bool
    """Whether targets are classes, of which a client may lack some."""
    collected: tuple[str, ...]
    """The running statistics that are collected after training: none without BatchNorm."""
    is_trained: bool
    """Whether this round's training is done, and its statistics are not."""
    statistics: dict[float, Tree]
    """By share: the statistics of the model in this width. Those of the whole are in the model."""


@dataclass(frozen=True)
class HeteroFL(CommonParts):
    """One model of which every client trains the first channels; their share fits its device."""

    widths: tuple[float, ...] = ()
    """Shares of channels, assigned to the clients in turn; empty: what fits on each device."""
    scale: bool = True
    """Whether outputs of layers are divided by a client's share in training (the scaler)."""
    masked: bool = True
    """Whether a client leaves out the classes that it lacks, in its loss and of the last layer."""
    static: bool = True
    """Whether the statistics of BatchNorm are collected after training in an exchange of their own,
    with one more pass over the data. Without, those of training are averaged."""

    uses_whole: ClassVar[bool] = False
    """Whether clients use the whole model, and not the part that they train."""

    def __post_init__(self) -> None:
        check_shares(self.widths)

    # ---- which part is whose ---------------------------------------------------------------------

    def width_of(self, state: State, client: int) -> float:
        """Part of width methods: the share of channels that a client trains."""
        return state.shares[client]

    def part(self, state: State, client: int, groups: Sequence[ChannelGroup]) -> Channels:
        """Part of width methods: the channels that a client trains in this round."""
        # Nested: a narrow client's channels are among those of every wider one.
        return select_first(groups, self.width_of(state, client))

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The network's initial parameters, and every client's width."""
        all_have_all = bool(self.widths) and min(self.widths) == 1
        shares = client_shares(setup, self.widths, self.local)
        return self._begin(setup, shares, not all_have_all)

    def _begin(self, setup: Setup, shares: dict[int, float], narrows: bool) -> State:
        return State(
            round=0,
            model=setup.params,
            structure=find_plain_groups(setup.net, narrows),
            shares=shares,
            has_classes=has_classes(setup.net.problem),
            collected=statistics_names(setup.net) if self.static else (),
            is_trained=False,
            statistics={},
        )

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The client's own width of the model, with the statistics of this width; or the whole."""
        if self.uses_whole:
            return {"model": Packet(state.model)}
        groups = groups_from_plain(state.structure)
        model = state.model
        share = self.width_of(state, client)
        if share in state.statistics:
            model = model | state.statistics[share]
        return {"model": extract_submodel(model, groups, self.part(state, client, groups))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client its part; then it collects the model's statistics."""
        if state.is_trained:
            clients = self._add_missing_widths(state, cohort)
            return [Task(k, self.deliver(state, k), verb=STATISTICS) for k in clients]
        groups = groups_from_plain(state.structure)
        tasks = []
        for k in cohort:
            packet = extract_submodel(state.model, groups, self.part(state, k, groups))
            how = []
            settings = {}
            share = self.width_of(state, k)
            if self.scale and share < 1:
                how.append("scaled")
                settings["share"] = share
            if self.masked and state.has_classes:
                how.append("masked")
            # A verb is part of the name of a memory file: no other sign than a hyphen.
            verb = ":".join(filter(None, ("train", "-".join(how))))
            tasks.append(Task(k, {"model": packet}, settings, verb))
        return tasks

    def _add_missing_widths(self, state: State, cohort: Sequence[int]) -> list[int]:
        """The cohort, and a client of every width that it lacks, another one each round."""
        if self.uses_whole:
            return list(cohort)
        present = {self.width_of(state, k) for k in cohort}
        others: dict[float, list[int]] = {}
        for k, share in state.shares.items():
            if share not in present:
                others.setdefault(share, []).append(k)
        added = [clients[state.round % len(clients)] for clients in others.values()]
        return sorted([*cohort, *added])

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Every parameter averaged over the clients that have it; then the statistics."""
        if state.is_trained:
            return self._fold_statistics(state, reports)
        groups = groups_from_plain(state.structure)
        mean = self.mean.start(state.model)
        for report in reports:
            add_known(mean, report, groups)
        model = mean.value()
        if not state.collected:
            return replace(state, round=state.round + 1, model=model)
        # In training nobody keeps statistics.
        model = model | trees.pick(state.model, state.collected)
        return replace(state, model=model, is_trained=True)

    def _fold_statistics(self, state: State, reports: Iterable[Report]) -> State:
        """The mean over the clients of each width, which ends the round."""
        before = trees.pick(state.model, state.collected)
        means = {}
        for report in reports:
            share = 1.0 if self.uses_whole else self.width_of(state, report.of)
            if share not in means:
                means[share] = self.mean.start(state.statistics.get(share, before))
            means[share].add(report.give[STATISTICS].values, report.examples)
        found = {share: mean.value() for share, mean in sorted(means.items())}
        model = state.model | found.pop(1.0, {})
        statistics = dict(sorted((state.statistics | found).items()))
        return replace(
            state, round=state.round + 1, model=model, is_trained=False, statistics=statistics
        )

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send, or collect statistics; to use the model, nothing need be done."""
        kind, _, how = verb.partition(":")
        if kind != "train":
            # Shuffled: data lie sorted by class, and a batch of one class has its own variance.
            over = Batches("train", shuffle=True, least=2)
            collect = Measure(STATISTICS, BatchStatistics(), over)
            return {
                "use": (),
                STATISTICS: (collect, Give(send_statistics, expected_statistics)),
            }[verb]
        stages: list[Stage] = []
        train = Train(self.objective, self.local)
        give = Give(send_masked)
        if "masked" in how:
            stages.append(Measure(LABELS, LabelCounts(), Batches("train")))
            train = replace(train, objective=MaskedLoss(self.objective))
            give = Give(send_known, expected_known)
        if "scaled" in how:
            stages.append(Edit(find_scales))
            train = replace(train, at=scaled_weights, differentiate=True)
        return (*stages, train, give)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """A client's sub-model down and up: the mean width, the whole if devices decide."""
        return submodel_bytes(net, self.widths, cohort, rounds)
