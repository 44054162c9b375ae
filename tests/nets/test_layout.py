import copy
import doctest
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgrove import nets
from fedgrove.errors import InputError
from fedgrove.nets import layout as module_under_test
from fedgrove.nets.layout import Layout, probe

torch.set_num_threads(1)


def layout(name: str, shape: tuple[int, ...], classes: int = 10, **options: object) -> Layout:
    return Layout.of(nets.build(name, shape, classes, seed=0, **options), shape)


def test_har_cnn() -> None:
    """By hand, for 9 channels × 128 steps: positions × weights.

    conv1 128 · 64·9·5 = 368,640; conv2 (64 steps left) 64 · 64·64·5 = 1,310,720; fc1 64·32 · 32 = 65,536;
    head 32·6 = 192. Activations 64·128 + 64·64 + 32 + 6.
    """
    found = layout("har-cnn", (9, 128), 6)
    assert [la.macs for la in found.layers] == [368_640, 1_310_720, 65_536, 192]
    assert found.macs == 1_745_088
    assert found.activations == 8192 + 4096 + 32 + 6
    assert found.size == 89_254
    assert found.param_bytes == 4 * 89_254
    assert found.prunable == ("conv1.weight", "conv2.weight", "fc1.weight", "head.weight")
    assert found.prunable_size == 89_254 - 64 - 64 - 32 - 6
    assert found.head == ("head.weight", "head.bias")
    assert found.norms == found.buffers == ()


def test_lenet() -> None:
    """By hand, for 3 × 32 × 32.

    conv1 28·28 · 32·3·25 = 1,881,600; conv2 (14 wide in, 10 out) 10·10 · 64·32·25 = 5,120,000;
    fc1 1600·120 = 192,000; fc2 120·84 = 10,080; head 84·10 = 840.
    """
    found = layout("lenet", (3, 32, 32))
    assert [la.macs for la in found.layers] == [1_881_600, 5_120_000, 192_000, 10_080, 840]
    assert found.macs == 7_204_520
    # Adam on a batch of 64: 4 bytes · (4 · 256830 + 64 · (32·784 + 64·100 + 120 + 84 + 10))
    assert found.memory(64, 2) == 4 * (4 * 256_830 + 64 * (25_088 + 6_400 + 214)) == 12_224_992


def test_resnet18() -> None:
    """The conv weights of layer2-4 are the 11.01 M that FedAPTA counts."""
    found = layout("resnet18", (3, 32, 32))
    kinds = [la.kind for la in found.layers]
    assert (kinds.count("conv"), kinds.count("norm"), kinds.count("linear"), len(kinds)) == (
        20,
        20,
        1,
        41,
    )
    assert found.size == 11_173_962
    assert found.head == ("head.weight", "head.bias")
    assert len(found.norms) == 20 * 4
    assert found.norms[:4] == (
        "norm1.weight",
        "norm1.bias",
        "norm1.running_mean",
        "norm1.running_var",
    )
    assert set(found.buffers) < set(found.norms)
    deep = found.count([n for n in found.prunable if n[:6] in ("layer2", "layer3", "layer4")])
    assert deep == 11_010_048
    # stem 1024·1728; layer1 1024 · 4·36864; each of layer2-4 a quarter of the positions and four times the weights
    assert found.macs == 1024 * 1728 + 1024 * 4 * 36_864 + 3 * 256 * 524_288 + 512 * 10
    # the block's convs run before its shortcut
    order = [la.name for la in found.layers if la.name.startswith("layer2.0")]
    assert order == [
        f"layer2.0.{n}"
        for n in ("conv1", "norm1", "conv2", "norm2", "shortcut.conv", "shortcut.norm")
    ]


def test_group_norm_has_no_buffers() -> None:
    found = layout("resnet18", (3, 8, 8), norm="group", width=4)
    assert found.buffers == ()
    assert len(found.norms) == 20 * 2


