"""What a device gains from removed channels: the training step and inference of small nets beside the dense one.

Each net stands there dense, and with a share of the channels of every group removed: once masked (which saves nothing)
and once really gone. All variants take turns, step by step, so that a change in the machine's load falls on all of
them. Inputs are drawn at random: a step takes as long whatever it learns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..channels.find import channel_mask, groups_of
from ..channels.groups import Channels
from ..channels.shrink import cut
from ..core import Batch, Carry, Train
from ..engines.work import one_thread
from ..errors import check, unknown
from ..nets import Net, build
from ..parts import local
from ..parts.local import SGD, Adam, LocalTraining
from ..parts.objective import CrossEntropy
from ..trees import Tree

REMOVED = (0.0, 0.3, 0.5, 0.7)
DENSE = (-1.0, "dense")


@dataclass(frozen=True)
class Scene:
    """A net on its data's shape, and how it trains; ``most`` is the largest ratio of a step at half the channels."""

    shape: tuple[int, ...]
    classes: int
    local: LocalTraining
    most: float
    steps: int
    """Steps in a row that are timed: a task has many, and what it does once (masks, flat vectors) is no step."""
    turns: int
    """How often as many turns: short ones are cheap, and more of them meet an idle core."""


SCENES = {
    "har-cnn": Scene((9, 128), 6, LocalTraining(1, 32, Adam(1e-3)), 0.50, 16, 3),
    "bn-cnn4": Scene((3, 32, 32), 10, LocalTraining(1, 32, SGD(0.005)), 0.45, 2, 2),
    "resnet18": Scene((3, 32, 32), 10, LocalTraining(1, 32, SGD(0.005)), 0.35, 1, 1),
}


@dataclass(frozen=True)
class Row:
    """A net with a share of its channels removed, by ratio to the dense one (times: the shortest, in seconds)."""

    net: str
    removed: float
    params: int
    macs: int
    train_s: float
    train: float
    train_median: float
    """The median over turns of the ratio within a turn: as ``train`` on an idle machine, above it on a busy one."""
    train_masked: float
    infer_s: float
    infer: float
    infer_median: float
    infer_masked: float


def thinned(net: Net, removed: float, seed: int = 0) -> Channels:
    """Channels drawn at random: of each group the same share goes, at least one channel stays."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for group in groups_of(net):
        keep = max(1, group.size - round(removed * group.size))
        kept = torch.zeros(group.size, dtype=torch.bool)
        kept[torch.randperm(group.size, generator=g)[:keep]] = True
        found[group.name] = kept
    return found


def measure(name: str, removed: Sequence[float] = REMOVED, repeats: int = 11) -> Iterator[Row]:
    """The rows of one net, on one thread, after a warm-up."""
    if name not in SCENES:
        raise unknown("net to measure", name, SCENES)
    check(repeats >= 1, "repeats", repeats, "1 or more")
    for share in removed:
        check(0 <= share < 1, "the share of channels removed", share, "in [0, 1)")
    scene = SCENES[name]
    net = Net(build(name, scene.shape, scene.classes, 0), scene.shape)
    batch, params = _batch(scene), net.params()
    work: dict[tuple[float, str], tuple[Net, Tree, Tree | None]] = {DENSE: (net, params, None)}
    for share in removed:
        channels = thinned(net, share)
        thin = cut(net, channels)
        work[share, "masked"] = (net, params, channel_mask(net, channels))
        work[share, "gone"] = (thin.net, thin.narrow(params), None)
    with one_thread():
        train = timed({k: _step(scene, batch, *v) for k, v in work.items()}, repeats * scene.turns)
        infer = timed({k: _look(batch, *v) for k, v in work.items()}, repeats * scene.turns)
    for share in removed:
        small, gone, masked = work[share, "gone"][0].layout, (share, "gone"), (share, "masked")
        yield Row(
            *(name, share, small.size, small.macs),
            *(
                min(train[gone]) / scene.steps,
                ratio(train, gone),
                in_turns(train, gone),
                ratio(train, masked),
            ),
            *(min(infer[gone]), ratio(infer, gone), in_turns(infer, gone), ratio(infer, masked)),
        )


def ratio(times: Mapping[Any, Sequence[float]], which: Any) -> float:
    """The shortest time to the dense net's shortest: what is above that is other processes' doing."""
    return min(times[which]) / min(times[DENSE])


def in_turns(times: Mapping[Any, Sequence[float]], which: Any) -> float:
    """The median over turns of the time to the dense net's in the same turn."""
    return statistics.median(t / base for t, base in zip(times[which], times[DENSE], strict=True))


def _batch(scene: Scene) -> Batch:
    g, n = torch.Generator().manual_seed(0), scene.local.batch
    x, y = (
        torch.randn(n, *scene.shape, generator=g),
        torch.randint(scene.classes, (n,), generator=g),
    )
    return Batch(x, y, torch.ones(n), torch.arange(n), torch.tensor(0))


def _step(
    scene: Scene, batch: Batch, net: Net, params: Tree, mask: Tree | None
) -> Callable[[], object]:
    """Some steps of local training."""
    stage = Train(CrossEntropy(), scene.local)
    carry: Carry = {"model": params, "settings": {"round": torch.tensor(0.0)}, "aux": {}}
    if mask is not None:
        carry["model.mask"] = mask
    return lambda: local.train(net, stage, carry, [batch] * scene.steps)


def _look(batch: Batch, net: Net, params: Tree, mask: Tree | None) -> Callable[[], object]:
    """One batch of inference; a masked model's weights were zeroed before."""
    kept = {k: v * mask[k] if mask and k in mask else v for k, v in params.items()}

    def go() -> object:
        with torch.no_grad():
            return net.run(kept, batch.x, train=False)

    return go


def timed(work: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, list[float]]:
    """Seconds of each, turn by turn, after a first turn to warm up.

    Of the processor, not the clock: on one thread these are the same, unless other processes want the core.
    """
    times: dict[Any, list[float]] = {k: [] for k in work}
    for i in range(repeats + 1):
        for k, go in work.items():
            began = time.process_time()
            go()
            if i:
                times[k].append(time.process_time() - began)
    return times


def claims(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Whether half the channels really halve the work, per net that was measured so."""
    return {
        f"training step of {row.net} at half the channels": {
            "value": round(row.train, 3),
            "median": round(row.train_median, 3),
            "bound": SCENES[row.net].most,
            "ok": row.train <= SCENES[row.net].most,
        }
        for row in rows
        if row.removed == 0.5
    }
