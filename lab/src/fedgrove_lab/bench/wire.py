"""How close to entropy the wire format is, and how fast: real weights, compared with the plain way.

The weights are pruned and clustered. A row is one model at one density, as float32 numbers or k
centroids per layer: bytes by part, share of the dense float32 model, ratio to the empirical
entropy, and speed as a multiple of the plain way's, measured in turns on one thread. Weights are
really trained, since random ones compress like nothing that a client sends. Every row's round trip
is compared to the bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove import api, nets, trees
from fedgrove.core import ExpectedPacket, Packet
from fedgrove.data import load
from fedgrove.data.named_set import data_folders, find_files
from fedgrove.data.sets import SETS
from fedgrove.errors import EngineError, check
from fedgrove.nets.layout import named_tensors
from fedgrove.parts import mask as masks
from fedgrove.parts.allocate import Uniform
from fedgrove.runs.memory import read_tree
from fedgrove.seeds import single_thread, torch_rng
from fedgrove.trees import Tree
from fedgrove.wire.codec import ExplainedTensor, Smallest, explain
from fedgrove.wire.entropy import entropy_bytes, flag_bytes
from fedgrove.wire.tensors import to_words

from .kmeans import cluster

DENSITIES = (1.0, 0.5, 0.3, 0.1)
KINDS = (0, 8, 16, 32)
"""How many centroids; 0: float32 numbers as they are."""
LARGE = 80_000
"""Parameters above which there are claims on entropy: below, tables and headers weigh too much."""
CODEC = Smallest()
"""What is measured: the codec of the methods that prune."""


DataDir = str | Path | None
IMAGE = (3, 32, 32)
"""Channels, height and width of the images that ResNet-18 is trained on."""
CLASSES = 10
"""Both CIFAR-10 and digits have ten."""
BATCH = 16
"""Images per step of SGD."""


Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]
Books = Mapping[str, tuple[Floats, Indices]]
"""Codebook and indices of each clustered tensor."""


# ---- weights to measure on -----------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedWeights:
    """A trained model to measure on."""

    name: str
    about: str
    """How it was trained."""
    tree: Tree
    buffers: frozenset[str] = frozenset()
    """What in ``tree`` is not a parameter."""

    @property
    def prunable(self) -> tuple[str, ...]:
        """The weights of conv and linear layers; norms and biases have one dimension."""
        return tuple(name for name, value in self.tree.items() if value.dim() > 1)


def train_federated(rounds: int, data_dir: DataDir = None, data: str = "uci-har") -> TrainedWeights:
    """Return the model of a fedavg run on ``data``; on generated motion where it is not found."""
    check(rounds >= 1, "rounds", rounds, "1 or more")
    is_found = is_available(data, data_dir)
    used = data if is_found else "motion"
    result = api.run(
        "fedavg", data=used, rounds=rounds, evaluate=0, data_dir=data_dir, progress=False
    )
    models = result.folder.path / "models"
    index = json.loads((models / "index.json").read_text())
    # Client 0's, but in fedavg all clients use the same model.
    tree = read_tree(models / index["0"])
    accuracy = 100 * result.summary["accuracy_mean"]
    plural = "s" if rounds > 1 else ""
    about = f"fedavg on {used}, {rounds} round{plural}, {accuracy:.1f} % accurate"
    if not is_found:
        about += f" ({data} was not found)"
    return TrainedWeights(used, about, tree)


def train_resnet(steps: int, data_dir: DataDir = None) -> TrainedWeights:
    """Return ResNet-18 after steps of SGD on CIFAR-10; on enlarged digits where it is not found."""
    check(steps >= 0, "steps", steps, "0 or more")
    if is_available("cifar10", data_dir):
        used = "cifar10"
        note = ""
    else:
        used = "digits"
        note = ", enlarged (cifar10 was not found)"
    x, y = _images(used, steps * BATCH, data_dir)
    module = nets.build("resnet18", IMAGE, CLASSES, seed=0)
    _train(module, x, y, steps)
    tree = {name: value.detach().clone() for name, value in named_tensors(module).items()}
    parameters = {name for name, _ in module.named_parameters()}
    about = f"{steps} steps of SGD, batches of {BATCH}, on {used}{note}"
    return TrainedWeights("resnet18", about, tree, frozenset(tree) - parameters)


def is_available(name: str, data_dir: DataDir = None) -> bool:
    """Return whether a data set can be read without a download."""
    named_set = SETS[name]
    if not named_set.needs_files:
        return True
    return find_files(data_folders(data_dir), named_set.formats) is not None


def _images(name: str, n: int, data_dir: DataDir) -> tuple[Tensor, Tensor]:
    """``n`` images (at least one) of all clients, in random order, as large as CIFAR-10's."""
    federation = load(name, data_dir=data_dir)
    inputs = []
    labels = []
    for client in federation.clients.values():
        inputs.append(client.train.x)
        labels.append(client.train.y)
    x = torch.cat(inputs)
    y = torch.cat(labels)
    order = torch.randperm(len(x), generator=torch_rng(0, "bench"))[: max(n, 1)]
    # Digits are 8 x 8 in one channel. CIFAR-10's images stay as they are.
    return F.interpolate(x[order], size=IMAGE[1:]).expand(-1, *IMAGE), y[order]


