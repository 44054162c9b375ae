"""Hybrid masks: channels first, weights inside them, exact counts, and channels that are really gone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedgrove import nets
from fedgrove.channels.find_groups import find_groups, find_kept_channels
from fedgrove.channels.groups import find_channels_with_filters
from fedgrove.errors import InputError
from fedgrove.methods.fedlayerprune.hybrid import (
    Hybrid,
    LiteralHybrid,
    keep_channels,
    without_empty_channels,
)
from fedgrove.methods.fedlayerprune.rates import KindAndDepth, capped
from fedgrove.nets import Net
from fedgrove.trees import Mask


class TwoConvolutions(nn.Module):
    """conv 1 -> 4 and 4 -> 2 with 1 x 1 kernels, and a head: 4, 8 and 4 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 1)
        self.conv2 = nn.Conv2d(4, 2, 1)
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


NET = Net(TwoConvolutions(), (1, 2, 2))
WEIGHTS = {
    "conv1.weight": torch.tensor([4.0, 1.0, 3.0, 2.0]).view(4, 1, 1, 1),
    "conv2.weight": torch.tensor([[1.0, 8.0, 3.0, 5.0], [2.0, 7.0, 6.0, 4.0]]).view(2, 4, 1, 1),
    "head.weight": torch.tensor([[1.0, 2.0], [4.0, 3.0]]),
}


def whole() -> Mask:
    return {name: torch.ones(w.shape, dtype=torch.bool) for name, w in WEIGHTS.items()}


def pruned(rule, rates: list[float], mask: Mask | None = None) -> Mask:
    by_name = dict(zip(WEIGHTS, rates, strict=True))
    return rule(WEIGHTS, WEIGHTS, by_name, mask or whole(), find_groups(NET), NET.layout)


def test_channels_then_weights_by_hand() -> None:
    """conv1 at .5: half of it, 1 of 4 channels, goes: the shortest filter, 1; of the 3 left 2 stay.

    The channel of filter 2 is then empty too, and falls. conv2 at .5 may keep 4 of 8 weights, but
    two of those it chose read the channel that falls afterwards: 2 are left. A quarter of its 2
    channels is none. The head is not touched.
    """
    mask = pruned(Hybrid(0.5), [0.5, 0.5, 0.0])
    assert mask["conv1.weight"].flatten().tolist() == [True, False, True, False]
    assert mask["conv1.bias"].tolist() == [True, False, True, False]
    # Chosen while only channel 1 was gone: of 1, 3, 5, 2, 6, 4 the best four are 6, 5, 4 and 3;
    # channel 3 fell afterwards, and took 5 and 4 along.
    assert mask["conv2.weight"].flatten(1).tolist() == [
        [False, False, True, False],
        [False, False, True, False],
    ]
    assert bool(mask["head.weight"].all())


def test_weights_alone() -> None:
    """Without a share for channels: conv2 keeps its 4 best of 8 (8, 7, 6, 5), no channel falls."""
    mask = pruned(Hybrid(0.0), [0.0, 0.5, 0.25])
    assert mask["conv2.weight"].flatten(1).tolist() == [
        [False, True, False, True],
        [False, True, True, False],
    ]
    assert mask["head.weight"].tolist() == [[False, True], [True, True]]
    assert bool(mask["conv1.bias"].all())
    assert bool(mask["conv2.bias"].all())


def test_the_papers_words_prune_twice() -> None:
    """conv1 at .5 keeps 2 of 4 channels (4 and 3), and of their two weights 1: channel 0."""
    mask = pruned(LiteralHybrid(), [0.5, 0.0, 0.0])
    assert mask["conv1.weight"].flatten().tolist() == [True, False, False, False]
    assert mask["conv2.weight"].flatten(1).sum(1).tolist() == [1, 1]


def test_the_nominal_density_by_hand() -> None:
    """All rates .5, of 4 + 8 + 4 weights. By our rule half of them stay.

    Literally conv1 keeps 2 of 4 channels, and of their 2 weights 1. conv2 keeps 1 of 2 channels,
    which reads 2 channels: of 2 weights 1. The head loses no channel and reads 1: of 2 weights 1.
    That is 3 of 16, where (1 - p)^2 would be 4.
    """
    rates = dict.fromkeys(WEIGHTS, 0.5)
    groups = find_groups(NET)
    assert Hybrid().kept_share(rates, groups, NET.layout) == 0.5
    assert LiteralHybrid().kept_share(rates, groups, NET.layout) == 3 / 16
    assert LiteralHybrid().kept_share(dict.fromkeys(WEIGHTS, 0.0), groups, NET.layout) == 1


