"""The rows are what FedAPTA's section 3 says; its figures are typed as printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgrove.cli import main
from fedgrove.methods import FedAPTA, FedLPS, FedRolex
from fedgrove.methods.fedapta.channel_rules import LayerwiseL1, RollingWindow, UniformL1
from fedgrove.parts.augment import Augment
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove_lab import papers
from fedgrove_lab.papers import DataTable, Study, StudyOptions, StudyPart, StudyRow
from fedgrove_lab.papers.definition import load_definition
from fedgrove_lab.papers.fedapta import SIMILARITIES, similarity

PAPER = papers.find("fedapta")
DEFINITION = load_definition("fedapta")
PARTS: dict[str, StudyPart] = {
    **{f"table{n}": part for n, part in PAPER.tables.items() if isinstance(part, StudyPart)},
    **{f"figure{n}": part for n, part in PAPER.figures.items()},
}
ALL = "mnist+fashion-mnist+svhn+cifar10+emnist"
THREE = "mnist+fashion-mnist+digits"


RECIPE = LocalTraining(5, 512, SGD(0.1, weight_decay=1e-3), 0.998, 10.0, Augment(4, True, 16))


def study(part: str, data: str = ALL, **words: Any) -> Study:
    return PARTS[part].study(StudyOptions(data, **words))


def rows(found: Study) -> dict[str, StudyRow]:
    return {row.name: row for row in found.rows}


def test_the_parts_there_are() -> None:
    assert sorted(PAPER.tables) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert sorted(PAPER.figures) == [2, 3]
    assert isinstance(PAPER.tables[5], DataTable)


def test_figure_2_says_whose_feddrop_it_draws() -> None:
    """Caldas', of one ratio for all devices; Wen's has one for each."""
    found = [row for name, row in rows(study("figure2")).items() if "-random-" in name]
    assert len(found) == 4
    for row in found:
        assert row.series == "FedDrop's (Caldas et al.)"
        assert row.label.startswith(row.series)
        assert isinstance(row.experiment.method, FedAPTA)
        assert len(row.experiment.method.ratios) == 1


@pytest.mark.parametrize("part", sorted(PARTS.keys() - {"figure3"}))
def test_tables_say_what_is_scored_and_where_it_started(part: str) -> None:
    """Figure 3 scores nothing; all start from scratch, which no column shows."""
    found = study(part)
    assert any(note.startswith("Scored is") for note in found.notes)
    assert any(note.startswith("From scratch") for note in found.notes)
    for name, row in rows(found).items():
        method = row.experiment.method
        if isinstance(method, FedAPTA):
            changes = "-random-" in name or "-rolling-" in name
            as_in_the_code = "-paper-" in name or name.startswith("task-")
            assert method.use == ("whole" if changes or as_in_the_code else "cut"), name


@pytest.mark.parametrize(
    ("part", "net"),
    [
        ("table3", "resnet18:norm=group,stem=large"),
        ("table4", "shufflenetv2:norm=group,stem=large"),
    ],
)
def test_the_setting_of_section_3(part: str, net: str) -> None:
    """And of the authors' code: batch size, augmentation and stem."""
    recipe = RECIPE
    for name, row in rows(study(part)).items():
        asked = row.experiment
        assert (asked.net, asked.clients, asked.cohort, asked.rounds) == (net, 50, 50, 100)
        assert asked.partition == ("iid" if name.endswith("-iid") else "dirichlet:0.5")
        assert (asked.validation, asked.finetune, asked.freeze) == (0, (0,), 0)
        assert asked.method.local == recipe
        assert asked.per_task == ("-tasks-" in name)
        assert row.lead == name.startswith(f"fedapta-{net.partition(':')[0]}")
    assert study(part).seeds == 3
    # Two deals, of each: three readings of FedAPTA, local, and nine baselines in two ways.
    assert len(rows(study(part))) == 2 * (3 + 1 + 2 * 9)


def test_ratios_and_widths_remove_as_much() -> None:
    found = rows(study("table6", THREE))
    ours = found["fedapta-cnn2-a0.5"].experiment.method
    assert isinstance(ours, FedAPTA)
    assert ours.ratios == (0, 0.2, 0.4, 0.6, 0.8)
    for name, kind in (("fedlps", FedLPS), ("fedrolex", FedRolex)):
        method = found[f"{name}-tasks-cnn2-a0.5"].experiment.method
        assert isinstance(method, kind)
        assert method.widths == (1, 0.8, 0.6, 0.4, 0.2)


