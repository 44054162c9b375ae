"""The container ``fedgrove.v1``: magic, version, named tensors, streams, checksum (docs/wire.md).

Reading is safe: every length is checked against a limit before anything is allocated, and malformed
bytes raise :class:`~fedgrove.errors.WireError` with a sentence that states what is wrong. The
checksum detects accidents, not attacks: the transport has to prove who sent the bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, UnexpectedTensors, WireError, check
from .entropy import Cursor, deflate, inflate, varint
from .streams import Chunks

MAGIC = b"fgrv"
VERSION = 1
# Bytes of the digest that names the mask a receiver knows.
DIGEST = 8
# Bytes of the checksum at the end.
CHECKSUM = 4

# The flags, which are added up in one byte: the packet has masks; the index is compressed; a digest
# follows, because some masks refer to the one that the receiver knows.
HAS_MASK = 1
SHORT_INDEX = 2
HAS_KNOWN = 4

# The limits of what a reader accepts.
MAX_TENSORS = 1 << 14
# In bytes of UTF-8.
MAX_NAME = 256
MAX_DIMS = 16
# Of one dimension, and of a tensor's elements.
MAX_DIM = 1 << 40
# Bytes of the index.
MAX_INDEX = 1 << 22
# An index of at most this many bytes is cached once it is parsed.
SMALL_INDEX = 1 << 14

# Without the expected shapes, a payload may take this much memory to read, or this many times its
# own length if that is more ...
FREE_BYTES = 1 << 25
FREE_RATIO = 1 << 12
# ... where an element takes its own width and, while it is read, a place of 8 bytes (or a symbol of
# 4) and its part of a mask.
WORKING_BYTES = 12

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
"""A dtype's position here is its code in the index; new ones are added at the end."""


