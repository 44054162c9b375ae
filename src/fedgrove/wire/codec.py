"""Codecs: packets to bytes and back without loss, and what each part of the bytes costs.

A codec is lossless, so leaving it out of a simulation changes no result. Codecs chain:
``Sparse() >> Entropy()`` may use the forms of both, and takes the smallest form for each tensor.
The container names the form of each tensor, so any codec reads what any other wrote.
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
from ..errors import InputError, UnknownMask, WireError, check
from ..renamed import find_old_names
from ..trees import Mask
from .container import (
    DIGEST,
    MaskForm,
    TensorEntry,
    TensorForms,
    ValueForm,
    pack,
    packed_size,
    unpack,
)
from .streams import Chunks, Tools, count_bytes
from .tensors import (
    AllowedForms,
    read_tensor,
    to_bits,
    write_mask,
    write_tensor,
    write_tensor_values,
)

COSTS = ("values", "mask", "codebook", "indices", "scores", "header")
"""The named parts of a payload's size."""
CostByPart = Mapping[str, int]
"""Bytes, by the names of :data:`COSTS`."""


@dataclass(frozen=True)
class Encoded:
    """The bytes of a packet and what they were spent on.

    The parts of ``cost`` add up to ``len(data)``.
    """

    data: bytes
    cost: CostByPart


@dataclass(frozen=True)
class MeasuredTensor:
    """The size of a tensor's values by part, and the forms they are written in."""

    form: ValueForm
    mask: MaskForm
    sizes: CostByPart


@dataclass(frozen=True)
class KnownMask:
    """The mask that a receiver knows from an earlier message, and its digest.

    It lets a sender leave out a mask that did not change.
    """

    mask: Mask
    digest: bytes

    @staticmethod
    def of(mask: Mapping[str, Tensor]) -> KnownMask:
        """Return the mask that a receiver of bytes knows after ``mask`` has arrived.

        Both sides compute it.
        """
        # A copy: the digest must still describe it after the caller changes the original in place.
        copied = {k: v.detach().clone() for k, v in mask.items()}
        return KnownMask(copied, hash_mask(copied))


def hash_mask(mask: Mapping[str, Tensor]) -> bytes:
    """Hash the contents of a mask: equal masks have equal digests."""
    digest = blake2b(digest_size=DIGEST)
    # By sorted names: the two sides may have the mask's tensors in different orders.
    for name in sorted(mask):
        shape = ",".join(map(str, mask[name].shape))
        digest.update(f"{name}\0{shape}\0".encode())
        digest.update(np.packbits(to_bits(mask[name]), bitorder="little").data)
    return digest.digest()


class Codec(Protocol):
    """What an engine needs from a codec."""

    def encode(self, packet: Packet, known: KnownMask | None = None) -> Encoded:
        """Write a packet as bytes.

        Args:
            packet: What to send.
            known: The mask that the receiver knows, if any.
        """
        ...

    def cost(self, packet: Packet, known: KnownMask | None = None) -> CostByPart:
        """Return the bytes that :meth:`encode` would spend, by part: all a simulation needs."""
        ...

    def decode(
        self,
        data: bytes,
        known: KnownMask | None = None,
        like: TensorForms | None = None,
    ) -> Packet:
        """Read a packet from bytes.

        Args:
            data: What :meth:`encode` wrote.
            known: The mask that this receiver knows, if any.
            like: The names, types and shapes that it expects.
        """
        ...


