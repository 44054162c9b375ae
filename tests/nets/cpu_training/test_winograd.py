"""Winograd's algorithm: its matrices by hand, its tiles against plain sums, its gradients too."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgrove.nets.cpu_training.winograd import TILE, WIDTH, evaluate, transforms

numbers = st.lists(st.floats(-10, 10), min_size=8, max_size=8)


def a_tile(kernel: Tensor, inputs: Tensor, scale: float = 1.0) -> Tensor:
    matrices = transforms(inputs.dtype, scale)
    values = matrices.block.T @ inputs[:TILE] + matrices.next_block.T @ inputs[TILE:]
    return matrices.outputs.T @ ((matrices.kernel @ kernel) * values)


def test_a_polynomial_by_hand() -> None:
    # 2 + 3 z at 0, 1, -1, 2, -2, 1/2, -1/2 and, of its highest power, at infinity.
    values = evaluate(2) @ torch.tensor([2.0, 3.0], dtype=torch.float64)
    assert values.tolist() == [2, 5, -1, 8, -4, 3.5, 0.5, 3]


@given(numbers, numbers)
def test_a_tile_is_four_plain_sums(kernel: list[float], inputs: list[float]) -> None:
    g = torch.tensor(kernel[:WIDTH], dtype=torch.float64)
    d = torch.tensor(inputs, dtype=torch.float64)
    plain = torch.stack([d[i : i + WIDTH] @ g for i in range(TILE)])
    torch.testing.assert_close(a_tile(g, d), plain, atol=1e-10, rtol=0)
    torch.testing.assert_close(a_tile(g, d, scale=1.25), 1.25 * plain, atol=1e-10, rtol=0)


def test_pruned_weights_and_channels_give_exact_zeros() -> None:
    zeros = torch.zeros(8)
    ones = torch.ones(8)
    assert torch.equal(a_tile(zeros[:WIDTH], ones), zeros[:TILE])
    assert torch.equal(a_tile(ones[:WIDTH], zeros), zeros[:TILE])
