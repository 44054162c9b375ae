r"""FedMP: a bandit for each client finds how narrow a model its device should train (Jiang, Xu, Xu,
Wang, Qiao & Zhao, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022).

Round :math:`t`, cohort :math:`S_t`; client k has a bandit over pruning ratios, up to ``most``::

    a_k  = the ratio its bandit plays                                   -> EUCB
    M_k  = the (1 - a_k) C filters of largest |w|_1 of every layer      -> FilterL1, Even
    w_k  = E epochs of min CE(w; D_k) from w M_k, really smaller        -> Train
    w    = sum_k n_k (w_k + (w - w M_k)) / sum_k n_k                    -> fill_missing_channels

The last line is R2SP, "residual recovery synchronous parallel": what a client does not have keeps
its previous value in the mean. Then each bandit learns::

    T_k  = computing + 2 sending: seconds by device, sub-model and examples       -> seconds
    r_k  = max(0, F_{t-1} - F_t) / max(|T_k - mean T| / mean T, .1)               -> rewarded

F is the mean loss of the trained sub-models on the round's folds: a tenth of D_k, a different one
in each round, on which w_k was not trained in that round. A client uses the whole model. If
``most`` is 0 this is FedAvg.

- Shared: the model; each client trains the largest channels; a bandit chooses how many, by its
  device's time.
- A client uses: the shared model.
- Bytes in the paper: 8 d_s M T, s = 1 − ``most`` / 2.
- Secure aggregation: no; clients report their loss and their time, from which the server chooses a
  ratio for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..channels.selection import Even, FilterL1, FilterL2
from ..channels.shrink import find_small_net
from ..channels.submodel import (
    count_params_at,
    extract_submodel,
    fill_missing_channels,
    groups_from_plain,
    make_masked_packet,
)
from ..core import (
    GRADIENT_PASSES,
    REFERENCE_GMACS,
    Batch,
    Batches,
    Carry,
    Client,
    ClientInfo,
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
    expected_as_sent,
)
from ..errors import check
from ..nets import Net
from ..parts.common import CommonParts
from ..parts.device_widths import WideModel, find_plain_groups
from ..parts.one_model import deliver_model, dense_bytes
from ..seeds import torch_rng
from ..trees import Tree

# ---- choosing a ratio by trial -------------------------------------------------------------------


Plays = Sequence[tuple[float, float]]
"""What was played and what it gained, the latest last."""


@dataclass(frozen=True)
class EUCB:
    r"""E-UCB (FedMP, Jiang et al. 2022): discounted UCB over the leaves of a growing tree.

    The numbers are divided into intervals. Interval :math:`P`, after the plays :math:`s = 1..k`
    with rewards :math:`r_s`::

        N(P)  = sum over plays in P of lambda^(k - s)
        R(P)  = sum over plays in P of lambda^(k - s) r_s / N(P)
        U(P)  = R(P) / R + c sqrt(2 log N / N(P)),  R and N those of all plays together

    :math:`\lambda` -> ``discount``, :math:`c` -> ``explore``. A number is drawn from the interval
    of largest :math:`U`, the lowest of equal ones; one without plays comes first. Then the interval
    is divided there, unless it is as short as ``finest``. Differs from the paper: rewards are
    divided by their mean, so that neither units nor a loss that falls ever more slowly decide how
    much is explored; and c is there.

    >>> EUCB()((0.0, 0.4, 0.8), [(0.1, 2.0)], draw=0.5)
    0.6000000000000001
    >>> EUCB().split((0.0, 0.8), 0.6)
    (0.0, 0.6, 0.8)
    """

    discount: float = 0.99
    finest: float = 0.1
    explore: float = 0.25
    """Weight of the bonus for an interval that was rarely played; 1 in the paper."""

    def __post_init__(self) -> None:
        check(0 < self.discount <= 1, "discount", self.discount, "in (0, 1]")
        check(self.explore >= 0, "explore", self.explore, "0 or more")
        check(self.finest > 0, "finest", self.finest, "above 0")

    @property
    def remembered(self) -> int:
        """FedMP: how many plays of a bandit still count, at most 10,000.

        Older plays weigh less than a millionth.
        """
        if self.discount == 1:
            return 10_000
        return min(10_000, math.ceil(math.log(1e-6) / math.log(self.discount)))

    def __call__(self, edges: Sequence[float], plays: Plays, draw: float) -> float:
        """The next number to play; ``draw`` in [0, 1) is its place in its interval."""
        chosen = (edges[0], edges[-1])
        best = -math.inf
        for interval, bound in self.bounds(edges, plays).items():
            if bound > best:
                best = bound
                chosen = interval
        low, high = chosen
        return low + draw * (high - low)

    def bounds(self, edges: Sequence[float], plays: Plays) -> dict[tuple[float, float], float]:
        """FedMP: the bandit's bound U of every interval: [low, high), the last [low, high]."""
        weights = [self.discount**age for age in reversed(range(len(plays)))]
        total = sum(weights)
        gained = 0.0
        for (_, reward), weight in zip(plays, weights, strict=True):
            gained += weight * reward
        # If nothing was gained there is nothing to divide by.
        mean = gained / total if gained else 1.0
        found = {}
        for low, high in pairwise(edges):
            count = 0.0
            gain = 0.0
            for (number, reward), weight in zip(plays, weights, strict=True):
                if low <= number < high or number == high == edges[-1]:
                    count += weight
                    gain += weight * reward
            bound = math.inf
            if count:
                seldom = math.sqrt(2 * math.log(total) / count)
                bound = gain / count / mean + self.explore * seldom
            found[low, high] = bound
        return found

    def split(self, edges: Sequence[float], played: float) -> tuple[float, ...]:
        """FedMP: the bandit's edges after a play: one more, unless its interval is too short."""
        for low, high in pairwise(edges):
            is_inside = low < played < high
            if is_inside and high - low > self.finest:
                return tuple(sorted((*edges, played)))
        return tuple(edges)


