"""Runs in lockstep give what each gives alone, whatever becomes of the others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import federation, list_again

import fedgrove as fg
from fedgrove import api
from fedgrove.config import experiment as experiment_module
from fedgrove.config.experiment import Experiment, Federations
from fedgrove.config.sweep import experiments_of, plan_all, read, resume, sweep
from fedgrove.core import Answer, Job, Report, Task
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import EngineError, InputError
from fedgrove.methods import Ditto, FedAvg, FixedPrune
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.files import compute_checksum, read_sealed, seal_json
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.result import Failure, Result
from fedgrove.runs.run import Run

TINY = federation((12,), (20, 13, 24), dtype=torch.float32)
SPOILT = LocalTraining(1, 8, SGD(lr=1e30))


def four(rounds: int = 3, **words: Any) -> dict[str, Experiment]:
    """A method with memory and one with masks, two seeds each."""
    made = {"ditto": Ditto(), "fixedprune": FixedPrune()}
    words = {"data": TINY, "rounds": rounds, "finetune": (0, 1), **words}
    return {
        f"{n}-s{seed}": Experiment(m, seed=seed, **words)
        for n, m in made.items()
        for seed in (0, 1)
    }


def contents(folder: Path) -> dict[str, Any]:
    """All a run leaves behind, apart from what measures time or names the engine."""

    def timeless(found: Mapping[str, Any]) -> dict[str, Any]:
        different = ("seconds", "seconds_shared_by", "engine")
        return {k: v for k, v in found.items() if k not in different}

    models = {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}
    run = RunFolder.open(folder)
    assert run.summary is not None
    lines = [timeless(line) for line in run.metrics()]
    return {**models, "summary": timeless(run.summary), "metrics": lines, "config": run.config}


def alone(name: str, experiment: Experiment, folder: Path) -> dict[str, Any]:
    api.train(experiment, folder / name, engine=Serial())
    return contents(folder / name)


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The four runs, one by one."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: alone(name, experiment, folder) for name, experiment in four().items()}


def states(out: Path) -> dict[str, str]:
    return {name: member["state"] for name, member in read(out)["members"].items()}


# ---- lockstep ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "pool"])
def test_in_lockstep_is_alone_to_the_bit(engine: str, each: dict[str, Any], tmp_path: Path) -> None:
    ends = sweep(four(), tmp_path / "all", engine=engine)
    assert [type(end) for end in ends] == [Result] * 4
    assert {name: contents(tmp_path / "all" / name) for name in four()} == each
    assert [end.folder.path.name for end in ends] == list(four())
    assert states(tmp_path / "all") == dict.fromkeys(four(), "done")


def test_digits_by_name_are_loaded_once_per_seed_and_give_what_run_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    real = experiment_module.load

    def counted(*given: Any, seed: int, **words: Any) -> Any:
        loads.append(seed)
        return real(*given, seed=seed, **words)

    words: dict[str, Any] = {"clients": 4, "cohort": 2, "rounds": 1}
    made = {
        f"{n}-s{s}": Experiment(fg.methods.find(n)(), seed=s, **words)
        for n in ("fedavg", "local")
        for s in (0, 1)
    }
    monkeypatch.setattr(experiment_module, "load", counted)
    sweep(made, tmp_path / "all", engine="serial")
    assert sorted(loads) == [0, 1]
    for name in made:
        method, _, seed = name.rpartition("-s")
        fg.run(method, seed=int(seed), out=tmp_path / name, engine="serial", **words)
        assert contents(tmp_path / "all" / name) == contents(tmp_path / name)


def test_batched_stacks_the_members_and_agrees(each: dict[str, Any], tmp_path: Path) -> None:
    sweep(four(), tmp_path / "all", engine=Batched())
    for name in four():
        run = RunFolder.open(tmp_path / "all" / name)
        assert run.summary is not None
        assert run.summary["accuracy_mean"] == pytest.approx(
            each[name]["summary"]["accuracy_mean"], abs=0.05
        )
        for line, expected in zip(run.metrics(), each[name]["metrics"], strict=True):
            assert line["loss_mean"] == pytest.approx(expected["loss_mean"], rel=1e-3)
            assert line["bytes_up"] == expected["bytes_up"]


class Counting(Serial):
    """Notes which runs each map is for, and can break: at every job of ``bad``, or once."""

    def __init__(self, bad: Any = None, once_at: int = -1) -> None:
        self.maps: list[list[tuple[int, str]]] = []
        self.bad, self.once_at, self.jobs = bad, once_at, 0

    def map(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Job, Answer]]:
        self.maps.append([])
        return super().map(self._seen(jobs))

    def _seen(self, jobs: Iterable[tuple[Run, Task]]) -> Iterator[tuple[Run, Task]]:
        for run, task in jobs:
            self.maps[-1].append((id(run), task.verb))
            self.jobs += 1
            if self.jobs == self.once_at or (self.bad and self.bad(run, task)):
                raise EngineError(f"client {task.to} could not {task.verb}.")
            yield run, task


def test_each_exchange_scoring_and_fine_tuning_is_one_map(tmp_path: Path) -> None:
    engine = Counting()
    sweep(four(rounds=3, evaluate=2), tmp_path / "all", engine=engine)
    # rounds 1, 2, 3; scores after 2 and 3 (the last); then the fine-tuning
    assert [{verb for _, verb in seen} for seen in engine.maps] == [
        {"train"}, {"train"}, {"evaluate"}, {"train"}, {"evaluate"}, {"finetune"}
    ]  # fmt: skip
    assert {len({run for run, _ in seen}) for seen in engine.maps} == {4}


def test_the_pool_keeps_its_workers_from_map_to_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, closed = Pool(workers=2), []
    real = Pool.close
    monkeypatch.setattr(Pool, "close", lambda self: (closed.append(len(self._team)), real(self))[1])
    made = {name: e for name, e in four(rounds=4).items() if name.endswith("s0")}
    sweep(made, tmp_path / "all", engine=pool)
    pool.close()
    # forked once for the first window and once more at most for a run it did not hold; then only at the end
    assert sum(size > 0 for size in closed) <= 2


@dataclass(frozen=True)
class Sated(FedAvg):
    """Takes the first report and leaves the rest."""

    def fold(self, state: Any, reports: Iterable[Report]) -> Any:
        return super().fold(state, islice(reports, 1))


def test_what_a_fold_does_not_take_is_drained(each: dict[str, Any], tmp_path: Path) -> None:
    sated = Experiment(Sated(), TINY, rounds=3, finetune=(0, 1))
    ends = sweep({"sated-s0": sated, **four()}, tmp_path / "all", engine="serial")
    assert isinstance(ends[0], Result)
    assert {name: contents(tmp_path / "all" / name) for name in four()} == each


def test_members_of_different_lengths_end_together(each: dict[str, Any], tmp_path: Path) -> None:
    mixed = {"short": Experiment(FedAvg(), TINY, rounds=1), **four()}
    engine = Counting()
    sweep(mixed, tmp_path / "all", engine=engine)
    assert {name: contents(tmp_path / "all" / name) for name in four()} == each
    assert contents(tmp_path / "all" / "short") == alone("short", mixed["short"], tmp_path)
    assert sum({verb for _, verb in seen} == {"finetune"} for seen in engine.maps) == 1


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "pool"])
def test_a_member_that_fails_does_not_touch_the_others(
    engine: str, each: dict[str, Any], tmp_path: Path
) -> None:
    made = four()
    names = list(made)
    spoilt = Experiment(FedAvg(local=SPOILT), TINY, rounds=3)
    made = {names[0]: made[names[0]], "bad-s0": spoilt, **made}
    ends = sweep(made, tmp_path / "all", engine=engine)
    bad = ends[1]
    assert isinstance(bad, Failure)
    assert bad.why.startswith(
        "the exchange of round 1 was abandoned 3 times: 0 of 2 clients sent a usable report, and "
        "the quorum is 1: client 0 sent model with values that are not finite in fc1.weight;"
    )
    assert {name: contents(tmp_path / "all" / name) for name in four()} == each
    assert read(tmp_path / "all")["members"]["bad-s0"] == {"state": "failed", "why": bad.why}
    assert states(tmp_path / "all") == {**dict.fromkeys(made, "done"), "bad-s0": "failed"}


@pytest.mark.parametrize("verb", ["train", "evaluate", "finetune"])
def test_a_map_that_breaks_fails_only_the_run_at_fault(
    verb: str, each: dict[str, Any], tmp_path: Path
) -> None:
    def bad(run: Run, task: Task) -> bool:
        late = task.round == (3 if verb == "finetune" else 2)
        return (
            isinstance(run.method, FixedPrune)
            and run.seed == 0
            and (task.verb, task.to) == (verb, 1)
            and late
        )

    made = four(cohort=3)
    expected = {n: alone(n, made[n], tmp_path / "alone") for n in made if n != "fixedprune-s0"}
    ends = dict(zip(made, sweep(made, tmp_path / "all", engine=Counting(bad)), strict=True))
    failed = ends.pop("fixedprune-s0")
    assert isinstance(failed, Failure)
    assert failed.why == f"client 1 could not {verb}."
    # 1-based rounds: training for the third begins at round 2; the scores after the second are of round 2
    assert failed.folder.rounds_saved() == {"train": 2, "evaluate": 1, "finetune": 3}[verb]
    assert {name: contents(tmp_path / "all" / name) for name in ends} == expected


@pytest.mark.parametrize("at", [2, 9, 24, 42, 70])
def test_a_map_that_breaks_once_changes_nothing(
    at: int, each: dict[str, Any], tmp_path: Path
) -> None:
    # per round 8 jobs of training and 12 of scoring, then 12 of fine-tuning; 2, 24, 42: a client before kept something
    ends = sweep(four(), tmp_path / "all", engine=Counting(once_at=at))
    assert [type(end) for end in ends] == [Result] * 4
    assert {name: contents(tmp_path / "all" / name) for name in four()} == each


def test_a_mistake_in_the_code_is_not_hidden(tmp_path: Path) -> None:
    def bad(run: Run, task: Task) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sweep(four(), tmp_path / "all", engine=Counting(bad))


# ---- going on ------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for a process that ends in the middle."""


