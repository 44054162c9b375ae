"""What a method of one's own may do beside training one model, on every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import (
    admitted,
    answers,
    federation,
    make_run,
    play,
    remembered,
    reports,
    tensors,
)
from tests.contract import small
from torch import nn

import fedgrove
from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.core import (
    AnyMethod,
    Batch,
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Measure,
    Outcome,
    Packet,
    Report,
    Server,
    Setup,
    Stage,
    Task,
    Train,
)
from fedgrove.engines import Pool, Serial, Wired, work
from fedgrove.engines.batched import engine as batched
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import FedgroveError, InputError
from fedgrove.nets import Net, Output
from fedgrove.parts.aggregate import Averaging, WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import Objective, ProblemLoss, Proximal
from fedgrove.parts.one_model import (
    OneModel,
    average,
    deliver_model,
    initial_model,
    send_model,
    train_cohort,
)
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import build
from fedgrove.trees import Mask, Tree
from fedgrove.wire.codec import Codec, Dense


@dataclass(frozen=True)
class Plain:
    """FedAvg, to be changed in one place by each test."""

    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, setup: Setup) -> Any:
        return initial_model(setup)

    def deliver(self, state: Any, client: int) -> Mapping[str, Packet]:
        return deliver_model(state)

    def plan(self, state: Any, cohort: Sequence[int]) -> list[Task]:
        return train_cohort(state, cohort)

    def fold(self, state: Any, reports: Iterable[Report]) -> Any:
        return average(state, reports, self.mean)

    def work(self, verb: str) -> tuple[Stage, ...]:
        return {"train": self.training(), "use": ()}[verb]

    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss(), self.local), Give(send_model))


@dataclass(frozen=True)
class Played:
    """What is left of a run: the state, what clients remember, and their scores."""

    state: Any
    tree: Tree
    scores: list[dict[str, float]]


def on_every_engine(method: AnyMethod, folder: Path, **words: Any) -> Played:
    """Play a run on every engine, compare what is left of it, and return that of serial."""
    played = {}
    for engine in (Serial(), Pool(workers=2), Wired(), Batched()):
        run = make_run(method, folder / engine.name, **words)
        state = play(run, engine)
        scores = []
        for report in admitted(run, engine, plan_scoring(run, state, "finetune")):
            scores.append(dict(report.metrics))
        tree = {**tensors(state), **remembered(run)}
        played[engine.name] = Played(state, tree, scores)
        engine.close()
    serial = played["serial"]
    for name in ("pool", "wired"):
        assert trees.identical(played[name].tree, serial.tree), name
        assert played[name].scores == serial.scores, name
    assert trees.distance(played["batched"].tree, serial.tree) < 1e-9
    for mine, alone in zip(played["batched"].scores, serial.scores, strict=True):
        assert mine == pytest.approx(alone, abs=1e-9)
    return serial


# ---- what some clients remember, and others do not -----------------------------------------------


@dataclass(frozen=True)
class Drift(Objective):
    """A pull that only a client which took part before has (as in FedDC)."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        if "drift" not in carry:
            return 0 * out.logits.sum(), {}
        drift = trees.pick(carry["drift"], params)
        model = trees.pick(carry["model"], params)
        away = trees.map(torch.add, trees.sub(params, model), drift)
        return 0.25 * trees.sq_norm(away), {}


def keep_drift(carry: Carry, client: Client) -> Outcome:
    moved = trees.sub(carry["local"], carry["model"])
    drift = moved
    if "drift" in carry:
        drift = trees.map(torch.add, carry["drift"], moved)
    return Outcome({"model": Packet(carry["local"])}, memory={"drift": drift})


@dataclass(frozen=True)
class WithDrift(Plain):
    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss() + Drift(), self.local), Give(keep_drift))


