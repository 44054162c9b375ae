"""Figures over clients."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run

import fedgrove
from fedgrove import data, methods
from fedgrove.core import ClientInfo
from fedgrove.data import ClientData, Examples
from fedgrove.problems import numbers
from fedgrove.report.tables import print_summaries
from fedgrove.runs.scoring import spread

ACCURACIES = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=35)


def test_spread_of_four_clients() -> None:
    # mean (0.2 + 0.4 + 0.9 + 0.5) / 4 = 0.5
    # variance ((-0.3)^2 + (-0.1)^2 + 0.4^2 + 0) / 4 = (0.09 + 0.01 + 0.16) / 4 = 0.065, its root 0.25495098 (over
    # clients: divided by K, not K - 1); the worst tenth of four is ceil(0.4) = 1 client
    assert spread([0.2, 0.4, 0.9, 0.5]) == {
        "accuracy_mean": 0.5,
        "accuracy_std": 0.25495098,
        "accuracy_worst": 0.2,
        "accuracy_worst10": 0.2,
    }


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up(clients: int, tenth: int) -> None:
    # accuracies 0/100, 1/100, ...: the worst n of them have the mean (n - 1) / 200
    found = spread([i / 100 for i in reversed(range(clients))], prefix="a")
    assert found["a_worst10"] == pytest.approx((tenth - 1) / 200)
    assert found["a_worst"] == 0


def test_spread_of_nobody_is_not_a_number() -> None:
    found = spread([])
    assert set(found) == {"accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_worst10"}
    assert all(math.isnan(v) for v in found.values())


@given(ACCURACIES)
def test_spread_agrees_with_the_standard_library_in_any_order(accuracies: list[float]) -> None:
    found = spread(accuracies)
    assert found["accuracy_mean"] == pytest.approx(fmean(accuracies), abs=1e-8)
    assert found["accuracy_std"] == pytest.approx(pstdev(accuracies), abs=1e-7)
    assert found["accuracy_worst"] == round(min(accuracies), 8)
    assert found["accuracy_worst"] <= found["accuracy_worst10"] <= found["accuracy_mean"] + 1e-8
    assert found == spread(accuracies[::-1])


# ---- clients without test examples ---------------------------------------------------------------


def untested_client(k: int) -> ClientData:
    """A client that predicts a number; clients 1 and 3 have no test examples."""
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(k))
    end = 22 if k in (1, 3) else 30
    rows = [Examples(x[a:b], 5 * x[a:b, :1] + 10) for a, b in ((0, 20), (20, 22), (22, end))]
    return ClientData(*rows, ClientInfo(20))


@pytest.mark.parametrize("engine", ["serial", "pool", "batched"])
def test_a_client_without_test_examples_is_left_out_and_it_is_said(engine: str) -> None:
    """Its error is not 0, nor its accuracy: there is none."""
    federation = data.from_clients(untested_client, 5, classes=1, problem=numbers())
    words = {"rounds": 2, "cohort": 5, "finetune": (0, 1), "engine": engine, "progress": False}
    result = fedgrove.run("fedavg", data=federation, **words)
    summary = result.summary
    assert sorted(summary["mae_clients"]) == ["0", "2", "4"]
    assert summary["scored"] == 3
    assert "2 of 5 clients have no test examples: not scored" in summary["notes"]
    # The mean is that of the other three, after both lengths of fine-tuning.
    assert summary["mae_mean"] == pytest.approx(fmean(summary["mae_clients"].values()))
    assert min(summary["mae_clients"].values()) > 0
    assert summary["finetune"]["0"]["mae_mean"] > summary["mae_mean"]
    for line in result.folder.metrics():
        assert (line["scored"], line["unscored"]) == (3, {"no test examples": [1, 3]})
        assert line["mae_mean"] > 1
    # They are fine-tuned all the same: everybody has a model.
    assert len(list((result.folder.path / "models").glob("client-*.safetensors"))) == 5


def test_where_nobody_has_test_examples_there_are_no_scores(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path / "run", rounds=2)
    clients = {}
    for k, client in run.federation.clients.items():
        clients[k] = replace(client, test=Examples(client.test.x[:0], client.test.y[:0]))
    federation = replace(run.federation, clients=clients).to(torch.float32)
    result = fedgrove.run("fedavg", data=federation, rounds=2, engine="serial", progress=False)
    assert result.summary["scored"] == 0
    assert result.summary["metric"] == "accuracy"
    assert "accuracy_mean" not in result.summary
    assert "4 of 4 clients have no test examples: not scored" in result.summary["notes"]
    text = io.StringIO()
    print_summaries([result.summary], text)
    assert "not scored" in text.getvalue()
