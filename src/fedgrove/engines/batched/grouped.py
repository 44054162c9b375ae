"""A network run for many clients at once, each with its own weights, in grouped kernels.

``vmap`` moves the clients' dimension about before and after every convolution. Here K clients'
images lie side by side as one image of K·C channels, (N, K·C, H, W), from the first layer to the
last: a convolution has K groups, BatchNorm has K·C channels, pooling and ReLU need no change, and
channels are split, joined and shuffled client by client. A layer that is frozen has one weight for
all clients. From ``flatten`` on, features are (K, N, F) and a linear layer is a batched product.
The network's own forward code runs unchanged: a ``TorchFunctionMode`` replaces the few functions
that must know.

Not every forward can be run this way, so :func:`supports` tries a network before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...nets import Net
from ...nets.norms import use_native_batch_norm
from ...trees import Tree
from . import convolution, ragged
from .linear import linear

MOST_PLACES = 64
"""In a pooling window, for our kernel; it is written out place by place."""


def forward(
    net: Net, tree: Mapping[str, Tensor], x: Tensor, train: bool, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (K, N, classes) and features (K, N, F) of inputs (K, N, C, ...), weights (K, ...).

    Where ``weight`` (K, N) is 0 an example is padding, and BatchNorm leaves it out; without
    ``weight`` there is no padding.
    """
    clients, examples, channels = x.shape[:3]
    side_by_side = x.transpose(0, 1).reshape(examples, clients * channels, *x.shape[3:])
    # The layout that the card's matrix units read without another copy.
    if side_by_side.dim() == 4 and convolution.on_card(side_by_side):
        side_by_side = side_by_side.contiguous(memory_format=torch.channels_last)
    with _GroupedMode(clients, weight) as mode, use_native_batch_norm():
        logits: Tensor = net.run(tree, side_by_side, train)
    return logits, mode.linear_inputs[-1]


