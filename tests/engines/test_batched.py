"""The parts of the batched engine: plans, side-by-side networks, halved stacks, diverging runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, reports
from torch import Tensor, nn
from torch.func import vmap

from fedgrove import engines, methods, trees
from fedgrove.core import Batch, Carry, Packet, Task
from fedgrove.engines import Serial
from fedgrove.engines.batched import convolution, graphs, grouped, launching, stacking
from fedgrove.engines.batched import engine as batched_engine
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.batched.graphs import STEPS_MULTIPLE, CapturedStack, GraphCache
from fedgrove.engines.batched.jobs import from_template, to_template
from fedgrove.engines.batched.launching import Launcher
from fedgrove.engines.batched.stacking import join_rows, split_rows, stack_carries, start_return
from fedgrove.engines.batched.steps import BatchPlan, Stack
from fedgrove.errors import InputError
from fedgrove.nets import Net, Output, build
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy, Objective, Proximal
from fedgrove.runs.lockstep import limit_threads
from fedgrove.runs.rounds import plan, rounds
from fedgrove.runs.run import Run
from fedgrove.trees import Tree

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_plan_by_hand() -> None:
    """Batches of two: one client makes two passes over three examples, the other one over one."""
    passes = [[torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2])], [torch.tensor([0])]]
    plan = BatchPlan.of(passes, 2, [10, 20], torch.float32, CPU)
    assert plan.index[0].tolist() == [[2, 0], [1, 0], [0, 1], [2, 0]]
    assert plan.row[0].tolist() == [[12, 10], [11, 10], [10, 11], [12, 10]]
    assert plan.weight[0].tolist() == [[1, 1], [1, 0], [1, 1], [1, 0]]
    assert plan.position[0].tolist() == [0, 1, 0, 1]
    assert plan.weight[1].tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert plan.row[1, 0].tolist() == [20, 20]
    assert plan.steps.tolist() == [4, 1]


def test_a_plan_of_nothing_has_no_steps() -> None:
    """As where no client has validation examples."""
    empty = torch.zeros(0, dtype=torch.long)
    plan = BatchPlan.of([[empty], [empty]], 2, [0, 0], torch.float32, CPU)
    assert plan.row.shape == (2, 0, 1)
    assert plan.steps.tolist() == [0, 0]
    # Beside a client with one example it has padding only.
    plan = BatchPlan.of([[empty], [torch.tensor([0])]], 2, [0, 0], torch.float32, CPU)
    assert plan.weight.tolist() == [[[0]], [[1]]]
    assert plan.steps.tolist() == [0, 1]


def test_a_plan_grows_without_changing() -> None:
    plan = BatchPlan.of([[torch.arange(5)]], 2, [0], torch.float32, CPU)
    roomy = plan.with_room(2, 16)
    assert roomy.row.shape == (2, 16, 2)
    assert torch.equal(roomy.row[:1, :3], plan.row)
    assert float(roomy.weight[:, 3:].sum()) == 0
    assert roomy.steps.tolist() == [3, 0]
    loaded = roomy.loaded(BatchPlan.of([[torch.tensor([4, 3])]], 2, [7], torch.float32, CPU))
    assert loaded.row is roomy.row
    assert loaded.row[0, 0].tolist() == [11, 10]
    assert loaded.steps.tolist() == [1, 0]
    assert loaded.counts.tolist() == [1]
    assert loaded.sizes.tolist() == [[2]]


@pytest.mark.parametrize("is_little", [True, False], ids=["little work", "much work"])
def test_a_captured_stack_serves_fewer_clients_and_more_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_little: bool
) -> None:
    """Nothing is captured here, but all else is as on a card.

    Seven clients and then eight share a stack, which may have room for more, of which some are
    always done before others.
    """
    captured: set[tuple[int, bool]] = set()

    def capture(self: CapturedStack, size: int, all_active: bool, ragged: bool) -> Any:
        captured.add((size, all_active))
        return SimpleNamespace(replay=partial(self.stack.advance, size, all_active, ragged))

    if not is_little:
        monkeypatch.setattr(graphs, "LITTLE_STEP", 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CapturedStack, "_capture", capture)
    monkeypatch.setattr(GraphCache, "_memory_is_short", lambda self: False)
    made: list[int] = []
    make_room = Stack.make_room

    def noted(self: Stack, clients: int, multiple: int) -> None:
        made.append(clients)
        make_room(self, clients, multiple)

    monkeypatch.setattr(Stack, "make_room", noted)
    run = make_run(
        methods.FedAvg(local=LocalTraining(1, 4, Adam(1e-2, eps=1e-3))),
        tmp_path,
        sizes=(20, 13, 24, 17, 9, 8, 30, 11),
        cohort=8,
    )
    engine = Batched()
    engine._launcher.graph_cache = GraphCache()
    for count in (7, 8, 5):
        tasks = [Task(k, {"model": Packet(run.params)}) for k in list(run.infos)[:count]]
        expected = list(reports(run, Serial(), tasks))
        for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
            assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
    assert made == ([10] if is_little else [8, 5])
    assert (10, False) in captured if is_little else (8, True) in captured
    # One graph does, where a smaller one would not save anything.
    assert (len(captured) == 1) == is_little


def test_what_was_stacked_for_one_stage_is_there_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[int] = []
    stack_on_device = stacking.stack_on_device

    def noted(stacks: Any, device: torch.device) -> list[Tensor]:
        moved.append(len(stacks))
        return stack_on_device(stacks, device)

    monkeypatch.setattr(stacking, "stack_on_device", noted)
    carries = [{"kept": {"w": torch.full((2,), float(k))}, "own": {}} for k in range(3)]
    recent = stacking.RecentStacks()
    first = stack_carries(carries, CPU, recent)
    for k, carry in enumerate(carries):
        carry["own"] = {"w": torch.full((2,), 10.0 + k)}
    second = stack_carries(carries, CPU, recent)
    assert moved == [1, 1]
    assert second["kept"]["w"] is first["kept"]["w"]
    assert second["own"]["w"][:, 0].tolist() == [10.0, 11.0, 12.0]
    # Other clients, or the same in another order, are another stack.
    assert stack_carries(carries[::-1], CPU, recent)["kept"]["w"][:, 0].tolist() == [2.0, 1.0, 0.0]
    carries[1]["kept"]["w"].fill_(5.0)
    assert stack_carries(carries, CPU, recent)["kept"]["w"][:, 0].tolist() == [0.0, 5.0, 2.0]
    # No more than so much is kept, and nothing for the next exchange.
    recent.clear()
    monkeypatch.setattr(stacking, "RECENT_BYTES", 23)
    for _ in range(2):
        stack_carries(carries[:1], CPU, recent)
    stack_carries(carries, CPU, recent)
    stack_carries(carries, CPU, recent)
    assert moved[4:] == [2, 0, 2, 2]


def test_floats_become_slots_and_a_zero_stays() -> None:
    hyperparameters: list[float] = []
    stage = (CrossEntropy() + Proximal(0.5), LocalTraining(2, 8, SGD(0.1, momentum=0.9)))
    template = to_template(stage, hyperparameters)
    # mu, lr, momentum, decay; no weight decay, no clip
    assert hyperparameters == [0.5, 0.1, 0.9, 1.0]
    assert from_template(template, hyperparameters) == stage
    assert to_template(SGD(0.1, weight_decay=0.1), []) != to_template(SGD(0.1), [])
    assert to_template(SGD(0.2), []) == to_template(SGD(0.1), [])
    assert hash(template) == hash(to_template(stage, []))


NETS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", (1, 8, 8), {}),
    ("har-cnn", (3, 16), {"dropout": False}),
    ("mnist-cnn", (1, 12, 12), {}),
    ("lenet", (3, 32, 32), {}),
    ("leafcnn", (1, 28, 28), {}),
    ("bn-cnn2", (1, 8, 8), {"width": 4}),
    ("bn-cnn4", (3, 16, 16), {"width": 4}),
    ("resnet18", (3, 8, 8), {"width": 4}),
    ("resnet18", (3, 8, 8), {"width": 4, "norm": "group"}),
    ("shufflenetv2", (3, 8, 8), {"width": 4}),
    ("shufflenetv2", (3, 8, 8), {"width": 4, "norm": "group"}),
    ("resnet18", (3, 32, 32), {"width": 4, "stem": "large"}),
    ("shufflenetv2", (3, 32, 32), {"width": 4, "norm": "group", "stem": "large"}),
]


@pytest.mark.parametrize(
    ("name", "shape", "options"), NETS, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(NETS)]
)
def test_side_by_side_is_each_alone(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Logits, features, gradients and running statistics of three clients, in train mode."""
    net = Net(build(name, shape, 3, 0, **options).double(), shape)
    g = torch.Generator().manual_seed(1)
    tree = {k: torch.stack([v + 0.1 * i for i in range(3)]) for k, v in net.params().items()}
    x = torch.randn(3, 4, *shape, generator=g, dtype=torch.float64)
    assert grouped.supports(net, x)

    def side_by_side(stacked: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return grouped.forward(net, stacked, x, train=True)

    def one_by_one(stacked: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = []
        features = []
        for i in range(3):
            out = net({k: v[i] for k, v in stacked.items()}, x[i], train=True)
            logits.append(out.logits)
            features.append(out.features)
        return torch.stack(logits), torch.stack(features)

    def results(forward: Any) -> dict[str, Tensor]:
        params = {k: tree[k].clone().requires_grad_() for k in net.layout.params}
        # Moved in place by the forward pass.
        buffers = {k: tree[k].clone() for k in net.layout.buffers}
        logits, features = forward(params | buffers)
        grads = torch.autograd.grad(logits.square().sum(), list(params.values()))
        return {
            "logits": logits.detach(),
            "features": features.detach(),
            **dict(zip(params, grads, strict=True)),
            **buffers,
        }

    mine = results(side_by_side)
    expected = results(one_by_one)
    assert mine.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(mine[name], expected[name])


def test_what_runs_have_in_common_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs whose densities differ from the second pruning step on, and another seed."""
    sizes: list[int] = []

    class Counted(Stack):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sizes.append(len(self.hyperparameters))

    monkeypatch.setattr(launching, "Stack", Counted)
    schedules = {"a": (1.0, 0.5), "b": (1.0, 0.5), "c": (1.0, 0.8), "d": (1.0, 0.5)}
    data = make_run(methods.FedAvg(), tmp_path, net="bn-cnn2").federation

    def made(name: str, place: str) -> Run:
        slimming = methods.Hermes(
            0.5, densities=schedules[name], guided=1, tune=1, local=LocalTraining(1, 8, SGD(0.1))
        )
        run = make_run(
            slimming, tmp_path / place / name, net="bn-cnn2", cohort=4, seed=int(name == "d")
        )
        return replace(run, federation=data)

    runs = {name: made(name, "together") for name in schedules}
    engine = Batched()
    loops = {name: rounds(run) for name, run in runs.items()}
    exchanges = {name: next(loop) for name, loop in loops.items()}
    while any(exchange.tasks for exchange in exchanges.values()):
        jobs = []
        for name, exchange in exchanges.items():
            jobs += [(runs[name], task) for task in exchange.tasks]
        done = list(engine.map(jobs))
        for name, loop in loops.items():
            exchanges[name] = loop.send(
                [(task, answer) for (run, task), answer in done if run is runs[name]]
            )
    # The first pruning step of a, b and c is one; in the second c has another density, and is wider
    # from then on, in a stack of its own; d shares nothing.
    assert sizes == [4 * distinct for distinct in (2, 2, 3, 2, 1, 2, 1)]
    for name, exchange in exchanges.items():
        alone = play(made(name, "alone"), Serial())
        assert trees.distance(exchange.state.model, alone.model) < 1e-9


class Rescaled(nn.Module):
    """Looks across its channels in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.softmax(1) if self.training else x)


class Hidden(nn.Module):
    """A setting that does not show in its text."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.by * x)


class Flat(nn.Module):
    """BatchNorm of numbers in a row, without scale or shift."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12, affine=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Untracked(nn.Module):
    """BatchNorm that always takes the statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.unflatten(1, (3, 2, 2))).flatten(1))


OTHERS = {
    "train mode only": (Rescaled, Rescaled),
    "hidden settings": (partial(Hidden, 1.0), partial(Hidden, 3.0)),
    "flat": (Flat, Flat),
    "untracked": (Untracked, Untracked),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_modules_of_others_train_as_alone(kind: str, tmp_path: Path) -> None:
    """Two runs in one map; short batches; the last client has no examples."""
    nets = []
    for make in OTHERS[kind]:
        torch.manual_seed(0)
        nets.append(Net(make().double(), (12,)))
    method = methods.FedAvg(local=LocalTraining(2, 8, SGD(0.1)))

    def run_of(i: int, place: str) -> Run:
        run = make_run(method, tmp_path / place / str(i), sizes=(20, 13, 0), cohort=3)
        return replace(run, net=nets[i])

    jobs = []
    for i in range(2):
        run = run_of(i, "together")
        jobs += [(run, task) for task in plan(run, run.method.init(run.setup))]
    for (_, mine), (_, alone) in zip(list(Batched().map(jobs)), Serial().map(jobs), strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-10


class Odd(nn.Module):
    """Looks across its channels: side by side, it would see other clients' channels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.softmax(1))


def test_a_network_that_does_not_fit_is_left_to_vmap(tmp_path: Path) -> None:
    net = Net(Odd().double(), (12,))
    assert not grouped.supports(net, torch.randn(3, 4, 12, dtype=torch.float64))
    method = methods.FedAvg(local=LocalTraining(2, 8, Adam(1e-2, eps=1e-3)))
    alone = play(replace(make_run(method, tmp_path / "a"), net=net), Serial())
    stacked = play(replace(make_run(method, tmp_path / "b"), net=net), Batched())
    assert trees.distance(alone.model, stacked.model) < 1e-12


def test_too_little_memory_halves_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    train_stack = launching.train_stack

    def tight(stack: Any) -> Any:
        sizes.append(len(stack.hyperparameters))
        if len(stack.hyperparameters) > 2:
            raise torch.OutOfMemoryError("no room")
        return train_stack(stack)

    run = make_run(
        methods.FedAvg(local=LocalTraining(1, 8, SGD(0.1))),
        tmp_path,
        sizes=(20, 13, 24, 17, 9),
        cohort=5,
    )
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    monkeypatch.setattr(launching, "train_stack", tight)
    for mine, alone in zip(reports(run, Batched(), tasks), expected, strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
    assert sizes == [5, 2, 3, 1, 2]


def test_a_client_that_does_not_fit_is_trained_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the serial engine, to the bit, and a note says it. Where memory is there again in the
    next round, clients are stacked again."""
    train_stack = launching.train_stack
    is_short = True

    def tight(stack: Any) -> Any:
        if is_short:
            raise torch.OutOfMemoryError("no room")
        return train_stack(stack)

    run = make_run(methods.FedAvg(), tmp_path)
    tasks = [Task(k, {"model": Packet(run.params)}) for k in (1, 2)]
    expected = list(reports(run, Serial(), tasks))
    monkeypatch.setattr(launching, "train_stack", tight)
    engine = Batched()
    for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
        assert trees.identical(mine.give["model"].values, alone.give["model"].values)
        assert (mine.cost, mine.macs) == (alone.cost, alone.macs)
    (note,) = engine.notes(run)
    assert note.startswith("a client's work was done on the CPU 2 times, which is slower: cpu had")
    is_short = False
    for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
    assert engine.notes(run) == [note]


@pytest.mark.parametrize(
    ("per_client", "free", "share", "expected"),
    [
        (100, 1000, 0.8, 8),  # 800 hold 8
        (101, 1000, 0.8, 7),  # 800 / 101 = 7.9
        # Does not fit; whether it does without a margin is found out by trying.
        (1000, 1000, 0.8, 1),
        (0, 1000, 0.5, 500),  # nothing was seen to grow: a byte each
    ],
)
def test_how_many_fit_by_hand(per_client: int, free: int, share: float, expected: int) -> None:
    assert batched_engine.count_fitting_clients(per_client, free, share) == expected


def test_a_cut_plan_has_the_first_steps() -> None:
    plan = BatchPlan.of([[torch.arange(5)], [torch.arange(2)]], 2, [0, 5], torch.float32, CPU)
    short = plan.first_steps(2)
    assert short.row.tolist() == [[[0, 1], [2, 3]], [[5, 6], [5, 5]]]
    assert short.steps.tolist() == [2, 1]
    assert plan.first_steps(None) is plan


def test_a_stack_in_parts_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where two clients fit at a time."""
    run = make_run(
        methods.FedAvg(local=LocalTraining(1, 8, SGD(0.1))),
        tmp_path,
        sizes=(20, 13, 24, 17, 9),
        cohort=5,
    )
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    monkeypatch.setattr(Batched, "_stack_size", lambda self, jobs, number: 2)
    for mine, alone in zip(reports(run, Batched(), tasks), expected, strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12


@CUDA
@pytest.mark.parametrize("graphs", [True, False])
def test_memory_is_measured_once_and_the_stack_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Forty clients, five to a stack: the same models, and the second round measures nothing."""
    run = make_run(
        methods.FedAvg(local=LocalTraining(2, 8, SGD(0.1))),
        tmp_path,
        sizes=(20, 13) * 20,
        cohort=40,
    )
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    measured: list[tuple[int, int]] = []

    def five(per_client: int, free: int) -> int:
        measured.append((per_client, free))
        return 5

    monkeypatch.setattr(batched_engine, "count_fitting_clients", five)
    engine = Batched(device="cuda", graphs=graphs)
    for _ in range(2):
        for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
            assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
    assert len(measured) == 1
    per_client, free = measured[0]
    assert 0 < per_client < free


@CUDA
def test_a_graph_of_the_last_step_reads_nothing_behind_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client does 16 steps, as many as a captured plan has room for, and the last one alone.

    Its graph is captured there, and warmed up with steps of its own.
    """
    monkeypatch.setattr(graphs, "LITTLE_STEP", 0)
    run = make_run(
        methods.FedAvg(local=LocalTraining(1, 4, SGD(0.1))), tmp_path, sizes=(64, 20, 12), cohort=3
    )
    counts = [len(run.federation.clients[k].train) for k in run.infos]
    assert max(-(-count // 4) for count in counts) == STEPS_MULTIPLE
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    engine = Batched(device="cuda")
    for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12


def test_parts_take_turns_and_answers_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card: the next part is begun before the last one is asked for its answers."""
    run = make_run(
        methods.FedAvg(local=LocalTraining(1, 8, SGD(0.1))),
        tmp_path,
        sizes=(20, 13, 24, 17, 9, 11, 8),
        cohort=7,
    )
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    events: list[str] = []
    begin = Batched._start_chunk
    answers_of = Batched._finish_chunk

    def in_twos(self: Batched, stream: Any) -> Any:
        jobs = list(stream)
        yield from (jobs[i : i + 2] for i in range(0, len(jobs), 2))

    def noted_begin(self: Batched, jobs: Any, *rest: Any) -> Any:
        events.append(f"begin {jobs[0][1].to}")
        return begin(self, jobs, *rest)

    def noted_answers(self: Batched, part: Any, sent: Any, counters: Any) -> Any:
        events.append(f"answer {part.jobs[0].task.to}")
        yield from answers_of(self, part, sent, counters)

    monkeypatch.setattr(Batched, "_split_into_chunks", in_twos)
    monkeypatch.setattr(Batched, "_start_chunk", noted_begin)
    monkeypatch.setattr(Batched, "_finish_chunk", noted_answers)
    found = list(reports(run, Batched(chunk=4), tasks))
    assert [report.of for report in found] == [report.of for report in expected]
    for mine, alone in zip(found, expected, strict=True):
        assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
    # Four clients at most are under way.
    assert " ".join(events) == (
        "begin 0 begin 2 answer 0 begin 4 answer 2 begin 6 answer 4 answer 6"
    )


def test_an_abandoned_map_trains_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts are under way, and nobody asks for more than the first answer."""
    run = make_run(methods.FedAvg(), tmp_path, sizes=(20, 13, 24, 17), cohort=4)
    jobs = [(run, Task(k, {"model": Packet(run.params)})) for k in run.infos]
    launched: list[int] = []
    launch = Launcher._launch_training

    def noted(self: Batched, jobs: Any, number: int, steps: Any) -> Any:
        launched.append(len(jobs))
        return launch(self, jobs, number, steps)

    monkeypatch.setattr(
        Batched, "_split_into_chunks", lambda self, stream: iter([jobs[:2], jobs[2:]])
    )
    monkeypatch.setattr(Launcher, "_launch_training", noted)
    answers = Batched().map(jobs)
    next(answers)
    before = torch.get_rng_state()
    answers.close()
    assert launched == [2, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_training_on_a_cpu_has_the_threads_that_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the server, which asks for the answers, does with one."""
    run = make_run(methods.FedAvg(), tmp_path)
    threads: list[int] = []
    train_stack = launching.train_stack

    def noted(stack: Stack) -> Any:
        threads.append(torch.get_num_threads())
        return train_stack(stack)

    monkeypatch.setattr(launching, "train_stack", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine = Batched()
        with limit_threads(run.net.layout.size):
            list(reports(run, engine, [Task(0, {"model": Packet(run.params)})]))
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert threads == [3]


def test_a_norm_without_a_shift_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "has_triton", lambda: True)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([1.0, 2.0, 3.0])
    mine = grouped._GroupedMode(1)._batch_norm(x, None, None, scale, None, training=True)
    assert torch.equal(mine, nn.functional.batch_norm(x, None, None, scale, None, training=True))


@CUDA
def test_dropout_draws_the_same_whether_a_graph_was_there_or_not(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net="har-cnn", options={}, dtype=torch.float32)
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    engine = Batched("cuda")
    first, second = (list(reports(run, engine, tasks)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert trees.identical(one.give["model"].values, other.give["model"].values)


def test_runs_that_may_begin_alike_are_not_parted(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path / "a")
    other_seed = make_run(methods.FedAvg(), tmp_path / "b", seed=1)
    other_seed = replace(other_seed, federation=run.federation)
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    one = [(run, task) for task in tasks]
    assert not batched_engine.may_be_duplicates(one)
    assert not batched_engine.may_be_duplicates(one + [(other_seed, task) for task in tasks])
    assert batched_engine.may_be_duplicates(one + one)


@dataclass(frozen=True)
class Branching(Objective):
    """Cross-entropy, with a branch on data that vmap cannot take."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        loss, aux = CrossEntropy()(out, params, batch, carry)
        return (loss if loss > 0 else 2 * loss), aux


@dataclass(frozen=True)
class Copying(Objective):
    """Cross-entropy, with a number from the CPU in every step, which no graph can capture."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        loss, aux = CrossEntropy()(out, params, batch, carry)
        return loss * torch.tensor([1.0], device=batch.x.device)[0], aux


@pytest.mark.parametrize(
    ("device", "objective"),
    [
        ("cpu", Branching()),
        pytest.param("cuda", Branching(), marks=CUDA),
        pytest.param("cuda", Copying(), marks=CUDA),
    ],
)
def test_work_that_cannot_be_stacked_or_captured_counts_once(
    device: str, objective: Objective, tmp_path: Path
) -> None:
    """It ends as on the serial engine, and computes as much."""
    local = LocalTraining(2, 8, SGD(0.1))
    run = make_run(methods.FedAvg(objective=objective, local=local), tmp_path)
    tasks = [Task(k, {"model": Packet(run.params)}) for k in run.infos]
    expected = list(reports(run, Serial(), tasks))
    engine = Batched(device)
    for _ in range(2):
        for mine, alone in zip(reports(run, engine, tasks), expected, strict=True):
            assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12
            assert mine.macs == alone.macs
    is_stacked = isinstance(objective, Copying)
    assert (engine.notes(run) == []) == is_stacked


def test_a_member_that_diverges_does_not_touch_the_others(tmp_path: Path) -> None:
    """Three runs in one stack; the second one's learning rate is far too large."""
    rates = (0.1, 1e300, 0.05)
    runs = [
        make_run(methods.FedAvg(local=LocalTraining(2, 8, SGD(lr))), tmp_path / str(lr), seed=i)
        for i, lr in enumerate(rates)
    ]
    jobs = [(run, Task(k, {"model": Packet(run.params)})) for run in runs for k in (0, 1)]
    together = list(Batched().map(jobs))
    for ((run, _), mine), (_, alone) in zip(together, Serial().map(jobs), strict=True):
        finite = all(bool(v.isfinite().all()) for v in mine.give["model"].values.values())
        assert finite == (run is not runs[1])
        if finite:
            assert trees.distance(mine.give["model"].values, alone.give["model"].values) < 1e-12


def test_bytes_may_be_left_uncounted(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    (report,) = reports(run, Batched(count_bytes=False), [Task(0, {"model": Packet(run.params)})])
    assert report.cost == {}


def test_choosing_an_engine() -> None:
    assert isinstance(engines.choose("batched", "cpu"), Batched)
    assert engines.choose("serial").name == "serial"
    with pytest.raises(InputError, match="did you mean 'batched'"):
        engines.choose("batchd")
    with pytest.raises(InputError, match="there is no precision 'fp8'"):
        engines.choose("batched", "cpu", "fp8")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="torch finds no CUDA device here; use device='cpu'"):
            engines.choose("auto", "cuda")


def test_vmap_is_what_it_is_compared_with() -> None:
    """The oracle of the tests above, networks alone, is what vmap gives too."""
    net = Net(build("mlp", (5,), 3, 0).double(), (5,))
    tree = {k: torch.stack([v, v + 1]) for k, v in net.params().items()}
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    logits = vmap(lambda t, x: net(t, x, train=False).logits)(tree, x)
    for i in range(2):
        alone = net({k: v[i] for k, v in tree.items()}, x[i], train=False)
        torch.testing.assert_close(logits[i], alone.logits)


def test_rows_of_a_stack_are_each_clients_tree_and_one_vector() -> None:
    stacked = {"w": torch.arange(12.0).view(3, 2, 2), "b": torch.tensor([20.0, 21.0, 22.0])}
    rows = join_rows(stacked)
    assert rows[1].tolist() == [4.0, 5.0, 6.0, 7.0, 21.0]
    forest = split_rows(rows, {name: leaf[0] for name, leaf in stacked.items()})
    assert trees.identical(trees.stack(forest), stacked)
    for row, tree in zip(rows, forest, strict=True):
        vector = trees.as_vector(tree)
        assert vector is not None
        assert vector.data_ptr() == row.data_ptr()
    assert len(start_return({}, [0, 0, 0]).trees()) == 3
    assert trees.identical(start_return(stacked, [0, 1, 0]).trees()[2], forest[2])
