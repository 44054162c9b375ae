"""The same round in Flower's simulation: FedAvg by its own strategy, a Ray actor per core.

A client does what it does in the plain loop. flwr is imported when a measurement asks for it, never by the library.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..engines.pool.engine import cores
from ..runs.rounds import draw_cohort
from ..runs.run import Run
from .loop import fit, plain_module
from .scenes import Scene


def train(
    scene: Scene, run: Run, device: str, rounds: int, done: Callable[[], None], folder: Path
) -> None:
    """So many rounds of FedAvg over the cohort, a node for each of its clients; ``done`` is called after each."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = (
        "0"  # read when flwr is imported: measuring must not call home
    )
    cohort = draw_cohort(run, 0)
    for node, k in enumerate(cohort):
        part = run.federation.clients[k].train
        save_file({"x": part.x.contiguous(), "y": part.y.contiguous()}, _file(folder, node))
    client: Any = importlib.import_module("flwr.clientapp").ClientApp()
    client.train()(partial(_client, scene, str(folder), device))
    server: Any = importlib.import_module("flwr.serverapp").ServerApp()
    server.main()(partial(_server, scene, len(cohort), rounds, done))
    share = (
        0.0 if device == "cpu" else 1 / cores()
    )  # of the GPU, so that there is an actor per core all the same
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": share}}
    simulate = importlib.import_module("flwr.simulation").run_simulation
    simulate(server, client, num_supernodes=len(cohort), backend_config=resources)


def _server(
    scene: Scene, nodes: int, rounds: int, done: Callable[[], None], grid: Any, context: Any
) -> None:
    app: Any = importlib.import_module("flwr.app")
    strategies: Any = importlib.import_module("flwr.serverapp.strategy")
    strategy = strategies.FedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )

    def after(round: int, arrays: Any) -> None:
        if round:  # 0: nothing has been trained
            done()

    start = app.ArrayRecord(plain_module(scene).state_dict())
    strategy.start(grid, start, num_rounds=rounds, evaluate_fn=after)


def _client(scene: Scene, folder: str, device: str, message: Any, context: Any) -> Any:
    """In an actor: from the global model to the client's own."""
    app: Any = importlib.import_module("flwr.app")
    x, y = _data(folder, int(context.node_config["partition-id"]), device)
    model = plain_module(scene)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    fit(model.to(device), x, y, scene)
    arrays, metrics = (
        app.ArrayRecord(model.state_dict()),
        app.MetricRecord({"num-examples": len(y)}),
    )
    return app.Message(
        content=app.RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message
    )


@cache
def _data(folder: str, node: int, device: str) -> tuple[Tensor, Tensor]:
    """A client's examples; an actor reads them once."""
    found = load_file(_file(Path(folder), node), device=device)
    torch.set_num_threads(1)  # a core per actor; Ray asks for this too
    return found["x"], found["y"]


def _file(folder: Path, node: int) -> str:
    return str(folder / f"{node}.safetensors")
