"""Every engine gives the same answer, and the seams the coming engines need hold for every method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Noting, admitted, make_run, play, remembered, reports, tensors
from tests.contract import advise, contract_of, small
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from fedgrove import methods, trees
from fedgrove.channels.shrink import find_small_net
from fedgrove.core import (
    Answer,
    Batch,
    Carry,
    Edit,
    Give,
    Job,
    Measure,
    Outcome,
    Packet,
    Report,
    Task,
    Train,
)
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.work import make_carry, number_stages, perform
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.runs.run import Run
from fedgrove.wire.codec import Bitmap, Dense, Smallest

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]


# ---- serial = pool, to the bit, dropout included -------------------------------------------------


@pytest.mark.parametrize("method", EVERY)
def test_pool_is_serial_to_the_bit(method, tmp_path: Path) -> None:
    found = []
    for engine in (Noting(Serial()), Noting(Pool(workers=2))):
        run = make_run(
            method, tmp_path / engine.name, net="har-cnn", options={}, dtype=torch.float32, rounds=2
        )
        assert any(type(m).__name__ == "Dropout" for m in run.net.module.modules())
        state = play(run, engine)
        scores = [
            (r.of, dict(r.metrics), r.cost)
            for r in admitted(run, engine, plan_scoring(run, state, "finetune"))
        ]
        found.append((tensors(state), remembered(run), scores, engine.macs))
        engine.close()
    (a, kept_a, scores_a, macs_a), (b, kept_b, scores_b, macs_b) = found
    assert trees.identical(a, b)
    assert trees.identical(kept_a, kept_b)
    assert kept_a
    assert scores_a == scores_b
    assert macs_a == macs_b
    assert any(macs > 0 for _, _, macs in macs_a)


def test_batch_norm_on_the_pool(tmp_path: Path) -> None:
    states = []
    for engine in (Serial(), Pool(workers=2)):
        run = make_run(
            methods.FedBN(), tmp_path / engine.name, net="bn-cnn2", dtype=torch.float32, rounds=2
        )
        states.append((tensors(play(run, engine)), remembered(run)))
        engine.close()
    assert trees.identical(*(s[0] for s in states))
    assert trees.identical(*(s[1] for s in states))


# ---- Train and Measure under vmap over three clients, against three clients alone ----------------


def settled(run: Run, stage: Train, carry: Carry) -> Carry:
    """The statistics of removed channels as if the net had been shrunk."""
    thin = find_small_net(run.net, carry.get(stage.mask_name))
    return carry if thin is None else {**carry, stage.end: thin.reset_removed(carry[stage.end])}


def stacked(run: Run, tasks: list[Task], memories: list[dict[str, trees.Tree]]) -> list[Report]:
    """What a batching engine does: Train and Measure on stacked carries, Edit and Give one client at a time."""
    clients = [run.client(task, memory) for task, memory in zip(tasks, memories, strict=True)]
    carries = [make_carry(task, m, torch.float64) for task, m in zip(tasks, memories, strict=True)]
    outcomes = [Outcome()] * len(tasks)
    for number, stage in number_stages(run.work(tasks[0].verb)):
        net = run.net_named(getattr(stage, "net", "model"))
        match stage:
            case Train():
                carry = stack([local.start_training(net, stage, c) for c in carries])
                for batches in zip(
                    *(local.epochs(net, stage, c, number) for c in clients), strict=True
                ):
                    carry = vmap(lambda c, b, s=stage, n=net: local.step(n, s, c, b))(
                        carry, join(batches)
                    )
                carries = [settled(run, stage, c) for c in unstack(carry, len(tasks))]
            case Measure():
                carry = stack(carries)
                total = None
                for batches in zip(*(c.batches(stage.over, number) for c in clients), strict=True):
                    one = vmap(lambda c, b, s=stage, n=net: s.f(n, c[s.of], b, c))(
                        carry, join(batches)
                    )
                    total = one if total is None else trees.map(torch.add, total, one)
                carries = [
                    {**c, stage.name: t}
                    for c, t in zip(carries, trees.unstack(total or {}, len(tasks)), strict=True)
                ]
            case Edit():
                carries = [stage.f(c, client) for c, client in zip(carries, clients, strict=True)]
            case Give():
                outcomes = [stage.f(c, client) for c, client in zip(carries, clients, strict=True)]
    return [
        Report(t.to, o.give, 20, {**o.metrics, **kept(o)})
        for t, o in zip(tasks, outcomes, strict=True)
    ]


def kept(outcome: Outcome) -> dict[str, float]:
    return {
        f"{n}/{k}": float(v.double().sum())
        for n, tree in outcome.memory.items()
        for k, v in tree.items()
    }


def stack(carries: list[Carry]) -> Carry:
    return {k: trees.stack([c[k] for c in carries]) if carries[0][k] else {} for k in carries[0]}


def unstack(carry: Carry, n: int) -> list[Carry]:
    return [
        {k: {leaf: v[i] for leaf, v in tree.items()} for k, tree in carry.items()} for i in range(n)
    ]


def join(batches: Iterable[Batch]) -> Batch:
    """Batches of equal size as one."""
    return Batch(*(torch.stack(v) for v in zip(*batches, strict=True)))


ADAM = LocalTraining(2, 8, Adam(1e-2))
MOMENTUM = LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-3), decay=0.9, clip=0.5)


# Both recipes once, with and without norm layers; the rest says little more.
VMAPPED = [
    pytest.param(ADAM, "bn-cnn2", id="adam-bn-cnn2"),
    pytest.param(MOMENTUM, "mlp", id="sgd-mlp"),
    pytest.param(ADAM, "mlp", id="adam-mlp", marks=pytest.mark.slow),
    pytest.param(ADAM, "har-cnn", id="adam-har-cnn", marks=pytest.mark.slow),
    pytest.param(MOMENTUM, "bn-cnn2", id="sgd-bn-cnn2", marks=pytest.mark.slow),
    pytest.param(MOMENTUM, "har-cnn", id="sgd-har-cnn", marks=pytest.mark.slow),
]


def with_equal_labels(run: Run) -> Run:
    """The run where all clients have the same labels in the same order: their folds are as large."""
    y = run.federation.client(0).train.y
    clients = {}
    for k, data in run.federation.clients.items():
        clients[k] = replace(data, train=replace(data.train, y=y))
    return replace(run, federation=replace(run.federation, clients=clients))


@pytest.mark.parametrize(("recipe", "net"), VMAPPED)
@pytest.mark.parametrize("method", EVERY)
def test_stages_under_vmap_equal_clients_alone(
    method, recipe: LocalTraining, net: str, tmp_path: Path
) -> None:
    run = make_run(replace(method, local=recipe), tmp_path, net=net, sizes=(20, 20, 20), cohort=3)
    run = with_equal_labels(run)
    state = run.method.init(run.setup)
    planned = [*plan(run, state), *plan_scoring(run, state, "finetune")]
    # An exchange may have tasks of several verbs; only tasks of one verb are stacked.
    for verb in dict.fromkeys(task.verb for task in planned):
        tasks = [replace(task, round=2) for task in planned if task.verb == verb]
        together = stacked(run, tasks, [{} for _ in tasks])
        for mine, task in zip(together, tasks, strict=True):
            alone, memory = perform(run, task, {})
            expected = {**alone.metrics, **kept(Outcome(memory=memory))}
            assert mine.metrics == pytest.approx(expected, abs=1e-9)
            assert mine.give.keys() == alone.give.keys()
            for name, packet in alone.give.items():
                assert trees.distance(mine.give[name].values, packet.values) < 1e-10


# ---- every Task and Report through real bytes ----------------------------------------------------


CODECS = [Dense(), Bitmap(), Smallest()]


def coded() -> Iterator[Any]:
    """Every method with one codec, in turn, and in the slow tests with every one."""
    for turn, param in enumerate(EVERY):
        (method,) = param.values
        for number, codec in enumerate(CODECS):
            marks = () if number == turn % len(CODECS) else pytest.mark.slow
            name = f"{param.id}-{type(codec).__name__}"
            yield pytest.param(method, codec, id=name, marks=marks)


@pytest.mark.parametrize(("method", "codec"), list(coded()))
def test_real_bytes_change_nothing(method, codec, tmp_path: Path) -> None:
    method = replace(method, codec=codec)
    plain, wired = (
        make_run(method, tmp_path / n, net="bn-cnn2", dtype=torch.float32, rounds=2)
        for n in ("plain", "wired")
    )
    here, there = Noting(Serial()), Noting(Wired())
    a, b = play(plain, here), play(wired, there)
    assert trees.identical(tensors(a), tensors(b))
    assert trees.identical(remembered(plain), remembered(wired))
    assert here.macs == there.macs


@pytest.mark.parametrize("method", EVERY)
def test_reported_bytes_are_the_length_of_the_messages(method, tmp_path: Path) -> None:
    plain, wired = (
        make_run(method, tmp_path / n, net="bn-cnn2", dtype=torch.float32)
        for n in ("plain", "wired")
    )
    state = plain.method.init(plain.setup)
    tasks = plan(plain, state)
    for counted, real in zip(
        reports(plain, Serial(), tasks), reports(wired, Wired(), tasks), strict=True
    ):
        # Wired has compared its counts with the bytes it wrote.
        assert counted.cost == real.cost


class Counting(Serial):
    """Serial, with torch's own count of what a task takes beside ours."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job in jobs:
            with FlopCounterMode(display=False) as counted:
                [(_, answer)] = list(super().map([job]))
            assert isinstance(answer, Report)
            # A multiply-accumulate is two operations.
            operations = counted.get_total_flops()
            assert bool(operations) == bool(answer.macs)
            if operations:
                self.shares.append(operations / (2 * answer.macs))
            yield job, answer