def _train(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    module.train()
    for step in range(steps):
        # From the start again, where there are fewer images than the steps take.
        index = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        optimiser.zero_grad()
        # torch leaves backward untyped.
        loss: Any = F.cross_entropy(module(x[index]), y[index])
        loss.backward()
        optimiser.step()


# ---- the plain way: a bitmap and the kept numbers, each through zstandard ------------------------


@dataclass(frozen=True)
class PlainTensor:
    """One encoded tensor: its shape and three byte strings, whose lengths are what it costs."""

    shape: tuple[int, ...]
    bitmap: bytes | None
    """None: nothing was pruned."""
    book: bytes | None
    """The codebook; None: ``kept`` holds the numbers themselves, not indices."""
    kept: bytes

    def __len__(self) -> int:
        return len(self.bitmap or b"") + len(self.book or b"") + len(self.kept)


def find_books(packet: Packet, clustered: frozenset[str]) -> Books:
    """Return the codebook and the indices of each clustered tensor, by :func:`numpy.unique`."""
    given = {}
    for name in packet.values:
        if name in clustered:
            given[name] = _book(_kept(packet, name))
    return given


def encode_plain(
    packet: Packet, clustered: frozenset[str], given: Books | None = None
) -> dict[str, PlainTensor]:
    """Encode a packet as bitmaps and kept numbers, compressed by zstandard at level 3.

    The numbers of a ``clustered`` tensor are sent as a byte each, which points into a codebook,
    those of the others as float32. ``given``: codebooks and indices that are known beforehand.
    """
    compressor = zstandard.ZstdCompressor(level=3)
    encoded: dict[str, PlainTensor] = {}
    for name, value in packet.values.items():
        bitmap = None
        mask = (packet.mask or {}).get(name)
        if mask is not None:
            bitmap = compressor.compress(np.packbits(mask.numpy()).data)
        if name not in clustered:
            book_bytes = None
            kept = compressor.compress(_kept(packet, name).data)
        else:
            if given is None:
                book, index = _book(_kept(packet, name))
            else:
                book, index = given[name]
            # Not compressed: a handful of float32 numbers would only grow.
            book_bytes = book.tobytes()
            kept = compressor.compress(index.data)
        encoded[name] = PlainTensor(tuple(value.shape), bitmap, book_bytes, kept)
    return encoded


def decode_plain(data: Mapping[str, PlainTensor]) -> Packet:
    """Return the packet that :func:`encode_plain` encoded."""
    decompressor = zstandard.ZstdDecompressor()
    values: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, encoded in data.items():
        raw = decompressor.decompress(encoded.kept)
        if encoded.book is None:
            x = np.frombuffer(raw, np.float32)
        else:
            book = np.frombuffer(encoded.book, np.float32)
            x = book.take(np.frombuffer(raw, np.uint8))
        if encoded.bitmap is not None:
            packed = np.frombuffer(decompressor.decompress(encoded.bitmap), np.uint8)
            bits = np.unpackbits(packed, count=int(np.prod(encoded.shape))).view(np.bool_)
            full = np.zeros(len(bits), np.float32)
            # Several times faster than full[bits] = x.
            full[np.flatnonzero(bits)] = x
            x = full
            masks[name] = torch.from_numpy(bits).view(encoded.shape)
        elif encoded.book is None:
            # frombuffer is read-only, and our codec too returns tensors that may be written to.
            x = x.copy()
        values[name] = torch.from_numpy(x).view(encoded.shape)
    return Packet(values, masks or None)


def _kept(packet: Packet, name: str) -> Floats:
    flat: Floats = packet.values[name].numpy().reshape(-1)
    mask = (packet.mask or {}).get(name)
    if mask is None:
        return flat
    return flat[np.flatnonzero(mask.numpy())]


def _book(x: Floats) -> tuple[Floats, Indices]:
    book, index = np.unique(x, return_inverse=True)
    # At most 32 centroids are measured, so that an index fits into a byte.
    return book, index.astype(np.uint8)


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecSpeed:
    """Megabytes of dense float32 a second, and the same as a multiple of the plain way's speed.

    ``encode_given``: the plain way gets the codebook and the indices, and need not find them.
    """

    encode_mb: float
    decode_mb: float
    encode: float
    decode: float
    encode_given: float


@dataclass(frozen=True)
class WireRow:
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
    model_speed: CodecSpeed
    tensor: str
    """The largest tensor, sent alone."""
    tensor_speed: CodecSpeed

    @property
    def kind(self) -> str:
        """What is sent for a kept weight."""
        return f"k={self.k}" if self.k else "fp32"


def measure(
    weights: TrainedWeights,
    densities: Sequence[float] = DENSITIES,
    kinds: Sequence[int] = KINDS,
    repeats: int = 51,
) -> Iterator[WireRow]:
    """Yield the rows of one model; a time is the median of at most ``repeats``."""
    with single_thread():
        for density in densities:
            mask = prune_weights(weights, density)
            for k in kinds:
                yield _row(weights, density, k, make_packet(weights, mask, k), repeats)


def prune_weights(weights: TrainedWeights, density: float) -> trees.Mask | None:
    """Return the mask of the largest weights of each layer; None at density 1."""
    if density >= 1:
        return None
    scores = {name: weights.tree[name].abs() for name in weights.prunable}
    return masks.top(scores, Uniform()(scores, density))


def make_packet(weights: TrainedWeights, mask: trees.Mask | None, k: int) -> Packet:
    """Return what is sent: every parameter on its layer's k centroids; buffers unchanged.

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
    # Kept weights go to the free centroids only, so that the density does not change.
    kept = value.new_zeros(value.shape)
    kept[mask] = cluster(value[mask], k - 1, zero=False).values
    return kept


def _row(weights: TrainedWeights, density: float, k: int, packet: Packet, repeats: int) -> WireRow:
    encoded = CODEC.encode(packet)
    clustered = frozenset[str]()
    if k:
        clustered = frozenset(weights.tree) - weights.buffers
    _check_round_trip(packet, clustered)
    dense = 4 * trees.size(packet.values)
    plain_bytes = sum(len(tensor) for tensor in encode_plain(packet, clustered).values())
    bound = find_bounds(packet, explain(encoded.data))
    # Dense float32 numbers have neither mask nor indices: nothing to divide by.
    ratio = None
    ratio_header = None
    least = bound["mask"] + bound["indices"]
    if least:
        streams = encoded.cost["mask"] + encoded.cost["indices"]
        ratio = streams / least
        ratio_header = (streams + encoded.cost["header"]) / least
    largest = max(packet.values, key=lambda name: packet.values[name].numel())
    return WireRow(
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
        model_speed=measure_speed(packet, clustered, repeats),
        tensor=largest,
        tensor_speed=measure_speed(_only(packet, largest), clustered, repeats),
    )


def find_bounds(packet: Packet, lines: Sequence[ExplainedTensor]) -> dict[str, float]:
    """Return order-0 entropies in bytes, tensor by tensor.

    Numbers count as indices or as values, by how each tensor was written according to ``lines``.
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


def measure_speed(packet: Packet, clustered: frozenset[str], repeats: int = 51) -> CodecSpeed:
    """Time our codec and the plain way in turns; medians, of fewer repeats for large packets."""
    data = CODEC.encode(packet).data
    plain_data = encode_plain(packet, clustered)
    # As in a run, where the receiver knows the names and shapes that it expects.
    like = ExpectedPacket.of(packet.values).tensors
    given = find_books(packet, clustered)
    n = trees.size(packet.values)
    ours, plain, plain_given, ours_back, plain_back = _median_seconds(
        [
            lambda: CODEC.encode(packet),
            lambda: encode_plain(packet, clustered),
            lambda: encode_plain(packet, clustered, given),
            lambda: CODEC.decode(data, None, like),
            lambda: decode_plain(plain_data),
        ],
        repeats=min(repeats, max(5, 20_000_000 // n)),
    )
    # 4 bytes a number, 1e-6 megabytes a byte.
    return CodecSpeed(
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
    plain = decode_plain(encode_plain(packet, clustered))
    for back in (ours, plain):
        same_values = trees.identical(back.values, packet.values)
        same_mask = trees.identical(back.mask or {}, packet.mask or {})
        if not (same_values and same_mask):
            raise EngineError(
                "a packet came back changed from its round trip; "
                "please report this with your versions."
            )


# ---- claims --------------------------------------------------------------------------------------


Claim = tuple[str, float, Sequence[WireRow], Callable[[WireRow], Any]]
"""Name, bound, the rows it is made for, and the value that it is about."""


def checks(rows: Sequence[WireRow]) -> dict[str, dict[str, Any]]:
    """Return each claim with its worst value, where that was, its bound, and whether it holds.

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
    for name, bound, candidates, value_of in at_most:
        if candidates:
            worst = max(candidates, key=value_of)
            # Judged as it is printed, so that no claim fails with its own bound as the value.
            value = round(value_of(worst), 4)
            results[name] = _result(worst, value, bound, value <= bound)
    for name, bound, candidates, value_of in at_least:
        if candidates:
            worst = min(candidates, key=value_of)
            value = round(value_of(worst), 4)
            results[name] = _result(worst, value, bound, value >= bound)
    return results


def _result(row: WireRow, value: float, bound: float, ok: bool) -> dict[str, Any]:
    place = f"{row.model}, density {row.density:g}, {row.kind}"
    return {"value": value, "bound": bound, "ok": ok, "at": place}


def report(weights: Sequence[TrainedWeights], rows: Sequence[WireRow]) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "weights": {model.name: model.about for model in weights},
        "rows": [asdict(row) | {"kind": row.kind} for row in rows],
        "checks": checks(rows),
    }
