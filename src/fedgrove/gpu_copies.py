"""Numbers that lie on the CPU and on a card too: what is there need not be brought there again.

Methods work on the CPU, so what the batched engine trained is copied there. The rows on the card,
its *twin*, stay as long as the copy does, and the gate and the mean read those: a card does in
microseconds what takes a CPU milliseconds. A twin is only ever a copy; where there is none, or one
side was written to since, the CPU's numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SHARE = 1 / 8
"""Of a card's memory: twins take no more, since training needs it."""


@dataclass(eq=False)
class Twin:
    """The same numbers elsewhere, and how often either side had been written to when they were."""

    there: Tensor
    version: int
    version_there: int
    written: torch.cuda.Event | None = None
    """When a card had written them; None: they were there when this was made."""
    served: set[int] = field(default_factory=set)
    """The CUDA streams, by number, that may read them."""

    def for_now(self) -> Tensor:
        """The numbers for what is launched next, on whatever stream that is."""
        if not self.there.is_cuda:
            return self.there
        # The same as current_stream(...).cuda_stream, but quick: this is asked for every client.
        number = torch._C._cuda_getCurrentRawStream(self.there.get_device())
        if number not in self.served:
            stream = torch.cuda.current_stream(self.there.device)
            if self.written is not None:
                stream.wait_event(self.written)
            # Their memory is given to no one else before this stream is done with it.
            self.there.record_stream(stream)
            self.served.add(number)
        return self.there


# By the tensor that owns the memory, of which leaves are views. Weak: a twin goes with the last of
# them.
_twins: MutableMapping[Tensor, Twin] = WeakTensorKeyDictionary()


def keep(here: Tensor, there: Tensor, is_written: bool = False) -> None:
    """Remember that two tensors, contiguous and no views, hold the same numbers.

    ``is_written``: a card has written its side already, and no one need wait for it.

    Torch counts what is written into a tensor or a view of it, and of either side one write ends
    it. What is written behind torch's back (through ``.data`` or ``.numpy()``, or by torch's own
    fused optimisers) is not counted. Nor is what BatchNorm writes: :class:`fedgrove.nets.Net` says
    so, by :func:`end`.
    """
    if here._base is not None:
        raise ValueError("a twin belongs to a tensor that owns its memory, and this is a view")
    if not _has_room(there.nbytes, there.device):
        return
    written = None
    if there.is_cuda and not is_written:
        written = torch.cuda.current_stream(there.device).record_event()
    _twins[here] = Twin(there, here._version, there._version, written)


def _has_room(more: int, device: torch.device) -> bool:
    """Whether twins may take so many bytes more on a device."""
    if device.type != "cuda":
        return True
    room = SHARE * torch.cuda.get_device_properties(device).total_memory
    return more + held() <= room


def held() -> int:
    """The bytes that all twins take."""
    return sum(twin.there.nbytes for twin in _twins.values())


def forget() -> None:
    """Let all go, where memory is short."""
    _twins.clear()


def end(tensors: Iterable[Tensor]) -> None:
    """These were written to, and torch did not count it: their twins are none any more."""
    if not _twins:
        return
    for tensor in tensors:
        owner = tensor if tensor._base is None else tensor._base
        _twins.pop(owner, None)


def of(tensor: Tensor) -> Tensor | None:
    """The twin of a tensor, or of the part that a view shows; None where there is none."""
    owner = tensor if tensor._base is None else tensor._base
    there = _current(owner, tensor)
    if there is None:
        return None
    begin = tensor.storage_offset() - owner.storage_offset()
    return there.view(-1)[begin : begin + tensor.numel()].view(tensor.shape)


def _current(owner: Tensor, part: Tensor) -> Tensor | None:
    """All of a twin, if there is one of this part's owner that is still the same."""
    twin = _twins.get(owner)
    if twin is None or not part.is_contiguous() or part.dtype != twin.there.dtype:
        return None
    if owner._version != twin.version or twin.there._version != twin.version_there:
        return None
    return twin.for_now()


def row_of(vector: Tensor) -> tuple[Tensor, int] | None:
    """The rows of a stack of twins that a vector is one of, and which; None where it is none.

    The rows are cut to the columns that the vector spans.
    """
    owner = vector if vector._base is None else vector._base
    there = _current(owner, vector)
    if there is None or owner.dim() != 2:
        return None
    width = owner.shape[1]
    begin = vector.storage_offset() - owner.storage_offset()
    column = begin % width
    if column + vector.numel() > width:
        return None
    return there[:, column : column + vector.numel()], begin // width


def rows_of(leaves: Sequence[Tensor]) -> Tensor | None:
    """The twins of leaves of one shape and type, stacked, where they are parts of a stack's rows.

    None where they are not. The same as to ask for each leaf's twin, but in one kernel: a stage's
    results are what the next begins with.
    """
    first = leaves[0]
    owner = first._base
    # One without numbers lies nowhere.
    found = None if owner is None or not first.numel() else row_of(first)
    if owner is None or found is None:
        return None
    rows, _ = found
    width = owner.shape[1]
    origin = owner.storage_offset()
    column = (first.storage_offset() - origin) % width
    places: list[int] = []
    for leaf in leaves:
        begin = int(leaf.storage_offset() - origin)
        is_alike = leaf._base is owner and leaf.stride() == first.stride()
        if not is_alike or begin % width != column:
            return None
        places.append(begin // width)
    # Not by an index, which would have to be brought to the card.
    each = rows.unbind()
    return torch.stack([each[row] for row in places]).view(len(leaves), *first.shape)


def brought(tensor: Tensor, device: torch.device) -> Tensor | None:
    """The twin on a device of what is part of a vector; None for anything else.

    The whole vector is brought there the first time, and stays: a model whose leaves are views of
    one goes to a card in one copy, and only once for all who ask.
    """
    found = of(tensor)
    owner = tensor._base
    if found is None and owner is not None and owner.dim() == 1 and owner.dtype == tensor.dtype:
        # Asked first: where there is none, every leaf would take the whole vector along in vain.
        if not _has_room(owner.nbytes, device):
            return None
        # Pinned: the CPU does not wait for all that was launched before.
        pinned = owner.detach().pin_memory() if device.type == "cuda" else owner.detach()
        keep(owner, pinned.to(device, copy=True, non_blocking=True))
        found = of(tensor)
    if found is None or found.device.type != device.type:
        return None
    # No copy: "cuda" is a card too, the one in use.
    return found.to(device)


def copied_back(there: Tensor) -> Tensor:
    """A copy on the CPU of what a card has computed, which stays there as its twin."""
    # Pinned: a card copies there at full speed, and torch keeps the memory for the next one.
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    here.copy_(there)
    keep(here, there)
    return here


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device: itself or its twin, if it is there, or else a copy."""
    if tensor.device == device:
        return tensor
    twin = of(tensor)
    if twin is not None and twin.device == device:
        return twin
    return tensor.to(device)
