"""The coders under the streams: zstandard, read safely, and an asymmetric numeral system with integer frequencies.

Both sides of the entropy coder must have the same probabilities to the last bit or it decodes to wrong symbols without
a word, so integers travel, never floats (docs/wire.md).
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

LEVEL = 1  # zstandard's; level 3 gains .1 % on weights, loses on masks, and takes longer
BIT_SCALE = 16  # a bit's frequency is sent in 16 bits
BYTE_SCALE = 22  # and spread over the 256 bytes of eight such bits with 22
ONES = np.array([b.bit_count() for b in range(256)])


class Method(IntEnum):
    """How the items of one stream are written; its first byte."""

    RAW = 0
    ZSTD = 1
    ANS = 2
    FILL = 3
    PLANES = 4


class Cursor:
    """A place in received bytes; every step is checked against what is left."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data, self.at = data, at
        self.methods: list[Method] = []

    def take(self, n: int, what: str) -> memoryview:
        """The next ``n`` bytes."""
        if n > len(self.data) - self.at:
            raise WireError(
                f"the payload ends inside {what}: {n} bytes wanted, {len(self.data) - self.at} left."
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self, what: str) -> int:
        """The next byte."""
        return self.take(1, what)[0]

    def method(self, allowed: Sequence[Method], what: str) -> Method:
        """The next byte as a method, noted for whoever asks how the payload was written."""
        found = self.byte(what)
        if found not in allowed:
            raise WireError(
                f"{what} is written by method {found}; allowed there: {', '.join(map(str, allowed))}."
            )
        self.methods.append(Method(found))
        return self.methods[-1]

    def starts(self, method: Method) -> bool:
        """Whether the next stream is written by ``method``."""
        return self.data[self.at : self.at + 1] == bytes([method])

    def varint(self, limit: int, what: str) -> int:
        """The next number, seven bits to a byte, low bits first; refused above ``limit``."""
        value = 0
        for shift in range(0, 63, 7):
            b = self.byte(what)
            value |= (b & 127) << shift
            if b < 128:
                if value > limit:
                    raise WireError(f"{what} is {value}; at most {limit} is allowed.")
                return value
        raise WireError(f"{what} is longer than 63 bits.")


