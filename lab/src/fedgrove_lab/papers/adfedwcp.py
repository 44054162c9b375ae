"""What of AdFedWCP's tables is not data: how users are dealt, and what clustering costs."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgrove.config.experiment import Experiment
from fedgrove.core import REFERENCE_GMACS, AnyMethod
from fedgrove.data import Federation
from fedgrove.data.sets import SETS
from fedgrove.engines.work import perform
from fedgrove.methods import AdFedWCP, FedWCP
from fedgrove.methods.adfedwcp import kmeans
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import Run

from .definition import load_definition
from .scope import Scope
from .study import Fact


def values(scope: Scope) -> dict[str, Any]:
    """Return how data are dealt: by an alpha, unless the clients are the data's own users."""
    known = SETS.get(scope["data"])
    is_natural = known is not None and known.partition == "natural" and not scope["is_quick"]
    if is_natural:
        return {"partition": None, "alphas": [scope["alpha"]], "dealt": "users"}
    by_alpha = {"partition": "dirichlet:{alpha}", "dealt": "Dirichlet {alpha}"}
    return {**by_alpha, "alphas": [0.1, 0.4, 1.0]}


def time_clustering(
    name: str, federation: Federation, numbers: Mapping[str, Mapping[str, Any]]
) -> list[Fact]:
    """Time one client after another on this machine's CPU: a round without clustering, and with."""
    paper = load_definition("adfedwcp")
    scale = paper.full
    k = scale["timed_k"]
    net = paper.data.get(name, paper.quick)["net"]
    local = LocalTraining(1, scale["batch"], Adam(scale["lr"]))
    timed: list[AnyMethod] = [
        FedWCP(k=0, local=local),
        FedWCP(k=k, local=local),
        AdFedWCP(local=local),
    ]
    clients = list(federation.ids)[: scale["timed_clients"]]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for i, method in enumerate(timed):
            experiment = Experiment(method, federation, net=net, rounds=1)
            runs.append(experiment.build(federation, Memory(Path(folder) / str(i))))
        training, with_clusters, with_imprinting = _best_times(runs, clients, scale["times"])
    spent = [both - alone for both, alone in zip(with_clusters, training, strict=True)]
    weighing = [all_ - some for all_, some in zip(with_imprinting, with_clusters, strict=True)]
    examples = statistics.mean(federation.infos[client].examples for client in clients)
    layout = runs[0].net.layout
    macs = 3 * layout.macs * examples
    sizes = [layout.count((weight,)) for weight in layout.prunable]
    steps = sum(kmeans.operations(size, k) for size in sizes)
    giga = REFERENCE_GMACS * 1e9
    by_formula = numbers["all"]["by_formula"]
    in_words = numbers["all"]["in_words"]
    total = sum(training) + sum(spent)
    return [
        Fact("examples of a client", examples, digits=0),
        Fact("training one epoch, ms", 1000 * statistics.mean(training), digits=1),
        Fact(f"clustering at k = {k}, ms", 1000 * statistics.mean(spent), digits=1),
        Fact("imprinting, ms", 1000 * statistics.mean(weighing), digits=1),
        Fact("clustering, % of both", 100 * sum(spent) / total, 100 / (1 + by_formula), 2),
        Fact("training over clustering", sum(training) / sum(spent), in_words, 2),
        Fact(
            "training over clustering, by the paper's formula",
            3 * examples / (10 * k),
            by_formula,
            2,
        ),
        Fact("virtual s of training, speed 1", macs / giga, digits=4),
        Fact("virtual s of clustering, each step as a MAC", steps / giga, digits=4),
        Fact("clustering, % of both on the virtual clock", 100 * steps / (macs + steps), digits=2),
    ]


def _best_times(runs: Sequence[Run], clients: Sequence[int], times: int) -> list[list[float]]:
    """By run, the seconds of each client's second round: the first one also prepares.

    The best of some: what else a machine does only adds. Runs take turns, so that it adds to all.
    """
    prepared = []
    for run in runs:
        state = run.method.init(run.setup)
        if not state.weighed:
            # Importances that no client was asked for: all alike.
            state = replace(state, weighed=True)
        for task in run.method.plan(state, clients):
            _, memory = perform(run, task, {})
            prepared.append((run, task, memory))
    best = [math.inf] * len(prepared)
    for _ in range(times):
        for i, (run, task, memory) in enumerate(prepared):
            begin = time.perf_counter()
            perform(run, task, memory)
            best[i] = min(best[i], time.perf_counter() - begin)
    count = len(clients)
    return [best[i : i + count] for i in range(0, len(best), count)]
