"""The bench of the device: what it removes, counts and claims."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from fedgrove.cli import main
from fedgrove.errors import InputError
from fedgrove.nets import Net, build
from fedgrove_lab.bench import device, report
from fedgrove_lab.bench.device import (
    DeviceRow,
    checks,
    draw_channels,
    measure,
    median_ratio,
    shortest_ratio,
)

ROW = DeviceRow(
    net="har-cnn",
    removed=0.5,
    params=100,
    macs=200,
    train_s=0.003,
    train=0.45,
    train_median=0.47,
    train_masked=1.02,
    infer_s=0.001,
    infer=0.5,
    infer_median=0.52,
    infer_masked=0.98,
)


def content(rows: list[DeviceRow]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows], "checks": checks(rows)}


def test_the_same_share_of_every_group() -> None:
    net = Net(build("har-cnn", (9, 128), 6, 0), (9, 128))
    kept = draw_channels(net, 0.7)
    assert {k: int(v.sum()) for k, v in kept.items()} == {"conv1": 19, "conv2": 19, "fc1": 10}
    assert all(int(v.sum()) == 1 for v in draw_channels(net, 0.999).values())
    assert all(bool(v.all()) for v in draw_channels(net, 0.0).values())


def test_rows_of_a_small_net() -> None:
    # By hand, half of 64, 64 and 32 channels:
    # 128 · 32·9·5 + 64 · 32·32·5 + 32·32 · 16 + 16·6 multiply-accumulates.
    whole, half = measure("har-cnn", removed=(0.0, 0.5), repeats=1)
    assert (whole.removed, whole.params, whole.macs) == (0.0, 89_254, 1_745_088)
    assert half.macs == 128 * 32 * 45 + 64 * 32 * 32 * 5 + 1024 * 16 + 96
    assert half.params == 32 * 46 + 32 * 161 + 16 * 1025 + 6 * 17
    for row in (whole, half):
        assert min(row.train, row.train_masked, row.infer, row.infer_masked) > 0


def test_ratios_are_of_the_shortest_times() -> None:
    times = {device.DENSE: [2.0, 8.0, 4.0], "x": [7.0, 2.0, 1.0]}
    assert shortest_ratio(times, "x") == 0.5
    # Of 3.5, .25 and .25.
    assert median_ratio(times, "x") == 0.25


def test_claims() -> None:
    slow = replace(ROW, net="resnet18", train=0.36)
    results = checks([ROW, replace(ROW, removed=0.3, train=0.9), slow])
    assert {name: claim["ok"] for name, claim in results.items()} == {
        "training step of har-cnn at half the channels": True,
        "training step of resnet18 at half the channels": False,
    }
    text = io.StringIO()
    report.print_device(content([ROW, slow]), text)
    assert "holds: training step of har-cnn at half the channels 0.45" in text.getvalue()
    assert "DOES NOT HOLD: training step of resnet18" in text.getvalue()


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="no net to measure 'har-cn'; did you mean 'har-cnn'"):
        next(measure("har-cn"))
    with pytest.raises(InputError, match="repeats is 0"):
        next(measure("har-cnn", repeats=0))
    with pytest.raises(InputError, match=r"removed is 1.0; it must be in \[0, 1\)"):
        next(measure("har-cnn", removed=(1.0,)))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "measure", lambda name, repeats: measure(name, (0.5,), repeats))
    assert main(["bench", "device", "--net", "har-cnn", "--repeats", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["removed"] for row in printed["rows"]] == [0.5]
    assert printed["command"] == "fedgrove bench device --net har-cnn --repeats 1"
    assert printed["torch"] == torch.__version__
    assert "CPU cores" in printed["machine"]
    assert {"commit", "date"} <= set(printed)
    assert list(printed["checks"]) == ["training step of har-cnn at half the channels"]


def test_the_page_stands_alone(tmp_path) -> None:
    report.write_device_page(content([ROW, replace(ROW, removed=0.7)]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "har-cnn, masked" in text
    assert 'src="http' not in text
