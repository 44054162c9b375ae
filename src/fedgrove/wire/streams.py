"""Streams of bytes, bits, symbols and numbers, each in the fewest bytes the tools allow.

The format is specified in docs/wire.md. A stream never states how many items it holds: the reader
knows that from the tensor's shape before it reads, so no length found in the bytes decides how much
is allocated. A stream of no items is no bytes at all.
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
    SMALLEST_FRAME,
    Bytes,
    Cursor,
    Method,
    ans_size,
    bit_ans_size,
    deflate,
    deflate_once,
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
    """What a codec may use besides raw bytes.

    ``slack``: by what share a stream of ``long`` bytes or more may be larger if it then decodes
    faster. With any slack, numbers of less than ``short`` bytes stay raw, and byte planes are left
    to zstandard, which takes a fraction of the entropy coder's time. ``measure``: only the lengths
    of streams are wanted; of what would take time to write they have a stand-in of its length.
    """

    ans: bool = False
    zstd: bool = False
    planes: bool = False
    slack: float = 0.0
    long: int = 1 << 13
    short: int = 1 << 11
    measure: bool = False


def size(chunks: Chunks) -> int:
    """How many bytes the chunks hold."""
    return sum(map(len, chunks))


# ---- bytes ---------------------------------------------------------------------------------------


def write_bytes(x: Bytes, tools: Tools) -> Chunks:
    """Bytes: raw, one zstandard frame, entropy-coded by their frequencies, or one byte repeated."""
    if len(x) == 0:
        return []
    return _smallest(x, x, tools, tools.ans)


def read_bytes(cursor: Cursor, n: int, what: str) -> Bytes:
    """The inverse of :func:`write_bytes`."""
    if n == 0:
        return np.empty(0, np.uint8)
    return _read(cursor, n, 256, what)


# ---- symbols -------------------------------------------------------------------------------------


def write_symbols(x: Bytes, k: int, tools: Tools) -> Chunks:
    """Numbers below ``k``, raw in the fewest bits each; for k = 1 nothing is written.

    zstandard gets 1, 2, 4 or 8 bits each, because it looks for repetition in whole bytes.
    """
    if len(x) == 0 or k < 2:
        return []
    whole_bits = _whole_bits(k)
    packed = _pack(x, whole_bits)
    best = _smallest(x, packed, tools, tools.ans)
    # `best` was chosen beside raw symbols of 1, 2, 4 or 8 bits. The raw form has 3, 5, 6 or 7 where
    # that is enough, so it may win after all.
    bits = (k - 1).bit_length()
    best_is_raw = best[0][0] == Method.RAW
    raw_is_smaller = 1 + _packed_size(len(x), bits) < size(best)
    if not best_is_raw and not raw_is_smaller:
        return best
    if bits == whole_bits:
        return _raw(packed)
    if tools.measure:
        return _stand_in(Method.RAW, _packed_size(len(x), bits))
    return _raw(_pack(x, bits))


def read_symbols(cursor: Cursor, n: int, k: int, what: str) -> Bytes:
    """The inverse of :func:`write_symbols`."""
    if n == 0 or k == 1:
        return np.zeros(n, np.uint8)
    x = _read(cursor, n, k, what, raw_bits=(k - 1).bit_length(), framed_bits=_whole_bits(k))
    largest = int(x.max())
    if largest >= k:
        raise WireError(f"{what} holds the index {largest}; the codebook has {k} entries.")
    return x


# ---- bits ----------------------------------------------------------------------------------------


def write_bits(x: Bits, tools: Tools, ones: int | None = None) -> Chunks:
    """Booleans, eight to a byte, low bit first; entropy-coded eight at a time with one frequency.

    ``ones``: how many are true, where the caller has counted them.
    """
    n = len(x)
    if n == 0:
        return []
    if ones is None:
        ones = int(np.count_nonzero(x))
    may_compress = tools.ans or tools.zstd
    if may_compress and ones in (0, n):
        return [bytes([Method.FILL, 255 if ones else 0])]
    packed = np.packbits(x, bitorder="little")
    best = _raw(packed)
    # 9: method, frequency, number of words, and what the last word does not use.
    least_of_ans = 9
    if len(packed) < least_of_ans:
        # No coder can win, and most biases are so short.
        return best
    ans_guess = flag_bytes(ones, n) + least_of_ans
    if tools.zstd:
        rival = ans_guess if tools.ans else len(packed)
        if _promising(packed, rival):
            best = _framed_or_raw(packed)
    if tools.ans and ans_guess * (1 + _slack(len(packed), tools)) < size(best):
        # The reader refuses 0, and 2^16 does not fit in two bytes.
        f = min(max(round(ones / n * (1 << BIT_SCALE)), 1), (1 << BIT_SCALE) - 1)
        if tools.measure:
            coded = _stand_in(Method.ANS, 2 + bit_ans_size(packed, f))
        else:
            coded = [bytes([Method.ANS]) + f.to_bytes(2, "little"), write_bit_ans(packed, f)]
        best = min(best, coded, key=size)
    return best


def read_bits(cursor: Cursor, n: int, what: str) -> Bits:
    """The inverse of :func:`write_bits`."""
    if n == 0:
        return np.empty(0, np.bool_)
    bytes_wanted = _packed_size(n, 1)
    if cursor.starts(Method.ANS):
        cursor.method([Method.ANS], what)
        ones = int.from_bytes(cursor.take(2, what), "little")
        if ones == 0:
            raise WireError(f"the frequency of {what} is 0; it must be in 1..65535.")
        packed = read_bit_ans(cursor, bytes_wanted, ones, what)
    else:
        packed = _read(cursor, bytes_wanted, 256, what)
    return np.unpackbits(packed, count=n, bitorder="little").view(np.bool_)


# ---- numbers -------------------------------------------------------------------------------------


def write_values(x: Words, tools: Tools) -> Chunks:
    """Numbers of 1, 2, 4 or 8 bytes: raw, one frame, or split into byte planes, lowest first."""
    if len(x) == 0:
        return []
    raw = x.view(np.uint8)
    plain = _raw(raw)
    is_short = len(raw) < tools.short
    # All zeros are exempt: they shrink to a few bytes at no cost.
    if is_short and tools.slack and np.count_nonzero(x):
        return plain
    if not tools.planes or x.itemsize == 1:
        # The entropy coder gains only where all bytes follow one distribution, which the high and
        # low bytes of wider numbers do not.
        return _smallest(raw, raw, tools, tools.ans and x.itemsize == 1)
    split: Chunks = [bytes([Method.PLANES])]
    # On planes the entropy coder would save a fiftieth of the tensor, and take ten times as long to
    # write and three times as long to read: only without slack.
    ans = tools.ans and not tools.slack
    for i, is_noise in enumerate(_noisy_planes(x)):
        if is_noise and tools.measure:
            split += _stand_in(Method.RAW, len(x))
            continue
        plane = raw[i :: x.itemsize].copy()
        if is_noise:
            split += _raw(plane)
        else:
            split += _smallest(plane, plane, tools, ans, is_own=True)
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


# ---- which method --------------------------------------------------------------------------------


_RAW = bytes([Method.RAW])


def _raw(x: Bytes) -> Chunks:
    return [_RAW, x.data]


def _stand_in(method: Method, length: int) -> Chunks:
    """A stream of so many bytes behind its method, for tools that only measure."""
    # The same byte again and again: it takes no memory, and no container can be made of it.
    return [bytes([method]), np.ndarray((length,), np.uint8, buffer=b"\0", strides=(0,)).data]


def _framed_or_raw(packed: Bytes, is_own: bool = False) -> Chunks:
    """One zstandard frame, or the raw bytes where that gains nothing.

    ``is_own``: nobody else can write into the bytes, so they may be remembered.
    """
    # 4: room for the frame's length, so that the frame with it is never longer than the raw bytes.
    if len(packed) <= SMALLEST_FRAME + 4:
        return _raw(packed)
    frame = deflate_once(packed) if is_own else deflate(packed.data)
    if len(frame) + 4 < len(packed):
        return [bytes([Method.ZSTD]), varint(len(frame)), frame]
    return _raw(packed)


def _smallest(x: Bytes, packed: Bytes, tools: Tools, ans: bool, is_own: bool = False) -> Chunks:
    """The smallest of the forms the tools allow.

    ``packed`` is what raw and zstandard write of ``x``; ``ans``: whether to try the entropy coder;
    ``is_own``: as in :func:`_framed_or_raw`.
    """
    if not (tools.ans or tools.zstd):
        return _raw(packed)
    # Comparing the two ends first spares most streams the comparison of all items.
    if x[0] == x[-1] and (x == x[0]).all():
        return [bytes([Method.FILL, int(x[0])])]
    best = _framed_or_raw(packed, is_own) if tools.zstd else _raw(packed)
    # The coder is slow, so it runs only where its size, which the counts give away, would win: the
    # entropy, about two bytes for each frequency in the table, and nine for method, scale, number
    # of words, and what the last word does not use. At least two symbols occur.
    least_of_ans = 2 * 2 + 9
    if not ans or size(best) <= least_of_ans:
        return best
    counts = np.bincount(x, minlength=256)
    guess = entropy_bytes(counts) + 2 * int(np.count_nonzero(counts)) + 9
    if guess * (1 + _slack(len(x), tools)) < size(best):
        f = frequencies(counts)
        table = table_bytes(f)
        if tools.measure:
            coded = _stand_in(Method.ANS, len(table) + ans_size(x, f))
        else:
            coded = [bytes([Method.ANS]), table, write_ans(x, f)]
        best = min(best, coded, key=size)
    return best


def _slack(n: int, tools: Tools) -> float:
    return tools.slack if n >= tools.long else 0.0


def _promising(packed: Bytes, rival: float) -> bool:
    """Whether zstandard may come near ``rival`` bytes on a bitmap.

    A long bitmap is judged by a piece of it, since zstandard is slow on noise. One of less than 512
    bytes is promising only where the rival saves nothing: zstandard's tables weigh too much in it.
    """
    piece_size = 1 << 14
    if len(packed) < 4 * piece_size:
        return len(packed) >= 1 << 9 or rival >= len(packed)
    middle = len(packed) // 2
    piece = packed[middle:][:piece_size]
    return len(deflate(piece.data)) / len(piece) < 1.05 * rival / len(packed)


def _noisy_planes(x: Words) -> list[bool]:
    """Whether each byte plane of long numbers looks random, as the low bytes of floats do.

    zstandard would find that out too, but slowly. Two of m draws agree with a probability of 1/256
    if all bytes are equally likely, else more often.
    """
    if len(x) < 1 << 12:
        return [False] * x.itemsize
    # One way through memory for all planes.
    sample = x[:: len(x) >> 10].copy()
    m = len(sample)
    sample_bytes = sample.view(np.uint8)
    noisy = []
    for i in range(x.itemsize):
        counts = np.bincount(sample_bytes[i :: x.itemsize])
        # Ordered pairs that agree: sum c (c - 1) = sum c^2 - m, out of m (m - 1). The 8 % are for
        # chance.
        agreeing = int(counts @ counts) - m
        noisy.append(256 * agreeing <= 1.08 * m * (m - 1))
    return noisy


def _read(
    cursor: Cursor, n: int, symbols: int, what: str, raw_bits: int = 8, framed_bits: int = 8
) -> Bytes:
    """``n`` symbols, which take ``raw_bits`` bits each if raw and ``framed_bits`` in a frame."""
    method = cursor.method([Method.RAW, Method.ZSTD, Method.ANS, Method.FILL], what)
    # The copies below make the arrays writable: they become tensors, and must not share memory with
    # the payload.
    if method == Method.RAW:
        packed = cursor.take(_packed_size(n, raw_bits), what)
        return _unpack(np.frombuffer(packed, np.uint8).copy(), n, raw_bits)
    if method == Method.ZSTD:
        length = cursor.varint(len(cursor.data), f"the length of {what}")
        frame = cursor.take(length, what)
        content = inflate(frame, _packed_size(n, framed_bits), what)
        return _unpack(np.frombuffer(content, np.uint8).copy(), n, framed_bits)
    if method == Method.FILL:
        return np.full(n, cursor.byte(what), np.uint8)
    return read_ans(cursor, n, read_table(cursor, symbols, what), what)


# ---- symbols of less than a byte -----------------------------------------------------------------


def _packed_size(n: int, bits: int) -> int:
    """The bytes that n symbols take, rounded up."""
    return -(-n * bits // 8)


def _whole_bits(k: int) -> int:
    """The fewest bits for numbers below k of which a byte holds a whole number."""
    return next(bits for bits in (1, 2, 4, 8) if k <= 1 << bits)


def _pack(x: Bytes, bits: int) -> Bytes:
    """``bits`` bits each, the first symbol in the lowest bits."""
    if bits == 8:
        return x
    if bits == 1:
        return np.packbits(x, bitorder="little")
    if 8 % bits:
        flags = np.unpackbits(x[:, None], axis=1, count=bits, bitorder="little")
        return np.packbits(flags.reshape(-1), bitorder="little")
    # Where symbols do not straddle bytes, those of a byte are one wider number, and shifting them
    # together is faster than going through single bits.
    per_byte = 8 // bits
    left_over = -len(x) % per_byte
    if left_over:
        x = np.concatenate([x, np.zeros(left_over, np.uint8)])
    wide = np.ascontiguousarray(x).view(f"<u{per_byte}")
    packed = wide.copy()
    for i in range(1, per_byte):
        packed |= wide >> wide.dtype.type(i * (8 - bits))
    # The lowest byte has them all.
    return packed.astype(np.uint8)


def _unpack(packed: Bytes, n: int, bits: int) -> Bytes:
    """The inverse of :func:`_pack`."""
    if bits == 8:
        return packed
    if 8 % bits:
        flags = np.unpackbits(packed, count=n * bits, bitorder="little").reshape(n, bits)
        return np.packbits(flags, axis=1, bitorder="little").reshape(-1)
    return _symbols_by_byte(bits).take(packed).view(np.uint8)[:n]


@lru_cache
def _symbols_by_byte(bits: int) -> Words:
    """For each byte the symbols in it, joined into one wider number: one lookup gives them all."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    symbols = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    table: Words = symbols.view(f"u{len(shifts)}").reshape(-1)
    return table
