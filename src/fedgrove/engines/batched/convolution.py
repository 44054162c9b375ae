"""A convolution of many clients on a GPU: each pass in the fastest of several implementations.

There are three implementations (:mod:`.conv_library`, :mod:`.conv_windows`, :mod:`.conv_triton`)
and three passes: forward, the gradient of the images, the gradient of the weights. Which one is
fastest depends on the shape and the precision. So all are timed for each new shape, on a few
clients, and the fastest is kept, as cuDNN does among its own kernels.

Images of K clients have their channels last and next to each other, (N, H, W, K·C) in memory.
Weights are packed once for both directions, (K, O, kh, kw, C), in the type of the product.

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

from . import conv_library, conv_windows

Pair = tuple[int, int]

TIMED_CLIENTS = 32
"""Clients for timing: enough to fill a GPU, few enough for its memory."""
TIMED_CALLS = 5
"""Calls that are timed together, after one to warm up."""

_fastest: dict[Any, ModuleType] = {}
"""The fastest implementation, by pass, shapes and precision."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve the images of K clients at once: x (N, K·C, H, W), weight (K, O, C, kh, kw).

    The result is (N, K·O, H', W'); bias is (K, O).
    """
    y: Tensor = _Convolve.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    return y


def is_on_gpu(x: Tensor) -> bool:
    """Return whether our kernels can run on x; tests replace this to interpret them on a CPU."""
    return x.is_cuda


@cache
def has_triton() -> bool:
    """Return whether kernels can be compiled for this GPU: tried once, with a small one.

    Triton comes with torch's builds for Linux and CUDA. It needs a C compiler on the machine.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    # Slow to import.
    from . import pool_triton

    try:
        pool_triton.max_pool(torch.zeros(1, 1, 2, 2, device="cuda"), (2, 2))
    except Exception:  # any error, in a compiler that is not ours
        return False
    return True


@cache
def list_implementations() -> tuple[ModuleType, ...]:
    """Return the batched convolutions on this machine: modules with a function per pass."""
    if not has_triton():
        return (conv_library, conv_windows)
    # Slow to import, and only for torch builds with CUDA.
    from . import conv_triton

    return (conv_library, conv_windows, conv_triton)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        """Return the clients' convolved images, with channels last in memory."""
        # Autocast does not reach into an autograd function, so this casts.
        dtype = product_dtype(x)
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        last = weight.permute(0, 1, 3, 4, 2)
        # Cast and permuted in one kernel.
        packed = torch.empty(last.shape, dtype=dtype, device=x.device).copy_(last)
        ctx.save_for_backward(x, packed)
        ctx.geometry = (stride, padding)
        ctx.weight_type = weight.dtype
        ctx.bias_type = None if bias is None else bias.dtype

        def arguments_of(clients: int) -> tuple[Any, ...]:
            own_bias = None if bias is None else bias[:clients]
            share = clients / len(weight)
            return (_take_first_clients(x, share), packed[:clients], own_bias, stride, padding)

        return _run_fastest("forward", arguments_of, len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images and weights, each by its fastest implementation."""
        x, packed = ctx.saved_tensors
        dy = grads[0].to(x.dtype).contiguous(memory_format=torch.channels_last)

        def arguments_of(clients: int) -> tuple[Any, ...]:
            share = clients / len(packed)
            return (
                _take_first_clients(dy, share),
                _take_first_clients(x, share),
                packed[:clients],
                *ctx.geometry,
            )

        dx = None
        if ctx.needs_input_grad[0]:
            dx = _run_fastest("input_gradient", arguments_of, len(packed))
        dw = _run_fastest("weight_gradient", arguments_of, len(packed))
        if dw.dtype != ctx.weight_type or not dw.is_contiguous():
            # Cast and made contiguous in one kernel.
            dw = torch.empty(dw.shape, dtype=ctx.weight_type, device=dw.device).copy_(dw)
        db = None
        if ctx.bias_type is not None:
            db = dy.sum((0, 2, 3), dtype=ctx.bias_type).view(len(packed), -1)
        return dx, dw, db, None, None


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a GPU kernel multiplies x: under autocast, torch's type for it."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def _take_first_clients(images: Tensor, share: float) -> Tensor:
    """Return the images of the first clients, a share of all."""
    if share == 1:
        return images
    channels = round(share * images.shape[1])
    return images[:, :channels].contiguous(memory_format=torch.channels_last)


def _run_fastest(name: str, arguments_of: Callable[[int], tuple[Any, ...]], clients: int) -> Tensor:
    """Run a pass by its fastest implementation.

    Args:
        name: The function of the pass.
        arguments_of: Returns its arguments for the first n clients.
        clients: The number of clients.
    """
    arguments = arguments_of(clients)
    key = (name, min(clients, TIMED_CLIENTS), *_shape_key(arguments, clients))
    if key not in _fastest:
        # Neither on a CPU nor while a graph is captured; a later call then chooses.
        can_time = arguments[0].is_cuda and not torch.cuda.is_current_stream_capturing()
        if not can_time:
            result: Tensor = getattr(conv_library, name)(*arguments)
            return result
        sample = arguments_of(min(clients, TIMED_CLIENTS))
        _fastest[key] = find_fastest(
            [(way, getattr(way, name)) for way in list_implementations()], sample
        )
    result = getattr(_fastest[key], name)(*arguments)
    return result


def _shape_key(arguments: tuple[Any, ...], clients: int) -> tuple[Any, ...]:
    """Return shapes for one client, types, and whether tf32 is allowed."""
    parts: list[Any] = [torch.backends.cudnn.allow_tf32]
    for value in arguments:
        if not isinstance(value, Tensor):
            parts.append(value)
        elif value.dim() == 4:
            # Images of all clients next to each other.
            examples, channels, *size = value.shape
            parts.append((examples, channels // clients, *size, value.dtype))
        else:
            parts.append((*value.shape[1:], value.dtype))
    return tuple(parts)


def find_fastest(
    candidates: list[tuple[ModuleType, Callable[..., Tensor]]], arguments: tuple[Any, ...]
) -> ModuleType:
    """Return the candidate whose function is fastest on the GPU; one that fails is skipped."""
    best: ModuleType | None = None
    least = float("inf")
    for way, function in candidates:
        try:
            milliseconds = _time_calls(function, arguments)
        except Exception as error:
            # It does not support this shape, or has too little memory for it. Any exception,
            # because Triton's errors are not RuntimeErrors.
            failure = error
            continue
        if milliseconds < least:
            best = way
            least = milliseconds
    if best is None:
        raise failure
    return best


def _time_calls(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> float:
    """Return the milliseconds of a few calls in a graph, without the time to launch them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # A warm-up: the library chooses a kernel, or one is compiled.
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
