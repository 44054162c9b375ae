"""One client's work, stage by stage."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.conftest import answers, make_run, reports

from fedgrove import methods, trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.shrink import cut_channels
from fedgrove.core import (
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    Give,
    Lost,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Task,
    Train,
    expected_no_packets,
)
from fedgrove.engines import Serial
from fedgrove.engines.work import make_carry, number_stages, perform
from fedgrove.errors import EngineError, InputError
from fedgrove.nets import Net
from fedgrove.parts.gradient import Gradient
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import CrossEntropy
from fedgrove.runs.run import Run
from fedgrove.seeds import preserve_rng, single_thread
from fedgrove.wire.codec import Delta, Dense
from fedgrove.wire.message import write_report, write_task
from fedgrove.wire.message_costs import BroadcastCosts, count_report, count_task

W = {"w": torch.ones(2)}
MASK = {"w": torch.tensor([True, False])}


# ---- the carry -----------------------------------------------------------------------------------


def test_the_carry_a_task_starts_with() -> None:
    kept, other = {"k": torch.zeros(1)}, {"w": torch.zeros(2)}
    task = Task(
        0, {"model": Packet(W, MASK), "extra": Packet(W)}, {"lr": 0.5, "phases": [1, 2]}, round=3
    )
    carry = make_carry(task, {"kept": kept, "extra": other}, torch.float64)
    assert set(carry) == {"kept", "extra", "model", "model.mask", "settings", "aux"}
    assert carry["kept"] is kept
    assert (
        carry["extra"] is task.send["extra"].values
    )  # a packet wins over what is remembered under its name
    assert carry["model.mask"] is MASK
    assert {k: v.tolist() for k, v in carry["settings"].items()} == {
        "round": 3.0,
        "lr": 0.5,
        "phases": [1.0, 2.0],
    }
    assert all(v.dtype == torch.float64 for v in carry["settings"].values())
    assert carry["aux"] == {}


def test_the_carry_of_an_empty_task() -> None:
    assert set(make_carry(Task(0), {}, torch.float32)) == {"settings", "aux"}


# ---- stages --------------------------------------------------------------------------------------


def nothing(carry: Carry, client: Client) -> Carry:
    return carry


def give_all(carry: Carry, client: Client) -> Outcome:
    return Outcome(
        {"model": Packet(carry["local"])},
        {"n": float(client.info.examples)},
        {"mine": carry["local"]},
    )


def test_stages_are_numbered_among_their_kind() -> None:
    train, edit, give = Train(CrossEntropy(), None), Edit(nothing), Give(give_all)
    measure = Measure("m", lambda *a: {})
    found = [
        (n, type(s).__name__)
        for n, s in number_stages((edit, train, measure, edit, train, measure, give))
    ]
    assert found == [
        (0, "Edit"),
        (0, "Train"),
        (0, "Measure"),
        (1, "Edit"),
        (1, "Train"),
        (1, "Measure"),
        (0, "Give"),
    ]


def total(net: Net, params: trees.Tree, batch: Batch, carry: Carry) -> trees.Tree:
    return {
        "sum": batch.x.sum(),
        "n": batch.weight.sum(),
        "grad": torch.tensor(float(torch.is_grad_enabled())),
    }


@dataclass(frozen=True)
class Staged(methods.FedAvg):
    """FedAvg whose work is given as stages."""

    stages: tuple[Stage, ...] = ()

    def work(self, verb: str) -> tuple[Stage, ...]:
        return self.stages


def staged(tmp_path: Path, *stages: Stage, **words) -> Run:
    return make_run(Staged(stages=stages), tmp_path, **words)


def test_a_measure_is_the_sum_over_its_batches(tmp_path: Path) -> None:
    seen: list[trees.Tree] = []

    def look(carry: Carry, client: Client) -> Outcome:
        seen.extend([carry["all"], carry["two"], carry["none"]])
        return Outcome()

    run = staged(
        tmp_path,
        Measure("all", total, Batches(size=6)),
        Measure("two", total, Batches("validation", size=2, limit=1)),
        Measure("none", total, Batches(limit=0)),
        Give(look),
    )
    perform(run, Task(0, {"model": Packet(run.params)}), {})
    data = run.federation.clients[0]
    everything, two, none = seen
    assert everything["sum"].item() == pytest.approx(data.train.x.sum().item(), abs=1e-9)
    assert everything["n"].item() == len(data.train)
    assert everything["grad"].item() == 0
    assert two["sum"].item() == pytest.approx(data.validation.x[:2].sum().item(), abs=1e-12)
    assert none == {}


def test_edits_see_what_came_before_and_reports_say_who_and_how_many(tmp_path: Path) -> None:
    def mark(carry: Carry, client: Client) -> Carry:
        return {**carry, "local": {"w": torch.tensor([float(client.id)])}}

    run = staged(tmp_path, Edit(mark), Give(give_all))
    report, kept = perform(run, Task(2), {"old": W})
    assert (report.of, report.examples, report.metrics) == (
        2,
        run.infos[2].examples,
        {"n": run.infos[2].examples},
    )
    assert report.give["model"].values["w"].item() == 2.0
    assert set(kept) == {"old", "mine"}  # a name left out stays as it was


def test_a_client_that_keeps_nothing_new_changes_nothing(tmp_path: Path) -> None:
    report, kept = perform(staged(tmp_path, Give(lambda c, k: Outcome())), Task(0), {"old": W})
    assert (dict(kept), report.give) == ({}, {})


def test_work_without_a_give_reports_nothing(tmp_path: Path) -> None:
    run = staged(tmp_path)
    report, kept = perform(run, Task(1), {})
    assert (report, kept) == (Report(1, {}, 13), {})
    # Nor is it a report that could be folded.
    for other in (run, staged(tmp_path, Edit(nothing))):
        with pytest.raises(EngineError, match=r"^the work of 'train' does not end with Give"):
            other.expected(Task(1))


def test_an_edit_more_or_less_does_not_change_what_a_train_draws(tmp_path: Path) -> None:
    train, give = Train(CrossEntropy(), LocalTraining(1, 8)), Give(give_all)
    trees_ = []
    for i, stages in enumerate(((train, give), (Edit(nothing), train, Edit(nothing), give))):
        run = staged(
            tmp_path / str(i), *stages, net="har-cnn", options={}, dtype=torch.float32
        )  # with dropout
        trees_.append(
            perform(run, Task(0, {"model": Packet(run.params)}), {})[0].give["model"].values
        )
    assert trees.identical(*trees_)


def test_the_same_task_gives_the_same_bits_and_another_round_others(tmp_path: Path) -> None:
    stages = (Train(CrossEntropy(), LocalTraining(1, 8)), Give(give_all))
    run = staged(tmp_path, *stages, net="har-cnn", options={}, dtype=torch.float32)
    task = Task(0, {"model": Packet(run.params)})
    first, again, later = (
        perform(run, t, {})[0].give["model"].values for t in (task, task, replace(task, round=1))
    )
    assert trees.identical(first, again)
    assert not trees.identical(first, later)


def test_two_trains_in_a_row_draw_other_batches(tmp_path: Path) -> None:
    # two stages of one epoch from the same start: another order of examples, so another result
    recipe = LocalTraining(1, 8, SGD(0.1))
    stages = (Train(CrossEntropy(), recipe, end="a"), Train(CrossEntropy(), recipe, end="local"))
    found: list[Carry] = []
    run = staged(tmp_path, *stages, Edit(lambda c, k: (found.append(c), c)[1]))
    perform(run, Task(0, {"model": Packet(run.params)}), {})
    assert trees.distance(found[0]["a"], found[0]["local"]) > 1e-6


# ---- one answer per task -------------------------------------------------------------------------


def fails(error: Exception) -> Edit:
    def fail(carry: Carry, client: Client) -> Carry:
        if client.id == 1:
            raise error
        return {**carry, "local": carry["model"]}

    return Edit(fail)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ValueError("a wrong shape."),
            r"client 1 could not train: ValueError: a wrong shape "
            r"\(at test_work\.py, line \d+\)\.",
        ),
        # One that fedgrove means is a sentence of its own.
        (
            InputError("lr is 0; it must be more."),
            r"client 1 could not train: lr is 0; it must be more\.",
        ),
    ],
)
def test_what_a_client_raises_is_its_answer(
    error: Exception, sentence: str, tmp_path: Path
) -> None:
    run = staged(tmp_path, fails(error), Give(give_all))
    tasks = [Task(k, {"model": Packet(run.params)}) for k in (0, 1, 2)]
    found = list(answers(run, Serial(), tasks))
    assert [task for task, _ in found] == tasks
    good, lost, other = (answer for _, answer in found)
    assert isinstance(good, Report)
    assert isinstance(other, Report)
    assert isinstance(lost, Lost)
    assert (lost.of, lost.reason) == (1, "crashed")
    assert re.fullmatch(sentence, lost.detail)
    # Its task was sent all the same.
    assert lost.cost.keys() == {"down"}
    assert sum(lost.cost["down"].values()) == sum(good.cost["down"].values())


def test_a_client_that_takes_too_long_is_lost(tmp_path: Path) -> None:
    def dawdle(carry: Carry, client: Client) -> Carry:
        if client.id == 1:
            time.sleep(0.6)
        return {**carry, "local": carry["model"]}

    run = staged(tmp_path, Edit(dawdle), Give(give_all))
    tasks = [Task(k, {"model": Packet(run.params)}) for k in (0, 1)]
    (_, good), (_, lost) = answers(run, Serial(timeout=0.5), tasks)
    assert isinstance(good, Report)
    assert isinstance(lost, Lost)
    assert (lost.reason, lost.detail) == ("late", "client 1 did not answer within 0.5 s.")


def test_a_reply_that_cannot_be_written_is_lost(tmp_path: Path) -> None:
    def odd(carry: Carry, client: Client) -> Outcome:
        return Outcome({"model": Packet({"w": "not a tensor"})})  # type: ignore[dict-item]

    run = staged(tmp_path, Give(odd))
    ((_, lost),) = answers(run, Serial(), [Task(0)])
    assert isinstance(lost, Lost)
    assert lost.reason == "unreadable"
    assert lost.detail.startswith("the reply of client 0 cannot be read: ")


def test_what_a_client_remembers_is_written_and_named_but_not_yet_accepted(tmp_path: Path) -> None:
    def count(carry: Carry, client: Client) -> Outcome:
        before = carry.get("seen", {"n": torch.zeros(1)})
        return Outcome(memory={"seen": {"n": before["n"] + 1}})

    run = staged(tmp_path, Give(count, expected_no_packets))
    (first,) = reports(run, Serial(), [Task(0)])
    (same,) = reports(run, Serial(), [Task(0)])
    assert run.memory.files == {}
    assert first.memory is not None
    (second,) = reports(run, Serial(), [Task(0, round=1, memory=first.memory)])
    for report, n in ((first, 1), (same, 1), (second, 2)):
        assert run.memory.read(0, report.memory)["seen"]["n"].item() == n
    # The version that the server knows of is still there, to go back to.
    assert second.memory != first.memory
    (again,) = reports(run, Serial(), [Task(0, round=1, memory=second.memory)])
    assert again.memory != second.memory
    assert run.memory.read(0, second.memory)["seen"]["n"].item() == 2


def test_threads_and_randomness_are_left_as_they_were(tmp_path: Path) -> None:
    run = staged(tmp_path, Train(CrossEntropy(), LocalTraining(1, 8)), Edit(lambda c, k: 1 / 0))  # type: ignore[arg-type,return-value]
    before = torch.get_rng_state()
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        perform(run, Task(0, {"model": Packet(run.params)}), {})
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before)
    with single_thread(), preserve_rng():
        assert torch.get_num_threads() == 1
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


# ---- bytes ---------------------------------------------------------------------------------------


def test_both_directions_are_counted_to_the_byte(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, dtype=torch.float32)
    task = Task(0, {"model": Packet(run.params)}, {"lr": 0.1}, round=12)
    report = Report(0, {"model": Packet(run.params)}, 20, {"loss": 1.5})
    assert sum(
        count_task(task, run.method.codec, run.known_state, BroadcastCosts()).values()
    ) == len(write_task(task, Dense()))
    assert sum(count_report(task, report, run.method.codec, run.known_state).values()) == len(
        write_report(report, Dense())
    )


def test_a_broadcast_is_encoded_once(tmp_path: Path) -> None:
    encoded = []

    @dataclass(frozen=True)
    class Counting(Dense):
        def encode(self, packet, known=None):
            encoded.append(packet)
            return super().encode(packet, known)

    run = make_run(methods.FedAvg(codec=Counting()), tmp_path)
    packet, sent = Packet(run.params), BroadcastCosts()
    costs = [
        count_task(Task(k, {"model": packet}), run.method.codec, run.known_state, sent)
        for k in range(4)
    ]
    assert len(encoded) == 1
    assert all(cost == costs[0] for cost in costs)
    count_task(
        Task(0, {"model": Packet(dict(run.params))}), run.method.codec, run.known_state, sent
    )
    assert len(encoded) == 2


def test_a_mask_that_the_client_holds_costs_nothing_again(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(codec=Delta()), tmp_path, dtype=torch.float32)
    drawn = torch.rand(run.params["fc1.weight"].shape, generator=torch.Generator().manual_seed(0))
    mask = {"fc1.weight": drawn < 0.5}
    packet = Packet(trees.apply_mask(run.params, mask), mask)
    scored, first, second, other = (
        count_task(task, run.method.codec, run.known_state, BroadcastCosts())["mask"]
        for task in (
            Task(0, {"model": packet}, verb="evaluate"),  # leaves no trace
            Task(0, {"model": packet}),
            Task(0, {"model": packet}, round=1),
            Task(1, {"model": packet}, round=1),
        )
    )
    assert scored == first == other
    assert first > run.params["fc1.weight"].numel() // 8
    assert second < first / 10
    back = count_report(
        Task(0, {"model": packet}),
        Report(0, {"model": packet}, 20),
        run.method.codec,
        run.known_state,
    )
    assert back["mask"] == second  # the server knows what it sent


# ---- what a client computes ----------------------------------------------------------------------


def forward_macs(run: Run) -> int:
    """Of the mlp: every weight once."""
    return sum(v.numel() for k, v in run.params.items() if k.endswith("weight"))


def test_training_is_three_passes_per_example_and_epoch(tmp_path: Path) -> None:
    """Client 1 has 13 examples: 2 epochs are 26 examples, of 3 passes each; an Edit is free."""
    stages = (Train(CrossEntropy(), LocalTraining(2, 8, SGD(0.1))), Edit(nothing), Give(give_all))
    run = staged(tmp_path, *stages)
    report, _ = perform(run, Task(1, {"model": Packet(run.params)}), {})
    assert report.macs == 3 * 13 * 2 * forward_macs(run)


def test_a_measure_is_one_pass_or_as_many_as_its_function_says(tmp_path: Path) -> None:
    """Of 20 examples one batch of 6, once by `total` and thrice by a gradient; 4 of validation."""
    one_batch = Batches(size=6, limit=1)
    run = staged(
        tmp_path,
        Measure("plain", total, one_batch),
        Measure("gradient", Gradient(CrossEntropy()), one_batch),
        Measure("held out", total, Batches("validation")),
        Give(lambda c, k: Outcome()),
    )
    report, _ = perform(run, Task(0, {"model": Packet(run.params)}), {})
    assert report.macs == (6 + 3 * 6 + 4) * forward_macs(run)


def test_a_client_is_counted_in_the_width_it_trains(tmp_path: Path) -> None:
    """Half of the hidden channels of the mlp are gone, and with them half of both matrices."""
    run = staged(tmp_path, Train(CrossEntropy(), LocalTraining(1, 8, SGD(0.1))), Give(give_all))
    groups = find_groups(run.net)
    kept = {group.name: torch.arange(group.size) % 2 == 0 for group in groups}
    small = cut_channels(run.net, kept)
    sizes = [v.numel() for k, v in small.net.params().items() if k.endswith("weight")]
    assert sum(sizes) < forward_macs(run)
    packet = Packet(run.params, make_channel_mask(run.net, kept))
    report, _ = perform(run, Task(0, {"model": packet}), {})
    assert report.macs == 3 * 20 * sum(sizes)
    # Single weights that are pruned spare no device any work.
    scattered = {k: torch.rand(v.shape) < 0.5 for k, v in run.params.items() if v.dim() > 1}
    for leaf in scattered.values():
        leaf[:, 0] = True
        leaf[0] = True
    report, _ = perform(run, Task(0, {"model": Packet(run.params, scattered)}), {})
    assert report.macs == 3 * 20 * forward_macs(run)
