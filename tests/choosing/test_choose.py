"""Trials that are really trained, on tiny data, and what is made of them."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.export.made import with_onnx

import fedgrove as fg
from fedgrove.choosing import choose as choosing
from fedgrove.choosing.choice_report import (
    average_validation,
    command,
    list_notes,
    sentence,
    use_validation_scores,
)
from fedgrove.choosing.choose import Choice
from fedgrove.choosing.decision import Trial, select_promising
from fedgrove.cli import main
from fedgrove.errors import EngineError, InputError
from fedgrove.report.tables import Scores
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.scoring import spread

TINY: dict[str, Any] = {
    "data": "digits",
    "clients": 3,
    "cohort": 1,
    "rounds": 4,
    "trial": 2,
    "epochs": 1,
    "batch": 64,
    "finetune": (0, 1),
    "methods": ["local", "fedavg", "stc", "ditto", "grove"],
    "seeds": 2,
    "engine": "serial",
    "progress": False,
}


@pytest.fixture(scope="session")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Choice:
    out = tmp_path_factory.mktemp("chosen") / "choice"
    return fg.choose(**TINY, budget="60kB", hindsight=True, out=out)


def test_the_pick_has_the_best_validation_score_of_the_longer_trial(chosen: Choice) -> None:
    assert chosen.path is not None
    rows = {row["method"]: row for row in chosen.rows}
    last = [row for row in chosen.rows if row["went_on"]]
    assert chosen.pick == max(last, key=lambda row: row["score"])["method"]
    # Worked out once more from the run folders: the mean over clients, then over seeds.
    for name in [row["method"] for row in last]:
        by_length: dict[str, list[float]] = {}
        for seed in (0, 1):
            sweep = "first" if seed == 0 else "second"
            summary = RunFolder(chosen.path / sweep / f"{name}-s{seed}").summary
            assert summary is not None
            for length, clients in summary["validation_clients"].items():
                by_length.setdefault(length, []).append(sum(clients.values()) / len(clients))
            # What is used is not what tables of runs report.
            assert summary["validation"] == 0.2
        best = max(by_length, key=lambda length: sum(by_length[length]))
        assert rows[name]["epochs"] == int(best)
        assert rows[name]["score"] == pytest.approx(sum(by_length[best]) / 2, abs=1e-6)


def test_test_scores_have_no_part_in_it(chosen: Choice) -> None:
    # Every score that the rule saw is one of a validation example, and of no other.
    assert chosen.path is not None
    for trial in chosen.trials:
        for (seed, client), value in trial.clients.items():
            sweep = "first" if seed == 0 else "second"
            summary = RunFolder(chosen.path / sweep / f"{trial.method}-s{seed}").summary
            assert summary is not None
            assert summary["validation_clients"][str(trial.epochs)][str(client)] == value


def test_who_takes_too_much_is_measured_or_known(chosen: Choice) -> None:
    # 8 bytes of 8,970 parameters, in 4 / 3 of 4 rounds.
    assert "at least 95.7 kB in 4 rounds" in chosen.left_out["fedavg"]
    assert "ditto" in chosen.left_out
    assert {row["method"] for row in chosen.rows} == {"local", "stc", "grove"}
    assert all(row["bytes_each"] <= 60_000 for row in chosen.rows)


def test_the_first_trial_decides_who_goes_on(chosen: Choice) -> None:
    assert chosen.path is not None
    went_on = {row["method"] for row in chosen.rows if row["went_on"]}
    second = {path.name.rpartition("-s")[0] for path in (chosen.path / "second").glob("*-s1")}
    assert second == went_on
    cost = chosen.found["cost"]
    # Two rounds of three methods on a seed, of those that went on on the other; against four of
    # three on both.
    assert cost["rounds"] == 2 * (3 + len(went_on))
    assert cost["rounds_in_full"] == 2 * 4 * 3


def test_hindsight_is_on_test_data(chosen: Choice) -> None:
    assert chosen.path is not None
    back = chosen.found["hindsight"]
    best = back["rows"][0]
    means = []
    for seed in (0, 1):
        summary = RunFolder(chosen.path / "full" / f"{best['method']}-s{seed}").summary
        assert summary is not None
        assert summary["rounds"] == 4
        # As the command that is printed has it.
        assert summary["validation"] == 0
        means.append(summary["finetune"][str(best["epochs"])]["accuracy_mean"])
    assert best["test"] == pytest.approx(sum(means) / 2, abs=1e-6)
    assert back["behind"] == pytest.approx(best["test"] - back["pick_test"], abs=1e-6)
    assert back["behind"] >= 0


def test_the_command_runs(chosen: Choice, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = shlex.split(chosen.command)
    assert words[:3] == ["fedgrove", "run", chosen.pick]
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], "--dry-run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["run"]["rounds"], config["run"]["cohort"]) == (4, 1)


def test_the_same_call_goes_on_and_trains_nothing_twice(chosen: Choice) -> None:
    assert chosen.path is not None
    stamp = (chosen.path / "first" / "local-s0" / "summary.json").stat().st_mtime_ns
    again = fg.choose(**TINY, budget="60kB", out=chosen.path)
    assert again.pick == chosen.pick
    assert again.rows == chosen.rows
    # What was found in hindsight before is not lost.
    kept = json.loads((chosen.path / "choice.json").read_text())["hindsight"]
    assert kept == chosen.found["hindsight"]
    assert again.found["hindsight"] == kept
    assert (chosen.path / "first" / "local-s0" / "summary.json").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="contains a different choice"):
        fg.choose(**TINY, out=chosen.path)


def test_a_choice_whose_full_run_is_damaged(chosen: Choice, tmp_path: Path, capsys: Any) -> None:
    assert chosen.path is not None
    out = tmp_path / "copy"
    shutil.copytree(chosen.path, out)
    (out / "full" / f"{chosen.pick}-s0" / "summary.json").write_text("{")
    again = fg.choose(**TINY, budget="60kB", hindsight=True, out=out)
    again.table()
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Use {chosen.pick}" in printed
    assert f"{chosen.pick} failed in full: " in printed
    assert list(again.found["hindsight"]["failed"]) == [chosen.pick]


def test_hindsight_survives_an_interruption(
    chosen: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen.path is not None
    out = tmp_path / "copy"
    shutil.copytree(chosen.path, out)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "assess_choice", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fg.choose(**TINY, budget="60kB", hindsight=True, out=out)
    kept = json.loads((out / "choice.json").read_text())["hindsight"]
    assert kept == chosen.found["hindsight"]


def test_the_page_shows_validation_scores(chosen: Choice) -> None:
    assert chosen.path is not None
    page = (chosen.path / "report.html").read_text()
    assert f"Use {chosen.pick}" in page
    assert "All scores on this page are on validation data" in page
    dropped = [row["method"] for row in chosen.rows if not row["went_on"]]
    assert ("Tried on one seed, and not on this page" in page) == bool(dropped)


def test_methods_that_one_seed_dropped_are_noted(chosen: Choice) -> None:
    rows = [dict(row) for row in chosen.rows]
    rows[-1] |= {"went_on": False, "score": 0.5}
    note = f"Tried on one seed, and not on this page: {rows[-1]['method']} (50.0 %)."
    assert note in list_notes({**chosen.found, "rows": rows})


@pytest.mark.parametrize("verb", ["report", "watch", "compare"])
def test_a_choice_is_no_run(chosen: Choice, verb: str, capsys: Any) -> None:
    assert main([verb, str(chosen.path)]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "contains a choice between methods" in err
    assert f"{chosen.path}/report.html is its report" in err


def test_the_table(chosen: Choice, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    chosen.table()
    out = capsys.readouterr().out
    assert f"{chosen.pick} *" in out
    assert "Use " in out
    assert "the best in hindsight" in " ".join(out.split())
    assert chosen.command in out
    table = [line for line in out.splitlines() if not line.startswith("fedgrove run")]
    assert max(len(line) for line in table if str(chosen.path) not in line) <= 80


def test_figures_of_a_summary_on_validation_data() -> None:
    summary = {
        "metric": "accuracy",
        "accuracy_mean": 0.99,
        "validation_clients": {"0": {"0": 0.5, "1": 0.7}, "3": {"0": 0.1, "1": 0.1}},
    }
    found = use_validation_scores(summary, 0)
    assert found["accuracy_mean"] == pytest.approx(0.6)
    assert found["accuracy_worst"] == spread([0.5, 0.7])["accuracy_worst"]
    assert average_validation({"validation_mean": 0.5}) == 0.5
    # 3 clients at .5 and 1 at .9: .6; a task nobody of which has validation data does not count.
    tasks = {
        "a": {"clients": 3, "validation_mean": 0.5},
        "b": {"clients": 1, "validation_mean": 0.9},
        "c": {"clients": 9, "validation_mean": None},
    }
    assert average_validation({"tasks": tasks}) == pytest.approx(0.6)


def test_data_made_in_python(tmp_path: Path) -> None:
    federation = fg.load("digits", clients=3, validation=0.2)
    words = {**TINY, "data": federation, "methods": ["local", "fedavg"], "seeds": 1}
    del words["clients"]
    found = fg.choose(**words, out=tmp_path / "choice")
    assert found.command.startswith(f"fedgrove.run('{found.pick}', data=..., ")
    assert "of one seed)" in found.found["sentence"]


def test_only_trials_hold_out_of_arrays(tmp_path: Path) -> None:
    """The full runs train on everything, as the printed call does."""
    x = torch.arange(80.0).reshape(20, 4) % 7
    y = torch.arange(20) % 2
    words = {**TINY, "methods": ["local", "fedavg"], "seeds": 1, "rounds": 2, "finetune": (0,)}
    del words["clients"]
    words |= {"data": {"ann": (x, y), "ben": (x + 1, y)}, "net": torch.nn.Linear(4, 2)}
    found = fg.choose(**words, validation=0.5, hindsight=True, out=tmp_path / "choice")
    assert "validation" not in found.command
    for part, examples in (("first", 8), ("full", 16)):
        summary = RunFolder(tmp_path / "choice" / part / "fedavg-s0").summary
        assert summary is not None
        # 4 of 20 examples are for testing.
        assert summary["train_examples_clients"] == {"0": examples, "1": examples}


def test_the_printed_command_holds_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "choose --data digits --clients 3 --cohort 1 --rounds 2 --trial 2 --epochs 1 --seeds 1"
    more = "--methods local,fedavg --finetune 0 --validation 0.3 --engine serial --hindsight"
    assert main([*words.split(), *more.split(), "--out", str(tmp_path / "c")]) == 0
    found = RunFolder(tmp_path / "c" / "full" / "local-s0").summary
    assert found is not None
    assert found["validation"] == 0
    out = capsys.readouterr().out
    (printed,) = [line for line in out.splitlines() if line.startswith("fedgrove run ")]
    assert "validation" not in printed


def test_other_data_made_in_python_are_another_choice(tmp_path: Path) -> None:
    words = {**TINY, "methods": ["local", "fedavg"], "seeds": 1, "rounds": 2, "finetune": (0,)}
    del words["clients"]

    def arrays(shift: float) -> dict[str, Any]:
        x = torch.arange(80.0).reshape(20, 4) % 7 + shift
        y = torch.arange(20) % 2
        return {"ann": (x, y), "ben": (x + 1, y)}

    words["net"] = torch.nn.Linear(4, 2)
    words["out"] = tmp_path / "choice"
    fg.choose(**{**words, "data": arrays(0)})
    fg.choose(**{**words, "data": arrays(0)})
    for data in (arrays(0.5), fg.load(arrays(0.5), validation=0.2)):
        with pytest.raises(InputError, match="a different"):
            fg.choose(**{**words, "data": data})
    with pytest.raises(InputError, match="a different data set or net that was made in Python"):
        fg.choose(**{**words, "data": arrays(0.5)})
    with pytest.raises(InputError, match="a different data set or net that was made in Python"):
        fg.choose(**{**words, "data": arrays(0), "net": torch.nn.Linear(4, 2)})


def test_an_error_is_better_if_less(tmp_path: Path) -> None:
    words = {**TINY, "data": "rooms", "methods": ["local", "fedavg"]}
    found = fg.choose(**words, out=tmp_path / "choice")
    last = [row for row in found.rows if row["went_on"]]
    assert found.pick == min(last, key=lambda row: row["score"])["method"]


def test_what_the_sentence_says() -> None:
    def made(method: str, score: float, sent: float, half: int = 0, at_half: float = 0.0) -> Trial:
        clients = {(seed, k): score + 0.01 * k for seed in (0, 1) for k in (0, 1, 2)}
        return Trial(method, 10, 0, clients, score, half, at_half, bytes_each=sent)

    class Asked:
        rounds = 40
        budget = 8e6
        file = None

    asked: Any = Asked()
    far = sentence(asked, [made("a", 0.8, 2e6), made("b", 0.6, 3e6)], Scores())
    assert far.startswith("Use a: 81.0 % on validation data after 10 of 40 rounds; a client sends")
    assert "of a budget of 8 MB" in far
    assert "20.0 ± 0.0 points ahead of b" in far
    assert "which is clear." in far
    one_seed = [made("a", 0.8, 2e6), made("b", 0.6, 3e6)]
    one_seed = [
        replace(t, clients={k: v for k, v in t.clients.items() if not k[0]}) for t in one_seed
    ]
    sure = sentence(asked, one_seed, Scores())
    assert "20.0 ± 0.0 points ahead of b (paired over 3 clients of one seed); one seed: not" in sure
    assert "clear" not in sure
    near = sentence(asked, [made("a", 0.8, 2e6), made("b", 0.8, 1e5)], Scores())
    assert "either may be better" in near
    assert "b is within the noise of it and takes 100 kB" in near
    rising = sentence(asked, [made("a", 0.8, 1), made("b", 0.7, 1, 5, 0.6)], Scores())
    assert "b was still improving when its trial ended" in rising
    assert select_promising([made("a", 0.8, 1), made("b", 0.7, 1)], 40) == ["a", "b"]


def test_commands_are_quoted() -> None:
    class Fit:
        method = "grove"
        settings = ()
        spends_budget = True

    class Base:
        data = "my data.csv"

    class Asked:
        chosen = (Fit(),)
        budget = 1000.0
        rounds = 5
        run_options = MappingProxyType(
            {"data": "my data.csv", "finetune": (0, 3), "standardise": False}
        )
        base = Base()
        running = MappingProxyType({"engine": "pool", "timeout": 3.0, "data_dir": Path("my sets")})

    asked: Any = Asked()
    pick = Trial("grove", 5, 3, {}, 0.0)
    assert command(asked, pick) == (
        "fedgrove run grove --data 'my data.csv' --finetune 3 --no-standardise --rounds 5 "
        "--engine pool --timeout 3.0 --data-dir 'my sets' --set budget=900B"
    )
    # A net that was made in Python has no name: the call in Python then.
    asked.run_options = {"data": "my data.csv", "net": torch.nn.Linear(1, 1)}
    assert command(asked, pick) == (
        "fedgrove.run('grove', data='my data.csv', net=..., rounds=5, finetune=[3], "
        "engine='pool', timeout=3.0, data_dir='my sets', set=['budget=900B'])"
    )


# ---- a size --------------------------------------------------------------------------------------


@with_onnx
def test_methods_whose_files_are_too_large_are_left_out(tmp_path: Path) -> None:
    """All devices are small, so heterofl's models are narrow; a method is not by its name."""
    profile = tmp_path / "devices.csv"
    rows = [f"{k},5,5,10,60000" for k in range(3)]
    profile.write_text("\n".join(["client,up,down,speed,memory", *rows]))
    words = {**TINY, "methods": ["heterofl", "fedlps"], "seeds": 1, "profile": str(profile)}
    words |= {"rounds": 2, "finetune": (0,)}
    found = fg.choose(**words, size="12kB", out=tmp_path / "choice")
    assert found.pick == "heterofl"
    assert "fits into an ONNX file of 12kB" in found.found["sentence"]
    assert set(found.left_out) <= {"fedlps"}
    # The file that is promised can really be had, of every client.
    run = tmp_path / "choice" / "first" / "heterofl-s0"
    for client in range(3):
        assert fg.export_model(run, client=client, size="12kB").file
    # Without small devices its models are whole, which the trial shows.
    del words["profile"]
    with pytest.raises(EngineError, match=r"heterofl: by its trial, the largest exported file"):
        fg.choose(**{**words, "methods": ["heterofl"]}, size="12kB", out=tmp_path / "whole")
    # The folder remembers the size.
    with pytest.raises(InputError, match="contains a different choice"):
        fg.choose(**{**words, "methods": ["heterofl"]}, size="13kB", out=tmp_path / "whole")
