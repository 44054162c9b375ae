"""Metrics that a run with classes can be scored by: by hand, by scikit-learn, in every engine."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score
from tests.runs.test_scoring import unscaled

import fedgrove
from fedgrove import data
from fedgrove.cli import main
from fedgrove.core import Report
from fedgrove.data import Federation
from fedgrove.errors import InputError
from fedgrove.metrics import BALANCED_ACCURACY, CLASS_METRICS, MACRO_F1
from fedgrove.options.groups import METRICS
from fedgrove.problems import CLASSES, MixedProblem, score_by
from fedgrove.runs.scoring import pool_scores

CLASS_COUNT = 4
NAMES = ("balanced_accuracy", "macro_f1")


def score(metric: str, true: list[int], predicted: list[int], classes: int = CLASS_COUNT) -> float:
    """The metric of these predictions, padded by two examples that do not count."""
    outputs = torch.eye(classes)[torch.tensor([*predicted, 0, 1])]
    y = torch.tensor([*true, 1, 1])
    weight = torch.tensor([1.0] * len(true) + [0.0, 0.0])
    problem = score_by(CLASSES, metric)
    sums = problem.select_sums(problem.sums(outputs, y, weight, {}), "")
    return problem.for_task("").metric.value(sums)


def score_by_sklearn(metric: str, true: Any, predicted: Any) -> float:
    if metric == "accuracy":
        return float(np.mean(np.asarray(true) == np.asarray(predicted)))
    if metric == "balanced_accuracy":
        return float(balanced_accuracy_score(true, predicted))
    labels = np.unique(true)
    return float(f1_score(true, predicted, labels=labels, average="macro", zero_division=0))


# ---- one client ----------------------------------------------------------------------------------


def test_by_hand() -> None:
    # Class 0: 3 of 4 recognised. Class 1: 1 of 2; the other is taken for class 3, which has no
    # example. One of class 0 is taken for class 1. Class 2 has no example and no prediction.
    true = [0, 0, 0, 0, 1, 1]
    predicted = [0, 0, 0, 1, 1, 3]
    # Recalls 3/4 and 1/2: classes 2 and 3 do not count.
    assert score("balanced_accuracy", true, predicted) == 0.625
    # F1 of class 0: 2 * 3 / (4 + 3) = 6/7; of class 1: 2 * 1 / (2 + 2) = 1/2.
    assert score("macro_f1", true, predicted) == pytest.approx((6 / 7 + 1 / 2) / 2, abs=1e-15)
    assert score("accuracy", true, predicted) == pytest.approx(4 / 6)


def test_a_class_that_is_never_predicted_counts_as_0() -> None:
    assert score("balanced_accuracy", [0, 0, 0, 1], [0, 0, 0, 0]) == 0.5
    # Class 0: 2 * 3 / (3 + 4) = 6/7, class 1: 0.
    assert score("macro_f1", [0, 0, 0, 1], [0, 0, 0, 0]) == pytest.approx(3 / 7)
    assert score("macro_f1", [1], [2]) == 0


LABELS_OF = st.integers(0, CLASS_COUNT - 1)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("metric", METRICS)
@given(pairs=st.lists(st.tuples(LABELS_OF, LABELS_OF), min_size=1, max_size=30))
def test_it_is_scikit_learns(metric: str, pairs: list[tuple[int, int]]) -> None:
    true = [one for one, _ in pairs]
    predicted = [other for _, other in pairs]
    expected = score_by_sklearn(metric, true, predicted)
    assert score(metric, true, predicted) == pytest.approx(expected, abs=1e-6)


def test_the_option_takes_exactly_the_metrics_of_classes() -> None:
    assert tuple(CLASS_METRICS) == METRICS
    assert score_by(CLASSES, None) is CLASSES


# ---- all clients together ------------------------------------------------------------------------


def report(client: int, score: float, **counts: float) -> Report:
    named = {f"test0.{name.replace('_', '.')}": count for name, count in counts.items()}
    return Report(client, metrics={"test0": score, **named})


def test_the_pooled_score_is_over_the_classes_of_all() -> None:
    # One client has class 0 (3 of 4 recognised, once taken for class 1), the other has class 1
    # (none of 2, both taken for class 0). What is 0 is not reported.
    one = report(0, 0.75, total=4, hits_0=3, examples_0=4, predictions_0=3, predictions_1=1)
    two = report(1, 0.0, total=2, examples_1=2, predictions_0=2)
    # Recalls 3/4 and 0/2; F1 2 * 3 / (4 + 5) = 2/3 and 0.
    assert pool_scores(BALANCED_ACCURACY, [one, two], 0) == 0.375
    assert pool_scores(MACRO_F1, [one, two], 0) == pytest.approx(1 / 3)
    # Nobody is right: no client reports a hit.
    assert pool_scores(BALANCED_ACCURACY, [two], 0) == 0


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"total": 2},
        {"total": 2, "hits_0": 5, "examples_0": 2, "predictions_0": 2},
        {"total": 2, "hits_0": 2, "examples": 2},
        {"total": 2, "hits_x": 2, "examples_0": 2},
    ],
)
@pytest.mark.parametrize("metric", [BALANCED_ACCURACY, MACRO_F1])
def test_counts_that_give_no_score_give_no_pooled_score(metric: Any, counts: Any) -> None:
    found = pool_scores(metric, [report(0, 0.5, **counts)], 0)
    has_wrong_name = "hits_x" in counts
    # An unknown name is a sum like any other, and there are no hits.
    assert found == (0.0 if has_wrong_name else None)


# ---- runs ----------------------------------------------------------------------------------------


def unbalanced() -> Federation:
    return data.load("digits", clients=4, partition="dirichlet:0.3", seed=1)


OPTIONS = {"rounds": 2, "cohort": 4, "finetune": (0, 1), "progress": False}


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("engine", ["serial", "wired", "pool", "batched"])
@pytest.mark.parametrize("metric", METRICS)
def test_a_run_reports_what_its_predictions_give(metric: str, engine: str) -> None:
    """For each client and for all together, recomputed by scikit-learn from the final models."""
    federation = unbalanced()
    result = fedgrove.run("fedavg", data=federation, metric=metric, engine=engine, **OPTIONS)
    true = []
    predicted = []
    for k, client in federation.clients.items():
        logits = torch.from_numpy(result.model(k).outputs(unscaled(federation, client.test.x)))
        true.append(client.test.y.numpy())
        predicted.append(logits.argmax(1).numpy())
        found = result.summary[f"{metric}_clients_after_1"][str(k)]
        assert found == pytest.approx(score_by_sklearn(metric, true[-1], predicted[-1]), abs=1e-7)
    pooled = score_by_sklearn(metric, np.concatenate(true), np.concatenate(predicted))
    assert result.summary[f"{metric}_pooled_after_1"] == pytest.approx(pooled, abs=1e-7)
    assert result.summary["metric"] == metric
    assert result.rounds()[-1][f"{metric}_pooled"] <= 1
    for ending in ("", "_after_1"):
        scores = result.summary[f"{metric}_clients{ending}"]
        assert result.clients()[0][f"{metric}{ending}"] == scores["0"]


@pytest.mark.parametrize("method", ["fedavg", "ca-afp", "grove", "ditto"])
def test_training_does_not_depend_on_the_metric(method: str) -> None:
    federation = unbalanced()
    results = []
    for metric in (None, "macro_f1"):
        options = {**OPTIONS, "engine": "serial", "metric": metric}
        results.append(fedgrove.run(method, data=federation, **options))
    plain, other = results
    assert plain.summary["metric"] == "accuracy"
    for k, file in plain.folder.models().items():
        one = plain.folder.tree(file)
        two = other.folder.tree(other.folder.models()[k])
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert plain.summary["bytes_up"] == other.summary["bytes_up"]


def test_validation_has_the_metric_too() -> None:
    federation = data.load("digits", clients=4, validation=0.2)
    result = fedgrove.run("fedavg", data=federation, metric="macro_f1", **OPTIONS)
    values = list(result.summary["validation_clients"]["1"].values())
    assert result.summary["validation_mean_after_1"] == pytest.approx(sum(values) / len(values))
    plain = fedgrove.run("fedavg", data=federation, **OPTIONS)
    assert plain.summary["validation_mean"] != result.summary["validation_mean"]


def test_each_task_of_a_mixed_federation_has_the_metric() -> None:
    tasks = data.load("digits+digits:turned", clients=4)
    assert isinstance(tasks.problem, MixedProblem)
    found = []
    for engine in ("serial", "batched"):
        options = {**OPTIONS, "engine": engine, "metric": "balanced_accuracy"}
        result = fedgrove.run("fedavg", data=tasks, **options)
        for task in result.summary["tasks"].values():
            assert task["metric"] == "balanced_accuracy"
            assert 0 < task["pooled"] <= 1
        found.append([task["mean"] for task in result.summary["tasks"].values()])
    assert found[0] == pytest.approx(found[1], abs=0.05)


# ---- what does not fit ---------------------------------------------------------------------------


def test_a_metric_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError) as error:
        fedgrove.run("fedavg", data="rooms", metric="macro_f1")
    assert str(error.value) == (
        "metric is macro_f1, which needs classes, and the targets of the data are numbers, scored "
        "by mae; leave metric out, or choose data with classes."
    )
    with pytest.raises(InputError, match=r"targets of task motion-forecast are numbers, scored by"):
        fedgrove.run("fedavg", data="motion+motion-forecast", metric="balanced_accuracy")
    with pytest.raises(InputError, match=r"metric is 'f1'; it must be accuracy, balanced_accuracy"):
        fedgrove.run("fedavg", data="digits", metric="f1")


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run, compare, report, export, repeat; and what does not fit."""
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "4", "--rounds", "2", "--engine", "serial"]
    assert main(["run", "fedavg", *small, "--metric", "macro_f1", "--out", "a"]) == 0
    out, err = capsys.readouterr()
    assert "macro_f1" in out
    assert "macro_f1" in err
    assert 'metric = "macro_f1"' in Path("a/config.toml").read_text()
    assert main(["rerun", "a", "--out", "b", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    first = json.loads(Path("a/summary.json").read_text())
    assert again["macro_f1_clients"] == first["macro_f1_clients"]
    assert math.isclose(again["macro_f1_pooled"], first["macro_f1_pooled"])
    assert main(["compare", "a", "b", "--time", "--to", "0.1"]) == 0
    assert "macro_f1 10" in capsys.readouterr().out
    assert main(["report", "a"]) == 0
    assert "macro_f1, pooled: over the test examples" in Path("a/report.html").read_text()
    capsys.readouterr()
    assert main(["run", "fedavg", "--data", "rooms", "--metric", "macro_f1"]) == 2
    assert "--metric is macro_f1, which needs classes" in capsys.readouterr().err
    assert main(["export", "a", "--client", "0"]) == 0


def test_seeds_of_different_metrics_are_compared_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names differ in the seed only, and they have no common mean."""
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "3", "--rounds", "1", "--epochs", "1", "--engine", "serial"]
    assert main(["run", "fedavg", *small, "--out", "a-s0"]) == 0
    more = ["--seed", "1", "--metric", "macro_f1", "--out", "a-s1"]
    assert main(["run", "fedavg", *small, *more]) == 0
    capsys.readouterr()
    assert main(["compare", "a-s0", "a-s1", "--table", "t.csv"]) == 0
    rows = list(csv.DictReader(Path("t.csv").read_text().splitlines()))
    assert [(row["entry"], row["metric"]) for row in rows] == [
        ("a-s0", "accuracy"),
        ("a-s1", "macro_f1"),
    ]


def test_choose_ranks_by_the_metric(tmp_path: Path) -> None:
    chosen = fedgrove.choose(
        data="digits",
        clients=4,
        rounds=2,
        trial=1,
        seeds=1,
        methods=["local", "fedavg"],
        metric="balanced_accuracy",
        out=tmp_path / "choice",
        progress=False,
    )
    found = json.loads((tmp_path / "choice" / "choice.json").read_text())
    assert found["metric"] == "balanced_accuracy"
    assert "--metric balanced_accuracy" in found["command"]
    assert chosen is not None
