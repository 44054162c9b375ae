"""A linear layer of many clients: batched products, each result laid out as it is needed next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .convolution import product_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(K, N, O) of features x (K, N, F), weight (K, O, F) and bias (K, O)."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One product, with the bias added where it is written."""
        # Autocast does not look into an autograd function: the cast is ours to do.
        dtype = product_dtype(x)
        x = x.to(dtype)
        ctx.weight_type = weight.dtype
        weight = weight.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        if bias is None:
            return x @ weight.mT
        return torch.baddbmm(bias.to(dtype).unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The weights' gradient comes as (K, O, F): torch's own would have to be turned round."""
        x, weight = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = (dy.mT @ x).to(ctx.weight_type)
        db = dy.sum(1, dtype=ctx.weight_type) if ctx.has_bias else None
        return dx, dw, db
