"""What a client of Grove does, by hand: where it begins, how it trains, what it keeps and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, reports
from torch import Tensor

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.selection import select_first
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.methods.grove.method import Grove
from fedgrove.methods.grove.stability import HeldOutGroups
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import Proximal
from fedgrove.runs.rounds import plan
from fedgrove.runs.run import Run
from fedgrove.trees import Tree

RATE = 0.1
LOCAL = LocalTraining(2, 64, SGD(RATE))
"""Two epochs of one batch: two steps down the gradient of all that is trained on."""


def filled(tree: Tree, value: float) -> Tree:
    return {name: torch.full_like(leaf, value) for name, leaf in tree.items()}


def plus(tree: Tree, value: float) -> Tree:
    return {name: leaf + value for name, leaf in tree.items()}


def all_are(tree: Tree, value: float) -> bool:
    return all(bool((leaf == value).all()) for leaf in tree.values())


# ---- where it begins, and what it keeps ----------------------------------------------------------


def test_a_client_begins_with_the_layers_that_it_kept(tmp_path: Path) -> None:
    """Convolutions are the group's, here one above the start; norms and head are its own, here 2."""
    run = make_run(Grove(), tmp_path, net="bn-cnn2")
    client = run.client(plan(run, run.initial_state)[0], {})
    shared = trees.pick(client.start, ("conv1.weight", "conv2.weight"))
    own = {name: leaf for name, leaf in client.start.items() if name not in shared}
    assert {"head.weight", "norm1.weight", "norm1.running_mean"} <= own.keys()
    new = {"change": filled(shared, 1.0)}
    begun = run.method.client.begin(new, client)
    assert trees.identical(trees.pick(begun["model"], shared), plus(shared, 1.0))
    assert trees.identical(trees.pick(begun["model"], own), own)
    # A new client's personal model begins where its group's does.
    assert trees.identical(begun["personal"], begun["model"])
    known = {**new, "kept": filled(own, 2.0), "personal": filled(client.start, 7.0)}
    begun = run.method.client.begin(known, client)
    assert trees.identical(trees.pick(begun["model"], shared), plus(shared, 1.0))
    assert all_are(trees.pick(begun["model"], own), 2.0)
    assert all_are(begun["personal"], 7.0)


def test_statistics_of_shared_norms_come_from_the_server(tmp_path: Path) -> None:
    run = make_run(Grove(home=False), tmp_path, net="bn-cnn2")
    client = run.client(plan(run, run.initial_state)[0], {})
    weights, names = run.method.client.shared_names(client.layout)
    assert names == run.net.layout.buffers
    shared = trees.pick(client.start, weights)
    statistics = filled(trees.pick(client.start, names), 5.0)
    carry = {"change": filled(shared, 1.0), "statistics": statistics}
    begun = run.method.client.begin(carry, client)["model"]
    assert trees.identical(trees.pick(begun, weights), plus(shared, 1.0))
    assert all_are(trees.pick(begun, names), 5.0)


def test_a_client_keeps_what_it_trained(tmp_path: Path) -> None:
    """Its group's model is 1, what it trained from there 2, its personal model 5. Half of the head's
    change, of 1 everywhere, is evidence; with one group it is not sent."""
    for most, has_evidence in ((6, True), (1, False)):
        method = Grove(finding=HeldOutGroups(most=most))
        run = make_run(method, tmp_path / str(most), net="bn-cnn2")
        client = run.client(plan(run, run.initial_state)[0], {})
        carry: Any = {"model": filled(client.start, 1.0), "local": filled(client.start, 2.0)}
        carry |= {"personal": filled(client.start, 5.0), "merit": {}}
        outcome = run.method.client.send(carry, client)
        memory = outcome.memory
        shared = ("conv1.weight", "conv2.weight")
        assert tuple(memory["held"]) == tuple(memory["step"]) == shared
        assert memory["kept"].keys() == client.start.keys() - set(shared)
        for name, value in (("held", 1.0), ("step", 1.0), ("kept", 2.0), ("personal", 5.0)):
            assert all_are(memory[name], value), name
        assert ("evidence" in outcome.give) == has_evidence
        if has_evidence:
            head = outcome.give["evidence"].values["scores.head"]
            count = trees.size(trees.pick(client.start, client.layout.head))
            assert head.tolist() == [1.0] * round(count / 2) + [0.0] * (count - round(count / 2))


