"""Streams of bytes, bits, symbols and numbers, each in the fewest bytes the tools allow.

The format is specified in docs/wire.md. A stream never states how many items it has: the reader
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
from . import entropy
from .entropy import Bytes, Cursor, StreamMethod, varint

Bits = npt.NDArray[np.bool_]
Words = npt.NDArray[np.unsignedinteger[Any]]
Chunks = list[bytes | memoryview]

LONG = 1 << 13
"""From this many bytes on, the slack of a codec counts."""
SHORT = 1 << 11
"""Numbers of fewer bytes stay raw if the codec has slack: compressing them takes longer to set up
than it saves."""


@dataclass(frozen=True)
class Tools:
    """The coders that a codec may use in addition to raw bytes; ``a | b`` allows the coders of
    both."""

    ans: bool = False
    zstd: bool = False
    planes: bool = False
    slack: float = 0.0
    """By what share a stream of :data:`LONG` bytes or more may be larger if it then decodes faster.
    With any slack, numbers of less than :data:`SHORT` bytes stay raw, and byte planes are left to
    zstandard, which takes a fraction of the entropy coder's time."""
    measure: bool = False
    """Only the lengths of streams are needed: a placeholder stands for what takes time to write."""

    def __or__(self, other: Tools) -> Tools:
        return Tools(
            ans=self.ans or other.ans,
            zstd=self.zstd or other.zstd,
            planes=self.planes or other.planes,
            slack=max(self.slack, other.slack),
            measure=self.measure or other.measure,
        )


def count_bytes(chunks: Chunks) -> int:
    """Count the bytes of a stream's chunks."""
    return sum(map(len, chunks))


# ---- symbols -------------------------------------------------------------------------------------


def write_symbols(x: Bytes, k: int, tools: Tools) -> Chunks:
    """Write numbers below ``k`` as a stream of bytes, raw in the fewest bits each.

    For k = 1 nothing is written.

    zstandard gets 1, 2, 4 or 8 bits each, because it looks for repetition in whole bytes.
    """
    if len(x) == 0 or k < 2:
        return []
    whole_bits = _whole_bits(k)
    packed = _pack(x, whole_bits)
    best = _smallest(x, packed, tools, tools.ans)
    # `best` was compared with raw symbols of 1, 2, 4 or 8 bits. The raw form has 3, 5, 6 or 7 where
    # that is enough, so it may win after all.
    bits = (k - 1).bit_length()
    best_is_raw = best[0][0] == StreamMethod.RAW
    raw_is_smaller = 1 + _packed_size(len(x), bits) < count_bytes(best)
    if not best_is_raw and not raw_is_smaller:
        return best
    if bits == whole_bits:
        return _raw(packed)
    if tools.measure:
        return [_RAW, _placeholder(_packed_size(len(x), bits))]
    return _raw(_pack(x, bits))


def read_symbols(cursor: Cursor, n: int, k: int, what: str) -> Bytes:
    """Read the stream of bytes that :func:`write_symbols` wrote."""
    if n == 0 or k == 1:
        return np.zeros(n, np.uint8)
    x = _read(cursor, n, k, what, raw_bits=(k - 1).bit_length(), framed_bits=_whole_bits(k))
    largest = int(x.max())
    if largest >= k:
        raise WireError(f"{what} contains the index {largest}; the codebook has {k} entries.")
    return x


# ---- bits ----------------------------------------------------------------------------------------


def write_bits(x: Bits, tools: Tools, ones: int | None = None) -> Chunks:
    """Write booleans as a stream of bytes, low bit first; entropy-coded eight at a time.

    Args:
        x: The booleans.
        tools: The allowed coders.
        ones: How many are true, where the caller has counted them.
    """
    n = len(x)
    if n == 0:
        return []
    if ones is None:
        ones = int(np.count_nonzero(x))
    may_compress = tools.ans or tools.zstd
    if may_compress and ones in (0, n):
        return [bytes([StreamMethod.FILL, 255 if ones else 0])]
    packed = np.packbits(x, bitorder="little")
    best = _raw(packed)
    # 9: method, frequency, number of words, and what the last word does not use.
    least_of_ans = 9
    if len(packed) < least_of_ans:
        # No coder can win, and most biases are so short.
        return best
    ans_guess = entropy.flag_bytes(ones, n) + least_of_ans
    if tools.zstd:
        rival = ans_guess if tools.ans else len(packed)
        if _promising(packed, rival):
            best = _framed_or_raw(packed)
    if tools.ans and ans_guess * (1 + _slack(len(packed), tools)) < count_bytes(best):
        # The reader refuses 0, and 2^16 does not fit in two bytes.
        f = min(max(round(ones / n * (1 << entropy.BIT_SCALE)), 1), (1 << entropy.BIT_SCALE) - 1)
        coded = _ans(f.to_bytes(2, "little"), entropy.encode_bit_ans(packed, f), tools)
        best = min(best, coded, key=count_bytes)
    return best


