"""The engine's device: torch's settings on it, copies to and from it, and clients' examples there.

From ordinary memory a copy to a GPU begins when everything launched before is done, and the program
waits until then. From pinned memory the copy is queued like a kernel.

Of every split, the examples of all clients are one tensor on the device, so that any batch is a set
of rows. A federation in memory is loaded whole, once. Where clients are made on request, the
examples of each stack are copied to a buffer, over those of the stack before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...data import ClientData, Examples, Federation
from ...trees import Tree


def seed_device(device: torch.device, seed: int) -> None:
    """Seed torch's generators on the GPU, on which the dropout of stacked clients depends."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def use_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Let the batched engine use full fp32, tf32 products or bf16 activations."""
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    matmul_tf32_before = matmul.allow_tf32
    cudnn_tf32_before = cudnn.allow_tf32
    benchmark_before = cudnn.benchmark
    matmul.allow_tf32 = precision != "fp32"
    cudnn.allow_tf32 = precision != "fp32"
    # Shapes repeat, so cuDNN may try its kernels once and keep the fastest.
    cudnn.benchmark = True
    try:
        # No cache of casts: a captured graph must cast the weights that it finds in each replay.
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
        ):
            yield
    finally:
        matmul.allow_tf32 = matmul_tf32_before
        cudnn.allow_tf32 = cudnn_tf32_before
        cudnn.benchmark = benchmark_before


@contextmanager
def without_kernel_trials() -> Iterator[None]:
    """Let cuDNN choose a kernel without trying all of them.

    For a few batches a trial takes longer than it saves, and each number of clients is a new shape.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def preserve_device_rng(device: torch.device) -> Iterator[None]:
    """Restore torch's generators on CPU and GPU afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


# ---- copies to the device and back ---------------------------------------------------------------


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; to a GPU without waiting for the copy."""
    if device.type != "cuda":
        return values.to(device)
    # Torch does not reuse the pinned memory before this copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def stack_on_device(stacks: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Stack each sequence of tensors of equal shape and type on a device.

    To a GPU all stacks of one type go in one copy.
    """
    if device.type != "cuda":
        return [torch.stack(tuple(leaves)).to(device) for leaves in stacks]
    places_by_type: dict[torch.dtype, list[int]] = {}
    for place, leaves in enumerate(stacks):
        places_by_type.setdefault(leaves[0].dtype, []).append(place)
    there: dict[int, Tensor] = {}
    for dtype, places in places_by_type.items():
        sizes = [len(stacks[place]) * stacks[place][0].numel() for place in places]
        here = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        for place, part in zip(places, torch.split(here, sizes), strict=True):
            leaves = stacks[place]
            torch.stack(tuple(leaves), out=part.view(len(leaves), *leaves[0].shape))
        moved = torch.split(here.to(device, non_blocking=True), sizes)
        for place, part in zip(places, moved, strict=True):
            there[place] = part.view(len(stacks[place]), *stacks[place][0].shape)
    return [there[place] for place in range(len(stacks))]


class Copies(NamedTuple):
    """A tree while it is copied to the CPU."""

    tree: Tree
    done: torch.cuda.Event | None
    """Recorded when the copy is done; None: it is done."""

    def wait(self) -> Tree:
        """Wait for the copy from the GPU and return the tree."""
        if self.done is not None:
            self.done.synchronize()
        return self.tree


def start_copy_to_cpu(tree: Tree) -> Copies:
    """Start copying a tree from the GPU to the CPU, without waiting."""
    if not any(v.is_cuda for v in tree.values()):
        return Copies(tree, None)
    pinned: Tree = {}
    for leaf, value in tree.items():
        pinned[leaf] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned[leaf].copy_(value, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return Copies(pinned, done)


# ---- clients' examples on the device -------------------------------------------------------------


SplitKey = tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...], torch.dtype]
"""Split, shape and type of an input and of a target: examples with one key share a tensor."""


@dataclass(eq=False)
class DeviceSplit:
    """One split of all loaded clients, concatenated: inputs and labels."""

    x: Tensor
    y: Tensor
    offsets: dict[int, int] = field(default_factory=dict)
    """The id of a client's data -> the row at which its examples begin."""


@dataclass(eq=False)
class DeviceData:
    """The examples of the runs under way, loaded when a stage first needs them."""

    device: torch.device
    _splits: dict[SplitKey, DeviceSplit] = field(default_factory=dict)
    # Kept alive because offsets are keyed by id: the id of freed data could be given to others.
    _federations: list[Federation] = field(default_factory=list)
    _buffers: dict[SplitKey, DeviceSplit] = field(default_factory=dict)

    def load(self, federations: list[Federation], split: str) -> DeviceSplit:
        """Load a split of these federations onto the GPU; they must agree in shape and type."""
        first_client = next(iter(federations[0].clients.values()))
        sample = getattr(first_client, split)
        key = _key(split, sample)
        nothing = DeviceSplit(sample.x[:0].to(self.device), sample.y[:0].to(self.device))
        loaded = self._splits.get(key, nothing)
        for federation in federations:
            some_client = next(iter(federation.clients.values()))
            # All clients of a federation are loaded together, so any one shows whether they are.
            if id(some_client) in loaded.offsets:
                continue
            self._federations.append(federation)
            inputs = [loaded.x]
            labels = [loaded.y]
            offsets = dict(loaded.offsets)
            end = len(loaded.y)
            begins: dict[int, int] = {}
            for data in federation.all_data():
                examples = getattr(data, split)
                # Clients with the same classes may have the same official test examples.
                if id(examples) not in begins:
                    begins[id(examples)] = end
                    inputs.append(examples.x.to(self.device))
                    labels.append(examples.y.to(self.device))
                    end += len(examples)
                offsets[id(data)] = begins[id(examples)]
            # A new split: a stack that is under way still reads the old one.
            loaded = DeviceSplit(torch.cat(inputs), torch.cat(labels), offsets)
        self._splits[key] = loaded
        return loaded

    def load_clients(self, clients: list[ClientData], split: str) -> DeviceSplit:
        """Load a split of these clients onto the GPU, until the next call.

        The caller keeps their data.

        The buffer keeps its address while it is large enough: captured graphs read it there.
        """
        distinct = {id(data): getattr(data, split) for data in clients}
        sample = next(iter(distinct.values()))
        key = _key(split, sample)
        rows = max(1, sum(len(examples) for examples in distinct.values()))
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer.y) < rows:
            # A power of two, so that a few more rows next time fit too. Zeros, because unused rows
            # are read as padding.
            room = 1 << (rows - 1).bit_length()
            x = torch.zeros(room, *sample.x.shape[1:], dtype=sample.x.dtype, device=self.device)
            y = torch.zeros(room, *sample.y.shape[1:], dtype=sample.y.dtype, device=self.device)
            buffer = DeviceSplit(x, y)
            self._buffers[key] = buffer
        buffer.offsets.clear()
        end = 0
        for identity, examples in distinct.items():
            buffer.offsets[identity] = end
            end += len(examples)
        # Concatenated first: one copy to the device instead of one per client.
        inputs = torch.cat([examples.x for examples in distinct.values()])
        labels = torch.cat([examples.y for examples in distinct.values()])
        buffer.x[:end].copy_(to_device(inputs, self.device))
        buffer.y[:end].copy_(to_device(labels, self.device))
        return buffer


def _key(split: str, sample: Examples) -> SplitKey:
    """Return what clients' data on the GPU must have in common: split, shapes and types."""
    x = sample.x
    y = sample.y
    return (split, tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)
