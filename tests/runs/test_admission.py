"""Which answers of an exchange count, and what is left of those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, play, remembered, tensors
from tests.contract import small

from fedgrove import methods, trees
from fedgrove.core import (
    SCORING_VERBS,
    Answer,
    Carry,
    Client,
    Edit,
    Job,
    Lost,
    Packet,
    Report,
    Stage,
    Task,
)
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import EngineError
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.gate import FEW_LENGTHS, Gate
from fedgrove.runs.lockstep import MOST_ATTEMPTS, Member, train_alone, train_together
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import Admission, TooFewReports, complete_task, draw_cohort, plan, rounds
from fedgrove.runs.run import Run

Change = Callable[[Run, Task, Answer], list[Answer]]


class Altered(Serial):
    """Serial, whose answers are dropped, repeated or replaced on their way."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.trained = 0

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job, answer in super().map(jobs):
            self.trained += job[1].verb not in SCORING_VERBS
            for changed in self.change(*job, answer):
                yield job, changed


def dropped(run: Run, task: Task, answer: Answer) -> list[Answer]:
    """No training is answered."""
    return [answer] if task.verb in SCORING_VERBS else []


def only(client: int, change: Change) -> Change:
    """The change, for what one client trains; all else as it is."""

    def changed(run: Run, task: Task, answer: Answer) -> list[Answer]:
        hit = task.to == client and task.verb not in SCORING_VERBS
        return change(run, task, answer) if hit else [answer]

    return changed


def member(run: Run, folder: Path, **words: Any) -> Member:
    """A run whose clients keep what they remember in its folder."""
    kept = replace(run, memory=Memory(folder / "checkpoint"))
    return Member(kept, RunFolder.create(folder, ""), **words)


# ---- the quorum ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "asked", "needed"),
    [
        # At least one must report.
        (0.0, 4, 1),
        (0.5, 4, 2),
        # 1.2 clients are two.
        (0.3, 4, 2),
        (0.75, 4, 3),
        (1.0, 4, 4),
        # In floating point the product is 7.000000000000001.
        (0.28, 25, 7),
    ],
)
def test_how_many_must_report_by_hand(
    quorum: float, asked: int, needed: int, tmp_path: Path
) -> None:
    run = make_run(methods.FedAvg(), tmp_path, sizes=(9,) * asked, cohort=asked)
    tasks = plan(run, run.initial_state)
    good = list(answers(run, Serial(), tasks[:needed]))
    passed = Admission(run, tasks, quorum).admit(good)
    assert [report.of for report in passed] == [task.to for task, _ in good]
    admission = Admission(run, tasks, quorum)
    with pytest.raises(TooFewReports) as caught:
        list(admission.admit(good[:-1]))
    first = tasks[needed - 1].to
    assert str(caught.value) == (
        f"{needed - 1} of {asked} clients sent a usable report, and the quorum is {needed}: "
        f"the engine gave no answer for client {first}."
    )
    assert admission.tally.lost == {"unanswered": [task.to for task in tasks[needed - 1 :]]}


def test_below_the_quorum_nothing_is_folded_and_above_it_the_rest_is(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=4, quorum=0.5)
    loop = rounds(run)
    first = next(loop)
    three_lost = list(answers(run, Serial(), first.tasks))[:1]
    again = loop.send(three_lost)
    assert again.state is first.state
    assert (again.attempt, again.why_abandoned[:36]) == (1, "1 of 4 clients sent a usable report,")
    two_lost = list(answers(run, Serial(), again.tasks))[:2]
    last = loop.send(two_lost)
    assert (last.state.round, last.attempt, last.why_abandoned) == (1, 0, "")
    assert last.tally.lost == {"unanswered": [2, 3]}


# ---- an abandoned exchange -----------------------------------------------------------------------


