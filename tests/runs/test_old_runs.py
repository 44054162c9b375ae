"""Run folders that an earlier version left after two of four rounds can be resumed.

``old_runs`` has one folder per method, written by fedgrove 8335907 and interrupted there::

    fg.run(method, data="digits", net="mlp:hidden=4", clients=4, cohort=2, rounds=4, epochs=1,
           engine="serial", out=method)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import fedgrove as fg
from fedgrove.runs.memory import read_tree

OLD_RUNS = Path(__file__).parent / "old_runs"
NEW_RULE = ("grove",)
"""Methods that choose by another rule since: the last two rounds follow it."""
THRESHOLDS = ("fedmask",)
"""Methods that send a mask entry if a trained score exceeds a threshold. The machine that made the
folders rounds in another way, so a few entries of rounds 1 and 2 differ, and all that follows from
them: 3 % of the weights on one machine, where a wrong state changes 14 %."""


@pytest.mark.parametrize("method", sorted(path.name for path in OLD_RUNS.iterdir()))
def test_an_old_run_ends_as_a_run_of_today(method: str, tmp_path: Path) -> None:
    shutil.copytree(OLD_RUNS / method, tmp_path / "old")
    resumed = fg.resume(tmp_path / "old", engine="serial", progress=False)
    today = fg.rerun(OLD_RUNS / method, engine="serial", out=tmp_path / "new", progress=False)
    if method in NEW_RULE:
        assert resumed.summary["rounds"] == 4
        assert resumed.summary["scored"] == today.summary["scored"]
        return
    for key in ("rounds", "clients"):
        assert resumed.summary[key] == today.summary[key], key
    rounding = 0.05 if method in THRESHOLDS else 0.0
    for key in ("bytes_up", "bytes_down", "density"):
        assert resumed.summary[key] == pytest.approx(today.summary[key], rel=rounding, abs=0.0), key
    old_models = sorted((tmp_path / "old" / "models").glob("*.safetensors"))
    assert len(old_models) >= 4
    equal: list[torch.Tensor] = []
    for path in old_models:
        old = read_tree(path)
        new = read_tree(tmp_path / "new" / "models" / path.name)
        assert old.keys() == new.keys()
        for name in old:
            # Equal to the bit on the machine that made the folders; other processors may add up in
            # another order.
            equal.append(torch.isclose(old[name], new[name], rtol=1e-4, atol=1e-5).flatten())
    share = torch.cat(equal).float().mean().item()
    assert share >= (0.9 if method in THRESHOLDS else 1.0)
