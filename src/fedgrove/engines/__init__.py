"""Engines run the tasks of a run: in this process, in worker processes, on a GPU, over Flower."""

from __future__ import annotations

import re

import torch

from ..core import Engine
from ..errors import InputError, check, spell_option, unknown
from .pool.engine import Pool, cores
from .serial import Serial
from .wired import Wired

__all__ = ["Pool", "Serial", "Wired", "choose", "names"]


PRECISIONS = ("fp32", "tf32", "bf16")
DEVICES = ("auto", "cpu", "cuda", "cuda:0")
"""The devices that are named in errors; other GPUs have higher numbers."""
GPU = re.compile(r"cuda:(\d{1,3})")


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
        device: auto, cpu, cuda, or a GPU by its number, as cuda:0.
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
    gpu = _number_of_gpu(device)
    device = device_of(device, name)
    if device == "cuda" and gpu:
        # From here on "cuda" is this one.
        torch.cuda.set_device(gpu)
    if device == "cuda" or name == "batched":
        if timeout is not None:
            raise InputError(
                f"{spell_option('timeout')} is {timeout:g}, but batched trains clients in stacks, "
                f"which answer together; it works with the {spell_option('engine')} flower, pool, "
                "serial or wired."
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
    """Return the kind of device of an engine, "cpu" or "cuda"; for "auto" the best one here.

    Raises:
        InputError: CUDA was requested, and this machine or the engine does not support it.
    """
    if device not in DEVICES and not GPU.fullmatch(device):
        raise unknown("device", device, DEVICES)
    has_cuda = torch.cuda.is_available()
    runs_on_cuda = engine in ("auto", "batched")
    if device.startswith("cuda"):
        if not has_cuda:
            raise InputError(
                f"{spell_option('device')} is {device}, and torch finds no CUDA device here; use "
                f"{spell_option('device', 'cpu')}."
            )
        if not runs_on_cuda:
            raise InputError(
                f"{spell_option('engine', engine)} runs on the CPU only; for CUDA use "
                f"{spell_option('engine', 'batched')}, or leave {spell_option('engine')} out."
            )
        number = _number_of_gpu(device)
        count = torch.cuda.device_count()
        if number >= count:
            raise InputError(
                f"{spell_option('device')} is {device}, and there {'is' if count == 1 else 'are'} "
                f"{count} here, counted from cuda:0; name one of them."
            )
        return "cuda"
    if device == "auto" and has_cuda and runs_on_cuda:
        return "cuda"
    return "cpu"


def _number_of_gpu(device: str) -> int:
    """Return the number of a GPU, as of cuda:1; 0 where none is given."""
    found = GPU.fullmatch(device)
    return int(found[1]) if found else 0
