"""Seconds per round of our engines beside a plain PyTorch loop, in one run: UCI-HAR, har-cnn, a cohort of 10.

The plain loop is what a researcher writes first: nn.Conv1d, nn.MaxPool1d, nn.Dropout, a DataLoader, torch.optim.Adam,
``load_state_dict`` per client and a mean of state dicts. All variants train the same clients for the same epochs and
batches. Variants take turns, so that a change in the machine's load falls on all of them. Evaluation is left out.

    python benchmarks/engine.py [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedgrove import methods
from fedgrove.api import Experiment
from fedgrove.core import Engine
from fedgrove.engines import Pool, Serial
from fedgrove.engines.pool import cores
from fedgrove.rounds import Run, plan
from fedgrove.store import Memory


class PlainCnn(nn.Sequential):
    """CA-AFP's 1D-CNN as one writes it down."""

    def __init__(self, channels: int, length: int, classes: int) -> None:
        super().__init__(
            *(nn.Conv1d(channels, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.3)),
            *(nn.Conv1d(64, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.3)),
            *(nn.Flatten(), nn.Linear(16 * length, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, classes)),
        )


def plain_round(run: Run, model: nn.Module, cohort: list[int]) -> None:
    """FedAvg, one client after another."""
    local, start = run.method.local, {k: v.clone() for k, v in model.state_dict().items()}
    sums = {k: torch.zeros_like(v) for k, v in start.items()}
    total = sum(run.infos[k].examples for k in cohort)
    for k in cohort:
        data = run.federation.clients[k].train
        model.load_state_dict(start)
        optimiser = torch.optim.Adam(model.parameters(), lr=local.optimiser.lr)
        model.train()
        for _ in range(local.epochs):
            for x, y in DataLoader(TensorDataset(data.x, data.y), batch_size=local.batch, shuffle=True):
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()
        for name, value in model.state_dict().items():
            sums[name] += value * (len(data) / total)
    model.load_state_dict(sums)


def variants(run: Run) -> dict[str, Callable[[], None]]:
    """One round of each, from the same model on the same cohort."""
    state = run.method.init(run.start)
    tasks = plan(run, state)
    cohort = [task.to for task in tasks]
    model = PlainCnn(*run.federation.shape, run.federation.classes)
    threads = torch.get_num_threads()

    def plain(n: int) -> None:
        torch.set_num_threads(n)
        plain_round(run, model, cohort)
        torch.set_num_threads(threads)

    def ours(engine: Engine) -> None:
        run.method.fold(state, (report for _, report in engine.map((run, task) for task in tasks)))

    serial, pool = Serial(), Pool()
    return {
        "plain loop, 1 thread": lambda: plain(1),
        f"plain loop, torch's default ({threads} threads)": lambda: plain(threads),
        "serial": lambda: ours(serial),
        f"pool, {cores()} workers": lambda: ours(pool),
    }


def measure(run: Run, repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, taking turns, after one round to warm up."""
    each = variants(run)
    times: dict[str, list[float]] = {name: [] for name in each}
    for i in range(repeats + 1):
        for name, go in each.items():
            began = time.perf_counter()
            go()
            if i:
                times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    experiment = Experiment(methods.FedAvg(), "uci-har", cohort=10)
    with tempfile.TemporaryDirectory() as folder:
        run = experiment.build(experiment.federation(), Memory(Path(folder)))
        times = measure(run, given.rounds)
    base = statistics.median(times["plain loop, 1 thread"])
    rows = {
        name: {
            "median_s": statistics.median(t),
            "min_s": min(t),
            "max_s": max(t),
            "speedup": base / statistics.median(t),
        }
        for name, t in times.items()
    }
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'variant':44} {'median s':>9} {'min':>7} {'max':>7} {'times plain':>12}")
    for name, row in rows.items():
        print(f"{name:44} {row['median_s']:9.3f} {row['min_s']:7.3f} {row['max_s']:7.3f} {row['speedup']:12.2f}")


if __name__ == "__main__":
    main()
