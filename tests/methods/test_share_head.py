"""SAFL and Hermes with the last layer at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import play
from tests.methods.exchanges import exchanges
from tests.methods.test_safl import SHORT, START, run_of, safl
from torch import nn

from fedgrove.channels.submodel import restore_submodel
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import Hermes
from fedgrove.nets import Net
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run


@pytest.mark.parametrize(
    "method", [safl(share_head=False), Hermes(**SHORT, share_head=False)], ids=["safl", "hermes"]
)
def test_a_head_that_is_not_shared_stays_at_home(method: Any, tmp_path: Path) -> None:
    run = run_of(method, tmp_path / "a")
    head, seen = set(run.net.layout.head), 0
    for before, tasks, answers, after in exchanges(run):
        if before.round >= len(method.schedule):
            packets = [p for t in tasks for p in t.send.values()] + [
                a.give["model"] for a in answers
            ]
            assert packets
            assert not any(head & {*p.values, *(p.mask or {})} for p in packets)
            seen += 1
        assert not head & after.model.keys()
    assert seen == 2
    assert len(_used_heads(run, after)) == len(run.infos)
    for task in plan_scoring(run, after):
        kept = run.memory.read(task.to, run.memory.files[task.to])["personal"]["head.bias"]
        assert tuple(kept.tolist()) in _used_heads(
            run, after
        )  # as it was left after its last training
    shared = run_of(replace(method, share_head=True), tmp_path / "b")
    assert len(_used_heads(shared, play(shared, Serial()))) == 1
    bare = Net(
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1), nn.Flatten()),
        (1, 3),
    )
    with pytest.raises(InputError, match=r"share_head is False; .* no last linear layer"):
        method.init(replace(START, net=bare, params=bare.params(), rounds=9))


def _used_heads(run: Run, state: Any) -> set[tuple[float, ...]]:
    """The last biases that clients use."""
    found = set()
    for task in plan_scoring(run, state):
        memory = run.memory.read(task.to, run.memory.files[task.to])
        carry = restore_submodel(
            {**memory, "model": task.send["model"].values}, run.client(task, {})
        )
        found.add(tuple(carry["model"]["head.bias"].tolist()))
    return found
