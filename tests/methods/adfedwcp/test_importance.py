"""Layers weighed by their weights and by their gradient, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedgrove.core import Batch
from fedgrove.methods.adfedwcp.importance import by_gradient, by_magnitude, weighed
from fedgrove.nets import Net
from fedgrove.parts.gradient import Gradient
from fedgrove.parts.objective import ProblemLoss

LAYERS = [["0.weight"], ["1.weight"]]


def test_magnitude_by_hand() -> None:
    """Means of |w|: (1 + 3) / 2 = 2 and (1 + 1 + 0 + 0) / 4 = .5, a layer of two tensors included."""
    params = {"a": torch.tensor([[1.0], [-3.0]]), "b": torch.ones(2), "c": torch.zeros(2)}
    assert by_magnitude(params, [["a"], ["b", "c"]]) == [2.0, 0.5]
    # 2 / 2 = 1 and .5 / 2 = .25, through a softmax.
    first, second = math.exp(1), math.exp(0.25)
    total = first + second
    assert weighed([2.0, 0.5]) == pytest.approx([first / total, second / total])


def test_gradient_by_hand() -> None:
    """One input x = 1 of class 0; the first layer has w = 2, the second (1, -1): logits 2 and -2.

    p = (1, e^-4) / (1 + e^-4); the gradient of the loss by the logits is (p_0 - 1, p_1) = (-q, q),
    q = p_1. By the second layer: (-2 q, 2 q); by the first: 1 * -q - 1 * q = -2 q. So |w g| is 4 q
    in the first layer and 2 q, 2 q in the second: 4 q and 2 q.
    """
    net = Net(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), (1,))
    params = {"0.weight": torch.tensor([[2.0]]), "1.weight": torch.tensor([[1.0], [-1.0]])}
    batch = Batch(
        x=torch.tensor([[1.0], [9.0]]),
        y=torch.tensor([0, 1]),
        weight=torch.tensor([1.0, 0.0]),  # the second is padding
        index=torch.arange(2),
        position=torch.tensor(0),
    )
    slope = Gradient(ProblemLoss())(net, params, batch, {"aux": {}})
    q = math.exp(-4) / (1 + math.exp(-4))
    assert by_gradient(params, slope, LAYERS) == pytest.approx([4 * q, 2 * q])


def test_layers_of_nothing_are_alike() -> None:
    assert weighed([0.0, 0.0]) == [0.5, 0.5]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_weights_sum_to_1_and_do_not_depend_on_the_unit(scores: list[float], unit: float) -> None:
    """And the largest is at most e times the least: softmax of numbers from 0 to 1."""
    omega = weighed(scores)
    assert sum(omega) == pytest.approx(1)
    assert max(omega) <= math.e * min(omega) * (1 + 1e-9)
    assert weighed([unit * score for score in scores]) == pytest.approx(omega)
