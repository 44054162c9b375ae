"""What was measured, compared with what is reported: one object, and its tables."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.papers.made import done, study, summary

from fedgrove.config.experiment import Experiment
from fedgrove.methods import FedAvg
from fedgrove_lab.papers import Study, StudyRow, experiments
from fedgrove_lab.papers.compare import compare_part
from fedgrove_lab.papers.measures import run_value
from fedgrove_lab.papers.tables import (
    lay_out,
    lay_out_pairs,
    list_groups,
    print_comparison,
    write_markdown,
)


def test_golden() -> None:
    found = compare_part("x", "table1", [(study(), done())])
    a, b = found["rows"]
    # means (.5 + .7) / 2 and (.7 + .9) / 2; deviations sqrt(2 * .1^2 / 1) = .14142136
    assert a["ours"]["accuracy_mean:0"] == {"mean": 0.6, "std": round(math.sqrt(0.02), 8)}
    assert a["ours"]["accuracy_mean:3"]["mean"] == 0.8
    assert a["ours"]["mib"] == {"mean": 3.0, "std": 0.0}
    assert a["difference"] == {"accuracy_mean:3": 0.0, "accuracy_std:3": -0.1, "mib_paper": 0.5}
    assert (a["seeds"], a["missing"], b["seeds"], b["missing"]) == ([0, 1], 0, [0, 1], 1)
    assert (b["paper"], b["difference"]) == ({}, {})
    # a - b: .1 and .3 without fine-tuning: mean .2, SE .1, t = 2 with 1 degree of freedom,
    # p = 1 - 2 atan(2) / pi
    pair = {"data": "motion", "panel": "", "x": None, "row": "a", "against": "b & co", "seeds": 2}
    p = round(1 - 2 * math.atan(2) / math.pi, 8)
    assert found["paired"] == [
        {**pair, "finetune": 0, "difference": 0.2, "standard_error": 0.1, "p": p},
        {**pair, "finetune": 3, "difference": 0.0, "standard_error": 0.0, "p": None},
    ]
    assert found["notes"] == ["a note", "motion: made up"]
    assert (found["seconds"], found["engines"]) == (6.0, ["serial"])


def test_pairs_of_every_panel_are_shown() -> None:
    """Rows of one label stand in several panels: density .7 and .3, say, or points of a line."""
    asked = Experiment(FedAvg(), "motion", finetune=(0,))
    at = {"p": ("density 0.7", None), "q": ("density 0.3", None), "r": ("rounds", 10.0)}
    rows = tuple(
        StudyRow(f"{n}{k}", n, asked, panel=p, x=x, lead=n == "a")
        for k, (p, x) in at.items()
        for n in "ab"
    )
    runs = {f"{row.name}-s0": summary(0, {0: 0.5 + i / 100}) for i, row in enumerate(rows)}
    runs |= {f"{row.name}-s1": summary(1, {0: 0.5 + i / 50}) for i, row in enumerate(rows)}
    head, lines = lay_out_pairs(compare_part("x", "table1", [(Study("t", "a", rows, 2), runs)]))
    assert head == ["data", "at", "row", "minus", "seeds", "fine-tuned 0"]
    assert [line[1] for line in lines] == ["density 0.7", "density 0.3", "rounds 10"]


def test_head_and_lines_without_empty_columns() -> None:
    head, [(title, lines)] = lay_out(compare_part("x", "table1", [(study(), done())]))
    assert title == "motion, blocks split"
    assert head == [
        "row", "fine-tuned", "seeds", "accuracy %", "paper", "difference", "std over clients", "paper", "difference",
        "worst %", "groups", "MiB counted", "paper", "difference", "MiB sent",
    ]  # fmt: skip
    assert lines[1] == [
        "a", "3", "2", "80.00 ± 14.14", "80.00", "+0.00", "10.00 ± 0.00", "20.00", "-10.00", "60.00 ± 14.14", "3/1",
        "2.5", "2.0", "+0.5", "3.0",
    ]  # fmt: skip
    assert lines[3][:5] == ["b & co", "3", "2 of 3", "80.00 ± 14.14", ""]
    assert lines[3][10] == "9 x 1"


def test_for_people() -> None:
    found = compare_part("x", "table1", [(study(), done())], quick=True)
    text = io.StringIO()
    print_comparison(found, text)
    said = text.getvalue()
    assert said.startswith("A paper, Table 1, QUICK: a quick run, not a measurement\nTwo rows.\n")
    assert "+20.00 (p 0.3)" in said
    rows = [line for line in write_markdown(found).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows[:6]} == {16}
    assert rows[1] == "| " + " | ".join(["---"] * 15) + " |"
    assert write_markdown(found).endswith("- a note\n\n- motion: made up\n")


def test_rows_without_a_single_result_still_have_their_lines() -> None:
    found = compare_part("x", "table1", [(study(), dict.fromkeys(done()))])
    assert [row["missing"] for row in found["rows"]] == [2, 3]
    assert found["paired"] == []
    assert lay_out(found)[1][0].lines[0][:3] == ["a", "0", "0 of 2"]


def test_the_best_row_and_the_papers() -> None:
    asked = Experiment(FedAvg(), "motion", finetune=(0,))
    rows = tuple(StudyRow(n, n, asked, panel="p", picked=n == "a") for n in "abc")
    one = Study("T", "About.", rows, 1, ("accuracy_mean", "score"), best="score", only_best=True)
    stds = {"a": 0.2, "b": 0.1, "c": 0.0}  # a deviation of 0 has no score
    found = compare_part(
        "x", "table1", [(one, {f"{n}-s0": summary(0, {0: 0.5}, std) for n, std in stds.items()})]
    )
    assert [(row["label"], row["best"], row["picked"]) for row in found["rows"]] == [
        ("a", False, True),
        ("b", True, False),
        ("c", False, False),
    ]
    head, [(title, lines)] = lay_out(found)
    assert title == "motion, blocks split: p"
    assert [line[0] for line in lines] == ["a +", "b *"]
    assert head == ["row", "seeds", "accuracy %", "score", "groups", "MiB counted", "MiB sent"]


def test_a_value_of_a_run() -> None:
    run = summary(0, {0: 0.5, 3: 0.75}, std=0.25)
    keys = ("accuracy_mean:3", "accuracy_std:0", "score:3", "mib", "mib_paper")
    assert [run_value(run, key) for key in keys] == [0.75, 0.25, 3.0, 3.0, 2.5]
    assert run_value(summary(0, {0: 1.0}, std=0.0), "score:0") is None


def test_sizes_and_shares_of_another_rows_bytes() -> None:
    """a sends 3 MiB and b 6, a's model has 250,000 parameters of 4 bytes: 1 MB; b is 100 %."""
    counted = ("params", "model_mb", "share_paper", "share")
    wanted = study(counted=(*counted, "mib_paper", "mib"), base="b")
    rows = (replace(wanted.rows[0], reported={"share": 40.0, "model_mb": 2.0}), wanted.rows[1])
    summaries = {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}, params_mean=250_000),
        "b-s0": summary(0, {0: 0.5, 3: 0.7}, params_mean=250_000, bytes_up=2**22),
    }
    compared = compare_part("x", "figure8", [(replace(wanted, rows=rows), summaries)])
    a, b = compared["rows"]
    assert [a["ours"][key]["mean"] for key in counted] == [250_000, 1.0, 100.0, 50.0]
    assert b["ours"]["share"]["mean"] == 100.0
    assert a["difference"] == {"share": 10.0, "model_mb": -1.0}
    head, (section,) = lay_out(compared)
    # Columns of the paper stand behind the measures that it reports.
    assert head[-10:] == [
        "parameters left", "model MB", "paper", "difference", "% counted", "% sent", "paper",
        "difference", "MiB counted", "MiB sent",
    ]  # fmt: skip
    assert section.lines[0][-10:] == [
        "250000", "1.000", "2.000", "-1.000", "100.00", "50.00", "40.00", "+10.00", "2.5", "3.0",
    ]  # fmt: skip


