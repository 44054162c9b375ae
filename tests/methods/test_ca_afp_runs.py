"""CA-AFP on every engine, from any checkpoint, and in bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import play, remembered, tensors
from tests.methods.exchanges import exchanges, tiny, verbs

import fedgrove
from fedgrove import methods, nets, trees
from fedgrove.config.cost import estimate_cost
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.methods import CAAFP
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.memory import Memory
from fedgrove.wire.known_state import KnownState

# ---- engines and checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", pytest.param("har-cnn", marks=pytest.mark.slow)])
def test_batched_is_serial_is_pool_with_churn_steps(net: str, tmp_path: Path) -> None:
    """One client has more examples than a Measure's batch of 256: it sums two gradients."""
    words = {
        "phases": (1, 1, 3),
        "start": 0.6,
        "churn": 0.1,
        "net": net,
        "sizes": (270, 13, 24, 17, 9),
    }
    ends = []
    for engine in (Serial(), Batched(), Pool(workers=2)):
        run = tiny(tmp_path / engine.name, **words)
        state = play(run, engine)
        ends.append((state, remembered(run)))
        engine.close()
    serial, memory = ends[0]
    assert set(serial.groups.values()) == {0, 1}
    for other, other_memory in ends[1:]:
        assert other.groups == serial.groups
        assert all(trees.identical(other.masks[g], serial.masks[g]) for g in serial.masks)
        assert trees.distance(tensors(other), tensors(serial)) < 1e-9
        assert trees.distance(other_memory, memory) < 1e-9


def test_a_run_resumed_in_any_phase_ends_the_same(tmp_path: Path) -> None:
    """Frozen after every exchange: in all phases, after the clustering, around every step."""
    run = tiny(tmp_path / "whole", phases=(1, 2, 3), every=2, start=0.6)
    points = []
    stages = []
    for before, tasks, _, after in exchanges(run):
        kept: trees.Tree = {}
        frozen = state_to_json(after, kept)
        files = {k: run.memory.read(k, name) for k, name in run.memory.files.items()}
        points.append((frozen, {k: v.clone() for k, v in kept.items()}, files))
        stages.append((before.round, *verbs(tasks)))
        end = after
    assert len(points) == 7
    for i, (frozen, kept, files) in enumerate(points[:-1]):
        memory = Memory(tmp_path / f"from{i}")
        memory.folder.mkdir(exist_ok=True)
        for k, forest in files.items():
            memory.accept(k, memory.write(k, 0, "train", forest))
        again = replace(run, memory=memory, known_state=KnownState())
        state = state_from_json(frozen, kept, run.method.init(run.setup))
        rest = list(exchanges(again, state=state))
        assert [(before.round, *verbs(tasks)) for before, tasks, *_ in rest] == stages[i + 1 :]
        last = rest[-1][-1]
        assert trees.identical(tensors(last), tensors(end))
        assert (last.groups, last.round) == (end.groups, end.round)


# ---- bytes ---------------------------------------------------------------------------------------

WISDM = ((3, 200), 36)
UCI = ((9, 128), 30)
"""The shape of an input, and how many clients; 10 of them take part in each of 50 rounds."""
TABLE = {
    "fully pruned": (CAAFP(phases=(0, 0, 50)), 176.2, 122.6),
    "phased": (CAAFP(phases=(15, 15, 20)), 375.2, 265.6),
    "one group": (methods.GlobalFT(phases=(0, 0, 50)), 176.2, 122.6),
    "fedchar": (methods.FedCHAR(), 483.3, 347.3),
    "clusterfl": (methods.ClusterFL(), 473.8, 340.5),
    "fedsnip": (methods.FedSNIP(), 142.1, 102.1),
    "efficientfl": (methods.EfficientFL(), 142.1, 102.1),
}


@pytest.mark.parametrize("name", TABLE)
def test_mebibytes_are_those_of_the_papers_table(name: str) -> None:
    """Eq. 13, e.g. (15, 15, 20) on WISDM, in units of 8 * 124,198 bytes: 30 rounds of 10, 20 of
    10 * .3, 36 once: 300 + 60 + 36 = 396 -> 375.2 MiB."""
    method, wisdm, uci = TABLE[name]
    for (shape, clients), mib in ((WISDM, wisdm), (UCI, uci)):
        net = nets.Net(nets.build("har-cnn", shape, 6, 0), shape)
        assert round(method.paper_bytes(net, clients, 10, 50) / 2**20, 1) == mib


def test_bytes_follow_the_density_of_each_round_by_hand() -> None:
    """Density .7 to .3 in 15 rounds, f = 5: .7 in rounds 1 to 4, .5 in 5 to 9, .3 from 10 on, which
    is 4 * .7 + 5 * .5 + 6 * .3 = 7.1 of a dense round of ten clients; and 30 clients once.
    """
    shape, clients = UCI
    net = nets.Net(nets.build("har-cnn", shape, 6, 0), shape)
    method = CAAFP(phases=(0, 0, 15), start=0.7, density=0.3, every=5)
    expected = 8 * net.layout.size * (10 * 7.1 + 30)
    assert method.paper_bytes(net, clients, 10, 15) == pytest.approx(expected, abs=1)


def test_cost_says_the_same_mebibytes() -> None:
    method, mib, _ = TABLE["phased"]
    shape, clients = WISDM
    words = {"net": "har-cnn", "classes": 6, "cohort": 10, "rounds": 50}
    assert estimate_cost(method, shape=shape, clients=clients, **words)["mib_paper"] == mib


def test_nominal_bytes_of_a_falling_density_by_hand(tmp_path: Path) -> None:
    """Phases (1, 1, 4), .7 -> .3, f = 1, 5 clients, cohort 4, d = 5187. R before rounds 2, 3, 4 is
    2, 1, 1, so the density is .7, .5, .3, .3: 4 * (1 + 1 + .7 + .5 + .3 + .3) + 5 = 20.2 dense
    messages, both ways."""
    run = tiny(tmp_path, phases=(1, 1, 4), start=0.7)
    assert run.method.paper_bytes(run.net, 5, 4, 6) == round(20.2 * 8 * 5187)


@pytest.mark.parametrize(
    "made",
    [CAAFP(phases=(0, 0, 2)), CAAFP(phases=(1, 0, 1)), methods.GlobalFT()],
    ids=["pruned", "warm", "one"],
)
def test_a_real_runs_nominal_bytes_are_those_of_cost(made: CAAFP, tmp_path: Path) -> None:
    words = {"clients": 5, "cohort": 3, "rounds": 2}
    real = fedgrove.run(
        made, data="digits", engine="serial", out=tmp_path / "run", evaluate=0, **words
    ).summary
    estimate = estimate_cost(made, net="mlp", shape=(1, 8, 8), classes=10, **words)
    assert real["bytes_paper"] == estimate["bytes_paper"]
    assert real["density"] == pytest.approx(0.3, abs=1e-4)


def test_evidence_is_counted_where_it_is_sent(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(0, 0, 2), dtype=torch.float32)
    counted = []
    for _, _, answers, _ in exchanges(run):
        counted.append([report.cost["up"].get("scores", 0) > 0 for report in answers])
    assert counted == [[True] * 5, [True] * 4, [False] * 4]
