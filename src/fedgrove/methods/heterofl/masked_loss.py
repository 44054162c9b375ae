"""HeteroFL's masked loss: a client neither learns nor sends what it knows nothing of.

Where a client lacks a class, its data teach the class's logit one thing, to be small, and an
average over such clients forgets the class. Here the logit counts as 0, which no weight changes,
and the class's weights in the last layer are averaged over the clients that have the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ... import trees
from ...channels.groups import ChannelGroup, is_whole
from ...channels.mask_cache import get_shared_mask
from ...channels.submodel import add_submodel, get_shapes, read_packet_channels
from ...core import (
    Batch,
    Carry,
    Client,
    ExpectedPacket,
    ExpectedReport,
    Outcome,
    Packet,
    Report,
    Task,
    expected_as_sent,
)
from ...nets.layout import Layout
from ...parts.aggregate import Average
from ...parts.device_widths import send_masked
from ...parts.objective import Loss, Objective
from ...trees import Mask, Tree

if TYPE_CHECKING:
    from ...nets import Net, Output

LABELS = "labels"
"""The tree of the carry with the client's labels (:class:`LabelCounts`)."""


@dataclass(frozen=True)
class MaskedLoss(Objective):
    """A loss in which the logits of classes that the client lacks are 0, whatever the weights.

    ``loss`` -> what is minimised; the client's classes -> ``carry["labels"]``. In the softmax such
    a class has the constant weight of a logit of 0, as in the authors' code.
    """

    only_in: ClassVar[str] = "heterofl"
    targets: ClassVar[tuple[str, ...] | None] = ()
    loss: Objective

    def begin(self, params: Tree, carry: Carry) -> Tree:
        """Return what the masked loss begins with."""
        return self.loss.begin(params, carry)

    def more_macs(self, net: Net, forward: int) -> int:
        """Return the additional MACs of the loss that is masked."""
        return self.loss.more_macs(net, forward)

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The loss of the masked logits."""
        missing = missing_classes(carry[LABELS])
        logits = torch.where(missing, torch.zeros_like(out.logits), out.logits)
        return self.loss(replace(out, logits=logits), params, batch, carry)


def missing_classes(labels: Tree) -> Tensor:
    """HeteroFL: which outputs are classes of the client's task that none of its examples has.

    >>> counts = torch.tensor([4.0, 0.0, 0.0])
    >>> missing_classes({"counts": counts, "is_class": torch.tensor([1.0, 1.0, 0.0])})
    tensor([False,  True, False])
    """
    return (labels["is_class"] > 0) & (labels["counts"] == 0)


def known_outputs(labels: Tree) -> Tensor | None:
    """HeteroFL: which outputs a client has examples of; None for all, or if it has no classes."""
    if not labels or not bool((labels["is_class"] > 0).any()):
        # Without examples, or with another kind of targets: there is nothing to leave out.
        return None
    known = labels["counts"] > 0
    return None if bool(known.all()) else known


def send_known(carry: Carry, client: Client) -> Outcome:
    """HeteroFL: a client sends its sub-model, and of the last layer the classes that it has.

    The last layer is a packet of its own: its mask is the client's, that of the rest the server's.
    """
    head = client.layout.head
    if not head:
        # It ends in no linear layer: the classes' weights are not known by name.
        return send_masked(carry, client)
    sent = carry.get("model.mask") or {}
    mask = {name: leaf for name, leaf in sent.items() if name in head}
    known = known_outputs(carry[LABELS])
    for name in head:
        leaf = carry["local"][name]
        # A network may go on behind its last linear layer, whose rows are then no classes.
        if known is not None and leaf.shape[0] == len(known):
            mask[name] = _keep_rows(leaf, known, mask.get(name))
    body, last = split_head(carry["local"], client.layout)
    packets = {
        "head": _masked_packet(trees.apply_mask(last, mask), mask),
        "model": _masked_packet(body, {k: v for k, v in sent.items() if k not in head}),
    }
    return Outcome(packets)


def _keep_rows(leaf: Tensor, known: Tensor, kept: Tensor | None) -> Tensor:
    """Return a mask of the rows of known classes, within another mask."""
    rows = known.view(-1, *[1] * (leaf.dim() - 1)).expand(leaf.shape)
    return rows.clone() if kept is None else rows & kept


def _masked_packet(values: Tree, mask: Mask) -> Packet:
    return Packet(values, mask or None)


def split_head(model: Tree, layout: Layout) -> tuple[Tree, Tree]:
    """HeteroFL: a model without its last layer, and that layer."""
    body = {name: leaf for name, leaf in model.items() if name not in layout.head}
    return body, trees.pick(model, layout.head)


def expected_known(task: Task, net: Net) -> ExpectedReport:
    """HeteroFL: the sub-model under its mask, and its last layer under a mask of the client's."""
    if not net.layout.head:
        return expected_as_sent(task, net)
    sent = task.send["model"]
    body, last = split_head(sent.values, net.layout)
    mask = {name: leaf for name, leaf in (sent.mask or {}).items() if name not in net.layout.head}
    # The head first: if noise is requested, its mask is the reason to refuse.
    packets = {
        "head": ExpectedPacket.of(last, "own"),
        "model": ExpectedPacket.of(body, mask or None),
    }
    return ExpectedReport(packets)


def add_known(mean: Average, report: Report, groups: Sequence[ChannelGroup]) -> None:
    """HeteroFL: add a sub-model to a mean; of its last layer the classes that the client has."""
    packet = report.give["model"]
    if "head" not in report.give:
        add_submodel(mean, packet, groups, report.examples)
        return
    head = report.give["head"]
    values = packet.values | head.values
    channels = read_packet_channels(packet, groups)
    mask: Mask = {}
    if not is_whole(channels):
        mask = get_shared_mask(groups, get_shapes(values), channels, buffers=True)
    # The head's own mask is within that of the channels.
    mask.update(head.mask or {})
    mean.add(values, report.examples, mask or None)
