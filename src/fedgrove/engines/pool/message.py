"""What the processes of a pool send each other: tasks and answers without tensors, and runs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import Answer, Lost, Packet, Report, Task
from ...errors import EngineError, spell_option
from ...nets import user_files
from ...runs.run import Run
from ...trees import Tree
from ..work import explain_error
from . import shared
from .shared import Block

Indices = tuple[tuple[str, int, int | None], ...]
"""(packet name, index of the tree of its values, index of the tree of its mask)."""


@dataclass(frozen=True)
class Envelope:
    """A task or report without its tensors, which are sent as a list of trees in shared memory."""

    body: Any
    packets: Indices


@dataclass(frozen=True)
class Failed:
    """An error that would hit every worker, such as a full disk; it ends the run."""

    sentence: str


def strip(body: Task | Report) -> tuple[Envelope, list[Tree]]:
    """Split a task or report for a worker into an envelope without tensors, and its trees."""
    packets: Mapping[str, Packet]
    bare: Task | Report
    if isinstance(body, Task):
        packets = body.send
        bare = replace(body, send={})
    else:
        packets = body.give
        bare = replace(body, give={})
    indices, forest = list_trees(packets)
    return Envelope(bare, indices), forest


def list_trees(packets: Mapping[str, Packet]) -> tuple[Indices, list[Tree]]:
    """Return the trees of packets for a worker, and which tree belongs to which packet."""
    forest: list[Tree] = []
    indices: list[tuple[str, int, int | None]] = []
    for name, packet in packets.items():
        values_index = len(forest)
        forest.append(packet.values)
        mask_index = None
        if packet.mask is not None:
            mask_index = len(forest)
            forest.append(packet.mask)
        indices.append((name, values_index, mask_index))
    return tuple(indices), forest


def rebuild_packets(indices: Indices, forest: list[Tree]) -> dict[str, Packet]:
    """Rebuild in a worker the packets that :func:`list_trees` took apart."""
    packets = {}
    for name, values_index, mask_index in indices:
        mask = None if mask_index is None else forest[mask_index]
        packets[name] = Packet(forest[values_index], mask)
    return packets


def read_answer(message: bytes) -> Answer | Failed:
    """Read the answer that :func:`~fedgrove.engines.pool.worker.do_task` wrote."""
    reply = pickle.loads(message)
    if isinstance(reply, Lost | Failed):
        return reply
    envelope, block = reply
    report: Report = replace(
        envelope.body, give=rebuild_packets(envelope.packets, shared.get(block))
    )
    return report


# ---- runs, for processes that inherit nothing ----------------------------------------------------


@dataclass(frozen=True)
class PackedRuns:
    """Runs as bytes in shared memory, and the user's files that define their classes."""

    files: tuple[Path, ...]
    block: Block


class RunPickler(pickle.Pickler):
    """Pickles a slice of a tensor without the rest of the tensor, which torch would write too.

    The examples of all clients may be slices of one tensor.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value for a worker; NotImplemented: in the usual way."""
        if type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes:
            return _return_tensor, (value.detach().clone(),)
        return NotImplemented


def _return_tensor(tensor: Tensor) -> Tensor:
    return tensor


def pack_runs(runs: list[Run]) -> PackedRuns:
    """Write runs into shared memory for the pool's workers. The caller drops the block."""
    buffer = io.BytesIO()
    try:
        RunPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(runs)
    except Exception as error:
        raise explain_unpicklable(error) from None
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    # Only the files that these runs need: others that were imported may be deleted by now.
    files = user_files.find_files_in_pickle(buffer.getvalue())
    return PackedRuns(tuple(files), shared.put([{"runs": data}]))


def unpack_runs(packed: PackedRuns) -> list[Run]:
    """Read what :func:`pack_runs` wrote, in a worker process."""
    try:
        for file in packed.files:
            user_files.import_file(file)
        (tree,) = shared.get(packed.block)
        runs: list[Run] = pickle.loads(tree["runs"].numpy().data)
    except Exception as error:
        raise explain_unpicklable(error) from None
    return runs


def explain_unpicklable(error: Exception) -> EngineError:
    """Return the error for a run that cannot be pickled for a worker."""
    return EngineError(
        f"the run cannot be sent to a worker process: {explain_error(error)} Your own classes and "
        "functions must be at the top level of a file that can be imported; or use "
        f"{spell_option('engine', 'serial')}."
    )
