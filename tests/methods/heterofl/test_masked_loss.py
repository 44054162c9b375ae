"""HeteroFL's masked loss: classes that a client lacks, in its loss and in what it sends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import federation, make_run, play, reports
from torch import nn

from fedgrove import data, trees
from fedgrove.core import Batch, ClientInfo, Packet, Report, Setup
from fedgrove.data import ClientData, Examples
from fedgrove.engines import Serial
from fedgrove.methods import CaldasDropout, FedDrop, FedRolex, HeteroFL
from fedgrove.methods.heterofl.masked_loss import MaskedLoss, known_outputs, missing_classes
from fedgrove.nets import Net, Output
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import ProblemLoss
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan
from fedgrove.runs.run import Run, build

NET = Net(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)), (1,))


def labels(counts: list[float], is_class: list[float]) -> dict[str, torch.Tensor]:
    return {"counts": torch.tensor(counts), "is_class": torch.tensor(is_class)}


def test_the_loss_by_hand() -> None:
    """Logits (ln 3, 5), and no example of class 1: its logit counts as 0, the shares are 3/4 and
    1/4, and the loss of class 0 is ln 4/3. Its gradient is -1/4 by the first logit, 0 by the other."""
    logits = torch.tensor([[math.log(3), 5.0]], requires_grad=True)
    batch = Batch(
        torch.zeros(1, 1), torch.tensor([0]), torch.ones(1), torch.arange(1), torch.tensor(0)
    )
    carry = {"labels": labels([1.0, 0.0], [1.0, 1.0])}
    loss, _ = MaskedLoss(ProblemLoss())(Output(logits, None, NET, True), {}, batch, carry)
    assert loss.item() == pytest.approx(math.log(4 / 3))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.0])
    # A client that has both learns from both.
    carry = {"labels": labels([1.0, 2.0], [1.0, 1.0])}
    loss, _ = MaskedLoss(ProblemLoss())(Output(logits, None, NET, True), {}, batch, carry)
    assert loss.item() == pytest.approx(math.log((3 + math.exp(5)) / 3))


def test_what_a_client_knows_by_hand() -> None:
    two_of_three = labels([4.0, 0.0, 2.0], [1.0, 1.0, 1.0])
    assert missing_classes(two_of_three).tolist() == [False, True, False]
    known = known_outputs(two_of_three)
    assert known is not None
    assert known.tolist() == [True, False, True]
    assert known_outputs(labels([4.0, 1.0], [1.0, 1.0])) is None
    # Outputs of another task are no classes of this one's: they are not masked, but not known.
    other = labels([4.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    assert missing_classes(other).tolist() == [False, False, False]
    known = known_outputs(other)
    assert known is not None
    assert known.tolist() == [True, True, False]
    # A task of numbers, and a client without examples, leave nothing out.
    assert known_outputs(labels([0.0, 0.0], [0.0, 0.0])) is None
    assert known_outputs({}) is None


def test_a_fold_by_hand() -> None:
    """Client 0 (10 examples) is of half width and lacks class 1; client 1 (30) has all. Client k sends
    1 + 4k everywhere. Units 0 and 1 are (10 · 1 + 30 · 5) / 40 = 4, the others 5. Of the head class
    0 is shared the same way, and class 1 is client 1's alone: 5."""
    infos = {0: ClientInfo(10), 1: ClientInfo(30)}
    start = Setup(trees.map(torch.zeros_like, NET.params()), NET, infos, 3, lambda j: {})
    method = HeteroFL(widths=(0.5, 1.0))
    state = method.init(start)
    done = []
    for task, n in zip(method.plan(state, [0, 1]), (10, 30), strict=True):
        sent = task.send["model"]
        values = trees.map(lambda leaf, k=task.to: torch.full_like(leaf, 1.0 + 4 * k), sent.values)
        mask = dict(sent.mask or {})
        if task.to == 0:
            mask["2.weight"] = mask["2.weight"] & torch.tensor([[True], [False]])
            mask["2.bias"] = torch.tensor([True, False])
        values = trees.apply_mask(values, mask)
        packets = {}
        for name, leaves in (("model", ("0.weight", "0.bias")), ("head", ("2.weight", "2.bias"))):
            own = {leaf: mask[leaf] for leaf in leaves if leaf in mask}
            packets[name] = Packet(trees.pick(values, leaves), own or None)
        done.append(Report(task.to, packets, n))
    found = method.fold(state, done).model
    assert found["0.weight"].flatten().tolist() == [4, 4, 5, 5]
    assert found["0.bias"].tolist() == [4, 4, 5, 5]
    assert found["2.weight"].tolist() == [[4, 4, 5, 5], [5, 5, 5, 5]]
    assert found["2.bias"].tolist() == [4, 5]


