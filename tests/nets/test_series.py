"""A block of a network for series at once: the same numbers and gradients as step by step."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedgrove.nets import build
from fedgrove.nets.dropout import Dropout
from fedgrove.nets.series import _is_faster_at_once, conv_pool_relu_drop


def step_by_step(conv: nn.Conv2d, x: Tensor) -> Tensor:
    images = x.transpose(1, 2).unsqueeze(2)
    y = F.max_pool2d(F.relu(conv(images)), (1, 2))
    return y.squeeze(2).transpose(1, 2)


@pytest.fixture
def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 8, (1, 5), padding=(0, 2)).double()


@pytest.mark.parametrize("is_first", [True, False])
def test_numbers_and_gradients_are_those_of_the_steps(conv: nn.Conv2d, is_first: bool) -> None:
    x = torch.randn(4, 10, 3, dtype=torch.float64)
    # Whole numbers, so that some of a pair are equal: the first one then has the gradient.
    conv.weight.data.round_()
    x = x.round().requires_grad_(not is_first)
    leaves = [conv.weight, conv.bias] + ([] if is_first else [x])
    assert _is_faster_at_once(conv, nn.Identity(), x)
    at_once = conv_pool_relu_drop(conv, nn.Identity(), x)
    in_steps = step_by_step(conv, x)
    torch.testing.assert_close(at_once, in_steps)
    weighting = torch.randn_like(in_steps)
    ours = torch.autograd.grad((at_once * weighting).sum(), leaves)
    theirs = torch.autograd.grad((in_steps * weighting).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_gradient_has_a_gradient(conv: nn.Conv2d) -> None:
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)

    def squares(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # Not linear in its inputs, so that second derivatives are not all 0.
        own = nn.Conv2d(3, 8, (1, 5), padding=(0, 2), device="meta")
        own._parameters["weight"] = weight  # type: ignore[assignment]
        own._parameters["bias"] = bias  # type: ignore[assignment]
        return conv_pool_relu_drop(own, nn.Identity(), x) ** 2

    inputs = (x, conv.weight, conv.bias)
    assert torch.autograd.gradcheck(squares, inputs)
    assert torch.autograd.gradgradcheck(squares, inputs)


def test_what_is_dropped_has_no_gradient(conv: nn.Conv2d) -> None:
    x = torch.randn(64, 32, 3, dtype=torch.float64, requires_grad=True)
    drop = Dropout(0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        dropped = conv_pool_relu_drop(conv, drop, x)
    whole = step_by_step(conv, x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    share = 1 - kept.double().sum() / (whole > 0).double().sum()
    # 8192 numbers, about half of them above 0: five standard deviations.
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    (ours,) = torch.autograd.grad(dropped.sum(), x)
    (theirs,) = torch.autograd.grad((whole * kept / 0.75).sum(), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("length", [10, 11])
def test_under_torch_func_and_at_odd_lengths_it_goes_step_by_step(
    conv: nn.Conv2d, length: int
) -> None:
    x = torch.randn(3, 2, length, 3, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return conv_pool_relu_drop(conv, nn.Identity(), x).square().sum()

    mapped = vmap(grad(loss))(x)
    for one, client in zip(mapped, x, strict=True):
        client.requires_grad_()
        (alone,) = torch.autograd.grad(step_by_step(conv, client).square().sum(), client)
        torch.testing.assert_close(one, alone)


def test_the_same_seed_drops_the_same() -> None:
    module = build("har-cnn", (9, 128), 6, 0)
    x = torch.randn(32, 9, 128)
    outputs = []
    for seed in (1, 1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            outputs.append(module.train()(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
