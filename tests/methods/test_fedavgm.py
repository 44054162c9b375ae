"""FedAvgM: two rounds against plain torch, and its server in other methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD

from fedgrove import trees
from fedgrove.core import AnyMethod
from fedgrove.engines import Serial
from fedgrove.methods import (
    STC,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedPAQ,
    FedPer,
    FedProx,
    LGFedAvg,
    QFedCG,
    Scaffold,
)
from fedgrove.parts.server import ServerAdam, ServerSGD

CONTRACT = Contract(
    off=FedAvgM(server=ServerSGD()),
)


@pytest.mark.parametrize("step", [1.0, 0.5])
def test_two_rounds_equal_plain_torch(step: float, tmp_path: Path) -> None:
    method = FedAvgM(local=PLAIN_SGD, server=ServerSGD(step, 0.9))
    run, state = plain_torch.play_two_rounds(method, tmp_path)
    x = plain_torch.initial()
    velocity = {name: torch.zeros_like(value) for name, value in x.items()}
    for number in range(2):
        mean = plain_torch.mean([plain_torch.train(x, i, number) for i in range(2)])
        for name in x:
            velocity[name] = 0.9 * velocity[name] + (x[name] - mean[name])
            x[name] = x[name] - step * velocity[name]
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(x, state.model) < 1e-12


WITH_A_SERVER: list[AnyMethod] = [
    FedAvg(),
    FedProx(),
    FedPAQ(),
    QFedCG(),
    FedBN(),
    FedPer(),
    FedBABU(),
    LGFedAvg(),
    Scaffold(),
    STC(up=1.0, ternary=False),
    STC(down=1.0, ternary=False),
    STC(up=0.5, down=0.5),
]


@pytest.mark.parametrize("method", WITH_A_SERVER, ids=str)
def test_a_server_moves_every_model_by_its_share(method: AnyMethod, tmp_path: Path) -> None:
    """In one round half a step goes half as far; running statistics are averaged."""

    def model_after(made: AnyMethod, folder: str) -> trees.Tree:
        run = make_run(made, tmp_path / folder, net="bn-cnn2", rounds=1)
        state = play(run, Serial())
        model: trees.Tree = dict(run.params)
        if isinstance(made, STC):
            return model | state.published.models[0] | state.statistics
        return model | state.model

    with_server = replace(method, server=ServerSGD(0.5))  # type: ignore[type-var]
    run = make_run(method, tmp_path / "start", net="bn-cnn2")
    whole = model_after(method, "whole")
    half = model_after(with_server, "half")
    moved = 0.0
    for name, start in run.params.items():
        share = 1.0 if name in run.net.layout.buffers else 0.5
        expected = start + share * (whole[name] - start)
        if not isinstance(method, STC) or method.codes_down.is_off:
            assert (half[name] - expected).abs().max() < 1e-12, name
        moved = max(moved, float((half[name] - start).abs().max()))
    assert moved > 0


def test_what_the_server_remembers_covers_what_is_shared(tmp_path: Path) -> None:
    method = FedPer(server=ServerAdam())
    run = make_run(method, tmp_path, net="bn-cnn2")
    state = run.method.init(run.setup)
    shared = set(run.net.layout.params) - set(run.net.layout.head)
    assert set(state.server["m"]) == set(state.server["v"]) == shared
