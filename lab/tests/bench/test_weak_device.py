"""A weak device's training step with FedAPTA, timed next to the dense net's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.shrink import cut_channels
from fedgrove.core import Batch, Train
from fedgrove.methods.fedapta.channel_rules import LayerwiseL1
from fedgrove.methods.fedapta.layer_ratios import candidates
from fedgrove.nets import Net, build
from fedgrove.parts import local
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import CrossEntropy
from fedgrove.seeds import single_thread
from fedgrove.trees import Tree
from fedgrove_lab.bench import device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "steps", "turns"),
    [("bn-cnn2:norm=group", (1, 28, 28), 4, 15), ("resnet18:norm=group", (3, 32, 32), 1, 7)],
)
def test_a_weak_device_takes_at_most_35_percent_of_a_dense_step(
    name: str, shape: tuple[int, ...], steps: int, turns: int
) -> None:
    """Training as a client does it, at ratio .8 by default, in turn with the dense net."""
    net = Net(build(name, shape, 10, 0), shape)
    layers = candidates(find_groups(net), net.layout.shapes)
    thin = cut_channels(net, LayerwiseL1()(net.params(), layers, 0.8, round=0, client=0))
    stage = Train(CrossEntropy(), LocalTraining(1, 32, SGD(0.1)))
    labels = torch.arange(32) % 10
    batch = Batch(torch.randn(32, *shape), labels, torch.ones(32), labels, torch.tensor(0))

    def training(net: Net, params: Tree) -> Callable[[], object]:
        carry = {"model": params, "settings": {"round": torch.tensor(0.0)}, "aux": {}}
        return lambda: local.train(net, stage, carry, [batch] * steps)

    work = {
        device.DENSE: training(net, net.params()),
        "cut": training(thin.net, thin.narrow(net.params())),
    }
    with single_thread():
        times = device.time_in_turns(work, turns)
    assert device.median_ratio(times, "cut") <= 0.35
