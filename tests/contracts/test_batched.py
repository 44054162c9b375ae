"""Stacked clients give what clients alone give: every method, network, ragged sizes, runs that differ in numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports, small, tensors

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import evaluation, plan
from fedgrove.wire.codec import Dense

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]
RAGGED = (20, 13, 33, 17, 9)
# Near a reference that a dead unit has not left, Adam multiplies a rounding error by lr * mu / eps every step: with the
# usual eps 1e-16 becomes 1e-2 within three rounds on any engine. A larger eps keeps the comparison about the engine.
CALM = Adam(1e-2, eps=1e-3)
# Half a ResNet of width 4 on a few images turns 1e-16 on the outputs of its convolutions into 4e-6 within three rounds
# of SAFL, on one engine alone; with this step into 4e-13. No other method does.
CALMER, PRUNING = Adam(1e-3, eps=1e-3), methods.SAFL | methods.Hermes
RECIPES = {
    "adam": LocalTraining(2, 8, CALM),
    "sgd": LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-3), decay=0.9, clip=0.5),
}


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    "net", ["mlp", "har-cnn", "bn-cnn2", pytest.param("resnet18", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", EVERY)
def test_batched_is_serial(method, net: str, device: str, tmp_path: Path) -> None:
    found = []
    for engine in (Serial(), Batched(device)):
        calm = replace(
            method,
            local=LocalTraining(
                2, 8, CALMER if net == "resnet18" and isinstance(method, PRUNING) else CALM
            ),
        )
        run = make_run(calm, tmp_path / engine.name, net=net, sizes=RAGGED, cohort=4)
        state = play(run, engine)
        scores = {
            r.of: (dict(r.metrics), r.cost)
            for r in reports(run, engine, evaluation(run, state, "finetune"))
        }
        found.append((tensors(state), remembered(run), scores))
    (a, kept_a, scores_a), (b, kept_b, scores_b) = found
    assert trees.distance(a, b) < 1e-9
    assert trees.distance(kept_a, kept_b) < 1e-9
    assert scores_a.keys() == scores_b.keys()
    for k, (metrics, cost) in scores_a.items():
        assert scores_b[k][0] == pytest.approx(metrics, abs=1e-9)
        assert (
            scores_b[k][1]["up"].keys() == cost["up"].keys()
        )  # its head holds scores, whose last digits may differ
        if isinstance(method.codec, Dense):  # others look at the bits of the values
            assert scores_b[k][1]["down"] == cost["down"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, tmp_path: Path) -> None:
    method = methods.FedProx(local=RECIPES[recipe])
    states = [
        play(make_run(method, tmp_path / e.name, sizes=RAGGED, cohort=5), e)
        for e in (Serial(), Batched())
    ]
    assert trees.distance(*(s.model for s in states)) < 1e-9


def test_runs_that_differ_in_numbers_train_in_one_stack(tmp_path: Path) -> None:
    """Learning rate, pull, seed and data differ; each run is the one it would be alone."""
    made = [
        replace(
            methods.FedProx(),
            local=LocalTraining(2, 8, Adam(lr)),
            pull=replace(methods.FedProx().pull, mu=mu),
        )
        for lr, mu in ((1e-2, 0.1), (3e-3, 1.0), (1e-3, 0.5))
    ]
    runs = [
        make_run(m, tmp_path / str(i), sizes=RAGGED[i:], cohort=2, seed=i)
        for i, m in enumerate(made)
    ]
    engine = Batched()
    jobs = [(run, task) for run in runs for task in plan(run, run.method.init(run.start))]
    groups = engine._alike([engine._open(run, task, {}) for run, task in jobs])
    assert [len(g) for g in groups] == [6]
    together = list(engine.map(jobs))
    for (run, mine), (other, alone) in zip(together, Serial().map(jobs), strict=True):
        assert run is other
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-10


def test_chunks_do_not_matter(tmp_path: Path) -> None:
    found = [
        play(make_run(methods.Ditto(), tmp_path / str(n), sizes=RAGGED, cohort=5), Batched(chunk=n))
        for n in (1, 2, 512)
    ]
    assert all(trees.distance(found[0].model, other.model) < 1e-12 for other in found[1:])


def test_dropout_gives_the_same_accuracy_within_noise_and_the_same_bits_again(
    tmp_path: Path,
) -> None:
    def losses(engine) -> list[float]:
        scores = []
        for seed in range(10):
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
            each = [r.metrics["test_loss0"] for r in reports(run, engine, evaluation(run, state))]
            scores.append(sum(each) / len(each))
        return scores

    serial, first, again = losses(Serial()), losses(Batched()), losses(Batched())
    assert first == again
    assert first != serial
    gap = torch.tensor(first) - torch.tensor(serial)
    assert abs(gap.mean()) < 3 * gap.std() / len(gap) ** 0.5 + 1e-3


def test_global_randomness_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    play(
        make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32),
        Batched(),
    )
    assert torch.equal(before, torch.get_rng_state())
