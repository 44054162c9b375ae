"""What clients hold: views and versions by hand, under masks too."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedgrove import trees
from fedgrove.core import Carry
from fedgrove.methods.grove import client_views
from fedgrove.methods.grove.client_views import ClientViews
from fedgrove.trees import Mask, Tree

ALL = 0


def vector(*numbers: float) -> Tree:
    return {"w": torch.tensor(numbers)}


def test_a_view_by_hand() -> None:
    """The model is (3 4 -4 1), the view (1 1 -4 1): half of four are two, 2 and 3, mean 2.5."""
    held = client_views.first({"w": torch.ones(4)}, ALL, False)
    held = replace(held, views={7: {"w": torch.tensor([1.0, 1.0, -4.0, 1.0])}})
    model = {"w": torch.tensor([3.0, 4.0, -4.0, 1.0])}
    packet = client_views.packets(held, 7, ALL, model, 0.5, None, {})["change"]
    assert packet.values["w"].tolist() == [2.5, 2.5, 0.0, 0.0]
    assert client_views.received(held, 7, 0, model, 0.5, None)["w"].tolist() == [
        3.5,
        3.5,
        -4.0,
        1.0,
    ]
    # Under a mask that keeps the last two: the share is of these, and the rest is gone.
    mask = {"w": torch.tensor([False, False, True, True])}
    other = {"w": torch.tensor([3.0, 4.0, -6.0, 2.0])}
    packet = client_views.packets(held, 7, ALL, other, 0.5, mask, {})["change"]
    assert packet.values["w"].tolist() == [0.0, 0.0, -2.0, 0.0]
    assert client_views.received(held, 7, 0, other, 0.5, mask)["w"].tolist() == [
        0.0,
        0.0,
        -6.0,
        1.0,
    ]


def test_what_was_made_for_a_client_is_noted_only_as_it_was_made() -> None:
    """Kept until its report is folded, and made anew of another model, share or mask."""
    held = client_views.first({"w": torch.zeros(4)}, ALL, False)
    held = replace(held, views={7: {"w": torch.zeros(4)}})
    model = {"w": torch.tensor([4.0, 2.0, 1.0, 1.0])}
    sent = client_views.packets(held, 7, ALL, model, 0.5, None, {}, will_report=True)["change"]
    assert held.sent[7].change is sent.values
    # Half of four are two, mean 3; of another model others; a quarter is one; under a mask others.
    other = {"w": torch.tensor([0.0, 0.0, 6.0, 8.0])}
    mask = {"w": torch.tensor([False, False, True, True])}
    for shown, share, kept, expected in (
        (other, 0.5, None, [0.0, 0.0, 7.0, 7.0]),
        (model, 0.25, None, [4.0, 0.0, 0.0, 0.0]),
        (model, 0.5, mask, [0.0, 0.0, 1.0, 0.0]),
        (model, 0.5, None, [3.0, 3.0, 0.0, 0.0]),
    ):
        client_views.packets(held, 7, ALL, model, 0.5, None, {}, will_report=True)
        assert client_views.received(held, 7, 0, shown, share, kept)["w"].tolist() == expected
        assert not held.sent
    # Scoring a client leaves nothing behind.
    client_views.packets(held, 7, ALL, model, 0.5, None, {})
    assert not held.sent


def test_new_clients_share_what_was_made_for_one_of_them() -> None:
    """Their view is the initial model, (0 0 0 0): half of (4 2 1 1) are two, mean 3."""
    held = client_views.first({"w": torch.zeros(4)}, ALL, False)
    held = replace(held, views={7: {"w": torch.ones(4)}})
    model = {"w": torch.tensor([4.0, 2.0, 1.0, 1.0])}

    def make(client: int, will_report: bool = False) -> Tree:
        made = client_views.packets(held, client, ALL, model, 0.5, None, {}, will_report)
        return made["change"].values

    first = make(3)
    assert first["w"].tolist() == [3.0, 3.0, 0.0, 0.0]
    assert make(5, will_report=True) is first
    # After a client's report is folded, the change still serves others.
    after = client_views.received(held, 5, ALL, model, 0.5, None)
    assert after["w"].tolist() == [3.0, 3.0, 0.0, 0.0]
    assert make(4) is first
    # A client with a view of its own gets its own change: (3 1 0 0), mean 2.
    assert make(7)["w"].tolist() == [2.0, 2.0, 0.0, 0.0]


def received(
    held: ClientViews, client: int, group: int, memory: Carry, mask: Mask | None = None
) -> Tree:
    """What a client holds once it has read what it is sent."""
    carry = dict(memory)
    model = vector(0.0, 0.0, 0.0, 0.0)
    for name, packet in client_views.packets(held, client, group, model, 0.5, mask, {}).items():
        assert packet.mask == mask
        carry[name] = packet.values
    now, rest = client_views.receive(carry, held.initial)
    assert not rest
    return trees.apply_mask(now, mask or {})


def test_versions_by_hand() -> None:
    """Half of four numbers are published each time, the rest comes later.

    Steps (4 0 1 2): 4 and 2 go, as 3 each; (1 0 1 -1) is left. Then (0 2 2 0) more, (1 2 3 -1): 2 and 3 go as 2.5;
    (1 -.5 .5 -1) is left.
    """
    held = client_views.first(vector(0.0, 0.0, 0.0, 0.0), ALL, True)
    assert client_views.packets(held, 7, ALL, held.initial, 0.5, None, {}) == {}
    held = client_views.publish(held, ALL, vector(4.0, 0.0, 1.0, 2.0), 0.5, None, [7], 9)
    assert held.left[ALL]["w"].tolist() == [1.0, 0.0, 1.0, -1.0]
    assert received(held, 7, ALL, {})["w"].tolist() == [3.0, 0.0, 0.0, 3.0]
    held = client_views.publish(held, ALL, vector(0.0, 2.0, 2.0, 0.0), 0.5, None, [7], 9)
    assert held.left[ALL]["w"].tolist() == [1.0, -0.5, 0.5, -1.0]
    assert received(held, 8, ALL, {})["w"].tolist() == [3.0, 2.5, 2.5, 3.0]
    memory = {"held": vector(3.0, 0.0, 0.0, 3.0)}
    assert received(held, 7, ALL, memory)["w"].tolist() == [3.0, 2.5, 2.5, 3.0]


def test_a_group_beside_another_by_hand() -> None:
    """What was left of the one is left of both; who has other channels now is sent all of them."""
    held = client_views.first(vector(0.0, 0.0, 0.0, 0.0), ALL, True)
    held = client_views.publish(held, ALL, vector(4.0, 0.0, 1.0, 2.0), 0.5, None, [7], 9)
    held = client_views.branch(held, [1], ALL)
    held = client_views.publish(held, 1, vector(0.0, 2.0, 2.0, 0.0), 0.5, None, [7], 9)
    assert held.left[ALL]["w"].tolist() == [1.0, 0.0, 1.0, -1.0]
    assert received(held, 9, ALL, {})["w"].tolist() == [3.0, 0.0, 0.0, 3.0]
    mask = {"w": torch.tensor([True, True, False, False])}
    assert received(held, 7, 1, {"held": vector(3.0, 0.0, 0.0, 3.0)}, mask)["w"].tolist() == [
        *(3.0, 2.5, 0.0, 0.0)
    ]
    # What it held it held of other channels.
    held = client_views.forget(held, [7])
    assert received(held, 7, 1, {"held": vector(0.0, 0.0, 0.0, 3.0)}, mask)["w"].tolist() == [
        *(3.0, 2.5, 0.0, 0.0)
    ]
    assert client_views.thin(held, 1, mask).left[1]["w"].tolist() == [1.0, -0.5, 0.0, 0.0]


def test_who_has_missed_nothing_learns_its_channels_all_the_same() -> None:
    held = client_views.first(vector(1.0, 1.0, 1.0, 1.0), ALL, True)
    mask = {"w": torch.tensor([True, False, True, False])}
    (packet,) = client_views.packets(held, 7, ALL, held.initial, 0.5, mask, {}).values()
    assert packet.mask == mask
    assert not bool(packet.values["w"].any())


def test_views_know_no_versions() -> None:
    held = client_views.first(vector(1.0, 1.0), ALL, False)
    mask = {"w": torch.tensor([True, False])}
    assert client_views.branch(held, [1], ALL) is held
    assert client_views.forget(held, [7]) is held
    assert client_views.thin(held, ALL, mask) is held
