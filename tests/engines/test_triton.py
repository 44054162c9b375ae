"""The kernels written in Triton, beside what torch computes.

They run where there is a card, or anywhere with ``TRITON_INTERPRET=1`` (`pip install triton`, with
a numpy that its interpreter takes, such as 2.2).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, tensors
from tests.contract import small
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedgrove import methods, trees
from fedgrove.core import Train
from fedgrove.engines import Serial
from fedgrove.engines.batched import convolution
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.batched.graphs import CapturedStack, GraphCache
from fedgrove.engines.batched.jobs import from_template, to_template
from fedgrove.engines.batched.steps import Stack, train_stack
from fedgrove.nets import Net
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy

pytest.importorskip("triton")
pytestmark = [
    # Of the interpreter's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from fedgrove.engines.batched import conv_triton, norm_triton, optimiser_triton, pool_triton  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"

SHAPES = [
    # Clients, channels in and out, side, kernel, stride, padding.
    (3, 9, 16, (1, 12), (1, 5), (1, 1), (0, 2)),
    (2, 1, 8, (9, 9), (5, 5), (1, 1), (2, 2)),
    (2, 32, 20, (7, 6), (3, 3), (1, 1), (1, 1)),
    (2, 32, 40, (6, 6), (5, 5), (1, 1), (0, 0)),
    (2, 64, 16, (8, 8), (3, 3), (2, 2), (1, 1)),
    (2, 32, 16, (7, 7), (1, 1), (2, 2), (0, 0)),
    (2, 16, 32, (7, 8), (3, 3), (2, 2), (1, 1)),
    (2, 16, 64, (9, 6), (5, 5), (2, 1), (2, 0)),
    (2, 16, 32, (6, 6), (1, 1), (2, 2), (0, 0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_implicit_products_are_a_convolution(shape: Any) -> None:
    clients, depth, filters, size, kernel, stride, padding = shape
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, clients * depth, *size, generator=draw)
    x = x.contiguous(memory_format=torch.channels_last).to(DEVICE).requires_grad_()
    w = torch.randn(clients, filters, depth, *kernel, generator=draw).to(DEVICE).requires_grad_()
    bias = torch.randn(clients, filters, generator=draw).to(DEVICE)
    with torch.backends.cudnn.flags(allow_tf32=False):
        expected = F.conv2d(x, w.flatten(0, 1), bias.flatten(), stride, padding, groups=clients)
        dy = torch.randn(expected.shape, generator=draw).to(DEVICE)
        dy = dy.contiguous(memory_format=torch.channels_last)
        expected_dx, expected_dw = torch.autograd.grad(expected, (x, w), dy)
        packed = w.detach().permute(0, 1, 3, 4, 2).contiguous()
        y = conv_triton.forward(x.detach(), packed, bias, stride, padding)
        dx = conv_triton.input_gradient(dy, x.detach(), packed, stride, padding)
        dw = conv_triton.weight_gradient(dy, x.detach(), packed, stride, padding)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(dw, expected_dw, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("shape", "window"), [((2, 6, 1, 9), (1, 2)), ((2, 5, 7, 8), (2, 2)), ((1, 3, 6, 6), (3, 2))]
)
def test_maxima_and_their_gradient(shape: Any, window: Any) -> None:
    """To the bit; of two equal ones the first counts, and NaN wins, as in torch."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, :2] = 5.0
    x[0, 1, 0, 1] = torch.nan
    x = x.contiguous(memory_format=torch.channels_last).to(DEVICE)
    one = x.clone().requires_grad_()
    other = x.clone().requires_grad_()
    expected = F.max_pool2d(one, window)
    mine = pool_triton.max_pool(other, window)
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (expected_dx,) = torch.autograd.grad(expected, one, dy)
    (dx,) = torch.autograd.grad(mine, other, dy)
    assert torch.equal(dx, expected_dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "affine"])
