"""A run folder may come from somebody else: its code runs, and its paths lead out, only if we say so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import list_again

import fedgrove as fg
from fedgrove.cli import main
from fedgrove.config import sweep
from fedgrove.errors import InputError
from fedgrove.export.source import opened
from fedgrove.runs.files import seal_json

NET = """
from pathlib import Path

from torch import nn

with Path(__file__).with_name("traces").open("a") as file:
    file.write("run\\n")


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.flat = nn.Flatten()
        self.head = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return self.head(self.flat(x))
"""
SMALL = ["--data", "digits", "--clients", "3", "--cohort", "2", "--rounds", "2"]
SMALL += ["--engine", "serial", "--evaluate", "0", "--json"]


class Stop(Exception):
    """Stands for a kill."""


def stop(line: Mapping[str, Any]) -> None:
    raise Stop


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Each test has a text of its own: a text that was imported once is not run again.
    (tmp_path / "x.py").write_text(f"# {tmp_path}\n{NET}")
    return tmp_path


def cut(path: str, out: Path) -> None:
    with pytest.raises(Stop):
        fg.run(
            "fedavg",
            net=path,
            out=out,
            watch=stop,
            progress=False,
            clients=3,
            cohort=2,
            rounds=2,
            engine="serial",
        )


def stranger(here: Path) -> None:
    """From now on the code is another, of which nobody has said that it may be run."""
    (here / "x.py").write_text((here / "x.py").read_text() + "\n# changed\n")
    (here / "traces").unlink(missing_ok=True)


def test_what_the_command_line_names_is_trusted(here: Path) -> None:
    assert main(["cost", "fedavg", "--net", "x.py:Net", "--json"]) == 0
    assert main(["run", "fedavg", "--net", "x.py:Net", *SMALL, "--out", "run"]) == 0
    assert main(["sweep", "fedavg", "--net", "x.py:Net", *SMALL, "--out", "all"]) == 0
    assert (here / "traces").exists()


def test_resume_needs_trust(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut("x.py:Net", here / "run")
    stranger(here)
    assert main(["resume", "run", "--engine", "serial", "--json"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f'net = "x.py:Net", so the code in {here / "x.py"} would be run' in sentence
    assert "--trust" in sentence
    assert not (here / "traces").exists()
    with pytest.raises(InputError, match="trust=True"):
        fg.resume("run")
    assert not (here / "run/lock").exists()
    assert main(["resume", "run", "--engine", "serial", "--json", "--trust"]) == 0
    assert (here / "traces").exists()


def test_a_sweeps_resume_needs_trust(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "fedavg", "--net", "x.py:Net", *SMALL, "--out", "all"]) == 0
    (here / "all/fedavg-s0/summary.json").unlink()
    stranger(here)
    capsys.readouterr()
    assert main(["resume", "all", "--engine", "serial"]) == 2
    assert f"the code in {here / 'x.py'} would be run" in capsys.readouterr().err
    with pytest.raises(InputError, match="trust=True"):
        sweep.resume("all")
    assert not (here / "traces").exists()
    assert main(["resume", "all", "--engine", "serial", "--trust", "--json"]) == 0


def test_export_needs_trust_and_compare_runs_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedavg", "--net", "x.py:Net", *SMALL, "--out", "run"]) == 0
    stranger(here)
    assert main(["compare", "run", "--bytes", "--json"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--client", "0"]) == 2
    assert f"the code in {here / 'x.py'} would be run" in capsys.readouterr().err
    with pytest.raises(InputError, match="trust=True"):
        opened("run")
    assert not (here / "traces").exists()
    assert len(opened("run", trust=True).tree(0)) == 2
    assert (here / "traces").exists()


def test_what_this_process_has_run_it_may_export(here: Path) -> None:
    result = fg.run("fedavg", net="x.py:Net", clients=3, cohort=2, rounds=1, engine="serial")
    assert len(opened(result).tree(0)) == 2


def test_a_net_of_ones_own_takes_the_place_of_the_code(here: Path) -> None:
    cut("x.py:Net", here / "run")
    stranger(here)
    namespace: dict[str, Any] = {"__file__": str(here / "elsewhere" / "x.py")}
    (here / "elsewhere").mkdir()
    exec(NET, namespace)
    net = namespace["Net"]((1, 8, 8), 10)
    assert fg.resume("run", net=net, engine="serial", progress=False).summary["rounds"] == 2
    assert not (here / "traces").exists()


# ---- paths that lead out -------------------------------------------------------------------------


def test_models_stay_inside(here: Path) -> None:
    assert main(["run", "fedavg", *SMALL, "--out", "run"]) == 0
    shutil.copytree(here / "run/models", here / "outside")
    index = here / "run/models/index.json"
    (name, *_) = json.loads(index.read_text()).values()
    for path in (f"../../outside/{name}", str(here / "outside" / name), "..", 7):
        index.write_text(json.dumps({"0": path}))
        list_again(here / "run")
        with pytest.raises(InputError, match=r"index\.json is damaged"):
            opened("run")
    index.write_text(json.dumps({"0": name}))
    list_again(here / "run")
    (here / "run/models" / name).unlink()
    (here / "run/models" / name).symlink_to(here / "outside" / name)
    with pytest.raises(InputError, match="is outside of run"):
        opened("run").tree(0)


@pytest.mark.parametrize("name", ["../mine", "{here}/mine", "..", "a/b", "link"])
def test_the_runs_of_a_sweep_stay_inside(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedavg", *SMALL, "--out", "mine"]) == 0
    (here / "all").mkdir()
    (here / "all/link").symlink_to(here / "mine")
    members = {name.format(here=here): {"state": "unfinished"}}
    (here / "all/sweep.json").write_bytes(seal_json({"grid": {}, "members": members}))
    before = sorted(os.listdir(here / "mine"))
    capsys.readouterr()
    for words in (["resume", "all"], ["compare", "all"]):
        assert main(words) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert "sweep.json is damaged" in sentence or "is outside of all" in sentence
    assert sorted(os.listdir(here / "mine")) == before


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"grid": {}, "members": []}', "\xff"])
def test_a_sweep_json_that_is_none_is_a_sentence(
    text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "all").mkdir()
    (here / "all/sweep.json").write_text(text, encoding="latin-1")
    for words in (["resume", "all"], ["compare", "all"]):
        assert main(words) == 2
        assert "all/sweep.json is damaged" in capsys.readouterr().err
