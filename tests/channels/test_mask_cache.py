"""Masks of channels that are made once, and what is remembered of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedgrove import trees
from fedgrove.channels import mask_cache as known
from fedgrove.channels.find_groups import find_groups, find_kept_channels
from fedgrove.channels.groups import expand_channels
from fedgrove.channels.mask_cache import get_shared_mask
from fedgrove.channels.submodel import groups_from_plain, groups_to_plain, read_packet_channels
from fedgrove.core import Packet
from fedgrove.nets import Net

CHOICE = {"0": torch.tensor([True, False, True])}


@pytest.fixture
def net() -> Net:
    return Net(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)), (2,))


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_CACHE", known._MaskCache())


def made(net: Net, channels: dict[str, Tensor] = CHOICE, buffers: bool = False) -> trees.Mask:
    return get_shared_mask(find_groups(net), net.layout.shapes, channels, buffers)


@pytest.mark.parametrize("buffers", [False, True])
def test_a_shared_mask_is_what_expand_gives_and_is_made_once(net: Net, buffers: bool) -> None:
    expected = expand_channels(find_groups(net), net.layout.shapes, CHOICE, buffers)
    first = made(net, buffers=buffers)
    # An equal choice, and equal groups as a state holds them.
    again = {"0": CHOICE["0"].clone()}
    groups = groups_from_plain(groups_to_plain(find_groups(net)))
    second = get_shared_mask(groups, net.layout.shapes, again, buffers)
    assert list(first) == list(expected)
    assert trees.identical(first, expected)
    assert first is not second
    assert all(second[name] is leaf for name, leaf in first.items())


def test_another_choice_or_other_shapes_make_another_mask(net: Net) -> None:
    first = made(net)
    other = made(net, {"0": torch.tensor([True, True, False])})
    assert other["0.weight"].int().tolist() == [[1, 1], [1, 1], [0, 0]]
    assert first["0.weight"].int().tolist() == [[1, 1], [0, 0], [1, 1]]
    wider = dict(net.layout.shapes) | {"0.weight": (3, 5)}
    assert get_shared_mask(find_groups(net), wider, CHOICE)["0.weight"].shape == (3, 5)
    assert made(net, {}) == {}


def test_a_choice_written_into_is_another_one(net: Net) -> None:
    channels = {"0": CHOICE["0"].clone()}
    made(net, channels)
    channels["0"][1] = True
    assert bool(made(net, channels)["0.weight"].all())


def test_a_mask_written_into_is_not_given_to_others(net: Net) -> None:
    mask = made(net)
    assert find_kept_channels(net, mask)["0"].tolist() == [True, False, True]
    for leaf in mask.values():
        leaf.fill_(True)
    assert find_kept_channels(net, mask) is None
    assert read_packet_channels(Packet({}, mask), find_groups(net))["0"].tolist() == [
        True,
        True,
        True,
    ]
    assert made(net)["0.weight"].int().tolist() == [[1, 1], [0, 0], [1, 1]]


def test_what_is_found_in_a_mask_may_be_written_into(net: Net) -> None:
    mask = made(net)
    groups = find_groups(net)
    for _ in range(2):
        left = find_kept_channels(net, mask)
        held = read_packet_channels(Packet({}, mask), groups)
        assert left["0"].tolist() == held["0"].tolist() == [True, False, True]
        left["0"].fill_(False)
        held["0"].fill_(False)


def test_part_of_a_mask_is_looked_at_for_itself(net: Net) -> None:
    """Without its filters nothing says which channels are gone; a replaced leaf counts too."""
    mask = made(net)
    groups = find_groups(net)
    assert read_packet_channels(Packet({}, mask), groups)["0"].tolist() == [True, False, True]
    rest = {name: leaf for name, leaf in mask.items() if name != "0.weight"}
    assert read_packet_channels(Packet({}, rest), groups)["0"].tolist() == [True, True, True]
    assert find_kept_channels(net, rest) is None
    replaced = mask | {"0.weight": torch.tensor([[False, False], [False, False], [True, True]])}
    assert read_packet_channels(Packet({}, replaced), groups)["0"].tolist() == [False, False, True]


def test_no_more_is_held_than_allowed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of 3 x 2 + 3 + 3 + 3 + 3 = 18 bytes: two have room in 40, the one used last stays."""
    monkeypatch.setattr(known, "MOST_CACHED_BYTES", 40)
    choices = [{"0": torch.tensor(kept)} for kept in ([True, False, True], [True] * 2 + [False])]
    first = made(net, choices[0])
    second = made(net, choices[1])
    assert made(net, choices[0])["0.weight"] is first["0.weight"]
    made(net, {"0": torch.tensor([False, True, True])})
    assert made(net, choices[0])["0.weight"] is first["0.weight"]
    assert made(net, choices[1])["0.weight"] is not second["0.weight"]
    assert known._CACHE.nbytes == 36
    assert len(known._CACHE.by_leaf) == 10


def test_masks_of_inference_mode_are_not_remembered(net: Net) -> None:
    # The net's structure is found before: its forward pass could not be followed there.
    find_groups(net)
    with torch.inference_mode():
        first = made(net)
        assert made(net)["0.weight"] is not first["0.weight"]
