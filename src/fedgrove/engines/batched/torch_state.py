"""What the engine sets in torch while clients train and puts back: precision, generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_device(device: torch.device, seed: int) -> None:
    """Dropout of a stack draws in an order of its own, but always the same."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def precision_context(device: torch.device, precision: str) -> Iterator[None]:
    """fp32 in full, or with the matrix units' shorter products (tf32), or with bf16 activations."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    matmul_tf32_before = matmul.allow_tf32
    cudnn_tf32_before = cudnn.allow_tf32
    benchmark_before = cudnn.benchmark
    matmul.allow_tf32 = precision != "fp32"
    cudnn.allow_tf32 = precision != "fp32"
    # The same shapes come again and again: cuDNN may try its kernels once and keep the fastest.
    cudnn.benchmark = True
    try:
        # No cache of casts: a captured graph must make its own, from the weights it then finds.
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
        ):
            yield
    finally:
        matmul.allow_tf32 = matmul_tf32_before
        cudnn.allow_tf32 = cudnn_tf32_before
        cudnn.benchmark = benchmark_before


@contextmanager
def no_trials() -> Iterator[None]:
    """Have cuDNN take the kernel that it thinks best, and not try all of them first.

    For a few batches a trial takes longer than it saves, and every number of clients is a new one.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Torch's generators are left as they were found."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
