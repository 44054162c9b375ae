"""Networks run for many clients at once, each with its own weights: which can, and grouped kernels.

``vmap`` moves the clients' dimension before and after every convolution. Here the images of K
clients are next to each other as one image of K·C channels, (N, K·C, H, W), from the first layer to
the last: a convolution has K groups, BatchNorm has K·C channels, pooling and ReLU need no change,
and channels are split, joined and shuffled client by client. A frozen layer has one weight for all
clients. From ``flatten`` on, features are (K, N, F) and a linear layer is a batched product. The
network's own forward code runs unchanged: a ``TorchFunctionMode`` replaces the few functions that
depend on the layout.

Not every forward pass can be run this way, so :func:`supports` tries a network before it is used;
:func:`can_stack` tries whether ``vmap`` can run it. If neither can, clients train one by one.

BatchNorm leaves out the padding of short batches (:func:`normalise_examples`). A client's channels
are normalised by the mean and variance of its own examples. In torch's kernels statistics take no
weights; but padding that is 0 adds nothing to sums. With r = places / examples, and m and v the
mean and variance that the kernel computes over all places, those of the examples are r m and
r (v - (r - 1) m^2).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ... import nets, trees
from ...nets import Net
from ...nets.norms import use_native_batch_norm
from ...trees import Tree
from . import convolution
from .convolution import product_dtype

OptionalPair = tuple[Tensor | None, Tensor | None]
"""Running mean and variance of a norm layer, or its scale and shift; None: it has none."""

MAX_WINDOW_SIZE = 64
"""The largest pooling window for our kernel, which is unrolled over its places."""


def forward(
    net: Net, tree: Mapping[str, Tensor], x: Tensor, train: bool, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run K clients' networks at once in grouped kernels: logits (K, N, classes) and features.

    Args:
        net: The network.
        tree: Weights (K, ...).
        x: The inputs.
        train: Whether to run in train mode.
        weight: (K, N): 0 for padding, which BatchNorm leaves out; None: there is no padding.
    """
    clients, examples, channels = x.shape[:3]
    side_by_side = x.transpose(0, 1).reshape(examples, clients * channels, *x.shape[3:])
    # The layout that the GPU's matrix units read without another copy.
    if side_by_side.dim() == 4 and convolution.is_on_gpu(side_by_side):
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
        # The inputs of all linear layers; the last are the features.
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
        # torch turns the mode off while this runs, so replacements can call torch's functions.
        return self.replacements.get(func, func)(*args, **(kwargs or {}))

    # The replacements have the arguments of the functions that they replace.

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
            # A frozen layer has one weight for all clients: their images are just more examples.
            images = self._as_examples(input)
            y = F.conv2d(images, weight, bias, stride, padding, dilation, groups)
            return self._side_by_side(y)
        is_plain = groups == 1 and not isinstance(padding, str) and _pair(dilation) == (1, 1)
        # In float64, which is for comparisons, and on a CPU there is only the library.
        if is_plain and convolution.is_on_gpu(input) and weight.dtype != torch.float64:
            return convolution.convolve(input, weight, bias, _pair(stride), _pair(padding))
        if bias is not None:
            bias = bias.flatten()
        # (K, O, C, kh, kw) as (K·O, C, kh, kw): K times the groups, each with its client's filters.
        weight = weight.flatten(0, 1)
        y = F.conv2d(input, weight, bias, stride, padding, dilation, groups * self.clients)
        if convolution.is_on_gpu(y):
            # In float64 a GPU returns channels first; `supports` must see the layout of training.
            return y.contiguous(memory_format=torch.channels_last)
        return y

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        running = (self._flat_view(running_mean), self._flat_view(running_var))
        affine = (self._flat_view(weight), self._flat_view(bias))
        # In eval mode the batch does not matter, so padding does no harm.
        if training and self.weight is not None:
            return normalise_examples(input, self.weight, running, affine, momentum, eps)
        # Both or none of the statistics, and of scale and shift.
        is_usual = (running[0] is None) == (running[1] is None)
        is_usual = is_usual and (affine[0] is None) == (affine[1] is None)
        if training and is_usual and convolution.is_on_gpu(input) and convolution.has_triton():
            # Slow to import, and only for torch builds with CUDA.
            from . import norm_triton

            if norm_triton.can_normalise(input, momentum):
                return norm_triton.batch_norm(input, running, affine, momentum, eps)
        return F.batch_norm(input, *running, *affine, training, momentum, eps)

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
            # Caught by `supports`: such a network runs under vmap.
            raise ValueError("the indices of maxima have no meaning for stacked clients")
        window = _pair(kernel_size)
        is_side_by_side = not stride or _pair(stride) == window
        is_plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode
        can_pool = convolution.is_on_gpu(input) and convolution.has_triton()
        # The place of a maximum is kept as a small number.
        is_small = window[0] * window[1] <= MAX_WINDOW_SIZE
        if is_side_by_side and is_plain and is_small and can_pool:
            # Slow to import, and only for torch builds with CUDA.
            from . import pool_triton

            return pool_triton.max_pool(input, window)
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
            # Caught by `supports`: such a network runs under vmap.
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
        # A frozen bias or weight is one for all clients.
        if bias is not None and bias.dim() == 1:
            bias = bias.expand(self.clients, -1)
        if weight.dim() == 2:
            y = features @ weight.mT
            return y if bias is None else y + bias.unsqueeze(1)
        return linear(features, weight, bias)

    # Channels are split, joined and shuffled client by client.

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
        """Flatten one row per client to one row for all.

        It is a view, so that BatchNorm changes the running statistics of the tree itself. A frozen
        layer's row is repeated.
        """
        if rows is None:
            return None
        if rows.dim() == 1:
            return rows.repeat(self.clients)
        return rows.view(-1)

    def _split_clients(self, x: Tensor) -> Tensor:
        """(N, K·C, ...) as (K, N, C...), if x does not have that form already."""
        if x.dim() == 3 and x.shape[0] == self.clients:
            return x
        by_client = x.reshape(x.shape[0], self.clients, -1, *x.shape[2:]).transpose(0, 1)
        return by_client.reshape(self.clients, x.shape[0], -1)


