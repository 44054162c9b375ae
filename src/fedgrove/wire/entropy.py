"""The coders under the streams: zstandard, read safely, and an asymmetric numeral system (ANS).

Sender and receiver must use the same probabilities to the last bit; otherwise the entropy coder
decodes to wrong symbols without an error. So integer frequencies are sent, never floats
(docs/wire.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import constriction
import numpy as np
import numpy.typing as npt
import zstandard

from ..errors import WireError

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

# zstandard's level. Level 3 gains 0.1 % on weights, loses on masks, and takes longer.
LEVEL = 1
# No frame of anything is shorter: magic (4), flags (1), content size (1), and a block of its header
# (3) and at least a byte.
SMALLEST_FRAME = 10
# Frames of contents of this many bytes, from and to, are cached, 32 of them per thread: 8 MiB at
# most. A shorter one is made as fast as it is looked up.
CACHED_SIZES = (1 << 12, 1 << 18)
MOST_FRAMES = 32
# The frequency of a 1 among bits is sent in 16 bits ...
BIT_SCALE = 16
# ... and the 256 bytes that eight such bits can make get frequencies that sum to 2^22.
BYTE_SCALE = 22
# How many ones each byte has.
ONES = np.array([b.bit_count() for b in range(256)])


class StreamMethod(IntEnum):
    """How the items of one stream are written; the stream's first byte."""

    RAW = 0
    ZSTD = 1
    ANS = 2
    FILL = 3
    PLANES = 4


class Cursor:
    """A position in received bytes; every step is checked against what is left."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at
        # The methods of the streams read so far, which `explain` reports.
        self.methods: list[StreamMethod] = []

    def take(self, n: int, what: str) -> memoryview:
        """Return the next ``n`` received bytes; ``what`` they are goes into the error message."""
        left = len(self.data) - self.at
        if n > left:
            raise WireError(f"the payload ends inside {what}: {n} bytes expected, {left} left.")
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self, what: str) -> int:
        """Return the next received byte."""
        return self.take(1, what)[0]

    def method(self, allowed: Sequence[StreamMethod], what: str) -> StreamMethod:
        """Return the next byte as the method of a stream, which is recorded in ``methods``."""
        code = self.byte(what)
        if code not in allowed:
            codes = ", ".join(map(str, allowed))
            raise WireError(f"{what} is written by method {code}; allowed there: {codes}.")
        method = StreamMethod(code)
        self.methods.append(method)
        return method

    def starts(self, method: StreamMethod) -> bool:
        """Return whether the next stream is written by ``method``; nothing is read."""
        # A slice, because at the end of the data it is empty where an index would raise.
        return self.data[self.at : self.at + 1] == bytes([method])

    def varint(self, limit: int, what: str) -> int:
        """Return the next varint of received bytes, low bits first; none above ``limit``."""
        value = 0
        for shift in range(0, 63, 7):
            b = self.byte(what)
            value |= (b & 127) << shift
            is_last = b < 128
            if is_last:
                if value > limit:
                    raise WireError(f"{what} is {value}; at most {limit} is allowed.")
                return value
        raise WireError(f"{what} is longer than 63 bits.")


def varint(value: int) -> bytes:
    """Write a number as varint bytes: seven bits to a byte, low bits first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---- zstandard -----------------------------------------------------------------------------------


class _Zstd(threading.local):
    """A compressor and a decompressor per thread: neither may be shared between threads.

    They are kept because making one takes as long as compressing a small tensor.
    """

    def __init__(self) -> None:
        self.writer = zstandard.ZstdCompressor(level=LEVEL)
        self.reader = zstandard.ZstdDecompressor()
        # Contents and their frames, by the length and the first bytes.
        self.recent: dict[tuple[int, bytes], tuple[Bytes, bytes]] = {}


_ZSTD = _Zstd()


def deflate(data: bytes | memoryview) -> bytes:
    """Compress to one zstandard frame that states its content size."""
    return _ZSTD.writer.compress(data)


def deflate_cached(content: Bytes) -> bytes:
    """Compress bytes that are never written into, or look up the frame of equal ones.

    Clients that are sent different parts of a model get some of its layers in common, each its own
    copy. To compare contents takes a fiftieth of the time to compress them.
    """
    if not CACHED_SIZES[0] <= len(content) <= CACHED_SIZES[1]:
        return deflate(content.data)
    recent = _ZSTD.recent
    # Different contents seldom have the same first bytes, so these tell most of them apart.
    key = (len(content), content[:64].tobytes())
    found = recent.pop(key, None)
    if found is not None and np.array_equal(found[0], content):
        frame = found[1]
    else:
        frame = deflate(content.data)
    # At the end: the frame that was not used for longest is dropped first.
    recent[key] = (content, frame)
    if len(recent) > MOST_FRAMES:
        del recent[next(iter(recent))]
    return frame