def test_a_row_may_have_fewer_seeds() -> None:
    rows = (replace(study().rows[0], seeds=1), study().rows[1])
    runs = experiments(replace(study(), rows=rows), (0, 1, 2))
    assert list(runs) == ["a-s0", "b-s0", "b-s1", "b-s2"]


def test_groups_of_several_seeds() -> None:
    assert list_groups({"group_sizes": [[28, 1, 1], [20, 9, 1], [28, 1, 1]]}) == "28/1/1, 20/9/1"
    assert list_groups({"group_sizes": [[i, 1] for i in range(5)]}) == "0/1, 1/1, 2/1 ..."


# ---- over the rounds -----------------------------------------------------------------------------


def lines(*accuracies: float) -> list[dict[str, Any]]:
    """A line of metrics.jsonl per round, behind one of an exchange that is no round."""
    found: list[dict[str, Any]] = [
        {"round": 0, "counts": False, "figures": {"mask_stability": 0.0}}
    ]
    for i, accuracy in enumerate(accuracies):
        line = {"accuracy_mean": accuracy, "density": 1 - i / 10}
        figures = {"mask_stability": 0.5 + i / 10}
        found.append({"round": i + 1, "counts": True, **line, "figures": figures})
    return found


def test_values_over_the_rounds() -> None:
    run = summary(0, {0: 0.9}, lines=lines(0.5, 0.8, 0.7, 0.9))
    keys = ("density_run", "mask_stability", "accuracy_mean@3", "rounds_to@0.8", "rounds_to@0.91")
    # (1 + .9 + .8 + .7) / 4 = .85 and (.5 + .6 + .7 + .8) / 4 = .65; .8 is first reached in round 2.
    assert [run_value(run, key) for key in keys] == [
        pytest.approx(0.85), pytest.approx(0.65), 0.7, 2.0, None,
    ]  # fmt: skip
    # A run whose clients were scored at the end only, of a method without figures of its own.
    unscored = summary(0, {0: 0.9}, lines=[{"round": 1, "counts": True}])
    assert [run_value(unscored, key) for key in keys] == [None] * 5