class Chainable(ABC):
    """A codec that chains with others by ``>>``."""

    @property
    @abstractmethod
    def allow(self) -> AllowedForms:
        """The forms in which the codec may encode a tensor."""

    def encode(self, packet: Packet, known: KnownMask | None = None) -> Encoded:
        """Write a packet as bytes, each tensor in the smallest form this codec allows.

        Args:
            packet: What to send.
            known: The mask that the receiver knows, if any.

        Raises:
            InputError: The mask does not fit the values, or a tensor has a type or a name that
                cannot be sent.
        """
        return _encode(packet, known, _allowed_forms(self))

    def cost(self, packet: Packet, known: KnownMask | None = None) -> CostByPart:
        """Return what :meth:`encode` spends, by part, without joining the bytes."""
        if not self.can_measure:
            return self.encode(packet, known).cost
        return self.cost_of_measured(self.measure(packet), packet, known)

    @property
    def can_measure(self) -> bool:
        """Whether :meth:`measure` and :meth:`cost_of_measured` agree with :meth:`encode`."""
        # A subclass may encode in another way, or know its cost without measuring.
        kind = type(self)
        return kind.encode is Chainable.encode and kind.cost is Chainable.cost

    @property
    def is_defined_by_allow(self) -> bool:
        """Whether :attr:`allow` alone decides what :meth:`encode` spends."""
        kind = type(self)
        measures_alike = kind.measure is Chainable.measure
        adds_alike = kind.cost_of_measured is Chainable.cost_of_measured
        return self.can_measure and measures_alike and adds_alike

    def measure(self, packet: Packet) -> list[MeasuredTensor]:
        """Measure the encoded size of a packet's values, tensor by tensor.

        :meth:`cost_of_measured` takes the result.
        """
        allow = _allowed_when_measuring(self)
        _check_packet(packet)
        mask = packet.mask or {}
        measured = []
        for name, value in packet.values.items():
            written = write_tensor_values(value, mask.get(name), allow)
            sizes = {part: count_bytes(chunks) for part, chunks in written.streams.items()}
            measured.append(MeasuredTensor(written.form, written.mask, sizes))
        return measured

    def cost_of_measured(
        self, measured: Sequence[MeasuredTensor], packet: Packet, known: KnownMask | None
    ) -> CostByPart:
        """Return what :meth:`encode` spends on a packet whose values were measured.

        The size of values does not depend on the receiver, so only masks are written here.
        """
        allow = _allowed_when_measuring(self)
        mask = packet.mask or {}
        cost = dict.fromkeys(COSTS, 0)
        entries: list[TensorEntry] = []
        for (name, value), of_values in zip(packet.values.items(), measured, strict=True):
            form = of_values.mask
            mask_size = 0
            kept = mask.get(name)
            if kept is not None:
                form, chunks = write_mask(kept, _find_known(known, name, value.shape), allow)
                mask_size = count_bytes(chunks)
            entries.append(TensorEntry.of(name, value, form, of_values.form))
            _add_cost(cost, name, of_values.sizes, mask_size)
        digest = _digest_to_send(entries, known)
        body = sum(cost.values())
        cost["header"] = packed_size(entries, body, packet.mask is not None, digest) - body
        return cost

    def decode(
        self,
        data: bytes,
        known: KnownMask | None = None,
        like: TensorForms | None = None,
    ) -> Packet:
        """Read a packet that any codec wrote.

        Args:
            data: The bytes.
            known: The mask that this receiver knows, if any.
            like: The names, types and shapes that it expects. Without them a small payload may not
                claim large tensors.

        Raises:
            WireError: The bytes are malformed; the message states what is wrong.
            UnknownMask: They refer to a mask that is not ``known``.
        """
        packet, _ = _decode(data, known, like)
        return packet

    def __rshift__(self, then: Chainable) -> Chain:
        return Chain(self, then)


@dataclass(frozen=True)
class Chain(Chainable):
    """Two codecs as one, which may use the forms of both."""

    first: Chainable
    then: Chainable

    @property
    def allow(self) -> AllowedForms:
        """The forms in which both codecs write bytes."""
        return self.first.allow | self.then.allow


