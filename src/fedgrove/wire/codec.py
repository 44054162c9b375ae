"""Codecs: packets to bytes and back, to the bit; what each part of the bytes cost.

A codec is lossless, so leaving it out of a simulation changes no result. Codecs chain:
``Sparse() >> Entropy()`` may use what either may use, and takes the smallest form for each tensor.
The container says which form was taken, so any codec reads what any other wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import Packet
from ..errors import InputError, NotHeld, WireError, check
from ..trees import Mask
from .container import (
    DIGEST,
    Entry,
    MaskForm,
    Row,
    ValueForm,
    form_byte,
    pack,
    packed_size,
    unpack,
)
from .forms import Allow, read_leaf, to_bits, write_body, write_leaf, write_mask
from .streams import Chunks, Tools, size

COSTS = ("values", "mask", "codebook", "indices", "scores", "header")
"""The named parts of a payload's size."""


@dataclass(frozen=True)
class Encoded:
    """The bytes of a packet and what they were spent on.

    The parts of ``cost`` add up to ``len(data)``.
    """

    data: bytes
    cost: Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """What the values of a tensor take, by part, and their forms."""

    form: ValueForm
    mask: MaskForm
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Known:
    """The mask a receiver holds, and its digest.

    It lets a sender leave out a mask that did not change.
    """

    mask: Mask
    digest: bytes

    @staticmethod
    def of(mask: Mapping[str, Tensor]) -> Known:
        """What a receiver knows once ``mask`` has arrived; both sides compute it themselves."""
        # A copy: the digest must still describe it after the caller changes the original in place.
        copied = {k: v.detach().clone() for k, v in mask.items()}
        return Known(copied, digest_of(copied))


def digest_of(mask: Mapping[str, Tensor]) -> bytes:
    """The name of a mask's contents: equal masks have equal digests."""
    digest = blake2b(digest_size=DIGEST)
    # By sorted names: the two sides may hold the same mask in another order.
    for name in sorted(mask):
        shape = ",".join(map(str, mask[name].shape))
        digest.update(f"{name}\0{shape}\0".encode())
        digest.update(np.packbits(to_bits(mask[name]), bitorder="little").data)
    return digest.digest()


class Codec(Protocol):
    """What an engine asks of a codec."""

    def encode(self, packet: Packet, known: Known | None = None) -> Encoded:
        """The packet as bytes; ``known`` is what its receiver holds."""
        ...

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]:
        """What :meth:`encode` would spend, by part: all that a simulation needs to know."""
        ...

    def decode(
        self,
        data: bytes,
        known: Known | None = None,
        like: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Packet:
        """The packet; ``known`` is what this receiver holds.

        ``like``: the names and shapes it expects.
        """
        ...


class Chainable(ABC):
    """A codec that chains."""

    @property
    @abstractmethod
    def allow(self) -> Allow:
        """What it may do to a tensor."""

    def encode(self, packet: Packet, known: Known | None = None) -> Encoded:
        """The packet as bytes, each tensor in the smallest form this codec has."""
        return _encode(packet, known, _allow(self))

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]:
        """What :meth:`encode` spends, by part; the bytes are not joined.

        A codec that can tell without encoding overrides this.
        """
        if not self.writes_as_measured:
            return self.encode(packet, known).cost
        return self.cost_with(self.measured(packet), packet, known)

    @property
    def writes_as_measured(self) -> bool:
        """Whether :meth:`measured` and :meth:`cost_with` tell what :meth:`encode` spends."""
        # A subclass may encode in another way, or know its cost without measuring.
        kind = type(self)
        return kind.encode is Chainable.encode and kind.cost is Chainable.cost

    @property
    def is_told_by_allow(self) -> bool:
        """Whether any codec that may do the same spends the same: :attr:`allow` says all of it."""
        kind = type(self)
        measures_alike = kind.measured is Chainable.measured
        adds_alike = kind.cost_with is Chainable.cost_with
        return self.writes_as_measured and measures_alike and adds_alike

    def measured(self, packet: Packet) -> list[Measured]:
        """The sizes of a packet's values, tensor by tensor, which :meth:`cost_with` needs."""
        allow = _measuring(self)
        _check_packet(packet)
        mask = packet.mask or {}
        found = []
        for name, value in packet.values.items():
            body = write_body(value, mask.get(name), allow)
            sizes = {part: size(chunks) for part, chunks in body.streams.items()}
            found.append(Measured(body.form, body.mask, sizes))
        return found

    def cost_with(
        self, measured: Sequence[Measured], packet: Packet, known: Known | None
    ) -> Mapping[str, int]:
        """What :meth:`encode` spends on a packet whose values were measured.

        Those take the same whatever the receiver holds, and only masks are written here.
        """
        return _cost_with(measured, packet, known, _measuring(self))

    def decode(
        self,
        data: bytes,
        known: Known | None = None,
        like: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Packet:
        """The packet that any codec wrote.

        Malformed bytes raise :class:`~fedgrove.errors.WireError`, which says what is wrong.
        """
        packet, _ = _decode(data, known, like)
        return packet

    def __rshift__(self, then: Chainable) -> Chain:
        return Chain(self, then)


@dataclass(frozen=True)
class Chain(Chainable):
    """Two codecs as one: what either may do, both may."""

    first: Chainable
    then: Chainable

    @property
    def allow(self) -> Allow:
        """What either may do."""
        return self.first.allow | self.then.allow


@dataclass(frozen=True)
class Dense(Chainable):
    """Every element in its own width, a bit per element for a mask.

    Its size follows from the shapes alone.

    >>> packet = Packet({"w": torch.tensor([1.0, 2.0])})
    >>> Dense().encode(packet).cost["values"]
    9
    >>> Dense().decode(Dense().encode(packet).data).values["w"]
    tensor([1., 2.])
    """

    allow = Allow()

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]:
        """What :meth:`encode` spends, by part; computed once for all packets of the same shapes.

        >>> packet = Packet({"w": torch.tensor([1.0, 2.0])})
        >>> Dense().cost(packet) == Dense().encode(packet).cost
        True
        """
        # A subclass may encode in another way, so that the shapes say nothing.
        if type(self) is not Dense:
            return self.encode(packet, known).cost
        _check_packet(packet)
        mask = packet.mask or {}
        shapes = []
        for name, value in packet.values.items():
            shapes.append((name, tuple(value.shape), value.dtype, name in mask))
        # A copy: a caller that adds to its costs must not change the remembered ones.
        return dict(_dense_cost(tuple(shapes), packet.mask is not None))


