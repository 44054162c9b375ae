"""The rows are what SAFL's section IV says, in fewer rounds; its figures are typed as printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from fedgrove.data.partition import parse
from fedgrove.methods import SAFL, Hermes, name_of
from fedgrove_lab import papers
from fedgrove_lab.papers import Study, StudyOptions, StudyRow
from fedgrove_lab.papers.definition import load_definition
from fedgrove_lab.tables import ROOT

from .made import paired_difference, stored_values

PAPER = papers.find("safl")
PARTS = [*PAPER.tables.values(), *PAPER.figures.values()]


def reported(name: str, data: str, method: str) -> dict[float, float]:
    """What is typed of a method, by number of clusters or rate."""
    block = load_definition("safl").reported[name]
    numbers = block.numbers[data][method]
    assert isinstance(numbers, list)
    by_value = zip(block.at, numbers, strict=False)
    return {value: number for value, number in by_value if not math.isnan(number)}


def table(n: int, data: str = "cifar10", quick: bool = False) -> Study:
    return PAPER.tables[n].study(StudyOptions(data, quick=quick))


def rows(study: Study) -> Mapping[str, StudyRow]:
    return {row.name: row for row in study.rows}


@pytest.mark.parametrize(
    ("n", "data", "clients", "net", "partition", "clusters"),
    [
        (1, "cifar10", 10, "bn-cnn4", "shards:2:1000:grouped", [1, 2, 3, 4, 5]),
        (2, "mnist", 20, "bn-cnn2", "classes:5:25:grouped", [1, 2]),
    ],
)
def test_tables_1_and_2_are_run_as_section_4_says(
    n: int, data: str, clients: int, net: str, partition: str, clusters: list[int]
) -> None:
    found = rows(table(n, data))
    assert [name_of(row.experiment.method) for row in found.values()] == [
        "local", "local", "fedavg", "lg-fedavg", "fedbn", "hermes", *["safl"] * len(clusters),
    ]  # fmt: skip
    for name, row in found.items():
        asked, local = row.experiment, row.experiment.method.local
        assert (asked.data, asked.clients, asked.cohort, asked.evaluate, asked.partition) == (
            data,
            clients,
            clients,
            0,
            partition,
        )
        assert asked.finetune == (0, 1)
        assert asked.net == (f"{net}:norm=none" if name == "fedavg" else net)
        assert local is not None
        assert (local.epochs, type(local.optimiser).__name__, local.optimiser.lr) == (
            1,
            "SGD",
            0.005,
        )
        assert asked.rounds == {"local-long": 380, "hermes": 104, "safl-k1": 104}.get(
            name, asked.rounds
        )
    lead = [row for row in found.values() if row.lead]
    assert [row.experiment.method.clusters for row in lead] == clusters  # type: ignore[attr-defined]
    for row in lead:
        method = row.experiment.method
        assert isinstance(method, SAFL)
        assert (method.density, method.guided, method.tune) == (0.7, 50, 20)
        assert (method.sparse.weight, method.pull.weight) == (1e-4, 0.004)
    assert (parse(partition).grouped, table(1).seeds) == (True, 3)


def test_figures_are_as_printed() -> None:
    first, second = rows(table(1)), rows(table(2, "mnist"))
    for length in ("0", "1"):
        # FedAvg is scored as its one model only.
        own = {"fedavg": 0.6198} if length == "0" else {}
        assert printed(first, f"accuracy_mean:{length}") == own | {
            "lg-fedavg": 0.9056, "fedbn": 0.9261, "hermes": 0.9273, "safl-k1": 0.9302,
            "safl-k2": 0.9304, "safl-k3": 0.9316, "safl-k4": 0.9326, "safl-k5": 0.9329,
        }  # fmt: skip
        own = {"fedavg": 0.8602} if length == "0" else {}
        assert printed(second, f"accuracy_mean:{length}") == own | {
            "lg-fedavg": 0.8439, "fedbn": 0.7013, "hermes": 0.9065, "safl-k1": 0.9309,
            "safl-k2": 0.9329,
        }  # fmt: skip
    # Table III repeats the best of Tables I and II; the sums of its columns
    sums = {"safl": 0.0, "hermes": 0.0, "all": 0.0}
    for data, k in (("cifar10", 5), ("mnist", 2)):
        rates = reported("rates", data, "safl")
        assert rates[0.3] == reported("clusters", data, "safl")[k]
        assert reported("sizes", data, "all").keys() == rates.keys()
        sums["safl"] += sum(rates.values())
        sums["hermes"] += sum(reported("rates", data, "hermes").values())
        sums["all"] += sum(reported("sizes", data, "all").values())
    assert {name: round(value, 3) for name, value in sums.items()} == {
        "safl": 829.19, "hermes": 796.77, "all": 7.648,
    }  # fmt: skip
    assert not any(row.reported for row in table(1, "fashion-mnist").rows)


def printed(found: Mapping[str, StudyRow], key: str) -> dict[str, float]:
    return {name: row.reported[key] for name, row in found.items() if key in row.reported}


@pytest.mark.parametrize(
    ("data", "k", "partition"), [("cifar10", 5, "shards:2:1000"), ("mnist", 2, "classes:5:25")]
)
def test_table_3_by_rate(data: str, k: int, partition: str) -> None:
    found = rows(table(3, data))
    sizes = reported("sizes", data, "all")
    for rate in sizes:
        for name, kind in (("hermes", Hermes), (f"safl-k{k}", SAFL)):
            row = found[f"{name}-{rate:g}"]
            method = row.experiment.method
            assert isinstance(method, kind)
            assert method.schedule[-1] == round(1 - rate, 6)
            assert row.experiment.rounds == 100 + len(method.schedule)
            assert row.experiment.partition == f"{partition}:grouped"
            percent = reported("rates", data, name.partition("-")[0])[rate]
            expected = {f"accuracy_mean:{n}": percent / 100 for n in (0, 1)}
            assert row.reported == pytest.approx({**expected, "model_mb": sizes[rate]})
            assert (row.lead, row.seeds) == (kind is SAFL, None)
    assert all(row.experiment.finetune == (0, 1) for row in found.values())
    assert table(3, data).counted == ("params", "model_mb", "mib_paper", "mib")


@pytest.mark.parametrize(("data", "k", "last"), [("cifar10", 5, 0.7), ("mnist", 2, 0.65)])
def test_what_table_3_has_beside_the_papers_rows(data: str, k: int, last: float) -> None:
    """At the first and last rate: Hermes without recovery, and clients as they were, not grouped."""
    found = rows(table(3, data))
    partition = found[f"hermes-{last}"].experiment.partition or ""
    for rate in (0.3, last):
        alone = found[f"hermes-without-recovery-{rate}"]
        usual = found[f"hermes-{rate}"]
        assert isinstance(alone.experiment.method, Hermes)
        assert alone.panel == usual.panel
        recovering = replace(alone.experiment.method, recover=True)
        assert replace(alone.experiment, method=recovering) == usual.experiment
        # The paper does not say which Hermes it compares with.
        assert alone.reported == usual.reported
        for name in ("hermes", f"safl-k{k}"):
            other = found[f"not-grouped-{name}-{rate}"]
            assert other.experiment.partition == partition.removesuffix(":grouped")
            same = replace(other.experiment, partition=partition)
            assert same == found[f"{name}-{rate}"].experiment
            assert not other.reported
    whole = [name for name in found if name.startswith("all-images")]
    if data == "mnist":
        assert whole == []
    else:
        assert whole == ["all-images-hermes-0.7", "all-images-safl-k5-0.7"]
        assert {found[name].experiment.partition for name in whole} == {"shards:2:grouped"}
        runs = papers.experiments(table(3), range(3))
        assert [name for name in runs if "all" in name] == [f"{name}-s0" for name in whole]
        # Rates: 5 x 2 rows; recovery 2; not grouped 4; three seeds each, and the two of one.
        assert len(runs) == 3 * 16 + 2


@pytest.mark.parametrize(
    ("data", "k", "long", "last"), [("cifar10", 5, 1000, 0.7), ("mnist", 2, 2000, 0.65)]
)
def test_study_4_changes_one_thing_at_a_time(data: str, k: int, long: int, last: float) -> None:
    """FedBN's and local training's rounds and images; of the pruned rows recovery, and clusters."""
    study = table(4, data)
    found = rows(study)
    one = rows(table({"cifar10": 1, "mnist": 2}[data], data))
    for name in ("local", "fedbn"):
        usual = found[name].experiment
        assert usual == one[name].experiment
        longer = found[f"{name}-{long}"]
        assert longer.experiment == replace(usual, rounds=long)
        assert (longer.seeds, longer.reported) == (1, one[name].reported)
        if data == "cifar10":
            whole = replace(usual, partition="shards:2:grouped")
            assert found[f"all-images-{name}"].experiment == whole
            both = found[f"all-images-{name}-{long}"]
            assert both.experiment == replace(whole, rounds=long)
            assert both.label == f"{name}, {long} rounds, all images"
    three = rows(table(3, data))
    for rate in (0.3, last):
        for name in (f"hermes-{rate}", f"hermes-without-recovery-{rate}", f"safl-k{k}-{rate}"):
            assert found[name].experiment == three[name].experiment
            assert found[name].reported == three[name].reported
        alone = found[f"safl-k1-{rate}"]
        method = three[f"safl-k{k}-{rate}"].experiment.method
        assert isinstance(method, SAFL)
        one_cluster = replace(method, clusters=1)
        usual = three[f"safl-k{k}-{rate}"].experiment
        assert alone.experiment == replace(usual, method=one_cluster)
        assert (alone.label, alone.reported) == ("safl, K = 1", {})
    assert len(found) == {"cifar10": 16, "mnist": 12}[data]


def test_rows_of_different_tables_are_the_same_runs() -> None:
    """So that they need not be trained twice: a run folder may be copied."""
    first, third = rows(table(1)), rows(table(3))
    assert first["hermes"].experiment == third["hermes-0.3"].experiment
    assert first["safl-k5"].experiment == third["safl-k5-0.3"].experiment
    eight = rows(PAPER.figures[8].study(StudyOptions("cifar10")))
    assert eight["safl"].experiment == third["safl-k5-0.4"].experiment
    assert eight["hermes"].experiment == third["hermes-0.4"].experiment
    assert eight["fedavg"].experiment == first["fedavg"].experiment
    seven = rows(PAPER.figures[7].study(StudyOptions("cifar10")))
    assert seven["safl-100"].experiment == first["safl-k5"].experiment


def test_figures_7_and_8() -> None:
    seven, eight = (PAPER.figures[n].study(StudyOptions("mnist")) for n in (7, 8))
    assert {(row.series, row.x) for row in seven.rows} == {
        (m, x) for m in ("fedavg", "lg-fedavg", "fedbn", "hermes", "safl") for x in (10, 30, 100)
    }
    assert seven.lines
    method = rows(eight)["safl"].experiment.method
    assert isinstance(method, SAFL)
    assert (method.density, method.clusters, rows(eight)["safl"].reported) == (
        0.4,
        2,
        {"accuracy_mean:0": 0.9224, "accuracy_mean:1": 0.9224, "share_paper": 33.01},
    )
    assert (eight.base, eight.counted) == ("fedavg", ("mib_paper", "share_paper", "mib", "share"))


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small_and_runs_on_built_in_images(part: papers.StudyPart) -> None:
    study = part.study(StudyOptions(part.quick_data, quick=True))
    assert part.quick_data == "digits"
    for row in study.rows:
        asked = row.experiment
        assert asked.clients is not None
        # Clients train on all that is not test.
        assert asked.validation == 0
        assert (asked.rounds or 0) * asked.clients < 50
        assert len(asked.federation().clients) == asked.clients
    assert study.notes[0].startswith("Quick")
    assert len(papers.experiments(study, (0,))) == len(study.rows)


def test_the_differences_in_the_docs_follow_from_the_stored_values() -> None:
    def gap(result: str, measure: str, one: str, other: str) -> str:
        values = (stored_values(result, row, measure) for row in (one, other))
        return paired_difference(*values)

    pages = [ROOT / "docs" / folder / "safl.md" for folder in ("evidence", "papers")]
    evidence, method = (" ".join(page.read_text().split()) for page in pages)
    for other in ("lg-fedavg", "fedbn", "safl-k1"):
        text = gap("safl-mnist", "accuracy_mean:0", "safl-k2", other)
        assert text in evidence
        assert text in method
    tuned = gap("safl-mnist", "accuracy_mean:1", "safl-k2", "fedavg")
    assert tuned in evidence
    assert tuned in method
    assert gap("safl-mnist", "accuracy_mean:0", "safl-k2", "fedavg") in evidence
    assert gap("safl-mnist", "accuracy_mean:0", "safl-k2", "local-long") in evidence
    for rate in (0.3, 0.4, 0.6, 0.65):
        text = gap("safl-mnist-rates", "accuracy_mean:0", f"safl-k2-{rate}", f"hermes-{rate}")
        assert text in evidence
        assert text in method
    for rate in (0.3, 0.65):
        rows = (f"hermes-{rate}", f"hermes-without-recovery-{rate}")
        assert gap("safl-mnist-rates", "accuracy_mean:0", *rows) in evidence
