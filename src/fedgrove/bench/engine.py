"""Seconds per round of our engines beside a plain PyTorch loop, in one run.

The plain loop is what a researcher writes first: an nn.Module, a DataLoader (on CUDA: batches cut from tensors that
already lie there), torch.optim, ``load_state_dict`` per client and a mean of state dicts. All variants train the same
clients for the same epochs and batches, and take turns, so that a change in the machine's load falls on all of them.
Evaluation is left out. Inputs are drawn at random, except in the scene uci-har, a cohort of 10 of its real users.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from .. import methods
from ..api import Experiment
from ..core import Engine, Info
from ..data import ClientData, Defaults, Examples, Federation
from ..engines import Pool, Serial
from ..engines.batched import Batched, Precision
from ..engines.pool import cores
from ..errors import unknown
from ..nets import Net, build
from ..parts.local import SGD, Adam, Local
from ..rounds import Run, draw_cohort, gated, plan
from ..store import Memory


@dataclass(frozen=True)
class Scene:
    """A round to measure: a network, clients, examples each, and how they train."""

    net: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    examples: int
    local: Local
    half: bool = False
    """On CUDA in bf16, the plain loop too."""


SCENES = {
    "har": Scene("har-cnn", (9, 128), 6, 30, 343, Local(3, 32, Adam(1e-3))),
    "cnn": Scene("mnist-cnn", (1, 28, 28), 10, 100, 600, Local(1, 32, SGD(0.01, momentum=0.9))),
    "resnet": Scene("resnet18", (3, 32, 32), 10, 10, 640, Local(1, 32, SGD(0.01, momentum=0.9)), half=True),
}


def run_of(scene: Scene, folder: Path, cohort: int | None = None) -> Run:
    """The scene as a run of fedavg, on numbers drawn at random."""
    g = torch.Generator().manual_seed(0)

    def examples(n: int) -> Examples:
        return Examples(torch.randn(n, *scene.shape, generator=g), torch.randint(scene.classes, (n,), generator=g))

    n = scene.examples
    clients = {k: ClientData(examples(n), examples(1), examples(1), Info(n)) for k in range(scene.clients)}
    names = tuple(map(str, range(scene.classes)))
    defaults = Defaults(scene.net, scene.clients, 1, scene.local.epochs, scene.local.batch, "Adam", 1e-3)
    federation = Federation("random", clients, scene.classes, names, scene.shape, defaults)
    net = Net(build(scene.net, scene.shape, scene.classes, 0), scene.shape)
    method = methods.FedAvg(local=scene.local)
    return Run(method, federation, net, Memory(folder), rounds=1, cohort=cohort or scene.clients)


# ---- the plain loop -----------------------------------------------------------------------------------------------


def plain_module(scene: Scene) -> nn.Module:
    """The network as one writes it down."""
    if scene.net != "har-cnn":
        return build(scene.net, scene.shape, scene.classes, 0)
    channels, length = scene.shape
    return nn.Sequential(
        *(nn.Conv1d(channels, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.3)),
        *(nn.Conv1d(64, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(16 * length, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, scene.classes)),
    )


class Plain:
    """FedAvg, one client after another."""

    def __init__(self, scene: Scene, run: Run, device: str) -> None:
        self.scene, self.run, self.device = scene, run, device
        self.model = plain_module(scene).to(device)
        parts = {k: c.train for k, c in run.federation.clients.items()}
        self.data = {k: (p.x.to(device), p.y.to(device)) for k, p in parts.items()}

    def round(self, cohort: list[int]) -> None:
        """Train every client of the cohort from the same model and average."""
        local, model = self.scene.local, self.model
        start = {k: v.clone() for k, v in model.state_dict().items()}
        sums = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in start.items()}
        total = sum(self.run.infos[k].examples for k in cohort)
        model.train()
        for k in cohort:
            model.load_state_dict(start, strict=False)
            optimiser = _torch_optimiser(local, model)
            for x, y in self._batches(k, local):
                optimiser.zero_grad()
                with torch.autocast(self.device, torch.bfloat16, enabled=self.scene.half and self.device == "cuda"):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for name, value in model.state_dict().items():
                sums[name] += value * (self.run.infos[k].examples / total)
        model.load_state_dict(sums, strict=False)

    def _batches(self, k: int, local: Local) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data[k]
        for _ in range(local.epochs):
            if self.device == "cpu":
                yield from DataLoader(TensorDataset(x, y), batch_size=local.batch, shuffle=True)
                continue
            order = torch.randperm(len(y), device=self.device)
            for index in torch.split(order, local.batch):
                yield x[index], y[index]


def _torch_optimiser(local: Local, model: nn.Module) -> torch.optim.Optimizer:
    rule = local.optimiser
    if isinstance(rule, Adam):
        return torch.optim.Adam(model.parameters(), lr=rule.lr)
    return torch.optim.SGD(model.parameters(), lr=rule.lr, momentum=rule.momentum)


# ---- the variants -------------------------------------------------------------------------------------------------


def variants(scene: Scene, run: Run, device: str) -> dict[str, Callable[[], None]]:
    """One round of each, from the same model on the same cohort."""
    state = run.method.init(run.start)
    tasks = plan(run, state)
    cohort = [task.to for task in tasks]
    plain, threads = Plain(scene, run, device), torch.get_num_threads()

    def loop(n: int) -> Callable[[], None]:
        def go() -> None:
            torch.set_num_threads(n)
            plain.round(cohort)
            torch.set_num_threads(threads)

        return go

    def ours(engine: Engine) -> Callable[[], None]:
        return lambda: run.method.fold(state, (report for _, report in engine.map((run, task) for task in tasks)))

    if device == "cpu":
        return {
            "plain loop, 1 thread": loop(1),
            f"plain loop, torch's default ({threads} threads)": loop(threads),
            "serial": ours(Serial()),
            f"pool, {cores()} workers": ours(Pool()),
        }
    kinds: tuple[Precision, ...] = ("bf16", "tf32") if scene.half else ("fp32", "tf32", "bf16")
    made = {f"batched, {kind}": Batched(device="cuda", precision=kind) for kind in kinds}
    made[f"batched, {kinds[0]}, no graphs"] = Batched(device="cuda", precision=kinds[0], graphs=False)
    return {"plain loop": loop(threads), **{name: ours(engine) for name, engine in made.items()}}


def measure(
    name: str, device: str = "cpu", repeats: int = 5, cohort: int | None = None, data_dir: str | Path | None = None
) -> list[dict[str, Any]]:
    """Seconds of each variant of a scene, taking turns, after one round to warm up."""
    if name not in (*SCENES, "uci-har"):
        raise unknown("scene", name, [*SCENES, "uci-har"])
    with tempfile.TemporaryDirectory() as folder:
        if name == "uci-har":
            run = _seeded(0, Path(folder), data_dir)
            scene = _scene_of(run)
        else:
            scene = SCENES[name]
            run = run_of(scene, Path(folder), cohort)
        each = variants(scene, run, device)
        times: dict[str, list[float]] = {variant: [] for variant in each}
        first: dict[str, float] = {}
        for i in range(repeats + 1):
            for variant, go in each.items():
                seconds = _timed(go, device)
                times[variant].append(seconds)
                if not i:
                    first[variant] = times[variant].pop()
    base = statistics.median(next(iter(times.values())))
    return [
        {
            "scene": name,
            "variant": variant,
            "first_s": first[variant],
            "median_s": statistics.median(t),
            "min_s": min(t),
            "max_s": max(t),
            "times_plain": base / statistics.median(t),
        }
        for variant, t in times.items()
    ]


# ---- runs in lockstep -----------------------------------------------------------------------------------------------


def lockstep(
    seeds: int, device: str = "cuda", repeats: int = 5, data_dir: str | Path | None = None
) -> list[dict[str, Any]]:
    """Seconds per round of so many seeds of fedavg on uci-har, a cohort of 10: together, one after another, plain."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_seeded(seed, Path(folder), data_dir) for seed in range(seeds)]
        plains = [Plain(_scene_of(run), run, device) for run in runs]
        cohorts = [draw_cohort(r, 0) for r in runs]

        def plain() -> None:
            for loop, cohort in zip(plains, cohorts, strict=True):
                loop.round(cohort)

        each: dict[str, Callable[[], None]] = {"plain loop, one after another": plain}
        kinds: dict[str, dict[str, Any]] = {"fp32": {"precision": "fp32"}, "tf32": {"precision": "tf32"}}
        for kind, words in kinds.items():
            together, silent, alone = (Batched(device=device, **words) for _ in range(3))
            silent.count_bytes = False
            each[f"batched, {kind}, one after another"] = partial(_one_by_one, runs, alone)
            each[f"batched, {kind}, in lockstep"] = partial(_together, runs, together)
            each[f"batched, {kind}, in lockstep, bytes not counted"] = partial(_together, runs, silent)
        times = {name: [_timed(go, device) for _ in range(repeats + 1)][1:] for name, go in each.items()}
    base = statistics.median(times["plain loop, one after another"])
    return [
        {
            "variant": name,
            "median_s": statistics.median(t),
            "min_s": min(t),
            "max_s": max(t),
            "times_plain": base / statistics.median(t),
        }
        for name, t in times.items()
    ]


def _seeded(seed: int, folder: Path, data_dir: str | Path | None) -> Run:
    experiment = Experiment(methods.FedAvg(), "uci-har", cohort=10, seed=seed)
    return experiment.build(experiment.federation(data_dir), Memory(folder / str(seed)))


def _scene_of(run: Run) -> Scene:
    """What the plain loop needs to know of a run on uci-har."""
    assert run.method.local is not None
    return Scene("har-cnn", run.federation.shape, run.federation.classes, len(run.infos), 0, run.method.local)


def _one_by_one(runs: list[Run], engine: Engine) -> None:
    for run in runs:
        _together([run], engine)


def _together(runs: list[Run], engine: Engine) -> None:
    """One round of every run, in one map."""
    states = [run.method.init(run.start) for run in runs]
    tasks = [plan(run, state) for run, state in zip(runs, states, strict=True)]
    stream = engine.map((run, task) for run, own in zip(runs, tasks, strict=True) for task in own)
    for run, state, own in zip(runs, states, tasks, strict=True):
        run.method.fold(state, gated(run, (report for _, report in islice(stream, len(own))), [], own))
    for _ in stream:
        pass


def _timed(go: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    go()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
