"""Engines: where the work is done. Every engine gives the same answer."""

from __future__ import annotations

import torch

from ..core import Engine
from ..errors import InputError, check, unknown
from .pool.engine import Pool, cores
from .serial import Serial
from .wired import Wired

__all__ = ["Pool", "Serial", "Wired", "choose", "names"]


PRECISIONS = ("fp32", "tf32", "bf16")
DEVICES = ("auto", "cpu", "cuda")


def names() -> list[str]:
    """What ``--engine`` takes."""
    return ["auto", "batched", "flower", "pool", "serial", "wired"]


def choose(
    name: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float | None = None,
) -> Engine:
    """The engine of that name.

    ``auto`` stacks clients on a GPU if there is one, otherwise it takes one worker per core.
    ``precision`` is for the GPU: fp32 in full, with shorter products (tf32), or with bf16
    activations. A client that has not answered after ``timeout`` seconds is lost.
    """
    if name not in names():
        raise unknown("engine", name, names())
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if timeout is not None:
        check(timeout > 0, "timeout", timeout, "more than 0 seconds")
    device = device_of(device, name)
    if device == "cuda" or name == "batched":
        if timeout is not None:
            raise InputError(
                f"--timeout is {timeout:g}, but batched trains clients in stacks, which answer "
                "together; it works with --engine flower, pool, serial or wired."
            )
        # Imported here: most runs on a CPU never need it.
        from .batched.engine import Batched

        return Batched(device=device, precision=precision)  # type: ignore[arg-type]
    if name == "wired":
        return Wired(timeout)
    if name == "flower":
        # Imported here, and flwr only when it starts: few runs need it.
        from .flower.simulation import Simulation

        return Simulation(timeout)
    one_core = cores() == 1
    if name == "serial" or (name == "auto" and one_core):
        return Serial(timeout)
    return Pool(timeout=timeout)


def device_of(device: str, engine: str = "auto") -> str:
    """cpu or cuda: what was asked for, or what is there."""
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    has_cuda = torch.cuda.is_available()
    runs_on_cuda = engine in ("auto", "batched")
    if device == "cuda":
        if not has_cuda:
            raise InputError(
                "--device cuda was asked for and torch sees no CUDA device here; take --device cpu."
            )
        if not runs_on_cuda:
            raise InputError(
                f"--engine {engine} works on the CPU; on CUDA take --engine batched, or leave it "
                "out."
            )
        return "cuda"
    if device == "auto" and has_cuda and runs_on_cuda:
        return "cuda"
    return "cpu"
