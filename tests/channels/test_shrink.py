"""Really smaller nets: the same outputs, there and back, and the same training."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedgrove import nets, trees
from fedgrove.channels import find_groups as find
from fedgrove.channels import shrink, small_net
from fedgrove.channels.find_groups import find_groups, find_kept_channels, make_channel_mask
from fedgrove.channels.shrink import cut_channels, find_small_net, widen
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.trees import Mask, Tree

NETS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "har-cnn": ("har-cnn", (3, 12), {"dropout": False}),
    "mnist-cnn": ("mnist-cnn", (1, 8, 8), {}),
    "lenet": ("lenet", (1, 16, 16), {}),
    "leafcnn": ("leafcnn", (1, 16, 16), {}),
    "bn-cnn2": ("bn-cnn2", (1, 8, 8), {"width": 6}),
    "bn-cnn4": ("bn-cnn4", (3, 16, 16), {"width": 4}),
    "bn-cnn2-group": ("bn-cnn2", (1, 8, 8), {"width": 6, "norm": "group"}),
    "bn-cnn2-none": ("bn-cnn2", (1, 8, 8), {"width": 6, "norm": "none"}),
    "resnet18": ("resnet18", (3, 8, 8), {"width": 4}),
    "resnet18-group": ("resnet18", (3, 8, 8), {"width": 4, "norm": "group"}),
    "resnet18-large": ("resnet18", (3, 32, 32), {"width": 4, "norm": "group", "stem": "large"}),
    "shufflenetv2": ("shufflenetv2", (3, 8, 8), {"width": 8}),
    "shufflenetv2-group": ("shufflenetv2", (3, 8, 8), {"width": 8, "norm": "group"}),
    "mlp": ("mlp", (5,), {"hidden": 7}),
}
EVERY = pytest.mark.parametrize("name", NETS)


@functools.cache
def net_of(name: str) -> Net:
    kind, shape, options = NETS[name]
    return Net(nets.build(kind, shape, 3, 0, **options), shape)


def drawn(net: Net, seed: int, density: float) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    kept = {group.name: torch.rand(group.size, generator=g) < density for group in find_groups(net)}
    for flags in kept.values():
        flags[int(torch.randint(len(flags), (), generator=g))] = True
    return kept


def values(net: Net, seed: int) -> Tree:
    """Parameters with scales and statistics that differ."""
    g = torch.Generator().manual_seed(seed)
    return {
        k: v + 0.5 * torch.rand(v.shape, generator=g) * (v.dim() == 1)
        for k, v in net.params().items()
    }


def output(net: Net, tree: Tree, x: torch.Tensor, train: bool) -> torch.Tensor:
    return net(trees.map(torch.clone, tree), x, train).logits


# ---- the same function, there and back -----------------------------------------------------------


@EVERY
@given(
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
    pruned=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_outputs_and_round_trips(name: str, seed: int, density: float, pruned: bool) -> None:
    """Random structured masks, also with single weights pruned inside the channels that stay."""
    net = net_of(name)
    kept, tree = drawn(net, seed, density), values(net, seed)
    mask = make_channel_mask(net, kept)
    if pruned:
        g = torch.Generator().manual_seed(seed)
        mask = {
            k: m & (torch.rand(m.shape, generator=g) < 0.8) if m.dim() > 1 else m
            for k, m in mask.items()
        }
    small, part = shrink.shrink(net, tree, mask)
    assert {k: tuple(v.shape) for k, v in part.items()} == small.layout.shapes
    assert list(part) == list(tree)

    masked = trees.apply_mask(tree, mask)
    x = torch.randn(
        5, *NETS[name][1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    # In double precision: in single, rounding alone reaches 1e-6 behind the eighteen layers of a ResNet.
    whole, few = ({k: v.double() for k, v in each.items()} for each in (masked, part))
    for train in (False, True):
        full, less = output(net, whole, x, train), output(small, few, x, train)
        assert (full - less).abs().max() <= 1e-10 * max(1.0, float(full.abs().max()))

    wide = widen(net, part, mask)
    thin = find_small_net(net, mask)
    assert trees.identical(
        wide, thin.reset_removed(masked) if thin else masked
    )  # removed statistics are reset, nothing else
    assert {k: tuple(v.shape) for k, v in wide.items()} == net.layout.shapes
    again, back = shrink.shrink(net, wide, mask)
    assert again is small
    assert trees.identical(back, part)


@EVERY
def test_fewer_channels_are_fewer_parameters(name: str) -> None:
    net = net_of(name)
    half = {g.name: torch.arange(g.size) % 2 == 0 for g in find_groups(net)}
    small = cut_channels(net, half).net
    assert small.layout.size == sum(
        int(m.sum()) for m in make_channel_mask(net, half).values()
    ) + net.layout.count(set(net.layout.params) - set(make_channel_mask(net, half)))
    assert small.layout.macs < 0.6 * net.layout.macs
    assert small.layout.norms == net.layout.norms
    assert small.layout.prunable == net.layout.prunable
    assert net.layout.size == net_of(name).layout.size  # the wide net is as it was


@EVERY
def test_channels_come_back_from_their_mask(name: str) -> None:
    net = net_of(name)
    for seed in range(3):
        kept = drawn(net_of(name), seed, 0.6)
        found = find_kept_channels(net, make_channel_mask(net, kept))
        assert found is None or trees.identical(found, kept)
        assert (found is None) == all(bool(k.all()) for k in kept.values())


def test_a_running_variance_is_reset_to_one() -> None:
    net = net_of("bn-cnn2")
    mask = make_channel_mask(net, {"conv1": torch.tensor([True, False, True, True, False, True])})
    tree = {k: torch.full_like(v, 7.0) for k, v in net.params().items()}
    wide = widen(net, shrink.shrink(net, tree, mask)[1], mask)
    assert wide["norm1.running_mean"].tolist() == [7, 0, 7, 7, 0, 7]
    assert wide["norm1.running_var"].tolist() == [7, 1, 7, 7, 1, 7]
    assert wide["norm1.bias"].tolist() == [7, 0, 7, 7, 0, 7]
    assert wide["norm2.running_var"].tolist() == [7] * 12
    assert wide["conv2.weight"][3, :, 1, 1].tolist() == [7, 0, 7, 7, 0, 7]


def test_a_mask_that_removes_nothing_changes_nothing() -> None:
    net = net_of("mlp")
    small, part = shrink.shrink(net, net.params(), {})
    assert small.layout == net.layout
    assert trees.identical(part, net.params())


def test_leaves_that_are_not_the_nets_are_left_alone() -> None:
    net = net_of("mlp")
    thin = cut_channels(net, {"fc1": torch.tensor([True] * 3 + [False] * 4)})
    tree = {"fc1.bias": torch.ones(7), "loss": torch.ones(7), "fc2.weight": torch.ones(2, 7, 7)}
    narrow = thin.narrow(tree)
    assert {k: tuple(v.shape) for k, v in narrow.items()} == {
        "fc1.bias": (3,),
        "loss": (7,),
        "fc2.weight": (2, 7, 7),
    }
    assert trees.identical(
        thin.widen(narrow), {**tree, "fc1.bias": torch.tensor([1.0] * 3 + [0.0] * 4)}
    )


def test_masks_are_narrowed_as_values_are() -> None:
    net = net_of("mlp")
    mask = make_channel_mask(net, {"fc1": torch.tensor([True] * 3 + [False] * 4)})
    mask["fc2.weight"][0, 0] = False
    thin = find_small_net(net, mask)
    assert thin is not None
    narrow = thin.narrow(mask)
    assert [bool(m.all()) for m in narrow.values()] == [True, True, False]
    assert int((~narrow["fc2.weight"]).sum()) == 1


def test_at_least_one_channel_stays() -> None:
    net = net_of("mlp")
    whole = make_channel_mask(net, {"fc1": torch.ones(7).bool()})
    none = {k: torch.zeros_like(m) for k, m in whole.items()}
    with pytest.raises(
        InputError,
        match="all 7 channels of group 'fc1' would be removed; at least one must be kept",
    ):
        shrink.shrink(net, net.params(), none)
    thin = find_small_net(net, none)  # an engine keeps one, masked
    assert thin is not None
    assert thin.net.layout.shapes["fc1.weight"] == (1, 5)
    assert not any(bool(m.any()) for m in thin.narrow(none).values())


# ---- what is remembered --------------------------------------------------------------------------


def test_nets_of_equal_width_are_one() -> None:
    net = net_of("mlp")
    first = {"fc1": torch.tensor([True, True, False, False, True, False, False])}
    other = {"fc1": first["fc1"].flip(0)}
    assert cut_channels(net, first).net is cut_channels(net, other).net
    assert cut_channels(net, first).net is not cut_channels(net, {"fc2": first["fc1"]}).net
    grouped = net_of("bn-cnn2-group")  # its norm is told how many channels stay in each half
    even, odd = torch.tensor([True, False] * 3), torch.tensor([True] * 3 + [False] * 3)
    assert (
        cut_channels(grouped, {"conv1": even}).net is not cut_channels(grouped, {"conv1": odd}).net
    )


def test_a_mask_is_looked_at_once_and_nothing_outlives_its_net(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), (2,))
    mask = make_channel_mask(net, {"0": torch.tensor([True, False, True])})
    looked: list[Mask] = []
    monkeypatch.setattr(shrink, "find_kept_channels", _noting(shrink.find_kept_channels, looked))
    assert find_small_net(net, mask) is find_small_net(net, mask)
    assert len(looked) == 1
    assert find_small_net(net, dict(mask)) is not None
    assert len(looked) == 2
    assert find_small_net(net, None) is None
    for _ in range(3 * small_net.MOST_NETS):
        find_small_net(net, dict(mask))
    assert len(shrink._SEEN[net]) == small_net.MOST_NETS
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def _noting(f: Any, looked: list[Mask]) -> Any:
    def noting(net: Net, mask: Mask) -> Any:
        looked.append(mask)
        return f(net, mask)

    return noting


def test_masks_of_single_weights_ask_for_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), (2,))
    monkeypatch.setattr(find, "_trace", None)  # would fail
    mask = {"0.weight": torch.zeros(3, 2).bool(), "2.weight": torch.ones(2, 3).bool()}
    assert find_small_net(net, mask) is None


def test_a_thin_group_norm_counts_what_is_gone() -> None:
    """By hand: two groups of two channels, one number each; the first keeps one channel, of value 2.

    mean (2 + 0) / 2 = 1, variance ((2-1)² + (0-1)²) / 2 = 1, so (2 - 1) / 1 = 1; the second is (3, 5): -1 and 1.
    """
    full = nn.GroupNorm(2, 3 + 1, eps=0.0)
    full.weight, full.bias = (
        nn.Parameter(torch.tensor([2.0, 1, 1])),
        nn.Parameter(torch.tensor([0.5, 0, 0])),
    )
    thin = nets.norms.ThinGroupNorm(full, (1, 2))
    assert thin(torch.tensor([[2.0, 3, 5]]).view(1, 3, 1, 1)).flatten().tolist() == pytest.approx(
        [2.5, -1, 1]
    )


@EVERY
@given(seed=st.integers(0, 99), density=st.floats(0.1, 1.0))
@settings(max_examples=5, deadline=None)
def test_multiply_accumulates_are_known_without_building_the_small_net(
    name: str, seed: int, density: float
) -> None:
    net = net_of(name)
    small = cut_channels(net, drawn(net, seed, density))
    assert small.macs(net.layout) == small.net.layout.macs
