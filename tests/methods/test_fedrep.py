"""FedRep: head, then body, each alone; two rounds against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run
from tests.contract import Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD

from fedgrove.core import Train
from fedgrove.engines.work import make_carry
from fedgrove.errors import InputError
from fedgrove.methods import FedRep
from fedgrove.parts import local
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    off=FedRep(head=0),
    # All but the last layer's 195.
    paper_bytes=8 * (5187 - 195) * 3 * 50,
    small={"head_epochs": 1},
)


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_head_and_body_are_trained_in_turn(net: str, tmp_path: Path) -> None:
    """Running statistics of the body stay with it."""
    run = make_run(FedRep(head_epochs=2, local=PLAIN_SGD), tmp_path, net=net)
    (task, *_) = plan(run, run.initial_state)
    client = run.client(task, {})
    carry = make_carry(task, {}, torch.float64)
    head = set(run.net.layout.last(1))
    epochs = []
    moved = []
    for stage in run.work("train"):
        if isinstance(stage, Train):
            before = carry[stage.start]
            carry = local.train(run.net, stage, carry, local.epochs(run.net, stage, client, 0))
            after = carry[stage.end]
            moved.append({name for name in after if not torch.equal(before[name], after[name])})
            assert stage.local is not None
            epochs.append(stage.local.epochs)
        elif hasattr(stage, "f") and not hasattr(stage, "expected"):
            carry = stage.f(carry, client)  # type: ignore[union-attr, arg-type, assignment, call-arg]
    assert moved == [head, set(run.params) - head]
    assert epochs == [2, 2]


def plain_fedrep(
    head: tuple[str, ...], head_epochs: int
) -> tuple[plain_torch.Weights, list[plain_torch.Weights]]:
    """Alg. 1 with both clients in both rounds: the body and the heads."""
    model = plain_torch.initial()
    heads = [{name: model[name] for name in head} for _ in range(2)]
    body = {name: value for name, value in model.items() if name not in head}
    for number in range(2):
        trained = []
        for i in range(2):
            whole = {**body, **heads[i]}
            stage = 0
            if head_epochs:
                whole = plain_torch.train(whole, i, number, only=head, epochs=head_epochs)
                stage = 1
            whole = plain_torch.train(whole, i, number, only=tuple(body), stage=stage)
            heads[i] = {name: whole[name] for name in head}
            trained.append({name: whole[name] for name in body})
        body = plain_torch.mean(trained)
    return body, heads


@pytest.mark.parametrize("head_epochs", [0, 3])
def test_two_rounds_equal_plain_torch(head_epochs: int, tmp_path: Path) -> None:
    method = FedRep(head_epochs=head_epochs, local=PLAIN_SGD)
    run, state = plain_torch.play_two_rounds(method, tmp_path)
    body, heads = plain_fedrep(run.net.layout.head, head_epochs)
    assert plain_torch.far(run.params, state.model) > 1e-2
    assert plain_torch.far(body, state.model) < 1e-12
    for i in range(2):
        assert plain_torch.far(heads[i], run.memory.read(i, run.memory.files[i])["kept"]) < 1e-12


def test_wrong_epochs_are_refused() -> None:
    with pytest.raises(InputError, match=r"head_epochs is -1; it must be 0 or more epochs."):
        FedRep(head_epochs=-1)
    with pytest.raises(InputError, match=r"head is -1; it must be 0 or more layers."):
        FedRep(head=-1)