def seen_twice(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    times = 2.0 if "seen" in carry else 1.0
    return {"examples": times * batch.weight.sum()}


def shifted(carry: Carry, client: Client) -> Outcome:
    shift = 1e-3 * float(carry["counted"]["examples"])
    model = trees.map(lambda v: v + shift, carry["local"])
    return Outcome({"model": Packet(model)}, memory={"seen": {"x": torch.zeros(1)}})


@dataclass(frozen=True)
class WithSeen(Plain):
    def training(self) -> tuple[Stage, ...]:
        return (
            Train(ProblemLoss(), self.local),
            Measure("counted", seen_twice),
            Give(shifted),
        )


@pytest.mark.parametrize("method", [WithDrift(), WithSeen()], ids=["in Train", "in Measure"])
def test_new_clients_among_old_ones(method: AnyMethod, tmp_path: Path) -> None:
    """In a cohort of three of four, some have the memory that a stage asks for and one has not."""
    on_every_engine(method, tmp_path)


ONE_STACK = ["fedavg", "ca-afp", "ditto", "fedchar", "fedbn", "lg-fedavg", "local", "clusterfl"]


@pytest.mark.parametrize("name", ONE_STACK)
def test_new_and_old_clients_of_our_own_methods_form_one_stack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ditto's personal model, FedBN's norms: who has them already must not cost a second stack."""
    counts = []
    split = batched.split_into_stacks

    def counted(jobs: Any, stage: Any, is_on_gpu: bool) -> Any:
        stacks = split(jobs, stage, is_on_gpu)
        counts.append(len(stacks))
        return stacks

    monkeypatch.setattr(batched, "split_into_stacks", counted)
    sizes = (20, 13, 24, 17, 18, 19, 16, 15)
    run = make_run(small(name), tmp_path, net="bn-cnn2", sizes=sizes, cohort=4, rounds=2)
    # Two cohorts of four: some clients took part twice, and some never.
    state = play(run, Batched())
    list(reports(run, Batched(), plan_scoring(run, state, "finetune")))
    assert set(counts) == {1}


# ---- training on the server ----------------------------------------------------------------------


@dataclass(frozen=True)
class ServerState:
    round: int
    model: Tree
    critic: Tree
    seeds: tuple[int, ...] = ()
    threads: int = 0
    is_half: bool = False


@dataclass(frozen=True)
class ServerTrained(Plain):
    """The server trains a net of its own, with dropout; every round takes two exchanges."""

    def nets(self, net: Net) -> Mapping[str, Net]:
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Dropout(0.5), nn.Linear(6, 1))
        return {"critic": Net(module.double(), net.shape)}

    def init(self, setup: Setup) -> ServerState:
        return ServerState(0, setup.params, setup.nets["critic"].params())

    def fold(self, state: ServerState, reports: Iterable[Report]) -> ServerState:
        model = average(OneModel(0, state.model), reports, self.mean).model
        done = state.round + int(state.is_half)
        return replace(state, round=done, model=model, is_half=not state.is_half)

    def train_server(self, state: ServerState, server: Server) -> ServerState:
        leaves = {name: v.clone().requires_grad_() for name, v in state.critic.items()}
        x = torch.ones(8, 12, dtype=torch.float64)
        loss = server.nets["critic"](leaves, x, train=True).logits.square().sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        critic = {}
        for (name, v), gradient in zip(leaves.items(), gradients, strict=True):
            critic[name] = (v - 1e-3 * gradient).detach()
        seen = (*state.seeds, server.seed)
        return replace(state, critic=critic, seeds=seen, threads=torch.get_num_threads())


def test_the_server_trains_the_same_wherever_clients_do(tmp_path: Path) -> None:
    """To the bit, dropout included, however torch's generator and threads were left."""
    torch.set_num_threads(2)
    torch.manual_seed(1)
    first = on_every_engine(ServerTrained(), tmp_path / "first")
    torch.set_num_threads(1)
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    run = make_run(ServerTrained(), tmp_path / "second")
    state = play(run, Serial())
    # The run drew nothing from the caller's generator.
    assert torch.equal(torch.rand(1), drawn)
    assert trees.identical(state.critic, first.state.critic)
    assert trees.distance(state.critic, run.initial_state.critic) > 1e-4
    assert first.state.threads == 1


def test_every_exchange_has_a_server_seed_of_its_own_also_in_a_resumed_run(tmp_path: Path) -> None:
    run = make_run(ServerTrained(), tmp_path / "whole")
    whole = play(run, Serial())
    # Three rounds of two exchanges.
    assert len(set(whole.seeds)) == 6
    # Stopped after three exchanges, in the middle of the second round, as lockstep does it.
    run = make_run(ServerTrained(), tmp_path / "parts")
    folder = RunFolder.create(tmp_path / "run", "method = 1\n")
    member = Member(run, folder, every=0)
    member.restore()
    for _ in range(3):
        member.fold(member.exchange.tasks, answers(run, Serial(), member.exchange.tasks))
        member.commit(0.0)
    again = Member(run, folder, every=0)
    train_alone(again, Serial())
    assert again.exchange.state.seeds == whole.seeds


# ---- a prediction of one's own -------------------------------------------------------------------


@dataclass(frozen=True)
class Shifted(Plain):
    """Predicts the class after the one that the model names: the last class after the others."""

    tuned: str = "model"

    def predict(self, net: Net, model: Tree, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        return net(carry["model"], x, train=False).logits.roll(1, 1)


@dataclass(frozen=True)
class Untunable(Plain):
    def predict(self, net: Net, model: Tree, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        return net(carry["model"], x, train=False).logits.roll(1, 1)


def test_clients_are_scored_by_what_they_predict(tmp_path: Path) -> None:
    played = on_every_engine(Shifted(), tmp_path / "shifted")
    plain = on_every_engine(Plain(), tmp_path / "plain")
    # The same training, and so the same model; on the same data, another class each.
    assert trees.identical(played.tree, plain.tree)
    for mine, usual in zip(played.scores, plain.scores, strict=True):
        assert mine["test0"] + usual["test0"] <= 1
        assert mine["test_loss0"] != usual["test_loss0"]
        # Fine-tuning moved the model that the prediction reads.
        assert mine["test_loss1"] != mine["test_loss0"]


def test_what_a_prediction_may_not_read_is_not_fine_tuned(tmp_path: Path) -> None:
    tiny = federation((12,), (20, 13))
    with pytest.raises(
        InputError, match=r"untunable has its own way to predict, and does not name"
    ):
        build(Untunable(), tiny, Memory(tmp_path), finetune=(0, 5))
    build(Untunable(), tiny, Memory(tmp_path), finetune=(0,))
    build(Shifted(), tiny, Memory(tmp_path), finetune=(0, 5))


def test_a_part_of_a_prediction_is_not_exported(tmp_path: Path) -> None:
    words: dict[str, Any] = {"clients": 3, "rounds": 1, "engine": "serial", "progress": False}
    result = fedgrove.run(Untunable(), data="digits", out=tmp_path / "run", **words)
    assert any("models/ contains only the tree 'model'" in note for note in result.summary["notes"])
    with pytest.raises(InputError, match="predict in their method's own way"):
        fedgrove.export_model(result, client=0)


# ---- a masked packet of another name -------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    round: int
    model: Tree
    mask: Mask


@dataclass(frozen=True)
class MaskedStudent(Plain):
    """What is trained is called "student", and every second weight of it is pruned."""

    def init(self, setup: Setup) -> Sparse:
        mask = {}
        for name in setup.layout.prunable:
            places = torch.arange(setup.params[name].numel())
            mask[name] = (places % 2 == 0).view(setup.params[name].shape)
        return Sparse(0, trees.apply_mask(setup.params, mask), mask)

    def deliver(self, state: Sparse, client: int) -> Mapping[str, Packet]:
        return {"student": Packet(state.model, state.mask)}

    def plan(self, state: Sparse, cohort: Sequence[int]) -> list[Task]:
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: Sparse, reports: Iterable[Report]) -> Sparse:
        mean = self.mean.start(state.model)
        for report in reports:
            mean.add(report.give["student"].values, report.examples)
        return replace(state, round=state.round + 1, model=mean.value())

    def work(self, verb: str) -> tuple[Stage, ...]:
        if verb == "use":
            return (Edit(use_student),)
        return (Train(ProblemLoss(), self.local, start="student"), Give(send_student))


def use_student(carry: Carry, client: Client) -> Carry:
    return {**carry, "model": carry["student"], "model.mask": carry["student.mask"]}


def send_student(carry: Carry, client: Client) -> Outcome:
    return Outcome({"student": Packet(carry["local"], carry["student.mask"])})


def test_a_tree_is_trained_under_the_mask_that_came_with_it(tmp_path: Path) -> None:
    played = on_every_engine(MaskedStudent(), tmp_path)
    state = played.state
    for name, mask in state.mask.items():
        assert not state.model[name][~mask].any()
        assert state.model[name][mask].all()
    assert {score["density"] for score in played.scores} == {0.5}


# ---- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named(Plain):
    """A pull to a tree of this name, made in an Edit, sent as a packet, or remembered."""

    name: str = "anchor"
    how: str = "edit"

    def plan(self, state: Any, cohort: Sequence[int]) -> list[Task]:
        send = dict(deliver_model(state))
        if self.how == "packet":
            send[self.name] = Packet(state.model)
        return [Task(k, send) for k in cohort]

    def anchor(self, carry: Carry, client: Client) -> Carry:
        return {self.name: carry["model"], **carry}

    def send(self, carry: Carry, client: Client) -> Outcome:
        memory = {self.name: carry["local"]} if self.how == "memory" else {}
        return Outcome({"model": Packet(carry["local"])}, memory=memory)

    def training(self) -> tuple[Stage, ...]:
        last = Give(self.send, holds_model)
        if self.how != "edit":
            return (Train(ProblemLoss(), self.local), last)
        train = Train(ProblemLoss() + Proximal(1.0, to=self.name), self.local)
        return (Edit(self.anchor), train, last)


def holds_model(task: Task, net: Net) -> ExpectedReport:
    return ExpectedReport({"model": ExpectedPacket.of(task.send["model"].values)})


@pytest.mark.parametrize("name", ["before", "optimiser", "anchor"])
def test_engines_take_no_name_for_themselves(name: str, tmp_path: Path) -> None:
    on_every_engine(Named(name=name), tmp_path)


@pytest.mark.parametrize("engine", [Serial(), Batched()], ids=["serial", "batched"])
@pytest.mark.parametrize("how", ["packet", "memory"])
@pytest.mark.parametrize("name", ["settings", "client", "aux", "own", "model.mask"])
def test_names_that_are_taken_are_refused(name: str, how: str, engine: Any, tmp_path: Path) -> None:
    if (name, how) == ("model.mask", "memory"):
        pytest.skip("a client may remember its mask")
    run = make_run(Named(name=name, how=how), tmp_path)
    # A packet ends the run at once; a memory is found on the client, whose task is lost.
    with pytest.raises(FedgroveError, match=rf"calls a {how} '{name}'"):
        play(run, engine)


@dataclass(frozen=True)
class WithSecond(Plain):
    second: str = "model"
    trained: str = "model"
    is_net: bool = True

    def nets(self, net: Net) -> Mapping[str, Any]:
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
        return {self.second: Net(module, net.shape) if self.is_net else module}

    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss(), self.local, net=self.trained), Give(send_model))