def test_an_abandoned_exchange_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """And the next attempt is the one of a run that never made the first."""
    run = make_run(methods.Ditto(), tmp_path / "run", cohort=4, quorum=1.0)
    other = make_run(methods.Ditto(), tmp_path / "other", cohort=4, quorum=1.0)
    loop = rounds(run)
    second = loop.send(answers(run, Serial(), next(loop).tasks))
    other_loop = rounds(other)
    other_state = other_loop.send(answers(other, Serial(), next(other_loop).tasks)).state

    files = dict(run.memory.files)
    kept = remembered(run)
    lengths = {kind: list(recent) for kind, recent in run.lengths.by_kind.items()}
    assert set(files) == {0, 1, 2, 3}
    assert len(lengths["train/model"]) == 4
    for attempt in (1, 2):
        third = loop.send(list(answers(run, Serial(), second.tasks))[:3])
        assert third.attempt == attempt
        assert third.state is second.state
        assert run.memory.files == files
        assert trees.identical(remembered(run), kept)
        assert run.lengths.by_kind == lengths
        assert {task.memory for task in third.tasks} == set(files.values())
    last = loop.send(answers(run, Serial(), third.tasks))

    other_loop = rounds(other, other_state, 2)
    other_last = other_loop.send(answers(other, Serial(), next(other_loop).tasks))
    assert trees.identical(tensors(last.state), tensors(other_last.state))
    assert trees.identical(remembered(run), remembered(other))
    assert run.lengths.by_kind == other.lengths.by_kind
    assert len(run.lengths.by_kind["train/model"]) == 8


def test_another_attempt_draws_another_cohort_and_other_seeds(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, sizes=(9,) * 30, cohort=3)
    loop = rounds(run)
    tried = [next(loop)]
    for _ in range(3):
        tried.append(loop.send([]))
    cohorts = [tuple(task.to for task in exchange.tasks) for exchange in tried]
    assert len(set(cohorts)) == 4
    for attempt, exchange in enumerate(tried):
        assert list(cohorts[attempt]) == draw_cohort(run, 0, attempt)
        assert {(task.round, task.attempt) for task in exchange.tasks} == {(0, attempt)}
    seeds = {run.client(complete_task(run, Task(4), 0, attempt), {}).seed for attempt in range(4)}
    assert len(seeds) == 4
    assert run.client(Task(4), {}).seed in seeds


# ---- patience ------------------------------------------------------------------------------------


def test_a_run_ends_after_three_attempts_and_can_be_resumed(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path / "run", rounds=2)
    broken = member(run, tmp_path / "all")
    engine = Altered(dropped)
    with pytest.raises(EngineError) as caught:
        train_alone(broken, engine)
    first = draw_cohort(run, 0, MOST_ATTEMPTS - 1)[0]
    assert str(caught.value) == (
        "the exchange of round 1 was abandoned 3 times: 0 of 3 clients sent a usable report, and "
        "the quorum is 1: "
        f"the engine gave no answer for client {first}."
    )
    assert engine.trained == 3 * MOST_ATTEMPTS
    lines = broken.folder.metrics()
    assert len(lines) == MOST_ATTEMPTS
    for attempt, line in enumerate(lines):
        assert (line["round"], line["counts"]) == (0, False)
        assert line["lost"] == {"unanswered": draw_cohort(run, 0, attempt)}
        assert "accuracy_mean" not in line
        assert line["abandoned"].startswith("0 of 3 clients sent a usable report")

    # What was sent for nothing was paid for, and the resumed run takes up the fourth attempt.
    state, attempt = broken.folder.restore(broken.run)
    assert (state.round, attempt) == (0, MOST_ATTEMPTS)
    summary = train_alone(Member(broken.run, broken.folder), Serial())
    assert (summary["abandoned"], summary["lost"]) == (3, {"unanswered": 9})
    assert "9 answers lost: unanswered 9" in summary["notes"]
    assert [line["round"] for line in broken.folder.metrics()] == [0, 0, 0, 1, 2]


