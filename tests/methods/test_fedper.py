"""FedPer: the body travels, the head stays; two rounds against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import make_run
from tests.contract import Contract
from tests.methods import plain_torch
from tests.methods.exchanges import exchanges
from tests.methods.plain_torch import PLAIN_SGD

from fedgrove.errors import InputError
from fedgrove.methods import FedPer

CONTRACT = Contract(
    off=FedPer(head=0),
    # All but the last layer's 195.
    paper_bytes=8 * (5187 - 195) * 3 * 50,
)


@pytest.mark.parametrize("head", [1, 2])
def test_the_body_travels_and_the_head_stays(head: int, tmp_path: Path) -> None:
    run = make_run(FedPer(head), tmp_path, rounds=2)
    kept = set(run.net.layout.last(head))
    for _, tasks, answers, _ in exchanges(run):
        for message in [*(task.send for task in tasks), *(report.give for report in answers)]:
            assert set(message["model"].values) == set(run.params) - kept
    for client, version in run.memory.files.items():
        assert set(run.memory.read(client, version)["kept"]) == kept


def test_two_rounds_equal_plain_torch(tmp_path: Path) -> None:
    run, state = plain_torch.play_two_rounds(FedPer(local=PLAIN_SGD), tmp_path)
    model = plain_torch.initial()
    head = run.net.layout.head
    heads = [{name: model[name] for name in head} for _ in range(2)]
    body = {name: value for name, value in model.items() if name not in head}
    for number in range(2):
        trained = []
        for i in range(2):
            found = plain_torch.train({**body, **heads[i]}, i, number)
            heads[i] = {name: found[name] for name in head}
            trained.append({name: found[name] for name in body})
        body = plain_torch.mean(trained)
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(body, state.model) < 1e-12
    for i in range(2):
        assert plain_torch.far(heads[i], run.memory.read(i, run.memory.files[i])["kept"]) < 1e-12


def test_a_head_that_leaves_no_body_is_refused(tmp_path: Path) -> None:
    run = make_run(FedPer(head=3), tmp_path)
    with pytest.raises(InputError, match="the last 3 layers are the head, and it has 3"):
        run.method.init(run.setup)
    with pytest.raises(InputError, match=r"head is -1; it must be 0 or more layers."):
        FedPer(head=-1)