def with_labels(*own: list[int]) -> Any:
    """A federation of clients that have these labels alone."""
    made = federation((12,), (16,) * len(own))
    clients = {}
    for k, client in made.clients.items():
        parts = []
        for part in (client.train, client.validation, client.test):
            y = torch.tensor(own[k])[torch.arange(len(part)) % len(own[k])]
            parts.append(Examples(part.x, y))
        clients[k] = ClientData(*parts, client.info)
    return replace(made, clients=clients)


def run_of(method: Any, made: Any, folder: Path) -> Run:
    template = make_run(method, folder, sizes=(16,) * len(made.clients), rounds=1)
    return replace(template, federation=made, cohort=len(made.clients))


def test_clients_send_the_classes_that_they_have(tmp_path: Path) -> None:
    """Client 0 lacks class 1, and its weights are those of client 1, though client 0's decay would
    have moved them."""
    local = LocalTraining(2, 8, SGD(0.1, weight_decay=0.1))
    made = with_labels([0, 2], [0, 1, 2])
    run = run_of(HeteroFL(widths=(1.0,), local=local), made, tmp_path)
    tasks = plan(run, run.initial_state)
    first, second = reports(run, Serial(), tasks)
    assert (first.give["head"].mask or {})["head.weight"].any(1).tolist() == [True, False, True]
    assert (first.give["head"].mask or {})["head.bias"].tolist() == [True, False, True]
    assert not first.give["head"].values["head.weight"][1].any()
    assert second.give["head"].mask is None
    after = run.method.fold(run.initial_state, [first, second]).model
    own = second.give["head"].values["head.weight"][1]
    torch.testing.assert_close(after["head.weight"][1], own)
    assert not torch.equal(after["head.weight"][0], second.give["head"].values["head.weight"][0])


def test_a_narrow_client_sends_its_channels_of_the_classes_that_it_has(tmp_path: Path) -> None:
    """Client 0 is of half width and lacks class 1: it sends the first half of rows 0 and 2. The other
    half, and row 1, are client 1's alone."""
    made = with_labels([0, 2], [0, 1, 2])
    run = run_of(HeteroFL(widths=(0.5, 1.0)), made, tmp_path)
    tasks = plan(run, run.initial_state)
    first, second = reports(run, Serial(), tasks)
    channels = (tasks[0].send["model"].mask or {})["head.weight"]
    half = channels.shape[1] // 2
    assert channels.sum(1).tolist() == [half] * 3
    mask = (first.give["head"].mask or {})["head.weight"]
    assert mask.sum(1).tolist() == [half, 0, half]
    assert mask[:, :half].all(1).tolist() == [True, False, True]
    after = run.method.fold(run.initial_state, [first, second]).model["head.weight"]
    own = second.give["head"].values["head.weight"]
    torch.testing.assert_close(after[:, half:], own[:, half:])
    torch.testing.assert_close(after[1], own[1])
    shared = (16 * first.give["head"].values["head.weight"] + 16 * own) / 32
    torch.testing.assert_close(after[::2, :half], shared[::2, :half])


def test_a_class_that_nobody_has_stays_as_it_was(tmp_path: Path) -> None:
    local = LocalTraining(2, 8, SGD(0.1, weight_decay=0.1))
    made = with_labels([0, 2], [0, 2])
    run = run_of(HeteroFL(widths=(0.5, 1.0), local=local), made, tmp_path)
    state = play(run, Serial())
    assert torch.equal(state.model["head.weight"][1], run.params["head.weight"][1])
    assert not torch.equal(state.model["head.weight"][0], run.params["head.weight"][0])


def test_clients_with_all_classes_train_as_without(tmp_path: Path) -> None:
    made = with_labels([0, 1, 2], [2, 1, 0])
    models = []
    for masked in (True, False):
        method = HeteroFL(widths=(0.5, 1.0), masked=masked)
        models.append(play(run_of(method, made, tmp_path / str(masked)), Serial()).model)
    assert trees.identical(*models)


def test_whose_papers_mask(tmp_path: Path) -> None:
    for method, masks in (
        (HeteroFL(), True), (FedRolex(), True), (FedDrop(), False), (CaldasDropout(), False)
    ):  # fmt: skip
        run = make_run(method, tmp_path / type(method).__name__)
        verbs = {task.verb for task in plan(run, run.initial_state)}
        assert all(("masked" in verb) == masks for verb in verbs)


def test_targets_without_classes_are_not_masked(tmp_path: Path) -> None:
    run = build(HeteroFL(), data.load("rooms", clients=3), Memory(tmp_path), rounds=1)
    assert {task.verb for task in plan(run, run.initial_state)} == {"train"}
    assert play(run, Serial()).round == 1