def test_a_resumed_run_has_no_more_patience_than_another(tmp_path: Path) -> None:
    """It starts at its fourth attempt; what it has left for later rounds is three all the same."""
    run = make_run(methods.FedAvg(), tmp_path / "run", rounds=2)
    first = member(run, tmp_path / "all")
    with pytest.raises(EngineError, match=r"^the exchange of round 1 was abandoned 3 times"):
        train_alone(first, Altered(dropped))

    def dropped_later(run: Run, task: Task, answer: Answer) -> list[Answer]:
        return dropped(run, task, answer) if task.round == 1 else [answer]

    engine = Altered(dropped_later)
    with pytest.raises(EngineError, match=r"^the exchange of round 2 was abandoned 3 times"):
        train_alone(Member(first.run, first.folder), engine)
    assert engine.trained == 3 * (1 + MOST_ATTEMPTS)


# ---- answers that do not belong ------------------------------------------------------------------


def test_a_second_answer_counts_once(tmp_path: Path) -> None:
    run = make_run(methods.Ditto(), tmp_path / "run", cohort=4)
    loop = rounds(run)
    tasks = next(loop).tasks
    good = list(answers(run, Serial(), tasks))
    last = loop.send([good[0], good[1], good[1], good[2], good[3], good[0]])
    assert last.tally.refused == {"duplicate": [1, 0]}
    assert last.tally.sentences == {"duplicate": "client 1 answered a task again."}
    healthy = make_run(methods.Ditto(), tmp_path / "healthy", cohort=4)
    loop = rounds(healthy)
    expected = loop.send(answers(healthy, Serial(), next(loop).tasks))
    assert trees.identical(tensors(last.state), tensors(expected.state))
    assert trees.identical(remembered(run), remembered(healthy))
    assert run.lengths.by_kind == healthy.lengths.by_kind


@pytest.mark.parametrize("to", [0, 1, 99])
def test_an_answer_to_a_task_that_was_never_asked_does_not_count(to: int, tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=2)
    loop = rounds(run)
    tasks = next(loop).tasks
    good = list(answers(run, Serial(), tasks))
    # Equal to one that was asked, for two of these; but not that one.
    made = replace(tasks[0], to=to)
    forged = Report(to, {"model": Packet(run.params)}, 20)
    admission = Admission(run, tasks)
    assert [r.of for r in admission.admit([(made, forged), *good])] == [t.to for t in tasks]
    assert admission.tally.refused == {"duplicate": [to]}
    assert admission.tally.lost == {}


def test_a_report_after_its_task_was_lost_does_not_count(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, cohort=2)
    tasks = plan(run, run.initial_state)
    first, second = answers(run, Serial(), tasks)
    lost = Lost(tasks[0].to, "late", "client was late.")
    admission = Admission(run, tasks)
    passed = list(admission.admit([(tasks[0], lost), second, first]))
    assert [report.of for report in passed] == [tasks[1].to]
    assert admission.tally.lost == {"late": [tasks[0].to]}
    assert admission.tally.refused == {"duplicate": [tasks[0].to]}


# ---- what is refused or lost is as if it had not been asked --------------------------------------


def lied(run: Run, task: Task, answer: Answer) -> list[Answer]:
    assert isinstance(answer, Report)
    return [replace(answer, examples=1000 * answer.examples)]


def lost(run: Run, task: Task, answer: Answer) -> list[Answer]:
    return [Lost(task.to, "late", f"client {task.to} was late.", {"down": {}})]


def nothing(run: Run, task: Task, answer: Answer) -> list[Answer]:
    return []


