"""What stacks compute in their own way: BatchNorm over short batches, and convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove.engines.batched import conv_library, conv_windows, convolution, grouped
from fedgrove.nets import Net

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_short_batches_beside_full_ones(device: str, far: float) -> None:
    """BatchNorm of clients with 5, 3 and 1 examples: as torch does each alone, without padding."""
    g = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    x = (draw(5, 12, 3, 3) + far).to(device).requires_grad_()
    y = draw(5, 12, 3, 3).to(device)
    affine = draw(2, 12).to(device).requires_grad_()
    weight = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double().to(device)
    # Running mean and variance.
    running = torch.stack([torch.zeros(12), torch.ones(12)]).to(x)
    expected_running = running.clone()

    out = grouped.normalise_examples(
        x, weight, (running[0], running[1]), (affine[0], affine[1]), 0.1, 1e-5
    )
    loss = torch.zeros((), dtype=torch.float64, device=device)
    expected_loss = torch.zeros_like(loss)
    for client, n in enumerate((5, 3, 1)):
        channels = slice(4 * client, 4 * client + 4)
        expected = F.batch_norm(
            x[:n, channels],
            expected_running[0, channels],
            expected_running[1, channels],
            affine[0, channels],
            affine[1, channels],
            training=True,
        )
        torch.testing.assert_close(out[:n, channels], expected)
        expected_loss = expected_loss + (expected * y[:n, channels]).sum()
        loss = loss + (out[:n, channels] * y[:n, channels]).sum()
    torch.testing.assert_close(running, expected_running)
    grads = torch.autograd.grad(loss, (x, affine))
    expected_grads = torch.autograd.grad(expected_loss, (x, affine))
    torch.testing.assert_close(grads, expected_grads)


KERNELS = [
    ((3, 3), (1, 1), (1, 1)),
    ((3, 3), (1, 1), (0, 0)),
    ((1, 1), (1, 1), (0, 0)),
    ((5, 5), (1, 1), (2, 2)),
    ((2, 3), (1, 1), (0, 1)),
    ((1, 5), (1, 1), (0, 2)),
    ((3, 3), (2, 2), (1, 1)),
    ((3, 3), (2, 1), (0, 1)),
    ((1, 1), (2, 2), (0, 0)),
]
"""Kernel, stride and padding."""


def images(examples: int, channels: int, side: int) -> Tensor:
    """Random images, channels last in memory."""
    g = torch.Generator().manual_seed(channels)
    x = torch.randn(examples, channels, side, side, generator=g, dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("way", [conv_library, conv_windows], ids=["library", "windows"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), KERNELS)
def test_each_way_is_a_convolution(way: Any, kernel: Any, stride: Any, padding: Any) -> None:
    """Images and both gradients of two clients, four channels to five."""
    x = images(3, 8, 7).requires_grad_()
    g = torch.Generator().manual_seed(1)
    w = torch.randn(2, 5, 4, *kernel, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 5, generator=g, dtype=torch.float64)
    expected = F.conv2d(x, w.flatten(0, 1), bias.flatten(), stride, padding, groups=2)
    dy = images(3, 10, 9)[:, :, : expected.shape[2], : expected.shape[3]]
    dy = dy.contiguous(memory_format=torch.channels_last)
    expected_dx, expected_dw = torch.autograd.grad(expected, (x, w), dy)

    packed = w.detach().permute(0, 1, 3, 4, 2).contiguous()
    y = way.forward(x.detach(), packed, bias, stride, padding)
    torch.testing.assert_close(y, expected.detach())
    assert y.is_contiguous(memory_format=torch.channels_last)
    dw = way.weight_gradient(dy, x.detach(), packed, stride, padding)
    torch.testing.assert_close(dw, expected_dw)
    if way is conv_windows and stride != (1, 1):
        with pytest.raises(ValueError, match="a stride of 1"):
            way.input_gradient(dy, x.detach(), packed, stride, padding)
        return
    dx = way.input_gradient(dy, x.detach(), packed, stride, padding)
    torch.testing.assert_close(dx, expected_dx)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_gradients_of_a_convolution(has_bias: bool) -> None:
    """As torch's own of one with groups, in float32, of weights, bias and images."""
    x = images(3, 8, 7).float().requires_grad_()
    g = torch.Generator().manual_seed(1)
    w = torch.randn(2, 5, 4, 3, 3, generator=g, requires_grad=True)
    bias = torch.randn(2, 5, generator=g, requires_grad=True) if has_bias else None
    leaves = [x, w] if bias is None else [x, w, bias]
    mine = convolution.convolve(x, w, bias, (1, 1), (1, 1))
    flat_bias = None if bias is None else bias.flatten()
    expected = F.conv2d(x, w.flatten(0, 1), flat_bias, 1, 1, groups=2)
    torch.testing.assert_close(mine, expected)
    grads = torch.autograd.grad(mine.square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)
    assert grads[1].is_contiguous()


