"""Which groups fall together, and masks that take whole groups away."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from fedgrove import nets
from fedgrove.channels import groups
from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.groups import ChannelGroup, Place
from fedgrove.errors import InputError
from fedgrove.nets import Net

T, F = True, False


def layout(name: str, shape: tuple[int, ...], **options: object) -> Net:
    return Net(nets.build(name, shape, 3, seed=0, **options), shape)


@pytest.fixture(scope="module")
def har() -> Net:
    return layout("har-cnn", (2, 8))


@pytest.fixture(scope="module")
def res() -> Net:
    return layout("resnet18", (1, 8, 8), width=2)


def places(group: ChannelGroup) -> dict[tuple[str, int], str]:
    return {(p.tensor, p.dim): p.role for p in group.places}


# ---- groups --------------------------------------------------------------------------------------


def test_a_window_of_sensor_readings(har: Net) -> None:
    assert [(g.name, g.size) for g in find_groups(har)] == [
        ("conv1", 64),
        ("conv2", 64),
        ("fc1", 32),
    ]
    assert places(find_groups(har)[1]) == {
        ("conv2.weight", 0): "filter",
        ("conv2.bias", 0): "bias",
        ("fc1.weight", 1): "input",
    }
    # 8 steps, pooled twice: two inputs of fc1 per channel, side by side
    inputs = next(p for p in find_groups(har)[1].places if p.tensor == "fc1.weight")
    assert inputs.channel == tuple(c for c in range(64) for _ in range(2))


def test_a_residual_sum_ties_layers(res: Net) -> None:
    """The stem and the first two blocks write into one stream; each block's inner groups are its own."""
    sizes = [(g.name, g.size) for g in find_groups(res)]
    assert sizes[:4] == [
        ("conv1", 2),
        ("layer1.0.conv1", 2),
        ("layer1.1.conv1", 2),
        ("layer2.0.conv1", 4),
    ]
    assert len(sizes) == 8 + 4  # eight blocks and four streams
    stream = places(find_groups(res)[0])
    assert {t for (t, _), role in stream.items() if role == "filter"} == {
        "conv1.weight",
        "layer1.0.conv2.weight",
        "layer1.1.conv2.weight",
    }
    assert {t for (t, _), role in stream.items() if role == "scale"} == {
        "norm1.weight",
        "layer1.0.norm2.weight",
        "layer1.1.norm2.weight",
    }
    assert {t for (t, _), role in stream.items() if role == "input"} == {
        "layer1.0.conv1.weight",
        "layer1.1.conv1.weight",
        "layer2.0.conv1.weight",
        "layer2.0.shortcut.conv.weight",
    }
    assert {p.tensor: p.fill for p in find_groups(res)[1].places if p.role == "statistic"} == {
        "layer1.0.norm1.running_mean": 0.0,
        "layer1.0.norm1.running_var": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("har-cnn", (2, 8), 3),
        ("mnist-cnn", (1, 8, 8), 3),
        ("lenet", (1, 16, 16), 4),
        ("leafcnn", (1, 16, 16), 3),
        ("bn-cnn2", (1, 8, 8), 2),
        ("bn-cnn4", (1, 16, 16), 4),
        ("resnet18", (1, 8, 8), 12),
        ("mlp", (5,), 2),
    ],
)
def test_every_net_but_not_its_output(name: str, shape: tuple[int, ...], count: int) -> None:
    found = layout(name, shape)
    assert len(find_groups(found)) == count
    makers = {p.tensor for g in find_groups(found) for p in g.places_with("filter")}
    assert makers == set(found.layout.prunable) - {"head.weight"}


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_shufflenetv2_loses_what_no_shuffle_mixes(norm: str) -> None:
    """The stem, the inner channels of every unit and those in front of the head. Channels that are
    split and shuffled come out in other places, and stay."""
    found = layout("shufflenetv2", (1, 8, 8), width=4, norm=norm)
    units = [f"stage{i}.{j}" for i, n in ((2, 4), (3, 8), (4, 4)) for j in range(n)]
    inner = [f"{unit}.conv1" for unit in units]
    groups = {group.name: group for group in find_groups(found)}
    assert list(groups) == ["conv1", *inner, "conv5"]
    for unit in units:
        places = groups[f"{unit}.conv1"].places_with("filter", "input")
        tensors = {(place.tensor, place.role) for place in places}
        assert tensors == {
            (f"{unit}.conv1.weight", "filter"),
            (f"{unit}.conv2.weight", "filter"),
            (f"{unit}.conv3.weight", "input"),
        }
    # What the stem makes is read by both branches of the first unit.
    read = {place.tensor for place in groups["conv1"].places_with("input")}
    assert read == {"stage2.0.side_conv2.weight", "stage2.0.conv1.weight"}


