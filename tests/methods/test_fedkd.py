from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports
from tests.contract import WHOLE, Contract

import fedgrove
from fedgrove import trees
from fedgrove.core import Packet
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.wired import Wired
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import FedKD
from fedgrove.methods.fedkd import Energy, largest_rank, recovered
from fedgrove.runs.rounds import plan, plan_scoring

CONTRACT = Contract(
    off=FedKD(distil=0.0, energy=Energy(1.0, 1.0)),
    paper_bytes=WHOLE,
    refused_with_privacy="'u'",
)

SMALL = FedKD(mentee="mlp:hidden=8", use_mentor=True)


def test_a_mentee_is_the_old_one_and_what_came_whole_and_in_factors():
    model = {"w": torch.full((4, 3), 2.0), "c": torch.ones(3, 3), "b": torch.zeros(4)}
    whole = {"w": torch.zeros(4, 3), "c": torch.eye(3), "b": torch.full((4,), 7.0)}
    # 2 e1 (x) (0, .6, .8), as in test_lowrank.
    give = {
        "model": Packet(whole),
        "u": Packet({"w": torch.tensor([[1.0, 0, 0, 0]]), "c": torch.zeros(1, 3)}),
        "s": Packet({"w": torch.tensor([2.0]), "c": torch.zeros(1)}),
        "v": Packet({"w": torch.tensor([[0, 0.6, 0.8]]), "c": torch.zeros(1, 3)}),
    }
    mentee = recovered(give, model)
    assert mentee["w"][0].tolist() == pytest.approx([2.0, 3.2, 3.6])
    assert mentee["w"][1:].tolist() == [[2.0] * 3] * 3
    assert torch.equal(mentee["c"], (torch.ones(3, 3) + torch.eye(3)).double())
    # What has no factors is no update: it came as it is.
    assert torch.equal(mentee["b"], whole["b"])


def test_the_energy_rises_with_the_rounds(tmp_path: Path):
    run = make_run(FedKD(), tmp_path, rounds=4)
    state = run.initial_state
    asked = []
    while state.round < 4:
        tasks = plan(run, state)
        asked.append(tasks[0].settings["energy"])
        state = run.method.fold(state, reports(run, Serial(), tasks))
    assert asked == pytest.approx([0.95, 0.9575, 0.965, 0.9725])


def test_only_factors_of_matrices_travel_and_the_mentor_stays(tmp_path: Path):
    run = make_run(FedKD(), tmp_path, dtype=torch.float32, rounds=1)
    tasks = plan(run, run.initial_state)
    report, memory = perform(run, tasks[0], {})
    assert set(report.give) == {"model", "u", "s", "v"}
    weights = ["fc1.weight", "fc2.weight"]
    assert set(weights) <= set(report.give["u"].values)
    for name in report.give["u"].values:
        most = largest_rank(tuple(run.params[name].shape))
        assert len(report.give["s"].values[name]) == most
        is_factored = bool(report.give["u"].values[name].any())
        assert is_factored != bool(report.give["model"].values[name].any())
    # Training from one model moves the wide layer along few directions.
    assert bool(report.give["u"].values["fc2.weight"].any())
    assert set(memory) == {"mentor"}


def test_a_lower_energy_costs_fewer_bytes_and_loses_more(tmp_path: Path):
    spent = []
    for energy in (Energy(0.5, 0.5), Energy(0.95, 0.95), Energy(1.0, 1.0)):
        method = FedKD(distil=0.0, energy=energy)
        run = make_run(method, tmp_path / str(energy.first), dtype=torch.float32, rounds=1)
        total = 0
        for report in reports(run, Serial(), plan(run, run.initial_state)):
            total += sum(report.cost["up"].values())
        spent.append((total, play(run, Serial()).model))
    assert spent[0][0] < spent[1][0] < spent[2][0]
    far, near = (trees.distance(model, spent[2][1]) for _, model in spent[:2])
    assert far > near > 0


