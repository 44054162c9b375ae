"""Gradients that torch.func can take, and those that it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedgrove.parts.gradient import gradient
from fedgrove.trees import Tree


def cubes(weights: Tree) -> Tensor:
    return (weights["a"] ** 3).sum()


def cubes_with_numpy(weights: Tree) -> Tensor:
    """The same; torch.func has no NumPy array of what it tracks."""
    one = float(weights["a"].detach().numpy().size > 0)
    return cubes(weights) * one


@pytest.mark.parametrize("loss", [cubes, cubes_with_numpy])
def test_the_gradient_and_its_own_gradient(loss: Callable[[Tree], Tensor]) -> None:
    weights = {"a": torch.tensor([1.0, -2.0]), "unused": torch.ones(3)}
    with torch.no_grad():
        found = gradient(loss, weights)
    # 3 a^2, and 0 where nothing depends on a weight.
    assert found["a"].tolist() == [3.0, 12.0]
    assert found["unused"].tolist() == [0.0, 0.0, 0.0]
    assert not found["a"].requires_grad
    assert not weights["a"].requires_grad

    def sum_of_gradient(weights: Tree) -> Tensor:
        return gradient(loss, weights)["a"].sum()

    with torch.no_grad():
        # 6 a.
        assert gradient(sum_of_gradient, weights)["a"].tolist() == [6.0, -12.0]


def test_it_is_mapped_over_clients() -> None:
    found = vmap(lambda a: gradient(cubes, {"a": a})["a"])(torch.tensor([[1.0], [2.0]]))
    assert found.tolist() == [[3.0], [12.0]]


def test_an_error_of_the_loss_itself_is_raised() -> None:
    def broken(weights: Tree) -> Tensor:
        raise KeyError("nothing")

    with pytest.raises(KeyError, match="nothing"):
        gradient(broken, {"a": torch.ones(1)})
