"""A million clients beside a thousand."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest

from fedgrove.bench.scale import cpu_seconds, measure, summarise
from fedgrove.bench.show import print_scale, print_times


def test_rows_are_of_the_fastest_starts_beside_the_first_size() -> None:
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
    print_scale([first, second], text)
    assert text.getvalue().split("\n")[3].split() == [
        "fedavg", "serial", "20", "120", "1.20", "4.00", "2.00", "2.50", "2.50", "1.00"
    ]  # fmt: skip


PEAKS = """
from fedgrove.bench.scale import own_peak_memory
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
    million = rows[1]
    assert million["clients"] == 1_000_000
    assert million["times_memory"] <= 1.5
    # On cores: a clock also counts what else the machine does.
    assert million["times_cpu"] <= 1.2


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_tables_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = io.StringIO()
    measured = {
        n: [{"seconds": [12.5], "cpu": [1.0], "joining": [1.0], "memory": 2000 << 20}]
        for n in (1000, 1_000_000)
    }
    print_scale(summarise("caldas-dropout", "batched", measured), text)
    times = {"median_s": 12.1234, "min_s": 1.5, "max_s": 20.0, "times_plain": 33.25}
    alone = {"start_s": 10.5, "from_start_s": 30.5, "times_plain_from_start": 2.5}
    alone |= {"memory_mib": 1386.0, "device_mib": 20_000.0, "how": "alone", "rounds": 3}
    variant = {"variant": "plain loop, torch's two threads"}
    print_times([variant | times, variant | times | alone], text)
    assert "12.1234" in text.getvalue()
    assert max(len(line) for line in text.getvalue().splitlines()) <= width