def inflate(frame: memoryview, n: int, what: str) -> bytes:
    """Decompress the ``n`` bytes of a frame.

    A frame that states another size, or none, is refused before anything is allocated.
    """
    try:
        stated = zstandard.get_frame_parameters(frame).content_size
        if stated != n:
            no_size = stated >= zstandard.CONTENTSIZE_UNKNOWN or stated < 0
            claim = "no size" if no_size else f"{stated} bytes"
            raise WireError(f"the frame of {what} states {claim}; exactly {n} bytes are expected.")
        # With the size stated, the output is one block of n bytes and no window is allocated; a
        # frame with more than it states is a ZstdError.
        out = _ZSTD.reader.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"the frame of {what} cannot be read: {error}.") from error
    if len(out) != n:
        raise WireError(f"the frame of {what} contains {len(out)} bytes; {n} are expected.")
    return out


# ---- frequencies ---------------------------------------------------------------------------------


def frequencies(counts: Counts) -> Counts:
    """Scale symbol counts for entropy coding to integers that sum to a power of two.

    A symbol that was counted gets at least 1.

    f_i = 1 + floor(c_i (T - u) / N) for the u symbols that occur; what is left of T goes to the
    most frequent symbol.

    >>> frequencies(np.array([3, 0, 1])).tolist()
    [768, 0, 256]
    """
    n = int(counts.sum())
    used = counts > 0
    # A larger T is more exact but has longer frequencies in the table: it grows with N, from 2^10
    # to 2^16.
    total = 1 << min(max(n.bit_length(), 10), 16)
    f: Counts = used + counts * (total - int(np.count_nonzero(used))) // n
    f[f.argmax()] += total - int(f.sum())
    return f


def table_bytes(f: Counts) -> bytes:
    """Write a coder's table as bytes: the scale, then the frequencies.

    A 0 is followed by how many more zeros follow.
    """
    used = np.flatnonzero(f).tolist()
    out = bytearray([int(f.sum()).bit_length() - 1])
    last = -1
    for symbol, frequency in zip(used, f[used].tolist(), strict=True):
        zeros = symbol - last - 1
        if zeros:
            out += b"\0" + varint(zeros - 1)
        out += varint(frequency)
        last = symbol
    return bytes(out)


def read_table(cursor: Cursor, symbols: int, what: str) -> Counts:
    """The inverse of :func:`table_bytes`; the table ends where its sum reaches 2 to the scale."""
    left = 1 << cursor.varint(16, f"the scale of {what}")
    f = np.zeros(symbols, np.int64)
    symbol = 0
    while left:
        if symbol >= symbols:
            raise WireError(f"the frequencies of {what} name more than {symbols} symbols.")
        # No frequency may exceed what is left of the sum, so the sum comes out exactly.
        frequency = cursor.varint(left, f"a frequency of {what}")
        f[symbol] = frequency
        left -= frequency
        symbol += 1
        if frequency == 0:
            symbol += cursor.varint(symbols, f"a run of zeros of {what}")
    return f


def bit_frequencies(ones: int) -> Counts:
    """Return the frequencies of a byte of eight independent bits, each 1 with ``ones`` of 2^16.

    W_j = max(1, ones^j (2^16 - ones)^(8-j) >> 106) for a byte with j ones, in exact integers; byte
    0 or 255, the likelier, gets the rest of 2^22.
    """
    zeros = (1 << BIT_SCALE) - ones
    shift = 8 * BIT_SCALE - BYTE_SCALE
    by_ones = [max(1, (ones**j * zeros ** (8 - j)) >> shift) for j in range(9)]
    f: Counts = np.array(by_ones, np.int64)[ONES]
    likelier = 255 if ones > zeros else 0
    f[likelier] += (1 << BYTE_SCALE) - int(f.sum())
    return f


def entropy_bytes(counts: Counts) -> float:
    """Return the empirical bound of a stream in bytes: -sum c_i log2(c_i / N) / 8.

    >>> entropy_bytes(np.array([8, 8]))
    2.0
    """
    # -sum c_i log2(c_i / N) = N log2 N - sum c_i log2 c_i, where c_i = 0 adds nothing. Rounding may
    # take the difference below zero.
    n = int(counts.sum())
    within = float((counts * np.log2(np.maximum(counts, 1))).sum())
    return max(0.0, _n_log_n(n) - within) / 8


