"""What our engines are compared with: a plain PyTorch loop, Flower's simulation, pfl-research.

The yardstick is centralised training: what the hardware does if there are no clients.

The plain loop is what a researcher writes first: an nn.Module, a DataLoader (on CUDA: batches cut
from tensors that are already there), torch.optim, ``load_state_dict`` per client and a mean of
state dicts. A client of Flower's does what a client of the plain loop does.

In pfl-research a client trains with torch's optimiser; its examples and the mean of the updates are
on the device, where the model is. Under ``torchrun`` the clients of a round are divided among
processes; on CUDA pfl wants a GPU for each of them, so there it is one process. Differs from ours:
pfl never shuffles; a client's batches are cut once, in order, and used in every epoch.

flwr and pfl are imported when a measurement needs them, never by the library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedgrove.engines.pool.engine import cores
from fedgrove.errors import InputError
from fedgrove.nets import build
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import draw_cohort
from fedgrove.runs.run import Run

from .scenes import Scene

Precision = Literal["tf32", "bf16"]
FOREVER = sys.maxsize
"""A number of rounds that is never reached: the measurement decides when to stop."""

# ---- the plain loop ------------------------------------------------------------------------------


def build_plain_net(scene: Scene) -> nn.Module:
    """Return the network as one would write it in plain PyTorch."""
    # Our har-cnn treats a series as an image of height 1: faster, but not what one writes first.
    if scene.net != "har-cnn":
        return build(scene.net, scene.shape, scene.classes, 0)
    channels, length = scene.shape
    return nn.Sequential(
        nn.Conv1d(channels, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Dropout(0.3),
        nn.Conv1d(64, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        # Two poolings leave a quarter of the length, in 64 channels: 64 * length / 4.
        nn.Linear(16 * length, 32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, scene.classes),
    )


def find_optimiser(local: LocalTraining) -> Callable[..., torch.optim.Optimizer]:
    """Return torch's own optimiser for a recipe; it still needs the parameters and ``lr``."""
    rule = local.optimiser
    if isinstance(rule, Adam):
        return torch.optim.Adam
    if isinstance(rule, SGD):
        return partial(torch.optim.SGD, momentum=rule.momentum)
    raise InputError(f"optimiser is {type(rule).__name__}; benchmarks compare SGD and Adam only.")


def fit(model: nn.Module, x: Tensor, y: Tensor, scene: Scene) -> None:
    """Train a client's model in place, as the plain loop and Flower's clients do."""
    optimiser = find_optimiser(scene.local)(model.parameters(), lr=scene.local.optimiser.lr)
    use_bf16 = scene.half and x.is_cuda
    model.train()
    for batch_x, batch_y in _batches(x, y, scene.local):
        optimiser.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=use_bf16):
            loss = F.cross_entropy(model(batch_x), batch_y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _batches(x: Tensor, y: Tensor, local: LocalTraining) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(local.epochs):
        if x.is_cuda:
            # A DataLoader would fetch example by example, a kernel for each: too easy to beat.
            order = torch.randperm(len(y), device=x.device)
            for index in torch.split(order, local.batch):
                yield x[index], y[index]
        else:
            yield from DataLoader(TensorDataset(x, y), batch_size=local.batch, shuffle=True)


class PlainLoop:
    """FedAvg, one client after another."""

    def __init__(self, scene: Scene, run: Run, device: str) -> None:
        self.scene = scene
        self.run = run
        self.device = device
        self.model = build_plain_net(scene).to(device)
        self.data: dict[int, tuple[Tensor, Tensor]] = {}
        for k, client in run.federation.clients.items():
            self.data[k] = (client.train.x.to(device), client.train.y.to(device))

    def round(self, cohort: list[int]) -> None:
        """Train every client of the cohort from the same model, and average."""
        model = self.model
        start = {}
        sums = {}
        for name, value in model.state_dict().items():
            # state_dict returns the live tensors, which training changes.
            start[name] = value.clone()
            # In float32, since BatchNorm counts its batches in integers.
            sums[name] = torch.zeros_like(value, dtype=torch.float32)
        total = sum(self.run.infos[k].examples for k in cohort)
        for k in cohort:
            model.load_state_dict(start, strict=False)
            fit(model, *self.data[k], self.scene)
            for name, value in model.state_dict().items():
                sums[name] += value * (self.run.infos[k].examples / total)
        model.load_state_dict(sums, strict=False)


# ---- the yardstick -------------------------------------------------------------------------------


class Centralised:
    """One model trained on the examples of a whole cohort, with the cohort's batches as one batch.

    It is compiled, on CUDA with CUDA graphs, channels last and a fused optimiser. A last batch that
    is smaller is left out, since it would be compiled anew.
    """

    def __init__(
        self, scene: Scene, run: Run, device: str, half: bool = False, compiled: bool = True
    ) -> None:
        cohort = draw_cohort(run, 0)
        clients = [run.federation.clients[k].train for k in cohort]
        self.device = device
        self.half = half
        self.epochs = scene.local.epochs
        self.x = torch.cat([examples.x for examples in clients]).to(device)
        self.y = torch.cat([examples.y for examples in clients]).to(device)
        self.batch = min(len(cohort) * scene.local.batch, len(self.y))
        self.model = build_plain_net(scene).to(device).train()
        is_image = self.x.dim() == 4
        if device == "cuda" and is_image:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.optimiser = find_optimiser(scene.local)(
            self.model.parameters(), lr=scene.local.optimiser.lr, fused=device == "cuda"
        )
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if compiled:
            self.loss = torch.compile(
                self._loss, mode="reduce-overhead" if device == "cuda" else "default"
            )

    @property
    def examples(self) -> int:
        """The examples that a round trains on, those of several epochs counted again."""
        return self.epochs * (len(self.y) // self.batch) * self.batch

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            return F.cross_entropy(self.model(x), y)

    def round(self) -> None:
        """Train as many epochs as clients do in a round."""
        for _ in range(self.epochs):
            order = torch.randperm(len(self.y), device=self.y.device)
            for index in torch.split(order, self.batch):
                if len(index) < self.batch:
                    continue
                self.optimiser.zero_grad()
                self.loss(self.x[index], self.y[index]).backward()  # type: ignore[no-untyped-call]
                self.optimiser.step()


# ---- Flower --------------------------------------------------------------------------------------


def train_flower(
    scene: Scene, run: Run, device: str, rounds: int, end_round: Callable[[], None], folder: Path
) -> None:
    """Train rounds of FedAvg in Flower's simulation, a node for each client of the cohort.

    ``end_round`` is called after each round; ``folder`` takes the clients' examples.
    """
    # Read when flwr is imported: measuring must not send anything anywhere.
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    cohort = draw_cohort(run, 0)
    # Through files, so that actors read their clients' examples once and no message carries them.
    for node, k in enumerate(cohort):
        part = run.federation.clients[k].train
        save_file({"x": part.x.contiguous(), "y": part.y.contiguous()}, _file(folder, node))
    from flwr.clientapp import ClientApp

    client: Any = ClientApp()
    client.train()(partial(_train_flower_client, scene, str(folder), device))
    from flwr.serverapp import ServerApp

    server: Any = ServerApp()
    server.main()(partial(_serve_flower, scene, len(cohort), rounds, end_round))
    # A share of the GPU such that there is an actor per core there too.
    gpu_share = 0.0 if device == "cpu" else 1 / cores()
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": gpu_share}}
    from flwr.simulation import run_simulation as simulate

    simulate(server, client, num_supernodes=len(cohort), backend_config=resources)


def _serve_flower(
    scene: Scene, nodes: int, rounds: int, end_round: Callable[[], None], grid: Any, context: Any
) -> None:
    """The server's part: Flower's own FedAvg, which evaluates nothing and waits for all nodes."""
    from flwr import app
    from flwr.serverapp import strategy as strategies

    strategy = strategies.FedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )

    def evaluate(round: int, arrays: Any) -> None:
        # Flower calls this before the first round as well, with 0.
        if round:
            end_round()

    start = app.ArrayRecord(build_plain_net(scene).state_dict())
    strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate)


