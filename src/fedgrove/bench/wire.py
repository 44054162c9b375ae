"""How near its limit the wire is, and how fast: real weights, pruned and clustered, beside the plain way.

A row is one model at one density, as float32 numbers or k centroids per layer: bytes by part, share of the dense
float32 model, ratio to the empirical entropy, and speed as a multiple of the plain way's (:mod:`fedgrove.bench.plain`),
measured in turns on one thread. Every row's round trip is compared to the bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import trees
from ..core import Packet
from ..engines.work import one_thread
from ..errors import EngineError
from ..parts import mask as masks
from ..parts.allocate import Uniform
from ..parts.quantise import cluster
from ..wire.codec import Line, Smallest, explain
from ..wire.entropy import entropy_bytes, flag_bytes
from ..wire.forms import to_words
from . import plain
from .weights import Weights

DENSITIES = (1.0, 0.5, 0.3, 0.1)
KINDS = (0, 8, 16, 32)
"""How many centroids; 0: float32 numbers as they are."""
LARGE = 80_000
CODEC = Smallest()


@dataclass(frozen=True)
class Speed:
    """Megabytes of dense float32 a second, and the same as a multiple of the plain way's speed.

    ``encode_given``: the plain way is handed the codebook and the indices, and need not look for them.
    """

    encode_mb: float
    decode_mb: float
    encode: float
    decode: float
    encode_given: float


@dataclass(frozen=True)
class Row:
    """One model at one density, as ``k`` centroids per layer (0: float32 numbers)."""

    model: str
    params: int
    density: float
    k: int
    bytes: int
    parts: dict[str, int]
    share: float
    """Of the dense model in float32."""
    plain_share: float
    bound: dict[str, float]
    """Empirical entropy in bytes: of masks, of indices, and of the byte planes of numbers."""
    ratio: float | None
    """Masks and indices, their tables included, to their bound; None where there are none."""
    ratio_header: float | None
    """The same with all the container's own bytes: names, shapes, checksum."""
    model_speed: Speed
    tensor: str
    """The largest tensor, sent alone."""
    tensor_speed: Speed

    @property
    def kind(self) -> str:
        """What is sent for a kept weight."""
        return f"k={self.k}" if self.k else "fp32"


def measure(
    weights: Weights,
    densities: Sequence[float] = DENSITIES,
    kinds: Sequence[int] = KINDS,
    repeats: int = 51,
) -> Iterator[Row]:
    """The rows of one model, as they are ready; each timing is the median of at most so many ``repeats``."""
    with one_thread():
        for density in densities:
            mask = prune(weights, density)
            for k in kinds:
                yield _row(weights, density, k, quantised(weights, mask, k), repeats)


def prune(weights: Weights, density: float) -> trees.Mask | None:
    """The largest weights of each layer; None at density 1."""
    scores = {k: weights.tree[k].abs() for k in weights.prunable}
    return masks.top(scores, Uniform()(scores, density)) if density < 1 else None


def quantised(weights: Weights, mask: trees.Mask | None, k: int) -> Packet:
    """What is sent: every parameter on its layer's k centroids, one of them the 0 of what is pruned; buffers as are."""
    values = trees.masked(weights.tree, mask or {})
    if k:
        values = {
            n: v if n in weights.buffers else _centroids(v, (mask or {}).get(n), k)
            for n, v in values.items()
        }
    return Packet(values, mask)


def _centroids(value: Tensor, mask: Tensor | None, k: int) -> Tensor:
    if mask is None:
        return cluster(value, k, zero=False).values
    # Kept weights go to the free centroids only, so that the density stays what it says.
    kept = value.new_zeros(value.shape)
    kept[mask] = cluster(value[mask], k - 1, zero=False).values
    return kept


def _row(weights: Weights, density: float, k: int, packet: Packet, repeats: int) -> Row:
    encoded, clustered = (
        CODEC.encode(packet),
        frozenset(weights.tree) - weights.buffers if k else frozenset[str](),
    )
    _check_round_trip(packet, clustered)
    dense = 4 * trees.size(packet.values)
    bound = bounds(packet, explain(encoded.data))
    streams, least = (
        encoded.cost["mask"] + encoded.cost["indices"],
        bound["mask"] + bound["indices"],
    )
    largest = max(packet.values, key=lambda n: packet.values[n].numel())
    return Row(
        model=weights.name,
        params=trees.size(packet.values),
        density=density,
        k=k,
        bytes=len(encoded.data),
        parts=dict(encoded.cost),
        share=len(encoded.data) / dense,
        plain_share=sum(map(len, plain.encode(packet, clustered).values())) / dense,
        bound=bound,
        ratio=streams / least if least else None,
        ratio_header=(streams + encoded.cost["header"]) / least if least else None,
        model_speed=speed(packet, clustered, repeats),
        tensor=largest,
        tensor_speed=speed(_alone(packet, largest), clustered, repeats),
    )


