"""One tensor as streams: which form its mask and its values take, and back (docs/wire.md)."""

from __future__ import annotations

import math
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

# A codebook's indices are single bytes.
MAX_BOOK = 256
# A sample of at least this many numbers shows whether looking for a codebook is worth while.
GLANCE = 1 << 7
# Up to this many numbers, a binary search is faster than making a table.
BRIEF = 1 << 10
# The codebook is first collected from a sample of about this many numbers.
SAMPLE = 1 << 12
# Odd multipliers with well mixed bits, one tried after the other until a codebook has no collision.
HASHES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
# numpy dtypes by width: unsigned for all work on bits, and those that torch takes from numpy.
UNSIGNED = {w: np.dtype(f"u{w}") for w in (1, 2, 4, 8)}
SIGNED = {
    1: np.dtype("u1"),
    2: np.dtype("i2"),
    4: np.dtype("i4"),
    8: np.dtype("i8"),
}


@dataclass(frozen=True)
class Allow:
    """What a codec may do to a tensor; ``a | b`` may do both.

    ``kept``: leave out what the mask drops; ``zeros``: also zeros of a tensor without a mask;
    ``channels``: write a mask by whole channels; ``known``: refer to the mask the receiver holds;
    ``book``: write values as a codebook and indices.
    """

    kept: bool = False
    zeros: bool = False
    channels: bool = False
    known: bool = False
    book: bool = False
    tools: Tools = Tools()

    def __or__(self, other: Allow) -> Allow:
        tools = Tools(
            ans=self.tools.ans or other.tools.ans,
            zstd=self.tools.zstd or other.tools.zstd,
            planes=self.tools.planes or other.tools.planes,
            slack=max(self.tools.slack, other.tools.slack),
            measure=self.tools.measure or other.tools.measure,
        )
        return Allow(
            kept=self.kept or other.kept,
            zeros=self.zeros or other.zeros,
            channels=self.channels or other.channels,
            known=self.known or other.known,
            book=self.book or other.book,
            tools=tools,
        )


@dataclass(frozen=True)
class Leaf:
    """A tensor as it is written: its entry in the index, and its streams by part of the cost."""

    entry: Entry
    streams: Mapping[str, Chunks]


@dataclass(frozen=True)
class Body:
    """The values of a tensor as they are written, which is the same whatever its receiver holds.

    With the places of its zeros, where those of a tensor without a mask are left out.
    """

    form: ValueForm
    streams: Mapping[str, Chunks]
    mask: MaskForm = MaskForm.NONE


def write_leaf(
    name: str, value: Tensor, mask: Tensor | None, held: Tensor | None, allow: Allow
) -> Leaf:
    """The streams of one tensor, each in the smallest form that ``allow`` has.

    ``held``: the mask that the receiver holds. A tensor without elements has no streams.
    """
    body = write_body(value, mask, allow)
    form = body.mask
    streams = body.streams
    if mask is not None:
        form, chunks = write_mask(mask, held, allow)
        if value.numel():
            # The order of the streams is the order of the body: the mask first, so that the reader
            # knows how many values follow.
            streams = {"mask": chunks, **streams}
    return Leaf(Entry(name, value.dtype, tuple(value.shape), form, body.form), streams)


def write_body(value: Tensor, mask: Tensor | None, allow: Allow) -> Body:
    """The values of one tensor, of which a codec may leave out what the mask drops."""
    if value.numel() == 0:
        return Body(ValueForm.FULL, {})
    streams: dict[str, Chunks] = {}
    words = to_words(value)
    bits: Bits | None = None
    kept = len(words)
    mask_form = MaskForm.NONE
    if mask is not None:
        bits = to_bits(mask)
        kept = int(np.count_nonzero(bits))
    elif allow.zeros and value.dtype != torch.bool:
        not_zero = int(np.count_nonzero(words))
        if _worth_dropping(words, len(words) - not_zero):
            bits = words != 0
            kept = not_zero
            mask_form = MaskForm.ZEROS
            streams["mask"] = write_bits(bits, allow.tools, kept)

    value_form = ValueForm.FULL
    if bits is not None and allow.kept:
        value_form = ValueForm.KEPT
    drops_some = kept < len(words)
    if bits is not None and drops_some and allow.kept:
        # Taking by index is faster than words[bits].
        words = words.take(bits.nonzero()[0])
    elif bits is not None and drops_some:
        # What the mask drops is +0 on the other side, whichever codec wrote it.
        words = np.where(bits, words, words.dtype.type(0))

    book = None
    if value.dtype == torch.bool:
        streams["values"] = write_bits(words.view(np.bool_), allow.tools)
    else:
        if allow.book and len(words):
            book = _write_book(words, allow)
        if book is None:
            streams["values"] = write_values(words, allow.tools)
        else:
            value_form = ValueForm.BOOK
            streams.update(book)
    return Body(value_form, streams, mask_form)


