"""Everything that is wrong is said at once, and nothing is said that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedgrove as fg
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment, with_settings
from fedgrove.errors import InputError, InputErrors
from fedgrove.methods import Ditto, FedAvg, FedProx
from fedgrove.parts.local import LocalTraining


def test_options_of_an_experiment_are_refused_together() -> None:
    with pytest.raises(InputErrors) as caught:
        Experiment(FedAvg(), seed=-1, clients=0, rounds=0, quorum=2, faults="x=1")
    words = [sentence.split()[0] for sentence in caught.value.sentences]
    assert words == ["clients", "rounds", "quorum", "seed", "there"]
    # Of the wrong type: not compared with their limits.
    with pytest.raises(InputErrors) as caught:
        Experiment(FedAvg(), seed="x", rounds="many")  # type: ignore[arg-type]
    assert [sentence.split()[0] for sentence in caught.value.sentences] == ["rounds", "seed"]


def test_one_wrong_option_is_an_error_of_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^seed is -1; it must be 0 or more, and below 2\^63\.$"):
        Experiment(FedAvg(), seed=-1)


def test_settings_are_refused_together_in_one_part_and_across_parts() -> None:
    settings = ["mu=-1", "nosuch=1", "lr=-1", "epochs=0", "batch=0"]
    with pytest.raises(InputErrors) as caught:
        with_settings(Ditto(), settings, LocalTraining())
    assert [sentence.split(";")[0].split(". ")[0] for sentence in caught.value.sentences] == [
        "there is no setting of ditto 'nosuch'",
        "pull.mu is -1.0",
        "local.optimiser.lr is -1.0",
        "local.epochs is 0",
        "local.batch is 0",
    ]


def test_what_is_right_together_is_not_refused_for_the_sake_of_another() -> None:
    # The one wrong setting is the only thing said; mu is right.
    with pytest.raises(InputError, match=r"^local\.epochs is 0; it must be 1 or more\.$"):
        with_settings(FedProx(), ["mu=3", "epochs=0"], LocalTraining())


def test_the_command_line_says_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        "run fedavgg --rounds abc --lr x --data digitts --net mlpp --partition iidd "
        "--engine poool --seed -1"
    )
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert first == "fedgrove: 8 things are wrong:"
    assert [line.split(";")[0] for line in lines] == [
        "- --rounds is 'abc'",
        "- --seed is -1",
        "- --lr is 'x'",
        "- there is no method 'fedavgg'",
        "- there is no engine 'poool'",
        "- there is no partition 'iidd'",
        "- there is no data set 'digitts'",
        "- there is no net 'mlpp'",
    ]
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_commands_that_look_no_further_say_all_wrong_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", "fedavg", "--rounds", "abc", "--seeds", "x", "--lr=y"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "fedgrove: 3 things are wrong:"
    assert [line.split()[1] for line in lines] == ["--rounds", "--lr", "--seeds"]


def test_python_says_all_of_it_too() -> None:
    with pytest.raises(InputErrors) as caught:
        fg.run("ditto", rounds=0, set={"mu": -1, "lambda": 2}, engine="poool", cohort=99)
    assert len(caught.value.sentences) == 5
    assert "did you mean 'pull.mu'?" in str(caught.value)
    assert str(caught.value).startswith("5 things are wrong:\n- rounds is 0; ")


def test_what_only_the_data_tell_is_refused_with_the_rest() -> None:
    with pytest.raises(InputErrors) as caught:
        fg.run("fedavg", data="digits", cohort=99, net="mlpp")
    assert sorted(sentence.split()[0] for sentence in caught.value.sentences) == ["cohort", "there"]


def test_settings_that_the_data_would_bring_are_not_doubted() -> None:
    # mnist would be trained with SGD, which has a momentum; nobody knows of mnistt. No data bring
    # a lambda.
    with pytest.raises(InputErrors) as caught:
        fg.run("ditto", data="mnistt", set={"momentum": 0.5, "lr": -1, "lambda": 1})
    assert sorted(sentence.split(";")[0] for sentence in caught.value.sentences) == [
        "local.optimiser.lr is -1.0",
        "there is no data set 'mnistt'",
        "there is no setting of ditto 'lambda'",
    ]
