"""Tensors on the CPU that also have a cached copy on the GPU, so that they are sent there once.

Methods work on the CPU, so the batched engine copies there what it trained. The rows on the GPU are
kept as long as the CPU tensor lives, and the gate and the mean read those: a GPU does in
microseconds what takes a CPU milliseconds. Where there is no copy, or where either side was written
to since, the CPU's numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

COPIES_SHARE = 1 / 8
"""The share of a GPU's memory that copies may take, since training needs the rest."""


@dataclass(eq=False)
class GpuCopy:
    """A copy of a CPU tensor, and how often either side had been written to when it was made."""

    values: Tensor
    cpu_version: int
    gpu_version: int
    written: torch.cuda.Event | None = None
    """When the GPU has written the copy; None if it already had."""
    ready_streams: set[int] = field(default_factory=set)
    """The CUDA streams, by number, that may read the copy."""

    def for_current_stream(self) -> Tensor:
        """Return the copy for what is launched next, on whatever stream that is."""
        if not self.values.is_cuda:
            return self.values
        # The same as current_stream(...).cuda_stream, but fast: this runs for every client.
        number = torch._C._cuda_getCurrentRawStream(self.values.get_device())
        if number not in self.ready_streams:
            stream = torch.cuda.current_stream(self.values.device)
            if self.written is not None:
                stream.wait_event(self.written)
            # The memory is given to no one else before this stream is done with it.
            self.values.record_stream(stream)
            self.ready_streams.add(number)
        return self.values


# By the tensor that owns the memory, of which leaves are views. Weak: a copy goes with the last of
# them.
_copies: MutableMapping[Tensor, GpuCopy] = WeakTensorKeyDictionary()


def keep_copy(on_cpu: Tensor, on_gpu: Tensor, is_written: bool = False) -> None:
    """Remember that two tensors contain the same numbers, if there is room for the copy.

    Torch counts the writes to a tensor and its views, and the first write to either side ends it.
    Writes that torch does not count are not noticed: through ``.data`` or ``.numpy()``, and by
    torch's fused optimisers. :class:`fedgrove.nets.Net` reports those of BatchNorm by
    :func:`drop_copies`.

    Args:
        on_cpu: A contiguous tensor that owns its memory.
        on_gpu: Its copy, contiguous too.
        is_written: The GPU has already written the copy, so no stream needs to wait for it.
    """
    if on_cpu._base is not None:
        raise ValueError("a copy belongs to a tensor that owns its memory, and this is a view")
    if not _has_room(on_gpu.nbytes, on_gpu.device):
        return
    written = None
    if on_gpu.is_cuda and not is_written:
        written = torch.cuda.current_stream(on_gpu.device).record_event()
    _copies[on_cpu] = GpuCopy(on_gpu, on_cpu._version, on_gpu._version, written)


def _has_room(more: int, device: torch.device) -> bool:
    """Return whether copies may take ``more`` bytes on a device."""
    if device.type != "cuda":
        return True
    room = COPIES_SHARE * torch.cuda.get_device_properties(device).total_memory
    return more + count_bytes() <= room


def count_bytes() -> int:
    """Count the bytes of all copies."""
    return sum(copy.values.nbytes for copy in _copies.values())


def drop_all() -> None:
    """Drop all copies, where memory is short."""
    _copies.clear()


def drop_copies(tensors: Iterable[Tensor]) -> None:
    """Drop the copies of tensors that were written to without torch counting it."""
    if not _copies:
        return
    for tensor in tensors:
        _copies.pop(_find_owner(tensor), None)


def find_copy(tensor: Tensor) -> Tensor | None:
    """Return the GPU copy of a tensor, or of the part that a view shows; None if there is none."""
    owner = _find_owner(tensor)
    values = _find_current(owner, tensor)
    if values is None:
        return None
    begin = tensor.storage_offset() - owner.storage_offset()
    return values.view(-1)[begin : begin + tensor.numel()].view(tensor.shape)