def _pair(value: Any) -> convolution.Pair:
    """Return a pair, from one number or two as torch takes them."""
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[1])


# ---- whether a network can be run this way -------------------------------------------------------


def supports(net: Net, x: Tensor) -> bool:
    """Return whether a network in grouped kernels gives the outputs of each client alone.

    Tried in double precision, so that rounding does not matter, and in train mode too, unless
    random numbers are drawn there.

    Args:
        net: The network.
        x: One stacked batch of two examples or more.
    """
    pair = torch.stack([x[0, :2], x[-1, -2:]]).double()
    tree = trees.map(lambda leaf: leaf.to(pair), _make_two_clients(net))
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return _agrees_side_by_side(net, tree, pair, train=False) and _agrees_side_by_side(
                net, tree, pair, train=True
            )
    except torch.OutOfMemoryError:
        # Also a RuntimeError, but not caused by the network.
        raise
    except Exception:  # any error, in code that is not ours or in a compiler
        return False


def _agrees_side_by_side(net: Net, tree: Tree, x: Tensor, train: bool) -> bool:
    """Return whether the clients' logits in grouped kernels are those of each client alone."""
    expected = _logits_alone(net, tree, x, train)
    # With dropout no two passes agree; eval mode has been compared already.
    if train and not torch.equal(expected, _logits_alone(net, tree, x, train)):
        return True
    logits, features = forward(net, _copy(tree), x, train)
    return (
        logits.shape == expected.shape
        and torch.allclose(logits, expected, rtol=1e-6)
        and features.dim() == 3
    )


def _logits_alone(net: Net, tree: Tree, x: Tensor, train: bool) -> Tensor:
    """Return each client's logits, one client after another."""
    logits = []
    for client in range(len(x)):
        logits.append(net.run(_copy_row(tree, client), x[client], train))
    return torch.stack(logits)


