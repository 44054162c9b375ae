"""How near its limit the wire is, and how fast: real weights, beside the plain way to send them.

The weights are pruned and clustered. A row is one model at one density, as float32 numbers or k
centroids per layer: bytes by part, share of the dense float32 model, ratio to the empirical
entropy, and speed as a multiple of the plain way's (:mod:`.plain_codec`), measured in
turns on one thread. Every row's round trip is compared to the bit.
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

from fedgrove import trees
from fedgrove.core import Packet
from fedgrove.errors import EngineError
from fedgrove.parts import mask as masks
from fedgrove.parts.allocate import Uniform
from fedgrove.parts.quantise import cluster
from fedgrove.seeds import single_thread
from fedgrove.wire.codec import ExplainedTensor, Smallest, explain
from fedgrove.wire.entropy import entropy_bytes, flag_bytes
from fedgrove.wire.tensors import to_words

from . import plain_codec
from .weights import Weights

DENSITIES = (1.0, 0.5, 0.3, 0.1)
KINDS = (0, 8, 16, 32)
"""How many centroids; 0: float32 numbers as they are."""
LARGE = 80_000
"""Parameters above which there are claims on entropy: below, tables and headers weigh too much."""
CODEC = Smallest()
"""What is measured: the codec of the methods that prune."""


@dataclass(frozen=True)
class Speed:
    """Megabytes of dense float32 a second, and the same as a multiple of the plain way's speed.

    ``encode_given``: the plain way is given the codebook and the indices, and need not look for
    them.
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
    """The rows of one model, as they are ready; a timing is the median of at most ``repeats``."""
    with single_thread():
        for density in densities:
            mask = prune(weights, density)
            for k in kinds:
                yield _row(weights, density, k, quantised(weights, mask, k), repeats)


def prune(weights: Weights, density: float) -> trees.Mask | None:
    """The largest weights of each layer; None at density 1."""
    if density >= 1:
        return None
    scores = {name: weights.tree[name].abs() for name in weights.prunable}
    return masks.top(scores, Uniform()(scores, density))


def quantised(weights: Weights, mask: trees.Mask | None, k: int) -> Packet:
    """What is sent: every parameter on its layer's k centroids; buffers as they are.

    One of the k is the 0 of what is pruned. With k = 0 nothing is clustered.
    """
    masked = trees.apply_mask(weights.tree, mask or {})
    if k == 0:
        return Packet(masked, mask)
    values = {}
    for name, value in masked.items():
        if name in weights.buffers:
            values[name] = value
        else:
            values[name] = _centroids(value, (mask or {}).get(name), k)
    return Packet(values, mask)


def _centroids(value: Tensor, mask: Tensor | None, k: int) -> Tensor:
    if mask is None:
        return cluster(value, k, zero=False).values
    # Kept weights go to the free centroids only, so that the density stays what it says.
    kept = value.new_zeros(value.shape)
    kept[mask] = cluster(value[mask], k - 1, zero=False).values
    return kept


def _row(weights: Weights, density: float, k: int, packet: Packet, repeats: int) -> Row:
    encoded = CODEC.encode(packet)
    clustered = frozenset[str]()
    if k:
        clustered = frozenset(weights.tree) - weights.buffers
    _check_round_trip(packet, clustered)
    dense = 4 * trees.size(packet.values)
    plain_bytes = sum(len(tensor) for tensor in plain_codec.encode(packet, clustered).values())
    bound = bounds(packet, explain(encoded.data))
    # Dense float32 numbers have neither mask nor indices: nothing to divide by.
    ratio = None
    ratio_header = None
    least = bound["mask"] + bound["indices"]
    if least:
        streams = encoded.cost["mask"] + encoded.cost["indices"]
        ratio = streams / least
        ratio_header = (streams + encoded.cost["header"]) / least
    largest = max(packet.values, key=lambda name: packet.values[name].numel())
    return Row(
        model=weights.name,
        params=trees.size(packet.values),
        density=density,
        k=k,
        bytes=len(encoded.data),
        parts=dict(encoded.cost),
        share=len(encoded.data) / dense,
        plain_share=plain_bytes / dense,
        bound=bound,
        ratio=ratio,
        ratio_header=ratio_header,
        model_speed=speed(packet, clustered, repeats),
        tensor=largest,
        tensor_speed=speed(_only(packet, largest), clustered, repeats),
    )


def bounds(packet: Packet, lines: Sequence[ExplainedTensor]) -> dict[str, float]:
    """Order-0 entropies in bytes, tensor by tensor.

    Numbers count as indices or as values, by how ``lines`` say that each tensor was written.
    """
    totals = {"mask": 0.0, "indices": 0.0, "values": 0.0}
    for line in lines:
        words = to_words(packet.values[line.name])
        mask = (packet.mask or {}).get(line.name)
        bits = None
        if line.mask == "zeros":
            # No mask names this tensor, and the codec left its zeros out all the same.
            bits = words != 0
        elif mask is not None:
            bits = mask.reshape(-1).numpy()
        if bits is not None:
            totals["mask"] += flag_bytes(int(np.count_nonzero(bits)), len(bits))
            words = words[bits]
        if line.values == "book":
            _, counts = np.unique(words, return_counts=True)
            totals["indices"] += entropy_bytes(counts)
        else:
            # All first bytes, all second bytes, ...: exponents repeat, low bits hardly do.
            planes = words.view(np.uint8).reshape(len(words), -1).T
            sizes = [entropy_bytes(np.bincount(plane, minlength=256)) for plane in planes]
            totals["values"] += sum(sizes)
    return totals


