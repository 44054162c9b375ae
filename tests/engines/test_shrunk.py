"""Engines train the small net under a structured mask: the same result as training masked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import SHAPES, make_run

from fedgrove import methods, trees
from fedgrove.channels.find import channel_mask, groups_of
from fedgrove.channels.shrink import structured
from fedgrove.core import Carry, Packet, Task, Train
from fedgrove.engines import Pool, Serial, work
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.batched.stacking import fitted, stackable
from fedgrove.engines.work import initial_carry, trained
from fedgrove.parts import local
from fedgrove.parts.gamma import GammaDistance, GammaL1
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy, Proximal
from fedgrove.runs.run import Run
from fedgrove.trees import Mask

RECIPES = [
    LocalTraining(2, 8, Adam(1e-2)),
    LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-2), clip=0.5),
]


def half(run: Run, pruned: bool = False) -> Mask:
    g = torch.Generator().manual_seed(3)
    mask = channel_mask(
        run.net, {group.name: torch.arange(group.size) % 2 == 0 for group in groups_of(run.net)}
    )
    if pruned:
        mask = {
            k: m & (torch.rand(m.shape, generator=g) < 0.7) if m.dim() > 1 else m
            for k, m in mask.items()
        }
    return mask


def both(run: Run, stage: Train, mask: Mask, **more: trees.Tree) -> tuple[Carry, Carry]:
    """The carry after training: shrunk, and masked."""
    task = Task(0, {"model": Packet(run.params, mask)})
    client, carry = run.client(task, {}), {**initial_carry(task, {}, torch.float64), **more}
    batches = [*local.epochs(run.net, stage, client, 0)]
    return trained(run.net, stage, carry, batches), local.train(run.net, stage, carry, batches)


@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("recipe", RECIPES, ids=["adam", "sgd"])
@pytest.mark.parametrize("net", SHAPES)
def test_shrunk_training_is_masked_training(
    net: str, recipe: LocalTraining, pruned: bool, tmp_path: Path
) -> None:
    run = make_run(
        methods.FedAvg(), tmp_path, net=net, options={"width": 4} if net == "resnet18" else None
    )
    mask = half(run, pruned)
    near = {k: v + 0.1 for k, v in run.params.items()}
    stage = Train(
        CrossEntropy() + Proximal(0.3, to="near") + GammaL1(0.01) + GammaDistance(0.02, to="near"),
        recipe,
    )
    thin, masked = both(run, stage, mask, near=near)
    small = structured(run.net, mask)
    assert small is not None
    assert trees.distance(thin["local"], small.settled(masked["local"])) < 1e-9
    assert (
        trees.distance(thin["local"], trees.masked(run.params, mask)) > 1e-3
    )  # something was learnt
    assert list(thin["local"]) == list(masked["local"])
    assert all(bool((thin["local"][k][~m] == 0).all()) for k, m in mask.items())
    assert thin["near"] is near
    assert thin["model.mask"] is mask


def test_the_small_net_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    seen: list[Any] = []

    def noted(net: Any, *rest: Any) -> Any:
        seen.append(net)
        return kept(net, *rest)

    kept = local.train
    monkeypatch.setattr(work.local, "train", noted)
    mask = half(run)
    stage = Train(CrossEntropy(), RECIPES[0])
    both(run, stage, mask)
    thin = structured(run.net, mask)
    assert thin is not None
    assert seen[0] is thin.net
    assert seen[0].layout.size < 0.5 * run.net.layout.size
    both(
        run, stage, {k: m for k, m in mask.items() if m.dim() > 1}
    )  # weights alone: biases still speak
    assert seen[2] is run.net


class Remembering(CrossEntropy):
    """Keeps a running mean of a parameter in aux, under the parameter's own name."""

    def __call__(self, out: Any, params: Any, batch: Any, carry: Any) -> Any:
        loss, _ = super().__call__(out, params, batch, carry)
        return loss, {
            "fc1.bias": params["fc1.bias"] * 1.0,
            "steps": carry["aux"].get("steps", torch.zeros(())) + 1,
        }