def bounds(packet: Packet, lines: Sequence[Line]) -> dict[str, float]:
    """Order-0 entropies in bytes, tensor by tensor; numbers by what each was written as, whole or by codebook."""
    found = {"mask": 0.0, "indices": 0.0, "values": 0.0}
    for line in lines:
        words, mask = to_words(packet.values[line.name]), (packet.mask or {}).get(line.name)
        bits = (
            words != 0
            if line.mask == "zeros"
            else None
            if mask is None
            else mask.reshape(-1).numpy()
        )
        if bits is not None:
            found["mask"] += flag_bytes(int(np.count_nonzero(bits)), len(bits))
            words = words[bits]
        if line.values == "book":
            found["indices"] += entropy_bytes(np.unique(words, return_counts=True)[1])
        else:
            planes = words.view(np.uint8).reshape(len(words), -1).T
            found["values"] += sum(
                entropy_bytes(np.bincount(plane, minlength=256)) for plane in planes
            )
    return found


def speed(packet: Packet, clustered: frozenset[str], repeats: int = 51) -> Speed:
    """Ours and the plain way in turns; medians, of fewer repeats where the packet is large."""
    data, other = CODEC.encode(packet).data, plain.encode(packet, clustered)
    like = {k: tuple(v.shape) for k, v in packet.values.items()}
    given, n = plain.books(packet, clustered), trees.size(packet.values)
    seconds = _turns(
        [
            lambda: CODEC.encode(packet),
            lambda: plain.encode(packet, clustered),
            lambda: plain.encode(packet, clustered, given),
            lambda: CODEC.decode(data, None, like),
            lambda: plain.decode(other),
        ],
        repeats=min(repeats, max(5, 20_000_000 // n)),
    )
    ours, theirs, handed, read, read_plain = seconds
    return Speed(4e-6 * n / ours, 4e-6 * n / read, theirs / ours, read_plain / read, handed / ours)


def _turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each call: they take turns, so that a change in the machine's load falls on all of them."""
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, spent, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in spent]


def _alone(packet: Packet, name: str) -> Packet:
    return Packet({name: packet.values[name]}, {name: packet.mask[name]} if packet.mask else None)


def _check_round_trip(packet: Packet, clustered: frozenset[str]) -> None:
    back = CODEC.decode(CODEC.encode(packet).data)
    other = plain.decode(plain.encode(packet, clustered))
    for found in (back, other):
        if not trees.equal(found.values, packet.values) or not trees.equal(
            found.mask or {}, packet.mask or {}
        ):
            raise EngineError(
                "a packet came back changed from its round trip; please report this with your versions."
            )


# --- what must hold ------------------------------------------------------------------------------------------------


def checks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each claim with its worst value, where that was found, its bound, and whether it holds; those without rows go."""
    large = [r for r in rows if r.params > LARGE and r.ratio_header is not None]
    at3 = [r for r in rows if r.density == 0.3]
    most = (
        ("streams", 1.02, large, lambda r: r.ratio),
        ("streams_with_header", 1.02, large, lambda r: r.ratio_header),
        ("share_k16_density_0.3", 0.062, [r for r in at3 if r.k == 16], lambda r: r.share),
        ("share_fp32_density_0.3", 0.29, [r for r in at3 if not r.k], lambda r: r.share),
    )
    least = (
        ("encode_model", 0.5, rows, lambda r: r.model_speed.encode),
        ("encode_tensor", 0.5, rows, lambda r: r.tensor_speed.encode),
        ("decode_model", 0.2, rows, lambda r: r.model_speed.decode),
        ("decode_tensor", 0.2, rows, lambda r: r.tensor_speed.decode),
    )
    found = {
        name: _claim(max(some, key=of), of, bound, True) for name, bound, some, of in most if some
    }
    return found | {
        name: _claim(min(some, key=of), of, bound, False) for name, bound, some, of in least if some
    }


def _claim(row: Row, of: Callable[[Row], Any], bound: float, most: bool) -> dict[str, Any]:
    value = round(of(row), 4)
    ok = value <= bound if most else value >= bound
    return {
        "value": value,
        "bound": bound,
        "ok": ok,
        "at": f"{row.model}, density {row.density:g}, {row.kind}",
    }


def report(weights: Sequence[Weights], rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "weights": {w.name: w.about for w in weights},
        "torch": torch.__version__,
        "rows": [asdict(r) | {"kind": r.kind} for r in rows],
        "checks": checks(rows),
    }
