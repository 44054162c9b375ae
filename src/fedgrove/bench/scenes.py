"""The rounds that ``fedgrove bench engine`` measures, as runs of fedavg.

Inputs are drawn at random, except in the scene uci-har, a cohort of 10 of its real users.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import methods
from ..config.experiment import Experiment
from ..core import Info
from ..data import ClientData, Defaults, Examples, Federation
from ..errors import unknown
from ..nets import Net, build
from ..parts.local import SGD, Adam, LocalTraining
from ..runs.run import Run
from ..runs.store import Memory


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
    "har": Scene("har-cnn", (9, 128), 6, 30, 343, LocalTraining(3, 32, Adam(1e-3))),
    "cnn": Scene(
        "mnist-cnn", (1, 28, 28), 10, 100, 600, LocalTraining(1, 32, SGD(0.01, momentum=0.9))
    ),
    "resnet": Scene(
        "resnet18",
        (3, 32, 32),
        10,
        10,
        640,
        LocalTraining(1, 32, SGD(0.01, momentum=0.9)),
        half=True,
    ),
}


def setting(
    name: str, folder: Path, cohort: int | None = None, data_dir: str | Path | None = None
) -> tuple[Scene, Run]:
    """A scene by its name, and the run in which its round is measured."""
    if name not in (*SCENES, "uci-har"):
        raise unknown("scene", name, [*SCENES, "uci-har"])
    if name == "uci-har":
        run = seeded(0, folder, data_dir)
        return scene_of(run), run
    return SCENES[name], run_of(SCENES[name], folder, cohort)


def run_of(scene: Scene, folder: Path, cohort: int | None = None) -> Run:
    """The scene as a run of fedavg, on numbers drawn at random."""
    g = torch.Generator().manual_seed(0)

    def examples(n: int) -> Examples:
        return Examples(
            torch.randn(n, *scene.shape, generator=g),
            torch.randint(scene.classes, (n,), generator=g),
        )

    n = scene.examples
    clients = {
        k: ClientData(examples(n), examples(1), examples(1), Info(n)) for k in range(scene.clients)
    }
    names = tuple(map(str, range(scene.classes)))
    defaults = Defaults(
        scene.net, scene.clients, 1, scene.local.epochs, scene.local.batch, "Adam", 1e-3
    )
    federation = Federation("random", clients, scene.classes, names, scene.shape, defaults)
    net = Net(build(scene.net, scene.shape, scene.classes, 0), scene.shape)
    method = methods.FedAvg(local=scene.local)
    return Run(method, federation, net, Memory(folder), rounds=1, cohort=cohort or scene.clients)


def seeded(seed: int, folder: Path, data_dir: str | Path | None) -> Run:
    """fedavg on uci-har, a cohort of 10."""
    experiment = Experiment(methods.FedAvg(), "uci-har", cohort=10, seed=seed)
    return experiment.build(experiment.federation(data_dir), Memory(folder / str(seed)))


def scene_of(run: Run) -> Scene:
    """What the plain loop needs to know of a run on uci-har."""
    assert run.method.local is not None
    return Scene(
        "har-cnn", run.federation.shape, run.federation.classes, len(run.infos), 0, run.method.local
    )
