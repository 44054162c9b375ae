import io
from typing import Any

from fedgrove.report.tables import name_by_length, print_summaries


def summary(mean: float, **more: Any) -> dict[str, Any]:
    scores = {
        "accuracy_mean": mean,
        "accuracy_std": 0.1,
        "accuracy_worst": 0.25,
        "accuracy_worst10": 0.5,
    }
    base = {
        "method": "fedavg",
        "data": "digits",
        "seed": 0,
        "rounds": 2,
        **scores,
        "finetune": {"0": scores},
    }
    size = {
        "density": 0.3,
        "params_mean": 8970.0,
        "bytes_up": 3 << 20,
        "bytes_down": 2048,
        "bytes_paper": 1 << 21,
    }
    return base | size | {"seconds": 1.25} | more


def printed(*summaries: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    print_summaries(list(summaries), out)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_one_run_is_named_above_its_figures() -> None:
    lines = printed(summary(0.9412, cohort=4))
    assert lines[0] == "method fedavg, data digits, seed 0, rounds 2"
    # 3 MiB are 3,145,728 bytes, of 2 rounds of 4 devices: 393.2 kB each; 2,048 / 8 = 256 bytes.
    assert (
        " ".join(lines[3].split())
        == "94.12 ± 10.00 25.00 50.00 0.300 8,970 393.2 0.3 3.0 MiB 2.0 KiB 2.0 1.2"
    )
    assert lines[4].startswith("kB: per device and round")
    assert lines[5] == "accuracy: before fine-tuning"
    assert len(lines) == 6


def test_the_pooled_score_has_a_column_if_a_run_has_one() -> None:
    """A run of an older version has none: a dash next to others, no column alone."""
    new = summary(0.9, run="runs/a", method="local")
    new["accuracy_pooled"] = 0.875
    old = summary(0.8, run="runs/b")
    lines = [" ".join(line.split()) for line in printed(new, old)]
    assert lines[1].startswith("accuracy worst worst pooled")
    assert lines[3].startswith("a local 90.00 ± 10.00 * 25.00 50.00 87.50 0.300")
    assert lines[4].startswith("b fedavg 80.00 ± 10.00 25.00 50.00 - 0.300")
    assert not any("pooled" in line for line in printed(old))


def test_runs_are_told_apart_by_what_differs_and_the_best_on_the_same_data_is_marked() -> None:
    lines = printed(
        summary(0.9, run="runs/a", split="blocks"),
        summary(0.8, run="runs/b", method="local", split="blocks"),
        summary(0.3, run="runs/c", data="motion"),
    )
    assert lines[0] == "runs in runs, seed 0, rounds 2"
    assert lines[2].split()[:4] == ["run", "method", "data", "split"]
    assert lines[3].split()[:4] == ["a", "fedavg", "digits", "blocks"]
    # The last is alone on its data: to be the best of one says nothing.
    assert ["*" in line for line in lines[3:6]] == [True, False, False]
    assert (
        "* the best mean accuracy of the runs on the same data for the same number of rounds"
        in lines
    )


def test_nothing_is_marked_across_unlike_rounds() -> None:
    lines = printed(
        summary(0.9, run="a", rounds=9), summary(0.8, run="b"), summary(0.7, run="c", rounds=4)
    )
    assert not any("*" in line for line in lines)
    assert "no run is marked as the best: they trained for 2 and 4 and 9 rounds" in lines
    # Two of as many rounds are compared with each other.
    lines = printed(summary(0.9, run="a", rounds=9), summary(0.8, run="b"), summary(0.7, run="c"))
    assert [line.split()[0] for line in lines if "*" in line[1:]] == ["b"]


def test_runs_that_trained_on_different_amounts_say_so_and_are_not_compared() -> None:
    lines = printed(
        summary(0.9, run="a", validation=0.0, train_examples=71.45),
        summary(0.8, run="b", validation=0.2, train_examples=57.1),
    )
    assert lines[1].split()[0] == "train"
    assert lines[2].split()[:3] == ["run", "validation", "examples"]
    assert lines[3].split()[:3] == ["a", "0.0", "71"]
    assert lines[4].split()[:3] == ["b", "0.2", "57"]
    assert not any("*" in line for line in lines)
    assert "train examples: of one client, mean" in lines
    assert "no run is marked as the best: they held out 0.0 and 0.2 for validation" in lines
    # Equal amounts need no column; a share of all runs is above the table.
    lines = printed(*(summary(0.9, run=run, validation=0.2, train_examples=57.1) for run in "ab"))
    assert "validation 0.2" in lines[0]
    assert not any("examples" in line for line in lines)
    # Without a hold-out, which is usual, nothing is said.
    lines = printed(*(summary(0.9, run=run, validation=0.0) for run in "ab"))
    assert not any("validation" in line for line in lines)


def test_seeds_round_the_amounts() -> None:
    """70.6 and 71.4 are two draws of the same division: no column."""
    both = [summary(0.9, seed=seed, train_examples=71.4 - 0.8 * seed) for seed in (0, 1)]
    assert not any("examples" in line for line in printed(*both))


def test_other_files_of_a_data_set_give_other_amounts() -> None:
    lines = printed(summary(0.9, run="a", train_examples=71.0), summary(0.8, run="b"))
    assert not any("examples" in line for line in lines)
    both = summary(0.9, run="a", train_examples=71.0), summary(0.8, run="b", train_examples=9.0)
    assert [line.split()[1] for line in printed(*both)[3:5]] == ["71", "9"]


def test_tasks_have_their_clients_and_bytes() -> None:
    form = {"metric": "accuracy", "more_is_better": True, "share": True}
    scores = {"std": 0.0, "worst": 0.5, "worst10": 0.5, "bytes_up": 1 << 20, "bytes_down": 12}
    tasks = {
        "one": {**form, **scores, "mean": 0.6, "clients": 3},
        "two": {**form, **scores, "mean": 0.7, "clients": 2},
    }
    alone = summary(0.0, metric=None, tasks=tasks, finetune={"0": {"tasks": tasks}})
    lines = printed(alone)
    assert lines[3].split()[:5] == ["one", "3", "60.00", "±", "0.00"]
    assert "1.0 MiB" in lines[3]
    assert "12 B" in lines[3]
    # The tasks of one run are not compared with each other; those of two are.
    assert not any("*" in line for line in lines)
    lines = printed(alone, alone | {"method": "local", "tasks": {"two": tasks["one"]}})
    assert ["*" in line for line in lines[3:6]] == [False, True, False]


def test_each_fine_tuning_length_has_a_row() -> None:
    low = {
        "accuracy_mean": 0.5,
        "accuracy_std": 0.0,
        "accuracy_worst": 0.5,
        "accuracy_worst10": 0.5,
    }
    high = {**low, "accuracy_mean": 0.75}
    known = name_by_length({"0": low, "25": high})
    one = summary(0.75, **known, finetune={"0": low, "25": high})
    lines = printed(one, one | {"method": "local", "accuracy_mean_after_25": 0.25})
    assert [line.split()[1] for line in lines[3:7]] == ["0", "25", "0", "25"]
    # Before fine-tuning and after it, each with its own best.
    assert "50.00 ± 0.00 *" in lines[3]
    assert "75.00 ± 0.00 *" in lines[4]
    assert "25.00 ± 0.00 " in lines[6]
    assert "* the best mean accuracy, before fine-tuning and after it" in lines


def test_one_length_that_is_not_zero_is_said() -> None:
    lines = printed(summary(0.5, finetune={"3": {}}, accuracy_mean_after_3=0.75))
    assert "75.00 ±" in lines[3]
    assert lines[1].split()[0] == "tuned"
    assert lines[3].split()[0] == "3"


def test_unfinished_runs_and_notes_are_shown() -> None:
    unfinished = {"run": "b", "method": "local", "data": "digits", "rounds": 9, "rounds_done": 4}
    lines = printed(summary(0.5, run="a", notes=["a third of the set"]), unfinished)
    assert "unfinished, 4 of 9 rounds" in lines[4]
    assert lines[-1] == "digits: a third of the set"
