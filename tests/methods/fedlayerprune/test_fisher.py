"""Fisher scores and layer strengths: by hand on a network of two weights, and against autograd."""

import pytest
import torch
from torch import nn

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods.fedlayerprune.fisher import (
    Fisher,
    GradientVariance,
    HessianTrace,
    signs_like,
)
from fedgrove.nets import Net
from fedgrove.parts.objective import CrossEntropy

ZERO = {"weight": torch.zeros(2, 1, dtype=torch.float64)}
"""Logits (w0 x, w1 x), all 0: both classes have probability 1/2, the gradient of class c at weight
j is (1/2 - [j = c]) x, and the Hessian is x^2 (1/4, -1/4; -1/4, 1/4)."""


def net() -> Net:
    return Net(nn.Linear(1, 2, bias=False), (1,))


def batch(xs: list[float], ys: list[int], weights: list[float] | None = None) -> Batch:
    weight = torch.tensor(weights or [1.0] * len(xs), dtype=torch.float64)
    x = torch.tensor(xs, dtype=torch.float64)[:, None]
    return Batch(x, torch.tensor(ys), weight, torch.arange(len(xs)), torch.tensor(0))


def test_fisher_per_sample_by_hand() -> None:
    """x = 1 of class 0: gradient (-.5, .5); x = 2 of class 1: (1, -1). Squares .25 and 1, mean .625."""
    found = Fisher().of(CrossEntropy())(net(), ZERO, batch([1, 2], [0, 1]), {})
    assert found["weight"].flatten().tolist() == pytest.approx([0.625, 0.625])


def test_fisher_of_the_batch_by_hand() -> None:
    """The mean gradient is (.25, -.25): .0625. Opposite gradients cancel, which they do not above."""
    of_batch = Fisher(per_sample=False).of(CrossEntropy())
    found = of_batch(net(), ZERO, batch([1, 2], [0, 1]), {})
    assert found["weight"].flatten().tolist() == pytest.approx([0.0625, 0.0625])


@pytest.mark.parametrize(
    "part", [Fisher(), Fisher(per_sample=False), GradientVariance(), HessianTrace()]
)
def test_padding_does_not_count(part) -> None:
    measure = part.of(CrossEntropy())
    alone = measure(net(), ZERO, batch([1, 2], [0, 1]), {})["weight"]
    padded = measure(net(), ZERO, batch([1, 2, 9], [0, 1, 1], [1, 1, 0]), {})["weight"]
    assert torch.allclose(alone, padded)


def test_smoothing_by_hand() -> None:
    """From 0: .1 * 4 = .4, then .9 * .4 + .1 * 2 = .56. Of weights .09 and .1, which sum to .19,

    the average is .56 / .19 = 2.947; after one estimate it is that one.
    """
    fisher = Fisher(smoothing=0.9)
    first = fisher.smoothed(None, {"w": torch.tensor([4.0])})
    assert first["w"].tolist() == pytest.approx([0.4])
    assert fisher.value(first, 1)["w"].tolist() == pytest.approx([4.0])
    second = fisher.smoothed(first, {"w": torch.tensor([2.0])})
    assert second["w"].tolist() == pytest.approx([0.56])
    assert fisher.value(second, 2)["w"].tolist() == pytest.approx([0.56 / 0.19])
    assert Fisher(smoothing=0.0).smoothed(first, {"w": torch.tensor([2.0])})["w"].tolist() == [2.0]
    with pytest.raises(InputError, match=r"smoothing is 1; it must be in \[0, 1\)"):
        Fisher(smoothing=1)


def test_gradient_variance_by_hand() -> None:
    """Weight 0: gradients -.5 and 1, mean .25, mean square .625: variance .5625; weight 1 the same."""
    part = GradientVariance()
    measured = part.of(CrossEntropy())(net(), ZERO, batch([1, 2], [0, 1]), {})
    assert part.value(measured) == pytest.approx({"weight": 0.5625})
    # One example has no variance, and rounding does not make it negative.
    alone = part.of(CrossEntropy())(net(), ZERO, batch([3], [1]), {})
    assert part.value(alone) == pytest.approx({"weight": 0.0})


def test_hessian_trace_by_hand() -> None:
    """x = 1 and 2: mean of x^2 is 2.5, H = 2.5 (1/4, -1/4; -1/4, 1/4), its trace 1.25.

    v'Hv is 0 for equal signs and 2.5 for unequal ones: the mean over draws tends to 1.25.
    """
    part = HessianTrace(draws=400)
    measured = part.of(CrossEntropy())(net(), ZERO, batch([1, 2], [0, 1]), {})
    assert part.value(measured)["weight"] == pytest.approx(1.25, abs=0.15)
    one_draw = HessianTrace(draws=1).of(CrossEntropy())(net(), ZERO, batch([1, 2], [0, 1]), {})
    assert float(one_draw["weight"]) in (pytest.approx(0.0), pytest.approx(2.5))


def test_a_negative_trace_counts_as_0() -> None:
    """Estimates may be below 0 where the loss is no bowl; such a layer is not taken for a strong one."""
    estimates = {"a": torch.tensor(-2.0), "b": torch.tensor(0.5)}
    assert HessianTrace().value(estimates) == {"a": 0.0, "b": 0.5}


def test_the_trace_is_split_by_layer() -> None:
    """Against autograd's full Hessian, block by block, on a network of two layers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))
    small = Net(module.double(), (2,))
    params = small.params()
    x = torch.randn(5, 2, dtype=torch.float64)
    ones = torch.ones(5, dtype=torch.float64)
    some = Batch(x, torch.tensor([0, 1, 1, 0, 1]), ones, torch.arange(5), torch.tensor(0))

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x @ first.T) @ second.T
        return nn.functional.cross_entropy(out, some.y)

    blocks = torch.autograd.functional.hessian(loss, (params["0.weight"], params["2.weight"]))
    expected = [float(blocks[i][i].flatten(0, 1).flatten(1).trace()) for i in (0, 1)]
    measured = HessianTrace(draws=800).of(CrossEntropy())(small, params, some, {})
    assert [float(v) for v in measured.values()] == pytest.approx(expected, abs=0.1)


def test_signs_are_signs_and_depend_on_draw_and_name_alone() -> None:
    weight = torch.zeros(100, 10)
    signs = signs_like(weight, 0, "a")
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.1
    assert torch.equal(signs, signs_like(weight, 0, "a"))
    assert not torch.equal(signs, signs_like(weight, 1, "a"))
    assert not torch.equal(signs, signs_like(weight, 0, "b"))
