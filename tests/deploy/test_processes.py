"""Real processes on loopback: a SuperLink under TLS, three SuperNodes with keys, and ``flwr run``.

Flower starts a process for each task and asks for news every few seconds, so a round takes ten to
twenty seconds here, however small the data.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.processes import Program, Site, wait_for

from fedgrove import api, methods
from fedgrove.config.experiment import Experiment
from fedgrove.core import Answer, Job, Lost
from fedgrove.deploy.app import write_app
from fedgrove.deploy.keys import make_keys
from fedgrove.engines.serial import Serial

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIENTS = 3
RUN = 600.0
"""Seconds that a run may take: some 100 on an idle machine, 200 on a busy one."""

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(shape[0], 6, 3), nn.ReLU(), nn.Conv1d(6, 8, 3), nn.ReLU(),
            nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(16, classes),
        )

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A SuperLink and three registered nodes."""
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        make_keys(made.keys, CLIENTS)
        made.start_link()
        made.register(CLIENTS)
        for k in range(CLIENTS):
            made.start_node(k)
        yield made
    finally:
        made.close()


def experiment(method: str, **words: Any) -> Experiment:
    given = {"data": "digits", "clients": CLIENTS, "rounds": 4, "evaluate": 0} | words
    return Experiment(methods.make(method), **given)


def finished(program: Program, out: Path) -> dict[str, Any]:
    """The summary of a run that came to its end."""
    wait_for("flwr run ends", lambda: program.process.poll() is not None, RUN)
    assert (out / "summary.json").is_file(), program.text
    return dict(json.loads((out / "summary.json").read_text()))


def lines_of(out: Path) -> list[dict[str, Any]]:
    if not (out / "metrics.jsonl").is_file():
        return []
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_same(out: Path, serial: Path) -> None:
    """Accuracies, bytes, groups and times are equal, and the weights to the bit."""
    parts = []
    for folder in (out, serial):
        summary = json.loads((folder / "summary.json").read_text())
        lines = lines_of(folder)
        for line in lines:
            del line["seconds"]
        rest = {k: v for k, v in summary.items() if k not in ("seconds", "engine")}
        parts.append((rest, lines))
    assert parts[0] == parts[1]
    # What the server knows at the end; personal models stay with the nodes.
    states = [sorted((folder / "checkpoint").glob("state.*"))[-1] for folder in (out, serial)]
    assert states[0].read_bytes() == states[1].read_bytes()