@dataclass(frozen=True)
class Bitmap(Chainable):
    """The kept elements and a bit per element; its size follows from the shapes and the density."""

    allow = Allow(kept=True)


@dataclass(frozen=True)
class SubModel(Chainable):
    """The kept elements and, where a mask drops whole channels, a bit per channel."""

    allow = Allow(kept=True, channels=True)


@dataclass(frozen=True)
class Delta(Chainable):
    """The kept elements and what changed in the mask since the receiver's.

    A mask that did not change takes no bytes.
    """

    allow = Allow(kept=True, known=True)


@dataclass(frozen=True)
class Sparse(Chainable):
    """The kept elements and the mask in its smallest form.

    Zeros of tensors without a mask are left out as well.
    """

    allow = Allow(kept=True, zeros=True, channels=True, known=True)


@dataclass(frozen=True)
class Codebook(Chainable):
    """Up to 256 distinct values and an index for each kept element, where that is smaller."""

    allow = Allow(kept=True, book=True)


@dataclass(frozen=True)
class Planes(Chainable):
    """Numbers split into byte planes.

    So a later codec can compress the exponents and leave the rest.
    """

    allow = Allow(tools=Tools(planes=True))


@dataclass(frozen=True)
class Zstd(Chainable):
    """zstandard wherever it makes a stream smaller."""

    allow = Allow(tools=Tools(zstd=True))


@dataclass(frozen=True)
class Entropy(Chainable):
    """An asymmetric numeral system with integer frequencies, or zstandard where that is smaller.

    ``slack``: zstandard is also taken where a long stream (8 KiB and up) gets larger by at most
    this share, since it decodes tens of times faster.
    """

    slack: float = 0.015

    def __post_init__(self) -> None:
        check(0 <= self.slack <= 1, "slack", self.slack, "in [0, 1]")

    @property
    def allow(self) -> Allow:
        """Both coders."""
        return Allow(tools=Tools(ans=True, zstd=True, slack=self.slack))


@dataclass(frozen=True)
class Smallest(Chainable):
    """Everything: ``Sparse() >> Codebook() >> Planes() >> Entropy(slack)``."""

    slack: float = 0.015

    @property
    def allow(self) -> Allow:
        """Every form."""
        return (Sparse() >> Codebook() >> Planes() >> Entropy(self.slack)).allow


@dataclass(frozen=True)
class Line:
    """How one tensor of a payload was written: its forms, its coders and its bytes."""

    name: str
    shape: tuple[int, ...]
    mask: str
    values: str
    coders: tuple[str, ...]
    bytes: int


def explain(data: bytes, known: Known | None = None) -> tuple[Line, ...]:
    """Which form each tensor of a payload took.

    >>> packet = Packet({"w": torch.ones(4, 4)}, {"w": torch.eye(4) > 0})
    >>> explain(Bitmap().encode(packet).data)
    (Line(name='w', shape=(4, 4), mask='bits', values='kept', coders=('raw', 'raw'), bytes=20),)
    """
    _, lines = _decode(data, known, None)
    return lines


# ---- both directions -----------------------------------------------------------------------------


# A chain computes its allowance from its parts, and a codec encodes many packets.
@lru_cache(maxsize=64)
def _allow(codec: Chainable) -> Allow:
    return codec.allow


@lru_cache(maxsize=64)
def _measuring(codec: Chainable) -> Allow:
    """The same, for tools that need not write what they can measure."""
    allow = codec.allow
    return replace(allow, tools=replace(allow.tools, measure=True))


def refers_to_masks(codec: Codec) -> bool:
    """Whether a codec can refer to a mask that its receiver holds; one of your own may."""
    return not isinstance(codec, Chainable) or _allow(codec).known


