"""The example does what the library does: the same algorithm, written twice, compared."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.conftest import federation, make_run, play, reports, tensors

import fedgrove
from fedgrove import data, nets, trees
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg
from fedgrove.nets import Net
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run

EXAMPLES = Path(__file__).parents[1] / "examples"
FILE = EXAMPLES / "fedavg_by_hand.py"


@pytest.fixture(scope="module")
def by_hand() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fedavg_by_hand", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FEDERATIONS = {
    # ragged: 13 and 17 are no multiples of the batch, and weights differ
    "tiny": lambda: federation((12,), (20, 13, 24, 17)),
    "digits": lambda: data.load("digits", clients=6, seed=3).to(torch.float64),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", FEDERATIONS)
def test_the_library_and_the_page_of_plain_torch_agree(
    by_hand, name: str, seed: int, tmp_path: Path
) -> None:
    fed = FEDERATIONS[name]()
    module = nets.build("mlp", fed.shape, fed.classes, seed).double()
    run = Run(
        FedAvg(local=LocalTraining(2, 8, Adam(1e-2))),
        fed,
        Net(module, fed.shape),
        Memory(tmp_path),
        rounds=3,
        cohort=3,
        seed=seed,
    )
    state = play(run, Serial())
    weights = by_hand.fedavg(fed, module, rounds=3, cohort=3, epochs=2, batch=8, lr=1e-2, seed=seed)
    assert list(weights) == list(state.model)
    # training has moved the weights
    assert trees.distance(weights, run.params) > 1e-3
    assert trees.distance(weights, state.model) < 1e-10
    jobs = [(run, task) for task in plan_scoring(run, state)]
    scores = [report.metrics["test0"] for _, report in Serial().map(jobs)]
    assert by_hand.score(fed, module, weights) == pytest.approx(scores, abs=1e-12)


def test_another_seed_is_another_run(by_hand) -> None:
    """Else the comparison above would hold for an example that draws nothing."""
    fed = FEDERATIONS["tiny"]()
    module = nets.build("mlp", fed.shape, fed.classes, 0).double()
    words = {"rounds": 1, "cohort": 2, "epochs": 1, "batch": 8, "lr": 1e-2}
    one = by_hand.fedavg(fed, module, seed=0, **words)
    other = by_hand.fedavg(fed, module, seed=1, **words)
    assert trees.distance(one, other) > 1e-4


def test_the_mean_by_hand(by_hand) -> None:
    """(1 * 1 + 3 * 5) / 4 = 4."""
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}]
    assert by_hand.average(models, [1, 3])["w"].tolist() == [4.0]


def test_it_runs_as_it_stands(by_hand, capsys) -> None:
    by_hand.main(["--rounds", "2"])
    printed = capsys.readouterr().out
    match = re.fullmatch(r"20 clients: mean accuracy (0\.\d{4}), worst (0\.\d{4})\n", printed)
    assert match, printed
    mean = float(match[1])
    worst = float(match[2])
    # a fifth is twice what guessing one digit in ten gets
    assert mean > 0.2
    assert worst <= mean


def test_it_stays_plain_and_short() -> None:
    """No engine, method or part of ours does its work, and it fits on a page or two."""
    ours = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("fedgrove")
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "fedgrove":
                ours.update(f"fedgrove.{alias.name}" for alias in node.names)
            elif module.startswith("fedgrove"):
                ours.add(module)
    assert ours == {"fedgrove.data", "fedgrove.nets", "fedgrove.seeds"}
    assert len(FILE.read_text().splitlines()) < 125


# ---- methods of one's own ------------------------------------------------------------------------

OWN = {"fedgen": "FedGen"}


@pytest.fixture(params=OWN)
def own_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A method from a user's file of under 120 lines."""
    path = EXAMPLES / f"{request.param}.py"
    assert len(path.read_text().splitlines()) < 120
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return getattr(importlib.import_module(request.param), OWN[request.param])()


@pytest.mark.parametrize("net", ["mlp", "har-cnn"])
def test_a_users_method_is_the_same_on_every_engine(
    own_method: Any, net: str, tmp_path: Path
) -> None:
    states = {}
    scores = {}
    for engine in (Serial(), Pool(workers=2), Batched(), Wired()):
        run = make_run(own_method, tmp_path / engine.name, net=net)
        state = play(run, engine)
        states[engine.name] = tensors(state)
        answered = reports(run, engine, plan_scoring(run, state))
        scores[engine.name] = [dict(report.metrics) for report in answered]
        engine.close()
    serial = states.pop("serial")
    assert trees.identical(states["pool"], serial)
    assert trees.identical(states["wired"], serial)
    assert trees.distance(states["batched"], serial) < 1e-9
    assert len(scores["serial"]) == 4
    assert scores["pool"] == scores["wired"] == scores["serial"]
    for stacked, alone in zip(scores["batched"], scores["serial"], strict=True):
        assert stacked == pytest.approx(alone, abs=1e-9)


@pytest.fixture
def fedgen(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("fedgen")


def test_fedgen_trains_clients_on_what_is_generated(fedgen: ModuleType, tmp_path: Path) -> None:
    """From the second round on: the first generator was not trained."""
    models = {}
    for name, method in {"without": fedgen.FedGen(weight=0.0), "with": fedgen.FedGen()}.items():
        for rounds in (1, 2):
            run = make_run(method, tmp_path / f"{name}-{rounds}", rounds=rounds)
            models[name, rounds] = play(run, Serial()).model
    assert trees.identical(models["without", 1], models["with", 1])
    assert trees.distance(models["without", 2], models["with", 2]) > 1e-3


def test_a_term_of_fedgen_by_hand(fedgen: ModuleType) -> None:
    """A head of zeros says both classes alike: ln 2, times the weight; nothing in round 0."""
    net = Net(torch.nn.Linear(3, 2), (3,))
    params = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    out = net(params, torch.zeros(1, 3), train=True)
    made = {"features": torch.ones(4, 3), "y": torch.tensor([0, 1, 1, 0])}
    for number, expected in ((0.0, 0.0), (1.0, 0.5 * math.log(2))):
        carry = {"generated": made, "settings": {"round": torch.tensor(number)}}
        loss, _ = fedgen.Generated(0.5)(out, params, None, carry)
        assert float(loss) == pytest.approx(expected)


def test_fedgen_refuses_what_is_not_classes(fedgen: ModuleType) -> None:
    with pytest.raises(
        InputError, match=r"has CrossEntropy, which is for classes, and .* are numbers"
    ):
        fedgrove.run(fedgen.FedGen(), data="rooms", clients=3, rounds=1, progress=False)


def test_fedgen_trains_its_generator_on_the_server(fedgen: ModuleType) -> None:
    result = fedgrove.run(fedgen.FedGen(), data="digits", rounds=3, progress=False, engine="serial")
    lengths = [line["figures"]["generator_length"] for line in result.folder.metrics()]
    assert len(set(lengths)) == 3
    assert result.summary["figures"]["generator_length"] == lengths[-1]