class _GroupedMode(TorchFunctionMode):
    """Runs layers on K clients' stacked weights; ``weight`` (K, N) is 0 for padding."""

    def __init__(self, clients: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.clients = clients
        self.weight = weight
        # What every linear layer was given; the last of them is the features.
        self.linear_inputs: list[Tensor] = []
        self.replacements: dict[Any, Callable[..., Any]] = {
            F.conv2d: self._conv2d,
            torch.conv2d: self._conv2d,
            F.linear: self._linear,
            F.batch_norm: self._batch_norm,
            F.max_pool2d: self._max_pool2d,
            torch.max_pool2d: self._max_pool2d,
            F.group_norm: self._group_norm,
            torch.flatten: self._flatten,
            Tensor.flatten: self._flatten,
            Tensor.view: self._view,
            torch.chunk: self._chunk,
            Tensor.chunk: self._chunk,
            torch.cat: self._cat,
            F.channel_shuffle: self._channel_shuffle,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch turns the mode off while this runs: the replacements call torch's own functions.
        return self.replacements.get(func, func)(*args, **(kwargs or {}))

    # The replacements take the arguments of the functions they stand for.

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if weight.dim() == 4:
            # A frozen layer has one weight for all clients: their images are so many examples.
            images = self._as_examples(input)
            y = F.conv2d(images, weight, bias, stride, padding, dilation, groups)
            return self._side_by_side(y)
        is_plain = groups == 1 and not isinstance(padding, str) and _pair(dilation) == (1, 1)
        # In float64, which is for comparisons, and on a CPU there is one way only.
        if is_plain and convolution.on_card(input) and weight.dtype != torch.float64:
            return convolution.convolve(input, weight, bias, _pair(stride), _pair(padding))
        bias = None if bias is None else bias.flatten()
        # (K, O, C, kh, kw) as (K·O, C, kh, kw): K times the groups, each with its client's filters.
        weight = weight.flatten(0, 1)
        y = F.conv2d(input, weight, bias, stride, padding, dilation, groups * self.clients)
        if convolution.on_card(y):
            # In float64 a card gives channels first: `supports` must see what training will see.
            return y.contiguous(memory_format=torch.channels_last)
        return y

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        mean = self._flat_view(running_mean)
        var = self._flat_view(running_var)
        scale = self._flat_view(weight)
        shift = self._flat_view(bias)
        # Running statistics do not see the batch, so padding does no harm when they are used.
        if self.weight is None or not options.get("training"):
            return _batch_norm(input, mean, var, scale, shift, **options)
        if scale is None:
            scale = input.new_ones(input.shape[1])
        if shift is None:
            shift = torch.zeros_like(scale)
        return ragged.batch_norm(
            input, self.weight, (mean, var), (scale, shift), options["momentum"], options["eps"]
        )

    def _max_pool2d(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices:
            # Caught by `supports`: such a network is left to vmap.
            raise ValueError("places of maxima have no meaning for clients side by side")
        window = _pair(kernel_size)
        is_side_by_side = not stride or _pair(stride) == window
        is_plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode
        can_pool = convolution.on_card(input) and convolution.has_triton()
        # The place of a maximum is kept as a small number.
        is_small = window[0] * window[1] <= MOST_PLACES
        if is_side_by_side and is_plain and is_small and can_pool:
            # Slow to import, and only where torch was built for a card.
            from . import pooling

            return pooling.max_pool(input, window)
        return torch.max_pool2d(
            input, kernel_size, stride or kernel_size, padding, dilation, ceil_mode
        )

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        groups = num_groups * self.clients
        return F.group_norm(input, groups, self._flat_view(weight), self._flat_view(bias), eps)

    def _flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if start_dim != 1 or end_dim != -1:
            # Caught by `supports`: such a network is left to vmap.
            raise ValueError("only flatten(1) has a meaning for clients side by side")
        return self._split_clients(x)

    def _view(self, x: Tensor, *shape: Any) -> Tensor:
        # With channels last in memory a view of an image, or of a part of one, may need a copy.
        is_other_type = len(shape) == 1 and isinstance(shape[0], torch.dtype)
        if is_other_type:
            return x.view(*shape)
        return x.reshape(*shape)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        features = self._split_clients(x)
        self.linear_inputs.append(features)
        # What is frozen is one for all clients.
        if bias is not None and bias.dim() == 1:
            bias = bias.expand(self.clients, -1)
        if weight.dim() == 2:
            y = features @ weight.mT
            return y if bias is None else y + bias.unsqueeze(1)
        return linear(features, weight, bias)

    # Channels that are split, joined or shuffled are so client by client.

    def _chunk(self, input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        if input.dim() != 4 or dim != 1:
            return torch.chunk(input, chunks, dim)
        parts = torch.chunk(self._as_examples(input), chunks, 1)
        return tuple(self._side_by_side(part) for part in parts)

    def _cat(self, tensors: list[Tensor] | tuple[Tensor, ...], dim: int = 0) -> Tensor:
        if dim != 1 or any(x.dim() != 4 for x in tensors):
            return torch.cat(tensors, dim)
        return self._side_by_side(torch.cat([self._as_examples(x) for x in tensors], 1))

    def _channel_shuffle(self, input: Tensor, groups: int) -> Tensor:
        return self._side_by_side(F.channel_shuffle(self._as_examples(input), groups))

    def _as_examples(self, x: Tensor) -> Tensor:
        """(N, K·C, ...) as (N·K, C, ...)."""
        return x.reshape(len(x) * self.clients, -1, *x.shape[2:])

    def _side_by_side(self, x: Tensor) -> Tensor:
        """(N·K, C, ...) as (N, K·C, ...)."""
        return x.reshape(len(x) // self.clients, -1, *x.shape[2:])

    def _flat_view(self, rows: Tensor | None) -> Tensor | None:
        """One row per client as one row for all: a view, so that BatchNorm moves the running
        statistics of the tree itself. A frozen layer's row, the same for all, is repeated."""
        if rows is None:
            return None
        if rows.dim() == 1:
            return rows.repeat(self.clients)
        return rows.view(-1)

    def _split_clients(self, x: Tensor) -> Tensor:
        """(N, K·C, ...) as (K, N, C...); what has that form already stays."""
        if x.dim() == 3 and x.shape[0] == self.clients:
            return x
        by_client = x.reshape(x.shape[0], self.clients, -1, *x.shape[2:]).transpose(0, 1)
        return by_client.reshape(self.clients, x.shape[0], -1)


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``, in kernels of ours where they are faster."""
    # Of scale and shift, and of the statistics, both or none.
    is_usual = (mean is None) == (var is None) and (scale is None) == (shift is None)
    if training and is_usual and convolution.on_card(x) and convolution.has_triton():
        # Slow to import, and only where torch was built for a card.
        from . import normalising

        if normalising.can_normalise(x, momentum):
            running = None if mean is None or var is None else (mean, var)
            affine = None if scale is None or shift is None else (scale, shift)
            return normalising.batch_norm(x, running, affine, momentum, eps)
    return F.batch_norm(x, mean, var, scale, shift, training, momentum, eps)


def _pair(value: Any) -> convolution.Pair:
    """What torch takes as one number or two."""
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[1])


# ---- whether a network can be run this way -------------------------------------------------------


def supports(net: Net, x: Tensor) -> bool:
    """Whether the network gives side by side what it gives alone; ``x`` is one stacked batch of two
    examples or more.

    In double precision, so that rounding has no say, whatever the precision of training; in train
    mode too, unless something is drawn there.
    """
    pair = torch.stack([x[0, :2], x[-1, -2:]]).double()
    # Two clients with unlike weights: a client that reads the other's must show.
    tree = {k: torch.stack([v, v + 0.1]).to(pair) for k, v in net.params().items()}
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return _agrees(net, tree, pair, train=False) and _agrees(net, tree, pair, train=True)
    except torch.OutOfMemoryError:
        # A RuntimeError too, but it says nothing about the network.
        raise
    except Exception:  # of whatever kind: in code that is not ours, or in a compiler
        return False


def _agrees(net: Net, tree: Tree, x: Tensor, train: bool) -> bool:
    """Whether the clients' logits side by side are those of each client alone."""
    expected = _logits_alone(net, tree, x, train)
    # With dropout no two runs agree; evaluation mode has been compared already.
    if train and not torch.equal(expected, _logits_alone(net, tree, x, train)):
        return True
    logits, features = forward(net, _copy(tree), x, train)
    return (
        logits.shape == expected.shape
        and torch.allclose(logits, expected, rtol=1e-6)
        and features.dim() == 3
    )


def _logits_alone(net: Net, tree: Tree, x: Tensor, train: bool) -> Tensor:
    """Each client's logits, one client after another."""
    logits = []
    for client in range(len(x)):
        own_tree = {k: v[client] for k, v in _copy(tree).items()}
        logits.append(net.run(own_tree, x[client], train))
    return torch.stack(logits)


def _copy(tree: Tree) -> Tree:
    """A copy for one run: train mode writes running statistics into the tree it is given."""
    return {k: v.clone() for k, v in tree.items()}