@pytest.mark.parametrize("method", EVERY)
def test_what_is_counted_is_what_torch_computes(method, tmp_path: Path) -> None:
    """Three passes for a gradient are a little too many: the first layer's input has none.

    A Measure that takes gradients and does not say so with ``passes`` shows here.
    """
    engine = Counting()
    name = methods.name_of(method)
    contract = contract_of(name)
    play(make_run(method, tmp_path, net=contract.macs_net, rounds=2), engine)
    assert engine.shares
    assert min(engine.shares) > 0.8
    more = f"torch counts {max(engine.shares):.3f} of what the virtual clock counts"
    assert max(engine.shares) <= contract.most_macs, advise(name, "most_macs", more)


def test_masked_packets_survive_the_pool(tmp_path: Path) -> None:
    """Masks travel through shared memory as they travel through a codec, and are kept exactly while training."""
    run = make_run(methods.FedAvg(), tmp_path, dtype=torch.float32)
    g = torch.Generator().manual_seed(0)
    mask = {
        k: torch.rand(v.shape, generator=g) < 0.3
        for k, v in run.params.items()
        if k in run.net.layout.prunable
    }
    tasks = [Task(k, {"model": Packet(run.params, mask)}) for k in run.infos]
    for engine in (Serial(), Pool(workers=2)):
        for report in reports(run, engine, tasks):
            values = report.give["model"].values
            assert all(bool((values[k][~m] == 0).all()) for k, m in mask.items())
            assert any(bool((values[k][m] != run.params[k][m]).any()) for k, m in mask.items())
        engine.close()
