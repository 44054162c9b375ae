r"""STC: sparse ternary updates both ways, with error feedback (Sattler, Wiedemann, Müller, Samek,
"Robust and Communication-Efficient Federated Learning from Non-IID Data", 2019, Alg. 2).

Round :math:`t`, cohort :math:`S_t`; W the published model, A the errors of the server and of each
client, 0 at first::

    W      = what client k has + the updates it has missed          -> versions.packets, receive
    d_k    = E epochs of min CE(w; D_k) from W, minus W             -> Train
    q_k    = STC_up(d_k + A_k);     A_k = d_k + A_k - q_k           -> SparseTernary, feedback
    d      = sum_k n_k q_k / sum_k n_k                              -> WeightedMean
    q      = STC_down(d + A);       A = d + A - q                   -> SparseTernary, feedback
    W      = W + q                                                  -> versions.publish

Running statistics are not weights: they are averaged and sent in full. With ``head = "home"``
(ours) the last layer is kept on the client. If a direction is not compressed (a share of 1, not
ternary), the model itself is sent; without compression in both directions this is FedAvg.

- Shared: the model; updates are sent as a few signs, both ways; what they leave out is sent later.
- A client uses: the shared model; with ``head=home`` with its own last layer.
- Bytes in the paper: M T (g(p_up) + K/M g(p_down)).
- Secure aggregation: yes; updates are averaged. With noise or secure sums the uplink is no longer
  ternary; the downlink still is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
from ...errors import UnfitError, check, spell_option
from ...nets import Net
from ...nets.layout import Layout
from ...parts.common import CommonParts
from ...parts.quantise import Scope, check_scope, feedback
from ...parts.server import ServerOptimiser, ServerState, begin_server, step_server
from ...trees import Tree
from . import versions
from .ternary import SparseTernary, golomb_bytes
from .versions import Versions


@dataclass(frozen=True)
class State:
    """The published model with its history, and what the server has not published yet."""

    round: int
    published: Versions
    statistics: Tree
    """The running statistics, which are sent in full; nothing where nothing is compressed."""
    left: Tree
    """A, the server's error."""
    server: ServerState = field(default_factory=dict, metadata={"optional": True})
    """What the server's optimiser remembers; nothing without one."""


