"""The virtual clock: worked by hand for two clients, a deadline and an outage; and in real runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run

import fedgrove
from fedgrove.core import Answer, ClientInfo, Job, Lost, Report, Task
from fedgrove.data.devices import Steps
from fedgrove.engines import Serial
from fedgrove.errors import EngineError, InputError
from fedgrove.methods import Ditto, FedAvg
from fedgrove.runs.clock import (
    NoClientInTime,
    Stopwatch,
    Times,
    clock_of,
    make_notes,
    times,
    transfer,
)
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.run import Run

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "cohort": 4, "rounds": 3, "epochs": 1}


# ---- by hand -------------------------------------------------------------------------------------

MEGABYTE = 1_000_000
COST = {"down": {"values": 900_000, "header": 100_000}, "up": {"values": MEGABYTE // 2}}
SLOW = ClientInfo(20, bandwidth=2.0, speed=0.5, downlink=4.0)
FAST = ClientInfo(13, bandwidth=8.0, speed=2.0)
"""Client 0, SLOW: 1 MB down at 4 Mbit/s is 2 s; 1 GMAC at .5 GMAC/s is 2 s; half a MB up at
2 Mbit/s is 2 s: 6 s. Client 1, FAST: 8 Mbit at 8 Mbit/s is 1 s, 1 GMAC at 2 GMAC/s .5 s, 4 Mbit
.5 s: 2 s."""


def two_clients(tmp_path: Path, trace: dict[int, Steps] | None = None, **words: Any) -> Run:
    run = make_run(FedAvg(), tmp_path, sizes=(20, 13), cohort=2, **words)
    clients = dict(run.federation.clients)
    for k, info in enumerate((SLOW, FAST)):
        clients[k] = replace(clients[k], info=info)
    return replace(run, federation=replace(run.federation, clients=clients, trace=trace))


def report(client: int) -> tuple[Task, Answer]:
    return Task(client), Report(client, cost=COST, macs=10**9)


def test_two_clients_by_hand(tmp_path: Path) -> None:
    watch = Stopwatch(two_clients(tmp_path), start=100.0)
    answers = [report(0), report(1)]
    assert list(watch.time_answers(answers)) == answers
    assert watch.to_line() == {
        "virtual_seconds": 6.0,
        "virtual_clock": 106.0,
        "slowest": {"client": 0, "down": 2.0, "compute": 2.0, "up": 2.0},
    }
    assert watch.explain_all_late() == ""


@pytest.mark.parametrize(("deadline", "late", "seconds"), [(5.0, [0], 5.0), (6.0, [], 6.0)])
def test_a_deadline_by_hand(
    deadline: float, late: list[int], seconds: float, tmp_path: Path
) -> None:
    """Who needs 6 s is in time for 6 s, and not for 5 s: then the exchange lasts to the deadline."""
    watch = Stopwatch(two_clients(tmp_path, deadline=deadline), start=0.0)
    found = [answer for _, answer in watch.time_answers([report(0), report(1)])]
    assert [answer.of for answer in found if isinstance(answer, Lost)] == late
    if late:
        sentence = "client 0 takes 6 s of virtual time, and the deadline is 5 s."
        # Its bytes were sent.
        assert found[0] == Lost(0, "late", sentence, COST)
    assert watch.seconds == seconds


def test_a_deadline_that_nobody_meets_says_how_long_the_fastest_takes(tmp_path: Path) -> None:
    run = two_clients(tmp_path, deadline=1.0)
    tasks = [Task(0), Task(1)]
    watch = Stopwatch(run, start=0.0)
    list(watch.time_answers([report(0), report(1)]))
    sentence = (
        "No client answered within deadline=1: the fastest, client 1, takes 2 s of virtual time "
        "(1 s down, 0.5 s of work, 0.5 s up)."
    )
    assert watch.explain_all_late() == sentence
    with pytest.raises(NoClientInTime) as refused:
        watch.check_deadline(tasks)
    assert str(refused.value) == f"{sentence} Give a longer deadline."
    # Others may be faster, or the same ones at another time: then it is tried again.
    watch.check_deadline(tasks[:1])
    changing = Stopwatch(two_clients(tmp_path, trace={}, deadline=1.0), start=0.0)
    list(changing.time_answers([report(0), report(1)]))
    assert changing.explain_all_late()
    changing.check_deadline(tasks)


def test_an_outage_by_hand(tmp_path: Path) -> None:
    """Client 0 from second 10 on, its trace in place of its profile.

    1 MB down: at 4 Mbit/s to second 11 (4 of 8 Mbit), nothing to second 20, then 4 Mbit at 2 Mbit/s:
    1 + 9 + 2 = 12 s, to second 22. Work 2 s, to second 24. Half a MB up: 1 Mbit/s to second 25 (1 of
    4 Mbit), nothing to second 30, then 3 Mbit at 3 Mbit/s: 1 + 5 + 1 = 7 s. In all 21 s.
    """
    steps = Steps(
        seconds=(0.0, 11.0, 20.0, 25.0, 30.0),
        up=(9.0, 9.0, 1.0, 0.0, 3.0),
        down=(4.0, 0.0, 2.0, 9.0, 9.0),
    )
    watch = Stopwatch(two_clients(tmp_path, trace={0: steps}), start=10.0)
    list(watch.time_answers([report(0), report(1)]))
    assert watch.to_line() == {
        "virtual_seconds": 21.0,
        "virtual_clock": 31.0,
        "slowest": {"client": 0, "down": 12.0, "compute": 2.0, "up": 7.0},
    }


def test_of_a_lost_client_only_its_bytes_count_and_a_deadline_waits_for_it(tmp_path: Path) -> None:
    """1 MB down over SLOW's 4 Mbit/s is 2 s; FAST takes 2 s too."""
    lost = Lost(0, "crashed", "", {"down": COST["down"]})
    watch = Stopwatch(two_clients(tmp_path), start=0.0)
    assert list(watch.time_answers([(Task(0), lost)])) == [(Task(0), lost)]
    assert watch.seconds == 2.0
    waiting = Stopwatch(two_clients(tmp_path, deadline=50.0), start=0.0)
    list(waiting.time_answers([(Task(0), lost), report(1)]))
    assert waiting.seconds == 50.0
    assert waiting.explain_all_late() == ""
    nothing = Stopwatch(two_clients(tmp_path), start=7.0)
    assert nothing.to_line() == {"virtual_seconds": 0.0, "virtual_clock": 7.0}