def test_nets_that_cannot_be_told_apart_or_found_are_refused(tmp_path: Path) -> None:
    tiny = federation((12,), (20, 13))
    for method, sentence in (
        (WithSecond(), "calls one of its nets 'model'"),
        (WithSecond(second="critic", is_net=False), r"net 'critic' of the method is Sequential"),
        (WithSecond(second="critic", trained="critc"), "did you mean 'critic'"),
    ):
        with pytest.raises(InputError, match=sentence):
            build(method, tiny, Memory(tmp_path))


# ---- straight through, what an objective begins with, several nets -------------------------------


@dataclass(frozen=True)
class Rounded:
    """Weights to the nearest multiple of a step that the client was sent."""

    def __call__(self, params: Tree, carry: Carry) -> Tree:
        step = carry["settings"]["step"]
        return {name: (value / step).round() * step for name, value in params.items()}


@dataclass(frozen=True)
class StraightThrough(Plain):
    step: float = 0.05

    def plan(self, state: Any, cohort: Sequence[int]) -> list[Task]:
        return [Task(k, deliver_model(state), {"step": self.step}) for k in cohort]

    def training(self) -> tuple[Stage, ...]:
        return (Train(ProblemLoss(), self.local, at=Rounded()), Give(send_model))


@pytest.mark.parametrize("net", ["mlp", "har-cnn", "bn-cnn2"])
def test_weights_of_the_forward_pass(net: str, tmp_path: Path) -> None:
    coarse = on_every_engine(StraightThrough(), tmp_path / "coarse", net=net)
    fine = on_every_engine(StraightThrough(step=1e-9), tmp_path / "fine", net=net)
    plain = play(make_run(Plain(), tmp_path / "plain", net=net), Serial())
    # Steps too small to matter are no steps; large ones do matter.
    assert trees.distance(fine.state.model, plain.model) < 1e-5
    assert trees.distance(coarse.state.model, plain.model) > 1e-3


