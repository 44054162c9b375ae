"""One tensor as streams and back: which form its mask and its values take (docs/wire.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from . import streams
from .container import MaskForm, TensorEntry, ValueForm
from .entropy import Bytes, Cursor, flag_bytes
from .streams import Bits, Chunks, Tools, Words, count_bytes

# A codebook's indices are single bytes.
MAX_BOOK = 256
# A sample of at least this many numbers shows whether looking for a codebook is worthwhile.
QUICK_SAMPLE = 1 << 7
# Up to this many numbers, a binary search is faster than making a table.
MOST_SEARCHED = 1 << 10
# The codebook is first collected from a sample of about this many numbers.
SAMPLE = 1 << 12
# Odd multipliers with well mixed bits, one tried after the other until a codebook has no collision.
HASHES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
# numpy dtypes by width: unsigned for all work on bits, and those that torch takes from numpy.
UNSIGNED = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)}
SIGNED = {1: np.dtype("u1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}


@dataclass(frozen=True)
class AllowedForms:
    """The forms in which a codec may write a tensor; ``a | b`` allows the forms of both."""

    kept: bool = False
    """Leave out what the mask drops."""
    zeros: bool = False
    """Leave out the zeros of a tensor without a mask."""
    channels: bool = False
    """Write a mask by whole channels."""
    known: bool = False
    """Refer to the mask that the receiver knows."""
    book: bool = False
    """Write values as a codebook and indices."""
    tools: Tools = Tools()

    def __or__(self, other: AllowedForms) -> AllowedForms:
        return AllowedForms(
            kept=self.kept or other.kept,
            zeros=self.zeros or other.zeros,
            channels=self.channels or other.channels,
            known=self.known or other.known,
            book=self.book or other.book,
            tools=self.tools | other.tools,
        )


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor as it is written: its entry in the index, and its streams by part of the cost."""

    entry: TensorEntry
    streams: Mapping[str, Chunks]


@dataclass(frozen=True)
class WrittenValues:
    """The values of a tensor as they are written, which does not depend on the receiver.

    With the positions of its zeros, where those of a tensor without a mask are left out.
    """

    form: ValueForm
    streams: Mapping[str, Chunks]
    mask: MaskForm = MaskForm.NONE


def write_tensor(
    name: str, value: Tensor, mask: Tensor | None, known: Tensor | None, allow: AllowedForms
) -> WrittenTensor:
    """Write one tensor, each stream in the smallest allowed form.

    Args:
        name: Its name in the packet.
        value: The tensor. One without elements has no streams.
        mask: Its mask, if it has one.
        known: The mask that the receiver knows, if it knows one.
        allow: The allowed forms.
    """
    body = write_tensor_values(value, mask, allow)
    form = body.mask
    parts = body.streams
    if mask is not None:
        form, chunks = write_mask(mask, known, allow)
        if value.numel():
            # The order of the streams is the order of the body: the mask first, so that the reader
            # knows how many values follow.
            parts = {"mask": chunks, **parts}
    return WrittenTensor(TensorEntry.of(name, value, form, body.form), parts)


def write_tensor_values(value: Tensor, mask: Tensor | None, allow: AllowedForms) -> WrittenValues:
    """Write the values of one tensor; a codec may leave out what the mask drops."""
    if value.numel() == 0:
        return WrittenValues(ValueForm.FULL, {})
    parts: dict[str, Chunks] = {}
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
            parts["mask"] = streams.write_bits(bits, allow.tools, kept)

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
        parts["values"] = streams.write_bits(words.view(np.bool_), allow.tools)
    else:
        if allow.book and len(words):
            book = _write_book(words, allow)
        if book is None:
            parts["values"] = streams.write_values(words, allow.tools)
        else:
            value_form = ValueForm.BOOK
            parts.update(book)
    return WrittenValues(value_form, parts, mask_form)


