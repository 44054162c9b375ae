"""What several seeds say together."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from fedgrove.report.seed_averages import (
    average_over_seeds,
    compare_methods,
    paired_difference,
    print_method_rows,
    print_seed_averages,
)
from fedgrove.report.tables import name_by_length


def summary(
    method: str, seed: int, mean: float, worst: float = 0.25, up: int = 100, **more: Any
) -> dict[str, Any]:
    return {
        "method": method, "seed": seed, "accuracy_mean": mean, "accuracy_worst": worst, "bytes_up": up, "bytes_down": 7
    } | {"data": "digits", "partition": "iid"} | more  # fmt: skip


def three() -> dict[str, dict[str, Any] | None]:
    a = {f"a-mu=1-s{s}": summary("a", s, m) for s, m in enumerate((0.5, 0.6, 0.7))}
    b = {f"b-s{s}": summary("b", s, m, worst=0.1 * s, up=s) for s, m in enumerate((0.6, 0.6, 0.9))}
    return {**a, **b, "b-s3": None}


def test_golden() -> None:
    a, b = average_over_seeds(three())
    assert (a["group"], a["method"], a["seeds"], a["missing"], a["paired"]) == (
        "a-mu=1",
        "a",
        [0, 1, 2],
        0,
        [],
    )
    # mean (.5 + .6 + .7) / 3 = .6; squared deviations .01 + 0 + .01 over n - 1 = 2: .01, whose
    # root is .1
    assert (a["accuracy_mean"], a["accuracy_mean_std"]) == (0.6, 0.1)
    assert (a["accuracy_worst"], a["bytes_up"], a["bytes_down"]) == (0.25, 100, 7)
    assert (b["accuracy_mean"], b["accuracy_worst"], b["bytes_up"], b["missing"]) == (
        0.7,
        0.1,
        1,
        1,
    )
    (pair,) = b["paired"]
    # differences .1, 0, .2: mean .1, sd .1, standard error .1 / sqrt 3 = .0577; t = sqrt 3 with
    # 2 degrees of freedom, whose two-sided p is 1 - t / sqrt(2 + t^2) = 1 - sqrt(3 / 5) = .2254
    assert pair == {
        "against": "a-mu=1",
        "seeds": 3,
        "difference": 0.1,
        "standard_error": round(0.1 / math.sqrt(3), 8),
        "p": round(1 - math.sqrt(0.6), 8),
    }


def test_runs_that_trained_on_another_share_of_the_data_are_not_paired() -> None:
    runs = {seed: summary("a", seed, 0.5, validation=0.1) for seed in (0, 1)}
    others = {seed: summary("b", seed, 0.6, validation=0.0) for seed in (0, 1)}
    assert paired_difference(runs, others) is None
    assert paired_difference(
        runs, {seed: run | {"validation": 0.1} for seed, run in others.items()}
    )


@pytest.mark.parametrize(
    "other",
    [
        {"validation": 0.2},
        {"split": "official"},
        {"rounds": 9},
        {"method": "b"},
        {"data": "motion"},
    ],
)
def test_runs_whose_names_differ_in_the_seed_have_no_mean_if_they_are_of_other_data(
    other: dict[str, Any],
) -> None:
    """A file name is no proof: a mean over runs of two kinds would be of neither."""
    runs = {"a-s0": summary("a", 0, 0.5), "a-s1": summary("a", 1, 0.7) | other}
    groups = average_over_seeds(runs)
    assert [(group["group"], group["seeds"]) for group in groups] == [("a-s0", [0]), ("a-s1", [1])]
    file = io.StringIO()
    print_seed_averages(groups, file)
    for name, value in other.items():
        if name not in ("rounds", "method"):
            assert str(value) in file.getvalue()


def test_fine_tuned_and_other_runs_have_no_common_mean() -> None:
    tuned = summary("a", 1, 0.7, finetune={"0": {}, "3": {}}, accuracy_mean_after_3=0.8)
    assert len(average_over_seeds({"a-s0": summary("a", 0, 0.5), "a-s1": tuned})) == 2


def test_amounts_of_training_data_are_averaged_and_decide_on_pairs() -> None:
    runs = {f"a-s{s}": summary("a", s, 0.5, train_examples=10.0 + s) for s in (0, 1)}
    others = {f"b-s{s}": summary("b", s, 0.5, train_examples=20.0) for s in (0, 1)}
    a, b = average_over_seeds(runs | others)
    # (10 + 11) / 2
    assert (a["train_examples"], b["train_examples"]) == (10.5, 20.0)
    assert b["paired"] == []
    # An older run does not say how many there were.
    older = {f"b-s{s}": summary("b", s, 0.5) for s in (0, 1)}
    assert average_over_seeds(runs | older)[1]["paired"]


def test_one_seed_has_no_deviation_and_no_pair() -> None:
    a, b = average_over_seeds({"a-s0": summary("a", 0, 0.5), "b-s0": summary("b", 0, 0.6)})
    assert a["accuracy_mean_std"] is None
    assert b["paired"] == []


def test_only_shared_seeds_on_the_same_data_are_paired() -> None:
    runs = {s: summary("a", s, 0.5 + 0.01 * s * s) for s in range(4)}
    others = {s: summary("b", s, 0.5) for s in (1, 2, 3, 9)}
    found = paired_difference(runs, others)
    assert found is not None
    assert found["seeds"] == 3
    assert (
        paired_difference(runs, {s: summary("b", s, 0.5, data="motion") for s in range(4)}) is None
    )


@pytest.mark.parametrize("gap", [0.0, 0.125])
def test_equal_differences_have_no_p(gap: float) -> None:
    runs = {s: summary("a", s, 0.3 + 0.1 * s) for s in range(3)}
    found = paired_difference(
        {s: {**r, "accuracy_mean": r["accuracy_mean"] + gap} for s, r in runs.items()}, runs
    )
    assert found == {"seeds": 3, "difference": gap, "standard_error": 0.0, "p": None}


def test_a_group_whose_runs_all_failed_is_left_out() -> None:
    assert average_over_seeds({"a-s0": None}) == []


def mixed(method: str, seed: int, **means: float) -> dict[str, Any]:
    """Of a federation of two tasks, the second with an error."""
    words = {
        "one": {"metric": "accuracy", "more_is_better": True, "share": True},
        "two": {"metric": "rmse", "more_is_better": False, "share": False},
    }
    tasks = {}
    for name, mean in means.items():
        figures = {"mean": mean, "worst": 0.25, "clients": 3, "bytes_up": 60, "bytes_down": 4}
        tasks[name] = {**words[name], **figures}
    whole = {"method": method, "seed": seed, "bytes_up": 100, "bytes_down": 8, "metric": None}
    return {**whole, "data": "one+two", "clients": 6, "tasks": tasks}


def test_each_task_of_a_mixed_federation_is_compared_with_its_own() -> None:
    runs = {}
    for seed in (0, 1):
        runs[f"a-s{seed}"] = mixed("a", seed, one=0.5 + 0.1 * seed, two=2.0)
        runs[f"b-s{seed}"] = mixed("b", seed, one=0.7 + 0.2 * seed, two=1.5)
    groups = average_over_seeds(runs)
    named = [(group["group"], group["task"]) for group in groups]
    assert named == [("a", "one"), ("a", "two"), ("b", "one"), ("b", "two")]
    # (.7 + .9) / 2 of b, whose differences to a are .2 and .3.
    assert groups[2]["accuracy_mean"] == 0.8
    assert groups[2]["bytes_up"] == 60
    (pair,) = groups[2]["paired"]
    assert (pair["against"], pair["difference"]) == ("a", 0.25)
    (pair,) = groups[3]["paired"]
    assert (pair["difference"], groups[3]["rmse_mean"]) == (-0.5, 1.5)
    file = io.StringIO()
    print_seed_averages(groups, file)
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert [
        "b",
        "one",
        "accuracy",
        "%",
        "2",
        "80.00",
        "±",
        "14.14",
        "25.00",
        "-",
        "-",
        "60",
        "B",
        "4",
        "B",
    ] in rows
    assert ["b", "a", "on", "two", "2", "-0.5", "0", "-"] in rows


def test_the_tables_say_it() -> None:
    file = io.StringIO()
    print_seed_averages(average_over_seeds(three()), file)
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert [
        "b",
        "3",
        "of",
        "4",
        "70.00",
        "±",
        "17.32",
        "10.00",
        "-",
        "-",
        "1",
        "B",
        "7",
        "B",
    ] in rows
    assert ["b", "a-mu=1", "3", "+10.00", "5.77", "0.23"] in rows
    file = io.StringIO()
    print_seed_averages(average_over_seeds({"a-s0": summary("a", 0, 0.5)}), file)
    assert "±" not in file.getvalue()
    assert "paired" not in file.getvalue()


def test_scores_before_and_after_fine_tuning_are_averaged_under_their_own_keys() -> None:
    runs = {}
    for seed in (0, 1):
        runs[f"a-s{seed}"] = summary("a", seed, 0.5, finetune=["0", "3"]) | {
            "accuracy_mean_after_3": 0.7,
            "accuracy_worst_after_3": 0.3,
        }
        runs[f"b-s{seed}"] = summary("b", seed, 0.6 + 0.1 * seed, finetune=["0", "3"]) | {
            "accuracy_mean_after_3": 0.6,
            "accuracy_worst_after_3": 0.3,
        }
    a, b = average_over_seeds(runs)
    assert (a["finetune"], a["accuracy_mean"], a["accuracy_mean_after_3"]) == ([0, 3], 0.5, 0.7)
    # Before fine-tuning b is .1 and .2 ahead, after it .1 behind on both.
    assert b["paired"][0]["difference"] == pytest.approx(0.15)
    assert b["paired_after_3"][0]["difference"] == pytest.approx(-0.1)
    file = io.StringIO()
    print_seed_averages([a, b], file)
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert [row[4] for row in rows if row[:2] == ["a", "2"]] == ["0.00", "0.00"]
    assert ["a", "2", "50.00", "±", "0.00", "25.00", "0"] in [row[:7] for row in rows]
    assert ["a", "2", "70.00", "±", "0.00", "30.00", "3"] in [row[:7] for row in rows]
    assert ["b", "a", "3", "2", "-10.00", "0.00", "-"] in rows


def test_a_seed_of_an_older_version_is_missing_before_fine_tuning_only() -> None:
    old = summary("a", 0, 0.0, finetune=["3"], accuracy_mean_after_3=0.7)
    del old["accuracy_mean"]
    new = summary("a", 1, 0.5, finetune=["0", "3"], accuracy_mean_after_3=0.9)
    (group,) = average_over_seeds({"a-s0": old, "a-s1": new})
    assert (group["seeds"], group["accuracy_mean"]) == ([1], 0.5)
    assert (group["seeds_after_3"], group["accuracy_mean_after_3"]) == ([0, 1], 0.8)


def tuned_summary(accuracy: float, worst: float, up: int, seed: int = 0) -> dict[str, Any]:
    scores = {"accuracy_mean": accuracy, "accuracy_worst": worst}
    tuned = {"accuracy_mean": 1.0, "accuracy_worst": 1.0}
    return {
        "method": "a",
        "seed": seed,
        **name_by_length({"0": scores, "3": tuned}),
        "finetune": {"0": scores, "3": tuned},
        "density": 0.3,
        "bytes_up": up,
        "bytes_down": 2 * up,
    }


def test_lines_by_hand() -> None:
    rows = compare_methods({"a": [tuned_summary(0.5, 0.2, 100), tuned_summary(0.7, 0.4, 300, 1)]})
    # accuracies .5 and .7: mean .6, sample deviation sqrt(2 * .1^2 / 1) = .14142; worst .2 and .4;
    # bytes 300 and 900: mean 600
    assert [(row["group"], row["finetune_epochs"]) for row in rows] == [("a", 0), ("a", 3)]
    first = rows[0]
    assert first["accuracy_mean"] == pytest.approx(0.6)
    assert first["accuracy_mean_std"] == pytest.approx(0.14142136)
    assert first["accuracy_worst"] == pytest.approx(0.3)
    assert first["density"] == pytest.approx(0.3)
    assert first["bytes_up"] + first["bytes_down"] == 600


def test_what_an_engineer_asks_first_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = tuned_summary(0.5, 0.2, 6000) | {"rounds": 2, "cohort": 3}
    first |= {"accuracy_worst10": 0.25, "finetune": {"0": {}}}
    (line,) = compare_methods({"a": [first]}, {"a": 218_100})
    # 6,000 up and 12,000 down, of 2 rounds of 3 devices: 3,000 bytes each.
    assert (line["accuracy_worst10"], line["model_bytes"]) == (0.25, 218_100)
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    print_method_rows([line], out)
    rows = out.getvalue().splitlines()
    assert rows[2].split()[:6] == ["a", "0", "50.0", "25.0", "3.0", "218.1"]
    assert max(len(row) for row in rows) <= 80


def test_one_seed_has_no_deviation_and_does_not_show_one() -> None:
    lines = compare_methods({"a": [tuned_summary(0.5, 0.2, 100)]})
    assert lines[0]["accuracy_mean_std"] is None
    out = io.StringIO()
    print_method_rows(lines, out)
    assert "±" not in out.getvalue()
    assert "50.0" in out.getvalue()
