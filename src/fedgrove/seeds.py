"""Randomness as a function of (seed, round, client, purpose).

It never depends on the order of calls, the number of workers or the engine; with one thread, nor do
sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch


def derive(seed: int, *words: int | str) -> int:
    """A 63-bit seed that depends on every word and on nothing else.

    >>> derive(0, 3, "shuffle") == derive(0, 3, "shuffle")
    True
    >>> derive(0, 3, "shuffle") == derive(0, 4, "shuffle")
    False
    """
    # repr keeps the words apart: (1, 2), (12,) and ("1", 2) are different texts. int() makes one
    # text of a seed that came as an int, a bool or a numpy integer.
    text = repr((int(seed), *words))
    # Not Python's hash(), which differs from process to process.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # torch and numpy both take 63 bits without a sign.
    return int.from_bytes(digest, "little") >> 1


def numpy_rng(seed: int, *words: int | str) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *words))


def torch_rng(seed: int, *words: int | str) -> torch.Generator:
    """A torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *words))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many torch threads, and then as many as before."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """One torch thread: sums then come out the same on every machine and in every engine."""
    return threads(1)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave torch's global generator as it was."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
