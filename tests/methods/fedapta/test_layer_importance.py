"""Importance of layers by L1, and which layers count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.groups import ChannelGroup, Place
from fedgrove.errors import InputError
from fedgrove.methods.fedapta.layer_ratios import candidates, layer_importance, weight_counts
from fedgrove.nets import Net, build


def two_convs() -> Net:
    """Convs 1 → 2 and 2 → 1 of 1 × 1, then a linear layer: weights 1, -3; 2, -2; and 5."""
    conv1 = nn.Conv2d(1, 2, 1)
    conv2 = nn.Conv2d(2, 4, 1)
    net = nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
    with torch.no_grad():
        conv1.weight.copy_(torch.tensor([1.0, -3.0]).reshape(2, 1, 1, 1))
        conv2.weight.copy_(torch.tensor([2.0, -2, 1, 1, 0, 0, 0, -1]).reshape(4, 2, 1, 1))
    return Net(net, (1, 1, 1))


def test_importance_by_hand() -> None:
    """|1| + |-3| = 4 over 2 weights; 2 + 2 + 1 + 1 + 1 = 7 over 8."""
    net = two_convs()
    groups = find_groups(net)
    assert weight_counts(groups, net.layout.shapes) == {"0": 2, "2": 8}
    assert layer_importance(net.params(), groups, "sum") == {"0": 4.0, "2": 7.0}
    assert layer_importance(net.params(), groups, "mean") == {"0": 2.0, "2": 7 / 8}


def test_a_weight_counts_in_the_group_that_it_makes_a_channel_of() -> None:
    """Four filters of 2 · 3 · 3 weights, of which the last two make channels of another group."""
    place = Place("conv.weight", 0, (0, 1, -1, -1), "filter")
    counts = weight_counts([ChannelGroup("conv", 2, (place,))], {"conv.weight": (4, 2, 3, 3)})
    assert counts == {"conv": 36}


def test_sum_and_mean_may_order_layers_differently() -> None:
    """The sum ranks by size."""
    net = two_convs()
    by_sum = layer_importance(net.params(), find_groups(net), "sum")
    by_mean = layer_importance(net.params(), find_groups(net), "mean")
    assert by_sum["0"] < by_sum["2"]
    assert by_mean["0"] > by_mean["2"]


def test_an_unknown_importance_is_refused() -> None:
    net = two_convs()
    with pytest.raises(InputError, match=r"there is no importance 'l7'.*mean, sum"):
        layer_importance(net.params(), find_groups(net), "l7")


def test_only_convolutions_are_candidates_where_there_are_some() -> None:
    """conv1, conv2 and fc1 of mnist-cnn can lose channels; FedAPTA cuts the convs."""
    net = Net(build("mnist-cnn", (1, 8, 8), 3, 0), (1, 8, 8))
    assert [group.name for group in find_groups(net)] == ["conv1", "conv2", "fc1"]
    names = [group.name for group in candidates(find_groups(net), net.layout.shapes)]
    assert names == ["conv1", "conv2"]


def test_without_convolutions_hidden_layers_are_candidates() -> None:
    net = Net(build("mlp", (12,), 3, 0), (12,))
    assert candidates(find_groups(net), net.layout.shapes) == find_groups(net)


def test_frozen_layers_are_no_candidates() -> None:
    """With the stem and layer1 frozen, 9 layers are left: three a stage, one of them residual."""
    module = build("resnet18", (3, 8, 8), 3, 0, width=4, norm="group")
    for part in (module.conv1, module.norm1, module.layer1):
        part.requires_grad_(False)
    net = Net(module, (3, 8, 8))
    found = candidates(find_groups(net), net.layout.shapes)
    assert len(found) == 9
    assert all(group.name.startswith(("layer2", "layer3", "layer4")) for group in found)
