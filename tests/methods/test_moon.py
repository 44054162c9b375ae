"""MOON: what a client trained last is what its features are held against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered
from tests.contract import Contract
from tests.methods.exchanges import exchanges
from torch import nn

from fedgrove import data, trees
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import MOON, FedAvg
from fedgrove.methods.moon import ModelContrast
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import build

CONTRACT = Contract(
    off=MOON(contrast=ModelContrast(mu=0.0)),
)


def test_a_client_keeps_what_it_sent(tmp_path: Path) -> None:
    run = make_run(MOON(), tmp_path, rounds=1, cohort=4)
    ((_, _, answers, _),) = exchanges(run)
    kept = remembered(run)
    for report in answers:
        for name, value in report.give["model"].values.items():
            assert torch.equal(kept[f"{report.of}/previous/{name}"], value)


def test_the_first_round_is_fedavgs_and_the_second_is_not(tmp_path: Path) -> None:
    """Before a client has trained, its last model is the one it got: the term is constant."""
    for rounds, is_same in ((1, True), (2, False)):
        states = []
        for method in (FedAvg(), MOON()):
            name = f"{type(method).__name__}{rounds}"
            states.append(play(make_run(method, tmp_path / name, rounds=rounds), Serial()))
        assert (trees.distance(states[0].model, states[1].model) < 1e-9) == is_same


def test_a_net_without_features_is_refused(tmp_path: Path) -> None:
    federation = data.load("digits", clients=3)
    net = nn.Sequential(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(InputError, match="moon cannot be used with net Sequential: its features"):
        build(MOON(), federation, Memory(tmp_path), net=net)
