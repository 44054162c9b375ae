"""The study of Grove: the same examples, rounds and cohort for all, and each part off once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fedgrove.methods import Grove, name_of
from fedgrove_lab import papers
from fedgrove_lab.papers import Study, StudyOptions, StudyRow
from fedgrove_lab.papers.compare import compare_part
from fedgrove_lab.papers.measures import run_value
from fedgrove_lab.papers.page import write_page

from .made import summary

PAPER = papers.find("grove")
PARTS = [*PAPER.tables.values(), *PAPER.figures.values()]
RIVALS = [
    "local",
    "fedavg",
    "fedchar",
    "ca-afp",
    "ca-afp-cold",
    "stc",
    "stc-home",
    "fedpaq",
    "pfed1bs",
]
DATA = ["motion", "uci-har", "wisdm"]


def study(n: int, data: str = "motion", **more: object) -> Study:
    part = PAPER.tables[n]
    assert isinstance(part, papers.StudyPart)
    return part.study(replace(StudyOptions(data), **more))  # type: ignore[arg-type]


def rows(found: Study) -> Mapping[str, StudyRow]:
    return {row.name: row for row in found.rows}


@pytest.mark.parametrize("data", DATA)
def test_all_of_table_1_are_run_alike(data: str) -> None:
    found = rows(study(1, data))
    assert list(found) == [*RIVALS, "grove", "grove-1%"]
    for row in found.values():
        asked = row.experiment
        assert (asked.data, asked.rounds, asked.cohort, asked.evaluate) == (data, 50, 10, 0)
        # All train on everything that is not test data.
        assert (asked.finetune, asked.validation, asked.split) == ((0, 3, 25), 0, None)
        assert asked.method.local is None
    assert [row.name for row in found.values() if row.lead] == ["grove"]
    assert found["grove"].experiment.method == Grove()
    assert found["grove-1%"].experiment.method == Grove(bytes="1%")
    assert (study(1).seeds, study(1).base) == (10, "fedavg")


def test_rounds_and_split_can_be_given() -> None:
    found = rows(study(1, "uci-har", rounds=20, split="blocks"))
    assert {row.experiment.rounds for row in found.values()} == {20}
    assert {row.experiment.split for row in found.values()} == {"blocks"}
    assert found["fedchar"].experiment.method.warmup == 4  # type: ignore[attr-defined]


def test_table_2_differs_from_grove_in_one_field_each() -> None:
    found = rows(study(2))
    changed = {}
    for name, row in found.items():
        method = row.experiment.method
        if not isinstance(method, Grove) or name == "grove":
            continue
        fields = vars(Grove())
        changed[name] = [field for field in fields if getattr(method, field) != fields[field]]
    assert changed == {
        "grove-one-group": ["finding"],
        "grove-head-shared": ["home"],
        "grove-no-own": ["own"],
        "grove-offset": ["own"],
        "grove-pulled": ["own"],
        "grove-step-1": ["step"],
        "grove-dense-up": ["up"],
        "grove-dense-down": ["down"],
        "grove-thin": ["density"],
    }
    assert rows(study(1))["grove"].experiment == found["grove"].experiment


def test_table_3_has_users_without_kinds() -> None:
    found = study(3)
    even = [row for row in found.rows if row.name.endswith("-even")]
    assert {(row.experiment.data, row.experiment.partition) for row in even} == {("digits", "iid")}
    # CA-AFP twice: as in the paper, and by default.
    found = [name_of(row.experiment.method) for row in even]
    assert found == ["fedchar", "ca-afp", "ca-afp", "grove"]


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small(part: papers.StudyPart) -> None:
    found = part.study(StudyOptions(part.quick_data, quick=True))
    for row in found.rows:
        assert (row.experiment.rounds, row.experiment.clients, row.experiment.cohort) == (5, 6, 3)
    assert found.notes[0].startswith("Quick")
    names = [row.name for row in found.rows]
    assert len(names) == len(set(names))
    # A name is that of a folder, and ends in the seed.
    assert not any("/" in name or "-s0" in name for name in names)


def test_what_is_measured_of_groups_and_devices() -> None:
    run = summary(0, {0: 0.5}, groups=3, rounds=4, cohort=2, figures={"divided_in_round": 12.0})
    assert run_value(run, "group_count") == 3.0
    assert run_value(run, "divided_in_round") == 12.0
    # 2^20 bytes up and 2^21 down over 4 x 2 turns: 393,216 bytes each.
    assert run_value(run, "kb_each") == pytest.approx(393.216)
    undivided = summary(0, {0: 0.5}, figures={"divided_in_round": -1.0})
    assert run_value(undivided, "divided_in_round") is None
    assert run_value(summary(0, {0: 0.5}), "divided_in_round") is None


def test_the_figure_is_accuracy_against_bytes(tmp_path: Path) -> None:
    found = PAPER.figures[1].study(StudyOptions("motion", quick=True))
    assert found.against == "share"
    lines: dict[str, list[str]] = {}
    for row in found.rows:
        lines.setdefault(row.series, []).append(row.name)
    assert lines["grove"] == ["grove-0.5%", "grove-1%", "grove-2%", "grove-3%", "grove-5%"]
    assert lines["fedavg"] == ["fedavg"]
    made = {}
    for i, row in enumerate(found.rows):
        scores = {"accuracy_mean": 0.5, "accuracy_std": 0.1, "accuracy_worst10": 0.2}
        tuned = {str(length): scores for length in row.experiment.finetune}
        counts = {"rounds": 5, "cohort": 3, "params_mean": 10.0, "groups": 1}
        made[f"{row.name}-s0"] = {
            **summary(0, {}, **counts), "finetune": tuned, "bytes_up": 2**20 + i
        }  # fmt: skip
    page = tmp_path / "paper.html"
    write_page(compare_part("grove", "figure1", [(found, made)]), PAPER.cited, page)
    text = page.read_text()
    for length in found.rows[0].experiment.finetune:
        assert f"fine-tuned {length}" in text
    assert "% sent" in text
