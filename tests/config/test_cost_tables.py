"""Predicted costs as people read them."""

from __future__ import annotations

import io

from fedgrove.config.cost import print_cost, print_costs
from fedgrove.report.tables import format_bytes


def test_cost_and_sizes_are_for_people() -> None:
    out = io.StringIO()
    found = {
        "clients": 36,
        "cohort": 10,
        "rounds": 50,
        "bytes_up": 5 << 20,
        "bytes_down": 0,
        "bytes_paper": 149_000_000,
        "mib_paper": 142.1,
        "reduction_paper": 0.7,
        "params": 124198,
        "macs": 10,
        "memory": 12,
        "virtual_seconds": 600.0,
        "per_device": {
            "bytes_up": {"min": 1024, "median": 2048, "max": 4096},
            "bytes_down": {"min": 0, "median": 0, "max": 0},
            "macs": {"min": 10**6, "median": 10**8, "max": 2 * 10**9},
            "seconds": {"min": 0.5, "median": 2.0, "max": 180.0},
        },
    }
    print_cost(found, out)
    assert "142.1 MiB, 70.0% less than dense" in out.getvalue()
    assert "at most 142.1 MiB" not in out.getvalue()
    print_cost(found | {"paper_at_most": True}, out)
    assert "at most 142.1 MiB, 70.0% less than dense" in out.getvalue()
    print_cost(found | {"reduction_paper": -0.22}, out)
    assert "142.1 MiB, 22.0% more than dense" in out.getvalue()
    rows = dict(row.rstrip().split("  ", 1) for row in out.getvalue().splitlines())
    assert rows["virtual time of all rounds"].strip() == "10 min"
    assert rows["up per device and round, at most"].strip() == "2.0 kB (1.0 kB to 4.1 kB)"
    assert rows["work per device and round"].strip() == "100 MMAC (1 MMAC to 2 GMAC)"
    assert rows["time per device and round"].strip() == "2 s (500 ms to 3 min)"
    several = io.StringIO()
    print_costs([{"method": name, **found} for name in ("fedavg", "mine")], several)
    lines = [row.split() for row in several.getvalue().splitlines() if row.startswith("mine")]
    assert lines[0][-2:] == ["10", "min"]
    assert lines[1][1:7] == ["1.0", "kB", "2.0", "kB", "4.1", "kB"]
    assert (format_bytes(1023), format_bytes(1024), format_bytes(1 << 30)) == (
        "1023 B",
        "1.0 KiB",
        "1,024.0 MiB",
    )
