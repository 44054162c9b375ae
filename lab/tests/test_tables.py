"""Tables of README.md and the docs: they are what the stored results give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedgrove.errors import InputError
from fedgrove_lab import tables
from fedgrove_lab.tables import (
    MARKED,
    TableDefinition,
    fill_page,
    find_changes,
    find_pages,
    load_tables,
    write_table,
)

RESULT = {
    "command": "fedgrove run",
    "commit": "abc1234",
    "date": "2026-11-18",
    "machine": "2 CPU cores",
    "seeds": [0, 1],
    "rows": [
        {"name": "fedavg", "data": "a", "values": {"acc": [0.5, 0.7], "kb": [2000.0, 2000.0]}},
        {"name": "grove", "data": "a", "values": {"acc": [0.8, 0.8], "kb": [50.0, 30.0]}},
        {"name": "grove", "data": "b", "values": {"acc": [0.9, 0.9]}},
    ],
}
DEFINITION: dict[str, Any] = {
    "only": {"data": "a"},
    "rows": ["grove", "fedavg"],
    "columns": [
        {"title": "method", "name": "name", "rename": {"fedavg": "FedAvg"}},
        {"title": "accuracy %", "measures": ["acc"], "scale": 100, "spread": True},
        {"title": "kB", "measures": ["kb"], "digits": 0, "thousands": True},
        {"title": "bytes", "measures": ["kb"], "relative_to": "fedavg"},
        {"title": "both", "measures": ["acc", "kb"]},
    ],
}


@pytest.fixture
def _result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read_result", lambda name: RESULT)


def test_pages_are_what_the_results_give() -> None:
    pages = [page.relative_to(tables.ROOT).as_posix() for page in find_changes()]
    assert pages == [], "run: python -m fedgrove_lab.tables"


def test_no_page_has_a_measured_number_that_is_not_stored() -> None:
    """Spreads, times and speed-ups are measured: they are only in tables that results give."""
    measured = re.compile(r"\d ± \d|\d times (as fast|faster)|\d ms\b|\bH200\b")
    found = []
    for page in [*find_pages(), tables.ROOT / "CHANGELOG.md"]:
        for line in MARKED.sub("", page.read_text()).splitlines():
            if measured.search(line):
                found.append(f"{page.name}: {line}")
    assert found == []


def test_every_table_has_a_page() -> None:
    used = set()
    for page in find_pages():
        used.update(name for _, name, _ in MARKED.findall(page.read_text()))
    assert used == set(load_tables())


@pytest.mark.usefixtures("_result")
def test_a_table_by_hand() -> None:
    # The deviation of .5 and .7 over two seeds is .2 / sqrt(2) = .1414; 40 kB are 2 % of 2,000.
    assert write_table("mine", TableDefinition(**DEFINITION)) == (
        "| method | accuracy % | kB | bytes | both |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| grove | 80.0 ± 0.0 | 40 | 2.0 | 0.8 / 40.0 |\n"
        "| FedAvg | 60.0 ± 14.1 | 2,000 | 100.0 | 0.6 / 2000.0 |\n"
        "\n"
        "`fedgrove run`, 2 seeds; 2 CPU cores, 2026-11-18, commit abc1234.\n"
    )


@pytest.mark.usefixtures("_result")
def test_what_was_not_measured_is_empty() -> None:
    definition = {**DEFINITION, "only": {"data": "b"}, "rows": [], "caption": False}
    definition["columns"] = [{"title": "kB", "measures": ["kb"]}]
    assert write_table("mine", TableDefinition(**definition)) == "| kB |\n| --- |\n|  |\n"


@pytest.mark.usefixtures("_result")
def test_a_page_is_filled_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Above.\n\n<!-- table: mine -->\nold\n<!-- end -->\n\nBelow.\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "find_pages", lambda: [page])
    monkeypatch.setattr(tables, "load_tables", lambda: {"mine": TableDefinition(**DEFINITION)})
    assert tables.main(["--check"]) == 1
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    text = page.read_text()
    assert text.startswith("Above.\n\n<!-- table: mine -->\n\n| method")
    assert text.endswith("\n\n<!-- end -->\n\nBelow.\n")
    # Written again, nothing changes.
    assert tables.main(["--check"]) == 0
    assert capsys.readouterr().out == "page.md differs\npage.md was written\n"


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(InputError, match="the table 'mine'"):
        fill_page("<!-- table: mine -->\n<!-- end -->", {})
