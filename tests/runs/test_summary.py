"""How pure groups are, and against what they are held."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import fedgrove as fg
from fedgrove import data, methods
from fedgrove.report.tables import name_old_scores
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import build
from fedgrove.runs.summary import find_true_kinds, measure_purity, purity

QUIET: dict[str, Any] = {"engine": "serial", "progress": False}


def test_golden() -> None:
    """Groups {0, 1, 2}, {3, 4}, {5}: most of the first are a (2 of 3), one of two is b, c is c."""
    groups = {0: 7, 1: 7, 2: 7, 3: 8, 4: 8, 5: 9}
    truth = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    assert purity(groups, truth) == 4 / 6
    # Client 6 has no group, and of client 5 nobody knows what it is.
    assert purity(groups, {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 6: "c"}) == 3 / 5
    assert purity({}, truth) == 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1))
def test_bounds(pairs: list[tuple[int, str]]) -> None:
    groups = {k: group for k, (group, _) in enumerate(pairs)}
    truth = {k: kind for k, (_, kind) in enumerate(pairs)}
    found = purity(groups, truth)
    one_group = purity(dict.fromkeys(groups, 0), truth)
    # Dividing a group never makes it less pure.
    assert one_group <= found <= 1
    assert purity(truth, truth) == 1
    assert purity({k: k for k in truth}, truth) == 1


def test_truth_is_the_task_or_the_kind_of_the_round(tmp_path: Path) -> None:
    mixed = data.load("rooms+tags", clients=4, scenario="switch:2:1-2")
    run = build(methods.make("ifca"), mixed, Memory(tmp_path))
    assert find_true_kinds(run, 1) == {0: "rooms", 1: "rooms", 2: "tags", 3: "tags"}
    assert find_true_kinds(run, 2) == {0: "rooms", 1: "tags", 2: "rooms", 3: "tags"}

    state = SimpleNamespace(groups={0: 0, 1: 0, 2: 1, 3: 1})
    assert measure_purity(run, state, 1) == {"groups": 2, "purity": 1.0}
    assert measure_purity(run, state, 2) == {"groups": 2, "purity": 0.5}
    assert measure_purity(run, object(), 2) == {}
    # motion has users of three kinds, which its dealt clients have not.
    motion = build(methods.make("ifca"), data.load("motion", clients=4), Memory(tmp_path))
    assert find_true_kinds(motion, 0) == {0: "0", 1: "1", 2: "2", 3: "0"}
    dealt = data.load("motion", clients=4, partition="iid")
    assert find_true_kinds(build(methods.make("ifca"), dealt, Memory(tmp_path)), 0) == {}
    digits = build(methods.make("ifca"), data.load("digits", clients=4), Memory(tmp_path))
    assert find_true_kinds(digits, 0) == {}
    crowd = build(methods.make("ifca"), data.load("crowd", clients=20), Memory(tmp_path))
    assert find_true_kinds(crowd, 0) == {}


def test_a_summary_has_the_number_of_examples_that_each_client_trained_on(tmp_path: Path) -> None:
    for validation in (0.0, 0.25):
        federation = data.load("digits", clients=3, validation=validation)
        result = fg.run(
            "fedavg", data=federation, rounds=1, epochs=1, out=tmp_path / str(validation), **QUIET
        )
        sizes = {str(k): len(client.train) for k, client in federation.clients.items()}
        assert result.summary["train_examples_clients"] == sizes
        assert result.summary["train_examples"] == round(sum(sizes.values()) / 3, 8)
        assert f"{sum(sizes.values()) / 3:,.0f} training examples of one client" in (
            tmp_path / str(validation) / "report.html"
        ).read_text().replace("&nbsp;", " ")


def test_a_summary_counts_the_examples_of_the_scored_clients_among_very_many(
    tmp_path: Path,
) -> None:
    words = {"data": "crowd", "clients": 100_000, "cohort": 2, "rounds": 1, "epochs": 1}
    result = fg.run("fedavg", **words, score_on=3, out=tmp_path / "some", **QUIET)
    assert len(result.summary["train_examples_clients"]) == 3
    result = fg.run("fedavg", **words, score_on=0, out=tmp_path / "none", **QUIET)
    assert result.summary["train_examples"] is None


def test_examples_are_those_of_the_last_round(tmp_path: Path) -> None:
    """With a switch, some clients have other data from the middle of the run on."""
    federation = data.load("digits", clients=4, partition="classes:2", scenario="switch:1:1")
    result = fg.run("fedavg", data=federation, rounds=2, epochs=1, out=tmp_path / "run", **QUIET)
    sizes = {str(k): len(federation.client(k, 1).train) for k in federation.ids}
    assert result.summary["train_examples_clients"] == sizes
    assert sizes != {str(k): len(federation.client(k, 0).train) for k in federation.ids}


def test_plain_keys_are_before_fine_tuning_whatever_lengths_are_asked_for() -> None:
    size: dict[str, Any] = {"data": "digits", "clients": 4, "cohort": 2, "rounds": 1, **QUIET}
    plain = fg.run("fedavg", **size)
    tuned = fg.run("fedavg", **size, finetune=(2,))
    assert tuned.summary["finetune"].keys() == {"0", "2"}
    for key in ("mean", "std", "worst", "worst10", "pooled", "clients"):
        assert tuned.summary[f"accuracy_{key}"] == plain.summary[f"accuracy_{key}"]
        assert tuned.summary[f"accuracy_{key}_after_2"] != plain.summary[f"accuracy_{key}"]
    # Fine-tuning itself does not depend on what is scored next to it.
    both = fg.run("fedavg", **size, finetune=(0, 2))
    assert both.summary["accuracy_clients_after_2"] == tuned.summary["accuracy_clients_after_2"]


def test_tasks_have_both_too() -> None:
    size: dict[str, Any] = {"data": "rooms+tags", "clients": 4, "rounds": 1, **QUIET}
    summary = fg.run("local", **size, finetune=(1,)).summary
    assert summary["tasks"] == summary["finetune"]["0"]["tasks"]
    assert summary["tasks_after_1"] == summary["finetune"]["1"]["tasks"]
    assert summary["tasks"] != summary["tasks_after_1"]


def old_summary(**finetune: dict[str, float]) -> dict[str, Any]:
    """As earlier versions wrote it: the scores under plain keys are those after the last length."""
    last = list(finetune.values())[-1]
    return {
        "metric": "accuracy",
        **last,
        "validation_mean": 0.6,
        "accuracy_clients": {"0": 0.9},
        "finetune": {length.removeprefix("n"): scores for length, scores in finetune.items()},
    }


def test_an_old_summary_is_read_with_the_names_of_today() -> None:
    before = {"accuracy_mean": 0.5, "accuracy_worst": 0.25}
    after = {"accuracy_mean": 0.9, "accuracy_worst": 0.75}
    both = name_old_scores(old_summary(n0=before, n3=after))
    assert (both["accuracy_mean"], both["accuracy_mean_after_3"]) == (0.5, 0.9)
    assert (both["accuracy_worst"], both["accuracy_worst_after_3"]) == (0.25, 0.75)
    assert both["accuracy_clients_after_3"] == {"0": 0.9}
    assert "accuracy_clients" not in both
    # What was not measured before fine-tuning is not known, and not what it was after it.
    late = name_old_scores(old_summary(n3=after))
    assert "accuracy_mean" not in late
    assert "validation_mean" not in late
    assert (late["accuracy_mean_after_3"], late["validation_mean_after_3"]) == (0.9, 0.6)
    # Of those of today, and of runs without fine-tuning, nothing is renamed.
    assert name_old_scores(both) == both
    plain = old_summary(n0=before)
    assert name_old_scores(plain) == plain
