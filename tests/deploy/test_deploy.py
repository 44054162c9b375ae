"""A server without data and nodes with their own, over real Flower messages in this process."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import federation
from tests.engines.loopback import Loopback

import fedgrove
from fedgrove import api, methods, trees
from fedgrove.config.experiment import Experiment
from fedgrove.core import ClientInfo
from fedgrove.data import Federation
from fedgrove.deploy import client_app, enrolment, roster, serve
from fedgrove.deploy.node import Node
from fedgrove.engines.flower import messages
from fedgrove.engines.flower.messages import Letter
from fedgrove.errors import EngineError, InputError
from fedgrove.problems import LABELS, Problem, Unit, cross_entropy, numbers
from fedgrove.runs.memory import read_tree

SIZES = (20, 13, 24)


def all_data() -> Federation:
    made = federation((12,), SIZES, dtype=torch.float32)
    clients = dict(made.clients)
    # A device of its own: what a node says of it is what the server's clock goes by.
    info = ClientInfo(24, bandwidth=3.0, downlink=30.0, speed=0.5, memory=1 << 20)
    clients[2] = replace(clients[2], info=info, labels=(0, 1, 2))
    return replace(made, clients=clients)


def own_data(partition: int, node_config: Mapping[str, Any]) -> Federation:
    return all_data()


def alone(partition: int, node_config: Mapping[str, Any]) -> Federation:
    """As a real node has them: its own, and no other's."""
    made = all_data()
    return replace(made, clients={0: made.clients[partition]})


def experiment(name: str = "ditto", **words: Any) -> Experiment:
    given = {"data": all_data(), "rounds": 4, "cohort": 2, "finetune": (0, 1)} | words
    return Experiment(methods.make(name), **given)


def grid_of(home: Path, data: Any = alone, partitions: tuple[int, ...] = (0, 1, 2)) -> Loopback:
    app = client_app(data, home=home)
    return Loopback(dict.fromkeys(partitions, app))


def rest(folder: Path) -> dict[str, Any]:
    """The summary and the metrics, apart from what measures time or names the engine."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return {k: v for k, v in summary.items() if k not in ("seconds", "engine")} | {"lines": lines}


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("ditto", None),
        ("ditto", "macro_f1"),
        ("ca-afp", None),
        pytest.param("heterofl", None, marks=pytest.mark.slow),
    ],
)
def test_a_server_without_data_gets_what_serial_gets(
    name: str, metric: str | None, tmp_path: Path
) -> None:
    """Scores, groups, bytes by part, virtual time; and what clients remember, on their own disks."""
    api.train(experiment(name, metric=metric), tmp_path / "serial", engine="serial")
    grid = grid_of(tmp_path / "home")
    result = serve(grid, experiment(name, metric=metric), out=tmp_path / "flower", clients=3)
    assert rest(tmp_path / "serial") == rest(tmp_path / "flower")
    assert f"{metric or 'accuracy'}_pooled" in result.summary
    assert result.summary["engine"] == "flower"
    # Personal models stay with the nodes.
    assert not list((tmp_path / "flower" / "checkpoint").rglob("client-*"))
    if name == "ditto":
        assert list((tmp_path / "serial" / "models").glob("client-*"))
        assert not list((tmp_path / "flower" / "models").glob("client-*"))
    for path in (tmp_path / "serial" / "checkpoint").glob("client-*finetune*"):
        [copy] = (tmp_path / "home").glob(f"{path.name[:12]}/*/{path.name}")
        assert trees.identical(read_tree(path), read_tree(copy))


def test_the_server_is_sent_no_example() -> None:
    said = enrolment.describe_client(all_data(), 2)
    known = enrolment.read_enrolment(json.loads(json.dumps(said)))
    assert known.info == all_data().clients[2].info
    assert known.labels == (0, 1, 2)
    seen = enrolment.make_federation({2: known}, known.kind)
    assert seen.infos == {2: known.info}
    assert len(seen.clients[2].train) == len(seen.clients[2].test) == 0
    assert set(said) == {"version", "partition", "info", "own_labels", "kind", "words"}


@pytest.mark.parametrize(
    "problem", [LABELS, numbers(Unit((1.5, 0.0, 2.0), (0.5, 1.0, 3.0)), "rmse")]
)
def test_problems_travel_by_name(problem: Problem) -> None:
    given = replace(all_data(), problem=problem)
    known = enrolment.read_enrolment(json.loads(json.dumps(enrolment.describe_client(given, 0))))
    assert enrolment.make_federation({0: known}, known.kind).problem == problem


def test_a_problem_of_ones_own_is_refused() -> None:
    mine = replace(all_data(), problem=Problem("mine", cross_entropy, fedgrove.metrics.ACCURACY))
    with pytest.raises(InputError, match="the targets of the data are mine; over a network"):
        enrolment.describe_client(mine, 0)


# ---- refusals, on both sides ---------------------------------------------------------------------


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for."""
    monkeypatch.setattr(roster, "AGAIN", 0.0)