def _train_flower_client(scene: Scene, folder: str, device: str, message: Any, context: Any) -> Any:
    """In an actor: train the global model on the client's examples."""
    from flwr import app

    x, y = _data(folder, int(context.node_config["partition-id"]), device)
    model = build_plain_net(scene)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    fit(model.to(device), x, y, scene)
    arrays = app.ArrayRecord(model.state_dict())
    # Flower's FedAvg weights by this.
    metrics = app.MetricRecord({"num-examples": len(y)})
    content = app.RecordDict({"arrays": arrays, "metrics": metrics})
    return app.Message(content=content, reply_to=message)


@cache
def _data(folder: str, node: int, device: str) -> tuple[Tensor, Tensor]:
    """A client's examples; an actor reads them once."""
    data = load_file(_file(Path(folder), node), device=device)
    # A core per actor, as Ray plans it too. Here, because this runs in the actor, before it trains.
    torch.set_num_threads(1)
    return data["x"], data["y"]


def _file(folder: Path, node: int) -> str:
    return str(folder / f"{node}.safetensors")


# ---- pfl-research --------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A network with the two methods that pfl calls: ``loss`` and ``metrics``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        # Checked first: going through all modules at every step takes time.
        if not self.net.training:
            self.net.train()
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated, but pfl needs at least one metric, in the first round."""
        from pfl import metrics

        return {"examples": metrics.Weighted(len(y), len(y))}


def train_pfl(
    scene: Scene, run: Run, device: str, rounds: int, end_round: Callable[[], None], folder: Path
) -> None:
    """Train rounds of FedAvg in pfl-research over the cohort.

    ``end_round`` is called after each round, by the first process; ``folder`` is not used.
    """
    train_round = prepare_pfl(scene, device, None, run)
    # Without torchrun there is no RANK, and this process is the only one.
    is_first = os.environ.get("RANK", "0") == "0"
    for _ in range(rounds):
        train_round()
        if is_first:
            end_round()


def prepare_pfl(
    scene: Scene, device: str, precision: Precision | None, run: Run
) -> Callable[[], None]:
    """Return a round of FedAvg in pfl-research over the cohort, to be called again and again.

    With a precision, products are short (tf32); with bf16 activations are too, by pfl's own mixed
    precision. None: torch's defaults.
    """
    # Read whenever pfl looks up its device.
    os.environ["PFL_PYTORCH_DEVICE"] = device
    # All processes must draw the same clients.
    np.random.seed(0)
    from pfl import algorithm as algorithms
    from pfl import hyperparam as hyperparams
    from pfl.model.pytorch import PyTorchModel as pytorch_model

    local = scene.local
    module = WithLoss(build_plain_net(scene)).to(device)
    amp_dtype = torch.bfloat16 if precision == "bf16" else None
    # SGD with a learning rate of 1 adds the mean update as it is: plain FedAvg.
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = pytorch_model(module, find_optimiser(local), central, amp_dtype=amp_dtype)
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
    """The cohort's clients in turn; their sizes let pfl divide them evenly among processes."""
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
