"""FedBABU: the head stays random and at home until a client tunes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove import trees
from fedgrove.core import Task, Train
from fedgrove.engines import Serial
from fedgrove.engines.work import make_carry
from fedgrove.errors import InputError
from fedgrove.methods import FedBABU
from fedgrove.parts import local
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run

CONTRACT = Contract(
    off=FedBABU(head=0),
    # All but the last layer's 195.
    paper_bytes=8 * (5187 - 195) * 3 * 50,
)


def test_only_the_body_travels(tmp_path: Path) -> None:
    run = make_run(FedBABU(), tmp_path, rounds=2)
    head = set(run.net.layout.last(1))
    for _, tasks, answers, _ in exchanges(run):
        for message in [*(task.send for task in tasks), *(report.give for report in answers)]:
            assert set(message["model"].values) == set(run.params) - head


def used(run: Run, task: Task) -> trees.Tree:
    """The model that a client uses, after the stages of "use"."""
    client = run.client(task, {})
    carry = make_carry(task, {}, torch.float64)
    for number, stage in enumerate(run.work("use")):
        if isinstance(stage, Train):
            assert number == 1
            carry = local.train(run.net, stage, carry, local.epochs(run.net, stage, client, 0))
        else:
            carry = stage.f(carry, client)  # type: ignore[union-attr, arg-type, assignment]
    return carry["model"]


@pytest.mark.parametrize("tune", [0, 2])
def test_to_use_it_the_head_alone_is_tuned(tune: int, tmp_path: Path) -> None:
    run = make_run(FedBABU(tune=tune), tmp_path, rounds=1)
    state = play(run, Serial())
    head = run.net.layout.last(1)
    task = plan_scoring(run, state)[0]
    model = used(run, task)
    assert trees.identical(trees.pick(model, state.model), state.model)
    for name in head:
        assert torch.equal(model[name], run.params[name]) == (tune == 0)


def test_a_head_that_leaves_no_body_is_refused(tmp_path: Path) -> None:
    run = make_run(FedBABU(head=3), tmp_path)
    with pytest.raises(InputError, match="the last 3 layers are the head, and it has 3"):
        run.method.init(run.setup)
    with pytest.raises(InputError, match=r"head is -1; it must be 0 or more layers."):
        FedBABU(head=-1)
    with pytest.raises(InputError, match=r"tune is -1; it must be 0 or more epochs."):
        FedBABU(tune=-1)