def _encode(packet: Packet, known: Known | None, allow: Allow) -> Encoded:
    _check_packet(packet)
    mask = packet.mask or {}
    entries: list[Entry] = []
    cost = dict.fromkeys(COSTS, 0)
    body: Chunks = []
    for name, value in packet.values.items():
        leaf = write_leaf(name, value, mask.get(name), _held(known, name, value.shape), allow)
        entries.append(leaf.entry)
        for chunks in leaf.streams.values():
            body += chunks
        _add(cost, name, {part: size(chunks) for part, chunks in leaf.streams.items()})
    data = pack(entries, body, packet.mask is not None, _digest(entries, known))
    cost["header"] = len(data) - sum(cost.values())
    return Encoded(data, cost)


def _cost_with(
    measured: Sequence[Measured], packet: Packet, known: Known | None, allow: Allow
) -> Mapping[str, int]:
    mask = packet.mask or {}
    cost = dict.fromkeys(COSTS, 0)
    rows: list[Row] = []
    refers = False
    for (name, value), of_values in zip(packet.values.items(), measured, strict=True):
        form = of_values.mask
        of_mask = 0
        kept = mask.get(name)
        if kept is not None:
            form, chunks = write_mask(kept, _held(known, name, value.shape), allow)
            of_mask = size(chunks)
            refers = refers or form in _REFERRING
        # A torch.Size is a tuple: it need not become another.
        rows.append((name, value.dtype, value.shape, form_byte(form, of_values.form)))
        _add(cost, name, of_values.sizes, of_mask)
    digest = known.digest if known is not None and refers else None
    body = sum(cost.values())
    cost["header"] = packed_size(rows, body, packet.mask is not None, digest) - body
    return cost


def _digest(entries: Sequence[Entry], known: Known | None) -> bytes | None:
    """The digest, which takes 8 bytes and is sent only where a mask refers to it."""
    if known is None or not any(entry.mask in _REFERRING for entry in entries):
        return None
    return known.digest


_REFERRING = (MaskForm.SAME, MaskForm.FLIPS)


def _add(cost: dict[str, int], name: str, sizes: Mapping[str, int], of_mask: int = 0) -> None:
    """Add the parts of a tensor, and those of its mask, to what a packet spends."""
    is_scores = name.split(".", 1)[0] == "scores"
    if is_scores:
        cost["scores"] += of_mask + sum(sizes.values())
        return
    cost["mask"] += of_mask
    for part, count in sizes.items():
        cost[part] += count


@lru_cache(maxsize=64)
def _dense_cost(
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...], masked: bool
) -> Mapping[str, int]:
    """What :class:`Dense` spends on a packet of these names, shapes, dtypes and "has a mask"."""
    # Zeros cost what any other values would, and encoding them cannot disagree with `encode`.
    values: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    for name, shape, dtype, has_mask in shapes:
        values[name] = torch.zeros(shape, dtype=dtype)
        if has_mask:
            mask[name] = torch.zeros(shape, dtype=torch.bool)
    return Dense().encode(Packet(values, mask if masked else None)).cost


def _decode(
    data: bytes, known: Known | None, like: Mapping[str, tuple[int, ...]] | None
) -> tuple[Packet, tuple[Line, ...]]:
    opened = unpack(data, like)
    if opened.known is not None and (known is None or known.digest != opened.known):
        raise NotHeld(
            "the payload refers to a mask this receiver does not hold; a full resend is needed."
        )
    body = opened.body
    values: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    lines: list[Line] = []
    for entry in opened.entries:
        start = body.at
        # The cursor collects the methods of this tensor's streams, for its line.
        body.methods = []
        value, kept = read_leaf(entry, body, _held(known, entry.name, entry.shape))
        values[entry.name] = value
        if kept is not None:
            mask[entry.name] = kept
        line = Line(
            name=entry.name,
            shape=entry.shape,
            mask=entry.mask.name.lower(),
            values=entry.values.name.lower(),
            coders=tuple(method.name.lower() for method in body.methods),
            bytes=body.at - start,
        )
        lines.append(line)
    if body.at != len(body.data):
        raise WireError(f"{len(body.data) - body.at} bytes follow the last tensor.")
    return Packet(values, mask if opened.masked else None), tuple(lines)


def _held(known: Known | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The mask a receiver holds for a tensor; None where it holds none, or one of another shape."""
    if known is None:
        return None
    held = known.mask.get(name)
    if held is None or held.shape != shape:
        return None
    return held


def _check_packet(packet: Packet) -> None:
    """Refuse masks that no reader could apply."""
    for name, kept in (packet.mask or {}).items():
        if name not in packet.values:
            raise InputError(
                f"the mask names {name!r}, which is not among the packet's tensors; leave it out."
            )
        expected = packet.values[name].shape
        if kept.shape != expected or kept.dtype != torch.bool:
            raise InputError(
                f"the mask of {name!r} is {kept.dtype} of shape {tuple(kept.shape)}; it must be"
                f" torch.bool of shape {tuple(expected)}."
            )
