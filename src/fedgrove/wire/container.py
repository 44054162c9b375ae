"""The container ``fedgrove.v1``: magic, version, named tensors, streams, checksum (docs/wire.md).

Reading is safe: every length is checked against a limit before anything is allocated, and whatever is wrong with the
bytes raises :class:`~fedgrove.errors.WireError` with a sentence. The checksum finds accidents, not attacks: who sent
the bytes is for the transport to prove.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, reduce

import torch

from ..errors import InputError, WireError, check
from .entropy import Cursor, deflate, inflate, varint
from .streams import Chunks

MAGIC, VERSION = b"fgrv", 1
HAS_MASK, SHORT_INDEX, HAS_KNOWN = 1, 2, 4
MAX_TENSORS, MAX_NAME, MAX_DIMS, MAX_DIM, MAX_INDEX = 1 << 14, 256, 16, 1 << 40, 1 << 22
SMALL_INDEX = 1 << 14
FREE_BYTES, FREE_RATIO, WORKING = 1 << 25, 1 << 12, 12
DIGEST = 8

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""A dtype's place here is its code in the index; new ones are added at the end."""


Row = tuple[str, torch.dtype, tuple[int, ...], int]
"""Name, dtype, shape and form of a tensor, which hash faster than an :class:`Entry`."""


class MaskForm(IntEnum):
    """How the mask of a tensor is written."""

    NONE = 0  # no mask
    BITS = 1  # a bit per element
    CHANNELS = 2  # a bit per row of dimension 0, then one per row of dimension 1
    SAME = 3  # the mask the receiver holds
    FLIPS = 4  # a bit per element: differs from the mask the receiver holds
    ZEROS = 5  # no mask, but a bit per element: is not zero


class ValueForm(IntEnum):
    """How the values of a tensor are written."""

    FULL = 0  # every element
    KEPT = 1  # the kept elements
    BOOK = 2  # a codebook, then an index for each kept element


