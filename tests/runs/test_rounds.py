"""A run, its loop, and what it does with reports that would spoil the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, answers, federation, make_run, play, reports
from torch import nn

from fedgrove import methods, trees
from fedgrove.config.cost import estimate_cost
from fedgrove.core import (
    Batch,
    Carry,
    Client,
    Edit,
    Give,
    Packet,
    Report,
    Stage,
    Task,
    Train,
    expected_no_packets,
)
from fedgrove.data.federation import Defaults
from fedgrove.engines import Pool, Serial
from fedgrove.errors import EngineError, InputError
from fedgrove.nets import Net
from fedgrove.parts.aggregate import WeightedMean
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.one_model import send_model as send
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import Admission, draw_cohort, plan, plan_scoring, rounds
from fedgrove.runs.run import build, make_recipe
from fedgrove.runs.scoring import count_kept, score_batch


@dataclass(frozen=True)
class Poisoned(methods.FedAvg):
    """FedAvg in which some clients' training went wrong."""

    bad: tuple[int, ...] = ()
    value: float = math.nan

    def work(self, verb: str) -> tuple[Stage, ...]:
        return (
            (Train(self.objective, self.local), Edit(self.spoil), Give(send))
            if verb == "train"
            else ()
        )

    def spoil(self, carry: Carry, client: Client) -> Carry:
        if client.id not in self.bad:
            return carry
        first, *rest = carry["local"].items()
        return {**carry, "local": {first[0]: torch.full_like(first[1], self.value), **dict(rest)}}


# ---- a client that sends NaN ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_spoilt_report_is_left_out_and_the_others_count(value: float, tmp_path: Path) -> None:
    run = make_run(Poisoned(bad=(1,), value=value), tmp_path / "bad", cohort=4, rounds=1)
    loop = rounds(run)
    last = loop.send(answers(run, Serial(), next(loop).tasks))
    healthy = make_run(methods.FedAvg(), tmp_path / "good", cohort=4, rounds=1)
    mean = WeightedMean().start()
    for report in reports(healthy, Serial(), plan(healthy, healthy.method.init(healthy.setup))):
        if report.of != 1:
            mean.add(report.give["model"].values, report.examples)
    assert trees.identical(last.state.model, mean.value())
    assert last.tally.lost == {}
    assert last.tally.refused == {"not finite": [1]}
    assert last.tally.sentences == {
        "not finite": "client 1 sent model with values that are not finite in fc1.weight; "
        "a lower lr or a gradient clip may help."
    }


def test_refusals_are_counted_in_metrics_and_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    run = make_run(Poisoned(bad=(1, 2)), tmp_path / "run" / "checkpoint", cohort=4, rounds=2)
    summary = train_alone(Member(run, folder, 1), Serial())
    sentence = (
        "client 1 sent model with values that are not finite in fc1.weight; "
        "a lower lr or a gradient clip may help."
    )
    for line in folder.metrics():
        assert line["refused"] == {"not finite": [1, 2]}
        assert line["why"] == {"not finite": sentence}
        assert "lost" not in line
        assert "abandoned" not in line
    assert len(folder.metrics()) == 2
    assert (summary["refused"], summary["lost"]) == ({"not finite": 4}, {})
    assert "4 answers refused: not finite 4" in summary["notes"]
    assert 0 <= summary["accuracy_mean"] <= 1
    # what a refused client sent was sent all the same: four reports of the same length
    another = RunFolder.create(tmp_path / "other", "")
    healthy = make_run(methods.FedAvg(), tmp_path / "other" / "checkpoint", cohort=4, rounds=2)
    other = train_alone(Member(healthy, another, 1), Serial())
    assert summary["bytes_up"] == other["bytes_up"]
    assert (other["refused"], other["lost"], other["abandoned"]) == ({}, {}, 0)
    assert other["notes"] == []
    for line in another.metrics():
        assert not {"refused", "lost", "why", "abandoned"} & line.keys()


