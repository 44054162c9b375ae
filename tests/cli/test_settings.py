"""``--set`` on the command line: what is right together is taken, in any order."""

import itertools
import json
from pathlib import Path

import pytest

from fedgrove.cli import main

SMALL = ["--clients", "4", "--rounds", "1", "--dry-run", "--json"]
TOGETHER = [
    ("adfedwcp", ("allocation.k_min=256", "allocation.k_max=256")),
    ("adfedwcp", ("allocation.k_max=3", "k_min=2")),
    ("adfedwcp", ("slow=200", "fast=300")),
    ("fedkd", ("energy.first=1", "energy.last=1")),
]


def planned(method: str, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> dict:
    words = itertools.chain.from_iterable(("--set", text) for text in settings)
    assert main(["run", method, *words, *SMALL]) == 0
    config: dict = json.loads(capsys.readouterr().out)["config"]
    return config


@pytest.mark.parametrize(("method", "settings"), TOGETHER)
def test_settings_that_are_right_together_are_taken_in_any_order(
    method: str, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [planned(method, order, capsys) for order in itertools.permutations(settings)]
    assert configs[0] == configs[1]


def test_of_several_methods_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = ["--set", "allocation.k_min=256", "--set", "allocation.k_max=256"]
    assert main(["cost", "adfedwcp", "fedavg", *pair, "--clients", "4", "--rounds", "1"]) == 0
    assert main(["sweep", "adfedwcp", "fedavg", *pair, "--dry-run"]) == 0
    capsys.readouterr()


def test_a_part_that_is_replaced_forgets_what_was_set_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = planned("adfedwcp", ("allocation.k_max=1", "allocation=Fixed"), capsys)
    assert config["method"]["allocation"] == {"type": "Fixed", "k": 16}


def test_what_is_wrong_together_is_refused_with_its_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ["--set", "allocation.k_max=3", "--set", "lr=0.1", "--set", "k_min=5"]
    assert main(["run", "adfedwcp", *wrong, "--dry-run"]) == 2
    sentence = "fedgrove: allocation.k_max is 3; it must be in 5 (k_min)..256.\n"
    assert capsys.readouterr().err == sentence
    assert main(["run", "adfedwcp", "--set", "slow=300", "--set", "fast=200", "--dry-run"]) == 2
    told = "fedgrove: allocation.slow, allocation.fast: slow and fast is (300.0, 200.0); "
    assert capsys.readouterr().err.startswith(told)


def test_cost_says_which_methods_have_no_such_setting(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "k=8", "--set", "lr=0.1", "--clients", "4", "--rounds", "1"]
    assert main(["cost", "adfedwcp", "fedwcp", "fedavg", *words]) == 0
    assert capsys.readouterr().err == "fedgrove: k=8 is not a setting of adfedwcp, fedavg.\n"
    # With a part that has such a field, adfedwcp takes it.
    fixed = ["--set", "allocation=Fixed"]
    assert main(["cost", "adfedwcp", "fedwcp", *fixed, *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "fedgrove: allocation=Fixed is not a setting of fedwcp.\n"
    adaptive, plain = json.loads(out)
    assert adaptive["bytes_paper"] == plain["bytes_paper"]


def test_cost_says_where_a_papers_count_is_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, is_bound in (((), True), (("--set", "allocation=Fixed"), False)):
        assert main(["cost", "adfedwcp", *settings, "--clients", "4", "--rounds", "1"]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("paper's own")]
        assert ("at most" in line) is is_bound