@pytest.mark.parametrize("name", methods.names())
def test_a_refused_report_is_as_good_as_none(name: str, tmp_path: Path) -> None:
    """To the bit, what the client remembers included."""
    ends = []
    for word, change in {"lied": lied, "lost": lost, "nothing": nothing}.items():
        run = make_run(small(name), tmp_path / word, cohort=4, rounds=2)
        engine = Altered(only(1, change))
        loop = rounds(run)
        exchange = next(loop)
        while exchange.tasks:
            assert all(task.memory is None for task in exchange.tasks if task.to == 1)
            exchange = loop.send(answers(run, engine, exchange.tasks))
            assert not exchange.why_abandoned
            tally = exchange.tally
            words = {**tally.refused, **tally.lost}
            assert words == {{"lied": "examples", "lost": "late"}.get(word, "unanswered"): [1]}
        assert 1 not in run.memory.files
        ends.append((tensors(exchange.state), remembered(run), run.lengths.by_kind))
    for state, kept, lengths in ends[1:]:
        assert trees.identical(state, ends[0][0])
        assert trees.identical(kept, ends[0][1])
        assert lengths == ends[0][2]


def huge(run: Run, task: Task, answer: Answer) -> list[Answer]:
    assert isinstance(answer, Report)
    values = dict(answer.give["model"].values)
    first = next(iter(values))
    values[first] = values[first].clone()
    values[first].view(-1)[0] = 1e30
    return [replace(answer, give={"model": Packet(values)})]


@pytest.mark.parametrize("cohort", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_that_is_too_long_is_refused_in_the_first_round(
    cohort: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    words: dict[str, Any] = {"sizes": (20, 13, 24, 17)[:cohort], "cohort": cohort, "rounds": 1}

    def end(change: Change, gate: Gate, place: str) -> Any:
        run = make_run(methods.FedAvg(), tmp_path / place, dtype=dtype, gate=gate, **words)
        loop = rounds(run)
        return loop.send(answers(run, Altered(only(1, change)), next(loop).tasks))

    refused = end(huge, Gate(), "refused")
    assert refused.tally.refused == {"too long": [1]}
    assert refused.tally.sentences["too long"].startswith(
        "client 1 sent model with a change of length 1e+30; recent ones allow "
    )
    left_out = end(nothing, Gate(), "left out")
    assert trees.identical(refused.state.model, left_out.state.model)
    off = end(huge, Gate(norm=0), "off")
    assert off.tally.to_line() == {}
    assert float(off.state.model["fc1.weight"].abs().max()) > 1e28


def test_a_client_alone_is_compared_with_its_model(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, sizes=(20,), cohort=1)
    loop = rounds(run)
    exchange = next(loop)
    again = loop.send(answers(run, Altered(lambda *job: huge(*job)), exchange.tasks))
    assert again.tally.refused == {"too long": [0]}
    assert loop.send(answers(run, Serial(), again.tasks)).state.round == 1


def test_lengths_are_remembered_in_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path / "run", cohort=4, rounds=3)
    whole = member(run, tmp_path / "all", every=0)
    train_alone(whole, Serial())
    known = whole.run.lengths.by_kind
    assert {kind: len(recent) for kind, recent in known.items()} == {"train/model": 12}
    assert len(known["train/model"]) > FEW_LENGTHS
    again = make_run(methods.FedAvg(), tmp_path / "again", cohort=4, rounds=3)
    whole.folder.restore(again)
    assert again.lengths.by_kind == known


# ---- a client that fails -------------------------------------------------------------------------


@dataclass(frozen=True)
class Clumsy(methods.Ditto):
    """Ditto in which some clients' work ends with an error."""

    bad: tuple[int, ...] = ()

    def work(self, verb: str) -> tuple[Stage, ...]:
        stages = super().work(verb)
        if verb != "train":
            return stages
        return (*stages[:-1], Edit(self._stumble), stages[-1])

    def _stumble(self, carry: Carry, client: Client) -> Carry:
        if client.id in self.bad:
            raise ZeroDivisionError("nothing left to divide by")
        return carry


@pytest.mark.parametrize("engine", [Serial, Batched])
def test_a_client_that_fails_is_lost_and_the_others_count(engine: Any, tmp_path: Path) -> None:
    run = make_run(Clumsy(bad=(1,)), tmp_path / "run", cohort=4, rounds=2)
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(answers(run, engine(), exchange.tasks))
        assert exchange.tally.lost == {"crashed": [1]}
        assert exchange.tally.refused == {}
        sentence = exchange.tally.sentences["crashed"]
        assert sentence.startswith(
            "client 1 could not train: ZeroDivisionError: nothing left to divide by "
            "(at test_admission.py, line "
        )
    assert sorted(run.memory.files) == [0, 2, 3]
    healthy = make_run(methods.Ditto(), tmp_path / "healthy", cohort=4, rounds=2)
    loop = rounds(healthy)
    expected = next(loop)
    while expected.tasks:
        found = answers(healthy, engine(), expected.tasks)
        expected = loop.send([pair for pair in found if pair[0].to != 1])
    assert trees.distance(exchange.state.model, expected.state.model) < 1e-12
    assert trees.distance(remembered(run), remembered(healthy)) < 1e-12


# ---- in lockstep ---------------------------------------------------------------------------------


def alone(seed: int, change: Change, folder: Path) -> tuple[Any, Any, Any]:
    run = make_run(methods.Ditto(), folder / "memory", seed=seed, rounds=2)
    one = member(run, folder / "run")
    train_alone(one, Altered(change))
    return found(one)


def found(one: Member) -> tuple[Any, Any, Any]:
    lines = [{**line, "seconds": 0} for line in one.folder.metrics()]
    return tensors(one.exchange.state), remembered(one.run), lines


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, Any, Any]]:
    """What B and C are alone; of their answers none is ever changed."""
    folder = tmp_path_factory.mktemp("unchanged")
    return {seed: alone(seed, lambda r, t, a: [a], folder / str(seed)) for seed in (1, 2)}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", [nothing, lost, lied, lambda r, t, a: [a, a]])
