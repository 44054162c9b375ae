"""Engines: where the work is done. Every engine gives the same answer."""

from __future__ import annotations

import torch

from ..core import Engine
from ..errors import InputError, unknown
from .pool.engine import Pool, cores
from .serial import Serial

__all__ = ["Pool", "Serial", "choose", "names"]


PRECISIONS = ("fp32", "tf32", "bf16")


def names() -> list[str]:
    """What ``--engine`` takes."""
    return ["auto", "batched", "pool", "serial"]


def choose(name: str = "auto", device: str = "auto", precision: str = "fp32") -> Engine:
    """The engine of that name. ``auto`` stacks clients on a GPU where there is one, else takes a worker per core.

    ``precision`` is for the GPU: fp32 in full, or with shorter products (tf32), or with bf16 activations.
    """
    if name not in names():
        raise unknown("engine", name, names())
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    device = device_of(device, name)
    if device == "cuda" or name == "batched":
        from .batched.engine import Batched

        return Batched(device=device, precision=precision)  # type: ignore[arg-type]
    if name == "serial" or (name == "auto" and cores() == 1):
        return Serial()
    return Pool()


def device_of(device: str, engine: str = "auto") -> str:
    """cpu or cuda: what was asked for, or what is there."""
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InputError(
            "--device cuda was asked for and torch sees no CUDA device here; take --device cpu."
        )
    if device == "cuda" and engine not in ("auto", "batched"):
        raise InputError(
            f"--engine {engine} works on the CPU; on CUDA take --engine batched, or leave it out."
        )
    return (
        "cuda"
        if device == "cuda" or (device == "auto" and there and engine in ("auto", "batched"))
        else "cpu"
    )
