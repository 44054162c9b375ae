"""The page of several runs, and its table for a paper."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.report.record import line, summary

from fedgrove.report.comparison_report import (
    ComparedRun,
    describe_setup,
    find_front,
    make_comparison_report,
)
from fedgrove.report.paper_table import csv_table, latex_table, markdown_table
from fedgrove.report.seed_averages import average_over_seeds


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
        "Before fine-tuning, fedavg has the best score: 75.0 % accuracy on average; stc_&lt;b&gt; "
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
    assert table.startswith(
        "| Method | Split | Train examples | Metric | Score before fine-tuning |"
    )
    assert "| fedavg-s0 | random | 7 | accuracy % | 70.0 |" in table
    assert "| fedavg-s1 | official | 9 | macro_f1 % | 60.0 |" in table
    assert "& macro\\_f1 \\% & 60.0 &" in latex_table(groups)
    rows = list(csv.DictReader(io.StringIO(csv_table(groups))))
    assert [(row["split"], row["train_examples"]) for row in rows] == [
        ("random", "7.0"),
        ("official", "9.0"),
    ]


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


def tuned(name: str, seed: int, before: float, after: float) -> ComparedRun:
    more = {"finetune": {"0": {}, "3": {}}, "accuracy_mean_after_3": after}
    return run(name, seed, before, 100, **more, accuracy_worst_after_3=0.5)


def test_the_page_says_which_scores_are_after_fine_tuning() -> None:
    runs = [tuned("fedavg", 0, 0.5, 0.9), tuned("ditto", 0, 0.7, 0.8)]
    page = make_comparison_report(runs).html().replace("&nbsp;", " ")
    assert (
        "Before fine-tuning, ditto has the best score: 70.0 % accuracy on average; fedavg gives "
        "50.0 %. ditto sends 100 % of fedavg's bytes. After 3 epochs of fine-tuning, fedavg has "
        "the best score: 90.0 % accuracy on average; ditto gives 80.0 %."
    ) in page.replace("&#39;", "'")
    for when in ("before fine-tuning", "after 3 epochs of fine-tuning"):
        assert f"<th>accuracy % {when}</th>" in page
        assert f"Accuracy against bytes, {when}" in page


CONFIG = """
[run]
net = "mlp"
rounds = 4
[method]
type = "FedAvg"
[method.local]
epochs = 5
batch = 16
[method.local.optimiser]
type = "Adam"
lr = 0.001
"""


def test_the_page_states_how_the_runs_were_made() -> None:
    first = replace(RUNS[2], config=CONFIG)
    other = replace(RUNS[0], config=CONFIG.replace("0.001", "0.1"))
    setup = describe_setup([first, other])
    assert setup["partition"] == ["natural"]
    assert (setup["rounds"], setup["cohort"], setup["net"]) == (["4"], ["10"], ["mlp"])
    assert setup["optimiser"] == ["Adam, learning rate 0.001", "Adam, learning rate 0.1"]
    page = make_comparison_report([first, other]).html()
    for words in ("partition natural,", "rounds 4,", "cohort 10,", "net mlp,", "local epochs 5,"):
        assert words in page
    # What runs differ in has a column.
    assert "<th>optimiser</th>" in page
    assert "<td>Adam, learning rate 0.1</td>" in page


def test_a_time_that_was_not_measured_is_not_shown() -> None:
    shared = [run("fedavg", seed, 0.5, 100, seconds_shared_by=2, seconds=60.0) for seed in (0, 1)]
    page = make_comparison_report(shared).html().replace("&nbsp;", " ")
    assert "computed in</th>" not in page
    assert "2 runs were trained together, so the time of one of them was not measured" in page
    assert "together they were computed in 2 min." in page
    assert "computed in</th>" in make_comparison_report(RUNS).html()


def test_more_than_six_entries_are_grouped_by_method() -> None:
    """Colours of classes c0 to c5, and grey (c8)."""
    few = [run(f"fedprox-mu={i}", 0, 0.5 + i / 100, 100) for i in range(6)]
    assert colours_of(few) == {0, 1, 2, 3, 4, 5}
    many = [*few, run("fedprox-mu=6", 0, 0.1, 100), run("fedavg", 0, 0.2, 100)]
    assert colours_of(many) == {0, 1}
    methods = [run(name, 0, 0.5 + i / 100, 100) for i, name in enumerate("abcdefgh")]
    assert colours_of(methods) == {0, 1, 2, 3, 4, 8}
    page = make_comparison_report(methods).html()
    # The best five have their names next to their lines: h, g, f, e and d.
    assert [f">{name}</text>" in page for name in "hd"] == [True, True]
    assert page.count('class="tag"') == 3 * 5


def colours_of(runs: list[ComparedRun]) -> set[int]:
    page = make_comparison_report(runs).html()
    figures = page.split("<figure>")
    (curve,) = [each for each in figures if "Accuracy by round" in each]
    return {int(number) for number in re.findall(r'<g class="s c(\d+)"', curve)}


def test_curves_have_a_band_over_seeds() -> None:
    """Scores of .5 and .7 in each round: mean .6, deviation .1414."""
    runs = []
    for seed, score in enumerate((0.5, 0.7)):
        lines = [{**line(n, 2), "accuracy_mean": score} for n in (1, 2)]
        runs.append(replace(run("fedavg", seed, score, 100), lines=lines))
    assert 'class="band"' in make_comparison_report(runs).html()
    assert 'class="band"' not in make_comparison_report(runs[:1]).html()
