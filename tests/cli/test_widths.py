"""Every table at 80, 100 and 120 columns: no line is wider, no figure is cut."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedgrove import methods
from fedgrove.cli import main
from fedgrove.report.terminal import wrap_docstring

WIDTHS = (80, 100, 120)
WIDE = 1000
SMALL = ["--data", "digits", "--clients", "4", "--cohort", "2", "--epochs", "1"]
SMALL += ["--engine", "serial"]
SHAPE = ["--net", "mlp", "--input", "12", "--classes", "3", "--clients", "4", "--rounds", "2"]
COMMANDS = [
    ["compare", "sweep"],
    ["compare", "sweep", "longer"],
    ["compare", "sweep/fedavg-s0", "longer"],
    ["compare", "longer"],
    ["compare", "sweep", "--bytes"],
    ["compare", "sweep", "--time"],
    ["cost", "fedavg", *SHAPE],
    ["cost", "fedavg", "ca-afp", "lg-fedavg", *SHAPE],
    ["sweep", "fedavg", "local", *SMALL, "--rounds", "2", "--dry-run"],
    # The sweep is there already: nothing is trained, and its tables are shown.
    ["sweep", "local", "fedavg", *SMALL, "--rounds", "2", "--seeds", "2", "--out", "sweep"],
    ["list", "methods"],
    ["list", "data"],
    ["list", "nets"],
    ["list", "parts"],
    ["list", "engines"],
    ["list", "faults"],
    ["show", "ca-afp"],
    ["show", "fedapta:paper"],
]

Said = Callable[[list[str], int], str]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two methods and two seeds, and a run of more rounds."""
    folder = tmp_path_factory.mktemp("widths")
    before = Path.cwd()
    os.chdir(folder)
    try:
        words = [*SMALL, "--rounds", "2", "--seeds", "2", "--out", "sweep", "--json"]
        assert main(["sweep", "local", "fedavg", *words]) == 0
        assert main(["run", "fedavg", *SMALL, "--rounds", "3", "--out", "longer", "--json"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def said(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints on a pipe of that width."""
    monkeypatch.chdir(runs)

    def say(words: list[str], width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        assert main(words) == 0
        return capsys.readouterr().out

    return say


def numbers(text: str) -> set[str]:
    """All numbers of a text but the width that a line below a table names."""
    text = re.sub(r"COLUMNS=\d+", "", text)
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


def assert_fits(text: str, width: int, whole: str) -> None:
    for line in text.splitlines():
        assert len(line) <= width, line
    assert "…" not in text
    assert "\x1b" not in text
    # A number that was cut would be one that the wide table does not have.
    assert numbers(text) <= numbers(whole)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:4]))
def test_every_table_fits(words: list[str], said: Said) -> None:
    whole = said(words, WIDE)
    assert "no room for" not in whole
    for width in WIDTHS:
        text = said(words, width)
        assert_fits(text, width, whole)
        for mark in ("`", "**", ":math:", "::", "\\"):
            assert mark not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_shows_its_score_and_kilobytes_whole(width: int, said: Said) -> None:
    out = said(["compare", "longer"], width)
    summary = json.loads(Path("longer/summary.json").read_text())
    assert f"{100 * summary['accuracy_mean']:.2f} ± {100 * summary['accuracy_std']:.2f}" in out
    # 3 rounds of 2 devices.
    assert f" {summary['bytes_up'] / 6 / 1000:.1f} " in out
    assert "run longer, method fedavg, data digits" in out


def test_columns_left_out_are_named_with_where_to_see_them(said: Said) -> None:
    narrow = said(["compare", "sweep"], 80)
    (line,) = re.findall(r"no room for([^:]+):\s+set\s+COLUMNS=(\d+),\s+or\s+see\s+--json", narrow)
    assert "params" in line[0]
    assert "params" not in narrow.split("no room for")[0]
    # As wide as it says, nothing is left out; one column less, something is.
    assert "no room" not in said(["compare", "sweep"], int(line[1]))
    assert "no room" in said(["compare", "sweep"], int(line[1]) - 1)


def test_runs_of_unlike_rounds_are_named_and_none_is_starred(said: Said) -> None:
    out = said(["compare", "sweep/fedavg-s0", "longer"], 80)
    assert re.search(r"^sweep/fedavg-s0 +2 ", out, re.MULTILINE)
    assert re.search(r"^longer +3 ", out, re.MULTILINE)
    assert " *" not in out
    assert "no run is marked as the best: they trained for 2 and 3 rounds" in out


@pytest.mark.parametrize("width", WIDTHS)
def test_the_equations_of_all_methods_fit_without_markup(width: int) -> None:
    for name in methods.names():
        module = __import__(methods.find(name).__module__, fromlist=["__doc__"])
        text = wrap_docstring(module.__doc__.strip(), width)
        assert max(len(line) for line in text.splitlines()) <= width, name
        assert not re.search(r"`|\*\*|:\w+:`|\\|::$", text, re.MULTILINE), name
        # Nothing but markup is lost: every part that an arrow leads to is still there.
        assert text.count("->") == module.__doc__.count("->"), name
