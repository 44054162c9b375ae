"""Presets: ``method:name`` wherever a method is named; what is written holds plain fields."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fedgrove
from fedgrove import methods
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.config.grid import grid
from fedgrove.config.toml import from_toml
from fedgrove.errors import InputError
from fedgrove.parts.group import Agglomerative

SMALL = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--epochs", "1"]
LONG = [*SMALL, "--rounds", "20"]
PRESETS = [(name, preset) for name in methods.names() for preset in methods.presets(name)]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_is_another_instance_of_the_methods_own_class(name: str, preset: str) -> None:
    made = methods.make(f"{name}:{preset}")
    assert type(made) is methods.find(name)
    assert methods.name_of(made) == name
    assert made != methods.make(name)


def test_the_papers_ca_afp_never_warms_up() -> None:
    paper = methods.make("ca-afp:paper")
    assert isinstance(paper, methods.CAAFP)
    assert paper.lengths(50) == (0, 0, 50)
    # Table 5 of the paper.
    assert (paper.density, paper.first, paper.clusters, paper.churn) == (0.3, 0.3, 3, 0.05)
    assert paper.weights == (0.5, 0.25, 0.25)
    # Its groups are formed as in the paper, too.
    ours = methods.CAAFP()
    assert (paper.probe_epochs, paper.grouping) == (1, Agglomerative("average"))
    assert replace(paper, phases=ours.phases, probe_epochs=3, grouping=ours.grouping) == ours
    assert methods.CAAFP().lengths(50)[0] > 0


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "ca-afp:papr",
            r"^there is no preset of ca-afp 'papr'; did you mean 'paper'\? There are: paper\.$",
        ),
        ("fedavg:paper", r"^there is no preset of fedavg 'paper'\. There are: none\.$"),
        ("ca-afp:", r"^there is no preset of ca-afp ''\. There are: paper\.$"),
        ("ca-apf:paper", r"^there is no method 'ca-apf'; did you mean 'ca-afp'\?"),
    ],
)
def test_an_unknown_preset_gets_the_nearest(word: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        methods.make(word)


def test_config_toml_holds_the_fields_and_not_the_preset(tmp_path: Path) -> None:
    result = fedgrove.run(
        "ca-afp:paper",
        clients=4,
        cohort=2,
        rounds=2,
        epochs=1,
        set={"clusters": 2},
        evaluate=0,
        engine="serial",
        out=tmp_path / "run",
        progress=False,
    )
    config = tomllib.loads(result.folder.config)
    assert config["run"]["method"] == "ca-afp"
    assert config["method"]["phases"] == [0, 0, 1]
    assert config["method"]["clusters"] == 2
    assert "paper" not in result.folder.config
    again = from_toml(result.folder.config).method
    assert isinstance(again, methods.CAAFP)
    assert again.phases == (0, 0, 1)


def test_runs_of_a_preset_have_plain_names() -> None:
    base = Experiment(methods.FedAvg())
    assert list(grid(["ca-afp", "ca-afp:paper"], base, [0], ["density=0.2,0.3"])) == [
        "ca-afp-density=0.2-s0",
        "ca-afp-density=0.3-s0",
        "ca-afp-paper-density=0.2-s0",
        "ca-afp-paper-density=0.3-s0",
    ]


def test_the_command_line_takes_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "ca-afp:paper", *SMALL, "--engine", "serial", "--evaluate", "0"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["ca-afp-paper-digits-s0"]
    capsys.readouterr()
    assert main(["cost", "ca-afp:paper", *LONG, "--json"]) == 0
    paper = json.loads(capsys.readouterr().out)
    assert paper["method"] == "ca-afp:paper"
    assert main(["cost", "ca-afp", *LONG, "--json"]) == 0
    # It has no dense round.
    assert paper["bytes_paper"] < json.loads(capsys.readouterr().out)["bytes_paper"]
    assert main(["show", "ca-afp:paper"]) == 0
    assert "(0, 0, 1)" in capsys.readouterr().out
    assert main(["sweep", "ca-afp", "ca-afp:paper", *SMALL, "--dry-run"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["ca-afp-s0", "ca-afp-paper-s0"]
    assert main(["list", "methods"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["ca-afp:paper", "ca-afp with phases=0,0,1 grouping.linkage=average probe_epochs=1"] in [
        [word.strip() for word in line] for line in lines
    ]
    assert main(["run", "ca-afp:papr"]) == 2
    assert "did you mean 'paper'?" in capsys.readouterr().err
