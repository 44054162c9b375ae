"""What stacks compute in their own way: BatchNorm over short batches, convolutions by im2col."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedgrove.engines.batched import im2col, ragged

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

    out = ragged.batch_norm(x, weight, (running[0], running[1]), (affine[0], affine[1]), 0.1, 1e-5)
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


KERNELS = [((3, 3), (1, 1)), ((3, 3), (0, 0)), ((1, 1), (0, 0)), ((5, 5), (2, 2)), ((2, 3), (0, 1))]


@pytest.mark.parametrize("side", [4, 7])
@pytest.mark.parametrize(("kernel", "padding"), KERNELS, ids=[str(k) for k, _ in KERNELS])
def test_windows_times_weights_are_a_convolution(kernel: Any, padding: Any, side: int) -> None:
    """Images and both gradients of two clients, four to five channels."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, side, side, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 5, 4, *kernel, generator=g, dtype=torch.float64, requires_grad=True)
    assert im2col.is_faster(x, w, (1, 1), padding)
    mine = im2col.convolve(x, w, (1, 1), padding)
    expected = F.conv2d(x, w.flatten(0, 1), None, 1, padding, groups=2)
    torch.testing.assert_close(mine, expected)
    back = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad(mine, (x, w), back)
    expected_grads = torch.autograd.grad(expected, (x, w), back)
    torch.testing.assert_close(grads, expected_grads)


def test_only_small_images_are_multiplied_and_in_bf16_only_tiny_ones() -> None:
    w = torch.zeros(2, 5, 4, 3, 3)

    def is_faster(side: int, dtype: torch.dtype = torch.float32) -> bool:
        x = torch.zeros(5, 8, side, side, dtype=dtype, requires_grad=True)
        return im2col.is_faster(x, w, (1, 1), (1, 1))

    assert is_faster(4)
    assert is_faster(5)
    assert is_faster(8)
    assert not is_faster(9)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_faster(4)
        assert not is_faster(5)
        assert not is_faster(8)
        assert not is_faster(9)
        # Autocast leaves float64 as it is.
        assert is_faster(8, torch.float64)


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)])
def test_a_first_layer_with_few_channels(stride: Any) -> None:
    """No gradient of the images is asked for, so any stride will do."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, 20, 20, generator=g, dtype=torch.float64)
    w = torch.randn(2, 4, 3, 3, 3, generator=g, dtype=torch.float64, requires_grad=True)
    assert im2col.is_faster(x, w, stride, (1, 1))
    mine = im2col.convolve(x, w, stride, (1, 1))
    expected = F.conv2d(x, w.flatten(0, 1), None, stride, 1, groups=2)
    torch.testing.assert_close(mine, expected)
    grads = torch.autograd.grad(mine.square().sum(), w)
    expected_grads = torch.autograd.grad(expected.square().sum(), w)
    torch.testing.assert_close(grads, expected_grads)


def test_a_large_mean_does_not_hide_the_variance() -> None:
    """Single precision, a mean of 1000 deviations: within what torch's own BatchNorm is off."""
    g = torch.Generator().manual_seed(0)
    x = 100 + 0.1 * torch.randn(8, 4, 5, 5, generator=g)
    weight = (torch.arange(8) < 3).float().view(1, -1)
    affine = (torch.ones(4), torch.zeros(4))
    mine = ragged.batch_norm(x, weight, (None, None), affine, 0.1, 1e-5)[:3]
    exact = F.batch_norm(x[:3].double(), None, None, training=True)
    assert (mine - exact).abs().max() < 2e-4
