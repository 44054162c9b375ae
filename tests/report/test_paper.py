"""What was measured beside what is reported."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from fedgrove.config.experiment import Experiment
from fedgrove.methods import FedAvg, Local
from fedgrove.papers import Row, Study
from fedgrove.report.paper import figure, groups, layout, markdown, print_paper, table
from fedgrove.report.paper import tests as lines_of_pairs
from fedgrove.report.paper_page import can_draw, middle, points, span, write_page


def summary(seed: int, means: dict[int, float], std: float = 0.1, **more: Any) -> dict[str, Any]:
    lengths = {
        str(n): {"accuracy_mean": m, "accuracy_std": std, "accuracy_worst": m - 0.2}
        for n, m in means.items()
    }
    counts = {
        "bytes_up": 2**20,
        "bytes_down": 2**21,
        "bytes_paper": 5 * 2**19,
        "seconds": 1.5,
        "engine": "serial",
    }
    dealt = {
        "data": "motion",
        "partition": "natural",
        "scenario": "none",
        "split": "blocks",
        "clients": 4,
    }
    return {
        "seed": seed,
        "finetune": lengths,
        "group_sizes": [3, 1],
        "notes": ["made up"],
        **counts,
        **dealt,
        **more,
    }


def study(**more: Any) -> Study:
    asked = Experiment(FedAvg(), "motion", finetune=(0, 3))
    reported = {"accuracy_mean:3": 0.8, "accuracy_std:3": 0.2, "mib_paper": 2.0}
    rows = (
        Row("a", "a", asked, reported, lead=True),
        Row("b", "b & co", Experiment(Local(), "motion", finetune=(0, 3))),
    )
    return Study("A paper, Table 1", "Two rows.", rows, 2, notes=("a note",), **more)


def done() -> dict[str, dict[str, Any] | None]:
    return {
        "a-s0": summary(0, {0: 0.5, 3: 0.7}),
        "a-s1": summary(1, {0: 0.7, 3: 0.9}),
        "b-s0": summary(0, {0: 0.4, 3: 0.7}, group_sizes=[1] * 9),
        "b-s1": summary(1, {0: 0.4, 3: 0.9}, group_sizes=[1] * 9),
        "b-s2": None,
    }


def test_golden() -> None:
    found = table("x", "table1", [(study(), done())])
    a, b = found["rows"]
    # means (.5 + .7) / 2 and (.7 + .9) / 2; deviations sqrt(2 * .1^2 / 1) = .14142136
    assert a["ours"]["accuracy_mean:0"] == {"mean": 0.6, "std": round(math.sqrt(0.02), 8)}
    assert a["ours"]["accuracy_mean:3"]["mean"] == 0.8
    assert a["ours"]["mib"] == {"mean": 3.0, "std": 0.0}
    assert a["difference"] == {"accuracy_mean:3": 0.0, "accuracy_std:3": -0.1, "mib_paper": 0.5}
    assert (a["seeds"], a["missing"], b["seeds"], b["missing"]) == ([0, 1], 0, [0, 1], 1)
    assert (b["paper"], b["difference"]) == ({}, {})
    # a - b: .1 and .3 without fine-tuning: mean .2, SE .1, t = 2 with 1 degree of freedom, p = 1 - 2 atan(2) / pi
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
        Row(f"{n}{k}", n, asked, panel=p, x=x, lead=n == "a")
        for k, (p, x) in at.items()
        for n in "ab"
    )
    runs = {f"{row.name}-s0": summary(0, {0: 0.5 + i / 100}) for i, row in enumerate(rows)}
    runs |= {f"{row.name}-s1": summary(1, {0: 0.5 + i / 50}) for i, row in enumerate(rows)}
    head, lines = lines_of_pairs(table("x", "table1", [(Study("t", "a", rows, 2), runs)]))
    assert head == ["data", "at", "row", "minus", "seeds", "fine-tuned 0"]
    assert [line[1] for line in lines] == ["density 0.7", "density 0.3", "rounds 10"]


def test_head_and_lines_without_empty_columns() -> None:
    head, [(title, lines)] = layout(table("x", "table1", [(study(), done())]))
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


def test_for_people(tmp_path: Path) -> None:
    found = table("x", "table1", [(study(), done())], quick=True)
    text = io.StringIO()
    print_paper(found, text)
    said = text.getvalue()
    assert said.startswith("A paper, Table 1, QUICK: a look, not a measurement\nTwo rows.\n")
    assert "+20.00 (p 0.3)" in said
    rows = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows[:6]} == {16}
    assert rows[1] == "| " + " | ".join(["---"] * 15) + " |"
    assert markdown(found).endswith("- a note\n\n- motion: made up\n")


@pytest.mark.skipif(not can_draw(), reason="plotly is not installed")
@pytest.mark.parametrize("lines", [False, True])
def test_the_page_stands_alone(tmp_path: Path, lines: bool) -> None:
    found = table("x", "table1", [(study(lines=lines), done())], quick=True)
    write_page(found, "Who & Whom, 2026", tmp_path / "paper.html")
    page = (tmp_path / "paper.html").read_text()
    assert (
        page.count("QUICK: a look, not a measurement") == 2
    )  # its title in the browser, and on the page
    assert "b &amp; co" in page
    assert "Who &amp; Whom, 2026" in page
    assert "<script src=" not in page
    assert "<link" not in page
    assert page.count('class="plotly-graph-div"') == (1 if lines else 2)


def test_a_page_without_a_single_result_can_still_be_made(tmp_path: Path) -> None:
    found = table("x", "table1", [(study(), dict.fromkeys(done()))])
    assert [row["missing"] for row in found["rows"]] == [2, 3]
    assert found["paired"] == []
    assert layout(found)[1][0].lines[0][:3] == ["a", "0", "0 of 2"]
    if can_draw():
        write_page(found, "Who", tmp_path / "paper.html")


def test_the_best_row_and_the_papers() -> None:
    asked = Experiment(FedAvg(), "motion", finetune=(0,))
    rows = tuple(Row(n, n, asked, panel="p", picked=n == "a") for n in "abc")
    one = Study("T", "About.", rows, 1, ("accuracy_mean", "score"), best="score", only_best=True)
    stds = {"a": 0.2, "b": 0.1, "c": 0.0}  # a deviation of 0 has no score
    found = table(
        "x", "table1", [(one, {f"{n}-s0": summary(0, {0: 0.5}, std) for n, std in stds.items()})]
    )
    assert [(row["label"], row["best"], row["picked"]) for row in found["rows"]] == [
        ("a", False, True),
        ("b", True, False),
        ("c", False, False),
    ]
    head, [(title, lines)] = layout(found)
    assert title == "motion, blocks split: p"
    assert [line[0] for line in lines] == ["a +", "b *"]
    assert head == ["row", "seeds", "accuracy %", "score", "groups", "MiB counted", "MiB sent"]


def test_figure() -> None:
    run = summary(0, {0: 0.5, 3: 0.75}, std=0.25)
    keys = ("accuracy_mean:3", "accuracy_std:0", "score:3", "mib", "mib_paper")
    assert [figure(run, key) for key in keys] == [0.75, 0.25, 3.0, 3.0, 2.5]
    assert figure(summary(0, {0: 1.0}, std=0.0), "score:0") is None


def test_points_of_a_curve() -> None:
    a, _ = table("x", "figure1", [(study(lines=True), done())])["rows"]
    assert [(p["x"], p["mean"], p["paper"]) for p in points([a], "accuracy_mean")] == [
        (0, 60.0, None),
        (3, 80.0, 80.0),
    ]
    later, sooner = {**a, "x": 5.0, "lengths": [3]}, {**a, "x": 1.0, "lengths": [3]}
    assert [(p["x"], p["mean"]) for p in points([later, sooner], "mib_paper")] == [
        (1.0, 2.5),
        (5.0, 2.5),
    ]
    assert span([a], ["mib_paper"]) == [
        1.975,
        2.525,
    ]  # from the paper's 2 to our 2.5, a twentieth more on either side
    assert [middle(lengths) for lengths in ([0], [0, 3], [0, 3, 25])] == [0, 3, 3]


def test_groups_of_several_seeds() -> None:
    assert groups({"group_sizes": [[28, 1, 1], [20, 9, 1], [28, 1, 1]]}) == "28/1/1, 20/9/1"
    assert groups({"group_sizes": [[i, 1] for i in range(5)]}) == "0/1, 1/1, 2/1 ..."
