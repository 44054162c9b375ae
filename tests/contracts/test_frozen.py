"""What is frozen stays to the bit, is not sent and not pruned, whatever the method and the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, federation, make_run, play, remembered, tensors
from tests.contract import small

from fedgrove import methods, nets, trees
from fedgrove.core import AnyMethod
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.wired import Wired
from fedgrove.nets import Net
from fedgrove.nets.freeze import freeze
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]
CALM = LocalTraining(2, 8, Adam(1e-2, eps=1e-3))
"""As in test_batched: rounding is not to be magnified."""
CALMER = LocalTraining(1, 8, Adam(1e-3, eps=1e-3))
"""For the deep nets: with the other recipe noise of 1e-15 becomes 1e-6 within a round, on one engine
alone; with this one 1e-11."""
FEW: dict[str, Any] = {"rounds": 2, "sizes": (12, 9, 17, 10)}
CUTS_CHANNELS = {"heterofl", "hermes", "safl", "fedrolex", "feddrop", "fedlps", "fedapta"}
"""What a frozen layer makes stays whole, and with it what the next layer reads: these methods send
less without freezing, since they then cut there."""
SENDS_THE_LAST_LAYERS = {"lg-fedavg"}
"""What it sends is of no frozen layer anyway."""
SHARES = {"mlp": 0.34, "bn-cnn2": 0.34, "resnet18": 0.25, "shufflenetv2": 0.25}


def frozen_run(
    method: AnyMethod,
    folder: Path,
    net: str,
    recipe: LocalTraining = CALM,
    options: dict[str, Any] | None = None,
    **words: Any,
) -> Run:
    words = FEW | words
    run = make_run(replace(method, local=recipe), folder, net=net, options=options, **words)
    freeze(run.net.module, run.net.shape, SHARES[net])
    # The net is made anew: which tensors it has is found when it is made.
    return replace(run, net=Net(run.net.module, run.net.shape))


def handed_out(run: Run, state: object) -> int:
    """How many numbers the clients are sent of the last model; they can use what they get.

    Not bytes: what is not yet trained compresses better, so that a larger model may be shorter.
    """
    tasks = plan_scoring(run, state, "finetune")
    admitted(run, Serial(), tasks)
    numbers = 0
    for task in tasks:
        for packet in task.send.values():
            for name, leaf in packet.values.items():
                kept = (packet.mask or {}).get(name)
                numbers += leaf.numel() if kept is None else int(kept.sum())
    return numbers


@pytest.mark.parametrize("method", EVERY)
def test_frozen_tensors_stay_and_do_not_travel(method, tmp_path: Path) -> None:
    run = frozen_run(method, tmp_path / "frozen", "mlp")
    before = run.net.constants()
    assert before.keys() == {"fc1.weight", "fc1.bias"}
    state = play(run, Serial())
    down = handed_out(run, state)
    assert trees.identical(before, run.net.constants())
    for name in (*tensors(state), *remembered(run)):
        assert "fc1" not in name.rpartition("/")[2]

    whole = make_run(replace(method, local=CALM), tmp_path / "whole", net="mlp", **FEW)
    whole_down = handed_out(whole, play(whole, Serial()))
    sends_nothing = run.deliver_to(state, [0])[0] == {}
    is_alike = methods.name_of(method) in CUTS_CHANNELS | SENDS_THE_LAST_LAYERS
    assert down < whole_down or sends_nothing or is_alike


@pytest.mark.parametrize("method", EVERY)
def test_batched_is_serial_with_frozen_layers(method, tmp_path: Path) -> None:
    results = []
    for engine in (Serial(), Batched()):
        run = frozen_run(method, tmp_path / engine.name, "bn-cnn2")
        before = run.net.constants()
        assert "norm1.running_mean" in before
        state = play(run, engine)
        assert trees.identical(before, run.net.constants())
        results.append((tensors(state), remembered(run)))
    (expected, expected_memory), (mine, memory) = results
    assert trees.distance(expected, mine) < 1e-9
    assert trees.distance(expected_memory, memory) < 1e-9


DEEP = [
    ("fedavg", "bn-cnn2", "group"),
    ("fedavg", "resnet18", "batch"),
    ("fedavg", "shufflenetv2", "batch"),
    ("heterofl", "bn-cnn2", "group"),
    ("heterofl", "resnet18", "batch"),
]
DEEP_AND_SLOW = [
    ("fedavg", "resnet18", "group"),
    ("fedavg", "shufflenetv2", "group"),
    ("heterofl", "resnet18", "group"),
    ("heterofl", "shufflenetv2", "batch"),
    ("heterofl", "shufflenetv2", "group"),
]


@pytest.mark.parametrize(
    ("name", "net", "norm"),
    [*DEEP, *(pytest.param(*case, marks=pytest.mark.slow) for case in DEEP_AND_SLOW)],
)
def test_engines_agree_on_deeper_nets(name: str, net: str, norm: str, tmp_path: Path) -> None:
    """Channels are removed behind the frozen layers; clients are stacked side by side."""
    found = {}
    for engine in (Serial(), Wired(), Batched()):
        options = {"width": 4, "norm": norm}
        run = frozen_run(small(name), tmp_path / engine.name, net, CALMER, options, rounds=1)
        before = run.net.constants()
        found[engine.name] = tensors(play(run, engine))
        assert trees.identical(before, run.net.constants())
    assert trees.identical(found["serial"], found["wired"])
    assert trees.distance(found["serial"], found["batched"]) < 1e-9


def test_pool_is_serial_with_frozen_layers(tmp_path: Path) -> None:
    engine = Pool(workers=2)
    try:
        mine = tensors(play(frozen_run(small("fedavg"), tmp_path / "pool", "bn-cnn2"), engine))
    finally:
        engine.close()
    alone = tensors(play(frozen_run(small("fedavg"), tmp_path / "serial", "bn-cnn2"), Serial()))
    assert trees.identical(mine, alone)


def test_runs_with_other_frozen_weights_share_no_stack(tmp_path: Path) -> None:
    """Of another seed: their modules print alike, and what is frozen in them differs."""
    jobs = []
    alone = []
    shape = (1, 8, 8)
    data = federation(shape, (20, 13))
    for seed in (0, 1):
        module = nets.build("bn-cnn2", shape, 3, seed, width=4).double()
        freeze(module, shape, 0.34)
        run = Run(methods.FedAvg(local=CALM), data, Net(module, shape), Memory(tmp_path), cohort=2)
        tasks = run.method.plan(run.initial_state, [0, 1])
        jobs += [(run, task) for task in tasks]
        alone += [answer for _, answer in Serial().map((run, task) for task in tasks)]
    together = [answer for _, answer in Batched().map(jobs)]
    for one, other in zip(together, alone, strict=True):
        mine = one.give["model"].values
        assert trees.distance(mine, other.give["model"].values) < 1e-9
    first, second = (together[i].give["model"].values["conv2.weight"] for i in (0, 2))
    assert not torch.equal(first, second)
