"""Seconds per round of FedAvg over real processes: plain Flower, and fedgrove, on the same nodes.

``python -m tests.deploy.compare_with_plain``: a SuperLink under TLS and three nodes on this machine, the
same small model on the same examples, run by turns. It prints what docs/performance.md says.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tests.deploy.processes import Site, wait_for

from fedgrove import data, methods
from fedgrove.config.experiment import Experiment
from fedgrove.deploy.app import write_app
from fedgrove.deploy.keys import make_keys

CLIENTS = 3
ROUNDS = 4
TURNS = 2

PYPROJECT = """
[project]
name = "plain"
version = "1.0.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "plain"

[tool.flwr.app.components]
serverapp = "plain.both:server"
clientapp = "plain.both:client"

[tool.flwr.app.config]
out = ""
"""
BOTH = '''
"""FedAvg as Flower's own tutorials write it."""

import time

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file
from torch import nn

FOLDER = "{folder}"
client = ClientApp()
server = ServerApp()


def net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


@client.train()
def train(message, context):
    torch.set_num_threads(1)
    own = load_file(f"{{FOLDER}}/{{context.node_config['partition-id']}}.safetensors")
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.001)
    for _ in range(5):
        for rows in torch.randperm(len(own["y"])).split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(own["x"][rows]), own["y"][rows]).backward()
            optimiser.step()
    content = {{
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({{"num-examples": len(own["y"])}}),
    }}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    begun = [time.monotonic()]

    def note(round, arrays):
        with open(context.run_config["out"], "a") as file:
            now = time.monotonic()
            file.write(f"{{now - begun[0]}}\\n")
            begun[0] = now

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes={clients}, min_available_nodes={clients})
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds={rounds}, evaluate_fn=note)
'''


def main() -> None:
    """Run both by turns and print the seconds of each round but the first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        site = Site(path)
        try:
            measure(site, path)
        finally:
            site.close()


def measure(site: Site, path: Path) -> None:
    """The same on nodes that are there."""
    federation = data.load("digits", clients=CLIENTS)
    for k, client in federation.clients.items():
        part = client.train
        save_file({"x": part.x.contiguous(), "y": part.y.contiguous()}, path / f"{k}.safetensors")
    plain = path / "plain-app"
    (plain / "plain").mkdir(parents=True)
    (plain / "pyproject.toml").write_text(PYPROJECT)
    (plain / "plain" / "__init__.py").write_text("")
    both = BOTH.format(folder=path, clients=CLIENTS, rounds=ROUNDS)
    (plain / "plain" / "both.py").write_text(both)
    words: Any = {"data": "digits", "clients": CLIENTS, "rounds": ROUNDS, "evaluate": 0}
    ours = write_app(Experiment(methods.make("fedavg"), **words), path / "our-app").folder
    make_keys(site.keys, CLIENTS)
    site.start_link()
    site.register(CLIENTS)
    for k in range(CLIENTS):
        site.start_node(k)
    seconds: dict[str, list[float]] = {"plain Flower": [], "fedgrove": []}
    for turn in range(TURNS):
        out = path / f"plain-{turn}.txt"
        run = site.start_run(plain, f"plain-{turn}", out=str(out))
        wait_for("the end", lambda run=run: run.process.poll() is not None, 600)
        # The first line is before round 1.
        seconds["plain Flower"] += [float(line) for line in out.read_text().split()[2:]]
        out = path / f"ours-{turn}"
        run = site.start_run(ours, f"ours-{turn}", out=str(out))
        wait_for("the end", lambda run=run: run.process.poll() is not None, 600)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds["fedgrove"] += [line["seconds"] for line in lines[1:]]
        for name, each in seconds.items():
            shown = " ".join(f"{one:.1f}" for one in each)
            median = statistics.median(each)
            print(f"{name}: median {median:.1f} s a round ({shown})", flush=True)


if __name__ == "__main__":
    main()
