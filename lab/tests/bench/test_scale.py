"""A million clients compared with a thousand."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedgrove.cli import main
from fedgrove_lab.bench.processes import cpu_seconds
from fedgrove_lab.bench.report import print_scale, print_times, write_scale_page
from fedgrove_lab.bench.scale import checks, measure, summarise


def content(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": rows, "checks": checks(rows)}


def test_rows_are_of_the_fastest_starts_compared_with_the_first_size() -> None:
    measured = {
        10: [{"seconds": [1.0, 3.0], "cpu": [1.0], "joining": [], "memory": 100 << 20}],
        20: [
            # The least of each round: 4, 6 and 1; their median is 4.
            {"seconds": [4.0, 9.0, 1.0], "cpu": [3.0], "joining": [1.0], "memory": 110 << 20},
            {"seconds": [5.0, 6.0, 7.0], "cpu": [2.5], "joining": [1.5], "memory": 130 << 20},
        ],
    }
    first, second = summarise("fedavg", "serial", measured)
    assert (first["seconds"], first["times_seconds"], first["joining_cpu"]) == (2.0, 1.0, None)
    assert (second["seconds"], second["times_seconds"], second["joining_cpu"]) == (4.0, 2.0, 1.0)
    assert (second["memory_mib"], second["times_memory"]) == (120.0, 1.2)
    text = io.StringIO()
    print_scale(content([first, second]), text)
    assert text.getvalue().split("\n")[3].split() == [
        "fedavg", "serial", "20", "120", "1.20", "4.00", "2.00", "2.50", "2.50", "1.00"
    ]  # fmt: skip


def rows_of(memory: list[int], cpu: list[float]) -> list[dict[str, Any]]:
    measured = {}
    for i, size in enumerate((1000, 10_000, 1_000_000)):
        start = {"seconds": [1.0], "cpu": [cpu[i]], "joining": [], "memory": memory[i] << 20}
        measured[size] = [start]
    return summarise("fedavg", "serial", measured)


def test_claims_are_of_the_worst_size() -> None:
    rows = rows_of([100, 150, 140], [1.0, 0.9, 1.3])
    memory, cores, clock = checks(rows).values()
    # 150 compared with 100 is just within; 1.3 is more than a fifth above 1.
    assert (memory["value"], memory["ok"]) == (1.5, True)
    assert memory["at"] == "fedavg on serial, 10,000 clients"
    assert (cores["value"], cores["ok"]) == (1.3, False)
    assert cores["at"] == "fedavg on serial, 1,000,000 clients"
    assert clock["ok"]
    text = io.StringIO()
    print_scale(content(rows), text)
    said = " ".join(text.getvalue().split())
    assert "holds: memory, times that of the fewest clients 1.5 (bound 1.5; worst at" in said
    assert "DOES NOT HOLD: seconds of a round on cores, times 1.3" in said
    assert checks(rows[:1]) == {}


def test_page(tmp_path: Path) -> None:
    write_scale_page(content(rows_of([100, 150, 140], [1.0, 0.9, 1.3])), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for word in ("peak memory", "on cores", "fedavg on serial", "1,000,000", "DOES NOT HOLD"):
        assert word in text
    # A line of three points in each figure.
    assert text.count("<svg") == 3


def test_the_command_refuses_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in {
        ("--sizes", "1e3,many"): "sizes is '1e3,many'; it must be whole numbers",
        ("--sizes", "10,1000"): "sizes is '10,1000'; it must be different numbers of clients",
        ("--engines", "seral"): "there is no engine 'seral'; did you mean 'serial'",
        ("--methods", "fedavk"): "there is no method 'fedavk'; did you mean 'fedavg'",
        ("--methods", "fedavg,,"): "methods is 'fedavg,,'; it must be names separated by commas",
        ("--repeats", "0"): "repeats is 0; it must be 1 or more",
    }.items():
        assert main(["bench", "scale", *words]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


PEAKS = """
from fedgrove_lab.bench.processes import own_peak_memory
print(own_peak_memory())
block = b"x" * (512 << 20)
print(own_peak_memory())
del block
print(own_peak_memory())
"""


def test_a_process_knows_its_peak() -> None:
    """In a process of its own: another one has had its peak already."""
    said = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, during, after = (int(line) for line in said.stdout.split())
    # Half a GiB more; within a tenth of it, for the import may have had a peak above what it keeps.
    assert 0.9 * (512 << 20) < during - before < 1.1 * (512 << 20)
    # What was freed is not forgotten.
    assert after > 0.99 * during


def test_seconds_on_a_core_are_those_of_work() -> None:
    before = cpu_seconds(os.getpid())
    time.sleep(0.3)
    waited = cpu_seconds(os.getpid())
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    # In ticks of a hundredth of a second.
    assert waited - before < 0.2
    assert 0.25 < cpu_seconds(os.getpid()) - waited < 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ca-afp"])
def test_a_million_clients_cost_what_a_thousand_do(method: str) -> None:
    rows = measure([method], ["serial"], rounds=6, repeats=2)
    assert [row["clients"] for row in rows] == [1000, 10_000, 100_000, 1_000_000]
    memory, cores, _ = checks(rows).values()
    assert memory["ok"]
    # On cores: a clock also counts what else the machine does.
    assert cores["ok"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_tables_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = io.StringIO()
    measured = {
        n: [{"seconds": [12.5], "cpu": [1.0], "joining": [1.0], "memory": 2000 << 20}]
        for n in (1000, 1_000_000)
    }
    print_scale(content(summarise("caldas-dropout", "batched", measured)), text)
    times = {"median_s": 12.1234, "min_s": 1.5, "max_s": 20.0, "times_plain": 33.25}
    alone = {"start_s": 10.5, "from_start_s": 30.5, "times_plain_from_start": 2.5}
    alone |= {"memory_mib": 1386.0, "device_mib": 20_000.0, "how": "alone", "rounds": 3}
    variant = {"variant": "plain loop, torch's two threads"}
    print_times({"rows": [variant | times, variant | times | alone]}, text)
    assert "12.1234" in text.getvalue()
    assert max(len(line) for line in text.getvalue().splitlines()) <= width
