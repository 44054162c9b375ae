"""Randomness as a function of (seed, round, client, purpose): never of call order, workers or engines."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *words: int | str) -> int:
    """A 63-bit seed that depends on every word and on nothing else.

    >>> derive(0, 3, "shuffle") == derive(0, 3, "shuffle"), derive(0, 3, "shuffle") == derive(0, 4, "shuffle")
    (True, False)
    """
    digest = hashlib.blake2b(repr((int(seed), *words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_rng(seed: int, *words: int | str) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *words))


def torch_rng(seed: int, *words: int | str) -> torch.Generator:
    """A torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *words))
