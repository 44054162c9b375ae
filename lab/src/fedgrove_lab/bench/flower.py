"""The same round in Flower's simulation: FedAvg by its own strategy, a Ray actor per core.

A client does what it does in the plain loop. flwr is imported when a measurement asks for it, never
by the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedgrove.engines.pool.engine import cores
from fedgrove.runs.rounds import draw_cohort
from fedgrove.runs.run import Run

from .plain_loop import fit, plain_module
from .scenes import Scene


def train(
    scene: Scene, run: Run, device: str, rounds: int, round_done: Callable[[], None], folder: Path
) -> None:
    """Train so many rounds of FedAvg over the cohort, a node for each of its clients.

    ``round_done`` is called after each round; ``folder`` takes the clients' examples.
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
    client.train()(partial(_client, scene, str(folder), device))
    from flwr.serverapp import ServerApp

    server: Any = ServerApp()
    server.main()(partial(_server, scene, len(cohort), rounds, round_done))
    # A share of the GPU such that there is an actor per core there too.
    gpu_share = 0.0 if device == "cpu" else 1 / cores()
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": gpu_share}}
    from flwr.simulation import run_simulation as simulate

    simulate(server, client, num_supernodes=len(cohort), backend_config=resources)


def _server(
    scene: Scene, nodes: int, rounds: int, round_done: Callable[[], None], grid: Any, context: Any
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
            round_done()

    start = app.ArrayRecord(plain_module(scene).state_dict())
    strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate)


def _client(scene: Scene, folder: str, device: str, message: Any, context: Any) -> Any:
    """In an actor: train the global model on the client's examples."""
    from flwr import app

    x, y = _data(folder, int(context.node_config["partition-id"]), device)
    model = plain_module(scene)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    fit(model.to(device), x, y, scene)
    arrays = app.ArrayRecord(model.state_dict())
    # FedAvg weighs by this.
    metrics = app.MetricRecord({"num-examples": len(y)})
    content = app.RecordDict({"arrays": arrays, "metrics": metrics})
    return app.Message(content=content, reply_to=message)


@cache
def _data(folder: str, node: int, device: str) -> tuple[Tensor, Tensor]:
    """A client's examples; an actor reads them once."""
    data = load_file(_file(Path(folder), node), device=device)
    # A core per actor, as Ray asks for too. Here, because this runs in the actor, before it trains.
    torch.set_num_threads(1)
    return data["x"], data["y"]


def _file(folder: Path, node: int) -> str:
    return str(folder / f"{node}.safetensors")
