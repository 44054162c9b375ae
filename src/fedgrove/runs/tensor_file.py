"""Named tensors as a safetensors file, to the byte what its own library writes, in no copy or one.

That library copies each tensor several times on its way to the bytes, and spends more time on small
ones than on their numbers. Here tensors are hashed and written where they are; of those that are
kept at hand the bytes are laid side by side once, and hashed and written from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..trees import Tree

Bytes = npt.NDArray[np.uint8]
Row = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

WORDS = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls a dtype, in the order in which tensors lie in a file: the widest first, so
that each begins where its width divides the place."""
RANKS = {dtype: rank for rank, dtype in enumerate(WORDS)}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies behind the header, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def pieces_of(tree: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The content of a tree's file: the header, then the bytes of one tensor after another."""
    header, places = _laid_out(_rows(tree))
    return [header, *(_bytes_of(tree[place.name]).data for place in places)]


@dataclass(frozen=True)
class TensorFile:
    """The content of a file: its header, and the bytes of all tensors one after another."""

    header: bytes
    body: Bytes
    names: tuple[str, ...]
    """In the order of the tree that was written."""
    places: tuple[Place, ...]

    @staticmethod
    def of(tree: Mapping[str, Tensor]) -> TensorFile:
        """A copy of a tree: what is written into its tensors later does not change it."""
        header, places = _laid_out(_rows(tree))
        body = np.empty(places[-1].end if places else 0, np.uint8)
        for place in places:
            if place.end > place.begin:
                body[place.begin : place.end] = _bytes_of(tree[place.name])
        return TensorFile(header, body, tuple(tree), places)

    @property
    def size(self) -> int:
        """What it takes, without the header."""
        return len(self.body)

    @property
    def pieces(self) -> tuple[bytes, memoryview]:
        """The whole file, header and body."""
        return self.header, self.body.data

    def tree(self) -> Tree:
        """The tensors again, in new memory that the caller may write to."""
        # One copy for all, of which each is a part.
        body = torch.from_numpy(self.body).clone()
        leaves: Tree = {}
        for dtype, places in groupby(self.places, lambda place: place.dtype):
            alike = list(places)
            begin, end = alike[0].begin, alike[-1].end
            if begin == end:
                leaves |= {place.name: torch.empty(place.shape, dtype=dtype) for place in alike}
                continue
            vector = body[begin:end].view(dtype)
            width = dtype.itemsize
            for place in alike:
                part = vector[(place.begin - begin) // width : (place.end - begin) // width]
                leaves[place.name] = part.view(place.shape)
        return {name: leaves[name] for name in self.names}


def _rows(tree: Mapping[str, Tensor]) -> tuple[Row, ...]:
    return tuple((name, leaf.dtype, tuple(leaf.shape)) for name, leaf in tree.items())


def _bytes_of(leaf: Tensor) -> Bytes:
    if leaf.dtype == torch.bfloat16:
        # numpy has no bfloat16.
        leaf = leaf.detach().view(torch.int16)
    flat: Bytes = leaf.numpy(force=True).reshape(-1).view(np.uint8)
    return flat


# What a run writes has the same names and shapes each time.
@lru_cache(maxsize=64)
def _laid_out(rows: tuple[Row, ...]) -> tuple[bytes, tuple[Place, ...]]:
    """The header, behind its length, and where each tensor lies."""
    for name, dtype, _ in rows:
        if dtype not in RANKS:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in WORDS)
            raise TypeError(
                f"{name} is of {dtype}, which a run's files do not hold; allowed: {allowed}"
            )
    # The file sorts names; their order, on which sums depend to the bit, goes into the metadata.
    order = json.dumps([name for name, _, _ in rows])
    fields: dict[str, object] = {"__metadata__": {"order": order}}
    places: list[Place] = []
    begin = 0
    for name, dtype, shape in sorted(rows, key=lambda row: (RANKS[row[1]], row[0])):
        end = begin + dtype.itemsize * math.prod(shape)
        places.append(Place(name, dtype, shape, begin, end))
        fields[name] = {"dtype": WORDS[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces up to a multiple of eight, so that numbers of eight bytes lie well.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, tuple(places)
