"""FedDyn: by hand, two rounds against plain torch, and sums that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import WHOLE, Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD, SHARES

from fedgrove import trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import FedDyn
from fedgrove.methods.feddyn import State, next_gradient

CONTRACT = Contract(
    off=FedDyn(alpha=0.0),
    paper_bytes=WHOLE,
)


def tree(*numbers: float) -> trees.Tree:
    return {"w": torch.tensor(numbers)}


def test_a_clients_gradient_by_hand() -> None:
    """1 - .5 · (2 - 4) = 2."""
    assert next_gradient(tree(1.0), tree(2.0), tree(4.0), 0.5)["w"].tolist() == [2.0]


def test_the_server_by_hand() -> None:
    """Models 4 and 8 of one and three examples: 7, an update of 5 from 2. They have 4 of 8 examples:
    s = 1 + 4/8 · 5 = 3.5, and the model is 7 + 3.5."""
    before = State(3, tree(2.0), tree(1.0), 8)
    reports = [
        Report(0, {"model": Packet(tree(4.0))}, 1),
        Report(1, {"model": Packet(tree(8.0))}, 3),
    ]
    after = FedDyn().fold(before, reports)
    assert (after.round, after.examples) == (4, 8)
    assert after.sum["w"].tolist() == [3.5]
    assert after.model["w"].tolist() == [10.5]


def test_two_rounds_equal_plain_torch(tmp_path: Path) -> None:
    alpha = 0.2
    run, state = plain_torch.play_two_rounds(FedDyn(alpha, local=PLAIN_SGD), tmp_path)
    w = plain_torch.initial()
    h = {name: torch.zeros_like(value) for name, value in w.items()}
    own = [dict(h), dict(h)]
    for number in range(2):
        trained = []
        for i in range(2):

            def penalty(
                name: str, v: torch.Tensor, w: trees.Tree = w, g: trees.Tree = own[i]
            ) -> torch.Tensor:
                return alpha * (v - w[name]) - g[name]

            found = plain_torch.train(w, i, number, more=penalty)
            own[i] = {name: own[i][name] - alpha * (found[name] - w[name]) for name in w}
            trained.append(found)
        for name in h:
            for i in range(2):
                h[name] = h[name] - alpha * SHARES[i] * (trained[i][name] - w[name])
        mean = plain_torch.mean(trained)
        w = {name: mean[name] - h[name] / alpha for name in mean}
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(w, state.model) < 1e-12


def test_the_sum_is_the_weighted_mean_of_what_clients_keep(tmp_path: Path) -> None:
    """Three of four clients in a round; g_k = -alpha times the sum of a client's updates."""
    run = make_run(FedDyn(0.5, local=PLAIN_SGD), tmp_path, rounds=5)
    state = play(run, Serial())
    expected = {name: torch.zeros_like(value) for name, value in state.sum.items()}
    for client, version in run.memory.files.items():
        own = run.memory.read(client, version)["own_gradient"]
        for name, value in own.items():
            expected[name] -= run.setup.clients[client].examples / 74 * value / 0.5
    assert trees.sq_norm(state.sum) > 0
    assert trees.distance(state.sum, expected) < 1e-12


def test_running_statistics_are_averaged(tmp_path: Path) -> None:
    run = make_run(FedDyn(local=PLAIN_SGD), tmp_path, net="bn-cnn2", rounds=2)
    state = play(run, Serial())
    assert set(state.sum) == set(run.net.layout.params)
    for name in run.net.layout.buffers:
        if name.endswith("running_var"):
            assert bool((state.model[name] > 0).all())


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(InputError, match=r"^alpha is -1; it must be 0 or more\.$"):
        FedDyn(-1)