def find_row(vector: Tensor) -> tuple[Tensor, int] | None:
    """Find the row of a stack on the GPU that a vector is a copy of.

    Returns:
        All rows of the stack, cut to the columns that the vector spans, and the number of its row;
        None if the vector is not part of one row.
    """
    owner = _find_owner(vector)
    values = _find_current(owner, vector)
    if values is None or owner.dim() != 2:
        return None
    begin = int(vector.storage_offset() - owner.storage_offset())
    row, column = divmod(begin, owner.shape[1])
    if column + vector.numel() > owner.shape[1]:
        return None
    return values[:, column : column + vector.numel()], row


def stack_rows(leaves: Sequence[Tensor]) -> Tensor | None:
    """Stack the copies of leaves that are the same columns of one stack's rows, in one kernel.

    A stage's results are what the next stage begins with. Asking for each leaf's copy would give
    the same, with one kernel per leaf.

    Returns:
        The stacked copies, or None if the leaves are not such columns.
    """
    first = leaves[0]
    owner = first._base
    # A leaf without elements has no place in memory.
    found = None if owner is None or not first.numel() else find_row(first)
    if owner is None or found is None:
        return None
    rows, _ = found
    width = owner.shape[1]
    origin = owner.storage_offset()
    column = (first.storage_offset() - origin) % width
    numbers: list[int] = []
    for leaf in leaves:
        begin = int(leaf.storage_offset() - origin)
        is_alike = leaf._base is owner and leaf.stride() == first.stride()
        if not is_alike or begin % width != column:
            return None
        numbers.append(begin // width)
    # Not by an index, which would have to be sent to the GPU.
    views = rows.unbind()
    return torch.stack([views[row] for row in numbers]).view(len(leaves), *first.shape)


def find_or_make_copy(tensor: Tensor, device: torch.device) -> Tensor | None:
    """Return the copy, on a device, of a part of a vector; None for anything else.

    The whole vector is copied the first time, and stays: a model whose leaves are views of one
    vector goes to the GPU in one copy, once for all clients.
    """
    found = find_copy(tensor)
    owner = tensor._base
    if found is None and owner is not None and owner.dim() == 1 and owner.dtype == tensor.dtype:
        # Checked first: without room, every leaf would send the whole vector in vain.
        if not _has_room(owner.nbytes, device):
            return None
        # Pinned: the CPU does not wait for all that was launched before.
        pinned = owner.detach().pin_memory() if device.type == "cuda" else owner.detach()
        keep_copy(owner, pinned.to(device, copy=True, non_blocking=True))
        found = find_copy(tensor)
    if found is None or found.device.type != device.type:
        return None
    # No copy: "cuda" without a number is the current GPU.
    return found.to(device)


def copy_to_cpu(on_gpu: Tensor) -> Tensor:
    """Copy what a GPU has computed to the CPU, and keep the original as the copy's cached copy."""
    # Pinned: a GPU copies there at full speed, and torch keeps the memory for the next one.
    on_cpu = torch.empty(on_gpu.shape, dtype=on_gpu.dtype, pin_memory=on_gpu.is_cuda)
    on_cpu.copy_(on_gpu)
    keep_copy(on_cpu, on_gpu)
    return on_cpu


def read_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: itself or its cached copy if it is there, else a new copy."""
    if tensor.device == device:
        return tensor
    found = find_copy(tensor)
    if found is not None and found.device == device:
        return found
    return tensor.to(device)


def _find_owner(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a view shows; the tensor itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def _find_current(owner: Tensor, part: Tensor) -> Tensor | None:
    """Return all of the owner's copy; None if there is none or either side was written to."""
    copy = _copies.get(owner)
    if copy is None or not part.is_contiguous() or part.dtype != copy.values.dtype:
        return None
    if owner._version != copy.cpu_version or copy.values._version != copy.gpu_version:
        return None
    return copy.for_current_stream()
