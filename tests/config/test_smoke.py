"""A smoke run goes the whole way on a few examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.contract import contract_of

import fedgrove as fg
from fedgrove import api, data, methods
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment, Federations
from fedgrove.config.smoke import smaller, smoke
from fedgrove.errors import InputError


def test_a_federation_becomes_small_from_all_over_it() -> None:
    small = smaller(data.load("motion+motion-forecast", clients=10))
    assert list(small.clients) == [0, 1, 2, 3]
    # Both tasks are still there.
    tasks = [client.info.task for client in small.clients.values()]
    assert tasks == ["motion", "motion", "motion-forecast", "motion-forecast"]
    for client in small.clients.values():
        assert client.info.examples == len(client.train) <= 32
        assert 0 < len(client.test) <= 16


def test_clients_that_switch_do_so_in_the_second_round() -> None:
    whole = data.load("digits", clients=4, scenario="switch:10:2")
    small = smaller(whole)
    assert {versions[0][0] for versions in small.later.values()} == {1}
    made = smoke(
        Experiment(methods.FedAvg(), "digits", clients=4, scenario="switch:10:2"), Federations()
    )
    assert api.train(made, engine="serial").summary["rounds"] == 2


@pytest.mark.parametrize("name", ["feddst", "fedavg"])
def test_methods_do_in_two_rounds_what_they_do_in_many(name: str) -> None:
    result = fg.run(name, smoke=True, finetune=(0, 25), engine="serial", progress=False)
    assert result.summary["rounds"] == 2
    assert list(result.summary["finetune"]) == ["0", "1"]
    prunes = name != "fedavg"
    assert (result.summary["density"] < 1) == prunes


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_every_method_can_be_tried_out(name: str) -> None:
    net = "bn-cnn2" if contract_of(name).net_with_norms else None
    fg.run(name, net=net, smoke=True, finetune=(0, 3), engine="serial", progress=False)


def test_a_method_with_long_stages_gets_the_rounds_it_needs() -> None:
    method = methods.make("hermes")
    small = smoke(Experiment(method, net="bn-cnn2"), Federations())
    assert small.rounds == 8
    with pytest.raises(InputError, match="hermes cannot be used with net Mlp"):
        smoke(Experiment(method), Federations())


def test_the_command_line_says_what_worked_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fedavg", "--smoke", "--engine", "serial"]) == 0
    out = capsys.readouterr().out
    assert "fine-tuning, scoring, saving" in out
    assert out.splitlines()[-1] == "fedavg works: 2 rounds, 4 clients, nothing was kept."
    assert list(tmp_path.iterdir()) == []
    assert main(["run", "fedavg", "--smoke", "--engine", "serial", "--json", "--out", "x"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["works"]
    assert "reading back" in said["seconds"]
    assert Path("x/summary.json").is_file()
