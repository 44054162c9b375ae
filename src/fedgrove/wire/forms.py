"""One tensor as streams: which form its mask and its values take, and back (docs/wire.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from .container import Entry, MaskForm, ValueForm
from .entropy import Bytes, Cursor, flag_bytes
from .streams import (
    Bits,
    Chunks,
    Tools,
    Words,
    read_bits,
    read_symbols,
    read_values,
    size,
    write_bits,
    write_symbols,
    write_values,
)

MAX_BOOK = 256
GLANCE, BRIEF, SAMPLE = 1 << 7, 1 << 10, 1 << 12
HASHES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
UNSIGNED = {w: np.dtype(f"u{w}") for w in (1, 2, 4, 8)}
SIGNED = {
    1: np.dtype("u1"),
    2: np.dtype("i2"),
    4: np.dtype("i4"),
    8: np.dtype("i8"),
}  # what torch takes from numpy


@dataclass(frozen=True)
class Allow:
    """What a codec may do to a tensor; ``a | b`` may do both."""

    kept: bool = False  # leave out what the mask leaves out
    zeros: bool = False  # and zeros that no mask names
    channels: bool = False
    known: bool = False
    book: bool = False
    tools: Tools = Tools()

    def __or__(self, other: Allow) -> Allow:
        a, b = self.tools, other.tools
        tools = Tools(a.ans or b.ans, a.zstd or b.zstd, a.planes or b.planes, max(a.slack, b.slack))
        flags = {
            k: getattr(self, k) or getattr(other, k)
            for k in ("kept", "zeros", "channels", "known", "book")
        }
        return Allow(**flags, tools=tools)


@dataclass(frozen=True)
class Leaf:
    """A tensor as it is written: its entry in the index, and its streams by the part of the cost they belong to."""

    entry: Entry
    streams: Mapping[str, Chunks]


def write_leaf(
    name: str, value: Tensor, mask: Tensor | None, held: Tensor | None, allow: Allow
) -> Leaf:
    """The streams of one tensor, each in the smallest form that ``allow`` has; none for a tensor of no elements."""
    form, shape, streams = (
        MaskForm.NONE if mask is None else MaskForm.BITS,
        tuple(value.shape),
        dict[str, Chunks](),
    )
    if value.numel() == 0:
        return Leaf(Entry(name, value.dtype, shape, form), {})
    words = to_words(value)
    bits = None if mask is None else to_bits(mask)
    if bits is not None:
        form, streams["mask"] = _write_mask(
            bits, shape, None if held is None else to_bits(held), allow
        )
    elif allow.zeros and value.dtype != torch.bool and _worth_dropping(words):
        bits, form = words != 0, MaskForm.ZEROS
        streams["mask"] = write_bits(bits, allow.tools)
    if bits is not None:
        words = (
            words[np.flatnonzero(bits)]
            if allow.kept
            else np.where(bits, words, words.dtype.type(0))
        )
    kept = ValueForm.KEPT if bits is not None and allow.kept else ValueForm.FULL
    if value.dtype == torch.bool:
        streams["values"] = write_bits(words.view(np.bool_), allow.tools)
    elif booked := _write_book(words, allow) if allow.book and len(words) else None:
        return Leaf(Entry(name, value.dtype, shape, form, ValueForm.BOOK), streams | booked)
    else:
        streams["values"] = write_values(words, allow.tools)
    return Leaf(Entry(name, value.dtype, shape, form, kept), streams)


def read_leaf(entry: Entry, cursor: Cursor, held: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tensor and its mask, the inverse of :func:`write_leaf`."""
    n, what = entry.count, entry.name
    bits = _read_mask(entry, cursor, held) if n else np.empty(0, np.bool_)
    places = None if bits is None or entry.values == ValueForm.FULL else np.flatnonzero(bits)
    kept = n if places is None else len(places)
    if entry.dtype == torch.bool:
        words: Words = read_bits(cursor, kept, what).view(np.uint8)
    elif entry.values == ValueForm.BOOK and kept:
        words = _read_book(cursor, kept, entry.dtype.itemsize, what)
    else:
        words = read_values(cursor, kept, entry.dtype.itemsize, what)
    if places is not None:
        full = np.zeros(n, words.dtype)
        full[places] = words
        words = full
    elif bits is not None and not bits.all():
        words = np.where(
            bits, words, words.dtype.type(0)
        )  # a foreign writer may leave something off the mask
    value = torch.from_numpy(words.view(SIGNED[words.itemsize])).view(entry.dtype).view(entry.shape)
    masked = entry.mask not in (MaskForm.NONE, MaskForm.ZEROS)
    return value, torch.from_numpy(bits).view(entry.shape) if masked and bits is not None else None


