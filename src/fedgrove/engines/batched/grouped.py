"""A network run for many clients at once, each with its own weights, in the libraries' own grouped kernels.

``vmap`` moves the clients' dimension about before and after every convolution. Here K clients' images lie side by side
as one image of K·C channels, (N, K·C, H, W), from the first layer to the last: a convolution has K groups, BatchNorm
has K·C channels, pooling and ReLU do not notice. From ``flatten`` on, features are (K, N, F) and a linear layer is a
batched product. The network's own forward code runs unchanged; the few functions that must know are caught on the way.

Not every forward can be read this way, so :func:`fits` tries it once before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...nets import Net
from ...nets.norms import native
from . import ragged, windows


class _Grouped(TorchFunctionMode):
    """Reads stacked weights as groups; ``clients`` is K, ``weight`` (K, N) says which examples are padding."""

    def __init__(self, clients: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.clients, self.weight = clients, weight
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
        if groups == 1 and not isinstance(padding, str) and _pair(dilation) == (1, 1):
            shift, frame = _pair(stride), _pair(padding)
            if windows.better(input, weight, shift, frame):
                y = windows.convolve(input, weight, shift, frame)
                return y if many is None else y + many.view(-1, 1, 1).to(y.dtype)
        return F.conv2d(
            input, weight.flatten(0, 1), many, stride, padding, dilation, groups * self.clients
        )

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
        if self.weight is None or not how.get("training"):
            return F.batch_norm(input, mean, var, scale, shift, **how)
        scale = input.new_ones(input.shape[1]) if scale is None else scale
        shift = torch.zeros_like(scale) if shift is None else shift
        return ragged.batch_norm(
            input, self.weight, (mean, var), (scale, shift), how["momentum"], how["eps"]
        )

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


def _pair(value: Any) -> windows.Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _flat(rows: Tensor | None) -> Tensor | None:
    """One row per client as one row for all: a view, so that running statistics are written where they lie."""
    return None if rows is None else rows.view(-1)


def forward(
    net: Net, tree: Mapping[str, Tensor], x: Tensor, train: bool, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (K, N, classes) and features (K, N, F) of inputs (K, N, C, ...) under weights (K, ...).

    Where ``weight`` (K, N) is 0 an example is padding, and norms do not see it; without it all are examples.
    """
    clients, n = x.shape[:2]
    side_by_side = x.transpose(0, 1).reshape(n, clients * x.shape[2], *x.shape[3:])
    if side_by_side.dim() == 4 and torch.is_autocast_enabled(
        "cuda"
    ):  # where half precision has its fast kernels
        side_by_side = side_by_side.contiguous(memory_format=torch.channels_last)
    with _Grouped(clients, weight) as mode, native():
        logits: Tensor = net.run(tree, side_by_side, train)
    return logits, mode.heads[-1]


def fits(net: Net, x: Tensor) -> bool:
    """Whether this network gives side by side what it gives alone; ``x`` is one stacked batch of two examples or more.

    In double precision, so that rounding has no say, whatever the precision of training; in train mode too, unless
    something is drawn there.
    """
    pair = torch.stack([x[0, :2], x[-1, -2:]]).double()
    tree = {k: torch.stack([v, v + 0.1]).to(pair) for k, v in net.params().items()}
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return all(_agrees(net, tree, pair, train) for train in (False, True))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


def _agrees(net: Net, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> bool:
    def own() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in tree.items()}  # train mode writes statistics

    def alone() -> Tensor:
        return torch.stack(
            [net.run({k: v[i] for k, v in own().items()}, x[i], train) for i in range(len(x))]
        )

    expected = alone()
    if train and not torch.equal(expected, alone()):
        return True
    mine, features = forward(net, own(), x, train)
    return (
        mine.shape == expected.shape
        and torch.allclose(mine, expected, rtol=1e-6)
        and features.dim() == 3
    )