def test_what_is_removed_is_neither_sent_nor_left(tmp_path: Path) -> None:
    """Of the first bias a mask keeps four, which changed by 3, -2, 1 and 0, and .5 is left of the last:
    half of them are 3 and -2, of mean magnitude 2.5. The others' 9 and 8 are gone for good."""
    run = make_run(Grove(up=0.5, own="none"), tmp_path)
    task = plan(run, run.initial_state)[0]
    shared = trees.pick(run.params, run.method.client.shared_names(run.net.layout)[0])
    left = filled(shared, 0.0)
    left["fc1.bias"][3:6] = torch.tensor([0.5, 0.0, 8.0])
    client = run.client(task, {"left": left})
    changes = torch.zeros_like(client.start["fc1.bias"])
    changes[:5] = torch.tensor([3.0, -2.0, 1.0, 0.0, 9.0])
    carry: Any = {"model": client.start, "merit": {}}
    carry["local"] = {**client.start, "fc1.bias": client.start["fc1.bias"] + changes}
    carry["model.mask"] = {"fc1.bias": torch.arange(len(changes)) < 4}
    outcome = run.method.client.send(carry, client)
    sent = outcome.give["change"].values["fc1.bias"]
    assert sent[:6].tolist() == pytest.approx([2.5, -2.5, 0.0, 0.0, 0.0, 0.0])
    owed = outcome.memory["left"]["fc1.bias"]
    assert owed[:6].tolist() == pytest.approx([0.5, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_a_model_in_use_has_no_removed_channels(tmp_path: Path) -> None:
    """Its last step, 2 everywhere, may be of more channels: half of it is added to those that stay, on
    top of the group's model, which is 3 above the start."""
    run = make_run(Grove(own="offset"), tmp_path)
    shared = trees.pick(run.params, run.method.client.shared_names(run.net.layout)[0])
    mask = make_channel_mask(run.net, select_first(find_groups(run.net), 0.5))
    step = filled(shared, 2.0)
    client = run.client(plan(run, run.initial_state)[0], {"step": step})
    carry = {"change": filled(shared, 3.0), "change.mask": mask, "step": step}
    used = run.method.client.use(carry, client)["model"]
    for name, leaf in shared.items():
        assert torch.equal(used[name], torch.where(mask[name], leaf + 3.0 + 1.0, 0.0))
        assert 0 < int(mask[name].sum()) < leaf.numel()


def test_what_a_client_uses_by_option(tmp_path: Path) -> None:
    """Its group's model, 1 above the start; half of a step of 2 more; or its personal one, of sevens."""
    kinds: tuple[Any, ...] = ("none", "offset", "pulled")
    for own in kinds:
        run = make_run(Grove(own=own), tmp_path / own)
        shared = trees.pick(run.params, run.method.client.shared_names(run.net.layout)[0])
        memory = {"step": filled(shared, 2.0), "personal": filled(run.params, 7.0)}
        client = run.client(plan(run, run.initial_state)[0], memory)
        carry = {**memory, "change": filled(shared, 1.0)}
        used = run.method.client.use(carry, client)["model"]
        if own == "pulled":
            assert all_are(used, 7.0)
        else:
            above = 1.0 if own == "none" else 2.0
            assert trees.distance(trees.pick(used, shared), plus(shared, above)) < 1e-12


def test_a_share_from_a_budget_comes_with_the_task(tmp_path: Path) -> None:
    """A gigabyte allows the largest share; told a quarter, a client sends 16 of 64 numbers."""
    run = make_run(Grove(budget="1GB", own="none"), tmp_path)
    task = plan(run, run.initial_state)[0]
    assert task.settings == {"up": 0.5}
    client = run.client(task, {})
    carry: Any = {"model": client.start, "local": plus(client.start, 1.0), "merit": {}}
    carry["settings"] = {"up": torch.tensor(0.25)}
    sent = run.method.client.send(carry, client).give["change"].values["fc1.bias"]
    assert int((sent != 0).sum()) == 16


# ---- how it trains -------------------------------------------------------------------------------


def gradient(run: Run, params: Tree, rows: Tensor) -> Tree:
    """Of the mean loss over these examples of client 0."""
    train = run.federation.clients[0].train
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    outputs = run.net(leaves, train.x[rows], train=True).logits
    loss = run.net.problem.losses(outputs, train.y[rows], {}).mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def steps(run: Run, params: Tree, rows: Tensor, to: Tree, mu: float) -> Tree:
    """Two steps down that gradient and ``mu`` times the distance to a model."""
    for _ in range(2):
        pull = trees.map(lambda w, near: mu * (w - near), params, to)
        whole = trees.map(torch.add, gradient(run, params, rows), pull)
        params = trees.map(lambda w, g: w - RATE * g, params, whole)
    return params


def shares(run: Run, params: Tree, rows: Tensor) -> Tensor:
    """The probability of the class of each example."""
    train = run.federation.clients[0].train
    outputs = run.net(params, train.x[rows], train=False).logits
    return outputs.softmax(1).gather(1, train.y[rows].unsqueeze(1)).flatten()


@pytest.mark.parametrize("own", ["none", "offset", "pulled", "chosen"])
def test_both_models_are_trained_by_hand(own: Any, tmp_path: Path) -> None:
    """From the same start each by its own gradient; v is pulled to the model as it began.

    If the kinds are compared, neither is trained on the round's fold, and they are scored on it.
    """
    method = Grove(own=own, pull=Proximal(mu=0.7), keep=0.25, up=1.0, local=LOCAL)
    run = make_run(method, tmp_path, sizes=(24, 20))
    task = plan(run, run.initial_state)[0]
    assert task.to == 0
    start = run.params
    head = run.net.layout.head
    memory: dict[str, Tree] = {"kept": plus(trees.pick(start, head), 0.5)}
    if own in ("pulled", "chosen"):
        memory["personal"] = plus(start, -0.2)
    report, kept = perform(run, task, memory)
    begun = {**start, **memory["kept"]}
    rows = torch.arange(24)
    in_fold = run.federation.clients[0].train.folds == 0
    if own == "chosen":
        assert 0 < int(in_fold.sum()) < 24
        rows = rows[~in_fold]
    trained = steps(run, begun, rows, begun, 0.0)
    shared = trees.pick(trained, kept["held"])
    assert trees.distance(report.give["model"].values, shared) < 1e-12
    assert trees.distance(kept["kept"], trees.pick(trained, head)) < 1e-12
    if own not in ("pulled", "chosen"):
        assert "personal" not in kept
        return
    personal = steps(run, memory["personal"], rows, begun, 0.7)
    assert trees.distance(kept["personal"], personal) < 1e-12
    if own == "pulled":
        assert not report.metrics
        return
    # A quarter of the step from the group's model, and the head that was trained.
    step = trees.sub(shared, trees.pick(begun, shared))
    moved = trees.map(lambda w, s: w + 0.25 * s, trees.pick(begun, shared), step)
    inside = torch.arange(24)[in_fold]
    offset = shares(run, {**trained, **moved}, inside)
    expected = float((offset - shares(run, personal, inside)).mean())
    assert report.metrics["tried"] == len(inside)
    assert report.metrics["better"] == pytest.approx(expected, abs=1e-9)
    assert abs(expected) > 1e-4


@pytest.mark.parametrize("engine", [Serial(), Batched()], ids=lambda engine: engine.name)
def test_a_client_without_a_fold_does_not_vote(engine: Any, tmp_path: Path) -> None:
    """With fewer than ten examples nothing is left out to score, also in a stack with others."""
    run = make_run(Grove(), tmp_path, sizes=(9, 20))
    by_client = {
        each.of: each.metrics for each in reports(run, engine, plan(run, run.initial_state))
    }
    assert by_client[0] == {}
    assert set(by_client[1]) == {"better", "tried"}


def test_only_a_number_is_a_vote(tmp_path: Path) -> None:
    """A loss that overflowed says nothing; 6 worse on each of 2 examples counts as 1, .5 as itself."""
    run = make_run(Grove(), tmp_path)
    client = run.client(plan(run, run.initial_state)[0], {})
    whole = {"model": client.start, "local": client.start, "personal": client.start}
    for better, expected in ((torch.inf, None), (torch.nan, None), (-12.0, -1.0), (1.0, 0.5)):
        merit = {"better": torch.tensor(better), "tried": torch.tensor(2.0)}
        metrics = run.method.client.send({**whole, "merit": merit}, client).metrics
        assert metrics == ({} if expected is None else {"better": expected, "tried": 2.0})
    nothing = {"better": torch.tensor(0.0), "tried": torch.tensor(0.0)}
    assert run.method.client.send({**whole, "merit": nothing}, client).metrics == {}