def to_words(value: Tensor) -> Words:
    """A tensor's bits as unsigned numbers of its width, in row order."""
    if value.dtype == torch.bfloat16:  # numpy has none
        value = value.detach().view(torch.int16)
    words: Words = value.numpy(force=True).reshape(-1).view(UNSIGNED[value.dtype.itemsize])
    return words


def to_bits(mask: Tensor) -> Bits:
    """A mask as booleans in row order."""
    bits: Bits = mask.numpy(force=True).reshape(-1)
    return bits


# --- masks ---------------------------------------------------------------------------------------------------------


def _write_mask(
    bits: Bits, shape: tuple[int, ...], held: Bits | None, allow: Allow
) -> tuple[MaskForm, Chunks]:
    """The form that will be smallest by count: a bit per element, per channel, or per change."""
    ones = int(np.count_nonzero(bits))
    channels = _channels(bits, shape, ones) if allow.channels else None
    if channels is None and (held is None or not allow.known):
        return MaskForm.BITS, write_bits(bits, allow.tools, ones)
    guesses = {MaskForm.BITS: _guess(ones, len(bits), allow.tools)}
    parts = {MaskForm.BITS: [(bits, ones)]}
    if allow.known and held is not None:
        flips = bits != held
        changed = int(np.count_nonzero(flips))
        if not changed:
            return MaskForm.SAME, []
        guesses[MaskForm.FLIPS] = _guess(changed, len(bits), allow.tools)
        parts[MaskForm.FLIPS] = [(flips, changed)]
    if channels is not None:
        parts[MaskForm.CHANNELS] = [(c, int(np.count_nonzero(c))) for c in channels]
        guesses[MaskForm.CHANNELS] = sum(
            _guess(k, len(c), allow.tools) for c, k in parts[MaskForm.CHANNELS]
        )
    form = min(guesses, key=lambda f: guesses[f])
    return form, [chunk for part, k in parts[form] for chunk in write_bits(part, allow.tools, k)]