def flag_bytes(ones: int, n: int) -> float:
    """Return the same bound for ``n`` bits of which ``ones`` are 1.

    >>> flag_bytes(8, 16)
    2.0
    """
    return max(0.0, _n_log_n(n) - _n_log_n(ones) - _n_log_n(n - ones)) / 8


def _n_log_n(n: int) -> float:
    return n * math.log2(n) if n else 0.0


# ---- the entropy coder ---------------------------------------------------------------------------


def _model(f: Counts) -> Any:
    """Return the entropy coder's model of frequencies."""
    # f / sum is exact, since the sum is a power of two, and so is every product that constriction
    # forms from it: both sides have the same probabilities to the last bit on any machine.
    return constriction.stream.model.Categorical(f / f.sum(), perfect=False, lazy=False)


@lru_cache(maxsize=64)
def _bit_model(ones: int) -> Any:
    # Layers of one density share a model, and making it takes as long as coding a small mask.
    return _model(bit_frequencies(ones))


def encode_ans(symbols: Bytes, f: Counts) -> Any:
    """Encode symbols of these frequencies, for :func:`ans_bytes` or :func:`ans_size`."""
    # The coder sees only the symbols that occur, by their rank: one with frequency 0 would still
    # take a share of the probabilities.
    used = np.flatnonzero(f)
    if _ranks_are_symbols(used):
        return _encode(symbols, _model(f[used]))
    rank = np.zeros(256, np.int32)
    rank[used] = np.arange(len(used), dtype=np.int32)
    return _encode(rank.take(symbols), _model(f[used]))


def encode_bit_ans(packed: Bytes, ones: int) -> Any:
    """Encode packed bits, each 1 with frequency ``ones`` of 2^16, as :func:`encode_ans` does."""
    return _encode(packed, _bit_model(ones))


def _encode(ranks: npt.NDArray[Any], model: Any) -> Any:
    # The coder is a stack: written in reverse, the symbols are read in order.
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(ranks.astype(np.int32, copy=False), model)
    return coder


def _ranks_are_symbols(used: Counts) -> bool:
    """Return whether the symbols that occur are 0, 1, 2, ... without a gap."""
    return bool(used[-1] == len(used) - 1)


def ans_bytes(coder: Any) -> bytes:
    """Return the words of a coder, preceded by their number."""
    words: npt.NDArray[np.uint32] = coder.get_compressed().astype("<u4")
    return varint(len(words)) + words.tobytes()


def ans_size(coder: Any) -> int:
    """Return how many bytes :func:`ans_bytes` takes."""
    words: int = coder.num_words()
    return len(varint(words)) + 4 * words


def read_ans(cursor: Cursor, n: int, f: Counts, what: str) -> Bytes:
    """Read the ``n`` symbols of :func:`encode_ans`; words left over are refused."""
    used = np.flatnonzero(f)
    if len(used) < 2:
        raise WireError(f"the frequencies of {what} name fewer than two symbols.")
    ranks = _read(cursor, n, _model(f[used]), what)
    if _ranks_are_symbols(used):
        return ranks.astype(np.uint8)
    return used.astype(np.uint8).take(ranks)


def read_bit_ans(cursor: Cursor, n: int, ones: int, what: str) -> Bytes:
    """Read the ``n`` packed bytes of :func:`encode_bit_ans`."""
    return _read(cursor, n, _bit_model(ones), what).astype(np.uint8)


def _read(cursor: Cursor, n: int, model: Any, what: str) -> npt.NDArray[np.int32]:
    """Read the symbols of an entropy-coded stream."""
    # A symbol takes at most 24 bits, less than a word, and the coder's state takes two words: a
    # well-formed stream has at most n + 2.
    count = cursor.varint(n + 2, f"the words of {what}")
    words = np.frombuffer(cursor.take(4 * count, what), "<u4")
    try:
        coder = constriction.stream.stack.AnsCoder(words.astype(np.uint32))
    except ValueError as error:
        # The top of the stack is never zero in what the coder writes, so it refuses to start there.
        raise WireError(f"the words of {what} end in a zero.") from error
    ranks: npt.NDArray[np.int32] = coder.decode(model, n)
    if not coder.is_empty():
        raise WireError(f"the words of {what} contain more than {n} symbols.")
    return ranks
