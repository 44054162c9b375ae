"""``report.html`` of a run folder: what is known of the run, gathered from its files.

A page is for looking at. If it cannot be made, that is a warning, and the run is as good without.
"""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import FedgroveError, FolderWarning, InputError
from ..report.run_page import Record, run_page
from ..trees import Tree
from .folder import RunFolder

FILE = "report.html"
BASELINES = ("local", "fedavg")
SAME = (
    "data",
    "partition",
    "scenario",
    "split",
    "validation",
    "clients",
    "cohort",
    "rounds",
    "seed",
    "metric",
)
"""Two runs are laid side by side where these agree, and the lengths of fine-tuning."""
MOST_SIBLINGS = 200
"""Folders beside a run in which local and fedavg are looked for."""
HEAD = 4096
"""Bytes of a summary.json that are read to see whose it is."""
MOST_COMPARED = 60
"""Clients in the map of how alike models are."""
SAME_MODEL = 1e-5
"""Models no further than this share of their length from their mean are one model."""
MOST_WEIGHTS = 6_000_000
"""Weights that are read for the map and for the layers, in all models together."""


def write_page(folder: RunFolder, failure: str = "", name: str | None = None) -> Path | None:
    """Write the page of a run, finished or not; its path, or None where that was not possible.

    ``name`` is what the page calls the folder, else its path.
    """
    path = folder.path / FILE
    try:
        run_page(record_of(folder, failure, name)).write(path)
    # Whatever is wrong with the page, the run is not.
    except Exception as error:
        # Of a run that failed, its own reason is the one to tell.
        if not failure:
            reason = str(error) or type(error).__name__
            warnings.warn(f"{path} was not written: {reason}", FolderWarning, stacklevel=2)
        return None
    return path


def record_of(folder: RunFolder, failure: str = "", name: str | None = None) -> Record:
    """What is known of a run."""
    summary = folder.summary
    config = folder.config
    try:
        words = dict(tomllib.loads(config).get("run", {}))
    except tomllib.TOMLDecodeError:
        raise InputError(f"{folder.path / 'config.toml'} cannot be read.") from None
    lines = folder.metrics() if summary is not None else folder.metrics_to_show()
    clients = _clients(folder, summary) if summary is not None else []
    models = _models(folder, summary, clients)
    similarity: list[list[float]] = []
    similar = _by_group(clients, models)
    if len(similar) > 2:
        similarity = cosines([models[str(client["model"])] for client in similar])
    beside: dict[str, Any] = {}
    if summary is not None:
        beside = _beside(folder.path, summary)
    return Record(
        path=name or str(folder.path),
        words=words,
        config=config,
        lines=lines,
        summary=summary,
        clients=clients,
        layers=_layer_densities(models),
        similarity=similarity,
        similar=[_called(client) for client in similar],
        beside=beside,
        failure=failure,
    )


# ---- clients -------------------------------------------------------------------------------------