def stop_after(lines: int, error: type[BaseException] = Killed) -> Any:
    seen: list[Any] = []

    def watch(line: Any) -> None:
        seen.append(line["run"])
        if len(seen) == lines:
            raise error

    return watch


@pytest.mark.parametrize("lines", [1, 6, 12])
def test_the_same_call_goes_on_and_finished_runs_are_left_alone(
    lines: int, each: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "all"
    with pytest.raises(Killed):
        sweep(four(), out, engine="serial", watch=stop_after(lines))
    assert set(states(out).values()) == {"unfinished"}
    sweep(four(), out, engine="serial")
    assert {name: contents(out / name) for name in four()} == each
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.parent != out}
    engine = Counting()
    again = sweep(four(), out, engine=engine)
    assert [end.summary for end in again if isinstance(end, Result)] == [
        RunFolder(out / n).summary for n in four()
    ]
    assert engine.jobs == 0
    assert {
        p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.parent != out
    } == before


def test_resume_rebuilds_the_runs_and_tries_a_failed_one_again(tmp_path: Path) -> None:
    words: dict[str, Any] = {"clients": 4, "cohort": 2, "rounds": 2}
    made = {f"fedavg-s{seed}": Experiment(FedAvg(), seed=seed, **words) for seed in (0, 1)}

    def bad(run: Run, task: Task) -> bool:
        return run.seed == 1 and (task.verb, task.round) == ("train", 1)

    first = sweep(made, tmp_path / "all", engine=Counting(bad), grid={"methods": ["fedavg"]})
    assert isinstance(first[1], Failure)
    whole = dict(zip(made, sweep(made, tmp_path / "whole", engine="serial"), strict=True))
    engine = Counting()
    ends = resume(tmp_path / "all", engine=engine)
    assert [type(end) for end in ends] == [Result, Result]
    # one of two rounds was saved
    assert [{verb for _, verb in seen} for seen in engine.maps] == [
        {"train"},
        {"evaluate"},
        {"finetune"},
    ]
    assert {n: contents(tmp_path / "all" / n) for n in whole} == {
        n: contents(tmp_path / "whole" / n) for n in whole
    }
    assert read(tmp_path / "all") == {
        "grid": {"methods": ["fedavg"]},
        "members": {"fedavg-s0": {"state": "done"}, "fedavg-s1": {"state": "done"}},
    }
    wanted = plan_all(made, tmp_path, Federations())
    rebuilt = plan_all(experiments_of(tmp_path / "all"), tmp_path, Federations())
    assert {n: p.experiment for n, p in rebuilt.items()} == {
        n: p.experiment for n, p in wanted.items()
    }


