"""Codecs: packets to bytes and back, to the bit; what each part of the bytes cost.

A codec is lossless, so leaving it out of a simulation changes no result. Codecs chain: ``Sparse() >> Entropy()`` may
use what either may use, and takes the smallest form for each tensor. The container says which form was taken, so any
codec reads what any other wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import Packet
from ..errors import InputError, WireError, check
from ..trees import Mask
from .container import DIGEST, MaskForm, pack, unpack
from .forms import Allow, Leaf, read_leaf, to_bits, write_leaf
from .streams import Chunks, Tools, size

COSTS = ("values", "mask", "codebook", "indices", "scores", "header")
"""The named parts of a payload's size."""


@dataclass(frozen=True)
class Encoded:
    """The bytes of a packet and what they were spent on; the parts of ``cost`` add up to ``len(data)``."""

    data: bytes
    cost: Mapping[str, int]


@dataclass(frozen=True)
class Known:
    """The mask a receiver holds, and its digest: what lets a sender leave out a mask that did not change."""

    mask: Mask
    digest: bytes

    @staticmethod
    def of(mask: Mapping[str, Tensor]) -> Known:
        """What a receiver knows once ``mask`` has arrived; both sides make it from the packet's own mask."""
        h = blake2b(digest_size=DIGEST)
        for name in sorted(mask):
            h.update(f"{name}\0{','.join(map(str, mask[name].shape))}\0".encode())
            h.update(np.packbits(to_bits(mask[name]), bitorder="little").data)
        return Known({k: v.detach().clone() for k, v in mask.items()}, h.digest())


class Codec(Protocol):
    """What an engine asks of a codec."""

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]: ...

    def encode(self, packet: Packet, known: Known | None = None) -> Encoded:
        """The packet as bytes; ``known`` is what its receiver holds."""
        ...

    def decode(
        self,
        data: bytes,
        known: Known | None = None,
        like: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Packet:
        """The packet; ``known`` is what this receiver holds, ``like`` the names and shapes it expects."""
        ...


class Chainable(ABC):
    """A codec that chains."""

    @property
    @abstractmethod
    def allow(self) -> Allow:
        """What it may do to a tensor."""

    def cost(self, packet: Packet, known: Known | None = None) -> Mapping[str, int]:
        """TMP"""
        return self.encode(packet, known).cost

    def encode(self, packet: Packet, known: Known | None = None) -> Encoded:
        """The packet as bytes, each tensor in the smallest form this codec has."""
        return _encode(packet, known, _allow(self))

    def decode(
        self,
        data: bytes,
        known: Known | None = None,
        like: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Packet:
        """The packet that any codec wrote; :class:`~fedgrove.errors.WireError` says what is wrong with the bytes."""
        return _decode(data, known, like)[0]

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
    """Every element in its own width, a bit per element for a mask; its size follows from the shapes alone.

    >>> packet = Packet({"w": torch.tensor([1.0, 2.0])})
    >>> Dense().encode(packet).cost["values"]
    9
    >>> Dense().decode(Dense().encode(packet).data).values["w"]
    tensor([1., 2.])
    """

    allow = Allow()


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
    """The kept elements and what changed in the mask since the receiver's; nothing when nothing did."""

    allow = Allow(kept=True, known=True)


@dataclass(frozen=True)
class Sparse(Chainable):
    """The kept elements and the mask in its smallest form; zeros that no mask names are left out as well."""

    allow = Allow(kept=True, zeros=True, channels=True, known=True)


@dataclass(frozen=True)
class Codebook(Chainable):
    """Up to 256 distinct values and an index for each kept element, where that is smaller."""

    allow = Allow(kept=True, book=True)


@dataclass(frozen=True)
class Planes(Chainable):
    """Numbers split into their bytes, so that a later codec may squeeze the exponents and leave the rest."""

    allow = Allow(tools=Tools(planes=True))


@dataclass(frozen=True)
class Zstd(Chainable):
    """zstandard where it wins."""

    allow = Allow(tools=Tools(zstd=True))


@dataclass(frozen=True)
class Entropy(Chainable):
    """An asymmetric numeral system with integer frequencies, or zstandard where it wins.

    ``slack``: zstandard also wins when a long stream (8 KiB and up) is larger by at most this share, since it
    decodes tens of times faster.
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
    """Say which form each tensor of a payload took.

    >>> packet = Packet({"w": torch.ones(4, 4)}, {"w": torch.eye(4) > 0})
    >>> explain(Bitmap().encode(packet).data)
    (Line(name='w', shape=(4, 4), mask='bits', values='kept', coders=('raw', 'raw'), bytes=20),)
    """
    return _decode(data, known, None)[1]


# --- both directions -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _allow(codec: Chainable) -> Allow:
    return codec.allow


def _encode(packet: Packet, known: Known | None, allow: Allow) -> Encoded:
    mask = packet.mask or {}
    _check_packet(packet)
    leaves = [
        write_leaf(k, v, mask.get(k), _held(known, k, v.shape), allow)
        for k, v in packet.values.items()
    ]
    body: Chunks = [chunk for leaf in leaves for part in leaf.streams.values() for chunk in part]
    held = any(leaf.entry.mask in (MaskForm.SAME, MaskForm.FLIPS) for leaf in leaves)
    digest = known.digest if known is not None and held else None
    data = pack([leaf.entry for leaf in leaves], body, packet.mask is not None, digest)
    return Encoded(data, _cost(leaves, len(data)))


def _cost(leaves: list[Leaf], total: int) -> dict[str, int]:
    cost = dict.fromkeys(COSTS, 0)
    for leaf in leaves:
        scores = leaf.entry.name.split(".", 1)[0] == "scores"
        for part, chunks in leaf.streams.items():
            cost["scores" if scores else part] += size(chunks)
    return cost | {"header": total - sum(cost.values())}


def _decode(
    data: bytes, known: Known | None, like: Mapping[str, tuple[int, ...]] | None
) -> tuple[Packet, tuple[Line, ...]]:
    opened = unpack(data, like)
    if opened.known is not None and (known is None or known.digest != opened.known):
        raise WireError(
            "the payload refers to a mask this receiver does not hold; a full resend is needed."
        )
    values, mask, lines = dict[str, Tensor](), dict[str, Tensor](), []
    for e in opened.entries:
        start, opened.body.methods = opened.body.at, []
        values[e.name], kept = read_leaf(e, opened.body, _held(known, e.name, e.shape))
        if kept is not None:
            mask[e.name] = kept
        coders = tuple(m.name.lower() for m in opened.body.methods)
        forms = e.mask.name.lower(), e.values.name.lower()
        lines.append(Line(e.name, e.shape, *forms, coders, opened.body.at - start))
    if opened.body.at != len(opened.body.data):
        raise WireError(f"{len(opened.body.data) - opened.body.at} bytes follow the last tensor.")
    return Packet(values, mask if opened.masked else None), tuple(lines)


def _held(known: Known | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    held = None if known is None else known.mask.get(name)
    return held if held is not None and tuple(held.shape) == tuple(shape) else None


def _check_packet(packet: Packet) -> None:
    for name, kept in (packet.mask or {}).items():
        if name not in packet.values:
            raise InputError(
                f"the mask names {name!r}, which is not among the packet's tensors; leave it out."
            )
        if kept.shape != packet.values[name].shape or kept.dtype != torch.bool:
            raise InputError(
                f"the mask of {name!r} is {kept.dtype} of shape {tuple(kept.shape)}; it must be torch.bool of shape "
                f"{tuple(packet.values[name].shape)}."
            )
