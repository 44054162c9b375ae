"""How large a client's model is once it is exported."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ..config.experiment import Experiment
from ..data import Federation
from ..nets import Net
from ..report.tables import format_kilobytes
from ..runs.folder import RunFolder
from ..runs.memory import decode_tree
from .formats import ExportRequest
from .make import Subject, exporter_errors, open_subject, write_versions
from .source import Source, shrunk, unprepared


def model_bytes(folder: RunFolder, net: Net) -> float | None:
    """The bytes of the weights that ``fedgrove export`` writes, mean over the run's clients.

    As float32, without the channels that were removed; weights that are pruned one by one stay in
    the file, as zeros. The graph around the weights comes on top, some kilobytes. None for a run
    whose models cannot be exported.
    """
    summary = folder.summary
    index = folder.path / "models" / "index.json"
    if summary is None or summary.get("prediction") == "own" or not index.is_file():
        return None
    files = Counter(folder.models().values())
    total = 0
    # Clients of one group share a file: each is read once.
    for name, clients in files.items():
        path = folder.path / "models" / name
        tree = decode_tree(folder.read(f"models/{name}"), path)
        _, small = shrunk(net, {key: value.float() for key, value in tree.items()})
        total += clients * sum(4 * value.numel() for value in small.values())
    return total / files.total()


# ---- files ---------------------------------------------------------------------------------------


class FileSize(NamedTuple):
    """The size of an exported file: float if it is within the requested size, else int8."""

    bytes: int
    version: str

    def __str__(self) -> str:
        return f"{format_kilobytes(self.bytes)} kB in {self.version}"


def measure_dense_file(
    net: Net, federation: Federation, experiment: Experiment, client: int, request: ExportRequest
) -> FileSize:
    """Write a client's untrained model in full width, as an export would; return its size.

    Sizes do not depend on weights, so this is known before anything is trained.
    """
    # There is no run yet, of which a source has the folder and the models.
    source = Source(
        RunFolder(Path()), {"method": "", "rounds": 0}, experiment, net, federation, {client: ""}
    )
    data = source.data(client)
    tree = net.params()
    own = source.preparation(client)
    inputs = {"train": unprepared(own, data.train.x)}
    outputs = source.outputs(client)
    return _measure(Subject(source, client, tree, net, tree, own, outputs, inputs), request)


def measure_largest_file(source: Source, request: ExportRequest) -> FileSize:
    """Write the model of the client that has the largest one; return the size of its file."""
    largest = 0
    its_client = min(source.files)
    # Of the clients of one group, which share a model, one is enough.
    for client in {file: client for client, file in source.files.items()}.values():
        small_net, _ = shrunk(source.net, source.tree(client), request.align)
        if small_net.layout.size > largest:
            largest = small_net.layout.size
            its_client = client
    subject = open_subject(source, its_client, request.standardised, request.align)
    return _measure(subject, request)


def _measure(subject: Subject, request: ExportRequest) -> FileSize:
    with (
        tempfile.TemporaryDirectory() as scratch,
        exporter_errors(request, subject.source.net),
    ):
        paths, _ = write_versions(subject, request, Path(scratch))
        version = "int8" if "int8" in paths else "float"
        smallest = min(paths.values(), key=lambda path: path.stat().st_size)
        return FileSize(smallest.stat().st_size, version)
