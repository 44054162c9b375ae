"""FedNTD: its distillation is a part that any method takes, also where channels are pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import make_run, play
from tests.contract import Contract

from fedgrove import data, trees
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg, FedLC, FedNTD, FedRolex
from fedgrove.methods.fedntd import NotTrueDistillation
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.parts.objective import ProblemLoss
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import build

CONTRACT = Contract(
    off=FedNTD(distil=NotTrueDistillation(beta=0.0)),
)

DISTILLED = ProblemLoss() + NotTrueDistillation(beta=2.0, tau=0.7)
CALM = LocalTraining(1, 8, Adam(1e-2, eps=1e-3))  # see tests/contracts/test_batched.py


def test_fedavg_with_the_part_is_the_method(tmp_path: Path) -> None:
    states = []
    for method in (
        FedNTD(distil=NotTrueDistillation(beta=2.0, tau=0.7)),
        FedAvg(objective=DISTILLED),
    ):
        states.append(play(make_run(method, tmp_path / type(method).__name__), Serial()))
    assert trees.identical(states[0].model, states[1].model)
    plain = play(make_run(FedAvg(), tmp_path / "plain"), Serial())
    assert not trees.equal(plain.model, states[0].model)


def test_narrow_clients_are_taught_by_what_they_received(tmp_path: Path) -> None:
    models = []
    for engine in (Serial(), Batched()):
        method = FedRolex(widths=(0.5, 0.75), objective=DISTILLED, local=CALM)
        run = make_run(method, tmp_path / engine.name, net="bn-cnn2", rounds=2)
        models.append(play(run, engine).model)
        engine.close()
    assert trees.distance(*models) < 1e-9


@pytest.mark.parametrize("method", [FedNTD(), FedLC()], ids=["fedntd", "fedlc"])
def test_targets_without_classes_are_refused(method, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the targets of the data are numbers"):
        build(method, data.load("rooms", clients=3), Memory(tmp_path))