def _copy(tree: Tree) -> Tree:
    """Copy a tree, because train mode writes running statistics into it."""
    return trees.map(Tensor.clone, tree)


def _copy_row(tree: Tree, client: int) -> Tree:
    """Copy one client's row of a stacked tree, for the reason of :func:`_copy`."""
    return {k: v[client].clone() for k, v in tree.items()}


def _make_two_clients(net: Net) -> Tree:
    """Stack two clients with different weights, so that mixing them up changes the outputs."""
    return {k: torch.stack([v, v + 0.1]) for k, v in net.params().items()}


def can_stack(net: Net, device: torch.device) -> bool:
    """Return whether a network under ``vmap`` gives the outputs of each client alone.

    The built-in networks do. Others may not: a forward pass that branches on data, calls what
    ``vmap`` has no rule for, or mixes the examples of a batch, because short batches are padded.
    """
    if nets.is_built_in(net.module):
        return True
    generator = torch.Generator().manual_seed(0)
    # A copy, because a failed trial may change the module.
    net = copy.deepcopy(net)
    tree = trees.map(lambda leaf: leaf.to(device), _make_two_clients(net))
    like = next(iter(tree.values()))
    x = torch.randn((2, 3, *net.shape), generator=generator).to(like.dtype).to(device)
    try:
        with torch.autocast(device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Twice, because the first call may leave something that the second cannot use.
            _try_gradient(net, tree, x)
            _try_gradient(net, tree, x)
            return _agrees_under_vmap(net, tree, x) and not _mixes_examples(net, tree, x)
    except torch.OutOfMemoryError:
        # Also a RuntimeError, but not caused by the network.
        raise
    except Exception:  # any error, in code that is not ours
        return False


def _try_gradient(net: Net, tree: Tree, x: Tensor) -> None:
    """Raise an error if a training step would."""

    def loss(params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        return net.run(params | _copy(buffers), x, True).sum()

    params = trees.pick(tree, net.layout.params)
    buffers = trees.pick(tree, net.layout.buffers)
    vmap(grad(loss), randomness="different")(params, buffers, x)


def _agrees_under_vmap(net: Net, tree: Tree, x: Tensor) -> bool:
    """Return whether two clients under vmap get the logits of each alone, in eval mode."""

    def forward(tree: Tree, x: Tensor) -> Tensor:
        return net.run(tree, x, False)

    with torch.no_grad():
        together = vmap(forward, randomness="different")(tree, x)
        alone = _logits_alone(net, tree, x, False)
    return _close(together, alone)


def _mixes_examples(net: Net, tree: Tree, x: Tensor) -> bool:
    """Return whether an example's logits depend on other examples, except by BatchNorm."""
    modes = (False,) if net.layout.batch_norm else (False, True)
    for train in modes:

        def logits(x: Tensor, train: bool = train) -> Tensor:
            with torch.no_grad():
                return net.run(_copy_row(tree, 0), x, train)

        whole = logits(x[0])
        # With dropout no two passes agree; eval mode has been compared already.
        is_random = train and not torch.equal(whole, logits(x[0]))
        if not is_random and not _close(whole[:2], logits(x[0, :2])):
            return True
    return False


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=rounding, atol=rounding)


# ---- a linear layer of many clients --------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer of K clients at once: (K, N, O) from x (K, N, F).

    Weight is (K, O, F), bias (K, O).
    """
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute one batched product of all clients, which also adds the bias."""
        # Autocast does not reach into an autograd function, so this casts.
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
        """Return the clients' weight gradients as (K, O, F); torch's own would be transposed."""
        x, weight = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = (dy.mT @ x).to(ctx.weight_type)
        db = dy.sum(1, dtype=ctx.weight_type) if ctx.has_bias else None
        return dx, dw, db


# ---- BatchNorm that leaves padding out -----------------------------------------------------------


def normalise_examples(
    x: Tensor,
    weight: Tensor,
    running: OptionalPair,
    affine: OptionalPair,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise x (N, K·C, ...) in train mode; ``weight`` (K, N) is 1 for examples, 0 for padding.

    The ``running`` mean and variance are updated in place as torch does: with unbiased variance.
    ``affine``: scale and shift.
    """
    scale, bias = affine
    if scale is None:
        scale = x.new_ones(x.shape[1])
    if bias is None:
        bias = torch.zeros_like(scale)
    channels = x.shape[1] // len(weight)
    trailing = [1] * (x.dim() - 2)
    # `weight` in a shape that broadcasts over x: (N, K·C, 1, ...).
    is_example = weight.repeat_interleave(channels, 0).T
    is_example = is_example.reshape(*x.shape[:2], *trailing).to(x.dtype)

    # Values are first shifted by about their mean, that of the first example: the kernel subtracts
    # squares, and those of large values would hide the variance. Padding becomes 0.
    shift = x[0].detach().reshape(x.shape[1], -1).mean(1)
    shifted = torch.addcmul(-shift.view(1, -1, *trailing) * is_example, x, is_example)

    # r of the formula above. A client whose batch is all padding has no examples to divide by.
    ratio = (len(x) / weight.sum(1).clamp_min(1)).repeat_interleave(channels)
    normalise = _NormaliseExamples.apply if x.is_cuda else _normalise_eagerly
    y, mean, var = normalise(shifted, is_example, ratio, scale, bias, eps)

    places = x.numel() // x.shape[1]
    count = places / ratio
    with torch.no_grad():
        new_mean = mean + shift
        new_var = var * count / (count - 1)
        for statistic, new in ((running[0], new_mean), (running[1], new_var)):
            if statistic is not None:
                statistic.lerp_(new.to(statistic.dtype), momentum)
    return y.to(x.dtype)


def _normalise_eagerly(
    x: Tensor, is_example: Tensor, ratio: Tensor, scale: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Normalise on a CPU, where torch has no kernels for parts of BatchNorm; x is 0 at padding."""
    x = x.to(scale.dtype)
    dims = [0, *range(2, x.dim())]
    shape = [-1, *[1] * (x.dim() - 2)]
    mean = x.mean(dims) * ratio
    centred = (x - mean.view(shape)) * is_example
    var = centred.square().mean(dims) * ratio
    y = centred * (scale * torch.rsqrt(var + eps)).view(shape) + bias.view(shape)
    return y, mean.detach(), var.detach()


class _NormaliseExamples(torch.autograd.Function):
    """Normalises on CUDA, in torch's kernels for BatchNorm over several devices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        is_example: Tensor,
        ratio: Tensor,
        scale: Tensor,
        bias: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise stacked clients: statistics over all places, corrected for padding."""
        # The kernel returns 1 / sqrt(v + eps), from which v is computed.
        mean_of_places, inverse_std = torch.batch_norm_stats(x, eps)
        mean = mean_of_places * ratio
        var_of_places = inverse_std.pow(-2) - eps
        # Clamped: rounding may leave a variance of 0 slightly below.
        var = (ratio * (var_of_places - (ratio - 1) * mean_of_places.square())).clamp_min(0)
        inverse_std = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, ratio, scale, mean, inverse_std)
        ctx.mark_non_differentiable(mean, var)
        return torch.batch_norm_elemt(x, scale, bias, mean, inverse_std, eps), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return stacked clients' gradients: 0 at padding, so that sums are over examples."""
        x, ratio, scale, mean, inverse_std = ctx.saved_tensors
        sum_dy, sum_dy_x, d_scale, d_bias = torch.batch_norm_backward_reduce(
            grads[0], x, mean, inverse_std, scale, True, True, True
        )
        # The kernel divides both sums by the number of places; the ratio corrects this.
        places = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
        dx = torch.batch_norm_backward_elemt(
            grads[0], x, mean, inverse_std, scale, sum_dy * ratio, sum_dy_x * ratio, places
        )
        return dx, None, None, d_scale, d_bias, None