TensorForms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Names, types and shapes of tensors, as a reader expects them."""


class MaskForm(IntEnum):
    """How the mask of a tensor is written."""

    # no mask
    NONE = 0
    # a bit per element
    BITS = 1
    # a bit per row of dimension 0, then one per row of dimension 1
    CHANNELS = 2
    # the mask the receiver knows
    SAME = 3
    # a bit per element: differs from the mask the receiver knows
    FLIPS = 4
    # no mask, but a bit per element: is not zero
    ZEROS = 5


class ValueForm(IntEnum):
    """How the values of a tensor are written."""

    # every element
    FULL = 0
    # the kept elements
    KEPT = 1
    # a codebook, then an index for each kept element
    BOOK = 2


class TensorEntry(NamedTuple):
    """What the index contains about one tensor; a tuple, which hashes fast."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: int
    """The mask's form in the low four bits, the values' form in the high four."""

    @classmethod
    def of(cls, name: str, value: Tensor, mask: MaskForm, values: ValueForm) -> TensorEntry:
        """Return the index entry of a tensor that is encoded in these forms."""
        # A torch.Size is a tuple: no need to make another.
        return cls(name, value.dtype, value.shape, mask | values << 4)

    @property
    def mask(self) -> MaskForm:
        """The form in which the mask's bytes are written."""
        return MaskForm(self.form & 15)

    @property
    def values(self) -> ValueForm:
        """The form in which the values' bytes are written."""
        return ValueForm(self.form >> 4)

    @property
    def refers_to_known(self) -> bool:
        """Whether its mask refers to the one that the receiver knows."""
        return self.form & 15 in (MaskForm.SAME, MaskForm.FLIPS)

    @property
    def elements(self) -> int:
        """The number of elements of an encoded tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OpenedContainer:
    """A container whose index has been read and whose body has not."""

    masked: bool
    known: bytes | None
    entries: tuple[TensorEntry, ...]
    body: Cursor


# ---- writing -------------------------------------------------------------------------------------


def pack(entries: Sequence[TensorEntry], body: Chunks, masked: bool, known: bytes | None) -> bytes:
    """Write the bytes of a container: header, index, body, checksum.

    Args:
        entries: One per tensor.
        body: The streams of all tensors, in order.
        masked: Whether the packet has masks.
        known: The digest of the mask that the receiver knows, if a tensor refers to it.
    """
    head = _head(tuple(entries), masked, known)
    # The body is joined once, at the end: it may be hundreds of megabytes.
    chunks = [head, *body]
    checksum = 0
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    chunks.append(struct.pack("<I", checksum))
    return b"".join(chunks)


def packed_size(
    entries: Sequence[TensorEntry], body: int, masked: bool, known: bytes | None
) -> int:
    """Return how many bytes :func:`pack` writes, if the body takes ``body`` bytes."""
    return len(_head(tuple(entries), masked, known)) + body + CHECKSUM


def _head(entries: tuple[TensorEntry, ...], masked: bool, known: bytes | None) -> bytes:
    """Return everything before the body."""
    check(
        len(entries) <= MAX_TENSORS,
        "the number of tensors",
        len(entries),
        f"at most {MAX_TENSORS}",
    )
    compressed, index = _index_field(entries)

    flags = 0
    if masked:
        flags |= HAS_MASK
    if compressed:
        flags |= SHORT_INDEX
    if known is not None:
        flags |= HAS_KNOWN
    return MAGIC + bytes([VERSION, flags]) + (known or b"") + varint(len(entries)) + index


# Cached: the packets of a run have the same index and differ only in their numbers.
@lru_cache(maxsize=64)
def _index_field(entries: tuple[TensorEntry, ...]) -> tuple[bool, bytes]:
    """Return whether the index is compressed, and the index preceded by its lengths."""
    index = _write_index(entries)
    frame = deflate(index)
    length = varint(len(index))
    # The second length, which only a compressed index has, is at most as long as the first.
    if len(frame) + len(length) < len(index):
        return True, length + varint(len(frame)) + frame
    return False, length + index


def _write_index(entries: Sequence[TensorEntry]) -> bytes:
    out = bytearray()
    last = b""
    for name, dtype, shape, form in entries:
        encoded = name.encode()
        check(
            len(encoded) <= MAX_NAME,
            "the length of a tensor's name",
            len(encoded),
            f"at most {MAX_NAME} bytes",
        )
        check(
            len(shape) <= MAX_DIMS,
            f"the number of dimensions of {name}",
            len(shape),
            f"at most {MAX_DIMS}",
        )
        if dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise InputError(f"{name} has dtype {dtype}; allowed: {allowed}.")
        # The names of one layer's tensors begin alike, so only what differs is written.
        shared = _shared_prefix(last, encoded)
        out += varint(shared) + varint(len(encoded) - shared) + encoded[shared:]
        out += bytes([DTYPES.index(dtype), form, len(shape)])
        for dim in shape:
            out += varint(dim)
        last = encoded
    return bytes(out)


def _shared_prefix(a: bytes, b: bytes) -> int:
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    return shared


# ---- reading -------------------------------------------------------------------------------------


def unpack(data: bytes, like: TensorForms | None = None) -> OpenedContainer:
    """Check the frame of received bytes and read the index.

    Nothing is allocated that neither the length of the bytes nor the expected shapes justify.

    Args:
        data: The container.
        like: The expected names, types and shapes; None if nothing is known about them.

    Raises:
        WireError: The bytes are malformed, or not what was expected.
    """
    cursor = Cursor(memoryview(data)[:-4], at=5)
    _check_frame(data)
    flags = cursor.byte("the flags")
    if flags > 7:
        raise WireError(f"the flags are {flags}; version {VERSION} knows 0 to 7.")
    masked = bool(flags & HAS_MASK)
    known = None
    if flags & HAS_KNOWN:
        known = bytes(cursor.take(DIGEST, "the digest"))
    count = cursor.varint(MAX_TENSORS, "the number of tensors")
    index = _index_bytes(cursor, bool(flags & SHORT_INDEX))
    if len(index) <= SMALL_INDEX:
        entries = _read_small_index(index, count, masked, known is not None)
    else:
        entries = _read_index(index, count, masked, known is not None)
    if like is not None:
        _check_like(entries, like)
    else:
        _check_growth(entries, len(data))
    return OpenedContainer(masked, known, entries, cursor)


def _check_frame(data: bytes) -> None:
    """Check magic, version and checksum."""
    # 12: the container of no tensors, which is magic, version, flags, two counts of 0 and checksum.
    if len(data) < 12 or data[:4] != MAGIC:
        raise WireError(
            f"{len(data)} bytes that begin with {bytes(data[:4])!r} are not a fedgrove payload."
        )
    if data[4] != VERSION:
        raise WireError(
            f"the payload has version {data[4]}; this library reads {VERSION}: update the older"
            " side."
        )
    if zlib.crc32(memoryview(data)[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise WireError(
            "the checksum does not match: the payload was truncated or changed on the way; send it "
            "again."
        )


def _index_bytes(cursor: Cursor, compressed: bool) -> bytes:
    n = cursor.varint(MAX_INDEX, "the length of the index")
    if not compressed:
        return bytes(cursor.take(n, "the index"))
    frame_length = cursor.varint(MAX_INDEX, "the length of the index")
    frame = cursor.take(frame_length, "the index")
    return inflate(frame, n, "the index")


def _read_index(index: bytes, count: int, masked: bool, known: bool) -> tuple[TensorEntry, ...]:
    cursor = Cursor(memoryview(index))
    entries: dict[str, TensorEntry] = {}
    name = b""
    for _ in range(count):
        name = _read_name(cursor, name)
        entry = _read_entry(cursor, name)
        if entry.name in entries:
            raise WireError(f"the payload names {entry.name!r} twice.")
        if not masked and entry.mask not in (MaskForm.NONE, MaskForm.ZEROS):
            raise WireError(f"{entry.name} has a mask in a payload without masks.")
        if not known and entry.refers_to_known:
            raise WireError(
                f"{entry.name} refers to a known mask, but the payload does not name it."
            )
        entries[entry.name] = entry
    if cursor.at != len(cursor.data):
        left = len(cursor.data) - cursor.at
        raise WireError(f"the index has {left} bytes after its last tensor.")
    return tuple(entries.values())


# The packets of a run have the same index, so it is parsed once. Only a small one is cached: what
# an unknown sender sends must not fill the memory.
_read_small_index = lru_cache(maxsize=64)(_read_index)


def _read_name(cursor: Cursor, last: bytes) -> bytes:
    shared = cursor.varint(len(last), "the shared part of a name")
    length = cursor.varint(MAX_NAME - shared, "the length of a name")
    return last[:shared] + bytes(cursor.take(length, "a name"))


def _read_entry(cursor: Cursor, encoded: bytes) -> TensorEntry:
    try:
        name = encoded.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the name {encoded!r} is not UTF-8.") from error
    code, form, dims = cursor.take(3, f"the entry of {name}")
    if code >= len(DTYPES):
        raise WireError(f"{name} has dtype code {code}; codes 0 to {len(DTYPES) - 1} are known.")
    dtype = DTYPES[code]
    mask_form = form & 15
    value_form = form >> 4
    if mask_form > max(MaskForm) or value_form > max(ValueForm):
        raise WireError(f"{name} is written in form {form}, which version {VERSION} does not know.")
    if dims > MAX_DIMS:
        raise WireError(f"{name} has {dims} dimensions; at most {MAX_DIMS} are allowed.")
    shape: tuple[int, ...] = ()
    elements = 1
    for _ in range(dims):
        dim = cursor.varint(MAX_DIM, f"a dimension of {name}")
        shape += (dim,)
        # A zero counts as a one: torch multiplies the other dimensions all the same, and would fail
        # with an overflow.
        elements *= max(dim, 1)
    if elements > MAX_DIM:
        raise WireError(f"{name} has shape {shape}; at most {MAX_DIM} elements are allowed.")
    if mask_form == MaskForm.CHANNELS and dims < 2:
        raise WireError(f"{name} has {dims} dimensions and a mask of channels, which needs two.")
    if value_form == ValueForm.BOOK and dtype == torch.bool:
        raise WireError(f"{name} contains booleans and a codebook, which they cannot have.")
    return TensorEntry(name, dtype, shape, form)


def _check_like(entries: Sequence[TensorEntry], like: TensorForms) -> None:
    missing = set(like)
    for entry in entries:
        if entry.name not in like:
            raise UnexpectedTensors(f"the payload contains {entry.name!r}, which was not expected.")
        dtype, shape = like[entry.name]
        if entry.dtype != dtype or entry.shape != tuple(shape):
            raise UnexpectedTensors(
                f"{entry.name} is {entry.dtype} of shape {entry.shape}; {dtype} of shape "
                f"{tuple(shape)} was expected."
            )
        missing.discard(entry.name)
    if missing:
        raise UnexpectedTensors(f"the payload lacks {', '.join(map(repr, sorted(missing)))}.")


def _check_growth(entries: Sequence[TensorEntry], given: int) -> None:
    # Nothing confirms the shapes, so a small payload may not ask for large tensors.
    wanted = 0
    for entry in entries:
        wanted += entry.elements * (entry.dtype.itemsize + WORKING_BYTES)
    allowed = max(FREE_BYTES, FREE_RATIO * given)
    if wanted > allowed:
        raise WireError(
            f"{given} bytes claim to contain tensors that take {wanted} bytes to read; without the "
            f"expected shapes at most {allowed} are allowed."
        )
