"""The rows are what AdFedWCP's section 5 and Appendix E say; its figures are typed as printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedgrove.cli import main
from fedgrove.methods import AdFedWCP, FedWCP
from fedgrove.methods.adfedwcp.anneal import AnnealedPull
from fedgrove_lab import papers
from fedgrove_lab.papers import DataTable, Study, StudyOptions, StudyPart, StudyRow
from fedgrove_lab.papers.definition import load_definition

PAPER = papers.find("adfedwcp")
DEFINITION = load_definition("adfedwcp")
PARTS: dict[str, StudyPart] = {
    **{f"table{n}": part for n, part in PAPER.tables.items() if isinstance(part, StudyPart)},
    **{f"figure{n}": part for n, part in PAPER.figures.items()},
}


def study(part: str, data: str = "cifar10", **words: Any) -> Study:
    return PARTS[part].study(StudyOptions(data, **words))


def rows(found: Study) -> dict[str, StudyRow]:
    return {row.name.removesuffix("-a0.4"): row for row in found.rows}


def printed(found: Study, key: str) -> dict[str, float]:
    """What the paper reports, of rows whose methods there are."""
    return {name: row.reported[key] for name, row in rows(found).items() if key in row.reported}


def test_the_parts_there_are() -> None:
    assert sorted(PAPER.tables) == list(range(1, 14))
    assert sorted(PAPER.figures) == [2, 3]
    assert all(part.takes_rounds and part.quick_data == "digits" for part in PARTS.values())


@pytest.mark.parametrize(
    ("data", "net", "clients"),
    [
        ("cifar10", "lenet", 100),
        ("cifar100", "lenet", 50),
        ("emnist", "leafcnn", 100),
        ("fashion-mnist", "leafcnn", 100),
    ],
)
def test_the_setting_of_section_5(data: str, net: str, clients: int) -> None:
    for name, row in rows(study("table3", data)).items():
        asked = row.experiment
        assert (asked.data, asked.net, asked.clients, asked.cohort) == (data, net, clients, clients)
        assert (asked.partition, asked.rounds, asked.profile) == ("dirichlet:0.4", 100, "adfedwcp")
        assert (asked.validation, asked.finetune, asked.evaluate) == (0, (0,), 1)
        local = asked.method.local
        assert local is not None
        assert (local.epochs, local.batch, local.optimiser.lr) == (1, 64, 1e-3)
        assert row.lead == (name == "adfedwcp")
    found = rows(study("table3", data, rounds=60))
    assert {row.experiment.rounds for row in found.values()} == {60}
    assert [row.experiment.method.k for n, row in found.items() if n.startswith("fedwcp")] == [  # type: ignore[attr-defined]
        8,
        16,
        32,
        0,
    ]
    assert found["adfedwcp"].experiment.method == AdFedWCP(local=local)


def test_rows_of_one_name_are_the_same_runs_everywhere() -> None:
    """So that they need not be trained twice: a run folder may be copied."""
    for data in ("cifar10", "emnist"):
        known: dict[str, Any] = {}
        for part in PARTS:
            for row in study(part, data).rows:
                assert known.setdefault(row.name, row.experiment) == row.experiment, row.name


def test_the_baselines_have_rows() -> None:
    others = ["fedem", "qfedcg", "fedmask", "pfedgate"]
    assert list(rows(study("table1"))) == ["local", "fedavg", *others, "adfedwcp"]
    mentors = rows(study("table10"))["fedkd"].experiment.method
    assert mentors.use_mentor


def test_figures_are_as_printed() -> None:
    """Tables 1 and 3 are the middle column of Table 6, but for two figures that are not."""
    differ = []
    sixth: dict[str, dict[str, Any]] = DEFINITION.reported["table_6"].numbers
    for data, by_row in DEFINITION.reported["accuracy"].numbers.items():
        for name, percent in by_row.items():
            if sixth[data][name][1] != percent:
                differ.append((data, name, percent, sixth[data][name][1]))
    assert differ == [
        ("cifar10", "fedwcp-32", 63.38, 63.58),
        ("cifar100", "pfedgate", 12.40, 13.50),
    ]
    # The sums of the columns of Tables 6 and 9.
    columns = []
    for by_row in sixth.values():
        columns += [round(sum(some), 2) for some in zip(*by_row.values(), strict=True)]
    assert columns == [
        534.46, 594.49, 681.01, 746.05, 818.25, 865.08, 131.33, 183.77, 305.31,
    ]  # fmt: skip
    typed: dict[str, Any] = DEFINITION.reported["table_9"].numbers["emnist"]
    ninth = zip(*typed.values(), strict=True)
    assert [round(sum(some), 2) for some in ninth] == [764.7, 787.97]
    accuracies = printed(study("table3"), "accuracy_mean:0")
    assert accuracies["adfedwcp"] == 0.6104
    assert accuracies["fedwcp-none"] == 0.6366
    assert printed(study("table4"), "less_counted") == {
        "fedwcp-8": 90.5, "fedwcp-16": 87.36, "fedwcp-32": 84.21, "fedwcp-none": 0.0,
        "adfedwcp": 87.82,
    }  # fmt: skip
    assert printed(study("table7"), "density_end")["adfedwcp"] == pytest.approx(0.4581)
    # Fashion-MNIST stands for EMNIST, and says so.
    assert printed(study("table8", "fashion-mnist"), "accuracy_mean:0")["adfedwcp"] == 0.8512
    assert "replaces EMNIST" in study("table8", "fashion-mnist").notes[0]
    assert not any(row.reported for row in study("table8", "cifar10").rows)


def test_tables_5_8_9_and_11_change_one_thing_each() -> None:
    def method(part: str, name: str) -> AdFedWCP:
        made = rows(study(part, "emnist"))[name].experiment.method
        assert isinstance(made, AdFedWCP)
        return made

    assert method("table5", "adfedwcp-alike").importance == "alike"
    assert method("table5", "adfedwcp-gradient").importance == "gradient"
    assert method("table8", "adfedwcp-pull0.45").pull == AnnealedPull(fixed=0.45)
    assert method("table9", "adfedwcp-xi0.5-zeta1").allocation.xi == 0.5  # type: ignore[union-attr]
    assert len(study("table9", "emnist").rows) == 9
    assert not method("table11", "adfedwcp-without-lower").allocation.lower  # type: ignore[union-attr]
    phones = [row for row in study("table11", "emnist").rows if row.panel == "phones"]
    assert {row.experiment.profile for row in phones} == {"phones"}
    assert len(phones) == 4


def test_table_13_varies_adam_and_zeroing_and_nothing_else() -> None:
    found = study("table13")
    rows_of: dict[str, dict[str, StudyRow]] = {}
    for row in found.rows:
        rows_of.setdefault(row.panel, {})[row.name] = row
    assert list(rows_of) == [
        "Adam reset",
        "Adam kept",
        "zeroed per batch, Adam reset",
        "zeroed per batch, Adam kept",
    ]
    assert found.seeds == 3
    methods = ("local", "fedavg", "fedem", "fedwcp-16", "adfedwcp")
    zeroed = ("fedwcp-16-zeroed-batch", "adfedwcp-zeroed-batch")
    # Those with Adam reset are the runs of Tables 1 and 3.
    known = {row.name: row.experiment for t in ("table1", "table3") for row in study(t).rows}
    for name in methods:
        reset = rows_of["Adam reset"][f"{name}-a0.4"]
        assert reset.experiment == known[f"{name}-a0.4"]
        assert reset.experiment.rounds == 100
    for panel, listed in (("Adam", methods), ("zeroed per batch, Adam", zeroed)):
        for name in listed:
            reset = rows_of[f"{panel} reset"][f"{name}-a0.4"]
            kept = rows_of[f"{panel} kept"][f"{name}-kept-a0.4"]
            method: Any = reset.experiment.method
            local = replace(method.local, keep_state=True)
            assert kept.experiment == replace(reset.experiment, method=replace(method, local=local))
            assert kept.reported == reset.reported
    for name in zeroed:
        plain: Any = known[f"{name.removesuffix('-zeroed-batch')}-a0.4"]
        made = rows_of["zeroed per batch, Adam reset"][f"{name}-a0.4"].experiment
        assert made == replace(plain, method=replace(plain.method, zero_pruned="batch"))
    assert rows_of["Adam kept"]["fedem-kept-a0.4"].reported == {"accuracy_mean:0": 0.6219}


def test_a_quick_table_13(tmp_path: Path) -> None:
    found = quick(tmp_path, "--table", "13", "--rounds", "1", "--rows", "fedwcp-16-*")
    assert [row["name"] for row in found["rows"]] == [
        "fedwcp-16-a0.4",
        "fedwcp-16-kept-a0.4",
        "fedwcp-16-zeroed-batch-a0.4",
        "fedwcp-16-zeroed-batch-kept-a0.4",
    ]
    assert not any(row["missing"] for row in found["rows"])


def test_users_are_dealt_by_no_alpha() -> None:
    found = study("table6", "motion")
    assert {row.experiment.partition for row in found.rows} == {None}
    assert {row.experiment.clients for row in found.rows} == {24}
    assert len({row.name for row in found.rows}) == len(found.rows)


def test_figure_3_has_a_row_for_each_group_of_bandwidths() -> None:
    found = study("figure3", "emnist")
    ours = [row for row in found.rows if row.series == "adfedwcp"]
    assert [row.band for row in ours] == [(5, 24), (24, 43), (43, 62), (62, 81), (81, 100)]
    assert ours[0].reported == {"accuracy_band:0": 0.8655}
    assert len(papers.experiments(found, (0,))) == 4


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small(part: str) -> None:
    found = study(part, "digits", quick=True)
    assert found.notes[0].startswith("Quick")
    for row in found.rows:
        assert (row.experiment.clients, row.experiment.rounds) == (4, 2)


# ---- through the command line --------------------------------------------------------------------


def quick(folder: Path, *words: str) -> dict[str, Any]:
    where = ["--quick", "--engine", "serial", "--out", str(folder)]
    assert main(["paper", "adfedwcp", *words, *where]) == 0
    found: dict[str, Any] = json.loads((folder / "table.json").read_text())
    return found


def test_a_quick_main_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--table", "3", "--rounds", "1", "--rows", "local-*,fedwcp-8-*,adfedwcp-*"]
    found = quick(tmp_path, *wanted)
    assert [row["name"] for row in found["rows"]] == [
        "local-a0.4",
        "fedwcp-8-a0.4",
        "adfedwcp-a0.4",
    ]
    by_name = {row["name"]: row["ours"] for row in found["rows"]}
    ours = by_name["adfedwcp-a0.4"]
    for key in (*study("table3").counted, "accuracy_mean:0"):
        assert key in ours, key
    assert ours["mib_up"]["mean"] < by_name["fedwcp-8-a0.4"]["mib_down"]["mean"]
    assert by_name["fedwcp-8-a0.4"]["less_counted"]["mean"] > ours["less_counted"]["mean"] > 50
    assert all(row["ours"]["seconds_to_all"]["mean"] >= 0 for row in found["rows"])
    out = capsys.readouterr().out
    assert "% less up, counted" in out
    assert "virtual s to what all reach" in out
    run = json.loads((tmp_path / "digits/adfedwcp-a0.4-s0/summary.json").read_text())
    assert run["rounds"] == 1


def test_a_quick_figure_by_bandwidth(tmp_path: Path) -> None:
    found = quick(tmp_path, "--figure", "3", "--rows", "local-*", "--rounds", "1")
    assert len(found["rows"]) == 5
    assert sum(row["ours"]["clients_band"]["mean"] for row in found["rows"]) == 4
    (only,) = {row["name"] for row in found["rows"]}
    assert only == "local-a0.4"


def test_what_clustering_costs(tmp_path: Path) -> None:
    assert isinstance(PAPER.tables[12], DataTable)
    words = ["paper", "adfedwcp", "--table", "12", "--quick", "--out", str(tmp_path)]
    assert main(words) == 0
    found = json.loads((tmp_path / "table.json").read_text())
    by_measure = {row["measure"]: row for row in found["rows"]}
    assert by_measure["training one epoch, ms"]["ours"] > 0
    assert by_measure["clustering at k = 32, ms"]["ours"] > 0
    formula = by_measure["training over clustering, by the paper's formula"]
    # 3 N E / (T k): the paper's 2174 examples give 20.38.
    assert formula["ours"] == pytest.approx(3 * by_measure["examples of a client"]["ours"] / 320)
    assert round(3 * 2174 / 320, 2) == formula["paper"] == 20.38


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs(part: str, tmp_path: Path) -> None:
    kind = "--table" if part.startswith("table") else "--figure"
    found = quick(tmp_path, kind, part.removeprefix("table").removeprefix("figure"))
    assert not any(row["missing"] for row in found["rows"])


def test_fixed_numbers_are_fedwcp() -> None:
    assert isinstance(rows(study("table3"))["fedwcp-8"].experiment.method, FedWCP)
