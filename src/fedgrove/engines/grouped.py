"""A network run for many clients at once, each with its own weights, in the libraries' own grouped kernels.

``vmap`` moves the clients' dimension about before and after every convolution. Here K clients' images lie side by side
as one image of K·C channels, (N, K·C, H, W), from the first layer to the last: a convolution has K groups, BatchNorm
has K·C channels, pooling and ReLU do not notice. From ``flatten`` on, features are (K, N, F) and a linear layer is a
batched product. The network's own forward code runs unchanged; the few functions that must know are caught on the way.

Not every forward can be read this way, so :func:`fits` tries it once against ``vmap`` before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..nets import Net
from ..nets.norms import native

Pair = tuple[int, int]


class _Grouped(TorchFunctionMode):
    """Reads stacked weights as groups; ``clients`` is K."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.clients = clients
        self.heads: list[Tensor] = []
        self.own: dict[Any, Callable[..., Any]] = {
            F.conv2d: self._conv,
            torch.conv2d: self._conv,
            F.linear: self._linear,
            F.batch_norm: self._batch_norm,
            F.group_norm: self._group_norm,
            torch.flatten: self._flatten,
            Tensor.flatten: self._flatten,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.own.get(func, func)(*args, **(kwargs or {}))

    def _conv(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        many = None if bias is None else bias.flatten()
        if weight.shape[2] == groups == 1 and not input.requires_grad and not isinstance(padding, str):
            return _first(input, weight, many, _pair(stride), _pair(padding), _pair(dilation))
        return F.conv2d(input, weight.flatten(0, 1), many, stride, padding, dilation, groups * self.clients)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **how: Any,
    ) -> Tensor:
        mean, var, scale, shift = map(_flat, (running_mean, running_var, weight, bias))
        return F.batch_norm(input, mean, var, scale, shift, **how)

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        return F.group_norm(input, num_groups * self.clients, _flat(weight), _flat(bias), eps)

    def _flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if start_dim != 1 or end_dim != -1:
            raise ValueError("only flatten(1) has a meaning for clients side by side")
        return self._apart(x)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self._apart(x)
        self.heads.append(x)
        y = x @ weight.mT
        return y if bias is None else y + bias.unsqueeze(1)

    def _apart(self, x: Tensor) -> Tensor:
        """(N, K·C, ...) as (K, N, C...); what is apart already stays."""
        if x.dim() == 3 and x.shape[0] == self.clients:
            return x
        each = x.reshape(x.shape[0], self.clients, -1, *x.shape[2:])
        return each.transpose(0, 1).reshape(self.clients, x.shape[0], -1)


def _first(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, gap: Pair) -> Tensor:
    """A first layer on one channel, as windows times weights: its groups of one channel would be taken for a depthwise
    convolution, whose kernels are slow. x is (N, K, H, W), weight (K, O, 1, kh, kw)."""
    if gap != (1, 1):
        return F.conv2d(x, weight.flatten(0, 1), bias, stride, padding, gap, x.shape[1])
    (n, k), (kh, kw) = x.shape[:2], weight.shape[3:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = padded.unfold(2, kh, stride[0]).unfold(3, kw, stride[1])  # N, K, H', W', kh, kw
    size = seen.shape[2:4]
    columns = seen.permute(1, 4, 5, 0, 2, 3).reshape(k, kh * kw, -1)
    y = (weight.flatten(2) @ columns).view(-1, n, *size).transpose(0, 1)  # N, K·O, H', W'
    return y if bias is None else y + bias.view(-1, 1, 1)


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _flat(rows: Tensor | None) -> Tensor | None:
    """One row per client as one row for all: a view, so that running statistics are written where they lie."""
    return None if rows is None else rows.view(-1)


def forward(net: Net, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """Logits (K, N, classes) and features (K, N, F) of inputs (K, N, C, ...) under weights (K, ...)."""
    clients, n = x.shape[:2]
    side_by_side = x.transpose(0, 1).reshape(n, clients * x.shape[2], *x.shape[3:])
    if side_by_side.dim() == 4 and torch.is_autocast_enabled("cuda"):  # where half precision has its fast kernels
        side_by_side = side_by_side.contiguous(memory_format=torch.channels_last)
    with _Grouped(clients) as mode, native():
        logits: Tensor = net.run(tree, side_by_side, train)
    return logits, mode.heads[-1]


def fits(net: Net, x: Tensor) -> bool:
    """Whether this network gives the same side by side as under ``vmap``; ``x`` is one stacked batch."""
    tree = {k: torch.stack([v, v + 0.1]).to(x) for k, v in net.params().items()}
    pair = torch.stack([x[0, :2], x[-1, -2:]])
    if pair.shape[1] < 2:
        return False
    try:
        with torch.no_grad():
            mine, features = forward(net, tree, pair, train=False)
            expected = vmap(lambda t, x: net(t, x, train=False).logits)(tree, pair)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return mine.shape == expected.shape and torch.allclose(mine, expected, rtol=1e-3, atol=1e-3) and features.dim() == 3
