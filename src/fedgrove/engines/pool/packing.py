"""Runs for worker processes that inherit nothing, as where processes are spawned."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from ...nets import user_files
from ...runs.run import Run
from ..work import explained
from . import shared
from .shared import Block


@dataclass(frozen=True)
class PackedRuns:
    """Runs as bytes in shared memory, and the user's files that their classes come from."""

    files: tuple[Path, ...]
    block: Block


class RunPickler(pickle.Pickler):
    """Pickles a part of a tensor as that part: torch would write all of the tensor it is cut from.

    The clients' examples may all be cut from one tensor.
    """

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a value, where it is not the usual way."""
        if type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes:
            return _same, (value.detach().clone(),)
        return NotImplemented


def _same(tensor: Tensor) -> Tensor:
    return tensor


def pack(runs: list[Run]) -> PackedRuns:
    """Write runs into shared memory; whoever packs them drops the block."""
    buffer = io.BytesIO()
    try:
        RunPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(runs)
    except Exception as error:
        raise cannot_be_sent(error) from None
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    # Not all files that were ever imported: some may be gone.
    files = user_files.find_files_in_pickle(buffer.getvalue())
    return PackedRuns(tuple(files), shared.put([{"runs": data}]))


def unpack(packed: PackedRuns) -> list[Run]:
    """Read what :func:`pack` wrote, in another process."""
    try:
        for file in packed.files:
            user_files.import_file(file)
        (tree,) = shared.get(packed.block)
        runs: list[Run] = pickle.loads(tree["runs"].numpy().data)
    except Exception as error:
        raise cannot_be_sent(error) from None
    return runs


def cannot_be_sent(error: Exception) -> EngineError:
    """The sentence for a run that cannot be pickled, or not read again."""
    return EngineError(
        f"the run cannot be sent to a worker process: {explained(error)} Classes and functions of "
        "your own must be at the top level of a file that can be imported; or take --engine serial."
    )