def test_what_an_objective_remembers_is_widened_too(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    thin, masked = both(run, Train(Remembering(), RECIPES[0]), half(run))
    assert trees.distance(thin["aux"], masked["aux"]) < 1e-9
    assert tuple(thin["aux"]["fc1.bias"].shape) == run.net.layout.shapes["fc1.bias"]


def test_pool_is_serial_to_the_bit_on_small_nets(tmp_path: Path) -> None:
    run = make_run(
        methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32
    )  # with dropout
    mask = half(run)
    tasks = [Task(k, {"model": Packet(run.params, mask)}) for k in run.infos]
    found = []
    for engine in (Serial(), Pool(workers=2)):
        found.append(
            [report.give["model"].values for _, report in engine.map((run, task) for task in tasks)]
        )
        engine.close()
    assert all(trees.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(bool((tree[k][~m] == 0).all()) for tree in found[0] for k, m in mask.items())


def test_dropout_agrees_in_distribution(tmp_path: Path) -> None:
    """The small net draws fewer bits, so other ones; over many rounds the mean step is the same."""
    recipe = LocalTraining(1, 20, SGD(0.1))
    run = make_run(
        methods.FedAvg(local=recipe), tmp_path, net="har-cnn", options={}, sizes=(20,), cohort=1
    )
    mask, stage = half(run), Train(CrossEntropy(), recipe)
    steps: list[list[float]] = [[], []]
    for round in range(60):
        task = replace(Task(0, {"model": Packet(run.params, mask)}), round=round)
        client, carry = run.client(task, {}), initial_carry(task, {}, torch.float64)
        for found, go in zip(steps, (trained, local.train), strict=True):
            torch.default_generator.manual_seed(round)
            after = go(run.net, stage, carry, local.epochs(run.net, stage, client, 0))["local"]
            found.append(float(after["head.bias"][0] - run.params["head.bias"][0]))
    thin, masked = torch.tensor(steps)
    error = (thin.std() ** 2 + masked.std() ** 2).sqrt() / 60**0.5
    assert abs(thin.mean() - masked.mean()) < 4 * error
    assert not torch.equal(thin, masked)


WIDTHS = {"equal widths": (2, 2, 2), "unlike widths": (2, 3, 4), "one whole": (2, 1, 2)}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("net", ["har-cnn", "bn-cnn2", "resnet18"])
def test_stacked_clients_under_structured_masks(net: str, widths: str, tmp_path: Path) -> None:
    """Every second, third or fourth channel: a stack is as wide as its widest client; all train as they do alone."""
    recipe = LocalTraining(2, 8, Adam(1e-2, eps=1e-3))
    options = {"width": 4} if net == "resnet18" else None
    run = make_run(
        methods.FedAvg(local=recipe), tmp_path, net=net, sizes=(20, 13, 24), options=options
    )
    groups = groups_of(run.net)
    masks = [
        channel_mask(run.net, {g.name: torch.arange(g.size) % every == k % every for g in groups})
        for k, every in enumerate(WIDTHS[widths])
    ]
    tasks = [
        Task(k, {"model": Packet(trees.masked(run.params, mask), mask)})
        for k, mask in enumerate(masks)
    ]
    engine = Batched()
    stacks = stackable(
        [engine._open(run, task, {}) for task in tasks], Train(CrossEntropy(), recipe)
    )
    assert [len(stack) for stack in stacks] == {
        "equal widths": [3],
        "unlike widths": [1, 1, 1],
        "one whole": [2, 1],
    }[widths]
    ways = fitted([job for stack in stacks for job in stack])
    assert not any(
        "net" in vars(thin) for way in ways for thin in (way.own, way.common) if thin
    )  # none is made yet
    for way in ways:
        assert (way.common is None) == (widths == "one whole")
        if way.common is not None:
            assert all(
                int(kept.sum()) == -(-len(kept) // 2) for kept in way.common.channels.values()
            )
    for (_, one), (_, other) in zip(
        Serial().map((run, task) for task in tasks),
        engine.map((run, task) for task in tasks),
        strict=True,
    ):
        assert trees.distance(one.give["model"].values, other.give["model"].values) < 1e-9