class Jumbled(nn.Module):
    """Registered in another order than it runs; one layer runs twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(9, 9)
        self.head = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.twice = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x)) * self.scale + self.table
        return self.head(self.norm(x))


def test_order_of_execution() -> None:
    found = Layout.of(Jumbled(), (4,))
    assert [la.name for la in found.layers] == ["", "twice", "norm", "head", "unused"]
    assert [la.kind for la in found.layers] == ["other", "linear", "norm", "linear", "linear"]
    assert [la.macs for la in found.layers] == [0, 2 * 16, 0, 8, 0]
    assert [la.activations for la in found.layers] == [2, 8, 4, 2, 0]
    assert found.params[0] == "scale"  # parameters stay in the order of the module
    assert found.prunable == ("twice.weight", "head.weight", "unused.weight")
    assert found.head == ("head.weight", "head.bias")
    assert found.layers[1].bias is None
    assert found.buffers == ()  # whole numbers and what no state_dict holds stay out of trees
    assert found.norms == ("norm.weight", "norm.bias")


def test_first_and_last() -> None:
    found = Layout.of(Jumbled(), (4,))
    assert found.first(2) == ("scale", "twice.weight")
    assert found.last(2) == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert found.first(0) == found.last(0) == ()
    assert set(found.first(1)) | set(found.last(3)) == set(found.params) - {
        "unused.weight",
        "unused.bias",
    }
    for n in (-1, 5):
        with pytest.raises(InputError, match=f"n is {n}; it must be from 0 to 4, the layers"):
            found.last(n)


def test_norm_statistics_go_with_their_layer() -> None:
    found = layout("bn-cnn2", (1, 8, 8), width=4)
    statistics = ("norm1.running_mean", "norm1.running_var")
    assert found.first(2) == ("conv1.weight", "norm1.weight", "norm1.bias", *statistics)


@given(
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(max_examples=25, deadline=None)
def test_density_counts(first: list[bool], second: list[bool]) -> None:
    found = Layout.of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), (4,))
    one, two = torch.tensor(first).view(3, 4), torch.tensor(second).view(2, 3)
    assert found.density({"0.weight": one, "1.weight": two}) == pytest.approx(
        (sum(first) + sum(second)) / 18
    )
    assert found.density({"0.weight": one}) == pytest.approx(
        (sum(first) + 6) / 18
    )  # not named: whole
    assert found.density({"1.weight": two, "1.bias": torch.zeros(2).bool()}) == pytest.approx(
        (12 + sum(second)) / 18
    )


def test_density_at_the_ends() -> None:
    found = layout("mlp", (4,), 2, hidden=3)
    assert found.density(None) == found.density({}) == 1.0
    assert found.density({k: torch.zeros(found.shapes[k]).bool() for k in found.prunable}) == 0.0
    assert Layout.of(nn.BatchNorm1d(3), (3,)).density({"weight": torch.zeros(3).bool()}) == 1.0


def test_density_of_a_wrong_mask() -> None:
    found = Layout.of(nn.Linear(3, 2), (3,))
    with pytest.raises(InputError, match="did you mean 'weight'"):
        found.density({"weigth": torch.ones(2, 3).bool()})
    with pytest.raises(InputError, match=r"'weight' is \(3, 2\); it must be \(2, 3\)"):
        found.density({"weight": torch.ones(3, 2).bool()})


@pytest.mark.parametrize(("batch", "slots"), [(0, 1), (1, -1)])
def test_memory_of_nothing(batch: int, slots: int) -> None:
    with pytest.raises(InputError):
        Layout.of(nn.Linear(3, 2), (3,)).memory(batch, slots)


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(6, 12), st.integers(1, 2)
)
@settings(max_examples=20, deadline=None)
def test_macs_agree_with_torch(
    channels: int, out: int, kernel: int, side: int, stride: int
) -> None:
    """torch's own counter counts two operations per multiply-accumulate."""
    from torch.utils.flop_counter import FlopCounterMode

    net = nn.Sequential(
        nn.Conv2d(channels, 2 * out, kernel, stride),
        nn.Conv2d(2 * out, 2, 1, groups=2),
        nn.ConvTranspose2d(2, out, 2, 2),
    )
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, channels, side, side))
    assert Layout.of(net, (channels, side, side)).macs * 2 == counter.get_total_flops()


def test_immutable_comparable_picklable() -> None:
    one, two = (layout("bn-cnn2", (1, 8, 8), width=4) for _ in range(2))
    assert one == two == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one)
    assert hash(one) == hash(two)
    assert one != layout("bn-cnn2", (1, 8, 8), width=5)
    one.shapes["head.bias"] = (3,)
    assert one == two
    assert one.shapes["head.bias"] == (10,)
    with pytest.raises(FrozenInstanceError):
        one.layers = ()  # type: ignore[misc]


def test_looking_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    net[1].eval()
    state, before = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    Layout.of(net, (4,))
    assert [m.training for m in net.modules()] == [True, True, False, True]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())


def test_a_shape_the_module_cannot_take() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        InputError, match=r"Sequential was given zeros of shape \(1, 5\) and raised RuntimeError"
    ):
        Layout.of(net, (5,))
    assert net.training
    assert not net[0]._forward_hooks


def test_probe_follows_the_type_of_the_module() -> None:
    assert probe(nn.Linear(2, 3).double(), (2,), batch=4).dtype == torch.float64
    assert probe(nn.Flatten(), (2, 3)).shape == (1, 6)


def test_doctests() -> None:
    assert doctest.testmod(module_under_test).failed == 0
