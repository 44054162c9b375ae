"""What AdFedWCP's server does with the reports of a round, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run

from fedgrove.core import Packet, Report
from fedgrove.methods import AdFedWCP
from fedgrove.methods.adfedwcp.centroids import Adaptive
from fedgrove.methods.adfedwcp.method import State

METHOD = AdFedWCP(allocation=Adaptive(k_min=2, k_max=10))
# Two layers of 10 and 20 weights, 4 biases. Client 0 has the fewest examples, client 1 the most, and no
# bandwidth limits them.
BEFORE = State(
    round=1,
    rounds=2,
    model={"a.weight": torch.zeros(2)},
    layers=("a", "b"),
    weights=("a.weight", "b.weight"),
    sizes=(10, 20),
    size=34,
    devices={0: (100, 100.0, 1.0, 1 << 30), 1: (300, 100.0, 1.0, 1 << 30)},
    fewest=100,
    most=300,
    omegas={0: (0.5, 0.5), 1: (0.25, 0.75)},
    weighed=True,
    accuracy=0.4,
)


def report(client: int, examples: int, value: float, accuracy: float) -> Report:
    model = {"a.weight": torch.full((2,), value)}
    metrics = {"layer0": 0.1 + client / 10, "layer1": 0.9 - client / 10, "accuracy": accuracy}
    return Report(client, {"model": Packet(model)}, examples, metrics)


REPORTS = [report(0, 100, 1.0, 0.5), report(1, 300, 5.0, 0.7)]


def test_the_centroids_of_each_layer_and_client_by_hand() -> None:
    """alpha = 8 / 200. k_data: client 0 2, 2; client 1 2 + .04 * .25 * 200 = 4 and 2 + 6 = 8.

    gamma = 1.5: 3, 3, 6, and 12, of which k_max leaves 10. If the accuracy fell by .2, eta is 1.3:
    ceil(3.9) = 4, 4 and ceil(7.8) = 8, 10.
    """
    assert METHOD.centroids(BEFORE, 0) == [3, 3]
    assert METHOD.centroids(BEFORE, 1) == [6, 10]
    fallen = replace(BEFORE, change=-0.2)
    assert METHOD.centroids(fallen, 0) == [4, 4]
    assert METHOD.centroids(fallen, 1) == [8, 10]
    begun = replace(BEFORE, round=0)
    assert METHOD.centroids(begun, 1) == [4, 8]


def test_a_round_by_hand() -> None:
    """The shared model is (100 * 1 + 300 * 5) / 400 = 4; the accuracy rises from .4 to .6."""
    after = METHOD.fold(BEFORE, REPORTS)
    assert after.round == 2
    assert after.model["a.weight"].tolist() == [4, 4]
    assert after.accuracy == pytest.approx(0.6)
    assert after.change == pytest.approx(0.2)
    assert after.omegas == {0: (0.1, 0.9), 1: (0.2, 0.8)}
    # Who does not report keeps the importances that are known.
    assert METHOD.fold(BEFORE, REPORTS[:1]).omegas == {0: (0.1, 0.9), 1: (0.25, 0.75)}


def test_what_the_paper_counts_of_a_round_by_hand() -> None:
    """By the centroids that the clients had, not by those of the round to come.

    Client 0 with 3, 3: 32 * 3 + 2 * 10 + 32 * 3 + 2 * 20 = 252 bits; client 1 with 6, 10:
    32 * 6 + 3 * 10 + 32 * 10 + 4 * 20 = 622; each and 32 * 4 of biases. Dense: 32 * 34.
    """
    after = METHOD.fold(BEFORE, REPORTS)
    expected = (252 + 622) / 2 + 128
    assert METHOD.server_metrics(after) == {
        "centroids": (3 + 3 + 6 + 10) / 4,
        "uplink_counted": pytest.approx(expected / 1088),
    }


def test_what_the_server_knows_at_first(tmp_path: Path) -> None:
    run = make_run(METHOD, tmp_path, sizes=(20, 13, 24, 17))
    state = METHOD.init(run.setup)
    assert (state.fewest, state.most, state.round, state.rounds) == (13, 24, 0, 3)
    assert state.omegas == dict.fromkeys(range(4), (1 / 3, 1 / 3, 1 / 3))
    assert state.sizes == (64 * 12, 64 * 64, 3 * 64)
    assert state.size == 5187
    assert (state.accuracy, state.change, state.weighed) == (None, 0.0, False)