def speed(packet: Packet, clustered: frozenset[str], repeats: int = 51) -> Speed:
    """Ours and the plain way in turns; medians, of fewer repeats where the packet is large."""
    data = CODEC.encode(packet).data
    plain_data = plain_codec.encode(packet, clustered)
    # As in a run, where the receiver knows the names and shapes that it expects.
    shapes = {name: tuple(value.shape) for name, value in packet.values.items()}
    given = plain_codec.books(packet, clustered)
    n = trees.size(packet.values)
    ours, plain, plain_given, ours_back, plain_back = _median_seconds(
        [
            lambda: CODEC.encode(packet),
            lambda: plain_codec.encode(packet, clustered),
            lambda: plain_codec.encode(packet, clustered, given),
            lambda: CODEC.decode(data, None, shapes),
            lambda: plain_codec.decode(plain_data),
        ],
        repeats=min(repeats, max(5, 20_000_000 // n)),
    )
    # 4 bytes a number, 1e-6 megabytes a byte.
    return Speed(
        encode_mb=4e-6 * n / ours,
        decode_mb=4e-6 * n / ours_back,
        encode=plain / ours,
        decode=plain_back / ours_back,
        encode_given=plain_given / ours,
    )


def _median_seconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each call; they take turns, so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in times]


def _only(packet: Packet, name: str) -> Packet:
    """One tensor of a packet, as a packet."""
    mask = {name: packet.mask[name]} if packet.mask else None
    return Packet({name: packet.values[name]}, mask)


def _check_round_trip(packet: Packet, clustered: frozenset[str]) -> None:
    ours = CODEC.decode(CODEC.encode(packet).data)
    plain = plain_codec.decode(plain_codec.encode(packet, clustered))
    for back in (ours, plain):
        same_values = trees.identical(back.values, packet.values)
        same_mask = trees.identical(back.mask or {}, packet.mask or {})
        if not (same_values and same_mask):
            raise EngineError(
                "a packet came back changed from its round trip; "
                "please report this with your versions."
            )


# ---- what must hold ------------------------------------------------------------------------------


Claim = tuple[str, float, Sequence[Row], Callable[[Row], Any]]
"""Name, bound, the rows it is made for, and the figure that it is about."""


def checks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each claim with its worst value, where that was, its bound, and whether it holds.

    A claim without rows is left out.
    """
    large = []
    k16_at_0_3 = []
    fp32_at_0_3 = []
    for row in rows:
        if row.params > LARGE and row.ratio_header is not None:
            large.append(row)
        if row.density == 0.3 and row.k == 16:
            k16_at_0_3.append(row)
        if row.density == 0.3 and row.k == 0:
            fp32_at_0_3.append(row)
    at_most: tuple[Claim, ...] = (
        ("streams", 1.02, large, lambda row: row.ratio),
        ("streams_with_header", 1.02, large, lambda row: row.ratio_header),
        ("share_k16_density_0.3", 0.062, k16_at_0_3, lambda row: row.share),
        ("share_fp32_density_0.3", 0.29, fp32_at_0_3, lambda row: row.share),
    )
    at_least: tuple[Claim, ...] = (
        ("encode_model", 0.5, rows, lambda row: row.model_speed.encode),
        ("encode_tensor", 0.5, rows, lambda row: row.tensor_speed.encode),
        ("decode_model", 0.2, rows, lambda row: row.model_speed.decode),
        ("decode_tensor", 0.2, rows, lambda row: row.tensor_speed.decode),
    )
    results = {}
    for name, bound, candidates, figure in at_most:
        if candidates:
            worst = max(candidates, key=figure)
            # Judged as it is printed, so that no claim fails with its own bound as the value.
            value = round(figure(worst), 4)
            results[name] = _result(worst, value, bound, value <= bound)
    for name, bound, candidates, figure in at_least:
        if candidates:
            worst = min(candidates, key=figure)
            value = round(figure(worst), 4)
            results[name] = _result(worst, value, bound, value >= bound)
    return results


def _result(row: Row, value: float, bound: float, ok: bool) -> dict[str, Any]:
    place = f"{row.model}, density {row.density:g}, {row.kind}"
    return {"value": value, "bound": bound, "ok": ok, "at": place}


def report(weights: Sequence[Weights], rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "weights": {model.name: model.about for model in weights},
        "torch": torch.__version__,
        "rows": [asdict(row) | {"kind": row.kind} for row in rows],
        "checks": checks(rows),
    }
