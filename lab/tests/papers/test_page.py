"""The page of a paper: it stands alone, and its points and axes follow from the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.tests.papers.made import done, study

from fedgrove_lab.papers.compare import compare_part
from fedgrove_lab.papers.page import _lines, middle, points, write_page
from fedgrove_lab.papers.study import Matrix


@pytest.mark.parametrize("lines", [False, True])
def test_the_page_stands_alone(tmp_path: Path, lines: bool) -> None:
    comparison = compare_part("x", "table1", [(study(lines=lines), done())], quick=True)
    write_page(comparison, "Who & Whom, 2026", tmp_path / "paper.html")
    page = (tmp_path / "paper.html").read_text()
    # Once in the browser's tab and once on the page.
    assert page.count("QUICK: a quick run, not a measurement") == 2
    assert "b &amp; co" in page
    assert "Who &amp; Whom, 2026" in page
    assert "<script src=" not in page
    assert "<link" not in page
    assert page.count("<svg") == page.count("<figure>") > 0
    # A paper's values are hollow diamonds.
    assert 'class="hollow"' in page


def test_a_page_without_a_single_result_can_still_be_made(tmp_path: Path) -> None:
    comparison = compare_part("x", "table1", [(study(), dict.fromkeys(done()))])
    write_page(comparison, "Who", tmp_path / "paper.html")
    page = (tmp_path / "paper.html").read_text()
    assert "<td>0 of 2</td>" in page
    assert "<svg" not in page


def test_matrices_are_heat_maps(tmp_path: Path) -> None:
    """Those of a row's first seed, which stand on the page and with a note each."""
    likeness = Matrix("cosine", ("0 x", "1 y"), ((1.0, 0.25), (0.25, 1.0)), "none alike")
    summaries = done()
    for name in ("a-s0", "a-s1"):
        summary = summaries[name]
        assert summary is not None
        summaries[name] = {**summary, "matrices": [likeness, likeness]}
    comparison = compare_part("x", "figure3", [(study(lines=True), summaries)])
    assert [matrix["values"][0] for matrix in comparison["matrices"]] == [[1.0, 0.25]] * 2
    assert ", cosine: none alike." in comparison["notes"]
    write_page(comparison, "Who", tmp_path / "paper.html")
    page = (tmp_path / "paper.html").read_text()
    assert page.count('class="heat') == 2
    assert 'data-t="0 x, 1 y: 0.25"' in page


def test_points_of_a_curve() -> None:
    a, _ = compare_part("x", "figure1", [(study(lines=True), done())])["rows"]
    assert [(p["x"], p["mean"], p["paper"]) for p in points([a], "accuracy_mean")] == [
        (0, 60.0, None),
        (3, 80.0, 80.0),
    ]
    later = {**a, "x": 5.0, "lengths": [3]}
    sooner = {**a, "x": 1.0, "lengths": [3]}
    assert [(p["x"], p["mean"]) for p in points([later, sooner], "mib_paper")] == [
        (1.0, 2.5),
        (5.0, 2.5),
    ]
    assert [middle(lengths) for lengths in ([0], [0, 3], [0, 3, 25])] == [0, 3, 3]


def test_a_curve_scored_at_several_lengths_has_a_line_for_each() -> None:
    a, _ = compare_part("x", "figure7", [(study(lines=True), done())])["rows"]
    along = [{**a, "series": "a", "x": x, "panel": "rounds"} for x in (10.0, 30.0)]
    (drawing,) = _lines(along, ("accuracy_mean",))
    assert [entry.name for entry in drawing.legend] == ["a, fine-tuned 0", "a, fine-tuned 3"]
    for tip in ("a, fine-tuned 0: 60 accuracy", "a, fine-tuned 3: 80 accuracy"):
        assert f'data-t="{tip}' in drawing.svg


def test_points_of_a_curve_over_the_rounds() -> None:
    a, _ = compare_part("x", "figure2", [(study(lines=True), done())])["rows"]
    curve = [{"round": 1, "mean": 0.5, "std": None}, {"round": 2, "mean": 0.75, "std": 0.25}]
    row = {**a, "curves": {"accuracy_mean": curve}, "paper": {"accuracy_mean@2": 0.8}}
    assert points([row], "accuracy_mean") == [
        {"x": 1, "mean": 50.0, "std": None, "paper": None},
        {"x": 2, "mean": 75.0, "std": 25.0, "paper": 80.0},
    ]


def test_accuracy_is_laid_against_what_the_study_measures(tmp_path: Path) -> None:
    wanted = study(measures=("accuracy_mean",), counted=("mib_paper",))
    write_page(compare_part("x", "table1", [(wanted, done())]), "Who", tmp_path / "paper.html")
    page = (tmp_path / "paper.html").read_text()
    assert "accuracy against bytes, fine-tuned 3" in page
    assert "fairness" not in page