@pytest.mark.parametrize("engine", [Serial, lambda: Pool(workers=2)], ids=["serial", "pool"])
def test_nothing_but_spoilt_reports_ends_the_run_with_a_sentence(
    engine: Any, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    run = make_run(Poisoned(bad=(0, 1, 2, 3)), tmp_path / "run" / "checkpoint", cohort=4)
    chosen = engine()
    with pytest.raises(EngineError) as caught:
        train_alone(Member(run, folder), chosen)
    chosen.close()
    assert str(caught.value) == (
        "the exchange of round 1 was abandoned 3 times: 0 of 4 clients sent a usable report, and "
        "the quorum is 1: "
        "client 0 sent model with values that are not finite in fc1.weight; a lower lr or a "
        "gradient clip may help."
    )
    assert folder.summary is None


def test_no_report_at_all_is_an_exchange_that_is_abandoned_with_a_sentence(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    loop = rounds(run)
    first = next(loop)
    again = loop.send([])
    assert again.state is first.state
    assert (first.attempt, again.attempt) == (0, 1)
    clients = [task.to for task in first.tasks]
    assert again.tally.lost == {"unanswered": clients}
    assert again.why_abandoned == (
        "0 of 3 clients sent a usable report, and the quorum is 1: "
        f"the engine gave no answer for client {clients[0]}."
    )


def test_a_report_that_lacks_a_layer_is_refused_too(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=2)
    exchange = next(loop := rounds(run))
    good, other = reports(run, Serial(), exchange.tasks)
    (name, _), *rest = other.give["model"].values.items()
    short = replace(other, give={"model": Packet(dict(rest))})
    last = loop.send(zip(exchange.tasks, [good, short], strict=True))
    assert last.state.round == 1
    assert last.tally.refused == {"tensors": [other.of]}
    assert f"{name} on one side only" in last.tally.sentences["tensors"]


@dataclass(frozen=True)
class Wordless(methods.FedAvg):
    """Answers hold nothing."""

    def work(self, verb: str) -> tuple[Stage, ...]:
        return (Give(send, expected_no_packets),)


def test_the_gate_lets_reports_through_one_by_one(tmp_path: Path) -> None:
    """Where nothing has a length, and where enough lengths are known, no report waits."""
    run = make_run(Wordless(), tmp_path)
    assert passed_when(run, [{}] * 3) == [1, 2, 3]
    run = make_run(methods.FedAvg(), tmp_path)
    model = {"model": Packet(run.params)}
    # The first ones wait for each other.
    assert passed_when(run, [model] * 3) == [3, 3, 3]
    run.lengths.by_kind["train/model"] = [1.0] * 9
    assert passed_when(run, [model] * 3) == [1, 2, 3]
    # Nine together are enough to know.
    many = make_run(methods.FedAvg(), tmp_path, sizes=(9,) * 12, cohort=12)
    assert passed_when(many, [model] * 12) == [9] * 9 + [10, 11, 12]


def passed_when(run: Any, packets: Sequence[dict[str, Packet]]) -> list[int]:
    """How many answers were asked for when each report passed the gate."""
    tasks = plan(run, run.initial_state)
    asked = 0

    def stream() -> Any:
        nonlocal asked
        for task, give in zip(tasks, packets, strict=True):
            asked += 1
            yield task, Report(task.to, give, run.infos[task.to].examples)

    admission = Admission(run, tasks)
    when = []
    for _ in admission.admit(stream()):
        when.append(asked)
    assert admission.tally.to_line() == {}
    return when


# ---- the loop ------------------------------------------------------------------------------------


def test_the_loop_stamps_rounds_and_ends_without_tasks(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, rounds=2)
    loop = rounds(run)
    seen = [exchange := next(loop)]
    while exchange.tasks:
        seen.append(exchange := loop.send(answers(run, Serial(), exchange.tasks)))
    assert [e.state.round for e in seen] == [0, 1, 2]
    assert [{t.round for t in e.tasks} for e in seen] == [{0}, {1}, set()]
    assert [[t.to for t in e.tasks] for e in seen[:2]] == [draw_cohort(run, 0), draw_cohort(run, 1)]
    with pytest.raises(StopIteration):
        loop.send([])


def test_going_on_from_a_state_gives_the_same_result(tmp_path: Path) -> None:
    whole = play(make_run(methods.FedAvg(), tmp_path / "whole"), Serial())
    half = play(make_run(methods.FedAvg(), tmp_path / "half", rounds=1), Serial())
    run = make_run(methods.FedAvg(), tmp_path / "rest")
    loop = rounds(run, half)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(answers(run, Serial(), exchange.tasks))
    assert trees.identical(exchange.state.model, whole.model)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"rounds": 0}, "rounds is 0; it must be 1 or more."),
        ({"cohort": 0}, "cohort is 0; it must be between 1 and the number of clients, 4."),
        ({"cohort": 5}, "cohort is 5; it must be between 1 and the number of clients, 4."),
        ({"finetune": ()}, r"finetune is \(\); it must be lengths of 0 or more epochs."),
        ({"quorum": 1.5}, r"quorum is 1\.5; it must be a share between 0 and 1."),
        ({"quorum": -0.1}, r"quorum is -0\.1; it must be a share between 0 and 1."),
        ({"finetune": (0, -1)}, r"finetune is \(0, -1\); it must be lengths of 0 or more epochs."),
    ],
)
def test_impossible_runs_are_refused(words: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{sentence}$"):
        make_run(methods.FedAvg(), tmp_path, **words)


# ---- scores --------------------------------------------------------------------------------------


def test_correct_by_hand() -> None:
    # logits (x, 0): x = 1, -1, 1, 1 predict 0, 1, 0, 0; labels 0, 1, 1, 0; the last is padding.
    # score_batch 2 of 3; losses ln(1 + e^-1) twice, then ln(1 + e) for the wrong one.
    net = Net(nn.Linear(1, 2, bias=False), (1,))
    params = {"weight": torch.tensor([[1.0], [0.0]])}
    x, y = torch.tensor([[1.0], [-1.0], [1.0], [1.0]]), torch.tensor([0, 1, 1, 0])
    found = score_batch(
        net, params, Batch(x, y, torch.tensor([1.0, 1, 1, 0]), torch.arange(4), torch.tensor(0)), {}
    )
    assert (found["correct"].item(), found["total"].item()) == (2.0, 3.0)
    assert found["loss"].item() == pytest.approx(
        2 * math.log(1 + math.exp(-1)) + math.log(1 + math.e), abs=1e-6
    )


def test_finetuning_is_scored_for_each_length_and_the_last_model_kept(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, finetune=(0, 2))
    state = run.method.init(run.setup)
    before = {r.of: dict(r.metrics) for r in reports(run, Serial(), plan_scoring(run, state))}
    for report in admitted(run, Serial(), plan_scoring(run, state, "finetune")):
        assert report.give == {}
        assert report.metrics["test0"] == before[report.of]["test0"]
        assert report.metrics["validation_loss2"] != report.metrics["validation_loss0"]
        assert report.metrics["params"] == run.net.layout.size
        assert report.metrics["density"] == 1
        assert (
            trees.distance(
                run.memory.read(report.of, run.memory.files[report.of])["own"], run.params
            )
            > 1e-4
        )


def test_parameters_that_are_left_under_a_mask() -> None:
    assert count_kept(100, None) == 100
    assert (
        count_kept(100, {"w": torch.tensor([True, False, False]), "v": torch.tensor([[False]])})
        == 97
    )


def test_a_masked_model_is_scored_by_what_is_kept(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    weight = run.net.layout.prunable[0]
    mask = {weight: torch.zeros_like(run.params[weight], dtype=torch.bool)}
    (report,) = reports(
        run, Serial(), [Task(0, {"model": Packet(run.params, mask)}, verb="evaluate")]
    )
    gone = run.params[weight].numel()
    assert report.metrics["params"] == run.net.layout.size - gone
    assert report.metrics["density"] == pytest.approx(1 - gone / run.net.layout.prunable_size)


# ---- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "recipe"),
    [
        (
            Defaults("mlp", 2, 3, 5, 16, "SGD", 0.1, 0.9, 1e-4),
            LocalTraining(5, 16, SGD(0.1, 0.9, 1e-4)),
        ),
        (
            Defaults("mlp", 2, 3, 1, 8, "Adam", 1e-2, weight_decay=0.1),
            LocalTraining(1, 8, Adam(1e-2, weight_decay=0.1)),
        ),
    ],
)
def test_the_data_sets_own_recipe(
    defaults: Defaults, recipe: LocalTraining, tmp_path: Path
) -> None:
    data = replace(federation((12,), (20, 20, 20), dtype=torch.float32), defaults=defaults)
    assert make_recipe(data.defaults) == recipe
    run = build(methods.FedAvg(), data, Memory(tmp_path))
    assert (run.method.local, run.rounds, run.cohort) == (recipe, 3, 2)
    own = build(
        methods.FedAvg(local=LocalTraining(7)),
        data,
        Memory(tmp_path),
        rounds=9,
        cohort=3,
        finetune=[0, 4],
    )
    assert (own.method.local, own.rounds, own.cohort, own.finetune) == (
        LocalTraining(7),
        9,
        3,
        (0, 4),
    )


def test_a_federation_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiny has no clients left"):
        build(methods.FedAvg(), replace(federation((12,), ()), clients={}), Memory(tmp_path))


def test_fresh_parameters_are_drawn_from_seed_and_number(tmp_path: Path) -> None:
    def drawn(seed: int, numbers: Sequence[int]) -> list[trees.Tree]:
        run = make_run(methods.FedAvg(), tmp_path, seed=seed)
        return [run.setup.fresh(j) for j in numbers]

    first, second = drawn(0, (1, 2))
    assert trees.identical(first, drawn(0, (1,))[0])
    assert not trees.identical(first, second)
    assert not trees.identical(first, drawn(1, (1,))[0])


# ---- a method that does not move on --------------------------------------------------------------


@dataclass(frozen=True)
class Stuck(methods.FedAvg):
    """FedAvg that forgets to count its rounds, or counts backwards after the first."""

    back: bool = False

    def fold(self, state: Any, reports: Any) -> Any:
        after = super().fold(state, reports)
        if self.back and state.round == 0:
            return after
        return replace(after, round=0)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Stuck(), "has made 100 exchanges without completing round 1; its fold must give a state"),
        (Stuck(back=True), "went back from round 1 to 0"),
    ],
)
def test_a_method_that_never_completes_a_round_ends_with_a_sentence(
    method: Stuck, sentence: str, tmp_path: Path
) -> None:
    run = make_run(method, tmp_path / "memory", sizes=(8, 8))
    with pytest.raises(EngineError, match=sentence):
        play(run, Serial())
    with pytest.raises(EngineError, match=sentence):
        estimate_cost(method, net="mlp", shape=(4,), classes=2, clients=2, cohort=1, rounds=3)