def test_a_kill_while_the_folders_are_made(each: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "all"
    first, second, *_ = four()
    RunFolder.create(out / first, each[first]["config"])
    (out / second).mkdir()
    (out / second / "config.toml.part").write_text("[ru")
    sweep(four(), out, engine="serial")
    assert {name: contents(out / name) for name in four()} == each


def test_a_damaged_run_leaves_the_others_alone(each: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "all"
    with pytest.raises(Killed):
        sweep(four(), out, engine="serial", watch=stop_after(12))
    first, *others = four()
    for path in (out / first / "checkpoint").glob("state.*"):
        path.write_bytes(b"")
    ends = dict(zip(four(), sweep(four(), out, engine="serial"), strict=True))
    assert isinstance(ends[first], Failure)
    assert re.search(r"state\.\S+ is damaged.*Nothing was changed", ends[first].why)
    assert {name: contents(out / name) for name in others} == {n: each[n] for n in others}
    # A finished one whose result is damaged is not trained again, and said to have failed.
    (out / others[0] / "summary.json").write_text("{}")
    ends = dict(zip(four(), sweep(four(), out, engine="serial"), strict=True))
    assert isinstance(ends[others[0]], Failure)
    assert "summary.json does not match" in ends[others[0]].why
    assert states(out)[others[0]] == "failed"


@pytest.mark.parametrize("data", ["digits", TINY])
def test_an_interruption_says_how_to_go_on(data: Any, tmp_path: Path) -> None:
    """What was made in Python is not in the folders: the command could not read it."""
    out = tmp_path / "all"
    how = f"resume with: fedgrove.config.sweep.resume({str(out)!r})"
    if data is TINY:
        how = "to continue, run the same sweep again from Python."
    said = re.escape(f"Interrupted. 0 of 4 runs are finished; {how}")
    with pytest.raises(KeyboardInterrupt, match=f"^{said}$"):
        sweep(four(data=data), out, engine="serial", watch=stop_after(3, KeyboardInterrupt))


# ---- refusals ------------------------------------------------------------------------------------


def test_a_sweep_from_before_a_word_existed_is_gone_on_with(tmp_path: Path) -> None:
    made = {
        f"s{seed}": Experiment(Ditto(), "motion", clients=3, rounds=1, seed=seed) for seed in (0, 1)
    }
    ends = sweep(made, tmp_path / "all", engine="serial")
    for name in made:
        config = tmp_path / "all" / name / "config.toml"
        config.write_text(config.read_text().replace("standardise = true\n", ""))
        for latest in config.parent.glob("checkpoint/*.json"):
            content = read_sealed(latest)
            content["config"] = compute_checksum(config.read_bytes())
            latest.write_bytes(seal_json(content))
        list_again(config.parent)
    again = sweep(made, tmp_path / "all", engine="serial")
    assert [end.summary for end in again] == [end.summary for end in ends]
    config.write_text(config.read_text().replace("[run]", "[run]\nstandardise = false"))
    list_again(config.parent)
    with pytest.raises(InputError, match="contains a different sweep"):
        sweep(made, tmp_path / "all", engine="serial")
    config.write_text(config.read_text().replace("standardise", "standardize"))
    list_again(config.parent)
    with pytest.raises(InputError, match="contains a different sweep"):
        sweep(made, tmp_path / "all", engine="serial")


def test_another_sweep_a_run_and_other_files_are_refused(tmp_path: Path) -> None:
    made = {name: e for name, e in four(rounds=1).items() if name.startswith("ditto")}
    sweep(made, tmp_path / "all", engine="serial")
    before = (tmp_path / "all" / "sweep.json").read_bytes()
    fewer = dict(list(made.items())[:1])
    longer = {name: replace(e, rounds=2) for name, e in made.items()}
    for other in (fewer, longer, four(rounds=1)):
        with pytest.raises(InputError, match=r"contains a different sweep.*sweep\.resume\("):
            sweep(other, tmp_path / "all", engine="serial")
    assert (tmp_path / "all" / "sweep.json").read_bytes() == before
    with pytest.raises(InputError, match="contains a different sweep or other files"):
        sweep(made, tmp_path / "all" / "ditto-s0", engine="serial")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all I have")
    (tmp_path / "file").write_text("")
    for place in ("mine", "file"):
        with pytest.raises(InputError, match=r"Give a different out\.$"):
            sweep(made, tmp_path / place, engine="serial")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_everything_is_checked_before_a_folder_is_made(tmp_path: Path) -> None:
    made = four()
    for given, said in (
        ({}, "a sweep is {}"),
        ({**made, "x": Experiment(FedAvg(), TINY, cohort=9)}, "cohort is 9"),
        ({"a/b": made["ditto-s0"]}, "a run's name is 'a/b'"),
        ({"..": made["ditto-s0"]}, "a run's name is"),
    ):
        with pytest.raises(InputError, match=said):
            sweep(given, tmp_path / "all", engine="serial")
    with pytest.raises(InputError, match="there is no engine 'seriall'"):
        sweep(made, tmp_path / "all", engine="seriall")
    with pytest.raises(InputError, match="contains no sweep"):
        resume(tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_federations_are_shared_only_where_the_share_of_validation_is_the_same() -> None:
    federations = Federations()
    tenth = Experiment(FedAvg(), clients=4, validation=0.1)
    whole = Experiment(FedAvg(), clients=4)
    assert federations.of(whole) is federations.of(Experiment(FedAvg(), clients=4, rounds=9))
    assert sum(len(c.validation) for c in federations.of(tenth).clients.values()) > 0
    assert sum(len(c.validation) for c in federations.of(whole).clients.values()) == 0


def test_a_sweep_made_in_python_goes_on_in_python(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        sweep(four(), tmp_path / "all", engine="serial", watch=stop_after(1))
    with pytest.raises(InputError, match=r"call fedgrove\.config\.sweep\.sweep again"):
        resume(tmp_path / "all")


def test_lines_are_watched_with_the_name_of_their_run(tmp_path: Path) -> None:
    seen: list[Any] = []
    sweep(four(rounds=2), tmp_path / "all", engine="serial", watch=seen.append)
    assert [(line["run"], line["round"]) for line in seen] == [
        (name, r) for r in (1, 2) for name in four()
    ]
    kept = [
        json.loads(line)
        for line in (tmp_path / "all" / "ditto-s1" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line for line in seen if line["run"] == "ditto-s1"] == [
        {"run": "ditto-s1", **line} for line in kept
    ]


def test_the_seconds_of_a_sweep_are_shared_evenly(tmp_path: Path) -> None:
    sweep(four(rounds=1), tmp_path / "all", engine="serial")
    folders = [RunFolder(tmp_path / "all" / name) for name in four()]
    assert len({folder.metrics()[0]["seconds"] for folder in folders}) == 1
    # The summary says so: no table may show them as measured.
    assert {folder.summary["seconds_shared_by"] for folder in folders if folder.summary} == {4}


def test_an_older_sweep_shares_its_seconds_too(tmp_path: Path) -> None:
    """Its summaries do not say so, and its sweep.json has several members."""
    sweep(four(rounds=1), tmp_path / "all", engine="serial")
    name = next(iter(four()))
    forget(tmp_path / "all" / name, "seconds_shared_by")
    summary = RunFolder(tmp_path / "all" / name).summary
    assert summary is not None
    assert summary["seconds_shared_by"] == 4
    shutil.copytree(tmp_path / "all" / name, tmp_path / name)
    alone = RunFolder(tmp_path / name).summary
    assert alone is not None
    assert "seconds_shared_by" not in alone


def forget(folder: Path, key: str) -> None:
    """Leave a key out of summary.json, as a version did that did not know it."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    del summary[key]
    before = path.read_bytes()
    path.write_text(json.dumps(summary))
    sums = folder / "checksums.txt"
    listed = sums.read_text()
    known = compute_checksum(before)
    assert known in listed
    sums.write_text(listed.replace(known, compute_checksum(path.read_bytes())))