def test_the_best_client_and_what_is_pruned_of_a_layer() -> None:
    run = summary(
        0,
        {0: 0.5, 3: 0.7},
        accuracy_clients_after_3={"0": 0.6, "1": 0.8},
        figures={"density:w": 0.25},
    )
    # A run of an older version has the accuracies of single clients at the last length only.
    assert [run_value(run, f"accuracy_best:{n}") for n in (0, 3)] == [None, 0.8]
    assert run_value(run, "pruned:0", "w") == 0.75
    assert run_value(run, "pruned:0", "v") is None


def test_an_accuracy_that_one_seed_does_not_reach_has_no_mean_but_a_note() -> None:
    wanted = study(counted=("rounds_to@0.8",))
    rows = (replace(wanted.rows[0], reported={"rounds_to@0.8": 1}), wanted.rows[1])
    runs = {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}, lines=lines(0.5, 0.9)),
        "a-s1": summary(1, {0: 0.5, 3: 0.7}, lines=lines(0.5, 0.6, 0.7, 0.8)),
        "b-s0": summary(0, {0: 0.5, 3: 0.7}, lines=lines(0.9)),
        "b-s1": summary(1, {0: 0.5, 3: 0.7}, lines=lines(0.7)),
    }
    found = compare_part("x", "table8", [(replace(wanted, rows=rows), runs)])
    a, b = found["rows"]
    # Rounds 2 and 4: mean 3, deviation sqrt(2).
    assert a["ours"]["rounds_to@0.8"] == {"mean": 3.0, "std": round(math.sqrt(2), 8)}
    assert a["difference"]["rounds_to@0.8"] == 2.0
    assert "rounds_to@0.8" not in b["ours"]
    assert found["notes"][1] == "80 % was not reached by: b & co (on 1 of 2 seeds)."
    head, (section,) = lay_out(found)
    assert head[-3:] == ["rounds to 80 %", "paper", "difference"]
    assert section.lines[0][-3:] == ["3.00 ± 1.41", "1.00", "+2.00"]
    never = compare_part("x", "table8", [(wanted, {"b-s0": runs["b-s1"]})])
    assert never["notes"][1] == "80 % was not reached by: b & co."


def test_reductions_against_another_row() -> None:
    """a sends 3 MiB and b 6: half, and 50 % less."""
    wanted = study(counted=("mib", "reduction", "reduction_paper"), base="b")
    summaries = {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}),
        "b-s0": summary(0, {0: 0.5, 3: 0.7}, bytes_up=2**22),
    }
    a, b = compare_part("x", "table3", [(wanted, summaries)])["rows"]
    assert (a["ours"]["reduction"]["mean"], b["ours"]["reduction"]["mean"]) == (50.0, 0.0)
    # Of what the study does not count there is no share either.
    assert "reduction_paper" not in a["ours"]


