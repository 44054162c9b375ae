"""What a device gains from removed channels: training step and inference.

Each net is measured dense, and with a share of the channels of every group removed: once masked
(which saves nothing) and once really gone. All variants take turns, step by step, so that a change
in the machine's load falls on all of them. Inputs are drawn at random: a step takes as long
whatever it learns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.groups import Channels
from fedgrove.channels.shrink import cut_channels
from fedgrove.core import Batch, Carry, Train
from fedgrove.errors import check, unknown
from fedgrove.nets import Net, build
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy
from fedgrove.seeds import single_thread
from fedgrove.trees import Tree

REMOVED = (0.0, 0.3, 0.5, 0.7)
"""Shares of channels."""
DENSE = (-1.0, "dense")
"""The dense net's key among times; the others are ``(share, "masked")`` and ``(share, "gone")``."""


@dataclass(frozen=True)
class DeviceSetup:
    """A net on its data's shape, and how it trains."""

    shape: tuple[int, ...]
    classes: int
    local: LocalTraining
    most: float
    """The claim: the largest ratio of a training step at half the channels to the dense net's."""
    steps: int
    """Steps in a row that are timed.

    A task has many; what it does once (masks, flat vectors) is not part of a step.
    """
    turns: int
    """Multiplies the turns: short ones cost little, and more of them meet an idle core."""


SETUPS = {
    "har-cnn": DeviceSetup(
        shape=(9, 128),
        classes=6,
        local=LocalTraining(1, 32, Adam(1e-3)),
        most=0.50,
        steps=16,
        turns=3,
    ),
    "bn-cnn4": DeviceSetup(
        shape=(3, 32, 32),
        classes=10,
        local=LocalTraining(1, 32, SGD(0.005)),
        most=0.45,
        steps=2,
        turns=2,
    ),
    "resnet18": DeviceSetup(
        shape=(3, 32, 32),
        classes=10,
        local=LocalTraining(1, 32, SGD(0.005)),
        most=0.35,
        steps=1,
        turns=1,
    ),
}


@dataclass(frozen=True)
class DeviceRow:
    """A net with a share of its channels removed, by ratio to the dense one.

    Times (``_s``) are the shortest, in seconds.
    """

    net: str
    removed: float
    params: int
    macs: int
    train_s: float
    train: float
    train_median: float
    """The median over turns of the ratio within a turn.

    As ``train`` on an idle machine, above it on a busy one.
    """
    train_masked: float
    infer_s: float
    infer: float
    infer_median: float
    infer_masked: float


def draw_channels(net: Net, removed: float, seed: int = 0) -> Channels:
    """Draw channels to keep: the same share of each group is removed, at least one stays."""
    g = torch.Generator().manual_seed(seed)
    channels = {}
    for group in find_groups(net):
        keep = max(1, group.size - round(removed * group.size))
        kept = torch.zeros(group.size, dtype=torch.bool)
        kept[torch.randperm(group.size, generator=g)[:keep]] = True
        channels[group.name] = kept
    return channels


def measure(
    name: str, removed: Sequence[float] = REMOVED, repeats: int = 11
) -> Iterator[DeviceRow]:
    """Yield the rows of one net, on one thread, after a warm-up."""
    if name not in SETUPS:
        raise unknown("net to measure", name, SETUPS)
    check(repeats >= 1, "repeats", repeats, "1 or more")
    for share in removed:
        check(0 <= share < 1, "the share of channels removed", share, "in [0, 1)")
    setup = SETUPS[name]
    net = Net(build(name, setup.shape, setup.classes, 0), setup.shape)
    batch = _random_batch(setup)
    params = net.params()
    models: dict[tuple[float, str], tuple[Net, Tree, Tree | None]] = {DENSE: (net, params, None)}
    for share in removed:
        channels = draw_channels(net, share)
        thin = cut_channels(net, channels)
        models[share, "masked"] = (net, params, make_channel_mask(net, channels))
        models[share, "gone"] = (thin.net, thin.narrow(params), None)
    training = {}
    inference = {}
    for key, model in models.items():
        training[key] = _training(setup, batch, *model)
        inference[key] = _inference(batch, *model)
    with single_thread():
        train = time_in_turns(training, repeats * setup.turns)
        infer = time_in_turns(inference, repeats * setup.turns)
    for share in removed:
        gone = (share, "gone")
        masked = (share, "masked")
        small_net, _, _ = models[gone]
        yield DeviceRow(
            net=name,
            removed=share,
            params=small_net.layout.size,
            macs=small_net.layout.macs,
            train_s=min(train[gone]) / setup.steps,
            train=shortest_ratio(train, gone),
            train_median=median_ratio(train, gone),
            train_masked=shortest_ratio(train, masked),
            infer_s=min(infer[gone]),
            infer=shortest_ratio(infer, gone),
            infer_median=median_ratio(infer, gone),
            infer_masked=shortest_ratio(infer, masked),
        )


def shortest_ratio(times: Mapping[Any, Sequence[float]], key: Any) -> float:
    """Return the shortest time relative to the dense net's: other processes only add to it."""
    return min(times[key]) / min(times[DENSE])


def median_ratio(times: Mapping[Any, Sequence[float]], key: Any) -> float:
    """Return the median over turns of the time relative to the dense net's in that turn."""
    ratios = []
    for seconds, dense_seconds in zip(times[key], times[DENSE], strict=True):
        ratios.append(seconds / dense_seconds)
    return statistics.median(ratios)


def _random_batch(setup: DeviceSetup) -> Batch:
    g = torch.Generator().manual_seed(0)
    n = setup.local.batch
    x = torch.randn(n, *setup.shape, generator=g)
    y = torch.randint(setup.classes, (n,), generator=g)
    return Batch(x, y, torch.ones(n), torch.arange(n), torch.tensor(0))


def _training(
    setup: DeviceSetup, batch: Batch, net: Net, params: Tree, mask: Tree | None
) -> Callable[[], object]:
    """``setup.steps`` steps of local training, as a client does them."""
    stage = Train(CrossEntropy(), setup.local)
    carry: Carry = {"model": params, "settings": {"round": torch.tensor(0.0)}, "aux": {}}
    if mask is not None:
        carry["model.mask"] = mask
    return lambda: local.train(net, stage, carry, [batch] * setup.steps)


def _inference(batch: Batch, net: Net, params: Tree, mask: Tree | None) -> Callable[[], object]:
    """Inference on one batch."""
    # Outside what is timed: a masked model's weights are zeroed once, when it is stored.
    kept = trees.apply_mask(params, mask or {})

    def predict() -> object:
        with torch.no_grad():
            return net.run(kept, batch.x, train=False)

    return predict


def time_in_turns(work: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, list[float]]:
    """Return the seconds of each call, turn by turn, after a first turn to warm up.

    Of the processor, not the clock: on one thread these are equal, unless other processes need the
    core.
    """
    times: dict[Any, list[float]] = {key: [] for key in work}
    for turn in range(repeats + 1):
        for key, call in work.items():
            began = time.process_time()
            call()
            if turn > 0:
                times[key].append(time.process_time() - began)
    return times


def checks(rows: Sequence[DeviceRow]) -> dict[str, dict[str, Any]]:
    """Return for each net at half the channels whether a step is as short as claimed."""
    results = {}
    for row in rows:
        if row.removed == 0.5:
            bound = SETUPS[row.net].most
            results[f"training step of {row.net} at half the channels"] = {
                "value": round(row.train, 3),
                "median": round(row.train_median, 3),
                "bound": bound,
                # Judged before rounding.
                "ok": row.train <= bound,
            }
    return results
