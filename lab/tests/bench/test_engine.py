"""The bench of the engines: what it computes from times, what it starts, and what it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgrove.cli import main
from fedgrove.engines.pool.engine import cores
from fedgrove.errors import EngineError, InputError
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove_lab.bench import engine, processes, report, simulators, starts
from fedgrove_lab.bench.engine import compare_with_first, measure, variants
from fedgrove_lab.bench.scenes import SCENES, build_run, find_scene
from fedgrove_lab.bench.starts import COMMAND, ColdStart, RoundLog, StartJob

LINUX = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc"
)


@pytest.fixture
def job(tmp_path: Path) -> StartJob:
    """Two rounds of one client."""
    return StartJob("har", "serial", "cpu", 2, str(tmp_path / "log"), cohort=1)


# --- what follows from times ----------------------------------------------------------------------


def test_times_by_hand() -> None:
    # Medians 4 and 1, so the second is 4 times as fast.
    rows = compare_with_first({"plain": [3.0, 4.0, 6.0], "ours": [1.0, 2.0, 0.5]})
    assert rows[0] == {
        "variant": "plain",
        "median_s": 4.0,
        "min_s": 3.0,
        "max_s": 6.0,
        "seconds": [3.0, 4.0, 6.0],
        "times_plain": 1.0,
    }
    assert rows[1] == {
        "variant": "ours",
        "median_s": 1.0,
        "min_s": 0.5,
        "max_s": 2.0,
        "seconds": [1.0, 2.0, 0.5],
        "times_plain": 4.0,
    }


def test_starts_by_hand() -> None:
    # Plain: rounds of 2 and 4, 4 and 4 after the first; their median is 4. First rounds end at 6
    # and 10, median 8: a start costs 8 - 4 = 4. All is done after 12 and 18, median 15.
    # Ours: rounds of 1, done after 5: 3 times as fast.
    plain = [
        ColdStart((6.0, 8.0, 12.0), 2**20, None),
        ColdStart((10.0, 14.0, 18.0), 3 * 2**20, None),
    ]
    ours = [ColdStart((3.0, 4.0, 5.0), None, 2**21)]
    rows = starts.summarise({"plain": plain, "ours": ours})
    keys = ("median_s", "start_s", "rounds", "from_start_s", "from_start_min_s", "from_start_max_s")
    assert [rows[0][k] for k in keys] == [4.0, 4.0, 3, 15.0, 12.0, 18.0]
    assert [rows[1][k] for k in keys] == [1.0, 2.0, 3, 5.0, 5.0, 5.0]
    assert (rows[1]["times_plain"], rows[1]["times_plain_from_start"]) == (4.0, 3.0)
    assert [(r["memory_mib"], r["device_mib"]) for r in rows] == [(3.0, None), (None, 2.0)]


def test_shares_of_centralised_training_by_hand() -> None:
    """100 examples in 4 s are 25 a second; centralised 80 in 2 s are 40, and in bf16 160 in 2 s 80."""
    names = ("plain loop", "batched, bf16", "centralised, tf32", "centralised, bf16, compiled")
    seconds = ([4.0], [4.0], [2.0], [2.0])
    rows = compare_with_first(dict(zip(names, seconds, strict=True)))
    added = engine.add_shares(rows, dict(zip(names, (100, 100, 80, 160), strict=True)))
    assert [row["examples_s"] for row in added] == [25.0, 25.0, 40.0, 80.0]
    # A variant without a precision is compared with the fastest.
    assert [row["of_centralised"] for row in added] == [25 / 80, 25 / 80, 1.0, 1.0]
    alone = engine.add_shares(compare_with_first({"plain loop": [4.0]}), {"plain loop": 100})
    assert "of_centralised" not in alone[0]


# --- rounds that are really done ------------------------------------------------------------------


def test_a_scene_that_there_is_not() -> None:
    with pytest.raises(InputError, match="there is no scene 'hra'; did you mean 'har'"):
        measure("hra")


def test_scenes_are_what_they_say(tmp_path: Path) -> None:
    scene, run = find_scene("cnn", tmp_path, cohort=7)
    assert (scene.net, run.cohort, len(run.infos)) == ("mnist-cnn", 7, 100)
    assert {info.examples for info in run.infos.values()} == {600}


def test_the_yardstick_trains_on_all_examples_of_the_cohort(tmp_path: Path) -> None:
    """Two clients of 343 examples and batches of 32: ten batches of 64 an epoch, in three epochs."""
    scene, run = find_scene("har", tmp_path, cohort=2)
    yardstick = simulators.Centralised(scene, run, "cpu", compiled=False)
    assert (yardstick.batch, yardstick.examples) == (64, 3 * 10 * 64)
    assert engine.count_examples(run) == 3 * 2 * 343
    before = [parameter.clone() for parameter in yardstick.model.parameters()]
    yardstick.round()
    moved = zip(before, yardstick.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)


@LINUX
def test_a_process_of_its_own(job: StartJob) -> None:
    cold_start = starts.run_process(job, COMMAND)
    assert len(cold_start.ends) == 2
    assert 0 < cold_start.ends[0] < cold_start.ends[1]
    assert cold_start.memory is not None
    # torch is in it.
    assert cold_start.memory > 50 * 2**20
    assert cold_start.device is None
    assert [set(line) for line in RoundLog(Path(job.out)).read()] == [{"at"}, {"at"}]


def test_a_process_that_fails_is_quoted(job: StartJob) -> None:
    broken = [sys.executable, "-c", "raise KeyError('parallel')"]
    with pytest.raises(
        EngineError, match="parallel ended with code 1 after 0 rounds: KeyError: 'parallel'"
    ):
        starts.run_process(replace(job, variant="parallel"), broken)


def test_a_process_that_does_too_little_is_noticed(job: StartJob) -> None:
    with pytest.raises(EngineError, match="ended with code 0 after 0 rounds: it printed nothing"):
        starts.run_process(job, [sys.executable, "-c", "pass"])


@LINUX
def test_a_process_that_takes_too_long_is_ended(
    job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "TIMEOUT", 0.1)
    with pytest.raises(EngineError, match="ended with code -15"):
        starts.run_process(job, [sys.executable, "-c", "import time; time.sleep(60)"])


@LINUX
def test_descendants_and_their_memory() -> None:
    """A process whose child holds 64 MiB."""
    child = "x = bytes(range(256)) * 2**18; print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(processes.descendants(process.pid)) == 2
        assert process.pid in processes.descendants(os.getpid())
        assert 64 * 2**20 < processes.memory_of(process.pid) < 128 * 2**20
        process.communicate(b"\n")
    assert processes.memory_of(process.pid) == 0


# --- the other simulators -------------------------------------------------------------------------


def test_what_is_not_installed_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(starts, "find_spec", lambda name: None)
    assert starts.find_others("cpu", said.append) == {}
    assert [line.split(" is not")[0] for line in said] == [
        "left out: Flower",
        "left out: pfl-research",
    ]
    assert all(line.endswith("pip install 'path/to/fedgrove/lab[bench]'") for line in said)


def test_a_rival_that_fails_is_left_out_and_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(job: StartJob, command: Any) -> ColdStart:
        # Every process has a log of its own.
        assert not Path(job.out).exists()
        Path(job.out).touch()
        if job.variant == broken:
            raise EngineError(f"{job.variant} broke")
        return ColdStart((3.0, 4.0, 5.0))

    said: list[str] = []
    monkeypatch.setattr(starts, "run_process", pretend)
    monkeypatch.setattr(
        starts, "find_others", lambda device, report: {"Flower, 2 Ray actors": COMMAND}
    )
    broken = "Flower, 2 Ray actors"
    rows = starts.measure_starts("har", starts=2, cohort=1, report=said.append)
    assert [row["variant"] for row in rows] == list(variants(SCENES["har"], "cpu"))
    assert said == ["left out: Flower, 2 Ray actors broke"]
    broken = "serial"
    with pytest.raises(EngineError, match="serial broke"):
        starts.measure_starts("har", starts=1, cohort=1)


@pytest.mark.parametrize("precision", [None, "tf32", "bf16"])
def test_a_round_of_pfl_research(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, round by round in this process."""
    pytest.importorskip("pfl")
    scene = replace(SCENES["har"], clients=3, examples=6, local=LocalTraining(2, 4, SGD(0.1)))
    dtypes = []
    net_of = simulators.build_plain_net

    def watched(of: Any) -> Any:
        module = net_of(of)
        module.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
        return module

    monkeypatch.setattr(simulators, "build_plain_net", watched)
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    train_round = simulators.prepare_pfl(scene, "cpu", precision, build_run(scene, tmp_path))
    for done in (1, 2, 3):
        train_round()
        # Three clients, two epochs of two batches.
        assert len(dtypes) == done * 12
    assert set(dtypes) == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert torch.backends.cuda.matmul.allow_tf32 == tf32_before