@dataclass(frozen=True)
class Waning(Objective):
    """The loss, of which less counts with every step of a task; at first the share of the round."""

    def begin(self, params: Tree, carry: Carry) -> Tree:
        return {"share": 1 / (1 + carry["settings"]["round"])}

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        share = carry["aux"]["share"]
        loss, _ = ProblemLoss()(out, params, batch, carry)
        return share * loss, {"share": share / 2}


@dataclass(frozen=True)
class WithWaning(Plain):
    def training(self) -> tuple[Stage, ...]:
        return (Train(Waning(), self.local), Give(send_model))


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_what_an_objective_begins_with(net: str, tmp_path: Path) -> None:
    waning = on_every_engine(WithWaning(), tmp_path / "waning", net=net)
    plain = play(make_run(Plain(), tmp_path / "plain", net=net), Serial())
    assert trees.distance(waning.state.model, plain.model) > 1e-3


@dataclass(frozen=True)
class TwoModels:
    round: int
    model: Tree
    student: Tree


@dataclass(frozen=True)
class WithStudent(Plain):
    """A small net is trained beside the run's own, and both are averaged."""

    def nets(self, net: Net) -> Mapping[str, Net]:
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
        return {"student": Net(module.double(), net.shape)}

    def init(self, setup: Setup) -> TwoModels:
        return TwoModels(0, setup.params, setup.nets["student"].params())

    def deliver(self, state: TwoModels, client: int) -> Mapping[str, Packet]:
        return {"model": Packet(state.model), "student": Packet(state.student)}

    def plan(self, state: TwoModels, cohort: Sequence[int]) -> list[Task]:
        return [Task(k, self.deliver(state, k)) for k in cohort]

    def fold(self, state: TwoModels, reports: Iterable[Report]) -> TwoModels:
        means = {name: self.mean.start(getattr(state, name)) for name in ("model", "student")}
        for report in reports:
            for name, mean in means.items():
                mean.add(report.give[name].values, report.examples)
        return TwoModels(state.round + 1, means["model"].value(), means["student"].value())

    def training(self) -> tuple[Stage, ...]:
        return (
            Train(ProblemLoss(), self.local),
            Train(ProblemLoss(), self.local, "student", "local_student", net="student"),
            Give(send_both),
        )