@pytest.mark.parametrize("shape", [(2, 5, 1, 1), (3, 70, 7, 6), (2, 130, 16, 16)])
def test_batch_norm_and_its_gradient(shape: Any, is_plain: bool, dtype: torch.dtype) -> None:
    """As torch's; values far from 0, whose squares would hide the variance."""
    draw = torch.Generator().manual_seed(0)
    channels = shape[1]
    x = (torch.randn(shape, generator=draw) + 30).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last).to(DEVICE)
    scale = torch.rand(channels, generator=draw).to(DEVICE) + 0.5
    bias = torch.randn(channels, generator=draw).to(DEVICE)
    dy = torch.randn(shape, generator=draw).to(dtype).to(DEVICE)
    results = []
    for is_mine in (False, True):
        # In float64: what both are measured with.
        inputs = x.clone() if is_mine else x.double()
        inputs.requires_grad_()
        like = torch.float32 if is_mine else torch.float64
        own_scale = scale.to(like, copy=True).requires_grad_()
        own_bias = bias.to(like, copy=True).requires_grad_()
        running = (torch.zeros_like(own_bias), torch.ones_like(own_bias))
        running = (running[0].detach(), running[1].detach())
        wanted = [inputs] if is_plain else [inputs, own_scale, own_bias]
        affine = (None, None) if is_plain else (own_scale, own_bias)
        if is_mine:
            assert norm_triton.can_normalise(inputs, 0.1)
            y = norm_triton.batch_norm(inputs, running, affine, 0.1, 1e-5)
        else:
            y = F.batch_norm(inputs, *running, *affine, True, 0.1, 1e-5)
        gradients = torch.autograd.grad(y, wanted, dy.to(y.dtype))
        results.append([y.detach(), *running, *gradients])
    rounding = 2e-2 if dtype == torch.bfloat16 else 2e-4
    for expected, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=rounding, atol=rounding)


class Halves:
    """What :class:`GraphCache` does, without graphs: steps of clients in sizes that are halved.

    So some of the clients of a step may be done already, and must stay as they are.
    """

    def __init__(self) -> None:
        self.was_partly_done = False

    def train(self, stack: Stack, key: object) -> Any:
        assert stack.in_place

        def advance(active: int, ragged: bool) -> None:
            size = len(stack.hyperparameters)
            while size // 2 >= active:
                size //= 2
            self.was_partly_done |= size > active
            stack.advance(size, size == active, ragged)

        return train_stack(stack, advance)


METHODS = ["fedavg", "fedprox", "ditto", "fedbn", "fixedprune", "ca-afp", "grove"]
KEEPING = ["ditto", "fixedprune", "fedwcp"]
"""Tried with a kept optimiser state: two models, a mask, and pruned weights zeroed per batch."""