def read_tensor(
    entry: TensorEntry, cursor: Cursor, known: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Read a tensor and its mask, the inverse of :func:`write_tensor`."""
    n = entry.elements
    bits: Bits | None = np.empty(0, np.bool_)
    if n:
        bits = _read_mask(entry, cursor, known)
    # Where the values that were sent belong; None if all were sent.
    places = None
    if bits is not None and entry.values != ValueForm.FULL:
        places = np.flatnonzero(bits)
    sent = n if places is None else len(places)

    if entry.dtype == torch.bool:
        words: Words = streams.read_bits(cursor, sent, entry.name).view(np.uint8)
    elif entry.values == ValueForm.BOOK and sent:
        words = _read_book(cursor, sent, entry.dtype.itemsize, entry.name)
    else:
        words = streams.read_values(cursor, sent, entry.dtype.itemsize, entry.name)

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
    """Return a tensor's bits to encode, as unsigned numbers of its width, in row order."""
    if value.dtype == torch.bfloat16:
        # numpy has no bfloat16.
        value = value.detach().view(torch.int16)
    words: Words = value.numpy(force=True).reshape(-1).view(UNSIGNED[value.dtype.itemsize])
    return words


def to_bits(mask: Tensor) -> Bits:
    """Return a mask to encode as booleans in row order."""
    bits: Bits = mask.numpy(force=True).reshape(-1)
    return bits


# ---- masks ---------------------------------------------------------------------------------------


def write_mask(mask: Tensor, known: Tensor | None, allow: AllowedForms) -> tuple[MaskForm, Chunks]:
    """Encode a mask by element, by channel or by change, whichever seems smallest."""
    if mask.numel() == 0:
        return MaskForm.BITS, []
    # Most masks come back as the very tensors that were sent.
    if known is mask and allow.known:
        return MaskForm.SAME, []
    bits = to_bits(mask)
    flips: Bits | None = None
    changed = 0
    if known is not None and allow.known:
        flips = bits != to_bits(known)
        changed = int(np.count_nonzero(flips))
        if changed == 0:
            return MaskForm.SAME, []
    ones = int(np.count_nonzero(bits))
    channels = None
    if allow.channels:
        channels = _channels(bits, tuple(mask.shape), ones)
    if channels is None and flips is None:
        return MaskForm.BITS, streams.write_bits(bits, allow.tools, ones)

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
        estimate = 0.0
        for part, part_ones in parts:
            estimate += _estimate_bits(part_ones, len(part), allow.tools)
        if estimate < smallest:
            smallest = estimate
            best_form = form

    chunks: Chunks = []
    for part, part_ones in candidates[best_form]:
        chunks += streams.write_bits(part, allow.tools, part_ones)
    return best_form, chunks


def _read_mask(entry: TensorEntry, cursor: Cursor, known: Tensor | None) -> Bits | None:
    n = entry.elements
    what = f"the mask of {entry.name}"
    if entry.mask == MaskForm.NONE:
        return None
    if entry.mask == MaskForm.CHANNELS:
        rows = streams.read_bits(cursor, entry.shape[0], what)
        columns = streams.read_bits(cursor, entry.shape[1], what)
        grid = (rows[:, None] & columns).reshape(-1, 1)
        # All elements behind one position of the grid are kept or dropped together.
        return np.repeat(grid, n // len(grid), axis=1).reshape(-1)
    if entry.mask in (MaskForm.BITS, MaskForm.ZEROS):
        return streams.read_bits(cursor, n, what)
    if known is None or tuple(known.shape) != entry.shape:
        raise WireError(f"{what} refers to a mask that is not known; send it in full.")
    known_bits = to_bits(known)
    if entry.mask == MaskForm.SAME:
        # A copy, for the caller may change the mask it gets.
        return known_bits.copy()
    return known_bits ^ streams.read_bits(cursor, n, what)


def _channels(bits: Bits, shape: tuple[int, ...], ones: int) -> tuple[Bits, Bits] | None:
    """Return which rows of dimensions 0 and 1 are kept, if the mask keeps or drops whole ones."""
    if len(shape) < 2:
        return None
    # Most masks are not made of channels, so a quick test comes first: in one that is, all rows
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


def _estimate_bits(ones: int, n: int, tools: Tools) -> float:
    """Estimate the bytes that :func:`fedgrove.wire.streams.write_bits` will take."""
    may_compress = tools.ans or tools.zstd
    if may_compress and ones in (0, n):
        return 2
    plain = 1 + n / 8
    if tools.ans:
        return min(plain, flag_bytes(ones, n) + 9)
    return plain


def _worth_dropping(words: Words, zeros: int) -> bool:
    """Return whether leaving out a tensor's zeros saves more than their bitmap costs.

    With less than a sixteenth of zeros the gain is not worth the time.
    """
    n = len(words)
    bitmap = n // 8 + 2
    return words.itemsize > 1 and 16 * zeros >= n and zeros * words.itemsize > bitmap


# ---- codebooks -----------------------------------------------------------------------------------


def _write_book(words: Words, allow: AllowedForms) -> dict[str, Chunks] | None:
    """Write codebook and indices, if the numbers take few enough values for that to be smaller."""
    # A sample of numbers with at most 256 values repeats one, except once in more than 10^14.
    sample = words[:: max(1, len(words) // QUICK_SAMPLE)].tolist()
    if len(set(sample)) == len(sample):
        return None
    book_and_index = find_book(words)
    if book_and_index is None:
        return None
    book, index = book_and_index
    # With fewer than two uses of each entry it is no codebook, only a sorted list.
    if 2 * len(book) > len(words):
        return None
    codebook: Chunks = [bytes([len(book) - 1]), *streams.write_values(book, allow.tools)]
    indices = streams.write_symbols(index, len(book), allow.tools)
    # Wide numbers with many repeats surely gain; the others are also written whole, and compared.
    many = len(words) > 8 * SAMPLE
    wide_and_repeated = words.itemsize > 2 and len(words) > 8 * len(book)
    surely_gains = words.itemsize > 1 and (many or wide_and_repeated)
    if not surely_gains:
        whole = streams.write_values(words, allow.tools)
        if count_bytes(codebook) + count_bytes(indices) >= count_bytes(whole):
            return None
    return {"codebook": codebook, "indices": indices}


def _read_book(cursor: Cursor, n: int, itemsize: int, what: str) -> Words:
    k = cursor.byte(f"the codebook of {what}") + 1
    book = streams.read_values(cursor, k, itemsize, f"the codebook of {what}")
    return book.take(streams.read_symbols(cursor, n, k, f"the indices of {what}"))


def find_book(words: Words) -> tuple[Words, Bytes] | None:
    """Find the codebook of a tensor: distinct bit patterns, and each number's position.

    The patterns are in rising order.

    Returns:
        Both, or None if there are over 256.

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
    """Return each number's position in the book, and any position for one that is not in it.

    By a table of 2^16 slots, where a hash without collisions is found: many times faster than a
    binary search.
    """
    if len(words) <= MOST_SEARCHED:
        # So few are all in the book, so every position is below its length.
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
    """Return the top 16 bits of ``words * key``; a number of one or two bytes is its own slot."""
    if words.itemsize <= 2:
        return words
    width = 8 * words.itemsize
    # An odd multiplier of the words' own width maps different words to different products.
    multiplier = words.dtype.type(key >> (64 - width) | 1)
    return (words * multiplier) >> words.dtype.type(width - 16)