def read_leaf(entry: Entry, cursor: Cursor, held: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tensor and its mask, the inverse of :func:`write_leaf`."""
    n = entry.count
    bits: Bits | None = np.empty(0, np.bool_)
    if n:
        bits = _read_mask(entry, cursor, held)
    # Where the values that were sent belong; None if all were sent.
    places = None
    if bits is not None and entry.values != ValueForm.FULL:
        places = np.flatnonzero(bits)
    sent = n if places is None else len(places)

    if entry.dtype == torch.bool:
        words: Words = read_bits(cursor, sent, entry.name).view(np.uint8)
    elif entry.values == ValueForm.BOOK and sent:
        words = _read_book(cursor, sent, entry.dtype.itemsize, entry.name)
    else:
        words = read_values(cursor, sent, entry.dtype.itemsize, entry.name)

    if places is not None:
        full = np.zeros(n, words.dtype)
        full[places] = words
        words = full
    elif bits is not None and not bits.all():
        # Another library's writer may have left something other than 0 where the mask drops.
        words = np.where(bits, words, words.dtype.type(0))
    flat = torch.from_numpy(words.view(SIGNED[words.itemsize]))
    value = flat.view(entry.dtype).view(entry.shape)
    has_mask = entry.mask not in (MaskForm.NONE, MaskForm.ZEROS)
    if bits is None or not has_mask:
        return value, None
    return value, torch.from_numpy(bits).view(entry.shape)


def to_words(value: Tensor) -> Words:
    """A tensor's bits as unsigned numbers of its width, in row order."""
    if value.dtype == torch.bfloat16:
        # numpy has no bfloat16.
        value = value.detach().view(torch.int16)
    words: Words = value.numpy(force=True).reshape(-1).view(UNSIGNED[value.dtype.itemsize])
    return words


def to_bits(mask: Tensor) -> Bits:
    """A mask as booleans in row order."""
    bits: Bits = mask.numpy(force=True).reshape(-1)
    return bits


# ---- masks ---------------------------------------------------------------------------------------


def write_mask(mask: Tensor, held: Tensor | None, allow: Allow) -> tuple[MaskForm, Chunks]:
    """The mask by element, by channel or by change, whichever its counts say will be smallest."""
    if mask.numel() == 0:
        return MaskForm.BITS, []
    # Most masks come back as the very tensors that were sent.
    if held is mask and allow.known:
        return MaskForm.SAME, []
    bits = to_bits(mask)
    flips: Bits | None = None
    changed = 0
    if held is not None and allow.known:
        flips = bits != to_bits(held)
        changed = int(np.count_nonzero(flips))
        if changed == 0:
            return MaskForm.SAME, []
    ones = int(np.count_nonzero(bits))
    channels = None
    if allow.channels:
        channels = _channels(bits, tuple(mask.shape), ones)
    if channels is None and flips is None:
        return MaskForm.BITS, write_bits(bits, allow.tools, ones)

    # For each form its streams of bits, and how many of them are ones.
    candidates = {MaskForm.BITS: [(bits, ones)]}
    if flips is not None:
        candidates[MaskForm.FLIPS] = [(flips, changed)]
    if channels is not None:
        rows, columns = channels
        candidates[MaskForm.CHANNELS] = [
            (rows, int(np.count_nonzero(rows))),
            (columns, int(np.count_nonzero(columns))),
        ]

    # At equal size the earlier form wins.
    best_form = MaskForm.BITS
    smallest = math.inf
    for form, parts in candidates.items():
        guess = 0.0
        for part, part_ones in parts:
            guess += _guess(part_ones, len(part), allow.tools)
        if guess < smallest:
            smallest = guess
            best_form = form

    chunks: Chunks = []
    for part, part_ones in candidates[best_form]:
        chunks += write_bits(part, allow.tools, part_ones)
    return best_form, chunks


def _read_mask(entry: Entry, cursor: Cursor, held: Tensor | None) -> Bits | None:
    n = entry.count
    what = f"the mask of {entry.name}"
    if entry.mask == MaskForm.NONE:
        return None
    if entry.mask == MaskForm.CHANNELS:
        rows = read_bits(cursor, entry.shape[0], what)
        columns = read_bits(cursor, entry.shape[1], what)
        grid = (rows[:, None] & columns).reshape(-1, 1)
        # All elements behind one place of the grid share its fate.
        return np.repeat(grid, n // len(grid), axis=1).reshape(-1)
    if entry.mask in (MaskForm.BITS, MaskForm.ZEROS):
        return read_bits(cursor, n, what)
    if held is None or tuple(held.shape) != entry.shape:
        raise WireError(f"{what} refers to a mask that is not held; send it in full.")
    held_bits = to_bits(held)
    if entry.mask == MaskForm.SAME:
        # A copy, for the caller may change the mask it gets.
        return held_bits.copy()
    return held_bits ^ read_bits(cursor, n, what)


def _channels(bits: Bits, shape: tuple[int, ...], ones: int) -> tuple[Bits, Bits] | None:
    """Which rows of dimensions 0 and 1 are kept, if the mask keeps or drops whole ones."""
    if len(shape) < 2:
        return None
    # Most masks are not made of channels, so a cheap refusal comes first: in one that is, all rows
    # that keep something keep the same number, which then divides the number of ones.
    width = len(bits) // shape[0]
    row = int(bits.argmax()) // width
    ones_in_row = int(np.count_nonzero(bits[row * width : (row + 1) * width]))
    if ones % max(1, ones_in_row):
        return None
    grid = bits.reshape(shape[0], shape[1], -1)
    first = grid[:, :, 0]
    rows = np.asarray(first.any(axis=1))
    columns = np.asarray(first.any(axis=0))
    if int(first.sum()) != int(rows.sum()) * int(columns.sum()):
        return None
    if not (grid == first[:, :, None]).all():
        return None
    return rows, columns


def _guess(ones: int, n: int, tools: Tools) -> float:
    """About how many bytes :func:`fedgrove.wire.streams.write_bits` will take."""
    may_compress = tools.ans or tools.zstd
    if may_compress and ones in (0, n):
        return 2
    plain = 1 + n / 8
    if tools.ans:
        return min(plain, flag_bytes(ones, n) + 9)
    return plain


def _worth_dropping(words: Words, zeros: int) -> bool:
    """Whether leaving out the zeros of a tensor without a mask saves more than their bitmap costs.

    With less than a sixteenth of zeros the gain is not worth the time.
    """
    n = len(words)
    bitmap = n // 8 + 2
    return words.itemsize > 1 and 16 * zeros >= n and zeros * words.itemsize > bitmap


# ---- codebooks -----------------------------------------------------------------------------------


def _write_book(words: Words, allow: Allow) -> dict[str, Chunks] | None:
    """Codebook and indices, if the numbers take few enough values for that to be smaller."""
    # If there are at most 256 values, the sample repeats one, but for less than one time in 10^14.
    glance = words[:: max(1, len(words) // GLANCE)].tolist()
    if len(set(glance)) == len(glance):
        return None
    book_and_index = find_book(words)
    if book_and_index is None:
        return None
    book, index = book_and_index
    # With fewer than two uses of each entry it is no codebook, only a sorted list.
    if 2 * len(book) > len(words):
        return None
    codebook: Chunks = [bytes([len(book) - 1]), *write_values(book, allow.tools)]
    indices = write_symbols(index, len(book), allow.tools)
    # Wide numbers with many repeats surely gain; the others are also written whole, and compared.
    many = len(words) > 8 * SAMPLE
    wide_and_repeated = words.itemsize > 2 and len(words) > 8 * len(book)
    surely_gains = words.itemsize > 1 and (many or wide_and_repeated)
    if not surely_gains:
        whole = write_values(words, allow.tools)
        if size(codebook) + size(indices) >= size(whole):
            return None
    return {"codebook": codebook, "indices": indices}


def _read_book(cursor: Cursor, n: int, itemsize: int, what: str) -> Words:
    k = cursor.byte(f"the codebook of {what}") + 1
    book = read_values(cursor, k, itemsize, f"the codebook of {what}")
    return book.take(read_symbols(cursor, n, k, f"the indices of {what}"))


def find_book(words: Words) -> tuple[Words, Bytes] | None:
    """The distinct bit patterns in rising order and each number's place among them.

    None if there are over 256.

    >>> book, index = find_book(np.array([7, 3, 7], np.uint32))
    >>> book.tolist(), index.tolist()
    ([3, 7], [1, 0, 1])
    """
    book = _distinct(words[:: max(1, len(words) // SAMPLE)])
    while len(book) <= MAX_BOOK:
        index = _places(words, book)
        sample_was_everything = len(words) < SAMPLE
        if sample_was_everything:
            return book, index
        missed = book.take(index) != words
        if not missed.any():
            return book, index
        # The sample missed rare values: add them, all at once, and look again.
        book = _distinct(np.concatenate([book, _distinct(words[missed])]))
    return None


def _distinct(words: Words) -> Words:
    # numpy's own unique hashes, which is ten times slower on a few thousand numbers.
    rising = words.copy()
    rising.sort()
    first = np.empty(len(words), np.bool_)
    first[0] = True
    np.not_equal(rising[1:], rising[:-1], out=first[1:])
    return rising[first]


def _places(words: Words, book: Words) -> Bytes:
    """Each number's place in the book, and any place for a number that is not in it.

    By a table of 2^16 slots, where a hash without collisions is found: many times faster than a
    binary search.
    """
    if len(words) <= BRIEF:
        # So few are all in the book, so every place is below its length.
        return np.searchsorted(book, words).astype(np.uint8)
    for key in HASHES:
        slots = _slot(book, key)
        has_no_collision = len(_distinct(slots)) == len(book)
        if has_no_collision:
            table = np.zeros(1 << 16, np.uint8)
            table[slots] = np.arange(len(book), dtype=np.uint8)
            return table.take(_slot(words, key))
    return np.minimum(np.searchsorted(book, words), len(book) - 1).astype(np.uint8)


def _slot(words: Words, key: int) -> Words:
    """The top 16 bits of ``words * key``; numbers of one or two bytes are their own slot."""
    if words.itemsize <= 2:
        return words
    width = 8 * words.itemsize
    # An odd multiplier of the words' own width maps different words to different products.
    multiplier = words.dtype.type(key >> (64 - width) | 1)
    return (words * multiplier) >> words.dtype.type(width - 16)