def varint(value: int) -> bytes:
    """A number in seven bits to a byte, low bits first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Zstd(threading.local):
    """A compressor and a decompressor per thread: making one takes as long as a small tensor."""

    def __init__(self) -> None:
        self.writer, self.reader = (
            zstandard.ZstdCompressor(level=LEVEL),
            zstandard.ZstdDecompressor(),
        )


_ZSTD = _Zstd()


def deflate(data: bytes | memoryview) -> bytes:
    """One zstandard frame that states its size."""
    return _ZSTD.writer.compress(data)


def inflate(frame: memoryview, n: int, what: str) -> bytes:
    """The ``n`` bytes of a frame; one that states another size, or none, is refused before anything is allocated."""
    try:
        stated = zstandard.get_frame_parameters(frame).content_size
        if stated != n:
            raise WireError(
                f"the frame of {what} states {_stated(stated)}; exactly {n} bytes are expected."
            )
        # With the size stated the output is one block of n bytes and no window is kept; more output is an error.
        out = _ZSTD.reader.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"the frame of {what} cannot be read: {error}.") from error
    if len(out) != n:
        raise WireError(f"the frame of {what} holds {len(out)} bytes; {n} are expected.")
    return out


def _stated(n: int) -> str:
    return "no size" if n >= zstandard.CONTENTSIZE_UNKNOWN or n < 0 else f"{n} bytes"


# --- frequencies ---------------------------------------------------------------------------------------------------


def frequencies(counts: Counts) -> Counts:
    """Counts as integers that sum to a power of two, at least 1 wherever something was counted.

    f_i = 1 + floor(c_i (T - u) / N) for the u symbols that occur; what is left goes to the most frequent.

    T is no larger than N deserves, since its digits are sent.

    >>> frequencies(np.array([3, 0, 1])).tolist()
    [768, 0, 256]
    """
    n, used = int(counts.sum()), counts > 0
    total = 1 << min(max(n.bit_length(), 10), 16)
    f: Counts = used + counts * (total - int(np.count_nonzero(used))) // n
    f[f.argmax()] += total - int(f.sum())
    return f


def table_bytes(f: Counts) -> bytes:
    """The scale, then the frequencies as varints; a 0 is followed by how many more zeros follow it."""
    used = np.flatnonzero(f).tolist()
    out, last = bytearray([int(f.sum()).bit_length() - 1]), -1
    for at, value in zip(used, f[used].tolist(), strict=True):
        out += (b"\0" + varint(at - last - 2) if at - last > 1 else b"") + varint(value)
        last = at
    return bytes(out)


def read_table(cursor: Cursor, symbols: int, what: str) -> Counts:
    """The inverse of :func:`table_bytes`: it ends where the sum is 2 to the scale."""
    total = 1 << cursor.varint(16, f"the scale of {what}")
    f, at, left = np.zeros(symbols, np.int64), 0, total
    while left:
        if at >= symbols:
            raise WireError(f"the frequencies of {what} name more than {symbols} symbols.")
        f[at] = cursor.varint(left, f"a frequency of {what}")
        left -= int(f[at])
        at += 1 if f[at] else 1 + cursor.varint(symbols, f"a run of zeros of {what}")
    return f


def bit_frequencies(ones: int) -> Counts:
    """The frequencies of a byte of eight independent bits, each 1 with frequency ``ones`` of 2^16; exact integers.

    W_j = max(1, ones^j (2^16 - ones)^(8-j) >> 106) for a byte with j ones; byte 0 or 255, the likelier, gets the rest
    of 2^22.
    """
    zeros = (1 << BIT_SCALE) - ones
    by_ones = [
        max(1, (ones**j * zeros ** (8 - j)) >> (8 * BIT_SCALE - BYTE_SCALE)) for j in range(9)
    ]
    f: Counts = np.array(by_ones, np.int64)[ONES]
    f[255 if ones > zeros else 0] += (1 << BYTE_SCALE) - int(f.sum())
    return f


def entropy_bytes(counts: Counts) -> float:
    """The empirical bound of a stream in bytes: -sum c_i log2(c_i / N) / 8.

    >>> entropy_bytes(np.array([8, 8]))
    2.0
    """
    n = int(counts.sum())
    return max(0.0, _bits(n) - float((counts * np.log2(np.maximum(counts, 1))).sum())) / 8


def flag_bytes(ones: int, n: int) -> float:
    """The same bound for ``n`` bits of which ``ones`` are 1.

    >>> flag_bytes(8, 16)
    2.0
    """
    return max(0.0, _bits(n) - _bits(ones) - _bits(n - ones)) / 8


def _bits(n: int) -> float:
    return n * math.log2(n) if n else 0.0


# --- the entropy coder ---------------------------------------------------------------------------------------------


def _model(f: Counts) -> Any:
    # f / sum is exact (the sum is a power of two), and so is every product constriction forms from it: both sides
    # have the same probabilities to the last bit on any machine.
    return constriction.stream.model.Categorical(f / f.sum(), perfect=False, lazy=False)


@lru_cache(maxsize=64)
def _bit_model(ones: int) -> Any:
    # Layers of one density share a model, and making it takes as long as coding a small mask.
    return _model(bit_frequencies(ones))


def write_ans(symbols: Bytes, f: Counts) -> bytes:
    """The symbols as words of the coder, their number before them; symbols that never occur take no room."""
    used = np.flatnonzero(f)
    rank = np.zeros(256, np.int32)
    rank[used] = np.arange(len(used), dtype=np.int32)
    return _write(rank.take(symbols), _model(f[used]))


def write_bit_ans(packed: Bytes, ones: int) -> bytes:
    """The same for packed bits, each 1 with frequency ``ones`` of 2^16."""
    return _write(packed.astype(np.int32), _bit_model(ones))


def _write(ranks: npt.NDArray[np.int32], model: Any) -> bytes:
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(ranks, model)
    words: npt.NDArray[np.uint32] = coder.get_compressed().astype("<u4")
    return varint(len(words)) + words.tobytes()


def read_ans(cursor: Cursor, n: int, f: Counts, what: str) -> Bytes:
    """The ``n`` symbols of :func:`write_ans`; words left over are refused."""
    used = np.flatnonzero(f)
    if len(used) < 2:
        raise WireError(f"the frequencies of {what} name fewer than two symbols.")
    ranks = _read(cursor, n, _model(f[used]), what)
    return (
        ranks.astype(np.uint8) if used[-1] == len(used) - 1 else used.astype(np.uint8).take(ranks)
    )


def read_bit_ans(cursor: Cursor, n: int, ones: int, what: str) -> Bytes:
    """The ``n`` packed bytes of :func:`write_bit_ans`."""
    return _read(cursor, n, _bit_model(ones), what).astype(np.uint8)


def _read(cursor: Cursor, n: int, model: Any, what: str) -> npt.NDArray[np.int32]:
    words = np.frombuffer(
        cursor.take(4 * cursor.varint(n + 2, f"the words of {what}"), what), "<u4"
    )
    try:
        coder = constriction.stream.stack.AnsCoder(words.astype(np.uint32))
    except ValueError as error:
        raise WireError(f"the words of {what} end in a zero.") from error
    found: npt.NDArray[np.int32] = coder.decode(model, n)
    if not coder.is_empty():
        raise WireError(f"the words of {what} hold more than {n} symbols.")
    return found
