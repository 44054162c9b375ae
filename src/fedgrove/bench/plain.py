"""The plain way to send a pruned model: a bitmap and the kept numbers, each through zstandard at level 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from ..core import Packet

Floats = npt.NDArray[np.float32]
Books = Mapping[str, tuple[Floats, npt.NDArray[np.uint8]]]
"""Codebook and indices of each clustered tensor."""


@dataclass(frozen=True)
class Plain:
    """One tensor: its bitmap (None: all kept), its codebook (None: the numbers themselves) and what was kept."""

    shape: tuple[int, ...]
    bitmap: bytes | None
    book: bytes | None
    kept: bytes

    def __len__(self) -> int:
        return len(self.bitmap or b"") + len(self.book or b"") + len(self.kept)


def books(packet: Packet, clustered: frozenset[str]) -> Books:
    """The codebook and the indices of each clustered tensor, by :func:`numpy.unique`."""
    return {k: _book(_kept(packet, k)) for k in packet.values if k in clustered}


def encode(
    packet: Packet, clustered: frozenset[str], given: Books | None = None
) -> dict[str, Plain]:
    """Bitmap and kept float32 numbers, or a byte per number that points into a codebook, all at zstandard's level 3.

    ``given``: codebooks and indices that are known beforehand; else they are looked for.
    """
    writer, out = zstandard.ZstdCompressor(level=3), dict[str, Plain]()
    for name, value in packet.values.items():
        mask = (packet.mask or {}).get(name)
        bitmap = None if mask is None else writer.compress(np.packbits(mask.numpy()).data)
        if name in clustered:
            book, index = _book(_kept(packet, name)) if given is None else given[name]
            out[name] = Plain(
                tuple(value.shape), bitmap, book.tobytes(), writer.compress(index.data)
            )
        else:
            out[name] = Plain(
                tuple(value.shape), bitmap, None, writer.compress(_kept(packet, name).data)
            )
    return out


def decode(data: Mapping[str, Plain]) -> Packet:
    """The inverse of :func:`encode`."""
    reader, values, masks = zstandard.ZstdDecompressor(), dict[str, Tensor](), dict[str, Tensor]()
    for name, plain in data.items():
        raw = reader.decompress(plain.kept)
        if plain.book is None:
            x = np.frombuffer(raw, np.float32)
        else:
            x = np.frombuffer(plain.book, np.float32).take(np.frombuffer(raw, np.uint8))
        if plain.bitmap is not None:
            packed = np.frombuffer(reader.decompress(plain.bitmap), np.uint8)
            bits = np.unpackbits(packed, count=int(np.prod(plain.shape))).view(np.bool_)
            full = np.zeros(len(bits), np.float32)
            full[np.flatnonzero(bits)] = x  # several times faster than full[bits] = x
            x, masks[name] = full, torch.from_numpy(bits).view(plain.shape)
        elif plain.book is None:
            x = x.copy()  # what comes back may be written to, as with us
        values[name] = torch.from_numpy(x).view(plain.shape)
    return Packet(values, masks or None)


def _kept(packet: Packet, name: str) -> Floats:
    flat: Floats = packet.values[name].numpy().reshape(-1)
    mask = (packet.mask or {}).get(name)
    return flat if mask is None else flat[np.flatnonzero(mask.numpy())]


def _book(x: Floats) -> tuple[Floats, npt.NDArray[np.uint8]]:
    book, index = np.unique(x, return_inverse=True)
    return book, index.astype(np.uint8)
