"""What each client has received of its group's model, and what is sent to bring it up to date.

There are two ways to know it. With *views* the server keeps a model for each client that has
reported, V_k, and sends the largest of the difference to its group's model W_g. Nothing is dropped:
what is left out is still in the difference the next time. With *versions* it keeps for each group
what it has published, P_g, with a bounded history (:mod:`fedgrove.methods.stc.versions`), and sends
what a client has missed; after each round it publishes the largest of W_g - P_g.

Both sides agree. A client keeps the model it has received in its memory as "held", and the server
notes it when it folds the client's report. If an exchange is lost neither happens: the client goes
back to the memory that the next task names. At first all clients have the initial model, which
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
from ...renamed import find_old_names
from ...trees import Mask, Tree
from ..stc import versions
from ..stc.ternary import coded
from ..stc.versions import MISSED, Versions

MissedUpdates = dict[tuple[int, int], Mapping[str, Packet]]
"""By group and number of missed updates: what was made for other clients."""
CHANGE = "change"
"""The packet of a coded difference."""
NEW = -1
"""Stands for all clients that have never reported: they have one and the same view."""


@dataclass(frozen=True)
class ClientViews:
    """What clients have received of their groups' models: views, or versions."""

    initial: Tree
    """The model of clients that have never reported."""
    views: dict[int, Tree]
    """By client: the model it has received."""
    published: Versions | None
    """Replaces views: what is published, by group, and which version a client has."""
    left: dict[int, Tree]
    """With versions, by group: what of its model is not published yet, W_g - P_g."""

    @cached_property
    def sent(self) -> dict[int, SentChange]:
        """Grove: with views, by client: what was last made for it, until its report is folded.

        Clients that have never reported share one entry, :data:`NEW`.

        Not part of the state: where it is not known it is made again.
        """
        return {}


class SentChange(NamedTuple):
    """A change that was made for a client, and what it was made of: does it still fit?"""

    model: Tree
    share: float
    mask: Mask | None
    change: Tree


def first(model: Tree, group: int, has_versions: bool) -> ClientViews:
    """Grove: the first views of clients: all have the initial model."""
    if not has_versions:
        return ClientViews(model, {}, None, {})
    left = {group: trees.map(torch.zeros_like, model)}
    return ClientViews(model, {}, versions.first(model, group), left)


# ---- what is sent --------------------------------------------------------------------------------


def packets(
    views: ClientViews,
    client: int,
    group: int,
    model: Tree,
    share: float,
    mask: Mask | None,
    known: MissedUpdates,
    will_report: bool = False,
) -> dict[str, Packet]:
    """Grove: what brings a client nearer to its group's model, under the mask of its channels.

    ``known`` has the sums of missed updates that were made for other clients. For a client that
    ``will_report``, :func:`received` needs the change again: it is remembered.
    """
    if views.published is None:
        change = _change(views, client, model, share, mask)
        key = _sent_key(views, client)
        # Made once for all new clients: there may be many of them, also when clients are scored.
        if will_report or key == NEW:
            views.sent[key] = SentChange(model, share, mask, change)
        return {CHANGE: make_masked_packet(change, mask)}
    send = dict(versions.packets(views.published, client, group, known))
    if not mask:
        return send
    if not send:
        # A client learns its channels from a mask, also when it has missed nothing.
        send[f"{MISSED}0"] = Packet(trees.map(torch.zeros_like, model))
    for name, packet in send.items():
        send[name] = make_masked_packet(trees.apply_mask(packet.values, mask), mask)
    return send


def receive(carry: Carry, start: Mapping[str, Tensor]) -> tuple[Tree, Carry]:
    """Grove: the client's side of an update: its group's model as received.

    The carry loses what that model was made of.

    ``start`` is the initial model. A whole model may have been sent as well, as "model".
    """
    model, rest = versions.receive(carry, start)
    change = rest.pop(CHANGE, None)
    if change is not None:
        model = trees.map(torch.add, model, change)
    return model, rest


# ---- what is noted -------------------------------------------------------------------------------


def received(
    views: ClientViews, client: int, group: int, model: Tree, share: float, mask: Mask | None
) -> Tree:
    """Grove: the model that a client has after it received :func:`packets`; the next view of it."""
    if views.published is not None:
        return trees.apply_mask(views.published.models[group], mask or {})
    before = _view(views, client)
    change = _change(views, client, model, share, mask)
    # A cohort may be large, but the change of new clients is one for all of them.
    if client in views.views:
        views.sent.pop(client, None)
    view = trees.map(torch.add, before, change)
    return trees.apply_mask(view, mask or {})


def publish(
    views: ClientViews,
    group: int,
    step: Mapping[str, Tensor],
    share: float,
    mask: Mask | None,
    reported: Sequence[int],
    room: float,
) -> ClientViews:
    """Grove: publish the next version of a group's model, after it moved by ``step``.

    Clients that have ``reported`` have the last one.
    """
    assert views.published is not None
    noted = versions.note(views.published, reported, group)
    # W_g - P_g as a sum of what was left and the new step: a difference of the two would round, and
    # rounding would decide which of equal changes are published.
    owed = trees.map(torch.add, views.left[group], step)
    update = coded(share, owed, mask)
    return replace(
        views,
        published=versions.publish(noted, update, room, group),
        left={**views.left, group: trees.sub(owed, update)},
    )


def branch(views: ClientViews, groups: Sequence[int], of: int) -> ClientViews:
    """Grove: add groups next to one, with the versions that it has published."""
    if views.published is None:
        return views
    published = versions.branch(views.published, groups, of, stays=True)
    left = {**views.left, **dict.fromkeys(groups, views.left[of])}
    return replace(views, published=published, left=left)


def forget(views: ClientViews, clients: Iterable[int]) -> ClientViews:
    """Grove: forget these clients' versions, because their channels may have changed.

    With versions they are then sent the whole model.

    A view shows itself what a client lacks.
    """
    if views.published is None:
        return views
    return replace(views, published=versions.forget(views.published, clients))


def thin(views: ClientViews, group: int, mask: Mask) -> ClientViews:
    """Grove: remove from a group's model what a mask removes; none of it is left to publish."""
    if views.published is None:
        return views
    left = {**views.left, group: trees.apply_mask(views.left[group], mask)}
    return replace(views, left=left)


def _change(views: ClientViews, client: int, model: Tree, share: float, mask: Mask | None) -> Tree:
    """The largest of what a client's view lacks."""
    known = views.sent.get(_sent_key(views, client))
    # States are never written into: what was made of the same objects is the same.
    is_same = known is not None and known.model is model and known.share == share
    if known is None or not is_same or not _same_mask(known.mask, mask):
        return coded(share, trees.sub(model, _view(views, client)), mask)
    return known.change


def _sent_key(views: ClientViews, client: int) -> int:
    """Under which number the change for a client is remembered."""
    return client if client in views.views else NEW


def _same_mask(mask: Mask | None, other: Mask | None) -> bool:
    if not mask or not other:
        return not mask and not other
    return mask is other or trees.equal(mask, other)


def _view(views: ClientViews, client: int) -> Tree:
    return views.views.get(client, views.initial)


__getattr__ = find_old_names(__name__)
