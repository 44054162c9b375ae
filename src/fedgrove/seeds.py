"""Randomness as a function of (seed, round, client, purpose), and sums that do not depend on cores.

A draw never depends on the order of calls, the number of workers or the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from .renamed import find_old_names


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed that depends on every argument and on nothing else.

    Args:
        seed: The seed of the run.
        purpose: What the randomness is for: round, client, a name.

    >>> derive(0, 3, "shuffle") == derive(0, 3, "shuffle")
    True
    >>> derive(0, 3, "shuffle") == derive(0, 4, "shuffle")
    False
    """
    # repr keeps the parts apart: (1, 2), (12,) and ("1", 2) are different texts. int() makes one
    # text of a seed that came as an int, a bool or a numpy integer.
    text = repr((int(seed), *purpose))
    # Not Python's hash(), which differs from process to process.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # torch and numpy both take 63 bits without a sign.
    return int.from_bytes(digest, "little") >> 1


def numpy_rng(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *purpose))


def torch_rng(seed: int, *purpose: int | str) -> torch.Generator:
    """Return a torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads, and afterwards the previous number."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single_thread() -> AbstractContextManager[None]:
    """Let torch use one thread: sums are then equal on every machine and in every engine."""
    return use_threads(1)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore torch's global generator afterwards."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


__getattr__ = find_old_names(__name__)