@pytest.mark.parametrize("rule", [Hybrid(), LiteralHybrid()])
@pytest.mark.parametrize("name", ["bn-cnn2", "resnet18"])
def test_a_client_keeps_the_nominal_density(name: str, rule) -> None:
    """Of random weights at the rates of section 3.2.1: fewer only by channels that become empty."""
    width = 16 if name == "resnet18" else 8
    shape = (1, 8, 8)
    net = Net(nets.build(name, shape, 10, seed=0, width=width), shape)
    layout = net.layout
    groups = find_groups(net)
    g = torch.Generator().manual_seed(0)
    weights = {k: torch.randn(layout.shapes[k], generator=g) for k in layout.prunable}
    scores = {k: torch.rand(layout.shapes[k], generator=g) for k in layout.prunable}
    every = {k: torch.ones(w.shape, dtype=torch.bool) for k, w in weights.items()}
    rates = capped(KindAndDepth()(layout, 0.3), 0.6)
    mask = rule(weights, scores, rates, every, groups, layout)
    kept = sum(int(mask[k].sum()) for k in weights) / layout.prunable_size
    assert kept == pytest.approx(rule.kept_share(rates, groups, layout), abs=0.01)


@pytest.mark.parametrize("rule", [Hybrid(), LiteralHybrid()])
def test_a_second_time_changes_nothing(rule) -> None:
    once = pruned(rule, [0.5, 0.25, 0.25])
    assert all(torch.equal(pruned(rule, [0.5, 0.25, 0.25], once)[k], once[k]) for k in once)


def test_the_mask_lies_inside_the_one_before() -> None:
    before = pruned(Hybrid(), [0.25, 0.25, 0.25])
    after = pruned(Hybrid(), [0.5, 0.5, 0.5], before)
    assert all(bool((~after[name] | before[name]).all()) for name in after)


def test_a_channel_without_filters_is_gone() -> None:
    """Channel 2 of conv1 has no weight left: its bias falls, and what conv2 reads of it."""
    mask = whole()
    mask["conv1.weight"][2] = False
    closed = without_empty_channels(mask, find_groups(NET), NET.layout.shapes)
    assert closed["conv1.bias"].tolist() == [True, True, False, True]
    assert closed["conv2.weight"].flatten(1).tolist() == [[True, True, False, True]] * 2
    left = find_kept_channels(NET, closed)
    assert left is not None
    assert left["conv1"].tolist() == [True, True, False, True]


def test_a_channel_that_reads_only_gone_ones_goes_too() -> None:
    mask = whole()
    mask["conv1.weight"][:3] = False
    mask["conv2.weight"][0, 3] = False
    closed = without_empty_channels(mask, find_groups(NET), NET.layout.shapes)
    assert closed["conv2.bias"].tolist() == [False, True]
    assert closed["head.weight"].tolist() == [[False, True], [False, True]]


def test_a_group_is_never_emptied() -> None:
    mask = whole()
    mask["conv1.weight"][:] = False
    closed = without_empty_channels(mask, find_groups(NET), NET.layout.shapes)
    assert "conv1.bias" not in closed
    kept = keep_channels(
        WEIGHTS, dict.fromkeys(WEIGHTS, 1.0), whole(), find_groups(NET), NET.layout
    )
    assert kept["conv1"].tolist() == [True, False, False, False]


def test_tied_channels_take_the_lowest_rate() -> None:
    """The residual stream of ResNet-18's first stage: conv1 and two more make the same channels."""
    net = Net(nets.build("resnet18", (3, 8, 8), 3, seed=0, width=8), (3, 8, 8))
    weights = {name: net.params()[name] for name in net.layout.prunable}
    rates = dict.fromkeys(weights, 0.5)
    rates["conv1.weight"] = 0.25
    mask = {name: torch.ones(w.shape, dtype=torch.bool) for name, w in weights.items()}
    (stem,) = (
        g for g in find_groups(net) if "conv1.weight" in {p.tensor for p in g.places_with("filter")}
    )
    assert len(stem.places_with("filter")) > 1
    kept = keep_channels(weights, rates, mask, find_groups(net), net.layout)
    assert int(kept[stem.name].sum()) == 8 - 2
    assert bool(find_channels_with_filters(stem, mask).all())


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 0.9), st.floats(0, 0.9), st.floats(0, 0.9), st.integers(0, 2**31))
def test_no_layer_keeps_more_than_its_rate(a: float, b: float, c: float, seed: int) -> None:
    net = Net(nets.build("bn-cnn2", (1, 8, 8), 3, seed=0, width=4), (1, 8, 8))
    g = torch.Generator().manual_seed(seed)
    names = net.layout.prunable
    shapes = net.layout.shapes
    weights = {name: torch.randn(shapes[name], generator=g) for name in names}
    scores = {name: torch.rand(shapes[name], generator=g) for name in names}
    rates = dict(zip(names, (a, b, c), strict=True))
    every = {name: torch.ones(shapes[name], dtype=torch.bool) for name in names}
    mask = Hybrid()(weights, scores, rates, every, find_groups(net), net.layout)
    for name in names:
        most = max(1, round((1 - rates[name]) * mask[name].numel()))
        assert 1 <= int(mask[name].sum()) <= most
    # Without channels the number is exact.
    fine = Hybrid(0.0)(weights, scores, rates, every, (), net.layout)
    for name in names:
        assert int(fine[name].sum()) == max(1, round((1 - rates[name]) * fine[name].numel()))


def test_a_share_outside_its_range_is_refused() -> None:
    with pytest.raises(InputError, match=r"channels is 1.5; it must be in \[0, 1\]"):
        Hybrid(1.5)
