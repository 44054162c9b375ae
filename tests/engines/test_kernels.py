"""What stacks compute in their own way: BatchNorm over short batches, convolutions as windows times weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedgrove.engines.batched import ragged, windows

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_short_batches_beside_full_ones(device: str, far: float) -> None:
    """BatchNorm of three clients with 5, 3 and 1 examples: each as torch does it alone, padding as if not there."""
    g = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    x, y, affine = draw(5, 12, 3, 3) + far, draw(5, 12, 3, 3), draw(2, 12)
    weight = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double()
    x, y, affine, weight = (t.to(device) for t in (x, y, affine, weight))
    x, affine = x.requires_grad_(), affine.requires_grad_()
    running, alone = (torch.stack([torch.zeros(12), torch.ones(12)]).to(x) for _ in range(2))

    out = ragged.batch_norm(x, weight, (running[0], running[1]), (affine[0], affine[1]), 0.1, 1e-5)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    mine = torch.zeros_like(loss)
    for k, n in enumerate((5, 3, 1)):
        part = slice(4 * k, 4 * k + 4)
        args = alone[0, part], alone[1, part], affine[0, part], affine[1, part]
        expected = F.batch_norm(x[:n, part], *args, training=True)
        torch.testing.assert_close(out[:n, part], expected)
        loss, mine = (
            loss + (expected * y[:n, part]).sum(),
            mine + (out[:n, part] * y[:n, part]).sum(),
        )
    torch.testing.assert_close(running, alone)
    for got, want in zip(
        torch.autograd.grad(mine, (x, affine)), torch.autograd.grad(loss, (x, affine)), strict=True
    ):
        torch.testing.assert_close(got, want)


KERNELS = [((3, 3), (1, 1)), ((3, 3), (0, 0)), ((1, 1), (0, 0)), ((5, 5), (2, 2)), ((2, 3), (0, 1))]


@pytest.mark.parametrize("side", [4, 7])
@pytest.mark.parametrize(("kernel", "padding"), KERNELS, ids=[str(k) for k, _ in KERNELS])
def test_windows_times_weights_are_a_convolution(kernel: Any, padding: Any, side: int) -> None:
    """Images and both gradients of two clients, four to five channels."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, side, side, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 5, 4, *kernel, generator=g, dtype=torch.float64, requires_grad=True)
    assert windows.better(x, w, (1, 1), padding)
    mine = windows.convolve(x, w, (1, 1), padding)
    expected = F.conv2d(x, w.flatten(0, 1), None, 1, padding, groups=2)
    torch.testing.assert_close(mine, expected)
    back = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    for got, want in zip(
        *(torch.autograd.grad(y, (x, w), back) for y in (mine, expected)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_only_small_images_are_multiplied_and_in_bf16_only_tiny_ones() -> None:
    images = {side: torch.zeros(5, 8, side, side, requires_grad=True) for side in (4, 5, 8, 9)}
    w = torch.zeros(2, 5, 4, 3, 3)
    assert [windows.better(x, w, (1, 1), (1, 1)) for x in images.values()] == [
        True,
        True,
        True,
        False,
    ]
    with torch.autocast("cpu", torch.bfloat16):
        assert [windows.better(x, w, (1, 1), (1, 1)) for x in images.values()] == [
            True,
            False,
            False,
            False,
        ]
        assert windows.better(images[8].double(), w, (1, 1), (1, 1))


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)])
def test_a_first_layer_with_few_channels(stride: Any) -> None:
    """No gradient of the images is asked for, so any stride will do."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, 20, 20, generator=g, dtype=torch.float64)
    w = torch.randn(2, 4, 3, 3, 3, generator=g, dtype=torch.float64, requires_grad=True)
    assert windows.better(x, w, stride, (1, 1))
    pair = (
        windows.convolve(x, w, stride, (1, 1)),
        F.conv2d(x, w.flatten(0, 1), None, stride, 1, groups=2),
    )
    torch.testing.assert_close(*pair)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), w)[0] for y in pair))


def test_a_large_mean_does_not_hide_the_variance() -> None:
    """Single precision, a mean of 1000 deviations: within what torch's own BatchNorm is off."""
    g = torch.Generator().manual_seed(0)
    x = 100 + 0.1 * torch.randn(8, 4, 5, 5, generator=g)
    weight, ones, zeros = (torch.arange(8) < 3).float().view(1, -1), torch.ones(4), torch.zeros(4)
    mine = ragged.batch_norm(x, weight, (None, None), (ones, zeros), 0.1, 1e-5)[:3]
    exact = F.batch_norm(x[:3].double(), None, None, training=True)
    assert (mine - exact).abs().max() < 2e-4
