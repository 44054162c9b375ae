"""Figures over clients."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run

import fedgrove
from fedgrove import data, methods
from fedgrove.core import ClientInfo, Report, Task
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.metrics import ACCURACY, F1
from fedgrove.problems import numbers
from fedgrove.report.tables import print_summaries
from fedgrove.runs.scoring import pool_scores, spread, spread_scores

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


# ---- all test examples together ------------------------------------------------------------------


def scored(client: int, score: float, **sums: float) -> Report:
    """The report of a client that scored a model; without ``sums`` by an older version."""
    return Report(
        client, metrics={"test0": score, **{f"test0.{name}": v for name, v in sums.items()}}
    )


def test_pooled_accuracy_weights_clients_by_their_examples() -> None:
    # 1 of 1 and 3 of 9 are right: the mean over clients is (1 + 1/3) / 2 = 2/3, pooled 4/10
    reports = [scored(0, 1.0, correct=1, total=1), scored(1, 1 / 3, correct=3, total=9)]
    found = spread_scores(ACCURACY, reports, 0)
    assert found["accuracy_mean"] == 0.66666667
    assert found["accuracy_pooled"] == 0.4
    assert found == spread_scores(ACCURACY, reports[::-1], 0)


def test_pooled_errors_are_computed_from_added_sums_not_averaged() -> None:
    # Squared errors 4 over 1 example and 5 over 2: rmse sqrt(9 / 3), not the mean of 2 and sqrt(5/2)
    reports = [scored(0, 2.0, value=4, total=1), scored(1, 2.5**0.5, value=5, total=2)]
    assert pool_scores(numbers(metric="rmse").metric, reports, 0) == pytest.approx(3**0.5)
    # Labels: hits 1 + 2, false alarms 0 + 1, misses 3 + 0: 2 * 3 / (2 * 3 + 4) = 0.6
    reports = [
        scored(0, 0.4, hits=1, false_alarms=0, misses=3, total=2),
        scored(1, 0.8, hits=2, false_alarms=1, misses=0, total=2),
    ]
    assert pool_scores(F1, reports, 0) == 0.6


@pytest.mark.parametrize(
    "other",
    [
        scored(1, 0.5),
        scored(1, 0.5, total=2),
        scored(1, 0.5, correct=9, total=2),
        scored(1, 0.5, correct=-9, total=2),
        scored(1, 0.5, correct=1, total=-1),
    ],
)
def test_sums_that_give_no_score_give_no_pooled_score(other: Report) -> None:
    """Sums come from clients: from an older one that has none, or one that lies."""
    found = spread_scores(ACCURACY, [scored(0, 1.0, correct=1, total=1), other], 0)
    assert found["accuracy_mean"] == 0.75
    assert "accuracy_pooled" not in found


def test_the_gate_refuses_a_report_on_no_examples(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    task = Task(0, verb="evaluate")
    metrics = {"density": 1.0, "params": 1.0, "test0": 0.5, "test0.correct": 0.0}
    for total, reason in ((1.0, None), (0.0, "metrics")):
        report = Report(0, {}, run.infos[0].examples, {**metrics, "test0.total": total})
        refusal = run.gate.refuses(report, task, run.expected(task), run.infos[0])
        assert (refusal and refusal.reason) == reason


def unscaled(federation: Federation, x: torch.Tensor) -> np.ndarray:
    """Images as they were before all of them were standardised."""
    assert federation.preparation.mean is not None
    assert federation.preparation.std is not None
    return x.numpy() * federation.preparation.std[0] + federation.preparation.mean[0]


@pytest.mark.parametrize("engine", ["serial", "wired", "pool", "batched"])
def test_the_pooled_score_of_a_run_is_that_of_all_predictions(engine: str) -> None:
    """Of the models that clients have at the end, recomputed from their predictions."""
    federation = data.load("digits", clients=4, partition="dirichlet:0.3", seed=1)
    options = {"rounds": 2, "cohort": 4, "finetune": (0, 1), "engine": engine, "progress": False}
    result = fedgrove.run("fedavg", data=federation, **options)
    right = 0
    tested = 0
    for k, client in federation.clients.items():
        logits = torch.from_numpy(result.model(k).outputs(unscaled(federation, client.test.x)))
        right += int((logits.argmax(1) == client.test.y).sum())
        tested += len(client.test)
        score = result.summary["accuracy_clients_after_1"][str(k)]
        assert score == pytest.approx(float((logits.argmax(1) == client.test.y).double().mean()))
    pooled = result.summary["accuracy_pooled_after_1"]
    assert pooled == pytest.approx(right / tested, abs=1e-8)
    assert result.summary["finetune"]["1"]["accuracy_pooled"] == pooled
    for line in result.rounds():
        assert 0 <= line["accuracy_pooled"] <= 1
    # Clients differ in size: the two means are not the same number.
    assert pooled != result.summary["accuracy_mean_after_1"]


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
    for ending in ("", "_after_1"):
        clients = summary[f"mae_clients{ending}"].values()
        assert summary[f"mae_mean{ending}"] == pytest.approx(fmean(clients))
        assert min(clients) > 0
    assert summary["finetune"]["0"]["mae_mean"] == summary["mae_mean"]
    assert summary["mae_mean"] > summary["mae_mean_after_1"]
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
