"""FedGen: labels are told, the server trains a generator, clients learn from what it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import WHOLE, Contract
from tests.methods.exchanges import exchanges

from fedgrove import data, trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg, FedGen
from fedgrove.methods.fedgen import GeneratedFeatures, GeneratorTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import build

FEW = {"samples": 8, "noise": 3, "hidden": 5, "training": GeneratorTraining(steps=3)}
CONTRACT = Contract(
    small=FEW,
    off=FedGen(**FEW, generated=GeneratedFeatures(alpha=0.0)),
    # And the generator down, 3 classes and 3 of noise to 5 to 64: 6*5+5 = 35, 5*64+64 = 384: 419.
    paper_bytes=WHOLE + 4 * 419 * 3 * 50,
    refused_with_privacy="numbers next to their model",
)

SMALL = FedGen(samples=8, noise=3, hidden=5)


def test_labels_add_up_over_clients(tmp_path: Path) -> None:
    run = make_run(SMALL, tmp_path)
    state = run.method.init(run.setup)
    packets = {"model": Packet(run.params)}
    told = {"label0": 1.0, "label1": 0.0, "label2": 3.0}
    for report in (Report(0, packets, 4, told), Report(1, packets, 4, told)):
        state = run.method.fold(state, [report])
    assert state.counts == (2.0, 0.0, 6.0)
    # Drawn again, a client weighs no more; and what it tells now is what counts.
    state = run.method.fold(state, [Report(0, packets, 4, told)])
    assert state.counts == (2.0, 0.0, 6.0)
    state = run.method.fold(state, [Report(0, packets, 4, told | {"label1": 5.0, "label2": 0.0})])
    assert state.counts == (2.0, 5.0, 3.0)


def test_what_clients_tell_are_their_labels(tmp_path: Path) -> None:
    run = make_run(SMALL, tmp_path, rounds=1)
    ((_, _, answers, after),) = exchanges(run)
    for report in answers:
        y = run.federation.clients[report.of].train.y
        counted = torch.bincount(y, minlength=3).tolist()
        assert [report.metrics[f"label{c}"] for c in range(3)] == counted
    assert sum(after.counts) == sum(report.examples for report in answers)


def test_the_generator_moves_and_then_clients_feel_it(tmp_path: Path) -> None:
    """In the first round the term is 0 and the model FedAvg's; afterwards it is not."""
    for rounds, is_same in ((1, True), (2, False)):
        run = make_run(SMALL, tmp_path / f"gen{rounds}", rounds=rounds)
        plain = make_run(FedAvg(), tmp_path / f"plain{rounds}", rounds=rounds)
        state = play(run, Serial())
        assert (trees.distance(state.model, play(plain, Serial()).model) < 1e-12) == is_same
        assert not trees.equal(state.generator, run.initial_state.generator)


def test_targets_without_classes_are_refused(tmp_path: Path) -> None:
    federation = data.load("rooms", clients=3)
    with pytest.raises(InputError, match="the targets of the data are numbers"):
        build(FedGen(), federation, Memory(tmp_path))
    for name in ("samples", "noise", "hidden"):
        with pytest.raises(InputError, match=f"{name} is 0; it must be 1 or more."):
            FedGen(**{name: 0})