def test_pfl_research_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is one of the variants that take turns, in the precisions that matter."""
    monkeypatch.setattr(engine, "find_spec", lambda name: True)

    def names(scene: str) -> list[str]:
        return [name for name in variants(SCENES[scene], "cuda") if name.startswith("pfl")]

    assert names("har") == ["pfl-research, tf32"]
    assert names("resnet") == ["pfl-research, bf16", "pfl-research, tf32"]
    said: list[str] = []
    monkeypatch.setattr(starts, "find_spec", lambda name: None)
    assert starts.find_others("cuda", said.append) == {}
    assert [line.split(" is not")[0] for line in said] == ["left out: Flower"]


def test_in_turns_a_rival_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Any) -> Any:
        raise RuntimeError("no such kernel")

    def two(scene: Any, device: str) -> Any:
        return {"plain loop": lambda run: lambda: None, broken: fails}

    said: list[str] = []
    monkeypatch.setattr(engine, "variants", two)
    monkeypatch.setattr(engine, "yardsticks", lambda scene, device: {"centralised": fails})
    broken = "pfl-research, tf32"
    rows = measure("har", repeats=2, cohort=1, report=said.append)
    assert [row["variant"] for row in rows] == ["plain loop"]
    assert said == [
        "left out: pfl-research, tf32: RuntimeError: no such kernel",
        "left out: centralised: RuntimeError: no such kernel",
    ]
    broken = "batched, tf32"
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure("har", repeats=1, cohort=1)


@pytest.mark.slow
def test_pfl_research_does_its_rounds(job: StartJob) -> None:
    pytest.importorskip("pfl")
    for variant, command in starts.find_others("cpu", lambda line: None).items():
        if variant.startswith("pfl"):
            pfl_job = replace(job, variant=variant, out=f"{job.out}{variant}", cohort=3)
            assert len(starts.run_process(pfl_job, command).ends) == 2


@pytest.mark.slow
def test_flower_does_its_rounds(job: StartJob) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    variant = f"Flower, {cores()} Ray actors"
    command = starts.find_others("cpu", lambda line: None)[variant]
    cold_start = starts.run_process(replace(job, variant=variant, cohort=3), command)
    first, second = cold_start.ends
    # Ray's start is in the first.
    assert first > 2 * (second - first)


# --- tables, page, command ------------------------------------------------------------------------


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    turns = compare_with_first({"plain loop": [4.0, 5.0, 6.0], "pool": [2.0, 2.5]})
    alone = starts.summarise(
        {
            "plain loop": [ColdStart((6.0, 8.0, 12.0), 2**28)],
            "Flower": [ColdStart((20.0, 23.0, 26.0), 2**30)],
        }
    )
    rows = [{"scene": "har", "how": "turns", **row} for row in turns]
    rows += [{"scene": "har", "how": "alone", **row} for row in alone]
    return rows


def test_tables(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    report.print_times({"rows": rows})
    first, second = capsys.readouterr().out.split(
        "each in its own process, 3 rounds from its start:"
    )
    assert "pool" in first
    # 5 / 2.25
    assert "2.22" in first
    assert "Flower" not in first
    line = next(line for line in second.splitlines() if line.startswith("Flower"))
    # Rounds of 3 compared with 3, in all 26 s compared with 12, a start of 20 - 3; 2**30 bytes.
    assert line.split() == [
        "Flower",
        "3.0000",
        "3.0000",
        "3.0000",
        "1.00",
        "17.0",
        "26.0",
        "0.46",
        "1024",
    ]
    assert "on the device" not in second


def test_other_simulators_are_compared_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "plain loop": [1.0],
        "batched, fp32": [0.5],
        "batched, tf32": [0.25],
        "batched, bf16": [0.125],
        "pfl-research, tf32": [1.0],
        "pfl-research, bf16": [2.0],
        "Flower, 2 Ray actors": [3.0],
    }
    rows = [{"scene": "resnet", "how": "turns", **row} for row in compare_with_first(times)]
    assert engine.compare_simulators(rows) == [
        # Of the same precision.
        {"ours": "batched, tf32", "other": "pfl-research, tf32", "times": 4.0},
        {"ours": "batched, bf16", "other": "Flower, 2 Ray actors", "times": 24.0},
    ]
    assert engine.compare_simulators(rows[:4]) == []
    assert engine.compare_simulators([rows[0], rows[-1]]) == []
    report.print_times({"rows": rows})
    said = " ".join(capsys.readouterr().out.split())
    assert "resnet: batched, tf32 is 4.00 times as fast as pfl-research, tf32, round" in said


def test_page(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    report.write_times_page({"rows": rows}, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for word in (
        "har: times as fast as the plain loop",
        "har: peak MiB",
        "Flower",
        "from process start",
        "0.46",
    ):
        assert word in text
    assert '<script src="http' not in text
    report.write_times_page({"rows": rows[:2]}, tmp_path / "turns.html")
    assert "peak MiB" not in (tmp_path / "turns.html").read_text()


def test_whiskers_by_hand() -> None:
    # A median of 2 s is 3 times plain, so plain takes 6 s: the fastest, 1 s, is 6 times, the
    # slowest, 4 s, 1.5 times.
    row = {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "times_plain": 3.0}
    assert report.find_whiskers(row, report.SPEEDS[0]) == (1.5, 6.0)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def eager_only(scene: Any, device: str) -> Any:
        # Compiling takes half a minute.
        both = yardsticks(scene, device)
        return {"centralised": both["centralised"]}

    yardsticks = engine.yardsticks
    monkeypatch.setattr(engine, "yardsticks", eager_only)
    words = ["bench", "engine", "--device", "cpu", "--cohort", "1", "--repeats", "1"]
    assert main([*words, "--starts", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    # Every variant has really done its round.
    expected = [*variants(SCENES["har"], "cpu"), "centralised"]
    assert [row["variant"] for row in rows] == expected
    assert rows[-1]["of_centralised"] == 1
    for row in rows:
        assert row["min_s"] > 0
        assert row["first_s"] > 0
        assert row["how"] == "turns"
    assert main([*words, "--starts", "-1"]) == 2
    assert "starts is -1; it must be 0 or more" in capsys.readouterr().err
    assert main([*words, "--scene", "hra"]) == 2
    assert "there is no scene 'hra'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "engine", "--device", "cuda"]) == 2
        assert "torch finds no CUDA device here" in capsys.readouterr().err
    assert main([*words, "--plot", "none/page.html"]) == 2
    assert "there is no folder 'none'" in capsys.readouterr().err