def test_weights_to_start_from_freeze_the_first_quarter() -> None:
    found = study("table3", init="imagenet.safetensors:body")
    for row in found.rows:
        assert (row.experiment.init, row.experiment.freeze) == ("imagenet.safetensors:body", 0.25)
    assert any("Started from imagenet" in note for note in found.notes)
    assert any(note.startswith("From scratch") for note in study("table3").notes)


def test_rows_of_one_name_are_the_same_runs_everywhere() -> None:
    """So that they need not be trained twice: a run folder may be copied."""
    for parts in (("table3", "table4", "figure2", "figure3"), ("table6", "table7", "table8")):
        known: dict[str, Any] = {}
        for part in parts:
            own = [row.name for row in study(part, THREE).rows]
            assert len(set(own)) == len(own)
            for row in study(part, THREE).rows:
                assert known.setdefault(row.name, row.experiment) == row.experiment, row.name


def test_figures_are_as_printed() -> None:
    """The paper's averages are the means of its columns, to a digit, but for one."""
    differ = []
    for table in ("table_3", "table_4"):
        typed: dict[str, Any] = DEFINITION.reported[table].numbers
        for deal, by_row in typed.items():
            for name, (*tasks, average) in by_row.items():
                if abs(sum(tasks) / 5 - average) > 0.0151:
                    differ.append((deal, name, round(sum(tasks) / 5, 2), average))
    assert differ == [("iid", "ditto", 81.99, 82.02)]
    found = rows(study("table3"))
    reported = found["fedapta-resnet18-a0.5"].reported
    assert reported == {
        "accuracy_on/mnist:0": 0.9875,
        "accuracy_on/fashion-mnist:0": 0.8913,
        "accuracy_on/svhn:0": 0.8982,
        "accuracy_on/cifar10:0": 0.6822,
        "accuracy_on/emnist:0": 0.8344,
        "accuracy_tasks:0": 0.8587,
    }
    assert found["fedapta-paper-resnet18-a0.5"].reported == reported
    # The baselines of the paper have a model for each task.
    assert found["fedlps-tasks-resnet18-iid"].reported["accuracy_tasks:0"] == 0.888
    assert found["fedlps-resnet18-iid"].reported == {}


def test_what_had_to_be_replaced_is_said() -> None:
    whole = study("table3")
    assert not any("replace" in note or "left out" in note for note in whole.notes)
    data = ALL
    chain = []
    while data in PARTS["table3"].substitutes:
        data = PARTS["table3"].substitutes[data]
        chain.append(data)
    assert chain[-1] == "mnist+fashion-mnist+digits+cifar10"
    assert "mnist+fashion-mnist+svhn+cifar10" in chain
    found = study("table3", chain[-1])
    text = " ".join(found.notes)
    assert "replace SVHN" in text
    assert "emnist is left out" in text
    # The paper's SVHN is not next to digits, nor its average next to a different one.
    reported = rows(found)["fedapta-resnet18-iid"].reported
    assert sorted(reported) == [
        "accuracy_on/cifar10:0", "accuracy_on/fashion-mnist:0", "accuracy_on/mnist:0",
    ]  # fmt: skip
    assert {row.experiment.clients for row in found.rows} == {40}


def test_the_tables_of_ours() -> None:
    six = study("table6", THREE)
    names = [row.name.removesuffix("-cnn2-a0.5") for row in six.rows]
    assert names == [
        "fedapta", "fedapta-mean", "fedapta-sum", "fedapta-uniform", "fedapta-paper", "local",
        "fedavg", "fedavg-tasks", "fedlps-tasks", "fedrolex-tasks",
    ]  # fmt: skip
    for row in six.rows:
        asked = row.experiment
        assert (asked.net, asked.clients, asked.rounds) == ("bn-cnn2:norm=group", 30, 30)
        assert asked.partition == "dirichlet:0.5:2000"
    fewer = study("table6", THREE, examples=100, rounds=5)
    assert {row.experiment.partition for row in fewer.rows} == {"dirichlet:0.5:100"}
    assert {row.experiment.rounds for row in fewer.rows} == {5}
    assert "purity@5" in six.counted
    seven = study("table7", THREE)
    assert {row.experiment.partition for row in seven.rows} == {"dirichlet:0.5:2000", "iid:2000"}
    eight = study("table8", THREE)
    assert {row.experiment.net for row in eight.rows} == {"resnet18:norm=group,stem=large"}
    assert eight.seeds == 1
    for found in (six, seven, eight):
        assert found.title.endswith("of ours")
        assert any(note.startswith("A study of ours") for note in found.notes)
        assert {(row.experiment.method.local.batch, row.experiment.method.local.augment)
                for row in found.rows} == {(32, None)}  # fmt: skip
    assert {"fedapta-paper", "fedapta-sum"} < {
        row.name.removesuffix("-resnet18-a0.5") for row in eight.rows
    }