def test_groups_are_plain_and_found_once(har: Net) -> None:
    assert find_groups(har) is find_groups(har)
    assert pickle.loads(pickle.dumps(find_groups(har))) == find_groups(har)
    assert hash(find_groups(har)) == hash(tuple(find_groups(har)))
    again = pickle.loads(pickle.dumps(har))
    assert again.layout == har.layout
    assert find_groups(again) == find_groups(har)


def test_looking_for_groups_leaves_no_trace() -> None:
    module = nets.build("bn-cnn2", (1, 8, 8), 3, seed=0, width=4)
    module.conv1.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    before, state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():  # as in a Measure
        # The frozen layer keeps its channels.
        assert [group.name for group in find_groups(Net(module, (1, 8, 8)))] == ["conv2"]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.training
    assert not module.conv1.weight.requires_grad
    assert all(not m._forward_hooks for m in module.modules())


class Mixed(nn.Module):
    """Two branches side by side, a convolution of each channel by itself, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 3, 3, padding=1)
        self.b = nn.Conv2d(1, 2, 3, padding=1)
        self.each = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        self.up = nn.ConvTranspose2d(5, 4, 2, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.a(x), self.b(x)], 1)
        out: Tensor = self.head(self.up(self.each(x).relu()).relu().mean((2, 3)))
        return out


def test_branches_side_by_side() -> None:
    found = Net(Mixed(), (1, 6, 6))
    assert [(g.name, g.size) for g in find_groups(found)] == [("a", 5), ("up", 4)]
    both = {p.tensor: p.channel for p in find_groups(found)[0].places}
    assert (both["a.weight"], both["b.weight"]) == ((0, 1, 2), (3, 4))
    assert places(find_groups(found)[0])["up.weight", 0] == "input"
    assert places(find_groups(found)[1])["up.weight", 1] == "filter"


class Awkward(nn.Module):
    """One group is free; one is averaged over its groups, one passes a LayerNorm, one a softmax over its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.mean, self.norm = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(1, 6)
        self.layer = nn.LayerNorm(6)
        self.soft = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mean(self.free(x).relu()).relu().mean(1, keepdim=True)
        out: Tensor = self.head(self.soft(self.layer(self.norm(x))).softmax(1))
        return out


def test_channels_that_are_not_independent_are_left_out() -> None:
    assert [g.name for g in find_groups(Net(Awkward(), (4,)))] == ["free"]


def test_a_net_that_cannot_be_followed_says_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise ValueError("not like this")
            out: Tensor = self.fc(x)
            return out

    with pytest.raises(
        InputError,
        match="channels of Odd could not be traced, ValueError: not like this; write its",
    ):
        assert find_groups(Net(Odd(), (2,)))


# ---- groups and masks ----------------------------------------------------------------------------

A = ChannelGroup(
    *("a", 2),
    (
        Place("a.w", 0, (0, 1), "filter"),
        Place("a.b", 0, (0, 1), "bias"),
        Place("c.w", 1, (0, 0, 1, 1, -1), "input"),
    ),
)
C = ChannelGroup(
    *("c", 2),
    (
        Place("c.w", 0, (0, 1), "filter"),
        Place("n", 0, (0, 1), "scale"),
        Place("v", 0, (0, 1), "statistic", 1.0),
    ),
)
GROUPS = (A, C)
SHAPES = {"a.w": (2, 3), "a.b": (2,), "c.w": (2, 5), "n": (2,), "v": (2,)}


