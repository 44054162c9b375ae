"""Engines train the small net under a structured mask: the same result as training masked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import SHAPES, make_run, play

from fedgrove import methods, trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.shrink import find_small_net
from fedgrove.core import Carry, Packet, Task, Train
from fedgrove.engines import Pool, Serial, work
from fedgrove.engines.batched import launching
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.batched.jobs import split_into_stacks
from fedgrove.engines.batched.stacking import make_width_adapters, round_width
from fedgrove.engines.batched.steps import Stack
from fedgrove.engines.work import make_carry, train_shrunk
from fedgrove.methods.safl.slimming import GammaDistance, GammaL1
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy, Proximal
from fedgrove.runs.run import Run
from fedgrove.trees import Mask

RECIPES = [
    LocalTraining(2, 8, Adam(1e-2)),
    LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-2), clip=0.5),
]


def half(run: Run, pruned: bool = False) -> Mask:
    """A mask that keeps every second channel; ``pruned``: and of their weights, about 0.7."""
    g = torch.Generator().manual_seed(3)
    channels = {group.name: torch.arange(group.size) % 2 == 0 for group in find_groups(run.net)}
    mask = make_channel_mask(run.net, channels)
    if pruned:
        for k, m in mask.items():
            if m.dim() > 1:
                mask[k] = m & (torch.rand(m.shape, generator=g) < 0.7)
    return mask


def both(run: Run, stage: Train, mask: Mask, **more: trees.Tree) -> tuple[Carry, Carry]:
    """The carry after training: shrunk, and masked."""
    task = Task(0, {"model": Packet(run.params, mask)})
    carry = {**make_carry(task, {}, torch.float64), **more}
    batches = list(local.epochs(run.net, stage, run.client(task, {}), 0))
    shrunk = train_shrunk(run.net, stage, carry, batches)
    masked = local.train(run.net, stage, carry, batches)
    return shrunk, masked


@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("recipe", RECIPES, ids=["adam", "sgd"])
@pytest.mark.parametrize("net", SHAPES)
def test_shrunk_training_is_masked_training(
    net: str, recipe: LocalTraining, pruned: bool, tmp_path: Path
) -> None:
    options = {"width": 4} if net == "resnet18" else None
    run = make_run(methods.FedAvg(), tmp_path, net=net, options=options)
    mask = half(run, pruned)
    near = {k: v + 0.1 for k, v in run.params.items()}
    stage = Train(
        CrossEntropy() + Proximal(0.3, to="near") + GammaL1(0.01) + GammaDistance(0.02, to="near"),
        recipe,
    )
    thin, masked = both(run, stage, mask, near=near)
    small = find_small_net(run.net, mask)
    assert small is not None
    # In 57 layers of four channels Adam turns noise of 1e-15 into 1e-8 within a round, on one
    # engine alone.
    tolerance = 1e-6 if net == "shufflenetv2" else 1e-9
    assert trees.distance(thin["local"], small.reset_removed(masked["local"])) < tolerance
    # Something was learnt.
    assert trees.distance(thin["local"], trees.apply_mask(run.params, mask)) > 1e-3
    assert list(thin["local"]) == list(masked["local"])
    assert all(bool((thin["local"][k][~m] == 0).all()) for k, m in mask.items())
    assert thin["near"] is near
    assert thin["model.mask"] is mask


@pytest.mark.parametrize("recipe", RECIPES, ids=["adam", "sgd"])
def test_a_kept_state_is_narrowed_and_widened(recipe: LocalTraining, tmp_path: Path) -> None:
    """As in masked training: 0 at removed channels, whatever it was before."""
    run = make_run(methods.FedAvg(), tmp_path, net="bn-cnn2")
    mask = half(run)
    stage = Train(CrossEntropy(), replace(recipe, keep_state=True))
    g = torch.Generator().manual_seed(1)
    state = {}
    for name, tree in local.find_state(run.net, stage, {"model": run.params}, {}, "").items():
        drawn = {k: torch.rand(v.shape, generator=g, dtype=v.dtype) for k, v in tree.items()}
        state[name] = drawn
    thin, masked = both(run, stage, mask, **state)
    small = find_small_net(run.net, mask)
    assert small is not None
    assert trees.distance(thin["local"], small.reset_removed(masked["local"])) < 1e-9
    for name in state:
        assert trees.distance(thin[name], masked[name]) < 1e-9
        assert thin[name].keys() == state[name].keys()
        removed = [thin[name][k][~m] for k, m in mask.items() if k in thin[name]]
        assert all(bool((leaf == 0).all()) for leaf in removed)


def test_the_small_net_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    seen: list[Any] = []
    train = local.train

    def recorded(net: Any, *rest: Any) -> Any:
        seen.append(net)
        return train(net, *rest)

    monkeypatch.setattr(work.local, "train", recorded)
    mask = half(run)
    stage = Train(CrossEntropy(), RECIPES[0])
    both(run, stage, mask)
    thin = find_small_net(run.net, mask)
    assert thin is not None
    assert seen[0] is thin.net
    assert seen[0].layout.size < 0.5 * run.net.layout.size
    # Weights alone are masked: the channels' biases still have an effect.
    weights_only = {k: m for k, m in mask.items() if m.dim() > 1}
    both(run, stage, weights_only)
    assert seen[2] is run.net


class Remembering(CrossEntropy):
    """Keeps a copy of a parameter in aux, under the parameter's own name, and counts its steps."""

    def __call__(self, out: Any, params: Any, batch: Any, carry: Any) -> Any:
        loss, _ = super().__call__(out, params, batch, carry)
        steps = carry["aux"].get("steps", torch.zeros(())) + 1
        return loss, {"fc1.bias": params["fc1.bias"] * 1.0, "steps": steps}


