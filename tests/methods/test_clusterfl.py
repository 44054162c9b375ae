"""ClusterFL: the spectral tie worked by hand, and nothing but local training without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run, play, remembered
from tests.contract import WHOLE, Contract

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.methods import ClusterFL
from fedgrove.methods.clusterfl import (
    Clustered,
    State,
    cluster_labels,
    group_average,
    leading_eigenvectors,
    shares,
)
from fedgrove.parts.robust import ClippedMean, Median
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    alone=ClusterFL(tie=Clustered(0.0, 0.0, 0.0)),
    why_no_liar_spoils_it="its eigenvectors set a liar apart",
    has_a_place_for_each_client=True,
    paper_bytes=WHOLE,
)

F64 = torch.float64
A = torch.tensor([1.0, 0.5, 0.0], dtype=F64)
B = torch.tensor([0.5, 1.0, 0.0], dtype=F64)
IDEAL = torch.stack([A, B, A, B])
"""Two clusters of models of one length, not at right angles.

F is (1, 1, 1, 1)/2 and (1, -1, 1, -1)/2.
"""


def test_the_ideal_case_gives_the_cluster_means() -> None:
    """F F^T = 1/2 for two clients of one cluster, 0 across: u is the cluster's mean."""
    wanted = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]] * 2, dtype=F64) / 2
    assert (shares(IDEAL, 2) - wanted).abs().max() < 1e-12
    assert (shares(IDEAL, 2) @ IDEAL - IDEAL).abs().max() < 1e-12
    assert cluster_labels(IDEAL, 2) == [0, 1, 0, 1]


def test_unequal_clusters_nearly_ideal() -> None:
    """Three clients of A's kind, two of B's, with noise: u is nearer the mean than any model is."""
    g = torch.Generator().manual_seed(0)
    kinds = torch.randn(2, 400, generator=g, dtype=F64)
    rows = kinds[[0, 0, 1, 0, 1]] + 0.1 * torch.randn(5, 400, generator=g, dtype=F64)
    assert cluster_labels(rows, 2) == [0, 0, 1, 0, 1]
    u = shares(rows, 2) @ rows
    means = torch.stack([rows[[0, 1, 3]].mean(0), rows[[2, 4]].mean(0)])
    for k, kind in enumerate((0, 0, 1, 0, 1)):
        assert (u[k] - means[kind]).norm() < 0.25 * (rows[k] - means[kind]).norm()


def test_leading_are_orthonormal_in_order_and_span_all_clients_at_most() -> None:
    rows = torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=F64))
    wanted = torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=F64)
    assert (leading_eigenvectors(rows, 2).abs() - wanted).abs().max() < 1e-12
    assert leading_eigenvectors(rows, 9).shape == (3, 3)
    assert (shares(rows, 9) - torch.eye(3, dtype=F64)).abs().max() < 1e-12


@given(st.integers(0, 2**31))
def test_directions_that_are_only_rounding_decide_nothing(seed: int) -> None:
    """Five clients at the start and one that has trained: two groups, whatever the rounding."""
    noise = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed), dtype=F64)
    start = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=F64)
    rows = start.repeat(6, 1)
    assert cluster_labels(rows + 1e-14 * noise, 3) == [0] * 6
    rows[2] += 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=F64)
    assert cluster_labels(rows + 1e-14 * noise, 3) == [0, 0, 1, 0, 0, 0]
    # Two models span all there is.
    assert (shares(rows, 3) @ rows - rows).abs().max() < 1e-9


def test_the_server_sends_each_client_its_share(tmp_path: Path) -> None:
    run = make_run(methods.ClusterFL(clusters=2), tmp_path, cohort=4)
    state = run.method.init(run.setup)
    first = state.rows[0]
    (task, *_) = plan(run, state)
    # All rows are equal: the mean is the start.
    assert trees.distance(task.send["model"].values, run.params) < 1e-12
    way = torch.randn(len(first), generator=torch.Generator().manual_seed(1), dtype=F64)
    rows = torch.stack([first + way, first - way, first + way, first - way])
    for k, task in enumerate(plan(run, replace(state, rows=rows))):
        assert (trees.flatten(task.send["model"].values) - rows[k]).abs().max() < 1e-9


def test_a_rule_averages_the_clients_group_by_hand() -> None:
    """Group 0 holds 1, 2 and 90, group 1 holds 7: the median of the first is 2, of the other 7.

    Clipped around client 0's own 1, the updates 0, 1 and 89 have the median 1: (1 + 2 + 2)/3.
    """
    rows = torch.tensor([[1.0], [2.0], [7.0], [90.0]], dtype=F64)
    start = {"w": torch.zeros(1, dtype=F64)}
    state = State(0, (0, 1, 2, 3), start, rows, {0: 0, 1: 0, 2: 1, 3: 0})
    assert [group_average(state, k, Median())["w"].item() for k in range(4)] == [2, 2, 7, 2]
    clipped = group_average(state, 0, ClippedMean())["w"].item()
    assert abs(clipped - 5 / 3) < 1e-12


def without_tree_names(memories: trees.Tree) -> trees.Tree:
    """The leaves by client and name: the two methods keep their models under different names."""
    leaves = {}
    for path, leaf in memories.items():
        client, _, name = path.split("/")
        leaves[client + name] = leaf
    return leaves


def test_without_its_tie_it_is_local_training(tmp_path: Path) -> None:
    alone = make_run(methods.Local(), tmp_path / "alone", dtype=torch.float32)
    tied = make_run(
        methods.ClusterFL(tie=Clustered(0.0, 0.0, 0.0)), tmp_path / "tied", dtype=torch.float32
    )
    play(alone, Serial())
    state = play(tied, Serial())
    mine = without_tree_names(remembered(tied))
    theirs = without_tree_names(remembered(alone))
    assert mine
    assert trees.identical(mine, theirs)
    # The server's row is the client's model.
    trained = {int(k.split("/")[0]) for k in remembered(tied)}
    for k in trained:
        assert torch.equal(
            state.rows[k], torch.cat([mine[f"{k}{name}"].view(-1) for name in tied.params])
        )


def test_the_tie_draws_models_together(tmp_path: Path) -> None:
    """One cluster and a strong tie: the clients' models end nearer to one another than without."""
    spread = {}
    for beta in (0.0, 0.5):
        method = methods.ClusterFL(clusters=1, tie=Clustered(0.5, beta, 0.0))
        rows = play(make_run(method, tmp_path / str(beta), cohort=4), Serial()).rows
        cosine = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2)
        spread[beta] = float(1 - cosine.mean())
    assert spread[0.5] < 0.5 * spread[0.0]
