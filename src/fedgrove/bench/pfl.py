"""The same round in pfl-research's simulator: FederatedAveraging, weighted by examples, torch's optimiser.

Under ``torchrun`` the clients of a round are shared out among processes. pfl is imported when a measurement asks for
it. Differs from ours: it never shuffles, a client's batches are cut once, in order, and used in every epoch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runs.rounds import draw_cohort
from ..runs.run import Run
from .loop import optimiser_of, plain_module
from .scenes import Scene


class Judged(nn.Module):
    """A network with the loss and metrics that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        self.net.train()
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated; pfl asks for one metric at least, in the first round."""
        metrics: Any = importlib.import_module("pfl.metrics")
        return {"examples": metrics.Weighted(len(y), len(y))}


def train(
    scene: Scene, run: Run, device: str, rounds: int, done: Callable[[], None], folder: Path
) -> None:
    """So many rounds of FedAvg over the cohort; ``done`` is called after each, by the first process."""
    os.environ["PFL_PYTORCH_DEVICE"] = device  # read when pfl is imported
    np.random.seed(0)  # the same in all processes, as pfl asks
    wrapped: Any = importlib.import_module("pfl.model.pytorch").PyTorchModel
    algorithms: Any = importlib.import_module("pfl.algorithm")
    hyper: Any = importlib.import_module("pfl.hyperparam")
    module, local = Judged(plain_module(scene)).to(device), scene.local
    half = torch.bfloat16 if scene.half and device == "cuda" else None
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = wrapped(module, optimiser_of(local), central, amp_dtype=half)
    cohort = draw_cohort(run, 0)
    algorithms.FederatedAveraging().run(
        algorithms.NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=len(cohort),
            val_cohort_size=None,
        ),
        _backend(run, cohort, device),
        model,
        hyper.NNTrainHyperParams(
            local_num_epochs=local.epochs,
            local_learning_rate=local.optimiser.lr,
            local_batch_size=local.batch,
        ),
        callbacks=[_watch(done)],
        send_metrics_to_platform=False,
    )


def _backend(run: Run, cohort: list[int], device: str) -> Any:
    """The cohort's clients in turn; their sizes let pfl share them out evenly among processes."""
    sets: Any = importlib.import_module("pfl.data")
    tensors: Any = importlib.import_module("pfl.data.pytorch").PyTorchTensorDataset
    sampling: Any = importlib.import_module("pfl.data.sampling")
    aggregate: Any = importlib.import_module("pfl.aggregate.simulate")
    weighting: Any = importlib.import_module("pfl.aggregate.weighting")
    parts = {k: run.federation.clients[k].train for k in cohort}
    users = {k: tensors((p.x.to(device), p.y.to(device)), user_id=str(k)) for k, p in parts.items()}
    sizes = {k: len(p) for k, p in parts.items()}
    data = sets.FederatedDataset(
        users.__getitem__, sampling.MinimizeReuseUserSampler(cohort), sizes
    )
    return aggregate.SimulatedBackend(data, data, postprocessors=[weighting.WeightByDatapoints()])


def _watch(done: Callable[[], None]) -> Any:
    base: Any = importlib.import_module("pfl.callback.base").TrainingProcessCallback
    metrics: Any = importlib.import_module("pfl.metrics").Metrics

    class Watch(base):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **words: Any) -> Any:
            if os.environ.get("RANK", "0") == "0":
                done()
            return False, metrics()

    return Watch()
