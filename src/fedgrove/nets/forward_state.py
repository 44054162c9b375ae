"""State that a forward pass changes in its own module: found by trying, restored after every call.

One module serves every client. A counter or a running tensor in it would go from client to client,
in the order in which an engine happens to run them; and ``torch.func`` refuses it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import norms

ABSENT = object()
"""Stands for an attribute that is not there yet."""

Location = tuple[nn.Module, str]
"""The module that has an attribute or a buffer, and its name there."""


def find_changed_state(
    module: nn.Module, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return which buffers and attributes of a network its forward passes change.

    Those in ``tensors`` are left out.

    Tried on a copy, in both modes and on batches of two sizes; a pass that fails is ignored.
    """
    try:
        trial = copy.deepcopy(module)
    except Exception:
        # Something in it cannot be copied.
        return ()
    like = next(iter(tensors.values()), torch.zeros(()))
    changed: list[str] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for train in (False, True):
            trial.train(train)
            for part in norms.find_fixed_norms(trial):
                part.eval()
            before: dict[str, Any] = {}
            # The first call may fill what later ones only read.
            for batch in (2, 3):
                before = _snapshot(trial, tensors)
                zeros = torch.zeros((batch, *shape), dtype=like.dtype, device=like.device)
                try:
                    trial(zeros)
                except Exception:
                    break
            after = _snapshot(trial, tensors)
            for name in {**before, **after}:
                if not _is_same(before.get(name, ABSENT), after.get(name, ABSENT)):
                    changed.append(name)
    return tuple(dict.fromkeys(changed))


def _snapshot(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a forward pass could change, by name; tensors with their number of writes."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in (*part._buffers.items(), *_attributes(part).items()):
            full_name = f"{name}.{key}" if name else key
            if full_name in tensors:
                continue
            if isinstance(value, Tensor):
                found[full_name] = (value, value._version)
            elif isinstance(value, list | dict):
                found[full_name] = (value, len(value))
            else:
                found[full_name] = (value, 0)
    return found


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes; torch's layers have none that matter."""
    if type(part).__module__.startswith("torch."):
        return {}
    usual = vars(nn.Module())
    added = {}
    for key, value in vars(part).items():
        if key not in usual:
            added[key] = value
    return added


def _is_same(before: Any, after: Any) -> bool:
    if before is ABSENT or after is ABSENT:
        return False
    value, count = before
    other, other_count = after
    if isinstance(value, bool | int | float | str):
        return bool(value == other)
    return value is other and count == other_count


def locate(module: nn.Module, name: str) -> Location:
    """Find where a network keeps a buffer or an attribute."""
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


@contextmanager
def restore_state(locations: list[Location]) -> Iterator[None]:
    """Replace a network's state by copies of it for a while, and restore it afterwards."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for part, key in locations:
        # Looked up every time: a copied module has other dictionaries.
        owner: dict[str, Any] = part._buffers if key in part._buffers else vars(part)
        value = owner.get(key, ABSENT)
        before.append((owner, key, value))
        if isinstance(value, Tensor):
            owner[key] = value.clone()
        elif isinstance(value, list | dict):
            owner[key] = copy.copy(value)
    try:
        yield
    finally:
        for owner, key, value in before:
            if value is ABSENT:
                owner.pop(key, None)
            else:
                owner[key] = value
