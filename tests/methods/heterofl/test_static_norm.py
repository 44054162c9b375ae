"""HeteroFL's static BatchNorm: statistics collected after training, against torch's own."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, tensors
from tests.methods.exchanges import exchanges
from torch import nn

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.selection import select_first
from fedgrove.channels.shrink import shrink
from fedgrove.core import Batch, Batches, Packet, Report
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.methods import CaldasDropout, FedDrop, FedRolex, HeteroFL
from fedgrove.methods.heterofl.static_norm import (
    STATISTICS,
    BatchStatistics,
    batch_moments,
    statistics_names,
)
from fedgrove.nets import Net, build
from fedgrove.nets.freeze import freeze
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.rounds import plan

F64 = torch.float64


def batch(x: torch.Tensor, padding: int = 0) -> Batch:
    n = len(x)
    weight = torch.ones(n, dtype=x.dtype)
    if padding:
        weight[-padding:] = 0
    return Batch(x, torch.zeros(n).long(), weight, torch.arange(n), torch.tensor(0))


def test_moments_by_hand() -> None:
    """Two images of one channel and two positions: 1, 3, 5, 7. The mean is 4, the squares 9, 1, 1, 9
    make 5 of 4. A third image is padding."""
    x = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]], [[100.0, 100.0]]])
    mean, variance, count = batch_moments(x, torch.tensor([1.0, 1.0, 0.0]))
    assert (mean.tolist(), variance.tolist(), count.item()) == ([4.0], [5.0], 4.0)


def test_a_layers_statistics_by_hand() -> None:
    """Batches (1, 3) and (5, 9) in front of the first BatchNorm: means 2 and 7, unbiased variances 2
    and 8. It gives -1 and 1 each time: 0 and 2 in front of the second."""
    module = nn.Sequential(nn.BatchNorm1d(1, eps=0.0), nn.BatchNorm1d(1, eps=0.0), nn.Linear(1, 2))
    net = Net(module, (1,))
    total: Any = None
    for values in ((1.0, 3.0), (5.0, 9.0)):
        x = torch.tensor(values).view(2, 1)
        found = BatchStatistics()(net, net.params(), batch(x), {})
        total = found if total is None else trees.map(torch.add, total, found)
    assert {name: leaf.tolist() for name, leaf in total.items()} == {
        "0.running_mean": [9.0],
        "0.running_var": [10.0],
        "1.running_mean": [0.0],
        "1.running_var": [4.0],
        "batches": 2.0,
    }


@pytest.mark.parametrize("name", ["bn-cnn2", "resnet18"])
def test_statistics_are_torchs_cumulative_average(name: str) -> None:
    """torch's BatchNorm with momentum=None, as the authors have it, over the same batches."""
    shape = (3, 8, 8)
    net = Net(build(name, shape, 3, 0, width=4).to(F64), shape)
    params = net.params()
    module = copy.deepcopy(net.module).train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None
            part.num_batches_tracked = torch.tensor(0)
    g = torch.Generator().manual_seed(0)
    total: Any = None
    for n in (6, 5, 9):
        x = torch.randn(n, *shape, generator=g, dtype=F64)
        module(x)
        padded = torch.cat([x, torch.randn(2, *shape, generator=g, dtype=F64)])
        found = BatchStatistics()(net, params, batch(padded, padding=2), {})
        total = found if total is None else trees.map(torch.add, total, found)
    state = module.state_dict()
    names = statistics_names(net)
    assert names == net.layout.buffers
    for leaf in names:
        torch.testing.assert_close(total[leaf] / total["batches"], state[leaf])
    # Nothing is written.
    assert trees.identical(params, net.params())


def test_statistics_of_a_narrow_network_are_those_of_the_small_one() -> None:
    shape = (1, 8, 8)
    net = Net(build("bn-cnn2", shape, 3, 0, width=4).to(F64), shape)
    groups = find_groups(net)
    mask = make_channel_mask(net, select_first(groups, 0.5))
    masked = trees.apply_mask(net.params(), mask)
    small, narrow = shrink(net, net.params(), mask)
    x = batch(torch.randn(6, *shape, dtype=F64))
    wide = BatchStatistics()(net, masked, x, {})
    thin = BatchStatistics()(small, narrow, x, {})
    for name in statistics_names(net):
        size = len(thin[name])
        torch.testing.assert_close(wide[name][:size], thin[name])