def test_what_an_objective_remembers_is_widened_too(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    thin, masked = both(run, Train(Remembering(), RECIPES[0]), half(run))
    assert trees.distance(thin["aux"], masked["aux"]) < 1e-9
    assert tuple(thin["aux"]["fc1.bias"].shape) == run.net.layout.shapes["fc1.bias"]


def test_pool_is_serial_to_the_bit_on_small_nets(tmp_path: Path) -> None:
    # Without options har-cnn has dropout.
    run = make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32)
    mask = half(run)
    jobs = [(run, Task(k, {"model": Packet(run.params, mask)})) for k in run.infos]
    models = []
    for engine in (Serial(), Pool(workers=2)):
        models.append([report.give["model"].values for _, report in engine.map(jobs)])
        engine.close()
    for serial, pool in zip(*models, strict=True):
        assert trees.identical(serial, pool)
        assert all(bool((serial[k][~m] == 0).all()) for k, m in mask.items())


def test_dropout_agrees_in_distribution(tmp_path: Path) -> None:
    """The small net draws fewer bits, so other ones; over many rounds the mean step is the same."""
    recipe = LocalTraining(1, 20, SGD(0.1))
    run = make_run(
        methods.FedAvg(local=recipe), tmp_path, net="har-cnn", options={}, sizes=(20,), cohort=1
    )
    mask = half(run)
    stage = Train(CrossEntropy(), recipe)
    steps: dict[Any, list[float]] = {train_shrunk: [], local.train: []}
    for round in range(60):
        task = replace(Task(0, {"model": Packet(run.params, mask)}), round=round)
        client = run.client(task, {})
        carry = make_carry(task, {}, torch.float64)
        for train, moves in steps.items():
            torch.default_generator.manual_seed(round)
            after = train(run.net, stage, carry, local.epochs(run.net, stage, client, 0))["local"]
            moves.append(float(after["head.bias"][0] - run.params["head.bias"][0]))
    thin = torch.tensor(steps[train_shrunk])
    masked = torch.tensor(steps[local.train])
    error = (thin.std() ** 2 + masked.std() ** 2).sqrt() / 60**0.5
    assert abs(thin.mean() - masked.mean()) < 4 * error
    assert not torch.equal(thin, masked)