def test_what_one_run_lacks_another_does_not_make_up(
    change: Change,
    place: int,
    unchanged: dict[int, tuple[Any, Any, Any]],
    tmp_path: Path,
) -> None:
    """Of run A's answers the first, the middle or the last is changed; B and C are as alone."""

    def changed(run: Run, task: Task, answer: Answer) -> list[Answer]:
        hit = run.seed == 0 and task.round == 0 and task.verb == "train"
        if hit and task.to == draw_cohort(run, 0)[place]:
            return change(run, task, answer)
        return [answer]

    members = []
    for seed in (0, 1, 2):
        run = make_run(methods.Ditto(), tmp_path / f"memory{seed}", seed=seed, rounds=2)
        members.append(member(run, tmp_path / f"run{seed}"))
    ended = list(train_together(members, Altered(changed)))
    assert ended == members
    assert [one.error for one in members] == [None] * 3
    each_alone = {0: alone(0, changed, tmp_path / "alone"), **unchanged}
    for seed, one in enumerate(members):
        expected = each_alone[seed]
        mine = found(one)
        assert trees.identical(mine[0], expected[0])
        assert trees.identical(mine[1], expected[1])
        assert mine[2] == expected[2]
        told = {"lost", "refused"} & mine[2][0].keys()
        assert bool(told) == (seed == 0)
        assert not {"lost", "refused"} & mine[2][1].keys()


def test_an_answer_that_comes_when_another_run_is_served_is_skipped(tmp_path: Path) -> None:
    class Late(Serial):
        """Repeats the first answer at the end of every map."""

        def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
            seen = []
            for pair in super().map(jobs):
                seen.append(pair)
                yield pair
            yield seen[0]

    members = []
    for seed in (0, 1):
        run = make_run(methods.Ditto(), tmp_path / f"memory{seed}", seed=seed, rounds=2)
        members.append(member(run, tmp_path / f"run{seed}"))
    list(train_together(members, Late()))
    for seed, one in enumerate(members):
        assert one.error is None
        expected = alone(seed, lambda run, task, answer: [answer], tmp_path / f"alone{seed}")
        mine = found(one)
        assert trees.identical(mine[0], expected[0])
        assert mine[2] == expected[2]