def test_a_mentor_starts_at_the_first_mentee_and_stays_away_from_the_mean(tmp_path: Path):
    """In the first round both are the same net on the same data; after it the mentee is a mean."""
    method = FedKD(energy=Energy(1.0, 1.0))
    run = make_run(method, tmp_path, rounds=1)
    for task in plan(run, run.initial_state):
        report, memory = perform(run, task, {})
        assert trees.distance(memory["mentor"], report.give["model"].values) < 1e-12
        # A second time the mentee is what came, and the mentor what was kept.
        again, later = perform(run, replace(task, round=1), memory)
        assert trees.distance(later["mentor"], again.give["model"].values) > 1e-3


def test_clients_use_the_mentee_or_their_mentor(tmp_path: Path):
    scores = {}
    for use_mentor in (False, True):
        method = FedKD(use_mentor=use_mentor)
        run = make_run(method, tmp_path / str(use_mentor), cohort=4, rounds=2)
        state = play(run, Serial())
        answers = reports(run, Serial(), plan_scoring(run, state))
        scores[use_mentor] = [report.metrics["test_loss0"] for report in answers]
    # Mentors are four, and each has a loss of its own.
    assert all(a != b for a, b in zip(scores[False], scores[True], strict=True))


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_a_smaller_mentee_is_the_same_on_every_engine(net: str, tmp_path: Path):
    states = {}
    for engine in (Serial(), Wired(), Pool(workers=2), Batched(device="cpu")):
        run = make_run(SMALL, tmp_path / engine.name, net=net, rounds=2)
        state = play(run, engine)
        states[engine.name] = (state.model, remembered(run))
        engine.close()
    # 8 hidden units for the net's 64, and the mentors are of the run's own net.
    assert states["serial"][0]["fc2.weight"].shape == (8, 8)
    start = run.net.params()
    mentors = {name: leaf for name, leaf in states["serial"][1].items() if name.startswith("0/")}
    assert {name.split("/", 2)[2] for name in mentors} == set(start)
    for name in ("wired", "pool"):
        assert trees.identical(states[name][0], states["serial"][0])
        assert trees.identical(states[name][1], states["serial"][1])
    for mine, theirs in zip(states["batched"], states["serial"], strict=True):
        assert trees.distance(mine, theirs) < 1e-9


def test_a_smaller_mentee_costs_fewer_bytes(tmp_path: Path):
    words = {"rounds": 1, "clients": 4, "cohort": 2, "engine": "serial", "progress": False}
    small = fedgrove.run(SMALL, out=tmp_path / "small", **words).summary
    whole = fedgrove.run(FedKD(), out=tmp_path / "whole", **words).summary
    assert small["bytes_up"] < 0.5 * whole["bytes_up"]
    # mlp of 64 inputs, 8 hidden units and 10 classes: 520 + 72 + 90 = 682 parameters.
    assert small["bytes_paper"] == 8 * 682 * 2


def test_bad_values_are_refused():
    for words, sentence in (
        ({"distil": -1.0}, "distil is -1.0"),
        ({"mentee": "my.py:Net", "use_mentor": True}, "built-in network"),
    ):
        with pytest.raises(InputError, match=sentence):
            FedKD(**words)


@pytest.mark.parametrize("words", [{"use_mentor": False}, {"distil": 0.0}])
def test_a_mentee_of_its_own_needs_mentors_to_use(words, tmp_path: Path):
    with pytest.raises(InputError, match="use_mentor': True"):
        fedgrove.run(
            replace(SMALL, **words),
            out=tmp_path / "run",
            rounds=1,
            engine="serial",
            progress=False,
        )
    assert not (tmp_path / "run").exists()


def test_a_mentee_that_does_not_fit_is_refused_before_the_run(tmp_path: Path):
    for name, sentence in (("lenet", "lenet"), ("nothing", "there is no net")):
        method = replace(SMALL, mentee=name)
        with pytest.raises(InputError, match=sentence):
            fedgrove.run(method, out=tmp_path / "run", rounds=1, engine="serial", progress=False)
        assert not (tmp_path / "run").exists()
