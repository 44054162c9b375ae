"""The first layers kept as they are: which ones, and that nothing of them is in the tree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgrove import nets
from fedgrove.channels.find_groups import find_groups
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.nets.freeze import freeze


def frozen(name: str, shape: tuple[int, ...], share: float, **options: object) -> Net:
    module = nets.build(name, shape, 10, seed=0, **options)
    freeze(module, shape, share)
    return Net(module, shape)


def conv_weights(net: Net) -> int:
    names = [n for layer in net.layout.layers if layer.kind == "conv" for n in layer.weights]
    return net.layout.count(names)


def test_the_first_quarter_is_what_fedapta_freezes() -> None:
    """Its Table 5 counts the trained convolutions: 11.01 M and 1.21 M.

    ResNet-18 has 21 layers with weights, of which 5 are frozen: the stem and the four of layer1.
    ShuffleNetV2 has 57, of which 14: the stem and stage2 but for the last 1 × 1, 58 · 58 weights;
    1,237,424 are all convolutions, 648 + 28,636 those of stem and stage2."""
    resnet = frozen("resnet18", (3, 32, 32), 0.25)
    assert conv_weights(resnet) == 11_010_048
    assert {name.split(".")[0] for name in resnet.layout.frozen} == {"conv1", "norm1", "layer1"}
    shuffle = frozen("shufflenetv2", (3, 32, 32), 0.25)
    assert conv_weights(shuffle) == 1_237_424 - 648 - 28_636 + 58 * 58 == 1_211_504
    first = shuffle.layout.layers[0]
    assert first.name == "stage2.3.conv3"


def test_costs_count_what_is_frozen_once() -> None:
    """fc1 8·5, fc2 5·5, head 5·3; a third of the layers is fc1."""
    module = nets.build("mlp", (8,), 3, seed=0, hidden=5)
    freeze(module, (8,), 1 / 3)
    layout = Net(module, (8,)).layout
    assert layout.frozen == ("fc1.weight", "fc1.bias")
    assert (layout.size, layout.frozen_size) == (5 * 5 + 5 + 5 * 3 + 3, 8 * 5 + 5)
    assert (layout.macs, layout.frozen_macs) == (8 * 5 + 5 * 5 + 5 * 3, 8 * 5)
    # Plain SGD: 2 · 48 trained numbers and gradients, 45 frozen ones, 8 activations of 4 samples.
    assert layout.memory(4, 0) == 4 * (2 * 48 + 45 + 8 * 4)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_nothing_frozen_is_in_the_tree_or_changes(norm: str) -> None:
    net = frozen("bn-cnn2", (1, 8, 8), 0.5, width=4, norm=norm)
    # Three layers with weights: half of them, rounded down, is conv1; with it goes its norm.
    statistics = {"norm1.running_mean", "norm1.running_var"} if norm == "batch" else set()
    before = net.constants()
    assert before.keys() == {"conv1.weight", "norm1.weight", "norm1.bias"} | statistics
    assert not before.keys() & net.params().keys()
    assert not before.keys() & set(net.layout.prunable)
    tree = net.params()
    x = 3 + torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for train in (True, False, True):
        net(tree, x, train)
    after = net.constants()
    assert all(torch.equal(before[name], after[name]) for name in before)
    if norm == "batch":
        # The other norm is trained, and has seen the data.
        assert bool(tree["norm2.running_mean"].any())


def test_a_frozen_batch_norm_is_the_same_in_both_modes_and_takes_one_example() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        module[1].running_mean.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    module[1].num_batches_tracked = None
    freeze(module, (3,), 0.5)
    net = Net(module, (3,))
    assert not net.layout.batch_norm
    assert net.layout.state == ()
    x = torch.randn(1, 3)
    tree = net.params()
    assert torch.equal(net.run(tree, x, True), net.run(tree, x, False))


def test_channels_of_frozen_layers_stay() -> None:
    names = [group.name for group in find_groups(frozen("mnist-cnn", (1, 8, 8), 0.25))]
    assert names == ["conv2", "fc1"]


def test_a_tensor_that_a_trained_layer_shares_is_trained() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.two(self.one(x).relu())
            return out

    module = Tied()
    freeze(module, (3,), 0.5)
    assert Net(module, (3,)).layout.params == ("one.weight",)


def test_constants_follow_the_tree_to_another_type() -> None:
    """As on another device: the module's own tensors stay where they are."""
    net = frozen("bn-cnn2", (1, 8, 8), 0.5, width=4)
    x = torch.randn(2, 1, 8, 8)
    single = net.run(net.params(), x, False)
    double = net.run({k: v.double() for k, v in net.params().items()}, x.double(), False)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single, double.float())
    assert net.module.get_parameter("conv1.weight").dtype == torch.float32


def test_shares_that_freeze_nothing_or_all() -> None:
    with pytest.raises(InputError, match=r"less than one of the 3 layers .* give 0\.34 or more"):
        frozen("mlp", (8,), 0.25)
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match=r"a share of the layers: 0 or more, and below 1\.$"):
            frozen("mlp", (8,), share)
    assert frozen("mlp", (8,), 0.999999).layout.params == ("head.weight", "head.bias")
    assert frozen("mlp", (8,), 0.0).layout.frozen == ()
