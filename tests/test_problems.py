"""Problems: losses and metrics by hand, labels of a client's own, mixed federations, on every engine."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import play, tensors
from torch import Tensor

import fedgrove as fg
from fedgrove import core, data, methods, nets, trees
from fedgrove.config.toml import from_toml, to_toml
from fedgrove.core import AnyMethod, ClientInfo, Engine, Give, Stage, Train
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import EngineError, InputError
from fedgrove.metrics import ACCURACY, F1, LABEL_ACCURACY
from fedgrove.parts.objective import CrossEntropy, ProblemLoss, Proximal
from fedgrove.parts.one_model import send_model
from fedgrove.problems import (
    CLASSES,
    LABELS,
    Metric,
    MixedProblem,
    Problem,
    TaskProblem,
    Unit,
    client_marks,
    numbers,
    restrict_outputs,
)
from fedgrove.report.seed_averages import average_over_seeds, print_seed_averages
from fedgrove.report.tables import print_summaries
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run, build

ONES = torch.ones(2)


def value(metric: Metric, outputs: Tensor, y: Tensor, weight: Tensor = ONES) -> float:
    sums = metric.sums(outputs, y, weight)
    return metric.value(
        {name: float(v) for name, v in sums.items()} | {"total": float(weight.sum())}
    )


# ---- by hand -------------------------------------------------------------------------------------


def test_f1_by_hand() -> None:
    # Said {0, 1}, {2}; true {0}, {0, 2}: hits 2, false alarms 1, misses 1: F1 = 4 / (4 + 2).
    outputs = torch.tensor([[1.0, 2.0, -1.0], [-1.0, -1.0, 3.0]])
    y = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    assert value(F1, outputs, y) == pytest.approx(2 / 3)
    # Of six labels four are right.
    assert value(LABEL_ACCURACY, outputs, y) == pytest.approx(4 / 6)
    # The first row alone: 1 hit, 1 false alarm: 2 / 3.
    assert value(F1, outputs, y, torch.tensor([1.0, 0.0])) == pytest.approx(2 / 3)
    # Nothing to find and nothing said.
    assert value(F1, -ONES.reshape(2, 1), torch.zeros(2, 1)) == 1.0


def test_numbers_by_hand() -> None:
    unit = Unit((10.0,), (2.0,))
    problem = numbers(unit)
    # Outputs 0 and 1 mean 10 and 12; targets 11 and 16: errors 1 and 4.
    outputs = torch.tensor([[0.0], [1.0]])
    y = torch.tensor([[11.0], [16.0]])
    assert value(problem.metric, outputs, y) == 2.5
    assert value(numbers(unit, "rmse").metric, outputs, y) == pytest.approx(math.sqrt(8.5))
    assert value(numbers(unit, "mse").metric, outputs, y) == 8.5
    # In units of 2: errors .5 and 2, squared .25 and 4.
    assert problem.losses(outputs, y, {}).tolist() == [0.25, 4.0]
    # A flat y means the same; it must not become a table of all pairs.
    assert problem.losses(outputs, y.flatten(), {}).tolist() == [0.25, 4.0]
    assert not problem.metric.more_is_better


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(-50, 50), st.floats(0.1, 9)
)
def test_units_there_and_back(targets: list[float], mean: float, scale: float) -> None:
    unit = Unit((mean,), (scale,))
    y = torch.tensor(targets, dtype=torch.float64)[:, None]
    assert torch.allclose(unit.targets_of(unit.outputs_of(y)), y, atol=1e-9)


def test_labels_of_ones_own_are_a_smaller_softmax() -> None:
    outputs = torch.tensor([[1.0, 5.0, 2.0], [0.0, 9.0, 1.0]], requires_grad=True)
    own = client_marks(CLASSES, 3, (0, 2), "")
    y = torch.tensor([0, 2])
    losses = CLASSES.losses(outputs, y, own)
    # The softmax over labels 0 and 2 alone: ln(1 + e^1) for the first, ln(1 + e^-1) for the second.
    expected = [math.log(1 + math.e), math.log(1 + math.exp(-1))]
    assert losses.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    assert gradient[:, 1].tolist() == [0.0, 0.0]
    # Without the mask the second logit wins; with it, never.
    assert value(ACCURACY, outputs.detach(), y) == 0
    assert value(ACCURACY, restrict_outputs(outputs.detach(), own), y) == 0.5
    # Padding of a label that the client lacks has a finite loss: times its weight of 0 it is 0.
    assert torch.isfinite(CLASSES.losses(outputs, torch.tensor([1, 1]), own)).all()
    # Of several labels one that is not there is never said, and costs nothing.
    both = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    only = LABELS.losses(outputs, both, own)
    alone = LABELS.losses(outputs[:, [0, 2]], both[:, [0, 2]], {})
    assert only.tolist() == pytest.approx(alone.tolist())


def test_labels_that_a_client_lacks_are_not_in_the_mean() -> None:
    """One label of five, said wrongly: a loss of ln(1 + e^3) and no label right, not four fifths."""
    outputs = torch.tensor([[-3.0, 5.0, 5.0, 5.0, 5.0]])
    y = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    own = client_marks(LABELS, 5, (0,), "")
    problem = replace(LABELS, metric=LABEL_ACCURACY)
    sums = problem.sums(outputs, y, torch.ones(1), own)
    assert float(sums["loss"]) == pytest.approx(math.log(1 + math.exp(3)))
    assert float(sums["value"]) == 0
    # In a mixed federation, where the label is one of the second task's.
    tasks = MixedProblem(
        (TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", problem, 2, 5, columns=5))
    )
    marks = client_marks(tasks, 7, (0,), "b")
    beside = torch.cat([torch.zeros(1, 2), outputs], 1)
    found = tasks.select_sums(tasks.sums(beside, y, torch.ones(1), marks), "b")
    assert found["loss"] == pytest.approx(math.log(1 + math.exp(3)))
    assert found["value"] == 0


def test_tasks_take_each_its_own_loss_and_let_no_other_gradient_through() -> None:
    def broken_at_zero(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.log(y) * outputs

    mine = Problem("mine", broken_at_zero, numbers().metric)
    tasks = MixedProblem((TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", mine, 2, 1, columns=1)))
    outputs = torch.tensor([[1.0, 0.0, 5.0]], requires_grad=True)
    for number, y, columns in ((0, 1.0, [0, 1]), (1, 2.0, [2])):
        own = {"task": torch.tensor(number)}
        loss = tasks.losses(outputs, torch.tensor([[y]]), own).sum()
        (gradient,) = torch.autograd.grad(loss, outputs)
        assert torch.isfinite(gradient).all()
        assert gradient[0].nonzero().flatten().tolist() == columns
    # Class 1 of logits (1, 0): ln(1 + e); the other task: 5 ln 2.
    y = torch.tensor([[1.0]])
    outputs = outputs.detach()
    assert float(tasks.losses(outputs, y, {"task": torch.tensor(0)})) == pytest.approx(
        math.log(1 + math.e)
    )
    assert float(tasks.losses(outputs, 2 * y, {"task": torch.tensor(1)})) == pytest.approx(
        5 * math.log(2)
    )


@pytest.mark.parametrize(
    "name",
    ["", "two words", "loss", "validation", 3, "metric", "bytes_up", "tasks", "density", "notes"],
)
def test_a_metric_needs_a_name_that_is_free(name: Any) -> None:
    with pytest.raises(InputError, match="name of the metric is"):
        Metric(name, lambda outputs, y: outputs[:, 0])


# ---- on every engine -----------------------------------------------------------------------------


def with_own_labels() -> Federation:
    """Digits, three classes each; the last client knows all, and so has no mask."""
    federation = data.load("digits", partition="classes:3", clients=5)
    clients = {}
    for k, client in federation.clients.items():
        labels = tuple(sorted(client.train.y.unique().tolist()))
        clients[k] = replace(client, labels=labels if k < 4 else None)
    return replace(federation, clients=clients)


def three_kinds() -> Federation:
    return data.mix(
        {
            "rooms": data.load("rooms", clients=2),
            "tags": data.load("tags", clients=3),
            "classes": small_classes(),
        }
    )


def small_classes() -> Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 5))
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    # The first client has classes 1 and 2 alone, and says so.
    client = np.where(y > 0, np.arange(90) % 3, 1 + np.arange(90) % 2)
    federation = data.from_arrays(x, y, client)
    first = replace(federation.clients[0], labels=(1, 2))
    return replace(federation, clients={**federation.clients, 0: first})


FEDERATIONS = {
    "own labels": with_own_labels,
    "numbers": lambda: data.load("rooms", clients=4),
    "labels": lambda: data.load("tags", clients=4),
    "tasks": three_kinds,
}


def few(federation: Federation) -> Federation:
    """At most two dozen examples a part, in batches that are not all full: engines agree on few as on many."""
    clients = {}
    for k, client in federation.clients.items():
        parts = {
            name: Examples(part.x[:most], part.y[:most])
            for name, part, most in (
                ("train", client.train, 24 - k),
                ("validation", client.validation, 6),
                ("test", client.test, 9),
            )
        }
        info = replace(client.info, examples=len(parts["train"]))
        clients[k] = replace(client, **parts, info=info)
    return replace(federation, clients=clients)


def scored(
    method: AnyMethod, federation: Federation, engine: Engine, folder: Path
) -> tuple[trees.Tree, dict[int, Mapping[str, float]]]:
    """The state after two rounds in float64, and every client's figures after fine-tuning."""
    double = few(federation).to(torch.float64)
    module = nets.build("mlp", double.shape, double.classes, 0).double()
    net = nets.Net(module, double.shape, double.problem)
    run = Run(method, double, net, Memory(folder), rounds=2, cohort=4, finetune=(0, 1))
    state = play(run, engine)
    answers = engine.map((run, task) for task in plan_scoring(run, state, "finetune"))
    reports = {}
    for _, report in answers:
        assert isinstance(report, fg.Report), report
        reports[report.of] = report.metrics
    engine.close()
    return tensors(state), reports


@pytest.mark.parametrize("kind", FEDERATIONS)
@pytest.mark.parametrize("method", ["fedavg", "ca-afp", "ifca"])
def test_engines_agree_on_every_problem(kind: str, method: str, tmp_path: Path) -> None:
    engines_agree(kind, method, tmp_path)


@pytest.mark.parametrize("kind", ["own labels", "tasks"])
@pytest.mark.parametrize("method", ["moon", "fedntd", "fedlc", "fedgen", "fedbabu"])
def test_engines_agree_on_methods_that_look_at_labels_and_features(
    kind: str, method: str, tmp_path: Path
) -> None:
    engines_agree(kind, method, tmp_path)


def engines_agree(kind: str, method: str, tmp_path: Path) -> None:
    federation = FEDERATIONS[kind]()
    made = methods.make(method)
    model, figures = scored(made, federation, Serial(), tmp_path / "serial")
    # To the bit on the pool.
    pool_model, pool_figures = scored(made, federation, Pool(workers=2), tmp_path / "pool")
    assert trees.identical(model, pool_model)
    assert pool_figures == figures
    batched_model, batched = scored(made, federation, Batched(), tmp_path / "batched")
    for name, leaf in model.items():
        assert torch.allclose(batched_model[name].double(), leaf.double(), atol=1e-9), name
    for k, own in figures.items():
        assert batched[k] == pytest.approx(dict(own), abs=1e-9)


def test_a_client_never_names_a_label_that_it_lacks(tmp_path: Path) -> None:
    federation = with_own_labels()
    everywhere = {k: replace(client, labels=None) for k, client in federation.clients.items()}
    run = build(methods.FedAvg(), federation, Memory(tmp_path / "a"), rounds=1, cohort=5)
    free = replace(federation, clients=everywhere)
    other = build(methods.FedAvg(), free, Memory(tmp_path / "b"), rounds=1, cohort=5)
    found = []
    for each in (run, other):
        tasks = plan_scoring(each, each.initial_state)
        found.append([dict(r.metrics) for _, r in Serial().map((each, t) for t in tasks)])  # type: ignore[union-attr]
    # The untrained net: a third by chance among three labels, a tenth among ten; the last client
    # has no labels of its own, and the same score.
    assert sum(own["test0"] for own in found[0][:4]) > sum(own["test0"] for own in found[1][:4])
    assert found[0][4] == found[1][4]
    losses = [own["test_loss0"] for own in found[0][:4]]
    # Near ln 3 and not near ln 10.
    assert max(losses) < 1.6


def test_labels_may_come_as_a_tensor_a_list_or_a_set() -> None:
    client = with_own_labels().clients[0]
    assert client.labels is not None
    for labels in (torch.tensor(client.labels), list(client.labels), set(client.labels)):
        assert sorted(replace(client, labels=labels).labels or ()) == sorted(client.labels)
    for wrong in ((0.5,), "ab", 3):
        with pytest.raises(InputError, match="they must be the numbers of its classes, such as"):
            replace(client, labels=wrong)


def test_an_example_of_a_label_that_the_client_lacks_is_refused() -> None:
    client = data.load("digits", clients=3).clients[0]
    with pytest.raises(InputError, match=r"has the labels \(0,\) and an example of"):
        replace(client, labels=(0,))
    with pytest.raises(InputError, match=r"labels is .*; it must be numbers from 0 to 2"):
        client_marks(CLASSES, 3, (0, 3), "")
    with pytest.raises(InputError, match="its targets are numbers"):
        client_marks(numbers(), 3, (0,), "")


# ---- what is reported ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summaries() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("diabetes", "tags"):
        for method in ("fedavg", "ditto"):
            words: dict[str, Any] = {"clients": 4, "rounds": 2, "engine": "serial"}
            result = fg.run(method, data=name, finetune=[0, 1], progress=False, **words)
            found.setdefault(name, []).append(result.summary)
    return found


def test_a_summary_is_of_its_metric(summaries: dict[str, list[dict[str, Any]]]) -> None:
    summary = summaries["diabetes"][0]
    assert (summary["metric"], summary["more_is_better"], summary["share"]) == ("mae", False, False)
    assert not [key for key in summary if key.startswith("accuracy")]
    of_clients = summary["mae_clients"].values()
    assert summary["mae_worst"] == max(of_clients)
    assert summary["mae_mean"] == pytest.approx(sum(of_clients) / 4)
    # In the units of the targets, which go from 25 to 346; the mean as a guess is off by some 65.
    assert 20 < summary["mae_mean"] < 100
    names = ("mean", "std", "worst", "worst10", "pooled")
    assert set(summary["finetune"]["0"]) == {f"mae_{name}" for name in names}
    tags = summaries["tags"][0]
    assert (tags["metric"], tags["f1_worst"]) == ("f1", min(tags["f1_clients"].values()))


def test_classes_report_accuracy_and_say_so() -> None:
    result = fg.run("fedavg", data="digits", clients=3, rounds=1, engine="serial", progress=False)
    summary = result.summary
    assert (summary["metric"], summary["more_is_better"], summary["share"]) == (
        "accuracy",
        True,
        True,
    )
    (line,) = result.folder.metrics()
    assert "accuracy_mean" in line
    assert "metric" not in line


def test_tables_mark_the_smallest_error(summaries: dict[str, list[dict[str, Any]]]) -> None:
    out = io.StringIO()
    errors = summaries["diabetes"]
    print_summaries(errors, out)
    text = out.getvalue()
    assert "mae: less is better, and the worst is the largest" in text
    assert "* the best mean mae" in text
    starred = [line for line in text.splitlines() if line.count("*") == 1 and "±" in line]
    assert len(starred) == 2
    # Before fine-tuning, and after it.
    for length in ("0", "1"):
        lowest = min(each["finetune"][length]["mae_mean"] for each in errors)
        assert any(f"{lowest:.4g} ±" in line for line in starred)
    assert "%" not in text

    both = io.StringIO()
    print_summaries([*errors, *summaries["tags"]], both)
    assert "metric" in both.getvalue()
    assert "f1 %" in both.getvalue()


def test_over_seeds_goes_by_the_metric(summaries: dict[str, list[dict[str, Any]]]) -> None:
    first, second = summaries["diabetes"]
    members = {}
    for seed in (0, 1):
        members[f"fedavg-s{seed}"] = {**first, "seed": seed, "mae_mean": 50.0 + seed}
        members[f"ditto-s{seed}"] = {**second, "seed": seed, "mae_mean": 40.0 + 3 * seed}
    groups = average_over_seeds(members)
    assert [group["mae_mean"] for group in groups] == [50.5, 41.5]
    # Differences 40 - 50 and 43 - 51: mean -9.
    assert groups[1]["paired"][0]["difference"] == -9.0
    out = io.StringIO()
    print_seed_averages(groups, out)
    assert "50.5 ± 0.7071" in out.getvalue()
    assert "-9" in out.getvalue()
    assert "%" not in out.getvalue()


def test_mixed_federations_report_by_task(tmp_path: Path) -> None:
    words: dict[str, Any] = {"rounds": 2, "finetune": [0, 1], "engine": "serial"}
    result = fg.run("fedavg", data=three_kinds(), progress=False, **words)
    summary = result.summary
    assert summary["metric"] is None
    assert "accuracy_mean" not in summary
    tasks = summary["tasks"]
    assert {name: task["metric"] for name, task in tasks.items()} == {
        "rooms": "mae",
        "tags": "f1",
        "classes": "accuracy",
    }
    assert [task["clients"] for task in tasks.values()] == [2, 3, 3]
    values = list(summary["metric_clients"].values())
    # Clients 0 and 1 are of rooms, where the largest error is the worst; 2 to 4 of tags.
    assert (tasks["rooms"]["worst"], tasks["tags"]["worst"]) == (max(values[:2]), min(values[2:5]))
    assert tasks["rooms"]["mean"] == pytest.approx(sum(values[:2]) / 2)
    assert set(summary["finetune"]["0"]["tasks"]) == set(tasks)
    assert set(result.folder.metrics()[-1]["tasks"]) == set(tasks)
    out = io.StringIO()
    print_summaries([summary], out)
    for words_of_a_row in ("rooms", "mae", "tags", "f1 %", "classes", "accuracy %"):
        assert words_of_a_row in out.getvalue()


def switching(k: int, round: int) -> ClientData:
    """Two examples of task a (two classes) before round 2, and then of task b (three)."""
    task, classes = ("a", 2) if round < 2 else ("b", 3)
    x = torch.eye(6)[: 2 * classes] + k
    part = Examples(x, torch.arange(2 * classes) % classes)
    return ClientData(part, part, part, ClientInfo(2 * classes, task=task))


def test_a_client_that_switches_task_is_reported_under_the_new_one() -> None:
    tasks = MixedProblem((TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", CLASSES, 2, 3)))
    federation = data.from_clients(switching, 4, classes=5, problem=tasks)
    words: dict[str, Any] = {"rounds": 3, "cohort": 4, "engine": "serial", "progress": False}
    result = fg.run("fedavg", data=federation, evaluate=1, finetune=[0, 1], **words)
    assert set(result.summary["tasks"]) == {"b"}
    assert set(result.summary["finetune"]["0"]["tasks"]) == {"b"}
    # Rounds count from 0: after r of them, clients are scored as round r finds them.
    assert [set(line["tasks"]) for line in result.folder.metrics()] == [{"a"}, {"b"}, {"b"}]


# ---- own problems, and what is refused -----------------------------------------------------------


def within(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y).abs() <= 1).all(1)


def test_an_own_metric_and_an_own_loss() -> None:
    federation = data.load("rooms", clients=3)

    def off(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).abs()

    problem = Problem("mine", off, Metric("within", within, share=True))
    words: dict[str, Any] = {"rounds": 1, "engine": "serial", "progress": False}
    result = fg.run("fedavg", data=replace(federation, problem=problem), **words)
    assert result.summary["metric"] == "within"
    assert 0 <= result.summary["within_mean"] <= 1


@pytest.mark.parametrize("kind", FEDERATIONS)
def test_problems_can_be_sent_to_a_worker(kind: str) -> None:
    problem = FEDERATIONS[kind]().problem
    assert pickle.loads(pickle.dumps(problem)) == problem


@pytest.mark.parametrize(("y", "metric"), [(0.5, "mae"), (0, "accuracy"), ((0, 1), "f1")])
def test_a_file_of_ones_own_with_any_targets(y: Any, metric: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    targets = (x[:, :1] > np.array(y)).astype(int) if metric != "mae" else x[:, 0] + y
    targets = targets[:, 0] if metric == "accuracy" else targets
    np.savez(tmp_path / "mine.npz", x=x, y=targets, client=np.arange(60) % 3)
    words: dict[str, Any] = {"rounds": 2, "finetune": [0, 1], "engine": "serial"}
    out = tmp_path / "run"
    result = fg.run("ca-afp", data=tmp_path / "mine.npz", out=out, progress=False, **words)
    assert result.summary["metric"] == metric
    assert math.isfinite(result.summary[f"{metric}_mean"])


def test_a_config_of_before_named_cross_entropy_and_still_loads() -> None:
    text = '[run]\nmethod = "fedavg"\n[method]\ntype = "FedAvg"\nobjective.type = "CrossEntropy"\n'
    assert from_toml(text).method == methods.FedAvg(objective=CrossEntropy())
    written = to_toml(fg.Experiment(methods.FedAvg()))
    assert 'type = "ProblemLoss"' in written
    assert from_toml(written).method == methods.FedAvg()


def test_cross_entropy_is_refused_where_there_are_no_classes(tmp_path: Path) -> None:
    method = methods.FedAvg(objective=CrossEntropy() + Proximal(0.1))
    with pytest.raises(InputError, match=r"targets of the data are numbers; use ProblemLoss"):
        build(method, data.load("rooms", clients=2), Memory(tmp_path))


@dataclass(frozen=True)
class InItsWork(methods.FedAvg):
    """FedAvg with its loss where no field shows it."""

    verb: str = "train"

    def plan(self, state: Any, cohort: Sequence[int]) -> list[core.TaskProblem]:
        return [replace(task, verb=self.verb) for task in super().plan(state, cohort)]

    def work(self, verb: str) -> tuple[Stage, ...]:
        if verb == self.verb:
            return (Train(CrossEntropy(), self.local), Give(send_model))
        return {"use": ()}[verb]


@pytest.mark.parametrize("name", ["rooms", "tags"])
def test_cross_entropy_in_a_methods_work_is_refused_too(name: str, tmp_path: Path) -> None:
    federation = data.load(name, clients=2)
    kind = federation.problem.name
    sentence = rf"targets of the data are {kind}; use ProblemLoss"
    with pytest.raises(InputError, match=sentence):
        build(InItsWork(), federation, Memory(tmp_path / "train"))
    # A verb that nobody looks at before the run: its clients say it.
    run = build(InItsWork(verb="learn"), federation, Memory(tmp_path / "learn"), rounds=1)
    with pytest.raises(EngineError, match=sentence):
        play(run, Serial())


def test_problem_loss_is_cross_entropy_for_classes(tmp_path: Path) -> None:
    models = []
    for objective in (ProblemLoss(), CrossEntropy()):
        run = build(
            methods.FedAvg(objective=objective),
            data.load("digits", clients=3),
            Memory(tmp_path / type(objective).__name__),
            rounds=1,
            cohort=3,
        )
        models.append(tensors(play(run, Serial())))
    assert trees.identical(*models)