@pytest.mark.parametrize(
    ("part", "net", "printed"), [("table9", "resnet18", 3), ("table10", "shufflenetv2", 4)]
)
@pytest.mark.parametrize(("data", "column"), [("mnist", 0), ("fashion-mnist", 1), ("cifar10", 3)])
def test_the_papers_tables_by_task(
    part: str, net: str, printed: int, data: str, column: int
) -> None:
    """Ten devices of one data set; three rows that differ in what the method is, and not in recipe."""
    assert PARTS[part].data == ("mnist", "fashion-mnist", "cifar10")
    found = study(part, data)
    assert [row.label for row in found.rows] == 2 * [
        "fedavg",
        "fedapta, without a drift",
        "fedapta, drift on the server, as in the authors' code",
    ]
    numbers = DEFINITION.reported[f"table_{printed}"].numbers
    for row, method in zip(found.rows, 2 * ["fedavg", "fedapta", "fedapta"], strict=True):
        asked = row.experiment
        assert (asked.clients, asked.cohort, asked.rounds) == (10, 10, 100)
        assert asked.net == f"{net}:norm=group,stem=large"
        assert asked.method.local == RECIPE
        deal = "iid" if asked.partition == "iid" else "a0.5"
        of_paper: Any = numbers[deal][method]
        assert row.reported == {"accuracy_mean:0": pytest.approx(of_paper[column] / 100)}
    alone, server = (found.rows[i].experiment.method for i in (1, 2))
    assert isinstance(alone, FedAPTA)
    assert alone.prune == LayerwiseL1(least=0.0)
    assert (alone.grouping, alone.use, alone.drift) == (None, "whole", "none")
    assert server == replace(alone, drift="server")


def test_figure_2_swaps_the_rule() -> None:
    found = study("figure2")
    methods = {row.name: row.experiment.method for row in found.rows}
    assert len(methods) == 6 * 4
    rolling = methods["fedapta-rolling-r0.6-resnet18-a0.5"]
    assert isinstance(rolling, FedAPTA)
    assert (rolling.prune, rolling.ratios) == (RollingWindow(), (0.6,))
    literal = methods["fedapta-mean-r0.8-resnet18-a0.5"]
    assert isinstance(literal, FedAPTA)
    assert literal.prune == LayerwiseL1(least=0.0)
    kinds = {type(method.prune) for method in methods.values() if isinstance(method, FedAPTA)}
    assert {LayerwiseL1, UniformL1} < kinds
    assert found.drawn == ("accuracy_on/svhn", "accuracy_on/cifar10", "accuracy_on/emnist")


def test_similarities_by_hand() -> None:
    """Rows (3, 4) and (3, 0), of which the second has its first entry alone.

    inner: 9 of 25; cosine: over the first entry, 1; L1 and L2: 4 apart, 1 / 5.
    """
    vectors = torch.tensor([[3.0, 4.0], [3.0, 0.0]])
    present = torch.tensor([[True, True], [True, False]])
    by_metric = {}
    for metric in SIMILARITIES:
        by_metric[metric] = similarity(vectors, present, metric)[0].tolist()
    assert by_metric == {
        "cosine": [1, 1],
        "inner": [1, pytest.approx(0.36)],
        "l1": [1, pytest.approx(0.2)],
        "l2": [1, pytest.approx(0.2)],
    }


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small(part: str) -> None:
    found = study(part, PARTS[part].quick_data, quick=True)
    assert found.notes[0].startswith("Quick")
    for row in found.rows:
        assert row.experiment.clients == (4 if part in ("table9", "table10") else 8)
        assert (row.experiment.rounds or 0) <= 2
        assert row.experiment.net == DEFINITION.quick["net"]


