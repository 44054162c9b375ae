"""A convolution of many clients on a card, each pass in the fastest of several ways.

There are three ways (:mod:`.library`, :mod:`.windows`, :mod:`.implicit`) and three passes: forward,
the gradient of the images, the gradient of the weights. Which way is fastest depends on the shape
and the precision, so all are timed when a shape comes up first, on a few clients, and the fastest
is kept: cuDNN does the same among its own kernels.

Images of K clients have their channels last and side by side, (N, H, W, K·C) in memory. Weights are
packed once for both directions, (K, O, kh, kw, C), in the type of the product.

Shapes: K clients, N examples, C channels in and O out, kernels of kh x kw, images of H x W in and
H' x W' out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import library, windows

Pair = tuple[int, int]

TIMED_CLIENTS = 32
"""Clients on which the ways are timed: enough to fill a card, few enough for its memory."""
TIMED_CALLS = 5
"""Calls of each way that are timed together, after one to warm up."""

_fastest: dict[Any, ModuleType] = {}
"""By pass, shapes and precision: the way that was fastest."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Images (N, K·O, H', W') of x (N, K·C, H, W), weight (K, O, C, kh, kw) and bias (K, O)."""
    y: Tensor = _Convolve.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    return y


def on_card(x: Tensor) -> bool:
    """Whether x is where our kernels run; a test may say so of a CPU, and have them interpreted."""
    return x.is_cuda


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled for this card: tried once, with a small one.

    Triton comes with torch's builds for Linux and CUDA. It needs a C compiler on the machine.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    # Slow to import.
    from . import pooling

    try:
        pooling.max_pool(torch.zeros(1, 1, 2, 2, device="cuda"), (2, 2))
    except Exception:  # of whatever kind, in a compiler that is not ours
        return False
    return True


@cache
def ways() -> tuple[ModuleType, ...]:
    """The ways that this machine has, each with a function per pass."""
    if not has_triton():
        return (library, windows)
    # Slow to import, and only where torch was built for a card.
    from . import implicit

    return (library, windows, implicit)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        """Images; their channels are last in memory."""
        # Autocast does not look into an autograd function: the cast is ours to do.
        dtype = product_dtype(x)
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        last = weight.permute(0, 1, 3, 4, 2)
        # Cast and laid out anew in one kernel.
        packed = torch.empty(last.shape, dtype=dtype, device=x.device).copy_(last)
        ctx.save_for_backward(x, packed)
        ctx.geometry = (stride, padding)
        ctx.weight_type = weight.dtype
        ctx.bias_type = None if bias is None else bias.dtype

        def arguments_of(clients: int) -> tuple[Any, ...]:
            own_bias = None if bias is None else bias[:clients]
            share = clients / len(weight)
            return (_few(x, share), packed[:clients], own_bias, stride, padding)

        return _run("forward", arguments_of, len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of images and weights, each in its own fastest way."""
        x, packed = ctx.saved_tensors
        dy = grads[0].to(x.dtype).contiguous(memory_format=torch.channels_last)

        def arguments_of(clients: int) -> tuple[Any, ...]:
            share = clients / len(packed)
            return (_few(dy, share), _few(x, share), packed[:clients], *ctx.geometry)

        dx = None
        if ctx.needs_input_grad[0]:
            dx = _run("input_gradient", arguments_of, len(packed))
        dw = _run("weight_gradient", arguments_of, len(packed))
        if dw.dtype != ctx.weight_type or not dw.is_contiguous():
            # Cast and laid out as the tree has it in one kernel.
            dw = torch.empty(dw.shape, dtype=ctx.weight_type, device=dw.device).copy_(dw)
        db = None
        if ctx.bias_type is not None:
            db = dy.sum((0, 2, 3), dtype=ctx.bias_type).view(len(packed), -1)
        return dx, dw, db, None, None


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which x is multiplied: under autocast, the type that torch would cast it to."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def _few(images: Tensor, share: float) -> Tensor:
    """The images of the first clients, a share of all."""
    if share == 1:
        return images
    channels = round(share * images.shape[1])
    return images[:, :channels].contiguous(memory_format=torch.channels_last)


def _run(name: str, arguments_of: Callable[[int], tuple[Any, ...]], clients: int) -> Tensor:
    """A pass in its fastest way; ``arguments_of(n)`` are its arguments for the first n clients."""
    arguments = arguments_of(clients)
    key = (name, min(clients, TIMED_CLIENTS), *_shape_key(arguments, clients))
    if key not in _fastest:
        # Not on a CPU, nor while a graph is captured; the choice is then left to a later call.
        can_time = arguments[0].is_cuda and not torch.cuda.is_current_stream_capturing()
        if not can_time:
            result: Tensor = getattr(library, name)(*arguments)
            return result
        sample = arguments_of(min(clients, TIMED_CLIENTS))
        _fastest[key] = fastest([(way, getattr(way, name)) for way in ways()], sample)
    result = getattr(_fastest[key], name)(*arguments)
    return result


def _shape_key(arguments: tuple[Any, ...], clients: int) -> tuple[Any, ...]:
    """Shapes for one client, types, and whether products are shortened."""
    parts: list[Any] = [torch.backends.cudnn.allow_tf32]
    for value in arguments:
        if not isinstance(value, Tensor):
            parts.append(value)
        elif value.dim() == 4:
            # Images, all clients' side by side.
            examples, channels, *size = value.shape
            parts.append((examples, channels // clients, *size, value.dtype))
        else:
            parts.append((*value.shape[1:], value.dtype))
    return tuple(parts)


def fastest(
    candidates: list[tuple[ModuleType, Callable[..., Tensor]]], arguments: tuple[Any, ...]
) -> ModuleType:
    """The candidate whose function takes the least time on the card; one that fails is out."""
    best: ModuleType | None = None
    least = float("inf")
    for way, function in candidates:
        try:
            milliseconds = _milliseconds(function, arguments)
        except Exception as error:
            # It cannot do this shape, or has too little memory for it. (Triton's errors are no
            # RuntimeErrors.)
            failure = error
            continue
        if milliseconds < least:
            best = way
            least = milliseconds
    if best is None:
        raise failure
    return best


def _milliseconds(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> float:
    """The time of a few calls in a graph: without the time that it takes to launch them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # To warm up: a library chooses among its own kernels, or one is compiled.
        function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMED_CALLS):
            function(*arguments)
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds
