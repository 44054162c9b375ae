"""Losses and metrics of one's own are tried before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedgrove
from fedgrove import data, methods, nets
from fedgrove.core import ClientInfo
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.problems import Metric, Problem, numbers
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import build

PLAIN = numbers()


def flat_client(k: int) -> ClientData:
    """A client whose targets are (n,), where a network gives (n, 1)."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(k))
    rows = [Examples(x[a:b], 2 * x[a:b, 0]) for a, b in ((0, 20), (20, 22), (22, 30))]
    return ClientData(*rows, ClientInfo(20))


def flat() -> Federation:
    return data.from_clients(flat_client, 4, classes=1, problem=PLAIN)


def run(problem: Problem, **words: Any) -> fedgrove.Result:
    words = {"rounds": 2, "cohort": 4, "engine": "serial", "net": "mlp:hidden=8"} | words
    return fedgrove.run("fedavg", data=replace(flat(), problem=problem), progress=False, **words)


def raises(outputs: Tensor, y: Tensor) -> Tensor:
    raise ValueError("boom")


def column(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs[:, 0] - y


METRICS: list[tuple[Callable[..., Any], str]] = [
    (lambda o, y: (o - y).abs(), r"shape \(2, 2\) for 2 examples; .* outputs are \(2, 1\) and y"),
    (lambda o, y: (o[:, 0] - y).abs().mean(), r"gives torch.float32 of shape \(\) for 2 examples"),
    (lambda o, y: (o[:, 0] - y)[:5], r"of shape \(5,\) for 7 examples"),
    (
        raises,
        r"could not be computed on a few examples, ValueError: boom \(at test_checks.py, line",
    ),
    (lambda o, y: 1.0, "gives a float; it must give a tensor"),
    (lambda o, y: None, "gives a NoneType"),
    (lambda o, y: column(o, y).numpy(), "gives a ndarray"),
    (lambda o, y: column(o, y) * float("nan"), "is not finite on the first examples"),
    (
        lambda o, y: {"good": column(o, y), "bad": column(o, y).repeat(3, 1).T},
        r"metric mine, bad, gives",
    ),
    (lambda o, y: (o - y).abs().mean(1), r"of an example changes with .* and y is \(7,\): give"),
    (
        lambda o, y: {"loss": column(o, y)},
        "a number called loss, which the library computes itself",
    ),
    (lambda o, y: {"total": column(o, y)}, "a number called total"),
]


@pytest.mark.parametrize(("metric", "sentence"), METRICS)
def test_a_metric_that_gives_no_number_per_example_is_refused(
    metric: Callable[..., Any], sentence: str, tmp_path: Path
) -> None:
    problem = replace(PLAIN, metric=Metric("mine", metric))
    with pytest.raises(InputError, match=sentence) as caught:
        run(problem, out=tmp_path / "run")
    assert str(caught.value).endswith(".")
    assert "the metric mine" in str(caught.value)
    assert not (tmp_path / "run").exists()


def first(sums: Mapping[str, float]) -> float:
    return sums["value"] / sums["total"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (lambda sums: None, "is None; it must be a number between 0 and 1"),
        (lambda sums: float("nan"), "is nan; it must be"),
        (lambda sums: 57.0, "is 57.0; it must be a number between 0 and 1, as it is a share"),
        (lambda sums: sums["nope"], "the value of the metric mine could not be .* KeyError"),
    ],
)
def test_the_value_of_a_metric_is_tried_too(value: Callable[..., Any], sentence: str) -> None:
    metric = Metric("mine", column, value, share=True)
    with pytest.raises(InputError, match=sentence):
        run(replace(PLAIN, metric=metric))


def test_a_value_may_be_a_tensor_of_one_number() -> None:
    metric = Metric("mine", column, lambda sums: torch.tensor(first(sums)))  # type: ignore[arg-type,return-value]
    plain = Metric("mine", column, first)
    means = [run(replace(PLAIN, metric=each)).summary["mine_mean"] for each in (metric, plain)]
    assert means[0] == pytest.approx(means[1])


LOST_REASONS: list[tuple[Callable[..., Any], str]] = [
    (lambda o, y: (o - y) ** 2, r"of an example changes with the other examples of its batch"),
    (lambda o, y: ((o - y) ** 2).mean(1), r"changes with .* Here outputs are \(7, 1\) and y is"),
    (
        lambda o, y: (column(o, y) ** 2).mean(),
        r"of shape \(\) for 2 examples; .* the library takes their mean",
    ),
    (lambda o, y: column(o.detach(), y) ** 2, "has no gradient with respect to the outputs"),
    (lambda o, y: (column(o, y) > 0).long(), "has no gradient"),
    (lambda o, y: 0.0, "gives a float"),
    (lambda o, y: column(o, y).log() - 1e9 * column(o, y).abs().log(), "is not finite"),
    (raises, "could not be computed on a few examples, ValueError: boom"),
]


@pytest.mark.parametrize(("loss", "sentence"), LOST_REASONS)
def test_a_loss_that_cannot_be_trained_is_refused(
    loss: Callable[..., Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        run(replace(PLAIN, loss=loss), out=tmp_path / "run")
    assert "the loss of numbers" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_is_right_passes() -> None:
    """One number per example; or several for the loss, also as many as there are examples."""
    federation = data.load("tags", clients=3)
    # Five labels, five outputs.
    several = replace(federation.problem, loss=lambda o, y: (o - y) ** 2)
    words: dict[str, Any] = {"rounds": 1, "engine": "serial", "progress": False}
    result = fedgrove.run("fedavg", data=replace(federation, problem=several), **words)
    assert result.summary["scored"] == 3
    mine = Metric("mine", lambda o, y: column(o, y).abs() < 1, share=True)
    assert 0 <= run(replace(PLAIN, metric=mine)).summary["mine_mean"] <= 1


def test_what_is_drawn_at_random_passes() -> None:
    noisy = Metric("noisy", lambda o, y: column(o, y) + torch.rand(len(y)))
    assert run(replace(PLAIN, metric=noisy)).summary["scored"] == 4


def test_every_task_of_a_mixed_federation_is_tried(tmp_path: Path) -> None:
    tags = data.load("tags", clients=2)
    rooms = data.load("rooms", clients=2)
    mixed = data.mix({"tags": tags, "rooms": rooms})
    assert build(methods.FedAvg(), mixed, Memory(tmp_path)).cohort == 4
    wrong = replace(rooms.problem, metric=Metric("wrong", lambda o, y: o[:, 0] - y))
    mixed = data.mix({"tags": tags, "rooms": replace(rooms, problem=wrong)})
    with pytest.raises(InputError, match=r"the metric wrong gives a tensor of shape \(2, 2\)"):
        build(methods.FedAvg(), mixed, Memory(tmp_path))


class Counting(nn.Module):
    """Counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x)


def test_the_trial_leaves_the_network_as_it_is(tmp_path: Path) -> None:
    made = build(methods.FedAvg(), flat(), Memory(tmp_path), net=Counting())
    # The network alone is tried as well, before there is a run.
    untried = Net(nets.build(Counting(), (4,), 1, 0), (4,))
    assert made.net.module.calls == untried.module.calls


def branching(outputs: Tensor, y: Tensor) -> Tensor:
    """As :func:`column`, with a branch on data that vmap cannot take."""
    error = (outputs[:, 0] - y).abs()
    return error if outputs.sum() > 0 else 1.0 * error


@pytest.mark.parametrize("part", ["loss", "metric"])
def test_a_branch_on_data_falls_back_on_the_batched_engine(part: str) -> None:
    problem = replace(PLAIN, loss=branching)
    if part == "metric":
        problem = replace(PLAIN, metric=Metric("mine", branching, more_is_better=False))
    serial = run(problem).summary
    batched = run(problem, engine="batched").summary
    key = f"{problem.metric.name}_clients"
    assert batched[key] == pytest.approx(serial[key], rel=1e-5)
    assert batched["lost"] == {}
    assert serial["notes"] == []
    assert any("one client after another, not at once" in note for note in batched["notes"])


# ---- labels of a client's own --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["as it is", "renamed", "from scratch"])
def test_labels_of_ones_own_are_refused_where_targets_are_numbers(way: str, tmp_path: Path) -> None:
    rooms = data.load("rooms", clients=3)
    problem = rooms.problem
    assert isinstance(problem, Problem)
    if way == "renamed":
        problem = replace(problem, name="temperature")
    elif way == "from scratch":
        problem = Problem("temperature", problem.loss, problem.metric)
    # Client 0 has none: the others are looked at before they train, too.
    clients = {**rooms.clients, 2: replace(rooms.clients[2], labels=(0,))}
    federation = replace(rooms, clients=clients, problem=problem)
    out = tmp_path / "run"
    with pytest.raises(InputError, match="its targets are numbers; leave the labels out"):
        fedgrove.run("fedavg", data=federation, rounds=1, out=out, progress=False)
    assert not out.exists()


# ---- stages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoStage(methods.FedAvg):
    """FedAvg whose clients use their model in a way that is none."""

    def work(self, verb: str) -> Any:
        return (3,) if verb == "use" else super().work(verb)


def test_what_is_no_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="the work of 'use' contains 3, which is not a stage; it must"
    ):
        build(NoStage(), flat(), Memory(tmp_path))
