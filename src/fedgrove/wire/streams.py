"""Streams of bytes, bits, symbols and numbers, each written in the fewest bytes the tools allow (docs/wire.md).

A stream never states how many items it holds: the reader knows that from the tensor's shape before it reads, so no
length found in the bytes decides how much is allocated. A stream of no items is no bytes at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from .entropy import (
    BIT_SCALE,
    Bytes,
    Cursor,
    Method,
    deflate,
    entropy_bytes,
    flag_bytes,
    frequencies,
    inflate,
    read_ans,
    read_bit_ans,
    read_table,
    table_bytes,
    varint,
    write_ans,
    write_bit_ans,
)

Bits = npt.NDArray[np.bool_]
Words = npt.NDArray[np.unsignedinteger[Any]]
Chunks = list[bytes | memoryview]


@dataclass(frozen=True)
class Tools:
    """What a codec may use beside raw bytes.

    ``slack``: how much larger a ``long`` stream may be to decode faster. With any slack, numbers of less than
    ``short`` bytes stay raw, and byte planes are left to zstandard, which takes a fraction of the time.
    """

    ans: bool = False
    zstd: bool = False
    planes: bool = False
    slack: float = 0.0
    long: int = 1 << 13
    short: int = 1 << 11


def size(chunks: Chunks) -> int:
    """How many bytes the chunks hold."""
    return sum(len(c) for c in chunks)


def write_bytes(x: Bytes, tools: Tools) -> Chunks:
    """Bytes: raw, one zstandard frame, entropy-coded with their own frequencies, or one byte repeated."""
    return _smallest(x, x, tools, tools.ans) if len(x) else []


def read_bytes(cursor: Cursor, n: int, what: str) -> Bytes:
    """The inverse of :func:`write_bytes`."""
    return _read(cursor, n, 256, what) if n else np.empty(0, np.uint8)


def write_symbols(x: Bytes, k: int, tools: Tools) -> Chunks:
    """Numbers below ``k``, raw in the fewest bits each; for k = 1 nothing is written.

    zstandard gets 1, 2, 4 or 8 bits each: it looks for what repeats in whole bytes.
    """
    if not len(x) or k < 2:
        return []
    best, bits = _smallest(x, _pack(x, _width(k)), tools, tools.ans), (k - 1).bit_length()
    return (
        _raw(_pack(x, bits))
        if best[0][0] == Method.RAW or 1 + _bytes(len(x), bits) < size(best)
        else best
    )


def read_symbols(cursor: Cursor, n: int, k: int, what: str) -> Bytes:
    """The inverse of :func:`write_symbols`."""
    if n == 0 or k == 1:
        return np.zeros(n, np.uint8)
    x = _read(cursor, n, k, what, (k - 1).bit_length(), _width(k))
    if int(x.max()) >= k:
        raise WireError(f"{what} holds the index {int(x.max())}; the codebook has {k} entries.")
    return x


def write_bits(x: Bits, tools: Tools, ones: int | None = None) -> Chunks:
    """Booleans, eight to a byte, low bit first; entropy-coded eight at a time with one frequency.

    ``ones``: how many are true, where that is known.
    """
    if not len(x):
        return []
    ones, n = int(np.count_nonzero(x)) if ones is None else ones, len(x)
    if (tools.ans or tools.zstd) and ones in (0, n):
        return [bytes([Method.FILL, 255 if ones else 0])]
    packed = np.packbits(x, bitorder="little")
    best: Chunks = [bytes([Method.RAW]), packed.data]
    guess = flag_bytes(ones, n) + 9
    if tools.zstd and _promising(packed, guess if tools.ans else len(packed)):
        framed = deflate(packed.data)
        if len(framed) + 4 < len(packed):
            best = [bytes([Method.ZSTD]), varint(len(framed)), framed]
    if tools.ans and guess * (1 + _slack(len(packed), tools)) < size(best):
        f = min(max(round(ones / n * (1 << BIT_SCALE)), 1), (1 << BIT_SCALE) - 1)
        head = bytes([Method.ANS]) + f.to_bytes(2, "little")
        best = min(best, [head, write_bit_ans(packed, f)], key=size)
    return best


def read_bits(cursor: Cursor, n: int, what: str) -> Bits:
    """The inverse of :func:`write_bits`."""
    if n == 0:
        return np.empty(0, np.bool_)
    if cursor.starts(Method.ANS):
        cursor.method([Method.ANS], what)
        ones = int.from_bytes(cursor.take(2, what), "little")
        if not ones:
            raise WireError(f"the frequency of {what} is 0; it must be in 1..65535.")
        packed = read_bit_ans(cursor, -(-n // 8), ones, what)
    else:
        packed = _read(cursor, -(-n // 8), 256, what)
    return np.unpackbits(packed, count=n, bitorder="little").view(np.bool_)


def write_values(x: Words, tools: Tools) -> Chunks:
    """Numbers of 1, 2, 4 or 8 bytes: raw, one frame, or a stream of bytes for each of their bytes, low byte first."""
    if not len(x):
        return []
    raw = x.view(np.uint8)
    plain: Chunks = [bytes([Method.RAW]), raw.data]
    if len(raw) < tools.short and tools.slack and raw.any():
        return plain
    if not tools.planes or x.itemsize == 1:
        return _smallest(raw, raw, tools, tools.ans and x.itemsize == 1)
    planes = np.ascontiguousarray(raw.reshape(-1, x.itemsize).T)
    split: Chunks = [bytes([Method.PLANES])]
    for plane in planes:
        # The coder would save a fiftieth of the tensor, take ten times as long to write it and three to read it.
        split += (
            _raw(plane)
            if _noise(plane)
            else _smallest(plane, plane, tools, tools.ans and not tools.slack)
        )
    return min(plain, split, key=size)


def read_values(cursor: Cursor, n: int, itemsize: int, what: str) -> Words:
    """The inverse of :func:`write_values`; a fresh array that may be written to."""
    dtype = np.dtype(f"u{itemsize}")
    if n == 0:
        return np.empty(0, dtype)
    if itemsize == 1 or not cursor.starts(Method.PLANES):
        return read_bytes(cursor, n * itemsize, what).view(dtype)
    cursor.method([Method.PLANES], what)
    out = np.empty((n, itemsize), np.uint8)
    for i in range(itemsize):
        out[:, i] = read_bytes(cursor, n, what)
    return out.reshape(-1).view(dtype)


def _raw(x: Bytes) -> Chunks:
    return [bytes([Method.RAW]), x.data]


def _smallest(x: Bytes, packed: Bytes, tools: Tools, ans: bool) -> Chunks:
    """The smallest of the forms the tools allow; ``packed`` is what raw and zstandard write of ``x``."""
    best = _raw(packed)
    if not (tools.ans or tools.zstd):
        return best
    if x[0] == x[-1] and (x == x[0]).all():
        return [bytes([Method.FILL, int(x[0])])]
    if tools.zstd:
        framed = deflate(packed.data)
        if len(framed) + 4 < len(packed):
            best = [bytes([Method.ZSTD]), varint(len(framed)), framed]
    if not ans:
        return best
    counts = np.bincount(x, minlength=256)
    guess = entropy_bytes(counts) + 2 * int(np.count_nonzero(counts)) + 9
    if guess * (1 + _slack(len(x), tools)) < size(best):
        f = frequencies(counts)
        best = min(best, [bytes([Method.ANS]), table_bytes(f), write_ans(x, f)], key=size)
    return best


def _slack(n: int, tools: Tools) -> float:
    return tools.slack if n >= tools.long else 0.0


def _promising(packed: Bytes, rival: float) -> bool:
    """Whether zstandard may come near the rival: tried on a piece of a long stream, since on noise it is slow.

    In a short one its tables weigh too much.
    """
    n = 1 << 14
    if len(packed) < 4 * n:
        return len(packed) >= 1 << 9 or rival >= len(packed)
    piece = packed[len(packed) // 2 :][:n]
    return len(deflate(piece.data)) / len(piece) < 1.05 * rival / len(packed)


def _noise(x: Bytes) -> bool:
    """Whether a sample of a long plane looks like chance, as the low bytes of floats do: zstandard finds out slowly.

    Two of m draws agree with a probability of 1/256 if all bytes are equally likely, else more often.
    """
    if len(x) < 1 << 12:
        return False
    sample = x[:: len(x) >> 10]
    counts, m = np.bincount(sample), len(sample)
    return 256 * (int(counts @ counts) - m) <= 1.08 * m * (m - 1)


def _read(cursor: Cursor, n: int, symbols: int, what: str, bits: int = 8, width: int = 8) -> Bytes:
    """``n`` symbols of ``bits`` bits each if they are raw, ``width`` if framed."""
    method = cursor.method([Method.RAW, Method.ZSTD, Method.ANS, Method.FILL], what)
    if method == Method.RAW:
        return _unpack(np.frombuffer(cursor.take(_bytes(n, bits), what), np.uint8).copy(), n, bits)
    if method == Method.ZSTD:
        frame = cursor.take(cursor.varint(len(cursor.data), f"the length of {what}"), what)
        return _unpack(
            np.frombuffer(inflate(frame, _bytes(n, width), what), np.uint8).copy(), n, width
        )
    if method == Method.FILL:
        return np.full(n, cursor.byte(what), np.uint8)
    return read_ans(cursor, n, read_table(cursor, symbols, what), what)


def _bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def _width(k: int) -> int:
    return next(w for w in (1, 2, 4, 8) if k <= 1 << w)


def _pack(x: Bytes, width: int) -> Bytes:
    """``width`` bits each, the first in the low bits."""
    if width == 8:
        return x
    if 8 % width:
        flags = np.unpackbits(x[:, None], axis=1, count=width, bitorder="little")
        return np.packbits(flags.reshape(-1), bitorder="little")
    per = 8 // width
    packed = np.zeros(-(-len(x) // per), np.uint8)
    for i in range(per):
        piece = x[i::per]
        packed[: len(piece)] |= piece << np.uint8(i * width)
    return packed


def _unpack(packed: Bytes, n: int, width: int) -> Bytes:
    if width == 8:
        return packed
    if 8 % width:
        flags = np.unpackbits(packed, count=n * width, bitorder="little").reshape(n, width)
        return np.packbits(flags, axis=1, bitorder="little").reshape(-1)
    return _unpacked(width).take(packed).view(np.uint8)[:n]


@lru_cache
def _unpacked(width: int) -> Words:
    """The items of every byte, those of one byte as one number."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    items = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << width) - 1)
    found: Words = items.view(f"u{len(shifts)}").reshape(-1)
    return found
