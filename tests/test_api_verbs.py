"""The verbs beside run and resume: load_run, compare, cost and sweep, the same as the commands."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedgrove as fg
from fedgrove import api, methods
from fedgrove.cli import main
from fedgrove.cli.parameters import typed_options
from fedgrove.cli.run import CostCommand
from fedgrove.cli.sweep import SweepCommand
from fedgrove.config.experiment import Experiment
from fedgrove.config.settings import assign
from fedgrove.config.sweep import Sweep
from fedgrove.errors import InputError
from fedgrove.parts.objective import Proximal
from fedgrove.runs.result import Result

TINY: dict[str, Any] = {"data": "digits", "clients": 3, "cohort": 2, "rounds": 1}
WORDS = ["--data", "digits", "--clients", "3", "--cohort", "2", "--rounds", "1"]


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    out = tmp_path_factory.mktemp("swept") / "sweep"
    return fg.sweep(
        ["local", "fedprox"],
        seeds=[3, 5],
        set={"mu": [0.1, 1.0]},
        out=out,
        engine="serial",
        progress=False,
        **TINY,
    )


def test_a_sweep_is_what_the_command_makes(
    swept: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "local", "fedprox", "--seeds", "3,5", "--set", "mu=0.1,1.0", *WORDS]
    assert main([*words, "--out", str(tmp_path / "cli"), "--engine", "serial", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [member["run"] for member in printed["members"]] == list(swept)
    for member in printed["members"]:
        end = swept[member["run"]]
        assert isinstance(end, Result)
        assert end.summary["accuracy_mean"] == member["accuracy_mean"]
    assert [group["accuracy_mean"] for group in printed["groups"]] == [
        group["accuracy_mean"] for group in swept.groups()
    ]


def test_the_runs_of_a_sweep_are_results(swept: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(swept) == [
        "local-s3",
        "local-s5",
        "fedprox-mu=0.1-s3",
        "fedprox-mu=0.1-s5",
        "fedprox-mu=1.0-s3",
        "fedprox-mu=1.0-s5",
    ]
    assert not swept.has_failures
    end = swept["local-s3"]
    assert isinstance(end, Result)
    assert end.model(0).kind == "classes"
    swept.table()
    shown = capsys.readouterr().out
    assert "fedprox-mu=0.1-s3" in shown
    assert "seeds" in shown


def test_a_sweep_takes_methods_that_were_made(tmp_path: Path) -> None:
    chosen = ["fedavg", methods.Ditto(), methods.Ditto(pull=Proximal(0.5))]
    words: dict[str, Any] = {"engine": "serial", "progress": False, **TINY}
    found = fg.sweep(chosen, out=tmp_path / "made", **words)
    assert list(found) == ["fedavg-s0", "ditto-s0", "ditto-2-s0"]
    third = found["ditto-2-s0"]
    assert isinstance(third, Result)
    alone = fg.run("ditto", set={"mu": 0.5}, out=tmp_path / "alone", **words)
    assert third.summary["accuracy_clients"] == alone.summary["accuracy_clients"]
    # A built-in method is in config.toml with its settings, so the command can go on.
    (tmp_path / "made" / "ditto-2-s0" / "summary.json").unlink()
    assert main(["resume", str(tmp_path / "made"), "--engine", "serial", "--json"]) == 0
    assert list(fg.sweep(methods.Ditto(), out=tmp_path / "one", **words)) == ["ditto-s0"]


def test_compare_takes_a_list(swept: Sweep) -> None:
    ends = list(swept.values())
    assert len(fg.compare([ends[0], ends[1]], [ends[2].folder]).rows) == 3
    with pytest.raises(InputError, match="compare was given 3; give results or run folders"):
        fg.compare(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="compare was given no run"):
        fg.compare([])


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (methods.Ditto, r"^method is the class Ditto; make a method of it: Ditto\(\).$"),
        (3, r"^method is 3; it must be a name, such as 'fedavg', or a method made in Python"),
        (["fedavg"], r"^method is a list of 1; give one method, or .* fedgrove.sweep.$"),
    ],
)
def test_what_is_no_method_is_refused(method: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        fg.run(method, progress=False, **TINY)
    with pytest.raises(InputError, match=r"^method is "):
        fg.sweep([method], progress=False, **TINY)


def test_a_net_that_was_not_made_is_refused() -> None:
    for net in (nn.LSTM, 3):
        with pytest.raises(
            InputError, match=r"^net is .*; it must be a name, such as 'mlp', or a network that"
        ):
            fg.run("fedavg", net=net, progress=False, **TINY)  # type: ignore[arg-type]


def test_compare_is_what_the_command_prints(
    swept: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    run = swept["local-s3"]
    assert isinstance(run, Result)
    for given, words in (
        ([swept], [str(swept.path)]),
        ([run, run.folder, run.folder.path], 3 * [str(run.folder.path)]),
    ):
        found = fg.compare(*given)
        assert main(["compare", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == found.rows
        assert len(found) == len(list(found))
        found.table()
        table = capsys.readouterr().out
        assert main(["compare", *words]) == 0
        # Beside the table the command writes a page, and says where.
        told, _, page = capsys.readouterr().out.partition("Page: ")
        assert told == table
        assert Path(page.strip()).is_file()
    fg.compare(run, bytes=True).table()
    assert "header" in capsys.readouterr().out
    with pytest.raises(InputError, match="compare was given no run"):
        fg.compare()


def test_load_run_knows_a_sweep(swept: Sweep) -> None:
    with pytest.raises(InputError, match=r"contains a sweep of 6 runs; load one .*local-s3"):
        fg.load_run(swept.path)
    assert fg.load_run(swept.path / "local-s3").summary["seed"] == 3


def test_cost_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "fedprox", *WORDS, "--set", "mu=0.5", "--epochs", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(fg.cost("fedprox", set={"mu": 0.5}, epochs=2, **TINY))) == printed
    shape = ["--input", "6", "--net", "mlp", "--classes", "3"]
    assert main(["cost", "fedavg", "ditto", *shape, "--set", "mu=0.5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    with pytest.warns(UserWarning, match="mu=0.5 is not a setting of fedavg"):
        rows = fg.cost(["fedavg", "ditto"], input=(6,), net="mlp", classes=3, set={"mu": 0.5})
    assert json.loads(json.dumps(rows)) == printed
    assert fg.cost(methods.FedAvg(), **TINY)["method"] == "fedavg"


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"argument 'roundz'; did you mean 'rounds'"):
        fg.sweep("fedavg", roundz=3)
    with pytest.raises(InputError, match="sweep was given no method"):
        fg.sweep([])
    with pytest.raises(InputError, match="cost was given no method"):
        fg.cost([])
    with pytest.raises(InputError, match="input came without net and classes"):
        fg.cost("fedavg", input=(6,))
    with pytest.raises(InputError, match="set is 'mu=1'"):
        fg.cost("fedprox", set="mu=1")


def test_cost_takes_the_options_of_a_run() -> None:
    """One dictionary of options serves both; those that cost nothing are checked."""
    options: dict[str, Any] = {
        "deadline": 60.0,
        "evaluate": 0,
        "faults": "crash=0.1",
        "finetune": (0, 3),
        "norm_bound": 10.0,
        "privacy": "clip=1.0,noise=0.8",
        "quorum": 0.5,
        "score_on": 2,
    }
    assert fg.cost("fedavg", **TINY, **options) == fg.cost("fedavg", **TINY)
    with pytest.raises(InputError, match="quorum is 2"):
        fg.cost("fedavg", quorum=2, **TINY)
    # None for data means that there are none.
    shape = {"input": (6,), "net": "mlp", "classes": 3}
    assert fg.cost("fedavg", data=None, **shape) == fg.cost("fedavg", **shape)
    assert fg.cost("fedavg", data=None, rounds=1) == fg.cost("fedavg", data="digits", rounds=1)


def test_both_take_every_option_of_their_command() -> None:
    # What only a command line needs.
    only_typed = {"json", "dry_run"}
    for command, function in ((CostCommand, api.cost), (SweepCommand, api.sweep)):
        names = {field.name for field in typed_options(command)} - only_typed
        assert names <= set(inspect.signature(function).parameters)


def test_the_verbs_are_functions_whatever_was_imported_before() -> None:

    for name in ("run", "resume", "load_run", "compare", "cost", "sweep"):
        assert getattr(fg, name) is getattr(api, name)


def test_a_sweep_is_a_frame(swept: Sweep) -> None:
    frame = swept.frame()
    assert list(frame["run"]) == list(swept)
    assert set(frame["state"]) == {"done"}
    assert not [name for name in frame if "_clients" in name and name[-1].isdigit()]
    assert frame["accuracy_mean"][0] == swept.summaries()["local-s3"]["accuracy_mean"]


def test_what_is_shown_in_a_notebook_is_short(swept: Sweep) -> None:
    found = api.compare(swept)
    for thing in (swept, found, swept["local-s3"]):
        assert len(repr(thing)) < 400
        assert len(thing._repr_html_()) < 4000
    assert repr(found) == "Comparison(6 runs)"


def test_temporary_runs_are_compared_under_their_own_names() -> None:
    runs = []
    pulls = [assign(methods.FedProx(), f"mu={mu}") for mu in (0.1, 0.5)]
    for method in (*pulls, methods.Local(), methods.Local()):
        experiment = Experiment(method, **{**TINY, "rounds": 2})
        runs.append(api.train(experiment, engine="serial", progress=False))
    found = api.compare(*runs)
    names = [row["run"] for row in found]
    assert names == ["fedprox-mu=0.1-s0", "fedprox-mu=0.5-s0", "local-s0", "local-s0 (2)"]
    # Their curves are read from where they are.
    assert "Accuracy by round" in found.page().html()
    # One that was kept has the name of its folder.
    assert [row["run"] for row in api.compare(str(runs[0].folder.path))] == [
        str(runs[0].folder.path)
    ]
