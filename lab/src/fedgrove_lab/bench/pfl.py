"""The same round in pfl-research's simulator: its FederatedAveraging, weighted by examples.

A client trains with torch's optimiser, its examples lie on the device, and so does the mean of the
updates: pfl keeps all of it where the model is. Under ``torchrun`` the clients of a round are
shared out among processes; on CUDA pfl wants a GPU for each of them, so there it is one process.
pfl is imported when a measurement asks for it. Differs from ours: it never shuffles; a client's
batches are cut once, in order, and used in every epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove.runs.rounds import draw_cohort
from fedgrove.runs.run import Run

from .plain_loop import optimiser_of, plain_module
from .scenes import Scene

Precision = Literal["tf32", "bf16"]
FOREVER = sys.maxsize
"""As many rounds: whoever measures says when to stop."""


class WithLoss(nn.Module):
    """A network with the two methods that pfl asks for: ``loss`` and ``metrics``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        # Asked first: going through all modules at every step takes time.
        if not self.net.training:
            self.net.train()
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated, but pfl asks for at least one metric, in the first round."""
        from pfl import metrics

        return {"examples": metrics.Weighted(len(y), len(y))}


def train(
    scene: Scene, run: Run, device: str, rounds: int, round_done: Callable[[], None], folder: Path
) -> None:
    """Train so many rounds of FedAvg over the cohort.

    ``round_done`` is called after each round, by the first process; ``folder`` is not used.
    """
    train_round = prepare(scene, device, None, run)
    # Without torchrun there is no RANK, and this process is the only one.
    is_first = os.environ.get("RANK", "0") == "0"
    for _ in range(rounds):
        train_round()
        if is_first:
            round_done()


def prepare(scene: Scene, device: str, precision: Precision | None, run: Run) -> Callable[[], None]:
    """A round of FedAvg over the cohort, to be called again and again.

    With a precision, products are short (tf32); with bf16 activations are too, by pfl's own mixed
    precision. None: torch's defaults.
    """
    # Read whenever pfl asks for its device.
    os.environ["PFL_PYTORCH_DEVICE"] = device
    # All processes must draw the same clients.
    np.random.seed(0)
    from pfl import algorithm as algorithms
    from pfl import hyperparam as hyperparams
    from pfl.model.pytorch import PyTorchModel as pytorch_model

    local = scene.local
    module = WithLoss(plain_module(scene)).to(device)
    amp_dtype = torch.bfloat16 if precision == "bf16" else None
    # SGD with a learning rate of 1 adds the mean update as it is: plain FedAvg.
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = pytorch_model(module, optimiser_of(local), central, amp_dtype=amp_dtype)
    cohort = draw_cohort(run, 0)
    backend = _backend(run, cohort, device)
    algorithm = algorithms.FederatedAveraging()
    params = algorithms.NNAlgorithmParams(
        central_num_iterations=FOREVER,
        # After the first round: never.
        evaluation_frequency=FOREVER,
        train_cohort_size=len(cohort),
        val_cohort_size=None,
    )
    recipe = hyperparams.NNTrainHyperParams(
        local_num_epochs=local.epochs,
        local_learning_rate=local.optimiser.lr,
        local_batch_size=local.batch,
    )
    callbacks = [_stop_after_a_round()]

    def train_round() -> None:
        with _products(precision):
            # It stops after one round, and counts on from there at the next call.
            algorithm.run(
                params,
                backend,
                model,
                recipe,
                callbacks=callbacks,
                send_metrics_to_platform=False,
            )

    return train_round


@contextmanager
def _products(precision: Precision | None) -> Iterator[None]:
    """Short products of float32 on CUDA, and kernels that cuDNN has tried; None: as torch has it.

    No autocast: within an outer one, pfl's own would keep the casts of weights that have moved.
    """
    if precision is None:
        yield
        return
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    matmul.allow_tf32 = True
    cudnn.allow_tf32 = True
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def _backend(run: Run, cohort: list[int], device: str) -> Any:
    """The cohort's clients in turn; their sizes let pfl share them out evenly among processes."""
    from pfl import data as datasets
    from pfl.aggregate import simulate, weighting
    from pfl.data import sampling
    from pfl.data.pytorch import PyTorchTensorDataset as tensor_dataset

    users: dict[int, Any] = {}
    sizes: dict[int, int] = {}
    for k in cohort:
        part = run.federation.clients[k].train
        # On the device once and for all, as in the plain loop.
        users[k] = tensor_dataset((part.x.to(device), part.y.to(device)), user_id=str(k))
        sizes[k] = len(part)
    sampler = sampling.MinimizeReuseUserSampler(cohort)
    data = datasets.FederatedDataset(users.__getitem__, sampler, sizes)
    return simulate.SimulatedBackend(data, data, postprocessors=[weighting.WeightByDatapoints()])


def _stop_after_a_round() -> Any:
    """A callback of pfl's that ends its loop after each round."""
    from pfl.callback.base import TrainingProcessCallback as base
    from pfl.metrics import Metrics as metrics

    # Defined here, since its base class is there only once pfl is imported.
    class StopAfterARound(base):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> Any:
            return True, metrics()

    return StopAfterARound()