def send_both(carry: Carry, client: Client) -> Outcome:
    give = {"model": Packet(carry["local"]), "student": Packet(carry["local_student"])}
    return Outcome(give)


def test_a_second_net_is_trained_beside_the_first(tmp_path: Path) -> None:
    two = on_every_engine(WithStudent(), tmp_path / "two")
    run = make_run(Plain(), tmp_path / "one")
    one = play(run, Serial())
    # The first trains as it would alone, and the second moves as well.
    assert trees.identical(two.state.model, one.model)
    start = make_run(WithStudent(), tmp_path / "start").initial_state.student
    assert trees.distance(two.state.student, start) > 1e-2


@dataclass(frozen=True)
class Taught(Objective):
    """The run's own net, as the carry has it, teaches the net that is trained."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        teacher = out.nets["model"](carry["local"], batch.x, train=False).logits.detach()
        away = (out.logits - teacher).square().sum(1)
        return (away * batch.weight).sum() / batch.weight.sum(), {}


def students_outputs(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    logits = net.nets["student"](carry["local_student"], batch.x, train=False).logits
    return {"sum": (logits * batch.weight[:, None]).sum(0)}


@dataclass(frozen=True)
class TaughtStudent(WithStudent):
    """A student that is taught by the model, alone travels, and alone predicts (as in FedKD)."""

    tuned: str = "student"

    def training(self) -> tuple[Stage, ...]:
        taught = ProblemLoss() + Taught()
        return (
            Train(ProblemLoss(), self.local),
            Train(taught, self.local, "student", "local_student", net="student"),
            Measure("outputs", students_outputs, of="local_student"),
            Give(send_outputs, holds_outputs),
        )

    def predict(self, net: Net, model: Tree, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        return net.nets["student"](carry["student"], x, train=False).logits


def send_outputs(carry: Carry, client: Client) -> Outcome:
    return replace(send_both(carry, client), metrics={"first": float(carry["outputs"]["sum"][0])})


def holds_outputs(task: Task, net: Net) -> ExpectedReport:
    shapes = {name: ExpectedPacket.of(net.nets[name].params()) for name in ("model", "student")}
    return ExpectedReport(shapes, {"first": (-1e6, 1e6)})


def test_several_nets_and_a_prediction_of_ones_own(tmp_path: Path) -> None:
    """Objective, Measure, holds and predict each reach the net that they need."""
    taught = on_every_engine(TaughtStudent(), tmp_path / "taught")
    alone = on_every_engine(WithStudent(), tmp_path / "alone")
    assert trees.identical(taught.state.model, alone.state.model)
    assert trees.distance(taught.state.student, alone.state.student) > 1e-3
    # The students predict, not the models; and they are what is fine-tuned.
    for score, other in zip(taught.scores, alone.scores, strict=True):
        assert score["test_loss0"] != other["test_loss0"]
        assert score["test_loss1"] != score["test_loss0"]
    kept = [name for name in taught.tree if "/own/" in name]
    assert kept
    assert not any("fc1" in name for name in kept)


class Recurrent(nn.Module):
    """A network that ``vmap`` cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x.unsqueeze(2))[0][:, -1]


