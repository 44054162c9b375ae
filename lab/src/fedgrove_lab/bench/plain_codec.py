"""The plain way to send a pruned model: a bitmap and the kept numbers, each through zstandard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from fedgrove.core import Packet

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]
Books = Mapping[str, tuple[Floats, Indices]]
"""Codebook and indices of each clustered tensor."""


@dataclass(frozen=True)
class PlainTensor:
    """One encoded tensor: its shape and three byte strings, whose lengths are what it costs."""

    shape: tuple[int, ...]
    bitmap: bytes | None
    """None: nothing was pruned."""
    book: bytes | None
    """The codebook; None: ``kept`` holds the numbers themselves, not indices."""
    kept: bytes

    def __len__(self) -> int:
        return len(self.bitmap or b"") + len(self.book or b"") + len(self.kept)


def books(packet: Packet, clustered: frozenset[str]) -> Books:
    """The codebook and the indices of each clustered tensor, by :func:`numpy.unique`."""
    given = {}
    for name in packet.values:
        if name in clustered:
            given[name] = _book(_kept(packet, name))
    return given


def encode(
    packet: Packet, clustered: frozenset[str], given: Books | None = None
) -> dict[str, PlainTensor]:
    """Bitmap and kept numbers, compressed by zstandard at level 3.

    The numbers of a ``clustered`` tensor are sent as a byte each, which points into a codebook,
    those of the others as float32. ``given``: codebooks and indices that are known beforehand; else
    they are looked for.
    """
    compressor = zstandard.ZstdCompressor(level=3)
    encoded: dict[str, PlainTensor] = {}
    for name, value in packet.values.items():
        bitmap = None
        mask = (packet.mask or {}).get(name)
        if mask is not None:
            bitmap = compressor.compress(np.packbits(mask.numpy()).data)
        if name not in clustered:
            book_bytes = None
            kept = compressor.compress(_kept(packet, name).data)
        else:
            if given is None:
                book, index = _book(_kept(packet, name))
            else:
                book, index = given[name]
            # Not compressed: a handful of float32 numbers would only grow.
            book_bytes = book.tobytes()
            kept = compressor.compress(index.data)
        encoded[name] = PlainTensor(tuple(value.shape), bitmap, book_bytes, kept)
    return encoded


def decode(data: Mapping[str, PlainTensor]) -> Packet:
    """The inverse of :func:`encode`."""
    decompressor = zstandard.ZstdDecompressor()
    values: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, encoded in data.items():
        raw = decompressor.decompress(encoded.kept)
        if encoded.book is None:
            x = np.frombuffer(raw, np.float32)
        else:
            book = np.frombuffer(encoded.book, np.float32)
            x = book.take(np.frombuffer(raw, np.uint8))
        if encoded.bitmap is not None:
            packed = np.frombuffer(decompressor.decompress(encoded.bitmap), np.uint8)
            bits = np.unpackbits(packed, count=int(np.prod(encoded.shape))).view(np.bool_)
            full = np.zeros(len(bits), np.float32)
            # Several times faster than full[bits] = x.
            full[np.flatnonzero(bits)] = x
            x = full
            masks[name] = torch.from_numpy(bits).view(encoded.shape)
        elif encoded.book is None:
            # frombuffer is read-only, and our codec too returns tensors that may be written to.
            x = x.copy()
        values[name] = torch.from_numpy(x).view(encoded.shape)
    return Packet(values, masks or None)


def _kept(packet: Packet, name: str) -> Floats:
    flat: Floats = packet.values[name].numpy().reshape(-1)
    mask = (packet.mask or {}).get(name)
    if mask is None:
        return flat
    return flat[np.flatnonzero(mask.numpy())]


def _book(x: Floats) -> tuple[Floats, Indices]:
    book, index = np.unique(x, return_inverse=True)
    # At most 32 centroids are measured, so that an index fits into a byte.
    return book, index.astype(np.uint8)