@dataclass(frozen=True)
class STC(CommonParts):
    """One model for all; updates are sent as a few signs, and what they leave out comes later."""

    up: float = 0.01
    """The share of an update that a client sends."""
    down: float = 0.01
    """The share of an update that the server sends."""
    ternary: bool = True
    """Whether values are sent as a sign times one magnitude; False: the values themselves."""
    scope: Scope = "model"
    """Whether the shares refer to the whole model or to each layer."""
    head: Literal["shared", "home"] = "shared"
    """Whether the last layer is shared, or kept on the client (ours)."""
    room: float = 4.0
    """The server's memory for updates that clients may have missed, in models."""
    server: ServerOptimiser | None = None
    """What the server makes of the mean update before it codes it; none: nothing."""

    def __post_init__(self) -> None:
        check(0 < self.up <= 1, "up", self.up, "in (0, 1]")
        check(0 < self.down <= 1, "down", self.down, "in (0, 1]")
        check_scope(self.scope)
        check(self.head in ("shared", "home"), "head", self.head, "'shared' or 'home'")
        check(self.room >= 0, "room", self.room, "0 or more models")

    @property
    def codes_up(self) -> SparseTernary:
        """STC: how clients code their updates."""
        return SparseTernary(self.up, self.scope, self.ternary)

    @property
    def codes_down(self) -> SparseTernary:
        """STC: how the server codes its updates."""
        return SparseTernary(self.down, self.scope, self.ternary)

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """Version 0 is the network's start, which costs no bytes."""
        layout = setup.layout
        if self.head == "home" and not layout.head:
            raise UnfitError(
                "the last layer would be kept on the client, but the net has no layer with "
                f"parameters. Share all layers ({spell_option('set', 'head=shared')}), or use a "
                "net that ends in one."
            )
        weights, statistics = self._names(layout)
        if not weights:
            raise UnfitError(
                "nothing would be shared: the net has only its last layer, which would be kept on "
                f"the client. Share all layers ({spell_option('set', 'head=shared')}), or use a "
                "deeper net."
            )
        model = trees.pick(setup.params, weights)
        left: Tree = {}
        if not self.codes_down.is_off:
            left = trees.map(torch.zeros_like, model)
        remembered = begin_server(self.server, model)
        return State(
            0, versions.first(model), trees.pick(setup.params, statistics), left, remembered
        )

    def _names(self, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The weights that are shared, and the running statistics."""
        home: tuple[str, ...] = ()
        if self.head == "home":
            home = layout.head
        return layout.without(home)

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """What the client has missed, or the whole model."""
        return self._send(state, client, {})

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """Alg. 2, "for i in I_t in parallel": the cohort catches up and trains."""
        known: dict[tuple[int, int], Mapping[str, Packet]] = {}
        return [Task(client, self._send(state, client, known)) for client in cohort]

    def _send(
        self, state: State, client: int, known: dict[tuple[int, int], Mapping[str, Packet]]
    ) -> Mapping[str, Packet]:
        if self.codes_down.is_off:
            # In round 0 too, as FedAvg does.
            send: Mapping[str, Packet] = {"model": Packet(state.published.models[0])}
        else:
            send = versions.packets(state.published, client, known=known)
        if state.statistics:
            return {**send, "statistics": Packet(state.statistics)}
        return send

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """Alg. 2, the server: the mean update and what was left of earlier ones, published."""
        model = state.published.models[0]
        # Updates are averaged from nothing, models from the one that was sent.
        before = model
        if not self.codes_up.is_off:
            before = trees.map(torch.zeros_like, model)
        mean = self.mean.start({**before, **state.statistics})
        reported = []
        for report in reports:
            given: Tree = {}
            for packet in report.give.values():
                given |= packet.values
            mean.add(given, report.examples)
            reported.append(report.of)
        found = mean.value()
        moved = trees.pick(found, model)
        remembered = state.server
        if self.server is not None:
            moved, remembered = self._step_server(model, moved, remembered)
        # Clients that reported have the version that they were sent.
        published = versions.note(state.published, reported)
        left = state.left
        if self.codes_down.is_off:
            if not self.codes_up.is_off:
                moved = trees.map(torch.add, model, moved)
            published = versions.publish_whole(published, moved)
        else:
            if self.codes_up.is_off:
                moved = trees.sub(moved, model)
            # What the coder leaves out is not lost: it is added to the next round's update.
            update, left = feedback(self.codes_down, moved, left)
            published = versions.publish(published, update, self.room)
        statistics = trees.pick(found, state.statistics)
        return State(state.round + 1, published, statistics, left, remembered)

    def _step_server(self, model: Tree, mean: Tree, state: ServerState) -> tuple[Tree, ServerState]:
        """What the server's optimiser makes of the mean of models, or of updates."""
        if self.codes_up.is_off:
            return step_server(self.server, model, mean, state)
        nothing = trees.map(torch.zeros_like, model)
        return step_server(self.server, nothing, mean, state)

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Catch up, train, send the coded update; or catch up and use the model."""
        return {
            "train": (
                Edit(self._begin),
                Train(self.objective, self.local),
                Give(self._give, self._expected),
            ),
            "use": (Edit(self._begin),),
        }[verb]

    def _begin(self, carry: Carry, client: Client) -> Carry:
        """The published model, with the client's own head if that stays on the client."""
        weights, _ = self._names(client.layout)
        received, rest = versions.receive(carry, trees.pick(client.start, weights))
        # Taken out, so that old and new clients have equal sets of trees, and train at once.
        kept = rest.pop("kept", {})
        statistics = rest.pop("statistics", {})
        whole = {**client.start, **kept, **statistics, **received}
        begun = {**rest, "model": trees.pick(whole, client.layout.shapes)}
        if not self.codes_up.is_off:
            begun["left"] = rest.get("left") or trees.map(torch.zeros_like, received)
        return begun

    def _give(self, carry: Carry, client: Client) -> Outcome:
        """Alg. 2, the client: send the coded update; keep its error and the received model."""
        weights, names = self._names(client.layout)
        held = trees.pick(carry["model"], weights)
        trained = trees.pick(carry["local"], weights)
        give = {}
        memory = {}
        if self.codes_up.is_off:
            give["model"] = Packet(trained)
        else:
            update, memory["left"] = feedback(
                self.codes_up, trees.sub(trained, held), carry["left"]
            )
            give["update"] = Packet(update)
        if names:
            give["statistics"] = Packet(trees.pick(carry["local"], names))
        if not self.codes_down.is_off:
            memory["held"] = held
        if self.head == "home":
            memory["kept"] = trees.pick(carry["local"], client.layout.head)
        return Outcome(give, memory=memory)

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        """What :meth:`_give` gives."""
        weights, names = self._names(net.layout)
        params = net.blank()
        packet = "model" if self.codes_up.is_off else "update"
        packets = {packet: ExpectedPacket.of(trees.pick(params, weights))}
        if names:
            packets["statistics"] = ExpectedPacket.of(trees.pick(params, names))
        return ExpectedReport(packets)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """Golomb-coded updates; down, those of all rounds that a client waits for its turn.

        A client takes part in every K/M-th round on average, and a sum of updates takes no more
        than they do one by one. No more than the whole model is counted.
        """
        numbers = net.layout.count(self._names(net.layout)[0])
        up = self._message(self.codes_up, numbers)
        down = min(self._message(self.codes_down, numbers) * clients / cohort, 4 * numbers)
        return round((up + down) * cohort * rounds)

    def _message(self, coder: SparseTernary, numbers: int) -> float:
        if coder.is_off:
            return 4 * numbers
        if not coder.ternary:
            # Instead of a sign and a common magnitude four bytes each.
            kept = max(1, round(coder.share * numbers))
            return golomb_bytes(numbers, coder.share) - 4 - kept / 8 + 4 * kept
        return golomb_bytes(numbers, coder.share)