@dataclass(frozen=True)
class Entry:
    """What the index says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mask: MaskForm = MaskForm.NONE
    values: ValueForm = ValueForm.FULL

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Opened:
    """A container whose index is read and whose body is not."""

    masked: bool
    known: bytes | None
    entries: tuple[Entry, ...]
    body: Cursor


def pack(entries: Sequence[Entry], body: Chunks, masked: bool, known: bytes | None) -> bytes:
    """A container: header, index, body, checksum."""
    check(
        len(entries) <= MAX_TENSORS, "the number of tensors", len(entries), f"at most {MAX_TENSORS}"
    )
    packed, index = _squeezed(
        tuple((e.name, e.dtype, e.shape, e.mask | e.values << 4) for e in entries)
    )
    flags = HAS_MASK * masked | SHORT_INDEX * packed | HAS_KNOWN * (known is not None)
    head = MAGIC + bytes([VERSION, flags]) + (known or b"") + varint(len(entries)) + index
    chunks = [head, *body]
    return b"".join(
        [*chunks, struct.pack("<I", reduce(lambda crc, c: zlib.crc32(c, crc), chunks, 0))]
    )


def unpack(data: bytes, like: Mapping[str, tuple[int, ...]] | None = None) -> Opened:
    """Check the frame and read the index; nothing is allocated that the bytes or ``like`` do not vouch for."""
    cursor = Cursor(memoryview(data)[:-4])
    _check_frame(data)
    cursor.at = 5
    flags = cursor.byte("the flags")
    if flags > 7:
        raise WireError(f"the flags are {flags}; version {VERSION} knows 0 to 7.")
    known = bytes(cursor.take(DIGEST, "the digest")) if flags & HAS_KNOWN else None
    count = cursor.varint(MAX_TENSORS, "the number of tensors")
    index = _index_bytes(cursor, bool(flags & SHORT_INDEX))
    read = _read_again if len(index) <= SMALL_INDEX else _read_index
    entries = read(index, count, bool(flags & HAS_MASK), known is not None)
    _check_like(entries, like) if like is not None else _check_growth(entries, len(data))
    return Opened(bool(flags & HAS_MASK), known, entries, cursor)


def _check_frame(data: bytes) -> None:
    if len(data) < 12 or data[:4] != MAGIC:
        raise WireError(
            f"{len(data)} bytes that begin with {bytes(data[:4])!r} are no fedgrove payload."
        )
    if data[4] != VERSION:
        raise WireError(
            f"the payload has version {data[4]}; this library reads {VERSION}: update the older side."
        )
    if zlib.crc32(memoryview(data)[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise WireError(
            "the checksum does not match: the payload was cut or changed on its way; send it again."
        )


@lru_cache(maxsize=64)
def _squeezed(entries: tuple[Row, ...]) -> tuple[bool, bytes]:
    """Lengths and index, and whether it is squeezed. Kept, for the packets of a run differ in their numbers only."""
    index = _write_index(entries)
    short = deflate(index)
    packed = len(short) + len(varint(len(index))) < len(index)
    return packed, varint(len(index)) + (varint(len(short)) + short if packed else index)


def _write_index(entries: Sequence[Row]) -> bytes:
    out, last = bytearray(), b""
    for called, dtype, shape, form in entries:
        name = called.encode()
        check(
            len(name) <= MAX_NAME,
            "the length of a tensor's name",
            len(name),
            f"at most {MAX_NAME} bytes",
        )
        check(
            len(shape) <= MAX_DIMS,
            f"the number of dimensions of {called}",
            len(shape),
            f"at most {MAX_DIMS}",
        )
        if dtype not in DTYPES:
            raise InputError(
                f"{called} has dtype {dtype}; allowed: {', '.join(str(d)[6:] for d in DTYPES)}."
            )
        shared = _shared(last, name)
        out += varint(shared) + varint(len(name) - shared) + name[shared:]
        out += bytes([DTYPES.index(dtype), form, len(shape)]) + b"".join(varint(d) for d in shape)
        last = name
    return bytes(out)


def _shared(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _index_bytes(cursor: Cursor, short: bool) -> bytes:
    n = cursor.varint(MAX_INDEX, "the length of the index")
    if not short:
        return bytes(cursor.take(n, "the index"))
    return inflate(
        cursor.take(cursor.varint(MAX_INDEX, "the length of the index"), "the index"),
        n,
        "the index",
    )


def _read_index(index: bytes, count: int, masked: bool, known: bool) -> tuple[Entry, ...]:
    cursor, last = Cursor(memoryview(index)), b""
    entries: dict[str, Entry] = {}
    for _ in range(count):
        last = _read_name(cursor, last)
        entry = _read_entry(cursor, _text(last))
        if entry.name in entries:
            raise WireError(f"the payload names {entry.name!r} twice.")
        if not masked and entry.mask not in (MaskForm.NONE, MaskForm.ZEROS):
            raise WireError(f"{entry.name} has a mask in a payload without masks.")
        if not known and entry.mask in (MaskForm.SAME, MaskForm.FLIPS):
            raise WireError(
                f"{entry.name} refers to a held mask, and the payload does not say which."
            )
        entries[entry.name] = entry
    if cursor.at != len(cursor.data):
        raise WireError(
            f"the index holds {len(cursor.data) - cursor.at} bytes after its last tensor."
        )
    return tuple(entries.values())


# The packets of a run have the same index. Small ones only: what strangers send must not fill the memory.
_read_again = lru_cache(maxsize=64)(_read_index)


def _read_name(cursor: Cursor, last: bytes) -> bytes:
    shared = cursor.varint(len(last), "the shared part of a name")
    return last[:shared] + bytes(
        cursor.take(cursor.varint(MAX_NAME - shared, "the length of a name"), "a name")
    )


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the name {name!r} is not UTF-8.") from error


def _read_entry(cursor: Cursor, name: str) -> Entry:
    code, form, dims = cursor.take(3, f"the entry of {name}")
    if code >= len(DTYPES):
        raise WireError(f"{name} has dtype code {code}; codes 0 to {len(DTYPES) - 1} are known.")
    if form & 15 > max(MaskForm) or form >> 4 > max(ValueForm):
        raise WireError(f"{name} is written in form {form}, which version {VERSION} does not know.")
    if dims > MAX_DIMS:
        raise WireError(f"{name} has {dims} dimensions; at most {MAX_DIMS} are allowed.")
    shape = tuple(cursor.varint(MAX_DIM, f"a dimension of {name}") for _ in range(dims))
    if math.prod(max(d, 1) for d in shape) > MAX_DIM:
        raise WireError(f"{name} has shape {shape}; at most {MAX_DIM} elements are allowed.")
    mask, values = MaskForm(form & 15), ValueForm(form >> 4)
    if mask == MaskForm.CHANNELS and dims < 2:
        raise WireError(f"{name} has {dims} dimensions and a mask of channels, which needs two.")
    if values == ValueForm.BOOK and DTYPES[code] == torch.bool:
        raise WireError(f"{name} holds booleans and a codebook, which they cannot have.")
    return Entry(name, DTYPES[code], shape, mask, values)


def _check_like(entries: Sequence[Entry], like: Mapping[str, tuple[int, ...]]) -> None:
    for e in entries:
        if e.name not in like:
            raise WireError(f"the payload holds {e.name!r}, which was not expected.")
        if e.shape != tuple(like[e.name]):
            raise WireError(f"{e.name} has shape {e.shape}; {tuple(like[e.name])} was expected.")
    missing = like.keys() - {e.name for e in entries}
    if missing:
        raise WireError(f"the payload lacks {', '.join(map(repr, sorted(missing)))}.")


def _check_growth(entries: Sequence[Entry], given: int) -> None:
    # Nobody vouches for the shapes, so a small payload may not ask for a large tree; an element takes its own width
    # and, while it is read, a symbol of 4 bytes or a place of 8, and a mask.
    wanted = sum(e.count * (e.dtype.itemsize + WORKING) for e in entries)
    allowed = max(FREE_BYTES, FREE_RATIO * given)
    if wanted > allowed:
        raise WireError(
            f"{given} bytes claim tensors that take {wanted} bytes to read; without the expected shapes at most "
            f"{allowed} are allowed: pass like={{name: shape}} to decode."
        )
