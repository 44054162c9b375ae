"""FedNova: by hand, the numbers of steps, two rounds against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run
from tests.contract import WHOLE, Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD, SHARES, STEPS

from fedgrove import trees
from fedgrove.core import Packet, Report, Train
from fedgrove.methods import FedNova
from fedgrove.methods.fednova import State, norm_of_steps
from fedgrove.parts.local import SGD, Adam, LocalTraining, count_steps
from fedgrove.parts.objective import ProblemLoss
from fedgrove.parts.server import ServerSGD
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    off=FedNova(normalise=False),
    paper_bytes=WHOLE,
)


def tree(*numbers: float) -> trees.Tree:
    return {"w": torch.tensor(numbers)}


def test_by_hand() -> None:
    """8 and 24 examples in batches of 8: 1 and 3 steps, shares 1/4 and 3/4. Updates 4 and 6: a step
    changes 4 and 2, on average 1/4 · 4 + 3/4 · 2 = 2.5; of 1/4 · 1 + 3/4 · 3 = 2.5 steps: 6.25."""
    method = FedNova(local=LocalTraining(1, 8, SGD(0.1)))
    before = State(3, tree(10.0), ("w",), 1)
    reports = [
        Report(0, {"model": Packet(tree(14.0))}, 8),
        Report(1, {"model": Packet(tree(16.0))}, 24),
    ]
    after = method.fold(before, reports)
    assert after.round == 4
    assert after.model["w"].tolist() == [16.25]


def test_with_momentum_by_hand() -> None:
    """Two steps with momentum .5: the first gradient moves by 1 and .5, the second by 1: 2.5. Three:
    1.75 + 1.5 + 1 = 4.25."""
    local = LocalTraining(1, 8, SGD(0.1, momentum=0.5))
    assert norm_of_steps(local, 16) == 2.5
    assert norm_of_steps(local, 17) == 4.25
    assert norm_of_steps(LocalTraining(3, 8, Adam()), 17) == 9.0
    assert norm_of_steps(local, 0) == 0.0


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_the_server_knows_how_many_steps_clients_do(net: str, tmp_path: Path) -> None:
    """17 examples are three batches, or two where BatchNorm skips the last one."""
    run = make_run(FedNova(local=PLAIN_SGD), tmp_path, net=net, sizes=(20, 13, 1, 17), cohort=4)
    state = run.initial_state
    found = []
    for task in plan(run, state):
        client = run.client(task, {})
        steps = count_steps(Train(ProblemLoss(), PLAIN_SGD), client)
        assert norm_of_steps(PLAIN_SGD, client.info.examples, state.least) == steps
        found.append(steps)
    assert found == ([6, 4, 2, 6] if net == "mlp" else [6, 4, 0, 4])


@pytest.mark.parametrize("step", [None, 0.5])
def test_two_rounds_equal_plain_torch(step: float | None, tmp_path: Path) -> None:
    server = None if step is None else ServerSGD(step)
    method = FedNova(local=PLAIN_SGD, server=server)
    run, state = plain_torch.play_two_rounds(method, tmp_path)
    w = plain_torch.initial()
    effective = SHARES[0] * STEPS[0] + SHARES[1] * STEPS[1]
    for number in range(2):
        moved = dict(w)
        for i in range(2):
            found = plain_torch.train(w, i, number)
            for name in w:
                change = effective * SHARES[i] * (found[name] - w[name]) / STEPS[i]
                moved[name] = moved[name] + (step or 1.0) * change
        w = moved
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(w, state.model) < 1e-12
