"""Two blocks of a network for series at once: the same numbers and gradients as step by step."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedgrove.nets import build
from fedgrove.nets.cpu_training.series import MOST_SPARE, _is_faster_at_once, _spare, two_blocks
from fedgrove.nets.dropout import Dropout

Convs = tuple[nn.Conv2d, nn.Conv2d]


def a_conv(channels: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(channels, outputs, (1, 5), padding=(0, 2)).double()


@pytest.fixture
def convs() -> Iterator[Convs]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield a_conv(3, 8), a_conv(8, 6)


def leaves_of(convs: Convs) -> list[Tensor]:
    return [*convs[0].parameters(), *convs[1].parameters()]


def step_by_step(convs: Convs, x: Tensor) -> Tensor:
    images = x.unsqueeze(2)
    for conv in convs:
        images = F.max_pool2d(F.relu(conv(images)), (1, 2))
    return images


def at_once(convs: Convs, x: Tensor, drop: nn.Module | None = None) -> Tensor:
    drop = drop or nn.Identity()
    assert _is_faster_at_once(convs[0], drop, convs[1], drop, x)
    return two_blocks(convs[0], drop, convs[1], drop, x)


def a_batch(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 3, length, dtype=torch.float64)


# Whole tiles, parts of a tile, lengths of which poolings leave out the end, a single pair.
@pytest.mark.parametrize("length", [16, 128, 20, 18, 24, 17, 19, 4, 5, 7])
@pytest.mark.parametrize("batch", [1, 3])
def test_numbers_and_gradients_are_those_of_the_steps(
    convs: Convs, length: int, batch: int
) -> None:
    x = a_batch(batch, length)
    # Whole numbers, so that some of a pair are equal: the first one then has the gradient.
    x.round_()
    convs[0].weight.data.mul_(4).round_()
    ours = at_once(convs, x)
    theirs = step_by_step(convs, x)
    torch.testing.assert_close(ours, theirs)
    weighting = torch.randn_like(theirs)
    ours_back = torch.autograd.grad((ours * weighting).sum(), leaves_of(convs))
    theirs_back = torch.autograd.grad((theirs * weighting).sum(), leaves_of(convs))
    for one, other in zip(ours_back, theirs_back, strict=True):
        torch.testing.assert_close(one, other)


def test_in_float32_it_is_nearly_as_exact() -> None:
    module = build("har-cnn", (9, 128), 6, 0).train()
    convs = (module.conv1, module.conv2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(32, 9, 128)
    ours = at_once(convs, x)
    ours_back = torch.autograd.grad(ours.square().sum(), leaves_of(convs))
    exact = (module.conv1.double(), module.conv2.double())
    theirs = step_by_step(exact, x.double())
    theirs_back = torch.autograd.grad(theirs.square().sum(), leaves_of(exact))
    for one, other in zip((ours, *ours_back), (theirs, *theirs_back), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 5e-6


def test_gradients_by_differences_and_the_gradient_has_a_gradient(convs: Convs) -> None:
    x = a_batch(2, 12)

    def squares(*parameters: Tensor) -> Tensor:
        # Not linear in its inputs, so that second derivatives are not all 0.
        own = (a_conv(3, 8), a_conv(8, 6))
        for conv, (weight, bias) in zip(own, (parameters[:2], parameters[2:]), strict=True):
            conv._parameters["weight"] = weight  # type: ignore[assignment]
            conv._parameters["bias"] = bias  # type: ignore[assignment]
        return at_once(own, x) ** 2

    assert torch.autograd.gradcheck(squares, leaves_of(convs), fast_mode=True)
    assert torch.autograd.gradgradcheck(squares, leaves_of(convs), fast_mode=True)


def test_a_second_gradient_of_the_same_step_is_the_same(convs: Convs) -> None:
    """The first one overwrites its arrays; what was dropped is drawn again from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        out = at_once(convs, a_batch(5, 22), Dropout(0.3))
    loss = (out * torch.randn_like(out)).sum()
    once = torch.autograd.grad(loss, leaves_of(convs), retain_graph=True)
    again = torch.autograd.grad(loss, leaves_of(convs), retain_graph=True)
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)
    by_steps = torch.autograd.grad(loss, leaves_of(convs), create_graph=True)
    for one, other in zip(once, by_steps, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_only_meets_zeros_has_no_gradient(dtype: torch.dtype) -> None:
    """Exactly none: Adam would make a whole step of a rest of rounding."""
    first = a_conv(1, 1).to(dtype)
    # A copy of the input; in the second block its middle, and what comes a step later.
    first.weight.data = torch.tensor([0, 0, 1, 0, 0], dtype=dtype).view(1, 1, 1, 5)
    second = a_conv(1, 1).to(dtype)
    second.weight.data = torch.tensor([0, 0, 0.7, 0.3, 0], dtype=dtype).view(1, 1, 1, 5)
    for conv in (first, second):
        conv.bias.data.fill_(-0.01)  # type: ignore[union-attr]
    # After the first pooling 0, .69, 0, 0, 0, ...: outputs are above 0 where its neighbour to the
    # left and where it is itself; they are a pair, of which the second is larger. It sees .69 in
    # the middle, and zeros left and right.
    x = torch.zeros(3, 1, 32, dtype=dtype)
    x[:, :, 2] = 0.7
    out = at_once((first, second), x)
    (to_weight,) = torch.autograd.grad(out.sum(), [second.weight])
    assert to_weight.flatten().ne(0).tolist() == [False, False, True, False, False]


def test_a_frozen_layer_has_no_gradient(convs: Convs) -> None:
    x = a_batch(3, 16)
    everything = torch.autograd.grad(at_once(convs, x).square().sum(), leaves_of(convs))
    convs[0].requires_grad_(False)
    moving = list(convs[1].parameters())
    for create_graph in (False, True):
        loss = at_once(convs, x).square().sum()
        some = torch.autograd.grad(loss, moving, create_graph=create_graph)
        for one, other in zip(some, everything[2:], strict=True):
            torch.testing.assert_close(one, other)


def test_steps_do_not_overwrite_each_other(convs: Convs) -> None:
    """Two forward passes before their gradients; then batches of other sizes in their memory."""
    batches = [a_batch(6, 32), a_batch(6, 32)]
    alone = []
    for x in batches:
        alone.append(torch.autograd.grad(at_once(convs, x).sum(), leaves_of(convs)))
    both = [at_once(convs, x).sum() for x in batches]
    for loss, expected in zip(both, alone, strict=True):
        for one, other in zip(torch.autograd.grad(loss, leaves_of(convs)), expected, strict=True):
            assert torch.equal(one, other)
    spare = len(_spare[torch.float64])
    small = at_once(convs, batches[0][:2])
    torch.testing.assert_close(small, step_by_step(convs, batches[0][:2]))
    torch.autograd.grad(small.sum(), leaves_of(convs))
    assert len(_spare[torch.float64]) == spare


def test_little_memory_is_kept(convs: Convs) -> None:
    losses = [at_once(convs, a_batch(2, 16)).sum() for _ in range(2 * MOST_SPARE + 3)]
    torch.autograd.grad(torch.stack(losses).sum(), leaves_of(convs))
    assert len(_spare[torch.float64]) == MOST_SPARE


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("what", ["eval", "another"])
def test_each_dropout_is_asked(convs: Convs, which: str, what: str) -> None:
    """One that is in eval mode drops nothing; one of another kind does what it does."""
    odd: nn.Module = Dropout(0.9).eval() if what == "eval" else nn.Tanh()
    drops = (odd, nn.Identity()) if which == "first" else (nn.Identity(), odd)
    x = a_batch(3, 16)
    found = two_blocks(convs[0], drops[0], convs[1], drops[1], x)
    images = x.unsqueeze(2)
    for conv, drop in zip(convs, drops, strict=True):
        images = drop(F.max_pool2d(F.relu(conv(images)), (1, 2)))
    torch.testing.assert_close(found, images)


def test_what_is_dropped_has_no_gradient() -> None:
    # Each output is a copy of one input: the middle of a kernel is 1, and the bias 0.
    conv = a_conv(1, 1)
    conv.weight.data = torch.tensor([0.0, 0, 1, 0, 0], dtype=torch.float64).view(1, 1, 1, 5)
    conv.bias.data.zero_()  # type: ignore[union-attr]
    second = a_conv(1, 1)
    second.load_state_dict(conv.state_dict())
    x = torch.ones(64, 1, 256, dtype=torch.float64)
    drop = Dropout(0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        out = two_blocks(conv, drop, second, drop, x)
    # One of a pair is enough, and then it must not be dropped itself: (1 - 1/16) 3/4 are kept.
    # (The second block's zeros are rounded ones.)
    kept = (out > 0.5).double()
    torch.testing.assert_close(out, kept / 0.75**2)
    share = 0.75 * 15 / 16
    # Five standard deviations.
    assert abs(kept.mean() - share) < 5 * (share * (1 - share) / out.numel()) ** 0.5
    to_bias = torch.autograd.grad(out[kept > 0].sum(), [conv.bias, second.bias])
    torch.testing.assert_close(to_bias[0], kept.sum().view(1) / 0.75**2)
    torch.testing.assert_close(to_bias[1], kept.sum().view(1) / 0.75)


@pytest.mark.parametrize("length", [16, 11])
def test_under_torch_func_it_goes_step_by_step(convs: Convs, length: int) -> None:
    x = torch.randn(3, 2, 3, length, dtype=torch.float64)
    drop = nn.Identity()

    def loss(x: Tensor) -> Tensor:
        return two_blocks(convs[0], drop, convs[1], drop, x).square().sum()

    mapped = vmap(grad(loss))(x)
    for one, client in zip(mapped, x, strict=True):
        client.requires_grad_()
        (alone,) = torch.autograd.grad(loss(client), client)
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
