"""Which channels a device trains at its ratio: four rules, and how Table 5 counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.groups import ChannelGroup
from fedgrove.channels.selection import Even, FilterL1, select_random, select_window
from fedgrove.errors import InputError
from fedgrove.methods.fedapta.channel_rules import (
    LayerwiseL1,
    RandomChannels,
    RollingWindow,
    UniformL1,
    check_ratio,
    kept_weights,
    largest_ratio,
)
from fedgrove.methods.fedapta.layer_ratios import candidates, layer_importance, weight_counts
from fedgrove.nets import Net, build
from fedgrove.seeds import torch_rng


def two_layers(first: list[float], second: list[float]) -> tuple[Net, tuple[ChannelGroup, ...]]:
    """Two 1 × 1 convs of four channels each, the second with equal weights in a filter."""
    conv1, conv2 = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1)
    with torch.no_grad():
        conv1.weight.copy_(torch.tensor(first).reshape(4, 1, 1, 1))
        conv2.weight.copy_(torch.tensor(second).reshape(4, 1, 1, 1).expand(4, 4, 1, 1))
    module = nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    net = Net(module, (1, 1, 1))
    return net, find_groups(net)


def test_layerwise_channels_by_hand() -> None:
    """Means 4 and 1, sizes 4 and 16: 1/I = .25, 1. The budget .4 · 20 = 8 = s (4 · .25 + 16) gives
    s = 8/17: ratios 2/17 = .12 and 8/17 = .47, of four channels .47 and 1.88. Down to 0 and 1, 8 - 4
    weights are missing: .88 of 4 weights is nearer as one more, .47 of 1 is then 0.0 away."""
    net, groups = two_layers([4.0, -5, 3, 4], [1.0, -2, 0.5, 0.5])
    kept = LayerwiseL1(least=0)(net.params(), groups, 0.4, round=0, client=0)
    assert kept["0"].tolist() == [True, True, True, True]
    # Of equal filters the first stays.
    assert kept["2"].tolist() == [True, True, False, False]


def test_a_floor_by_hand() -> None:
    """As above at .5: s = 10/17, ratios .15 and .59, of four channels .59 and 2.35. With a floor of
    .5 the first loses 2, and the second 2 of 4 too: 4 · .5 + 16 · .5 = 10."""
    net, groups = two_layers([4.0, -5, 3, 4], [1.0, -2, 0.5, 0.5])
    kept = LayerwiseL1(least=1)(net.params(), groups, 0.5, round=0, client=0)
    assert kept["0"].tolist() == [True, True, False, False]
    assert kept["2"].tolist() == [True, True, False, False]
    # Without it the first loses one at most.
    free = LayerwiseL1(least=0)(net.params(), groups, 0.5, round=0, client=0)
    assert int(free["0"].sum()) >= 3


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), ratio=st.floats(0, 0.9), least=st.floats(0, 1))
def test_no_layer_loses_less_than_the_floor(seed: int, ratio: float, least: float) -> None:
    """To within a channel, for channels are whole."""
    net = Net(build("bn-cnn2", (1, 8, 8), 3, seed, width=16, norm="group"), (1, 8, 8))
    layers = candidates(find_groups(net), net.layout.shapes)
    kept = LayerwiseL1(least=least)(net.params(), layers, ratio, round=0, client=0)
    for group in layers:
        lost = group.size - int(kept[group.name].sum())
        assert lost > least * ratio * group.size - 1 - 1e-6


def test_the_most_important_layer_loses_least() -> None:
    net, groups = two_layers([1.0, 1, 1, 1], [9.0, 9, 9, 9])
    kept = LayerwiseL1(least=0)(net.params(), groups, 0.5, round=0, client=0)
    assert int(kept["0"].sum()) < int(kept["2"].sum())
    # By the sum, too: 4 and 144.
    by_sum = LayerwiseL1("sum", least=0)(net.params(), groups, 0.5, round=0, client=0)
    assert int(by_sum["0"].sum()) < int(by_sum["2"].sum())


RULES = [LayerwiseL1(), UniformL1(), RollingWindow(), RandomChannels()]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), ratio=st.floats(0, 0.75))
def test_every_rule_keeps_a_channel_and_meets_the_budget(seed: int, ratio: float) -> None:
    module = build("bn-cnn2", (1, 8, 8), 3, seed, width=8, norm="group")
    net = Net(module, (1, 8, 8))
    layers = candidates(find_groups(net), net.layout.shapes)
    counts = weight_counts(layers, net.layout.shapes)
    for rule in RULES:
        kept = rule(net.params(), layers, ratio, round=3, client=5)
        assert kept.keys() == counts.keys()
        assert all(bool(channels.any()) for channels in kept.values())
        whole = sum(counts.values())
        share = 1 - kept_weights(layers, counts, kept) / whole
        # Half of the largest layer's channel; the other rules round in every layer.
        channel = max(counts[group.name] / group.size for group in layers) / whole
        allowed = channel / 2 if rule == RULES[0] else channel
        assert abs(share - ratio) <= allowed + 1e-9


def test_the_other_rules_are_those_of_their_methods() -> None:
    net, groups = two_layers([4.0, -5, 3, 4], [1.0, -2, 0.5, 0.5])
    params = net.params()

    def same(one: dict, other: dict) -> bool:
        return all(torch.equal(one[name], other[name]) for name in other)

    uniform = UniformL1()(params, groups, 0.5, 2, 7)
    assert same(uniform, Even()(FilterL1()(params, groups), 0.5))
    assert same(RollingWindow()(params, groups, 0.5, 2, 7), select_window(groups, 0.5, 2))
    generator = torch_rng(3, 2, 7, "channels")
    assert same(
        RandomChannels(draw=3)(params, groups, 0.5, 2, 7), select_random(groups, 0.5, generator)
    )


def test_only_random_channels_differ_between_devices() -> None:
    net, groups = two_layers([4.0, -5, 3, 4], [1.0, -2, 0.5, 0.5])
    for rule in RULES:
        kept = [rule(net.params(), groups, 0.5, 0, client) for client in range(6)]
        differs = any(not torch.equal(kept[0]["0"], other["0"]) for other in kept)
        assert differs == rule.varies


def test_a_ratio_that_no_allocation_can_meet() -> None:
    _, groups = two_layers([1.0] * 4, [1.0] * 4)
    check_ratio(LayerwiseL1(), groups, 0.75)
    sentence = r"ratio is 0.8, and layer '0', of 4 channels, can lose at most 0.75 of them"
    with pytest.raises(InputError, match=sentence):
        check_ratio(LayerwiseL1(), groups, 0.8)
    with pytest.raises(InputError, match=r"at most 0.5 of them \(prune.most is 0.5"):
        check_ratio(LayerwiseL1(most=0.5), groups, 0.6)
    # The others round in every layer: one channel stays at any ratio.
    for rule in RULES[1:]:
        check_ratio(rule, groups, 0.99)
        assert largest_ratio(rule, groups) == 1
    assert largest_ratio(LayerwiseL1(most=0.5), groups) == 0.5


@pytest.mark.parametrize(
    "bad", [{"importance": "l2"}, {"most": 1.0}, {"most": 0.0}, {"least": 1.1}, {"least": -0.1}]
)
def test_bad_fields_are_refused(bad: dict) -> None:
    with pytest.raises(InputError):
        LayerwiseL1(**bad)


TABLE_5 = {0.0: 11.01e6, 0.2: 8.81e6, 0.4: 6.61e6, 0.6: 4.40e6, 0.8: 2.20e6}
"""Parameters of ResNet-18 by pruning ratio, as the paper prints them."""


@pytest.mark.parametrize(
    "rule",
    [LayerwiseL1(), LayerwiseL1(least=0), LayerwiseL1("sum", least=0), UniformL1()],
    ids=str,
)
def test_parameters_of_table_5(rule: LayerwiseL1 | UniformL1) -> None:
    """Kept weights of layer2 to layer4, the stem and layer1 being frozen.

    layer2: 64·128·9 + 3·128·128·9 + 64·128 = 524,288; the next two four and sixteen times as many:
    11,010,048 in all.
    """
    module = build("resnet18", (3, 32, 32), 10, 0, norm="group")
    for part in (module.conv1, module.norm1, module.layer1):
        part.requires_grad_(False)
    net = Net(module, (3, 32, 32))
    layers = candidates(find_groups(net), net.layout.shapes)
    counts = weight_counts(layers, net.layout.shapes)
    assert sum(counts.values()) == 11_010_048
    for ratio, printed in TABLE_5.items():
        kept = rule(net.params(), layers, ratio, round=0, client=0)
        assert kept_weights(layers, counts, kept) == pytest.approx(printed, rel=0.02)


def test_ratios_of_resnet_go_with_importance() -> None:
    """The order of the ratios is that of importance, to within a channel."""
    net = Net(build("resnet18", (3, 8, 8), 10, 0, norm="group", width=16), (3, 8, 8))
    layers = candidates(find_groups(net), net.layout.shapes)
    importance = layer_importance(net.params(), layers)
    kept = LayerwiseL1(least=0)(net.params(), layers, 0.5, round=0, client=0)
    in_order = sorted(layers, key=lambda group: -importance[group.name])
    lost = [1 - float(kept[group.name].double().mean()) for group in in_order]
    for more, less, group, after in zip(lost, lost[1:], in_order, in_order[1:], strict=False):
        assert more <= less + 1 / group.size + 1 / after.size
    assert lost[-1] > lost[0]
