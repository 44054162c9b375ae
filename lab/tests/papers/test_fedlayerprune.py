"""The rows are what FedLayerPrune's section 4 says; its figures are typed as printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedgrove import data
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.core import AnyMethod
from fedgrove.data import Federation
from fedgrove.methods import FedDST, FedLayerPrune, FedPrune, FixedPrune, name_of
from fedgrove.methods.fedlayerprune.hybrid import Vote
from fedgrove.methods.fedlayerprune.method import PRESETS
from fedgrove.methods.fedlayerprune.rates import Alike, Piecewise
from fedgrove.runs.memory import Memory
from fedgrove_lab import papers
from fedgrove_lab.papers import Study, StudyOptions, StudyRow
from fedgrove_lab.papers.definition import load_definition
from fedgrove_lab.papers.fedlayerprune import last_density, prunable_layers
from fedgrove_lab.papers.measures import REACHED, digits_of
from fedgrove_lab.tables import ROOT

from .made import paired_difference, stored_values

PAPER = papers.find("fedlayerprune")
REPORTED = load_definition("fedlayerprune").reported
ALL = ("cifar10", "mnist", "fashion-mnist")
ABLATIONS = [
    "without-layers", "without-dynamic", "without-vote", "without-heterogeneity", "without-parts", "without-all",
    "without-dividing",
]  # fmt: skip
PARTS = {f"table{n}": part for n, part in PAPER.tables.items()}
PARTS |= {f"figure{n}": part for n, part in PAPER.figures.items()}
METHODS = [
    "local", "fedavg", "fedprox", "fixedprune-50", "fixedprune-50-static", "fixedprune-70",
    "fixedprune-70-static", "fedprune", "feddst", "fedlayerprune-literal", "fedlayerprune",
]  # fmt: skip


def study(part: str, on: str = "cifar10", quick: bool = False) -> Study:
    return PARTS[part].study(StudyOptions(on, quick=quick))


def rows(part: str, on: str = "cifar10") -> Mapping[str, StudyRow]:
    return {row.name: row for row in study(part, on).rows}


def methods(part: str) -> Mapping[str, AnyMethod]:
    """The methods of a part at the middle alpha, by name."""
    made = {}
    for name, row in rows(part).items():
        if name.endswith("-a0.5"):
            made[name.removesuffix("-a0.5")] = row.experiment.method
    return made


# ---- how it is run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "net", "rounds"),
    [("cifar10", "resnet18", 30), ("mnist", "mnist-cnn", 20), ("fashion-mnist", "mnist-cnn", 20)],
)
def test_table_4_is_run_as_section_4_1_says(on: str, net: str, rounds: int) -> None:
    found = rows("table4", on)
    assert list(found) == [f"{name}-a{alpha}" for alpha in ("0.1", "0.5", "1") for name in METHODS]
    for name, row in found.items():
        asked = row.experiment
        assert (asked.data, asked.net, asked.rounds, asked.clients, asked.cohort) == (
            on,
            net,
            rounds,
            10,
            10,
        )
        alpha = name.rpartition("-a")[2]
        assert (asked.partition, row.panel) == (f"dirichlet-clients:{alpha}", f"Dirichlet {alpha}")
        assert (asked.finetune, asked.evaluate, asked.validation) == ((0,), 1, 0)
        local = asked.method.local
        assert local is not None
        assert (local.epochs, local.batch) == (3, 32)
        optimiser = local.optimiser
        assert type(optimiser).__name__ == "SGD"
        assert (optimiser.lr, optimiser.momentum, optimiser.weight_decay) == (0.01, 0.9, 5e-4)  # type: ignore[attr-defined]
        assert row.lead == (name.startswith("fedlayerprune-a"))
    assert study("table4", on).seeds == 3


def test_the_methods_and_their_densities() -> None:
    made = methods("table4")
    for name, density in (("fixedprune-50", 0.5), ("fixedprune-70", 0.3)):
        anew, static = made[name], made[f"{name}-static"]
        assert isinstance(anew, FixedPrune)
        assert (anew.density, anew.static) == (density, False)
        assert static == replace(anew, static=True)
    local = made["local"].local
    for name, preset in (("fedlayerprune", "reported"), ("fedlayerprune-literal", "literal")):
        # The presets have R = 5 already.
        assert made[name] == replace(PRESETS[preset], local=local)
    # The average sparsities of Table 3: .485, and .423 as the mean of five steps after rounds 5 to
    # 25 of 30: (5 x 1 + 5 x 2 + 5 x 3 + 5 x 4 + 6 x 5) / (5 x 30) = 8 / 15 of the last one.
    feddst, fedprune = made["feddst"], made["fedprune"]
    assert isinstance(feddst, FedDST)
    assert isinstance(fedprune, FedPrune)
    assert (feddst.density, feddst.every, fedprune.every) == (0.515, 5, 5)
    assert fedprune.density == pytest.approx(1 - 0.423 * 15 / 8, abs=1e-6)
    # One step, after the first of two rounds: both rounds end at the last density.
    assert last_density(0.4, rounds=2, every=1) == 0.6


def test_the_ablation_takes_away_one_part_and_keeps_the_density() -> None:
    found = methods("table5")
    whole = methods("table4")["fedlayerprune"]
    assert isinstance(whole, FedLayerPrune)
    assert found["fedlayerprune"] == whole
    assert found["without-layers"] == replace(whole, rates=Alike())
    assert found["without-dynamic"] == replace(whole, schedule=Piecewise(rise=0))
    # The vote is the paper's, dividing ours: each alone, and both.
    assert found["without-vote"] == replace(whole, vote=Vote(0.0))
    assert found["without-dividing"] == replace(whole, renormalise=False)
    assert found["without-heterogeneity"] == replace(found["without-vote"], renormalise=False)
    parts = replace(whole, rates=Alike(), schedule=Piecewise(rise=0), vote=Vote(0.0))
    assert found["without-parts"] == parts
    assert found["without-all"] == replace(parts, renormalise=False)
    for name in ("fedlayerprune", *ABLATIONS):
        method = found[name]
        assert isinstance(method, FedLayerPrune)
        assert (method.density, method.p_base) == (0.4, None)
    assert "keep the same share" in study("table5").about


@pytest.mark.parametrize("on", ALL)
def test_both_readings_are_in_table_4_of_every_data_set(on: str) -> None:
    """So that one command for each data set runs them."""
    found = rows("table4", on)
    for alpha in ("0.1", "0.5", "1"):
        reported = {name: found[f"{name}-a{alpha}"].reported for name in METHODS}
        assert reported["fedlayerprune-literal"] == reported["fedlayerprune"] != {}
        for density in ("50", "70"):
            static = f"fixedprune-{density}-static"
            assert reported[static] == reported[f"fixedprune-{density}"] != {}


def test_study_9_changes_one_thing_at_a_time() -> None:
    found = rows("table9", "fashion-mnist")
    alphas = ("0.1", "0.5", "1")
    assert len(found) == 12 * len(alphas)
    fourth = rows("table4", "fashion-mnist")
    for alpha in alphas:
        own = {}
        for name, row in found.items():
            method_name, _, of = name.rpartition("-a")
            if of == alpha:
                own[method_name] = row
                assert row.panel == f"Dirichlet {alpha}"
        for name, row in own.items():
            if f"{name}-a{alpha}" in fourth:
                assert row.experiment == fourth[f"{name}-a{alpha}"].experiment
        feddst = own["feddst"].experiment.method
        assert isinstance(feddst, FedDST)
        assert feddst.churn == 0.05
        for percent in (20, 50):
            row = own[f"feddst-churn{percent}"]
            assert row.experiment.method == replace(feddst, churn=percent / 100)
            assert row.reported == own["feddst"].reported
        whole = own["fedlayerprune"].experiment.method
        assert isinstance(whole, FedLayerPrune)
        assert own["without-vote"].experiment.method == replace(whole, vote=Vote(0.0))
        assert own["without-dividing"].experiment.method == replace(whole, renormalise=False)
        assert not own["without-dividing"].reported
        assert {"fedavg", "fedlayerprune-literal", "fixedprune-50-static"} <= set(own)
        assert {"fixedprune-70-static", "fedprune", "local"} <= set(own)


@pytest.mark.parametrize(
    ("on", "goal"), [("cifar10", 0.85), ("mnist", 0.95), ("fashion-mnist", 0.85)]
)
def test_rounds_are_counted_to_a_goal_that_takes_some(on: str, goal: float) -> None:
    assert f"{REACHED}{goal}" in study("table8", on).counted


def test_table_8_has_fifty_clients() -> None:
    for row in study("table8").rows:
        asked = row.experiment
        assert (asked.clients, asked.cohort, asked.rounds) == (50, 15, 50)
    assert study("table8").base == "fedavg-k50"


def test_table_6_varies_the_threshold_only() -> None:
    found = rows("table6")
    for tau in (0.1, 0.3, 0.5, 0.7):
        row = found[f"fedlayerprune-tau{tau}-a0.5"]
        method = row.experiment.method
        assert isinstance(method, FedLayerPrune)
        assert replace(method, vote=Vote(0.3)) == methods("table4")["fedlayerprune"]
        assert (method.vote.threshold, row.lead) == (tau, tau == 0.3)


def test_rows_of_different_parts_are_the_same_runs() -> None:
    """So that they need not be trained twice: a run folder may be copied."""
    fourth = rows("table4")
    for part in ("table3", "table5", "table7", "table9", "figure2", "figure3", "figure4"):
        shared = [row for row in study(part).rows if row.name in fourth]
        assert shared
        for row in shared:
            assert row.experiment == fourth[row.name].experiment


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("on", [*ALL, "digits"])
def test_every_study_holds_together(part: str, on: str) -> None:
    """Rows of one name are one run; what is reported is measured; local is there."""
    found = study(part, on)
    by_name: dict[str, Experiment] = {}
    for row in found.rows:
        assert by_name.setdefault(row.name, row.experiment) == row.experiment
        for key in row.reported:
            measure = key.removesuffix(":0")
            is_point = found.over_rounds and measure.partition("@")[0] in found.drawn
            assert measure in (*found.measures, *found.counted) or is_point, key
            assert (
                row.reported[key] <= 1
                or digits_of(measure) is not None
                or measure.startswith(REACHED)
            )
    runs = papers.experiments(found, range(found.seeds))
    assert len(runs) == 3 * len(by_name)
    if "accuracy_mean" in found.measures:
        panels = {row.panel for row in found.rows}
        assert panels == {
            row.panel for row in found.rows if name_of(row.experiment.method) == "local"
        }
    assert any("common test set" in note for note in found.notes)
    if on == "digits":
        assert not any(row.reported for row in found.rows)


@pytest.fixture(scope="module")
def small_images() -> Mapping[str, Federation]:
    """A few made-up images in the shapes of the data sets, for ten clients."""
    rng = np.random.default_rng(0)
    federations = {}
    for name, shape in (("cifar10", (3, 32, 32)), ("fashion-mnist", (1, 28, 28))):
        x = rng.normal(size=(200, *shape)).astype(np.float32)
        federations[name] = data.from_arrays(
            x, np.arange(200) % 10, client=np.arange(200) // 20, validation=0
        )
    return federations


@pytest.mark.parametrize("name", [*METHODS, *ABLATIONS])
def test_every_method_begins_on_the_small_network(
    name: str, small_images: Mapping[str, Federation], tmp_path: Path
) -> None:
    """The densities can be reached with the rates and the cap, before anything is trained."""
    _begin("fashion-mnist", name, small_images, tmp_path)


@pytest.mark.parametrize("name", ["fedlayerprune", "without-all", "fedprune", "feddst"])
def test_pruning_begins_on_resnet18(
    name: str, small_images: Mapping[str, Federation], tmp_path: Path
) -> None:
    _begin("cifar10", name, small_images, tmp_path)


def _begin(on: str, name: str, federations: Mapping[str, Federation], folder: Path) -> None:
    part = "table5" if name.startswith("without") else "table4"
    asked = rows(part, on)[f"{name}-a0.5"].experiment
    federation = federations[on]
    own = replace(asked, data=federation, partition=None, clients=None)
    run = own.build(federation, Memory(folder))
    assert run.initial_state.round == 0
    assert len(run.method.plan(run.initial_state, range(10))) == 10
    assert run.method.paper_bytes(run.net, 10, 10, run.rounds) >= 0


# ---- what the paper reports ----------------------------------------------------------------------


def test_figures_are_as_printed() -> None:
    # Sums of the columns of Tables 3 and 4, added up from the page.
    sums = {
        on: np.sum(list(printed.values()), axis=0).round(4).tolist()
        for table in ("table_3_gb", "table_3_mb")
        for on, printed in REPORTED[table].numbers.items()
    }
    assert sums == {
        "cifar10": [78.63, 310.3, 2.635],
        "mnist": [2248.3, 309.6, 2.619],
        "fashion-mnist": [2252.8, 308.9, 2.608],
    }
    sums = {
        on: np.sum(list(printed.values()), axis=0).round(4).tolist()
        for on, printed in REPORTED["table_4"].numbers.items()
    }
    assert sums == {
        "cifar10": [6.089, 6.306, 6.421],
        "mnist": [6.673, 6.794, 6.845],
        "fashion-mnist": [5.977, 6.172, 6.29],
    }
    third = rows("table3")
    assert third["fedlayerprune-a0.5"].reported == {
        "mib_paper": pytest.approx(6.45 * 1024), "reduction_paper": 68.3, "density_run": 0.473,
    }  # fmt: skip
    assert rows("table3", "fashion-mnist")["feddst-a0.5"].reported == {
        "mib_paper": 209.1, "reduction_paper": 63.7, "density_run": 0.522,
    }  # fmt: skip
    fourth = rows("table4", "fashion-mnist")
    assert fourth["fedlayerprune-a0.5"].reported == {"accuracy_mean:0": 0.893}
    # Both readings are next to what the paper has once.
    assert fourth["fixedprune-70-static-a0.1"].reported == {"accuracy_mean:0": 0.802}
    assert fourth["fedlayerprune-literal-a1"].reported == {"accuracy_mean:0": 0.908}
    assert not fourth["local-a0.5"].reported


def test_what_is_reported_of_cifar10_alone() -> None:
    fifth = rows("table5")
    assert fifth["without-all-a0.5"].reported["accuracy_mean:0"] == 0.881
    # Section 4.2.6: the heterogeneity-aware mean adds 1.8, .9 and .3 points.
    for alpha, gain in (("0.1", 0.018), ("0.5", 0.009), ("1", 0.003)):
        whole, less = (
            fifth[f"{name}-a{alpha}"].reported["accuracy_mean:0"]
            for name in ("fedlayerprune", "without-heterogeneity")
        )
        assert whole - less == pytest.approx(gain)
    sixth = rows("table6")["fedlayerprune-tau0.7-a0.5"].reported
    assert sixth == {
        "accuracy_mean:0": 0.904,
        "mib_paper": pytest.approx(5816.32),
        "density_run": 0.402,
    }
    assert rows("table7")["fedlayerprune-a0.1"].reported == {
        "accuracy_mean:0": 0.887, "accuracy_std:0": 0.029, "accuracy_worst:0": 0.831,
        "accuracy_best:0": 0.935,
    }  # fmt: skip
    eighth = rows("table8")["feddst-k50"].reported
    assert (eighth["rounds_to@0.85"], eighth["reduction_paper"]) == (16, 63.0)
    second = rows("figure2")["fedlayerprune-a0.5"].reported
    assert second == {
        "accuracy_mean:0": 0.915, "accuracy_mean@10": 0.83, "accuracy_mean@20": 0.89,
        "accuracy_mean@30": 0.915,
    }  # fmt: skip
    for part in ("table5", "table6", "table7", "table8", "figure3"):
        for row in study(part, "mnist").rows:
            # Only what Table 4 has of these runs.
            assert set(row.reported) <= {"accuracy_mean:0"}


def test_figure_3_has_a_row_for_each_layer_of_resnet18() -> None:
    names = prunable_layers("resnet18", (3, 32, 32))
    # conv1, 4 x 4 convolutions, 3 shortcuts, the head
    assert (len(names), names[0], names[-1]) == (21, "conv1.weight", "head.weight")
    assert set(REPORTED["figure_3"].numbers["cifar10"]) <= set(names)
    found = study("figure3").rows
    assert [row.layer for row in found] == [*names, *names]
    assert {row.name for row in found} == {"fedlayerprune-a0.5", "fedlayerprune-literal-a0.5"}
    assert [row.reported for row in found if row.layer == "conv1.weight"] == [
        {"pruned:0": 0.325}
    ] * 2


# ---- quick runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small_and_runs_on_built_in_images(part: str, tmp_path: Path) -> None:
    assert PARTS[part].quick_data == "digits"
    found = study(part, "digits", quick=True)
    assert found.notes[0].startswith("Quick")
    federations: dict[str | None, Federation] = {}
    for run, asked in papers.experiments(found, (0,)).items():
        assert asked.clients is not None
        assert (asked.rounds or 0) * asked.clients <= 12
        federation = federations.setdefault(asked.partition, asked.federation())
        assert len(federation.clients) == asked.clients
        assert asked.build(federation, Memory(tmp_path / run)).initial_state.round == 0


def test_a_quick_table_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["paper", "fedlayerprune", "--table", "3", "--quick", "--engine", "serial"]
    chosen = "fedavg-a*,fixedprune-70-a*,fedlayerprune-a*,fedlayerprune-bitmap-a*"
    assert main([*words, "--rows", chosen, "--out", str(tmp_path / "t")]) == 0
    assert capsys.readouterr().out.startswith("FedLayerPrune, Table 3, QUICK")
    found = json.loads((tmp_path / "t/table.json").read_text())
    ours = {row["name"]: row["ours"] for row in found["rows"]}
    dense, fixed = ours["fedavg-a0.5"], ours["fixedprune-70-a0.5"]
    assert (dense["reduction"]["mean"], dense["density_run"]["mean"]) == (0.0, 1.0)
    assert fixed["reduction_paper"]["mean"] == pytest.approx(70, abs=0.01)
    assert fixed["density_run"]["mean"] == pytest.approx(0.3, abs=0.01)
    whole, bitmap = ours["fedlayerprune-a0.5"], ours["fedlayerprune-bitmap-a0.5"]
    # The code changes what is sent, and nothing else.
    assert whole["accuracy_mean:0"] == bitmap["accuracy_mean:0"]
    assert whole["mib"]["mean"] < bitmap["mib"]["mean"]
    assert (tmp_path / "t/paper.html").is_file()


def test_a_quick_curve_and_what_is_pruned_of_each_layer(tmp_path: Path) -> None:
    words = [
        "paper",
        "fedlayerprune",
        "--quick",
        "--engine",
        "serial",
        "--rows",
        "fedlayerprune-a*",
    ]
    both = ["--figure", "2", "--out", str(tmp_path / "f2")]
    assert main([*words, *both]) == 0
    (curve,) = json.loads((tmp_path / "f2/table.json").read_text())["rows"]
    points = curve["curves"]["accuracy_mean"]
    assert [point["round"] for point in points] == [1, 2]
    assert points[0]["mean"] == curve["ours"]["accuracy_mean@1"]["mean"]
    assert points[1]["mean"] == curve["ours"]["accuracy_mean:0"]["mean"]
    assert main([*words, "--figure", "3", "--out", str(tmp_path / "f3")]) == 0
    found = json.loads((tmp_path / "f3/table.json").read_text())
    assert [row["label"] for row in found["rows"]] == ["conv1", "conv2", "head"]
    pruned = [row["ours"]["pruned:0"]["mean"] for row in found["rows"]]
    # Sensitivities .6 x .7, .6 and 1.1 x 1.2: the head loses most.
    assert 0 < pruned[0] < pruned[2] < 0.81


def test_parts_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (
            "--table 2",
            "--table is 2; it must be one of 3, 4, 5, 6, 7, 8, 9, those of fedlayerprune",
        ),
        ("--figure 1", "--figure is 1; it must be one of 2, 3, 4, those of fedlayerprune"),
        ("--table 4 --rows nope", "--rows is 'nope', which is not a row of FedLayerPrune, Table 4"),
        ("--table 4 --data nope", "there is no data set 'nope'"),
    ):
        assert main(["paper", "fedlayerprune", *words.split(), "--quick"]) == 2
        assert sentence in capsys.readouterr().err


# ---- what the docs say of study 9 ----------------------------------------------------------------


def gap(one: str, other: str) -> str:
    """The difference of two stored rows, over all test examples."""
    result, measure = "fedlayerprune-fashion-mnist", "accuracy_pooled:0"
    values = (stored_values(result, row, measure) for row in (one, other))
    return paired_difference(*values)


def test_the_differences_in_the_docs_follow_from_the_stored_values() -> None:
    pages = [ROOT / "docs" / folder / "fedlayerprune.md" for folder in ("evidence", "papers")]
    evidence, method = (" ".join(page.read_text().split()) for page in pages)
    for alpha in ("0.1", "0.5", "1"):
        for other in ("fedavg", "without-vote", "without-dividing"):
            text = gap(f"fedlayerprune-a{alpha}", f"{other}-a{alpha}")
            assert text in evidence
            assert text in method
    for other in ("fixedprune-70-static", "fixedprune-50-static", "feddst"):
        text = gap("fedlayerprune-a0.1", f"{other}-a0.1")
        assert text in evidence
        assert text in method
    for other in ("feddst-churn20", "feddst-churn50"):
        assert gap("fedlayerprune-a0.1", f"{other}-a0.1") in method
    assert gap("fedlayerprune-a0.1", "fedlayerprune-literal-a0.1") in evidence
    assert gap("feddst-churn50-a0.1", "feddst-a0.1") in evidence