def test_frozen_norms_keep_theirs() -> None:
    module = build("bn-cnn2", (1, 8, 8), 3, 0, width=4)
    freeze(module, (1, 8, 8), 0.4)
    assert statistics_names(Net(module, (1, 8, 8))) == ("norm2.running_mean", "norm2.running_var")


def test_a_frozen_norm_is_used_and_not_collected() -> None:
    """The frozen one has mean 1 and variance 4: of (1, 3) it makes 0 and 1, and a weight of 2 makes 0
    and 2. In front of the other the mean is 1 and the unbiased variance 2."""
    module = nn.Sequential(
        nn.BatchNorm1d(1, eps=0.0), nn.Linear(1, 1),
        nn.Linear(1, 1), nn.BatchNorm1d(1, eps=0.0), nn.Linear(1, 2),
    )  # fmt: skip
    values = {"0.running_mean": 1, "0.running_var": 4, "1.weight": 2, "1.bias": 0}
    values |= {"2.weight": 1, "2.bias": 0}
    leaves: Any = module.state_dict()
    for name, value in values.items():
        leaves[name].fill_(value)
    freeze(module, (1,), 0.34)
    net = Net(module, (1,))
    found = BatchStatistics()(net, net.params(), batch(torch.tensor([[1.0], [3.0]])), {})
    assert {name: leaf.tolist() for name, leaf in found.items()} == {
        "3.running_mean": [1.0],
        "3.running_var": [2.0],
        "batches": 1.0,
    }


def test_what_nobody_collects_stays_as_it_was(tmp_path: Path) -> None:
    """Client 0 is whole, client 1 of half width, client 2 of a quarter. Client 1 has no examples,
    client 2's report is lost: their widths keep their own statistics, not those of the whole."""
    method = HeteroFL(widths=(1.0, 0.5, 0.25))
    run = make_run(method, tmp_path, net="bn-cnn2", sizes=(20,) * 3)
    first = trees.pick(run.params, run.net.layout.buffers)

    def told(client: int, value: float, examples: int) -> Report:
        values = trees.map(lambda leaf: torch.full_like(leaf, value), first)
        return Report(client, {STATISTICS: Packet(values)}, examples)

    state = replace(run.initial_state, is_trained=True)
    state = method.fold(state, [told(0, 2.0, 20), told(1, 3.0, 20), told(2, 4.0, 20)])
    state = replace(state, is_trained=True)
    state = method.fold(state, [told(0, 5.0, 20), told(1, 9.0, 0)])
    for name in first:
        assert set(state.model[name].tolist()) == {5.0}
        assert set(state.statistics[0.5][name].tolist()) == {3.0}
        assert set(state.statistics[0.25][name].tolist()) == {4.0}


def test_a_round_has_two_exchanges(tmp_path: Path) -> None:
    """After training no statistics have changed; then those of each width are there."""
    method = HeteroFL(widths=(1.0, 0.5))
    run = make_run(method, tmp_path, net="bn-cnn2", rounds=2, sizes=(20, 9, 30, 14), cohort=4)
    names = run.net.layout.buffers
    rounds = []
    for before, tasks, answers, after in exchanges(run):
        rounds.append(before.round)
        if before.is_trained:
            assert {task.verb for task in tasks} == {STATISTICS}
            assert after.round == before.round + 1
            assert {report.of for report in answers} >= {task.to for task in tasks}
            for name in names:
                expected = sum(
                    r.give[STATISTICS].values[name] * r.examples for r in answers if r.of % 2 == 0
                ) / sum(r.examples for r in answers if r.of % 2 == 0)
                torch.testing.assert_close(after.model[name], expected)
            assert sorted(after.statistics) == [0.5]
            # What each uses has the statistics of its own width.
            for client, share in ((0, 1.0), (1, 0.5)):
                used = method.deliver(after, client)["model"].values
                own = after.statistics.get(share, after.model)
                assert all(torch.equal(used[name], own[name]) for name in names)
        else:
            assert all(task.verb.startswith("train") for task in tasks)
            assert (after.round, after.is_trained) == (before.round, True)
            assert all(torch.equal(after.model[name], before.model[name]) for name in names)
    assert rounds == [0, 0, 1, 1]


