"""IFCA: clients that differ end with different models, each with the one that fits it best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.conftest import make_run, play, reports
from tests.contract import Contract

from fedgrove import methods
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.methods import IFCA
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.rounds import plan_scoring, rounds
from fedgrove.runs.run import Run

CONTRACT = Contract(
    off=IFCA(clusters=1),
    one_group=IFCA(clusters=1),
    paper_bytes=4 * 5187 * (3 + 1) * 3 * 50,
    refused_with_privacy="numbers next to their model",
)


def two_kinds(run: Run) -> Run:
    """Odd clients call every class by the next one's name."""
    for k, client in run.federation.clients.items():
        if k % 2:
            parts = {
                s: replace(getattr(client, s), y=(getattr(client, s).y + 1) % 3)
                for s in ("train", "test")
            }
            run.federation.clients[k] = replace(client, **parts)
    return run


def test_two_kinds_of_clients_end_with_two_models(tmp_path: Path) -> None:
    words = {"sizes": (60, 60, 60, 60), "cohort": 4, "rounds": 6}
    method = methods.IFCA(clusters=2, local=LocalTraining(2, 8, Adam(1e-2)))
    run = two_kinds(make_run(method, tmp_path / "two", **words))
    state = play(run, Serial())
    assert state.groups[0] == state.groups[2] != state.groups[1] == state.groups[3]
    one = two_kinds(make_run(replace(method, clusters=1), tmp_path / "one", **words))
    shared = play(one, Serial())
    mean = {}
    for name, r, s in (("two", run, state), ("one", one, shared)):
        scores = [perform(r, task, {})[0].metrics["test0"] for task in plan_scoring(r, s)]
        mean[name] = sum(scores) / len(scores)
    assert mean["two"] > mean["one"] + 0.15


def test_every_client_trains_the_model_with_the_lowest_loss(tmp_path: Path) -> None:
    """All three models travel down, one comes back; a model nobody chose stays as it was."""
    run = make_run(methods.IFCA(clusters=3), tmp_path, rounds=2)
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        before = exchange.state
        assert all(set(task.send) == {"model0", "model1", "model2"} for task in exchange.tasks)
        found = list(reports(run, Serial(), exchange.tasks))
        for report in found:
            data = run.federation.clients[report.of].train
            losses = [
                float(F.cross_entropy(run.net(model, data.x, train=False).logits, data.y))
                for _, model in sorted(before.models.items())
            ]
            assert report.metrics["group"] == losses.index(min(losses))
            assert set(report.give) == {"model"}
        exchange = loop.send(zip(exchange.tasks, found, strict=True))
        chosen = {int(r.metrics["group"]) for r in found}
        assert all(exchange.state.models[j] is before.models[j] for j in {0, 1, 2} - chosen)
        assert all(exchange.state.models[j] is not before.models[j] for j in chosen)


def test_starts_differ(tmp_path: Path) -> None:
    run = make_run(methods.IFCA(clusters=3), tmp_path)
    heads = [model["head.weight"] for model in run.method.init(run.setup).models.values()]
    assert torch.equal(heads[0], run.params["head.weight"])
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