def _clients(folder: RunFolder, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every client whose model is kept, or that was scored."""
    metric = summary.get("metric") or ("metric" if "tasks" in summary else "accuracy")
    scores = summary.get(f"{metric}_clients") or {}
    densities = summary.get("density_clients") or {}
    try:
        about = (folder.preparation() or {}).get("clients", {})
        files = {str(client): name for client, name in folder.models().items()}
    except FedgroveError:
        # A run without models is still worth a page.
        about = {}
        files = {}
    found = []
    for number in sorted({*scores, *about, *files}, key=int):
        entry = about.get(number, {})
        found.append(
            {
                "client": int(number),
                "name": str(entry.get("name", number)),
                "task": entry.get("task"),
                "group": entry.get("group"),
                "examples": entry.get("examples"),
                "test": entry.get("test"),
                "score": scores.get(number),
                "density": densities.get(number, summary.get("density")),
                "model": files.get(number),
            }
        )
    return found


def _called(client: Mapping[str, Any]) -> str:
    group = client.get("group")
    return f"{client['name']}" if group is None else f"{client['name']} (group {group})"


# ---- models --------------------------------------------------------------------------------------


def _models(
    folder: RunFolder, summary: Mapping[str, Any] | None, clients: Sequence[Mapping[str, Any]]
) -> dict[str, Tree]:
    """The models of some clients by file; none where they are too large to be read on the side."""
    if summary is None or not summary.get("params"):
        return {}
    names = list(dict.fromkeys(str(c["model"]) for c in clients if c.get("model")))
    affordable = int(MOST_WEIGHTS // summary["params"])
    models = {}
    for name in names[: min(affordable, MOST_COMPARED)]:
        models[name] = folder.tree(name)
    return models


def _by_group(
    clients: Sequence[Mapping[str, Any]], models: Mapping[str, Tree]
) -> list[Mapping[str, Any]]:
    """Clients with a model of their own that was read, those of one group together."""
    own = [client for client in clients if client.get("model") in models]
    files = {client["model"] for client in own}
    # Clients that share one model are alike for no other reason.
    if len(files) < len(own):
        return []
    # Stable: within a group by number, and clients without one at the end.
    return sorted(own, key=lambda c: math.inf if c.get("group") is None else c["group"])


def cosines(models: Sequence[Tree]) -> list[list[float]]:
    """The cosine of every pair of models, seen from their mean."""
    names = set.intersection(*({*model} for model in models))
    rows = []
    for model in models:
        rows.append(torch.cat([model[name].flatten() for name in sorted(names)]))
    if len({row.numel() for row in rows}) > 1:
        return []
    stacked = torch.stack(rows)
    mean = stacked.mean(0)
    stacked = stacked - mean
    # Models that are one and the same differ by rounding only, and its cosines say nothing.
    if float(stacked.norm(dim=1).max()) <= SAME_MODEL * float(mean.norm()):
        return []
    unit = torch.nn.functional.normalize(stacked, dim=1)
    return [[round(value, 3) for value in row] for row in (unit @ unit.T).tolist()]


def _layer_densities(models: Mapping[str, Tree]) -> dict[str, float]:
    """The share of weights that are not zero, by layer; vectors (biases, norms) are left out."""
    shares: dict[str, list[float]] = {}
    for model in models.values():
        for name, leaf in model.items():
            if leaf.dim() > 1:
                share = float((leaf != 0).float().mean())
                shares.setdefault(name.removesuffix(".weight"), []).append(share)
    return {name: math.fsum(own) / len(own) for name, own in shares.items()}


# ---- runs beside it ------------------------------------------------------------------------------


def _beside(path: Path, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The summaries of local and fedavg in the same folder that can be compared with this run."""
    found: dict[str, dict[str, Any]] = {}
    for other in _siblings(path):
        method = _method_of(other)
        if method is None or method in found:
            continue
        try:
            theirs = RunFolder(other).summary
        except FedgroveError:
            continue
        if theirs is not None and _is_comparable(summary, theirs):
            found[method] = theirs
    return {method: found[method] for method in BASELINES if method in found}


def _siblings(path: Path) -> Iterator[Path]:
    try:
        others = sorted(other for other in path.resolve().parent.iterdir() if other.is_dir())
    except OSError:
        return
    # A folder of thousands of runs is not read through for one sentence.
    for other in others[:MOST_SIBLINGS]:
        if other != path.resolve():
            yield other


def _method_of(path: Path) -> str | None:
    """Whether a folder holds one of the baselines, from the beginning of its summary."""
    try:
        with (path / "summary.json").open("rb") as file:
            head = file.read(HEAD).decode(errors="replace")
    except OSError:
        return None
    for method in BASELINES:
        if f'"method": {json.dumps(method)}' in head:
            return method
    return None


def _is_comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if any(one.get(word) != other.get(word) for word in SAME):
        return False
    return list(one.get("finetune") or {}) == list(other.get("finetune") or {})