def test_curves_of_a_study_over_the_rounds() -> None:
    wanted = study(drawn=("accuracy_mean",), over_rounds=True, lines=True)
    runs = {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}, lines=lines(0.5, 0.9)),
        "a-s1": summary(1, {0: 0.5, 3: 0.7}, lines=lines(0.7, 0.9)),
    }
    a, b = compare_part("x", "figure2", [(wanted, runs)])["rows"]
    assert a["curves"]["accuracy_mean"] == [
        {"round": 1, "mean": 0.6, "std": round(math.sqrt(0.02), 8)},
        {"round": 2, "mean": 0.9, "std": 0.0},
    ]
    assert b["curves"] == {"accuracy_mean": []}
    assert compare_part("x", "table1", [(study(), runs)])["rows"][0]["curves"] == {}


def test_groups_are_shown_where_clients_are_grouped() -> None:
    alone = {"a-s0": summary(0, {0: 0.5, 3: 0.7}, group_sizes=[4])}
    alone["b-s0"] = summary(0, {0: 0.5, 3: 0.7}, group_sizes=[1] * 4)
    assert "groups" not in lay_out(compare_part("x", "table1", [(study(), alone)]))[0]
    assert "groups" in lay_out(compare_part("x", "table1", [(study(), done())]))[0]


def line(done: int, accuracy: float, clock: float, **figures: float) -> dict[str, Any]:
    sent = {"bytes_up": 0, "bytes_down": 0}
    told = {"accuracy_mean": accuracy, "virtual_clock": clock, "figures": figures}
    return {"round": done, "counts": True, **sent, **told}


def test_what_is_less_than_dense_by_hand() -> None:
    """Dense is 4 bytes x 2^17 parameters x 2 clients x 2 rounds = 2 MiB each way.

    1 MiB up is half less, 2 MiB down nothing; the formula counts 2.5 MiB of both, 4 in all: 37.5.
    """
    sizes = {"params": 2**17, "cohort": 2, "rounds": 2, "virtual_seconds": 3.0}
    run = summary(0, {0: 0.5}, **sizes)
    keys = ["less_up", "less_down", "less_counted", "mib_up", "mib_down", "virtual_seconds"]
    assert [run_value(run, key) for key in keys] == [50.0, 0.0, 37.5, 1.0, 2.0, 3.0]
    assert run_value(run, "seconds_round") == 0.75
    # A method that tells its uplink is believed: .1 and .2 of a dense one.
    lines = [line(1, 0.4, 1.0, uplink_counted=0.1, centroids=4)]
    lines += [line(2, 0.5, 3.0, uplink_counted=0.2, centroids=6)]
    told = {**run, "lines": lines}
    assert run_value(told, "less_counted") == pytest.approx(85.0)
    assert run_value(told, "centroids") == 5.0


def test_seconds_to_what_all_reach_by_hand() -> None:
    """The best of a is .6 and of b .5: all reach .5, a after 2 s and b after 9 s."""
    asked = Experiment(FedAvg(), "motion")
    rows = (StudyRow("a", "a", asked), StudyRow("b", "b", asked))
    runs = {
        "a-s0": {**summary(0, {0: 0.6}), "lines": [line(1, 0.5, 2.0), line(2, 0.6, 4.0)]},
        "b-s0": {**summary(0, {0: 0.5}), "lines": [line(1, 0.4, 5.0), line(2, 0.5, 9.0)]},
    }
    made = Study("t", "a", rows, 1, measures=("accuracy_mean",), counted=("seconds_to_all",))
    found = compare_part("x", "table1", [(made, runs)])
    assert [row["ours"]["seconds_to_all"]["mean"] for row in found["rows"]] == [2.0, 9.0]
    assert "what all rows reach on every seed is 50.00 %." in found["notes"]


def test_accuracy_by_bandwidth_by_hand(tmp_path: Path) -> None:
    """Clients 0 and 1 have 5 and 23 Mbit/s, client 2 has 24, client 3 100, at the upper end."""
    lines = [f"{k},{up},50,1,1000" for k, up in enumerate((5, 23, 24, 100))]
    file = tmp_path / "devices.csv"
    file.write_text("client,up,down,speed,memory\n" + "\n".join(lines) + "\n")
    asked = Experiment(FedAvg(), "motion", profile=str(file))
    bands = ((5, 24), (24, 81), (81, 100))
    rows = tuple(StudyRow("a", f"a {band}", asked, series="a", band=band) for band in bands)
    scored = {"0": 0.2, "1": 0.4, "2": 0.6, "3": 0.9}
    runs = {"a-s0": summary(0, {0: 0.5}, accuracy_clients=scored)}
    made = Study("t", "a", rows, 1, measures=("accuracy_band",), counted=("clients_band",))
    found = compare_part("x", "figure3", [(made, runs)])
    means = [row["ours"]["accuracy_band:0"]["mean"] for row in found["rows"]]
    assert means == pytest.approx([0.3, 0.6, 0.9])
    assert [row["ours"]["clients_band"]["mean"] for row in found["rows"]] == [2, 1, 1]
    assert "a: groups of bandwidths lie 60.00 points apart." in found["notes"]