def test_expand_by_hand() -> None:
    mask = groups.expand_channels(
        GROUPS, SHAPES, {"a": torch.tensor([T, F]), "c": torch.tensor([F, T])}
    )
    assert {k: v.int().tolist() for k, v in mask.items()} == {
        "a.w": [[1, 1, 1], [0, 0, 0]],
        "a.b": [1, 0],
        "c.w": [
            [0, 0, 0, 0, 0],
            [1, 1, 0, 0, 1],
        ],  # row: its own channel 0 is gone; columns: those of a's channel 1
        "n": [0, 1],
    }


def test_a_group_that_is_not_named_is_whole() -> None:
    mask = groups.expand_channels(GROUPS, SHAPES, {"c": torch.tensor([F, T])})
    assert set(mask) == {"c.w", "n"}
    found = groups.read_channels(GROUPS, mask)
    assert found is not None
    assert {k: v.tolist() for k, v in found.items()} == {"a": [T, T], "c": [F, T]}


def test_single_weights_inside_channels_say_nothing() -> None:
    mask = groups.expand_channels(
        GROUPS, SHAPES, {"a": torch.tensor([T, F]), "c": torch.tensor([T, T])}
    )
    mask["c.w"][0, :4] = False  # all of row 0 but what no channel of a falls with
    found = groups.read_channels(GROUPS, mask)
    assert found is not None
    assert {k: v.tolist() for k, v in found.items()} == {"a": [T, F], "c": [T, T]}
    assert (
        groups.read_channels(GROUPS, {"a.w": torch.zeros(2, 3).bool()}) is None
    )  # the biases still speak
    assert groups.read_channels(GROUPS, {"a.b": torch.zeros(2).bool()}) is None
    assert groups.read_channels(GROUPS, None) is None
    assert groups.read_channels(GROUPS, {}) is None


@pytest.mark.parametrize("part", ["a.w", "a.b", "c.w"])
def test_one_entry_left_keeps_a_channel(part: str) -> None:
    mask = groups.expand_channels(
        GROUPS, SHAPES, {"a": torch.tensor([T, F]), "c": torch.tensor([T, T])}
    )
    spot = {"a.w": (1, 2), "a.b": (1,), "c.w": (1, 3)}[part]
    mask[part][spot] = True
    assert groups.read_channels(GROUPS, mask) is None


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"there is no group of channels 'b'\. There are: a, c"):
        groups.expand_channels(GROUPS, SHAPES, {"b": torch.tensor([T])})
    with pytest.raises(InputError, match=r"'a' is \(3,\); it must be \(2,\)"):
        groups.expand_channels(GROUPS, SHAPES, {"a": torch.tensor([T, T, T])})
    with pytest.raises(
        InputError, match="all 2 channels of group 'a' would be removed; at least one must be kept"
    ):
        groups.expand_channels(GROUPS, SHAPES, {"a": torch.tensor([F, F])})


def test_scales_are_the_weights_of_norms() -> None:
    assert layout("bn-cnn2", (1, 8, 8), width=2).layout.scales == ("norm1.weight", "norm2.weight")
    assert layout("mlp", (4,)).layout.scales == ()


@pytest.mark.parametrize("kept", [[T, F], [F, T], [T, T]])
def test_a_mask_without_removed_channels_is_cut_to_what_expand_leaves(kept: list[bool]) -> None:
    channels = {"a": torch.tensor([F, T]), "c": torch.tensor(kept)}
    around = groups.expand_channels(GROUPS, SHAPES, channels)
    mask = {"c.w": torch.tensor([[T, F, T, T, F], [F, T, T, T, T]]), "other": torch.tensor([T, F])}
    less = groups.drop_removed(mask, GROUPS, channels)
    assert torch.equal(less["c.w"], mask["c.w"] & around["c.w"])
    assert torch.equal(less["other"], mask["other"])