def test_a_trace_that_ends_before_the_run_is_named(tmp_path: Path) -> None:
    changing = Steps((0.0, 5.0), (1.0, 1.0), (1.0, 1.0))
    constant = Steps((0.0,), (1.0,), (1.0,))
    run = two_clients(tmp_path, trace={0: changing, 1: constant})
    assert make_notes(run, 5.0) == []
    assert make_notes(run, 12.5) == [
        "the trace ended before the run for 1 of 2 clients, the first at 5 s of 12.5 s: their last "
        "bandwidths stayed in effect"
    ]
    assert make_notes(two_clients(tmp_path), 99.0) == []


# ---- in general ----------------------------------------------------------------------------------

rates = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6)
gaps = st.lists(st.floats(0.01, 10.0), min_size=6, max_size=6)


@given(rates, gaps, st.integers(0, 10**7), st.floats(0.0, 60.0))
def test_what_flows_in_the_time_of_a_transfer_is_its_bytes(
    rates: list[float], gaps: list[float], count: int, start: float
) -> None:
    rates[-1] += 0.5
    seconds = [0.0]
    for gap in gaps[: len(rates) - 1]:
        seconds.append(seconds[-1] + gap)
    taken = transfer(count, start, seconds, rates)
    flowed = 0.0
    for i, rate in enumerate(rates):
        begins = max(seconds[i], start)
        ends = start + taken
        if i + 1 < len(rates):
            ends = min(ends, seconds[i + 1])
        flowed += 1e6 * rate * max(0.0, ends - begins)
    assert flowed == pytest.approx(8 * count, rel=1e-6, abs=1.0)


@given(st.integers(0, 10**9), st.integers(0, 10**12), st.integers(0, 10**9), st.floats(0.0, 1e6))
def test_a_constant_trace_is_the_profile(down: int, macs: int, up: int, start: float) -> None:
    steps = Steps((0.0, 7.0), (SLOW.up, SLOW.up), (SLOW.down, SLOW.down))
    plain = times(SLOW, None, start, down, macs, up)
    assert times(SLOW, steps, start, down, macs, up).total == pytest.approx(plain.total, rel=1e-9)
    assert plain == Times(8 * down / 4e6, macs / 0.5e9, 8 * up / 2e6)


def test_impossible_devices_and_deadlines_are_refused(tmp_path: Path) -> None:
    for words in ({"bandwidth": 0.0}, {"downlink": 0.0}, {"speed": 0.0}, {"speed": float("nan")}):
        with pytest.raises(InputError, match="it must be above 0"):
            ClientInfo(1, **words)
    for deadline in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"deadline is .*; it must be above 0"):
            two_clients(tmp_path, deadline=deadline)
        with pytest.raises(InputError, match=r"deadline is .*; it must be above 0"):
            fedgrove.Experiment(FedAvg(), deadline=deadline)


# ---- in real runs --------------------------------------------------------------------------------


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = {"seconds", "virtual_seconds", "virtual_clock", "slowest"}
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def test_the_clock_alone_changes_no_result(tmp_path: Path) -> None:
    """Other devices, or a deadline that all meet: other times, the same models, scores and bytes."""
    found = []
    for name, words in {
        "uniform": {},
        "phones": {"profile": "phones"},
        "late": {"profile": "phones", "deadline": 1e6},
    }.items():
        out = tmp_path / name
        summary = fedgrove.run("ditto", **TINY, **words, engine="serial", out=out).summary
        files = {p.name: p.read_bytes() for p in (out / "models").iterdir()}
        found.append((summary["virtual_seconds"], without_times(lines_of(out)), files))
        assert summary["virtual_seconds"] == clock_of(lines_of(out)) > 0
    (uniform, *plain), (phones, *other), (late, *third) = found
    assert plain == other == third
    assert phones == late != uniform


