"""The page of several runs, and its table for a paper."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.record import line, summary

from fedgrove.errors import InputError
from fedgrove.report.comparison_report import ComparedRun, find_front, make_comparison_report
from fedgrove.report.seed_averages import (
    average_over_seeds,
    csv_table,
    latex_table,
    markdown_table,
    write_paper_table,
)


def run(name: str, seed: int, score: float, sent: int, **more: object) -> ComparedRun:
    method = name.split("-")[0]
    known = summary(
        12, 4, method=method, seed=seed, accuracy_mean=score, bytes_up=sent, bytes_down=0, **more
    )
    return ComparedRun(f"runs/sweep/{name}-s{seed}", known, [line(n, 4) for n in range(1, 5)])


RUNS = [
    run("local", 0, 0.5, 100),
    run("local", 1, 0.55, 100),
    run("fedavg", 0, 0.7, 2**20),
    run("fedavg", 1, 0.8, 2**20),
    run("stc_<b>", 0, 0.6, 2**21),
    run("stc_<b>", 1, 0.65, 2**21),
]


def test_who_is_best_and_what_is_worth_choosing() -> None:
    page = make_comparison_report(RUNS).html().replace("&nbsp;", " ")
    # Mean of 0.7 and 0.8; it is fedavg itself that is best, and stc comes next.
    assert (
        "fedavg has the best score: 75.0 % accuracy on average before fine-tuning; stc_&lt;b&gt; "
        "gives 62.5 % and local gives 52.5 %."
    ) in page
    # 10 and 15 points ahead of stc: 12.5 with a standard error of 2.5, t = 5 with one degree of
    # freedom: p = 1 - 2 / pi * atan(5) = 0.126.
    assert "Its lead over stc_&lt;b&gt; may be chance (paired by seed, p 0.13)." in page
    # 60 and 59.99 points ahead.
    surely = [*RUNS[2:4], run("stc", 0, 0.1, 9), run("stc", 1, 0.2001, 9)]
    assert "may be chance" not in make_comparison_report(surely).html()
    assert "may be chance" in make_comparison_report(RUNS[::2]).html()
    for words in ("Accuracy against bytes", "Accuracy by round", "Paired by seed", "For a paper"):
        assert words in page
    assert "stc_&lt;b&gt;-s0" in page
    assert "<b>-s0" not in page
    assert "\\begin{tabular}" in page
    assert page.count("<figure>") >= 4


def test_unfinished_and_failed_runs_are_listed() -> None:
    failed = ComparedRun("runs/sweep/stc-s0", None, [], "failed: no <memory>")
    page = make_comparison_report([*RUNS[:2], failed]).html()
    assert "1 of 3 runs are not finished" in page
    assert "failed: no &lt;memory&gt;" in page
    nothing = make_comparison_report([failed]).html()
    assert "No run is finished" in nothing


def test_data_sets_are_not_mixed() -> None:
    page = make_comparison_report([RUNS[0], run("fedavg", 0, 0.9, 10, data="digits")]).html()
    assert "<h2>made, accuracy</h2>" in page
    assert "<h2>digits, accuracy</h2>" in page
    assert "has the best score" not in page


def test_runs_of_other_metrics_or_splits_are_told_apart() -> None:
    """Each run is an entry of its own, in its own chart, with what differs in columns."""
    first = run("fedavg", 0, 0.7, 10)
    other = run("fedavg", 1, 0.6, 10)
    assert first.summary is not None
    assert other.summary is not None
    scores = {
        name.replace("accuracy", "macro_f1"): value
        for name, value in other.summary.items()
        if name.startswith("accuracy")
    }
    changed = other.summary | scores | {"metric": "macro_f1", "split": "official"}
    changed["finetune"] = {"0": scores}
    changed["train_examples"] = 9.0
    for name in list(changed):
        if name.startswith("accuracy"):
            del changed[name]
    runs = [
        replace(first, summary={**first.summary, "split": "random", "train_examples": 7.0}),
        replace(other, summary=changed),
    ]
    page = make_comparison_report(runs).html()
    assert "has the best score" not in page
    assert "<h2>made, split random, accuracy</h2>" in page
    assert "<h2>made, split official, macro_f1</h2>" in page
    for head in ("split", "train examples", "metric"):
        assert f">{head}</th>" in page
    groups = average_over_seeds({each.run.rsplit("/")[-1]: each.summary for each in runs})
    assert [group["group"] for group in groups] == ["fedavg-s0", "fedavg-s1"]
    table = markdown_table(groups)
    assert table.startswith("| entry | split | train examples | metric | score |")
    assert "| fedavg-s0 | random | 7 | accuracy % | 70.0 |" in table
    assert "| fedavg-s1 | official | 9 | macro_f1 % | 60.0 |" in table
    assert "& macro\\_f1 \\% & 60.0 &" in latex_table(groups)
    rows = list(csv.DictReader(io.StringIO(csv_table(groups))))
    assert [(row["split"], row["train_examples"]) for row in rows] == [
        ("random", "7.0"),
        ("official", "9.0"),
    ]


def test_the_score_of_a_table_for_a_paper_has_the_name_of_its_metric() -> None:
    groups = average_over_seeds({each.run.rsplit("/")[-1]: each.summary for each in RUNS})
    assert markdown_table(groups).startswith("| entry | accuracy % | fine-tuned epochs |")
    assert "entry & accuracy \\% & fine-tuned epochs &" in latex_table(groups)


POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


@given(POINTS, st.booleans())
def test_what_nothing_beats(points: list[tuple[int, int]], more: bool) -> None:
    found = find_front(points, more)
    sign = 1 if more else -1

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a[0] <= b[0] and sign * a[1] >= sign * b[1] and a != b

    best = {point for point in points if not any(beats(other, point) for other in points)}
    assert {points[i] for i in found} == best
    assert len(found) == len(best)


def test_tables_for_a_paper(tmp_path: Path) -> None:
    groups = average_over_seeds({each.run.rsplit("/")[-1]: each.summary for each in RUNS})
    for name in ("t.md", "t.tex", "t.csv"):
        write_paper_table(groups, tmp_path / name)
    # 0.7 and 0.8: 75 % with a deviation of 0.0707.
    assert "| fedavg | 75.0 ± 7.1 | 0 | 35.0 | 1.0 | 0.0 | 2 |" in (tmp_path / "t.md").read_text()
    latex = (tmp_path / "t.tex").read_text()
    assert "stc\\_<b> & $62.5 \\pm 3.5$ & 0 & 35.0 & 2.0 & 0.0 & 2 \\\\" in latex
    (first, *_) = csv.DictReader(io.StringIO(csv_table(groups)))
    assert (first["entry"], first["mean"], first["bytes_up"]) == ("local", "0.525", "100")
    # A run that has the pooled score brings a column for it.
    groups[0]["accuracy_pooled"] = 0.8125
    assert "| worst client | pooled | MiB up |" in markdown_table(groups)
    assert "| 35.0 | 81.2 | " in markdown_table(groups)
    assert "| 35.0 | - | " in markdown_table(groups)
    (first, *_) = csv.DictReader(io.StringIO(csv_table(groups)))
    assert first["pooled"] == "0.8125"
    with pytest.raises(InputError, match=r"ends with \.md, \.tex or \.csv"):
        write_paper_table(groups, tmp_path / "t.xlsx")
