"""Write ``report.html`` of a run folder, from what its files contain.

The report is for people. If it cannot be written, there is a warning, and the run is complete
without it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import FedgroveError
from ..report.page import REPORT_FILE as REPORT_FILE
from ..report.page import Page, write_if_possible
from ..report.run_report import RunRecord, make_run_report
from ..report.tables import finetune_lengths, key_after
from ..trees import Tree
from .folder import RunFolder

BASELINES = ("local", "fedavg")
COMPARABLE = (
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
"""A baseline is shown if it agrees with the run in these, and in the lengths of fine-tuning."""
MOST_FOLDERS = 200
"""Folders next to a run in which baselines are searched."""
HEAD_BYTES = 4096
"""Bytes of a summary.json that are read to find its method."""
MOST_COMPARED = 60
"""Clients in the map of similarity of models."""
SAME_MODEL = 1e-5
"""Models that differ from their mean by at most this share of its length are one model."""
MOST_WEIGHTS = 6_000_000
"""Weights that are read for the map and for the layers, in all models together."""


def write_run_report(folder: RunFolder, failure: str = "") -> Path | None:
    """Write the report of a run, finished or not.

    Args:
        folder: The run folder.
        failure: Why the run failed, if it did.

    Returns:
        The path of the report; None if it could not be written.
    """

    def make_page() -> Page:
        return make_run_report(read_run_record(folder, failure))

    # The reason why a run failed is more important than why its report was not written.
    return write_if_possible(make_page, folder.path / REPORT_FILE, quiet=bool(failure))


def read_run_record(folder: RunFolder, failure: str = "") -> RunRecord:
    """Return what is known about a run; the arguments are those of :func:`write_run_report`."""
    config = folder.config
    options = folder.options
    path = str(folder.path)
    summary = folder.summary
    if summary is None:
        lines = folder.metrics_to_show()
        return RunRecord(path, options, config=config, lines=lines, failure=failure)
    clients = _read_clients(folder, summary)
    models = _read_models(folder, summary, clients)
    similar = _clients_to_compare(clients, models)
    similarity: list[list[float]] = []
    if len(similar) > 2:
        similarity = compute_cosines([models[client["model"]] for client in similar])
    return RunRecord(
        path=path,
        options=options,
        config=config,
        lines=folder.metrics(),
        summary=summary,
        clients=clients,
        layers=_layer_densities(models),
        similarity=similarity,
        similar=list(map(_label_client, similar)),
        baselines=_find_baselines(folder.path, summary),
        failure=failure,
    )


# ---- clients and models --------------------------------------------------------------------------


def _read_clients(folder: RunFolder, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every client whose model is kept, or that was scored."""
    metric = summary.get("metric") or ("metric" if "tasks" in summary else "accuracy")
    scores = {}
    for epochs in finetune_lengths(summary):
        scores[key_after("score", epochs)] = summary.get(key_after(f"{metric}_clients", epochs), {})
    scored = set[str]().union(*scores.values())
    densities = summary.get("density_clients") or {}
    about = {}
    files = {}
    try:
        about = (folder.preparation() or {}).get("clients", {})
        files = {str(client): name for client, name in folder.models().items()}
    except FedgroveError:
        # A run without models still gets a report.
        pass
    clients = []
    for number in sorted({*scored, *about, *files}, key=int):
        entry = about.get(number, {})
        clients.append(
            {
                "client": int(number),
                "name": str(entry.get("name", number)),
                "task": entry.get("task"),
                "group": entry.get("group"),
                "examples": entry.get("examples"),
                "test": entry.get("test"),
                **{name: values.get(number) for name, values in scores.items()},
                "density": densities.get(number, summary.get("density")),
                "model": files.get(number),
            }
        )
    return clients


def _label_client(client: Mapping[str, Any]) -> str:
    if client["group"] is None:
        return str(client["name"])
    return f"{client['name']} (group {client['group']})"


def _read_models(
    folder: RunFolder, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]
) -> dict[str, Tree]:
    """Return some models by file; none if they are so large that reading them takes long."""
    if not summary.get("params"):
        return {}
    most = min(int(MOST_WEIGHTS // summary["params"]), MOST_COMPARED)
    models: dict[str, Tree] = {}
    for client in clients:
        name = client["model"]
        if name and name not in models and len(models) < most:
            models[name] = folder.tree(name)
    return models


def _clients_to_compare(
    clients: Sequence[Mapping[str, Any]], models: Mapping[str, Tree]
) -> list[Mapping[str, Any]]:
    """Return the clients whose models were read, by group; none if clients share models."""
    by_model: dict[str, Mapping[str, Any]] = {}
    for client in clients:
        # Clients that share a model are alike for no other reason.
        if client["model"] in by_model:
            return []
        if client["model"] in models:
            by_model[client["model"]] = client
    # Stable: within a group by number, and clients without a group at the end.
    return sorted(by_model.values(), key=lambda c: (c["group"] is None, c["group"]))


def compute_cosines(models: Sequence[Tree]) -> list[list[float]]:
    """Return the cosine of each two models of a run relative to their mean.

    It is empty if all are one model.
    """
    names = sorted(set.intersection(*map(set, models)))
    rows = []
    for model in models:
        rows.append(torch.cat([model[name].flatten() for name in names]))
    if len(set(map(len, rows))) > 1:
        return []
    stacked = torch.stack(rows)
    mean = stacked.mean(0)
    stacked = stacked - mean
    # Copies of one model differ by rounding only, and cosines of rounding mean nothing.
    if float(stacked.norm(dim=1).max()) <= SAME_MODEL * float(mean.norm()):
        return []
    unit = torch.nn.functional.normalize(stacked, dim=1).double()
    cosines: list[list[float]] = (unit @ unit.T).round(decimals=3).tolist()
    return cosines


def _layer_densities(models: Mapping[str, Tree]) -> dict[str, float]:
    """Return the share of weights that are not zero, by layer, without vectors (biases, norms)."""
    shares: dict[str, list[float]] = {}
    for model in models.values():
        for name, leaf in model.items():
            if leaf.dim() > 1:
                share = float((leaf != 0).float().mean())
                shares.setdefault(name.removesuffix(".weight"), []).append(share)
    return {name: statistics.fmean(values) for name, values in shares.items()}


# ---- baselines -----------------------------------------------------------------------------------


def _find_baselines(path: Path, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the summaries of comparable runs of local and fedavg in the same folder."""
    path = path.resolve()
    try:
        others = sorted(filter(Path.is_dir, path.parent.iterdir()))
    except OSError:
        return {}
    found: dict[str, dict[str, Any]] = {}
    # A folder of thousands of runs is not read for one sentence.
    for other in others[:MOST_FOLDERS]:
        method = _read_baseline_method(other)
        if other == path or method is None or method in found:
            continue
        try:
            theirs = RunFolder(other).summary
        except FedgroveError:
            continue
        if theirs is not None and _is_comparable(summary, theirs):
            found[method] = theirs
    return {method: found[method] for method in BASELINES if method in found}


def _read_baseline_method(path: Path) -> str | None:
    """Return the method of a run if it is a baseline, from the beginning of its summary."""
    try:
        with (path / "summary.json").open("rb") as file:
            head = file.read(HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    for method in BASELINES:
        if f'"method": {json.dumps(method)}' in head:
            return method
    return None


def _is_comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    agree = [one.get(key) for key in COMPARABLE] == [other.get(key) for key in COMPARABLE]
    return agree and _finetune_lengths(one) == _finetune_lengths(other)


def _finetune_lengths(summary: Mapping[str, Any]) -> list[str]:
    return list(summary.get("finetune") or {})