# ---- the method ----------------------------------------------------------------------------------


LEAST_GAP = 0.1
"""Clients whose time is this near to the mean, as a share of it, gain the same."""
LARGEST_LOSS = 1e6
LONGEST_ROUND = 1e9
"""Seconds, some thirty years."""


@dataclass(frozen=True)
class State(WideModel):
    """The model in full width, the last mean loss, and what every client's bandit has seen."""

    loss: float | None
    edges: dict[int, tuple[float, ...]]
    """Between the intervals of ratios; a client without edges has one interval."""
    plays: dict[int, tuple[tuple[float, float], ...]]
    """Ratios and rewards, the latest last."""


@dataclass(frozen=True)
class FedMP(CommonParts):
    """One model of which every client trains the share of filters that its bandit chooses."""

    most: float = 0.8
    """The largest pruning ratio: the share of a layer's filters that a client does not train."""
    bandit: EUCB = EUCB()
    """How a client's pruning ratio is chosen by trial and error."""
    score: FilterL1 | FilterL2 = FilterL1()
    """Which filters are kept: the largest."""
    draw: int = 0
    """Seed of the random ratios, together with round and client; they do not depend on the run's
    seed."""

    def __post_init__(self) -> None:
        check(0 <= self.most < 1, "most", self.most, "in [0, 1)")

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The network's initial parameters; no bandit has played."""
        structure = find_plain_groups(setup.net, self.most > 0)
        return State(0, setup.params, structure, None, {}, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """Every client uses the whole model."""
        return deliver_model(state)

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains, each client the width that its bandit plays."""
        groups = groups_from_plain(state.structure)
        scores = self.score(state.model, groups)
        tasks = []
        for client in cohort:
            channels = Even()(scores, 1 - self.ratio(state, client))
            tasks.append(Task(client, {"model": extract_submodel(state.model, groups, channels)}))
        return tasks

    def ratio(self, state: State, client: int) -> float:
        """FedMP: the pruning ratio that a client's bandit plays in this round.

        Every call in one round gives one number.
        """
        edges = state.edges.get(client, (0.0, self.most))
        # Drawn from round and client, since `fold` needs the number that `plan` played.
        generator = torch_rng(self.draw, state.round, client, "ratio")
        draw = float(torch.rand((), generator=generator, dtype=torch.float64))
        return self.bandit(edges, state.plays.get(client, ()), draw)

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean of the recovered models; then the bandits learn."""
        groups = groups_from_plain(state.structure)
        mean = self.mean.start(state.model)
        times: dict[int, float] = {}
        losses: dict[int, tuple[int, float]] = {}
        for report in reports:
            packet = report.give["model"]
            mean.add(fill_missing_channels(packet, state.model, groups), report.examples)
            times[report.of] = report.metrics["seconds"]
            if "loss" in report.metrics:
                # However large a number a client sends, sums of it stay finite.
                loss = min(report.metrics["loss"], LARGEST_LOSS)
                losses[report.of] = (report.examples, loss)
        after = replace(state, round=state.round + 1, model=mean.value())
        if not losses or not self.most:
            return after
        after = replace(after, loss=mean_loss(losses))
        if state.loss is None or after.loss is None:
            # Nothing to compare with: the plays of this round are not counted.
            return after
        return self._learn(state, after, rewarded(state.loss - after.loss, times))

    def _learn(self, state: State, after: State, rewards: Mapping[int, float]) -> State:
        """The bandits of those who answered know one play more."""
        edges = dict(state.edges)
        plays = dict(state.plays)
        for client, gained in rewards.items():
            played = self.ratio(state, client)
            known = (*plays.get(client, ()), (played, gained))
            plays[client] = known[-self.bandit.remembered :]
            edges[client] = self.bandit.split(edges.get(client, (0.0, self.most)), played)
        edges = dict(sorted(edges.items()))
        plays = dict(sorted(plays.items()))
        return replace(after, edges=edges, plays=plays)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train and send, with the loss and the time it took; to use the model, nothing."""
        if verb != "train":
            return {"use": ()}[verb]
        give = Give(self._send, expected_time)
        if self.most == 0:
            # Bandits with a single choice need no loss.
            return (Train(self.objective, self.local), give)
        return (
            Train(self.objective, self.local, leaves_out_fold=True),
            Measure("loss", losses_of, Batches("train", fold="in"), of="local"),
            give,
        )

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The sub-model under the mask it came with, its loss, and its time."""
        mask = carry.get("model.mask")
        epochs = 1 if self.local is None else self.local.epochs
        thin = find_small_net(client.net, mask)
        layout = client.layout if thin is None else thin.net.layout
        metrics = {"seconds": seconds(client.info, layout.macs, layout.size, epochs)}
        sums = carry.get("loss", {})
        # Without examples in the fold a client reports no loss, nor if that is not finite.
        if sums:
            loss = float(sums["loss"] / sums["examples"])
            if math.isfinite(loss):
                metrics["loss"] = loss
        return Outcome({"model": make_masked_packet(carry["local"], mask)}, metrics)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Sub-models down and up as if every bandit played half of ``most``; masks do not count."""
        return dense_bytes(count_params_at(net, 1 - self.most / 2), cohort, rounds)


def seconds(info: ClientInfo, macs: int, params: int, epochs: int) -> float:
    r"""FedMP: how long a round takes a client: computing, and the sub-model down and up.

    :math:`3\, m\, n\, E / v + 32\, p / b_{down} + 32\, p / b_{up}`: :math:`m` -> ``macs`` of a
    forward pass, and as much twice for the way back, :math:`n` examples, :math:`E` -> ``epochs``,
    :math:`v` multiply-accumulates per second, :math:`p` -> ``params``, :math:`b` bits per second.

    >>> device = ClientInfo(100, bandwidth=64.0, speed=0.5)
    >>> seconds(device, macs=5_000_000, params=1_000_000, epochs=2)
    7.0
    """
    work = GRADIENT_PASSES * macs * info.examples * epochs
    computing = work / (info.speed * REFERENCE_GMACS * 1e9)
    sending = 32 * params / (info.down * 1e6) + 32 * params / (info.up * 1e6)
    return computing + sending


def mean_loss(losses: Mapping[int, tuple[int, float]]) -> float:
    """FedMP: the mean loss over clients, weighted by examples, in any order of answers."""
    # fsum rounds once, at the end: the order of reports does not matter.
    total = math.fsum(examples for examples, _ in losses.values())
    return math.fsum(examples * loss for examples, loss in losses.values()) / total


def rewarded(drop: float, times: Mapping[int, float]) -> dict[int, float]:
    """FedMP: each client's reward: the drop of the loss over its distance from the mean time.

    >>> rewarded(0.5, {0: 1.0, 1: 3.0, 2: 2.0})
    {0: 1.0, 1: 1.0, 2: 5.0}
    """
    mean = math.fsum(times.values()) / len(times)
    rewards = {}
    for client, time in times.items():
        # Relative to the mean, which is 0 only if all report that they take no time.
        gap = abs(time - mean) / mean if mean else 0.0
        # A loss that rose is no reward for any width, rather than a punishment of all.
        rewards[client] = max(0.0, drop) / max(gap, LEAST_GAP)
    return rewards


def losses_of(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """FedMP: the summed loss of a batch, and its number of examples."""
    outputs = net(params, batch.x, train=False).logits
    losses = net.problem.losses(outputs, batch.y, carry.get("client", {}))
    return {"loss": (losses * batch.weight).sum(), "examples": batch.weight.sum()}


def expected_time(task: Task, net: Net) -> ExpectedReport:
    """FedMP: the sub-model as it was sent, and the seconds it took."""
    return replace(expected_as_sent(task, net), metrics={"seconds": (0.0, LONGEST_ROUND)})
