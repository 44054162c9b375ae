"""SCAFFOLD: both options by hand, two rounds against plain torch, and control variates that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import answers, make_run, play
from tests.contract import WHOLE, Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD, RATE, SHARES, STEPS

from fedgrove import trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.engines.faulty import Faulty
from fedgrove.errors import InputError
from fedgrove.methods import Scaffold
from fedgrove.methods.scaffold import State, begin, control_of_update
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.faults import Faults
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run

CONTRACT = Contract(
    off=Scaffold(control="off"),
    # As many control variates as parameters travel, both ways.
    paper_bytes=2 * WHOLE,
    refused_with_privacy="send 'change', which is not a change of what they were sent",
)


def tree(*numbers: float) -> trees.Tree:
    return {"w": torch.tensor(numbers)}


# ---- by hand -------------------------------------------------------------------------------------


def test_option_two_by_hand() -> None:
    """x = 2, y = 1 after 4 steps of .25: the mean step was along (2 - 1) / (4 · .25) = 1. Of that
    c - c_i = .5 was the correction: c_i+ = .5."""
    after = control_of_update(tree(2.0), tree(1.0), tree(0.5), steps=4, lr=0.25)
    assert after["w"].tolist() == [0.5]


def test_a_new_client_is_corrected_by_all_of_c() -> None:
    """c = 3: without c_i the correction is 3, with c_i = 1 it is 2."""
    carry = {"control": tree(3.0)}
    assert begin(carry, None)["correction"]["w"].tolist() == [3.0]  # type: ignore[arg-type]
    carry["own_control"] = tree(1.0)
    assert begin(carry, None)["correction"]["w"].tolist() == [2.0]  # type: ignore[arg-type]


def report(client: int, examples: int, model: float, change: float) -> Report:
    give = {"model": Packet(tree(model)), "change": Packet(tree(change))}
    return Report(client, give, examples)


def test_the_server_by_hand() -> None:
    """Models 4 and 8 of one and three examples: 7. Changes 8 and 0: their mean is 2; these clients
    have 4 of 8 examples, so that c = 1 + 4/8 · 2 = 2."""
    before = State(3, tree(0.0), tree(1.0), 8)
    after = Scaffold().fold(before, [report(0, 1, 4.0, 8.0), report(1, 3, 8.0, 0.0)])
    assert after.round == 4
    assert after.model["w"].tolist() == [7.0]
    assert after.control["w"].tolist() == [2.0]
    assert after.examples == 8


# ---- two rounds in plain torch -------------------------------------------------------------------


def plain_scaffold(option: str) -> tuple[plain_torch.Weights, plain_torch.Weights]:
    """Alg. 1 with both clients in both rounds: the model and c."""
    x = plain_torch.initial()
    zeros = {name: torch.zeros_like(value) for name, value in x.items()}
    c = dict(zeros)
    own = [dict(zeros), dict(zeros)]
    for number in range(2):
        trained = []
        new_own = []
        for i in range(2):
            drift = {name: c[name] - own[i][name] for name in c}
            y = plain_torch.train(x, i, number, more=lambda name, w, drift=drift: drift[name])
            if option == "update":
                new = {n: own[i][n] - c[n] + (x[n] - y[n]) / (STEPS[i] * RATE) for n in x}
            else:
                new = plain_torch.gradient(x, *plain_torch.examples(i))
            trained.append(y)
            new_own.append(new)
        for name in c:
            for i in range(2):
                c[name] = c[name] + SHARES[i] * (new_own[i][name] - own[i][name])
        x = plain_torch.mean(trained)
        own = new_own
    return x, c


@pytest.mark.parametrize("option", ["update", "gradient"])
def test_two_rounds_equal_plain_torch(option: str, tmp_path: Path) -> None:
    method = Scaffold(option, local=PLAIN_SGD)  # type: ignore[arg-type]
    run, state = plain_torch.play_two_rounds(method, tmp_path)
    model, control = plain_scaffold(option)
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(model, state.model) < 1e-12
    assert plain_torch.far(control, state.control) < 1e-12


def test_with_plain_sgd_auto_is_option_two(tmp_path: Path) -> None:
    _, auto = plain_torch.play_two_rounds(Scaffold(local=PLAIN_SGD), tmp_path / "a")
    _, update = plain_torch.play_two_rounds(Scaffold("update", local=PLAIN_SGD), tmp_path / "b")
    assert trees.identical(auto.model, update.model)


# ---- what else holds -----------------------------------------------------------------------------


def own_controls(run: Run) -> Mapping[int, trees.Tree]:
    found = {}
    for client, version in run.memory.files.items():
        found[client] = run.memory.read(client, version)["own_control"]
    return found


@pytest.mark.parametrize("faults", ["crash=0", "crash=0.2,nan=0.2,late=0.2"])
@pytest.mark.parametrize("control", ["update", "gradient"])
def test_c_is_the_weighted_mean_of_all_c_i(control: str, faults: str, tmp_path: Path) -> None:
    """Also with clients of different sizes, three of four in a round, and lost reports."""
    method = Scaffold(control, local=PLAIN_SGD)  # type: ignore[arg-type]
    run = make_run(method, tmp_path, rounds=5, faults=Faults.parse(faults))
    engine = Faulty(Serial())
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(answers(run, engine, exchange.tasks))
    state = exchange.state
    expected = {name: torch.zeros_like(value) for name, value in state.control.items()}
    sizes = {client: info.examples for client, info in run.setup.clients.items()}
    for client, own in own_controls(run).items():
        for name, value in own.items():
            expected[name] += sizes[client] / 74 * value
    assert trees.sq_norm(state.control) > 0
    assert trees.distance(state.control, expected) < 1e-12


def test_running_statistics_have_no_control_variates(tmp_path: Path) -> None:
    run = make_run(Scaffold(local=PLAIN_SGD), tmp_path, net="bn-cnn2", rounds=1)
    state = play(run, Serial())
    assert run.net.layout.buffers
    assert set(state.control) == set(run.net.layout.params)


@pytest.mark.parametrize(
    ("local", "why"),
    [
        (LocalTraining(1, 8, Adam(1e-2)), "uses Adam"),
        (LocalTraining(1, 8, SGD(0.1, momentum=0.9)), "has momentum"),
        (LocalTraining(1, 8, SGD(0.1), clip=1.0), "clips gradients"),
    ],
)
def test_option_two_needs_plain_sgd(local: LocalTraining, why: str, tmp_path: Path) -> None:
    run = make_run(Scaffold("update", local=local), tmp_path)
    with pytest.raises(InputError, match=f"^control is update, .* {why}; "):
        run.method.init(run.setup)
    auto = replace(run, method=Scaffold(local=local))
    (note,) = auto.method.notes(run.net)
    assert note.endswith(f"local training {why}")
    _, by_gradient = plain_torch.play_two_rounds(Scaffold(local=local), tmp_path / "a")
    _, asked = plain_torch.play_two_rounds(Scaffold("gradient", local=local), tmp_path / "b")
    assert trees.identical(by_gradient.model, asked.model)
    assert Scaffold(local=PLAIN_SGD).notes(run.net) == []


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(InputError, match="option2"):
        Scaffold("option2")  # type: ignore[arg-type]
