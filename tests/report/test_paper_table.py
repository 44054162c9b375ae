"""Tables for a paper: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from fedgrove.errors import InputError
from fedgrove.report.paper_table import (
    csv_table,
    latex_table,
    markdown_table,
    title_of_entry,
    write_paper_table,
)
from fedgrove.report.seed_averages import average_over_seeds

GROUPS = [("local", 0.5, 100), ("fedavg", 0.7, 2**20), ("lg-fedavg-mu=1", 0.6, 2**21)]


def averages(**more: Any) -> list[dict[str, Any]]:
    """Two seeds of three methods; the second is .1 better."""
    runs = {}
    for name, score, sent in GROUPS:
        for seed in (0, 1):
            runs[f"{name}-s{seed}"] = {
                "method": name.removesuffix("-mu=1"),
                "seed": seed,
                "metric": "accuracy",
                "accuracy_mean": score + 0.1 * seed,
                "accuracy_worst": 0.35,
                "bytes_up": sent,
                "bytes_down": 0,
                "data": "made",
                **more,
            }
    return average_over_seeds(runs)


TUNED = {
    "finetune": {"0": {}, "3": {}},
    "accuracy_mean_after_3": 0.9,
    "accuracy_worst_after_3": 0.8,
}


def test_both_scores_are_labelled_in_every_format(tmp_path: Path) -> None:
    groups = averages(**TUNED)
    for name in ("t.md", "t.tex", "t.csv"):
        write_paper_table(groups, tmp_path / name)
    assert (tmp_path / "t.md").read_text().splitlines()[0] == (
        "| Method | Accuracy (%) before fine-tuning | Accuracy (%) after 3 epochs | Worst client "
        "(%) before fine-tuning | Worst client (%) after 3 epochs | Up (MiB) | Down (MiB) | Seeds |"
    )
    latex = (tmp_path / "t.tex").read_text().splitlines()
    assert "& \\multicolumn{2}{c}{Accuracy (\\%)}" in latex
    assert "\\cmidrule(lr){2-3}" in latex
    assert (
        " & before fine-tuning & after 3 epochs & before fine-tuning & after 3 epochs &  &  & "
        in ("\n".join(latex))
    )
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert [(row["entry"], row["finetune_epochs"], row["mean"]) for row in rows[:2]] == [
        ("local", "0", "0.55"),
        ("local", "3", "0.9"),
    ]


def test_latex_by_hand() -> None:
    """Means .55, .75 and .65, deviation .0707; 100 B, 1 MiB and 2 MiB with the same digits."""
    latex = latex_table(averages())
    assert latex.startswith("% Needs \\usepackage{booktabs}.")
    assert latex.splitlines()[-6:-2] == [
        "\\midrule",
        "Local & $55.0 \\pm 7.1$ & 35.0 & 0.0001 & 0.0 & 2 \\\\",
        "FedAvg & $\\mathbf{75.0} \\pm 7.1$ & 35.0 & 1.0000 & 0.0 & 2 \\\\",
        "LG-FedAvg, mu=1 & $65.0 \\pm 7.1$ & 35.0 & 2.0000 & 0.0 & 2 \\\\",
    ]


def test_the_lowest_error_is_bold_and_errors_have_equal_digits() -> None:
    runs = {}
    for method, score in (("fedavg", 12.25), ("local", 8.5)):
        runs[f"{method}-s0"] = {
            "method": method,
            "seed": 0,
            "metric": "mae",
            "more_is_better": False,
            "share": False,
            "mae_mean": score,
            "mae_worst": 20.0,
            "bytes_up": 0,
            "bytes_down": 0,
        }
    table = markdown_table(average_over_seeds(runs)).splitlines()
    assert table[0].startswith("| Method | Mae before fine-tuning |")
    assert table[2].startswith("| FedAvg | 12.25 | 20.00 |")
    assert table[3].startswith("| Local | **8.50** | 20.00 |")


def test_means_that_look_equal_are_both_best_and_other_data_do_not_count() -> None:
    groups = averages()
    groups[2]["accuracy_mean"] = 0.7501
    groups[0]["data"] = "digits"
    table = markdown_table(groups)
    assert table.count("**75.0 ± 7.1**") == 2
    assert "| 55.0 ± 7.1 |" in table


def test_an_entry_that_the_user_named_keeps_its_name() -> None:
    assert title_of_entry({"group": "fedavg-slow", "method": "fedavg"}) == "fedavg-slow"
    assert title_of_entry({"group": "ca-afp", "method": "ca-afp", "task": "a"}) == "CA-AFP on a"


def test_names_show_and_do_nothing_else() -> None:
    run = {"method": "a", "seed": 0, "accuracy_mean": 0.5, "accuracy_worst": 0.2, "bytes_up": 1}
    run |= {"bytes_down": 1}
    groups = average_over_seeds({"<img src=x onerror=f()>\x1b[31m\na|b_c-s0": run})
    row = markdown_table(groups).splitlines()[2]
    assert row.startswith("| \\<img src=x onerror=f()>?\\[31m a\\|b")
    assert "<img src=x onerror=f()>?[31m a|b\\_c" in latex_table(groups)


def test_a_pooled_score_is_in_the_csv() -> None:
    groups = averages()
    groups[0]["accuracy_pooled"] = 0.8125
    first, second, _ = csv.DictReader(io.StringIO(csv_table(groups)))
    assert (first["pooled"], second["pooled"]) == ("0.8125", "")
    assert (first["entry"], first["mean"], first["bytes_up"]) == ("local", "0.55", "100")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends with \.md, \.tex or \.csv"):
        write_paper_table(averages(), tmp_path / "t.xlsx")