def test_the_clock_adds_up_and_is_the_same_on_every_engine(tmp_path: Path) -> None:
    clocks = []
    for engine in ("serial", "wired", "pool"):
        out = tmp_path / engine
        fedgrove.run("fedavg", **TINY, profile="phones", engine=engine, out=out)
        lines = lines_of(out)
        total = 0.0
        for line in lines:
            slowest = line["slowest"]
            parts = slowest["down"] + slowest["compute"] + slowest["up"]
            assert line["virtual_seconds"] == pytest.approx(parts, abs=1e-8)
            total += line["virtual_seconds"]
            assert line["virtual_clock"] == pytest.approx(total, abs=1e-7)
        clocks.append([(line["virtual_clock"], line["slowest"]) for line in lines])
    assert clocks[0] == clocks[1] == clocks[2]


@dataclass(eq=False)
class Stops(Serial):
    """Breaks down in the middle of the third exchange."""

    left: int = 10

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job, answer in super().map(jobs):
            self.left -= 1
            if not self.left:
                raise EngineError("the power went.")
            yield job, answer


def test_who_is_late_is_lost_and_a_resumed_run_has_the_same_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 has an outage from the second round on; client 3 is always too slow."""
    monkeypatch.chdir(tmp_path)
    devices = "client,up,down,speed,memory\n0,9,9,5,9\n1,9,9,5,9\n2,9,9,5,9\n3,.1,9,5,9\n"
    Path("devices.csv").write_text(devices)
    trace = "client,second,up,down\n0,0,9,9\n1,0,9,9\n1,.9,0,0\n1,9,9,9\n2,0,9,9\n3,0,.1,9\n"
    Path("trace.csv").write_text(trace)
    words = {**TINY, "evaluate": 0, "profile": "devices.csv", "trace": "trace.csv"}
    whole = fedgrove.run(Ditto(), **words, deadline=1.0, engine="serial", out="whole").summary
    lines = lines_of(tmp_path / "whole")
    assert [line["lost"] for line in lines] == [{"late": [3]}, {"late": [1, 3]}, {"late": [1, 3]}]
    assert [line["virtual_clock"] for line in lines] == [1.0, 2.0, 3.0]
    assert whole["lost"] == {"late": 5}
    assert whole["virtual_seconds"] == 3.0
    # Each line counts the bytes of all four.
    first, second, _ = lines
    assert first["bytes_up"] == pytest.approx(second["bytes_up"], rel=0.01)

    with pytest.raises(EngineError, match=r"the power went. 2 of 3 rounds are saved"):
        fedgrove.run(Ditto(), **words, deadline=1.0, engine=Stops(), out="cut")
    assert not Path("cut/summary.json").exists()
    resumed = fedgrove.resume("cut", engine="pool", progress=False)
    assert without_times([resumed.summary]) == [
        {**without_times([whole])[0], "engine": "pool"},
    ]
    assert lines_of(tmp_path / "cut")[-1]["virtual_clock"] == 3.0

    with pytest.raises(EngineError, match="the power went"):
        fedgrove.run(Ditto(), **words, deadline=1.0, engine=Stops(), out="changed")
    Path("trace.csv").write_text(trace.replace("9,9,9", "8,9,9"))
    with pytest.raises(InputError, match=r"trace.csv has changed since the run was started \(its"):
        fedgrove.resume("changed", progress=False)
    Path("trace.csv").unlink()
    with pytest.raises(InputError, match=r"the run has the devices of trace.csv, and there is no"):
        fedgrove.resume("changed", progress=False)
    Path("trace.csv").write_text(trace)
    assert fedgrove.resume("changed", progress=False).summary["virtual_seconds"] == 3.0


def test_a_deadline_that_all_clients_miss_leaves_nothing_behind(tmp_path: Path) -> None:
    message = (
        r"^No client answered within deadline=1e-05: the fastest, client \d, takes 0.0\d+ s of"
    )
    with pytest.raises(NoClientInTime, match=message):
        fedgrove.run("fedavg", **TINY, deadline=1e-5, engine="serial", out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_where_others_may_be_faster_the_exchange_is_tried_again(tmp_path: Path) -> None:
    words = {**TINY, "cohort": 2, "deadline": 1e-5, "engine": "serial", "out": tmp_path / "run"}
    with pytest.raises(EngineError) as refused:
        fedgrove.run("fedavg", **words)
    sentence = str(refused.value)
    assert sentence.startswith("the exchange of round 1 was abandoned 3 times: 0 of 2 clients")
    assert "A longer deadline or timeout may help. No client answered within dead" in sentence
    lines = lines_of(tmp_path / "run")
    assert [line["virtual_clock"] for line in lines] == [1e-5, 2e-5, 3e-5]
    assert RunFolder(tmp_path / "run").rounds_saved() == 0