@pytest.mark.skipif(not INTERPRETED, reason="a card runs tests/contracts/test_batched.py")
@pytest.mark.parametrize("net", ["mlp", "har-cnn", "bn-cnn2"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimiser", [Adam(1e-2, eps=1e-3), SGD(0.05, momentum=0.9)], ids=str)
def test_a_card_would_give_what_serial_gives(
    name: str, net: str, optimiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done on a card, interpreted on a CPU: three rounds, in float64.

    But for graphs, and for convolutions, which in float64 are the library's: test_kernels.py has a
    network in float32.
    """
    if name not in methods.names():
        pytest.skip(f"there is no {name}")
    method = replace(small(name), local=LocalTraining(2, 8, optimiser))
    _compare_with_serial(method, net, tmp_path, monkeypatch)


@pytest.mark.skipif(not INTERPRETED, reason="a card runs tests/contracts/test_kept_state.py")
@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("optimiser", [Adam(1e-2, eps=1e-3), SGD(0.05, momentum=0.9)], ids=str)
def test_a_card_would_keep_the_state_that_serial_keeps(
    name: str, net: str, optimiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = replace(small(name), local=LocalTraining(2, 8, optimiser, keep_state=True))
    if name == "fedwcp":
        method = replace(method, zero_pruned="batch")
    _compare_with_serial(method, net, tmp_path, monkeypatch)


def _compare_with_serial(
    method: Any, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (12, 9, 17, 10, 5)
    serial = make_run(method, tmp_path / "serial", net=net, sizes=sizes, cohort=5)
    expected = play(serial, Serial())
    monkeypatch.setattr(convolution, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "has_triton", lambda: True)
    engine = Batched()
    halves = Halves()
    monkeypatch.setattr(engine._launcher, "graph_cache", halves)
    run = make_run(method, tmp_path / "batched", net=net, sizes=sizes, cohort=5)
    found = play(run, engine)
    assert halves.was_partly_done
    assert trees.distance(tensors(expected), tensors(found)) < 1e-9
    assert trees.distance(remembered(serial), remembered(run)) < 1e-9


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("optimiser", [Adam(1e-2, eps=1e-3), SGD(0.05, momentum=0.9)], ids=str)
def test_spare_room_keeps_nothing_of_the_round_before(
    optimiser: Any, keep_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven clients in a captured stack for ten, three rounds: each begins without momentum.

    Or with its own, if clients keep it.
    """
    method = methods.FedAvg(local=LocalTraining(2, 8, optimiser, keep_state=keep_state))
    sizes = (12, 9, 17, 10, 5, 8, 11)
    serial = make_run(method, tmp_path / "serial", sizes=sizes, cohort=7)
    expected = play(serial, Serial())
    if INTERPRETED:
        monkeypatch.setattr(convolution, "is_on_gpu", lambda x: True)
        monkeypatch.setattr(convolution, "has_triton", lambda: True)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(CapturedStack, "_capture", lambda self, size, all_active, ragged: None)
        monkeypatch.setattr(GraphCache, "_memory_is_short", lambda self: False)
    engine = Batched(DEVICE)
    engine._launcher.graph_cache = GraphCache()
    run = make_run(method, tmp_path / "batched", sizes=sizes, cohort=7)
    found = play(run, engine)
    assert len(engine._launcher.graph_cache._captured) == 1
    assert trees.distance(tensors(expected), tensors(found)) < 1e-9
    assert trees.distance(remembered(serial), remembered(run)) < 1e-9


OPTIMISERS = [
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    Adam(0.01),
    Adam(0.01, weight_decay=0.1),
]


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("active", [None, (True, False, True)])
def test_fused_steps_are_those_of_the_optimiser(
    optimiser: Any, clip: float | None, is_masked: bool, active: Any
) -> None:
    """Three steps of the first three of four clients, each with a learning rate of its own."""
    net = Net(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), (7,))
    rows: list[list[float]] = []
    for k in range(4):
        row: list[float] = []
        own = replace(optimiser, lr=optimiser.lr * (k + 1))
        stage = Train(CrossEntropy(), LocalTraining(1, 8, own, decay=0.9, clip=clip))
        template = to_template(stage, row)
        rows.append(row)
    hyperparameters = torch.tensor(rows, device=DEVICE)
    draw = torch.Generator().manual_seed(0)
    tree = {k: torch.randn(4, *v.shape, generator=draw) for k, v in net.params().items()}
    carry: Any = {
        "model": tree,
        "settings": {"round": torch.arange(4.0)},
        "aux": {},
    }
    if is_masked:
        carry["model.mask"] = {"0.weight": torch.rand(4, 5, 7, generator=draw) > 0.5}
    carry = _on_device(carry)

    def start_one(numbers: Tensor, carry: Any) -> Any:
        return local.start_training(net, from_template(template, numbers), carry)

    started = vmap(start_one)(hyperparameters, carry)
    expected = _on_device(started)
    mine = _on_device(started)
    end = stage.end
    flags = None if active is None else torch.tensor(active, device=DEVICE)
    for _ in range(3):
        grads = {k: torch.randn(3, *v.shape[1:], generator=draw) for k, v in tree.items()}
        grads = {k: v.to(DEVICE) for k, v in grads.items()}
        moves = torch.ones(3, dtype=torch.bool, device=DEVICE) if flags is None else flags

        def move_one(numbers: Tensor, carry: Any, grads: Any) -> Any:
            return local.moved(net, from_template(template, numbers), carry, grads, {}, {})

        after = vmap(move_one)(hyperparameters[:3], _first(expected), grads)
        for name in (end, local.OPTIMISER):
            for k, value in after[name].items():
                kept = moves.view(-1, *[1] * (value.dim() - 1))
                expected[name][k][:3] = torch.where(kept, value, expected[name][k][:3])
        own_stage = from_template(template, hyperparameters[:3].T)
        assert optimiser_triton.can_update(own_stage)
        optimiser_triton.update(own_stage, _first(mine), grads, mine[local.OPTIMISER], 3, flags)
    for k, value in expected[end].items():
        torch.testing.assert_close(mine[end][k], value, rtol=1e-5, atol=1e-6)
        # The fourth client was not asked.
        assert torch.equal(mine[end][k][3], started[end][k][3])


def _on_device(carry: Any) -> Any:
    """A copy of all trees."""
    copied = {}
    for name, tree in carry.items():
        copied[name] = {k: v.to(DEVICE).clone().contiguous() for k, v in tree.items()}
    return copied


def _first(carry: Any) -> Any:
    return {name: {k: v[:3] for k, v in tree.items()} for name, tree in carry.items()}