def test_a_width_that_the_cohort_lacks_is_collected_too(tmp_path: Path) -> None:
    """Widths 1, .5, .25 in turn, five clients; of the cohort (0, 3) both are whole. Each round another
    client of the same width is asked."""
    method = HeteroFL(widths=(1.0, 0.5, 0.25))
    run = make_run(method, tmp_path, net="bn-cnn2", sizes=(20,) * 5)
    state = replace(run.initial_state, is_trained=True)
    assert [task.to for task in method.plan(state, [0, 3])] == [0, 1, 2, 3]
    assert [task.to for task in method.plan(replace(state, round=1), [0, 3])] == [0, 2, 3, 4]
    # Where the whole model is used, there is one width.
    rolex = FedRolex(widths=(1.0, 0.5, 0.25))
    assert [task.to for task in rolex.plan(state, [0, 3])] == [0, 3]


def test_a_client_averages_over_shuffled_batches(tmp_path: Path) -> None:
    """300 examples are a batch of 256 and one of 44, each counted once, in the order of a shuffle."""
    run = make_run(HeteroFL(), tmp_path, net="bn-cnn2", sizes=(300,))
    (task,) = plan(run, replace(run.initial_state, is_trained=True))
    client = run.client(task, {})
    found = perform(run, task, {})[0].give[STATISTICS].values
    expected: Any = None
    sizes = []
    for each in client.batches(Batches("train", shuffle=True), 0):
        sizes.append(len(each.y))
        values = BatchStatistics()(run.net, run.params, each, {})
        expected = values if expected is None else trees.map(torch.add, expected, values)
    assert sizes == [256, 44]
    for name in run.net.layout.buffers:
        torch.testing.assert_close(found[name], expected[name] / 2)


def test_a_client_with_one_example_sends_what_it_got(tmp_path: Path) -> None:
    """One example has no variance."""
    run = make_run(HeteroFL(), tmp_path, net="bn-cnn2", sizes=(1, 20))
    state = replace(run.initial_state, is_trained=True)
    (task, other) = plan(run, state)
    sent = task.send["model"].values
    found = perform(run, task, {})[0].give[STATISTICS].values
    assert trees.identical(found, trees.pick(sent, run.net.layout.buffers))
    moved = perform(run, other, {})[0].give[STATISTICS].values
    assert not trees.equal(moved, found)


def test_whose_papers_collect(tmp_path: Path) -> None:
    for method, collects in (
        (HeteroFL(), True), (FedRolex(), True), (FedDrop(), False), (CaldasDropout(), False)
    ):  # fmt: skip
        folder = tmp_path / type(method).__name__
        run = make_run(method, folder / "batch", net="bn-cnn2")
        assert bool(run.initial_state.collected) == collects
        # Without BatchNorm there is nothing to collect, and no second exchange.
        plain = make_run(
            method, folder / "group", net="bn-cnn2", options={"width": 4, "norm": "group"}
        )
        assert plain.initial_state.collected == ()
        assert sum(1 for _ in exchanges(plain)) == plain.rounds


@pytest.mark.parametrize("method", [HeteroFL, FedRolex, FedDrop])
@pytest.mark.parametrize("net", ["bn-cnn2", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_all_engines_agree(method: Any, net: str, tmp_path: Path) -> None:
    """Ragged batches, three widths, all three features, whichever the paper has."""
    made = method(widths=(1.0, 0.75, 0.5), scale=True, masked=True, static=True)
    states = {}
    for engine in (Serial(), Wired(), Pool(workers=2), Batched()):
        run = make_run(
            made, tmp_path / engine.name, net=net, sizes=(12, 9, 17, 10, 5), cohort=4,
            options={"width": 4}, rounds=2,
        )  # fmt: skip
        states[engine.name] = tensors(play(run, engine))
        engine.close()
    assert trees.identical(states["serial"], states["wired"])
    assert trees.identical(states["serial"], states["pool"])
    assert trees.distance(states["serial"], states["batched"]) < 1e-9


def test_a_state_between_the_exchanges_is_written_and_read(tmp_path: Path) -> None:
    """Statistics are by share, which is no text."""
    run = make_run(
        HeteroFL(widths=(1.0, 0.5, 0.25)), tmp_path, net="bn-cnn2", sizes=(20,) * 3, cohort=3
    )
    states = [after for *_, after in exchanges(run)]
    for state in states[1:3]:
        found: trees.Tree = {}
        body = json.loads(json.dumps(state_to_json(state, found)))
        again = state_from_json(body, found, run.initial_state)
        assert (again.round, again.is_trained, again.shares) == (
            state.round, state.is_trained, state.shares
        )  # fmt: skip
        assert sorted(again.statistics) == [0.25, 0.5]
        assert trees.identical(tensors(again), tensors(state))