def _read_mask(entry: Entry, cursor: Cursor, held: Tensor | None) -> Bits | None:
    n, what = entry.count, f"the mask of {entry.name}"
    if entry.mask == MaskForm.NONE:
        return None
    if entry.mask == MaskForm.CHANNELS:
        rows, columns = (read_bits(cursor, entry.shape[i], what) for i in (0, 1))
        grid = (rows[:, None] & columns).reshape(-1, 1)
        return np.repeat(grid, n // len(grid), axis=1).reshape(-1)
    if entry.mask in (MaskForm.BITS, MaskForm.ZEROS):
        return read_bits(cursor, n, what)
    if held is None or tuple(held.shape) != entry.shape:
        raise WireError(f"{what} refers to a mask that is not held; send it in full.")
    mine = to_bits(held)
    return mine.copy() if entry.mask == MaskForm.SAME else mine ^ read_bits(cursor, n, what)


def _channels(bits: Bits, shape: tuple[int, ...], ones: int) -> tuple[Bits, Bits] | None:
    """Which rows of dimensions 0 and 1 are kept, if the mask keeps or drops whole ones."""
    if len(shape) < 2:
        return None
    # A cheap refusal first, for most masks are not made of channels: all rows that keep something keep as much.
    width = len(bits) // shape[0]
    row = int(bits.argmax()) // width
    if ones % max(1, int(np.count_nonzero(bits[row * width : (row + 1) * width]))):
        return None
    grid = bits.reshape(shape[0], shape[1], -1)
    first = grid[:, :, 0]
    rows, columns = np.asarray(first.any(axis=1)), np.asarray(first.any(axis=0))
    if (
        int(first.sum()) != int(rows.sum()) * int(columns.sum())
        or not (grid == first[:, :, None]).all()
    ):
        return None
    return rows, columns


def _guess(ones: int, n: int, tools: Tools) -> float:
    if (tools.ans or tools.zstd) and ones in (0, n):
        return 2
    plain = 1 + n / 8
    return min(plain, flag_bytes(ones, n) + 9) if tools.ans else plain


def _worth_dropping(words: Words) -> bool:
    zeros = len(words) - int(np.count_nonzero(words))
    return (
        words.itemsize > 1
        and 16 * zeros >= len(words)
        and zeros * words.itemsize > len(words) // 8 + 2
    )


# --- codebooks -----------------------------------------------------------------------------------------------------


def _write_book(words: Words, allow: Allow) -> dict[str, Chunks] | None:
    """Codebook and indices, if the numbers take few enough values for that to be smaller."""
    # Of 128 draws from at most 256 values two are the same, but for one time in 10^14.
    few = words[:: max(1, len(words) // GLANCE)].tolist()
    found = find_book(words) if len(set(few)) < len(few) else None
    if found is None or 2 * len(found[0]) > len(
        words
    ):  # without repeats it is no codebook, only a sorted list
        return None
    book, index = found
    codebook: Chunks = [bytes([len(book) - 1]), *write_values(book, allow.tools)]
    indices = write_symbols(index, len(book), allow.tools)
    # Wide numbers with many repeats surely gain; for the others both are written and compared.
    sure = words.itemsize > 1 and (
        len(words) > SAMPLE * 8 or (words.itemsize > 2 and len(words) > 8 * len(book))
    )
    if not sure and size(codebook) + size(indices) >= size(write_values(words, allow.tools)):
        return None
    return {"codebook": codebook, "indices": indices}


def _read_book(cursor: Cursor, n: int, itemsize: int, what: str) -> Words:
    k = cursor.byte(f"the codebook of {what}") + 1
    book = read_values(cursor, k, itemsize, f"the codebook of {what}")
    return book.take(read_symbols(cursor, n, k, f"the indices of {what}"))


def find_book(words: Words) -> tuple[Words, Bytes] | None:
    """The distinct bit patterns in rising order and each number's place among them; None when there are over 256.

    >>> book, index = find_book(np.array([7, 3, 7], np.uint32))
    >>> book.tolist(), index.tolist()
    ([3, 7], [1, 0, 1])
    """
    book = _distinct(words[:: max(1, len(words) // SAMPLE)])
    while len(book) <= MAX_BOOK:
        index = _places(words, book)
        strange = None if len(words) < SAMPLE else book.take(index) != words
        if strange is None or not strange.any():
            return book, index
        # The sample missed rare values: take them in, all at once, and look again.
        book = _distinct(np.concatenate([book, _distinct(words[strange])]))
    return None


def _distinct(words: Words) -> Words:
    # numpy's own unique hashes, which is ten times slower on a few thousand numbers
    rising = words.copy()
    rising.sort()
    first = np.empty(len(words), np.bool_)
    first[0] = True
    np.not_equal(rising[1:], rising[:-1], out=first[1:])
    return rising[first]


def _places(words: Words, book: Words) -> Bytes:
    """Each number's place in the book, anything for a stranger; by a table of 2^16 where the book has no collisions.

    Not for few numbers, which are all in the book, since a table takes its time to make.
    """
    if len(words) <= BRIEF:
        return np.searchsorted(book, words).astype(np.uint8)
    for key in (0, *HASHES) if words.itemsize <= 2 else HASHES:
        slots = _slot(book, key)
        if len(_distinct(slots)) == len(book):
            table = np.zeros(1 << 16, np.uint8)
            table[slots] = np.arange(len(book), dtype=np.uint8)
            return table.take(_slot(words, key))
    return np.minimum(np.searchsorted(book, words), len(book) - 1).astype(np.uint8)


def _slot(words: Words, key: int) -> Words:
    """The top 16 bits of ``words * key``; short numbers are their own slot."""
    if words.itemsize <= 2:
        return words
    width = 8 * words.itemsize
    return (words * words.dtype.type(key >> (64 - width) | 1)) >> words.dtype.type(width - 16)
