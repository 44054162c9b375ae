"""Stacked clients give what clients alone give: methods, networks, ragged sizes, several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import Noting, admitted, make_run, play, remembered, reports, tensors
from tests.contract import small

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.engines.batched import graphs
from fedgrove.engines.batched.engine import Batched
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.wire.codec import Dense

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]
RAGGED = (12, 9, 17, 10, 5)
"""Two batches of 8, three, or one, and few are full."""
# Near a reference that a dead unit has not left, Adam multiplies a rounding error by lr * mu / eps
# every step: with the usual eps 1e-16 becomes 1e-2 within three rounds on any engine. A larger eps
# keeps the comparison about the engine.
CALM = Adam(1e-2, eps=1e-3)
# Half a ResNet of width 4 on a few images turns 1e-16 on the outputs of its convolutions into 4e-6
# within three rounds of SAFL, on one engine alone; with this step into 4e-13. No other method does.
CALMER = Adam(1e-3, eps=1e-3)
PRUNING = methods.SAFL | methods.Hermes
RECIPES = {
    "adam": LocalTraining(2, 8, CALM),
    "sgd": LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-3), decay=0.9, clip=0.5),
}


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    "net",
    [
        "mlp",
        "bn-cnn2",
        *(pytest.param(net, marks=pytest.mark.slow) for net in ("har-cnn", "resnet18")),
    ],
)
@pytest.mark.parametrize("method", EVERY)
def test_batched_is_serial(
    method, net: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if net != "mlp":
        # As if it were a large one: on a card, with smaller graphs as clients finish.
        monkeypatch.setattr(graphs, "LITTLE_STEP", 0)
    magnifies_rounding = net == "resnet18" and isinstance(method, PRUNING)
    optimiser = CALMER if magnifies_rounding else CALM
    calm = replace(method, local=LocalTraining(2, 8, optimiser))
    results = []
    for engine in (Noting(Serial()), Noting(Batched(device))):
        run = make_run(calm, tmp_path / engine.name, net=net, sizes=RAGGED, cohort=4)
        state = play(run, engine)
        scores = {r.of: r for r in admitted(run, engine, plan_scoring(run, state, "finetune"))}
        results.append((tensors(state), remembered(run), scores, engine.macs))
    (expected, expected_memory, expected_scores, expected_macs), (*found, macs) = results
    mine, memory, scores = found
    assert trees.distance(expected, mine) < 1e-9
    assert trees.distance(expected_memory, memory) < 1e-9
    # Clients are trained wider than they are, and counted each in its own width all the same.
    assert macs == expected_macs
    assert expected_scores.keys() == scores.keys()
    for client, alone in expected_scores.items():
        stacked = scores[client]
        assert dict(stacked.metrics) == pytest.approx(dict(alone.metrics), abs=1e-9)
        # Not the lengths: the head holds scores, whose last digits may differ.
        assert stacked.cost["up"].keys() == alone.cost["up"].keys()
        # Other codecs look at the bits of the values.
        if isinstance(method.codec, Dense):
            assert stacked.cost["down"] == alone.cost["down"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, tmp_path: Path) -> None:
    method = methods.FedProx(local=RECIPES[recipe])
    alone = play(make_run(method, tmp_path / "serial", sizes=RAGGED, cohort=5), Serial())
    stacked = play(make_run(method, tmp_path / "batched", sizes=RAGGED, cohort=5), Batched())
    assert trees.distance(alone.model, stacked.model) < 1e-9


def test_runs_that_differ_in_numbers_train_in_one_stack(tmp_path: Path) -> None:
    """Learning rate, pull, seed and data differ; each run is the one it would be alone."""
    jobs = []
    for i, (lr, mu) in enumerate(((1e-2, 0.1), (3e-3, 1.0), (1e-3, 0.5))):
        fedprox = methods.FedProx(local=LocalTraining(2, 8, Adam(lr)))
        method = replace(fedprox, pull=replace(fedprox.pull, mu=mu))
        run = make_run(method, tmp_path / str(i), sizes=RAGGED[i:], cohort=2, seed=i)
        jobs += [(run, task) for task in plan(run, run.method.init(run.setup))]
    engine = Batched()
    groups = engine._group_by_work([engine._start_job(run, task, {}) for run, task in jobs])
    assert [len(group) for group in groups] == [6]
    together = list(engine.map(jobs))
    for (job, mine), (other, alone) in zip(together, Serial().map(jobs), strict=True):
        assert all(one is another for one, another in zip(job, other, strict=True))
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-10


def test_chunks_do_not_matter(tmp_path: Path) -> None:
    models = []
    for chunk in (1, 2, 512):
        run = make_run(methods.Ditto(), tmp_path / str(chunk), sizes=RAGGED, cohort=5)
        models.append(play(run, Batched(chunk=chunk)).model)
    assert trees.distance(models[0], models[1]) < 1e-12
    assert trees.distance(models[0], models[2]) < 1e-12


def test_dropout_gives_the_same_accuracy_within_noise_and_the_same_bits_again(
    tmp_path: Path,
) -> None:
    def losses(engine) -> list[float]:
        scores = []
        for seed in range(6):
            folder = tmp_path / f"{engine.name}{seed}{id(engine)}"
            run = make_run(
                methods.FedAvg(),
                folder,
                net="har-cnn",
                options={},
                dtype=torch.float32,
                seed=seed,
                cohort=4,
            )
            state = play(run, engine)
            each = [r.metrics["test_loss0"] for r in reports(run, engine, plan_scoring(run, state))]
            scores.append(sum(each) / len(each))
        return scores

    serial = losses(Serial())
    first = losses(Batched())
    again = losses(Batched())
    assert first == again
    assert first != serial
    gap = torch.tensor(first) - torch.tensor(serial)
    assert abs(gap.mean()) < 3 * gap.std() / len(gap) ** 0.5 + 1e-3


def test_global_randomness_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run = make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32)
    play(run, Batched())
    assert torch.equal(before, torch.get_rng_state())


def test_what_dropout_draws_does_not_depend_on_what_the_engine_did_before(tmp_path: Path) -> None:
    """A resumed run has a fresh engine, which tries every network again."""
    run = make_run(
        methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32, rounds=2
    )
    tasks = plan(run, run.initial_state)
    engine = Batched(device="cpu")
    first = list(reports(run, engine, tasks))
    second = list(reports(run, engine, tasks))
    for one, other in zip(first, second, strict=True):
        assert trees.equal(one.give["model"].values, other.give["model"].values)