@dataclass(frozen=True)
class Dense(Chainable):
    """Every element in full width, a bit per element for a mask.

    Its size follows from the shapes alone.

    >>> packet = Packet({"w": torch.tensor([1.0, 2.0])})
    >>> Dense().encode(packet).cost["values"]
    9
    >>> Dense().decode(Dense().encode(packet).data).values["w"]
    tensor([1., 2.])
    """

    allow = AllowedForms()

    def cost(self, packet: Packet, known: KnownMask | None = None) -> CostByPart:
        """Return what :meth:`encode` spends, by part; computed once for packets of equal shapes.

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
        # A copy: a caller that adds to its costs must not change the cached ones.
        return dict(_dense_cost(tuple(shapes), packet.mask is not None))


@dataclass(frozen=True)
class Bitmap(Chainable):
    """The kept elements and a bit per element; its size follows from the shapes and the density."""

    allow = AllowedForms(kept=True)


@dataclass(frozen=True)
class SubModel(Chainable):
    """The kept elements and, where a mask drops whole channels, a bit per channel."""

    allow = AllowedForms(kept=True, channels=True)


@dataclass(frozen=True)
class Delta(Chainable):
    """The kept elements and what changed since the mask that the receiver knows.

    A mask that did not change takes no bytes.
    """

    allow = AllowedForms(kept=True, known=True)


@dataclass(frozen=True)
class Sparse(Chainable):
    """The kept elements and the mask in its smallest form.

    Zeros of tensors without a mask are left out as well.
    """

    allow = AllowedForms(kept=True, zeros=True, channels=True, known=True)


@dataclass(frozen=True)
class Codebook(Chainable):
    """Up to 256 distinct values and an index for each kept element, where that is smaller."""

    allow = AllowedForms(kept=True, book=True)


@dataclass(frozen=True)
class Planes(Chainable):
    """Numbers split into byte planes.

    So a later codec can compress the exponents and leave the rest.
    """

    allow = AllowedForms(tools=Tools(planes=True))


@dataclass(frozen=True)
class Zstd(Chainable):
    """zstandard wherever it makes a stream smaller."""

    allow = AllowedForms(tools=Tools(zstd=True))


@dataclass(frozen=True)
class Entropy(Chainable):
    """An asymmetric numeral system with integer frequencies, or zstandard where that is smaller.

    ``slack``: zstandard is also taken where it makes a long stream (8 KiB and up) larger by at most
    this share, since it decodes tens of times faster.
    """

    slack: float = 0.015

    def __post_init__(self) -> None:
        check(0 <= self.slack <= 1, "slack", self.slack, "in [0, 1]")

    @property
    def allow(self) -> AllowedForms:
        """Both entropy coders of this codec."""
        return AllowedForms(tools=Tools(ans=True, zstd=True, slack=self.slack))


@dataclass(frozen=True)
class Smallest(Chainable):
    """Everything: ``Sparse() >> Codebook() >> Planes() >> Entropy(slack)``."""

    slack: float = 0.015

    @property
    def allow(self) -> AllowedForms:
        """Every form in which a codec can write bytes."""
        return (Sparse() >> Codebook() >> Planes() >> Entropy(self.slack)).allow


@dataclass(frozen=True)
class ExplainedTensor:
    """How one tensor of a payload was written: its forms, its coders and its bytes."""

    name: str
    shape: tuple[int, ...]
    mask: str
    values: str
    coders: tuple[str, ...]
    bytes: int


def explain(data: bytes, known: KnownMask | None = None) -> tuple[ExplainedTensor, ...]:
    """Return which form each tensor of a payload has.

    >>> packet = Packet({"w": torch.ones(4, 4)}, {"w": torch.eye(4) > 0})
    >>> (tensor,) = explain(Bitmap().encode(packet).data)
    >>> tensor.mask, tensor.values, tensor.coders, tensor.bytes
    ('bits', 'kept', ('raw', 'raw'), 20)
    """
    _, tensors = _decode(data, known, None)
    return tensors


# ---- both directions -----------------------------------------------------------------------------


# Cached: a chain computes what it allows from its parts, and a codec encodes many packets.
@lru_cache(maxsize=64)
def _allowed_forms(codec: Chainable) -> AllowedForms:
    return codec.allow


@lru_cache(maxsize=64)
def _allowed_when_measuring(codec: Chainable) -> AllowedForms:
    """Return the same forms, with tools that do not write what they can measure."""
    allow = codec.allow
    return replace(allow, tools=replace(allow.tools, measure=True))


def can_refer_to_masks(codec: Codec) -> bool:
    """Return whether a codec can refer to a mask that its receiver knows; a user's codec may."""
    return not isinstance(codec, Chainable) or _allowed_forms(codec).known


