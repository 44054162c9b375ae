"""Imprinting by hand on a network of two layers, and what pooling leaves."""

import math

import pytest
import torch
from torch import nn

from fedgrove.core import Batch
from fedgrove.methods.adfedwcp.importance import (
    Hits,
    Prototypes,
    accuracy,
    imprinted,
    layers_of,
    pooled,
)
from fedgrove.nets import Net


def test_imprinting_by_hand() -> None:
    """Layer 0 gives (x, -x), layer 1 the sum, which is always 0, and two outputs of it.

    Class 0 is at x = 1 and 3, class 1 at -2. Layer 0: prototypes (2, -2) and (-2, 2), everybody is
    nearest to their own: 1. Layer 1: embeddings and prototypes are 0, all are of class 0: 2/3.
    """
    module = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False))
    net = Net(module, (1,))
    params = {
        "0.weight": torch.tensor([[1.0], [-1.0]]),
        "1.weight": torch.tensor([[1.0, 1.0], [1.0, 1.0]]),
    }
    batch = Batch(
        x=torch.tensor([[1.0], [3.0], [-2.0], [9.0]]),
        y=torch.tensor([0, 0, 1, 1]),
        weight=torch.tensor([1.0, 1.0, 1.0, 0.0]),  # the last is padding
        index=torch.arange(4),
        position=torch.tensor(0),
    )
    assert layers_of(net.layout) == ("0", "1")
    prototypes = Prototypes()(net, params, batch, {})
    assert prototypes["0"].tolist() == [[4.0, -4.0], [-2.0, 2.0]]
    assert prototypes["examples"].tolist() == [2.0, 1.0]
    hits = Hits()(net, params, batch, {"prototypes": prototypes})
    assert (float(hits["0"]), float(hits["1"]), float(hits["all"])) == (3.0, 2.0, 3.0)
    assert accuracy(hits) == pytest.approx(2 / 3)
    # What they add: 1 and -1/3; the softmax of that.
    first, second = math.exp(1), math.exp(-1 / 3)
    expected = [first / (first + second), second / (first + second)]
    assert imprinted(hits, ("0", "1")) == pytest.approx(expected)


def test_a_class_without_examples_is_nobodys_nearest() -> None:
    net = Net(nn.Linear(1, 3, bias=False), (1,))
    params = {"weight": torch.tensor([[1.0], [2.0], [3.0]])}
    one = torch.ones(2)
    batch = Batch(
        torch.tensor([[-1.0], [-2.0]]), torch.tensor([0, 0]), one, torch.arange(2), torch.tensor(0)
    )
    prototypes = Prototypes()(net, params, batch, {})
    hits = Hits()(net, params, batch, {"prototypes": prototypes})
    assert float(hits[""]) == 2.0


def test_a_prototype_is_a_mean_and_may_lie_on_the_other_side() -> None:
    """Class 0 at 1, 1, 1 and class 1 at 2: prototypes 1 and 2, and everybody is nearest to 2.

    (Sums, 3 and 2, would give the first three to class 0.) Class 0 alone, at -1 and 2, with classes 1
    and 2 empty: its prototype is .5, and -1 is nearest to it, though its product is below 0.
    """
    net = Net(nn.Linear(1, 3, bias=False), (1,))
    params = {"weight": torch.tensor([[1.0], [0.0], [0.0]])}

    def right(x: list[float], y: list[int]) -> float:
        count = len(x)
        batch = Batch(
            torch.tensor(x)[:, None],
            torch.tensor(y),
            torch.ones(count),
            torch.arange(count),
            torch.tensor(0),
        )
        prototypes = Prototypes()(net, params, batch, {})
        return float(Hits()(net, params, batch, {"prototypes": prototypes})[""])

    assert right([1.0, 1.0, 1.0, 2.0], [0, 0, 0, 1]) == 1
    assert right([-1.0, 2.0], [0, 0]) == 2


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((4, 9, 9, 9), 4 * 3**3),  # (100 / 4)^(1/3) = 2.92
        ((2, 9, 3, 9, 9), 2 * 4**3),  # four dimensions: the last two as one, (50)^(1/3) = 3.68
        ((1, 4, 4, 4), 64),  # all of them: the root of 64 is 4, not 5
        ((32, 28, 28), 32 * 2 * 2),  # ceil(sqrt(100 / 32)) = 2
        ((64, 5, 5), 64 * 2 * 2),
        ((3, 2, 2), 3 * 2 * 2),  # 12 numbers in all: ceil(sqrt(12 / 3)) = 2
        ((64, 100), 64 * 2),  # ceil(100 / 64) = 2
        ((10,), 10),
    ],
)
def test_what_is_left_of_an_activation(shape: tuple[int, ...], length: int) -> None:
    assert pooled(torch.zeros(4, *shape)).shape == (4, length)