# ---- several tasks -------------------------------------------------------------------------------


def of_tasks(seed: int, means: tuple[float, float], **more: Any) -> dict[str, Any]:
    """The summary of a run on two tasks, one of which has a colon in its name, and a forecast."""
    tasks: dict[str, dict[str, Any]] = {}
    for name, mean in zip(("d", "d:turned"), means, strict=True):
        tasks[name] = {"metric": "accuracy", "mean": mean, "worst": mean - 0.25}
    tasks["f"] = {"metric": "rmse", "mean": 9.0, "worst": 99.0}
    run = summary(seed, {0: 0.0}, **more)
    return {**run, "finetune": {"0": {"tasks": tasks}}}


def test_values_of_tasks_and_groups() -> None:
    found = [
        {"round": 1, "counts": True, "purity": 0.5, "groups": 1},
        {"round": 2, "counts": True, "purity": 1.0, "groups": 2},
    ]
    run = of_tasks(0, (0.5, 1.0), lines=found, purity=1.0, groups=2)
    keys = {
        "accuracy_on/d:0": 0.5,
        "accuracy_on/d:turned:0": 1.0,
        "accuracy_on/f:0": None,
        # Over accuracies alone: (.5 + 1) / 2, and .5 - .25.
        "accuracy_tasks:0": 0.75,
        "accuracy_least:0": 0.25,
        "purity": 1.0,
        "groups": 2,
        "purity@1": 0.5,
        "groups@1": 1.0,
    }
    assert {key: run_value(run, key) for key in keys} == keys
    # One model for all is no group that a method found.
    assert run_value(of_tasks(0, (0.5, 1.0), groups=1), "groups") is None


def test_a_table_of_tasks() -> None:
    """Columns by task; rows are tested by the mean over tasks: +.25 and +.5 on two seeds."""
    asked = Experiment(FedAvg(), "motion")
    reported = {"accuracy_on/d:0": 0.5}
    rows = (StudyRow("a", "a", asked, reported, lead=True), StudyRow("b", "b", asked))
    measures = ("accuracy_on/d", "accuracy_on/d:turned", "accuracy_tasks")
    both = Study("T", "Two.", rows, 2, measures=measures, counted=("purity",))
    summaries = {
        "a-s0": of_tasks(0, (0.5, 1.0), purity=0.5),
        "a-s1": of_tasks(1, (0.75, 1.0), purity=1.0),
        "b-s0": of_tasks(0, (0.5, 0.5)),
        "b-s1": of_tasks(1, (0.25, 0.5)),
    }
    made = compare_part("x", "table1", [(both, summaries)])
    head, ((_, (first, second)),) = lay_out(made)
    assert head == [
        "row", "seeds", "d %", "paper", "difference", "d:turned %", "mean of tasks %", "groups",
        "purity",
    ]  # fmt: skip
    assert first[2:6] == ["62.50 ± 17.68", "50.00", "+12.50", "100.00 ± 0.00"]
    assert first[-1] == "0.75 ± 0.35"
    assert second[-1] == ""
    (pair,) = made["paired"]
    assert pair["difference"] == pytest.approx(0.375)


def test_rows_that_have_forecasts_alone_are_not_tested() -> None:
    asked = Experiment(FedAvg(), "motion")
    rows = (StudyRow("a", "a", asked, lead=True), StudyRow("b", "b", asked))
    alone = Study("T", "Two.", rows, 2, measures=("accuracy_tasks",), counted=())
    summaries = {}
    for name in ("a", "b"):
        for seed in (0, 1):
            run = of_tasks(seed, (0.5, 0.5))
            forecast = run["finetune"]["0"]["tasks"]["f"]
            summaries[f"{name}-s{seed}"] = {**run, "finetune": {"0": {"tasks": {"f": forecast}}}}
    assert compare_part("x", "table1", [(alone, summaries)])["paired"] == []