def users(folder: Path) -> None:
    """A file for each of three people; one of them never runs."""
    rng = random.Random(0)
    folder.mkdir()
    for k in range(CLIENTS):
        with (folder / f"watch-{k}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["t", "ax", "ay", "activity"])
            activities = ["run", "sit", "walk"] if k else ["sit", "walk"]
            for a, activity in enumerate(activities):
                for i in range(120):
                    moved = 0.0 if activity == "sit" else (i % (3 + 2 * len(activity))) / 3
                    noise = [round(rng.gauss(moved, 0.3), 3) for _ in range(2)]
                    rows.writerow([120 * a + i, *noise, activity])


def test_ca_afp_over_tls_is_serial(site: Site, tmp_path: Path) -> None:
    wanted = experiment("ca-afp")
    app = write_app(wanted, tmp_path / "app")
    out = tmp_path / "flower"
    run = site.start_run(app.folder, "ca-afp", out=str(out))
    api.train(wanted, tmp_path / "serial", engine="serial")
    summary = finished(run, out)
    assert summary["engine"] == "flower"
    check_same(out, tmp_path / "serial")
    print(run.text)


def test_a_channel_method_with_ones_own_files_and_net_is_serial(site: Site, tmp_path: Path) -> None:
    """As the command line writes it, for a folder of CSV files; one person never runs."""
    users(tmp_path / "users")
    (tmp_path / "net.py").write_text(NET)
    cut = ["--label", "activity", "--time", "t", "--window", "8", "--stride", "4"]
    words = ["--data", "users", *cut, "--net", "net.py:Net", "--rounds", "4", "--evaluate", "0"]
    fedgrove = ["python", "-m", "fedgrove"]
    print(site.done(*fedgrove, "app", "heterofl", "app", *words, cwd=tmp_path))
    out = tmp_path / "flower"
    run = site.start_run(tmp_path / "app", "heterofl", out=str(out))
    site.done(
        *fedgrove,
        "run",
        "heterofl",
        *words,
        *("--engine", "serial"),
        *("--out", "serial"),
        cwd=tmp_path,
    )
    finished(run, out)
    check_same(out, tmp_path / "serial")
    print(run.text)


# ---- who may not take part -----------------------------------------------------------------------


def test_strangers_are_refused(site: Site, tmp_path: Path) -> None:
    """A key that nobody registered, no key, plain text, and a server that one cannot trust."""
    make_keys(tmp_path / "others", 1)
    ca = str(site.keys / "ca.crt")
    other_ca = str(tmp_path / "others" / "ca.crt")
    stranger = str(tmp_path / "others" / "node-0")
    tries = {
        "unregistered": ("--root-certificates", ca, "--auth-supernode-private-key", stranger),
        "no-key": ("--root-certificates", ca),
        "plain-text": ("--insecure",),
        "other-ca": ("--root-certificates", other_ca, "--auth-supernode-private-key", stranger),
    }
    sentences = {
        "unregistered": "Failed to activate SuperNode",
        "no-key": "All SuperNodes must be registered",
        "plain-text": "Server disconnected without sending a response",
        "other-ca": "certificate verify failed",
    }
    programs = {}
    for name, words in tries.items():
        programs[name] = site.start_node(0, *words, "--max-retries", "2", name=name)
    for name, program in programs.items():
        assert program.process.wait(90) != 0
        assert sentences[name] in program.text
    # Nor does a SuperLink that is not there keep anybody waiting.
    nowhere = Site(tmp_path)
    nobody = nowhere.start_node(0, "--root-certificates", ca, "--max-retries", "2", name="nobody")
    try:
        assert nobody.process.wait(90) != 0
        assert "could not establish a connection" in nobody.text
    finally:
        nowhere.close()


# ---- kill -9 -------------------------------------------------------------------------------------


class Losing(Serial):
    """Serial, but some clients' answers are lost in some rounds, which a task counts from 0."""

    def __init__(self, lost: Mapping[int, Mapping[str, list[int]]]) -> None:
        super().__init__()
        self.lost = lost

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for job in jobs:
            task = job[1]
            reasons = [
                why for why, who in self.lost.get(task.round + 1, {}).items() if task.to in who
            ]
            if reasons and task.verb.startswith("train"):
                yield job, Lost(task.to, reasons[0])
            else:
                yield from super().map([job])


def trained(out: Path, rounds: int) -> bool:
    """Whether so many rounds are on disk."""
    return any(line["round"] == rounds for line in lines_of(out))


def test_a_node_that_is_killed_comes_back_with_its_personal_model(
    site: Site, tmp_path: Path
) -> None:
    wanted = experiment("ditto", rounds=6)
    app = write_app(wanted, tmp_path / "app")
    out = tmp_path / "flower"
    run = site.start_run(app.folder, "node-killed", out=str(out))
    wait_for("round 1", lambda: trained(out, 1), RUN)
    [node] = [each for each in site.programs if each.log.name == "node-1.log"]
    node.kill()
    remembered = {p: p.read_bytes() for p in site.path.glob("home/client-00001/*/client-*")}
    assert remembered
    wait_for("round 2", lambda: trained(out, 2), RUN)
    assert all(path.read_bytes() == data for path, data in remembered.items())
    site.start_node(1)
    summary = finished(run, out)
    lines = lines_of(out)
    lost = {line["round"]: line["lost"] for line in lines if line.get("lost")}
    assert list(lost[2].values()) == [[1]]
    assert "client 1" in next(iter(lines[1]["why"].values()))
    # Nobody waits while it starts and joins, so it may miss some rounds more; then it is back.
    assert list(lost) == list(range(2, 2 + len(lost)))
    assert max(lost) < 6
    assert sum(summary["lost"].values()) == len(lost)
    assert any("client 1" in note for note in summary["notes"])
    # Had its personal model been lost, or been another one, all would have ended otherwise.
    serial = api.train(wanted, tmp_path / "serial", engine=Losing(lost))
    for key in ("accuracy_mean", "accuracy_clients"):
        assert summary[key] == serial.summary[key]
    states = [
        sorted((tmp_path / f / "checkpoint").glob("state.*"))[-1] for f in ("flower", "serial")
    ]
    assert states[0].read_bytes() == states[1].read_bytes()
    print(run.text)
    print("lost:", lost, "summary:", summary["lost"])


def test_a_server_that_is_killed_is_resumed(site: Site, tmp_path: Path) -> None:
    wanted = experiment("ca-afp", seed=1)
    app = write_app(wanted, tmp_path / "app")
    out = tmp_path / "flower"
    run = site.start_run(app.folder, "server-killed", out=str(out))
    wait_for("round 2", lambda: trained(out, 2), RUN)
    # The SuperLink, and with it the process of the server's half.
    site.programs[0].kill()
    run.end()
    assert not (out / "summary.json").exists()
    site.start_link()
    again = site.start_run(app.folder, "server-again", out=str(out))
    api.train(wanted, tmp_path / "serial", engine="serial")
    finished(again, out)
    check_same(out, tmp_path / "serial")
    print(run.text, again.text)
