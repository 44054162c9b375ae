"""FedDrop: channels drawn anew for every round and client, from nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import make_run
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.submodel import read_packet_channels
from fedgrove.methods import FedDrop
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    small={"widths": (0.75, 0.5)},
    off=FedDrop(widths=(1.0,)),
    one_group=FedDrop(widths=(1.0,)),
    sends_masks=True,
    has_a_place_for_each_client=True,
    # As HeteroFL.
    paper_bytes=8 * (3123 + 1571) / 2 * 3 * 50,
)


def test_draws_depend_on_round_and_client_alone(tmp_path: Path) -> None:
    run = make_run(FedDrop(widths=(0.5,)), tmp_path, rounds=2, cohort=4)
    draws = {}
    for state, tasks, _, _ in exchanges(run):
        assert all(
            trees.equal(a.send["model"].mask or {}, b.send["model"].mask or {})
            for a, b in zip(tasks, plan(run, state), strict=True)
        )
        draws |= {
            (state.round, t.to): read_packet_channels(t.send["model"], find_groups(run.net))
            for t in tasks
        }
    assert all(
        {g: int(c.sum()) for g, c in d.items()} == {"fc1": 32, "fc2": 32} for d in draws.values()
    )
    assert len({tuple(d["fc1"].tolist()) for d in draws.values()}) == 8
    other = make_run(FedDrop(widths=(0.5,), draw=1), tmp_path / "other", cohort=4)
    first = read_packet_channels(
        plan(other, other.method.init(other.setup))[0].send["model"], find_groups(run.net)
    )
    assert not trees.equal(first, draws[0, 0])
