"""What a client of Grove does: catch up, train, send a coded update; or use its model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import trees
from ...channels.find_groups import find_groups, make_channel_mask
from ...channels.submodel import make_masked_packet, read_packet_channels
from ...core import (
    Batch,
    Carry,
    Client,
    ExpectedPacket,
    ExpectedReport,
    Outcome,
    Packet,
    Task,
)
from ...nets import Net
from ...nets.layout import Layout
from ...trees import Tree
from ..stc.ternary import coded
from .client_views import receive
from .head_evidence import head_change


@dataclass(frozen=True)
class GroveClient:
    """The client's half of Grove, with the settings that it depends on.

    A frozen dataclass, so that its functions compare equal from round to round and engines can
    stack clients.
    """

    home: bool
    """Whether the last layer and the norm layers stay on the client."""
    own: str
    """What a client uses: see :attr:`fedgrove.methods.grove.method.Grove.own`."""
    keep: float
    up: float | None
    """The share of an update that is sent; None: the task gives it, as it follows from a budget."""
    codes_up: bool
    """Whether clients send coded updates; False: models."""
    codes_down: bool
    """Whether the server sends coded updates; False: models."""
    looks_for_groups: bool

    @property
    def has_offset(self) -> bool:
        """Grove: whether a client keeps its last step, to use a part of it."""
        return self.own in ("offset", "chosen")

    @property
    def has_personal_model(self) -> bool:
        """Grove: whether a client trains a personal model next to the group's."""
        return self.own in ("pulled", "chosen")

    def shared_names(self, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Grove: the weights that are shared, and the running statistics."""
        local: set[str] = set()
        if self.home:
            local = {*layout.head, *layout.norms}
        return layout.without(local)

    def sends_evidence(self, layout: Layout) -> bool:
        """Grove: whether clients report how their heads moved, for grouping.

        A network without a head has only one group.
        """
        return self.looks_for_groups and bool(layout.head)

    # ---- before training -------------------------------------------------------------------------

    def begin(self, carry: Carry, client: Client) -> Carry:
        """Grove: start from the group's model with the client's own head.

        The carry also gets the personal model, where the client has one.

        Where channels are removed, their weights are 0 in all of these.
        """
        weights, _ = self.shared_names(client.layout)
        sent_mask = None
        rest = {}
        for name, tree in carry.items():
            # All packets that have a mask have one and the same: any of them will do.
            if name.endswith(".mask"):
                sent_mask = tree
            else:
                rest[name] = tree
        shared, rest = receive(rest, trees.pick(client.start, weights))
        # Taken out, so that old and new clients have equal sets of trees, and train at once. (The
        # error of the last update and the last step are read from the memory when needed.)
        rest.pop("left", None)
        rest.pop("step", None)
        kept = rest.pop("kept", {})
        statistics = rest.pop("statistics", {})
        # The last one wins: the start, over it the client's own layers, over them what is shared.
        complete = {**client.start, **kept, **statistics, **shared}
        model = trees.pick(complete, client.layout.shapes)
        personal = rest.pop("personal", model)
        if sent_mask:
            channels = read_packet_channels(Packet({}, sent_mask), find_groups(client.net))
            mask = make_channel_mask(client.net, channels)
            rest["model.mask"] = mask
            model = trees.apply_mask(model, mask)
            personal = trees.apply_mask(personal, mask)
        rest["model"] = model
        if self.has_personal_model:
            rest["personal"] = personal
        return rest

    def make_offset(self, carry: Carry, client: Client) -> Carry:
        """Grove: add the group's model with a part of the step that was just trained."""
        weights, _ = self.shared_names(client.layout)
        step = trees.sub(trees.pick(carry["local"], weights), trees.pick(carry["model"], weights))
        # The layers that stay on the client are those that were trained.
        return {**carry, "offset": self._move(carry["local"], carry["model"], step)}

    def _move(self, own: Tree, model: Tree, step: Tree) -> Tree:
        """Return ``own`` with the shared weights at the group's model plus a part of the step."""
        offset = dict(own)
        for name, leaf in step.items():
            # In the product's memory: to allocate more takes longer than the sum.
            offset[name] = (self.keep * leaf).add_(model[name])
        return offset

    def compare(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        r"""Grove: how much better the offset is than the personal model, summed over a batch.

        An example counts :math:`e^{-\ell}` by its loss: with cross-entropy that is the probability
        of its class, a smooth accuracy that no single example can spoil.
        """
        merits = {}
        for name in ("offset", "personal"):
            outputs = net(carry[name], batch.x, train=False).logits
            losses = net.problem.losses(outputs, batch.y, carry.get("client", {}))
            merits[name] = (torch.exp(-losses) * batch.weight).sum()
        return {"better": merits["offset"] - merits["personal"], "tried": batch.weight.sum()}

    def use(self, carry: Carry, client: Client) -> Carry:
        """Grove: the personal model, or the group's with a part of the client's last step."""
        begun = self.begin(carry, client)
        choice = begun.pop("choice", {})
        step = client.memory.get("step")
        offset = begun["model"]
        if self.has_offset and step is not None:
            offset = self._move(offset, offset, step)
            offset = trees.apply_mask(offset, begun.get("model.mask", {}))
        personal = begun.pop("personal", begun["model"])
        takes_personal = self.own == "pulled"
        if choice:
            takes_personal = takes_personal or bool(choice["pulled"])
        return {**begun, "model": personal if takes_personal else offset}

    # ---- after training --------------------------------------------------------------------------

    def send(self, carry: Carry, client: Client) -> Outcome:
        """Grove: send the coded update, keep its error, the head, and the personal model."""
        weights, names = self.shared_names(client.layout)
        model = trees.pick(carry["model"], weights)
        trained = trees.pick(carry["local"], weights)
        step = trees.sub(trained, model)
        mask = carry.get("model.mask")
        give = {}
        memory: dict[str, Tree] = {}
        if not self.codes_up:
            give["model"] = make_masked_packet(trained, mask)
        else:
            share = self.up
            if share is None:
                share = float(carry["settings"]["up"])
            left = client.memory.get("left")
            owed = step if left is None else trees.map(torch.add, step, left)
            owed = trees.apply_mask(owed, mask or {})
            sent = coded(share, owed, mask)
            memory["left"] = trees.sub(owed, sent)
            give["change"] = make_masked_packet(sent, mask)
        if names:
            give["statistics"] = Packet(trees.pick(carry["local"], names))
        if self.sends_evidence(client.layout):
            give["evidence"] = Packet({"scores.head": head_change(carry, client.layout)})
        if self.codes_down:
            memory["held"] = model
        if self.home:
            local = [name for name in client.layout.shapes if name not in weights]
            memory["kept"] = trees.pick(carry["local"], local)
        if self.has_offset:
            memory["step"] = step
        if self.has_personal_model:
            memory["personal"] = carry["personal"]
        return Outcome(give, self._comparison(carry), memory=memory)

    def _comparison(self, carry: Carry) -> dict[str, float]:
        """What a client reports of the two kinds of model, after :meth:`compare`."""
        if self.own != "chosen" or not carry["merit"]:
            return {}
        tried = float(carry["merit"]["tried"])
        better = float(carry["merit"]["better"]) / max(1.0, tried)
        # A client without examples in the fold, or with a loss that is not finite, does not vote.
        if tried == 0 or not math.isfinite(better):
            return {}
        # With a loss below 0, which a user's own problem may have, it may be any number.
        return {"better": min(1.0, max(-1.0, better)), "tried": tried}

    def expected(self, task: Task, net: Net) -> ExpectedReport:
        """Grove: the form of the report that :meth:`send` makes."""
        weights, names = self.shared_names(net.layout)
        params = net.blank()
        mask = None
        for sent in task.send.values():
            mask = mask or sent.mask
        packet = "change" if self.codes_up else "model"
        packets = {packet: ExpectedPacket.of(trees.pick(params, weights), mask or None)}
        if names:
            packets["statistics"] = ExpectedPacket.of(trees.pick(params, names))
        if self.sends_evidence(net.layout):
            head = trees.pick(params, net.layout.head)
            dtype = next(iter(head.values())).dtype
            packets["evidence"] = ExpectedPacket({"scores.head": (dtype, (trees.size(head),))})
        return ExpectedReport(packets, optional={"better": (-1.0, 1.0), "tried": (0.0, 1e9)})