# ---- through the command line --------------------------------------------------------------------


def quick(folder: Path, *words: str) -> dict[str, Any]:
    where = ["--quick", "--engine", "serial", "--out", str(folder)]
    assert main(["paper", "fedapta", *words, *where]) == 0
    found: dict[str, Any] = json.loads((folder / "table.json").read_text())
    return found


def test_a_quick_table_of_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = "fedapta-cnn2-*,local-*,fedavg-*"
    found = quick(tmp_path, "--table", "6", "--examples", "40", "--rows", some)
    by_name = {row["name"]: row["ours"] for row in found["rows"]}
    assert list(by_name) == [
        "fedapta-cnn2-a0.5", "local-cnn2-a0.5", "fedavg-cnn2-a0.5", "fedavg-tasks-cnn2-a0.5",
    ]  # fmt: skip
    for ours in by_name.values():
        both = [ours[f"accuracy_on/{task}:0"]["mean"] for task in ("digits", "digits:turned")]
        assert ours["accuracy_tasks:0"]["mean"] == pytest.approx(sum(both) / 2)
    assert 0.5 <= by_name["fedapta-cnn2-a0.5"]["purity@2"]["mean"] <= 1
    assert "purity" not in by_name["fedavg-cnn2-a0.5"]
    out = capsys.readouterr().out
    assert "digits:turned %" in out
    assert "fedavg, per true task" in out
    run = json.loads(
        (tmp_path / "digits+digits:turned/local-cnn2-a0.5-s0/summary.json").read_text()
    )
    assert run["clients"] == 8


def test_a_quick_figure_of_similarities(tmp_path: Path) -> None:
    found = quick(tmp_path, "--figure", "3", "--examples", "40", "--rows", "*-iid")
    titles = [matrix["title"] for matrix in found["matrices"]]
    assert titles == ["cosine", "inner product", "L1", "L2"]
    for matrix in found["matrices"]:
        assert matrix["labels"][0] == "0 digits"
        assert matrix["labels"][-1] == "7 digits:turned"
        assert len(matrix["values"]) == 8
        assert matrix["values"][0][0] == 1
    assert sum("devices of one task" in note for note in found["notes"]) == 4
    assert 'class="heat' in (tmp_path / "paper.html").read_text()
    # The same command finds the run finished, and makes them again.
    again = quick(tmp_path, "--figure", "3", "--examples", "40", "--rows", "*-iid")
    assert again["matrices"] == found["matrices"]


def test_a_quick_table_of_one_task(tmp_path: Path) -> None:
    found = quick(tmp_path, "--table", "9", "--rows", "*-iid")
    assert [row["name"] for row in found["rows"]] == [
        "task-fedavg-resnet18-iid", "task-fedapta-resnet18-iid", "task-fedapta-server-resnet18-iid",
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["data"] == "digits"
        assert 0 <= row["ours"]["accuracy_mean:0"]["mean"] <= 1


def test_parameters_of_table_5(tmp_path: Path) -> None:
    found = quick(tmp_path, "--table", "5")
    printed = [row for row in found["rows"] if row["paper"] is not None]
    assert len(printed) == 10
    for row in printed:
        # Shuffled channels stay here: of ShuffleNetV2 only the whole net agrees.
        if row["measure"].startswith("resnet18") or "ratio 0:" in row["measure"]:
            assert row["ours"] == pytest.approx(row["paper"], rel=0.02), row["measure"]
    # Ours at ratio .8: .56 M, the paper's .24 M.
    shuffled = [row for row in printed if row["measure"].startswith("shufflenetv2, ratio 0.8:")]
    assert [(round(row["ours"], 2), row["paper"]) for row in shuffled] == [(0.56, 0.24)]
    trained = [row["ours"] for row in found["rows"] if "trained" in row["measure"]]
    assert trained[:5] == sorted(trained[:5], reverse=True)
    assert trained[4] < 1


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs(part: str, tmp_path: Path) -> None:
    kind = "--table" if part.startswith("table") else "--figure"
    number = part.removeprefix("table").removeprefix("figure")
    found = quick(tmp_path, kind, number, "--rounds", "1")
    assert not any(row["missing"] for row in found["rows"])
    assert len(papers.experiments(study(part, PARTS[part].quick_data, quick=True), (0,))) == len(
        found["rows"]
    )