def test_under_autocast_products_are_short_and_gradients_are_not() -> None:
    x = images(2, 8, 5).float()
    w = torch.ones(2, 5, 4, 3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = convolution.convolve(x, w, None, (1, 1), (1, 1))
        assert convolution.product_dtype(x) == torch.bfloat16
        # Autocast leaves float64 as it is.
        assert convolution.product_dtype(x.double()) == torch.float64
    assert y.dtype == torch.bfloat16
    (dw,) = torch.autograd.grad(y.float().sum(), w)
    assert dw.dtype == torch.float32


@CUDA
def test_the_fastest_way_is_found_once_and_one_that_fails_is_out() -> None:
    calls: list[str] = []

    def slow(x: Tensor) -> Tensor:
        calls.append("slow")
        for _ in range(50):
            x = x @ x
        return x

    def quick(x: Tensor) -> Tensor:
        calls.append("quick")
        return x + 1

    def broken(x: Tensor) -> Tensor:
        calls.append("broken")
        # Triton's errors are no RuntimeErrors.
        raise Exception("cannot")

    candidates = [(conv_library, broken), (conv_windows, slow), (grouped, quick)]
    assert convolution.find_fastest(candidates, (torch.eye(512, device="cuda"),)) is grouped
    assert set(calls) == {"slow", "quick", "broken"}
    with pytest.raises(Exception, match="cannot"):
        convolution.find_fastest([(conv_library, broken)], (torch.eye(2, device="cuda"),))


def test_a_large_mean_does_not_hide_the_variance() -> None:
    """Single precision, a mean of 1000 deviations: within what torch's own BatchNorm is off."""
    g = torch.Generator().manual_seed(0)
    x = 100 + 0.1 * torch.randn(8, 4, 5, 5, generator=g)
    weight = (torch.arange(8) < 3).float().view(1, -1)
    affine = (torch.ones(4), torch.zeros(4))
    mine = grouped.normalise_examples(x, weight, (None, None), affine, 0.1, 1e-5)[:3]
    exact = F.batch_norm(x[:3].double(), None, None, training=True)
    assert (mine - exact).abs().max() < 2e-4


class Mixed(nn.Module):
    """Layers that go each of their own way, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding="same", groups=6)
        self.wide = nn.Conv2d(6, 8, 3, stride=2, dilation=2, padding=2)
        self.twice = nn.Conv2d(8, 8, 1)
        self.groups = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.wide(self.deep(x)))
        x = self.twice(F.relu(self.twice(x)))
        x = F.max_pool2d(self.groups(x), 2)
        logits: Tensor = self.head(x.view(x.size(0), -1))
        return logits


@pytest.mark.parametrize("way", [conv_library, conv_windows], ids=["library", "windows"])
def test_a_network_by_each_way(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 beside float64, as on a card: channels last, without Triton."""
    draw = torch.Generator().manual_seed(0)
    net = Net(Mixed(), (3, 8, 8))
    x = torch.randn(3, 4, 3, 8, 8, generator=draw)
    tree = {k: torch.stack([v, v + 0.1, v - 0.1]) for k, v in net.params().items()}
    # A running variance is not below 0.
    tree["norm.running_var"] = tree["norm.running_var"].abs()

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        own = {k: v.to(dtype).clone() for k, v in tree.items()}
        leaves = [own[k].requires_grad_() for k in net.layout.params]
        logits, _ = grouped.forward(net, own, x.to(dtype), train=True)
        weights = torch.arange(logits.numel()).view(logits.shape).to(dtype).cos()
        return [*torch.autograd.grad((logits * weights).sum(), leaves), own["norm.running_mean"]]

    expected = gradients(torch.float64)

    def run(name: str, arguments_of: Any, clients: int) -> Tensor:
        passes = way if way is conv_library or name != "input_gradient" else conv_library
        result: Tensor = getattr(passes, name)(*arguments_of(clients))
        return result

    monkeypatch.setattr(convolution, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "has_triton", lambda: False)
    monkeypatch.setattr(convolution, "_run_fastest", run)
    assert grouped.supports(net, x)
    for mine, exact in zip(gradients(torch.float32), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-4)
