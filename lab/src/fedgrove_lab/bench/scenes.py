"""The rounds that ``fedgrove bench engine`` measures, as runs of fedavg: net, clients, training.

Inputs are drawn at random, except in the scene uci-har, a cohort of 10 of its real users.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedgrove import methods
from fedgrove.config.experiment import Experiment
from fedgrove.core import ClientInfo
from fedgrove.data import ClientData, Defaults, Examples, Federation
from fedgrove.errors import unknown
from fedgrove.nets import Net, build
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import Run


@dataclass(frozen=True)
class Scene:
    """A round to measure: a network, clients, examples each, and how they train."""

    net: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    examples: int
    local: LocalTraining
    half: bool = False
    """On CUDA in bf16, the plain loop too."""


SCENES = {
    "har": Scene(
        net="har-cnn",
        shape=(9, 128),
        classes=6,
        clients=30,
        examples=343,
        local=LocalTraining(3, 32, Adam(1e-3)),
    ),
    "cnn": Scene(
        net="mnist-cnn",
        shape=(1, 28, 28),
        classes=10,
        clients=100,
        examples=600,
        local=LocalTraining(1, 32, SGD(0.01, momentum=0.9)),
    ),
    "resnet": Scene(
        net="resnet18",
        shape=(3, 32, 32),
        classes=10,
        clients=10,
        examples=640,
        local=LocalTraining(1, 32, SGD(0.01, momentum=0.9)),
        half=True,
    ),
}


def find_scene(
    name: str, folder: Path, cohort: int | None = None, data_dir: str | Path | None = None
) -> tuple[Scene, Run]:
    """Return a scene by its name, and the run in which its round is measured."""
    if name == "uci-har":
        run = build_uci_har_run(0, folder, data_dir)
        return describe_scene(run), run
    if name not in SCENES:
        raise unknown("scene", name, [*SCENES, "uci-har"])
    return SCENES[name], build_run(SCENES[name], folder, cohort)


def build_run(scene: Scene, folder: Path, cohort: int | None = None) -> Run:
    """Return the scene as a run of fedavg, on inputs drawn at random."""
    # One generator for all clients: every process draws the same examples for a scene.
    g = torch.Generator().manual_seed(0)

    def examples(n: int) -> Examples:
        x = torch.randn(n, *scene.shape, generator=g)
        y = torch.randint(scene.classes, (n,), generator=g)
        return Examples(x, y)

    clients = {}
    for k in range(scene.clients):
        # Nothing is evaluated, so one example of validation and one of test are enough.
        clients[k] = ClientData(
            examples(scene.examples), examples(1), examples(1), ClientInfo(scene.examples)
        )
    class_names = tuple(str(c) for c in range(scene.classes))
    # A federation must have defaults; these are never used, since the run sets everything itself.
    defaults = Defaults(
        scene.net, scene.clients, 1, scene.local.epochs, scene.local.batch, "Adam", 1e-3
    )
    federation = Federation("random", clients, scene.classes, class_names, scene.shape, defaults)
    net = Net(build(scene.net, scene.shape, scene.classes, 0), scene.shape)
    method = methods.FedAvg(local=scene.local)
    return Run(method, federation, net, Memory(folder), rounds=1, cohort=cohort or scene.clients)


def build_uci_har_run(seed: int, folder: Path, data_dir: str | Path | None) -> Run:
    """Return a run of fedavg on uci-har, a cohort of 10."""
    experiment = Experiment(methods.FedAvg(), "uci-har", cohort=10, seed=seed)
    return experiment.build(experiment.federation(data_dir), Memory(folder / str(seed)))


def describe_scene(run: Run) -> Scene:
    """Return what the plain loop needs to know of a run on uci-har."""
    # A run fills in the data set's recipe where its method has none.
    assert run.method.local is not None
    return Scene(
        net="har-cnn",
        shape=run.federation.shape,
        classes=run.federation.classes,
        clients=len(run.infos),
        # Its users have different numbers of examples, and nothing reads this.
        examples=0,
        local=run.method.local,
    )