def refused(grid: Loopback, tmp_path: Path, caplog: Any, **words: Any) -> list[str]:
    """The sentences of a run that cannot begin; and that both sides said so."""
    caplog.set_level(logging.ERROR, "fedgrove")
    with pytest.raises(EngineError) as caught:
        serve(grid, experiment(**words), out=tmp_path / "run", clients=3, wait=0.0)
    assert not (tmp_path / "run").exists()
    node_side = [
        r.message for r in caplog.records if r.message.startswith(("refused", "the server"))
    ]
    assert node_side
    return [str(caught.value), *node_side]


def with_one(home: Path, other: Any) -> Loopback:
    """Two good nodes, and another one as client 1."""
    grid = grid_of(home, partitions=(0, 2))
    grid.add(77, 1, other)
    return grid


def another_shape(partition: int, node_config: Mapping[str, Any]) -> Federation:
    return federation((5,), SIZES, dtype=torch.float32)


def fewer_outputs(partition: int, node_config: Mapping[str, Any]) -> Federation:
    return federation((12,), SIZES, classes=2, dtype=torch.float32)


def no_file(partition: int, node_config: Mapping[str, Any]) -> Federation:
    raise FileNotFoundError("data.csv")


def no_data(partition: int, node_config: Mapping[str, Any]) -> Any:
    return [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (another_shape, r"client 1 has data of shape \(5,\) with 3 outputs"),
        (fewer_outputs, r"client 1 has data of shape \(12,\) with 2 outputs"),
        (
            no_file,
            r"client 1 cannot read its data \(FileNotFoundError\); the log of its node gives the reason",
        ),
        (no_data, r"the node's data are a list"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    data: Any, sentence: str, tmp_path: Path, caplog: Any
) -> None:
    grid = with_one(tmp_path, client_app(data, home=tmp_path))
    said = refused(grid, tmp_path, caplog)
    assert "2 of 3 clients take part" in said[0]
    for side in said[:2]:
        assert re.search(sentence, side)


def test_names_of_files_stay_on_the_node(tmp_path: Path, caplog: Any) -> None:
    """A client is called after its file; the path in an error is in the node's own log only."""
    notes = ("there is one client only, anna, so nothing is learnt from other clients", "synthetic")
    named = replace(all_data(), name="anna", names={0: "anna"}, notes=notes)
    said = enrolment.describe_client(named, 0)
    assert "anna" not in json.dumps(said)
    assert said["words"]["notes"] == ["synthetic"]
    assert enrolment.read_enrolment(said).words["name"] == "own data"
    answer = Node(no_file, str(tmp_path)).answer_question(
        {"ask": "who", "version": fedgrove.__version__}, {"partition-id": 0}
    )
    assert "data.csv" not in json.dumps(answer)
    assert "FileNotFoundError: data.csv" in caplog.text


def test_another_version_is_refused(tmp_path: Path, caplog: Any) -> None:
    half = Node(alone, str(tmp_path))

    def asked(question: dict[str, Any], config: Any) -> dict[str, Any]:
        # As a node of another version reads the question.
        return half.answer_question(question | {"version": "0.0.1"}, config)

    said = refused(with_one(tmp_path, messages.client_app(asked, half.do_task)), tmp_path, caplog)
    for side in said[:2]:
        assert f"the server has fedgrove 0.0.1, and this side has {fedgrove.__version__}" in side


def test_two_nodes_of_one_partition_are_refused(tmp_path: Path, caplog: Any) -> None:
    grid = grid_of(tmp_path, partitions=(0, 1))
    grid.add(10**16, 1, next(iter(grid.apps.values())))
    said = refused(grid, tmp_path, caplog)
    for side in said[:2]:
        assert "two nodes report that they are client 1" in side


def test_a_node_without_a_partition_is_refused(tmp_path: Path, caplog: Any) -> None:
    grid = grid_of(tmp_path)
    next(iter(grid.contexts.values())).node_config.clear()
    said = refused(grid, tmp_path, caplog)
    assert "this node's partition-id is None" in said[0]
    assert "this node's partition-id is None" in said[1]


FILE = """
from dataclasses import dataclass
from fedgrove.methods import FedProx

@dataclass(frozen=True)
class Mine(FedProx):
    '''FedProx by another name.'''
    mu: float = 0.5
"""


def test_another_method_file_is_refused(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("server", "nodes", "changed"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "mine.py").write_text(FILE)
    (tmp_path / "changed" / "mine.py").write_text(FILE.replace("0.5", "0.25"))
    monkeypatch.chdir(tmp_path / "server")
    good = client_app(alone, home=tmp_path / "home", code=tmp_path / "nodes")
    serve(
        Loopback(dict.fromkeys(range(3), good)),
        experiment("mine.py:Mine", rounds=1),
        out=tmp_path / "good",
        clients=3,
    )
    other = client_app(alone, home=tmp_path / "home", code=tmp_path / "changed")
    grid = Loopback({0: good, 1: other, 2: good})
    said = refused(grid, tmp_path, caplog, name="mine.py:Mine")
    assert "client 1 refused to take part" in said[0]
    for side in said[:2]:
        assert "mine.py has changed since the run was started" in side


def test_another_half_is_refused() -> None:
    own = {"net": "a", "weights": 10.0, "codec": "Dense()", "method": "m"}
    enrolment.check_built_run(own | {"weights": 10.0001}, own)
    for key, sentence in {
        "net": "a different network",
        "codec": "a different codec",
        "method": "a different method",
        "weights": "initial weights that differ",
    }.items():
        with pytest.raises(InputError, match=sentence):
            enrolment.check_built_run(own | {key: "b"}, own)
    with pytest.raises(InputError, match="initial weights that differ"):
        enrolment.check_built_run(own | {"weights": 11.0}, own)


@pytest.mark.parametrize(
    "change",
    [
        {"partition": -1},
        {"partition": "0"},
        {"info": {"examples": 0}},
        {"info": {"examples": 10**400, "speed": float("nan")}},
        {"info": {"examples": 5, "bandwidth": -1}},
        {"info": {"wrong": 5}},
        {"kind": {}},
        {"words": None},
        {"own_labels": ["a"]},
    ],
)
def test_a_node_cannot_say_just_anything(change: dict[str, Any]) -> None:
    said = enrolment.describe_client(all_data(), 0)
    enrolment.read_enrolment(said)
    with pytest.raises(InputError):
        enrolment.read_enrolment(said | change)


# ---- nodes that go and come ----------------------------------------------------------------------


@dataclass
class Seen:
    """Does something once a round is done."""

    at: int
    do: Any

    def __call__(self, line: Mapping[str, Any]) -> None:
        if line["round"] == self.at and line["counts"]:
            self.do()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("same_number", [True, False])
def test_a_node_that_is_started_again_goes_on_as_it_was(same_number: bool, tmp_path: Path) -> None:
    """Node 1 is gone in round 2, and comes back with its personal model: as if it had not been asked in between."""
    grid = grid_of(tmp_path / "home")
    [number] = [n for n, c in grid.contexts.items() if c.node_config["partition-id"] == 1]
    app = grid.apps[number]
    gone: list[int] = []
    grid.fate = lambda message: "died" if message.metadata.dst_node_id in gone else ""

    def leave() -> None:
        gone.append(number)

    def come_back() -> None:
        if same_number:
            gone.clear()
        else:
            del grid.apps[number]
            grid.add(4711, 1, app)

    def watch(line: Mapping[str, Any]) -> None:
        Seen(1, leave)(line)
        Seen(3, come_back)(line)

    words = {"rounds": 5, "cohort": 3, "evaluate": 0}
    out = tmp_path / "run"
    result = serve(grid, experiment(**words), out=out, clients=3, watch=watch)
    lines = rest(out)["lines"]
    assert [sum(map(len, line.get("lost", {}).values())) for line in lines] == [0, 1, 1, 0, 0]
    assert lines[1]["lost"] == {"died": [1]}
    assert "client 1" in lines[1]["why"]["died"]
    assert sum(result.summary["lost"].values()) == 2
    # Its personal model of round 1 was not lost: what it remembers now was made from that.
    files = {p.name.split(".")[1] for p in (tmp_path / "home").glob("client-00001/*/client-*")}
    assert {"0", "3", "4", "5"} >= files
    assert "4" in files


@pytest.mark.usefixtures("_soon")
def test_a_node_that_lost_its_folder_joins_again(tmp_path: Path) -> None:
    """Without its memory it cannot do its task; it is lost once, asked to join, and says what it lacks."""
    grid = grid_of(tmp_path / "home")

    def empty() -> None:
        shutil.rmtree(tmp_path / "home" / "client-00001")

    out = tmp_path / "run"
    words = {"rounds": 4, "cohort": 3, "evaluate": 0}
    serve(grid, experiment("fedavg", **words), out=out, clients=3, watch=Seen(1, empty))
    lines = rest(out)["lines"]
    assert [line.get("lost", {}) for line in lines] == [{}, {"unsent": [1]}, {}, {}]
    assert "has not joined this run" in lines[1]["why"]["unsent"]


class Killed(BaseException):
    """As kill -9 would: nothing is tidied up."""


@pytest.mark.parametrize("name", ["ditto", pytest.param("ca-afp", marks=pytest.mark.slow)])
def test_a_server_that_was_killed_is_resumed(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    serve(grid_of(tmp_path / "a"), experiment(name), out=whole, clients=3)

    def kill() -> None:
        raise Killed

    half = tmp_path / "half"
    with pytest.raises(Killed):
        serve(grid_of(tmp_path / "b"), experiment(name), out=half, clients=3, watch=Seen(2, kill))
    assert not (half / "summary.json").exists()
    serve(grid_of(tmp_path / "b"), experiment(name), out=half, clients=3)
    assert rest(half) == rest(whole)
    for path in (whole / "models").iterdir():
        assert path.read_bytes() == (half / "models" / path.name).read_bytes()


def test_a_folder_of_another_run_is_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    serve(grid_of(tmp_path), experiment(rounds=1), out=out, clients=3)
    with pytest.raises(InputError, match=r"contains a run with a different config\.toml"):
        serve(grid_of(tmp_path), experiment(rounds=2), out=out, clients=3)
    with pytest.raises(InputError, match="is finished"):
        serve(grid_of(tmp_path), experiment(rounds=1), out=out, clients=3)


def test_a_node_keeps_a_few_versions_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    serve(grid_of(tmp_path / "home"), experiment(rounds=9, cohort=3), out=out, clients=3)
    for client in (0, 1, 2):
        assert len(list((tmp_path / "home").glob(f"client-0000{client}/*/client-*"))) == 4


def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"0 of 3 clients take part within 0 s\. Start the other"):
        serve(Loopback({}), experiment(), out=tmp_path / "run", clients=3, wait=0.0)


@pytest.mark.parametrize("word", ["net", "method", "init"])
def test_a_server_cannot_name_just_any_file_of_a_node(
    word: str, tmp_path: Path, caplog: Any
) -> None:
    """It is not even imported."""
    (tmp_path / "app").mkdir()
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    half = Node(alone, str(tmp_path / "home"), str(tmp_path / "app"))
    lines = {
        "net": f'[run]\nmethod = "fedavg"\nnet = "{evil}:Net"',
        "method": '[run]\nmethod = "x"\n[method]\ntype = "../evil.py:Mine"\n[code]\n"../evil.py" = "00"',
        "init": f'[run]\nmethod = "fedavg"\ninit = "{tmp_path}/w.safetensors:body"',
    }
    question = {"ask": "join", "version": fedgrove.__version__, "config": lines[word]}
    said = half.answer_question(question, {"partition-id": 0})
    assert "is not in the folder of the app's code" in said["refused"]
    assert not (tmp_path / "ran").exists()


def test_a_task_of_another_run_or_client_is_lost(tmp_path: Path) -> None:
    half = Node(alone, str(tmp_path))
    for note in ({}, {"run": "../../etc"}, {"run": "0123456789abcdef"}):
        assert "lost" in half.do_task(Letter(b"abcd", note=note), {"partition-id": 0}).note
    assert "lost" in half.do_task(Letter(b"abcd"), {}).note