def _encode(packet: Packet, known: KnownMask | None, allow: AllowedForms) -> Encoded:
    _check_packet(packet)
    mask = packet.mask or {}
    entries: list[TensorEntry] = []
    cost = dict.fromkeys(COSTS, 0)
    body: Chunks = []
    for name, value in packet.values.items():
        known_mask = _find_known(known, name, value.shape)
        written = write_tensor(name, value, mask.get(name), known_mask, allow)
        entries.append(written.entry)
        for chunks in written.streams.values():
            body += chunks
        sizes = {part: count_bytes(chunks) for part, chunks in written.streams.items()}
        _add_cost(cost, name, sizes)
    data = pack(entries, body, packet.mask is not None, _digest_to_send(entries, known))
    cost["header"] = len(data) - sum(cost.values())
    return Encoded(data, cost)


def _digest_to_send(entries: Sequence[TensorEntry], known: KnownMask | None) -> bytes | None:
    """Return the known mask's digest, which takes 8 bytes, where a tensor refers to that mask."""
    if known is None:
        return None
    return known.digest if any(entry.refers_to_known for entry in entries) else None


def _add_cost(cost: dict[str, int], name: str, sizes: CostByPart, mask_size: int = 0) -> None:
    """Add the parts of a tensor, and the size of its mask, to what a packet spends."""
    is_scores = name.split(".", 1)[0] == "scores"
    if is_scores:
        cost["scores"] += mask_size + sum(sizes.values())
        return
    cost["mask"] += mask_size
    for part, count in sizes.items():
        cost[part] += count


@lru_cache(maxsize=64)
def _dense_cost(
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...], masked: bool
) -> CostByPart:
    """Return what :class:`Dense` spends on a packet of these names, shapes, dtypes and "masked"."""
    # Zeros cost what any other values would, and encoding them cannot disagree with `encode`.
    values: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    for name, shape, dtype, has_mask in shapes:
        values[name] = torch.zeros(shape, dtype=dtype)
        if has_mask:
            mask[name] = torch.zeros(shape, dtype=torch.bool)
    return Dense().encode(Packet(values, mask if masked else None)).cost


def _decode(
    data: bytes, known: KnownMask | None, like: TensorForms | None
) -> tuple[Packet, tuple[ExplainedTensor, ...]]:
    opened = unpack(data, like)
    if opened.known is not None and (known is None or known.digest != opened.known):
        raise UnknownMask(
            "the payload refers to a mask this receiver does not know; a full resend is needed."
        )
    body = opened.body
    values: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    tensors: list[ExplainedTensor] = []
    for entry in opened.entries:
        start = body.at
        # The cursor collects the methods of this tensor's streams.
        body.methods = []
        value, kept = read_tensor(entry, body, _find_known(known, entry.name, entry.shape))
        values[entry.name] = value
        if kept is not None:
            mask[entry.name] = kept
        tensor = ExplainedTensor(
            name=entry.name,
            shape=entry.shape,
            mask=entry.mask.name.lower(),
            values=entry.values.name.lower(),
            coders=tuple(method.name.lower() for method in body.methods),
            bytes=body.at - start,
        )
        tensors.append(tensor)
    if body.at != len(body.data):
        raise WireError(f"{len(body.data) - body.at} bytes follow the last tensor.")
    return Packet(values, mask if opened.masked else None), tuple(tensors)


def _find_known(known: KnownMask | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return the known mask of a tensor; None where there is none, or one of another shape."""
    if known is None:
        return None
    mask = known.mask.get(name)
    if mask is None or mask.shape != shape:
        return None
    return mask


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


__getattr__ = find_old_names(__name__)
