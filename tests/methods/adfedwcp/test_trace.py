"""The allocation of centroids follows a bandwidth trace: by hand, in a real run, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import answers, make_run

import fedgrove as fg
from fedgrove.core import ClientInfo
from fedgrove.data.devices import Steps
from fedgrove.engines import Serial
from fedgrove.methods import AdFedWCP, FedWCP
from fedgrove.methods.adfedwcp.centroids import Adaptive
from fedgrove.parts.local import LocalTraining
from fedgrove.runs.per_task import PerTask
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run

# Without a change of accuracy in it, all layers alike: k follows from data, progress and bandwidth.
RULE = Adaptive(k_min=2, k_max=32, xi=0.0, zeta=0.0)
METHOD = AdFedWCP(allocation=RULE, importance="alike", local=LocalTraining(1, 8))
FALLS = Steps((0.0, 10.0), up=(100.0, 5.0), down=(100.0, 5.0))


def traced(method: Any, folder: Path, trace: dict[int, Steps]) -> Run:
    run = make_run(method, folder, sizes=(24, 12), cohort=2, rounds=4)
    return replace(run, federation=replace(run.federation, trace=trace))


def centroids_of(run: Run, now: Callable[[], float] | None) -> list[float]:
    """The centroids per layer of client 0 in each exchange."""
    loop = rounds(run, now=now)
    exchange = next(loop)
    found = []
    while exchange.tasks:
        (counts,) = [task.settings["k"] for task in exchange.tasks if task.to == 0]
        assert len(set(counts)) == 1
        found.append(counts[0])
        exchange = loop.send(answers(run, Serial(), exchange.tasks))
    return found


def test_centroids_follow_the_bandwidth_of_each_exchange_by_hand(tmp_path: Path) -> None:
    """Three layers, omega 1/3; client 0 has the most data: k_data = 2 + ceil(30 / 3) = 12.

    gamma = 1, 1.25, 1.5, 1.75: the lower bound is 12, 15, 18, 21. The upper one is 32 at 100 Mbit/s and
    32 - ceil(30 / 95 * 2/3 * 95) = 12 at 5 Mbit/s, from second 10 on.
    """
    clock = iter([0.0, 9.9, 10.0, 25.0])
    run = traced(METHOD, tmp_path / "follows", {0: FALLS})
    assert centroids_of(run, lambda: next(clock)) == [12, 15, 12, 12]
    # As in the paper: the bandwidth before the first round, which is 52.5 without a profile.
    fixed = replace(METHOD, allocation=replace(RULE, follow_trace=False))
    run = traced(fixed, tmp_path / "fixed", {0: FALLS})
    assert centroids_of(run, lambda: 25.0) == [12, 15, 18, 21]
    # A loop without a clock has no second to look at.
    run = traced(METHOD, tmp_path / "no-clock", {0: FALLS})
    assert centroids_of(run, None) == [12, 15, 18, 21]


def test_a_client_without_a_trace_keeps_what_is_known_of_it(tmp_path: Path) -> None:
    run = traced(METHOD, tmp_path, {0: FALLS})
    state = run.method.init(run.setup)
    followed = run.method.follow_devices(state, run.federation.infos_at(30.0))
    assert followed.devices[0] == (24, 5.0, 1.0, 1 << 30)
    assert followed.devices[1] == state.devices[1] == (12, 52.5, 1.0, 1 << 30)
    # A fixed number of centroids depends on no device.
    assert FedWCP().follow_devices(state, run.federation.infos_at(30.0)) is state


def test_in_an_outage_the_last_bandwidth_stays_known() -> None:
    steps = Steps((0.0, 5.0, 9.0), up=(0.0, 8.0, 2.0), down=(4.0, 0.0, 3.0))
    # It begins with an outage: the first bandwidth above 0 stands for it.
    assert steps.at(0.0) == (8.0, 4.0)
    assert steps.at(5.0) == (8.0, 4.0)
    assert steps.at(1e9) == (2.0, 3.0)


def test_each_task_follows_its_own_clients(tmp_path: Path) -> None:
    run = make_run(METHOD, tmp_path, cohort=4)
    server = PerTask(run.method, lambda client, round: "ab"[client % 2], run.federation.ids)
    state = server.init(run.setup)
    known = {client: ClientInfo(1, bandwidth=10.0 + client) for client in range(4)}
    states = server.follow_devices(state, known).by_task()
    for task, members in (("a", (0, 2)), ("b", (1, 3))):
        bandwidths = {client: device[1] for client, device in states[task].devices.items()}
        assert bandwidths == {client: 10.0 + client for client in members}


# ---- a run with a file ---------------------------------------------------------------------------


def quick(out: Path, trace: Path, method: Any = METHOD, **words: Any) -> Any:
    return fg.run(
        method,
        data="digits",
        clients=3,
        cohort=3,
        rounds=4,
        partition="dirichlet:0.4",
        trace=str(trace),
        engine="serial",
        progress=False,
        out=out,
        **words,
    )


def write_trace(path: Path, second: float, clients: int = 3) -> Path:
    """All clients have 100 Mbit/s up to a second, and 5 from then on."""
    lines = ["client,second,up,down"]
    for client in range(clients):
        lines += [f"{client},0,100,100", f"{client},{second},5,5"]
    path.write_text("\n".join(lines))
    return path


def columns(result: Any) -> list[tuple[float, float, int]]:
    lines = result.folder.metrics()
    return [(x["virtual_clock"], x["figures"]["centroids"], x["bytes_up"]) for x in lines]


class Killed(Exception):
    pass


def test_a_run_follows_its_trace_and_a_resumed_one_too(tmp_path: Path) -> None:
    never = quick(tmp_path / "never", write_trace(tmp_path / "never.csv", 1e6))
    # From the third exchange on: the second one ends with this second.
    falls = write_trace(tmp_path / "falls.csv", never.folder.metrics()[1]["virtual_clock"])
    whole = quick(tmp_path / "whole", falls)
    fixed = replace(METHOD, allocation=replace(RULE, follow_trace=False))
    blind = quick(tmp_path / "blind", falls, fixed)
    assert columns(whole)[:2] == columns(never)[:2]
    for mine, other in zip(columns(whole)[2:], columns(blind)[2:], strict=True):
        assert mine[1] < other[1]
        assert mine[2] < other[2]
    # Fewer bytes at 5 Mbit/s take less time.
    assert columns(whole)[-1][0] < columns(blind)[-1][0]

    def kill(line: Any) -> None:
        if line["round"] == 3:
            raise Killed

    with pytest.raises(Killed):
        quick(tmp_path / "cut", falls, watch=kill)
    resumed = fg.resume(tmp_path / "cut", progress=False)
    assert columns(resumed) == columns(whole)
    assert resumed.summary["accuracy_clients"] == whole.summary["accuracy_clients"]


def test_a_trace_that_ends_early_or_lacks_a_client(tmp_path: Path) -> None:
    """One sentence each: in the notes of the summary, and instead of a run."""
    result = quick(tmp_path / "early", write_trace(tmp_path / "early.csv", 1e-9))
    (note,) = [note for note in result.summary["notes"] if "trace" in note]
    assert "the trace ended before the run for 3 of 3 clients" in note
    assert note.endswith("their last bandwidths stayed in effect")
    lacks = write_trace(tmp_path / "lacks.csv", 1.0, clients=2)
    with pytest.raises(fg.errors.InputError, match=r"has no line for client 2, and there are 3 cl"):
        quick(tmp_path / "lacks", lacks)