WIDTHS = {"equal widths": (2, 2, 2), "unlike widths": (2, 3, 4), "one whole": (2, 1, 2)}
"""Every which channel each of three clients keeps."""
STACKS = {"equal widths": [3], "unlike widths": [2, 1], "one whole": [2, 1]}
"""How many clients are in each stack: a half and a third of all channels are in the second quarter,
a quarter is in the first."""


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("net", ["har-cnn", "bn-cnn2", "resnet18"])
def test_stacked_clients_under_structured_masks(net: str, widths: str, tmp_path: Path) -> None:
    """A stack is as wide as its widest client; all train as they do alone."""
    recipe = LocalTraining(2, 8, Adam(1e-2, eps=1e-3))
    options = {"width": 4} if net == "resnet18" else None
    run = make_run(
        methods.FedAvg(local=recipe), tmp_path, net=net, sizes=(20, 13, 24), options=options
    )
    tasks = []
    for client, every in enumerate(WIDTHS[widths]):
        channels = {}
        for group in find_groups(run.net):
            channels[group.name] = torch.arange(group.size) % every == client % every
        mask = make_channel_mask(run.net, channels)
        tasks.append(Task(client, {"model": Packet(trees.apply_mask(run.params, mask), mask)}))

    engine = Batched()
    jobs = [engine._start_job(run, task, {}) for task in tasks]
    stacks = split_into_stacks(jobs, Train(CrossEntropy(), recipe))
    assert [len(stack) for stack in stacks] == STACKS[widths]
    # A card has little to do with networks as small as these.
    assert len(split_into_stacks(jobs, Train(CrossEntropy(), recipe), is_on_gpu=True)) == 1

    stacked_jobs = []
    for stack in stacks:
        stacked_jobs += stack
    for adapter in make_width_adapters(stacked_jobs):
        # No net is made before it is needed.
        for thin in (adapter.own, adapter.common):
            assert thin is None or "net" not in vars(thin)
        assert (adapter.common is None) == (widths == "one whole")
        if adapter.common is not None:
            for kept in adapter.common.channels.values():
                # The widest client keeps every second channel.
                half_of_all = -(-len(kept) // 2)
                assert int(kept.sum()) == round_width(half_of_all, len(kept))

    alone = Serial().map((run, task) for task in tasks)
    together = engine.map((run, task) for task in tasks)
    for (_, one), (_, other) in zip(alone, together, strict=True):
        assert trees.distance(one.give["model"].values, other.give["model"].values) < 1e-9


def test_widths_that_differ_a_little_are_one_shape(tmp_path: Path) -> None:
    """Masks lose a channel here and there in every round: graphs and kernels are kept all the same.

    har-cnn in its real width has 64, 64 and 32 channels: parts of 16, 16 and 8.
    """
    run = make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={})
    shapes = []
    for kept in (30, 31, 18):
        channels = {}
        for group in find_groups(run.net):
            channels[group.name] = torch.arange(group.size) < kept * group.size // 64
        mask = make_channel_mask(run.net, channels)
        tasks = [Task(k, {"model": Packet(run.params, mask)}) for k in run.infos]
        engine = Batched()
        jobs = [engine._start_job(run, task, {}) for task in tasks]
        (stack,) = split_into_stacks(jobs, Train(CrossEntropy(), RECIPES[0]))
        adapters = make_width_adapters(stack)
        narrow = [
            adapter.narrow(job.carry, ()) for adapter, job in zip(adapters, stack, strict=True)
        ]
        shapes.append({name: tuple(leaf.shape) for name, leaf in narrow[0]["model"].items()})
        # What all were sent is narrowed once, and so moved to the device once.
        for carry in narrow[1:]:
            assert all(carry["model"][k] is leaf for k, leaf in narrow[0]["model"].items())
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0]["head.weight"] == (3, 16)


def test_a_net_that_keeps_nearly_all_channels_stays_whole(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={})
    channels = {g.name: torch.arange(g.size) > 0 for g in find_groups(run.net)}
    mask = make_channel_mask(run.net, channels)
    engine = Batched()
    job = engine._start_job(run, Task(0, {"model": Packet(run.params, mask)}), {})
    split_into_stacks([job], Train(CrossEntropy(), RECIPES[0]))
    assert job.thin is not None
    (adapter,) = make_width_adapters([job])
    assert adapter.common is None
    assert adapter.own is job.thin


def test_moving_masks_make_few_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of fedlayerprune has a mask of its own; a graph is captured for each shape."""
    recipe = LocalTraining(1, 8, SGD(0.05))
    method = methods.FedLayerPrune(local=recipe, density=0.2)
    run = make_run(
        method, tmp_path, net="har-cnn", options={}, rounds=10, cohort=3, dtype=torch.float32
    )
    own_widths = set()
    shapes = set()
    train = launching.train_stack

    def recorded(stack: Stack) -> Carry:
        shapes.add(stack.shape_key)
        return train(stack)

    def adapted(jobs: Any, name: str) -> Any:
        own_widths.update(job.thin.small["conv2.weight"] for job in jobs if job.thin)
        return make_width_adapters(jobs, name)

    monkeypatch.setattr(launching, "train_stack", recorded)
    monkeypatch.setattr(launching, "make_width_adapters", adapted)
    play(run, Batched())
    assert len(own_widths) >= 6
    # The whole net without a mask, and with one; then three more parts for each group at most.
    assert len(shapes) <= 4
