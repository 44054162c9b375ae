"""Finishing clients in threads: the same answers in the same order, and errors in their turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play

from fedgrove import methods, trees
from fedgrove.core import Packet, Report, Task
from fedgrove.engines.batched import scheduling
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.batched.scheduling import finish_in_order
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.run import Run

RECIPE = LocalTraining(1, 8, SGD(0.05))


def run_of(folder: Path) -> Run:
    # In its real width har-cnn is large enough for threads.
    method = methods.Grove(local=RECIPE)
    return make_run(method, folder, net="har-cnn", options={"dropout": 0.0}, rounds=2)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_change_nothing(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    states = []
    for number in (1, threads):
        monkeypatch.setattr(scheduling, "THREADS", number)
        run = run_of(tmp_path / str(number))
        (*tasks,) = run.method.plan(run.initial_state, list(run.infos))
        found = []
        for (_, task), report in Batched().map((run, task) for task in tasks):
            assert isinstance(report, Report)
            assert report.of == task.to
            assert report.memory is not None
            found.append(report)
        reports.append(found)
        states.append(play(run_of(tmp_path / f"{number} whole"), Batched()))
    for one, other in zip(*reports, strict=True):
        assert one.cost == other.cost
        assert one.memory == other.memory
    for group, model in states[0].models.items():
        assert trees.identical(model, states[1].models[group])


def test_an_error_is_raised_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "THREADS", 4)
    monkeypatch.setattr(scheduling, "WORTH_A_THREAD", 0)
    run = run_of(tmp_path)
    engine = Batched()
    packet = Packet({"w": torch.zeros(1)})
    jobs = [engine._start_job(run, Task(k, {"model": packet}), {}) for k in run.infos]

    def finish(job: object) -> int:
        client = jobs_seen.index(job)
        if client == 1:
            raise OSError("no space")
        return client

    jobs_seen = list(jobs)
    results = finish_in_order(jobs, finish)
    assert next(results)[1] == 0
    with pytest.raises(OSError, match="no space"):
        next(results)