def read_bits(cursor: Cursor, n: int, what: str) -> Bits:
    """Read the stream of bytes that :func:`write_bits` wrote."""
    if n == 0:
        return np.empty(0, np.bool_)
    bytes_wanted = _packed_size(n, 1)
    if cursor.starts(StreamMethod.ANS):
        cursor.method([StreamMethod.ANS], what)
        ones = int.from_bytes(cursor.take(2, what), "little")
        if ones == 0:
            raise WireError(f"the frequency of {what} is 0; it must be in 1..65535.")
        packed = entropy.read_bit_ans(cursor, bytes_wanted, ones, what)
    else:
        packed = _read(cursor, bytes_wanted, 256, what)
    return np.unpackbits(packed, count=n, bitorder="little").view(np.bool_)


# ---- numbers -------------------------------------------------------------------------------------


def write_values(x: Words, tools: Tools) -> Chunks:
    """Write numbers of 1, 2, 4 or 8 bytes as a stream: raw, one frame, or byte planes.

    The lowest plane comes first.
    """
    if len(x) == 0:
        return []
    raw = x.view(np.uint8)
    plain = _raw(raw)
    is_short = len(raw) < SHORT
    # All zeros are exempt: they shrink to a few bytes at no cost.
    if is_short and tools.slack and np.count_nonzero(x):
        return plain
    if not tools.planes or x.itemsize == 1:
        # The entropy coder gains only where all bytes follow one distribution, which the high and
        # low bytes of wider numbers do not.
        return _smallest(raw, raw, tools, tools.ans and x.itemsize == 1)
    split: Chunks = [bytes([StreamMethod.PLANES])]
    # On planes the entropy coder would save a fiftieth of the tensor, and take ten times as long to
    # write and three times as long to read: only without slack.
    ans = tools.ans and not tools.slack
    for i, is_noise in enumerate(_noisy_planes(x)):
        if is_noise and tools.measure:
            split += [_RAW, _placeholder(len(x))]
            continue
        plane = raw[i :: x.itemsize].copy()
        if is_noise:
            split += _raw(plane)
        else:
            split += _smallest(plane, plane, tools, ans, is_own=True)
    return min(plain, split, key=count_bytes)


def read_values(cursor: Cursor, n: int, itemsize: int, what: str) -> Words:
    """Read the bytes that :func:`write_values` wrote, as a fresh array that may be written to."""
    dtype = np.dtype(f"u{itemsize}")
    if n == 0:
        return np.empty(0, dtype)
    if itemsize == 1 or not cursor.starts(StreamMethod.PLANES):
        return _read(cursor, n * itemsize, 256, what).view(dtype)
    cursor.method([StreamMethod.PLANES], what)
    out = np.empty((n, itemsize), np.uint8)
    for i in range(itemsize):
        out[:, i] = _read(cursor, n, 256, what)
    return out.reshape(-1).view(dtype)


# ---- which method --------------------------------------------------------------------------------


_RAW = bytes([StreamMethod.RAW])


def _raw(x: Bytes) -> Chunks:
    return [_RAW, x.data]


def _ans(frequencies: bytes, coder: Any, tools: Tools) -> Chunks:
    """Return the stream of an entropy coder, behind its frequencies."""
    head = bytes([StreamMethod.ANS]) + frequencies
    if tools.measure:
        return [head, _placeholder(entropy.ans_size(coder))]
    return [head, entropy.ans_bytes(coder)]


def _placeholder(length: int) -> memoryview:
    """Return ``length`` bytes, for tools that only measure."""
    # One byte repeated by a stride of 0: it takes no memory, and no container can be made of it.
    return np.ndarray((length,), np.uint8, buffer=b"\0", strides=(0,)).data


def _framed_or_raw(packed: Bytes, is_own: bool = False) -> Chunks:
    """Return one zstandard frame, or the raw bytes where that gains nothing.

    ``is_own``: no other code can write into the bytes, so they may be cached.
    """
    # 4: room for the frame's length, so that the frame with it is never longer than the raw bytes.
    if len(packed) <= entropy.SMALLEST_FRAME + 4:
        return _raw(packed)
    frame = entropy.deflate_cached(packed) if is_own else entropy.deflate(packed.data)
    if len(frame) + 4 < len(packed):
        return [bytes([StreamMethod.ZSTD]), varint(len(frame)), frame]
    return _raw(packed)


