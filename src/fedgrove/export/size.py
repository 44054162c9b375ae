"""How large a client's model is once it is exported, without writing the file."""

from __future__ import annotations

from collections import Counter

from ..nets import Net
from ..runs.folder import RunFolder
from ..runs.memory import decode_tree
from .source import shrunk


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