@dataclass(frozen=True)
class FromRecurrent(Objective):
    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        teacher = out.nets["student"](carry["student"], batch.x, train=False).logits.detach()
        away = (out.logits - teacher).square().sum(1)
        return (away * batch.weight).sum() / batch.weight.sum(), {}


@dataclass(frozen=True)
class TaughtByRecurrent(WithStudent):
    def nets(self, net: Net) -> Mapping[str, Net]:
        return {"student": Net(Recurrent().double(), net.shape)}

    def training(self) -> tuple[Stage, ...]:
        return (Train(FromRecurrent(), self.local), Edit(keep_student), Give(send_both))


def keep_student(carry: Carry, client: Client) -> Carry:
    return {**carry, "local_student": carry["student"]}


def test_a_net_beside_the_trained_one_may_be_one_that_cannot_be_stacked(tmp_path: Path) -> None:
    on_every_engine(TaughtByRecurrent(), tmp_path)


# ---- a whole teacher of a student without some channels ------------------------------------------


@dataclass(frozen=True)
class FromTeacher(Objective):
    """As near as it can be to what a dense model of the same net gives."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[torch.Tensor, Tree]:
        teacher = out.whole(carry["teacher"], batch.x, train=False).logits.detach()
        away = (out.logits - teacher).square().sum(1)
        return (away * batch.weight).sum() / batch.weight.sum(), {}


@dataclass(frozen=True)
class Distilled(MaskedStudent):
    """Every second channel of the student is pruned; the teacher has all."""

    def init(self, setup: Setup) -> Sparse:
        channels = {}
        for group in find_groups(setup.net):
            channels[group.name] = torch.arange(group.size) % 2 == 0
        mask = make_channel_mask(setup.net, channels)
        return Sparse(0, trees.apply_mask(setup.params, mask), mask)

    def work(self, verb: str) -> tuple[Stage, ...]:
        if verb == "use":
            return (Edit(use_student),)
        train = Train(FromTeacher(), self.local, start="student", whole=("teacher",))
        return (Edit(dense_teacher), train, Give(send_student))


def dense_teacher(carry: Carry, client: Client) -> Carry:
    teacher = {name: value + 0.05 for name, value in client.start.items()}
    return {**carry, "teacher": teacher}


@pytest.mark.parametrize("net", ["har-cnn", "bn-cnn2"])
def test_a_teacher_stays_whole_beside_a_narrow_student(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training without the channels is training with them masked, on every engine."""
    thin = on_every_engine(Distilled(), tmp_path / "thin", net=net)
    monkeypatch.setattr(work, "find_small_net", lambda net, mask: None)
    run = make_run(Distilled(), tmp_path / "masked", net=net)
    masked = play(run, Serial())
    # Running statistics of channels that are not there mean nothing.
    params = run.net.layout.params
    mine = trees.pick(thin.state.model, params)
    assert trees.distance(trees.pick(masked.model, params), mine) < 1e-9
    assert trees.distance(masked.model, run.initial_state.model) > 1e-3
