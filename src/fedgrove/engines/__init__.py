"""Engines run the tasks of a run: in this process, in worker processes, on a GPU, over Flower."""

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
    """Return the names of all engines, the values of ``--engine``."""
    return ["auto", "batched", "flower", "pool", "serial", "wired"]


def choose(
    name: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float | None = None,
) -> Engine:
    """Make the engine that ``--engine`` names.

    Args:
        name: A value of ``--engine``. ``auto`` stacks clients on a GPU if there is one; otherwise
            it starts one worker process per core.
        device: auto, cpu or cuda.
        precision: On a GPU: fp32, tf32 (shorter products) or bf16 (bf16 activations).
        timeout: Seconds after which a task without an answer is lost; None: wait.

    Raises:
        InputError: An unknown name, or options that the engine or this machine does not support.
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
    """Return the device of an engine, "cpu" or "cuda"; for "auto" the best one here.

    Raises:
        InputError: CUDA was requested, and this machine or the engine does not support it.
    """
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    has_cuda = torch.cuda.is_available()
    runs_on_cuda = engine in ("auto", "batched")
    if device == "cuda":
        if not has_cuda:
            raise InputError(
                "--device is cuda, and torch finds no CUDA device here; use --device cpu."
            )
        if not runs_on_cuda:
            raise InputError(
                f"--engine {engine} runs on the CPU only; for CUDA use --engine batched, or "
                "leave --engine out."
            )
        return "cuda"
    if device == "auto" and has_cuda and runs_on_cuda:
        return "cuda"
    return "cpu"