def _smallest(x: Bytes, packed: Bytes, tools: Tools, ans: bool, is_own: bool = False) -> Chunks:
    """Return the smallest of the forms the tools allow.

    Args:
        x: The symbols.
        packed: What raw and zstandard write of them.
        tools: The allowed coders.
        ans: Whether to try the entropy coder.
        is_own: As in :func:`_framed_or_raw`.
    """
    if not (tools.ans or tools.zstd):
        return _raw(packed)
    # Comparing the two ends first spares most streams the comparison of all items.
    if x[0] == x[-1] and (x == x[0]).all():
        return [bytes([StreamMethod.FILL, int(x[0])])]
    best = _framed_or_raw(packed, is_own) if tools.zstd else _raw(packed)
    # The coder is slow, so it runs only where its size, which the counts predict, would win: the
    # entropy, about two bytes for each frequency in the table, and nine for method, scale, number
    # of words, and what the last word does not use. At least two symbols occur.
    least_of_ans = 2 * 2 + 9
    if not ans or count_bytes(best) <= least_of_ans:
        return best
    counts = np.bincount(x, minlength=256)
    guess = entropy.entropy_bytes(counts) + 2 * int(np.count_nonzero(counts)) + 9
    if guess * (1 + _slack(len(x), tools)) < count_bytes(best):
        f = entropy.frequencies(counts)
        coded = _ans(entropy.table_bytes(f), entropy.encode_ans(x, f), tools)
        best = min(best, coded, key=count_bytes)
    return best


def _slack(n: int, tools: Tools) -> float:
    return tools.slack if n >= LONG else 0.0


def _promising(packed: Bytes, rival: float) -> bool:
    """Return whether zstandard may come near ``rival`` bytes on a bitmap.

    A long bitmap is judged by a piece of it, since zstandard is slow on noise. One of less than 512
    bytes is promising only where the rival saves nothing: zstandard's tables weigh too much in it.
    """
    piece_size = 1 << 14
    if len(packed) < 4 * piece_size:
        return len(packed) >= 1 << 9 or rival >= len(packed)
    middle = len(packed) // 2
    piece = packed[middle:][:piece_size]
    return len(entropy.deflate(piece.data)) / len(piece) < 1.05 * rival / len(packed)


def _noisy_planes(x: Words) -> list[bool]:
    """Return whether each byte plane of long numbers looks random, as the low bytes of floats do.

    zstandard would find that out too, but slowly. Two of m draws agree with a probability of 1/256
    if all bytes are equally likely, else more often.
    """
    if len(x) < 1 << 12:
        return [False] * x.itemsize
    # One pass through memory for all planes.
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
    """Read ``n`` symbols of ``raw_bits`` bits each if raw, of ``framed_bits`` in a frame."""
    method = cursor.method(
        [StreamMethod.RAW, StreamMethod.ZSTD, StreamMethod.ANS, StreamMethod.FILL], what
    )
    # The copies below make the arrays writable: they become tensors, and must not share memory with
    # the payload.
    if method == StreamMethod.RAW:
        packed = cursor.take(_packed_size(n, raw_bits), what)
        return _unpack(np.frombuffer(packed, np.uint8).copy(), n, raw_bits)
    if method == StreamMethod.ZSTD:
        length = cursor.varint(len(cursor.data), f"the length of {what}")
        frame = cursor.take(length, what)
        content = entropy.inflate(frame, _packed_size(n, framed_bits), what)
        return _unpack(np.frombuffer(content, np.uint8).copy(), n, framed_bits)
    if method == StreamMethod.FILL:
        return np.full(n, cursor.byte(what), np.uint8)
    return entropy.read_ans(cursor, n, entropy.read_table(cursor, symbols, what), what)


# ---- symbols of less than a byte -----------------------------------------------------------------


def _packed_size(n: int, bits: int) -> int:
    """Return the bytes that n symbols take, rounded up."""
    return -(-n * bits // 8)


def _whole_bits(k: int) -> int:
    """Return the fewest bits, 1, 2, 4 or 8, for numbers below k."""
    return next(bits for bits in (1, 2, 4, 8) if k <= 1 << bits)


def _pack(x: Bytes, bits: int) -> Bytes:
    """Pack symbols into ``bits`` bits each, the first one in the lowest bits."""
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
    """Return for each byte its symbols, joined into one wider number: one lookup gives them all."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    symbols = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    table: Words = symbols.view(f"u{len(shifts)}").reshape(-1)
    return table
