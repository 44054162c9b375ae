"""What goes wrong is said in sentences."""

from __future__ import annotations

import pickle

import pytest

from fedgrove import methods
from fedgrove.errors import EngineError, FedgroveError, InputError, WireError, check, unknown
from fedgrove.methods._lookup import RELATED


def test_unknown_names_the_nearest_and_all_there_are() -> None:
    error = unknown("method", "fedavgg", ["local", "fedavg"])
    assert isinstance(error, InputError)
    sentence = "there is no method 'fedavgg'; did you mean 'fedavg'? There are: fedavg, local."
    assert str(error) == sentence


def test_unknown_guesses_nothing_when_nothing_is_near() -> None:
    assert str(unknown("net", "zzz", ["mlp"])) == "there is no net 'zzz'. There are: mlp."
    assert str(unknown("net", "zzz", [])) == "there is no net 'zzz'. There are: none."


def test_check_says_what_was_given_and_what_is_allowed() -> None:
    check(True, "lr", 0.1, "above 0")
    with pytest.raises(InputError, match=r"^lr is -1; it must be above 0\.$"):
        check(False, "lr", -1, "above 0")
    with pytest.raises(InputError, match=r"^norm is 'x'; it must be one of a, b\.$"):
        check(False, "norm", "x", "one of a, b")


@pytest.mark.parametrize(
    ("kind", "also"),
    [(InputError, ValueError), (WireError, ValueError), (EngineError, RuntimeError)],
)
def test_errors_are_fedgroves_and_pythons(kind: type[Exception], also: type[Exception]) -> None:
    error = kind("a sentence.")
    assert isinstance(error, FedgroveError)
    assert isinstance(error, also)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "a sentence."


METHODS = methods.names()


@pytest.mark.parametrize("given", sorted(RELATED))
def test_a_well_known_method_leads_to_the_nearest_in_kind(given: str) -> None:
    assert given not in METHODS
    assert RELATED[given] in METHODS
    with pytest.raises(InputError, match=rf"'{given}'; the nearest in kind is '{RELATED[given]}'"):
        methods.find(given)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("PerFedAvg", "; the nearest in kind is 'ditto'."),
        ("per-fedavg", "; the nearest in kind is 'ditto'."),
        ("scafold", "; did you mean 'scaffold'?"),
        ("grvoe", "; did you mean 'grove'?"),
        ("lotteryfed", "; did you mean 'lotteryfl'?"),
        ("moo", "; did you mean 'moon'?"),
        ("fedbuff", "."),
        ("fed", "."),
        ("scaffnew", "."),
    ],
)
def test_a_name_is_suggested_if_it_was_probably_meant(given: str, hint: str) -> None:
    sentence = str(unknown("method", given, METHODS, RELATED))
    assert sentence.startswith(f"there is no method '{given}'{hint} There are: ")


@pytest.mark.parametrize(
    ("kind", "given", "allowed", "meant"),
    [
        ("setting of ditto", "lambda", ["codec", "pull.mu"], "pull.mu"),
        ("setting of x", "learning_rate", ["local.optimiser.lr", "mean"], "local.optimiser.lr"),
        ("setting of x", "momentm", ["local.optimiser.momentum"], "local.optimiser.momentum"),
        ("setting of x", "sparsity", ["density", "phases"], "density"),
        ("option", "--batch-size", ["--batch", "--data"], "--batch"),
        ("option", "--learning-rate", ["--lr", "--rounds"], "--lr"),
        ("command", "train", ["run", "resume"], "run"),
        ("command", "ls", ["list", "run"], "list"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(
    kind: str, given: str, allowed: list[str], meant: str
) -> None:
    assert f"; did you mean '{meant}'?" in str(unknown(kind, given, allowed))
