"""HeteroFL's scaler: layers that lost channels give outputs as large as whole ones, in training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.conftest import federation, make_run, play
from torch import nn

from fedgrove import trees
from fedgrove.core import Batch, Client, ClientInfo
from fedgrove.data import ClientData, Examples
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.methods import CaldasDropout, FedDrop, FedRolex, HeteroFL
from fedgrove.methods.heterofl.scaler import find_scales, scaled_weights
from fedgrove.nets import Net, build
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import Loss, Objective
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan
from fedgrove.runs.run import Run


@dataclass(frozen=True)
class MeanOutput(Objective):
    """The mean output: its gradient can be worked out by hand."""

    is_loss: ClassVar[bool] = True

    def __call__(self, out: Any, params: Any, batch: Batch, carry: Any) -> Loss:
        return out.logits.mean(), {}


def one_step(folder: Path, scale: bool) -> dict[str, list[float]]:
    """What a client of width .5 has after one step of rate .1, from w = 1, v = 3 and biases of 0."""
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    for parameter, value in zip(module.parameters(), (1.0, 0.0, 3.0, 0.0), strict=True):
        nn.init.constant_(parameter, value)
    part = Examples(torch.ones(2, 1, dtype=torch.float64), torch.zeros(2).long())
    clients = {0: ClientData(part, part, part, ClientInfo(2))}
    made = replace(federation((1,), (4,)), clients=clients)
    local = LocalTraining(1, 2, SGD(0.1))
    method = HeteroFL(widths=(0.5,), scale=scale, masked=False, local=local, objective=MeanOutput())
    run = Run(method, made, Net(module, (1,)), Memory(folder), rounds=1, cohort=1)
    (task,) = plan(run, run.initial_state)
    report, _ = perform(run, task, {})
    return {k: v.flatten().tolist() for k, v in report.give["model"].values.items()}


def test_a_step_by_hand(tmp_path: Path) -> None:
    """One unit of two is left, s = .5. The hidden output is relu(1 · 1 + 0) / .5 = 2, and so is v's
    gradient: 3 - .1 · 2 = 2.8. Those of w and its bias are 3 / .5 = 6: .4 and -.6. The output's bias
    has gradient 1, as the last layer is as wide as before."""
    found = one_step(tmp_path / "scaled", scale=True)
    assert found["0.weight"] == pytest.approx([0.4, 0.0])
    assert found["0.bias"] == pytest.approx([-0.6, 0.0])
    assert found["2.weight"] == pytest.approx([2.8, 0.0])
    assert found["2.bias"] == pytest.approx([-0.1])
    # Without: v's gradient is 1, that of w and its bias 3.
    plain = one_step(tmp_path / "plain", scale=False)
    assert plain["0.weight"] == pytest.approx([0.7, 0.0])
    assert plain["0.bias"] == pytest.approx([-0.3, 0.0])
    assert plain["2.weight"] == pytest.approx([2.9, 0.0])


def client_with(net: Net) -> Client:
    """A client that has nothing but a network."""
    nothing = Examples(torch.empty(0), torch.empty(0))
    info = ClientInfo(0)
    return Client(0, info, ClientData(nothing, nothing, nothing, info), {}, net, {}, seed=0)


@pytest.mark.parametrize("name", ["bn-cnn2", "resnet18", "shufflenetv2"])
def test_outputs_of_layers_are_divided_by_the_share(name: str) -> None:
    """The weights of the forward pass against the layers' own outputs, divided by .25."""
    options = {"norm": "none", "width": 4}
    net = Net(build(name, (3, 8, 8), 3, 0, **options).double(), (3, 8, 8))
    carry = {"settings": {"share": torch.tensor(0.25, dtype=torch.float64)}}
    scales = find_scales(carry, client_with(net))["scales"]
    assert "head.weight" not in scales
    params = net.params()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    hooks = []
    for layer, part in net.module.named_modules():
        if f"{layer}.weight" in scales:
            hooks.append(part.register_forward_hook(lambda _, __, output: output / 0.25))
    expected = net(params, x, train=True).logits
    for hook in hooks:
        hook.remove()
    assert hooks
    found = net(scaled_weights(params, {"scales": scales}), x, train=True).logits
    torch.testing.assert_close(found, expected)


def test_a_layer_that_stays_as_wide_is_not_scaled() -> None:
    """Shuffled channels of ShuffleNetV2 cannot be removed, nor does the head lose outputs."""
    net = Net(build("shufflenetv2", (3, 8, 8), 3, 0, width=4), (3, 8, 8))
    carry = {"settings": {"share": torch.tensor(0.5)}}
    scales = find_scales(carry, client_with(net))["scales"]
    assert "stage2.1.conv1.weight" in scales
    assert "stage2.1.conv3.weight" not in scales
    assert "head.weight" not in scales
    assert all(float(scale) == 2.0 for scale in scales.values())


@pytest.mark.parametrize(
    "method", [HeteroFL(), FedRolex(), FedDrop(), CaldasDropout(share=1.0, scale=True)], ids=repr
)
def test_whole_clients_are_not_scaled(method: Any, tmp_path: Path) -> None:
    run = make_run(method, tmp_path, net="bn-cnn2")
    assert all("scaled" not in task.verb for task in plan(run, run.initial_state))


@pytest.mark.parametrize(
    "method",
    [HeteroFL(widths=(0.5, 1.0)), FedRolex(widths=(0.5, 1.0)), FedDrop(widths=(0.5, 1.0))],
    ids=repr,
)
def test_narrow_clients_are_scaled_by_default(method: Any, tmp_path: Path) -> None:
    run = make_run(method, tmp_path / "a", net="bn-cnn2", cohort=2, sizes=(20, 20))
    narrow, whole = plan(run, run.initial_state)
    assert "scaled" in narrow.verb
    assert narrow.settings == {"share": 0.5}
    assert "scaled" not in whole.verb
    other = make_run(
        replace(method, scale=False), tmp_path / "b", net="bn-cnn2", cohort=2, sizes=(20, 20)
    )
    assert all("scaled" not in task.verb for task in plan(other, other.initial_state))
    assert not trees.equal(play(run, Serial()).model, play(other, Serial()).model)
    # Caldas et al. do not scale.
    plain = make_run(CaldasDropout(share=0.5), tmp_path / "c")
    assert {task.verb for task in plan(plain, plain.initial_state)} == {"train"}
