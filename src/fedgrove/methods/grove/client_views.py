"""What each client holds of its group's model, and what brings it nearer: two ways to know.

With *views* the server keeps a model for each client that has reported, V_k, and sends the largest
of the difference to its group's model W_g. Nothing is lost for good: what is left out is still in
the difference the next time. With *versions* it keeps for each group what it has published, P_g,
with a bounded history (:mod:`.versions`), and sends what a client has missed; after each round it
publishes the largest of W_g - P_g.

Either way both sides agree. A client takes what it then holds into its memory as "held", and the
server notes it when it folds the client's report; where an exchange is lost neither happens, as the
client goes back to the memory that the next task names. At first all hold the initial model, which
costs no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ... import trees
from ...channels.submodel import make_masked_packet
from ...core import Carry, Packet
from ...trees import Mask, Tree
from ..stc import versions
from ..stc.ternary import coded
from ..stc.versions import MISSED, Versions

Sums = dict[tuple[int, int], Mapping[str, Packet]]
CHANGE = "change"
"""The packet of a coded difference."""


@dataclass(frozen=True)
class Holdings:
    """What clients hold: views, or versions."""

    initial: Tree
    """What clients hold that have never reported."""
    views: dict[int, Tree]
    """By client: what it holds."""
    published: Versions | None
    """In place of views: what is published, by group, and which version a client holds."""
    left: dict[int, Tree]
    """With versions, by group: what of its model is not published yet, W_g - P_g."""

    @cached_property
    def sent(self) -> dict[int, Sent]:
        """With views, by client: what was last made for it, until its report is folded.

        Not part of the state: where it is not known it is made again.
        """
        return {}


class Sent(NamedTuple):
    """A change that was made for a client, and what it was made of, which says whether it fits."""

    model: Tree
    share: float
    mask: Mask | None
    change: Tree


def first(model: Tree, group: int, has_versions: bool) -> Holdings:
    """All hold the initial model."""
    if not has_versions:
        return Holdings(model, {}, None, {})
    left = {group: trees.map(torch.zeros_like, model)}
    return Holdings(model, {}, versions.first(model, group), left)


# ---- what is sent --------------------------------------------------------------------------------


def packets(
    holdings: Holdings,
    client: int,
    group: int,
    model: Tree,
    share: float,
    mask: Mask | None,
    known: Sums,
    will_report: bool = False,
) -> dict[str, Packet]:
    """What brings a client nearer to its group's model, under the mask of what it has of it.

    ``known`` holds sums of missed updates that were made before, for others. Of who ``will_report``
    :func:`next_view` asks for the same again.
    """
    if holdings.published is None:
        change = _change(holdings, client, model, share, mask)
        if will_report:
            holdings.sent[client] = Sent(model, share, mask, change)
        return {CHANGE: make_masked_packet(change, mask)}
    send = dict(versions.packets(holdings.published, client, group, known))
    if not mask:
        return send
    if not send:
        # A client learns its channels from a mask, also when it has missed nothing.
        send[f"{MISSED}0"] = Packet(trees.map(torch.zeros_like, model))
    for name, packet in send.items():
        send[name] = make_masked_packet(trees.apply_mask(packet.values, mask), mask)
    return send


def receive(carry: Carry, start: Mapping[str, Tensor]) -> tuple[Tree, Carry]:
    """On the client: what it holds now, and the carry without what that was made of.

    ``start`` is the initial model. A whole model may have been sent as well, as "model".
    """
    model, rest = versions.receive(carry, start)
    change = rest.pop(CHANGE, None)
    if change is not None:
        model = trees.map(torch.add, model, change)
    return model, rest


# ---- what is noted -------------------------------------------------------------------------------


def next_view(
    holdings: Holdings, client: int, model: Tree, share: float, mask: Mask | None
) -> Tree:
    """What a client holds that was sent :func:`packets`."""
    held = _view(holdings, client)
    change = _change(holdings, client, model, share, mask)
    # A cohort may be large.
    holdings.sent.pop(client, None)
    view = trees.map(torch.add, held, change)
    return trees.apply_mask(view, mask or {})


def publish(
    holdings: Holdings,
    group: int,
    step: Mapping[str, Tensor],
    share: float,
    mask: Mask | None,
    reported: Sequence[int],
    room: float,
) -> Holdings:
    """The next version, once a group's model has moved by ``step``.

    Those who have ``reported`` hold the last one.
    """
    assert holdings.published is not None
    noted = versions.note(holdings.published, reported, group)
    # W_g - P_g as a sum of what was left and the new step: a difference of the two would round, and
    # rounding would decide which of equal changes are published.
    owed = trees.map(torch.add, holdings.left[group], step)
    update = coded(share, owed, mask)
    return replace(
        holdings,
        published=versions.publish(noted, update, room, group),
        left={**holdings.left, group: trees.sub(owed, update)},
    )


def branch(holdings: Holdings, groups: Sequence[int], of: int) -> Holdings:
    """New groups beside one, with what it has published."""
    if holdings.published is None:
        return holdings
    published = versions.branch(holdings.published, groups, of, stays=True)
    left = {**holdings.left, **dict.fromkeys(groups, holdings.left[of])}
    return replace(holdings, published=published, left=left)


def forget(holdings: Holdings, clients: Iterable[int]) -> Holdings:
    """These clients may have other channels now: with versions they are sent the whole model.

    A view shows itself what a client lacks.
    """
    if holdings.published is None:
        return holdings
    return replace(holdings, published=versions.forget(holdings.published, clients))


def thin(holdings: Holdings, group: int, mask: Mask) -> Holdings:
    """A group's model without what a mask removes: nothing of that is left to publish."""
    if holdings.published is None:
        return holdings
    left = {**holdings.left, group: trees.apply_mask(holdings.left[group], mask)}
    return replace(holdings, left=left)


def _change(holdings: Holdings, client: int, model: Tree, share: float, mask: Mask | None) -> Tree:
    """The largest of what a client's view lacks."""
    known = holdings.sent.get(client)
    # States are never written into: what was made of the same objects is the same.
    is_same = known is not None and known.model is model and known.share == share
    if known is None or not is_same or not _same(known.mask, mask):
        return coded(share, trees.sub(model, _view(holdings, client)), mask)
    return known.change


def _same(mask: Mask | None, other: Mask | None) -> bool:
    if not mask or not other:
        return not mask and not other
    return mask is other or trees.equal(mask, other)


def _view(holdings: Holdings, client: int) -> Tree:
    return holdings.views.get(client, holdings.initial)