def test_an_answer_out_of_order_is_lost_and_refused_when_it_comes(tmp_path: Path) -> None:
    class Swapped(Serial):
        """The first two answers of the first map change places."""

        swapped = False

        def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
            pairs = list(super().map(jobs))
            if not self.swapped:
                pairs[:2] = pairs[1::-1]
                self.swapped = True
            yield from pairs

    run = make_run(methods.Ditto(), tmp_path / "run", cohort=3, rounds=2)
    first, *_ = draw_cohort(run, 0)
    one = member(run, tmp_path / "all")
    train_alone(one, Swapped())
    state, kept, lines = found(one)
    assert lines[0]["lost"] == {"unanswered": [first]}
    assert lines[0]["refused"] == {"duplicate": [first]}

    def passed_over(run: Run, task: Task, answer: Answer) -> list[Answer]:
        return nothing(run, task, answer) if task.round == 0 else [answer]

    expected = alone(0, only(first, passed_over), tmp_path / "alone")
    assert trees.identical(state, expected[0])
    assert trees.identical(kept, expected[1])


def test_only_the_run_that_is_abandoned_too_often_ends(tmp_path: Path) -> None:
    members = []
    for seed in (0, 1):
        run = make_run(methods.FedAvg(), tmp_path / f"memory{seed}", seed=seed, rounds=4)
        members.append(member(run, tmp_path / f"run{seed}"))

    def changed(run: Run, task: Task, answer: Answer) -> list[Answer]:
        return dropped(run, task, answer) if run.seed == 0 else [answer]

    assert list(train_together(members, Altered(changed))) == members
    assert str(members[0].error).startswith("the exchange of round 1 was abandoned 3 times")
    assert members[1].error is None
    healthy = play(make_run(methods.FedAvg(), tmp_path / "healthy", seed=1, rounds=4), Serial())
    assert trees.identical(members[1].exchange.state.model, healthy.model)


# ---- scores --------------------------------------------------------------------------------------


def test_a_client_that_cannot_be_scored_is_left_out_and_it_is_said(tmp_path: Path) -> None:
    def unscored(run: Run, task: Task, answer: Answer) -> list[Answer]:
        hit = task.to == 2 and task.verb in SCORING_VERBS
        return lost(run, task, answer) if hit else [answer]

    run = make_run(methods.FedAvg(), tmp_path / "run", rounds=2)
    one = member(run, tmp_path / "all")
    summary = train_alone(one, Altered(unscored))
    assert [line["scored"] for line in one.folder.metrics()] == [3, 3]
    assert sorted(summary["accuracy_clients"]) == ["0", "1", "3"]
    assert "1 of 4 clients could not be scored at the end" in summary["notes"]
    healthy = member(make_run(methods.FedAvg(), tmp_path / "b", rounds=2), tmp_path / "healthy")
    expected = train_alone(healthy, Serial())["accuracy_clients"]
    assert summary["accuracy_clients"] == {k: v for k, v in expected.items() if k != "2"}


def test_where_nobody_can_be_scored_the_run_goes_on_to_its_end(tmp_path: Path) -> None:
    def unscored(run: Run, task: Task, answer: Answer) -> list[Answer]:
        return nothing(run, task, answer) if task.verb == "evaluate" else [answer]

    one = member(make_run(methods.FedAvg(), tmp_path / "run", rounds=2), tmp_path / "all")
    summary = train_alone(one, Altered(unscored))
    for line in one.folder.metrics():
        assert line["scored"] == 0
        assert "accuracy_mean" not in line
    assert math.isfinite(summary["accuracy_mean"])
